"""What travels from the kernel to the ranks: module, data, loggers and callbacks, as path, class, factory or instance.

Classes and factories defined in a notebook travel by value, those in modules by reference (with the kernel's working
folder and sys.path, so an edited file is seen by the next trial). Import paths and factories are best: the object is
then made inside the rank, and no weights travel. Nothing here imports torch.

`batch_rule` says whose batch size runs, the same in `kit.fit`, `kit.predict_memory`, `kit.memory.what_if` and the
panel: kit makes the loader of its own data and of a Dataset, with `loader.batch_size`; every other loader keeps the
batches it makes. Nothing of the caller's runs to find that out. A loader or data module may declare its size; where it
declares none, the size is known once the loader is made, in the process that trains or predicts.

What a class is like (`is_manual`, `shards_itself`, `takes_config`) is read off its source and never run, so that none
of its libraries are needed.
"""

from __future__ import annotations

import ast
import contextlib
import datetime
import functools
import inspect
import itertools
import linecache
import math
import os
import re
import sys
import textwrap
import types
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import cloudpickle

from kit.config import Config
from kit.errors import ConfigError, Problem, did_you_mean, warn_caller
from kit.secrets_in_text import secrets_of
from kit.targets import class_bodies, digest_of, find_target, path_of, signature_of, takes_any, tells_of_sharding

Kind = Literal["default", "path", "class", "factory", "instance", "entry", "module"]
"""`module` is data that the module itself makes the loaders of; the value is then the part of the module."""
LARGE_BYTES = 10_000_000
_SOURCE_BYTES = 1_000_000
_FUNCTIONS = (types.FunctionType, types.MethodType, types.BuiltinFunctionType, functools.partial)
_OF_ARRAYS = ("torch", "numpy", "pandas", "polars", "xarray", "zarr", "h5py", "pyarrow", "dask")
"""Packages whose objects with a shape hold values."""
_INSTANCE_MARKS = ("training_step", "train_dataloader", "__getitem__", "__iter__")


def trained_on(value: Any) -> Any:
    """The first of a pair of data to train and to validate on."""
    return value[0] if isinstance(value, tuple) and value else value


@dataclass(frozen=True, slots=True)
class Part:
    """A module or a data module as the caller gave it."""

    kind: Kind
    value: Any = None
    compiled: bytes = b""
    """What `torch.compile` made of the value, pickled; empty for most."""

    @classmethod
    def of(cls, value: object) -> Part:
        """Modules are callable too, so a callable object is a factory only without a method of a module or data set.

        Raises:
            ConfigError: for a compiled module that cannot be compiled again in a rank.
        """
        if (found := _before_compiling(value)) is not None:
            return cls("instance", *found)
        if value is None:
            return cls("default")
        if isinstance(value, str):
            return cls("path", value)
        if isinstance(value, dict) and "class_path" in value:
            return cls("entry", value)
        if isinstance(value, type):
            return cls("class", value)
        plain = callable(value) and not any(hasattr(value, mark) for mark in _INSTANCE_MARKS)
        return cls("factory" if plain or isinstance(value, _FUNCTIONS) else "instance", value)

    @property
    def is_dataset(self) -> bool:
        """Whether it is seen to be a data set, whose loader kit makes; one that a function makes is not seen."""
        value = trained_on(self.value)
        given = self.kind in ("class", "instance")
        return given and hasattr(value, "__getitem__") and not hasattr(value, "train_dataloader")

    @property
    def identity(self) -> str:
        """Tells it from others: its import path, or where it is from and what it is made with; empty by default."""
        if self.kind in ("default", "path"):
            return str(self.value or "")
        if self.kind in ("module", "entry"):
            return f"{self}:{digest_of(self.value)}"
        thing = self.value if self.kind in ("class", "factory") else type(self.value)
        name = getattr(thing, "__qualname__", type(thing).__qualname__)
        return f"{getattr(thing, '__module__', '')}:{name}:{digest_of(self.value)}"

    def __str__(self) -> str:
        name = getattr(self.value, "__qualname__", type(self.value).__name__)
        if self.kind == "entry":
            return str(self.value["class_path"]).rpartition(".")[2]
        if self.kind == "module":
            return "the module's own loaders"
        return {"path": str(self.value), "class": f"class {name}", "factory": f"factory {name}"}.get(self.kind, name)


