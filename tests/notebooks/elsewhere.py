"""Where the notebooks run besides JupyterLab: `python tests/notebooks/elsewhere.py` tries what is installed.

    pip install notebook voila papermill
    python tests/notebooks/elsewhere.py [notebook voila papermill nbconvert] [--name 00_start] [--pictures FOLDER]

Each front end is given one notebook of the course, in a project of its own, and a line says what was seen:

- **notebook**: all cells in Notebook 7 in Chromium: no error, the panel fits again, nothing scrolls without need;
- **voila**: the notebook as an app: the panel is there while later cells still run, settings left of results, its
  button fits;
- **papermill**: the cell of parameters is replaced, and what is saved holds the state of every widget and a picture or
  a text beside it, which is what VS Code and Colab show of a notebook that is opened again;
- **nbconvert**: the executed notebook as one page, whose pictures are seen without a network.

It is not run with the tests: the packages are not kit's.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.metadata
import json
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from types import SimpleNamespace

import nbformat

REPOSITORY = Path(__file__).parents[2]
sys.path.insert(0, str(REPOSITORY / "tests"))

from lab import (  # noqa: E402
    CHROMIUM,
    FLAGS,
    NOTEBOOK_SECONDS,
    SCROLLED,
    Notebook,
    ended,
    environment,
    free_port,
    serve_lab,
    wait_for,
    write_kernel,
)

WIDTH, HEIGHT = 1280, 720
_VIEW = "application/vnd.jupyter.widget-view+json"
_STATE = "application/vnd.jupyter.widget-state+json"
_FEW_STEPS = 8


def fits_again(page, panel):
    """Press Fit, and wait for a speed that this trial measured."""
    panel.get_by_role("button", name="Fit").click()
    panel.locator("[role=status]").first.wait_for()
    page.wait_for_function(
        "(box) => [...box.querySelectorAll('[role=status]')].some((one) => one.textContent.startsWith('complete'))",
        arg=panel.element_handle(),
    )


def in_notebook(asked):
    """All cells in Notebook 7."""
    with serve_lab(asked.state, asked.project.parent, "notebook") as server, browser() as context:
        page = context.new_page()
        page.set_viewport_size({"width": WIDTH, "height": HEIGHT})
        lab = SimpleNamespace(url=server.url, root=asked.project)
        opened = Notebook(page, lab, f"notebooks/{asked.name}.ipynb", "notebooks")
        opened.run_all(wait=False)
        opened.saved()
        panel = page.locator(".kit-live").first
        said = [f"{len(opened.errors())} errors"]
        if panel.count():
            panel.scroll_into_view_if_needed()
            picture(page, asked, "notebook")
            fits_again(page, panel)
            said += ["the panel fits", f"{len(panel.evaluate(SCROLLED))} empty scrollbars"]
        return said


def in_voila(asked):
    """The notebook as an app, drawn cell by cell."""
    write_kernel(asked.state / "share")
    port, log = free_port(), asked.state / "voila.log"
    command = [
        sys.executable, "-m", "voila", f"notebooks/{asked.name}.ipynb", "--no-browser", f"--port={port}",
        "--Voila.ip=127.0.0.1", "--progressive_rendering=True", "--show_tracebacks=True",
    ]  # fmt: skip
    with log.open("w") as output:
        server = subprocess.Popen(
            command, env=environment(asked.state), cwd=asked.project, stdout=output, stderr=output
        )
    with ended(server), browser() as context:
        page = context.new_page()
        page.set_viewport_size({"width": WIDTH, "height": HEIGHT})
        wait_for(f"http://127.0.0.1:{port}/api", server, log)
        begun = time.monotonic()
        page.goto(f"http://127.0.0.1:{port}/", wait_until="domcontentloaded")
        panel = page.locator(".kit-live").first
        panel.wait_for()
        said = [f"the panel after {time.monotonic() - begun:.0f} s"]
        form, tabs = panel.locator(".kit-form").bounding_box(), panel.get_by_role("tablist").bounding_box()
        left = form["x"] + form["width"] <= tabs["x"] and abs(form["y"] - tabs["y"]) < HEIGHT
        said.append("settings left, results right" if left else "settings above results")
        panel.scroll_into_view_if_needed()
        fits_again(page, panel)
        picture(page, asked, "voila")
        said += ["the panel fits", f"{len(panel.evaluate(SCROLLED))} empty scrollbars"]
        return [*said, f"{page.locator('.jp-RenderedText[data-mime-type*=error]').count()} errors"]


def in_papermill(asked):
    """Other parameters, and what is saved of the widgets."""
    executed = asked.executed
    run(asked, "papermill", f"{asked.name}.ipynb", str(executed), "-p", "steps", str(_FEW_STEPS), "-k", "kit")
    notebook = nbformat.read(executed, as_version=4)
    injected = [cell for cell in notebook.cells if "injected-parameters" in cell.metadata.get("tags", [])]
    bundles = [out.data for cell in notebook.cells for out in cell.get("outputs", []) if "data" in out]
    views = [bundle for bundle in bundles if _VIEW in bundle]
    state = notebook.metadata.get("widgets", {}).get(_STATE, {}).get("state", {})
    kept = sum(bundle[_VIEW]["model_id"] in state for bundle in views)
    told = sum(bool(bundle.get("text/plain")) for bundle in views)
    assert f"steps = {_FEW_STEPS}" in "".join(cell.source for cell in injected)
    size = len(json.dumps(state)) / 2**20
    return [
        f"steps = {_FEW_STEPS} injected", f"state of {kept} of {len(views)} widgets saved ({size:.1f} MiB)",
        f"{told} with a sentence beside them", f"{sum('image/png' in bundle for bundle in bundles)} pictures",
    ]  # fmt: skip


def in_nbconvert(asked):
    """The executed notebook as one page, opened where nothing answers."""
    executed = asked.executed
    if not executed.exists():
        run(asked, "jupyter", "nbconvert", "--to", "notebook", "--execute", f"{asked.name}.ipynb",
            f"--output={executed}")  # fmt: skip
    run(asked, "jupyter", "nbconvert", "--to", "html", str(executed))
    with browser() as context:
        context.set_offline(True)
        page = context.new_page()
        page.set_viewport_size({"width": WIDTH, "height": HEIGHT})
        page.goto(executed.with_suffix(".html").as_uri(), wait_until="domcontentloaded")
        pictures = page.evaluate("() => [...document.images].filter((one) => one.naturalWidth > 1).length")
        picture(page, asked, "nbconvert")
        errors = page.locator(".jp-RenderedText[data-mime-type*=error]").count()
        return [f"{pictures} pictures seen offline", f"{errors} errors"]


def run(asked, *command):
    """Run an installed command in the folder of notebooks; what it says is shown when it fails."""
    if not (asked.state / "share").exists():
        write_kernel(asked.state / "share")
    beside = Path(sys.executable).parent / command[0]
    done = subprocess.run(
        [str(beside), *command[1:]], cwd=asked.project / "notebooks", env=environment(asked.state),
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)}: {done.stderr[-2000:]}")


@contextlib.contextmanager
def browser():
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        opened = playwright.chromium.launch(executable_path=CHROMIUM, args=list(FLAGS))
        context = opened.new_context()
        context.set_default_timeout(1000 * NOTEBOOK_SECONDS)
        yield context
        opened.close()


def picture(page, asked, name):
    if asked.pictures:
        asked.pictures.mkdir(parents=True, exist_ok=True)
        page.wait_for_timeout(500)
        page.screenshot(path=asked.pictures / f"{asked.name}_{name}.png")


WAYS = {"notebook": in_notebook, "voila": in_voila, "papermill": in_papermill, "nbconvert": in_nbconvert}


def main():
    asked = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    asked.add_argument("ways", nargs="*", default=list(WAYS), help=f"some of {', '.join(WAYS)}; all when left out")
    asked.add_argument("--name", default="00_start", help="which notebook")
    asked.add_argument("--pictures", type=Path, help="a folder for a picture of each at 1,280 x 720")
    options = asked.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        for way in options.ways:
            try:
                version = importlib.metadata.version(way)
            except importlib.metadata.PackageNotFoundError:
                print(f"{way}: not installed: pip install {way}", flush=True)
                continue
            project, state = Path(folder) / way / "root" / "course", Path(folder) / way / "state"
            state.mkdir(parents=True)
            project.mkdir(parents=True)
            (project / "pyproject.toml").touch()
            for name in ("notebooks", "datasets"):
                shutil.copytree(REPOSITORY / name, project / name, ignore=shutil.ignore_patterns("runs", "data"))
            given = SimpleNamespace(
                project=project, state=state, name=options.name, pictures=options.pictures,
                executed=Path(folder) / "executed.ipynb",
            )  # fmt: skip
            print(f"{way} {version}, {options.name}: {'; '.join(WAYS[way](given))}", flush=True)


if __name__ == "__main__":
    main()
