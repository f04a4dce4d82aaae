"""The readers that benchmarks/streaming.py compares, each in a process of its own that is asked by lines of JSON.

Every reader yields batches of float32 patches from the same store; a question names the layout, the order and the
reader's own settings, the answer holds samples/s after a second of warming up, seconds to the first batch, and the
reason where there is no figure. What kit asked the store for is kept in a file, so that the plain GETs ask for exactly
that. Peers are looked for in `.peers`; benchmarks/streaming.py says how they get there.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import gc
import importlib
import importlib.metadata
import itertools
import json
import multiprocessing
import os
import queue
import statistics
import sys
import threading
import time
import warnings
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numcodecs import zstd
from streaming_store import BANDS, BATCH_SIZE, BUCKET, PATCH, SIDE, Layout, config_of, field, object_store, offsets
from torch.utils.data import DataLoader, Dataset, Sampler

PEERS = Path(__file__).parents[1] / ".peers"
ANSWER = "answer "
WARM_SECONDS, SECONDS = 1.0, 2.5
AHEAD = 8
REQUESTS_IN_FLIGHT = 256
WINDOW_BYTES = 192 << 20
"""Of decoded chunks, for kit's windows or cache and tensorstore's cache: a third of the field, or it would hold all."""


@dataclass(frozen=True, kw_only=True)
class Question:
    """One measurement."""

    layout: Layout
    url: str
    address: str
    """Of the cloud."""
    order: str = "random"
    settings: dict[str, Any] = dataclasses.field(default_factory=dict)
    requests: str = ""
    """Where kit writes, and the plain GETs read, which requests were made."""
    in_flight: int = REQUESTS_IN_FLIGHT
    environment: dict[str, str] = dataclasses.field(default_factory=dict)
    """Where kit finds the buckets of a cloud that was started after this process."""

    @property
    def config(self) -> Any:
        changes = {name: value for name, value in self.settings.items() if "__" in name}
        return config_of(
            self.layout, self.url,
            **{"data__order": self.order, "loader__requests_in_flight": self.in_flight,
               "loader__window_bytes": WINDOW_BYTES} | changes,
        )  # fmt: skip


def measure(batches: Iterator[int], seconds: float = SECONDS) -> dict[str, float]:
    """Rates of an iterator that yields the samples of each batch."""
    began = time.perf_counter()
    next(batches)
    first = time.perf_counter() - began
    warm = time.perf_counter() + WARM_SECONDS
    while time.perf_counter() < warm:
        next(batches)
    samples, began, cpu, threads = 0, time.perf_counter(), time.process_time(), thread_seconds()
    while time.perf_counter() < began + seconds:
        samples += next(batches)
    elapsed, cpu = time.perf_counter() - began, time.process_time() - cpu
    each: dict[str, float] = {}
    for name, (count, *took) in thread_seconds().items():
        ran, queued = (
            1e6 * (now - then) / samples for now, then in zip(took, threads.get(name, (0, 0.0, 0.0))[1:], strict=True)
        )
        blocked = 1e6 * count * elapsed / samples - ran - queued
        each |= {f"{name}_us": ran, f"{name}_queued_us": queued, f"{name}_blocked_us": blocked}
    return each | {
        "samples_per_second": samples / elapsed, "first_seconds": first, "cpu_milliseconds": 1000 * cpu / samples
    }  # fmt: skip


def thread_seconds() -> dict[str, tuple[int, float, float]]:
    """Of each kind of thread (`kit-decode`): how many there are, their seconds on a core, and waiting for one."""
    found: dict[str, tuple[int, float, float]] = {}
    for thread in threading.enumerate():
        with contextlib.suppress(OSError):  # it has ended, or this is no Linux
            ran, queued, _ = map(int, Path(f"/proc/self/task/{thread.native_id}/schedstat").read_text().split())
            name = thread.name.rstrip("0123456789").rstrip("-")
            count, before, queued_before = found.get(name, (0, 0.0, 0.0))
            found[name] = count + 1, before + ran / 1e9, queued_before + queued / 1e9
    return found


def decompress_microseconds(layout: Layout) -> float:
    """What the library alone takes for a chunk of this layout, as many in a call as kit gives it; the best of some."""
    import zstandard

    side = layout.chunk
    frames: Any = [zstd.compress(np.ascontiguousarray(field(slice(0, side))[:, :, :side]), 3)] * 16
    sizes = np.full(len(frames), BANDS * side * side * 4, np.uint64).tobytes()
    took = []
    for _ in range(50):
        began = time.perf_counter()
        zstandard.ZstdDecompressor().multi_decompress_to_buffer(frames, decompressed_sizes=sizes)
        took.append(time.perf_counter() - began)
    return 1e6 * min(took) / len(frames)


# -- kit


def kit_engine(question: Question) -> dict[str, float]:
    """The loader that Lightning gets, from opening the store on."""
    from kit.data.patches.module import PatchData

    data = PatchData(question.config)
    with _recorded(question.requests), _decoding_timed() as decoded:
        try:
            answer = measure(_sizes(_kit_batches(data)))
        finally:
            data.teardown()
    assert data.loader is not None
    counts = data.loader.counters()
    per_sample = {name: counts[name] / counts["samples"] for name in ("requests", "bytes_read", "chunks_decoded")}
    alone = decompress_microseconds(question.layout) if question.layout.compressed else 0.0
    took, chunks = map(sum, zip(*decoded, strict=True)) if decoded else (0.0, 0)
    in_place = 1e6 * took / chunks if chunks else alone
    more = {"mixing": data.loader.mixing or 1.0, "decompress_us": alone, "decompress_in_place_us": in_place}
    return answer | per_sample | more


def kit_memory(question: Question) -> dict[str, float]:
    """Host memory that the process that reads grows by, at its peak and later on."""
    import psutil

    from kit.data.patches.module import PatchData
    from kit.machine.processes import rss_bytes

    config = question.config
    limit, data = config.loader.memory_bytes, PatchData(config)
    before = rss_bytes()
    samples, streamed, held = 0, 0, list[int]()
    reads: Any = psutil.Process()
    try:
        for batch in _kit_batches(data):
            if not held and config.loader.num_workers:  # the loader process is the youngest below this one
                reads = max(reads.children(recursive=True), key=lambda process: process.create_time())
                before = reads.memory_info().rss
            samples, streamed = samples + len(batch), streamed + batch.nbytes
            held.append(reads.memory_info().rss)
            if streamed >= question.settings["most_bytes"]:
                break
    finally:
        data.teardown()
    quarter = len(held) // 4
    later = statistics.mean(held[3 * quarter :]) - statistics.mean(held[quarter : 2 * quarter])
    grown = max(held) - before
    return {
        "limit_bytes": limit, "streamed_bytes": streamed, "grown_bytes": grown, "later_bytes": later, "samples": samples
    }  # fmt: skip


def _kit_batches(data: Any) -> Iterator[torch.Tensor]:
    data.setup()
    loader = data.train_dataloader()
    while True:
        for batch in loader:
            yield batch["values"]


def _sizes(batches: Iterator[Any]) -> Iterator[int]:
    return (len(batch) for batch in batches)


@contextlib.contextmanager
def _recorded(path: str) -> Iterator[None]:
    """Every request for an object, in the order they were made, in a file."""
    from kit.data.stores.http import Get, HttpClient

    made: list[tuple[str, int | None, int | None]] = []
    send = HttpClient._send

    def listening(self: HttpClient, asked: Get, *more: Any) -> None:
        prefix = self._url.partition("://")[2].partition("/")[2]
        made.append((f"{prefix}/{asked.key}", asked.first, asked.last))
        send(self, asked, *more)

    HttpClient._send = listening  # type: ignore[method-assign]
    try:
        yield
    finally:
        HttpClient._send = send  # type: ignore[method-assign]
        if path:
            Path(path).write_text(json.dumps(made))


@contextlib.contextmanager
def _decoding_timed() -> Iterator[list[tuple[float, int]]]:
    """Of each call that decodes several chunks: seconds on a core, and how many chunks."""
    from kit.data.stream.codec import StoredArray

    calls: list[tuple[float, int]] = []
    decode = StoredArray.decode_together

    def timed(self: StoredArray, data: Sequence[Any]) -> list[Any]:
        began = time.thread_time()
        try:
            return decode(self, data)
        finally:
            calls.append((time.thread_time() - began, len(data)))

    StoredArray.decode_together = timed  # type: ignore[method-assign]
    try:
        yield calls
    finally:
        StoredArray.decode_together = decode  # type: ignore[method-assign]


# -- plain GETs of what kit asked for: the limit


def plain_gets(question: Question) -> dict[str, float]:
    """The same ranges, the same number in flight; `client`: threads of obstore, or bare sockets.

    Nothing is decoded but, by obstore's threads, `frames_per_request` frames as long as a chunk of this layout.
    """
    made = [tuple(one) for one in json.loads(Path(question.requests).read_text())]
    client = {"obstore": _by_obstore, "sockets": _by_sockets}[question.settings["client"]]
    each = question.settings["requests_per_sample"] * BATCH_SIZE
    done = client(question, itertools.cycle(made[: len(made) - len(made) // 20]))
    return measure(_in_batches(done, each))


def _in_batches(done: Iterator[int], each: float) -> Iterator[int]:
    """A batch's worth of samples each time enough requests are through."""
    through, batches = 0, 0
    for count in done:
        through += count
        while through >= (batches + 1) * each:
            batches += 1
            yield BATCH_SIZE


