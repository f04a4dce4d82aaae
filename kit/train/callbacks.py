"""Resuming from a checkpoint that was saved at the end of an epoch: the next epoch begins, with its first batch.

A Trainer with `max_steps` takes every resumed epoch for one that was broken off. Where it had ended, Lightning trains
one more batch in it, under an index past its end, and only then begins the next (Lightning-AI/pytorch-lightning#19617,
open in 2.6.6). `make_trainer` adds `WholeEpochs`, which says to the loop that the epoch is over.

A checkpoint from the middle of an epoch needs a loader that knows where it was. `kit.PatchData` makes one; any other
must have `state_dict` and `load_state_dict` (torchdata's StatefulDataLoader does). A plain DataLoader starts from its
first batch again and is left when the epoch has as many batches as it should, so it sees some samples twice and others
not at all in that epoch; Lightning warns of it, and nothing here can mend it.

LossLog: the loss of every batch in a file, and a line now and then, for whoever looks on from outside.

Rank 0 writes one `step` event a batch (`kit.events`: JSON lines, readable while they are written and after a kill)
between a `fit_started` and a `fit_ended`. Losses are read from the device together, every so often, so that a GPU is
not waited for at each step. It changes nothing in a fit, and needs nothing of the module.

The loss of one batch, as a module returned it: what events and logs of losses write down.

DeviceLimit: a device that holds less than it does, so that what does not fit fails here as it would there.

On a GPU torch's own allocator refuses what goes beyond the limit. On the CPU, whose allocator knows no limit, every
operation of a training step is followed by a look at what tensors hold: module, gradients, optimizer state, batch and
all that the step makes. Both raise `torch.OutOfMemoryError` in the middle of a step, as a full GPU does. Units: bytes.

Limits, known: on the CPU scratch memory inside a kernel and buffers that C++ makes for itself (the buckets of data
parallelism) are not seen, so that a few percent more than the limit may be held; each operation costs some tens of
microseconds more, so throughput under a limit is not to be compared with that without.

What a committed file runs with beside Lightning's own parts: the Config it was committed from, and kit's data.

`CommittedConfig` carries the Config in the file, as text that stock LightningCLI passes on untouched, and what `auto`
came to. It changes nothing in a fit but the threads that each rank computes with, where the config gives their number.
`kit.RowData` and `kit.EventData` take from it what the file does not name of their own (see `kit.data.patches.module`).
`CommittedData` is `kit.PatchData` of that Config: it is written once in a file, and read from there by both.
"""

from __future__ import annotations

import os
import time
import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch.utils._python_dispatch import TorchDispatchMode
from typing_extensions import override

from kit.config import Config
from kit.data.patches.loader import PatchLoader
from kit.data.patches.module import PatchData
from kit.errors import ConfigError, Problem
from kit.events import EventWriter
from kit.units import format_bytes


class WholeEpochs(Callback):
    """Begins the next epoch where a checkpoint was saved after the last batch of one."""

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        loop = trainer.fit_loop
        if not loop.is_resuming or not _has_ended(trainer):
            return
        epochs = loop.epoch_progress
        if epochs.current.completed < epochs.current.ready:  # saved while the epoch's last hooks ran
            epochs.increment_completed()
        loop._restarting = False  # its setter would make it True again wherever there is a `max_steps`
        loop.epoch_loop.restarting = False
        loop._resuming_from_checkpoint = False  # so that the loader is asked for the next epoch's batches
        for part in (loop, loop.epoch_loop, loop.epoch_loop.val_loop):
            part.reset_restart_stage()


def _has_ended(trainer: Trainer) -> bool:
    """Whether the epoch under way, as the checkpoint has it, has no batch left."""
    progress = trainer.fit_loop.epoch_loop.batch_progress
    done = progress.current.ready == progress.current.completed
    return done and (progress.is_last_batch or progress.current.ready >= trainer.num_training_batches)


