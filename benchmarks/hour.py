"""An hour's stream of a store of 2 TB: what the process that reads has grown by, minute by minute, beside its budget.

    python benchmarks/hour.py [--minutes 60] [--step 1.0] [--allowed 64 256 1024] [--ranks 10] [--name WORDS] [--record]

One process each for 64, 256 and 1,024 MiB allowed, reading in the rank and in a loader process, random order, half of
the budget kept as decoded chunks. All run at once on one simulated cloud, and each takes a batch in every step, as a
training does. Growth counts on glibc as it is, unless the environment says otherwise: in the rank from when the
dataset is open, what that took (modules that it imports) apart, so with threads, connections and the first batches; in
a loader process from its first batch on. Slopes are those of the last half of the minutes: of the process, and of what
the rank's reader says that it keeps, since a cache that is not full yet is no leak.

With `--ranks` that many processes read one epoch instead, each its own part as a fit on so many devices would, allowed
what `--allowed` says in turn.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from at_size import SHAPE, SHARDS, serving, write_store
from publish import publish

from kit.cloud.dials import Dials
from kit.units import format_bytes

MEBIBYTE = 1 << 20
NETWORK = Dials(latency_seconds=0.03, latency_spread=0.3, total_bandwidth_bytes_per_second=100e6)


def stream(allowed_bytes: int, workers: int, rank: int, ranks: int, *, minutes: float, step_seconds: float) -> None:
    """Read as a fit does; prints at the end of each minute what the process has grown in it and those before."""
    import psutil

    from kit.config import Config
    from kit.data.patches.module import PatchData

    of_ranks = (ranks, rank)

    class RankData(PatchData):
        """One rank's part, without a Trainer that says which."""

        ranks = of_ranks

    config = Config().replace(
        {
            "data.url": "gs://big/store", "data.credentials": "anonymous", "data.patch": {"y": 64, "x": 64},
            "data.samples_per_epoch": 10_000_000, "data.standardize": False, "loader.batch_size": 16,
            "loader.batches_ahead": 2, "loader.num_workers": workers, "loader.memory_bytes": allowed_bytes,
            "loader.cache_bytes": allowed_bytes // 2,
        }
    )  # fmt: skip
    reads, data = psutil.Process(), RankData(config)
    imports = reads.memory_info().rss
    data.setup()
    before = reads.memory_info().rss
    imports, loader = before - imports, data.train_dataloader()
    batches = iter(loader)
    streamed, samples, grown, kept, marks = 0, 0, list[int](), list[int](), list[int]()
    began = time.perf_counter()
    while (now := time.perf_counter() - began) < minutes * 60:
        values = next(batches)["values"]
        if not samples and workers:  # the loader process is the youngest below this one
            reads = max(reads.children(recursive=True), key=lambda process: process.create_time())
            before = reads.memory_info().rss
        streamed, samples = streamed + values.nbytes, samples + len(values)
        marks.append(reads.memory_info().rss - before)
        if now > 60 * (len(grown) + 1):
            grown.append(max(marks))
            kept.append(loader.held_bytes)
            marks.clear()
            told = {"samples": samples, "streamed_bytes": streamed, "grown_bytes": grown, "kept_bytes": kept}
            cpu = sum(reads.cpu_times()[:2]) / (time.time() - reads.create_time())
            print(json.dumps(told | {"imports_bytes": imports, "cpu_cores": cpu}), flush=True)
        time.sleep(max(0.0, began + now + step_seconds - time.perf_counter()))
    data.teardown()


def row(allowed_bytes: int, workers: int, rank: int, ranks: int, found: dict[str, Any]) -> dict[str, Any]:
    """One line of the table, of what a stream printed."""
    grown, kept = ([one / MEBIBYTE for one in found[name]] for name in ("grown_bytes", "kept_bytes"))
    half, tenth = len(grown) // 2, max(1, len(grown) // 10)
    slope, kept_slope = (
        statistics.linear_regression(range(half, len(grown)), each[half:]).slope for each in (grown, kept)
    )
    return {
        "loader.memory_bytes MiB": allowed_bytes // MEBIBYTE,
        "in": f"rank {rank} of {ranks}" if ranks > 1 else "a loader process" if workers else "the rank",
        "imports MiB": None if workers else found["imports_bytes"] / MEBIBYTE,
        "minutes": len(grown), "samples": found["samples"], "streamed GiB": found["streamed_bytes"] / 2**30,
        f"grown after {tenth} min, MiB": grown[tenth - 1], "half way": grown[half - 1], "at the end": grown[-1],
        "most": max(grown), "most / allowed": max(grown) * MEBIBYTE / allowed_bytes,
        "MiB a minute, last half": slope, "of it kept": None if workers else kept_slope,
        "CPU cores": found["cpu_cores"],
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--step", type=float, default=1.0, help="seconds between two batches")
    parser.add_argument("--allowed", type=int, nargs="+", default=[64, 256, 1024], help="MiB")
    parser.add_argument("--ranks", type=int, default=1, help="read one epoch together, each in a process of its own")
    parser.add_argument("--name", default="an hour's stream", help="what the table is called")
    parser.add_argument("--record", action="store_true")
    parser.add_argument("--stream", nargs=4, type=int, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.stream:
        stream(*given.stream, minutes=given.minutes, step_seconds=given.step)
        return
    asked = ["--minutes", str(given.minutes), "--step", str(given.step)]
    kinds = [(allowed * MEBIBYTE, workers, 0, 1) for allowed in given.allowed for workers in (0, 1)]
    if given.ranks > 1:
        allowed = itertools.cycle(given.allowed)
        kinds = [(next(allowed) * MEBIBYTE, 0, rank, given.ranks) for rank in range(given.ranks)]
    with tempfile.TemporaryDirectory() as folder:
        write_store(Path(folder))
        with serving(Path(folder), NETWORK) as environment:
            started = [
                subprocess.Popen(
                    [sys.executable, __file__, *asked, "--stream", *map(str, kind)],
                    stdout=subprocess.PIPE, env=environment,
                )
                for kind in kinds
            ]  # fmt: skip
            found = [json.loads(one.communicate()[0].splitlines()[-1]) for one in started]  # the last is of all minutes
    table = [row(*kind, one) for kind, one in zip(kinds, found, strict=True)]
    store = f"{format_bytes(SHAPE[0] * SHAPE[1] * SHAPE[2] * 4)} in {SHARDS:,} shards"
    publish(given.name, table, record=given.record, store=store, cloud=NETWORK.to_dict())


if __name__ == "__main__":
    main()
