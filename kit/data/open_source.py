"""The source that a config names, or that a caller has in hand.

`data.source` names a class or function by import path, or a place where data lies (`kit.data.places`). What a function
returns, or a caller has in hand, may also be an xarray object or a numpy array; it is wrapped.
"""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Mapping
from typing import Any

import numpy as np

from kit.config import Config
from kit.data.places import open_place
from kit.data.source import Source, check_source, source_error
from kit.errors import KitError
from kit.targets import load_target


def load_source(config: Config, given: Any = None) -> Source:
    """The source a config names, made with its arguments; or the one given, wrapped where it needs to be.

    Raises:
        TargetError: when `data.source` cannot be found.
        StoreError: when it is a place that cannot be opened.
        ConfigError: when it is empty, its arguments do not fit, or what it makes is no source.
    """
    if given is not None:
        return as_source(given)
    if config.data.source is None or not config.data.source.strip():
        raise source_error("source", "empty, so there is nothing to build from; give path/to/file.py:Name, or a place")
    make: Any = open_place(config.data.source) or load_target(config.data.source)
    arguments = config.data.arguments
    _check_arguments(make, arguments)
    try:
        made = make(**arguments)
    except KitError:
        raise
    except Exception as error:
        raise source_error(
            "arguments", f"{config.data.source} refused them: {type(error).__name__}: {error}"
        ) from error
    return as_source(made)


def as_source(made: Any) -> Source:
    """`made` itself, or an xarray object or array as a source.

    Raises:
        ConfigError: when it is no source.
    """
    kind = type(made)
    if kind.__module__.partition(".")[0] == "xarray":
        from kit.data.xarray_source import XarraySource

        made = XarraySource(made)
    elif isinstance(made, np.ndarray):
        from kit.data.array_source import ArraySource

        made = ArraySource(made)
    check_source(made)
    return made  # type: ignore[no-any-return]


def _check_arguments(make: Any, arguments: Mapping[str, Any]) -> None:
    try:
        known = inspect.signature(make).parameters
    except (TypeError, ValueError):
        return
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in known.values()):
        return
    for name in arguments:
        if name not in known:
            close = difflib.get_close_matches(name, known, n=1)
            hint = f"did you mean {close[0]!r}?" if close else f"it takes {', '.join(known) or 'none'}"
            raise source_error("arguments", f"the source takes no argument {name!r}; {hint}")
