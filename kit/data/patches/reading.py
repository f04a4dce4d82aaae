"""Measuring: how fast a store is really read, beside what was predicted of it; ratio = measured / predicted.

`kit.measure_reading(config)` streams for a few seconds what a fit of that config would be fed, through the same loader,
and trains nothing. The first batch, which opens the store, is told apart. In random and grid order samples count once
reading is under way: of each pass, the batches that were read ahead at its start are left out. In block order whole
passes count, because a window is read at once and served for long. One rank reads, whatever the config asks
for. The prediction is that of `kit.chunks.cost` for the store as it is cut, with the network that `config.chunking`
describes, so put the figures of `kit.probe` there first. In block order the batches are counted too: how well they are
mixed stands beside how well they were to be.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, overload

from kit.config import Config
from kit.data.build.layout import price_store
from kit.data.dataset import open_dataset
from kit.data.stores.url import redact
from kit.errors import PlanError
from kit.tables import html_table, text_table
from kit.units import format_bytes, format_count, format_seconds

if TYPE_CHECKING:
    from kit.chunks.cost import LayoutCost
    from kit.data.patches.loader import PatchLoader

_COLUMNS = (
    ("", "chunk"), ("", "order"), ("samples/s", "measured"), ("samples/s", "predicted"), ("samples/s", "ratio"),
    ("", "bound by"), ("requests", "measured"), ("requests", "predicted"), ("", "read"), ("", "first batch"),
)  # fmt: skip
"""(heading above, heading) of each."""
_KEY = "requests and bytes read are per sample"
_OF_ORDER = 1
"""Place of the column that is shown only where there are several."""
_DROPPED = 2
"""Batches left out at the start of a pass, beside those read ahead."""
_MOST_TIMES = 3
"""Whole time over the time asked for, at most."""
_ALONE = {"hardware.devices": "auto", "hardware.strategy": "none"}


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredReading:
    """One store, read for a while by one rank."""

    url: str
    chunk: tuple[int, ...]
    """Of the first variable, elements."""
    shard: tuple[int, ...] | None
    order: str
    batch_size: int
    predicted_samples_per_second: float
    samples_per_second: float
    bound: str
    """The resource predicted to decide."""
    predicted_requests_per_sample: float
    requests_per_sample: float
    bytes_per_sample: float
    """Stored bytes."""
    mixing: float | None
    """Independent samples that a batch was worth at least, over its size; 1 in random order, None in a grid."""
    predicted_mixing: float | None
    first_batch_seconds: float
    """From the open loader to the first batch: opening the store, and one batch without any read ahead."""
    batches: int
    """Measured, without those left out."""
    seconds: float
    requests_in_flight: int
    """Allowed."""
    open_requests: int
    """Of those, open at most in the end, on an object store read without loader processes."""
    open_reason: str
    """Why no more; empty where all that are allowed may be open."""

    @property
    def ratio(self) -> float:
        """Measured samples/s over predicted."""
        return self.samples_per_second / self.predicted_samples_per_second

    def row(self) -> tuple[str, ...]:
        """Its cells as text."""
        return (
            "×".join(map(str, self.chunk)), self.order, format_count(self.samples_per_second),
            format_count(self.predicted_samples_per_second), f"{self.ratio:.2f}", self.bound,
            f"{self.requests_per_sample:.3g}", f"{self.predicted_requests_per_sample:.3g}",
            format_bytes(self.bytes_per_sample), format_seconds(self.first_batch_seconds),
        )  # fmt: skip

    @property
    def held_back(self) -> str:
        """Why fewer requests were open than allowed; nothing where they were not."""
        if not self.open_reason:
            return ""
        allowed = f"{self.open_requests} of the {self.requests_in_flight} requests allowed"
        return f"{'×'.join(map(str, self.chunk))}: {allowed} are open: {self.open_reason}"

    @property
    def mixed(self) -> str:
        """How well block order mixed, beside how well it was to; nothing in other orders."""
        if self.order != "block" or self.mixing is None or self.predicted_mixing is None:
            return ""
        return (
            f"{'×'.join(map(str, self.chunk))} in block order: mixing {self.mixing:.0%}, predicted "
            f"{self.predicted_mixing:.0%} (the independent samples that a batch is worth at least, over its size)"
        )


class Readings(Sequence[MeasuredReading]):
    """What was measured, one row a config, in the order given."""

    def __init__(self, readings: Iterable[MeasuredReading]) -> None:
        self._readings = tuple(readings)

    @overload
    def __getitem__(self, index: int) -> MeasuredReading: ...
    @overload
    def __getitem__(self, index: slice) -> Readings: ...
    def __getitem__(self, index: int | slice) -> MeasuredReading | Readings:
        return Readings(self._readings[index]) if isinstance(index, slice) else self._readings[index]

    def __len__(self) -> int:
        return len(self._readings)

    def __iter__(self) -> Iterator[MeasuredReading]:
        return iter(self._readings)

    def __add__(self, other: Readings) -> Readings:
        return Readings((*self, *other))

    @property
    def median_ratio(self) -> float:
        """Of measured over predicted samples/s."""
        return statistics.median(reading.ratio for reading in self)

    @property
    def _headline(self) -> str:
        fastest = max(self, key=lambda reading: reading.samples_per_second)
        words = f"{format_count(fastest.samples_per_second)} samples/s measured"
        fastest_name = "×".join(map(str, fastest.chunk))
        if len(self) == 1:
            return f"{fastest_name} in {fastest.order} order: {words}, {fastest.ratio:.2f} of what was predicted"
        if len({reading.order for reading in self}) > 1:
            fastest_name += f" in {fastest.order} order"
        return f"fastest is {fastest_name} with {words}; median ratio {self.median_ratio:.2f}"

    @property
    def _marked(self) -> int:
        return max(range(len(self)), key=lambda place: self[place].samples_per_second)

    def _table(self) -> tuple[list[tuple[str, str]], list[tuple[str, ...]]]:
        """Columns and rows; the order only where there are several."""
        several = len({one.order for one in self}) > 1
        kept = [place for place in range(len(_COLUMNS)) if several or place != _OF_ORDER]
        return [_COLUMNS[place] for place in kept], [tuple(one.row()[place] for place in kept) for one in self]

    @property
    def _notes(self) -> list[str]:
        return [_KEY, *(one.held_back for one in self if one.held_back), *(one.mixed for one in self if one.mixed)]

    def __repr__(self) -> str:
        columns, rows = self._table()
        titles = [group if group and title == "measured" else title for group, title in columns]
        return "\n".join([self._headline, text_table(titles, rows, self._marked), *self._notes])

    def _repr_html_(self) -> str:
        columns, rows = self._table()
        groups, titles = zip(*columns, strict=True)
        table = html_table(
            titles, rows, caption=self._headline, marked=self._marked, mark="fastest", dense=True, groups=groups
        )
        notes = "<br>".join(self._notes)
        return f'{table}<div style="opacity: 0.75; max-width: 60em">{notes}</div>'


def measure_reading(*configs: Config, seconds: float = 3.0) -> Readings:
    """Read what each config would feed a fit, one after the other, and set it beside the prediction.

    Args:
        configs: One or several; each is read on its own.
        seconds: For how long, each, or until three times that has passed with what is left out; two batches or, in
            block order, a pass are measured however long they take.

    Raises:
        PlanError: without a config, for seconds that are not above 0, and for an epoch of a single batch.
        ConfigError: for what does not fit a store.
        StoreError: for a store that cannot be opened or read.
    """
    if not configs or not seconds > 0:
        raise PlanError(f"{len(configs)} configs for {seconds} s measure nothing; give one config and seconds above 0")
    return Readings([_measure(config.replace(_ALONE), seconds) for config in configs])


def _measure(config: Config, seconds: float) -> MeasuredReading:
    from kit.data.patches.module import PatchData

    dataset = open_dataset(config)
    costs = price_store(config, dataset)
    data = PatchData(config)
    loader = data.train_dataloader()
    if len(loader) < 2:
        raise PlanError(
            f"{redact(dataset.url)}: an epoch of {len(loader)} batch is too short to measure; raise samples_per_epoch"
        )
    ahead = min(config.loader.batches_ahead + _DROPPED, len(loader) - 2)
    left_out = None if config.data.order == "block" else ahead
    try:
        pace = _pace(loader, left_out, seconds)
        mixing, (opened, reason) = loader.mixing, loader.open_requests
    finally:
        data.teardown()
    info = dataset.select(config.data.variables)[0]
    return MeasuredReading(
        url=redact(dataset.url), chunk=info.chunk, shard=info.shard, order=config.data.order,
        batch_size=config.loader.batch_size,
        predicted_samples_per_second=config.loader.batch_size / sum(cost.seconds_per_batch for cost in costs),
        samples_per_second=pace.samples / pace.seconds,
        bound=max(costs, key=lambda cost: cost.seconds_per_batch).bound,
        predicted_requests_per_sample=sum(cost.requests_made_per_batch for cost in costs) / config.loader.batch_size,
        requests_per_sample=pace.per_sample("requests"), bytes_per_sample=pace.per_sample("bytes_read"),
        mixing=None if config.data.order == "grid" else mixing, predicted_mixing=_predicted_mixing(config, costs),
        first_batch_seconds=pace.first_seconds, batches=pace.batches, seconds=pace.seconds,
        requests_in_flight=config.loader.requests_in_flight, open_requests=opened, open_reason=reason,
    )  # fmt: skip


def _predicted_mixing(config: Config, costs: Sequence[LayoutCost]) -> float | None:
    """Of the variable that mixes worst; what has no window is read as random order."""
    if config.data.order == "grid":
        return None
    return min(1.0 if cost.window is None else cost.window.mixing(config.loader.batch_size) for cost in costs)


@dataclass(slots=True)
class _Pace:
    first_seconds: float = 0.0
    samples: int = 0
    seconds: float = 0.0
    batches: int = 0
    counts: Mapping[str, int] = field(default_factory=dict)
    """Of the samples that count where one pass was long enough, else of all."""

    def per_sample(self, name: str) -> float:
        return self.counts[name] / max(1, self.counts["samples"])


def _pace(loader: PatchLoader, left_out: int | None, seconds: float) -> _Pace:
    """Pass after pass until there is enough; of each, only what comes after the batches left out; None: all of it."""
    pace, began = _Pace(), time.perf_counter()
    next(iter(loader))
    pace.first_seconds = time.perf_counter() - began
    deadline = began + _MOST_TIMES * seconds
    passes, under_way = 0, loader.counters()
    while pace.batches < 2 or (pace.seconds < seconds and time.perf_counter() < deadline):
        before, passes = time.perf_counter(), passes + 1
        for place, batch in enumerate(loader):
            now = time.perf_counter()
            if left_out is None or place > left_out:
                pace.samples += len(batch["values"])
                pace.seconds += now - before
                pace.batches += 1
            elif place == left_out:
                under_way = loader.counters()
            before = now
            if left_out is not None and pace.seconds >= seconds and pace.batches > 1:
                break
    pace.counts = loader.counters()
    if passes == 1 and left_out is not None:
        pace.counts = {name: count - under_way[name] for name, count in pace.counts.items()}
    return pace
