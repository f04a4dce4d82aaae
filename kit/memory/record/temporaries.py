"""What an operator holds beside its results because torch computes it in more than one kernel.

A loss writes its terms before it takes their mean, and four of them return a number in the storage of all those terms.
Images added up from columns keep their storage. A mask becomes places, a sum of truths is one of integers. On the CPU
no kernel reads operands of several number formats and a mean is taken in float32. Rules are those of torch 2.13; what
has no source beside it was measured through the allocator's events. Each maps arguments and result of an operator, by
its name in aten with its overload, to bytes.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, in_kernel_invocation_manager

Rule = Callable[[Sequence[Any], Any], int]
aten = torch.ops.aten
_INT64, _INT32, _FLOAT32 = 8, 4, 4


# -- losses. (`native/Loss.cpp`)

SHRUNK_LOSSES = {
    aten.mse_loss.default: 2, aten.smooth_l1_loss.default: 2, aten.soft_margin_loss.default: 2,
    aten.binary_cross_entropy.default: 3,
}  # fmt: skip
"""Losses whose mean or sum has the storage of all terms, on every device and as long as it lives; with the place of
their reduction."""
FOLD = aten.col2im.default
"""Adds columns up to images, forward as `fold` and backward of `unfold`; the images have the storage of the columns, on
every device. (`native/Col2Im.cpp`, `cuda/Col2Im.cu`.)"""


def shrunk(mode: FakeTensorMode, func: Any, args: Sequence[Any], options: Mapping[str, Any]) -> FakeTensor | None:
    """The result of such an operator, a part of the storage that it has; None for a loss that returns all terms."""
    values, target = args[:2]
    dtype, shape, result = values.dtype, values.shape, ()
    if func is FOLD:
        result = (*shape[:-2], shape[-2] // math.prod(args[2]), *target)
    else:
        place = SHRUNK_LOSSES[func]
        if options.get("reduction", args[place] if len(args) > place else 1) == 0:
            return None
        shape = (values - target).shape if shape != target.shape else shape
        dtype = torch.promote_types(dtype, target.dtype)
    with in_kernel_invocation_manager(mode):
        made = torch.empty(shape, dtype=dtype, device="meta").resize_(result)
    return FakeTensor(mode, made, values.device)


BLOCKS = aten.block_diag.default
"""Matrices as blocks of one, which the kernels make at once; torch plays it by padding each and joining them."""


def joined_blocks(matrices: Sequence[Tensor]) -> Tensor:
    """The result of `BLOCKS`."""
    shapes = [(1,) * (2 - one.dim()) + tuple(one.shape) for one in matrices]
    dtype = functools.reduce(torch.promote_types, (one.dtype for one in matrices))
    return matrices[0].new_empty([sum(sizes) for sizes in zip(*shapes, strict=True)], dtype=dtype)


def _terms(args: Sequence[Any], _: Any) -> int:
    """The terms of a loss before their mean or sum."""
    return int(args[0].nbytes) if _is_reduced(args, 2) else 0


def _is_reduced(args: Sequence[Any], place: int) -> bool:
    """Whether a loss becomes a number; `reduction` is left out of the arguments where it is the mean."""
    return len(args) <= place or args[place] != 0


def _terms_of_logits(args: Sequence[Any], _: Any) -> int:
    """The logarithm of the sigmoid, the terms before their mean or sum, and the weight of each class."""
    return _sigmoids(args, _) + (int(args[3].nbytes) if len(args) > 3 and args[3] is not None else 0)


def _sigmoids(args: Sequence[Any], _: Any) -> int:
    return int(args[0].nbytes) * (2 if _is_reduced(args, 4) else 1)


def _nothing(_args: Sequence[Any], _out: Any) -> int:
    return 0


def _twice(args: Sequence[Any], _: Any) -> int:
    return 2 * int(args[1].nbytes)


# -- other operators, on every device


def _branches(args: Sequence[Any], out: Tensor) -> int:
    """A condition of bytes as one of truths, and a branch in the number format of the other.
    (`native/TensorCompare.cpp`.)"""
    return (int(args[0].numel()) if args[0].dtype is torch.uint8 else 0) + _casts(args[1:], out.dtype)


def _casts(operands: Sequence[Any], dtype: torch.dtype) -> int:
    """Copies of tensors that are in another number format."""
    others = (one for one in operands if isinstance(one, Tensor) and one.dim() and one.dtype != dtype)
    return sum(one.numel() for one in others) * dtype.itemsize


def _exponentials(args: Sequence[Any], out: Tensor) -> int:
    """Of all values, less the largest of each row. (`native/ReduceOps.cpp`.)"""
    return int(args[0].nbytes + out.nbytes)


def _wider_rows(args: Sequence[Any], _: Any) -> int:
    """Both sets of points with two more columns: squares of lengths and ones. (`native/Distance.cpp`.)"""
    rows = sum(math.prod(points.shape[:-1]) for points in args[:2])
    return int(rows * (args[0].shape[-1] + 2) * args[0].element_size())


def _products_of_three(args: Sequence[Any], _: Any) -> int:
    """What `bilinear` computes of one row after another of the axis that it goes along: the product of two, and that
    with the third, summed over some axes. (`native/Linear.cpp`.)"""
    expanded, summed, along = args[3:6], args[6], args[7] if len(args) > 7 else 1
    first, second, third = ([*shape[:along], 1, *shape[along + 1 :]] for shape in spread_shapes(args))
    pair = [1 if axis in summed and axis in expanded[2] else max(sizes) for axis, sizes in _axes(first, second)]
    whole = [1 if axis in summed and axis not in expanded[2] else max(sizes) for axis, sizes in _axes(pair, third)]
    return int((math.prod(pair) + math.prod(whole)) * args[0].element_size())


def spread_shapes(args: Sequence[Any]) -> Iterator[list[int]]:
    """The shapes of the operands of `_trilinear` with the axes along which each is spread, of size 1."""
    for operand, axes in zip(args[:3], args[3:6], strict=True):
        sizes = iter(operand.shape)
        yield [1 if axis in axes else next(sizes) for axis in range(operand.dim() + len(axes))]


def _axes(first: Sequence[int], second: Sequence[int]) -> Iterator[tuple[int, tuple[int, int]]]:
    return enumerate(zip(first, second, strict=True))


def places_bytes(args: Sequence[Any], out: Any) -> int:
    """A mask becomes the places that it chooses, an integer for each of its axes."""
    indices = list(args[1])
    for axis, mask in enumerate(indices):
        if mask is not None and mask.dtype in (torch.bool, torch.uint8):
            chosen = args[2] if len(args) > 2 else out
            count = chosen.shape[axis] if chosen.dim() > axis else 1
            return int(_INT64 * mask.dim() * count)
    return 0


def _as_counts(args: Sequence[Any], out: Tensor) -> int:
    """Small integers and truths in the type of their sum. (`native/ReduceOpsUtils.h`.)"""
    values = args[0]
    return 0 if values.dtype == out.dtype or values.dtype.is_floating_point else values.numel() * out.element_size()


def _complex(args: Sequence[Any], _: Any) -> int:
    """Size and angle of complex numbers are computed as such. (`native/UnaryOps.cpp`.)"""
    return int(args[0].nbytes) if args[0].is_complex() else 0


def _rolled(args: Sequence[Any], out: Tensor) -> int:
    """Several axes are rolled one after another. (`native/TensorTransformations.cpp`.)"""
    return int(out.nbytes) if len(args) > 2 and len(args[2]) > 1 else 0


def _drawn(args: Sequence[Any], out: Tensor) -> int:
    """A number for each chance, of which the largest are taken, and those. (`native/Distributions.cpp`.)"""
    return int(args[0].nbytes + out.numel() * args[0].element_size())


def _base_grid(_: Sequence[Any], out: Tensor) -> int:
    """The places of a grid with a one beside each. (`native/AffineGridGenerator.cpp`.)"""
    axes = out.shape[-1]
    return int(out.nbytes) // axes * (axes + 1)


# -- linear algebra: LAPACK writes over its operands. (`native/BatchLinearAlgebra.cpp`, `native/LinearAlgebra.cpp`)


def _matrix(args: Sequence[Any], _: Any) -> int:
    """A copy of the matrices, and a status for each."""
    return int(args[0].numel() * args[0].element_size() + _INT32 * math.prod(args[0].shape[:-2]))


def _least_squares(args: Sequence[Any], out: Any) -> int:
    """The same, and what `gelsy` asks for: at most 52 n numbers, measured up to n = 512."""
    return int(_matrix(args, out) + 52 * args[0].shape[-1] * args[0].element_size())


def _factors(args: Sequence[Any], out: Any) -> int:
    """The same, and the order of each one's rows."""
    return int(_matrix(args, out) + _INT32 * math.prod(args[0].shape[:-1]))


