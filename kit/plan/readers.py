"""Other readers of the same data: named patterns with weights, and what one layout costs each beside its own best.

A store that trains a model is also read for maps, or for time series at one place. Each reader is a pattern (patch,
order, stride, batch size) and a weight: the share of all reading time it would take if every reader had its own best
layout, relative to the plan's own pattern, which weighs 1. So the time of everything with one layout, over the time
with a layout for each, is the weighted mean of the readers' slowdowns; planning makes that smallest. All readers have
the same network and host, and nothing is shared between them."""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

from kit.errors import PlanError
from kit.plan.access import Access, Order
from kit.plan.cost import LayoutCost
from kit.plan.named_sizes import check_patch, ordered

OWN = "this plan's"
"""Name of the plan's own pattern among the readers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reader:
    """One pattern and how much it counts."""

    name: str
    access: Access
    weight: float


@dataclass(frozen=True, slots=True, kw_only=True)
class ReaderCost:
    """What the chosen layout costs one reader, beside its own best."""

    name: str
    patch: tuple[int, ...]
    weight: float
    cost: LayoutCost
    """With the chosen layout."""
    best: LayoutCost
    """With the layout that is best for this reader alone, under the same rules."""

    @property
    def slowdown(self) -> float:
        """Seconds with the chosen layout over seconds with the reader's own."""
        return self.cost.seconds_per_batch / self.best.seconds_per_batch


@dataclass(frozen=True, slots=True, kw_only=True)
class _Fields:
    """What a reader is described by; the fields of a `readers` entry."""

    patch: Mapping[str, int]
    order: Order = "random"
    stride: Mapping[str, int]
    batch_size: int = 1
    shuffle: bool = True
    weight: float = 1.0


def readers_of(given: Mapping[str, Mapping[str, Any]], own: Access, dims: Sequence[str]) -> tuple[Reader, ...]:
    """The readers described by `{name: {patch: {...}, weight: ..., order: ..., stride: {...}, batch_size: ...}}`.

    Raises:
        PlanError: for an unknown field, a weight or patch that cannot be, under `readers.<name>`.
    """
    return tuple(_reader(name, entry, own, dims) for name, entry in given.items())


def _reader(name: str, entry: Mapping[str, Any], own: Access, dims: Sequence[str]) -> Reader:
    where = f"readers.{name}"
    if not isinstance(entry, Mapping) or not isinstance(entry.get("patch"), Mapping):
        raise PlanError(f"{where} needs a patch, such as {{patch: {{{dims[0]}: 1}}, weight: 1}}")
    known = [field.name for field in fields(_Fields)]
    for key in entry:
        if key not in known:
            close = difflib.get_close_matches(key, known, n=1)
            hint = f"did you mean {close[0]!r}?" if close else f"it takes {', '.join(known)}"
            raise PlanError(f"{where} has no field {key!r}; {hint}")
    values = _Fields(**{"stride": {}, **entry})
    if isinstance(values.weight, bool) or not isinstance(values.weight, int | float) or not values.weight > 0:
        raise PlanError(f"{where}.weight is {values.weight!r}, but must be a number above 0")
    patch = ordered(f"{where}.patch", values.patch, dims, [1] * len(dims))
    check_patch(f"{where}.patch", dims, own.shape, patch)
    stride = ordered(f"{where}.stride", values.stride, dims, patch if values.order == "grid" else [1] * len(dims))
    try:
        access = replace(
            own, patch=patch, stride=stride, order=values.order, batch_size=values.batch_size, shuffle=values.shuffle,
            samples_per_epoch=None, epochs=1, ranks=1,
        )  # fmt: skip
    except PlanError as error:
        raise PlanError(f"{where}: {error}") from None
    return Reader(name=name, access=access, weight=float(values.weight))
