"""Real JupyterLab in real Chromium: one server a worker, one browser and project a file, one tab and kernel a test.

Not one browser a worker: playwright keeps an event loop running in this thread, in which `asyncio.run` of later tests
fails. What a notebook leaves when it is saved is judged after each test, so that no notebook is run twice.
"""

import contextlib
import os
import shutil
from pathlib import Path
from types import SimpleNamespace

import nbformat
import pytest
from lab import CHROMIUM, FLAGS, NOTEBOOK_SECONDS, Notebook, end_kernels, serve_lab
from properties import nightly
from saved_notebooks import assert_pictures_and_text

from kit.config import Config

REPOSITORY = Path(__file__).parents[2]
SMALLER = {
    "01_chunks": {"seconds": 1.0},
    "02_streaming": {"steps": 16, "seconds": 1.0},
    "04_levers": {"sequence_lengths": [128, 256], "steps": 4},
    "05_cloud": {"seconds": 0.3},
    "10_tables": {"rows": 100_000},
}
"""Parameters of notebooks that take long; the nightly tests run them as they are."""
SMALLER_RECIPES = {"slow": {"loader.batch_size": 4}}
"""Likewise for what a notebook takes from its recipe."""
FEWER_LAYERS = ("12, 12, 0.1", "12, 2, 0.1")
"""Likewise for the GPT-2 of `published/gpt2.py`."""
REQUIRED = os.environ.get("KIT_REQUIRE_BROWSER") == "1"


@pytest.fixture(scope="session")
def server(tmp_path_factory):
    """A JupyterLab server of this worker."""
    with serve_lab(tmp_path_factory.mktemp("state"), tmp_path_factory.mktemp("projects")) as found:
        yield found


@pytest.fixture(scope="module")
def project(server, request):
    """A copy of what a user has: a project folder with notebooks and datasets."""
    root = server.root / request.module.__name__
    root.mkdir()
    (root / "pyproject.toml").write_text('[project]\nname = "mine"\nversion = "0"\n')
    for folder in ("notebooks", "datasets"):
        shutil.copytree(REPOSITORY / folder, root / folder, ignore=shutil.ignore_patterns("runs", ".ipynb_checkpoints"))
    if not nightly():
        for name, changes in SMALLER.items():
            _change_parameters(root / "notebooks" / f"{name}.ipynb", changes)
        for name, changes in SMALLER_RECIPES.items():
            recipe = root / "datasets" / name / "recipe.yaml"
            recipe.write_text(Config.load(recipe).replace(changes).to_yaml())
        model = root / "datasets" / "published" / "gpt2.py"
        model.write_text(model.read_text().replace(*FEWER_LAYERS))
    return root


def _change_parameters(path, changes):
    notebook = nbformat.read(path, as_version=4)
    (cell,) = (cell for cell in notebook.cells if "parameters" in cell.metadata.get("tags", []))
    cell.source += "".join(f"\n{name} = {value!r}" for name, value in changes.items())
    nbformat.write(notebook, path)


@pytest.fixture(scope="module")
def lab(server, project):
    """The server, and the folder that a file of tests writes its own notebooks into."""
    return SimpleNamespace(url=server.url, root=project)


@pytest.fixture(scope="module")
def chromium():
    if not Path(CHROMIUM).exists():
        reason = f"no Chromium at {CHROMIUM}; install it or set CHROMIUM to its path"
        if REQUIRED:
            pytest.fail(f"{reason} (KIT_REQUIRE_BROWSER=1)")
        pytest.skip(reason)
    from playwright.sync_api import expect, sync_playwright

    expect.set_options(timeout=1000 * NOTEBOOK_SECONDS)
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=list(FLAGS))
        yield browser
        browser.close()


@pytest.fixture(scope="module")
def context(chromium):
    """One for a file of tests: Lab's code is parsed once."""
    context = chromium.new_context()
    context.set_default_timeout(1000 * NOTEBOOK_SECONDS)
    yield context
    context.close()


@contextlib.contextmanager
def _tabs(lab, context, session):
    """A function that opens a notebook of the project in a tab of the given width.

    One that kit comes with, and that a test has run, has to show everything without a kernel once it is saved.
    """
    opened = []

    def open_notebook(path, width=1280, height=900):
        page = context.new_page()
        page.set_viewport_size({"width": width, "height": height})
        opened.append(Notebook(page, lab, path))
        return opened[-1]

    failed_before = session.testsfailed
    yield open_notebook
    try:
        for one in opened:
            if session.testsfailed == failed_before and (REPOSITORY / "notebooks" / one.file.name).exists():
                assert_pictures_and_text(one.file.stem, one.saved())
    finally:
        for one in opened:
            one.page.close()
        end_kernels(lab.url, {str(one.file.relative_to(lab.root.parent)) for one in opened})


@pytest.fixture
def notebook(lab, context, request):
    """Opens notebooks that are closed, and their kernels ended, with the test."""
    with _tabs(lab, context, request.session) as open_notebook:
        yield open_notebook


@pytest.fixture(scope="module")
def notebook_of_file(lab, context, request):
    """Opens notebooks that the tests of one file share: a page of Lab and a kernel cost ten seconds of a core."""
    with _tabs(lab, context, request.session) as open_notebook:
        yield open_notebook


@pytest.fixture(scope="module")
def artifacts():
    """Where screenshots are left to be looked at; not compared with anything."""
    folder = REPOSITORY / "artifacts"
    folder.mkdir(exist_ok=True)
    return folder
