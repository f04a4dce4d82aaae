"""Expected reading: what the batches of a run will ask of a store, played through before a request is sent.

The offsets of a plan are known, so the chunks of every batch are, and with them what is shared: within a batch, with
the decoded chunks that are kept, with the read cache as it is filled now and as the run fills it, and in block order
within a window. As the engine does, the batches read ahead count, and whole windows. Objects have the sizes that a
manifest tells; the chunks of one are taken to be of one size, in the order in which zarr writes them.

A planned store is played as one whose chunks are as large as `compression_ratio` says. Of one that kit did not build, a
few of the objects that the first batches touch are looked at: how large chunks are, and in which order they lie in a
shard, decides which neighbours share a request; and under its tag a read cache keeps each object. The others are taken
to be like those. Where nothing can be looked at, chunks are taken to be as large as `compression_ratio` says too.

A run is played to its end, or as far as `most_touched` allows. A longer one goes on as the second half of what was
played, or in block order as the windows after the first, but for indexes of shards, each of which is fetched once.

A chunk is there for as many batches as are read ahead (`kit.data.stream.chunk_cache`), where memory is spare, else for
those read ahead when it was asked for, whether reading or training is the slower. Known error, measured on a store of
144 chunks: requests 0 to 5 % where a step takes 10 ms, up to 13 % where none takes any time, as batches then wait for
each other; up to 20 % too few where decoded chunks are kept, as which are evicted depends on the order in which threads
decode; 0.6 to 0.9 of them where memory is tight. What a request brings between the chunks that were wanted counts as
kept at once, so a read cache that fills may be asked for up to a fifth more bytes.
"""

from __future__ import annotations

import contextlib
import copy
import math
import statistics
from bisect import bisect
from collections import OrderedDict, defaultdict, deque
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import product

import numpy as np
from numpy.typing import NDArray

from kit.chunks.cost import ArrayRequests
from kit.chunks.requests import Coalescing, Place, c_numbers, morton_numbers, runs
from kit.chunks.resources import HOLES_SHARE, KEPT_AT_ONCE, READY_TOO, TRANSIENT_SHARE
from kit.data.dataset import Dataset, XarrayStore
from kit.data.samples import SamplePlan
from kit.data.stores.counters import Counters
from kit.data.stores.disk_cache import WHOLE, Entries
from kit.data.stores.url import run_sync, sizes_of_objects
from kit.data.stream.cached import KnownObjects, ObjectNames
from kit.data.stream.codec import ABSENT, INDEX_CHECKSUM_BYTES, INDEX_ENTRY_BYTES, FetchOnceCache, Index, StoredArray
from kit.data.stream.fetch import is_remote, leaves, open_client, read_index
from kit.data.stream.memory import batch_bytes, largest_chunk_bytes
from kit.data.stream.receive import WINDOWS_DECODED
from kit.data.stream.scatter import touched
from kit.data.variables import ArrayInfo
from kit.errors import KitError

_TOUCHED_AT_LEAST = 64
"""Chunks that a batch of fewer counts for: its offsets take as long to find."""
_LOOKED_AT = 64
"""Objects of an array: those of a short epoch mostly, so that what a read cache holds of each is known."""
_AT_ONCE = 16
_LOOK_SECONDS = 10.0


