"""What oneDNN's LSTM holds on the CPU: for its backward pass, where torch's fake kernel says nothing, and meanwhile.

oneDNN 3 (`rnn_utils::set_workspace_sizes`) keeps gates and hidden states per step, and states, cells and room for their
gradients per step and once more, each as a buffer of its own in whole pages. Rows are rounded up to 64 bytes, and by 64
more where they would be a multiple of 256 values. Compared with torch 2.13 in `tests/memory/test_cpu_lstm.py`: what is
kept is equal to the byte in float32 and bfloat16; what is held meanwhile, of which a part is only known as measured,
within a twentieth or 40 KiB, on CPUs without tiles (AMX).

Private: the fake kernel is exchanged in `fake_impls.op_implementations_dict`, by `kit.memory.fakes`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

_PAGE_BYTES = 4096
_ROW_BYTES = 64
_CROWDED = 256
_FLOAT_BYTES = 4
_HALF_LANES = 32
_SCRATCH_BYTES = 12856  # measured, whatever the shape


def workspace_bytes(steps: int, batch: int, features: int, width: int, element_size: int = _FLOAT_BYTES) -> int:
    """Of one layer and direction over `steps` inputs of (batch, features), with `width` numbers of state.

    Formula, in bytes, with rows of r(n) values, T steps and B samples, for element size e and states of
    n = max(features, width): e B T (r(4 width) + r(width)) + 2 B (T + 1) (e r(n) + 8 r(n) + (e + 4) width),
    each product rounded up to pages.
    """
    widest = max(features, width)
    each_step = (_row_bytes(4 * width, element_size), _row_bytes(width, element_size))
    one_more = (_row_bytes(widest, element_size), _row_bytes(widest, _FLOAT_BYTES), _row_bytes(widest, _FLOAT_BYTES))
    cells = (element_size * width, _FLOAT_BYTES * width)
    buffers = [batch * steps * size for size in each_step]
    buffers += [2 * batch * (steps + 1) * size for size in (*one_more, *cells)]
    return sum(-(-size // _PAGE_BYTES) * _PAGE_BYTES for size in buffers)


def _row_bytes(values: int, size: int) -> int:
    """Of a row of so many values of `size` bytes, as oneDNN spaces them."""
    unit = _ROW_BYTES // size
    values = -(-values // unit) * unit
    return size * (values + unit if values % _CROWDED == 0 else values)


def lstm_layer(_mode: Any, _func: Any, values: Tensor, *args: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The fake kernel of `aten::mkldnn_rnn_layer`: output, last state, last cell and the workspace with its bytes."""
    state, cell, width, train = args[4], args[5], args[9], args[14]
    steps, batch = _sizes(values)
    kept = workspace_bytes(steps, batch, values.shape[-1], width, values.element_size()) if train else 0
    output = values.new_empty((*values.shape[:2], width))
    return output, torch.empty_like(state), torch.empty_like(cell), values.new_empty((kept,), dtype=torch.uint8)


def forward_scratch_bytes(args: Sequence[Any], _: Any) -> int:
    """Of `aten::mkldnn_rnn_layer` while it runs: weights in its own layout, and in float32 the gates of all steps."""
    values, width = args[0], int(args[10])
    steps, batch = _sizes(values)
    inputs, size = int(values.shape[-1]) + width, int(values.element_size())
    if size < _FLOAT_BYTES:
        return 4 * width * size * (inputs + 1) + 6 * _FLOAT_BYTES * batch * width
    gates = _row_bytes(4 * width, _FLOAT_BYTES)
    return 4 * width * size + gates * (inputs + batch * steps) + 2 * size * batch * width + _SCRATCH_BYTES


def backward_scratch_bytes(args: Sequence[Any], _: Any) -> int:
    """Of its backward pass: the same, gradients of the weights in its own layout, and in half precision all that comes
    in as float32. A gradient that comes in turned round, as it does from a layer with `batch_first`, is copied."""
    values, came, width = args[0], args[10], int(args[15])
    steps, batch = _sizes(values)
    features, size = int(values.shape[-1]), int(values.element_size())
    gates = _row_bytes(4 * width, _FLOAT_BYTES)
    copied = 0 if came is None or came.is_contiguous() else int(came.nbytes)
    gradients = gates * (features + width) + 4 * width * size + copied
    rows = [(number, _row_bytes(number, size)) for number in (features, width)]
    if size < _FLOAT_BYTES:
        weights = 4 * width * sum(size * -(-number // _HALF_LANES) * _HALF_LANES for number, _ in rows)
        widened = _FLOAT_BYTES * batch * width * (steps + 2)
        return gradients + weights + widened + 4 * _FLOAT_BYTES * batch * width
    weights = 4 * width * sum(row for number, row in rows if row != number * size)
    return gradients + weights + gates * batch * steps + 2 * size * batch * width + _SCRATCH_BYTES


def _sizes(values: Tensor) -> tuple[int, int]:
    """(steps, batch): torch has turned the values round before, whatever `batch_first` it hands on."""
    return int(values.shape[0]), int(values.shape[1])
