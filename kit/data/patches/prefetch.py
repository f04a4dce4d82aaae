"""Prefetch: fills `cache.folder` with all that a config reads, so that no trial afterwards waits for the store.

Objects are read whole, in few long requests, and kept chunk by chunk as the engine keeps them
(`kit.data.stream.cached`). What is there already is not requested again, so a prefetch that was stopped goes on where
it was. Nothing is decoded.
"""

from __future__ import annotations

import itertools
import threading
import time
import warnings
from collections.abc import Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from functools import partial
from math import prod

import numpy as np
from zarr.core.sync import sync

from kit.arguments import takes_config
from kit.chunks.requests import Coalescing, runs
from kit.config import Config
from kit.data.build.build import Progress, make_progress
from kit.data.dataset import Dataset
from kit.data.open_dataset import open_dataset
from kit.data.stores.counters import Counters
from kit.data.stores.disk_cache import WHOLE, ReadCache, SharedFolder
from kit.data.stores.http import Client
from kit.data.stores.url import local_folder, redact
from kit.data.stream.cached import ObjectNames
from kit.data.stream.codec import ABSENT, FetchOnceCache, StoredArray
from kit.data.stream.fetch import is_remote, open_client
from kit.data.variables import ArrayInfo
from kit.errors import ConfigError, KitWarning, PlanError, Problem, warn_caller
from kit.units import format_bytes, format_count, format_seconds

_REQUEST_BYTES = 8 << 20
"""Of one request: long enough that latency hardly counts on any network."""
_REQUEST_SECONDS = 60.0
_MOST_THREADS = 32
_OVERHEAD = 1.1
"""Of a cache over the bytes that it keeps, at most."""
_NEVER_CACHED = "{} is on this machine, and is read without a cache"


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Prefetched:
    """What a cache holds of the data of a config."""

    folder: str
    objects: int
    """Of the store, that hold the data."""
    held_bytes: int
    """Stored bytes of them that are in the cache now."""
    requests: int
    """Sent for what was not there yet."""
    bytes_read: int
    seconds: float

    def __repr__(self) -> str:
        asked = f"{format_count(self.requests)} requests brought {format_bytes(self.bytes_read)}"
        return (
            f"{self.folder}: {format_bytes(self.held_bytes)} of {format_count(self.objects)} objects are held; "
            f"{asked} in {format_seconds(self.seconds)}"
        )


@takes_config
def prefetch(config: Config, given: Dataset | None = None, *, progress: bool | Progress = True) -> Prefetched:
    """Fill the cache of a config with all the chunks that it may read, before anything is trained.

    Args:
        config: Which store and variables, and in `cache` how large the cache is and where.
        given: An open dataset, instead of the store of the config.
        progress: True shows a line that updates in place, False shows nothing, and a callable is called with (objects
            done, objects in all, bytes so far). An interrupt stops it, and the next call goes on from there.

    Returns:
        What is held, and what was requested for it.

    Raises:
        ConfigError: for a config without a cache in a folder, a folder that cannot be written, and a cache that is
            smaller than the data.
        PlanError: for a store on this machine, which is never cached.
        StoreError: for a store that cannot be read.

    Example:
        >>> with kit.cloud.simulate("no limits") as cloud:
        ...     cached = ocean.replace({
        ...         "data.url": cloud.url("bucket/far.zarr"), "cache.size_bytes": "1 GiB", "cache.folder": "cache",
        ...     })
        ...     dataset = kit.build(cached, progress=False)
        ...     found = [kit.data.prefetch(cached, progress=False) for _ in range(2)]
        >>> found[0].requests > 0, found[1].requests
        (True, 0)
    """
    if given is None and all(local_folder(url) is not None for url in (config.data.url, *config.data.more)):
        raise PlanError(_NEVER_CACHED.format(redact(config.data.url)))
    cache = ReadCache.of(config.cache)
    if cache is None:
        raise ConfigError([Problem("cache.size_bytes", "is 0, so nothing is kept; set it to the size of the data")])
    if not cache.folder:
        raise ConfigError([Problem("cache.folder", "is empty, so only this process would find it; name a folder")])
    dataset = given or open_dataset(config)
    store = dataset.open_store()
    try:
        if not is_remote(store):
            raise PlanError(_NEVER_CACHED.format(redact(dataset.url)))
        arrays = dataset.select(config.data.variables)
        _refuse_too_small(dataset, arrays, cache)
        counters = Counters()
        in_flight = min(_MOST_THREADS, config.loader.requests_in_flight)
        client = open_client(store, dataset.url, _REQUEST_SECONDS, counters, in_flight)
        try:
            names = ObjectNames(client, dataset, FetchOnceCache(kept=dataset.names), partial(is_remote, store))
            stored = [sync(StoredArray.open(store, info)) for info in arrays]
            filler = _Filler(client, names, _open_folder(cache))
            began = time.perf_counter()
            objects, held = filler.fill(stored, arrays, in_flight, make_progress(progress, "Reading", "objects"))
            _say_what_was_evicted(cache, held)
            _keep_coordinates(dataset)
        finally:
            client.close()
    finally:
        store.close()
    counts: Mapping[str, int] = counters.values()
    return Prefetched(
        folder=cache.folder, objects=objects, held_bytes=held, requests=counts["requests"],
        bytes_read=counts["bytes_read"], seconds=time.perf_counter() - began,
    )  # fmt: skip


