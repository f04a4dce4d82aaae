"""The whole course walked in Chromium: `python tests/notebooks/minutes.py` runs each notebook as its reader does.

Printed for each: its question, the minutes it takes, those that notebooks/README.md promises, the words of its text,
and what went wrong. Minutes are those of reading text and code at 200 words a minute and of running all cells, rounded
up; a question that the reader has to answer counts as half a minute. `--pictures FOLDER` keeps one picture of every
screen at 1,280 x 720.
"""

from __future__ import annotations

import argparse
import math
import re
import shutil
import sys
import tempfile
import time
from pathlib import Path
from types import SimpleNamespace

import nbformat

REPOSITORY = Path(__file__).parents[2]
sys.path.insert(0, str(REPOSITORY / "tests"))

from lab import CHROMIUM, FLAGS, NOTEBOOK_SECONDS, Notebook, end_kernels, serve_lab  # noqa: E402

WORDS_PER_MINUTE = 200
MINUTES_OF_A_QUESTION = 0.5
WIDTH, HEIGHT = 1280, 720
_SCROLL = """(part) => { const box = document.querySelector('.jp-WindowedPanel-outer');
  box.scrollTop = part; return [box.scrollTop, box.scrollHeight, box.clientHeight]; }"""


def words_of(cells, kinds=("markdown",)):
    """Words of the cells of these kinds; folded solutions are read by whoever is stuck."""
    text = "\n".join(cell.source for cell in cells if cell.cell_type in kinds)
    return len(re.findall(r"\S*\w\S*", re.sub(r"<details>.*?</details>", "", text, flags=re.DOTALL)))


def promised():
    """{notebook: minutes} as the course's page says; empty where there is none."""
    page = REPOSITORY / "notebooks" / "README.md"
    rows = re.findall(r"^\| \[(\w+)\].*\| (\d+) \|", page.read_text(), re.MULTILINE) if page.exists() else []
    return {name: int(minutes) for name, minutes in rows}


def take_pictures(opened, folder):
    """Every screen of the notebook from its first to its last line."""
    opened.page.set_viewport_size({"width": WIDTH, "height": HEIGHT})
    place = 0
    while True:
        top, height, screen = opened.page.evaluate(_SCROLL, place * (HEIGHT - 120))
        opened.page.wait_for_timeout(250)
        opened.page.screenshot(path=folder / f"{opened.file.stem}_{place:02d}.png")
        place += 1
        if top + screen >= height - 1:
            return


def walk(context, lab, name, pictures):
    """(seconds, errors) of one notebook, run as its reader does."""
    page = context.new_page()
    page.set_viewport_size({"width": WIDTH, "height": HEIGHT})
    begun = time.monotonic()
    opened = Notebook(page, lab, f"notebooks/{name}")
    opened.run_all(wait=False)
    opened.saved()
    seconds = time.monotonic() - begun
    errors = opened.errors()
    if pictures:
        take_pictures(opened, pictures)
    end_kernels(lab.url, {f"{lab.root.name}/notebooks/{name}"})
    page.close()
    return seconds, errors


def main():
    from playwright.sync_api import sync_playwright

    asked = argparse.ArgumentParser(description=__doc__)
    asked.add_argument("names", nargs="*", help="notebooks, by the beginning of their names; all when left out")
    asked.add_argument("--pictures", type=Path, help="a folder for pictures of every screen")
    asked.add_argument("--folder", type=Path, help="where the project lies, and stays: a walk in several parts")
    asked.add_argument("--keep", type=Path, help="a folder for the executed notebooks")
    options = asked.parse_args()
    for folder in filter(None, (options.pictures, options.keep, options.folder)):
        folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder, sync_playwright() as playwright:
        state, root = Path(folder) / "state", (options.folder or Path(folder) / "root").absolute()
        project = root / "course"
        state.mkdir()
        project.mkdir(parents=True, exist_ok=True)
        (project / "pyproject.toml").touch()
        for name in ("notebooks", "datasets"):
            left_out = shutil.ignore_patterns("runs", "data")
            shutil.copytree(REPOSITORY / name, project / name, ignore=left_out, dirs_exist_ok=True)
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=list(FLAGS))
        context = browser.new_context()
        context.set_default_timeout(1000 * NOTEBOOK_SECONDS)
        with serve_lab(state, root) as server:
            lab = SimpleNamespace(url=server.url, root=project)
            for path in sorted((project / "notebooks").glob("*.ipynb")):
                if options.names and not path.name.startswith(tuple(options.names)):
                    continue
                cells = nbformat.read(path, as_version=4).cells
                seconds, errors = walk(context, lab, path.name, options.pictures)
                questions = sum("predict-first" in cell.metadata.get("tags", []) for cell in cells)
                reading = words_of(cells, ("markdown", "code")) / WORDS_PER_MINUTE + questions * MINUTES_OF_A_QUESTION
                minutes, allowed = math.ceil(reading + seconds / 60), promised().get(path.stem)
                question = cells[0].source.splitlines()[0].removeprefix("# ")
                print(
                    f"{path.stem:24} {minutes:3d} of {allowed or '–'} minutes ({seconds:.0f} s of running), "
                    f"{words_of(cells)} words: {question}",
                    *(f"  wrong: {error.splitlines()[0]}" for error in errors), sep="\n", flush=True,
                )  # fmt: skip
                if options.keep:
                    shutil.copy(path, options.keep / path.name)
        browser.close()


if __name__ == "__main__":
    main()
