"""Which attention kernel CUDA takes for a call, by torch's own rules, and the call as that kernel allocates.

The rules are those of torch 2.13 (`native/transformers/cuda/sdp_utils.cpp`), for dense tensors and the kernels that
ship with torch: the first kernel in torch's order of priority that no rule refuses. Torch's switches (`sdpa_kernel`,
`enable_flash_sdp`, ...) are obeyed. cuDNN comes first on capability 9 and 10, as with cuDNN above 9.15; an older one
gives flash, which keeps the same tensors.

`flex_kernel` is torch's flex attention as Triton's kernel allocates: operands, result and a number for each row are
kept, and the backward pass holds one more number for each row (`_inductor/kernel/flex`). That kernel exists only where
`torch.compile` makes it; without, all scores are held, several times over, and the dry run says so and stops.

The math path is written out here because on fake tensors torch adds a mask out of place, which a real run does not.

Private parts of torch used here, all tested on its upgrade: `_get_sdp_priority_order`,
`_get_math_sdp_allow_fp16_bf16_reduction`, and the operators of each kernel.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.nn import functional

from kit.memory.record.fake_mode import kernel_ran

PRIORITY = ("flash", "efficient", "math", "cudnn")
"""Torch's order when nobody has set one."""

_BY_NUMBER = {0: "math", 1: "flash", 2: "efficient", 3: "cudnn"}
_HALF = (torch.float16, torch.bfloat16)
_NEWEST = (12, 1)
_LARGEST_HEAD = 256
_LARGEST_CUDNN_HEAD = 128
_LARGEST_CUDNN_SIZE = 65535

aten = torch.ops.aten
_private: Any = torch._C


@dataclass(frozen=True)
class Call:
    """One call of `scaled_dot_product_attention`: query, key and value of shape (batch, heads, length, head size)."""

    query: Tensor
    key: Tensor
    value: Tensor
    mask: Tensor | None
    dropout: float
    causal: bool
    scale: float | None
    grouped: bool
    capability: tuple[int, int]

    @property
    def head(self) -> int:
        return self.query.shape[-1]

    @property
    def is_half(self) -> bool:
        return self.query.dtype in _HALF

    @property
    def needs_gradient(self) -> bool:
        return torch.is_grad_enabled() and any(t.requires_grad for t in (self.query, self.key, self.value))


def choose_kernel(call: Call) -> tuple[str, dict[str, str]]:
    """The kernel CUDA takes, and why each one before it in the order was refused.

    Raises:
        RuntimeError: when every kernel is refused, as torch does.
    """
    order = tuple(_BY_NUMBER[number] for number in _private._get_sdp_priority_order() if number in _BY_NUMBER)
    if order == PRIORITY and call.capability[0] in (9, 10):
        order = ("cudnn", "flash", "efficient", "math")
    refused: dict[str, str] = {}
    for name in order:
        reason = refusal(name, call)
        if not reason:
            return name, refused
        refused[name] = reason
    reasons = "; ".join(f"{name}: {reason}" for name, reason in refused.items())
    raise RuntimeError(f"no attention kernel takes this call ({reasons}); allow the math kernel")


def chooses_alike(capability: tuple[int, int], call: Call, name: str, refused: Mapping[str, str]) -> bool:
    """Whether a card of another capability takes the same kernel for `call`, and refuses those before it alike."""
    if name == "flex":
        return capability >= _TRITON
    try:
        return choose_kernel(replace(call, capability=capability)) == (name, refused)
    except RuntimeError:
        return False


def refusal(name: str, call: Call) -> str:
    """Why kernel `name` cannot take `call`; empty when it can."""
    if not _ENABLED[name]():
        return "switched off"
    return next((reason for refused, reason in _CHECKS[name](call) if refused), "")


_ENABLED: dict[str, Callable[[], bool]] = {
    "math": torch.backends.cuda.math_sdp_enabled,
    "flash": torch.backends.cuda.flash_sdp_enabled,
    "efficient": torch.backends.cuda.mem_efficient_sdp_enabled,
    "cudnn": torch.backends.cuda.cudnn_sdp_enabled,
}


# -- the checks of each kernel in torch's order: whether it refuses a call, and the reason. A check may rely on those
# before it, as they are asked one by one

Checks = Iterator[tuple[bool, str]]


def _four_dimensions(call: Call) -> tuple[bool, str]:
    return not call.query.dim() == call.key.dim() == call.value.dim() == 4, "needs 4 dimensions"


def _type_among(call: Call, allowed: Sequence[torch.dtype]) -> tuple[bool, str]:
    dtype = call.query.dtype
    taken = dtype == call.key.dtype == call.value.dtype and dtype in allowed
    return not taken, f"does not take {str(dtype).removeprefix('torch.')}"


def _new_enough(call: Call) -> tuple[bool, str]:
    return not (8, 0) <= call.capability <= _NEWEST, "needs capability 8.0 to 12.1"


