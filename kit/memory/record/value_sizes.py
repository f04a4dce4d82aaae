"""Kernels of fake tensors for operators whose results have a size that depends on values.

Where these values are known (lengths in a batch, numbers made from constants) the size is the real one. Elsewhere it is
the largest or the one that most data have, and what was assumed is told: a packed sequence is as long as the padded
one, each element is repeated once, rows are all different.

`shape_kernels` are for operators that a fake tensor is asked for. `composite_kernels` are for those that torch composes
of others and for which it reads lengths from memory: packed sequences, which recurrent layers take as the CPU does (on
a GPU as `kit.memory.record.cuda` says), and the CTC loss.

`WRITTEN` observes how many numbers of a tensor can be other than 0: those that were written to zeros, as in a mask of
random places. `nonzeros` says it, as long as nothing else has written there.

`BOUNDED` observes tensors of which it is known between which numbers all of theirs lie: those that are drawn uniformly
are in [0, 1), those of a mask that hides nothing are all 1. By these bounds some comparisons are known.

`adaptive_softmax` is for a layer that sorts its rows into clusters by their targets and counts them afterwards.

`lazy_parameters` are those that get their shape with the first batch, of torch.nn.LazyLinear and the like. One without
a shape is a real tensor without elements: torch cannot make it of a fake one. When it gets its shape a fake one takes
its place wherever it is kept: in its module and, where it had none before the optimizer was made, in that.

Private parts of torch used here, all tested on its upgrade: `_meta_registrations._create_grouped_mm_output_tensor`,
`Library._destroy`, `_DisableTorchDispatch` and `UninitializedTensorMixin`.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import itertools
import math
import operator
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, _meta_registrations, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.autograd import Function
from torch.nn.parameter import UninitializedBuffer, UninitializedParameter

from kit.confinement.stand_ins import replaced
from kit.memory.record.fake_mode import kernel_ran

aten = torch.ops.aten

Assume = Callable[[str], None]
"""Takes what was assumed of values that are not known, such as "that each element is repeated once"."""

_private: Any = _meta_registrations
_torch: Any = torch


def known_values(values: Tensor | Sequence[int]) -> list[int] | None:
    """The numbers of a vector; None when it is fake and nobody knows them."""
    if not isinstance(values, Tensor):
        return list(values)
    if isinstance(values, FakeTensor) and values.constant is None:
        return None
    numbers: list[int] = values.tolist()
    return numbers


def shape_kernels(assume: Assume) -> dict[Any, Callable[..., Any]]:
    """Kernels by operator, each called with the fake mode, the operator and its arguments."""

    def repeat_interleave(_mode: Any, _func: Any, repeats: Tensor, output_size: int | None = None) -> Tensor:
        if output_size is None:
            assume("that each element is repeated once")
        return repeats.new_empty((repeats.numel() if output_size is None else output_size,))

    def unique_rows(_mode: Any, _func: Any, values: Tensor, dim: int, *_: Any, **__: Any) -> tuple[Tensor, ...]:
        assume("that all rows are different")
        places = values.new_empty((values.shape[dim],), dtype=torch.int64)
        return torch.empty_like(values), places, torch.empty_like(places)

    def unique_runs(
        _mode: Any, _func: Any, values: Tensor, _inverse: bool = False, _counts: bool = False, dim: int | None = None
    ) -> tuple[Tensor, ...]:
        assume("that no element equals the next")
        count = values.numel() if dim is None else values.shape[dim]
        kept = values.new_empty((count,)) if dim is None else torch.empty_like(values)
        places = values.new_empty(values.shape if dim is None else (count,), dtype=torch.int64)
        return kept, places, places.new_empty((count,))

    def ctc_loss(
        _mode: Any, _func: Any, chances: Tensor, targets: Tensor, _lengths: Any, target_lengths: Any, *_: Any
    ) -> tuple[Tensor, Tensor]:
        steps, batch = int(chances.shape[0]), int(chances.shape[1])
        lengths = known_values(target_lengths)
        if lengths is None:
            assume("that targets are as long as they are padded to")
            lengths = [targets.shape[1] if targets.dim() > 1 else -(-targets.numel() // batch)]
        return chances.new_empty((batch,)), chances.new_empty((batch, steps, 2 * max(lengths, default=0) + 1))

    def ctc_loss_backward(_mode: Any, _func: Any, _gradient: Tensor, chances: Tensor, *_: Any) -> Tensor:
        return torch.empty_like(chances, memory_format=torch.contiguous_format)

    def grouped_product(
        mode: Any, _func: Any, first: Tensor, second: Tensor, ends: Tensor | None = None, _bias: Any = None,
        dtype: torch.dtype | None = None,
    ) -> Tensor:  # fmt: skip
        # Torch's own says that it is for bfloat16 only; the CPU takes more.
        with mode:
            return cast("Tensor", _private._create_grouped_mm_output_tensor(first, second, ends, dtype or first.dtype))

    def least_squares(
        _mode: Any, _func: Any, values: Tensor, target: Tensor, *_: Any, **__: Any
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        *batch, rows, columns = values.shape
        wide = target.shape[-1:] if target.dim() == values.dim() else ()
        solution = target.new_empty((*batch, max(rows, columns), *wide)).narrow(len(batch), 0, columns)
        return solution, target.new_empty((0,)), target.new_empty(batch, dtype=torch.int64), target.new_empty((0,))

    return {
        aten.linalg_lstsq.default: least_squares,
        aten.repeat_interleave.Tensor: repeat_interleave,
        aten.unique_dim.default: unique_rows,
        aten.unique_consecutive.default: unique_runs,
        aten._grouped_mm.default: grouped_product,
        **dict.fromkeys((aten._ctc_loss.default, aten._ctc_loss.Tensor), ctc_loss),
        **dict.fromkeys((aten._ctc_loss_backward.default, aten._ctc_loss_backward.Tensor), ctc_loss_backward),
    }


# -- how many numbers are not 0


def nonzeros(tensor: Any) -> tuple[int, bool] | None:
    """How many numbers of a fake tensor are other than 0, and whether just so many or at most; None if not known."""
    if (number := same_number(tensor)) is not None:
        return tensor.numel() * bool(number), True
    if "kit_nonzeros" not in (known := vars(tensor)):
        return None
    count, is_exact, version = known["kit_nonzeros"]
    return (min(count, tensor.numel()), is_exact) if version == _version(tensor) else None


def _version(tensor: Tensor) -> int:
    """How often a tensor, or another with its storage, was written to."""
    return -2 if tensor.is_inference() else tensor._version


def _note_nonzeros(out: Any, count: int, is_exact: bool, version: int | None = None) -> None:
    if isinstance(out, FakeTensor):
        out.kit_nonzeros = count, is_exact, _version(out) if version is None else version  # type: ignore[attr-defined]


def _zeros(_args: tuple[Any, ...], out: Any) -> None:
    _note_nonzeros(out, 0, True)


def _ones(_args: tuple[Any, ...], out: Any) -> None:
    _note_nonzeros(out, out.numel(), True)


def _permuted(_args: tuple[Any, ...], out: Any) -> None:
    out.kit_different = True


def _scattered(args: tuple[Any, ...], out: Any) -> None:
    """Each place that is written to adds one at most; just one to zeros where all places are different."""
    target, _, places, source = args[:4]
    if (known := nonzeros(target)) is None:
        return
    values = nonzeros(source) if isinstance(source, Tensor) else (places.numel() * (source != 0), True)
    count, all_known = values or (places.numel(), False)
    are_apart = "kit_different" in vars(places) and count in (0, places.numel())
    is_written = out is target  # which torch counts when this has ended
    _note_nonzeros(out, known[0] + count, known == (0, True) and all_known and are_apart, _version(out) + is_written)


def _carried(args: tuple[Any, ...], out: Any) -> None:
    """The result has the numbers of the argument."""
    source = args[0]
    _taken(args, out)
    if (known := nonzeros(source)) is not None:
        shares = out.untyped_storage()._cdata == source.untyped_storage()._cdata
        may_round = source.is_floating_point() and out.dtype not in (source.dtype, torch.bool)
        _note_nonzeros(out, known[0], known[1] and not (may_round and known[0]), _version(source if shares else out))


def _taken(args: tuple[Any, ...], out: Any) -> None:
    """The result has some numbers of the argument."""
    if "kit_different" in vars(args[0]):
        out.kit_different = True


def _compared(args: tuple[Any, ...], out: Any) -> None:
    """With a number other than 0, which is true at most where the argument is not 0."""
    if args[1] and (known := nonzeros(args[0])) is not None:
        _note_nonzeros(out, known[0], known[1] and args[0].dtype is torch.bool)


def _compared_with_zero(args: tuple[Any, ...], out: Any) -> None:
    if args[1] == 0 and (known := nonzeros(args[0])) is not None:
        _note_nonzeros(out, *known)


WRITTEN: dict[Any, Callable[[tuple[Any, ...], Any], None]] = {
    **dict.fromkeys((aten.zeros.default, aten.zeros_like.default, aten.new_zeros.default), _zeros),
    **dict.fromkeys((aten.ones.default, aten.ones_like.default, aten.new_ones.default), _ones),
    **dict.fromkeys((aten.randperm.default, aten.randperm.generator), _permuted),
    **dict.fromkeys(
        (aten.scatter_.src, aten.scatter.src, aten.scatter_.value, aten.scatter.value), _scattered
    ),
    **dict.fromkeys(
        (aten.view.default, aten._unsafe_view.default, aten.unsqueeze.default, aten.t.default, aten.transpose.int,
         aten.permute.default, aten.clone.default, aten.detach.default, aten._to_copy.default),
        _carried,
    ),
    aten.slice.Tensor: _taken,
    aten.eq.Scalar: _compared,
    aten.ne.Scalar: _compared_with_zero,
}  # fmt: skip
"""What a recorder calls after operators that make numbers of which is known whether they are 0, write or carry them."""


# -- between which numbers all lie


def bounds(tensor: Any) -> tuple[float, float] | None:
    """The least and the greatest that a number of a fake tensor can be; None if not known."""
    if "kit_bounds" not in (known := getattr(tensor, "__dict__", {})):
        return None
    least, greatest, version = known["kit_bounds"]
    return (least, greatest) if version == _version(tensor) else None


def same_number(tensor: Any) -> float | None:
    """What all numbers of a fake tensor are; None if they differ or nobody knows."""
    least, greatest = bounds(tensor) or (0, 1)
    return least if least == greatest else None


def note_bounds(out: Any, least: float, greatest: float, version: int | None = None) -> None:
    """Write on a fake tensor between which numbers all of its own lie, until it is written to."""
    if isinstance(out, FakeTensor):
        out.kit_bounds = least, greatest, _version(out) if version is None else version  # type: ignore[attr-defined]


def _drawn(_args: tuple[Any, ...], out: Any) -> None:
    note_bounds(out, 0.0, _GREATEST)


def _within_bounds(args: tuple[Any, ...], out: Any) -> None:
    """The result has some numbers of the argument, or all."""
    source = args[0]
    if (known := bounds(source)) is None or not isinstance(out, FakeTensor):
        return
    if out.dtype is source.dtype or known[0] == known[1]:  # others may be rounded to beyond a bound
        shares = out.untyped_storage()._cdata == source.untyped_storage()._cdata
        note_bounds(out, *known, _version(source if shares else out))


def _same_for_all(compare: Callable[[float, float], bool]) -> Callable[[tuple[Any, ...], Any], None]:
    """Write the truth of a comparison with a number where it is the same for the least and the greatest."""

    def observe(args: tuple[Any, ...], out: Any) -> None:
        values, number = args
        if (known := bounds(values)) is not None:
            least, greatest = (bool(compare(bound, number)) for bound in known)
            if least == greatest:
                note_bounds(out, least, greatest)

    return observe


_GREATEST = math.nextafter(1.0, 0.0)
BOUNDED: dict[Any, Callable[[tuple[Any, ...], Any], None]] = {
    **dict.fromkeys((aten.rand.default, aten.rand.generator, aten.rand_like.default), _drawn),
    **dict.fromkeys(
        (aten.view.default, aten._unsafe_view.default, aten.unsqueeze.default, aten.squeeze.dim, aten.t.default,
         aten.transpose.int, aten.permute.default, aten.expand.default, aten.slice.Tensor, aten.select.int,
         aten.index.Tensor, aten.clone.default, aten.detach.default, aten._to_copy.default),
        _within_bounds,
    ),
    **dict.fromkeys(
        (aten.all.default, aten.all.dim, aten.any.default, aten.any.dim),
        lambda args, out: _within_bounds(args, out) if out.numel() else None,
    ),
    aten.eq.Scalar: _same_for_all(operator.eq),
    aten.ne.Scalar: _same_for_all(operator.ne),
    aten.lt.Scalar: _same_for_all(operator.lt),
    aten.le.Scalar: _same_for_all(operator.le),
    aten.gt.Scalar: _same_for_all(operator.gt),
    aten.ge.Scalar: _same_for_all(operator.ge),
}  # fmt: skip
"""What a recorder calls after operators that draw numbers from [0, 1), carry or compare those whose bounds are known:
`torch.rand([]) < 0.0`, by which a layer that is never dropped asks whether it is, is False."""


@contextlib.contextmanager
def composite_kernels(assume: Assume, of_one_length: Callable[[], bool] = lambda: True) -> Iterator[None]:
    """Inside, sequences are packed and padded, recurrent layers run on packed ones, and the CTC loss takes lists of
    lengths, without reading memory."""

    def pack(values: Tensor, lengths: Tensor, batch_first: bool) -> tuple[Tensor, Tensor]:
        found = known_values(lengths)
        if found is None:
            assume("that sequences are as long as they are padded to")
            found = [values.shape[batch_first]] * values.shape[not batch_first]
        function: Any = _Packed
        counts = [sum(length > step for length in found) for step in range(max(found))]
        return function.apply(values, counts, batch_first), torch.tensor(counts)

    def product(values: Tensor, dim: int | None = None, keepdim: bool = False, *, dtype: Any = None) -> Tensor:
        if not (values.requires_grad and torch.is_grad_enabled()):
            return _product_of(values, dim, keepdim, dtype)
        assume("that no factor of a product is 0")
        values = values if dtype is None else values.to(dtype)
        if _torch._C._functorch.peek_interpreter_stack() is not None:  # which takes no functions of ours
            return values.log().sum(() if dim is None else dim, keepdim).exp()
        return cast("Tensor", cast("Any", _Product).apply(values, dim, keepdim))

    def products(values: Tensor, dim: int, *, dtype: Any = None) -> Tensor:
        if not (values.requires_grad and torch.is_grad_enabled()):
            return _products_of(values, dim, dtype)
        assume("that no factor of a product is 0")
        values = values if dtype is None else values.to(dtype)
        if _torch._C._functorch.peek_interpreter_stack() is not None:
            return values.log().cumsum(dim).exp()
        return cast("Tensor", cast("Any", _Products).apply(values, dim))

    library: Any = torch.library.Library("aten", "IMPL")  # type: ignore[no-untyped-call]
    kernels: dict[str, Callable[..., Any]] = {"_pack_padded_sequence": pack, "_pad_packed_sequence": _padded}
    kernels["ctc_loss.IntList"] = _ctc_of_lists
    kernels |= {f"{kind}.data": _recurrent(kind, of_one_length) for kind in _KINDS}
    try:
        with warnings.catch_warnings():
            # Torch warns of each kernel that is replaced, which is what this is for.
            warnings.filterwarnings("ignore", message=r"(?s).*[Oo]verriding a previously registered kernel")
            for name, kernel in kernels.items():
                for key in ("AutogradCPU", "CPU"):
                    library.impl(name, kernel, key)
            for name, kernel in {"prod": product, "prod.dim_int": product, "cumprod": products}.items():
                library.impl(name, kernel, "AutogradCPU")
            # Torch makes views of its zeros without storage, of which derivatives of derivatives have many, before it
            # asks whether they are fake.
            for name in ("view", "_reshape_alias", "as_strided"):
                library.impl(name, torch.library.fallthrough_kernel, "ZeroTensor")
        yield
    finally:
        library._destroy()


def _ctc_of_lists(
    chances: Tensor, targets: Tensor, lengths: Sequence[int], target_lengths: Sequence[int], *options: Any
) -> Tensor:
    return torch.ctc_loss(chances, targets, torch.tensor(lengths), torch.tensor(target_lengths), *options)


class _Packed(Function):
    """Allocates as `aten::_pack_padded_sequence` and its backward: each part on its own, then all in one."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, counts: list[int], batch_first: bool) -> Tensor:
        ctx.shape = values.shape
        steps = values.transpose(0, 1) if batch_first else values
        parts = [
            steps[first:last, :count].contiguous().view(-1, *steps.shape[2:]) for first, last, count in _runs(counts)
        ]
        return torch.cat(parts)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        return gradients[0].new_zeros(ctx.shape), None, None