def _before_compiling(value: Any) -> tuple[Any, bytes] | None:
    """A LightningModule as it was before `torch.compile(module)` or `module.compile()`, and what these made of it, as
    `compile_again` takes it; None for anything else. The weights are shared."""
    made: dict[str, Any] = {}
    if type(value).__name__ == "OptimizedModule" and _is_lightning(type(value._orig_mod)):
        value, made[WHOLE] = value._orig_mod, value.dynamo_ctx
    own = getattr(value, "__dict__", {}) if _is_lightning(type(value)) else {}
    left_out: list[str] = []
    if own.get("_compiler_ctx"):  # Lightning has unpacked it
        made[WHOLE] = own["_compiler_ctx"]["dynamo_ctx"]
        left_out += [name.removeprefix("original_") for name in own["_compiler_ctx"] if name.startswith("original_")]
        left_out.append("_compiler_ctx")
    if (call := own.get("_compiled_call_impl")) is not None:
        held = [cell.cell_contents for cell in call.__closure__ or ()]
        made[CALL] = next(one for one in held if type(one).__name__ == "OptimizeContext")
        left_out.append("_compiled_call_impl")
    if not made:
        return None
    if left_out:
        same = object.__new__(type(value))
        vars(same).update({name: item for name, item in own.items() if name not in left_out})
        vars(same)["_compiler_ctx"] = None
        value = same
    try:
        return value, cloudpickle.dumps(made)
    except Exception as error:
        message = (
            f"what torch.compile made of {type(value).__name__} cannot be sent to the ranks ({error}); give the module "
            "itself and compile a part of it in its __init__, as in self.net = torch.compile(self.net)"
        )
        raise ConfigError([Problem("module", message)]) from error


WHOLE, CALL = "whole", "call"
"""What was compiled of a module: its steps, by `torch.compile(module)`, or its call, by `module.compile()`."""


def _is_lightning(kind: type) -> bool:
    return any(base.__name__ == "LightningModule" for base in kind.__mro__)


@dataclass(frozen=True, slots=True)
class TrainerParts:
    """What the Trainer gets of the caller's own, beside module and data."""

    loggers: tuple[Part, ...] = ()
    callbacks: tuple[Part, ...] = ()
    flags: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, logger: object, callbacks: object, flags: Mapping[str, Any]) -> TrainerParts:
        """As `kit.fit` takes them.

        Raises:
            ConfigError: for what is no logger or callback.
        """
        logger = DEFAULT_LOGGER if logger is True else logger
        return cls(_parts("logger", "Logger", logger), _parts("callbacks", "Callback", callbacks), flags)

    def summary(self) -> dict[str, Any]:
        """What a run directory tells of it: names to be shown, and in `made` what `kit.commit` writes of each."""
        plain = (bool, int, float, str)
        flags = {name: value if isinstance(value, plain) else repr(value)[:80] for name, value in self.flags.items()}
        found = {"loggers": [*map(str, self.loggers)], "callbacks": [*map(str, self.callbacks)], "flags": flags}
        made = {
            "logger": [_recorded(part) for part in self.loggers],
            "callbacks": [_recorded(part) for part in self.callbacks],
            "trainer": {name: _recorded_flag(name, value) for name, value in self.flags.items()},
        }
        return {name: value for name, value in found.items() if value} | {"made": made} if any(found.values()) else {}


NO_PARTS = TrainerParts()


