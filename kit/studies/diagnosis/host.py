"""What the host of a rank does while it trains: hooks, garbage, threads, what is kept, and what its workers hold.

`HostWatch` writes one `host_watched` event per rank, of the steps after the warm-up. Lines of the user's code are
sampled in the rank and in its forked loader processes (`kit.studies.diagnosis.sampler`). What hooks take is timed, by
the clock of the step (`kit.trial.recorder`). What is kept is what the allocators say is not freed. How far each sample
fills its batch (`filled`) is looked at by NumPy, which asks nothing of torch's allocator or of its random numbers, in a
few batches: where there are warm-up steps, after those whose memory is measured and before any is timed. All of it
costs less than a hundredth of the time, and says what (`own_fraction`).
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import gc
import json
import mmap
import os
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import Checkpoint
from torch import nn
from torch.nn.parameter import is_lazy
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_leaves
from torch.utils.data import DataLoader, IterableDataset
from torch.utils.data._utils import worker as torch_worker
from torch.utils.data._utils.collate import default_collate
from typing_extensions import override

from kit.machine.processes import scheduled_seconds, thread_usage
from kit.studies.diagnosis.sampler import (
    MOST_WORKERS,
    PAGE_BYTES,
    Garbage,
    Sampler,
    WatchedLoop,
    copied_bytes,
    hold_signal,
    kind_of,
    summary,
)  # fmt: skip
from kit.trial.context import Context
from kit.trial.meters import STEPS
from kit.trial.recorder import StepClock
from kit.trial.recorder import samples_of as batch_samples
from kit.trial.verdict import describe

_POINTS = 12
_HOOKS = ("[Callback]", "[LightningModule]", "[LightningDataModule]")
_LEAST_ENTRIES, _MOST_WRAPPED = 10_000, 4
_LOOKED_INTO = 100
"""Items of one container, for which the others count as well."""
_TENSOR_BYTES = 440
"""Of a tensor without its numbers."""


class _Mallinfo(ctypes.Structure):
    """What glibc tells of its heaps, in bytes."""

    _fields_ = tuple(
        (name, ctypes.c_size_t)
        for name in (
            "arena",
            "ordblks",
            "smblks",
            "hblks",
            "hblkhd",
            "usmblks",
            "fsmblks",
            "uordblks",
            "fordblks",
            "keep",
        )
    )


@functools.cache
def _mallinfo() -> Any:
    call = getattr(ctypes.CDLL(None), "mallinfo2", None)
    if call is not None:
        call.restype = _Mallinfo
    return call


def held_bytes(device: torch.device) -> int | None:
    """What is allocated and not freed, on the device and, by glibc's count, on the host; None where nobody tells.

    Resident memory tells less: heaps in pieces grow for hundreds of steps though nothing is kept.
    """
    on_device = torch.cuda.memory_allocated(device) if device.type == "cuda" else 0
    with contextlib.suppress(OSError, AttributeError):
        call = _mallinfo()
        if call is not None:
            found = call()
            return int(found.uordblks + found.hblkhd + on_device)
    return on_device or None


class HostWatch(Callback):
    """Watches from the first step after the warm-up to the end of the last, and writes once."""

    def __init__(self, context: Context, clock: StepClock) -> None:
        self._context, self._clock = context, clock
        hold_signal()
        self._sampler: Sampler | None = None
        self._garbage = Garbage()
        self._pages: mmap.mmap | None = None
        self._loop: Any = None
        self._begun: dict[str, Any] = {}
        self._written = False
        self._held: list[tuple[int, int]] = []
        self._copied: dict[int, tuple[int, int]] = {}
        self._trained_on: Callable[[], Any] | None = None
        self._remade = 0
        self._filled: list[list[Filled]] = []

    @override
    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        loader = trainer.train_dataloader
        if self._trained_on is not None and self._trained_on() is not loader:
            self._remade += 1
        with contextlib.suppress(TypeError):  # what has no weak references is not watched
            self._trained_on = weakref.ref(loader)

    @override
    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        with contextlib.suppress(OSError, ValueError, AttributeError):
            self._pages = mmap.mmap(-1, MOST_WORKERS * PAGE_BYTES)
            self._loop = torch_worker._worker_loop
            setattr(torch_worker, "_worker_loop", WatchedLoop(self._loop, self._pages, os.getpid()))  # noqa: B010

    @override
    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        timed = trainer.global_step >= self._context.config.trial.warmup_steps
        least = STEPS if self._context.config.trial.measure_memory else 0
        if trainer.global_step >= least and len(self._filled) < _FILLED_BATCHES and not (timed and batch_is_far(batch)):
            with contextlib.suppress(Exception), _disable_current_modes():  # looking must never end a training
                self._filled.append(filled(batch, batch_samples(trainer, batch)))
        if self._sampler is None and timed:
            gc.callbacks.append(self._garbage)
            self._clock.actions.clear()
            self._begun = {
                "pixels": pixels(batch), "sample_bytes": sample_bytes(batch), "usage": thread_usage(),
                "wall": time.perf_counter(), "threads": thread_seconds(), "sizes": sizes(trainer, pl_module),
            }  # fmt: skip
            self._sampler = Sampler(self._clock)
            self._sampler.start()
        if self._sampler is not None:
            self._sampler.step += 1

    @override
    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        steps = getattr(trainer, "trial_steps", None)
        if self._sampler is None and trainer.global_step == self._context.config.trial.warmup_steps:  # not timed yet
            self._copied = {
                worker["process"]: (trainer.global_step, copied)
                for worker in self._workers() if (copied := copied_bytes(worker)) is not None
            }  # fmt: skip
        if self._sampler is not None and trainer.global_step % max(1, (steps or 0) // _POINTS) == 0:
            held = held_bytes(pl_module.device)
            if held is not None and len(self._held) < 4 * _POINTS:
                self._held.append((trainer.global_step, held))
        if steps is not None and trainer.global_step >= steps:  # while loader processes still live
            self._write(trainer, pl_module)

    @override
    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._write(trainer, pl_module)
        self._unhook()

    @override
    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        self.on_train_end(trainer, pl_module)

    def _unhook(self) -> None:
        if self._sampler is not None:
            self._sampler.stop()
        if self._garbage in gc.callbacks:
            gc.callbacks.remove(self._garbage)
        if self._loop is not None:
            setattr(torch_worker, "_worker_loop", self._loop)  # noqa: B010
            self._loop = None

    def _write(self, trainer: Trainer, module: LightningModule) -> None:
        sampler, begun = self._sampler, self._begun
        if sampler is None or self._written:
            return
        self._written = True
        wall = time.perf_counter() - begun["wall"]
        threads = thread_seconds()
        cores = {
            name: (seconds - begun["threads"].get(name, 0.0)) / wall
            for name, seconds in threads.items() if not name.startswith("kit-")
        }  # fmt: skip
        faults, system_seconds = (now - then for now, then in zip(thread_usage(), begun["usage"], strict=True))
        after, callbacks = sizes(trainer, module), getattr(trainer, "callbacks")  # noqa: B009
        mine = {callback.state_key for callback in callbacks if type(callback).__module__.startswith("kit.")}
        told = {thread.name: self._told_of(thread) for thread in threading.enumerate()}
        self._context.writer.write(
            "host_watched",
            own_fraction=(sampler.cost_seconds + sampler.disk.cost_seconds) / wall,
            interval_seconds=sampler.interval_seconds,
            **summary(sampler, self._context.cells),
            hooks={
                name: seconds / wall
                for name, seconds in self._clock.actions.items()
                if name.startswith(_HOOKS) and name.partition("]")[2].rpartition(".")[0] not in mine
            },
            checkpointers=[callback.state_key for callback in callbacks if isinstance(callback, Checkpoint)],
            garbage_fraction=self._garbage.seconds / wall,
            young_garbage_fraction=self._garbage.young_seconds / wall,
            collections=self._garbage.collections,
            threads=[{"name": name, "cores": share, **told.get(name, {"place": ""})} for name, share in cores.items()],
            grown={
                name: [begun["sizes"][name], size]
                for name, size in after.items()
                if size > begun["sizes"].get(name, size)
            },
            pixels=begun["pixels"],
            sample_bytes=begun["sample_bytes"],
            page_faults_per_second=faults / wall,
            system_fraction=system_seconds / wall,
            compute_threads=torch.get_num_threads(),
            anomaly_detection=torch.is_anomaly_enabled(),
            held=self._held,
            loader=self._loader(trainer),
            loaders_remade=self._remade,
            padding=padding(self._filled, equal_samples(trainer.train_dataloader)),
            workers=[{**worker, "copied": self._copies(worker, trainer.global_step)} for worker in self._workers()],
            embeddings=embeddings(module),
            optimizers=[optimizer_of(one) for one in trainer.optimizers],
        )  # fmt: skip

    def _told_of(self, thread: threading.Thread) -> dict[str, str]:
        """The function that a thread runs; of one of a library the package."""
        target = getattr(thread, "_target", None) or type(thread).run
        code = getattr(getattr(target, "__func__", target), "__code__", None)
        own, package = kind_of(code.co_filename) if code is not None else (False, "")
        if code is None or not own:
            return {"place": "", "package": package}
        return {"place": describe((code.co_filename, code.co_firstlineno, code.co_name), self._context.cells)}

    def _loader(self, trainer: Trainer) -> dict[str, Any]:
        loader = trainer.train_dataloader
        if not isinstance(loader, DataLoader):
            return {}
        method = getattr(loader.multiprocessing_context, "get_start_method", lambda: None)()
        return {
            "iterable": isinstance(loader.dataset, IterableDataset), "samples": samples_of(loader),
            "workers": loader.num_workers, "persistent": loader.persistent_workers,
            "start_method": method or ("fork" if sys.platform == "linux" and sys.version_info < (3, 14) else "other"),
            "objects_bytes": objects_bytes(loader.dataset), "arrays_bytes": arrays_bytes(loader.dataset),
        }  # fmt: skip

    def _copies(self, worker: dict[str, Any], step: int) -> list[tuple[int, int]]:
        """Steps, and bytes that a loader process had copied by then: after the warm-up, and now."""
        copied = copied_bytes(worker)
        first = [self._copied[worker["process"]]] if worker.get("process") in self._copied else []
        return first if copied is None else [*first, (step, copied)]

    def _workers(self) -> list[dict[str, Any]]:
        found = []
        for number in range(MOST_WORKERS if self._pages is not None else 0):
            begin = number * PAGE_BYTES
            page = (self._pages or b"")[begin : begin + PAGE_BYTES]
            size = int.from_bytes(page[:8], "little")
            with contextlib.suppress(ValueError):
                if size:
                    found.append(json.loads(page[8 : 8 + size]))
        return found


def thread_seconds() -> dict[str, float]:
    """CPU seconds of the other threads of Python, by name; zeros where the system does not tell."""
    found: dict[str, float] = {}
    for thread in threading.enumerate():
        if thread is threading.current_thread():
            continue
        found[thread.name] = found.get(thread.name, 0.0) + scheduled_seconds(thread.native_id or 0)[0]
    return found


def sizes(trainer: Trainer, module: LightningModule) -> dict[str, int]:
    """Entries of the containers that the module and the user's callbacks, or their classes, hold as attributes."""
    callbacks = getattr(trainer, "callbacks")  # noqa: B009
    own = [callback for callback in callbacks if not type(callback).__module__.startswith(("kit.", "lightning."))]
    holders: list[Any] = [module, *own]
    return {
        f"{type(holder).__name__}.{name}": len(value)
        for holder in holders
        for name, value in {**vars(type(holder)), **vars(holder)}.items()
        if isinstance(value, list | dict | set) and not name.startswith("_")
    }