def _reflections(args: Sequence[Any], out: Sequence[Tensor]) -> int:
    """Of tall matrices the second factor before it is cut, and a number for each reflection."""
    *batch, rows, columns = args[0].shape
    numbers = math.prod(batch) * min(rows, columns) * args[0].element_size()
    return int(numbers + (out[1].nbytes if rows > columns else 0))


def _reflections_on_the_cpu(args: Sequence[Any], _: Any) -> int:
    """A number for each reflection, and what MKL's `orgqr` asks for: so many numbers for each column of the first
    factor, at most as measured with two threads up to 2,048 rows. Without that factor tall matrices are factored in a
    copy."""
    *batch, rows, columns = args[0].shape
    mode, least = args[1] if len(args) > 1 else "reduced", min(rows, columns)
    made = rows if mode == "complete" else least
    each = next((numbers for most, numbers in _EACH_COLUMN if rows <= most), _MOST_EACH_COLUMN)
    copied = args[0].numel() if mode == "r" and rows > columns else 0
    numbers = math.prod(batch) * least + copied + max(each * made, _FEWEST_EACH_COLUMN * columns * (rows > _FEW_ROWS))
    return int(numbers * args[0].element_size())


_FEW_ROWS = 31
_EACH_COLUMN = ((_FEW_ROWS, 1), (64, 48), (511, 96), (1023, 192))
"""Most rows, and numbers for each column."""
_MOST_EACH_COLUMN, _FEWEST_EACH_COLUMN = 384, 17