def _product_of(values: Tensor, dim: int | None, keepdim: bool, dtype: Any = None) -> Tensor:
    """By torch's own kernel."""
    with _torch._C._AutoDispatchBelowAutograd():
        out = (
            aten.prod.default(values, dtype=dtype)
            if dim is None
            else aten.prod.dim_int(values, dim, keepdim, dtype=dtype)
        )
    return cast("Tensor", out)


def _products_of(values: Tensor, dim: int, dtype: Any = None) -> Tensor:
    with _torch._C._AutoDispatchBelowAutograd():
        return cast("Tensor", aten.cumprod.default(values, dim, dtype=dtype))


class _Product(Function):
    """Allocates as `aten::prod` and its backward where no factor is 0: under a mode, autograd takes a way that is safe
    for any, and holds twice as much. (`prod_backward` in `FunctionsManual.cpp`.)"""

    @staticmethod
    def forward(ctx: Any, values: Tensor, dim: int | None, keepdim: bool) -> Tensor:
        out = _product_of(values, dim, keepdim)
        ctx.save_for_backward(values, out)
        ctx.dim, ctx.is_cut = dim, dim is not None and not keepdim and values.dim() > 0
        return out

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        values, out = ctx.saved_tensors
        gradient, zeros = gradients[0], values == 0
        if ctx.dim is None:
            del zeros  # counted, and gone
        else:
            zeros.sum(ctx.dim, True)
        if ctx.is_cut:
            gradient, out = gradient.unsqueeze(ctx.dim), out.unsqueeze(ctx.dim)
        return gradient * (out / values), None, None


