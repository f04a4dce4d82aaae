"""Throughput of one device, data parallelism and sharding: inside kit, in plain Lightning, and in a plain torch loop.

    python benchmarks/strategies.py [none] [ddp] [fsdp] [--record]

The same GPT on the same tokens with the same AdamW, dtype, threads and ranks: on the CPU one rank, or two joined by
gloo, of one thread each; on GPUs one, or as many as there are. Samples a second of all ranks, between the end of the
tenth step and of the last. Each fit runs in fresh forks of a process that has imported Lightning. The ways of one round
run in random order, and a ratio is taken within its round: above 1, kit is faster. Medians over rounds, with the middle
half beside them. Lightning stands twice, so that its second row shows what chance alone does to a ratio.

Lightning's own FSDP does not run on CPUs, so its rows are its ModelParallelStrategy with a module that shards itself,
which is the same FSDP2 as kit's and as the torch loop's.
"""

from __future__ import annotations

import os
import random
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from lightning.fabric.plugins.environments.torchelastic import TorchElasticEnvironment
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.strategies import DDPStrategy, ModelParallelStrategy
from publish import publish, read_options
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from kit.config import Config
from kit.machine.machine import hardware
from kit.memory.alongside import fit
from kit.models import GPT

ROUNDS = 9
STEPS, DROPPED = 40, 10
BATCH_SIZE = 4
ANSWER = "samples/s"
ON_GPU = bool(hardware().gpus)
RANKS = len(hardware().gpus) if ON_GPU else 2
PRECISION = "bf16-mixed" if ON_GPU else "32-true"
SIZES = (
    {"vocabulary": 50304, "width": 768, "heads": 12, "layers": 12, "context": 1024}
    if ON_GPU
    else {"vocabulary": 1024, "width": 128, "heads": 4, "layers": 4, "context": 128}
)
WAYS = ("kit", "Lightning", "Lightning again", "torch")


@dataclass(frozen=True)
class Case:
    """A strategy over so many ranks."""

    strategy: str
    ranks: int

    @property
    def name(self) -> str:
        return f"{self.strategy} × {self.ranks}"


def model() -> GPT:
    torch.manual_seed(0)
    return GPT(**SIZES)


def loader(shuffled_over: tuple[int, int] | None = None) -> DataLoader[tuple[Tensor, ...]]:
    """Tokens in batches; (ranks, rank) gives a rank its share, as Lightning does by itself."""
    generator = torch.Generator().manual_seed(0)
    count = STEPS * BATCH_SIZE * RANKS
    tokens = torch.randint(SIZES["vocabulary"], (count, SIZES["context"] + 1), generator=generator)
    data = TensorDataset(tokens)
    sampler = DistributedSampler(data, *shuffled_over) if shuffled_over else None
    return DataLoader(data, batch_size=BATCH_SIZE, sampler=sampler, shuffle=sampler is None)


class Whole(LightningModule):
    """Trains the network through its forward, as Lightning's documentation does."""

    def __init__(self) -> None:
        super().__init__()
        self.network: Any = model()

    def training_step(self, batch: tuple[Tensor], _: int) -> Tensor:
        return loss_of(self.network, batch[0])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.network.parameters(), lr=3e-4)


class Sharded(Whole):
    """The same, which shards its network itself."""

    def configure_model(self) -> None:
        assert self.device_mesh is not None
        shard(self.network, self.device_mesh["data_parallel"])


def loss_of(network: nn.Module, tokens: Tensor) -> Tensor:
    logits = network(tokens[:, :-1])
    return functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())


def shard(network: nn.Module, mesh: Any) -> None:
    for block in network.get_submodule("blocks").children():
        fully_shard(block, mesh=mesh)
    fully_shard(network, mesh=mesh)


class Clock(Callback):
    def __init__(self) -> None:
        self.times: list[float] = []

    def on_train_batch_end(self, *_: Any) -> None:
        self.times.append(time.perf_counter())


