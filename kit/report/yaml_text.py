"""YAML that YAML 1.1 and 1.2 read alike, with a comment above each line that has a reason.

Lightning reads its files as YAML 1.1, kit as 1.2: `no`, `1e-5` or `12:30` mean different things to them. Text that is
not plainly a word is quoted here, and a float always has its point. Values are mappings, lists, text, numbers, booleans
and None; `Noted` puts a comment above a value, `Block` keeps the lines of a text as they are.
"""

from __future__ import annotations

import json
import re
import textwrap
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

_WORD = re.compile(r"[A-Za-z_/][A-Za-z0-9_./-]*|[0-9]+-[a-z]+")
_NO_WORD = {"y", "n", "yes", "no", "on", "off", "true", "false", "null", "nan", "inf"}
_UNPRINTABLE = re.compile("[\x7f-\x9f\u2028\u2029\ufeff\ufffe\uffff]")
_WIDTH = 110


@dataclass(frozen=True, slots=True)
class Noted:
    """A value with the reason for it."""

    value: Any
    note: str


@dataclass(frozen=True, slots=True)
class Block:
    """Text of whole lines, the first of them not indented."""

    text: str


def yaml_text(values: Mapping[str, Any]) -> str:
    """The mapping as YAML, in its order."""
    return "\n".join(_mapping(values, "")) + "\n"


def _mapping(values: Mapping[str, Any], indent: str) -> Iterator[str]:
    for key, given in values.items():
        value, note = (given.value, given.note) if isinstance(given, Noted) else (given, "")
        yield from comment(note, indent)
        yield from _under(f"{indent}{_scalar(key)}:", value, indent)


def _under(head: str, value: Any, indent: str) -> Iterator[str]:
    if isinstance(value, Block):
        yield f"{head} |"
        yield from (f"{indent}  {line}".rstrip() for line in value.text.splitlines())
    elif isinstance(value, Mapping) and value:
        yield head
        yield from _mapping(value, indent + "  ")
    elif isinstance(value, list | tuple) and value:
        yield head
        for item in value:
            yield from _item(item, indent + "  ")
    else:
        yield f"{head} {_scalar(value)}"


def _item(given: Any, indent: str) -> Iterator[str]:
    item, note = (given.value, given.note) if isinstance(given, Noted) else (given, "")
    yield from comment(note, indent)
    if isinstance(item, Mapping) and item:
        first, *rest = _mapping(item, indent + "  ")
        yield f"{indent}- {first.removeprefix(indent + '  ')}"
        yield from rest
    elif isinstance(item, list | tuple) and item:
        yield f"{indent}-"
        for inner in item:
            yield from _item(inner, indent + "  ")
    else:
        yield f"{indent}- {_scalar(item)}"


def comment(note: str, indent: str = "") -> list[str]:
    """The note as comment lines."""
    words = " ".join(note.split())
    return [f"{indent}# {line}" for line in textwrap.wrap(words, _WIDTH, break_long_words=False)]


def _scalar(value: Any) -> str:
    if isinstance(value, Mapping | list | tuple):
        return "{}" if isinstance(value, Mapping) else "[]"
    if isinstance(value, bool) or value is None:
        return {True: "true", False: "false", None: "null"}[value]
    if isinstance(value, float):
        text = repr(value)
        return text.replace("e", ".0e", 1) if "e" in text and "." not in text else text
    return str(value) if isinstance(value, int) else _quoted(str(value))


def _quoted(text: str) -> str:
    if _WORD.fullmatch(text) and text.lower() not in _NO_WORD:
        return text
    quoted = json.dumps(text, ensure_ascii=False)
    return _UNPRINTABLE.sub(lambda found: f"\\u{ord(found[0]):04x}", quoted)
