"""The order of arguments that every function shares which runs or predicts something: config, module, data.

The config comes first and may be left out: `kit.fit(MyModule(), loader)` runs with the defaults. The order of kit 0.1,
`fit(module, data, config)`, still works and warns.
"""

from __future__ import annotations

import functools
import inspect
import numbers
import os
import warnings
from collections.abc import Callable, Iterable, Mapping
from typing import Any, ParamSpec, TypeVar

from kit.config import Config, paths_of
from kit.errors import ArgumentError, ConfigError, Problem, did_you_mean

P = ParamSpec("P")
R = TypeVar("R")


def config_first(function: Callable[P, R]) -> Callable[P, R]:
    """Let a function of (config, module, data, ...) be called without a config, and in the order of kit 0.1.

    The function always gets a `Config`: the default one where the caller gave none. What reaches it otherwise is
    refused with a `ConfigError`, and an argument that it does not have with what was probably meant.
    """
    name, signature = function.__name__, inspect.signature(function)
    known = signature.parameters
    places = [one for one in known.values() if one.kind is one.POSITIONAL_OR_KEYWORD]

    @functools.wraps(function)
    def call(*given: Any, **named: Any) -> R:
        check_named(name, named, known)
        if given and (given[0] is None or isinstance(given[0], Config)):
            config, *others = given
        elif len(given) > 2 and (given[2] is None or isinstance(given[2], Config)):
            message = f"{name}(module, data, config) is the order of kit 0.1; give {name}(config, module, data)"
            warnings.warn(message, DeprecationWarning, stacklevel=2)
            config, others = given[2], [*given[:2], *given[3:]]
        else:
            config, others = named.pop("config", None), list(given)
        if len(others) >= len(places):  # as many as there are, so the first was meant for a config
            if isinstance(config, Config) or hasattr(others[0], "training_step"):
                most, pair = len(places) - 1, f"{name}(config, module, (training, validation))"
                raise ArgumentError(f"{name} takes {most} arguments beside the config; give loaders as {pair}")
            config = others[0]
        config = Config() if config is None else config
        if not isinstance(config, Config):
            raise no_config(name, config, f"call {name}(config, module, data)")
        if any(isinstance(one, Config) for one in others):
            raise ConfigError(f"{name} takes the Config first; call {name}(config, module, data)")
        if others:
            refuse_recipe(name, others[0], f"call {name}(config, module, data)")
        check_call(name, signature, (config, *others), named)
        return function(config, *others, **named)  # type: ignore[arg-type]

    return call


def check_count(name: str, given: Any, most: int) -> None:
    """Refuse what is no whole number of devices or ranks, under the name that the user wrote.

    Raises:
        ConfigError: for what is no whole number, and for one below 1 or above `most`.
    """
    if isinstance(given, bool) or not isinstance(given, numbers.Integral):
        raise ConfigError([Problem(name, f"{given!r} is no whole number; give one from 1 to {most:,}")])
    if not 1 <= int(given) <= most:
        raise ConfigError([Problem(name, f"is {given}; give a number from 1 to {most:,}")])


def takes_config(function: Callable[P, R]) -> Callable[P, R]:
    """Let a function whose first argument is a Config refuse everything else; None stays None where it may be left out.

    Raises:
        ConfigError: with what reads or makes one.
    """
    name, signature = function.__name__, inspect.signature(function)
    is_needed = next(iter(signature.parameters.values())).default is inspect.Parameter.empty

    @functools.wraps(function)
    def call(*given: P.args, **named: P.kwargs) -> R:
        check_named(name, named, signature.parameters)
        first = given[0] if given else named.get("config")
        if not isinstance(first, Config) and (first is not None or is_needed):
            raise no_config(name, first, f"call {name}(config)")
        check_call(name, signature, given, named)
        return function(*given, **named)

    return call


def checks_arguments(function: Callable[P, R]) -> Callable[P, R]:
    """Let a function that takes no config, or makes an instance, refuse what `check_named` and `check_call` refuse."""
    name, signature = function.__name__, inspect.signature(function)
    own = int(name == "__init__")  # the instance, which is nothing that a caller gives
    if own:
        name = function.__qualname__.split(".")[0]
        signature = signature.replace(parameters=[*signature.parameters.values()][own:])

    @functools.wraps(function)
    def call(*given: P.args, **named: P.kwargs) -> R:
        check_named(name, named, signature.parameters)
        check_call(name, signature, given[own:], named)
        return function(*given, **named)

    return call