def _by_obstore(question: Question, wanted: Iterator[Any]) -> Iterator[int]:
    import obstore

    store = object_store(question.address, BUCKET).store
    frames, side = question.settings.get("frames_per_request", 0.0), question.layout.chunk
    frame = zstd.compress(np.ascontiguousarray(field(slice(0, side))[:, :, :side]), 3) if frames else b""
    lock, stop, through = threading.Lock(), threading.Event(), queue.SimpleQueue[int]()

    def work() -> None:
        owed = 0.0
        while not stop.is_set():
            with lock:
                key, first, last = next(wanted)
            if first is None:
                obstore.get(store, key).bytes()
            elif first < 0:
                obstore.get(store, key, options={"range": {"suffix": -first}}).bytes()
            else:
                obstore.get_range(store, key, start=first, end=last)
                owed += frames
            while owed >= 1:
                zstd.decompress(frame)
                owed -= 1
            through.put(1)

    threads = [threading.Thread(target=work) for _ in range(question.in_flight)]
    for thread in threads:
        thread.start()
    try:
        while True:
            yield through.get()
    finally:
        stop.set()
        for thread in threads:
            thread.join()


class _Socket(asyncio.Protocol):
    """One connection that keeps one GET going."""

    def __init__(self, host: str, wanted: Iterator[Any], done: Callable[[], None]) -> None:
        self._host, self._wanted, self._done = host, wanted, done
        self._head, self._missing = b"", -1

    def connection_made(self, transport: Any) -> None:
        self._transport = transport
        self._ask()

    def _ask(self) -> None:
        key, first, last = next(self._wanted)
        span = "" if first is None else f"Range: bytes={first if first < 0 else f'{first}-{last - 1}'}\r\n"
        self._head, self._missing = b"", -1
        self._transport.write(f"GET /{BUCKET}/{key} HTTP/1.1\r\nHost: {self._host}\r\n{span}\r\n".encode())

    def data_received(self, data: bytes) -> None:
        if self._missing < 0:
            self._head += data
            head, found, body = self._head.partition(b"\r\n\r\n")
            if not found:
                return
            status = head.split(b" ", 2)[1]
            if status not in (b"200", b"206"):
                raise RuntimeError(f"the cloud answers {status.decode()}")
            lines = (line.partition(b":") for line in head.lower().split(b"\r\n"))
            self._missing = next(int(value) for name, _, value in lines if name == b"content-length") - len(body)
        else:
            self._missing -= len(data)
        if self._missing == 0:
            self._done()
            self._ask()


