"""Records and measures fits in real gloo ranks, through the Trainer of kit.train.

Each case is fitted twice on real tensors: once under the same recorder that a dry run uses, once under torch's profiler
with the recorder away. Rank 0 leaves the recording and the measured bytes in the folder.
"""

import gc
import json
import os
import time

import rank_processes
import torch
from lightning.pytorch import Callback, LightningModule
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.data import DataLoader

from kit.config import Config
from kit.models import GPT, UNet

STEPS = 2
SETTLE_SECONDS = 0.003
CONTEXT, VOCABULARY, WIDTH = 64, 512, 512
SAMPLES, BATCH = 64, 4


class Decoder(GPT):
    """About 2 million parameters, so that 1 MiB is not everything."""

    def __init__(self):
        super().__init__(vocabulary=VOCABULARY, width=256, heads=4, layers=2, context=CONTEXT)


class Fields(UNet):
    def __init__(self):
        super().__init__(variables=2, width=24, depth=2)


class Statistics(LightningModule):
    """Has running statistics, which data parallelism broadcasts in every step."""

    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH))

    def training_step(self, batch, batch_idx):
        return self.body(batch).square().mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)


class Manual(Statistics):
    """Two networks, two optimizers, and the backward inside training_step."""

    def __init__(self):
        super().__init__()
        self.automatic_optimization = False
        self.body = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH))
        self.other = nn.Linear(WIDTH, WIDTH)

    def training_step(self, batch, batch_idx):
        for optimizer in self.optimizers():
            loss = self.other(self.body(batch)).square().mean()
            optimizer.zero_grad()
            self.manual_backward(loss)
            optimizer.step()

    def configure_optimizers(self):
        return [torch.optim.AdamW(net.parameters()) for net in (self.body, self.other)]


class SelfSharded(Statistics):
    """Makes its layers on the meta device and shards them itself."""

    def __init__(self):
        super().__init__()
        self.body = None

    def configure_model(self):
        from torch.distributed.fsdp import fully_shard

        if self.body is not None:
            return
        with torch.device("meta"):
            self.body = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(4)))
        for layer in self.body:
            fully_shard(layer, mesh=self.device_mesh["data_parallel"])
        fully_shard(self.body, mesh=self.device_mesh["data_parallel"])


class Split(Statistics):
    """Tensor-parallel within pairs, sharded over pairs."""

    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.ReLU(), nn.Linear(2 * WIDTH, WIDTH))

    def configure_model(self):
        from torch.distributed.fsdp import FSDPModule, fully_shard
        from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

        if not isinstance(self.body, FSDPModule):
            parallelize_module(
                self.body, self.device_mesh["tensor_parallel"], {"0": ColwiseParallel(), "2": RowwiseParallel()}
            )
            fully_shard(self.body, mesh=self.device_mesh["data_parallel"])


def loader_of(case):
    samples = {"Decoder": lambda: torch.zeros(CONTEXT + 1, dtype=torch.int64), "Fields": _field}
    make = samples.get(case["module"], lambda: torch.zeros(WIDTH))
    return DataLoader([make() for _ in range(SAMPLES)], batch_size=BATCH)


def _field():
    return {"values": torch.zeros(2, 2, 32, 32), "valid": torch.ones(2, 2, 32, 32, dtype=torch.bool)}


def make_config(case, world_size):
    hardware = {"strategy": case["strategy"], "devices": world_size, "accelerator": "cpu"}
    return Config.make({"hardware": hardware, **case.get("settings", {})})


def precision_of(case):
    return case.get("precision", "32-true")


class WithoutGloo(TorchDispatchMode):
    """Keeps out what gloo adds by itself: its copies, which are workspace, and how long it holds what is sent."""

    def __init__(self, recorder):
        super().__init__()
        self.recorder = recorder
        self.sent = False

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if self.sent:
            time.sleep(SETTLE_SECONDS)
        self.sent = func.namespace == "c10d"
        if func is torch.ops.aten.split.Tensor and type(args[0]) is torch.Tensor and not self.recorder.knows(args[0]):
            self.recorder.ignore(args[0])  # no operator made it
        return func(*args, **(kwargs or {}))


class Recording(Callback):
    """Tells the recorder what a dry run tells it, at the same moments."""

    def __init__(self, recorder):
        self.recorder = recorder

    def on_train_start(self, trainer, pl_module):
        self.recorder.track(pl_module)

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        from kit.memory.record.recorder import tensors_in

        self.recorder.begin_batch()
        for tensor in tensors_in(batch):
            self.recorder.note(tensor, "inputs")


class Measuring(Callback):
    """Tells the profiler's ledger when a batch begins."""

    def __init__(self, trace):
        self.trace = trace

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        self.trace.note(batch)


def fit(case, world_size, callback, loader):
    from kit.train import make_trainer

    torch.manual_seed(0)
    module = globals()[case["module"]]()
    trainer = make_trainer(
        make_config(case, world_size), accelerator="cpu", world_size=world_size, precision=precision_of(case),
        module=module, callbacks=[callback], max_steps=STEPS * case.get("optimizers", 1),
    )  # fmt: skip
    trainer.fit(module, loader)


def record(case, world_size):
    from kit.memory.record.ranks import label_collectives
    from kit.memory.record.recorder import BlockRecorder
    from kit.memory.record.workspace import Workspaces

    recorder, loader = BlockRecorder(Workspaces(None)), loader_of(case)
    with recorder, label_collectives(recorder), WithoutGloo(recorder):
        fit(case, world_size, Recording(recorder), loader)
    return recorder.recording(1, 1)


def measure(case, world_size):
    from kit.memory.record.truth import AllocatorTrace

    trace, loader = AllocatorTrace(), loader_of(case)
    gc.collect()
    trace.start(())  # the dataset is on the host
    fit(case, world_size, Measuring(trace), loader)
    return trace.stop().peak_bytes


# -- the ranks


def run_ranks(cases, world_size, folder):
    """Fits every case in `world_size` ranks; what rank 0 measured, by name. Recordings are `NAME.npz` in `folder`."""
    rank_processes.run_ranks(world_size, folder, be_rank, cases)
    return json.loads((folder / "measured.json").read_text())


def be_rank(folder, cases):
    world_size, rank = int(os.environ["WORLD_SIZE"]), int(os.environ["RANK"])
    measured = {}
    for name, case in cases.items():
        recording = record(case, world_size)
        measured[name] = measure(case, world_size) if case.get("measured") else None
        if rank == 0:
            recording.save(folder / f"{name}.npz")
    if rank == 0:
        (folder / "measured.json").write_text(json.dumps(measured))
