"""DeviceLimit: a device that holds less than it does, so that what does not fit fails here as it would there.

On a GPU torch's own allocator refuses what goes beyond the limit. On the CPU, whose allocator knows no limit, every
operation of a training step is followed by a look at what tensors hold: module, gradients, optimizer state, batch and
all that the step makes. Both raise `torch.OutOfMemoryError` in the middle of a step, as a full GPU does. Units: bytes.

Limits, known: on the CPU scratch memory inside a kernel and buffers that C++ makes for itself (the buckets of data
parallelism) are not seen, so that a few percent more than the limit may be held; each operation costs some tens of
microseconds more, so throughput under a limit is not to be compared with that without.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch.utils._python_dispatch import TorchDispatchMode
from typing_extensions import override

from kit.errors import ConfigError, Problem
from kit.units import format_bytes


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
