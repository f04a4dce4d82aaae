"""Workspace: bytes that a kernel takes for itself while it runs; no operator shows them as argument or result.

`workspace_bytes` is what is known: from the source of torch 2.13's CUDA kernels, or measured on its CPU kernels. It is
allocated once the results are, and freed when the operator ends. `unsure_workspace_bytes` bounds what only cuDNN knows:
between nothing and one more layout of a convolution's operands. It is no part of the peak nor of any verdict: where it
finds no room, torch takes another algorithm. What cuBLAS keeps for good depends on the card, so the estimate adds it
(`kit.memory.replay.replay`).

Known error: CPU convolutions as `_scratch_of_convolution` says, and to 256 bytes in half precision where the processor
has none (a twentieth where each channel has a group); products in half precision as `_scratch_of_product` says;
everything else as its source says.

`eight_bit_on_fakes`: 8-bit optimizers (bitsandbytes, and torchao's states for shards) look their quantization maps up
in tables of 256 numbers, sorted in Python while the first step makes its state. Sorting needs numbers, which a fake
tensor has not, so the tables are made for real; all else is as in a real step.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import importlib.util
import math
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._prims_common import suggest_memory_format
from torch._subclasses import fake_tensor
from torch.utils._python_dispatch import _disable_current_modes

from kit.confinement.stand_ins import replaced
from kit.memory.record.fakes import ONEDNN_HALF, backward_scratch_bytes, forward_scratch_bytes, is_emulated
from kit.memory.record.sparse import GROWS_ON_A_GPU, is_sparse, sparse_bytes
from kit.memory.record.temporaries import ON_EVERY_DEVICE, ON_THE_CPU, PUTS, Rule, places_bytes, spread_shapes
from kit.memory.record.truth import AllocatorTrace
from kit.train.optimizers import is_installed, make_tables, quiet_import

Capability = tuple[int, int] | None
"""Of the GPU; None is the CPU."""

_torch_c: Any = torch._C
aten = torch.ops.aten
_INT64, _INT32 = 8, 4
_FLOAT32 = 4
_SORTED_EMBEDDING = 3072
_ROWS_PER_PART = 10


def workspace_bytes(operator: str, args: Sequence[Any], out: Any, capability: Capability) -> int:
    """Bytes that the kernel of `operator` (its name in aten without namespace and overload) holds meanwhile."""
    rule = (_CPU if capability is None else _CUDA).get(operator)
    return rule(args, out) if rule else 0


def unsure_workspace_bytes(operator: str, args: Sequence[Any], out: Any, capability: Capability) -> int:
    """The most that a kernel may hold beyond `workspace_bytes`; it may be nothing.

    cuDNN picks an algorithm for each shape and card; one that computes in another layout than the tensors' (half
    precision in NCHW) copies its operands into its workspace.
    """
    if capability is None or operator not in _CONVOLUTIONS:
        return 0
    return sum(tensor.nbytes for tensor in (*args[: _CONVOLUTIONS[operator]], *_tensors(out)) if tensor is not None)


_CONVOLUTIONS = {"convolution": 2, "convolution_backward": 3}
"""Convolutions and how many of their first arguments are operands."""


def _tensors(out: Any) -> list[Tensor]:
    if isinstance(out, Tensor):
        return [out]
    return [tensor for tensor in out or () if isinstance(tensor, Tensor)]


def _round_up(number: int, unit: int) -> int:
    return -(-number // unit) * unit


# -- CUDA


def _flash_backward(args: Sequence[Any], _: Any) -> int:
    """Gradient of the query summed in float32 and a row sum, lengths rounded up to 128 and head sizes to 32 (64 above
    128); key and value gradients of every query head when heads are grouped. (`flash_attn/flash_api.cpp`.)"""
    query, key = args[1], args[2]
    batch, heads, length, head = query.shape
    rows = batch * heads * _round_up(length, 128)
    wide = _round_up(head, 32 if head <= 128 else 64)
    grouped = 2 * batch * heads * key.shape[2] * head * query.element_size() if key.shape[1] != heads else 0
    return int(_FLOAT32 * rows * (wide + 1) + grouped)


def _efficient_backward(args: Sequence[Any], _: Any) -> int:
    """Gradient of the query summed in float32 (half precision), or the product whose row sums are kept (float32), and
    these sums. (`transformers/cuda/attention_backward.cu`; an upper bound for short keys.)"""
    query, value = args[1], args[3]
    batch, heads, length, head = query.shape
    rows = batch * heads * length
    wide = value.shape[-1] if query.dtype == torch.float32 else head
    return int(_FLOAT32 * rows * (wide + 1))


def _embedding_backward(args: Sequence[Any], _: Any) -> int:
    """Many indices are sorted, cut into parts of ten rows, and each part is summed in float32.
    (`cuda/Embedding.cu`, `EmbeddingBackwardKernel.cu`.)"""
    gradient, indices, rows = args[0], args[1], args[2]
    count = indices.numel()
    copied = 0 if gradient.is_contiguous() else gradient.numel() * gradient.element_size()
    if count <= _SORTED_EMBEDDING:
        return int(copied)
    segments = min(count, rows)
    parts = count // _ROWS_PER_PART + segments
    sums = parts * gradient.shape[-1] * max(gradient.element_size(), _FLOAT32)
    return int(copied + sums + indices.element_size() * (3 * count + 2 * segments + parts))


def _index_put(args: Sequence[Any], _: Any) -> int:
    """Accumulating sorts the flat indices: these, their order, and both sorted. (`cuda/Indexing.cu`.)"""
    if len(args) < 4 or not args[3]:
        return 0
    counts = [index.numel() for index in args[1] if index is not None]
    return 4 * _INT64 * max(counts, default=0)


def _safe_softmax(args: Sequence[Any], out: Tensor) -> int:
    """Which arguments are masked, and which rows are masked whole and set to 0: measured, the same on every device."""
    return int(out.numel() + out.numel() // max(1, out.shape[args[1]]))


def _ctc_backward(args: Sequence[Any], _: Any) -> int:
    """The chances of the rest of each target, as many as forward kept of their beginnings. (`native/LossCTC.cpp`.)"""
    return int(args[6].nbytes)


def _eigenvectors(args: Sequence[Any], _: Any) -> int:
    """What LAPACK's `syevd` asks for: 1 + 6 n + 2 n² numbers and 3 + 5 n integers for vectors, 1 + 2 n and one without,
    used again for each matrix of a batch. (`native/BatchLinearAlgebraKernel.cpp`.)"""
    size, vectors = int(args[0].shape[-1]), args[2] if len(args) > 2 else True
    numbers, integers = (1 + 6 * size + 2 * size**2, 3 + 5 * size) if vectors else (1 + 2 * size, 1)
    return int(args[0].element_size()) * numbers + _INT32 * integers


_MATRIX_AXES = 2


def _for_blas(operand: Tensor) -> int:
    """Bytes of the copy of a matrix, or of each of a batch, in which neither rows nor columns lie side by side, such as
    the gradient of a sum, which is one number spread out. The CPU copies one of a batch after another.
    (`native/LinearAlgebra.cpp`, `cuda/Blas.cpp`.)"""
    if operand.layout is not torch.strided:
        return 0
    rows, columns = operand.shape[-2:]
    down, along = operand.stride()[-2:]
    lies = (along == 1 and down >= columns) or (down == 1 and along >= rows)
    return 0 if lies or min(rows, columns) <= 1 else int(operand.numel() * operand.element_size())


def _cuda_product_of(place: int) -> Rule:
    return lambda args, _: sum(map(_for_blas, args[place : place + 2]))


_PRODUCTS = ("mm", "bmm", "mm.out", "bmm.out")
_PRODUCTS_ADDED = tuple(f"{name}{how}" for name in ("addmm", "baddbmm") for how in ("", "_", ".out"))

_BOTH: dict[str, Rule] = {
    **ON_EVERY_DEVICE,
    "_safe_softmax": _safe_softmax,
    **dict.fromkeys(("_ctc_loss_backward", "_ctc_loss_backward.Tensor"), _ctc_backward),
}

_CUDA: dict[str, Rule] = {
    **_BOTH,
    "_scaled_dot_product_flash_attention_backward": _flash_backward,
    # cuDNN's own figure is not known without a GPU; it sums the same gradient.
    "_scaled_dot_product_cudnn_attention_backward": _flash_backward,
    "_scaled_dot_product_efficient_attention_backward": _efficient_backward,
    "embedding_dense_backward": _embedding_backward,
    **dict.fromkeys(_PRODUCTS, _cuda_product_of(0)),
    **dict.fromkeys(_PRODUCTS_ADDED, _cuda_product_of(1)),
    **dict.fromkeys(PUTS, lambda args, out: _index_put(args, out) + places_bytes(args, out)),
}


# -- CPU: oneDNN copies operands into its blocked layout; measured with torch 2.13 through the allocator's events, on
# CPUs without tiles (AMX), with which bfloat16 takes up to twice as much


def _convolution(args: Sequence[Any], out: Tensor) -> int:
    """A copy of the input in a layout of its own while the result is made in one, then that result and the one that is
    handed back; a transposed one makes it twice."""
    if not _takes_onednn(args[0], args[1], args[3:9]):
        return _unrolled_convolution(args, out)
    result, weight_bytes = _blocked(out), int(args[1].nbytes)
    first = _copied(args[0]) + weight_bytes + result - int(out.nbytes)
    least_bytes, each_a_sum = max(first, (2 if args[6] else 1) * result), args[0] if args[6] else out
    return _scratch_of_convolution(aten.convolution.default, args, 1, each_a_sum, least_bytes)


def _convolution_backward(args: Sequence[Any], out: Any) -> int:
    """First the gradient of the input, from a copy of the output's gradient; then that of the weight, from copies of
    the output's gradient and the input, or of one of them where each channel has a group and a large kernel. Of half
    precision it is summed in float32, from a sample of each turned around for every thread; where it is made in another
    layout, it is there twice and more (`_times_made_beside`)."""
    gradient, values, weight, groups = args[0], args[1], args[2], args[9]
    if not _takes_onednn(values, weight, args[4:10]):
        return _unrolled_convolution_backward(args, out)
    results = sum(int(tensor.nbytes) for tensor in _tensors(out))
    first = _blocked(gradient) + _blocked(values) + int(weight.nbytes) - results if args[10][0] else 0
    if args[10][0] and values.shape[1] % _LANES:
        first = max(first, _blocked(values))  # the gradient of the input, before it is laid out as that
    second = _blocked(gradient) + _copied(values)
    if groups == values.shape[1] > 1 and max(weight.shape[2:]) > _SMALL_KERNEL:
        first, second = 0, max(_blocked(gradient), _copied(values))
    second += _times_made_beside(gradient, weight) * int(weight.nbytes)
    if weight.element_size() < _FLOAT32 and math.prod(weight.shape[2:]) > 1 and weight.shape[1] > 1:
        second += int(gradient.nbytes + values.nbytes) // max(1, len(values)) * torch.get_num_threads()
    least_bytes = max(first, second if args[10][1] else 0, int(weight.nbytes))
    if (
        groups == 1
        and not _lies_channels_last(values)
        and weight.numel() > _MOST_NUMBERS_OF_MANY
        and weight.nbytes > _HEAVY * (gradient.nbytes + values.nbytes)
    ):
        fewer = _of_fewer_channels(args)
        times = weight.numel() / fewer[2].numel()
        return max(least_bytes, int(times * _convolution_backward(fewer, fewer[1:3])))
    each_a_sum = values if args[7] else gradient
    return _scratch_of_convolution(aten.convolution_backward.default, args, 2, each_a_sum, least_bytes)


def _takes_onednn(values: Tensor, weight: Tensor, how: Sequence[Any]) -> bool:
    """Whether torch hands a convolution over, else it multiplies: half precision that the processor has no instructions
    for, and kernels of one position over few samples on one thread. (`use_mkldnn` in `native/Convolution.cpp`.)"""
    if is_emulated(values.dtype):
        return False
    strides, _, dilations, transposed, *_ = how
    is_product = math.prod(weight.shape[2:]) == 1 and max(*strides, *dilations) == 1 and not transposed
    in_full = values.dtype is torch.float32 and values.dim() < _VOLUME_AXES
    return not (in_full and is_product and len(values) < _FEW_SAMPLES and torch.get_num_threads() == 1)


def _times_made_beside(gradient: Tensor, weight: Tensor) -> int:
    """How many times as large as a weight's gradient is what it is made in. Measured; with AVX2, kernels of one
    position are so where both channels are an odd number of vectors."""
    is_wide = _LANES > _AVX2_LANES
    if weight.element_size() < _FLOAT32:
        return 2
    if max(gradient.shape[2:]) == 1:
        return 2 if is_wide or _suggests_channels_last(weight) else 1
    in_vectors = all(channels % (2 * _AVX2_LANES) == _AVX2_LANES for channels in weight.shape[:2])
    return 2 if not is_wide and in_vectors and math.prod(weight.shape[2:]) == 1 else 0


def _of_fewer_channels(args: Sequence[Any]) -> tuple[Any, ...]:
    """Arguments of the gradient of a convolution of as many positions whose weight has few numbers: where operands are
    small beside it, what is held is so many times the weight, eight times for some volumes."""
    gradient, values, weight = args[:3]
    channels = list(weight.shape[:2])
    while math.prod((*channels, *weight.shape[2:])) > _MOST_NUMBERS_OF_MANY and max(channels) > _LANES:
        widest = channels.index(max(channels))
        channels[widest] = -(-channels[widest] // 2)
    made, read = channels[::-1] if args[7] else channels
    with _disable_current_modes():
        parts = (
            torch.empty(shape, dtype=weight.dtype, device="meta")
            for shape in (
                (len(gradient), made, *gradient.shape[2:]),
                (len(values), read, *values.shape[2:]),
                (*channels, *weight.shape[2:]),
            )
        )
        return (*parts, None if args[3] is None else [made], *args[4:])


def _lies_channels_last(values: Tensor) -> bool:
    layout = {4: torch.channels_last, 5: torch.channels_last_3d}.get(values.dim())
    return layout is not None and not values.is_contiguous() and values.is_contiguous(memory_format=layout)


def _scratch_of_convolution(
    operator: Any, args: Sequence[Any], batched: int, each_a_sum: Tensor, least_bytes: int
) -> int:
    """What oneDNN holds for a convolution, asked of the kernel.

    What is copied, into which layout and how wide depends on the processor, on each size and on the number of threads,
    and a weight with a group for each channel takes as much for every group as 16 by 16 channels do. Of a long batch
    two short ones are asked about, and what is held grows as between these. A model has dozens of convolutions: those
    of large images or weights, which take longer than milliseconds, are not asked about. Those with strides or some
    groups are asked about at a greater length, as copies of their operands do not tell what is held: patches of 16 x 16
    took up to 4.8 times as much. Known error: up to a fifth of what is held where less than the whole batch is asked
    about, and three copies of the weight where another kernel is taken for the whole.

    Args:
        operator: Of aten.
        args: Its arguments: tensors that have a batch, and the weight.
        batched: How many have a batch.
        each_a_sum: The one of which each number is a sum, or is added to as many, as a row of the weight is long.
        least_bytes: What copies take where values do not lie channels last; those that do are read as they lie, and
            only weights are copied. It counts where the whole batch is not asked about: of few samples, a weight may
            take more than they do.
    """
    values, weight, batch = args[batched - 1], args[batched], int(args[0].shape[0])
    times = 1
    unasked_bytes = least_bytes
    if _lies_channels_last(values):
        # More is asked about where less is known. The weight is laid out channels last, and then as the kernel reads
        # it, and so is its gradient.
        least_bytes, times = 0, _FEWEST_SAMPLES
        unasked_bytes = batched * int(weight.nbytes) + _laid_out(weight, lies_last=True)
    threads = torch.get_num_threads()
    operands, options = _described(args)

    def ask(samples: int) -> int | None:
        return _scratch_of_samples(operator, operands, options, batched, samples, threads)

    numbers = max(1, *(int(one.numel()) for one in args[:batched])) / max(1, batch)
    products = max(1, int(each_a_sum.numel())) / max(1, batch) * math.prod(weight.shape[1:])
    fewest = _FEWEST_SAMPLES
    strides, groups = args[batched + 2], int(args[batched + 7])
    a_group_each = 1 < groups == values.shape[1]
    if not a_group_each and (groups > 1 or max(strides) > 1):
        times, fewest = max(times, _TIMES_OF_UNSURE), 2
    most = int(times * min(_MOST_PRODUCTS_OF_MANY / products, _MOST_NUMBERS_OF_MANY / numbers))
    asked = min(batch, most)
    if asked < min(batch, fewest) or weight.numel() > times * _MOST_NUMBERS_OF_MANY:
        return unasked_bytes
    fewer = max(asked // 2, asked - threads)  # threads share samples
    held, held_by_fewer = ask(asked), ask(fewer) if asked < batch else 0
    if held is None or held_by_fewer is None:
        return unasked_bytes
    if asked == batch:
        return held
    of_each = max(0, held - held_by_fewer) / (asked - fewer) if held_by_fewer else held / asked
    return max(held + int(of_each * (batch - asked)), least_bytes)


def _described(args: Sequence[Any]) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    """Shapes, strides and number formats of operands, and what else an operator is given; both can be hashed."""
    operands = tuple(
        None if one is None else (tuple(map(int, one.shape)), tuple(map(int, one.stride())), one.dtype)
        for one in args[:_OPERANDS]
    )
    return operands, tuple(tuple(one) if isinstance(one, list | tuple) else one for one in args[_OPERANDS:])


@functools.lru_cache(maxsize=4096)
def _scratch_of_samples(
    operator: Any, operands: tuple[Any, ...], options: tuple[Any, ...], batched: int, samples: int, _threads: int
) -> int | None:
    """The same for so many samples; None where the kernel cannot be asked."""
    with _disable_current_modes(), _torch_c.DisableTorchFunction():
        made: list[Tensor | None] = []
        for place, one in enumerate(operands):
            if one is not None:
                shape, stride, dtype = one
                shape = (samples, *shape[1:]) if place < batched else shape
                one = torch.empty_strided(shape, stride, dtype=dtype, device="cpu").zero_()
            made.append(one)
        return _held_beside(lambda: operator(*made, *options), *(one for one in made if one is not None))


def _copied(values: Tensor) -> int:
    """The input's copy; few channels are read as they lie."""
    return _blocked(values) if values.shape[1] >= _LANES else 0