def _eigenvalues_alone(args: Sequence[Any], out: Tensor) -> int:
    """A copy of the matrices, values in real numbers, and what `geev` asks for: 34 n numbers."""
    numbers = args[0].numel() + 2 * out.numel() + 34 * args[0].shape[-1]
    return int(numbers * args[0].element_size())


def _of_powers(args: Sequence[Any], out: Tensor) -> int:
    """Squares of a matrix, and products of these. (`native/LinearAlgebra.cpp`.)"""
    power = abs(int(args[1]))
    even: int = power - power % 2
    squared = 0 if power <= 2 else 1 if even & (even - 1) == 0 else 2
    return int(out.nbytes) * (squared + int(args[1] < 0))


def _difference(args: Sequence[Any], out: Tensor) -> int:
    """Of two tensors, of which a norm is taken. (`native/Distance.cpp`.)"""
    return math.prod(np.broadcast_shapes(args[0].shape, args[1].shape)) * int(out.element_size())


def _eigenvalues(args: Sequence[Any], out: Sequence[Tensor]) -> int:
    """The matrices and their vectors in real numbers, values twice, and what `geev` asks for: 386 n numbers."""
    size, numbers = args[0].shape[-1], args[0].numel()
    return int((2 * numbers + 2 * out[0].numel() + 386 * size) * args[0].element_size())


def _pseudoinverse(args: Sequence[Any], _: Any) -> int:
    """The singular vectors, those of one side divided by the values, and the values."""
    *batch, rows, columns = args[0].shape
    least = min(rows, columns)
    numbers = rows * least + 2 * least * columns + 2 * least
    return int(math.prod(batch) * numbers * args[0].element_size())


def _exponential(args: Sequence[Any], _: Any) -> int:
    """The most that a series of powers takes: how many there are depends on values."""
    powers = _POWERS if args[0].dim() > len(args[0].shape[-2:]) else _POWERS_OF_ONE
    return int(powers * args[0].numel() * args[0].element_size())


