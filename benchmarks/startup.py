"""From the click to the first training step: kit's warm and cold start beside torchrun, the same fit in turn.

    python benchmarks/startup.py [--record]

The fit is `TinyModule` on `TinyData`, on 1 and 2 CPU ranks; under torchrun it is a plain Lightning script. The warm
process is already up, as it is in a notebook after a few seconds.
"""

from __future__ import annotations

import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from publish import publish, read_options

from kit.config import Config
from kit.memory.alongside import fit
from kit.trial.trial import warm_up

REPETITIONS = 5
STEPS = 20
SCRIPT = """
import sys, time
import torch
from lightning.pytorch import Callback, Trainer
from kit.testing import TinyData, TinyModule
class Tell(Callback):
    def on_train_batch_end(self, trainer, *_):
        if trainer.global_step == 1 and trainer.is_global_zero:
            print("first step", time.time(), flush=True)
torch.set_num_threads(1)
ranks = int(sys.argv[1])
Trainer(
    accelerator="cpu", devices=ranks, strategy="ddp" if ranks > 1 else "auto", max_steps=int(sys.argv[2]),
    callbacks=[Tell()], logger=False, enable_checkpointing=False, enable_progress_bar=False,
    enable_model_summary=False, num_sanity_val_steps=0, limit_val_batches=0,
).fit(TinyModule(), datamodule=TinyData())
"""
Seconds = tuple[float, float]
"""(until the first step, until the end)"""


def kit_seconds(ranks: int, start: str, folder: str) -> Seconds:
    hardware = {"accelerator": "cpu", "devices": ranks, "strategy": "ddp" if ranks > 1 else "none"}
    trial = {"max_steps": STEPS, "start": start, "folder": folder}
    config = Config.make({"hardware": {**hardware, "threads_per_rank": 1}, "trial": trial})
    clicked = time.time()
    done = fit(config, "kit.testing:TinyModule", "kit.testing:TinyData").wait()
    return min(step["time"] for step in done.steps) - clicked, time.time() - clicked


def torchrun_seconds(ranks: int, folder: str) -> Seconds:
    script = Path(folder) / "plain.py"
    script.write_text(SCRIPT)
    clicked = time.time()
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    done = subprocess.run([*command, str(script), str(ranks), str(STEPS)], capture_output=True, text=True, check=True)
    first = next(line for line in done.stdout.splitlines() if line.startswith("first step"))
    return float(first.split()[-1]) - clicked, time.time() - clicked


def main() -> None:
    read_options(__doc__)
    with tempfile.TemporaryDirectory() as folder:
        warm_up()
        kit_seconds(1, "warm", folder)
        rows = [row for ranks in (1, 2) for row in compare(ranks, folder)]
    publish("seconds from click to first step", rows, repetitions=REPETITIONS, steps=STEPS)


def compare(ranks: int, folder: str) -> list[dict[str, object]]:
    ways: dict[str, Callable[[], Seconds]] = {
        "kit warm": lambda: kit_seconds(ranks, "warm", folder),
        "kit cold": lambda: kit_seconds(ranks, "cold", folder),
        "torchrun": lambda: torchrun_seconds(ranks, folder),
    }
    taken: dict[str, list[Seconds]] = {name: [] for name in ways}
    for _ in range(REPETITIONS):
        for name, way in ways.items():
            taken[name].append(way())
    medians = {
        name: [statistics.median(column) for column in zip(*pairs, strict=True)] for name, pairs in taken.items()
    }
    peer = medians["torchrun"][0]
    return [
        {
            "way": name,
            "ranks": ranks,
            "first step s": first,
            "whole trial s": end,
            "torchrun is slower by": peer / first,
        }
        for name, (first, end) in medians.items()
    ]


if __name__ == "__main__":
    main()
