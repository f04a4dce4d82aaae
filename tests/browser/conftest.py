"""Real JupyterLab in real Chromium: one server and one browser a module, one clean tab and fresh kernel a test.

Not one a session: playwright keeps an event loop running in this thread, in which `asyncio.run` of later tests fails.
"""

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

import pytest

REPOSITORY = Path(__file__).parents[2]
CHROMIUM = os.environ.get("CHROMIUM", "/usr/bin/chromium")
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

_PAINTED = "() => new Promise((done) => requestAnimationFrame(() => setTimeout(done, 150)))"
"""A frame within the page is painted only once it is in sight."""


@pytest.fixture(scope="module")
def project(tmp_path_factory):
    """A copy of what a user has: a project folder with notebooks and datasets."""
    root = tmp_path_factory.mktemp("project")
    (root / "pyproject.toml").write_text('[project]\nname = "mine"\nversion = "0"\n')
    for folder in ("notebooks", "datasets"):
        shutil.copytree(REPOSITORY / folder, root / folder, ignore=shutil.ignore_patterns("runs", ".ipynb_checkpoints"))
    return root


@pytest.fixture(scope="module")
def lab(project, tmp_path_factory):
    """A JupyterLab server on a free port of this machine, with settings and state of its own."""
    state = tmp_path_factory.mktemp("state")
    (state / "settings").mkdir()
    (state / "settings" / "overrides.json").write_text(json.dumps(SETTINGS))
    write_kernel(state / "share")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with (state / "lab.log").open("w") as log:
        server = subprocess.Popen(
            [
                sys.executable, "-m", "jupyterlab", "--no-browser", "--allow-root", f"--ServerApp.port={port}",
                "--ServerApp.port_retries=0", "--ServerApp.ip=127.0.0.1", "--IdentityProvider.token=",
                "--ServerApp.password=", "--ServerApp.disable_check_xsrf=True", f"--ServerApp.root_dir={project}",
                "--LabApp.expose_app_in_browser=True", f"--LabServerApp.app_settings_dir={state / 'settings'}",
            ],
            env={
                **os.environ, "KIT_FAST": "1",
                "JUPYTER_PATH": str(state / "share"), "IPYTHONDIR": str(state / "ipython"),
                "JUPYTER_CONFIG_DIR": str(state / "config"), "JUPYTER_RUNTIME_DIR": str(state / "runtime"),
                "JUPYTERLAB_WORKSPACES_DIR": str(state / "workspaces"), "JUPYTERLAB_SETTINGS_DIR": str(state / "user"),
            },
            stdout=log, stderr=log, cwd=project,
        )  # fmt: skip
    url = f"http://127.0.0.1:{port}"
    _wait_for(url, server, state / "lab.log")
    yield SimpleNamespace(url=url, root=project)
    server.terminate()
    try:
        server.wait(10)
    except subprocess.TimeoutExpired:
        server.kill()
        server.wait()


def write_kernel(share):
    """The kernel that the notebooks name, running this interpreter."""
    folder = share / "kernels" / "kit"
    folder.mkdir(parents=True)
    argv = [sys.executable, "-m", "ipykernel_launcher", "-f", "{connection_file}"]
    spec = {"argv": argv, "display_name": "kit (training experiments)", "language": "python"}
    (folder / "kernel.json").write_text(json.dumps(spec))


def _wait_for(url, server, log):
    deadline = time.monotonic() + 60
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
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=list(FLAGS))
        yield browser
        browser.close()


SIZES = ((1400, "Light"), (1400, "Dark"), (800, "Dark"), (800, "Light"))
OUTPUT = "xpath=ancestor::*[contains(@class, 'jp-OutputArea-output')]"


class Notebook:
    """One notebook in one tab, driven by Lab's own commands."""

    def __init__(self, page, url):
        self.page, self.url = page, url

    def open(self, path):
        self.page.goto(f"{self.url}/doc/tree/{path}?reset", wait_until="domcontentloaded")
        self.page.wait_for_selector(".jp-Notebook .jp-Cell", timeout=60_000)
        self.page.wait_for_function(_CONNECTED, timeout=60_000)
        return self

    def command(self, name, *, wait=True, **arguments):
        self.page.evaluate(_COMMAND, [name, wait, arguments])

    def run_all(self, *, wait=True):
        self.command("notebook:run-all-cells", wait=wait)

    def use_theme(self, name):
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


@pytest.fixture
def notebook(lab, chromium):
    """A function that opens a notebook of the project in a tab of the given width."""
    contexts = []

    def open_notebook(path, width=1280, height=900):
        context = chromium.new_context(viewport={"width": width, "height": height})
        contexts.append(context)
        return Notebook(context.new_page(), lab.url).open(path)

    yield open_notebook
    for context in contexts:
        context.close()
    with urllib.request.urlopen(f"{lab.url}/api/sessions") as answer:
        sessions = json.load(answer)
    for session in sessions:
        request = urllib.request.Request(f"{lab.url}/api/sessions/{session['id']}", method="DELETE")
        urllib.request.urlopen(request).close()


@pytest.fixture(scope="module")
def artifacts():
    """Where screenshots are left to be looked at; not compared with anything."""
    folder = REPOSITORY / "artifacts"
    folder.mkdir(exist_ok=True)
    return folder
