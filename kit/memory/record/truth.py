"""What the CPU allocator really did: every block, from torch's own profiler, kernels' inner buffers included.

The profiler records memory events only and no operators, so a step costs a few percent more and nothing is kept but
the events. `AllocatorTrace` counts what is there when it starts (`held`: a module, its optimizers) and all that is
allocated on this thread while it runs, and nothing else: a data set made before is not device memory.

Limits, known: blocks made by other threads are not seen (pass a batch to `note`, then it is counted while it lives),
and neither is the release of a held block that was made while nothing was traced.
"""

from __future__ import annotations

import gc
import os
import weakref
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch.autograd.profiler import record_function
from torch.nn.parameter import is_lazy

from kit.memory.replay.estimate import MeasuredMemory

__all__ = ["AllocatorTrace", "MeasuredMemory", "storages_of"]

_START, _BATCH, _GONE = "kit.start", "kit.batch.", "kit.gone."
Blocks = dict[int, int]
"""Bytes of a block by its address."""


class AllocatorTrace:
    """Traces the CPU allocator on this thread, in one part (`start`, `stop`) or several (`resume` after `pause`)."""

    def __init__(self) -> None:
        self._parts: list[tuple[Blocks, list[Any]]] = []
        self._held: Blocks = {}
        self._noted: list[Blocks] = []
        self._watching: list[weakref.finalize[Any, Any]] = []
        self.running = False

    def start(self, *held: Any) -> None:
        """Begin, with the storages of `held` (modules, optimizers, tensors) as what is there already.

        Without arguments every tensor that Python knows of is there already.
        """
        self._parts.clear()
        self._noted.clear()
        self.resume(*(held or _all_tensors()))

    def resume(self, *held: Any) -> None:
        """Go on after `pause`; `held` counts from here on, beside what is left of earlier parts.

        Raises:
            RuntimeError: when a profiler runs on this thread, which would lose what it has seen.
        """
        if _private._autograd._profiler_enabled():
            raise RuntimeError("a profiler runs already")
        self._held = storages_of(held)
        os.environ.setdefault("KINETO_LOG_LEVEL", "6")  # it would announce itself on stderr
        autograd, profiler = _private._autograd, _private._profiler
        options = profiler._ExperimentalConfig()
        config = profiler.ProfilerConfig(profiler.ProfilerState.KINETO, False, True, False, False, False, options)
        activities = {profiler.ProfilerActivity.CPU}
        autograd._prepare_profiler(config, activities)
        autograd._enable_profiler(config, activities, {profiler.RecordScope.USER_SCOPE})
        _mark(_START)
        self.running = True

    def pause(self) -> None:
        """Stop looking, keep what was seen."""
        if not self.running:
            return
        self.running = False
        for watch in self._watching:
            watch.detach()
        self._watching.clear()
        self._parts.append((self._held, list(_private._autograd._disable_profiler().experimental_event_tree())))

    def note(self, batch: Any) -> None:
        """A micro-batch begins: its tensors count while they live, even when another thread or process made them."""
        number = len(self._noted)
        self._noted.append(storages_of(batch))
        _mark(f"{_BATCH}{number}")
        for tensor in _tensors([batch]):
            storage = tensor.untyped_storage()
            watch = weakref.finalize(storage, self._gone, storage.data_ptr())
            watch.atexit = False
            self._watching.append(watch)

    def _gone(self, address: int) -> None:
        if self.running:
            _mark(f"{_GONE}{address}")

    def stop(self, optimizer_steps: int = 0, **facts: Any) -> MeasuredMemory:
        """End, and add everything up.

        Args:
            optimizer_steps: Whole optimizer steps that were taken meanwhile.
            facts: JSON values to keep with the numbers.

        Raises:
            RuntimeError: when another profiler was started meanwhile, and took over.
        """
        self.pause()
        ledger = _Ledger(self._noted)
        for held, tree in self._parts:
            ledger.hold(held)
            events = sorted(_flat(tree), key=lambda event: int(event.start_time_ns))
            if not any(event.name == _START for event in events):
                raise RuntimeError("a profiler was started by something else")
            for event in events:
                ledger.take(event)
        self._parts.clear()
        held_bytes, requested = np.array(ledger.series, dtype=np.int64).T
        return MeasuredMemory(held_bytes, requested, (ledger.last - ledger.first) / 1e9, optimizer_steps, facts)