class LossLog(Callback):
    """Writes the losses of rank 0.

    Args:
        file: The file they are appended to.
        every_seconds: Between two writes, each with a line on stdout.
    """

    def __init__(self, file: str, every_seconds: float = 1.0) -> None:
        self.file, self.every_seconds = file, every_seconds
        self._writer: EventWriter | None = None
        self._kept: list[tuple[dict[str, Any], torch.Tensor | None]] = []
        self._written = 0.0

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.is_global_zero:
            self._writer = EventWriter(self.file, 0)
            done = {"step": trainer.global_step, "batches": trainer.fit_loop.epoch_loop.batch_progress.total.ready}
            self._writer.write("fit_started", world_size=trainer.world_size, **done)
            self._written = time.monotonic()

    @override
    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if self._writer is None:
            return
        place = {"step": trainer.global_step, "epoch": trainer.current_epoch, "batch": batch_idx}
        self._kept.append((place, batch_loss(outputs, trainer)))
        if time.monotonic() - self._written >= self.every_seconds:
            self._write()

    @override
    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._end(trainer)

    @override
    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        self._end(trainer)

    def _write(self) -> None:
        """What is kept, waiting once for all losses; then where the fit is."""
        kept, self._kept, self._written = self._kept, [], time.monotonic()
        if self._writer is None or not kept:
            return
        tensors = [loss.float() for _, loss in kept if loss is not None]
        losses = iter(torch.stack(tensors).tolist() if tensors else [])
        for place, loss in kept:
            place["loss"] = None if loss is None else next(losses)
            self._writer.write("step", **place)
        last = kept[-1][0]
        said = "" if last["loss"] is None else f", loss {last['loss']:.4g}"
        print(f"epoch {last['epoch'] + 1}, step {last['step']}{said}", flush=True)  # noqa: T201 - it is for a log

    def _end(self, trainer: Trainer) -> None:
        if self._writer is not None:
            self._write()
            self._writer.write("fit_ended", step=trainer.global_step)
            self._writer.close()
            self._writer = None


def batch_loss(outputs: Any, trainer: Trainer) -> torch.Tensor | None:
    """The loss of one micro-batch, without the division by accumulation that Lightning has applied.

    Args:
        outputs: What callbacks get at the end of a training batch.

    Returns:
        A tensor without dimensions, still on its device; None where there is no single number.
    """
    loss = outputs.get("loss") if isinstance(outputs, dict) else outputs
    if not isinstance(loss, torch.Tensor) or loss.numel() != 1:
        return None
    automatic = trainer.lightning_module.automatic_optimization
    scale = trainer.accumulate_grad_batches if automatic else 1
    return loss.detach().reshape(()) * scale


class DeviceLimit(Callback):
    """Let this rank's device hold at most `limit_bytes`.

    Raises:
        ConfigError: for less than one byte.
    """

    def __init__(self, limit_bytes: int) -> None:
        if limit_bytes < 1:
            raise ConfigError([Problem("hardware.device_memory_bytes", f"{limit_bytes} bytes hold nothing")])
        self.limit_bytes = limit_bytes
        self.held = Held()
        """What tensors hold on the CPU; not used on a GPU."""
        self._counting = ExitStack()

    @override
    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        device = trainer.strategy.root_device
        if device.type == "cuda":
            total = torch.cuda.get_device_properties(device).total_memory
            torch.cuda.set_per_process_memory_fraction(min(1.0, self.limit_bytes / total), device)

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.strategy.root_device.type == "cpu":
            self.held.see(_states(pl_module, trainer.optimizers))
            self._check(0)

    @override
    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        if trainer.strategy.root_device.type == "cpu":
            self.held.see([batch])
            self._counting.enter_context(_Counting(self))

    @override
    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self._counting.close()

    @override
    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        self._counting.close()

    @override
    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        self._counting.close()

    def _check(self, more_bytes: int) -> None:
        if self.held.bytes > self.limit_bytes and self.held.recount() > self.limit_bytes:
            tried = f"after {format_bytes(more_bytes)} more, " if more_bytes else ""
            raise torch.OutOfMemoryError(
                f"the device is out of memory: {tried}tensors hold {format_bytes(self.held.bytes)} of the "
                f"{format_bytes(self.limit_bytes)} of hardware.device_memory_bytes"
            )


