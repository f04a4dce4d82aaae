"""ChunkPlan: a layout, its predicted cost, the candidates it beat, and the reasons, in one frozen answer.

Tuples of sizes are elements in the order of `dims`. Predictions are expected values over random offsets, uncompressed
and before decoding (see `kit.plan.cost` for the formula and its known error).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from kit.plan.cost import Bound, LayoutCost
from kit.tables import html_list, html_table, text_table
from kit.units import format_bytes, format_count, format_seconds

_COLUMNS = ("chunk", "chunk size", "requests/sample", "bytes/sample", "× patch", "seconds/batch", "samples/s")
_SHOWN_ROWS = 9


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class ChunkPlan:
    """Chunks and shards of a dataset and what reading it will cost."""

    dims: tuple[str, ...]
    shape: tuple[int, ...]
    itemsize: int
    variables: int
    patch: tuple[int, ...]
    chunk: tuple[int, ...]
    shard: tuple[int, ...] | None
    """None: every chunk is an object of its own."""
    order: Literal["random", "grid"]
    batch_size: int
    requests_per_sample: float
    """Expected, all variables, for a sample on its own; each request reads one chunk."""
    bytes_per_sample: float
    requests_per_batch: float
    """Expected different chunks of a whole batch, all variables."""
    seconds_per_batch: float
    samples_per_second: float
    amplification: float
    """Bytes read per byte of patch."""
    bound: Bound
    object_count: int
    """Objects in the store that hold data, all variables."""
    candidates: tuple[LayoutCost, ...]
    """Every layout considered, fastest first; a chunk given by hand comes last."""
    reasons: tuple[str, ...]

    @property
    def chunk_bytes(self) -> int:
        return math.prod(self.chunk) * self.itemsize

    @property
    def shard_bytes(self) -> int | None:
        return None if self.shard is None else math.prod(self.shard) * self.itemsize

    @property
    def patch_bytes(self) -> int:
        """Bytes of one patch in one variable."""
        return math.prod(self.patch) * self.itemsize

    @property
    def ladder(self) -> tuple[LayoutCost, ...]:
        """The fastest candidate of each size, sizes apart by a factor of two or so, smallest first, with the choice."""
        fastest: dict[int, LayoutCost] = {}
        for cost in self.candidates:
            fastest.setdefault(round(math.log2(cost.chunk_bytes)), cost)
        fastest[round(math.log2(self.chunk_bytes))] = self._chosen
        return tuple(fastest[size] for size in sorted(fastest))

    def __str__(self) -> str:
        rows, marked = self._rows
        reasons = "\n".join(f"- {reason}" for reason in self.reasons)
        return f"{self._headline}\n{text_table(_COLUMNS, rows, marked)}\n{reasons}"

    __repr__ = __str__

    def _repr_html_(self) -> str:
        rows, marked = self._rows
        return html_table(_COLUMNS, rows, caption=self._headline, marked=marked) + html_list(self.reasons)

    @property
    def _chosen(self) -> LayoutCost:
        return next(cost for cost in self.candidates if cost.chunk == self.chunk)

    @property
    def _headline(self) -> str:
        shard = "no shards" if self.shard is None else f"shard {named(self.dims, self.shard)}"
        rate = format_count(self.samples_per_second)
        return (
            f"{rate} samples/s predicted: chunk {named(self.dims, self.chunk)}, {shard}, "
            f"{format_count(self.object_count)} object{'' if self.object_count == 1 else 's'}"
        )

    @property
    def _rows(self) -> tuple[list[list[str]], int]:
        """The ladder around the choice as text, and where in it the choice stands."""
        ladder = self.ladder
        place = ladder.index(self._chosen)
        start = max(0, min(place - _SHOWN_ROWS // 2, len(ladder) - _SHOWN_ROWS))
        return [_row(cost) for cost in ladder[start : start + _SHOWN_ROWS]], place - start


def named(dims: Sequence[str], sizes: Sequence[int]) -> str:
    """Sizes with their dimensions: `time 3 × lat 64 × lon 64`."""
    return " × ".join(f"{name} {size}" for name, size in zip(dims, sizes, strict=True))


def _row(cost: LayoutCost) -> list[str]:
    return [
        "×".join(map(str, cost.chunk)),
        format_bytes(cost.chunk_bytes),
        f"{cost.requests_per_sample:.3g}",
        format_bytes(cost.bytes_per_sample),
        f"{cost.amplification:.3g}",
        format_seconds(cost.seconds_per_batch),
        format_count(cost.samples_per_second),
    ]
