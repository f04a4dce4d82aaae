"""Drafts: a class or function that was defined in a notebook, as the text of a module that can be imported anywhere.

The text is that of its cell, with the imports and the other definitions of the notebook that it names, each once, what
is needed before what needs it. Constants are written as their values. What cannot be written is left as a comment, for
the author to see to: a draft is to be read before it is used. Nothing is imported here and nothing is run.
"""

from __future__ import annotations

import ast
import builtins
import importlib
import linecache
import re
import sys
import textwrap
import types
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

_PLAIN = (int, float, str, bool, type(None))


def is_importable(value: Any) -> bool:
    """Whether another process finds a class or function under its module and name."""
    found: Any = sys.modules.get(getattr(value, "__module__", ""))
    if found is None or found.__name__ == "__main__":
        return False
    for name in value.__qualname__.split("."):
        found = getattr(found, name, None)
    return found is value


def draft_name(value: Any) -> str:
    """The name of a module for a class: `SeaNet` becomes `sea_net`."""
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", value.__name__).lower()


def draft_place(value: Any, folder: Path) -> tuple[Path, str] | None:
    """A new file in `folder`, or the one that holds the draft of `value`, and its text; None when it has no source."""
    text = draft_text(value)
    if text is None:
        return None
    stem = draft_name(value)
    for number in range(1, 1000):
        path = folder / f"{stem}{'' if number == 1 else f'_{number}'}.py"
        if not path.exists() or path.read_text(encoding="utf-8", errors="replace") == text:
            return path, text
    return None


def write_draft(value: Any, folder: Path) -> None:
    """Write the draft of `value` into a new file in `folder`, unless it is there, or its source is not known."""
    place = draft_place(value, folder)
    if place is not None and not place[0].exists():
        place[0].write_text(place[1], encoding="utf-8")


def draft_text(value: Any) -> str | None:
    """The module; None when the source of `value` is not known."""
    draft = _Draft(vars(sys.modules.get(value.__module__, types.ModuleType("nowhere"))))
    if not draft.add(value):
        return None
    head = f'"""{value.__name__}, taken from a notebook. Read it through before it is used."""'
    parts = [head, "\n".join(sorted(draft.imports)), "\n".join(draft.notes), "\n".join(draft.constants)]
    return "\n\n".join([part for part in parts if part] + ["\n" + text for text in draft.definitions]) + "\n"


@dataclass
class _Draft:
    """What has been gathered so far."""

    names: Mapping[str, Any]
    """Everything the notebook has."""
    imports: set[str] = field(default_factory=set)
    constants: list[str] = field(default_factory=list)
    definitions: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    _seen: set[str] = field(default_factory=set)

    def add(self, value: Any) -> bool:
        """Gather a definition, after all that it needs; False when its source is not known."""
        found = _source(value)
        if found is None:
            return False
        text, node = found
        self._seen.add(node.name)
        for name in _names_used(node):
            self._need(name)
        self.definitions.append(text)
        return True

    def _need(self, name: str) -> None:
        if name in self._seen or name not in self.names or hasattr(builtins, name):
            return
        self._seen.add(name)
        value = self.names[name]
        if isinstance(value, types.ModuleType):
            plain = value.__name__ == name
            self.imports.add(f"import {value.__name__}" + ("" if plain else f" as {name}"))
        elif _is_plain(value):
            self.constants.append(f"{name} = {value!r}")
        elif not (self._import(name, value) or (_is_defined(value) and self.add(value))):
            self.notes.append(f"# {name} was {type(value).__name__} in the notebook: define it here.")

    def _import(self, name: str, value: Any) -> bool:
        module, real = getattr(value, "__module__", None), getattr(value, "__name__", None)
        if not module or not real or module == "__main__":
            return False
        public = _shortest(module, real, value)
        if public is None:
            return False
        self.imports.add(f"from {public} import {real}" + ("" if name == real else f" as {name}"))
        return True


def _shortest(module: str, name: str, value: Any) -> str | None:
    """The outermost package that has `value` under its name, which is where its author offers it."""
    parts = module.split(".")
    for end in range(1, len(parts) + 1):
        place = ".".join(parts[:end])
        found = sys.modules.get(place) or importlib.import_module(place)
        if getattr(found, name, None) is value:
            return place
    return None


def _is_defined(value: Any) -> bool:
    return isinstance(value, type | types.FunctionType)


def _is_plain(value: Any) -> bool:
    if isinstance(value, list | tuple | set):
        return all(map(_is_plain, value))
    if isinstance(value, dict):
        return all(map(_is_plain, [*value, *value.values()]))
    return type(value) in _PLAIN


def _names_used(node: ast.AST) -> list[str]:
    return list(dict.fromkeys(item.id for item in ast.walk(node) if isinstance(item, ast.Name)))


def _source(value: Any) -> tuple[str, ast.ClassDef | ast.FunctionDef] | None:
    """Text and tree of a definition, from the file or cell that its code came from; the last of its name counts."""
    lines = linecache.getlines(_file(value))
    try:
        tree = ast.parse("".join(lines))
    except SyntaxError:  # a cell with magics
        return None
    nodes = [item for item in ast.walk(tree) if isinstance(item, ast.ClassDef | ast.FunctionDef)]
    named = [node for node in nodes if node.name == value.__name__]
    if not named:
        return None
    node = named[-1]
    first = min([node.lineno, *(item.lineno for item in node.decorator_list)])
    return textwrap.dedent("".join(lines[first - 1 : node.end_lineno])).rstrip(), node


def _file(value: Any) -> str:
    if isinstance(value, types.FunctionType):
        return value.__code__.co_filename
    codes = (getattr(item, "__code__", None) for item in vars(value).values())
    return next((code.co_filename for code in codes if code is not None), "")