def _by_sockets(question: Question, wanted: Iterator[Any]) -> Iterator[int]:
    loop = asyncio.new_event_loop()
    count = 0

    def done() -> None:
        nonlocal count
        count += 1

    async def begin() -> list[Any]:
        host, port = question.address.removeprefix("http://").split(":")
        made = [loop.create_connection(lambda: _Socket(f"{host}:{port}", wanted, done), host, int(port)) for _ in
                range(question.in_flight)]  # fmt: skip
        return [transport for transport, _ in await asyncio.gather(*made)]

    connections = loop.run_until_complete(begin())
    try:
        while True:
            before = count
            loop.run_until_complete(asyncio.sleep(0.005))
            if count > before:
                yield count - before
    finally:
        for connection in connections:
            connection.abort()
        loop.run_until_complete(asyncio.sleep(0))
        loop.close()


# -- tensorstore


def tensorstore(question: Question) -> dict[str, float]:
    """The same offsets and as many batches ahead; `batched`: whether a batch's reads are handed over as one."""
    return measure(_sizes(_tensorstore_batches(question)))


def _tensorstore_batches(question: Question) -> Iterator[torch.Tensor]:
    import tensorstore as ts

    os.environ["TENSORSTORE_GCS_HTTP_URL"] = question.address
    os.environ["GOOGLE_AUTH_TOKEN_FOR_TESTING"] = "none"
    cached = WINDOW_BYTES if question.order == "block" else question.settings["loader__cache_bytes"]
    context = ts.Context({
        "cache_pool": {"total_bytes_limit": cached}, "data_copy_concurrency": {"limit": 2},
        "gcs_request_concurrency": {"limit": question.in_flight},
    })  # fmt: skip
    opened = {"recheck_cached_data": False, "recheck_cached_metadata": False, "open": True}
    folder = question.layout.path.partition("/")[2]
    arrays = [
        ts.open({"driver": "zarr3", "kvstore": {"driver": "gcs", "bucket": BUCKET, "path": f"{folder}/{name}/"},
                 **opened}, context=context, read=True).result()
        for name in question.layout.arrays
    ]  # fmt: skip
    patch = tuple(question.layout.patch.values())

    def read(places: np.ndarray, how: dict[str, Any]) -> list[list[Any]]:
        regions = [tuple(slice(first, first + side) for first, side in zip(row, patch, strict=True)) for row in
                   places.tolist()]  # fmt: skip
        return [[array[region].read(**how) for array in arrays] for region in regions]

    waiting: deque[list[list[Any]]] = deque()
    for places in offsets(question.config):
        if question.settings["batched"]:
            with ts.Batch() as batch:
                waiting.append(read(places, {"batch": batch}))
        else:
            waiting.append(read(places, {}))
        if len(waiting) > AHEAD:
            yield torch.from_numpy(np.stack([_joined(one) for one in waiting.popleft()]))


