"""The table of notebooks in README: `python tests/notebooks/minutes.py` runs each and prints its question and minutes.

Minutes are those of reading its text at 200 words a minute and of running all cells, rounded up.
"""

from __future__ import annotations

import argparse
import math
import shutil
import tempfile
import time
from pathlib import Path

import nbformat
from nbclient import NotebookClient

REPOSITORY = Path(__file__).parents[2]
WORDS_PER_MINUTE = 200


def run_minutes(project: Path, path: Path) -> float:
    begun = time.monotonic()
    notebook = nbformat.read(path, as_version=4)
    resources = {"metadata": {"path": str(project / "notebooks")}}
    NotebookClient(notebook, timeout=1800, kernel_name="python3", resources=resources).execute()
    return (time.monotonic() - begun) / 60


def main() -> None:
    argparse.ArgumentParser(description=__doc__).parse_args()
    with tempfile.TemporaryDirectory() as folder:
        project = Path(folder)
        (project / "pyproject.toml").touch()
        for name in ("notebooks", "datasets"):
            shutil.copytree(REPOSITORY / name, project / name, ignore=shutil.ignore_patterns("runs"))
        for path in sorted((project / "notebooks").glob("*.ipynb")):
            cells = nbformat.read(path, as_version=4).cells
            words = sum(len(cell.source.split()) for cell in cells)
            minutes = math.ceil(words / WORDS_PER_MINUTE + run_minutes(project, path))
            question = cells[0].source.splitlines()[0].removeprefix("# ")
            print(f"| [{path.stem}](notebooks/{path.name}) | {question} | {minutes} |", flush=True)


if __name__ == "__main__":
    main()
