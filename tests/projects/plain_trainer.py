"""A training of the table with Lightning's own Trainer, as one rank or several, and its losses.

Each rank is a process of its own, alone too: nothing else draws random numbers there, and it has the one thread that
the ranks of the table have, as sums of more are rounded otherwise.
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from typing import Any

import setups
from lightning.pytorch import Callback, LightningDataModule, Trainer, seed_everything
from lightning.pytorch.strategies import DDPStrategy
from torch.utils.data import DataLoader

from kit.targets import load_target


@dataclass(frozen=True, kw_only=True)
class Row:
    """What is trained, by import paths."""

    module: str
    arguments: dict[str, Any]
    data: str
    seed: int
    steps: int
    ranks: int
    find_unused: bool


class Losses(Callback):
    """Those of the first steps; of a module that gives none, the first number that it logs."""

    def __init__(self, steps):
        self.steps, self.values, self.of_steps = steps, [], True

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        logged = trainer.callback_metrics
        self.of_steps = bool(outputs) and "loss" in outputs
        self.values.append(float(outputs["loss"] if self.of_steps else logged[min(logged)]))
        trainer.should_stop = trainer.global_step >= self.steps


def losses(row):
    """Schedules are of the whole epoch, as a trial's."""
    seed_everything(row.seed, workers=True, verbose=False)
    module = load_target(row.module)
    module = module(**row.arguments)
    data, seen = load_target(row.data)(), Losses(row.steps)
    strategy = "auto" if row.ranks == 1 else DDPStrategy(find_unused_parameters=row.find_unused)
    trainer = Trainer(
        accelerator="cpu", devices=row.ranks, max_epochs=1, limit_val_batches=0, logger=False, callbacks=[seen],
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False, strategy=strategy,
    )  # fmt: skip
    if isinstance(data, LightningDataModule):
        trainer.fit(module, datamodule=data)
    else:
        first = data[0] if isinstance(data, tuple) else data
        trainer.fit(module, DataLoader(first, setups.BATCH) if isinstance(first, setups.Patches) else first)
    return seen


def be_rank(folder, row):
    """One rank, or one of several that were started together."""
    for name in [name for name in os.environ if name.startswith("SLURM_")]:
        del os.environ[name]
    os.environ["GLOBAL_RANK"] = os.environ["RANK"]  # without which litdata takes every rank for the first
    seen = losses(row)
    found = {"values": seen.values, "of_steps": seen.of_steps}
    (folder / f"losses.{os.environ['RANK']}.json").write_text(json.dumps(found))
