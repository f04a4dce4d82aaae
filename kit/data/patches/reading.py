"""Measuring: how fast a store is really read, beside the prediction; ratio = measured / predicted.

`kit.data.measure_reading(config)` streams for a few seconds the batches that a fit of that config would read, through
the same loader and on one rank, and trains nothing. The first batch, which opens the store, is measured apart. In
random and grid order the batches read ahead at the start of each pass are left out, and where there is one pass the
requests of its beginning, predicted and measured. Whole passes count where most of one is read ahead, and in block
order, because a window is read at once and serves many batches; how well they are mixed stands beside its prediction
too. Indexes of shards are asked for in the first pass only.

The prediction is that of `kit.chunks.cost` for the store as it is cut, with the network and host that `config.chunking`
describes, so put the figures of `kit.data.probe` there first. A store in a folder has no network before it.

`kit.data.measure_networks(config, cloud)` turns a simulated cloud to one network after another, does the same in each,
and lets it serve whole epochs, which it counts as a provider would for the bill. Every network begins with an empty
cache in memory; what `cache.folder` keeps stays.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from kit.arguments import checks_arguments, no_config, takes_config
from kit.chunks.cost import slowest
from kit.cloud.dials import preset
from kit.config import Config
from kit.data.build.layout import price_store, requests_after
from kit.data.open_dataset import open_dataset
from kit.data.stores.disk_cache import ReadCache
from kit.data.stores.url import redact
from kit.errors import ConfigError, PlanError, Problem
from kit.machine.endpoints import endpoint_of
from kit.machine.processes import scheduled_seconds
from kit.tables import ResultRows, html_list, html_table, text_table
from kit.units import format_bytes, format_count, format_price, format_seconds

if TYPE_CHECKING:
    from kit.cloud.simulated import SimulatedCloud
    from kit.data.patches.loader import PatchLoader

_COLUMNS = (
    ("", "chunk"), ("", "order"), ("samples/s", "predicted"), ("samples/s", "measured"), ("samples/s", "ratio"),
    ("", "bound by"), ("requests", "predicted"), ("requests", "measured"), ("", "read"), ("", "first batch"),
)  # fmt: skip
"""(heading above, heading) of each."""
_KEY = "requests and bytes read are per sample"
_OF_ORDER = 1
"""Place of the column that is shown only where there are several."""
_DROPPED = 2
"""Batches left out at the start of a pass, beside those read ahead."""
_LONG = 3
"""So many times those have a pass of which they are left out; most of a shorter one is read by then."""
_MOST_TIMES = 3
"""Whole time over the time asked for, at most."""
_SETTLING_SECONDS = 1.0
"""At most, and ten times what a request may take to be answered without being missed."""
_BUSY_FRACTION = 0.5
"""Of the time of all threads that read."""
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
    queued_fraction: float
    """Of the time that its threads could have computed, how much they waited for a core."""

    @property
    def ratio(self) -> float:
        """Measured samples/s over predicted."""
        return self.samples_per_second / self.predicted_samples_per_second

    def row(self) -> tuple[str, ...]:
        """Its cells as text."""
        return (
            "×".join(map(str, self.chunk)), self.order, format_count(self.predicted_samples_per_second),
            format_count(self.samples_per_second), f"{self.ratio:.2f}", self.bound,
            f"{self.predicted_requests_per_sample:.3g}", f"{self.requests_per_sample:.3g}",
            format_bytes(self.bytes_per_sample), format_seconds(self.first_batch_seconds),
        )  # fmt: skip

    @property
    def notes(self) -> list[str]:
        """Fewer open requests than are allowed, and how well block order mixed, where there is such."""
        chunk, found = f"{'×'.join(map(str, self.chunk))} in {self.order} order", []
        if self.open_reason:
            allowed = f"{self.open_requests} of the {self.requests_in_flight} requests allowed"
            found.append(f"{chunk}: {allowed} are open: {self.open_reason}")
        if self.order == "block" and self.mixing is not None and self.predicted_mixing is not None:
            found.append(
                f"{chunk}: mixing {self.mixing:.0%}, predicted {self.predicted_mixing:.0%} (the independent samples "
                "that a batch is worth at least, over its size)"
            )
        return found


class Readings(ResultRows[MeasuredReading]):
    """What was measured, one row a config, in the order given."""

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

    def _table(self) -> tuple[list[tuple[str, str]], list[tuple[str, ...]], int]:
        """Columns, the order only where there are several; rows; and the place of the fastest."""
        several = len({one.order for one in self}) > 1
        kept = [place for place in range(len(_COLUMNS)) if several or place != _OF_ORDER]
        rows = [tuple(one.row()[place] for place in kept) for one in self]
        fastest = max(range(len(self)), key=lambda place: self[place].samples_per_second)
        return [_COLUMNS[place] for place in kept], rows, fastest

    @property
    def _notes(self) -> list[str]:
        found = [_KEY, *(note for one in self for note in one.notes)]
        if busy := [one.queued_fraction for one in self if one.queued_fraction > _BUSY_FRACTION]:
            waited = " to ".join(dict.fromkeys(f"{share:.0%}" for share in (min(busy), max(busy))))
            found.append(
                f"the machine was busy: in {len(busy)} of {len(self)} what reads waited {waited} of its time for a "
                "core, so samples/s say little about the store; measure again when other programs rest"
            )
        return found

    def __repr__(self) -> str:
        columns, rows, fastest = self._table()
        titles = [f"{group} {title}" if title == "predicted" else title for group, title in columns]
        return "\n".join([self._headline, text_table(titles, rows, fastest), *self._notes])

    def _repr_html_(self) -> str:
        columns, rows, fastest = self._table()
        groups, titles = zip(*columns, strict=True)
        table = html_table(
            titles, rows, caption=self._headline, marked=fastest, mark="fastest", dense=True, groups=groups
        )
        notes = "<br>".join(self._notes)
        return f'{table}<div style="opacity: 0.75; max-width: 60em">{notes}</div>'


@checks_arguments
def measure_reading(*configs: Config | Sequence[Config], seconds: float = 3.0) -> Readings:
    """Read what each config would feed a trial, and compare it with the prediction.

    Args:
        configs: One or several. Each is read by itself.
        seconds: How long each is read. Two batches, and in block order one pass, are read however long they take.

    Returns:
        For each config: samples per second, predicted and measured, and their ratio.

    Raises:
        PlanError: without a config, for seconds that are not above 0, and for an epoch of a single batch.
        ConfigError: for what does not fit a store.
        StoreError: for a store that cannot be opened or read.

    Example:
        >>> readings = kit.data.measure_reading(ocean, seconds=0.2)
        >>> len(readings)
        1
    """
    given: list[Any] = [one for some in configs for one in (some if isinstance(some, list | tuple) else [some])]
    length: Any = seconds
    if not given or not isinstance(length, int | float) or not length > 0:
        raise PlanError(f"{len(given)} configs for {seconds!r} s measure nothing; give one config and seconds above 0")
    for one in given:
        if not isinstance(one, Config):
            raise no_config("measure_reading", one, "call measure_reading(config)")
    return Readings([_measure(config.replace(_ALONE), seconds) for config in given])


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
    ahead = config.loader.batches_ahead + _DROPPED
    left_out = None if config.data.order == "block" or len(loader) < _LONG * (ahead + 1) else ahead
    size = config.loader.batch_size
    asked = sum(cost.requests_made_per_batch for cost in costs) / size
    asked_later = asked if left_out is None else requests_after(config, dataset, left_out + 1)
    if left_out is None:
        seconds_per_batch = sum(cost.seconds_per_epoch for cost in costs) / len(loader)
    else:
        seconds_per_batch = sum(cost.seconds_per_batch for cost in costs)
    try:
        pace = _pace(loader, left_out, seconds)
        mixing, (opened, reason) = loader.mixing, loader.open_requests
    finally:
        data.teardown()
    info = dataset.select(config.data.variables)[0]
    indexes = sum(cost.index_requests_per_batch for cost in costs) / size
    predicted = None  # of the variable that mixes worst; what has no window is read as random order
    if config.data.order != "grid":
        predicted = min(1.0 if cost.window is None else cost.window.mixing(size) for cost in costs)
    return MeasuredReading(
        url=redact(dataset.url), chunk=info.chunk, shard=info.shard, order=config.data.order, batch_size=size,
        predicted_samples_per_second=size / seconds_per_batch,
        samples_per_second=pace.samples / pace.seconds,
        bound=slowest(costs).bound,
        predicted_requests_per_sample=(  # of what was counted: the first pass asks for the indexes
            asked_later if pace.passes == 1 else asked - indexes * (1 - 1 / pace.passes)
        ),
        requests_per_sample=pace.per_sample("requests"), bytes_per_sample=pace.per_sample("bytes_read"),
        mixing=None if predicted is None else mixing, predicted_mixing=predicted,
        first_batch_seconds=pace.first_seconds, batches=pace.batches, seconds=pace.seconds,
        requests_in_flight=config.loader.requests_in_flight, open_requests=opened, open_reason=reason,
        queued_fraction=pace.queued_fraction,
    )  # fmt: skip


@dataclass(slots=True)
class _Pace:
    first_seconds: float = 0.0
    samples: int = 0
    seconds: float = 0.0
    batches: int = 0
    passes: int = 0
    queued_fraction: float = 0.0
    counts: Mapping[str, int] = field(default_factory=dict)
    """Of the samples that count where one pass was long enough, else of all."""

    def per_sample(self, name: str) -> float:
        return self.counts[name] / max(1, self.counts["samples"])


def _pace(loader: PatchLoader, left_out: int | None, seconds: float) -> _Pace:
    """Pass after pass until there is enough; of each, only what comes after the batches left out; None: all of it."""
    pace, began, (computed, queued) = _Pace(), time.perf_counter(), scheduled_seconds()
    next(iter(loader))
    pace.first_seconds = time.perf_counter() - began
    deadline = began + _MOST_TIMES * seconds
    first = under_way = _settled(loader)  # the batches that were read for the first one alone do not count
    while pace.batches < 2 or (pace.seconds < seconds and time.perf_counter() < deadline):
        before, pace.passes = time.perf_counter(), pace.passes + 1
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
    computed, queued = (now - then for now, then in zip(scheduled_seconds(), (computed, queued), strict=True))
    pace.queued_fraction = max(0.0, queued) / max(1e-9, computed + queued)
    before_them = under_way if pace.passes == 1 else first
    pace.counts = {name: count - before_them[name] for name, count in loader.counters().items()}
    return pace


def _settled(loader: PatchLoader) -> dict[str, int]:
    """What is counted once nothing that was read ahead in vain is on its way any more."""
    before: dict[str, int] = {}
    now, deadline = loader.counters(), time.perf_counter() + _SETTLING_SECONDS
    while now != before and time.perf_counter() < deadline:
        time.sleep(_SETTLING_SECONDS / 10)
        before, now = now, loader.counters()
    return now


NETWORKS = ("same region", "across the ocean", "home WiFi")
_NETWORK_COLUMNS = (
    ("", "network"), ("samples/s", "predicted"), ("samples/s", "measured"), ("samples/s", "ratio"), ("", "epoch"),
    ("requests", "to the store"), ("requests", "from the cache"), ("", "bytes sent"), ("", "took"), ("", "price"),
)  # fmt: skip
_PRICE = len(_NETWORK_COLUMNS) - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedEpoch:
    """One epoch, as the cloud counted it."""

    network: str
    epoch: int
    """From 1."""
    reading: MeasuredReading
    """How fast the store was read from there, before the first epoch."""
    requests: int
    cache_hits: int
    """Reads that the cache of stored bytes answered, so that the store was not asked."""
    sent_bytes: int
    seconds: float
    price: float
    """Of the requests and the bytes, in the currency of the prices."""

    def row(self) -> tuple[str, ...]:
        """Its cells as text; the network and its speed stand beside its first epoch."""
        rates = (format_count(self.reading.predicted_samples_per_second), format_count(self.reading.samples_per_second))
        first = (self.network, *rates, f"{self.reading.ratio:.2f}") if self.epoch == 1 else ("",) * 4
        counted = (str(self.epoch), format_count(self.requests), format_count(self.cache_hits))
        return (*first, *counted, format_bytes(self.sent_bytes), format_seconds(self.seconds), format_price(self.price))


class ServedEpochs(ResultRows[ServedEpoch]):
    """What was served, one row an epoch, networks in the order given."""

    @property
    def sentences(self) -> list[str]:
        """What the numbers say: how many times longer an epoch took, and what later epochs asked for."""
        first = [one for one in self if one.epoch == 1]
        near, far = (choose(first, key=lambda one: one.seconds) for choose in (min, max))
        found = []
        if len(first) > 1:
            times = f"{far.seconds / near.seconds:.2g} times as long from {far.network!r} as from {near.network!r}"
            found.append(f"an epoch took {times}")
        for later in (one for one in self if one.epoch > 1):
            asked = f"{format_count(later.requests)} requests, {format_count(later.cache_hits)} answered by the cache"
            found.append(f"{later.network}, epoch {later.epoch}: {asked}")
        return found

    def _table(self) -> tuple[list[tuple[str, str]], list[tuple[str, ...]]]:
        """Columns and rows, the price only where there is one."""
        kept = len(_NETWORK_COLUMNS) if any(one.price for one in self) else _PRICE
        return list(_NETWORK_COLUMNS[:kept]), [one.row()[:kept] for one in self]

    def __repr__(self) -> str:
        columns, rows = self._table()
        return "\n".join([text_table([f"{group} {title}".strip() for group, title in columns], rows), *self.sentences])

    def _repr_html_(self) -> str:
        columns, rows = self._table()
        groups, titles = zip(*columns, strict=True)
        return html_table(titles, rows, dense=True, groups=groups) + html_list(self.sentences)


@takes_config
def measure_networks(
    config: Config, cloud: SimulatedCloud, networks: str | Sequence[str] | Mapping[str, float] = NETWORKS, *,
    price_per_thousand_reads: float = 0.0, epochs: int = 1, seconds: float = 1.0,
) -> ServedEpochs:  # fmt: skip
    """Read one store over several networks: how fast, and what whole epochs ask of it and cost.

    Args:
        config: What reads it, and how. Its store lies in the cloud.
        cloud: What `kit.cloud.simulate` gave. It is turned to every network, and back in the end.
        networks: Presets of the cloud by name. A mapping gives each the price of a gigabyte that leaves the store.
        price_per_thousand_reads: In the same currency.
        epochs: Whole epochs over each network.
        seconds: How long the speed is measured over each.

    Returns:
        A row for each network and epoch: samples per second, predicted and measured, requests, bytes, time and price.

    Raises:
        ConfigError: for an unknown preset, and a store that does not lie in this cloud.
        PlanError: for no networks or epochs, and as `measure_reading`.
        StoreError: for a store that cannot be opened or read.

    Example:
        >>> with kit.cloud.simulate("no limits") as cloud:
        ...     there = ocean.replace({"data.url": cloud.url("bucket/ocean.zarr")})
        ...     dataset = kit.build(there, progress=False)
        ...     served = kit.data.measure_networks(there, cloud, ["same region"], seconds=0.2)
        >>> [one.network for one in served]
        ['same region']
    """
    place: Any = cloud  # by a user, who may give anything
    if not hasattr(place, "address"):
        message = f"{type(place).__name__} is no cloud; give what kit.cloud.simulate answered"
        raise ConfigError([Problem("cloud", message)])
    listed = [networks] if isinstance(networks, str) else networks
    prices = dict(listed) if isinstance(listed, Mapping) else dict.fromkeys(listed, 0.0)
    if not prices or epochs < 1:
        raise PlanError(f"{epochs} epochs over {len(prices)} networks measure nothing; give at least one of each")
    for name in prices:
        preset(name)
    if cloud.address not in (endpoint_of(config.data.url), config.data.url[: len(cloud.address)]):
        message = f"{redact(config.data.url)} is not in the cloud at {cloud.address}; use cloud.url('bucket/name')"
        raise ConfigError([Problem("data.url", message)])
    before, found = cloud.dials, list[ServedEpoch]()
    try:
        for name, price in prices.items():
            there = cloud.turn(name).dials.apply(config)
            reading = measure_reading(there.replace({"cache.size_bytes": 0}), seconds=seconds)[0]
            found += _served(there, cloud, name, epochs, reading, (price_per_thousand_reads, price))
    finally:
        cloud.turn(**before.to_dict())
    return ServedEpochs(found)


def _served(
    config: Config, cloud: SimulatedCloud, network: str, epochs: int, reading: MeasuredReading,
    prices: tuple[float, float],
) -> list[ServedEpoch]:  # fmt: skip
    """Whole epochs through one loader, so that a later one finds what the cache kept."""
    from kit.data.patches.module import PatchData

    if cache := ReadCache.of(config.cache):
        cache.forget()
    data = PatchData(config.replace(_ALONE))
    loader, found, hits = data.train_dataloader(), list[ServedEpoch](), 0
    try:
        for epoch in range(1, epochs + 1):
            mark = cloud.counts()
            for _ in loader:
                pass
            bill, all_hits = cloud.counts(since=mark), loader.counters()["read_cache_hits"]
            found.append(ServedEpoch(
                network=network, epoch=epoch, reading=reading, requests=bill.requests, cache_hits=all_hits - hits,
                sent_bytes=bill.bytes_sent, seconds=bill.elapsed_seconds, price=bill.price(*prices),
            ))  # fmt: skip
            hits = all_hits
    finally:
        data.teardown()
    return found
