"""DeviceLimit: a device that is out of memory earlier than it is.

On a GPU torch's own allocator refuses what goes beyond the limit. On the CPU, whose allocator knows no limit, every
operation of a training step is followed by a count of what tensors hold: module, gradients, optimizer state, batch and
all that the step makes. Both raise `torch.OutOfMemoryError` in the middle of a step, as a full GPU does. Known limits:
on the CPU scratch memory inside a kernel and buffers that C++ makes for itself (the buckets of data parallelism) are
not seen, so that a few percent more may be held; each operation costs some tens of microseconds more, so throughput
under a limit is not to be compared with that without.
"""

from __future__ import annotations

import os
import weakref
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch.utils._python_dispatch import TorchDispatchMode
from typing_extensions import override

from kit.errors import ConfigError, Problem
from kit.memory.replay.snapshot import owner_here, snapshot_of
from kit.units import format_bytes


class DeviceLimit(Callback):
    """Let this rank's device hold at most `limit_bytes`.

    Raises:
        ConfigError: for less than one byte.
    """

    def __init__(self, limit_bytes: int) -> None:
        if limit_bytes < 1:
            message = f"is {limit_bytes} bytes, but must be at least 1"
            raise ConfigError([Problem("hardware.device_memory_bytes", message)])
        self.limit_bytes = limit_bytes
        self.storages = LiveStorages()
        """What tensors hold on the CPU; not used on a GPU."""
        self.snapshot: dict[str, Any] | None = None
        """What they held when memory last ran out, in the form of `torch.cuda.memory._snapshot()`."""
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
            self.storages.add([*pl_module.parameters(), *pl_module.buffers()], "parameters")
            states = (value for optimizer in trainer.optimizers for value in optimizer.state.values())
            self.storages.add(states, "optimizer_state")
            self._check(0)

    @override
    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        if trainer.strategy.root_device.type == "cpu":
            self.storages.batch += 1
            self.storages.add([batch], "inputs")
            self._counting.enter_context(_Counting(self))

    @override
    def on_train_batch_end(self, *_: Any) -> None:
        self._counting.close()

    @override
    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        self._counting.close()

    @override
    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        self._counting.close()

    def _check(self, more_bytes: int) -> None:
        if self.storages.bytes > self.limit_bytes and self.storages.recount() > self.limit_bytes:
            self.snapshot = self.storages.snapshot(more_bytes)
            tried = f"after {format_bytes(more_bytes)} more, " if more_bytes else ""
            raise torch.OutOfMemoryError(
                f"the device is out of memory: {tried}tensors hold {format_bytes(self.storages.bytes)} of the "
                f"{format_bytes(self.limit_bytes)} of hardware.device_memory_bytes"
            )


MOST_ENTRIES = 100_000
"""Storages made or freed that are kept, the last ones."""


class LiveStorages:
    """Storages that are alive, each counted once, with their bytes when last seen, and who made them."""

    def __init__(self) -> None:
        self.bytes = 0
        self.batch = -1
        """The micro-batch that runs, from 0."""
        self._owners: dict[int, str] = {}
        self._trace: deque[tuple[str, int, int, str, int]] = deque(maxlen=MOST_ENTRIES)
        self._sizes: dict[int, int] = {}
        self._alive: dict[int, weakref.ref[Any]] = {}

    def add(self, values: Iterable[Any], owner: str = "") -> int:
        """Count the tensors in `values`; the bytes that are new. `owner` is who made them, by default who runs now."""
        before = self.bytes
        for tensor in _tensors(values):
            self._count(tensor.untyped_storage(), owner)
        return self.bytes - before

    def _count(self, storage: Any, owner: str = "") -> None:
        key, size = id(storage), int(storage.nbytes())
        known = self._sizes.get(key)
        if known == size:
            return
        if known is None:
            self._alive[key] = weakref.ref(storage, lambda _: self._drop(key))
            self._owners[key] = owner or owner_here()
        else:
            self._note("free_requested", key, known)
        self._note("alloc", key, size)
        self._sizes[key] = size
        self.bytes += size - (known or 0)

    def _drop(self, key: int) -> None:
        self._alive.pop(key, None)
        size = self._sizes.pop(key, 0)
        self._note("free_requested", key, size)
        self._owners.pop(key, None)
        self.bytes -= size

    def _note(self, action: str, key: int, size: int) -> None:
        self._trace.append((action, key, size, self._owners.get(key, ""), self.batch))

    def snapshot(self, asked_bytes: int) -> dict[str, Any]:
        """What is held but for the last `asked_bytes`, which were too many, in the form of torch's snapshots."""
        trace, refused, left = list(self._trace), set[int](), asked_bytes
        owner = trace[-1][3] if trace else ""
        while left > 0 and trace and trace[-1][0] == "alloc":
            _, key, size, _, _ = trace.pop()
            refused.add(key)
            left -= size
        held = [(key, size, self._owners[key]) for key, size in self._sizes.items() if key not in refused]
        return snapshot_of([*trace, ("oom", 0, asked_bytes, owner, self.batch)], held)

    def recount(self) -> int:
        """The bytes held, with every storage asked anew: sharding empties and refills its storages in place."""
        for reference in list(self._alive.values()):
            storage = reference()
            if storage is not None:
                self._count(storage)
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
            more = self._limit.storages.add((result, *args, *(kwargs or {}).values()))
            if more > 0:
                self._limit._check(more)
        return result


def _tensors(values: Iterable[Any]) -> Iterator[torch.Tensor]:
    """The tensors of the CPU that hold bytes: of a subclass, such as a DTensor, those that it is made of."""
    for value in values:
        if isinstance(value, torch.Tensor) and hasattr(value, "__tensor_flatten__"):
            names, _ = value.__tensor_flatten__()
            yield from _tensors(getattr(value, name) for name in names)
        elif isinstance(value, torch.Tensor):
            if value.layout is torch.strided and value.device.type == "cpu":
                yield value
        elif isinstance(value, Mapping):
            yield from _tensors(value.values())
        elif isinstance(value, list | tuple):
            yield from _tensors(value)
