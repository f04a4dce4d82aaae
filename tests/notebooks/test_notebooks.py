"""Every notebook: short, free of definitions, committed without outputs, and runs unattended from a fresh copy."""

import ast
import inspect
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient
from properties import nightly
from saved_notebooks import assert_pictures_and_text

import kit

REPOSITORY = Path(__file__).parents[2]
NOTEBOOKS = sorted((REPOSITORY / "notebooks").glob("*.ipynb"))
MOST_CODE_CELLS = 10
LIMIT_SECONDS = 600
IN_A_BROWSER = Path(os.environ.get("CHROMIUM", "/usr/bin/chromium")).exists() and not nightly()


@pytest.fixture(params=NOTEBOOKS, ids=lambda path: path.stem)
def path(request):
    return request.param


@pytest.fixture
def cells(path):
    return nbformat.read(path, as_version=4).cells


def code(cells):
    return [cell for cell in cells if cell.cell_type == "code"]


def trees(cells):
    return [ast.parse(cell.source) for cell in code(cells)]


def test_there_are_notebooks():
    assert NOTEBOOKS


def test_its_title_is_a_question_and_its_cells_are_few(cells):
    title = cells[0].source.splitlines()[0]
    assert title.startswith("# ")
    assert title.endswith("?")
    assert len(code(cells)) <= MOST_CODE_CELLS


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
    assert sum("parameters" in cell.metadata.get("tags", []) for cell in cells) == 1


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
    client = NotebookClient(
        notebook,
        timeout=LIMIT_SECONDS,
        kernel_name="python3",
        resources={"metadata": {"path": str(project / "notebooks")}},
    )
    client.execute()
    assert_pictures_and_text(path.stem, notebook)