def _dense(call: Call) -> Checks:
    query, key, value = (tensor.shape[:2] for tensor in (call.query, call.key, call.value))
    yield not query[0] == key[0] == value[0], "needs one batch size"
    grouped = call.grouped and key[1] == value[1] and key[1] > 0 and query[1] % key[1] == 0
    yield not (query[1] == key[1] == value[1] or grouped), "needs one number of heads"
    yield not (call.query.shape[2] and call.key.shape[2]), "needs a length above 0"
    tensors = [call.query, call.key, call.value, *([] if call.mask is None else [call.mask])]
    yield any(tensor.stride(-1) != 1 for tensor in tensors), "needs a last stride of 1"


def _half_types(call: Call) -> tuple[torch.dtype, ...]:
    return _HALF if call.capability >= (8, 0) else _HALF[:1]


def _flash_checks(call: Call) -> Checks:
    yield _four_dimensions(call)
    yield call.mask is not None, "takes no mask"
    same = call.head == call.key.shape[-1] == call.value.shape[-1]
    yield not same or call.head > _LARGEST_HEAD, f"needs one head size up to {_LARGEST_HEAD}"
    yield _new_enough(call)
    # Cards with little shared memory cannot go backward through large heads.
    small = (8, 6) <= call.capability <= (8, 9) or (12, 0) <= call.capability <= (12, 1)
    fits = call.head <= 192 or (call.dropout == 0 and call.head > 224)
    yield small and call.needs_gradient and not fits, f"cannot train head size {call.head} on this card"
    square = call.query.shape[-2] == call.key.shape[-2]
    yield call.causal and not square, "needs equal lengths when causal"
    yield _type_among(call, _half_types(call))
    yield from _dense(call)


def _efficient_checks(call: Call) -> Checks:
    yield not (5, 0) <= call.capability <= _NEWEST, "needs capability 5.0 to 12.1"
    yield _four_dimensions(call)
    # A matrix product of this type wants a head size to be a multiple of so many elements.
    ampere = call.capability >= (8, 0)
    tensor_cores = ampere or (call.capability >= (7, 0) and call.is_half)
    unit = max(4 if ampere else 1, 8 if call.is_half else 4) if tensor_cores else 1
    heads = (call.head, call.key.shape[-1], call.value.shape[-1])
    aligned = heads[0] == heads[1] and all(head > 0 and head % unit == 0 for head in heads)
    yield not aligned, f"needs a head size that is a multiple of {unit}"
    offsets = (tensor.storage_offset() for tensor in (call.query, call.key, call.value))
    yield ampere and any(offset % unit for offset in offsets), "needs aligned storage"
    yield from _dense(call)
    yield _type_among(call, (*_half_types(call), torch.float32))


def _cudnn_checks(call: Call) -> Checks:
    yield _four_dimensions(call)
    strict = torch.are_deterministic_algorithms_enabled() and not torch.is_deterministic_algorithms_warn_only_enabled()
    yield strict, "is not deterministic"
    yield _type_among(call, _half_types(call))
    yield _new_enough(call)
    yield not (call.dropout * 16).is_integer(), "needs a dropout that is a multiple of 1/16"
    yield from _dense(call)
    (batch, heads, length, head), value_head = call.query.shape, call.value.shape[-1]
    yield max(batch, heads) > _LARGEST_CUDNN_SIZE, f"takes no batch or heads above {_LARGEST_CUDNN_SIZE}"
    wide = call.capability[0] in (9, 10) and (head, value_head) == (192, 128)
    too_large = not wide and max(head, value_head) > _LARGEST_CUDNN_HEAD
    yield too_large, f"needs a head size up to {_LARGEST_CUDNN_HEAD}"
    yield bool(head % 8 or value_head % 8), "needs a head size that is a multiple of 8"
    yield call.key.shape[2] == 1 or (call.dropout > 0 and length == 1), "needs more than one position"


_CHECKS: dict[str, Callable[[Call], Checks]] = {
    "math": lambda _: iter(()), "flash": _flash_checks, "efficient": _efficient_checks, "cudnn": _cudnn_checks,
}  # fmt: skip


# -- the kernels, as they allocate


def _flash(call: Call) -> Tensor:
    scale = call.scale if call.scale is not None else 1 / math.sqrt(call.head)
    missing = -call.head % 8  # to a head size that is a multiple of 8, a copy when it is none
    query, key, value = (
        functional.pad(tensor, (0, missing)) if missing else tensor for tensor in (call.query, call.key, call.value)
    )
    output: Tensor = aten._scaled_dot_product_flash_attention(
        query, key, value, call.dropout, call.causal, False, scale=scale
    )[0]
    return output[..., : call.head] if missing else output


def _efficient(call: Call) -> Tensor:
    output: Tensor = aten._scaled_dot_product_efficient_attention(
        call.query, *_repeated(call), _bias(call), call.needs_gradient, call.dropout, call.causal, scale=call.scale
    )[0]
    return output


def _cudnn(call: Call) -> Tensor:
    mask = _additive(call.mask, call.query.dtype)
    output: Tensor = aten._scaled_dot_product_cudnn_attention(
        call.query, call.key, call.value, mask, call.needs_gradient, call.dropout, call.causal, False, scale=call.scale
    )[0]
    return output


