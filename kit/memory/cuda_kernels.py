"""Operators that CUDA computes with one fused kernel where the CPU takes several steps, as they allocate.

- `dropout` keeps a mask of one byte an element (the CPU keeps one of the input's type).
- `softmax` and `log_softmax` of float16 into float32 read it directly (other types are converted first, as on the CPU).
- `rms_norm` keeps one number a row.
- `LSTM`, `GRU` and `RNN` run in cuDNN, which keeps a reserve for the backward pass. Its size is cuDNN's own affair and
  cannot be asked without a GPU: the rule here counts what the backward pass needs (see `_KEPT`), and every use of it is
  noted as an estimate.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

aten = torch.ops.aten

_GATES = {"lstm": 4, "gru": 3, "rnn_tanh": 1, "rnn_relu": 1}
_KEPT = {"lstm": 6, "gru": 5, "rnn_tanh": 1, "rnn_relu": 1}
"""Values kept for each hidden unit, step, layer and direction: an LSTM's four gates, cell and its activation; a GRU's
three gates, the candidate's recurrent part and the previous output."""


def kernels(note: Callable[[str], None]) -> dict[str, Callable[..., Any]]:
    """What to register for which operator; `note` takes sentences about estimates."""
    return {
        "dropout": _dropout,
        "softmax.int": _softmax,
        "log_softmax.int": _log_softmax,
        "rms_norm": _rms_norm,
        **{f"{kind}.{form}": _recurrent(kind, form, note) for kind in _GATES for form in ("input", "data")},
    }


def _dropout(values: Tensor, p: float, train: bool) -> Tensor:
    if p == 0 or not train or values.numel() == 0:
        return values
    if p == 1:
        return values.mul(torch.zeros((), dtype=values.dtype))
    dropped: Tensor = aten.native_dropout(values, p, train)[0]
    return dropped


def _softmax(values: Tensor, dim: int, dtype: torch.dtype | None = None) -> Tensor:
    return _normalize(aten._softmax.default, values, dim, dtype)


def _log_softmax(values: Tensor, dim: int, dtype: torch.dtype | None = None) -> Tensor:
    return _normalize(aten._log_softmax.default, values, dim, dtype)


def _normalize(operator: Any, values: Tensor, dim: int, dtype: torch.dtype | None) -> Tensor:
    widens = values.dtype == torch.float16 and dtype == torch.float32
    converted = values if widens or dtype is None else values.to(dtype)
    result: Tensor = operator(converted, dim, widens)
    return result


def _rms_norm(values: Tensor, shape: Sequence[int], weight: Tensor | None = None, eps: float | None = None) -> Tensor:
    layouts = (torch.channels_last, torch.channels_last_3d)
    strided = any(values.dim() == 4 + axis and values.is_contiguous(memory_format=layout) and not values.is_contiguous()
                  for axis, layout in enumerate(layouts))  # fmt: skip
    if strided or values.is_complex() or (weight is not None and weight.dtype != values.dtype):
        composed: Tensor = aten._fused_rms_norm(values, list(shape), weight, eps)[0]
        return composed
    normalized: Tensor = _apply(_FusedRmsNorm, values, list(shape), weight)
    return normalized


def _apply(function: Any, *args: Any) -> Any:
    return function.apply(*args)