def _joined(futures: Sequence[Any]) -> np.ndarray:
    return futures[0].result() if len(futures) == 1 else np.stack([future.result() for future in futures])


# -- a Dataset of samples in a DataLoader


class Samples(Dataset[torch.Tensor]):
    """One patch for each index, read by zarr-python over obstore when it is asked for."""

    def __init__(self, question: Question) -> None:
        self._question = question
        self._arrays: list[Any] = []

    def _open(self) -> list[Any]:
        import zarr

        if not self._arrays:
            torch.set_num_threads(1)
            zarr.config.set({"async.concurrency": 64})
            store = object_store(self._question.address, self._question.layout.path, read_only=True)
            group = zarr.open_group(store, mode="r")
            self._arrays = [group[name] for name in self._question.layout.arrays]
        return self._arrays

    def __getitem__(self, place: tuple[int, ...]) -> torch.Tensor:
        patch = self._question.layout.patch.values()
        region = tuple(slice(first, first + side) for first, side in zip(place, patch, strict=True))
        read = [array[region] for array in self._open()]
        return torch.from_numpy(read[0] if len(read) == 1 else np.stack(read))


class Windows(Samples):
    """xbatcher's windows by index: it has no random offsets, so they lie on a grid of patches."""

    def __init__(self, question: Question) -> None:
        super().__init__(question)
        self._windows: Any = None

    def __getitem__(self, index: Any) -> torch.Tensor:
        if self._windows is None:
            self._windows = self._make()
        found = self._windows[index].load()
        return torch.from_numpy(np.asarray(found.to_array() if hasattr(found, "to_array") else found))

    def _make(self) -> Any:
        import xarray
        import xbatcher
        from xarray.backends.zarr import ZarrArrayWrapper
        from xarray.core.indexing import LazilyIndexedArray

        dims = tuple(self._question.layout.patch)
        variables = [xarray.Variable(dims, LazilyIndexedArray(ZarrArrayWrapper(array))) for array in self._open()]
        names = self._question.layout.arrays
        lazy = xarray.Dataset(dict(zip(names, variables, strict=True)))
        data = lazy[names[0]] if len(names) == 1 else lazy
        return xbatcher.BatchGenerator(data, input_dims=dict(self._question.layout.patch), preload_batch=False)


