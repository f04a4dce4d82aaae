"""JupyterLab on loopback and Chromium, for the tests of the browser and for whoever walks the notebooks."""

import contextlib
import json
import os
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from types import SimpleNamespace

import nbformat
from playwright.sync_api import TimeoutError as PageTimeoutError
from properties import nightly
from waiting import PATIENCE_SECONDS, wait_until

CHROMIUM = os.environ.get("CHROMIUM", "/usr/bin/chromium")
NOTEBOOK_SECONDS = 8 * PATIENCE_SECONDS
"""For whatever a page waits for, a whole notebook at the longest."""
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

_ERRORS = """() => window.jupyterapp.shell.currentWidget.content.widgets
  .flatMap((cell) => cell.model.outputs?.toJSON() ?? [])
  .filter((output) => output.output_type === 'error')
  .map((output) => `${output.ename}: ${output.evalue}`)"""

SCROLLED = """(box) => [box, ...box.querySelectorAll('*')].filter((part) => {
  const style = getComputedStyle(part), scrolls = /auto|scroll/;
  return part.clientWidth && part.clientHeight && !part.matches('pre, textarea')
    && (scrolls.test(style.overflowX) && part.scrollWidth > part.clientWidth
      || scrolls.test(style.overflowY) && part.scrollHeight > part.clientHeight && !part.matches('.kit-settings'));
}).map((part) => `${part.className}: ${part.scrollWidth} of ${part.clientWidth}`)"""
"""Parts of a box that scroll without need, with their sizes; settings above what they come to have need to."""
_PAINTED = "() => new Promise((done) => requestAnimationFrame(() => setTimeout(done, 150)))"
"""A frame within the page is painted only once it is in sight."""

_BEYOND = """(part) => part.getBoundingClientRect().right
  - part.parentElement.closest('.jp-OutputArea-output').getBoundingClientRect().right"""
"""Pixels that a part is wider than the output it stands in, both as they are at one moment."""


@contextlib.contextmanager
def serve_lab(state, root, app="jupyterlab"):
    """A JupyterLab server on a free port of this machine, with its settings below `state`: its URL and root.

    `app` is another front end's module: `notebook`.
    """
    name, settings = {"jupyterlab": ("LabApp", "LabServerApp"), "notebook": 2 * ("JupyterNotebookApp",)}[app]
    (state / "settings").mkdir()
    (state / "settings" / "overrides.json").write_text(json.dumps(SETTINGS))
    write_kernel(state / "share")
    port = free_port()
    with (state / "lab.log").open("w") as log:
        process = subprocess.Popen(
            [
                sys.executable, "-m", app, "--no-browser", "--allow-root", f"--ServerApp.port={port}",
                "--ServerApp.port_retries=0", "--ServerApp.ip=127.0.0.1", "--IdentityProvider.token=",
                "--ServerApp.password=", "--ServerApp.disable_check_xsrf=True", f"--ServerApp.root_dir={root}",
                f"--{name}.expose_app_in_browser=True", f"--{settings}.app_settings_dir={state / 'settings'}",
            ],
            env=environment(state), stdout=log, stderr=log, cwd=root,
        )  # fmt: skip
    url = f"http://127.0.0.1:{port}"
    with ended(process):
        wait_for(f"{url}/api/status", process, state / "lab.log")
        yield SimpleNamespace(url=url, root=root)


def free_port():
    """One that nobody listens on now."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


def environment(state):
    """Variables under which Jupyter keeps everything below `state`."""
    return {
        **os.environ,
        "JUPYTER_PATH": str(state / "share"), "IPYTHONDIR": str(state / "ipython"),
        "JUPYTER_CONFIG_DIR": str(state / "config"), "JUPYTER_RUNTIME_DIR": str(state / "runtime"),
        "JUPYTERLAB_WORKSPACES_DIR": str(state / "workspaces"), "JUPYTERLAB_SETTINGS_DIR": str(state / "user"),
    }  # fmt: skip


@contextlib.contextmanager
def ended(process):
    """Ends it, whatever happens."""
    try:
        yield process
    finally:
        process.terminate()
        try:
            process.wait(PATIENCE_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def write_kernel(share):
    """The kernel that the notebooks name, running this interpreter."""
    folder = share / "kernels" / "kit"
    folder.mkdir(parents=True)
    argv = [sys.executable, "-m", "ipykernel_launcher", "-f", "{connection_file}"]
    spec = {"argv": argv, "display_name": "kit (training experiments)", "language": "python"}
    (folder / "kernel.json").write_text(json.dumps(spec))


def wait_for(url, server, log):
    """Return once somebody answers there, with whatever it is."""
    deadline = time.monotonic() + PATIENCE_SECONDS
    while True:
        try:
            urllib.request.urlopen(url, timeout=1).close()
            return
        except urllib.error.HTTPError:  # an answer, too
            return
        except OSError:
            assert server.poll() is None, log.read_text()[-3000:]
            assert time.monotonic() < deadline, f"the server did not answer: {log.read_text()[-3000:]}"
            time.sleep(0.1)


_RELOADS = 2
"""Of a page whose kernel is not connected within `PATIENCE_SECONDS`, as a person reloads it."""
SIZES = ((1400, "Light"), (1400, "Dark"), (800, "Dark"), (800, "Light")) if nightly() else ((800, "Light"),)


class Notebook:
    """One notebook in one tab, driven by Lab's own commands."""

    def __init__(self, page, lab, path, place="doc/tree"):
        self.page, self.file = page, lab.root / path
        url = f"{lab.url}/{place}/{lab.root.name}/{path}?reset"
        for _ in range(_RELOADS):
            page.goto(url, wait_until="domcontentloaded")
            page.wait_for_selector(".jp-Notebook .jp-Cell")
            with contextlib.suppress(PageTimeoutError):
                page.wait_for_function(_CONNECTED, timeout=PATIENCE_SECONDS * 1000)
                return
        # Its kernel is there, or this is the error: on a busy machine Lab may lose sight of one that starts.
        page.goto(url, wait_until="domcontentloaded")
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
                what = f"that {part} is no wider than its output at {width} pixels"
                wait_until(lambda place=place: place.evaluate(_BEYOND) <= 1, 30, what)

    def errors(self):
        """What cells raised. On the page it looks like any other text on stderr, so Lab's model is asked."""
        return self.page.evaluate(_ERRORS)


def end_kernels(url, files):
    with urllib.request.urlopen(f"{url}/api/sessions") as answer:
        sessions = json.load(answer)
    for session in sessions:
        if session["path"] in files:
            request = urllib.request.Request(f"{url}/api/sessions/{session['id']}", method="DELETE")
            urllib.request.urlopen(request).close()
