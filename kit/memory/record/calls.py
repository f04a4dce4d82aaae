"""CallLog: the distinct calls of a step, numbered, as `kit.memory.replay.calls` reads them.

A call is what an operator was given and gave, with tensors as shapes; two calls with equal shapes and equal numbers
are one. What no JSON value can hold (a generator, a device) is left out as None: it costs no time.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


class CallLog:
    """Numbers calls in the order in which they are first seen."""

    def __init__(self) -> None:
        self.calls: list[Any] = []
        """JSON values."""
        self._numbers: dict[Any, int] = {}

    def number(self, name: str, args: tuple[Any, ...], named: dict[str, Any] | None, out: Any) -> int:
        """The number of this call."""
        results = out if isinstance(out, tuple) else (out,)
        key = (
            name, tuple(map(_key, args)), tuple((word, _key(value)) for word, value in (named or {}).items()),
            tuple(map(_key, results)),
        )  # fmt: skip
        number = self._numbers.get(key)
        if number is None:
            number = self._numbers[key] = len(self.calls)
            self.calls.append(_json(key))
        return number


class _Spec(tuple[Any, ...]):
    """(shape, dtype, strides or None) of a tensor."""

    __slots__ = ()


_DTYPES: dict[torch.dtype, str] = {}


def _key(value: Any) -> Any:
    """Something hashable that is equal for equal costs."""
    if isinstance(value, Tensor):
        try:
            strides = (
                None if value.layout is not torch.strided or value.is_contiguous() else tuple(map(int, value.stride()))
            )
            shape = tuple(map(int, value.shape))
        except Exception:  # a subclass without either, or a size that no number is known of
            return None
        dtype = _DTYPES.get(value.dtype) or _DTYPES.setdefault(value.dtype, str(value.dtype).removeprefix("torch."))
        return _Spec((shape, dtype, strides))
    if isinstance(value, list | tuple):
        return tuple(map(_key, value))
    if value is None or isinstance(value, bool | int | float | str):
        return value
    return str(value) if isinstance(value, torch.dtype | torch.memory_format) else None


def _json(key: Any) -> Any:
    if isinstance(key, _Spec):
        shape, dtype, strides = key
        return {"t": [list(shape), dtype, None if strides is None else list(strides)]}
    return [*map(_json, key)] if isinstance(key, tuple) else key
