"""ChunkPlan: a layout, its predicted cost, the candidates it beat, and the reasons, in one frozen answer.

Tuples of sizes are elements in the order of `dims`. Predictions are expected values over random offsets on one rank
(see `kit.plan.cost` for the formula and its known error)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

from kit.plan.access import Order
from kit.plan.cost import Bound, LayoutCost
from kit.plan.readers import ReaderCost
from kit.plan.resources import OPENING_BYTES
from kit.tables import html_list, html_table, text_table
from kit.units import format_bytes, format_count

_COLUMNS = (
    "chunk", "size", "rank", "requests/sample", "as read", "× patch", "read/sample", "samples/s", "bound by", "objects",
    "memory",
)  # fmt: skip
_READER_COLUMNS = ("reader", "weight", "samples/s", "bound by", "at its best", "with chunk", "price of sharing")
_KEY = (
    "requests/sample and × patch: least · mean · most of a sample alone; as read: shared by a batch, its window or the "
    "cache; read/sample: stored bytes as read; × patch counts whole chunks; memory: of one rank, "
    f"beside {format_bytes(OPENING_BYTES)} once"
)
_SHOWN_ROWS = 9


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class ChunkPlan:
    """Chunks and shards of a dataset and what reading it will cost."""

    dims: tuple[str, ...]
    shape: tuple[int, ...]
    itemsize: int
    variables: int
    together: bool
    """Whether the variables lie in one array, so that a chunk holds all of them."""
    patch: tuple[int, ...]
    chunk: tuple[int, ...]
    shard: tuple[int, ...] | None
    """None: every chunk is an object of its own."""
    order: Order
    batch_size: int
    """Samples of a batch on each rank."""
    ranks: int
    requests_per_sample: float
    """Expected, all variables, for a sample on its own; each request reads one chunk."""
    bytes_per_sample: float
    """Whole chunks of a sample on its own, decoded."""
    requests_per_batch: float
    """Expected chunks a batch fetches, all variables: shared by its samples, its window or the cache."""
    seconds_per_batch: float
    samples_per_second: float
    """Of one rank."""
    amplification: float
    """Bytes read per byte of patch, for a sample on its own."""
    bound: Bound
    """The resource that decides."""
    object_count: int
    """Objects in the store that hold data, all variables."""
    candidates: tuple[LayoutCost, ...]
    """Every layout considered, the best first; a chunk given by hand that is none of them comes last."""
    readers: tuple[ReaderCost, ...]
    """Every pattern the layout serves, this plan's own first."""
    reasons: tuple[str, ...]

    @property
    def chosen(self) -> LayoutCost:
        """All that is predicted of the chosen layout."""
        return next(cost for cost in self.candidates if cost.chunk == self.chunk)

    @property
    def chunk_bytes(self) -> int:
        return self.chosen.chunk_bytes

    @property
    def shard_bytes(self) -> int | None:
        return None if self.shard is None else math.prod(self.shard) * self.chunk_bytes // math.prod(self.chunk)

    @property
    def patch_bytes(self) -> int:
        """Bytes of one patch in one variable."""
        return math.prod(self.patch) * self.itemsize

    @property
    def ladder(self) -> tuple[LayoutCost, ...]:
        """The best candidate of each size, sizes apart by a factor of two or so, smallest first, with the choice."""
        best: dict[int, LayoutCost] = {}
        for cost in self.candidates:
            best.setdefault(round(math.log2(cost.chunk_bytes)), cost)
        best[round(math.log2(self.chunk_bytes))] = self.chosen
        return tuple(best[size] for size in sorted(best))

    def rows(self) -> list[dict[str, Any]]:
        """Every candidate as a plain dict, the best first, as a data frame takes them."""
        return [
            {field.name: getattr(cost, field.name) for field in fields(cost) if field.name not in _NESTED}
            | {"mixing": cost.window.mixing(self.batch_size) if cost.window else None}
            for cost in self.candidates
        ]

    def __str__(self) -> str:
        rows, marked = self._rows
        parts = [self._headline, text_table(self._columns, rows, marked), _KEY]
        if len(self.readers) > 1:
            parts.append(text_table(_READER_COLUMNS, [_reader_row(reader) for reader in self.readers]))
        return "\n".join([*parts, *(f"- {reason}" for reason in self.reasons)])

    __repr__ = __str__

    def _repr_html_(self) -> str:
        rows, marked = self._rows
        shown = html_table(self._columns, rows, caption=self._headline, marked=marked, dense=True)
        shown += f'<div style="opacity: 0.75; max-width: 60em">{_KEY}</div>'
        if len(self.readers) > 1:
            readers = [_reader_row(reader) for reader in self.readers]
            shown += html_table(_READER_COLUMNS, readers, caption="readers", dense=True)
        return f'<div style="overflow-x: auto">{shown}</div>{html_list(self.reasons)}'

    @property
    def _headline(self) -> str:
        shard = "no shards" if self.shard is None else f"shard {named(self.dims, self.shard)}"
        rate = f"{format_count(self.samples_per_second)} samples/s"
        rate += f" on each of {self.ranks} ranks" if self.ranks > 1 else ""
        return (
            f"{rate} predicted: chunk {named(self.dims, self.chunk)}, {shard}, "
            f"{format_count(self.object_count)} object{'' if self.object_count == 1 else 's'}"
        )

    @property
    def _columns(self) -> tuple[str, ...]:
        mixing = ("mixing",) if self.order == "block" else ()
        slowdown = ("slowdown",) if len(self.readers) > 1 else ()
        price = ("price/epoch",) if self.chosen.price_per_epoch is not None else ()
        return (*_COLUMNS, *mixing, *slowdown, *price)

    @property
    def _rows(self) -> tuple[list[list[str]], int]:
        """The ladder around the choice as text, and where in it the choice stands."""
        ladder = self.ladder
        place = ladder.index(self.chosen)
        start = max(0, min(place - _SHOWN_ROWS // 2, len(ladder) - _SHOWN_ROWS))
        return [self._row(cost) for cost in ladder[start : start + _SHOWN_ROWS]], place - start

    def _row(self, cost: LayoutCost) -> list[str]:
        amplification = (cost.least_amplification, cost.amplification, cost.most_amplification)
        requests = (cost.least_requests_per_sample, cost.requests_per_sample, cost.most_requests_per_sample)
        extra = []
        if self.order == "block":
            extra.append(f"{cost.window.mixing(self.batch_size):.0%}" if cost.window else "no room")
        if len(self.readers) > 1:
            extra.append(f"{cost.slowdown:.3g}")
        if self.chosen.price_per_epoch is not None:
            extra.append(f"{cost.price_per_epoch:.3g}")
        return [
            "×".join(map(str, cost.chunk)), format_bytes(cost.chunk_bytes), str(self.candidates.index(cost) + 1),
            _triple(requests), f"{cost.requests_per_batch / self.batch_size:.3g}", _triple(amplification),
            format_bytes(cost.stored_bytes_per_batch / self.batch_size), format_count(cost.samples_per_second),
            cost.bound if cost.fits else "does not fit", format_count(cost.object_count),
            format_bytes(cost.memory_bytes), *extra,
        ]  # fmt: skip


_NESTED = ("window", "seconds_by_resource")


def named(dims: Sequence[str], sizes: Sequence[int]) -> str:
    """Sizes with their dimensions: `time 3 × lat 64 × lon 64`."""
    return " × ".join(f"{name} {size}" for name, size in zip(dims, sizes, strict=True))


def _triple(values: Sequence[float]) -> str:
    return "\u00a0·\u00a0".join(format_count(float(f"{value:.3g}")) for value in values)  # never broken over lines


def _reader_row(reader: ReaderCost) -> list[str]:
    return [
        reader.name, f"{reader.weight:g}", format_count(reader.cost.samples_per_second), reader.cost.bound,
        f"{format_count(reader.best.samples_per_second)} samples/s", "×".join(map(str, reader.best.chunk)),
        f"{reader.slowdown:.3g} × the time",
    ]  # fmt: skip
