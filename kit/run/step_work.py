"""StepWork: what one step asks of the machine: arithmetic, memory traffic, calls, and waits of the host.

One batch after the first two optimizer steps and within the warm-up is watched operation by operation, on every rank,
and written as one `work_counted` event, so that no step that is measured pays for it; with less warm-up nothing is
counted. FLOPs follow torch's own formulas (a multiply and an add are two) for matrix products, convolutions and
attention, forward, backward and recomputation alike; everything else counts as none. Bytes are what would move if each
operation read its inputs and wrote its outputs once, views moving nothing: fused kernels and caches move less, so this
is an upper bound. A sync is where the host must know a value that a device computes: `.item()`, `bool(tensor)`,
`.cpu()`; on the CPU it stops nothing, but would on a GPU.

Watching changes no result, and what it fails to count it leaves out.
"""

from __future__ import annotations

import contextlib
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from types import FrameType
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from kit.run.jobs.context import Context
from kit.run.jobs.loader_used import samples_of
from kit.run.memory.meter import STEPS
from kit.run.places import describe, is_library

_LINES = 5
_TORCH = f"{torch.__path__[0]}/"
_FREE = {"detach", "empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "set_"}
_ASKING = {"_local_scalar_dense", "is_nonzero", "equal", "nonzero"}
_COPIES = {"_to_copy", "copy_"}
_NORMS = ("native_batch_norm", "cudnn_batch_norm", "miopen_batch_norm", "_batch_norm_with_update")
_Line = tuple[str, int, str]


class StepWork(Callback):
    """Writes `work_counted` once; to be placed before the callback that ends the step's time."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self._first = STEPS if context.config.trial.measure_memory else 1
        self._mode: WorkMode | None = None
        self._done = False

    def on_train_batch_start(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        batch: Any,  # noqa: ARG002
        batch_idx: int,  # noqa: ARG002
    ) -> None:
        if not self._done and self._first <= trainer.global_step < self._context.config.trial.warmup_steps:
            self._mode = WorkMode(pl_module.device)
            self._mode.__enter__()  # type: ignore[no-untyped-call]

    def on_before_backward(self, trainer: Trainer, pl_module: LightningModule, loss: Any) -> None:  # noqa: ARG002
        if self._mode is not None:
            self._mode.backward = True

    def on_after_backward(self, trainer: Trainer, pl_module: LightningModule) -> None:  # noqa: ARG002
        if self._mode is not None:
            self._mode.backward = False

    def on_train_batch_end(
        self,
        trainer: Trainer,
        pl_module: LightningModule,  # noqa: ARG002
        outputs: Any,  # noqa: ARG002
        batch: Any,
        batch_idx: int,  # noqa: ARG002
    ) -> None:
        mode = self._leave()
        if mode is not None:
            found = mode.found(self._context.cells)
            self._context.writer.write("work_counted", samples=samples_of(trainer, batch), **found)

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:  # noqa: ARG002
        self._leave()

    def _leave(self) -> WorkMode | None:
        mode, self._mode = self._mode, None
        if mode is not None:
            self._done = True
            mode.__exit__(None, None, None)  # type: ignore[no-untyped-call]
        return mode


class WorkMode(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Sees every operation that is run while it is entered."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        from torch.utils.flop_counter import flop_registry, sdpa_backward_flop_count, sdpa_flop_count

        self.backward = False
        """Whether gradients are being computed now."""
        self._on_cpu = device.type == "cpu"
        self._formulas: Mapping[Any, Callable[..., int]] = flop_registry
        self._attention: tuple[Callable[..., int], ...] = (sdpa_flop_count, sdpa_backward_flop_count)
        self._flops: Counter[str] = Counter()
        self._bytes = self._calls = self._syncs = self._norms_again = 0
        self._line_calls: Counter[_Line] = Counter()
        self._line_syncs: Counter[_Line] = Counter()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        with contextlib.suppress(Exception):  # counting must never end a step
            self._count(func, args, kwargs, out)
        return out

    def _count(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> None:
        name = func._opname
        self._calls += 1
        line = _own_line()
        if line is not None:
            self._line_calls[line] += 1
        if self._is_sync(name, args, out):
            self._syncs += 1
            if line is not None:
                self._line_syncs[line] += 1
        self._norms_again += self.backward and name.startswith(_NORMS) and not name.endswith("_backward")
        if name not in _FREE and not _is_view(func):
            self._bytes += _moved_bytes((args, kwargs), out)
        flops = self._flops_of(func, name, args, kwargs, out)
        if flops:
            self._flops[_dtype(args)] += flops

    def _flops_of(self, func: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> int:
        if name == "_scaled_dot_product_flash_attention_for_cpu":
            return int(self._attention[0](*(tensor.shape for tensor in args[:3])))
        if name == "_scaled_dot_product_flash_attention_for_cpu_backward":
            return int(self._attention[1](*(tensor.shape for tensor in args[:4])))
        formula = self._formulas.get(func._overloadpacket)
        return 0 if formula is None else int(formula(*args, **kwargs, out_val=out))

    def _is_sync(self, name: str, args: tuple[Any, ...], out: Any) -> bool:
        tensors = [leaf for leaf in tree_leaves(args) if isinstance(leaf, torch.Tensor)]
        if name in _ASKING:
            return self._on_cpu or any(tensor.device.type != "cpu" for tensor in tensors)
        if name not in _COPIES or not isinstance(out, torch.Tensor):
            return False
        return out.device.type == "cpu" and any(tensor.device.type != "cpu" for tensor in tensors)

    def found(self, cells: Mapping[str, tuple[str, str]]) -> dict[str, Any]:
        """The fields of the event. `lines` are those of the user's code that made most calls, and that had syncs."""
        most = [line for line, _ in self._line_calls.most_common(_LINES)]
        lines = dict.fromkeys([*most, *(line for line, _ in self._line_syncs.most_common(_LINES))])
        return {
            "flops": dict(self._flops),
            "bytes": self._bytes,
            "calls": self._calls,
            "syncs": self._syncs,
            "own_syncs": sum(self._line_syncs.values()),
            "batch_norms_again": self._norms_again,
            "lines": [
                {
                    "place": describe(line, cells),
                    "calls": self._line_calls[line],
                    "syncs": self._line_syncs[line],
                }
                for line in lines
            ],
        }


def _frames() -> Iterator[FrameType]:
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        yield frame
        frame = frame.f_back


def _own_line() -> _Line | None:
    """The line of the user's code that called torch; None where Lightning or another library did."""
    for frame in _frames():
        file = frame.f_code.co_filename
        if file == __file__ or file.startswith(_TORCH):
            continue
        return None if is_library(file) else (file, frame.f_lineno, frame.f_code.co_name)
    return None


def _is_view(func: Any) -> bool:
    returned = [value.alias_info for value in func._schema.returns]
    return any(alias is not None and not alias.is_write for alias in returned)


def _moved_bytes(inputs: Any, out: Any) -> int:
    read = [leaf for leaf in tree_leaves(inputs) if isinstance(leaf, torch.Tensor)]
    written = [leaf for leaf in tree_leaves(out) if isinstance(leaf, torch.Tensor)]
    return sum(map(_bytes, read)) + sum(map(_bytes, written))


def _bytes(tensor: torch.Tensor) -> int:
    """What a rank holds of it; an expanded tensor is no larger than what it repeats."""
    local = getattr(tensor, "_local_tensor", tensor)
    return min(int(local.nbytes), int(local.untyped_storage().nbytes()))


def _dtype(args: tuple[Any, ...]) -> str:
    tensors = (leaf for leaf in tree_leaves(args) if isinstance(leaf, torch.Tensor))
    return str(next(tensors).dtype).removeprefix("torch.")