def in_lightning(case: Case) -> list[float]:
    """End of every step."""
    backend = "nccl" if ON_GPU else "gloo"
    strategies: dict[str, Callable[[], Any]] = {
        "none": lambda: "auto",
        "ddp": lambda: DDPStrategy(process_group_backend=backend),
        "fsdp": lambda: ModelParallelStrategy(case.ranks, 1, process_group_backend=backend),
    }
    clock = Clock()
    trainer = Trainer(
        accelerator="gpu" if ON_GPU else "cpu", devices=case.ranks, strategy=strategies[case.strategy](),
        precision=PRECISION, plugins=[TorchElasticEnvironment()], max_steps=STEPS, max_epochs=-1, callbacks=[clock],
        logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    trainer.fit(Sharded() if case.strategy == "fsdp" else Whole(), loader())
    return clock.times


def in_torch(case: Case) -> list[float]:
    """End of every step."""
    rank = int(os.environ["LOCAL_RANK"])
    device = torch.device("cuda", rank) if ON_GPU else torch.device("cpu")
    network: nn.Module = model().to(device)
    if case.strategy != "none":
        torch.distributed.init_process_group("nccl" if ON_GPU else "gloo")
    if case.strategy == "ddp":
        network = DistributedDataParallel(network)
    if case.strategy == "fsdp":
        shard(network, init_device_mesh(device.type, (case.ranks,)))
    optimizer = torch.optim.AdamW(network.parameters(), lr=3e-4)
    times = []
    for _, (tokens,) in zip(range(STEPS), loader((case.ranks, rank)), strict=False):
        with torch.autocast(device.type, dtype=torch.bfloat16, enabled=PRECISION == "bf16-mixed"):
            loss = loss_of(network, tokens.to(device))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        times.append(time.perf_counter())
    return times


def inside_kit(case: Case, folder: str) -> float:
    devices = {"accelerator": "gpu" if ON_GPU else "cpu", "devices": case.ranks, "threads_per_rank": 1}
    quiet = {"predict_memory": False, "measure_memory": False}
    config = Config.make(
        {
            "hardware": {**devices, "strategy": case.strategy, "precision": PRECISION},
            "trial": {"max_steps": STEPS, "folder": folder, **quiet},
        }
    )
    steps = [step for step in fit(config, Whole, loader).wait().steps if step["rank"] == 0]
    return speed([step["train_ended"] for step in steps], case)


def speed(times: list[float], case: Case) -> float:
    """Samples a second of all ranks."""
    return (STEPS - DROPPED) * BATCH_SIZE * case.ranks / (times[STEPS - 1] - times[DROPPED - 1])


# -- the plain ways, in forks of a server that has imported what they need


def serve() -> None:
    """Fits without kit, one for each line `WAY STRATEGY RANKS` on stdin."""
    for line in sys.stdin:
        way, strategy, ranks = line.split()
        case, port = Case(strategy, int(ranks)), free_port()
        children = [fork(way, case, rank, port) for rank in range(case.ranks)]
        for child in children:
            os.waitpid(child, 0)


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


def fork(way: str, case: Case, rank: int, port: int) -> int:
    if (child := os.fork()) != 0:
        return child
    os.environ.update(
        RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(case.ranks), LOCAL_WORLD_SIZE=str(case.ranks),
        GROUP_RANK="0", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), TORCHELASTIC_RUN_ID="benchmark",
    )  # fmt: skip
    torch.set_num_threads(1)
    times = in_torch(case) if way == "torch" else in_lightning(case)
    if rank == 0:
        print(ANSWER, speed(times, case), flush=True)
    os._exit(0)


def without_kit(server: subprocess.Popen[str], way: str, case: Case) -> float:
    assert server.stdin is not None
    assert server.stdout is not None
    print(way.split()[0], case.strategy, case.ranks, file=server.stdin, flush=True)
    return next(float(line.split()[1]) for line in server.stdout if line.startswith(ANSWER))


def main(strategies: list[str]) -> None:
    read_options(__doc__)
    os.environ.update(MALLOC_MMAP_THRESHOLD_=str(1 << 30), MALLOC_TRIM_THRESHOLD_=str(1 << 34))
    cases = [Case(name, 1 if name == "none" else RANKS) for name in strategies if name == "none" or RANKS > 1]
    command = [sys.executable, __file__, "serve"]
    pipe = subprocess.PIPE
    with (
        tempfile.TemporaryDirectory() as folder,
        subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=subprocess.DEVNULL, text=True) as server,
    ):
        rows = [row for case in cases for row in compare(case, server, folder)]
    facts = {"model": SIZES, "batch": BATCH_SIZE, "precision": PRECISION, "device": "GPU" if ON_GPU else "CPU, gloo"}
    publish("throughput of strategies", rows, rounds=ROUNDS, **facts)


def compare(case: Case, server: subprocess.Popen[str], folder: str) -> Iterator[dict[str, Any]]:
    ways: dict[str, Callable[[], float]] = {way: partial(without_kit, server, way, case) for way in WAYS[1:]}
    ways["kit"] = partial(inside_kit, case, folder)
    rounds = [one_round(ways) for _ in range(ROUNDS + 1)][1:]  # the first starts both interpreters
    for way in WAYS:
        low, middle, high = statistics.quantiles(speeds["kit"] / speeds[way] for speeds in rounds)
        fastest = statistics.median(speeds[way] for speeds in rounds)
        row = {"case": case.name, "way": way, "samples/s": fastest, "kit / it": middle}
        if way == "Lightning again":  # what chance alone does, beside the same thing
            low, row["kit / it"], high = statistics.quantiles(speeds["Lightning"] / speeds[way] for speeds in rounds)
            row["way"] = "Lightning / Lightning again"
        yield {**row, "middle half of ratios": f"{low:.3f} to {high:.3f}"}


def one_round(ways: dict[str, Callable[[], float]]) -> dict[str, float]:
    """Samples per second of each way, taken in random order: whoever comes second finds another machine."""
    order = random.sample(list(ways), len(ways))
    return {way: ways[way]() for way in order}


if __name__ == "__main__":
    if sys.argv[1:] == ["serve"]:
        serve()
    else:
        chosen = [name for name in sys.argv[1:] if not name.startswith("-")]
        sys.argv[1:] = [name for name in sys.argv[1:] if name.startswith("-")]
        main(chosen or ["none", "ddp", "fsdp"])
