"""One pipeline in a plain Lightning Trainer under TraceML: `traceml run plain.py --args NAME FOLDER`."""

import os
import sys

import lightning.pytorch as pl
import torch
from traceml_ai.integrations.lightning import TraceMLCallback

from pipelines import SHORT, all_pipelines


def main() -> None:
    name, folder = sys.argv[-2:]
    parts = all_pipelines(folder)[name].parts
    torch.set_num_threads(1)
    config = {**SHORT, **parts.config}
    ranks, every = int(os.environ.get("WORLD_SIZE", "1")), config.get("trial.validate_every_steps", 0)
    data = parts.data()
    if isinstance(data, torch.utils.data.Dataset):
        data = torch.utils.data.DataLoader(data, batch_size=config["loader.batch_size"], shuffle=True)
    callbacks = parts.callbacks()
    validated = {"val_check_interval": every, "limit_val_batches": config["trial.validation_batches"]} if every else {}
    trainer = pl.Trainer(
        accelerator="cpu", devices=ranks, strategy="ddp" if ranks > 1 else "auto", max_epochs=-1,
        max_steps=config["trial.max_steps"],
        logger=False if parts.logger is None else parts.logger(), enable_progress_bar=False, enable_model_summary=False,
        enable_checkpointing=bool(callbacks) and any(isinstance(it, pl.callbacks.Checkpoint) for it in callbacks),
        callbacks=[*callbacks, TraceMLCallback()], num_sanity_val_steps=0,
        **({"limit_val_batches": 0} | validated | ({"check_val_every_n_epoch": None} if every else {})), **parts.flags,
    )  # fmt: skip
    where = {"datamodule": data} if isinstance(data, pl.LightningDataModule) else {"train_dataloaders": data}
    trainer.fit(parts.module(), **where)


if __name__ == "__main__":
    main()