_POWERS, _POWERS_OF_ONE = 10, 12


def _in_order(args: Sequence[Any], _: Any) -> int:
    """A copy of a gradient that is one number spread out, or turned around."""
    values = args[0]
    layout = {4: torch.channels_last, 5: torch.channels_last_3d}.get(values.dim(), torch.contiguous_format)
    lies = values.is_contiguous() or values.is_contiguous(memory_format=layout)
    return 0 if lies else int(values.numel() * values.element_size())


def _spread(args: Sequence[Any], _: Any) -> int:
    """A copy of a first argument that does not lie in order, as a gradient that is one number spread out."""
    return 0 if args[0].is_contiguous() else int(args[0].numel() * args[0].element_size())


def _two_in_order(args: Sequence[Any], options: Any) -> int:
    """Copies of the gradient and of the values that do not lie in order. (`native/layer_norm.cpp`, and on GPUs.)"""
    return _spread(args, options) + _spread(args[1:], options)


def _spread_for_onednn(args: Sequence[Any], options: Any) -> int:
    """The same of oneDNN's kernel, which takes float32, and bfloat16 where the processor has instructions for it; those
    of other types read such a gradient where it lies."""
    dtype = args[0].dtype
    taken = dtype == torch.float32 or (dtype == torch.bfloat16 and torch.ops.mkldnn._is_mkldnn_bf16_supported())
    return _spread(args, options) if taken else 0


PUTS = ("index_put", "index_put_", "_unsafe_index_put", "_index_put_impl_")
ON_EVERY_DEVICE: dict[str, Rule] = {
    **dict.fromkeys(("mse_loss", "smooth_l1_loss", "huber_loss"), _terms),
    "binary_cross_entropy_with_logits": _terms_of_logits,
    "soft_margin_loss_backward": _twice,
    "where.self": _branches,
    "logsumexp": _exponentials,
    "_euclidean_dist": _wider_rows,
    "index.Tensor": places_bytes,
    "col2im": _in_order,
    "native_layer_norm": _spread,
    "native_layer_norm_backward": _two_in_order,
    "_trilinear": _products_of_three,
    **dict.fromkeys(("abs", "angle"), _complex),
    "roll": _rolled,
    "affine_grid_generator": _base_grid,
    "multinomial": _drawn,
    **dict.fromkeys(("_softmax_backward_data", "_log_softmax_backward_data"), _spread),
    "_linalg_svd": _matrix,
    "linalg_lstsq": _least_squares,
    **dict.fromkeys(("linalg_inv_ex", "linalg_lu"), _factors),
    "linalg_qr": _reflections,
    "linalg_matrix_power": _of_powers,
    "cholesky_solve": lambda args, _: _matrix(args[1:], _),
    "dist": _difference,
    "linalg_pinv.atol_rtol_tensor": _pseudoinverse,
    "linalg_matrix_exp": _exponential,
    **dict.fromkeys(("sum", "sum.dim_IntList", "cumsum", "prod", "prod.dim_int"), _as_counts),
}


# -- CPU: no kernel reads operands of several number formats; measured with torch 2.13


def _elementwise(args: Sequence[Any], out: Tensor) -> int:
    """Copies of what is in another number format than it is computed in, and the result where it is stored in that."""
    tensors = [one for one in args if isinstance(one, Tensor)]
    dtype = out.dtype
    if all(one.dtype == dtype for one in tensors):
        return 0
    if dtype is torch.bool or any(out is one for one in tensors):
        with_axes = [one.dtype for one in tensors if one.dim()] or [dtype]
        dtype = functools.reduce(torch.promote_types, with_axes)
    stored = out.numel() * dtype.itemsize if out.dtype not in (dtype, torch.bool) else 0
    return _casts(tensors, dtype) + stored


def _one_after_another(args: Sequence[Any], out: Any) -> int:
    """The most of an operator on lists of tensors of several number formats, which it takes in turn."""
    lists = [one for one in args if isinstance(one, list | tuple) and one and isinstance(one[0], Tensor)]
    results = out if isinstance(out, list | tuple) and out else lists[0]
    return max((_elementwise(each[:-1], each[-1]) for each in zip(*lists, results, strict=False)), default=0)