def _parts(name: str, kind: str, given: object) -> tuple[Part, ...]:
    several = list(given) if isinstance(given, list | tuple) else [given]
    values = [one for one in several if one is not None and one is not False]
    parts = tuple(map(Part.of, values))
    for part in parts:
        if part.kind == "entry" and not isinstance(part.value.get("class_path"), str):
            message = f"{part.value} names no class_path; write {{'class_path': 'package.Name', 'init_args': {{...}}}}"
            raise ConfigError([Problem(name, message)])
        held = part.value if part.kind == "class" else type(part.value)
        if part.kind in ("class", "instance") and kind not in {base.__name__ for base in held.__mro__}:
            message = f"{part} is no {kind} of lightning.pytorch; give one, its class or a function that makes it"
            raise ConfigError([Problem(name, message)])
        if part.kind in ("class", "factory"):
            _check_call(part, name, {}, f"; give an instance, as {held.__name__}(...)" * (part.kind == "class"))
        if part.kind in ("path", "entry"):
            find_target(part.value if part.kind == "path" else ":".join(part.value["class_path"].rsplit(".", 1)))
    return parts


DEFAULT_LOGGER = "kit.train.trainer:default_logger"
"""What `logger=True` means."""
_CONNECT = ("CometLogger", "NeptuneLogger")
"""Loggers of Lightning that begin a run when they are made."""
_KEY = re.compile(r"(?i)(api_?key|token|secret|password|passwd)$")
_PLAIN = (bool, int, float, str, type(None))
_DEEPEST = 8


def _recorded(part: Part) -> dict[str, Any]:
    """The class and the arguments that make the same object; or `why` they are not known."""
    path, arguments = _made_with(part)
    if isinstance(arguments, str) or not _is_plain(arguments):
        why = arguments if isinstance(arguments, str) else "an argument of it is no plain value"
        return {"name": str(part), "why": why}
    kinds = [f"{name} is one" for name in arguments if _KEY.search(name)] + [kind for _, kind in secrets_of(arguments)]
    if kinds:
        why = f"an argument of it is a secret ({kinds[0]}), which no file may hold; give it by the environment"
        return {"name": str(part), "why": why}
    return {"name": str(part), "class": path, "arguments": arguments}


def _recorded_flag(name: str, value: Any) -> Any:
    if name == "plugins":
        return [_recorded(Part.of(one)) for one in (value if isinstance(value, list | tuple) else [value])]
    value = {"days": value.days, "seconds": value.seconds} if isinstance(value, datetime.timedelta) else value
    return {"value": value} if _is_plain(value) else {"name": name, "why": f"{type(value).__name__} is no plain value"}


def _made_with(part: Part) -> tuple[str | None, Any]:
    """Import path and arguments; None and the reason, where they cannot be known."""
    value = part.value
    if part.kind == "entry":
        return ":".join(value["class_path"].rsplit(".", 1)), dict(value.get("init_args") or {})
    if part.kind == "path":
        is_class = value == DEFAULT_LOGGER or next(class_bodies(value, until=""), None) is not None
        return (value, {}) if is_class else (None, f"{value} is no class")
    partial = isinstance(value, functools.partial) and isinstance(value.func, type)
    kind = value.func if partial else value if part.kind == "class" else type(value)
    if part.kind == "factory" and not partial:
        return None, "a function makes it"
    path = path_of(kind)
    if path is None:
        return None, "its class is known to this notebook only; put it into a module"
    if partial:
        return path, {**dict(zip(inspect.signature(kind).parameters, value.args, strict=False)), **value.keywords}
    return path, {} if part.kind == "class" else _arguments_of(value)


def _arguments_of(value: Any) -> dict[str, Any] | str:
    """What an instance was made with, or why that cannot be known: it keeps no record.

    What it holds under the names of its parameters is believed only where an object that is made of these anew is the
    same in all that both hold: some classes keep another value than they were given (EarlyStopping turns the sign of
    `min_delta` round).
    """
    kind = type(value)
    bases = {base.__name__: base.__module__ for base in kind.__mro__}
    if "Logger" in bases and (not kind.__module__.startswith("lightning.") or any(name in bases for name in _CONNECT)):
        return "a logger may begin a run when it is made anew"
    try:
        found = {}
        for name, parameter in inspect.signature(kind).parameters.items():
            held = _held_as(value, name, parameter.default)
            if _is_plain(held) and (type(held) is not type(parameter.default) or held != parameter.default):
                found[name] = held
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            again = kind(**found)
    except Exception as error:
        return f"its arguments cannot be told from what it holds ({type(error).__name__})"
    return found if _same(value, again, _DEEPEST) else "what it holds is not what it was made with"