class _Products(Function):
    """The same of `aten::cumprod`."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, dim: int) -> Tensor:
        out = _products_of(values, dim)
        ctx.save_for_backward(values, out)
        ctx.dim = dim
        return out

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        values, out = ctx.saved_tensors
        weighed = out * gradients[0]
        zeros = values == 0
        turned = weighed.flip(ctx.dim)
        summed = turned.cumsum(ctx.dim)
        back = summed.flip(ctx.dim)
        del turned, summed
        found = back.div(values)
        del back, zeros, weighed
        return found, None


def _runs(counts: Sequence[int]) -> Iterator[tuple[int, int, int]]:
    """First and last step (exclusive) with the same number of sequences, and that number."""
    first = 0
    for count, steps in itertools.groupby(counts):
        last = first + len(list(steps))
        yield first, last, count
        first = last


def _padded(
    data: Tensor, batch_sizes: Tensor, batch_first: bool, value: float, total: int = -1
) -> tuple[Tensor, Tensor]:
    counts = known_values(batch_sizes)
    if counts is None:
        raise RuntimeError("a packed sequence that was not packed by torch.nn.utils.rnn has unknown batch sizes")
    padded = data.new_full((max(total, len(counts)), counts[0], *data.shape[1:]), value)
    row = 0
    for first, last, count in _runs(counts):
        rows = (last - first) * count
        padded[first:last, :count].copy_(data[row : row + rows].view(last - first, count, *data.shape[1:]))
        row += rows
    lengths = torch.tensor([sum(count > place for count in counts) for place in range(counts[0])])
    return padded.transpose(0, 1) if batch_first else padded, lengths


class _Kind(NamedTuple):
    """Of recurrent layers on packed sequences."""

    gates: int
    kept: int
    """Numbers kept for each packed row and hidden unit beside the output."""
    forward: dict[str, int]
    """Operators on the states of each step, which torch runs one after another, as its dispatcher counts them."""
    backward: dict[str, int]


_KINDS = {
    "lstm": _Kind(
        4, 7, {"add_": 1, "sigmoid_": 3, "tanh_": 1, "tanh": 1, "mul": 3},
        {"mul": 6, "add": 3, "sigmoid_backward": 3, "tanh_backward": 2},
    ),
    "gru": _Kind(
        3, 7, {"add_": 2, "sigmoid_": 2, "tanh_": 1, "mul_": 2, "add": 1, "sub": 1, "clone": 2},
        {"mul": 4, "add": 4, "sigmoid_backward": 2, "tanh_backward": 1, "neg": 1},
    ),
    "rnn_tanh": _Kind(1, 1, {"tanh": 1}, {"add": 2, "tanh_backward": 1}),
    "rnn_relu": _Kind(1, 1, {"relu": 1}, {"add": 2, "threshold_backward": 1}),
}  # fmt: skip


def _recurrent(kind: str, of_one_length: Callable[[], bool]) -> Callable[..., Any]:
    def run(
        data: Tensor, batch_sizes: Tensor, states: Any, weights: Sequence[Tensor], biases: bool, layers: int,
        dropout: float, train: bool, both: bool,
    ) -> Any:  # fmt: skip
        counts = known_values(batch_sizes) or [data.shape[0]]
        alike = kind == "lstm" and counts[0] == counts[-1] and states[0].shape == states[1].shape
        if alike and (counts[0] == 1 or of_one_length()):
            # Sequences of one length are a padded batch, for which torch has a kernel that is faster and keeps more.
            padded = data.view(len(counts), counts[0], data.shape[1])
            options = (biases, layers, dropout, train, both, False)
            output, *last = torch.lstm(padded, tuple(states), list(weights), *options)
            return output.flatten(0, 1), *last
        if torch.is_autocast_enabled("cpu"):
            data = data.to(torch.get_autocast_dtype("cpu"))
        ways, function = 1 + both, cast("Any", _PackedLayer)
        each = len(weights) // (layers * ways)
        start, lasts = states[0] if kind == "lstm" else states, []
        for layer in range(layers):
            outputs = []
            for way in range(ways):
                first = (layer * ways + way) * each
                steps = counts[::-1] if way else counts
                output, *last = function.apply(_KINDS[kind], steps, start[0], data, *weights[first : first + each])
                outputs.append(output)
                lasts.append(last)
            data = torch.cat(outputs, -1) if both else outputs[0]
            data = torch.dropout(data, dropout, train and layer < layers - 1)
        state, cell = (torch.stack(parts) for parts in zip(*lasts, strict=True))
        return (data, state, cell) if kind == "lstm" else (data, state)

    return run


class _PackedLayer(Function):
    """Allocates as one direction of torch's layer on packed sequences of several lengths: the gates of all rows at
    once, then what each step keeps; backward, the gradient of the gates twice. Measured with torch 2.13's CPU. What
    runs is told step by step, since it takes its time."""

    @staticmethod
    def forward(ctx: Any, kind: _Kind, counts: list[int], start: Tensor, data: Tensor, *weights: Tensor) -> Any:
        rows, ctx.wide = data.shape[0], weights[1].shape[0]
        ctx.kind, ctx.counts = kind, counts
        hidden = ctx.wide // kind.gates
        gates = data.new_empty((rows, ctx.wide))
        kept, output = data.new_empty((rows, kind.kept * hidden)), data.new_empty((rows, start.shape[-1]))
        kernel_ran("addmm", (weights[-1], data, weights[0].t()), (gates,))
        del gates
        step = _steps_of(data, weights[1])
        for count in counts:
            states, wide = step(count)
            kernel_ran("addmm", (weights[-1], states, weights[1].t()), (wide,))
            kernel_ran("add_", (wide, wide), (wide,))
            _ran_on(states, kind.forward)
        ctx.save_for_backward(data, kept, *weights)
        return output, start.new_empty(start.shape), start.new_empty((len(start), hidden))

    @staticmethod
    def backward(ctx: Any, *_: Tensor) -> tuple[Tensor | None, ...]:
        data, _kept, *weights = ctx.saved_tensors
        gates = [data.new_empty((data.shape[0], ctx.wide)) for _ in range(2)]
        made = [torch.empty_like(weight) for weight in weights[1:]]
        step = _steps_of(data, weights[1])
        for place, count in reversed([*enumerate(ctx.counts)]):
            states, wide = step(count)
            _ran_on(states, ctx.kind.backward)
            if place or ctx.needs_input_grad[2]:
                kernel_ran("mm", (wide, weights[1]), (states,))
            kernel_ran("mm", (wide.t(), states), (weights[1],))
            kernel_ran("add", (weights[1], weights[1]), (weights[1],))  # to the sum of the steps so far
            kernel_ran("sum", (wide,), (weights[-1],))
            kernel_ran("cat", ([states] * ctx.kind.gates,), (wide,))
        gates.pop()
        to_data, to_weights = torch.empty_like(data), torch.empty_like(weights[0])
        if ctx.needs_input_grad[3]:
            kernel_ran("mm", (gates[0], weights[0]), (to_data,))
        kernel_ran("mm", (gates[0].t(), data), (to_weights,))
        return None, None, None, to_data, to_weights, *made


def _steps_of(data: Tensor, weight: Tensor) -> Callable[[int], tuple[Tensor, Tensor]]:
    """States and gates of a step with so many sequences, as shapes that take no memory."""
    wide, hidden = weight.shape

    @functools.lru_cache(None)
    def step(count: int) -> tuple[Tensor, Tensor]:
        made = (torch.empty((count, size), dtype=data.dtype, device="meta") for size in (hidden, wide))
        return next(made), next(made)

    return step


def _ran_on(states: Tensor, operators: Mapping[str, int]) -> None:
    for name, times in operators.items():
        for _ in range(times):
            kernel_ran(name, (states, states), (states,))


# -- rows that a layer sorts by their targets


@contextlib.contextmanager
def adaptive_softmax(assume: Assume) -> Iterator[None]:
    """Inside, `AdaptiveLogSoftmaxWithLoss` has targets where most memory is taken, if nobody knows them.

    What rows take is a sum over clusters, so that no split of them takes more than all in the dearest. Of every other
    cluster one class is taken, as far as there are rows: its weights have gradients too.
    """
    forward = nn.AdaptiveLogSoftmaxWithLoss.forward

    def run(layer: nn.AdaptiveLogSoftmaxWithLoss, values: Tensor, target: Tensor) -> Any:
        if target.dim() == 1 and known_values(target) is None:
            firsts = [0, *layer.cutoffs[:-1]]
            # Of each row: scores, their logarithms and gradient, its copy and what it is projected to.
            tails: Any = layer.tail
            taken = [0, *(2 * tail[1].weight.shape[0] + sum(tail[0].weight.shape) for tail in tails)]
            dearest = max(range(len(firsts)), key=taken.__getitem__)
            others = [first for first in firsts if first != firsts[dearest]]
            assume(f"that most targets are classes from {firsts[dearest]} on, where they take most (an upper bound)")
            rows = len(target)
            numbers = (others[: rows - 1] + [firsts[dearest]] * rows)[:rows]
            target = torch.tensor(numbers, dtype=target.dtype)
        return forward(layer, values, target)

    with replaced(nn.AdaptiveLogSoftmaxWithLoss, "forward", run):
        yield


# -- parameters whose shape comes with the first batch


@contextlib.contextmanager
def lazy_parameters() -> Iterator[None]:
    """Inside, lazy modules can be made and run in a fake mode."""
    with contextlib.ExitStack() as undo:
        for kind in (UninitializedParameter, UninitializedBuffer):
            undo.enter_context(replaced(kind, "__new__", _of_real_tensors(kind.__new__)))
        undo.enter_context(replaced(_torch.nn.parameter.UninitializedTensorMixin, "materialize", _materialize))
        yield


def _of_real_tensors(make: Callable[..., Any]) -> Callable[..., Any]:
    def new(*args: Any, **options: Any) -> Any:
        with _torch._C._DisableTorchDispatch():
            return make(*args, **options)

    return new


def _materialize(lazy: Any, shape: Any, device: torch.device | None = None, dtype: torch.dtype | None = None) -> None:
    """Give a parameter or buffer its shape: a fake one takes its place wherever it is kept."""
    with _torch._C._DisableTorchDispatch():
        data = lazy.data
    made: Tensor = torch.empty(shape, device=device or data.device, dtype=dtype or data.dtype)
    if isinstance(lazy, UninitializedParameter):
        made = nn.Parameter(made, lazy.requires_grad)
    else:
        made.persistent = getattr(lazy, "persistent", True)  # type: ignore[attr-defined]
    for holder in gc.get_referrers(lazy):
        if type(holder) is dict:
            holder.update({name: made for name, value in holder.items() if value is lazy})
        elif type(holder) is list:
            holder[:] = [made if value is lazy else value for value in holder]
