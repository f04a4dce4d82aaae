"""The loader setting that a calibration takes, beside exhaustive search over the same dials.

    python benchmarks/calibration.py [wait step compute engine] [--record]

Four pipelines, or those that are named: samples that wait as for a network; the same under a simulated training step;
samples that compute in Python; and kit's engine on a simulated bucket. Exhaustive search measures every number of
processes up to the same cap with every prefetch factor, or every combination of the engine's dials, each over all
batches that a candidate is allowed.
Afterwards both choices are measured in turn, with the same samples, and the medians compared: the best of many noisy
figures is better than what it stands for. Goals: 0.9 of the best throughput, in a third of the time.
"""

from __future__ import annotations

import itertools
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
from publish import publish
from torch.utils.data import DataLoader, Dataset

import kit
from kit.config import Config
from kit.data.patches.module import PatchData
from kit.machine.machine import share
from kit.studies.calibration.job import Resources, Sweep
from kit.studies.calibration.measure import MeasurementLimits, Observed, Subject, measure, subject_of
from kit.studies.calibration.rules import LoaderSetting, Measurement
from kit.studies.calibration.search import AHEAD, REQUESTS

MOST_BATCHES = {"processes": 200, "engine": 100}
TIMEOUT_SECONDS = 10.0
TURNS = 5
STEP_SECONDS = 0.01
NAMED = (0, 1, 2, 3, 4)
"""Numbers of processes under the simulated step: each takes its time at least."""


class Samples(Dataset[torch.Tensor]):
    """Waits `wait` seconds and computes `rounds` times in Python for each sample."""

    def __init__(self, wait: float, rounds: int) -> None:
        self.wait, self.rounds = wait, rounds

    def __len__(self) -> int:
        return 1 << 16

    def __getitem__(self, index: int) -> torch.Tensor:
        if self.wait:
            time.sleep(self.wait)
        total = float(sum(number % 7 for number in range(index, index + self.rounds)))
        return torch.full((64, 64), total)


def compare(name: str, data: dict[str, Any], config: Config) -> dict[str, Any]:
    """One row: what calibration took, what exhaustive search found, throughput and time of one over the other."""
    subject = subject_of(data)
    most = MOST_BATCHES["engine" if subject.own else "processes"]
    config = config.replace({"calibration.max_measure_batches": most, "calibration.timeout_seconds": TIMEOUT_SECONDS})
    found = Sweep(subject, config, Resources.of(share(), 1)).run()
    assert found.chosen is not None
    began = time.perf_counter()
    limits = MeasurementLimits(
        timeout_seconds=TIMEOUT_SECONDS, most_batches=most,
        step_seconds=config.calibration.step_seconds, to_the_end=True,
    )  # fmt: skip
    if subject.own:
        grid = engine_grid(subject, max(item.setting.cache_bytes or 0 for item in found.measured))
    else:
        grid = process_grid(subject, int(found.limits["cpu_workers"]), config)
    size_bytes = int(found.limits["batch_bytes"])
    every = (look(subject, setting, limits, turn, size_bytes) for turn, setting in enumerate(grid))
    best = max(every, key=lambda item: item.batches_per_second)
    exhaustive_seconds = time.perf_counter() - began
    chosen, fastest = duel(subject, (found.chosen, best.setting), limits, size_bytes)
    return {
        "pipeline": name, "chosen": str(found.chosen), "exhaustive": str(best.setting),
        "batches/s": chosen, "exhaustive batches/s": fastest, "ratio": chosen / fastest,
        "settings": f"{len(found.measured)} of {len(grid)}", "seconds": found.seconds,
        "exhaustive seconds": exhaustive_seconds, "time ratio": found.seconds / exhaustive_seconds,
    }  # fmt: skip


def look(
    subject: Subject, setting: LoaderSetting, limits: MeasurementLimits, turn: int, batch_bytes: int
) -> Measurement:
    """As a sweep does: a cache is given twice its size to fill."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # processes beyond the cores
        with subject.loader(setting, turn) as loader:
            return measure(loader, setting, limits, Observed(), 2 * (setting.cache_bytes or 0) // batch_bytes)


def process_grid(subject: Subject, most: int, config: Config) -> list[LoaderSetting]:
    """Every number of processes that is named, or up to the cap, with every prefetch factor."""
    base, asked = subject.present(), config.calibration
    pairs = itertools.product(asked.candidate_workers[1:] or range(1, most + 1), asked.candidate_prefetch)
    return [base, *(replace(base, num_workers=workers, prefetch_factor=factor) for workers, factor in pairs)]


def engine_grid(subject: Subject, cache_bytes: int) -> list[LoaderSetting]:
    """Every combination of requests in flight, batches ahead, and a cache or none; no processes."""
    base = replace(subject.present(), num_workers=0)
    return [
        replace(base, requests_in_flight=requests, batches_ahead=ahead, cache_bytes=size)
        for requests, ahead, size in itertools.product(REQUESTS, AHEAD, (0, cache_bytes))
    ]


def duel(
    subject: Subject, settings: Sequence[LoaderSetting], limits: MeasurementLimits, batch_bytes: int
) -> list[float]:
    """Median batches per second of each, taken in turn."""
    speeds: list[list[float]] = [[] for _ in settings]
    for turn in range(TURNS):
        for place, setting in enumerate(settings):
            speeds[place].append(look(subject, setting, limits, 100 + turn, batch_bytes).batches_per_second)
    return [statistics.median(each) for each in speeds]


def loader(wait: float, rounds: int) -> dict[str, Any]:
    return {"train_dataloaders": DataLoader(Samples(wait, rounds), batch_size=8)}


def on_a_bucket(folder: str) -> dict[str, Any]:
    """kit's engine, 30 ms to the first byte, a small store that a cache could hold whole."""
    with kit.cloud.simulate("no limits") as cloud:
        config = Config.load(Path(__file__).parents[1] / "datasets/ocean/recipe.yaml").replace({
            "data.url": cloud.url("bucket/ocean.zarr"), "trial.folder": folder, "loader.batch_size": 2,
            "data.samples_per_epoch": 1 << 14, "data.order": "random", "loader.memory_bytes": 256 << 20,
            "calibration.candidate_workers": [0],
        })  # fmt: skip
        kit.build(config)
        cloud.turn("same region")
        return compare("kit's engine, simulated bucket", {"datamodule": PatchData(config)}, config)


def on_the_engine() -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        return on_a_bucket(folder)


PLAIN = Config()
STEPPING = PLAIN.replace({"calibration.step_seconds": STEP_SECONDS, "calibration.candidate_workers": NAMED})
PIPELINES = {
    "wait": lambda: compare("samples wait 2 ms", loader(0.002, 0), PLAIN),
    "step": lambda: compare(f"the same, {1000 * STEP_SECONDS:g} ms a step", loader(0.002, 0), STEPPING),
    "compute": lambda: compare("samples compute 2 ms", loader(0.0, 30_000), PLAIN),
    "engine": on_the_engine,
}


def main() -> None:
    wanted = [name for name in sys.argv[1:] if name in PIPELINES] or list(PIPELINES)
    sys.argv[1:] = [name for name in sys.argv[1:] if name not in PIPELINES]
    torch.set_num_threads(1)
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    rows = [PIPELINES[name]() for name in wanted]
    publish("calibrated loader setting beside exhaustive search", rows, most_batches=MOST_BATCHES, turns=TURNS)


if __name__ == "__main__":
    main()