class _FusedRmsNorm(Function):
    """Allocates as CUDA's `_fused_rms_norm`: the output, and one reciprocal root a row."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, shape: list[int], weight: Tensor | None) -> Tensor:
        rows = (*values.shape[: values.dim() - len(shape)], *(1 for _ in shape))
        wide = torch.float64 if values.dtype == torch.float64 else torch.float32
        roots = values.new_empty(rows, dtype=wide)
        ctx.save_for_backward(values, roots, weight)
        return torch.empty_like(values, memory_format=torch.contiguous_format)

    @staticmethod
    def backward(ctx: Any, _: Tensor) -> tuple[Tensor | None, ...]:
        values, _roots, weight = ctx.saved_tensors
        asked = ctx.needs_input_grad
        return (
            torch.empty_like(values) if asked[0] else None,
            None,
            torch.empty_like(weight) if asked[2] else None,
        )


@dataclass(frozen=True)
class _Shape:
    """One recurrent call: `steps` counts positions over all samples."""

    kind: str
    layers: int
    directions: int
    steps: int
    hidden: int
    output: tuple[int, ...]
    state: tuple[int, ...]
    train: bool

    def reserve_bytes(self, itemsize: int) -> int:
        return _KEPT[self.kind] * self.steps * self.hidden * self.layers * self.directions * itemsize


def _recurrent(kind: str, form: str, note: Callable[[str], None]) -> Callable[..., Any]:
    told: set[str] = set()

    def from_padded(
        values: Tensor, states: Any, weights: Sequence[Tensor], _: bool, layers: int, __: float, train: bool,
        both: bool, ___: bool,
    ) -> tuple[Tensor, ...]:  # fmt: skip
        return run(values, states, weights, layers, train, both)

    def from_packed(
        values: Tensor, _: Tensor, states: Any, weights: Sequence[Tensor], __: bool, layers: int, ___: float,
        train: bool, both: bool,
    ) -> tuple[Tensor, ...]:  # fmt: skip
        return run(values, states, weights, layers, train, both)

    def run(
        values: Tensor, states: Any, weights: Sequence[Tensor], layers: int, train: bool, both: bool
    ) -> tuple[Tensor, ...]:
        start, cell = states if kind == "lstm" else (states, states.new_empty(0))
        values, start, cell, weights = _as_cudnn_takes_them(values, start, cell, weights)
        directions = 1 + both
        hidden = weights[0].shape[0] // _GATES[kind]
        out = (*values.shape[:-1], start.shape[-1] * directions)
        shape = _Shape(
            kind, layers, directions, values.shape[:-1].numel(), hidden, out, (*start.shape[:-1], hidden), train
        )
        if kind not in told:
            told.add(kind)
            note(_estimate_note(kind))
        output, last, last_cell = _apply(_FusedRecurrent, shape, values, start, cell, *weights)
        return (output, last, last_cell) if kind == "lstm" else (output, last)

    return from_padded if form == "input" else from_packed


def _estimate_note(kind: str) -> str:
    name = kind.upper() if kind in ("lstm", "gru") else "RNN"
    return (
        f"what cuDNN keeps for the backward pass of the {name} is an estimate of {_KEPT[kind]} values for each hidden "
        "unit, step, layer and direction; its own figure may differ"
    )


def _as_cudnn_takes_them(
    values: Tensor, start: Tensor, cell: Tensor, weights: Sequence[Tensor]
) -> tuple[Tensor, Tensor, Tensor, Sequence[Tensor]]:
    """Under autocast everything is cast to half precision, the weights into one new buffer (`AutocastRNN.cpp`)."""
    if not torch.is_autocast_enabled("cpu"):
        return values, start, cell, weights
    dtype = torch.get_autocast_dtype("cpu")
    return values.to(dtype), start.to(dtype), cell.to(dtype), [weight.to(dtype) for weight in weights]


class _FusedRecurrent(Function):
    """Allocates as `_cudnn_rnn` and its backward: outputs, the reserve, and one buffer for all weight gradients."""

    @staticmethod
    def forward(
        ctx: Any, shape: _Shape, values: Tensor, start: Tensor, cell: Tensor, *weights: Tensor
    ) -> tuple[Tensor, ...]:
        output, last = values.new_empty(shape.output), torch.empty_like(start)
        last_cell = values.new_empty(shape.state) if shape.kind == "lstm" else values.new_empty(0)
        size = shape.reserve_bytes(values.element_size()) if shape.train else 0
        reserve = torch.empty(size, dtype=torch.uint8, device=values.device)
        ctx.save_for_backward(values, start, cell, output, reserve, *weights)
        return output, last, last_cell

    @staticmethod
    def backward(ctx: Any, *_: Tensor) -> tuple[Tensor | None, ...]:
        values, start, cell, _output, _reserve, *weights = ctx.saved_tensors
        inputs, asked = (values, start, cell), ctx.needs_input_grad[1:4]
        made = [torch.empty_like(one) if wanted else None for one, wanted in zip(inputs, asked, strict=True)]
        sizes = [weight.numel() for weight in weights]
        parts = values.new_zeros(sum(sizes)).split(sizes)
        return (None, *made, *(part.view(weight.shape) for part, weight in zip(parts, weights, strict=True)))
