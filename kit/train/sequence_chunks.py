"""SequenceChunks: a long sequence trained a piece at a time, in the memory of one piece.

The contract, of any LightningModule in automatic optimization:

    chunk_step(chunk, state) -> (loss, state)    the mean loss of a sequence chunk, and what the next one starts from
    sequence_chunks(batch, length) -> list       optional: the batch cut into chunks of at most `length` positions

The first `state` is None; every later one is what the module returned, without its history: gradients end at the
borders of chunks, the numbers do not. So the loss of a step is that of the whole sequence wherever `state` carries all
that later positions see of earlier ones, and gradients are those of truncated backpropagation through time. Without
`sequence_chunks` every tensor of the batch is cut along its second dimension, (batch, position, ...); tensors without
one go to every chunk whole.

Each chunk runs forward and backward before the next begins, weighted by its share of the positions; gradients add up,
and are synchronized once, with those of the last chunk. Under fsdp they are held whole until then. Logged values are
those of the last chunk, the loss of the step is that of all.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from typing import Any
from weakref import WeakSet

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.utils._pytree import tree_leaves, tree_map
from typing_extensions import override

from kit.errors import ConfigError, Problem

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
            raise ConfigError([Problem("levers.sequence_chunk", f"{length} positions are no chunk; use 1 or more")])
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
        chunks = list(_cut(module, batch, self.length))
        self.count, total = len(chunks), sum(length for _, length in chunks)
        chunk_step: Callable[[Any, Any], tuple[Tensor, Any]] = getattr(module, "chunk_step")  # noqa: B009
        state, before = None, None
        for place, (chunk, length) in enumerate(chunks):
            last = place == len(chunks) - 1
            _synchronize(module, last)
            loss, state = chunk_step(chunk, tree_map(_without_history, state))
            loss = loss * (length / total)
            if not last:
                _backward(trainer, module, loss)
                before = loss.detach() if before is None else before + loss.detach()
        return loss if before is None else loss + before


def check_contract(module: LightningModule) -> None:
    """Refuse a module that cannot be fitted in sequence chunks.

    Raises:
        ConfigError: with what is missing.
    """
    name, step = type(module).__name__, getattr(module, "chunk_step", None)
    if not callable(step):
        message = f"{name} has no chunk_step(chunk, state) -> (loss, state), so that its sequences cannot be cut; "
        raise ConfigError([Problem("levers.sequence_chunk", message + "add it, or set 0 for whole sequences")])
    signature = _signature(module)
    if len(signature.parameters) != 2:
        message = f"{name}.chunk_step takes {signature}; it has to take (chunk, state)"
        raise ConfigError([Problem("levers.sequence_chunk", message)])
    if not module.automatic_optimization:
        message = f"{name} optimizes manually, and would have to cut its sequences itself; set 0"
        raise ConfigError([Problem("levers.sequence_chunk", message)])


def _signature(module: LightningModule) -> inspect.Signature:
    """What chunk_step takes beside the module, as its class has it: sharding puts a wrapper in front of the method."""
    signature = inspect.signature(getattr(type(module), "chunk_step"))  # noqa: B009
    return signature.replace(parameters=list(signature.parameters.values())[1:])


def cut_sequence(batch: Any, length: int) -> list[Any]:
    """A batch cut along the second dimension of its tensors.

    Raises:
        ConfigError: when those dimensions differ, or there is none.
    """
    sizes = {leaf.shape[1] for leaf in tree_leaves(batch) if isinstance(leaf, Tensor) and leaf.dim() > 1}
    if len(sizes) != 1:
        found = ", ".join(map(str, sorted(sizes))) or "none"
        message = f"sequences of one length are cut, (batch, position, ...), this batch has lengths {found}; give the "
        raise ConfigError([Problem("levers.sequence_chunk", message + "module sequence_chunks(batch, length)")])
    (size,) = sizes

    def piece(start: int) -> Any:
        def sliced(leaf: Any) -> Any:
            return leaf[:, start : start + length] if isinstance(leaf, Tensor) and leaf.dim() > 1 else leaf

        return tree_map(sliced, batch)

    return [piece(start) for start in range(0, size, length)]


def _cut(module: LightningModule, batch: Any, length: int) -> Iterator[tuple[Any, int]]:
    """Chunks, and how many positions each has."""
    own = getattr(module, "sequence_chunks", None)
    chunks: Sequence[Any] = own(batch, length) if callable(own) else cut_sequence(batch, length)
    if not chunks:
        raise ConfigError([Problem("levers.sequence_chunk", f"{type(module).__name__} cut a batch into no chunks")])
    for chunk in chunks:
        lengths = [leaf.shape[1] for leaf in tree_leaves(chunk) if isinstance(leaf, Tensor) and leaf.dim() > 1]
        yield chunk, lengths[0] if lengths else 1


def _without_history(value: Any) -> Any:
    return value.detach() if isinstance(value, Tensor) else value


def _synchronize(module: LightningModule, wanted: bool) -> None:
    """Under ddp no synchronization is awaited before the step returns; under fsdp it has to be switched off."""
    if isinstance(module, FSDPModule):
        module.set_requires_gradient_sync(wanted)


def _backward(trainer: Trainer, module: LightningModule, loss: Tensor) -> None:
    """As Lightning does it for the loss of a step, scaled alike, outside autocast."""
    precision = trainer.precision_plugin
    loss = loss / trainer.accumulate_grad_batches
    scaled = precision.pre_backward(loss, module)
    with torch.autocast(loss.device.type, enabled=False):
        module.backward(scaled)