def _blocked(tensor: Tensor) -> int:
    """Bytes with channels rounded up to the width of the vector unit."""
    return int(tensor.numel()) // int(tensor.shape[1]) * _round_up(tensor.shape[1], _LANES) * tensor.element_size()


# -- CPU: half precision where the processor has no instructions for it. torch writes out the patch of every position as
# a column, and multiplies. (`native/ConvolutionMM2d.cpp`, `NaiveConvolutionTranspose2d.cpp` and
# `NaiveDilatedConvolution.cpp`, and their like for volumes; groups in `native/Convolution.cpp`.)


def _unrolled_convolution(args: Sequence[Any], out: Tensor) -> int:
    """Columns, and copies of operands that lie otherwise than the kernel reads them. Of several groups each is computed
    from a copy of its channels, and at last all are joined."""
    if args[0].dim() == _SERIES_AXES:
        return _laid_out(args[0], lies_last=False) + _unrolled_convolution(_as_pictures(args, 0), out)
    values, weight, groups = args[0], args[1], int(args[8])
    lies_last = _reads_channels_last(values, weight)
    copies = _laid_out(values, lies_last) + _laid_out(weight, lies_last)
    columns = _columns(values, out, weight, args[3:9], backward=False)
    if args[2] is not None and args[6] and values.dim() == _VOLUME_AXES:
        columns += math.prod(out.shape[2:]) * out.element_size()  # as many ones spread the bias
    if groups == 1 or _takes_groups(values, args[3:9]):
        return copies + columns
    return copies + max(columns + int(values.nbytes) // groups, int(out.nbytes))


def _unrolled_convolution_backward(args: Sequence[Any], out: Any) -> int:
    """The same, with copies of the output's gradient too; that of the bias may be summed in float32, before there is
    one of the weight. Volumes have the columns of one gradient after those of the other."""
    if args[1].dim() == _SERIES_AXES:
        return _laid_out(args[1], lies_last=False) + _unrolled_convolution_backward(_as_pictures(args, 1), out)
    gradient, values, weight, groups, (to_values, to_weight, to_bias) = *args[:3], int(args[9]), args[10]
    how, is_volume, is_transposed, is_dilated = args[4:10], values.dim() == _VOLUME_AXES, args[7], max(args[6]) > 1
    lies_last = _reads_channels_last(values, weight)
    of_gradient, of_values, of_weight = (_laid_out(one, lies_last) for one in (gradient, values, weight))
    columns = _columns(values, gradient, weight, how, backward=True)
    made_later = int(weight.nbytes) if to_weight else 0
    bias_sum = _bias_sum(gradient, as_it_lies=not (is_volume and is_transposed)) if to_bias and not is_dilated else 0
    if _takes_groups(values, how):
        first = columns + of_gradient + of_weight - made_later if to_values else 0
        second = (0 if _reads_as_it_lies(weight, how) else columns) + of_gradient + of_values if to_weight else 0
        return max(first, second, bias_sum - made_later)
    if is_volume and is_transposed:
        return columns + of_gradient + of_values + of_weight + bias_sum
    if not (to_weight or is_transposed or is_dilated):
        columns = 0
    if groups > 1:
        # A group's channels are copied as the whole lies, and again as the kernel reads it.
        channels = (int(values.nbytes) + int(gradient.nbytes)) // groups
        of_gradient = channels + int(gradient.nbytes) // groups * (lies_last != _suggests_channels_last(gradient))
        bias_sum, made_later = bias_sum // groups + channels, made_later // groups
    results = sum(int(tensor.nbytes) for tensor in _tensors(out)) if groups > 1 else 0
    return of_values + of_weight + max(columns + of_gradient, bias_sum - made_later, results)


def _bias_sum(gradient: Tensor, *, as_it_lies: bool) -> int:
    """What the sum over all axes but that of channels takes, of a gradient as it lies or of its copy in order."""
    with _disable_current_modes():
        in_order = torch.empty(gradient.shape, dtype=gradient.dtype, device="meta")
        result = torch.empty(gradient.shape[1], dtype=gradient.dtype, device="meta")
    axes = [axis for axis in range(gradient.dim()) if axis != 1]
    return ON_THE_CPU["sum.dim_IntList"]((gradient if as_it_lies else in_order, axes), result)


def _as_pictures(args: Sequence[Any], place: int) -> tuple[Any, ...]:
    """Arguments with series seen as pictures one row high; `place` is that of the values, which are copied before where
    they do not lie in order. (`view1d_as_2d` in `native/Convolution.cpp`.)"""

    def picture(series: Tensor) -> Tensor:
        batch, channels, length = series.shape
        across, along, step = (channels * length, length, 1) if series is args[place] else series.stride()
        strides = (across, along, step * length, step)
        return torch.empty_strided((batch, channels, 1, length), strides, dtype=series.dtype, device="meta")

    with _disable_current_modes():
        tensors = [picture(one) for one in args[: place + 2]]
    strides, padding, dilations, transposed, more_padding, *rest = args[place + 3 :]
    lists = ([1, *strides], [0, *padding], [1, *dilations], transposed, [0, *more_padding])
    return (*tensors, args[place + 2], *lists, *rest)


def _suggests_channels_last(tensor: Tensor) -> bool:
    return suggest_memory_format(tensor) in (torch.channels_last, torch.channels_last_3d)


def _reads_channels_last(values: Tensor, weight: Tensor) -> bool:
    """Whether a kernel that writes out patches reads them with channels last: never volumes.
    (`thnn_conv_use_channels_last` in `native/ConvUtils.h`.)"""
    return values.dim() < _VOLUME_AXES and (_suggests_channels_last(values) or _suggests_channels_last(weight))


def _laid_out(tensor: Tensor, lies_last: bool) -> int:
    """Bytes of the copy of what lies otherwise."""
    last = torch.channels_last_3d if tensor.dim() == _VOLUME_AXES else torch.channels_last
    wanted = last if lies_last else torch.contiguous_format
    return 0 if tensor.is_contiguous(memory_format=wanted) else int(tensor.numel()) * tensor.element_size()


def _reads_as_it_lies(weight: Tensor, how: Sequence[Any]) -> bool:
    """Whether a kernel of one position needs no columns."""
    strides, padding, *_ = how
    return math.prod(weight.shape[2:]) == 1 and max(strides) == 1 and not max(padding)


def _takes_groups(values: Tensor, how: Sequence[Any]) -> bool:
    """Whether all groups are computed at once: those of volumes."""
    _, _, dilations, transposed, *_ = how
    return values.dim() == _VOLUME_AXES and not transposed and max(dilations) == 1


def _columns(values: Tensor, result: Tensor, weight: Tensor, how: Sequence[Any], *, backward: bool) -> int:
    """Bytes of the columns of what is computed at once: of a whole batch, or one sample after another. A kernel of one
    position reads the values as they lie."""
    _, _, dilations, transposed, _, groups = how
    if _reads_as_it_lies(weight, how) and (backward or not transposed):
        volume = values.dim() == _VOLUME_AXES and backward
        return int(values.nbytes) if volume else 0
    one_by_one = (backward or values.dim() == _VOLUME_AXES) if transposed else max(dilations) > 1
    positions = math.prod((values if transposed else result).shape[2:]) * (1 if one_by_one else values.shape[0])
    at_once = int(groups) if _takes_groups(values, how) else 1
    return math.prod(weight.shape[1:]) * at_once * positions * values.element_size()


def _product_of(place: int) -> Rule:
    """oneDNN multiplies half precision where the processor can, and copies operands that lie neither row by row nor
    column by column, a weight expanded over a batch among them: `linear` on a transposed batch without gradients, as in
    a reentrant checkpoint or a validation, copies the weight once a sample. (`native/mkldnn/Matmul.cpp`.)"""

    def copies(args: Sequence[Any], _: Any) -> int:
        first, second = operands = args[place : place + 2]
        supported = ONEDNN_HALF.get(first.dtype)
        if supported is None or not supported() or math.prod(first.shape) * second.shape[-1] <= _FEWEST_PRODUCTS:
            return sum(_for_blas(part) // (part.shape[0] if part.dim() > _MATRIX_AXES else 1) for part in operands)
        copied = sum(int(part.numel()) * part.element_size() for part in operands if not _lies_in_order(part))
        turned = tuple(map(_is_turned, operands))
        sizes = (*(int(size) for size in first.shape), int(second.shape[-1]))
        return int(copied) + _scratch_of_product(first.dtype, sizes, turned, torch.get_num_threads())

    return copies


@functools.lru_cache(maxsize=4096)
def _scratch_of_product(dtype: torch.dtype, sizes: tuple[int, ...], turned: tuple[bool, ...], _threads: int) -> int:
    """What oneDNN packs operands and sums products in, asked of the kernel: it multiplies once and is watched.

    How it cuts a product depends on the processor, on each size, and on the number of threads. A long product is asked
    about with its longest sizes halved, as is one of many numbers: what a thread packs is bounded, and sums of all
    results, as processors without instructions for bfloat16 keep them, grow with these. Known error: 0.5 MB of a
    product of more than 2 ** 31 terms.

    Args:
        sizes: ([batch,] rows, inner, columns) of the product.
        turned: Whether each operand is the transpose of a contiguous one.
    """
    asked = list(sizes)
    while math.prod(asked) > min(_MOST_PRODUCTS, _MOST_NUMBERS * min(asked[-3:])):
        longest = asked.index(max(asked))
        asked[longest] = -(-asked[longest] // 2)
    *batch, rows, inner, columns = asked
    with _disable_current_modes(), _torch_c.DisableTorchFunction():
        first = _matrices(batch, rows, inner, dtype, turned[0])
        second = _matrices(batch, inner, columns, dtype, turned[1])
        found = _held_beside(lambda: first @ second, first, second)
    if found is None:
        return _FLOAT32 * math.prod(sizes) // sizes[-2]
    results, all_results = (math.prod(one) // one[-2] for one in (asked, sizes))
    return found + (_FLOAT32 * (all_results - results) if found >= _FLOAT32 * results else 0)


def _held_beside(operator: Callable[[], Any], *operands: Tensor) -> int | None:
    """Bytes that an operator holds beside its operands and results; None where a profiler of the user's runs already,
    and where there is no memory for them.

    A run of the same operator in a dry run's process is as in a trial: kernel, threads and allocator are the same.
    """
    trace = AllocatorTrace()
    try:
        trace.start(*operands)
        results = _tensors(operator())
    except RuntimeError:
        return None
    finally:
        trace.pause()
    storages = {one.untyped_storage().data_ptr(): one.untyped_storage().nbytes() for one in (*operands, *results)}
    return max(0, trace.stop().peak_bytes - sum(storages.values()))


def _matrices(batch: Sequence[int], rows: int, columns: int, dtype: torch.dtype, is_turned: bool) -> Tensor:
    """Zeros, in order or as the transpose of what lies in order."""
    shape = (*batch, columns, rows) if is_turned else (*batch, rows, columns)
    zeros = torch.zeros(shape, dtype=dtype, device="cpu")
    return zeros.transpose(-2, -1) if is_turned else zeros


def _lies_in_order(operand: Tensor) -> bool:
    """Whether a matrix, or each of a batch, is contiguous or the transpose of one that is."""
    return operand.is_contiguous() or operand.transpose(-2, -1).is_contiguous()


def _is_turned(operand: Tensor) -> bool:
    """Whether it is the transpose of what lies in order; a single row is that by its strides alone."""
    is_row_of_column = operand.shape[-2] == 1 < operand.shape[-1] and operand.stride(-2) == 1
    return _lies_in_order(operand) and (is_row_of_column or not operand.is_contiguous())


def _trilinear(args: Sequence[Any], out: Tensor) -> int:
    """What `bilinear` computes of one row after another, and in half precision what its products are packed in, which
    is asked of the kernel where there are few."""
    rows_bytes = ON_EVERY_DEVICE["_trilinear"](args, out)
    is_packed = args[0].dtype in ONEDNN_HALF and not is_emulated(args[0].dtype)
    products = math.prod(max(sizes) for sizes in zip(*spread_shapes(args), strict=True))
    if not is_packed or products > _MOST_PRODUCTS:
        return rows_bytes
    held = _scratch_of_samples(aten._trilinear.default, *_described(args), 0, 0, torch.get_num_threads())
    return rows_bytes if held is None else held


_FEWEST_PRODUCTS, _MOST_PRODUCTS, _MOST_PRODUCTS_OF_MANY = 16**3, 2**31, 2**27
_MOST_NUMBERS, _MOST_NUMBERS_OF_MANY = 2**26, 2**20
_FEWEST_SAMPLES, _TIMES_OF_UNSURE = 8, 8
"""Of one tensor that a kernel is asked about with: a prediction takes little time and memory, whatever it is about."""


def _eight_bit_step(args: Sequence[Any], _: Any) -> int:
    """bitsandbytes on the CPU widens both states and the gradient, and divides a root: five numbers an element, and
    the parameter when it is in half precision. (`bitsandbytes/backends/cpu/ops.py`, 0.50.)"""
    gradient, parameter = args[1], args[2]
    widened = 5 + (parameter.element_size() < _FLOAT32)
    return int(_FLOAT32 * widened * gradient.numel())


_AVX2_LANES = 8
_LANES = 16 if "AVX512" in torch.backends.cpu.get_cpu_capability() else _AVX2_LANES
_SERIES_AXES, _VOLUME_AXES, _OPERANDS = 3, 5, 3
_FEW_SAMPLES, _SMALL_KERNEL, _HEAVY = 16, 3, 4


def _gloo_copy(argument: int) -> Rule:
    """Gloo copies one tensor of a collective while it runs, freed on a thread of its own: a copy may outlive its
    collective by a moment and meet the next one's. (`c10d/ProcessGroupGloo.cpp`.)"""
    return lambda args, _: int(args[argument].nbytes)


_CPU: dict[str, Rule] = {
    **_BOTH,
    **ON_THE_CPU,
    "_linalg_eigh": _eigenvectors,
    "_allgather_base_": _gloo_copy(0),  # its output
    "_reduce_scatter_base_": _gloo_copy(1),  # its input
    "convolution": _convolution,
    "convolution_backward": _convolution_backward,
    "_trilinear": _trilinear,
    "mkldnn_rnn_layer": forward_scratch_bytes,
    "mkldnn_rnn_layer_backward": backward_scratch_bytes,
    "optimizer_update_8bit_blockwise": _eight_bit_step,
    **dict.fromkeys(_PRODUCTS, _product_of(0)),
    **dict.fromkeys(_PRODUCTS_ADDED, _product_of(1)),
}


class Workspaces:
    """What a Recorder asks for every operator, on one device; `unsure_bytes` is the largest unsure one so far."""

    def __init__(self, capability: Capability) -> None:
        self.capability = capability
        self.unsure_bytes = 0
        self.of_sparse: dict[str, None] = {}
        """Operators on sparse tensors that may hold more than is known."""
        self.of_solvers: dict[str, int] = {}
        """Operators of linear algebra on a GPU, and the most that LAPACK takes for one: what cuSOLVER asks for depends
        on card and version."""

    def __call__(self, operator: str, args: Sequence[Any], out: Any) -> int:
        if any(map(is_sparse, (*args, *(out if isinstance(out, tuple | list) else (out,))))):
            size_of_sparse = sparse_bytes(operator, args, out)
            is_low_on_a_gpu = bool(size_of_sparse) or operator == GROWS_ON_A_GPU
            if size_of_sparse is None or (self.capability is not None and is_low_on_a_gpu):
                self.of_sparse.setdefault(operator.partition(".")[0])
            return size_of_sparse or 0
        if self.capability is not None and operator in _CONVOLUTIONS:
            self.unsure_bytes = max(self.unsure_bytes, unsure_workspace_bytes(operator, args, out, self.capability))
        size = workspace_bytes(operator, args, out, self.capability)
        if self.capability is not None and operator in _SOLVED:
            self.of_solvers[operator] = max(
                self.of_solvers.get(operator, 0), workspace_bytes(operator, args, out, None)
            )
        return size + _evenly(args[0]) if operator == OF_NODES and self.capability is None else size


_SOLVED = {
    "_linalg_eigh", "_linalg_svd", "_linalg_solve_ex", "_linalg_slogdet", "_linalg_det", "_linalg_eigvals",
    "linalg_cholesky_ex", "linalg_eig", "linalg_eigvals", "linalg_householder_product", "linalg_inv_ex", "linalg_lstsq",
    "linalg_lu", "linalg_lu_factor_ex", "linalg_pinv.atol_rtol_tensor", "linalg_qr",
}  # fmt: skip
OF_NODES = "sum"
"""The operator whose workspace depends on what autograd computes with it."""
_SPREAD_EVENLY = ("MaxBackward1", "MinBackward1", "MedianBackward0", "NanmedianBackward0")


def _evenly(mask: Tensor) -> int:
    """The gradient of the largest of all numbers, and the like, goes to all that are as large. The CPU counts them
    beside the gradient that it has made; under a recorder autograd makes two more masks, and no gradient yet.
    (`evenly_distribute_backward` in `FunctionsManual.cpp`.)"""
    private: Any = torch._C
    node = private._current_autograd_node()
    if mask.dtype is not torch.bool or node is None or node.name() not in _SPREAD_EVENLY:
        return 0
    return int(mask.numel() * (node._input_metadata[0].dtype.itemsize - 2))


@contextlib.contextmanager
def eight_bit_on_fakes(wanted: bool = True) -> Iterator[None]:
    """Inside, 8-bit optimizers step on fake tensors; enter it before any fake mode.

    Their libraries are loaded, where installed, when `wanted`; else only what is loaded already is patched.
    """
    if is_installed() if wanted else "torchao.optim" in sys.modules:
        make_tables()
    if wanted and importlib.util.find_spec("bitsandbytes") is not None:
        with quiet_import():
            importlib.import_module("bitsandbytes.functional")
    functional = sys.modules.get("bitsandbytes.functional")
    if functional is None:
        yield
        return
    make: Any = functional.create_dynamic_map
    unset: Any = fake_tensor.unset_fake_temporarily

    def make_for_real(*args: Any, **options: Any) -> Any:
        with unset():
            return make(*args, **options)

    with replaced(functional, "create_dynamic_map", make_for_real):
        yield