def _mean(args: Sequence[Any], out: Tensor) -> int:
    """Values and result in float32. (`native/ReduceOps.cpp`.)"""
    if out.dtype != args[0].dtype:
        return int(args[0].numel() * out.element_size())
    return _FLOAT32 * int(args[0].numel() + out.numel()) if args[0].element_size() < _FLOAT32 else 0


def _summed(args: Sequence[Any], out: Tensor) -> int:
    """Values in the number format of their sum; values and result in float32 where half precision is summed over axes
    that do not lie as one. (`should_use_acc_buffer` in `native/ReduceOps.cpp`; the order of axes is that of
    `TensorIterator.cpp`.)"""
    values = args[0]
    if out.dtype != values.dtype:
        return int(values.numel() * out.element_size())
    if values.dtype not in (torch.bfloat16, torch.float16):
        return 0
    among = range(values.dim()) if len(args) < 2 or not args[1] else [axis % values.dim() for axis in args[1]]
    axes: list[tuple[int, int]] = []  # stride and size, the fastest first
    for axis in sorted(among, reverse=True):
        stride, size = values.stride(axis), values.shape[axis]
        place = len(axes)
        for before in range(len(axes) - 1, -1, -1):
            one, other = axes[before], (stride, size)
            if 0 in (one[0], stride):
                continue
            if one <= other:
                break
            place = before
        if size > 1:
            axes.insert(place, (stride, size))
    lie_as_one = all(size * stride == following for (stride, size), (following, _) in itertools.pairwise(axes))
    return 0 if lie_as_one else _FLOAT32 * int(values.numel() + out.numel())


def _with_mean(terms: Rule, place: int) -> Rule:
    """A loss whose mean is taken last; `place` is that of its reduction."""

    def rule(args: Sequence[Any], out: Any) -> int:
        is_mean = len(args) <= place or args[place] == 1
        return terms(args, out) + (_mean(args, out) if is_mean else 0)

    return rule


def _lies(values: Tensor, layout: torch.memory_format) -> bool:
    """Whether values lie so; only images and volumes can lie channels last."""
    of_axes = {torch.channels_last: 4, torch.channels_last_3d: 5}.get(layout, values.dim())
    return values.dim() == of_axes and values.is_contiguous(memory_format=layout)


def _batch_norm(args: Sequence[Any], _: Any) -> int:
    """Values in float32 where those in half precision lie in no layout. (`native/Normalization.cpp`.)"""
    values = args[0]
    lies = any(_lies(values, layout) for layout in _LAYOUTS)
    return 0 if lies or values.element_size() >= _FLOAT32 else int(_FLOAT32 * values.numel())


def _batch_norm_backward(args: Sequence[Any], _: Any) -> int:
    """A copy where gradient and values lie alike; else a gradient in half precision is summed as float32, but not one
    that lies channels last, or is one number spread out. (`cpu/batch_norm_kernel.cpp` and the same.)"""
    gradient, values = args[:2]
    if any(_lies(gradient, layout) and _lies(values, layout) for layout in _LAYOUTS):
        return int(values.nbytes)
    read = is_spread_out(gradient) or any(_lies(gradient, layout) for layout in _LAYOUTS[1:])
    return 0 if read or values.element_size() >= _FLOAT32 else int(_FLOAT32 * values.numel())


_LAYOUTS = torch.contiguous_format, torch.channels_last, torch.channels_last_3d
NORMS: dict[Any, tuple[int, int | None]] = {
    aten.native_batch_norm.default: (0, 1), aten.native_batch_norm_backward.default: (1, None),
    aten.native_layer_norm.default: (0, 2), aten.native_group_norm.default: (0, 1),
    aten.native_group_norm_backward.default: (1, None),
}  # fmt: skip
"""Operators whose results torch's rules for shapes do not tell as kernels make them, with the places of their values
and, where they make statistics, of their weight."""