class _Ledger:
    """Adds up events in order: which blocks are alive, and what they hold together."""

    def __init__(self, noted: list[Blocks]) -> None:
        self.alive: Blocks = {}
        self.noted = noted
        self.untraced: set[int] = set()
        self.now = self.requested = 0
        self.first = self.last = 0
        self.series: list[tuple[int, int]] = [(0, 0)]

    def hold(self, blocks: Blocks) -> None:
        for address, size in blocks.items():
            if address not in self.alive:
                self._add(address, size)
        self.series[-1] = (self.now, self.requested)

    def take(self, event: Any) -> None:
        self.first, self.last = self.first or int(event.start_time_ns), int(event.start_time_ns)
        name = event.name
        if name == "[memory]":
            fields = event.extra_fields
            if fields.device.type == "cpu" and (fields.alloc_size > 0 or fields.ptr in self.alive):
                self.untraced.discard(fields.ptr)
                if fields.alloc_size > 0:
                    self.requested += fields.alloc_size
                    self._add(fields.ptr, fields.alloc_size)
                else:
                    self._remove(fields.ptr)
        elif name.startswith(_BATCH):
            self._begin_batch(int(name.removeprefix(_BATCH)))
        elif name.startswith(_GONE) and (address := int(name.removeprefix(_GONE))) in self.untraced:
            self.untraced.discard(address)
            self._remove(address)

    def _begin_batch(self, number: int) -> None:
        if number == 0:  # what came before the first batch is set-up: only what is left of it counts
            self.requested, self.series = 0, [(self.now, 0)]
        for address, size in self.noted[number].items():
            if address not in self.alive:
                self.untraced.add(address)
                self.requested += size
                self._add(address, size)

    def _add(self, address: int, size: int) -> None:
        self.now += size - self.alive.get(address, 0)
        self.alive[address] = size
        self.series.append((self.now, self.requested))

    def _remove(self, address: int) -> None:
        self.now -= self.alive.pop(address)
        self.series.append((self.now, self.requested))


COMPRESSED_LAYOUTS = (torch.sparse_csr, torch.sparse_csc, torch.sparse_bsr, torch.sparse_bsc)
SPARSE_LAYOUTS = (torch.sparse_coo, *COMPRESSED_LAYOUTS)


def sparse_parts(tensor: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """The indices and, last, the values of a sparse tensor, which hold its bytes; of compressed ones first those that
    say where rows or columns begin."""
    if tensor.layout is torch.sparse_coo:
        return tensor._indices(), tensor._values()
    with torch.no_grad():
        if tensor.layout in (torch.sparse_csr, torch.sparse_bsr):
            return tensor.crow_indices(), tensor.col_indices(), tensor.values()
        return tensor.ccol_indices(), tensor.row_indices(), tensor.values()


def storages_of(held: Any) -> Blocks:
    """The CPU storages of all tensors in modules, optimizers, mappings and sequences, each once."""
    found: Blocks = {}
    for tensor in _tensors([held]):
        storage = tensor.untyped_storage()
        if storage.device.type == "cpu" and storage.nbytes():
            found[storage.data_ptr()] = storage.nbytes()
    return found


def _tensors(objects: Iterable[Any]) -> Iterator[torch.Tensor]:
    for item in objects:
        if is_lazy(item):
            continue  # it holds nothing before it gets its shape
        if isinstance(item, torch.Tensor):
            # The tensors that really hold a subclass's bytes, such as the shard of a DTensor.
            flatten = getattr(item, "__tensor_flatten__", None)
            if flatten is not None:
                yield from _tensors(getattr(item, name) for name in flatten()[0])
            elif item.layout in SPARSE_LAYOUTS:
                yield from sparse_parts(item)
            elif item.layout is torch.strided:
                yield item
        elif isinstance(item, torch.nn.Module):
            for part in item.modules():
                own = [*part._parameters.values(), *part._buffers.values()]
                yield from _tensors([*own, *(getattr(tensor, "grad", None) for tensor in own)])
                yield from _tensors(value for value in vars(part).values() if isinstance(value, torch.Tensor))
        elif isinstance(item, torch.optim.Optimizer):
            yield from _tensors(item.state.values())
        elif isinstance(item, Mapping):
            yield from _tensors(item.values())
        elif isinstance(item, list | tuple):
            yield from _tensors(item)


def _all_tensors() -> list[torch.Tensor]:
    return [item for item in gc.get_objects() if issubclass(type(item), torch.Tensor)]


def _flat(events: Iterable[Any]) -> Iterator[Any]:
    for event in events:
        yield event
        yield from _flat(event.children)


# Private, because the public profiler cannot leave the operators out, which costs ten times as much.
_private: Any = torch._C


def _mark(name: str) -> None:
    with record_function(name):
        pass
