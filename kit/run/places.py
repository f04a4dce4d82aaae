"""Where in the user's own code something happened: the innermost frame that belongs to no library.

Frames come from tracebacks or from the stacks that faulthandler writes to a log when a rank hangs or crashes. Notebook
cells are named by their number when it is known.
"""

from __future__ import annotations

import functools
import re
import sysconfig
from collections.abc import Iterable, Mapping
from pathlib import Path

Frame = tuple[str, int, str]
"""(file, line, function)"""
_STACK_BYTES = 1 << 16
_FRAME = re.compile(r'^  File "(.+)", line (\d+)(?:,)? in (\S+)', re.MULTILINE)
_CELL = re.compile(r"ipykernel_\d+[/\\]\d+\.py|<ipython-input-")


@functools.cache
def _library_folders() -> tuple[str, ...]:
    paths = sysconfig.get_paths()
    kit = Path(__file__).parents[1]
    folders = [paths[name] for name in ("stdlib", "platstdlib", "purelib", "platlib")]
    return tuple(f"{folder}/" for folder in [*folders, kit / "run", kit / "train", kit / "memory"])


def is_library(file: str) -> bool:
    """Whether a file is Python's, a package's, or the part of kit that runs the user's code."""
    if _CELL.search(file):
        return False
    return file.startswith(("<", *_library_folders())) or "site-packages/" in file


def own_frame(frames: Iterable[Frame]) -> Frame | None:
    """The innermost frame of the user's code, from frames given outermost first."""
    own = [frame for frame in frames if not is_library(frame[0])]
    return own[-1] if own else None


def describe(frame: Frame, cells: Mapping[str, tuple[str, str]] | None = None) -> str:
    """`model.py, line 34, in training_step`, or `cell 5, line 3, in ...`."""
    file, line, function = frame
    unnamed = "a notebook cell" if _CELL.search(file) else Path(file).name
    where = cells[file][0] if cells and file in cells else unnamed
    return f"{where}, line {line}, in {function}"


def last_stack(log: Path) -> Frame | None:
    """The user's frame in the last stack that faulthandler wrote to a log; None when there is none."""
    try:
        with log.open("rb") as file:
            file.seek(max(0, log.stat().st_size - _STACK_BYTES))
            text = file.read().decode(errors="replace")
    except OSError:
        return None
    _, mark, stack = text.rpartition("Current thread 0x")
    frames = frames_in(stack) if mark else []
    return own_frame(reversed(frames)) or (frames[0] if frames else None)


def frames_in(text: str) -> list[Frame]:
    """The frames written in a traceback or stack, in the order written."""
    return [(match[1], int(match[2]), match[3]) for match in _FRAME.finditer(text)]
