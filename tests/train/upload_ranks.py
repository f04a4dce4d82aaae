"""One rank of the tests of checkpoint uploads: fits that copy what they save, and downloads that ranks share."""

import os
import threading
from pathlib import Path

import torch
import train_parts
from lightning.fabric.plugins.environments.torchelastic import TorchElasticEnvironment
from lightning.pytorch import Callback, LightningDataModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.strategies import DDPStrategy

from kit.checkpoints.downloading import download_once, fetch_checkpoint
from kit.errors import KitError
from kit.train import CheckpointUpload, ShardStrategy, WholeEpochs

QUIET = {
    "accelerator": "cpu", "logger": False, "enable_progress_bar": False, "enable_model_summary": False,
    "max_epochs": -1, "use_distributed_sampler": False, "num_sanity_val_steps": 0,
}  # fmt: skip


class Threads(Callback):
    """Whether a thread that copies was there while training went on."""

    seen = False

    def on_train_batch_end(self, *_):
        self.seen = self.seen or any(thread.name == "kit-upload" for thread in threading.enumerate())


class Numbers(LightningDataModule):
    def __init__(self, url, path):
        super().__init__()
        self.url, self.path = url, path

    def prepare_data(self):
        download_once(self.url, self.path)

    def setup(self, stage=None):
        self.text = Path(self.path).read_text()

    def train_dataloader(self):
        return train_parts.regression(4)


def do(case, world_size):
    torch.set_num_threads(1)
    torch.manual_seed(0)
    try:
        return {"fit": fit, "share": share, "prepare": prepare}[case["what"]](case, world_size)
    except KitError as error:
        return {"error": f"{type(error).__name__}: {error}"}


def fit(case, world_size):
    resumed = fetch_checkpoint(case["from"], case["folder"], together=True) if "from" in case else None
    upload = CheckpointUpload(case["url"], every_seconds=0, part_bytes=4096) if "url" in case else None
    threads, losses = Threads(), train_parts.Losses()
    saving = ModelCheckpoint(case["folder"], filename="{step}", every_n_train_steps=2, save_top_k=-1)
    trainer = make_trainer(case, world_size, [losses, threads, WholeEpochs(), saving, *([upload] if upload else [])])
    trainer.fit(train_parts.Net(), train_parts.regression(4), ckpt_path=resumed, weights_only=False)
    return {
        "losses": losses.values,
        "threads": threads.seen,
        "uploads": [] if upload is None else [sent.bundle.name for sent in upload.uploads],
        "resumed": str(resumed),
    }


def make_trainer(case, world_size, callbacks):
    strategy = DDPStrategy(process_group_backend="gloo")
    if case["strategy"] == "fsdp":
        strategy = ShardStrategy(save_distributed_checkpoint=True, process_group_backend="gloo")
    return Trainer(
        devices=world_size, strategy=strategy, plugins=[TorchElasticEnvironment()], max_steps=case["steps"],
        callbacks=callbacks, enable_checkpointing=bool(callbacks), **QUIET,
    )  # fmt: skip


def share(case, world_size):
    return {"path": str(download_once(case["url"], case["paths"][int(os.environ["RANK"])], together=True))}


def prepare(case, world_size):
    data = Numbers(case["url"], case["path"])
    case = {"strategy": "ddp", "steps": 1}
    trainer = make_trainer(case, world_size, [])
    trainer.fit(train_parts.Net(), data)
    return {"text": data.text}
