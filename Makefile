# Two commands: `make lab` opens JupyterLab on the notebooks, `make test` runs the tests.
# Both set up .venv first, and only again when pyproject.toml or constraints.txt change.

PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
READY  := $(VENV)/.ready
SUDO   := $(shell [ "$$(id -u)" = 0 ] || echo sudo)
ROOT   := $(shell [ "$$(id -u)" = 0 ] && echo --allow-root)

# Errors are shown, and no advice about pip.
INSTALL := $(BIN)/pip --disable-pip-version-check install -qq --root-user-action=ignore

# The tests start hundreds of interpreters: what they import is compiled once.
unexport PYTHONDONTWRITEBYTECODE

# Tests run in two workers more than cores; files stay whole, the long ones begin first.
PYTEST := -m pytest -n auto --dist loadfile --no-loadscope-reorder
TESTS  := $(BIN)/python $(PYTEST)
TESTED := --ignore=tests/browser --ignore=tests/faults -m "not fault and not slow"

# Jupyter's question about news, which lies over the notebook, and its look for a newer JupyterLab on the network.
ANNOUNCEMENTS := @jupyterlab/apputils-extension:announcements

# What kernel and server say to each other is encrypted; each kernel warns of it here where it is not.
ENCRYPTED := --KernelManager.transport_encryption=auto

# Where tests that break things stand beside those of what they break.
FAULTY = $(shell grep -rlE --include='test_*.py' '^@pytest.mark.fault' tests)

PEOPLE ?= 8

.PHONY: lab reset book room test slow browser faults quick nightly coverage wheel check lint types notebooks bench gpu clean

# A person needs the address and nothing else: Jupyter's own lines, extension by extension, are left out.
lab: $(READY)
	@echo "Starting JupyterLab: the browser opens notebooks/00_start.ipynb in a few seconds. Ctrl+C here ends it."
	@$(BIN)/jupyter lab $(ROOT) --log-level=ERROR --LabApp.log_level=ERROR $(ENCRYPTED) \
		--LabApp.default_url=/lab/tree/notebooks/00_start.ipynb

# A fresh start for a course. What it moves is named first, nothing is deleted, and stores stay.
reset: $(READY)
	@$(BIN)/python -m kit.course.reset

# The notebooks, executed, as pages that open offline: artifacts/book/index.html.
book: $(READY)
	@$(BIN)/python -m kit.course.book $(BOOK)

# Several people on this machine: make room PEOPLE=8 NAMES=ada,ben. More options in ROOM.
room: $(READY)
	@$(BIN)/python -m kit.course.room $(PEOPLE) --names "$(NAMES)" $(ROOM)

# All tests but those that take more than two seconds of a core, drive a browser or break things on purpose.
test: $(READY)
	$(TESTS) $(TESTED)

# Those of more than two seconds of a core: whole trainings beside their predictions, searches, committed runs, notebooks.
slow: $(READY)
	$(TESTS) --ignore=tests/browser --ignore=tests/faults -m "slow and not fault"

# The notebooks and the panel in Chromium, as a person sees them.
browser: $(READY)
	$(TESTS) tests/browser

# Killed ranks, kernels and builders, full disks, damaged files: each must be told, and nothing left behind.
faults: $(READY)
	$(TESTS) -m fault tests/faults $(FAULTY)

# What changed and all that is pure, in 90 seconds.
quick: $(READY)
	$(TESTS) --quick --hypothesis-profile=quick

# Everything, also what CI leaves out, with new examples for every property.
nightly: $(READY)
	KIT_REQUIRE_BROWSER=1 KIT_REQUIRE_POSTGRES=1 $(TESTS) --hypothesis-profile=nightly

# Lines and branches of kit that make test reaches, in its own processes and in those that they start: about twice as long.
coverage: $(READY)
	$(BIN)/coverage erase
	$(BIN)/coverage run $(PYTEST) $(TESTED)
	$(BIN)/coverage combine --quiet
	$(BIN)/coverage report --skip-covered --sort=cover

# The wheel, installed into an empty environment; the first notebook runs from there.
wheel: $(READY)
	$(BIN)/python tests/wheel.py

# Exactly what CI runs.
check: lint types notebooks test slow faults browser wheel

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(READY)
	$(BIN)/mypy

notebooks: $(READY)
	$(BIN)/nbstripout --verify notebooks/*.ipynb

bench: $(READY)
	for script in $(filter-out benchmarks/publish.py benchmarks/streaming_%.py,$(wildcard benchmarks/*.py)); do $(BIN)/python $$script --record || exit 1; done

# What only a GPU can tell, in 8 minutes, with the packages that are here: see tests/gpu/README.md. Options in GPU.
gpu:
	$(PYTHON) tests/gpu/run_checks.py $(GPU)

$(READY): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
		|| { echo "kit needs Python 3.11 or newer; $(PYTHON) is $$($(PYTHON) -V). Try: make PYTHON=python3.12 $(MAKECMDGOALS)"; exit 1; }
	@echo "Setting up $(VENV) with torch, Lightning and JupyterLab: about two minutes the first time, with no word until then."
	@test -x $(BIN)/pip || $(PYTHON) -m venv $(VENV) || { \
		echo "Debian and Ubuntu keep venv in a package of its own, python3-venv: installing it"; rm -rf $(VENV); \
		$(SUDO) apt-get update -qq && $(SUDO) apt-get install -y -qq python3-venv && $(PYTHON) -m venv $(VENV); }
	@$(INSTALL) --upgrade 'pip>=24'
	@$(INSTALL) --constraint constraints.txt --editable '.[dev]'
	@$(BIN)/python -m ipykernel install --prefix $(VENV) --name kit --display-name 'kit (training experiments)' >/dev/null
	@$(BIN)/jupyter labextension disable --level=sys_prefix --log-level=ERROR $(ANNOUNCEMENTS) 2>/dev/null
	@touch $@
	@echo "$(VENV) is ready."

clean:
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache .hypothesis .coverage* artifacts build dist *.egg-info
