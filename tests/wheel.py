"""Builds kit's wheel, installs it into an empty environment and runs the first notebook there, outside of the checkout.

`python tests/wheel.py`, or `make wheel`. What is missing in the wheel, or among the dependencies, is missing here.
"""

import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from saved_notebooks import assert_pictures_and_text

ROOT = Path(__file__).parents[1]
NOTEBOOK = "00_start"
RUN = """
import sys, nbformat
from nbclient import NotebookClient
import kit
assert "site-packages" in kit.__file__, kit.__file__
book = nbformat.read(sys.argv[1], as_version=4)
NotebookClient(book, timeout=600, kernel_name="python3").execute()
nbformat.write(book, sys.argv[1])
"""


def main(folder):
    source, project, environment = folder / "source", folder / "project", folder / "environment"
    for name in ("kit", "pyproject.toml", "README.md"):
        copy(ROOT / name, source / name)
    for name in ("datasets", f"notebooks/{NOTEBOOK}.ipynb"):
        copy(ROOT / name, project / name)
    (project / "pyproject.toml").write_text('[project]\nname = "mine"\nversion = "0"\n')

    run([sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", folder, source])
    run([sys.executable, "-m", "venv", environment])
    (wheel,) = folder.glob("kit-*.whl")
    python = environment / "bin" / "python"
    pins = ROOT / "constraints.txt"
    run([python, "-m", "pip", "install", "--quiet", "--constraint", pins, wheel, "nbclient"])
    run([python, "-m", "ipykernel", "install", "--prefix", environment, "--name", "python3"])

    book = project / "notebooks" / f"{NOTEBOOK}.ipynb"
    run([python, "-c", RUN, book], cwd=project / "notebooks")
    import nbformat

    assert_pictures_and_text(NOTEBOOK, nbformat.read(book, as_version=4))
    print(f"{wheel.name}: {wheel.stat().st_size >> 10} KiB, installed alone; {NOTEBOOK} ran")


def copy(source, target):
    target.parent.mkdir(parents=True, exist_ok=True)
    if source.is_dir():
        shutil.copytree(source, target, ignore=shutil.ignore_patterns("__pycache__", "runs", "*.egg-info"))
    else:
        shutil.copy2(source, target)


def run(command, **options):
    variables = {
        name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "JUPYTER", "KIT_"))
    }
    done = subprocess.run([*map(str, command)], env=variables, text=True, capture_output=True, check=False, **options)
    if done.returncode:
        sys.exit(f"{json.dumps([*map(str, command)][:6])} failed\n{done.stdout[-3000:]}\n{done.stderr[-6000:]}")


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as scratch:
        main(Path(scratch))