def pixels(batch: Any) -> int:
    """Of one picture of a batch; 0 where there are none."""
    shapes = [leaf.shape for leaf in tree_leaves(batch) if isinstance(leaf, torch.Tensor) and leaf.ndim >= 4]
    return max((int(shape[-1] * shape[-2]) for shape in shapes), default=0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Filled:
    """One tensor of a batch: how far each sample is anything but one value that is repeated to its end."""

    size: tuple[int, ...]
    """Along each dimension but that of samples."""
    ends: np.ndarray
    """`(sample, dimension)`: what comes after is all the value of the last number."""
    bytes: int
    told: tuple[bool, ...]
    """Of each dimension, whether lengths in the batch, or a mask, say the same."""
    dense: tuple[bool, ...]
    """Of each dimension, whether most places before the ends have another value: few of one-hot numbers have."""


def batch_is_far(batch: Any) -> bool:
    """Whether looking at a batch would make the host wait for a device."""
    return any(isinstance(leaf, torch.Tensor) and leaf.device.type != "cpu" for leaf in tree_leaves(batch))


def filled(batch: Any, samples: int) -> list[Filled]:
    """Of the tensors of a batch, in order; of one that cannot be padded an empty one.

    A value that is repeated to the end is looked for from the end, by halves, so what is no padding is hardly read.
    """
    leaves = [leaf for leaf in tree_leaves(batch) if isinstance(leaf, torch.Tensor)]
    arrays = [_array(leaf, samples) for leaf in leaves]
    whole = [(array, array) for array in arrays if array is not None and array.ndim == 1 and array.dtype.kind in "iu"]
    lengths = [*whole, *((array, _marked(array)) for array in arrays if array is not None and array.ndim == 2)]
    found = list[Filled]()
    for array in arrays:
        if array is None or array.ndim < 2 or array.dtype == bool or array.size > _MOST_FILLED:
            found.append(Filled(size=(), ends=np.zeros((0, 0), int), bytes=0, told=(), dense=()))
            continue
        last = array.reshape(len(array), -1)[:, -1]
        ends = np.array([
            [_end(sample, dim, value) for dim in range(sample.ndim)] for sample, value in zip(array, last, strict=True)
        ])  # fmt: skip
        full = np.array(array.shape[1:])
        values, counts = np.unique(last[(ends < full).any(axis=1)], return_counts=True)
        if len(values) > 1:  # some samples end with a few of another value, or each with one of its own
            filler = last == values[counts.argmax()]
            ends = np.where(filler[:, None] & (2 * counts.max() > counts.sum()), ends, full)
        told, dense = list[bool](), list[bool]()
        for dim, size in enumerate(full):
            told.append(any(_says(said, ends[:, dim], size) for of, said in lengths if of is not array))
            dense.append(bool((ends[:, dim] < size).any()) and _is_dense(array, ends[:, dim], dim))
        size = tuple(map(int, full))
        found.append(Filled(size=size, ends=ends, bytes=array.nbytes, told=tuple(told), dense=tuple(dense)))
    return found


_FILLED_BATCHES, _MOST_FILLED = 4, 1 << 25
_MOST_SAMPLES, _LEAST_LONG, _NEARLY_ALL = 1024, 4, 0.75


def _array(leaf: torch.Tensor, samples: int) -> np.ndarray | None:
    """The numbers of a tensor in memory, samples first; None where nobody knows which dimension has them."""
    if type(leaf) is not torch.Tensor or leaf.layout != torch.strided or leaf.requires_grad or leaf.is_complex():
        return None
    dim = next((dim for dim, size in enumerate(leaf.shape[:2]) if size == samples), None)
    if dim is None or not 1 < samples <= _MOST_SAMPLES or not leaf.numel():
        return None
    leaf = leaf.view(torch.int16) if leaf.dtype == torch.bfloat16 else leaf
    return np.moveaxis(leaf.cpu().numpy(), dim, 0)


def _end(sample: np.ndarray, dim: int, value: Any) -> int:
    """Where along a dimension the part begins that has nothing but `value`; one place at least is no such part."""
    along = np.moveaxis(sample, dim, 0)
    low, high = 1, len(along)
    if high < _LEAST_LONG or not (along[-1] == value).all():
        return high
    high -= 1
    while low < high:
        middle = (low + high) // 2
        if (along[middle:high] == value).all():
            high = middle
        else:
            low = middle + 1
    return high


def _is_dense(array: np.ndarray, ends: np.ndarray, dim: int) -> bool:
    """See `Filled.dense`, of a few samples that are filled up."""
    few = [place for place in range(len(array)) if ends[place] < array.shape[dim + 1]][:_FEW]
    others = [np.moveaxis(array[place], dim, 0)[: ends[place]] != array[place].flat[-1] for place in few]
    return float(np.mean([one.reshape(len(one), -1).any(axis=1).mean() for one in others])) >= _DENSE


_FEW, _DENSE = 16, 0.5


def _marked(array: np.ndarray) -> np.ndarray:
    """The lengths that a mask of samples says: true, or 1, up to there; -1 where it is no such mask."""
    ones = array == array[:, :1]
    lengths = ones.sum(axis=1)
    is_mask = array.dtype == bool or bool(np.isin(array[:, 0], (0, 1)).all() and np.isin(array, (0, 1)).all())
    is_first = (ones == (np.arange(array.shape[1]) < lengths[:, None])).all() if is_mask else False
    return lengths if is_first else np.full(len(array), -1)


def _says(lengths: np.ndarray, ends: np.ndarray, size: int) -> bool:
    """Whether lengths are those of the samples: data may itself end with a few of the value that fills it up."""
    beyond = lengths - ends
    return bool((beyond >= 0).all() and (lengths <= size).all() and beyond.mean() <= _OF_DATA * size)


_OF_DATA = 0.05


def equal_samples(loader: Any) -> bool:
    """Whether a loader only puts together what has one shape."""
    return isinstance(loader, DataLoader) and loader.collate_fn is default_collate


def padding(batches: list[list[Filled]], equal: bool) -> dict[str, Any]:
    """Sizes and ends of the padded tensor that is largest; empty where none is, which is told from zeros that are data.

    A dimension is padded where samples of a batch end at different places, and where batches differ in size and one
    sample fills each, or where lengths or a mask say so. Of tensors of one size the largest decides, as a mask of
    objects may end early in a picture that does not.

    Args:
        batches: In each the same tensors, in the same order.
        equal: Whether samples had one shape before they were put together.
    """
    tensors = [*zip(*batches, strict=False)] if batches else []
    most: tuple[int, list[int], tuple[Filled, ...]] = (0, [], ())
    for seen in tensors:
        size, dims = sum(one.bytes for one in seen), [*range(min(len(one.size) for one in seen))]
        larger = (other for other in tensors if sum(one.bytes for one in other) > size)
        if any(_sizes(other) & _sizes(seen) for other in larger if other is not seen):
            continue
        padded = [dim for dim in dims if _is_padded(seen, dim, equal)]
        if padded and size > most[0]:
            most = (size, padded, seen)
    _, dims, seen = most
    if not dims:
        return {}
    return {"sizes": [[one.size[dim] for dim in dims] for one in seen],
            "ends": [one.ends[:, dims].tolist() for one in seen]}  # fmt: skip


def _sizes(seen: tuple[Filled, ...]) -> set[tuple[int, ...]]:
    """Of each dimension its size in all batches."""
    return {*zip(*(one.size for one in seen), strict=False)}


def _is_padded(seen: tuple[Filled, ...], dim: int, equal: bool) -> bool:
    differ = [len({*one.ends[:, dim].tolist()}) > 1 for one in seen]
    fill = [int(one.ends[:, dim].max()) == one.size[dim] for one in seen]
    told, dense = [one.told[dim] for one in seen], [one.dense[dim] for one in seen]
    sizes = {one.size[dim] for one in seen}
    by_size = len(sizes) > 1 and not equal and sum(fill) >= _NEARLY_ALL * len(seen)
    return min(sum(differ), sum(dense)) >= _NEARLY_ALL * len(seen) and (by_size or all(told))


def samples_of(loader: DataLoader[Any]) -> int:
    """The length of an epoch's order; 0 where it has none."""
    with contextlib.suppress(TypeError, AttributeError, NotImplementedError):
        return len(loader.sampler)  # type: ignore[arg-type]
    return 0


def sample_bytes(batch: Any) -> int:
    """Of the tensors of a batch, by the length of the first; 0 where there are none."""
    tensors = [leaf for leaf in tree_leaves(batch) if isinstance(leaf, torch.Tensor) and leaf.ndim and len(leaf)]
    return sum(tensor.nbytes for tensor in tensors) // len(tensors[0]) if tensors else 0


def embeddings(module: nn.Module) -> dict[str, Any]:
    """The largest table of embeddings with dense gradients, and all trained parameters."""
    tables = [
        (part.weight.numel(), name) for name, part in module.named_modules()
        if isinstance(part, nn.Embedding | nn.EmbeddingBag) and not part.sparse and part.weight.requires_grad
    ]  # fmt: skip
    total = sum(one.numel() for one in module.parameters() if one.requires_grad and not is_lazy(one))
    size, name = max(tables, default=(0, ""))
    return {"name": name, "elements": size, "parameters": total}


def optimizer_of(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Its class, its parameters, and whether it is an Adam or AdamW of torch's that does not use its fused form."""
    groups = optimizer.param_groups
    own = type(optimizer) in (torch.optim.Adam, torch.optim.AdamW)
    other = any(group.get("fused") or group.get("differentiable") for group in groups)
    return {
        "name": type(optimizer).__name__, "can_fuse": own and not other,
        "parameters": sum(one.numel() for group in groups for one in group["params"] if not is_lazy(one)),
        "decays_gradients": any(
            group.get("weight_decay") and not group.get("decoupled_weight_decay", type(optimizer) is torch.optim.AdamW)
            for group in groups
        ),
    }  # fmt: skip


def held_by(dataset: Any) -> Iterator[Any]:
    """A dataset, those that it wraps, and their attributes."""
    for _ in range(_MOST_WRAPPED):
        if dataset is None:
            return
        yield dataset
        yield from [one for name, one in getattr(dataset, "__dict__", {}).items() if name != "dataset"]
        dataset = getattr(dataset, "dataset", None)


def objects_bytes(dataset: Any) -> int:
    """What the Python objects in a dataset's containers take, from a hundred of each: references count as they go."""
    held = held_by(dataset)
    return sum(_sampled_bytes(one) for one in held if isinstance(one, list | dict) and len(one) >= _LEAST_ENTRIES)


def arrays_bytes(dataset: Any) -> int:
    """What a dataset's arrays take, which are copied where it is pickled; tensors are shared, and mapped files too."""
    held = held_by(dataset)
    return sum(one.nbytes for one in held if isinstance(one, np.ndarray) and not isinstance(one, np.memmap))


def _sampled_bytes(container: list[Any] | dict[Any, Any]) -> int:
    count = min(100, len(container))
    if isinstance(container, dict):
        some: Iterator[Any] = (item for item, _ in zip(container.items(), range(count), strict=False))
    else:
        some = (container[place] for place in range(0, len(container), max(1, len(container) // count)))
    held = [_deep_bytes(item, 3) for item in some]
    return sys.getsizeof(container) + int(sum(held) / max(1, len(held)) * len(container))


def _deep_bytes(value: Any, depth: int) -> int:
    if isinstance(value, torch.Tensor):  # numbers of a small one share pages with what counts its references
        return _TENSOR_BYTES + (value.nbytes if value.nbytes < mmap.PAGESIZE else 0)
    size = sys.getsizeof(value, 0)
    if depth and isinstance(value, list | tuple | set | dict):
        items = list(value.items() if isinstance(value, dict) else value)[:_LOOKED_INTO]
        pairs = (item for pair in items for item in pair) if isinstance(value, dict) else items
        return size + sum(_deep_bytes(item, depth - 1) for item in pairs) * len(value) // max(1, len(items))
    return size
