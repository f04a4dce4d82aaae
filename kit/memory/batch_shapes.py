"""Batches: a batch as shapes, to be made again at will.

The batch is kept pickled, with a number in place of each tensor, so that any object a loader can send between processes
(a dict, a named tuple, a batch class) is one here too. The pickle is made and read in this process only. Numbers in
small integer vectors are kept, because lengths and counts decide shapes.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import cloudpickle
import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence

from kit.errors import ConfigError, Problem

LARGEST_CONSTANT = 4096
"""Elements of an integer vector whose numbers are kept."""


@dataclass(frozen=True)
class TensorShape:
    """A tensor of a batch: (sizes), dtype, and its numbers where they are few and whole."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    values: Tensor | None = None

    def make(self) -> Tensor:
        """A tensor without numbers, of this shape, on whatever device mode is active."""
        made = torch.empty(self.shape, dtype=self.dtype)
        if self.values is not None and hasattr(made, "constant"):
            made.constant = self.values
        return made


@dataclass(frozen=True)
class Batches:
    """What one loader yields again and again."""

    template: bytes
    """A batch, pickled, with a number for each tensor."""
    tensors: tuple[TensorShape, ...]
    batch_size: int
    length: int | None = None
    """Batches in an epoch, or None when the loader does not say (then Lightning keeps one more in hand)."""
    notes: tuple[str, ...] = ()

    def make(self) -> tuple[Any, list[Tensor]]:
        """A new batch, and the new tensors in it."""
        tensors = [shape.make() for shape in self.tensors]
        return Reader(io.BytesIO(self.template), tensors).load(), tensors

    @property
    def nbytes(self) -> int:
        return sum(torch.Size(item.shape).numel() * item.dtype.itemsize for item in self.tensors)


class Writer(cloudpickle.Pickler):  # type: ignore[misc]
    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file)
        self.tensors: list[Tensor] = []
        self._numbers: dict[int, int] = {}

    def persistent_id(self, value: Any) -> int | None:
        if not isinstance(value, Tensor):
            return None
        number = self._numbers.setdefault(id(value), len(self.tensors))
        if number == len(self.tensors):
            self.tensors.append(value)
        return number


class Reader(pickle.Unpickler):
    """Reads what `Writer` wrote in this process, never a file."""

    def __init__(self, file: io.BytesIO, tensors: Sequence[Tensor]) -> None:
        super().__init__(file)
        self.tensors = tensors

    def persistent_load(self, number: Any) -> Any:
        return self.tensors[number]


def describe(batch: Any, batch_size: int | None = None) -> Batches:
    """The shapes of one batch at hand.

    Args:
        batch: Anything a loader yields.
        batch_size: Samples in it; by default what `samples_in` finds.

    Raises:
        ConfigError: for a batch that cannot be pickled, as loaders with processes need it too.
    """
    file = io.BytesIO()
    writer = Writer(file)
    try:
        writer.dump(batch)
    except Exception as error:
        message = f"a batch of type {type(batch).__name__} cannot be copied: {error}"
        raise ConfigError([Problem("data", message)]) from error
    tensors = tuple(map(_shape, writer.tensors))
    if batch_size is None:
        batch_size = samples_in(batch) or next((item.shape[0] for item in tensors if item.shape), 1)
    return Batches(file.getvalue(), tensors, batch_size)


def samples_in(batch: Any) -> int | None:
    """Samples in a batch: what it says of itself, else the length of the first tensor or array in it; None for none."""
    if isinstance(batch, PackedSequence):
        return int(batch.batch_sizes[0])
    if isinstance(batch, str | bytes | int | float | type(None)):
        return None
    if isinstance(shape := getattr(batch, "shape", None), Sequence):
        return int(shape[0]) if len(shape) else None
    if isinstance(batch, Mapping):
        parts: Any = batch.values()
    elif isinstance(batch, list | tuple):
        parts = batch
    else:
        said = getattr(batch, "batch_size", None)  # a batch of graphs, a dict of tensors
        if isinstance(said, int) and said > 0:
            return said
        if isinstance(said, Sequence) and said:
            return int(said[0])
        parts = getattr(batch, "__dict__", {}).values()
    return next((size for size in map(samples_in, parts) if size is not None), None)


def _shape(tensor: Tensor) -> TensorShape:
    whole = tensor.dtype in (torch.int64, torch.int32, torch.bool)
    keep = whole and tensor.numel() <= LARGEST_CONSTANT and tensor.dim() <= 1
    return TensorShape(tuple(tensor.shape), tensor.dtype, tensor.detach().clone() if keep else None)