def _held_as(value: Any, name: str, default: Any) -> Any:
    held = vars(value)
    if name in held or f"_{name}" in held:
        found = held.get(name, held.get(f"_{name}"))
    else:
        found = getattr(value, name) if isinstance(getattr(type(value), name, None), property) else default
    return os.fspath(found) if isinstance(found, os.PathLike) else found


def _is_plain(value: Any) -> bool:
    """Whether it can be read back from JSON and YAML: whole numbers as keys too, but no text that looks like one."""
    if isinstance(value, dict):
        keys = all(type(key) is int or (type(key) is str and not key.lstrip("-").isdecimal()) for key in value)
        return keys and all(map(_is_plain, value.values()))
    if type(value) in (list, tuple):
        return all(map(_is_plain, value))
    return type(value) in _PLAIN and (not isinstance(value, float) or math.isfinite(value))


def _same(one: Any, other: Any, depth: int) -> bool:
    if one is other:
        return True
    if type(one) is not type(other) or depth == 0:
        return False
    if isinstance(one, dict):
        return list(one) == list(other) and all(_same(one[key], other[key], depth - 1) for key in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(_same, one, other, [depth - 1] * len(one)))
    if hasattr(one, "tolist"):
        return bool(one.tolist() == other.tolist())
    if isinstance(one, _FUNCTIONS):
        return getattr(one, "__func__", one) is getattr(other, "__func__", other)
    return _same(vars(one), vars(other), depth - 1) if hasattr(one, "__dict__") else bool(one == other)


def own_arguments(config: Config) -> dict[str, Any]:
    """What data of the caller's own is made with: `data.arguments`, unless they belong to a source."""
    return dict(config.data.arguments) if config.data.source is None else {}


def parts_of(module: object, data: object, config: Config) -> tuple[Part, Part]:
    """Module and data as `kit.fit` takes them; without data, a module that makes its loaders itself has its own.

    Raises:
        TargetError: for an import path that leads nowhere.
    """
    part = Part.of(module)
    own = data is None and part.kind != "factory" and brings_loaders(part, config)
    return part, Part("module", part) if own else Part.of(data)


def brings_loaders(module: Part, config: Config) -> bool:
    """Whether a module has a `train_dataloader` of its own, as far as its source tells."""
    if module.kind in ("default", "path"):
        nodes = class_bodies(module.value or config.model.target, until="LightningModule")
        return any(getattr(item, "name", "") == "train_dataloader" for node in nodes for item in node.body)
    kind = module.value if module.kind == "class" else type(module.value)
    own = itertools.takewhile(lambda base: base.__name__ != "LightningModule", kind.__mro__)
    return any("train_dataloader" in vars(base) for base in own)


def is_patch_data(kind: type) -> bool:
    """Whether a data module is kit's own or one that was made from it: those are made with the config."""
    return any(base.__module__ == "kit.data.patches.module" and base.__name__ == "PatchData" for base in kind.__mro__)


def _are_settings(value: Any) -> bool:
    """Whether it is what `Config.replace` takes, and no loaders by name."""
    plain = (str, int, float, bool, dict, type(None))
    return isinstance(value, dict) and bool(value) and all(
        isinstance(key, str) and key.partition(".")[0] in Config.model_fields and ("." in key or isinstance(one, plain))
        for key, one in value.items()
    )  # fmt: skip


