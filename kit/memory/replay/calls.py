"""OperatorCall: one operator as it was called, with tensors as their shapes: what decides how long it takes.

A recording holds each distinct call once. Calls travel as JSON values, so that a kernel without torch can price them,
and a process with torch can make them again with tensors of its own.

Every dimension of a tensor grows in proportion to the batch or not at all, so two recordings at two batch sizes give
the calls at any other (`calls_at`). Numbers among the arguments grow alike: a view's size holds the batch too.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from kit.errors import PlanError

ELEMENT_BYTES = {
    "float32": 4, "bfloat16": 2, "float16": 2, "float64": 8, "int64": 8, "int32": 4, "int16": 2, "int8": 1, "uint8": 1,
    "bool": 1, "complex64": 8, "complex128": 16, "float8_e4m3fn": 1, "float8_e5m2": 1,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """A tensor without its numbers."""

    shape: tuple[int, ...]
    dtype: str
    strides: tuple[int, ...] | None = None
    """None where it is contiguous."""

    @property
    def elements(self) -> int:
        count = 1
        for size in self.shape:
            count *= size
        return count

    @property
    def bytes(self) -> int:
        """Of memory that is read or written; an expanded tensor holds fewer elements than it shows."""
        count = 1
        for size, stride in zip(self.shape, self.strides or self.shape, strict=True):
            count *= size if self.strides is None or stride else 1
        return count * ELEMENT_BYTES.get(self.dtype, 4)


_TENSOR = "t"
"""Key of a tensor among JSON values: {"t": [shape, dtype, strides]}."""
Value = Any
"""A JSON value, in which tensors are `TensorSpec`."""


@dataclass(frozen=True)
class OperatorCall:
    """An operator and what it was given; equal calls take equally long."""

    operator: str
    """Name with namespace and overload, such as `aten::add.Tensor`."""
    arguments: tuple[Value, ...]
    """By place."""
    named: tuple[tuple[str, Value], ...]
    """By name."""
    results: tuple[Value, ...]

    @classmethod
    def of(cls, value: Any) -> OperatorCall:
        """From the JSON value of a recording."""
        name, arguments, named, results = value
        return cls(
            operator=str(name), arguments=tuple(map(_decode, arguments)),
            named=tuple((str(key), _decode(item)) for key, item in named), results=tuple(map(_decode, results)),
        )  # fmt: skip

    @property
    def name(self) -> str:
        """Without namespace and overload, such as `add`."""
        return self.operator.partition("::")[2].partition(".")[0]

    @cached_property
    def inputs(self) -> tuple[TensorSpec, ...]:
        return tuple(_tensors((self.arguments, tuple(value for _, value in self.named))))

    @cached_property
    def outputs(self) -> tuple[TensorSpec, ...]:
        return tuple(_tensors(self.results))

    def to_json(self) -> list[Any]:
        """What `of` reads."""
        named = [[key, _encode(value)] for key, value in self.named]
        return [self.operator, [*map(_encode, self.arguments)], named, [*map(_encode, self.results)]]


def _decode(value: Any) -> Value:
    if isinstance(value, dict):
        shape, dtype, strides = value[_TENSOR]
        return TensorSpec(tuple(shape), dtype, None if strides is None else tuple(strides))
    return tuple(map(_decode, value)) if isinstance(value, list | tuple) else value


def _encode(value: Value) -> Any:
    if isinstance(value, TensorSpec):
        return {_TENSOR: [list(value.shape), value.dtype, None if value.strides is None else list(value.strides)]}
    return [*map(_encode, value)] if isinstance(value, tuple) else value


def _tensors(value: Value) -> Iterator[TensorSpec]:
    if isinstance(value, TensorSpec):
        yield value
    elif isinstance(value, tuple):
        for item in value:
            yield from _tensors(item)


def calls_at(pairs: Sequence[tuple[Any, Any]], samples: float) -> list[Any]:
    """The calls of pairs of recordings at a third batch size.

    Args:
        pairs: The JSON values of one call in the first recording and in the second.
        samples: (wanted batch - first batch) / (second batch - first batch).

    Raises:
        PlanError: where two calls differ in more than numbers.
    """
    return [_affine(first, second, samples) for first, second in pairs]


def _affine(first: Any, second: Any, samples: float) -> Any:
    if first == second:
        return first
    if isinstance(first, dict) and isinstance(second, dict):
        return {key: _affine(first[key], second[key], samples) for key in first}
    if isinstance(first, list | tuple) and isinstance(second, list | tuple) and len(first) == len(second):
        return [_affine(one, other, samples) for one, other in zip(first, second, strict=True)]
    if isinstance(first, int) and isinstance(second, int):
        return max(0, round(first + (second - first) * samples))
    if isinstance(first, float) and isinstance(second, float):
        return second  # such as the divisor of a mean, which costs nothing
    raise PlanError(f"a call has {first!r} in one recording and {second!r} in the other")