class _Places(Sampler[Any]):
    """Offsets in the order of the config, or shuffled windows."""

    def __init__(self, question: Question, windows: bool) -> None:
        self._question, self._windows = question, windows

    def __iter__(self) -> Iterator[Any]:
        if self._windows:
            random = np.random.default_rng(0)
            while True:
                yield from random.permutation((SIDE // PATCH) ** 2).tolist()
        for batch in offsets(self._question.config):
            yield from map(tuple, batch.tolist())


def zarr_samples(question: Question) -> dict[str, float]:
    return _measure_loader(question, Samples(question), windows=False)


def xbatcher_windows(question: Question) -> dict[str, float]:
    return _measure_loader(question, Windows(question), windows=True)


def _measure_loader(question: Question, samples: Dataset[torch.Tensor], *, windows: bool) -> dict[str, float]:
    """`workers` processes, started from a server that has imported torch and zarr and opened nothing."""
    workers = question.settings["workers"]
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch", "zarr", "obstore", "xarray", "streaming_readers"])
    loader = DataLoader(
        samples, batch_size=BATCH_SIZE, sampler=_Places(question, windows), num_workers=workers, prefetch_factor=2,
        multiprocessing_context=context,
    )  # fmt: skip
    batches = iter(loader)
    try:
        return measure(_sizes(batches))
    finally:
        batches._shutdown_workers()  # type: ignore[attr-defined]


# -- the process

READERS: dict[str, tuple[str, Callable[[Question], dict[str, float]]]] = {
    "kit": ("kit", kit_engine),
    "kit's memory": ("kit", kit_memory),
    "plain GETs": ("obstore", plain_gets),
    "tensorstore": ("tensorstore", tensorstore),
    "DataLoader + zarr": ("zarr", zarr_samples),
    "xbatcher": ("xbatcher", xbatcher_windows),
}
"""Name: (the package it is in, how it answers)."""


def version(reader: str) -> str:
    """Of the package that a reader is in; empty when it is not installed."""
    found = importlib.metadata.distributions(name=READERS[reader][0], path=[*sys.path, str(PEERS)])
    return next((package.version for package in found), "")


def serve(reader: str) -> None:
    """Answer a question for each line of stdin."""
    sys.path.append(str(PEERS))
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    for module in (
        "gcsfs",
        "obstore",
        "zarr",
        "kit.data.patches.module",
    ):  # so that no reader's first batch waits for imports
        importlib.import_module(module)
    gc.collect()
    gc.freeze()
    for line in sys.stdin:
        asked = json.loads(line)
        question = Question(**asked | {"layout": Layout(**asked["layout"])})
        os.environ.update(question.environment)
        try:
            answer: Any = READERS[reader][1](question)
        except Exception as error:  # whatever a peer raises is its answer
            answer = f"{type(error).__name__}: {error}"
        print(f"\n{ANSWER}{json.dumps(answer)}", flush=True)


if __name__ == "__main__":
    serve(sys.argv[1])
