"""Runs fits in real ranks: one child process per rank, joined by gloo."""

import json
import os
from pathlib import Path

import psutil
import rank_processes
import train_parts

from kit.config import Config


def fit(case: dict, world_size: int) -> dict:
    """The fits of this rank; `case` names the module, the loader, the settings and how often to fit."""
    import torch

    from kit.models import UNet

    torch.set_num_threads(1)
    # Ranks differ in their seeds: the strategies have to agree on the weights of rank 0.
    torch.manual_seed(int(os.environ.get("RANK", 0)))
    module = UNet(variables=2, width=8, depth=2) if case["module"] == "UNet" else getattr(train_parts, case["module"])()
    losses = train_parts.Losses()
    saving = [train_parts.Save(case["checkpoint"])] if case.get("resume") else []
    counting = train_parts.Collectives() if case.get("counts") else None
    callbacks = [losses, *saving, *([] if counting is None else [counting])]
    make_loader = getattr(train_parts, case["loader"])
    for _ in range(case.get("fits", 1)):
        trainer = make_rank_trainer(case, world_size, module, callbacks, case.get("steps", 5))
        trainer.fit(module, make_loader(case["global_batch"] // world_size))
    if case.get("checkpoint") and not saving:
        trainer.save_checkpoint(case["checkpoint"])
    if case.get("resume"):
        trainer = _resume(case, world_size, losses)
    return {
        "losses": losses.values,
        "held": losses.held,
        "steps": trainer.global_step,
        "batches_per_epoch": trainer.num_training_batches,
        "strategy": type(trainer.strategy).__name__,
        "children": len(psutil.Process().children()),
        "precision": trainer.precision,
        "counts": {} if counting is None else counting.counts,
        "optimizers": [type(optimizer).__name__ for optimizer in trainer.optimizers],
        "state_bytes": sum(train_parts.state_bytes(optimizer) for optimizer in trainer.optimizers),
        "rates": [group["lr"] for optimizer in trainer.optimizers for group in optimizer.param_groups],
    }


def _resume(case: dict, world_size: int, losses):
    """Go on from the checkpoint at the end of the first epoch, in a module and a trainer made anew, to step 16."""
    losses.values.clear()
    module = getattr(train_parts, case["module"])()
    trainer = make_rank_trainer(case, world_size, module, [losses], max_steps=16)
    loader = getattr(train_parts, case["loader"])(case["global_batch"] // world_size)
    trainer.fit(module, loader, ckpt_path=case["checkpoint"], weights_only=False)
    return trainer


def make_rank_trainer(case: dict, world_size: int, module, callbacks, max_steps: int = 5):
    from kit.train import make_trainer

    hardware = {"strategy": case["strategy"], "devices": world_size, "accelerator": "cpu"}
    trainer = make_trainer(
        Config.make({"hardware": hardware, **case.get("settings", {})}),
        accelerator="cpu",
        world_size=world_size,
        precision=case.get("precision", "32-true"),
        module=module,
        callbacks=callbacks,
        max_steps=max_steps,
    )
    if case.get("sharded") is not None and world_size > 1:
        trainer.strategy._save_distributed_checkpoint = case["sharded"]
    return trainer


def fit_or_report(case: dict, world_size: int) -> dict:
    try:
        return fit(case, world_size)
    except Exception as error:
        if not case.get("fails"):
            raise
        return {"error": f"{type(error).__name__}: {error}"}


def run_ranks(cases: dict, world_size: int, folder: Path, do=fit_or_report) -> dict:
    """Every case by `do` in `world_size` ranks; name of the case to a list of what each rank said."""
    rank_processes.run_ranks(world_size, folder, be_rank, cases, do)
    answers = [json.loads((folder / f"answer.{rank}.json").read_text()) for rank in range(world_size)]
    return {name: [answer[name] for answer in answers] for name in cases}


def be_rank(folder: Path, cases: dict, do) -> None:
    world_size, rank = int(os.environ["WORLD_SIZE"]), os.environ["RANK"]
    answers = {name: do(case, world_size) for name, case in cases.items()}
    (folder / f"answer.{rank}.json").write_text(json.dumps(answers))