def check_parts(module: Part, data: Part, config: Config) -> None:
    """Refuse what could not be made in a rank, before there is one.

    Raises:
        ConfigError: for a module that is none, arguments that do not fit the class, factories that need arguments.
    """
    for name, part in (("module", module), ("data", data)):
        if _are_settings(part.value):
            given = "; ".join(itertools.islice(part.value, 2))
            message = (
                f"{given}: a dict of settings is no {name}; give a config first, such as "
                "kit.fit(kit.Config().replace({'loader.batch_size': 8}), module, data)"
            )
            raise ConfigError([Problem(name, message)])
    if module.kind in ("class", "instance") or (module.kind == "factory" and _is_of_torch(type(module.value))):
        if hasattr(data.value, "training_step") and not hasattr(module.value, "training_step"):
            raise ConfigError([Problem("module", f"{module} and {data} are swapped; give the module first, then data")])
        _check_module(module)
    if module.compiled and config.hardware.strategy.startswith("fsdp"):
        message = (
            "torch.compile of a whole LightningModule does not run with hardware.strategy fsdp, as Lightning refuses "
            "it; give the module itself and compile a part of it, as in self.net = torch.compile(self.net)"
        )
        raise ConfigError([Problem("module", message)])
    if data.kind == "instance":
        _check_data(data.value)
    calls: list[tuple[Part, str, Mapping[str, Any]]] = []
    if module.kind == "class":
        calls.append((module, "model.arguments", config.model.arguments))
    elif module.kind in ("default", "path"):
        _check_arguments(module.value or config.model.target, config.model.arguments)
    if data.kind == "class" and not is_patch_data(data.value):
        calls.append((data, "data.arguments", own_arguments(config)))
    for part, path, arguments in calls:
        _check_call(part, path, arguments, f"; set {path}, or give an instance")
    for part, path in ((module, "module"), (data, "data")):
        if part.kind == "factory":
            _check_call(part, path, {}, "; give functools.partial of it with them")


def warn_of_unused(module: Part, data: Part, config: Config) -> None:
    """Say what changes nothing: arguments where module or data is made already, or by a function, and blocks to be
    checkpointed where none is.

    Data of kit's own names another place in their stead, as in `kit.fit(recipe, data=kit.data.RowData(other))`.
    """
    is_kits = any((base.__module__, base.__name__) == _KITS for base in type(trained_on(data.value)).__mro__)
    own = {} if is_kits else own_arguments(config)
    arguments = {"model.arguments": (module, config.model.arguments), "data.arguments": (data, own)}
    for path, (part, given) in arguments.items():
        if part.kind in ("instance", "factory") and given:
            message = (
                f"{path} ({', '.join(given)}) are not used: {part} is made without them; give its class or an import "
                "path to have it made with them"
            )
            warn_caller(message)
    if config.levers.checkpoint_blocks and not config.levers.gradient_checkpointing:
        warn_caller("levers.checkpoint_blocks changes nothing while levers.gradient_checkpointing is false")


def refuse_unused(module: Part, data: Part, changes: Mapping[str, Any]) -> None:
    """Refuse changes of arguments with which nothing is made.

    Raises:
        ConfigError: naming the part that is made already, or by a function.
    """
    for path, part in (("model.arguments", module), ("data.arguments", data)):
        if part.kind in ("instance", "factory") and any(one.startswith(path) for one in changes):
            message = f"changes nothing, as {part} is made without them; give its class or an import path"
            raise ConfigError([Problem(path, message)])


def _check_call(part: Part, path: str, arguments: Mapping[str, Any], way_out: str = "") -> None:
    """Refuse a class or function that cannot be called with these arguments."""
    try:
        signature = inspect.signature(part.value)
    except (TypeError, ValueError):
        return
    try:
        signature.bind(**arguments)
    except TypeError as error:
        takes_any = any(one.kind is one.VAR_KEYWORD for one in signature.parameters.values())
        unknown = None if takes_any else next((name for name in arguments if name not in signature.parameters), None)
        takes = ", ".join(str(one).partition(":")[0].partition("=")[0].strip() for one in signature.parameters.values())
        cause, hint = f"{error}; it takes ({takes})", ""
        if unknown is not None:  # said first, as a typo leaves another one missing
            cause = f"it takes ({takes}) and no {unknown!r}"
            hint = did_you_mean(unknown, signature.parameters, otherwise="")
        message = f"{part} cannot be made: {cause}{way_out}{hint}"
        raise ConfigError([Problem(path, message)]) from None


