"""Levers for sequences: training a long sequence a piece at a time, and choosing the kernel of attention.

`SequenceChunks` trains in the memory of one piece. Its contract, for any LightningModule in automatic optimization:

    chunk_step(chunk, state) -> (loss, state)    the mean loss of a sequence chunk, and what the next one starts from
    sequence_chunks(batch, length) -> list       optional: the batch cut into chunks of at most `length` positions

The first `state` is None; every later one is what the module returned, detached: gradients end at the borders of
chunks, the numbers do not. So the loss of a step is that of the whole sequence wherever `state` carries all that later
positions see of earlier ones, and gradients are those of truncated backpropagation through time. Without
`sequence_chunks` every tensor of the batch is cut along its second dimension, (batch, position, ...); tensors without
one go to every chunk whole.

Each chunk runs forward and backward before the next begins, weighted by its share of the positions. Gradients add up,
and are synchronized once, with those of the last chunk; under fsdp they are held whole until then. Logged values are
those of the last chunk, the loss of the step is that of all.

`AttentionKernel` prefers one kernel for `scaled_dot_product_attention` during a fit, and says which one ran. It is a
preference, not a demand: a call that the preferred kernel cannot take (its dtype, head size or mask) goes to the next
one, and the reason is said. Torch's own switches are set for the whole fit, so that the backward pass and recomputed
blocks use the same kernels. Code that multiplies its scores itself is not reached.
"""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any
from weakref import WeakSet

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map
from typing_extensions import override

from kit.errors import ConfigError, Problem, warn_caller

_CHUNKED: WeakSet[nn.Module] = WeakSet()
_REPLACED = ("training_step", "optimizer_zero_grad")


def is_chunked(module: nn.Module) -> bool:
    """Whether `module` is being fitted in sequence chunks: its backward then runs inside its training_step."""
    return module in _CHUNKED


class SequenceChunks(Callback):
    """Fit in sequence chunks of at most `length` positions.

    Raises:
        ConfigError: for less than one position; when the fit starts, for a module that does not keep the contract.
    """

    def __init__(self, length: int) -> None:
        if length < 1:
            raise ConfigError([Problem("levers.sequence_chunk", f"is {length} positions, but must be at least 1")])
        self.length = length
        self.count = 0
        """Chunks of the last batch."""
        self._own: dict[str, Any] = {}

    @override
    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if stage != "fit":
            return
        check_contract(pl_module)
        self._own = {name: vars(pl_module)[name] for name in _REPLACED if name in vars(pl_module)}

        def training_step(batch: Any, batch_idx: int) -> Tensor:
            return self._step(trainer, pl_module, batch, batch_idx)

        def optimizer_zero_grad(*_: Any) -> None:
            """Lightning clears gradients between forward and backward, when those of all chunks but one are there."""

        vars(pl_module).update(training_step=training_step, optimizer_zero_grad=optimizer_zero_grad)
        _CHUNKED.add(pl_module)

    @override
    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        for name in _REPLACED:
            vars(pl_module).pop(name, None)
        vars(pl_module).update(self._own)
        _CHUNKED.discard(pl_module)

    def _step(self, trainer: Trainer, module: LightningModule, batch: Any, batch_idx: int) -> Tensor:
        """All chunks but the last backward; the loss of the step, whose own backward is that of the last chunk."""
        if batch_idx % trainer.accumulate_grad_batches == 0:
            for optimizer in trainer.optimizers:
                optimizer.zero_grad()
        own = getattr(module, "sequence_chunks", None)
        chunks: Sequence[Any] = own(batch, self.length) if callable(own) else cut_sequence(batch, self.length)
        if not chunks:
            message = f"{type(module).__name__} cut a batch into no chunks"
            raise ConfigError([Problem("levers.sequence_chunk", message)])
        lengths = [next(iter(_lengths(chunk)), 1) for chunk in chunks]
        self.count, total = len(chunks), sum(lengths)
        chunk_step: Callable[[Any, Any], tuple[Tensor, Any]] = getattr(module, "chunk_step")  # noqa: B009
        state, before = None, None
        for place, (chunk, length) in enumerate(zip(chunks, lengths, strict=True)):
            last = place == len(chunks) - 1
            if isinstance(module, FSDPModule):  # under ddp nothing is synchronized before the step returns
                module.set_requires_gradient_sync(last)
            detached = tree_map(lambda value: value.detach() if isinstance(value, Tensor) else value, state)
            loss, state = chunk_step(chunk, detached)
            loss = loss * (length / total)
            if not last:
                # As Lightning does it for the loss of a step: scaled alike, outside autocast.
                scaled = trainer.precision_plugin.pre_backward(loss / trainer.accumulate_grad_batches, module)
                with torch.autocast(loss.device.type, enabled=False):
                    module.backward(scaled)
                before = loss.detach() if before is None else before + loss.detach()
        return loss if before is None else loss + before