def normed(mode: FakeTensorMode, func: Any, args: Sequence[Any], results: Sequence[Any], is_cuda: bool) -> Any:
    """The results of such an operator as its kernel makes them.

    On the CPU a batch norm writes in order what lies in no layout. Statistics of half precision are in float32 where
    the weight is, and on GPUs those of rows always. (`native/mixed_data_type.h`, `cuda/layer_norm_kernel.cu`.)
    """
    first, *others = results
    values, place = args[NORMS[func][0]], NORMS[func][1]

    def made(like: Tensor, dtype: torch.dtype, steps: Sequence[int] | None = None) -> Tensor:
        with in_kernel_invocation_manager(mode):
            if steps is None:
                empty = torch.empty(like.shape, dtype=dtype, device="meta")
            else:
                empty = torch.empty_strided(like.shape, steps, dtype=dtype, device="meta")
        return FakeTensor(mode, empty, like.device)

    if place is not None and values.element_size() < _FLOAT32:
        weight = args[place]
        widened = weight is not None and weight.dtype == torch.float32
        if widened or (is_cuda and func is aten.native_layer_norm.default):
            others = [made(one, torch.float32) for one in others]
    is_batch = func in (aten.native_batch_norm.default, aten.native_batch_norm_backward.default)
    if is_batch and not is_cuda and first is not None and not any(_lies(values, layout) for layout in _LAYOUTS):
        first = made(first, first.dtype)
    if first is not None and first.dtype != values.dtype:  # of half precision with a weight in float32
        first = made(first, values.dtype, first.stride())
    return first, *others


def _chosen(args: Sequence[Any], _: Any) -> int:
    """A copy of all values, and a place for each. (`native/Sorting.cpp`, as the next two.)"""
    return int(args[0].numel() * (args[0].element_size() + _INT64))


def _copy(args: Sequence[Any], _: Any) -> int:
    return int(args[0].numel() * args[0].element_size())


def _copy_across(args: Sequence[Any], _: Any) -> int:
    """A copy where the values of a row do not lie side by side."""
    return 0 if args[0].dim() == 0 or args[0].stride(args[1]) == 1 else _copy(args, _)


def _accumulated(args: Sequence[Any], out: Tensor) -> int:
    """What is scattered to or gathered, in float32, unless an index is the same for a whole row.
    (`cpu/ScatterGatherKernel.cpp`.)"""
    index = args[2]
    by_rows = index.dim() > 1 and index.shape[0] > 1 and not any(index.stride()[1:])
    return 0 if by_rows or not out.is_floating_point() or out.element_size() >= _FLOAT32 else _FLOAT32 * out.numel()


def _as_sum(args: Sequence[Any], out: Tensor) -> int:
    """Values in the number format of their norm or sum."""
    return 0 if out.dtype == args[0].dtype else int(args[0].numel() * out.element_size())


def _one_layout(*places: int) -> Rule:
    """A kernel for one layout, which is that of the gradient: a copy of what lies otherwise, be it the gradient (one
    number spread out), another argument or the result. (`cpu/MaxPoolKernel.cpp`, `cpu/AvgPoolKernel.cpp`, and others.)
    """

    def rule(args: Sequence[Any], out: Tensor) -> int:
        last = {4: torch.channels_last, 5: torch.channels_last_3d}.get(args[0].dim(), torch.contiguous_format)
        layout = last if args[0].is_contiguous(memory_format=last) else torch.contiguous_format
        parts = (args[0], *(args[place] for place in places), out)
        return sum(one.numel() * one.element_size() for one in parts if not one.is_contiguous(memory_format=layout))

    return rule


def is_spread_out(values: Tensor) -> bool:
    """Whether values are one number spread out, along some axis."""
    return any(size > 1 and not stride for size, stride in zip(values.shape, values.stride(), strict=True))


def _one_number(args: Sequence[Any], _: Any) -> int:
    """A copy of a gradient that is one number spread out."""
    return _spread(args, _) if is_spread_out(args[0]) else 0


def _counted(args: Sequence[Any], out: Tensor) -> int:
    """How many are chosen is counted before there is room for them. (`native/TensorAdvancedIndexing.cpp`.)"""
    return max(0, _INT64 * (int(args[1].numel()) + 1) - int(out.nbytes))


