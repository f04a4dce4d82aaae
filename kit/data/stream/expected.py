"""Expected reading: what the first batches of a run will ask of a store, played through before a request is sent.

The offsets of a plan are known, so the chunks of every batch are, and with them what is shared: within a batch, with
the decoded chunks that are kept, with the read cache as it is filled now and as the run fills it, and in block order
within a window. As the engine does, the batches read ahead count, and whole windows. Objects have the sizes that a
manifest tells; the chunks of one are taken to be of one size, in the order in which zarr writes them.

A chunk is there for as many batches as are read ahead (`kit.data.stream.chunk_cache`), where memory is spare, whether
reading or training is the slower. Known error, measured on a store of 144 chunks: requests 0 to 5 % where a step takes
10 ms, up to 13 % where none takes any time, as batches then wait for each other; up to 20 % too few where decoded
chunks are kept, as which are evicted depends on the order in which threads decode. What a request brings between the
chunks that were wanted counts as kept at once, so a read cache that fills may be asked for up to a fifth more bytes.
"""

from __future__ import annotations

import math
from collections import OrderedDict, defaultdict, deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import product

from kit.chunks.requests import Coalescing, Place, morton_numbers, runs
from kit.chunks.resources import HOLES_SHARE, READY_TOO
from kit.data.dataset import ArrayInfo, Dataset
from kit.data.sampling import SamplePlan
from kit.data.stores.disk_cache import WHOLE, Entries
from kit.data.stream.cached import KnownObjects
from kit.data.stream.codec import ABSENT, INDEX_CHECKSUM_BYTES, INDEX_ENTRY_BYTES
from kit.data.stream.memory import batch_bytes, largest_chunk_bytes
from kit.data.stream.receive import WINDOWS_DECODED
from kit.data.stream.scatter import touched

