"""Every notebook: short, free of definitions, committed without outputs, and runs unattended from a fresh copy."""

import ast
import inspect
import os
import pkgutil
import re
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import nbformat
import pytest
from minutes import words_of
from nbclient import NotebookClient
from properties import nightly
from saved_notebooks import assert_pictures_and_text

import kit

REPOSITORY = Path(__file__).parents[2]
NOTEBOOKS = sorted((REPOSITORY / "notebooks").glob("*.ipynb"))
COURSE = REPOSITORY / "notebooks" / "README.md"
MOST_CODE_CELLS, MOST_WORDS = 10, 600
GUESS, INSTALL = "predict-first", "install"
LIMIT_SECONDS = 600
IN_A_BROWSER = Path(os.environ.get("CHROMIUM", "/usr/bin/chromium")).exists() and not nightly()


@pytest.fixture(params=NOTEBOOKS, ids=lambda path: path.stem)
def path(request):
    return request.param


@pytest.fixture
def cells(path):
    return nbformat.read(path, as_version=4).cells


def code(cells):
    """Cells of code that are the notebook's own."""
    return [cell for cell in cells if cell.cell_type == "code" and cell not in tagged(cells, INSTALL)]


def tagged(cells, tag):
    return [cell for cell in cells if tag in cell.metadata.get("tags", [])]


def shown(cells):
    """Cells of code that show something: those that ask for a guess come on top."""
    return [cell for cell in code(cells) if cell not in tagged(cells, GUESS)]


def solutions(cells):
    """Code of the exercises' solutions, in order."""
    text = "\n".join(cell.source for cell in cells if "## Exercises" in cell.source)
    return re.findall(r"<details><summary>Solution \d</summary>.*?```python\n(.*?)```.*?</details>", text, re.DOTALL)


def trees(cells):
    return [ast.parse(cell.source) for cell in code(cells)]


def test_there_are_notebooks():
    assert NOTEBOOKS


def test_its_title_is_a_question_and_its_cells_are_few(cells):
    title = cells[0].source.splitlines()[0]
    assert title.startswith("# ")
    assert title.endswith("?")
    assert len(shown(cells)) <= MOST_CODE_CELLS


def test_its_text_is_short(cells):
    assert words_of(cells) <= MOST_WORDS


def test_it_asks_before_it_answers(cells):
    """Each guess is asked for with None in its place, and compared further down."""
    asked = tagged(cells, GUESS)
    assert asked
    for cell in asked:
        calls = [node for node in ast.walk(ast.parse(cell.source)) if isinstance(node, ast.Call)]
        guesses = [call for call in calls if ast.unparse(call.func) == "kit.course.guess"]
        assert guesses
        assert all(isinstance(call.args[1], ast.Constant) and call.args[1].value is None for call in guesses)
        later = "\n".join(one.source for one in cells[cells.index(cell) + 1 :] if one.cell_type == "code")
        names = [node.targets[0].id for node in ast.parse(cell.source).body if isinstance(node, ast.Assign)]
        assert len(names) == len(guesses)
        assert [name for name in names if not re.search(rf"\b{name}\b", later)] == []


def test_no_two_notebooks_ask_the_same():
    text = "\n".join(path.read_text() for path in NOTEBOOKS)
    asked = re.findall(r'kit\.course\.guess\((?:\\n",\s*")?\s*f?\\"(.*?)\\"', text)
    assert len(asked) == len(set(asked)) >= 10


def test_it_has_two_exercises_with_solutions_and_says_what_next(cells, path):
    assert len(solutions(cells)) == 2
    for solution in solutions(cells):
        for node in ast.walk(ast.parse(solution)):
            if isinstance(node, ast.Call) and re.fullmatch(r"kit\.[\w.]+", name := ast.unparse(node.func)):
                called = pkgutil.resolve_name(name.replace("kit.", "kit:", 1))
                given = {word.arg: None for word in node.keywords}
                inspect.signature(called).bind(*node.args, **given)
    assert "**What next?**" in cells[-1].source


def test_the_page_of_the_course_has_a_row_for_each():
    rows = dict(re.findall(r"^\| \[(\w+)\]\(\w+\.ipynb\) \| (.*?) \| \d+ \|", COURSE.read_text(), re.MULTILINE))
    assert rows == {
        path.stem: nbformat.read(path, as_version=4).cells[0].source.splitlines()[0][2:] for path in NOTEBOOKS
    }


def test_it_defines_nothing(cells):
    definitions = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.Lambda
    assert not [node for tree in trees(cells) for node in ast.walk(tree) if isinstance(node, definitions)]


def test_it_imports_only_kit_and_uses_only_its_public_names(cells):
    nodes = [node for tree in trees(cells) for node in ast.walk(tree)]
    imported = {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
    assert imported <= {"kit"}
    assert not [node for node in nodes if isinstance(node, ast.ImportFrom)]
    chains = {ast.unparse(node) for node in nodes if isinstance(node, ast.Attribute)}
    for name, inner in {match.groups() for chain in chains if (match := re.match(r"kit\.(\w+)(?:\.(\w+))?", chain))}:
        assert name in dir(kit) or name in kit.BESIDE_DATASETS
        if inner and inspect.ismodule(package := getattr(kit, name)):
            assert inner in dir(package)


def test_it_has_one_cell_of_parameters(cells):
    assert len(tagged(cells, "parameters")) == 1


@pytest.mark.parametrize("missing", [False, True])
def test_its_first_cell_installs_kit_only_where_it_is_missing(cells, missing, monkeypatch):
    first = next(cell for cell in cells if cell.cell_type == "code")
    assert tagged(cells, INSTALL) == [first]
    if missing:
        monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    ran = []
    exec(first.source, {"get_ipython": lambda: SimpleNamespace(run_line_magic=lambda *line: ran.append(line))})
    assert ran == ([("pip", "install --quiet ..")] if missing else [])


def test_they_are_committed_without_outputs():
    command = [sys.executable, "-m", "nbstripout", "--verify", *map(str, NOTEBOOKS)]
    subprocess.run(command, check=True, capture_output=True)


def test_it_names_the_kernel_that_is_installed_for_it(path):
    kernel = nbformat.read(path, as_version=4).metadata.kernelspec
    assert (kernel.name, kernel.display_name) == ("kit", "kit (training experiments)")


@pytest.fixture
def project(tmp_path):
    """A copy of what a user has: a project folder with notebooks and datasets."""
    (tmp_path / "pyproject.toml").write_text('[project]\nname = "mine"\nversion = "0"\n')
    for folder in ("notebooks", "datasets"):
        shutil.copytree(
            REPOSITORY / folder, tmp_path / folder, ignore=shutil.ignore_patterns("runs", ".ipynb_checkpoints")
        )
    return tmp_path


@pytest.mark.slow
@pytest.mark.timeout(LIMIT_SECONDS + 60)
@pytest.mark.skipif(IN_A_BROWSER, reason="the tests of the browser run it, and judge what it leaves")
def test_it_runs_unattended_and_leaves_pictures_and_text(path, project):
    notebook = nbformat.read(project / "notebooks" / path.name, as_version=4)
    notebook.cells += [nbformat.v4.new_code_cell(solution) for solution in solutions(notebook.cells)]
    client = NotebookClient(
        notebook,
        timeout=LIMIT_SECONDS,
        kernel_name="python3",
        resources={"metadata": {"path": str(project / "notebooks")}},
    )
    client.execute()
    assert_pictures_and_text(path.stem, notebook)