def _several_axes(args: Sequence[Any], _: Any) -> int:
    """Spectra of several axes become numbers axis by axis. (`mkl/SpectralOps.cpp`.)"""
    return 2 * int(args[0].nbytes) if len(args[1]) > 1 else 0


def _bag(args: Sequence[Any], _: Any) -> int:
    """The bag of each index, but for sums. (`native/EmbeddingBag.cpp`.)"""
    return int(args[1].numel() * _INT64) if len(args) > 4 and args[4] else 0


def _bag_backward(args: Sequence[Any], _: Any) -> int:
    """The gradient in order, and indices, bags and both sorted."""
    return _spread(args, _) + (0 if args[9] else 3 * int(args[1].numel() * _INT64))


def _places_along(_: Sequence[Any], out: Tensor) -> int:
    """A place and a weight for each of two taps. (`cpu/UpSampleKernel.cpp`.)"""
    return int(2 * out.shape[-1] * (_INT64 + out.element_size()))


def _resized(taps: int, colours: int) -> Rule:
    """Both images channels last, where both sides of the result are at most 128 together or four channels lie so
    already; else a place and a weight for each tap of each row and column. (`cpu/UpSampleKernel.cpp`; that bilinear
    turns images of three channels too is measured.)"""

    def rule(args: Sequence[Any], out: Tensor) -> int:
        values, layout = args[0], torch.channels_last
        lies = values.is_contiguous(memory_format=layout) and values.shape[1] >= _FEWEST_CHANNELS
        sides = sum(out.shape[-2:])
        if sides > _SMALL_SIDES and not lies and values.shape[1] != colours:
            return int(taps * sides * (_INT64 + values.element_size()))
        turned = (one for one in (values, out) if not one.is_contiguous(memory_format=layout))
        return sum(one.numel() * one.element_size() for one in turned)

    return rule


def _resized_smoothly(taps: int) -> Rule:
    """Images that have the new width and the old height, and for each row or column of the result four places and the
    weights of all that it is made of, on either side. (`cpu/UpSampleKernel.cpp`.)"""

    def rule(args: Sequence[Any], out: Tensor) -> int:
        values, size = args[0], args[0].element_size()
        between = values.numel() // values.shape[-1] * out.shape[-1]
        weights = 0
        for axis in (-2, -1):
            scale = max(1.0, values.shape[axis] / out.shape[axis])
            reached = 2 * math.ceil(taps / 2 * scale) + 1
            weights = max(weights, out.shape[axis] * (4 * _INT64 + reached * size))
        return int(between * size + weights)

    return rule


def _numbered(args: Sequence[Any], out: Sequence[Tensor]) -> int:
    """The places of one row. (`native/Sorting.cpp`.)"""
    shape = out[0].shape or (1,)
    axis = args[1] if len(args) > 1 and type(args[1]) is int else -1
    return _INT64 * int(shape[axis])


def _numbered_longest(_: Sequence[Any], out: Sequence[Tensor]) -> int:
    """The same where the axis is an option, which no rule is given: an upper bound."""
    return _INT64 * max(out[0].shape, default=1)


_SMALL_SIDES, _FEWEST_CHANNELS = 128, 4
_RESIZED = (
    *(f"{name}{axes}d" for name in ("upsample_nearest", "_upsample_nearest_exact") for axes in (1, 2, 3)),
    "upsample_linear1d", "upsample_bilinear2d", "upsample_bicubic2d", "upsample_trilinear3d",
    "_adaptive_avg_pool2d",
)  # fmt: skip
_ORDERED = (
    "grid_sampler_2d", "embedding_dense",
    *(f"{kind}_pad{axes}d" for kind in ("reflection", "replication") for axes in (1, 2, 3)),
)  # fmt: skip
_POOLED = ("avg_pool2d", "avg_pool3d", "_adaptive_avg_pool3d")
_SCATTERED = ("scatter.src", "scatter.value", "scatter.reduce", "scatter_add", "scatter_reduce.two")
_ELEMENTWISE = [
    f"{name}{suffix}.Tensor"
    for name in (
        "add", "sub", "mul", "div", "eq", "ne", "lt", "le", "gt", "ge", "clamp", "bitwise_and", "bitwise_or",
        "remainder", "rsub", "fmod", "copysign", "xlogy",
    )
    for suffix in ("", "_")
] + [f"{name}{suffix}" for name in ("addcmul", "addcdiv", "hypot", "floor_divide") for suffix in ("", "_")]  # fmt: skip
_IN_TURN = [
    f"_foreach_{name}{suffix}.{overload}"
    for names, overloads in (
        (("add", "sub", "mul", "div", "maximum", "minimum", "clamp_min", "clamp_max"), ("List",)),
        (("addcmul", "addcdiv"), ("Scalar", "ScalarList", "Tensor")),
    )
    for name in names
    for overload in overloads
    for suffix in ("", "_")
]

