"""Real JupyterLab in real Chromium: one server a worker, one browser and project a file, one tab and kernel a test.

Not one browser a worker: playwright keeps an event loop running in this thread, in which `asyncio.run` of later tests
fails. What a notebook leaves when it is saved is judged after each test, so that no notebook is run twice.
"""

import contextlib
import json
import os
import shutil
import socket
import subprocess
import sys
import time
import urllib.request
from pathlib import Path
from types import SimpleNamespace

import nbformat
import pytest
from properties import nightly
from saved_notebooks import assert_pictures_and_text
from waiting import PATIENCE_SECONDS

from kit.config import Config

REPOSITORY = Path(__file__).parents[2]
CHROMIUM = os.environ.get("CHROMIUM", "/usr/bin/chromium")
NOTEBOOK_SECONDS = 4 * PATIENCE_SECONDS
"""For whatever a page waits for, a whole notebook at the longest."""
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
REQUIRED = os.environ.get("KIT_REQUIRE_BROWSER") == "1"
FLAGS = (
    "--no-sandbox", "--disable-dev-shm-usage", "--disable-gpu", "--disable-background-networking",
    "--disable-component-update", "--disable-sync", "--no-first-run",
)  # fmt: skip
SETTINGS = {
    "@jupyterlab/notebook-extension:tracker": {"windowingMode": "none", "autoStartDefaultKernel": True},
    "@jupyterlab/apputils-extension:notification": {
        "fetchNews": "false", "checkForUpdates": False, "doNotDisturbMode": True,
    },
    "@jupyterlab/docmanager-extension:plugin": {"autosave": False},
}  # fmt: skip
_COMMAND = """([name, wait, args]) => {
  const done = window.jupyterapp.commands.execute(name, args);
  return wait ? done.then(() => null) : null;
}"""
_CONNECTED = """() => {
  const kernel = window.jupyterapp?.shell?.currentWidget?.sessionContext?.session?.kernel;
  return kernel && kernel.connectionStatus === 'connected' && ['idle', 'busy'].includes(kernel.status);
}"""

_NOTHING_RUNS = """() => [...document.querySelectorAll('.jp-InputPrompt')]
  .every((prompt) => !prompt.textContent.includes('*'))"""

_PAINTED = "() => new Promise((done) => requestAnimationFrame(() => setTimeout(done, 150)))"
"""A frame within the page is painted only once it is in sight."""