def _check_arguments(target: str, arguments: Mapping[str, Any]) -> None:
    """Refuse arguments that a module at an import path is seen not to take; its source is read, and not run."""
    if not arguments or takes_any(target):
        return
    known = signature_of(target) or {}
    unknown = [name for name in arguments if name not in known]
    if unknown:
        message = f"{target} takes no {unknown[0]!r}{did_you_mean(unknown[0], known, otherwise='')}"
        raise ConfigError([Problem("model.arguments", f"{message}; it takes {', '.join(known) or 'none'}")])


def _is_of_torch(kind: type) -> bool:
    """Whether it is a class of models: those are callable, but make nothing."""
    return any((base.__module__, base.__name__) == ("torch.nn.modules.module", "Module") for base in kind.__mro__)


def _check_module(module: Part) -> None:
    """Refuse what Lightning would refuse, before a process starts and where the caller can read it."""
    kind = module.value if module.kind == "class" else type(module.value)
    base = next((base for base in kind.__mro__ if base.__name__ == "LightningModule"), None)
    if base is None:
        message = f"{kind.__name__} is no LightningModule, whose training_step(batch, batch_idx) returns a loss"
        if kind.__name__ == "OptimizedModule":
            message += "; give the module itself, and compile a part of it, as in self.net = torch.compile(self.net)"
        elif _is_of_torch(kind):
            message += "; write one that holds it, with training_step and configure_optimizers"
        raise ConfigError([Problem("module", message)])
    own = set() if module.kind == "class" else set(vars(module.value))
    hooks = [hook for hook in ("training_step", "configure_optimizers") if hook not in own]
    absent = [hook for hook in hooks if hook in vars(base) and getattr(kind, hook, None) is vars(base)[hook]]
    if absent:
        message = f"{kind.__name__} has no {' and no '.join(absent)}, and cannot be trained without; write it"
        raise ConfigError([Problem("module", message)])


def _check_data(value: Any) -> None:
    values = value if isinstance(value, tuple) else (value,)
    arrays = [one for one in values if type(one).__module__.partition(".")[0] in _OF_ARRAYS and hasattr(one, "shape")]
    if arrays:
        message = (
            f"{type(arrays[0]).__name__} holds values and makes no batches; give "
            "torch.utils.data.TensorDataset(inputs, targets), kit.data.RowData(values) or a DataLoader"
        )
        raise ConfigError([Problem("data", message)])
    if isinstance(value, types.GeneratorType):
        message = "a generator gives one epoch, and to one process; give the function that makes it, or a DataLoader"
        raise ConfigError([Problem("data", message)])
    if isinstance(value, list | dict):
        _check_several(value)
    if isinstance(value, tuple):
        _check_pair(value)
    elif not any(hasattr(value, mark) for mark in ("train_dataloader", "__iter__", "__getitem__")):
        given = f"{type(value).__name__} {os.fspath(value)}" if isinstance(value, os.PathLike) else type(value).__name__
        message = f"{given} is neither a data module nor a loader nor a data set; give one, or a function that makes it"
        raise ConfigError([Problem("data", message)])


def _check_several(given: list[Any] | dict[str, Any]) -> None:
    """Refuse batches where Lightning combines loaders, and nothing at all."""
    values = [*given.values()] if isinstance(given, dict) else given
    parts = [one for value in values for one in (value if isinstance(value, list | tuple) else [value])]
    holds_values = any(type(one).__module__.partition(".")[0] in _OF_ARRAYS and hasattr(one, "shape") for one in parts)
    if not values or holds_values:
        found = "samples or batches" if holds_values else "nothing"
        way_out = "of samples give DataLoader(samples, batch_size=...), of batches DataLoader(batches, batch_size=None)"
        message = f"a {type(given).__name__} of {found}, where Lightning combines loaders; {way_out}"
        raise ConfigError([Problem("data", message)])