ON_THE_CPU: dict[str, Rule] = {
    **dict.fromkeys((*_ELEMENTWISE, "pow.Tensor_Tensor", "maximum", "minimum", "atan2"), _elementwise),
    **dict.fromkeys(_IN_TURN, _one_after_another),
    **dict.fromkeys(("mean", "mean.dim"), _mean),
    **dict.fromkeys(("mse_loss", "smooth_l1_loss", "huber_loss"), _with_mean(_terms, 2)),
    "binary_cross_entropy_with_logits": lambda args, out: max(  # weights are gone when the mean is taken
        _terms_of_logits(args, out), _with_mean(_sigmoids, 4)(args, out)
    ),
    **dict.fromkeys(("sum", "sum.dim_IntList"), _summed),
    "binary_cross_entropy": _with_mean(_nothing, 3),
    "soft_margin_loss": _with_mean(_nothing, 2),
    "native_batch_norm": _batch_norm,
    "native_batch_norm_backward": _batch_norm_backward,
    "im2col": lambda args, _: int(args[0].nbytes),
    "linalg_eig": _eigenvalues,
    "linalg_qr": _reflections_on_the_cpu,
    **dict.fromkeys(("linalg_eigvals", "_linalg_eigvals"), _eigenvalues_alone),
    **dict.fromkeys(("masked_select", "masked_scatter_backward"), _counted),
    "masked_scatter": lambda args, _: _spread(args[2:], _),
    "_scaled_dot_product_flash_attention_for_cpu_backward": _one_number,
    "kthvalue": _chosen,
    **dict.fromkeys(("median", "nanmedian"), _copy),
    **dict.fromkeys(("median.dim", "nanmedian.dim"), _copy_across),
    **dict.fromkeys(
        ("gather", *_SCATTERED, *(name.replace(".", "_.") if "." in name else f"{name}_" for name in _SCATTERED)),
        _accumulated,
    ),
    "sort": _numbered,
    "sort.stable": _numbered_longest,
    "_upsample_bilinear2d_aa": _resized_smoothly(2),
    "_upsample_bicubic2d_aa": _resized_smoothly(4),
    **dict.fromkeys(("upsample_nearest2d", "_upsample_nearest_exact2d"), _resized(1, 0)),
    "upsample_bilinear2d": _resized(2, 3),
    **dict.fromkeys((f"{name}_backward" for name in _RESIZED), _in_order),
    **dict.fromkeys((f"{name}_backward" for name in _ORDERED), _spread),
    **dict.fromkeys((f"{name}_backward" for name in _POOLED), _one_layout()),
    **dict.fromkeys(("max_pool2d_with_indices_backward", "max_pool3d_with_indices_backward"), _one_layout(7)),
    **dict.fromkeys(("adaptive_max_pool2d_backward", "adaptive_max_pool3d_backward"), _one_layout(2)),
    **dict.fromkeys(("pixel_shuffle", "pixel_unshuffle", "_fft_r2c"), _spread),
    "gelu_backward": _spread_for_onednn,
    "_fft_c2r": _several_axes,
    "unfold_backward": lambda args, _: _INT64 * int(args[1][args[2]]),
    "_embedding_bag": _bag,
    "_embedding_bag_backward": _bag_backward,
    "upsample_linear1d": _places_along,
    **dict.fromkeys(("linalg_vector_norm", "cumsum", "prod", "prod.dim_int"), _as_sum),
    **dict.fromkeys(PUTS, places_bytes),
}