def check_contract(module: LightningModule) -> None:
    """Refuse a module that cannot be fitted in sequence chunks.

    Raises:
        ConfigError: with what is missing.
    """
    name, problem = type(module).__name__, ""
    if not callable(getattr(module, "chunk_step", None)):
        problem = f"{name} has no chunk_step(chunk, state) -> (loss, state), so that its sequences cannot be cut; "
        problem += "add it, or set 0 for whole sequences"
    else:  # as its class has it: sharding puts a wrapper in front of the method
        parameters = list(inspect.signature(getattr(type(module), "chunk_step")).parameters)[1:]  # noqa: B009
        if len(parameters) != 2:
            problem = f"{name}.chunk_step takes ({', '.join(parameters)}); it has to take (chunk, state)"
        elif not module.automatic_optimization:
            problem = f"{name} optimizes manually, and would have to cut its sequences itself; set 0"
    if problem:
        raise ConfigError([Problem("levers.sequence_chunk", problem)])


def _lengths(batch: Any) -> list[int]:
    """The second dimension of every tensor that has one."""
    return [leaf.shape[1] for leaf in tree_leaves(batch) if isinstance(leaf, Tensor) and leaf.dim() > 1]


def cut_sequence(batch: Any, length: int) -> list[Any]:
    """A batch cut along the second dimension of its tensors.

    Raises:
        ConfigError: when those dimensions differ, or there is none.
    """
    sizes = set(_lengths(batch))
    if len(sizes) != 1:
        found = ", ".join(map(str, sorted(sizes))) or "none"
        message = f"sequences of one length are cut, (batch, position, ...), this batch has lengths {found}; give the "
        raise ConfigError([Problem("levers.sequence_chunk", message + "module sequence_chunks(batch, length)")])
    (size,) = sizes

    def sliced(start: int, leaf: Any) -> Any:
        return leaf[:, start : start + length] if isinstance(leaf, Tensor) and leaf.dim() > 1 else leaf

    return [tree_map(partial(sliced, start), batch) for start in range(0, size, length)]


KERNELS = {
    "math": SDPBackend.MATH,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "flash": SDPBackend.FLASH_ATTENTION,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
}
"""Torch's name of each kernel; one that cannot take a call leaves it to those above, from below upwards."""
AUTO = "auto"

_backends: Any = torch.backends
_OPERATORS = {
    "_scaled_dot_product_flash_attention": "flash",
    "_scaled_dot_product_flash_attention_for_cpu": "flash",
    "_scaled_dot_product_efficient_attention": "efficient",
    "_scaled_dot_product_cudnn_attention": "cudnn",
}


def preferred_kernels(name: str) -> list[SDPBackend]:
    """What torch is to try for kernel `name`, in this order."""
    names = list(KERNELS)
    return [KERNELS[kernel] for kernel in reversed(names[: names.index(name) + 1])]


def available_kernels(device: str) -> dict[str, str]:
    """Each kernel and why it cannot be had on a `cpu` or `cuda` device; an empty reason means that it can."""
    if device == "cpu":
        return {"math": "", "efficient": "needs a GPU", "flash": "", "cudnn": "needs a GPU"}
    flash = torch.backends.cuda.is_flash_attention_available()
    cudnn = bool(_backends.cudnn.is_available())
    return {
        "math": "", "efficient": "", "flash": "" if flash else "this torch was built without it",
        "cudnn": "" if cudnn else "this torch was built without cuDNN",
    }  # fmt: skip


