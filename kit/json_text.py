"""JSON that somebody else may have written, damaged or made up: read within bounds, or one named error.

Python's own reader ends deep nesting in a RecursionError, and reads whole numbers that no float can hold, which fail
wherever they are computed with. Both are refused here, before anything walks over the values. What kit writes itself is
never found half-written.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import threading
from collections.abc import Iterator, Mapping
from itertools import accumulate
from pathlib import Path
from typing import Any

from kit.errors import JsonError

DEEPEST = 100
"""Levels of nesting; what kit writes has less than ten."""
_LONGEST = 308
"""Digits of a whole number that a float surely holds."""
_BRACKETS = b"[]{}"
_OTHERS = bytes(set(range(256)) - set(_BRACKETS))
_STEP = {ord("["): 1, ord("{"): 1, ord("]"): -1, ord("}"): -1}
_LONG_NUMBER = re.compile(rb"\d{%d}" % (_LONGEST + 1))


def read_json(data: bytes | str, where: str = "") -> Any:
    """The value that a JSON text holds; `where` is the file it came from.

    Raises:
        JsonError: when it is not JSON, nested deeper than `DEEPEST`, or holds a number of more than 308 digits.
    """
    raw = data.encode("utf-8", "surrogatepass") if isinstance(data, str) else data
    head = f"{where}: " if where else ""
    try:
        if _seems_deep(raw) and _depth(json.loads(raw)) > DEEPEST:
            raise RecursionError
        return json.loads(raw, parse_int=_whole) if _LONG_NUMBER.search(raw) else json.loads(raw)
    except RecursionError:
        raise JsonError(f"{head}nested deeper than {DEEPEST} levels; the file is damaged or none of kit's") from None
    except ValueError as error:
        raise JsonError(f"{head}not JSON: {error}; the file was cut short, edited or is none of kit's") from None


def write_json(path: Path, values: Any, indent: int | None = None) -> Path:
    """Write a file of kit's own, and the folders above it, as `write_whole` does."""
    path.parent.mkdir(parents=True, exist_ok=True)
    return write_whole(path, json.dumps(values, indent=indent))


def write_whole(path: Path, content: str | bytes) -> Path:
    """Replace a file in one move, so that a reader finds the old content or the new.

    The draft has a name that no other process or thread writes to.
    """
    draft = path.with_name(f".{path.name}.{os.getpid()}.{threading.get_ident()}.tmp")
    try:
        draft.write_bytes(content.encode() if isinstance(content, str) else content)
        return draft.replace(path)
    except BaseException as error:
        with contextlib.suppress(OSError):
            draft.unlink(missing_ok=True)
        if isinstance(error, OSError) and error.filename == str(draft):
            error.filename = str(path)  # the name that was asked for
        raise


def written(text: str, path: str | Path | None) -> str:
    """The text itself, also written to `path` when given, and the folders above it, as `write_whole` does."""
    if path is not None:
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        write_whole(Path(path), text)
    return text


def leaves(values: Mapping[str, Any], within: str = "") -> Iterator[tuple[str, Any]]:
    """(dotted name, value) of each value of nested mappings."""
    for key, value in values.items():
        if isinstance(value, Mapping) and value:
            yield from leaves(value, f"{within}{key}.")
        else:
            yield f"{within}{key}", value


def _whole(digits: str) -> int:
    if len(digits.lstrip("-")) > _LONGEST:
        raise ValueError(f"a number of {len(digits)} digits, at most {_LONGEST} are read")
    return int(digits)


def _seems_deep(raw: bytes) -> bool:
    """By its brackets, those within text too, so that all but odd files are told in a moment."""
    if raw.count(b"[") + raw.count(b"{") <= DEEPEST:
        return False
    return max(accumulate(map(_STEP.__getitem__, raw.translate(None, _OTHERS))), default=0) > DEEPEST


def _depth(value: Any) -> int:
    depth, level = 0, [value]
    while level := [
        inner
        for item in level
        if isinstance(item, dict | list)
        for inner in (item.values() if isinstance(item, dict) else item)
    ]:
        depth += 1
    return depth
