"""A fresh start: notebooks as they came, no guesses, no trials; stores stay, and nothing is deleted.

    python -m kit.course.reset [--yes]

What the course made beside its data is moved to `earlier/`, into a folder with the time of day: trials, guesses, pages
and files that notebooks wrote, and the notebooks themselves, which are replaced by those that kit came with. Each is
named first, with its size, and only then moved. Stores and arrays in `data/` are never touched. Whoever wants the space
back deletes `earlier/` himself.
"""

from __future__ import annotations

import argparse
import datetime
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from kit.config import project_folder
from kit.course.guesses import FILE
from kit.registry import REPOSITORY
from kit.units import format_bytes

EARLIER = "earlier"
MADE = (
    "runs", FILE, "committed", "scratch", "artifacts/book", "notebooks/guesses.html", "notebooks/forecast.html",
    "notebooks/ocean.yaml", "notebooks/committed", "notebooks/.ipynb_checkpoints",
)  # fmt: skip
"""In the project folder, beside the notebooks themselves."""


def as_it_came(name: str, project: Path, source: Path = REPOSITORY) -> bytes | None:
    """A notebook as kit came with it: in kit's own checkout what git keeps, elsewhere that of the checkout."""
    if project != source:
        file = source / "notebooks" / name
        return file.read_bytes() if file.is_file() else None
    command = ["git", "-C", str(project), "show", f"HEAD:./notebooks/{name}"]
    found = subprocess.run(command, capture_output=True, check=False)
    return found.stdout if found.returncode == 0 else None


def to_move(project: Path, source: Path = REPOSITORY) -> list[Path]:
    """What a fresh start moves away: what was made, and notebooks that differ from those that came."""
    made = [project / name for name in MADE if (project / name).exists()]
    changed = [
        path
        for path in sorted((project / "notebooks").glob("*.ipynb"))
        if (came := as_it_came(path.name, project, source)) is not None and came != path.read_bytes()
    ]
    return made + changed


def begin_anew(project: Path, paths: Sequence[Path], source: Path = REPOSITORY) -> Path:
    """Move these to a folder below `earlier/`, and put fresh notebooks where notebooks were; that folder.

    Raises:
        OSError: when something cannot be moved; what was moved before stays in the folder.
    """
    when = datetime.datetime.now().astimezone().strftime("%Y-%m-%d-%H%M%S")
    kept = project / EARLIER / when
    for path in paths:
        place = kept / path.relative_to(project)
        place.parent.mkdir(parents=True, exist_ok=True)
        came = as_it_came(path.name, project, source) if path.suffix == ".ipynb" else None
        shutil.move(path, place)
        if came is not None:
            path.write_bytes(came)
    return kept


def main(arguments: Sequence[str] | None = None) -> int:
    """Name what goes, ask, and move it; the exit status."""
    asked = argparse.ArgumentParser(prog="python -m kit.course.reset", description=(__doc__ or "").splitlines()[0])
    asked.add_argument("--yes", action="store_true", help="do not ask")
    given = asked.parse_args(arguments)
    project = project_folder()
    paths = to_move(project)
    if not paths:
        sys.stdout.write("Everything is as it came.\n")
        return 0
    sys.stdout.write(f"To be moved to {project / EARLIER}, from where you can take it back:\n")
    for path in paths:
        sys.stdout.write(f"  {path.relative_to(project)}  {format_bytes(_size(path))}\n")
    sys.stdout.write("data/ stays. Close the notebooks and stop what runs first.\n")
    if not given.yes and input("Move them? [y/N] ").strip().lower() not in ("y", "yes"):
        sys.stdout.write("Nothing was moved.\n")
        return 0
    sys.stdout.write(f"Moved to {begin_anew(project, paths)}\n")
    return 0


def _size(path: Path) -> int:
    files = [path] if path.is_file() else [file for file in path.rglob("*") if file.is_file()]
    return sum(file.stat().st_size for file in files)


if __name__ == "__main__":
    raise SystemExit(main())
