"""What a class is like, as far as its source tells: read and never run, so that no library of its is needed."""

from __future__ import annotations

import ast
import contextlib
import inspect
import textwrap
from collections.abc import Iterator
from typing import Any

from kit.config import Config
from kit.run.payload import Part
from kit.signatures import class_bodies


def takes_config(target: str) -> bool:
    """Whether data takes what it was not given from the config of a committed file, as far as its source tells."""
    return any(node.name == "ConfiguredData" for node in class_bodies(target, until="LightningDataModule"))


def shards_itself(target: str) -> bool:
    """Whether a class makes or shards layers in `configure_model`, as far as its source tells."""
    return any(_defines(node, "configure_model") for node in _own_classes(target))


def is_manual(target: str) -> bool:
    """Whether a class sets `automatic_optimization` to False, as far as its source tells."""
    return any(_sets_manual(node) for node in _own_classes(target))


def optimizes_manually(module: Any, config: Config) -> bool:
    """The same of a module as `kit.fit` takes it; a function that makes one does not tell, and counts as no."""
    part = Part.of(module)
    if part.kind == "instance":
        return not getattr(part.value, "automatic_optimization", True)
    if part.kind == "class":
        return any(_sets_manual(node) for node in _written_classes(part.value))
    return part.kind != "factory" and is_manual(part.value or config.model.target)


def _written_classes(kind: type) -> Iterator[ast.ClassDef]:
    """The class and its bases below LightningModule, as far as their source is at hand, also in a notebook."""
    for one in kind.__mro__:
        if one.__name__ == "LightningModule":
            return
        with contextlib.suppress(OSError, TypeError, SyntaxError):
            (node,) = ast.parse(textwrap.dedent(inspect.getsource(one))).body
            if isinstance(node, ast.ClassDef):
                yield node


def _own_classes(target: str) -> Iterator[ast.ClassDef]:
    return class_bodies(target, until="LightningModule")


def _defines(node: ast.ClassDef, name: str) -> bool:
    return any(isinstance(item, ast.FunctionDef) and item.name == name for item in node.body)


def _sets_manual(node: ast.ClassDef) -> bool:
    for item in ast.walk(node):
        if isinstance(item, ast.Assign) and isinstance(item.value, ast.Constant) and item.value.value is False:
            names = [ast.unparse(part) for part in item.targets]
            if "self.automatic_optimization" in names or "automatic_optimization" in names:
                return True
    return False
