"""The loader setting that a calibration takes, beside exhaustive search over the same dials, on the loaders of others.

    python benchmarks/calibration.py [--seconds 170] [--only TEXT] [--again] [--record]

The loaders are those of `benchmarks/loaders.py`. Exhaustive search measures every number of processes up to the same
cap with every prefetch factor, or every combination of the engine's dials, each over all batches that a candidate is
allowed. Afterwards both choices are measured in turn, a second each (two where a cache fills first), with the same
samples, and the medians compared: the best of many noisy figures is better than what it stands for. *chance* is that
comparison of the exhaustive choice with itself. Every setting is measured in a fresh process. What is done is appended
to a file of results, and a second start goes on from there. Goals: 0.9 of the best throughput, in a third of the time.
Loaders that no rule was tuned on have a table of their own.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import os
import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from loaders import CASES, OPEN, Case
from publish import publish

from kit.config import Config
from kit.machine.machine import share
from kit.studies.calibration.fresh import in_fresh_process
from kit.studies.calibration.job import Resources, Sweep
from kit.studies.calibration.measure import MeasurementLimits, Observed, Subject, measure, subject_of
from kit.studies.calibration.rules import LoaderSetting, Measurement
from kit.studies.calibration.search import AHEAD, REQUESTS

MOST_BATCHES, TIMEOUT_SECONDS, TURNS = {"processes": 200, "engine": 100}, 10.0, 5
TURN_SECONDS = 1.0
FOLDER = Path(tempfile.gettempdir(), "kit-calibration")
RESULTS = FOLDER / "results.jsonl"


def compare(case: Case) -> dict[str, Any]:
    """One row: what calibration took, what exhaustive search found, throughput and time of one over the other."""
    subject = subject_of(case.make(FOLDER))
    most = MOST_BATCHES["engine" if subject.own else "processes"]
    config = Config().replace({
        "calibration.max_measure_batches": most, "calibration.timeout_seconds": TIMEOUT_SECONDS, **case.settings,
    })  # fmt: skip
    step = config.calibration.step_seconds or 0.0
    found = Sweep(subject, config, Resources.of(share(), 1), step=step).run()
    assert found.chosen is not None
    began = time.perf_counter()
    limits = MeasurementLimits(
        timeout_seconds=TIMEOUT_SECONDS, most_batches=most, step_seconds=step, to_the_end=True
    )  # fmt: skip
    if subject.own:
        grid = engine_grid(subject, max(item.setting.cache_bytes or 0 for item in found.measured))
    else:
        grid = process_grid(subject, int(found.limits["cpu_workers"]), config)
    size_bytes = int(found.limits["batch_bytes"])
    every = (look(subject, setting, limits, turn, size_bytes) for turn, setting in enumerate(grid))
    best = max(every, key=lambda item: item.batches_per_second)
    exhaustive_seconds = time.perf_counter() - began
    chosen, fastest, again = duel(subject, (found.chosen, best.setting, best.setting), limits, size_bytes)
    return {
        "loader": case.name, "chosen": str(found.chosen), "exhaustive": str(best.setting),
        "batches/s": chosen, "exhaustive batches/s": fastest, "ratio": chosen / fastest, "chance": again / fastest,
        "settings": f"{len(found.measured)} of {len(grid)}", "seconds": found.seconds,
        "exhaustive seconds": exhaustive_seconds, "time ratio": found.seconds / exhaustive_seconds,
    }  # fmt: skip


def look(
    subject: Subject, setting: LoaderSetting, limits: MeasurementLimits, turn: int, batch_bytes: int
) -> Measurement:
    """As a sweep does: in a fresh process, and a cache is given twice its size to fill."""

    def alone() -> Measurement:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # processes beyond the cores
            with subject.loader(setting, turn) as loader:
                return measure(loader, setting, limits, Observed(), 2 * (setting.cache_bytes or 0) // batch_bytes)

    return in_fresh_process(alone)


def process_grid(subject: Subject, most: int, config: Config) -> list[LoaderSetting]:
    """Every number of processes that is named, or up to the cap, with every prefetch factor."""
    base, asked = subject.present(), config.calibration
    pairs = itertools.product(asked.candidate_workers[1:] or range(1, most + 1), asked.candidate_prefetch)
    return [
        replace(base, num_workers=0),
        *(replace(base, num_workers=workers, prefetch_factor=factor) for workers, factor in pairs),
    ]


def engine_grid(subject: Subject, cache_bytes: int) -> list[LoaderSetting]:
    """Every second number of requests in flight with every second of batches ahead, and a cache or none."""
    base = replace(subject.present(), num_workers=0)
    return [
        replace(base, requests_in_flight=requests, batches_ahead=ahead, cache_bytes=size)
        for requests, ahead, size in itertools.product(REQUESTS[1::2], AHEAD[1::2], (0, cache_bytes))
    ]


def duel(
    subject: Subject, settings: Sequence[LoaderSetting], limits: MeasurementLimits, batch_bytes: int
) -> list[float]:
    """Median batches per second of each, taken in turn."""
    speeds: list[list[float]] = [[] for _ in settings]
    seconds = TURN_SECONDS * (2 if any(setting.cache_bytes for setting in settings) else 1)
    limits = replace(limits, timeout_seconds=seconds, most_batches=sys.maxsize)
    for turn in range(TURNS):
        for place, setting in enumerate(settings):
            speeds[place].append(look(subject, setting, limits, 100 + turn, batch_bytes).batches_per_second)
    return [statistics.median(each) for each in speeds]


def facts(rows: list[dict[str, Any]]) -> dict[str, str]:
    return {
        "within 10 % of the best": f"{sum(row['ratio'] >= 0.9 for row in rows)} of {len(rows)}",
        "in a third of the time": f"{sum(row['time ratio'] <= 1 / 3 for row in rows)} of {len(rows)}",
    }


def read() -> dict[str, dict[str, Any]]:
    lines = RESULTS.read_text().splitlines() if RESULTS.exists() else []
    return {row["loader"]: row for row in map(json.loads, lines)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=math.inf, help="begin nothing after so long")
    parser.add_argument("--only", default="", help="loaders whose name has this text")
    parser.add_argument("--again", action="store_true", help="also what is known")
    parser.add_argument("--record", action="store_true", help="append the rows to benchmarks/results.jsonl")
    given = parser.parse_args()
    FOLDER.mkdir(exist_ok=True)
    torch.set_num_threads(1)
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    began, known = time.perf_counter(), {} if given.again else read()
    with OPEN:
        for case in CASES:
            if case.name in known or given.only not in case.name or time.perf_counter() - began > given.seconds:
                continue
            with RESULTS.open("a") as file:
                file.write(json.dumps(compare(case)) + "\n")
    for aside in (False, True):
        rows = [read()[case.name] for case in CASES if case.aside is aside and case.name in read()]
        if rows:
            title = "calibrated loader setting beside exhaustive search" + ", kept aside" * aside
            publish(title, rows, record=given.record, most_batches=MOST_BATCHES, turns=TURNS, **facts(rows))


if __name__ == "__main__":
    main()