@pytest.fixture(scope="session")
def server(tmp_path_factory):
    """A JupyterLab server on a free port of this machine, with settings and state of its own."""
    state, root = tmp_path_factory.mktemp("state"), tmp_path_factory.mktemp("projects")
    (state / "settings").mkdir()
    (state / "settings" / "overrides.json").write_text(json.dumps(SETTINGS))
    write_kernel(state / "share")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with (state / "lab.log").open("w") as log:
        process = subprocess.Popen(
            [
                sys.executable, "-m", "jupyterlab", "--no-browser", "--allow-root", f"--ServerApp.port={port}",
                "--ServerApp.port_retries=0", "--ServerApp.ip=127.0.0.1", "--IdentityProvider.token=",
                "--ServerApp.password=", "--ServerApp.disable_check_xsrf=True", f"--ServerApp.root_dir={root}",
                "--LabApp.expose_app_in_browser=True", f"--LabServerApp.app_settings_dir={state / 'settings'}",
            ],
            env={
                **os.environ,
                "JUPYTER_PATH": str(state / "share"), "IPYTHONDIR": str(state / "ipython"),
                "JUPYTER_CONFIG_DIR": str(state / "config"), "JUPYTER_RUNTIME_DIR": str(state / "runtime"),
                "JUPYTERLAB_WORKSPACES_DIR": str(state / "workspaces"), "JUPYTERLAB_SETTINGS_DIR": str(state / "user"),
            },
            stdout=log, stderr=log, cwd=root,
        )  # fmt: skip
    url = f"http://127.0.0.1:{port}"
    _wait_for(url, process, state / "lab.log")
    yield SimpleNamespace(url=url, root=root)
    process.terminate()
    try:
        process.wait(PATIENCE_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


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


def write_kernel(share):
    """The kernel that the notebooks name, running this interpreter."""
    folder = share / "kernels" / "kit"
    folder.mkdir(parents=True)
    argv = [sys.executable, "-m", "ipykernel_launcher", "-f", "{connection_file}"]
    spec = {"argv": argv, "display_name": "kit (training experiments)", "language": "python"}
    (folder / "kernel.json").write_text(json.dumps(spec))


def _wait_for(url, server, log):
    deadline = time.monotonic() + PATIENCE_SECONDS
    while True:
        try:
            urllib.request.urlopen(f"{url}/api/status", timeout=1).close()
            return
        except OSError:
            assert server.poll() is None, log.read_text()[-3000:]
            assert time.monotonic() < deadline, f"JupyterLab did not answer: {log.read_text()[-3000:]}"
            time.sleep(0.1)


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


SIZES = ((1400, "Light"), (1400, "Dark"), (800, "Dark"), (800, "Light")) if nightly() else ((800, "Light"),)
OUTPUT = "xpath=ancestor::*[contains(@class, 'jp-OutputArea-output')]"


class Notebook:
    """One notebook in one tab, driven by Lab's own commands."""

    def __init__(self, page, lab, path):
        self.page, self.file = page, lab.root / path
        page.goto(f"{lab.url}/doc/tree/{lab.root.name}/{path}?reset", wait_until="domcontentloaded")
        page.wait_for_selector(".jp-Notebook .jp-Cell")
        page.wait_for_function(_CONNECTED)

    def command(self, name, *, wait=True, **arguments):
        self.page.evaluate(_COMMAND, [name, wait, arguments])

    def run_all(self, *, wait=True):
        self.command("notebook:run-all-cells", wait=wait)

    def saved(self):
        """The notebook as it is on disk, once every cell has run and it has been saved."""
        self.page.wait_for_function(_NOTHING_RUNS)
        self.command("docmanager:save")
        return nbformat.read(self.file, as_version=4)

    def use_theme(self, name):
        if self.page.evaluate("document.body.dataset.jpThemeName") == name:
            return
        self.command("apputils:change-theme", theme=name)
        self.page.wait_for_function("(name) => document.body.dataset.jpThemeName === name", arg=name)
        self.page.locator("#jupyterlab-splash").wait_for(state="detached")

    def pictures(self, places, name, artifacts):
        """Pictures for people, wide and narrow, light and dark; nothing may be wider than the output it stands in."""
        for width, theme in SIZES:
            self.page.set_viewport_size({"width": width, "height": 1500})
            self.use_theme(f"JupyterLab {theme}")
            for part, place in places.items():
                place.scroll_into_view_if_needed()
                self.page.evaluate(_PAINTED)
                self.page.screenshot(path=artifacts / f"{name}_{part}_{width}_{theme.lower()}.png")
                box, around = place.bounding_box(), place.locator(OUTPUT).last.bounding_box()
                assert box["x"] + box["width"] <= around["x"] + around["width"] + 1, f"{part} at {width} pixels"

    def errors(self):
        output = ".jp-OutputArea-output[data-mime-type='application/vnd.jupyter.error']"
        return self.page.locator(output).all_inner_texts()


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
        _end_kernels(lab.url, {str(one.file.relative_to(lab.root.parent)) for one in opened})


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


def _end_kernels(url, files):
    with urllib.request.urlopen(f"{url}/api/sessions") as answer:
        sessions = json.load(answer)
    for session in sessions:
        if session["path"] in files:
            request = urllib.request.Request(f"{url}/api/sessions/{session['id']}", method="DELETE")
            urllib.request.urlopen(request).close()


@pytest.fixture(scope="module")
def artifacts():
    """Where screenshots are left to be looked at; not compared with anything."""
    folder = REPOSITORY / "artifacts"
    folder.mkdir(exist_ok=True)
    return folder
