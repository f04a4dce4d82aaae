"""Seconds per batch on more ranks, predicted from trials on fewer, beside what those ranks then took.

    python benchmarks/scaling.py [--record]

The same small GPT, in ddp by gloo, on 1, 2 and 4 CPU ranks of one thread each: on a machine of two cores the last four
share them. Every round runs each count once, in random order; of each count the round of the middle step time is taken.
What 2 and 4 ranks take is predicted from 1, and what 4 take from 1 and 2, where ranks were seen to slow each other. A
ratio is measured / predicted.
"""

from __future__ import annotations

import random
import tempfile
from functools import partial
from typing import Any, cast

import torch
from publish import publish
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from kit.config import Config
from kit.machine.machine import hardware
from kit.memory.alongside import fit
from kit.models import GPT
from kit.records.timing import timing
from kit.studies.scaling.predict import predict_run
from kit.trial.trial import Trial

ROUNDS = 5
STEPS, DROPPED = 36, 8
RANKS = (1, 2, 4)
SIZES = {"vocabulary": 1024, "width": 128, "heads": 4, "layers": 4, "context": 128}


def tokens() -> DataLoader[Tensor]:
    generator = torch.Generator().manual_seed(0)
    found = torch.randint(SIZES["vocabulary"], (4 * STEPS * max(RANKS), SIZES["context"] + 1), generator=generator)
    return DataLoader(cast(Dataset[Tensor], found), batch_size=4)


def run(ranks: int, folder: str) -> Trial:
    hardware = {"accelerator": "cpu", "devices": ranks, "threads_per_rank": 1}
    quiet = {"predict_memory": False, "measure_memory": False, "count_work": False}
    config = Config.make(
        {
            "hardware": {**hardware, "strategy": "ddp" if ranks > 1 else "none"},
            "trial": {"max_steps": STEPS, "warmup_steps": DROPPED, "folder": folder, **quiet},
        }
    )
    return fit(config, partial(GPT, **SIZES), tokens).wait()


def middle(trials: list[Trial]) -> Trial:
    return sorted(trials, key=lambda trial: timing(trial).step_seconds)[len(trials) // 2]


def main() -> None:
    found: dict[int, list[Trial]] = {ranks: [] for ranks in RANKS}
    with tempfile.TemporaryDirectory() as folder:
        run(1, folder)  # starts the processes
        for _ in range(ROUNDS):
            for ranks in random.sample(RANKS, len(RANKS)):
                found[ranks].append(run(ranks, folder))
        chosen = {ranks: middle(trials) for ranks, trials in found.items()}
        rows = [row([1], 2, chosen), row([1], 4, chosen), row([1, 2], 4, chosen)]
    publish("the big run predicted from the small one", rows, cores=hardware().cores, rounds=ROUNDS, model=SIZES)


def row(seen: list[int], ranks: int, chosen: dict[int, Trial]) -> dict[str, Any]:
    point = predict_run([chosen[count] for count in seen], devices=[ranks], memory=False).scaling.at(ranks)
    measured = predict_run(chosen[ranks], devices=[ranks], memory=False).scaling.base.seconds
    return {
        "ranks": ranks, "predicted from": " and ".join(map(str, seen)), "predicted ms": 1000 * point.seconds_per_batch,
        "low ms": 1000 * point.low_seconds, "high ms": 1000 * point.high_seconds, "measured ms": 1000 * measured,
        "ratio": measured / point.seconds_per_batch, "held up by": point.bound,
    }  # fmt: skip


if __name__ == "__main__":
    main()
