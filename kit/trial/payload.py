"""What travels from the kernel to the ranks: the module and the data, as import path, class, factory or instance.

Classes and factories defined in a notebook travel by value, those in modules by reference (with the kernel's working
folder and sys.path, so an edited file is seen by the next trial). Import paths and factories are best: the object is
then made inside the rank, and no weights travel. Nothing here imports torch.

Which batch size rules: the config's, or that of a loader which the caller brought, and what to do about it.

The rule, the same in `kit.fit`, `kit.predict_memory`, `kit.what_if` and the panel: kit makes the loader of its own data
and of a Dataset, with `loader.batch_size`; every other loader keeps the batches it makes. Nothing of the caller's runs
to find that out: what a loader or data module says of itself is read, and where it says nothing its size is known once
it is made, in the process that trains or predicts.

What a class is like, as far as its source tells: read and never run, so that no library of its is needed.
"""

from __future__ import annotations

import ast
import contextlib
import functools
import inspect
import linecache
import sys
import textwrap
import types
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

import cloudpickle

from kit.config import Config
from kit.errors import ConfigError, KitWarning, Problem
from kit.targets import class_bodies

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
    return any(base.__module__ == "kit.data.patches.module" and base.__name__ == "PatchData" for base in kind.__mro__)


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


BATCH = "loader.batch_size"


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchRule:
    """Whose batch size runs."""

    asked: int
    """What the config says."""
    size: int | None
    """What runs; None while only the loader knows."""
    whose: str
    """Who makes the batches; empty where that is the config."""

    @property
    def by_config(self) -> bool:
        return not self.whose

    @property
    def ignores_config(self) -> bool:
        """Whether another number than the config's is known to run."""
        return not self.by_config and self.size not in (None, self.asked)

    @property
    def note(self) -> str:
        """What a user should know; empty where the config's number runs."""
        if self.by_config or self.size == self.asked:
            return ""
        if self.size is None:
            return f"{BATCH} is {self.asked}, but {self.whose} may make batches of another size, and these run"
        return (
            f"{BATCH} is {self.asked}, but {self.whose} makes batches of {self.size}, and these run; set "
            f"{BATCH}: {self.size}, make that loader with {self.asked}, or give a Dataset, whose loader kit makes"
        )

    def made(self, size: int) -> BatchRule:
        """The same once the batches are known."""
        return replace(self, size=size)

    @property
    def is_worth_a_warning(self) -> bool:
        """Whether a number that somebody chose is ignored: the default is nobody's wish, and is noted only."""
        return self.ignores_config and self.asked != Config().loader.batch_size

    def warn(self, stacklevel: int = 3) -> None:
        if self.is_worth_a_warning:
            warnings.warn(self.note, KitWarning, stacklevel=stacklevel)

    @classmethod
    def of_environment(cls, environment: Mapping[str, Any]) -> BatchRule | None:
        """As a run directory keeps it; None in runs that keep none."""
        kept = environment.get("batch")
        if not isinstance(kept, Mapping) or not isinstance(kept.get("asked"), int):
            return None
        return cls(asked=kept["asked"], size=_whole(kept.get("size")), whose=str(kept.get("whose", "")))


def batch_rule(data: Part, config: Config) -> BatchRule:
    """The rule for `data` as `kit.fit` takes it."""
    asked, kind, known = config.loader.batch_size, _class_of(data), _arguments(data, config)
    if data.kind == "default" or _is_a(kind, _DATASET) or (data.kind == "class" and _is_a(kind, _PATCHES)):
        return BatchRule(asked=asked, size=asked, whose="")
    if not _is_a(kind, _KITS):
        size = _declared(data.value) if data.kind == "instance" else _argument(kind, known)
    elif data.kind == "instance":
        size = _of_kits_own(data.value, asked)
    else:  # takes the config that it is trained under, less what it was given
        size = None if _is_a(kind, _PATCHES) else _whole(known.get("batch_size")) or asked
    return BatchRule(asked=asked, size=size, whose=_name(data, kind))


_DATASET = ("torch.utils.data.dataset", "Dataset")
_KITS, _PATCHES = ("kit.data.patches.module", "EpochData"), ("kit.data.patches.module", "PatchData")
"""Told by name, as the kernel imports no torch for it."""


def _is_a(kind: type | None, base: tuple[str, str]) -> bool:
    return kind is not None and base in [(item.__module__, item.__name__) for item in kind.__mro__]


def _class_of(data: Part) -> type | None:
    """What will make the batches; None where that cannot be told without making it."""
    if data.kind == "instance":
        return type(data.value)
    found = data.value.func if isinstance(data.value, functools.partial) else data.value
    return found if isinstance(found, type) else None


def _name(data: Part, kind: type | None) -> str:
    return f"the data of {data}" if kind is None else f"your {kind.__name__}"


def _arguments(data: Part, config: Config) -> Mapping[str, Any]:
    """What the data will be made with, as far as it is named."""
    if isinstance(data.value, functools.partial):
        return data.value.keywords
    return own_arguments(config) if data.kind in ("class", "path") else {}


def _of_kits_own(data: Any, asked: int) -> int:
    """Data that takes the config it is trained under keeps what it was given; other data keeps its own config."""
    if hasattr(data, "use_config"):
        return int(data._given.get(BATCH, asked))
    return int(data.config.loader.batch_size)


def _declared(data: Any) -> int | None:
    """What a loader or data module says of itself."""
    places = (data, getattr(data, "batch_sampler", None), getattr(data, "hparams", None))
    sizes = (_whole(getattr(place, "batch_size", None)) for place in places)
    return next((size for size in sizes if size is not None), None)


def _argument(kind: type | None, known: Mapping[str, Any]) -> int | None:
    """The `batch_size` that a class is made with, or its default."""
    if "batch_size" in known or kind is None:
        return _whole(known.get("batch_size"))
    try:
        found = inspect.signature(kind).parameters.get("batch_size")
    except (TypeError, ValueError):
        return None
    return None if found is None else _whole(found.default)


def _whole(value: Any) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) and value > 0 else None


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
