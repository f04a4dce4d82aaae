"""Sizes by dimension name, as people write them, turned into tuples in dimension order, or refused with the way out."""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from kit.errors import PlanError


def named_shape(dims: Sequence[str], shape: Sequence[int]) -> tuple[tuple[str, ...], tuple[int, ...]]:
    """Raises: PlanError: unless every dimension has one name and one size."""
    names, extents = tuple(dims), tuple(int(extent) for extent in shape)
    if not names or len(names) != len(extents) or len(set(names)) != len(names):
        raise PlanError(f"dims {names} and shape {extents} must name each dimension once and have equal lengths")
    return names, extents


def ordered(what: str, sizes: Mapping[str, int], dims: Sequence[str], default: Sequence[int]) -> tuple[int, ...]:
    """A mapping of sizes as a tuple in dimension order.

    Raises:
        PlanError: for an unknown dimension or a size that is no whole number from 1.
    """
    for problem in _unfit(what, sizes, dims):
        raise PlanError(problem)
    return tuple(int(sizes.get(name, size)) for name, size in zip(dims, default, strict=True))


def _unfit(what: str, sizes: Mapping[str, Any], dims: Sequence[str]) -> Iterator[str]:
    for name, size in sizes.items():
        if name not in dims:
            close = difflib.get_close_matches(name, dims, n=1)
            hint = f"did you mean {close[0]!r}?" if close else f"the dimensions are {', '.join(dims)}"
            yield f"{what}: the array has no dimension {name!r}; {hint}"
        if isinstance(size, bool) or not isinstance(size, int) or size < 1:
            yield f"{what}.{name} is {size!r}, but must be a whole number of elements, at least 1"


def check_patch(what: str, dims: Sequence[str], shape: Sequence[int], patch: Sequence[int]) -> None:
    """Raises: PlanError: for a patch larger than the array."""
    for name, extent, size in zip(dims, shape, patch, strict=True):
        if size > extent:
            raise PlanError(
                f"{what}.{name} is {size}, larger than the array's {extent}; take a patch of at most {extent} along it"
            )
