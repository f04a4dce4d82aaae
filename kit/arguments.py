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
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

from kit.config import Config
from kit.errors import ConfigError, Problem

P = ParamSpec("P")
R = TypeVar("R")


def config_first(function: Callable[P, R]) -> Callable[P, R]:
    """Let a function of (config, module, data, ...) be called without a config, and in the order of kit 0.1.

    The function always gets a `Config`: the default one where the caller gave none. What reaches it otherwise is
    refused with a `ConfigError`.
    """
    name = function.__name__
    places = [one for one in inspect.signature(function).parameters.values() if one.kind is one.POSITIONAL_OR_KEYWORD]

    @functools.wraps(function)
    def call(*given: Any, **named: Any) -> R:
        if given and (given[0] is None or isinstance(given[0], Config)):
            config, *others = given
        elif len(given) > 2 and (given[2] is None or isinstance(given[2], Config)):
            message = f"{name}(module, data, config) is the order of kit 0.1; give {name}(config, module, data)"
            warnings.warn(message, DeprecationWarning, stacklevel=2)
            config, others = given[2], [*given[:2], *given[3:]]
        else:
            config, others = named.pop("config", None), list(given)
        if len(others) >= len(places):  # as many as there are, so the first was meant for a config
            config = others[0]
        config = Config() if config is None else config
        if not isinstance(config, Config):
            raise _no_config(name, config, f"call {name}(config, module, data)")
        if any(isinstance(one, Config) for one in others):
            raise ConfigError(f"{name} takes the Config first; call {name}(config, module, data)")
        if others:
            refuse_recipe(name, others[0], f"call {name}(config, module, data)")
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
    """Let a function whose first argument is a Config refuse everything else with a `ConfigError`; None stays None."""
    name = function.__name__

    @functools.wraps(function)
    def call(*given: P.args, **named: P.kwargs) -> R:
        first = given[0] if given else named.get("config")
        if first is not None and not isinstance(first, Config):
            raise _no_config(name, first, f"call {name}(config)")
        return function(*given, **named)

    return call


def refuse_recipe(name: str, given: object, way_out: str) -> None:
    """Refuse the path of a recipe that stands where a config does; any other text may be an import path.

    Raises:
        ConfigError: for a path of a YAML file, with what reads it.
    """
    if isinstance(given, str | os.PathLike) and str(given).endswith((".yaml", ".yml")):
        raise _no_config(name, given, way_out)


def _no_config(name: str, given: object, way_out: str) -> ConfigError:
    if isinstance(given, str | os.PathLike):
        text = str(given)
        return ConfigError(f"{name} takes a Config first, got {text!r}; kit.Config.load({text!r}) reads one")
    return ConfigError(f"{name} takes a Config first, got {type(given).__name__}; {way_out}")
