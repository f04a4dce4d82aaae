"""Kept: what a confined job was kept from, by whom it was asked, in a few sentences.

Whoever asked is named by that function of the user's which Lightning, or kit, had called: `on_train_end`,
`configure_optimizers`, `<module>` of a file that is being imported. What no function of the user's asked for, such as
a cache that a library keeps, is kept from others too but not worth a sentence.
"""

from __future__ import annotations

import functools
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from types import CodeType, FrameType

_MOST_SENTENCES = 8
_LONGEST = 200
_KIT = Path(__file__).parents[1]
_USERS_PARTS = (f"{_KIT}/models/", f"{_KIT}/testing.py")
"""Of kit, what stands where a user's own module or data would."""
_DATA_FILES = ("/torch/utils/data/", f"{_KIT}/data/")
_CALLERS = (f"{_KIT}/run/", f"{_KIT}/memory/dry_run.py")
_HOOK_CALLS = {"_call_lightning_module_hook", "_call_callback_hooks", "_call_strategy_hook"}


class Kept:
    """What was tried so far."""

    def __init__(self, job: str) -> None:
        self.job = job
        """Who kept it from happening, such as "the prediction"."""
        self.count = 0
        """Of everything that was tried, the same thing again included."""
        self.things: set[str] = set()
        self._tried: dict[tuple[str, str, str], None] = {}

    def tried(self, doing: str, thing: object) -> None:
        """`thing` was tried: "writing" a path, "connecting to" an address, "starting" a program."""
        text = str(thing)
        who = asking()
        self.things.add(text)
        if who:
            self.count += 1
            self._tried.setdefault((who, doing, text))

    def found(self, doing: str, thing: object) -> None:
        """`thing` was found to have been tried, nobody knows by whom."""
        if str(thing) not in self.things:
            self.things.add(str(thing))
            self._tried.setdefault(("the module", doing, str(thing)))

    @property
    def notes(self) -> list[str]:
        """A sentence for each thing that one function tried."""
        tried = list(self._tried)
        notes = [
            f"{self.job} kept {who} from {doing} {text[:_LONGEST]}" for who, doing, text in tried[:_MOST_SENTENCES]
        ]
        more = len(tried) - _MOST_SENTENCES
        return [*notes, f"{self.job} kept {more} more things from happening"] if more > 0 else notes


def asking() -> str:
    """The user's function that the present call comes from; empty where there is none."""
    name = ""
    for code in _codes():
        if is_users(code):
            name = code.co_name
        elif name and (_calls_a_hook(code) or code.co_filename.startswith(_CALLERS)):
            break
    return name


def hook_asks() -> bool:
    """Whether the present call comes from a hook of a module or callback, and not to read data."""
    by_user = False
    for code in _codes():
        by_user = by_user or is_users(code)
        if any(part in code.co_filename for part in _DATA_FILES):
            return False
        if _calls_a_hook(code):
            return by_user
    return False


@functools.cache
def is_users(code: CodeType) -> bool:
    """Whether it belongs neither to Python, nor to a package, nor to the part of kit that runs the user's code."""
    file = code.co_filename
    if file.startswith(_USERS_PARTS):
        return True
    return not (file.startswith(("<frozen", f"{_KIT}/", *_library_folders())) or "site-packages/" in file)


def _calls_a_hook(code: CodeType) -> bool:
    return code.co_name in _HOOK_CALLS and "/lightning/" in code.co_filename


@functools.cache
def _library_folders() -> tuple[str, ...]:
    paths = sysconfig.get_paths()
    return tuple(f"{paths[name]}/" for name in ("stdlib", "platstdlib", "purelib", "platlib"))


def _codes() -> Iterator[CodeType]:
    frame: FrameType | None = sys._getframe(2)
    while frame is not None:
        yield frame.f_code
        frame = frame.f_back