def check_call(name: str, signature: inspect.Signature, given: Iterable[Any], named: Mapping[str, Any]) -> None:
    """Refuse arguments that are too many, left out or given twice, and by place what `check_named` refuses by name.

    Raises:
        ArgumentError: naming them, and what the function takes.
    """
    try:
        bound = signature.bind(*given, **named)
    except TypeError as error:
        raise ArgumentError(f"{name}: {error}; it takes {', '.join(signature.parameters)}") from None
    check_named(name, bound.arguments, signature.parameters)


def check_named(name: str, named: Mapping[str, Any], known: Mapping[str, inspect.Parameter]) -> None:
    """Refuse arguments that a function does not have, with what was meant, and what is no number where it takes one.

    Raises:
        ArgumentError: naming them.
    """
    problems = []
    is_open = any(one.kind is one.VAR_KEYWORD for one in known.values())
    for given, value in named.items():
        parameter = known.get(given)
        if parameter is None:
            message = "" if is_open else f"{name} takes no such argument{_meant(given, known)}"
        else:
            annotation, _, optional = str(parameter.annotation).partition(" | ")
            kind, words = _NUMBERS.get(annotation if optional in ("", "None") else "", (object, ""))
            is_number = isinstance(value, kind) and not isinstance(value, bool)
            passes = not words or is_number or given in _COUNTS or (value is None and optional == "None")
            message = "" if passes else f"{value!r} is no {words}; give one"
        problems += [Problem(given, message)] * bool(message)
    if problems:
        raise ArgumentError(problems)


_NUMBERS: dict[str, tuple[type, str]] = {"int": (numbers.Integral, "whole number"), "float": (numbers.Real, "number")}
"""What a parameter takes, by its annotation."""
_COUNTS = ("devices", "world_size")
"""What `check_count` looks at, with the bounds."""


_CALLED = {
    **dict.fromkeys(("model", "lightning_module", "pl_module"), ("module", "module=")),
    **dict.fromkeys(
        ("datamodule", "dataloader", "dataloaders", "loader", "dataset", "train_dataset", "train_dataloader",
         "train_dataloaders", "train_loader"), ("data", "data="),
    ),
    **dict.fromkeys(
        ("val_dataloader", "val_dataloaders", "val_loader", "eval_dataset", "validation_data", "val_data"),
        ("data", "data=(training, validation)"),
    ),
    **dict.fromkeys(("devices", "num_devices", "n_gpus", "gpus", "ranks"), ("world_size", "world_size=")),
    **dict.fromkeys(("args", "cfg", "conf", "settings"), ("config", "config=")),
}  # fmt: skip
"""What other libraries call an argument: its name, and how it is given."""


def _meant(given: str, known: Mapping[str, inspect.Parameter]) -> str:
    """The end of an error about an argument that a function does not have."""
    called, how = _CALLED.get(given.lower(), ("", ""))
    if called in known:
        return f"; give {how}"
    fields = paths_of(given)
    if fields and "config" in known:
        said = f"; {' or '.join(fields)} of the config says it: config.replace({{{fields[0]!r}: ...}})"
        return said + did_you_mean(given, known, otherwise="", cutoff=0.75)
    more = f"; what lightning.pytorch's Trainer takes goes into trainer={{{given!r}: ...}}" * ("trainer" in known)
    return did_you_mean(given, known) + more


def refuse_recipe(name: str, given: object, way_out: str) -> None:
    """Refuse the path of a recipe that stands where a config does; any other text may be an import path.

    Raises:
        ConfigError: for a path of a YAML file, with what reads it.
    """
    if isinstance(given, str | os.PathLike) and str(given).endswith((".yaml", ".yml")):
        raise no_config(name, given, way_out)


def no_config(name: str, given: object, way_out: str) -> ConfigError:
    """The error that something stands where a Config does."""
    if isinstance(given, str | os.PathLike):
        text = str(given)
        return ConfigError(f"{name} takes a Config first, got {text!r}; kit.Config.load({text!r}) reads one")
    if isinstance(given, Mapping):
        way_out = "kit.Config().replace(...) takes settings by dotted path, kit.Config.make(...) nested ones"
    return ConfigError(f"{name} takes a Config first, got {type(given).__name__}; {way_out}")