_MOST_TOUCHED = 200_000
"""Chunks of batches; more are not played through."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Expected:
    """Of all ranks, in the batches begun."""

    samples: int
    requests: int
    stored_bytes: float | None
    """None where the store does not tell the sizes of its objects."""


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


def expect(dataset: Dataset, arrays: Sequence[ArrayInfo], plan: SamplePlan, reading: Reading) -> Expected | None:
    """What a run will ask of the store; None where it is too long to be played through."""
    readers: list[_Reader] = []
    objects: list[_Objects] = []
    known = KnownObjects(dataset)
    for rank, process in product(range(plan.world_size), range(reading.processes)):
        if not objects or not reading.shared:
            objects = [_Objects(known, info, reading.entries) for info in arrays]
        readers.append(_Reader(objects, plan, reading, rank, process))
    touched_chunks = 0
    steps = math.ceil(reading.batches / reading.processes)
    for _ in range(steps):
        for reader in readers:
            touched_chunks += reader.serve_one()
        if touched_chunks > _MOST_TOUCHED:
            return None
    sizes = [reader.stored_bytes for reader in readers]
    return Expected(
        samples=sum(reader.samples for reader in readers),
        requests=sum(reader.requests for reader in readers),
        stored_bytes=sum(sizes) if all(one.tells_sizes for one in objects) else None,
    )


class _Objects:
    """The objects of one array; what a read cache holds of them, shared by all readers."""

    def __init__(self, known: KnownObjects, info: ArrayInfo, entries: Entries | None) -> None:
        self.info, self._entries = info, entries
        self._known = known
        self.tells_sizes = True
        """Whether manifests tell the size of every object met."""
        self.keeps = entries is not None
        self.per_shard = info.shard and tuple(info.shard[axis] // info.chunk[axis] for axis in info.stored_axes)
        self._held: dict[Place, set[int]] = {}
        """Of each object, the chunks that the read cache holds, by their numbers; -1 for the index."""

    @cached_property
    def index_bytes(self) -> int:
        return math.prod(self.per_shard or ()) * INDEX_ENTRY_BYTES + INDEX_CHECKSUM_BYTES

    def place(self, coords: Place) -> tuple[Place, Place]:
        """The object that a chunk lies in, and its place in it."""
        stored = tuple(coords[axis] for axis in self.info.stored_axes)
        if not self.per_shard:
            return stored, ()
        pairs = [divmod(place, count) for place, count in zip(stored, self.per_shard, strict=True)]
        return tuple(outer for outer, _ in pairs), tuple(inner for _, inner in pairs)

    def numbers(self, outer: Place) -> dict[Place, int]:
        """Where the chunks of a shard lie, in turn; those outside the array are not stored."""
        assert self.per_shard is not None
        limits = tuple(
            min(count, -(-size // self.info.chunk[axis]) - place * count)
            for axis, size, place, count in zip(
                self.info.stored_axes, self.info.stored_shape, outer, self.per_shard, strict=True
            )
        )
        return morton_numbers(self.per_shard, limits)

    def chunk_bytes(self, outer: Place) -> float:
        """Stored bytes of a chunk of this object."""
        _, key, listed = self._known.find(self._key(outer))
        self.tells_sizes &= listed is not None
        if listed is None or key not in listed:
            return float(self.info.chunk_bytes)
        size = listed[key].bytes
        return (size - self.index_bytes) / len(self.numbers(outer)) if self.per_shard else float(size)

    def held(self, outer: Place) -> set[int]:
        """What the read cache holds of an object now."""
        if outer not in self._held:
            self._held[outer] = {*self._held_at_first(outer)}
        return self._held[outer]

    def _held_at_first(self, outer: Place) -> Iterable[int]:
        name = self._known.name(self._key(outer))
        if name is None or self._entries is None:
            return
        if not self.per_shard:
            if self._entries.holds(name, WHOLE):
                yield 0
            return
        data = self._entries.get(name, -self.index_bytes)
        if data is None:
            return
        yield -1
        index = data[:-INDEX_CHECKSUM_BYTES].view("<u8").reshape(*self.per_shard, 2)
        for inside, number in self.numbers(outer).items():
            first, count = index[inside].tolist()
            if first != ABSENT and self._entries.holds(name, (first, first + count)):
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
        self.samples = self.requests = 0
        self.stored_bytes = 0.0
        self._epoch, self._served, self._begun = 0, 0, 0
        self._indexes: set[tuple[int, Place]] = set()
        self._joined: deque[set[tuple[int, Place]]] = deque(maxlen=reading.joins or None)
        self._kept: OrderedDict[tuple[int, Place], int] = OrderedDict()
        self._kept_bytes = 0
        self._window, self._pinned_steps = -1, 0
        self._pinned: deque[set[tuple[int, Place]]] = deque(maxlen=WINDOWS_DECODED)
        batch = batch_bytes([one.info for one in objects], plan.batch_size, plan.patch)
        chunk = largest_chunk_bytes([one.info for one in objects])
        others = READY_TOO * reading.requests_in_flight * chunk + (reading.ahead + 2) * batch
        self._most_pinned = (reading.memory_bytes * (1 - 1 / HOLES_SHARE) - others) / chunk * 2 / 3
        """Chunks of two windows, up to which a third is requested too."""

    def serve_one(self) -> int:
        """Hand over the next batch, and begin those that the engine begins then; returns the chunks touched."""
        if not self._steps:
            return 0
        if self._served == len(self._steps):
            self._epoch, self._served, self._begun = self._epoch + 1, 0, 0
            self._window, self._pinned_steps = -1, 0
            self._pinned.clear()
        self._served += 1
        most = min(len(self._steps), self._served + self._reading.ahead)
        if self._plan.windows is not None:
            return self._begin_windows(most)
        chunks = 0
        for number in range(self._begun, most):
            chunks += self._begin(self._steps[number])
        self._begun = most
        return chunks

    def _begin(self, step: int) -> int:
        wanted = self._touched([step])
        self.samples += len(self._plan.positions(step, self._rank))
        missing = [chunk for chunk in wanted if not self._is_here(chunk)]
        self._request(missing)
        if self._reading.joins:
            self._joined.append({*wanted})
        self._keep(wanted)
        return len(wanted)

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

    def _begin_windows(self, most: int) -> int:
        """Whole windows are read: that being served, the next, and the one after it where memory allows."""
        for number in range(self._begun, most):
            self.samples += len(self._plan.positions(self._steps[number], self._rank))
        self._begun, last, chunks = most, len(self._steps), 0
        until = self._window_of(self._served - 1) + WINDOWS_DECODED
        while self._pinned_steps < last and (
            self._window + 1 < until or (self._window < until and sum(map(len, self._pinned)) <= self._most_pinned)
        ):
            self._window += 1
            first = self._pinned_steps
            while self._pinned_steps < last and self._window_of(self._pinned_steps) <= self._window:
                self._pinned_steps += 1
            wanted = {*self._touched(self._steps[first : self._pinned_steps])}
            self._request(sorted(wanted.difference(*self._pinned)))
            self._pinned.append(wanted)
            chunks += len(wanted)
        return chunks

    def _window_of(self, number: int) -> int:
        return self._plan.window(self._epoch, self._steps[number], self._rank)

    def _touched(self, steps: Sequence[int]) -> list[tuple[int, Place]]:
        found: dict[tuple[int, Place], None] = {}
        for step in steps:
            offsets = self._plan.batch(self._epoch, step, self._rank)
            for number, array in enumerate(self._objects):
                places = touched(offsets, self._plan.patch, array.info.chunk, array.info.matched)
                found.update(dict.fromkeys((number, place) for place in places))
        return [*found]

    def _request(self, chunks: Iterable[tuple[int, Place]]) -> None:
        """Send what the read cache does not hold; neighbours in a shard together."""
        by_object: defaultdict[tuple[int, Place], set[Place]] = defaultdict(set)
        for number, coords in chunks:
            outer, inside = self._objects[number].place(coords)
            by_object[number, outer].add(inside)
        for (number, outer), places in by_object.items():
            array = self._objects[number]
            held, size = array.held(outer) if array.keeps else set(), array.chunk_bytes(outer)
            if not array.per_shard:
                self._count(0 not in held, size)
                held.add(0)
                continue
            if (number, outer) not in self._indexes:
                self._indexes.add((number, outer))
                self._count(-1 not in held, array.index_bytes)
                held.add(-1)
            numbers = array.numbers(outer)
            missing = {numbers[place] for place in places} - held
            spans = [(round(place * size), round((place + 1) * size), place) for place in missing]
            for run in runs(spans, self._reading.coalescing):
                self._count(True, run.last - run.first)
                held.update(range(run.items[0][2], run.items[-1][2] + 1))

    def _count(self, requested: bool, size_bytes: float) -> None:
        if requested:
            self.requests += 1
            self.stored_bytes += size_bytes
