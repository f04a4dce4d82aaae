"""What one call of an operator does: FLOPs, bytes read and written, and of which kind it is; pure arithmetic on shapes.

FLOPs count a multiplication and an addition as two, as `torch.utils.flop_counter` does, of products, convolutions and
attention; everything else counts none, since memory bounds it. Bytes are those of the tensors named by the call, each
once: what a kernel reads again, or keeps in a cache from the call before, is not known here. Gathers read what they
return, not the table they read from. A view moves nothing.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, get_args

from kit.memory.replay.calls import OperatorCall, TensorSpec

Kind = Literal[
    "matmul", "convolution", "attention", "recurrent", "normalization", "elementwise", "reduction", "indexing", "copy",
    "communication", "view",
]  # fmt: skip
KINDS: tuple[Kind, ...] = get_args(Kind)


@dataclass(frozen=True, slots=True)
class Work:
    """Of one call."""

    kind: Kind
    flops: int
    read_bytes: int
    written_bytes: int

    @property
    def bytes(self) -> int:
        return self.read_bytes + self.written_bytes


def work_of(call: OperatorCall) -> Work:
    """What a call does."""
    name = call.name.removesuffix("_")
    if call.operator.startswith(("c10d::", "_c10d_functional::", "c10d_functional::")):
        return Work("communication", 0, 0, 0)
    if call.name in _VIEWS or call.operator.startswith("prim::"):
        return Work("view", 0, 0, 0)
    read, written = (sum(spec.bytes for spec in specs) for specs in (call.inputs, call.outputs))
    if name in _GATHERS:
        table = call.inputs[0].bytes if call.inputs else 0
        read += written - table
    if name == "all_gather_copy_in":  # a rank's shards, to their place in what is gathered, which comes last
        read = written = sum(spec.bytes for spec in call.inputs[:-1])
    kind = _kind(name)
    formula = next((formula for start, formula in _FLOPS if name.startswith(start)), None)
    try:
        flops = 0 if formula is None else int(formula(call))
    except (IndexError, TypeError, ValueError, AttributeError):  # an overload of other arguments
        flops = 0
    return Work(kind, flops, max(0, read), written)


_VIEWS = frozenset((
    "view", "_unsafe_view", "t", "transpose", "permute", "expand", "slice", "select", "unsqueeze", "squeeze",
    "alias", "as_strided", "split", "split_with_sizes", "chunk", "unbind", "detach", "detach_", "empty",
    "empty_like", "new_empty", "empty_strided", "new_empty_strided", "unfold", "diagonal", "reshape", "lift_fresh",
    "squeeze_", "unsqueeze_", "transpose_", "t_", "view_as_real", "view_as_complex", "real", "imag",
    "_reshape_alias", "resize_", "set_", "lift", "swapaxes", "movedim", "numpy_T",
    "narrow", "result_type", "_record_function_enter_new", "_record_function_exit", "is_same_size",
))  # fmt: skip
_GATHERS = frozenset(("embedding", "index", "index_select", "gather", "take", "_embedding_bag"))
_KIND_OF: tuple[tuple[Kind, tuple[str, ...]], ...] = (
    ("attention", ("_scaled_dot_product", "_flash_attention", "_efficient_attention", "_cudnn_attention")),
    ("convolution", ("convolution", "_slow_conv", "slow_conv", "mkldnn_convolution", "_convolution", "cudnn_conv")),
    ("recurrent", ("mkldnn_rnn", "_cudnn_rnn", "_thnn_fused", "lstm", "gru")),
    ("matmul", ("mm", "addmm", "bmm", "baddbmm", "addbmm", "mv", "addmv", "dot", "linear", "matmul",
                "_scaled_mm", "_grouped_mm", "_scaled_grouped_mm")),
    ("normalization", (
        "native_layer_norm", "native_group_norm", "native_batch_norm", "_native_batch_norm", "cudnn_batch_norm",
        "batch_norm", "_batch_norm", "_fused_rms_norm", "_softmax", "_log_softmax", "_safe_softmax", "renorm",
    )),
    ("indexing", (
        "embedding", "index", "gather", "scatter", "take", "_embedding_bag", "masked_select", "nonzero", "sort", "topk",
        "_unique", "unique", "roll", "flip", "tril", "triu", "searchsorted", "bincount", "argsort", "one_hot",
        "slice_backward", "select_backward", "slice_scatter", "select_scatter",
    )),
    ("copy", (
        "copy", "_to_copy", "clone", "cat", "stack", "zero", "zeros", "ones", "full", "fill", "constant_pad",
        "new_zeros", "new_full", "new_ones", "zeros_like", "ones_like", "full_like", "repeat", "contiguous",
        "_foreach_copy", "_foreach_zero", "arange", "scalar_tensor", "_pack_padded", "_pad_packed",
        "pixel_shuffle", "im2col", "col2im", "all_gather_copy_in", "split_with_sizes_copy", "chunk_cat",
    )),
    ("reduction", (
        "sum", "mean", "amax", "amin", "max", "min", "argmax", "argmin", "var", "std", "norm", "linalg_vector_norm",
        "cumsum", "cumprod", "logsumexp", "all", "any", "prod", "_foreach_norm", "nll_loss", "avg_pool", "max_pool",
        "adaptive_avg_pool", "_adaptive_avg_pool", "adaptive_max_pool", "mse_loss", "binary_cross_entropy", "upsample",
        "_ctc_loss", "grid_sampler",
    )),
)  # fmt: skip


def _kind(name: str) -> Kind:
    for kind, starts in _KIND_OF:
        for start in starts:
            rest = name.removeprefix(start)
            if (
                rest is not name
                and name.startswith(start)
                and (not rest or rest[0] == "_" or rest[0].isdigit() or len(start) > 8)
            ):
                return kind
    return "elementwise"


# -- FLOPs


def _product(call: OperatorCall) -> int:
    left, right = call.inputs[-2:]
    return 2 * left.elements * right.shape[-1]


def _linear(call: OperatorCall) -> int:
    return 2 * call.inputs[0].elements * call.inputs[1].shape[0]


def _vector(call: OperatorCall) -> int:
    return 2 * max(spec.elements for spec in call.inputs)


def _convolved(source: TensorSpec, weight: TensorSpec, out: TensorSpec, transposed: bool) -> int:
    # Each element of the smaller side meets a kernel of the channels of its group.
    side = source if transposed else out
    return 2 * side.elements * math.prod(weight.shape[1:])


def _convolution(call: OperatorCall) -> int:
    return _convolved(call.inputs[0], call.inputs[1], call.outputs[0], bool(call.arguments[6]))


def _convolution_backward(call: OperatorCall) -> int:
    grad, source, weight = call.inputs[:3]
    once = _convolved(source, weight, grad, bool(call.arguments[7]))
    return once * sum(map(bool, call.arguments[10][:2]))


def _attention(call: OperatorCall) -> int:
    query, key, value = call.inputs[:3]
    whole = 2 * math.prod(query.shape[:-1]) * key.shape[-2] * (query.shape[-1] + value.shape[-1])
    return whole // (2 if _is_causal(call) else 1)


def _attention_backward(call: OperatorCall) -> int:
    """Five products where forward has two."""
    query, key, value = call.inputs[1:4]
    whole = 2 * math.prod(query.shape[:-1]) * key.shape[-2] * (3 * query.shape[-1] + 2 * value.shape[-1])
    return whole // (2 if _is_causal(call) else 1)


def _is_causal(call: OperatorCall) -> bool:
    """Flags of attention kernels are bool: dropout is a float, and of the other flag (a debug mask) nobody asks."""
    named = dict(call.named)
    if "is_causal" in named:
        return bool(named["is_causal"])
    place = _CAUSAL_AT.get(call.name)
    return bool(call.arguments[place]) if place is not None and len(call.arguments) > place else False


_CAUSAL_AT = {
    "_scaled_dot_product_flash_attention": 4, "_scaled_dot_product_efficient_attention": 6,
    "_scaled_dot_product_cudnn_attention": 6, "_scaled_dot_product_flash_attention_for_cpu": 4,
    "_scaled_dot_product_flash_attention_backward": 11, "_scaled_dot_product_efficient_attention_backward": 11,
    "_scaled_dot_product_cudnn_attention_backward": 14, "_scaled_dot_product_flash_attention_for_cpu_backward": 7,
}  # fmt: skip


def _recurrent(call: OperatorCall) -> int:
    """Of each step of a sequence: the input and the state meet the weights of all gates."""
    source, weight, hidden = call.inputs[:3]
    return 2 * math.prod(source.shape[:-1]) * (weight.elements + hidden.elements)


def _cudnn(call: OperatorCall) -> int:
    """Of each step of each sequence, in all layers: it meets every matrix of weights."""
    source, weights = call.arguments[:2]
    matrices = sum(spec.elements for spec in weights if len(spec.shape) > 1)
    return int(2 * math.prod(source.shape[:-1]) * matrices)


def _first_product(call: OperatorCall) -> int:
    """Of products whose scales and ends of groups come after the matrices."""
    left, right = call.inputs[:2]
    return 2 * left.elements * right.shape[-1]


_FLOPS: tuple[tuple[str, Callable[[OperatorCall], int]], ...] = (
    ("_scaled_dot_product_fused_attention_overrideable_backward", _attention_backward),
    ("_scaled_dot_product_flash_attention_for_cpu_backward", _attention_backward),
    ("_scaled_dot_product_flash_attention_backward", _attention_backward),
    ("_scaled_dot_product_efficient_attention_backward", _attention_backward),
    ("_scaled_dot_product_cudnn_attention_backward", _attention_backward),
    ("_scaled_dot_product_flex_attention_backward", _attention_backward),
    ("_scaled_dot_product", _attention),
    ("convolution_backward", _convolution_backward),
    ("convolution", _convolution),
    ("mkldnn_rnn_layer_backward", lambda call: 2 * _recurrent(call)),
    ("mkldnn_rnn_layer", _recurrent),
    ("_cudnn_rnn_backward", lambda call: 2 * _cudnn(call)),
    ("_cudnn_rnn", _cudnn),
    ("_grouped_mm", _first_product), ("_scaled_mm", _first_product), ("_scaled_grouped_mm", _first_product),
    ("linear", _linear),
    ("addmv", _vector), ("mv", _vector), ("dot", _vector), ("vdot", _vector),
    ("mm", _product), ("addmm", _product), ("bmm", _product), ("baddbmm", _product), ("addbmm", _product),
)  # fmt: skip
