"""Streaming: samples per second of random patches from a simulated cloud, kit beside its peers, in one run.

    python benchmarks/streaming.py [random] [block] [memory] [small] [peers] [--layouts 0 1] [--in-flight 256]
                                   [--record]

Batches of 64 random patches of 64 × 64 × 4 float32 from a cloud with 30 ms to the first byte, 80 MB/s a connection,
400 MB/s and 5,000 requests/s in total, in a process of its own on the same cores. Every reader has a process of its
own, which has frozen what it imported as the processes of kit's trials do (`gc.freeze`: else each full collection stops
all threads for a third of a second), and is asked in turn; each may have 256 requests in flight (64 in the last row)
and 8 batches ahead. "plain GETs" ask for the very ranges that kit asked for, as many at once as may be, and decode
nothing: the faster of obstore in threads and bare sockets on an event loop. kit may pass them where the cloud refuses
requests or the wire is crowded, since it opens no more than help; tensorstore is the faster of one read for a patch and
one for a batch; a DataLoader has the best of the worker counts tried, in brackets. Ratios are medians over rounds.
xbatcher has windows on a grid but no random offsets, which spares it three of four requests where a chunk is a patch:
"kit, grid" reads the same windows, in an order of its own, and is what xbatcher is compared with. Every chunk is kept
no longer than the batches under way need it, but in the row with a cache of 192 MiB, which kit and tensorstore have: on
that layout the wire is full, and only bytes that are not asked for again make reading faster.

"small" (by name only) is one layout of the first table, small zstd chunks in shards, at 256 and 64 in flight, with what
binds it: beside the plain GETs the same with as many chunks decompressed and nothing more, which is what these cores,
shared with the cloud, leave to any reader on such GETs; CPU milliseconds are the reader's own, for a sample. Then where
kit's microseconds go: decoding in zstd's own library while kit streams ("zstd"), whose bytes come from memory and go
there, and what it takes for a few chunks again and again ("zstd alone", a part of it); the rest of the threads that
plan, decode and copy; the thread of requests; and the cloud's process. "cores" are those
that a reader and the cloud had, "kit on all cores" is what it would reach with all of them. Beyond 5,000 requests/s the
cloud refuses. A second table divides all that the cores give while a chunk comes through among the cloud, the reader's
requests, zstd and the rest, and what nobody of these used: idle, or others on the machine. What kit's threads spend
waiting is beside it: for a core while they could run, and blocked, the decoding ones for Python's lock or for work.

"peers" (by name only) is the first table with plain GETs and tensorstore alone. `--layouts` are numbers of those of the
first table, for it and for "peers"; the rows with a cache and with 64 in flight come with all of them alone.

Block order reads a window of chunks, 192 MiB decoded, for many samples; the field has 576 MiB. With a reuse of 1 a
visit to a block draws as many patches as fit it side by side, with 4 four times as many. tensorstore is given the same
offsets and as large a cache; the eight workers of a DataLoader read sample by sample.

Memory is what the process grows by at its peak, from before the store is opened on and with everything imported, while
it streams ten times `loader.memory_bytes`, at most 4 GiB: batches, chunks, cache or window, connections, threads, and
what the allocator holds. "later" is by how much more it holds on average in the last quarter than in the second, which
must not add up over an hour. With a loader process it is that one which is measured, from its first batch on.

Peers that are no part of kit are installed beside the environment, not into it:

    pip install --no-deps --target .peers tensorstore ml_dtypes xbatcher

Of other loaders, zarrdataset and cellmap-data read Zarr 2 only, insitubatch wants Python 3.12, and it and zarr-beluga
read whole fields along one axis and no patches.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import Any, Self

import psutil
from publish import publish
from streaming_readers import ANSWER, READERS, REQUESTS_IN_FLIGHT, WINDOW_BYTES, Question, version
from streaming_store import Layout, write

from kit.cloud.simulated import SimulatedCloud, simulated_cloud

SITUATION = "same region"
LAYOUTS = (
    Layout(chunk=64, compressed=False),
    Layout(chunk=128, compressed=False),
    Layout(chunk=256),
    Layout(chunk=64, shard=1024),
    Layout(chunk=128, compressed=False, together=False),
)
FEW_IN_FLIGHT = (LAYOUTS[0], 64, 0)
CACHED = (LAYOUTS[1], REQUESTS_IN_FLIGHT, WINDOW_BYTES)
ROUNDS = 3
WORKERS = {"DataLoader + zarr": (8, 16), "xbatcher": (8, 16)}
"""Tried on the first layout; the best is kept for the others."""
BLOCK_LAYOUTS = (Layout(chunk=128), LAYOUTS[3])
MEMORY_LAYOUT = BLOCK_LAYOUTS[0]
BLOCK_WORKERS = 8
BLOCK_REUSES = (1, 4)
MEMORY_LIMITS = {"56 MiB": "16 MiB", "64 MiB": "16 MiB", "256 MiB": "64 MiB", "1024 MiB": "256 MiB"}
"""Allowed in all, and of it for the cache or the window."""
TIMES, MOST_STREAMED_BYTES = 10, 4 << 30
Answer = dict[str, float]


class Child:
    """A Python process that answers lines of JSON, a text where it has no answer."""

    def __init__(self, *command: str, **options: Any) -> None:
        self._process = subprocess.Popen(
            [sys.executable, *command], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
            text=True, **options,
        )  # fmt: skip

    def ask(self, question: object) -> Any:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        print(json.dumps(question), file=self._process.stdin, flush=True)
        line = next((line for line in self._process.stdout if line.startswith(ANSWER)), f'{ANSWER}"it has ended"')
        return json.loads(line.removeprefix(ANSWER))

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()


class Readers:
    """A process for each reader that is installed; ends them all."""

    def __init__(self, names: Sequence[str] = tuple(READERS)) -> None:
        self.in_flight = REQUESTS_IN_FLIGHT
        self._children: dict[str, Child] = {}
        self._file = tempfile.NamedTemporaryFile(suffix=".json")  # noqa: SIM115 - closed with the processes
        script = __file__.replace("streaming.py", "streaming_readers.py")
        for name in names:
            if version(name):
                self._children[name] = Child(script, name)
            else:
                print(f"{name} is left out: it is not installed; {__file__} says how in its first lines")

    def __contains__(self, name: str) -> bool:
        return name in self._children

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for child in self._children.values():
            child.close()
        self._file.close()

    def ask(self, name: str, cloud: SimulatedCloud, layout: Layout, order: str = "random", **settings: Any) -> Answer:
        question = Question(
            layout=layout, url=cloud.url(layout.path), address=cloud.address, order=order, settings=settings,
            in_flight=self.in_flight, requests=self._file.name,
            environment={"KIT_ENDPOINTS": os.environ["KIT_ENDPOINTS"]},
        )  # fmt: skip
        answer = self._children[name].ask(asdict(question))
        if isinstance(answer, str):
            print(f"{name} has no answer for {layout.name}, {order} order: {answer}")
            return {"samples_per_second": float("nan"), "first_seconds": float("nan")}
        return dict(answer)


# -- one layout


def rounds(
    readers: Readers, cloud: SimulatedCloud, layout: Layout, order: str, **settings: Any
) -> Iterator[dict[str, Answer]]:
    """What kit, the plain GETs and tensorstore answer, turn by turn; the better way of the last two is found first."""
    ways = {
        "plain GETs": [{"client": "obstore"}, {"client": "sockets"}],
        "tensorstore": [{"batched": False}, {"batched": True}],
    }
    for _ in range(ROUNDS):
        answers = {"kit": readers.ask("kit", cloud, layout, order, **settings)}
        for name in filter(readers.__contains__, ways):
            more = settings | ({"requests_per_sample": answers["kit"]["requests"]} if name == "plain GETs" else {})
            tried = [(readers.ask(name, cloud, layout, order, **way, **more), way) for way in ways[name]]
            answers[name], best = max(tried, key=lambda one: one[0]["samples_per_second"])
            ways[name] = [best]
        yield answers


def loaders(
    readers: Readers,
    cloud: SimulatedCloud,
    layout: Layout,
    order: str,
    workers: dict[str, Sequence[int]],
    **settings: Any,
) -> dict[str, tuple[float, int]]:
    """Samples/s and workers of each DataLoader at its best."""
    found = {}
    for name in filter(readers.__contains__, workers):
        tried = [(readers.ask(name, cloud, layout, order, workers=count, **settings), count) for count in workers[name]]
        rates = [(answer["samples_per_second"], count) for answer, count in tried]
        found[name] = max(rates)
    return found


def median(rows: Sequence[dict[str, Answer]], name: str, figure: str = "samples_per_second") -> float:
    return statistics.median(row[name][figure] for row in rows) if name in rows[0] else float("nan")


def ratio(rows: Sequence[dict[str, Answer]], name: str) -> float:
    pairs = [(row["kit"], row[name]) for row in rows if name in row]
    return statistics.median(
        ours["samples_per_second"] / theirs["samples_per_second"] for ours, theirs in pairs
    ) if pairs else float("nan")  # fmt: skip


def alone(readers: Readers, cloud: SimulatedCloud, layout: Layout, order: str, **settings: Any) -> float:
    """Samples/s of kit in another order."""
    answers = [readers.ask("kit", cloud, layout, order, **settings) for _ in range(ROUNDS)]
    return statistics.median(answer["samples_per_second"] for answer in answers)


def random_rows(readers: Readers, layouts: Sequence[Layout]) -> Iterator[dict[str, Any]]:
    workers: dict[str, Sequence[int]] = dict(WORKERS)
    plain = [(layout, REQUESTS_IN_FLIGHT, 0) for layout in layouts]
    for layout, in_flight, cache_bytes in [*plain, *([CACHED, FEW_IN_FLIGHT] if len(layouts) == len(LAYOUTS) else [])]:
        row, best = random_row(layout, readers, workers, in_flight, cache_bytes)
        workers = {name: (count,) for name, (_, count) in best.items()}
        yield row


def random_row(
    layout: Layout, readers: Readers, workers: dict[str, Sequence[int]], in_flight: int, cache_bytes: int
) -> tuple[dict[str, Any], dict[str, tuple[float, int]]]:
    readers.in_flight = in_flight
    with simulated_cloud(SITUATION) as cloud:
        write(cloud, [layout])
        rows = list(rounds(readers, cloud, layout, "random", loader__cache_bytes=cache_bytes))
        best = loaders(readers, cloud, layout, "random", workers)
        grid = alone(readers, cloud, layout, "grid", loader__cache_bytes=cache_bytes)
    kit_rate = median(rows, "kit")
    row = {
        "layout": layout.name,
        "in flight": in_flight,
        "cache MiB": cache_bytes >> 20,
        "requests/sample": median(rows, "kit", "requests"),
        "kit": kit_rate,
        "kit, grid": grid,
        **{name: median(rows, name) for name in ("plain GETs", "tensorstore")},
        **{name: f"{rate:.3g} ({count})" for name, (rate, count) in best.items()},
        "kit / plain GETs": ratio(rows, "plain GETs"),
        "/ tensorstore": ratio(rows, "tensorstore"),
        **{f"/ {name}": (grid if name == "xbatcher" else kit_rate) / rate for name, (rate, _) in best.items()},
        "first batch s": median(rows, "kit", "first_seconds"),
    }
    return row, best


def peer_rows(readers: Readers, layouts: Sequence[Layout]) -> Iterator[dict[str, Any]]:
    for layout in layouts:
        with simulated_cloud(SITUATION) as cloud:
            write(cloud, [layout])
            rows = list(rounds(readers, cloud, layout, "random", loader__cache_bytes=0))
        names = ("kit", "plain GETs", "tensorstore")
        yield {
            "layout": layout.name, "in flight": readers.in_flight, **{name: median(rows, name) for name in names},
            **{f"kit / {name}": ratio(rows, name) for name in names[1:]},
        }  # fmt: skip


def small_row(readers: Readers, cloud: SimulatedCloud, layout: Layout, in_flight: int) -> dict[str, Any]:
    readers.in_flight, rows = in_flight, list[dict[str, Answer]]()
    process, counts = psutil.Process(cloud.process_id), cloud.counts()
    began = sum(process.cpu_times()[:2])
    readers.ask("kit", cloud, layout, loader__cache_bytes=0)
    request_us = 1e6 * (sum(process.cpu_times()[:2]) - began) / cloud.counts(counts).requests
    for answers in rounds(readers, cloud, layout, "random", loader__cache_bytes=0):
        ours = answers["kit"]
        more = {"frames_per_request": ours["chunks_decoded"] / ours["requests"], "client": "obstore"}
        decoded = readers.ask("plain GETs", cloud, layout, requests_per_sample=ours["requests"], **more)
        rows.append(answers | {"GETs, decompressed": decoded})
    names = ("kit", "plain GETs", "tensorstore", "GETs, decompressed")
    chunks = median(rows, "kit", "chunks_decoded")
    zstd_us, alone_us = (chunks * median(rows, "kit", f"decompress_{how}us") for how in ("in_place_", ""))
    threads = {name: median(rows, "kit", f"{name}_us") for name in ("kit-decode", "kit-http", "MainThread")}
    cloud_us = request_us * median(rows, "kit", "requests")
    taken = {name: (1000 * median(rows, name, "cpu_milliseconds") + cloud_us) / 1e6 for name in names}
    return {
        "layout": layout.name,
        "in flight": in_flight,
        "requests/sample": median(rows, "kit", "requests"),
        "chunks/sample": median(rows, "kit", "chunks_decoded"),
        **{name: median(rows, name) for name in names},
        **{f"{name}, CPU ms": median(rows, name, "cpu_milliseconds") for name in names},
        **{f"kit / {name}": ratio(rows, name) for name in names[1:]},
        "zstd, µs": zstd_us,
        "zstd alone, µs": alone_us,
        "plan, copy, µs": threads["kit-decode"] + threads["MainThread"] - zstd_us,
        "requests, µs": threads["kit-http"],
        "the cloud, µs": cloud_us,
        **{f"cores, {name}": median(rows, name) * taken[name] for name in names},
        "kit on all cores": (os.cpu_count() or 1) / taken["kit"],
        "plain GETs, requests/s": median(rows, "plain GETs") * median(rows, "kit", "requests"),
        "kit queued, µs": sum(median(rows, "kit", f"{name}_queued_us") for name in threads),
        "decoding blocked, µs": median(rows, "kit", "kit-decode_blocked_us"),
    }  # fmt: skip


def chunk_rows(row: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """What the cores give while a chunk comes through, and who took it; in microseconds."""
    chunks, cloud = row["chunks/sample"], row["the cloud, µs"]
    own = {"requests": row["requests, µs"], "zstd": row["zstd, µs"], "plan, copy": row["plan, copy, µs"],
           "zstd alone": row["zstd alone, µs"], "waits for a core": row["kit queued, µs"],
           "decoding blocked": row["decoding blocked, µs"]}  # fmt: skip
    for name in ("kit", "plain GETs", "GETs, decompressed"):
        given, reader = 1e6 * (os.cpu_count() or 1) / row[name], 1000 * row[f"{name}, CPU ms"]
        parts = {
            "all cores": given,
            "the cloud": cloud,
            "the reader": reader,
            "nobody of these": given - cloud - reader,
        }
        parts |= own if name == "kit" else dict.fromkeys(own, math.nan)
        yield {"reader": name, "in flight": row["in flight"], **{part: us / chunks for part, us in parts.items()}}


def small_rows(readers: Readers, all_in_flight: Sequence[int]) -> Iterator[dict[str, Any]]:
    layout = BLOCK_LAYOUTS[1]
    with simulated_cloud(SITUATION) as cloud:
        write(cloud, [layout])
        for in_flight in all_in_flight:
            yield small_row(readers, cloud, layout, in_flight)


def block_rows(readers: Readers) -> Iterator[dict[str, Any]]:
    readers.in_flight = REQUESTS_IN_FLIGHT
    for layout in BLOCK_LAYOUTS:
        with simulated_cloud(SITUATION) as cloud:
            write(cloud, [layout])
            plain = alone(readers, cloud, layout, "random")
            for reuse in BLOCK_REUSES:
                yield block_row(layout, reuse, plain, cloud, readers)


def block_row(layout: Layout, reuse: int, plain: float, cloud: SimulatedCloud, readers: Readers) -> dict[str, Any]:
    settings, name = {"loader__block_reuse": float(reuse)}, "DataLoader + zarr"
    rows = list(rounds(readers, cloud, layout, "block", **settings))
    rate, _ = loaders(readers, cloud, layout, "block", {name: (BLOCK_WORKERS,)}, **settings)[name]
    kit_rate = median(rows, "kit")
    return {
        "layout": layout.name,
        "reuse": reuse,
        "requests/sample": median(rows, "kit", "requests"),
        "mixing": median(rows, "kit", "mixing"),
        "kit": kit_rate,
        "kit, random": plain,
        **{name: median(rows, name) for name in ("plain GETs", "tensorstore")},
        f"{BLOCK_WORKERS} workers": rate,
        "kit / plain GETs": ratio(rows, "plain GETs"),
        "/ random": kit_rate / plain,
        "/ tensorstore": ratio(rows, "tensorstore"),
        f"/ {BLOCK_WORKERS} workers": kit_rate / rate,
        "first batch s": median(rows, "kit", "first_seconds"),
    }


def memory_row(order: str, limit: str, workers: int, cloud: SimulatedCloud, readers: Readers) -> dict[str, Any]:
    small = {"loader__memory_bytes": limit, "loader__batch_size": 16, "loader__batches_ahead": 2}
    small |= {"loader__num_workers": workers}
    most_bytes = min(TIMES * int(limit.split()[0]) << 20, MOST_STREAMED_BYTES)
    kept = {f"loader__{'window' if order == 'block' else 'cache'}_bytes": MEMORY_LIMITS[limit]}
    answer = readers.ask("kit's memory", cloud, MEMORY_LAYOUT, order, most_bytes=most_bytes, **small, **kept)
    mebibytes = {name: answer[f"{name}_bytes"] / 2**20 for name in ("limit", "grown", "later", "streamed")}
    return {
        "order": order,
        "in": "a loader process" if workers else "the rank",
        "loader.memory_bytes MiB": mebibytes["limit"],
        "grown by MiB": mebibytes["grown"],
        "ratio": mebibytes["grown"] / mebibytes["limit"],
        "later, MiB": mebibytes["later"],
        "streamed MiB": mebibytes["streamed"],
    }


# -- tables


def memory_table(readers: Readers) -> list[dict[str, Any]]:
    with simulated_cloud(SITUATION) as cloud:
        write(cloud, [MEMORY_LAYOUT])
        kinds = [(order, limit, 0) for limit in MEMORY_LIMITS for order in ("random", "block")]
        kinds += [("random", limit, 1) for limit in MEMORY_LIMITS]
        return [memory_row(*kind, cloud, readers) for kind in kinds]


def tables(readers: Readers, wanted: Sequence[str], layouts: Sequence[Layout], in_flight: Sequence[int]) -> None:
    facts = {"cloud": SITUATION, "rounds": ROUNDS, **versions()}
    if "random" in wanted:
        publish("samples per second, random order", list(random_rows(readers, layouts)), **facts)
    if "small" in wanted:
        rows = list(small_rows(readers, in_flight))
        publish("samples per second, small zstd chunks", rows, **facts)
        publish("microseconds of a small zstd chunk", [part for row in rows for part in chunk_rows(row)], **facts)
    if "peers" in wanted:
        readers.in_flight = in_flight[0]
        publish("samples per second beside tensorstore", list(peer_rows(readers, layouts)), **facts)
    if "block" in wanted:
        publish("samples per second, block order", list(block_rows(readers)), **facts)
    if "memory" in wanted:
        publish("host memory of a loader", memory_table(readers), layout=MEMORY_LAYOUT.name)


def versions() -> dict[str, str]:
    return {package: version(name) for name, (package, _) in READERS.items() if package != "kit" and version(name)}


def main() -> None:
    known, by_name = ("random", "block", "memory"), ("small", "peers")
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("tables", nargs="*", metavar="TABLE", help=", ".join((*known, *by_name)))
    parser.add_argument(
        "--layouts", type=int, nargs="+", default=[*range(len(LAYOUTS))], help="numbers, for random, peers"
    )
    parser.add_argument("--in-flight", type=int, nargs="+", default=[REQUESTS_IN_FLIGHT, 64], help="for small, peers")
    given, rest = parser.parse_known_args()
    sys.argv[1:] = rest
    wanted = given.tables or list(known)
    few = {*wanted} <= {*by_name}
    with Readers(("kit", "plain GETs", "tensorstore") if few else tuple(READERS)) as readers:
        tables(readers, wanted, [LAYOUTS[number] for number in given.layouts], given.in_flight)


if __name__ == "__main__":
    main()