@dataclass(frozen=True, slots=True)
class Expected:
    """On average for a sample, of each array in the order given."""

    arrays: tuple[ArrayRequests, ...]
    tells_sizes: bool
    """Whether the store tells how large its objects are."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """How a run reads.

    Args:
        batches: Handed over to each rank.
        ahead: Batches read ahead.
        processes: Loader processes of a rank, or 1.
        joins: Batches before one whose chunks are still there, or on their way.
        cache_bytes: Decoded chunks that each process keeps.
        memory_bytes: Of each process.
        requests_in_flight: Of each process.
        entries: The read cache as it is; None for none.
        shared: Whether all processes have one read cache.
        most_touched: Chunks of batches that are played through.
        compression_ratio: Decoded bytes per stored byte, of chunks whose size nothing else tells.
        left_out: Batches handed over first, on each rank, of which nothing counts.
        is_planned: What batches in flight share is counted as of an array that memory does not hold: a chunk is there
            for those read ahead when it was asked for, however many of them use it.
    """

    batches: int
    ahead: int
    coalescing: Coalescing
    processes: int = 1
    joins: int = 0
    cache_bytes: int = 0
    memory_bytes: int = 4 << 30
    requests_in_flight: int = 32
    entries: Entries | None = None
    shared: bool = True
    compression_ratio: float = 1.0
    most_touched: int = 200_000
    left_out: int = 0
    is_planned: bool = False


def expect(dataset: Dataset, arrays: Sequence[ArrayInfo], plan: SamplePlan, reading: Reading) -> Expected:
    """What a run will ask of the store; of one without a URL, which is yet to be built, nothing is looked at."""
    readers: list[_Reader] = []
    objects = _objects_of(dataset, arrays, plan, reading)
    for rank, process in product(range(plan.world_size), range(reading.processes)):
        if readers and not reading.shared:
            objects = [one.again() for one in objects]
        readers.append(_Reader(objects, plan, reading, rank, process))
    steps = math.ceil(reading.batches / reading.processes)
    start = _Mark.of(readers)
    marks, played = [start], 0
    while played < steps and (done := sum(reader.touched for reader in readers)) <= reading.most_touched:
        for reader in readers:
            reader.serve_one()
        played += 1
        if played * reading.processes <= reading.left_out and played < steps:
            start = _Mark.of(readers)
        if done <= reading.most_touched // 2:
            marks[1:] = [_Mark.of(readers)]
    end = _Mark.of(readers)
    if start.samples == end.samples:  # what counts has been read ahead
        start = marks[0]
    if played == steps:
        counted = zip(end.asked, start.asked, strict=True)
        per_sample = [(one - before).times(1 / (end.samples - start.samples)) for one, before in counted]
        return Expected(tuple(per_sample), all(one.tells_sizes for one in objects))
    if all(reader.first_window for reader in readers):
        marks.insert(1, _Mark.of([reader.first_window for reader in readers if reader.first_window]))
    begin = next(mark for mark in reversed(marks) if mark.read_samples < end.read_samples)
    samples = max(end.read_samples, reading.batches * plan.global_batch_size)
    times, found = (samples - end.read_samples) / (end.read_samples - begin.read_samples), list[ArrayRequests]()
    for now, before, left_out, array in zip(end.asked, begin.asked, start.asked, objects, strict=True):
        one = now + (now - before).times(times)
        indexes = array.shards_met(now.indexes, len(readers), samples / end.read_samples)
        more = (indexes - one.indexes, indexes * array.index_bytes - one.index_bytes)
        one += ArrayRequests(0, more[0], more[0], more[1], more[1])
        found.append((one - left_out).times(1 / (samples - start.read_samples)))
    return Expected(tuple(found), all(one.tells_sizes for one in objects))


@dataclass(frozen=True, slots=True)
class _Mark:
    """How far readers have come, all together."""

    samples: int
    """Begun."""
    read_samples: int
    """Those whose chunks have been asked for: in block order, of whole windows."""
    asked: list[ArrayRequests]
    """Of each array."""

    @classmethod
    def of(cls, readers: Sequence[_Reader | _Mark]) -> _Mark:
        return cls(
            sum(reader.samples for reader in readers),
            sum(reader.read_samples for reader in readers),
            [sum(each, ArrayRequests()) for each in zip(*(reader.asked for reader in readers), strict=True)],
        )


def _objects_of(dataset: Dataset, arrays: Sequence[ArrayInfo], plan: SamplePlan, reading: Reading) -> list[_Objects]:
    """Those of each array; where no manifest lists what the first batches touch, some have been looked at."""
    known = KnownObjects(dataset)
    found = [_Objects(known, info, reading.entries, reading.compression_ratio) for info in arrays]
    if not dataset.url:
        return found
    first = _Reader(found, plan, reading, 0, 0).touched_first()
    unlisted = {one: [place for place in first[number] if not one.lists(place)] for number, one in enumerate(found)}
    if any(unlisted.values()):
        with contextlib.suppress(KitError, OSError):  # then it is not known, and the run will say why
            _look_at(dataset, unlisted)
    return found


def _look_at(dataset: Dataset, unlisted: Mapping[_Objects, Sequence[Place]]) -> None:
    """Look at some of these objects of each array: for size or index and, where a cache may keep them, for their tags.

    Raises:
        StoreError: for a store that cannot be read.
        CorruptChunkError: for a damaged index.
    """
    store = dataset.open_store()
    if any(isinstance(one, XarrayStore) for one, _ in leaves(store, dataset.url)):
        return  # whose chunks are cut from what xarray has read
    client = open_client(store, dataset.url, _LOOK_SECONDS, Counters(), _AT_ONCE)
    names = ObjectNames(client, dataset, FetchOnceCache(kept=dataset.names), partial(is_remote, store))
    try:
        with ThreadPoolExecutor(_AT_ONCE, "kit-look") as threads:
            for objects, places in unlisted.items():
                stored = run_sync(partial(StoredArray.open, store, objects.info), dataset.url, _LOOK_SECONDS)
                some = sorted(places)[:: max(1, -(-len(places) // _LOOKED_AT))]
                keys = [stored.object_key(place) for place in some]
                if objects.keeps:
                    found = threads.map(lambda key: names.claim(key).result(), keys)
                    objects.names = dict(zip(some, found, strict=True))
                if stored.per_shard is None:
                    sizes = {key: names.sizes[key] for key in keys if key in names.sizes}
                    absent = {key for key, at in zip(keys, some, strict=True) if objects.names.get(at, "") is None}
                    sizes |= sizes_of_objects(store, {*keys} - {*sizes} - absent, dataset.url)
                    if sizes:  # else its server may tell none
                        objects.there = {at: key in sizes for key, at in zip(keys, some, strict=True)}
                    objects.typical_bytes = statistics.fmean(sizes.values()) if sizes else None
                else:
                    read = partial(read_index, client, stored, url=dataset.url)
                    indexes = dict(zip(some, threads.map(read, keys), strict=True))
                    objects.there = {at: index is not None for at, index in indexes.items()}
                    objects.learn(indexes)
    finally:
        client.close()
        store.close()


class _Objects:
    """The objects of one array; what a read cache holds of them, shared by all readers."""

    def __init__(self, known: KnownObjects, info: ArrayInfo, entries: Entries | None, compression_ratio: float) -> None:
        self.info, self._entries, self._stored_axes = info, entries, info.stored_axes
        self._known, self._compression_ratio = known, compression_ratio
        self.tells_sizes = True
        """Whether manifests tell the size of every object met, or some have been looked at."""
        self.keeps = entries is not None
        self.names: dict[Place, str | None] = {}
        """Under which a read cache keeps the objects that have been looked at, in their order."""
        self.there: dict[Place, bool] = {}
        """Whether each object is there that has been looked at, in their order; an absent one is its fill value."""
        self.typical_bytes: float | None = None
        """Of a stored chunk, in those."""
        self._indexes: dict[Place, tuple[Index, NDArray[np.int64]]] = {}
        """Of shards that have been looked at, with the number of each chunk in the order of the bytes."""
        self._in_c_order = False
        """Whether chunks lie in shards so, instead of in the order in which zarr-python writes them."""
        self.per_shard = info.shard and tuple(info.shard[axis] // info.chunk[axis] for axis in info.stored_axes)
        self._held: dict[Place, set[int]] = {}
        """Of each object, the chunks that the read cache holds, by their numbers; -1 for the index."""

    def again(self) -> _Objects:
        """The same for a reader with a read cache of its own."""
        other = copy.copy(self)
        other._held = {}
        return other

    def shards_met(self, met: float, readers: int, times: float) -> float:
        """Indexes that readers fetch in a run, of which they have met some in one that was so many times shorter."""
        if not self.info.shard:
            return 0.0
        all_of_them = readers * math.prod(-(-n // side) for n, side in zip(*self._outer_sides, strict=True))
        return all_of_them * float(1 - max(0.0, 1 - met / all_of_them) ** times)

    @property
    def _outer_sides(self) -> tuple[Place, Place]:
        """Of the array as it is stored, and of a shard."""
        assert self.info.shard is not None
        return self.info.stored_shape, tuple(self.info.shard[axis] for axis in self.info.stored_axes)

    @cached_property
    def index_bytes(self) -> int:
        return math.prod(self.per_shard or ()) * INDEX_ENTRY_BYTES + INDEX_CHECKSUM_BYTES

    def lists(self, outer: Place) -> bool:
        """Whether a manifest tells the objects beside this one."""
        return self._known.find(self._key(outer))[2] is not None

    def learn(self, indexes: Mapping[Place, Index | None]) -> None:
        """Take what these shards say of how chunks lie in all of them."""
        assert self.per_shard is not None
        by_code = np.argsort(morton_numbers(self.per_shard, self.per_shard), axis=None)
        sizes, more_in_c_order = list[int](), 0
        for outer, index in indexes.items():
            if index is None:
                continue
            self._know(outer, index)
            firsts, counts = index.reshape(-1, 2).astype(np.int64).T
            there = counts >= 0  # what is absent is -1 with a sign
            sizes += counts[there].tolist()
            coded = firsts[by_code][there[by_code]]
            more_in_c_order += int((np.diff(firsts[there]) > 0).sum() - (np.diff(coded) > 0).sum())
        self._in_c_order = more_in_c_order > 0
        self.typical_bytes = statistics.fmean(sizes) if sizes else None

    def _know(self, outer: Place, index: Index) -> None:
        ranks = np.empty(index[..., 0].size, np.int64)
        ranks[np.argsort(index[..., 0], axis=None)] = np.arange(len(ranks))  # the absent ones last
        self._indexes[outer] = index, ranks.reshape(index.shape[:-1])

    def place(self, coords: Place) -> tuple[Place, Place]:
        """The object that a chunk lies in, and its place in it."""
        stored = tuple([coords[axis] for axis in self._stored_axes])
        if not self.per_shard:
            return stored, ()
        outer, inner = zip(*map(divmod, stored, self.per_shard), strict=True)
        return outer, inner

    def spans(self, outer: Place, places: Iterable[Place]) -> list[tuple[int, int, int]]:
        """First and last byte of chunks in a shard, and their numbers in the order of the bytes; not of absent ones."""
        if outer in self._indexes:
            index, ranks = self._indexes[outer]
            found = [(*index[place].tolist(), int(ranks[place])) for place in places]
            return [(first, first + count, number) for first, count, number in found if first != ABSENT]
        size, found = self.chunk_bytes(outer), self._numbers(outer)[tuple(np.array([*places]).T)]
        return [(round(number * size), round((number + 1) * size), number) for number in found.tolist()]

    def _numbers(self, outer: Place) -> NDArray[np.int64]:
        """Where the chunks of a shard lie, in turn; those outside the array are not stored."""
        assert self.per_shard is not None
        limits = tuple(
            min(count, -(-size // self.info.chunk[axis]) - place * count)
            for axis, size, place, count in zip(
                self.info.stored_axes, self.info.stored_shape, outer, self.per_shard, strict=True
            )
        )
        return c_numbers(limits) if self._in_c_order else morton_numbers(self.per_shard, limits)

    def chunk_bytes(self, outer: Place) -> float:
        """Stored bytes of a chunk of this object."""
        _, key, listed = self._known.find(self._key(outer))
        if listed is None or key not in listed:
            self.tells_sizes &= listed is not None or self.typical_bytes is not None
            return self.typical_bytes or self.info.chunk_bytes / self._compression_ratio
        size = listed[key].bytes
        return (size - self.index_bytes) / self._numbers(outer).size if self.per_shard else float(size)

    def held(self, outer: Place) -> set[int]:
        """What the read cache holds of an object now."""
        if outer not in self._held:
            self._held[outer] = {*self._held_at_first(outer)}
        return self._held[outer]

    def is_tagged(self, outer: Place) -> bool:
        """Whether a reader asks for the tag of this object, to find it in a read cache."""
        return self.keeps and bool(self.names) and not self.lists(outer)

    def is_absent(self, outer: Place) -> bool:
        """Whether a reader finds that there is no such object."""
        return bool(self.there) and not self.lists(outer) and not self.there[self._looked_at_beside(outer, self.there)]

    def _looked_at_beside(self, outer: Place, looked_at: Mapping[Place, object]) -> Place:
        """The object itself, or one before or behind it: a cache is filled in order, and as far as somewhere."""
        if outer in looked_at:
            return outer
        known = [*looked_at]
        place = bisect(known, outer)
        beside = known[max(0, place - 1) : place + 1]
        return beside[hash(outer) % len(beside)]

    def _held_at_first(self, outer: Place) -> Iterable[int]:
        if not self.is_tagged(outer):
            name = self._known.name(self._key(outer))
        else:
            outer = self._looked_at_beside(outer, self.names)
            name = self.names[outer]
        if not name or self._entries is None:
            return
        if not self.per_shard:
            if self._entries.holds(name, WHOLE):
                yield 0
            return
        data = self._entries.get(name, -self.index_bytes)
        if data is None:
            return
        yield -1
        self._know(outer, data[:-INDEX_CHECKSUM_BYTES].view("<u8").reshape(*self.per_shard, 2))
        for first, last, number in self.spans(outer, np.ndindex(*self.per_shard)):
            if self._entries.holds(name, (first, last)):
                yield number

    def _key(self, outer: Place) -> str:
        return "/".join([self.info.name, "c", *map(str, outer)])


class _Reader:
    """One process that reads, batch after batch."""

    def __init__(
        self, objects: Sequence[_Objects], plan: SamplePlan, reading: Reading, rank: int, process: int
    ) -> None:
        self._objects, self._plan, self._reading, self._rank = objects, plan, reading, rank
        self._steps = range(process, plan.batches_per_epoch, reading.processes)
        self.samples = self.read_samples = self.touched = 0
        self.asked = [ArrayRequests() for _ in objects]
        """Of each array."""
        self.first_window: _Mark | None = None
        """Where the first window ended, which shares its chunks with none before."""
        self._epoch, self._served, self._begun = 0, 0, 0
        self._met: set[tuple[int, Place]] = set()
        self._joined: deque[set[tuple[int, Place]]] = deque(maxlen=reading.joins or None)
        self._kept: OrderedDict[tuple[int, Place], int] = OrderedDict()
        self._kept_bytes = 0
        self._window, self._pinned_steps = -1, 0
        self._pinned: deque[set[tuple[int, Place]]] = deque(maxlen=WINDOWS_DECODED)
        batch = batch_bytes([one.info for one in objects], plan.batch_size, plan.patch)
        chunk = largest_chunk_bytes([one.info for one in objects])
        others = READY_TOO * reading.requests_in_flight * chunk + (reading.ahead + 2) * batch
        left_bytes = reading.memory_bytes * (1 - 1 / HOLES_SHARE) - others
        self._most_pinned = left_bytes / chunk * 2 / 3
        """Chunks of two windows, up to which a third is requested too."""
        self._most_transient = (left_bytes - reading.cache_bytes) / chunk / TRANSIENT_SHARE / KEPT_AT_ONCE
        """Chunks of batches in flight, up to which all of them stay until their batches are whole."""

    def serve_one(self) -> None:
        """Hand over the next batch, and begin those that the engine begins then."""
        if not self._steps:
            return
        if self._served == len(self._steps):
            self._epoch, self._served, self._begun = self._epoch + 1, 0, 0
            self._window, self._pinned_steps = -1, 0
            self._pinned.clear()
            self._joined.clear()  # all of them are handed over when an epoch ends
        self._served += 1
        most = min(len(self._steps), self._served + self._reading.ahead)
        if self._plan.windows is not None:
            self._begin_windows(most)
            return
        for number in range(self._begun, most):
            self._begin(self._steps[number])
        self._begun = most

    def touched_first(self) -> list[list[Place]]:
        """The objects of each array that the first batches touch."""
        found: list[dict[Place, None]] = [{} for _ in self._objects]
        for number, coords in self._touched(self._steps[: self._reading.ahead + 1]):
            found[number].setdefault(self._objects[number].place(coords)[0])
        return [[*places] for places in found]

    def _begin(self, step: int) -> None:
        wanted = self._touched([step])
        self.samples += len(self._plan.positions(step, self._rank))
        self.read_samples = self.samples
        missing = [chunk for chunk in wanted if not self._is_here(chunk)]
        self._request(missing)
        if self._reading.joins:
            many = len(wanted) * (1 + len(self._joined)) > self._most_transient
            spare = not many or len({*wanted}.union(*self._joined)) <= self._most_transient
            self._joined.append({*(wanted if spare and not self._reading.is_planned else missing)})
        self._keep(wanted)

    def _is_here(self, chunk: tuple[int, Place]) -> bool:
        return chunk in self._kept or any(chunk in batch for batch in self._joined)

    def _keep(self, chunks: Iterable[tuple[int, Place]]) -> None:
        """Use these of the decoded chunks, the least recently used of which go."""
        if not self._reading.cache_bytes:
            return
        for chunk in chunks:
            if chunk not in self._kept:
                self._kept_bytes += self._objects[chunk[0]].info.chunk_bytes
            self._kept[chunk] = 1
            self._kept.move_to_end(chunk)
        while self._kept_bytes > self._reading.cache_bytes:
            (array, _), _ = self._kept.popitem(last=False)
            self._kept_bytes -= self._objects[array].info.chunk_bytes

    def _begin_windows(self, most: int) -> None:
        """Whole windows are read: that being served, the next, and the one after it where memory allows."""
        for number in range(self._begun, most):
            self.samples += len(self._plan.positions(self._steps[number], self._rank))
        self._begun, last = most, len(self._steps)
        until = self._window_of(self._served - 1) + WINDOWS_DECODED
        while self._pinned_steps < last and (
            self._window + 1 < until or (self._window < until and sum(map(len, self._pinned)) <= self._most_pinned)
        ):
            self._window += 1
            first = self._pinned_steps
            while self._pinned_steps < last and self._window_of(self._pinned_steps) <= self._window:
                self._pinned_steps += 1
            steps = self._steps[first : self._pinned_steps]
            wanted = {*self._touched(steps)}
            self.read_samples += sum(len(self._plan.positions(step, self._rank)) for step in steps)
            self._request(sorted(wanted.difference(*self._pinned)))
            self._pinned.append(wanted)
            if self.first_window is None:
                self.first_window = _Mark(self.samples, self.read_samples, [*map(copy.copy, self.asked)])

    def _window_of(self, number: int) -> int:
        return self._plan.window(self._epoch, self._steps[number], self._rank)

    def _touched(self, steps: Sequence[int]) -> list[tuple[int, Place]]:
        found: dict[tuple[int, Place], None] = {}
        for step in steps:
            offsets = self._plan.batch(self._epoch, step, self._rank)
            for number, array in enumerate(self._objects):
                places = touched(offsets, self._plan.patch, array.info.chunk, array.info.matched)
                self.touched += max(_TOUCHED_AT_LEAST, len(places))
                found.update(dict.fromkeys((number, place) for place in places))
        return [*found]

    def _request(self, chunks: Iterable[tuple[int, Place]]) -> None:
        """Send what the read cache does not hold; neighbours in a shard together."""
        by_object: defaultdict[tuple[int, Place], set[Place]] = defaultdict(set)
        for number, coords in chunks:
            self.asked[number].chunks += 1
            outer, inside = self._objects[number].place(coords)
            by_object[number, outer].add(inside)
        for (number, outer), places in by_object.items():
            array = self._objects[number]
            held, first = array.held(outer) if array.keeps else set(), (number, outer) not in self._met
            self._met.add((number, outer))
            asked = self.asked[number]
            asked.requests += first and array.is_tagged(outer)
            if array.is_absent(outer):  # asked for once where an index or a tag is kept of it, else by each batch
                asked.requests += first or not (array.per_shard or array.is_tagged(outer))
                continue
            if not array.per_shard:
                if 0 not in held:
                    asked.requests += 1
                    asked.stored_bytes += array.chunk_bytes(outer)
                held.add(0)
                continue
            if first and -1 not in held:
                asked.requests += 1
                asked.indexes += 1
                asked.stored_bytes += array.index_bytes
                asked.index_bytes += array.index_bytes
            held.add(-1)
            spans = [span for span in array.spans(outer, places) if span[2] not in held]
            for run in runs(spans, self._reading.coalescing):
                asked.requests += 1
                asked.stored_bytes += run.last - run.first
                held.update(range(run.items[0][2], run.items[-1][2] + 1))
