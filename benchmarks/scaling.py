"""Seconds per batch on more ranks, predicted before any trial and from trials on fewer, beside what they then took.

    python benchmarks/scaling.py [--answers FILE] [--record]

The same small GPT, in ddp by gloo, on 1 to 4 CPU ranks of one thread each: on a machine of two cores three and four
share them. Every round runs each count once, in random order. Before any trial `kit.predict_speed` predicts them from
operators that as many ranks timed beside each other. What 2 and 4 ranks take is predicted from 1, and what 4 take from
1 and 2, where ranks were seen to slow each other: of each count the round of the middle step time is taken. Three
modules from elsewhere are predicted before any trial alone.

A ratio is measured / predicted. kit predicts the CPU at its fastest, and neighbours on a shared host change its pace
within seconds, so one rank asks for the pace before each step, and a step is divided by how much slower it is at that
pace (`as it was` is not divided); what is predicted from trials is not. Beside a ratio stands how much the steps of the
same trial differ between rounds: the longest over the shortest. An efficiency is seconds of one rank over those of
several.

`--answers` keeps the rows of each module, which then is not run again: all take longer than a machine is quiet.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch
from publish import publish
from speed_models import MODELS, Step, at_fastest, loader, print_pace, steps_at_paces
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, default_collate

from kit.config import Config
from kit.machine.machine import hardware
from kit.memory.alongside import fit
from kit.models import GPT
from kit.records.timing import timing
from kit.speed.prediction import SpeedEstimate, predict_speed
from kit.studies.scaling.predict import predict_run
from kit.trial.trial import Trial

ROUNDS = 3
STEPS, DROPPED = 36, 8
RANKS = (1, 2, 3, 4)
SIZES = {"vocabulary": 1024, "width": 128, "heads": 4, "layers": 4, "context": 128}


Part = Callable[[], Any]
OWN, ELSEWHERE = "GPT of kit", ("llama", "monai_unet", "two_towers")
"""The others are among those of `speed_models.py`."""


def tokens() -> DataLoader[Tensor]:
    generator = torch.Generator().manual_seed(0)
    found = torch.randint(SIZES["vocabulary"], (4 * STEPS * max(RANKS), SIZES["context"] + 1), generator=generator)
    return DataLoader(cast(Dataset[Tensor], found), batch_size=4, collate_fn=_batch_at_pace)


def _batch_at_pace(samples: list[Tensor]) -> Tensor:
    print_pace()
    return cast(Tensor, default_collate(samples))


def parts() -> dict[str, tuple[Part, Part]]:
    """Makers of module and data by name."""
    found: dict[str, tuple[Part, Part]] = {OWN: (partial(GPT, **SIZES), tokens)}
    for name in ELSEWHERE:
        found[name] = partial(Step, name), partial(loader, name, MODELS[name].batch_sizes[0])
    return found


def config_of(ranks: int, folder: str) -> Config:
    hardware = {"accelerator": "cpu", "devices": ranks, "threads_per_rank": 1}
    quiet = {"predict_memory": False, "measure_memory": False, "count_work": False}
    return Config.make(
        {
            "hardware": {**hardware, "strategy": "ddp" if ranks > 1 else "none"},
            "trial": {"max_steps": STEPS, "warmup_steps": DROPPED, "folder": folder, **quiet},
        }
    )


def middle(trials: list[Trial]) -> Trial:
    return sorted(trials, key=lambda trial: timing(trial).step_seconds)[len(trials) // 2]


def step_seconds(trials: list[Trial], speed: SpeedEstimate | None = None) -> float:
    """The median step of these trials as it was, or at the pace of the prediction."""
    return statistics.median(
        at_fastest(seconds, pace, speed.pace_seconds, speed.computing_fraction) if speed else seconds
        for trial in trials for seconds, pace in steps_at_paces(trial, DROPPED)
    )  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--answers", type=Path, help="where rows of each module are kept and taken from")
    parser.add_argument("--record", action="store_true", help="append the rows to benchmarks/results.jsonl")
    asked = parser.parse_args()
    lines = asked.answers.read_text().splitlines() if asked.answers and asked.answers.exists() else []
    rows: list[dict[str, Any]] = list(map(json.loads, lines))
    with tempfile.TemporaryDirectory() as folder:
        for name, (module, data) in parts().items():
            if name not in {row["module"] for row in rows}:
                found = rows_of(name, module, data, folder)
                rows += found
                if asked.answers:
                    with asked.answers.open("a") as file:
                        file.write("".join(json.dumps(row) + "\n" for row in found))
    facts = {"cores": hardware().cores, "rounds": ROUNDS, "model": SIZES}
    publish("the big run predicted from the small one", rows, record=asked.record, **facts)


def rows_of(name: str, module: Part, data: Part, folder: str) -> list[dict[str, Any]]:
    found: dict[int, list[Trial]] = {ranks: [] for ranks in RANKS}
    speeds = {ranks: predict_speed(config_of(ranks, folder), module, data) for ranks in RANKS}
    for _ in range(ROUNDS):
        for ranks in random.sample(RANKS, len(RANKS)):
            found[ranks].append(fit(config_of(ranks, folder), module, data).wait())
    rows = [before(name, speeds[ranks], found[ranks]) for ranks in RANKS]
    one, *more = rows
    for several in more:
        predicted, measured = (one[key] / several[key] for key in ("predicted ms", "measured ms"))
        several |= {"efficiency": predicted, "measured efficiency": measured, "efficiency ratio": measured / predicted}
    if name == OWN:
        chosen = {ranks: middle(trials) for ranks, trials in found.items()}
        rows += [row([1], 2, chosen), row([1], 4, chosen), row([1, 2], 4, chosen)]
    return rows


def before(name: str, speed: SpeedEstimate, trials: list[Trial]) -> dict[str, Any]:
    measured = step_seconds(trials, speed)
    rounds = [step_seconds([trial], speed) for trial in trials]
    return {
        "module": name, "ranks": speed.devices, "predicted from": "operators",
        "predicted ms": 1000 * speed.step_seconds,
        "low ms": 1000 * speed.low_seconds, "high ms": 1000 * speed.high_seconds, "measured ms": 1000 * measured,
        "as it was ms": 1000 * step_seconds(trials), "ratio": measured / speed.step_seconds,
        "rounds differ": max(rounds) / min(rounds), "held up by": speed.bound,
    }  # fmt: skip


def row(seen: list[int], ranks: int, chosen: dict[int, Trial]) -> dict[str, Any]:
    point = predict_run([chosen[count] for count in seen], devices=[ranks], memory=False).scaling.at(ranks)
    measured = predict_run(chosen[ranks], devices=[ranks], memory=False).scaling.base.seconds
    trials = f"trials on {' and '.join(map(str, seen))}"
    return {
        "module": OWN, "ranks": ranks, "predicted from": trials, "predicted ms": 1000 * point.seconds_per_batch,
        "low ms": 1000 * point.low_seconds, "high ms": 1000 * point.high_seconds, "measured ms": 1000 * measured,
        "ratio": measured / point.seconds_per_batch, "held up by": point.bound,
    }  # fmt: skip


if __name__ == "__main__":
    main()
