"""The order of arguments that every function shares which runs or predicts something: config, module, data.

The config comes first and may be left out: `kit.fit(MyModule(), loader)` runs with the defaults. The order of kit 0.1,
`fit(module, data, config)`, still works and warns.
"""

from __future__ import annotations

import functools
import inspect
import warnings
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

from kit.config import Config
from kit.errors import ConfigError

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
            message = f"{name} takes a Config first, got {type(config).__name__}; call {name}(config, module, data)"
            raise ConfigError(message)
        return function(config, *others, **named)  # type: ignore[arg-type]

    return call