def _check_pair(values: tuple[Any, ...]) -> None:
    wrong = [type(one).__name__ for one in values if not hasattr(one, "__iter__") and not hasattr(one, "__getitem__")]
    if wrong or len(values) != 2:
        found = wrong[0] if wrong else f"{len(values)} values"
        message = f"a tuple with {found}; give (training, validation), each a loader or a data set"
        raise ConfigError([Problem("data", message)])


def pack(module: Part, data: Part, trainer: TrainerParts | None = None) -> bytes:
    """The payload of a run.

    Raises:
        ConfigError: naming the object that cannot be sent, and where it was found.
    """
    trainer = trainer or TrainerParts()
    more = [("logger", part) for part in trainer.loggers] + [("callbacks", part) for part in trainer.callbacks]
    more += [(f"trainer.{name}", Part("instance", value)) for name, value in trainer.flags.items()]
    for name, part in (("module", module), ("data", data), *more):
        try:
            cloudpickle.dumps(part)
        except Exception as error:
            raise ConfigError([Problem(name, why_not_sent(part, error))]) from error
    whole = {"module": module, "data": data, "trainer": trainer, "cells": cells()}
    return cloudpickle.dumps(whole, protocol=5)  # type: ignore[no-any-return]


def unpack(payload: bytes) -> dict[str, Any]:
    """What `pack` packed, of a run whose signature was looked at (`kit.trial.directory.contents_to_run`)."""
    found: dict[str, Any] = cloudpickle.loads(payload)
    return found


def why_not_sent(part: Part, error: Exception) -> str:
    """Why a part cannot be pickled, naming what it holds that cannot."""
    culprit = _culprit(part.value)
    found = f"{culprit} cannot be pickled" if culprit else f"{type(error).__name__}: {error}"
    way_out = "give the class or a function that makes it, as kit.fit(config, Class), or make it in setup"
    return f"{part} cannot be sent to the ranks: {found}; {way_out}"


def _culprit(value: Any) -> str:
    """The attribute, captured variable or global that does not pickle, with its type."""
    for name, item in _held_by(value):
        try:
            cloudpickle.dumps(item)
        except Exception:
            inner = "" if isinstance(item, type) else _culprit(item)
            return f"{name} ({inner or type(item).__name__})"
    return ""


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
    left = _SOURCE_BYTES
    for file, number in reversed(list(names.items())):
        source = "".join(linecache.getlines(file))
        left -= len(source)
        if left < 0:
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
    def note(self) -> str:
        """What a user should know; empty where the config's number runs."""
        if self.by_config or self.size == self.asked:
            return ""
        if self.size is None:
            return f"{BATCH} is {self.asked}, but {self.whose} may make batches of another size, which are used"
        if not self.is_worth_a_warning:
            return f"{self.whose} makes batches of {self.size}, whatever {BATCH} says"
        return (
            f"{BATCH} is {self.asked}, but {self.whose} makes batches of {self.size}, which are used; set "
            f"{BATCH}: {self.size}, make that loader with {self.asked}, or give a Dataset, whose loader kit makes"
        )

    def made(self, size: int) -> BatchRule:
        """The same once the batches are known."""
        return replace(self, size=size)

    @property
    def is_worth_a_warning(self) -> bool:
        """Whether another number is known to run than somebody chose; nobody chose the default, which is noted only."""
        ignored = not self.by_config and self.size not in (None, self.asked)
        return ignored and self.asked != Config().loader.batch_size

    def warn(self) -> None:
        if self.is_worth_a_warning:
            warn_caller(self.note)

    @classmethod
    def of_environment(cls, environment: Mapping[str, Any]) -> BatchRule | None:
        """As a run directory keeps it; None in runs that keep none."""
        kept = environment.get("batch")
        if not isinstance(kept, Mapping) or not isinstance(kept.get("asked"), int):
            return None
        return cls(asked=kept["asked"], size=_whole(kept.get("size")), whose=str(kept.get("whose", "")))