class AttentionKernel(Callback):
    """Prefer one kernel for `scaled_dot_product_attention` while fitting, and count what ran in the first batch.

    Args:
        name: `math`, `efficient`, `flash` or `cudnn`; `auto` leaves the choice to torch, and only counts.
        stands_in: The CPU stands in for a GPU (a dry run): all kernels are taken for available, and nothing is counted.

    Raises:
        ConfigError: for another name.
    """

    def __init__(self, name: str, stands_in: bool = False) -> None:
        if name not in (AUTO, *KERNELS):
            raise ConfigError([Problem("levers.attention", f"{name!r} is none of {', '.join(KERNELS)}")])
        self.name = name
        self.ran: Counter[str] = Counter()
        """Calls of the first batch by the kernel that took them."""
        self._stands_in = stands_in
        self._switches = ExitStack()
        self._counting = ExitStack()
        self._counted = True
        self._silent = False

    @override
    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._silent = self.name == AUTO
        if self.name == AUTO:  # compiled code would be compiled anew to be counted
            parts = pl_module.modules()
            self._counted = any(type(m).__name__ == "OptimizedModule" or m._compiled_call_impl for m in parts)
            return
        self._counted = self._stands_in
        device = trainer.strategy.root_device.type
        reason = "" if self._stands_in else available_kernels(device)[self.name]
        if reason:
            message = f"levers.attention: {self.name} {reason}; torch chooses among "
            message += " and ".join(name for name, why in available_kernels(device).items() if not why)
            warn_caller(message)
            self._silent = True
            return
        self._switches.enter_context(sdpa_kernel(preferred_kernels(self.name), set_priority=True))

    @override
    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        if not self._counted:
            self.ran.clear()
            self._seen = self._counting.enter_context(_Calls(self.ran))

    @override
    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
        if not self._counted:
            self._counting.close()
            self._counted = True
            self._explain(type(pl_module).__name__)

    @override
    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        self._restore()

    @override
    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        self._restore()

    def _restore(self) -> None:
        self._counting.close()
        self._switches.close()
        self._counted = True

    def _explain(self, module_name: str) -> None:
        if self._silent:
            return
        if not self.ran:
            message = f"levers.attention: {self.name} does nothing: {module_name} does not call "
            warn_caller(message + "scaled_dot_product_attention")
        elif set(self.ran) != {self.name}:
            counts = ", ".join(f"{name} {count}" for name, count in sorted(self.ran.items()))
            message = f"levers.attention: {self.name} did not take every call of the first batch ({counts}): "
            message += self._seen.why(self.name) or "its rules (type, head size, mask, dropout) were not met"
            warn_caller(message)


class _Calls(TorchFunctionMode):
    """Counts calls of attention by kernel, and keeps the arguments of one that each kernel took."""

    def __init__(self, ran: Counter[str]) -> None:
        super().__init__()
        self._ran = ran
        self._refused: dict[str, str] = {}

    def __torch_function__(
        self, func: Callable[..., Any], types: Sequence[type], args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        keywords = kwargs or {}
        direct = func is functional.scaled_dot_product_attention
        if not direct and func is not functional.multi_head_attention_forward:
            return func(*args, **keywords)
        with _Fused() as fused:
            result = func(*args, **keywords)
        # A call that returns its weights multiplies them itself, without a kernel.
        uses_kernel = direct or not keywords.get("need_weights", True)
        kernels = fused.kernels or (["math"] if uses_kernel else [])
        self._ran.update(kernels)
        if direct:
            self._refused.update(dict.fromkeys(kernels, _describe(*args, **keywords)))
        return result

    def why(self, preferred: str) -> str:
        """The call that another kernel than the preferred one took."""
        other = [call for kernel, call in self._refused.items() if kernel != preferred]
        return f"it was ruled out for {other[0]}" if other else ""


class _Fused(TorchDispatchMode):
    """Names the fused kernels that run."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.kernels: list[str] = []

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kernel = _OPERATORS.get(func.overloadpacket.__name__)
        if kernel:
            self.kernels.append(kernel)
        return func(*args, **(kwargs or {}))


def _describe(query: torch.Tensor, *others: Any, **keywords: Any) -> str:
    given = dict(zip(("key", "value", "attn_mask", "dropout_p"), others, strict=False)) | keywords
    mask = "no mask" if given.get("attn_mask") is None else "a mask"
    shape, kind = "×".join(map(str, query.shape)), str(query.dtype).removeprefix("torch.")
    return f"a query of {shape} ({kind}), {mask}, dropout {given.get('dropout_p', 0.0):g}"
