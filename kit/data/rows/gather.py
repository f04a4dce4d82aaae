"""Gather: rows of a table copied out as one block, whatever their order, without a loop over them.

A table is the bytes of an array, `(row, byte)`, in memory or mapped from a file: one shape for every type of number,
also those that numpy does not know. Neighbours in order are copied as one slice, all else by one indexed copy, during
which other threads run.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Table = NDArray[np.uint8]


def table_of(array: NDArray[Any]) -> Table:
    """The bytes of an array whose rows lie one after another."""
    return array.reshape(len(array), -1).view(np.uint8)


def gather(table: Table, rows: NDArray[np.int64]) -> Table:
    """The bytes of `rows`, in their order, in memory of their own."""
    count = len(rows)
    if count and rows[-1] - rows[0] == count - 1 and (count == 1 or bool((np.diff(rows) == 1).all())):
        return table[rows[0] : rows[0] + count].copy()
    block = np.empty((count, table.shape[1]), np.uint8)
    np.take(table, rows, axis=0, out=block, mode="clip")  # mode raise would copy once more
    return block


def runs_of(numbers: NDArray[np.int64]) -> NDArray[np.int64]:
    """Sorted distinct numbers as runs `(run, [first, last + 1])`."""
    if not len(numbers):
        return np.empty((0, 2), np.int64)
    breaks = np.flatnonzero(np.diff(numbers) != 1)
    first = numbers[np.concatenate([[0], breaks + 1])]
    last = numbers[np.concatenate([breaks, [len(numbers) - 1]])]
    return np.stack([first, last + 1], axis=1)


def tensor_of(block: Table, dtype: torch.dtype, columns: tuple[int, ...]) -> Tensor:
    """The numbers in a block of bytes, `(row, *columns)`."""
    if not len(block):
        return torch.empty((0, *columns), dtype=dtype)
    return torch.from_numpy(block).view(dtype).reshape(len(block), *columns)
