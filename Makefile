# Two commands: `make lab` opens JupyterLab on the notebooks, `make test` runs the tests.
# Both set up .venv first, and only again when pyproject.toml or constraints.txt change.

PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
READY  := $(VENV)/.ready
ROOT   := $(shell [ "$$(id -u)" = 0 ] && echo --allow-root)

.PHONY: lab test check lint types notebooks bench clean

lab: $(READY)
	$(BIN)/jupyter lab $(ROOT) --LabApp.default_url=/lab/tree/notebooks/00_start.ipynb

test: $(READY)
	$(BIN)/python -m pytest

# Exactly what CI runs.
check: lint types notebooks test

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(READY)
	$(BIN)/mypy

notebooks: $(READY)
	$(BIN)/nbstripout --verify notebooks/*.ipynb

bench: $(READY)
	for script in benchmarks/[a-z]*.py; do $(BIN)/python $$script --record || exit 1; done

$(READY): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
		|| { echo "kit needs Python 3.11 or newer; $(PYTHON) is $$($(PYTHON) -V). Try: make PYTHON=python3.12 $(MAKECMDGOALS)"; exit 1; }
	@test -x $(BIN)/pip || $(PYTHON) -m venv $(VENV) \
		|| { echo "Debian and Ubuntu keep venv in a package of its own: apt-get install python3-venv"; rm -rf $(VENV); exit 1; }
	$(BIN)/pip install --quiet --upgrade 'pip>=24'
	$(BIN)/pip install --quiet --constraint constraints.txt --editable '.[dev]'
	$(BIN)/python -m ipykernel install --prefix $(VENV) --name kit --display-name 'kit (training experiments)' >/dev/null
	@touch $@

clean:
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache .hypothesis artifacts build *.egg-info