def _repeated(call: Call) -> tuple[Tensor, Tensor]:
    """Key and value once for each head of the query: the fake kernel, unlike the real one, does not group heads."""
    groups = call.query.shape[1] // call.key.shape[1]
    if groups == 1:
        return call.key, call.value
    batch, heads, length, _ = call.key.shape
    key, value = (
        tensor.unsqueeze(2).expand(batch, heads, groups, length, tensor.shape[-1]).flatten(1, 2)
        for tensor in (call.key, call.value)
    )
    return key, value


def _additive(mask: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    if mask is None or mask.dtype != torch.bool:
        return mask
    zero, never = (torch.full((), value, dtype=dtype, device=mask.device) for value in (0.0, -math.inf))
    return torch.where(mask.logical_not(), never, zero)


def _bias(call: Call) -> Tensor | None:
    """The mask as a bias over (batch, heads, length, key length), its rows padded to multiples of 8."""
    bias = _additive(call.mask, call.query.dtype)
    if bias is None:
        return None
    if any(bias.stride(axis) % 8 for axis in range(bias.dim() - 1)) or bias.stride(-1) != 1:
        length = bias.shape[-1]
        bias = functional.pad(bias, (0, 8 - length % 8))[..., :length]
    return bias.expand(*call.query.shape[:3], call.key.shape[2])


def _math(call: Call) -> Tensor:
    """Scores are scaled by the root of the scale on both sides, in float32 unless half reductions are allowed."""
    wide = call.is_half and not _private._get_math_sdp_allow_fp16_bf16_reduction()
    query, key, value = (t.float() if wide else t for t in (call.query, call.key, call.value))
    if call.grouped:
        key, value = (t.repeat_interleave(call.query.shape[-3] // t.shape[-3], -3) for t in (key, value))
    root = math.sqrt(abs(call.scale if call.scale is not None else 1 / math.sqrt(call.head)))
    scores = torch.matmul(query * root, key.transpose(-2, -1) * root)
    mask = call.mask
    if call.causal:
        mask = torch.ones((query.shape[-2], call.key.shape[-2]), dtype=torch.bool, device=query.device).tril()
    mask = _additive(mask, query.dtype)
    if mask is not None:
        scores = scores.add_(mask)
    weights = aten._safe_softmax(scores, -1)
    if call.dropout:
        weights = functional.dropout(weights, call.dropout)
    return torch.matmul(weights, value).to(call.query.dtype)


_RUN: dict[str, Callable[[Call], Tensor]] = {"flash": _flash, "efficient": _efficient, "cudnn": _cudnn, "math": _math}


def attention_kernel(capability: tuple[int, int], ran: Callable[[str, dict[str, str], Call], None]) -> Any:
    """What to register for `scaled_dot_product_attention`; `ran` is told of every call."""

    def kernel(
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        *,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Tensor:
        call = Call(query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa, capability)
        name, refused = choose_kernel(call)
        ran(name, refused, call)
        return _RUN[name](call)

    return kernel


_TRITON = (7, 5)


class _Flex(Function):
    """The fused kernel, by what it allocates."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        out = query.new_empty((*query.shape[:-1], value.shape[-1]))
        rows = query.new_empty(query.shape[:-1], dtype=torch.float32)
        ctx.save_for_backward(query, key, value, out, rows)
        kernel_ran("_scaled_dot_product_flex_attention", (query, key, value), (out, rows))
        return out, rows, rows.new_empty((0,))

    @staticmethod
    def backward(ctx: Any, gradient: Tensor, *_: Tensor) -> tuple[Tensor, ...]:
        query, key, value, _, rows = ctx.saved_tensors
        delta = torch.empty_like(rows)
        gradients = [torch.empty_like(query)]
        for one in (key, value):
            whole = one.new_empty((query.shape[0], *one.shape[1:]))
            gradients.append(whole if whole.shape == one.shape else whole.sum(0, keepdim=True))
        del delta
        kernel_ran("_scaled_dot_product_flex_attention_backward", (gradient, query, key, value), tuple(gradients))
        return tuple(gradients)


def flex_kernel(
    capability: tuple[int, int], is_compiled: Callable[[], bool], ran: Callable[[str, dict[str, str], Call], None]
) -> Any:
    """What to call in place of the operator `flex_attention`; `is_compiled` says whether `torch.compile` was left out.

    Raises, when called:
        RuntimeError: for a card or a call for which there is no fused kernel.
    """

    def kernel(
        query: Tensor, key: Tensor, value: Tensor, _score: Any, _blocks: Any, scale: float, *_: Any, **__: Any
    ) -> Any:  # fmt: skip
        if capability < _TRITON:
            here = ".".join(map(str, capability))
            raise RuntimeError(f"flex_attention needs a card of compute capability 7.5, and this one has {here}")
        if not is_compiled():
            raise RuntimeError("flex_attention holds all scores unless it is compiled; wrap it in torch.compile")
        ran("flex", {}, Call(query, key, value, None, 0.0, False, scale, False, capability))
        function: Any = _Flex
        return function.apply(query, key, value)

    return kernel
