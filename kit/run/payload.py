"""What travels from the kernel to the ranks: the module and the data, as import path, class, factory or instance.

Classes and factories defined in a notebook travel by value, those in modules by reference (with the kernel's working
folder and sys.path, so an edited file is seen by the next trial). Import paths and factories are best: the object is
then made inside the rank, and no weights travel. Nothing here imports torch.
"""

from __future__ import annotations

import functools
import inspect
import linecache
import sys
import types
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import cloudpickle

from kit.config import Config
from kit.errors import ConfigError, Problem

Kind = Literal["default", "path", "class", "factory", "instance"]
LARGE_BYTES = 10_000_000
_SOURCE_BYTES = 1_000_000
_INSTANCE_MARKS = ("training_step", "train_dataloader", "__getitem__", "__iter__")


@dataclass(frozen=True, slots=True)
class Part:
    """A module or a data module as the caller gave it."""

    kind: Kind
    value: Any = None

    @classmethod
    def of(cls, value: object) -> Part:
        if value is None:
            return cls("default")
        if isinstance(value, str):
            return cls("path", value)
        if isinstance(value, type):
            return cls("class", value)
        return cls("factory" if _is_factory(value) else "instance", value)

    @property
    def is_dataset(self) -> bool:
        """Whether it is seen to be a data set, whose loader kit makes; one that a function makes is not seen."""
        given = self.kind in ("class", "instance")
        return given and hasattr(self.value, "__getitem__") and not hasattr(self.value, "train_dataloader")

    @property
    def identity(self) -> str:
        """What tells it from others: import path, or where its class or function is from; empty for the default."""
        if self.kind in ("default", "path"):
            return str(self.value or "")
        thing = self.value if self.kind in ("class", "factory") else type(self.value)
        line = getattr(getattr(thing, "__code__", None), "co_firstlineno", "")
        name = getattr(thing, "__qualname__", type(thing).__qualname__)
        return f"{getattr(thing, '__module__', '')}:{name}" + (f":{line}" if line else "")

    def __str__(self) -> str:
        name = getattr(self.value, "__qualname__", type(self.value).__name__)
        return {"path": str(self.value), "class": f"class {name}", "factory": f"factory {name}"}.get(self.kind, name)


def _is_factory(value: object) -> bool:
    """Modules are callable too, so a callable object is a factory only when it has no part of a module or data set."""
    if isinstance(value, types.FunctionType | types.MethodType | types.BuiltinFunctionType | functools.partial):
        return True
    return callable(value) and not any(hasattr(value, mark) for mark in _INSTANCE_MARKS)


def own_arguments(config: Config) -> dict[str, Any]:
    """What data of the caller's own is made with: `data.arguments`, unless they belong to a source."""
    return dict(config.data.arguments) if config.data.source is None else {}


def is_patch_data(kind: type) -> bool:
    """Whether a data module is kit's own or one that was made from it: those are made with the config."""
    return any(base.__module__ == "kit.data.module" and base.__name__ == "PatchData" for base in kind.__mro__)


def check_parts(module: Part, data: Part, config: Config) -> None:
    """Refuse what could not be made in a rank, before there is one.

    Raises:
        ConfigError: for arguments that do not fit the class, and factories that need arguments.
    """
    if module.kind == "class":
        _check_call(module, "model.arguments", config.model.arguments)
    if data.kind == "class" and own_arguments(config) and not is_patch_data(data.value):
        _check_call(data, "data.arguments", own_arguments(config))
    if module.kind == "factory":
        _check_call(module, "module", {})
    if data.kind == "factory":
        _check_call(data, "data", {})


def _check_call(part: Part, path: str, arguments: Mapping[str, Any]) -> None:
    try:
        signature = inspect.signature(part.value)
    except (TypeError, ValueError):
        return
    try:
        signature.bind(**arguments)
    except TypeError as error:
        raise ConfigError([Problem(path, f"{part} cannot be made: {error}; it takes {signature}")]) from None


def pack(module: Part, data: Part) -> bytes:
    """The payload of a run.

    Raises:
        ConfigError: naming the object that cannot be sent, and where it was found.
    """
    for name, part in (("module", module), ("data", data)):
        try:
            cloudpickle.dumps(part)
        except Exception as error:
            raise ConfigError([Problem(name, why_not_sent(part, error))]) from error
    return cloudpickle.dumps({"module": module, "data": data, "cells": cells()}, protocol=5)  # type: ignore[no-any-return]


def why_not_sent(part: Part, error: Exception) -> str:
    """Why a part cannot be pickled, naming what it holds that cannot."""
    culprit = _culprit(part.value)
    found = f"{culprit} cannot be pickled" if culprit else f"{type(error).__name__}: {error}"
    way_out = "make it inside the class (in setup or __init__) or give a factory that makes it"
    return f"{part} cannot be sent to the ranks: {found}; {way_out}"


def _culprit(value: Any) -> str:
    """The attribute, captured variable or global that does not pickle, with its type."""
    for name, item in _held_by(value):
        try:
            cloudpickle.dumps(item)
        except Exception:
            inner = "" if isinstance(item, type) else _culprit_within(item)
            return f"{name} ({inner or type(item).__name__})"
    return ""


def _culprit_within(value: Any) -> str:
    return _culprit(value) if isinstance(value, types.FunctionType) or hasattr(value, "__dict__") else ""


def _held_by(value: Any) -> list[tuple[str, Any]]:
    if isinstance(value, functools.partial):
        pairs = [*enumerate(value.args), *value.keywords.items()]
        return [("function", value.func), *((f"argument {name}", item) for name, item in pairs)]
    if isinstance(value, types.FunctionType):
        captured = inspect.getclosurevars(value)
        return [(f"variable {name}", item) for name, item in {**captured.nonlocals, **captured.globals}.items()]
    names = vars(value) if hasattr(value, "__dict__") else {}
    return [(f"attribute {name}", item) for name, item in names.items() if name not in ("__dict__", "__weakref__")]


def cells() -> dict[str, tuple[str, str]]:
    """Source text of notebook cells by the file name in their tracebacks, so that a rank can name cell and line."""
    shell = getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)()
    names = getattr(getattr(shell, "compile", None), "_filename_map", {})
    found: dict[str, tuple[str, str]] = {}
    room = _SOURCE_BYTES
    for file, number in reversed(list(names.items())):
        source = "".join(linecache.getlines(file))
        room -= len(source)
        if room < 0:
            break
        found[file] = (f"cell {number}", source)
    return found