def _refuse_too_small(dataset: Dataset, arrays: Sequence[ArrayInfo], cache: ReadCache) -> None:
    """Raises: ConfigError: where the manifest tells that the data are larger than the cache."""
    if dataset.manifest is None:
        return
    names = {info.name for info in arrays}
    needed = sum(item.bytes for item in dataset.manifest.objects if item.array in names)
    if needed > cache.size_bytes:
        message = (
            f"{format_bytes(cache.size_bytes)} cannot hold the {format_bytes(needed)} of "
            f"{', '.join(sorted(names))}; use at least {format_bytes(_OVERHEAD * needed, up=True)}, or fewer "
            "data.variables"
        )
        raise ConfigError([Problem("cache.size_bytes", message)])


def _say_what_was_evicted(cache: ReadCache, held_bytes: int) -> None:
    """Warn where the cache turned out to be too small on the way, as no manifest told before."""
    if held_bytes > cache.size_bytes:
        message = (
            f"cache.size_bytes: the data are {format_bytes(held_bytes)}, more than {format_bytes(cache.size_bytes)}; "
            "some of it is not in the cache"
        )
        warn_caller(message)


def _keep_coordinates(dataset: Dataset) -> None:
    """Those along one dimension, which splits and joins go by; reading keeps them, of stores that kit built."""
    for part in getattr(dataset, "parts", (dataset,)):
        for name, info in part.coordinates.items():
            if info.dims == (name,) and part.manifest is not None:
                part.coordinate(name)


def _open_folder(cache: ReadCache) -> SharedFolder:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", KitWarning)  # an error here, since nothing else is wanted
        folder = cache.open()
    assert isinstance(folder, SharedFolder)
    if folder.refused:
        raise ConfigError([Problem("cache.folder", f"{cache.folder} {folder.refused}")])
    return folder


class _Filler:
    """Puts objects into a cache; call from several threads."""

    def __init__(self, client: Client, names: ObjectNames, entries: SharedFolder) -> None:
        self._client, self._names, self._entries = client, names, entries
        self._stop = threading.Event()

    def fill(
        self, stored: Sequence[StoredArray], arrays: Sequence[ArrayInfo], threads: int, progress: Progress
    ) -> tuple[int, int]:
        """Every object of these arrays; returns how many there are, and their bytes that are held."""
        outer = [_outer_counts(*pair) for pair in zip(stored, arrays, strict=True)]
        total, done, held = sum(map(prod, outer)), 0, 0
        jobs = (
            (array, place)
            for array, counts in zip(stored, outer, strict=True)
            for place in itertools.product(*map(range, counts))
        )
        running: set[Future[int]] = set()
        with ThreadPoolExecutor(threads, "kit-prefetch") as pool:
            try:
                progress(0, total, 0)
                while True:
                    more = itertools.islice(jobs, 2 * threads - len(running))
                    running |= {pool.submit(self._keep, *job) for job in more}
                    if not running:
                        return total, held
                    ended, running = wait(running, return_when=FIRST_COMPLETED)
                    for future in ended:
                        held += future.result()
                        done += 1
                        progress(done, total, held)
            finally:
                self._stop.set()

    def _keep(self, stored: StoredArray, place: tuple[int, ...]) -> int:
        """Read what is missing of one object; returns the bytes of it that are held then."""
        key = stored.object_key(place)
        name = "" if self._stop.is_set() else self._names.claim(key).result()
        if not name:
            return 0
        if stored.per_shard is None:
            return self._keep_whole(key, name)
        data = self._entries.get(name, *stored.index_span)
        if data is None:
            data = self._client.read(key, *stored.index_span)
            if data is None:
                return 0
            self._entries.put(name, [(stored.index_span, data)])
        index = stored.decode_index(data, key).reshape(-1, 2)
        there = index[index[:, 1] != ABSENT].astype(np.int64).tolist()
        spans = [(first, first + count, None) for first, count in there]
        missing = [span for span in spans if not self._entries.holds(name, span[:2])]
        for run in runs(missing, Coalescing(_REQUEST_BYTES // 8, _REQUEST_BYTES)):
            if self._stop.is_set():
                break
            found = self._client.read(key, run.first, run.last)
            if found is not None and len(found) == run.last - run.first:
                parts = [((first, last), found[first - run.first : last - run.first]) for first, last, _ in run.items]
                self._entries.put(name, parts)
        return len(data) + int(sum(last - first for first, last, _ in spans))

    def _keep_whole(self, key: str, name: str) -> int:
        data = self._entries.get(name)
        if data is None:
            data = self._client.read(key)
            if data is None:
                return 0
            self._entries.put(name, [(WHOLE, data)])
        return len(data)


def _outer_counts(stored: StoredArray, info: ArrayInfo) -> tuple[int, ...]:
    """Objects of an array along its own dimensions."""
    inside = stored.per_shard or (1,) * len(stored.axes)
    sides = (stored.chunk[axis] * n for axis, n in zip(stored.axes, inside, strict=True))
    return tuple(-(-size // side) for size, side in zip(info.stored_shape, sides, strict=True))