def batch_rule(data: Part, config: Config) -> BatchRule:
    """The rule for `data` as `kit.fit` takes it."""
    asked, value = config.loader.batch_size, trained_on(data.value)
    known: Mapping[str, Any] = own_arguments(config) if data.kind in ("class", "path") else {}
    if isinstance(value, functools.partial):
        known, value = value.keywords, value.func
    kind = type(value) if data.kind == "instance" else value if isinstance(value, type) else None
    bases = [(base.__module__, base.__name__) for base in (() if kind is None else kind.__mro__)]
    if data.kind == "default" or _DATASET in bases or (data.kind == "class" and _PATCHES in bases):
        return BatchRule(asked=asked, size=asked, whose="")
    if _KITS not in bases:
        size = _declared(value) if data.kind == "instance" else _argument(kind, known)
    elif data.kind != "instance":  # takes the config that it is trained under, less what it was given
        size = None if _PATCHES in bases else _whole(known.get("batch_size")) or asked
    elif hasattr(value, "use_config"):
        size = int(value._given.get(BATCH, asked))
    else:
        size = int(value.config.loader.batch_size)
    return BatchRule(asked=asked, size=size, whose=f"the data of {data}" if kind is None else f"your {kind.__name__}")


_DATASET = ("torch.utils.data.dataset", "Dataset")
_KITS, _PATCHES = ("kit.data.patches.module", "EpochData"), ("kit.data.patches.module", "PatchData")
"""Known by name, as the kernel imports no torch for it."""


def _declared(data: Any) -> int | None:
    """The batch size that a loader or data module has as an attribute."""
    holders = (data, getattr(data, "batch_sampler", None), getattr(data, "hparams", None))
    sizes = (_whole(getattr(holder, "batch_size", None)) for holder in holders)
    return next((size for size in sizes if size is not None), None)


def _argument(kind: type | None, known: Mapping[str, Any]) -> int | None:
    """The `batch_size` that a class is made with, or its default."""
    if "batch_size" in known or kind is None:
        return _whole(known.get("batch_size"))
    with contextlib.suppress(KeyError, TypeError, ValueError):
        return _whole(inspect.signature(kind).parameters["batch_size"].default)
    return None


def _whole(value: Any) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) and value > 0 else None


def takes_config(target: str) -> bool:
    """Whether data takes what it was not given from the config of a committed file, as far as its source tells."""
    return any(node.name == "ConfiguredData" for node in class_bodies(target, until="LightningDataModule"))


def shards_itself(target: str) -> bool:
    """Whether a class shards its layers in `configure_model`, as far as its source tells."""
    functions = (item for node in class_bodies(target, until="LightningModule") for item in node.body)
    makers = (item for item in functions if isinstance(item, ast.FunctionDef) and item.name == "configure_model")
    return any(tells_of_sharding(ast.unparse(item)) for item in makers)


def is_manual(target: str) -> bool:
    """Whether a class sets `automatic_optimization` to False, as far as its source tells."""
    return any(map(_sets_manual, class_bodies(target, until="LightningModule")))


def optimizes_manually(module: Any, config: Config) -> bool:
    """The same of a module as `kit.fit` takes it; a function that makes one does not tell, and counts as no."""
    part = Part.of(module)
    if part.kind == "instance":
        return not getattr(part.value, "automatic_optimization", True)
    if part.kind == "class":
        return any(map(_sets_manual, _written_classes(part.value)))
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


def _sets_manual(node: ast.ClassDef) -> bool:
    functions = (item for item in node.body if isinstance(item, ast.FunctionDef))
    selves = {arguments[0].arg for one in functions if (arguments := (*one.args.posonlyargs, *one.args.args))}
    for item in ast.walk(node):
        if isinstance(item, ast.Assign) and isinstance(item.value, ast.Constant) and item.value.value is False:
            names = {ast.unparse(part) for part in item.targets}
            if names & {"automatic_optimization", *(f"{name}.automatic_optimization" for name in selves)}:
                return True
    return False