class Held:
    """Storages that are alive, each counted once, with their bytes when last seen."""

    def __init__(self) -> None:
        self.bytes = 0
        self._sizes: dict[int, int] = {}
        self._alive: dict[int, weakref.ref[Any]] = {}

    def see(self, values: Iterable[Any]) -> int:
        """Count the tensors in `values`; the bytes that are new."""
        before = self.bytes
        for tensor in _tensors(values):
            self._see(tensor.untyped_storage())
        return self.bytes - before

    def _see(self, storage: Any) -> None:
        key, size = id(storage), int(storage.nbytes())
        known = self._sizes.get(key)
        if known == size:
            return
        if known is None:
            self._alive[key] = weakref.ref(storage, lambda _: self._drop(key))
        self._sizes[key] = size
        self.bytes += size - (known or 0)

    def _drop(self, key: int) -> None:
        self._alive.pop(key, None)
        self.bytes -= self._sizes.pop(key, 0)

    def recount(self) -> int:
        """The bytes held, with every storage asked anew: sharding empties and refills its storages in place."""
        for reference in list(self._alive.values()):
            storage = reference()
            if storage is not None:
                self._see(storage)
        return self.bytes


class _Counting(TorchDispatchMode):
    """Looks at the tensors that every operation takes and gives."""

    def __init__(self, limit: DeviceLimit) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._limit, self._process = limit, os.getpid()

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if os.getpid() == self._process:  # a loader process inherits this mode, and is no device
            more = self._limit.held.see((result, *args, *(kwargs or {}).values()))
            if more > 0:
                self._limit._check(more)
        return result


def _states(module: LightningModule, optimizers: Sequence[torch.optim.Optimizer]) -> Iterator[Any]:
    yield from module.parameters()
    yield from module.buffers()
    for optimizer in optimizers:
        yield from optimizer.state.values()


def _tensors(values: Iterable[Any]) -> Iterator[torch.Tensor]:
    for value in values:
        if isinstance(value, torch.Tensor):
            yield from _plain(value)
        elif isinstance(value, Mapping):
            yield from _tensors(value.values())
        elif isinstance(value, list | tuple):
            yield from _tensors(value)


def _plain(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """The tensors that really hold a subclass's bytes, such as the shard of a DTensor."""
    flatten = getattr(tensor, "__tensor_flatten__", None)
    if flatten is not None:
        names, _ = flatten()
        yield from _tensors(getattr(tensor, name) for name in names)
    elif tensor.layout is torch.strided and tensor.device.type == "cpu":
        yield tensor


Resolved = dict[str, int | float | str | dict[str, int]]


class CommittedConfig(Callback):
    """Carries the Config of a committed run.

    Args:
        config: Its YAML.
        resolved: What settings left on `auto` came to, by dotted path.

    Raises:
        ConfigError: when that is no Config, or `resolved` does not fit it.
    """

    def __init__(self, config: str, resolved: Resolved | None = None) -> None:
        self.given = Config.from_yaml(config, "trainer.callbacks, CommittedConfig.config")
        self.committed = self.given.replace(resolved or {})
        """As it runs."""

    @override
    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if self.committed.hardware.threads_per_rank:
            torch.set_num_threads(self.committed.hardware.threads_per_rank)


class CommittedData(PatchData):
    """The patches that the committed Config names."""

    def __init__(self) -> None:
        super().__init__(Config())

    @override
    def setup(self, stage: str | None = None) -> None:
        self.config = self._config()
        super().setup(stage)

    @override
    def train_dataloader(self) -> PatchLoader:
        self.config = self._config()
        return super().train_dataloader()

    def _config(self) -> Config:
        found = self.committed
        if found is None:
            message = "CommittedData reads the config of kit.train.CommittedConfig, which is not among the callbacks"
            raise ConfigError([Problem("trainer.callbacks", message)])
        return found
