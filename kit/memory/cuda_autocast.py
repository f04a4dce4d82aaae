"""Autocast as CUDA does it, for fake tensors that say they are on the CPU.

Which operators autocast casts, and to what, differs by device: torch's CPU lists leave `layer_norm`, `softmax` or `sum`
in half precision, CUDA's do not, and that decides how many bytes are kept for the backward pass. The lists here are
CUDA's, from torch 2.13 (`ATen/autocast_mode.h`, `autocast_mode.cpp`); a test compares them with the header and with the
dispatcher of the torch that is installed. An operator that only the CPU's lists name is passed through.

Casts of weights to half precision are kept until the outermost autocast region ends, as torch's own cache does.

Private parts of torch used here, all tested on its upgrade: `_ExcludeDispatchKeyGuard`, `DispatchKeySet` and
`_dispatch_get_registrations_for_dispatch_key`.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils._pytree import tree_leaves, tree_map_only

from kit.memory.patches import replaced


def _words(text: str) -> list[str]:
    return text.split()


LOWER_PRECISION = _words("""_convolution.deprecated _convolution conv1d conv2d conv3d conv_tbc conv_transpose1d
conv_transpose2d.input conv_transpose3d.input convolution prelu addmm addmv addr matmul einsum mm mv linalg_vecdot
linear addbmm baddbmm bmm chain_matmul linalg_multi_dot _thnn_fused_lstm_cell _thnn_fused_gru_cell lstm_cell gru_cell
rnn_tanh_cell rnn_relu_cell _scaled_dot_product_flash_attention scaled_dot_product_attention cudnn_convolution
cudnn_convolution_transpose""")
"""Floating arguments are cast to the autocast type."""

FLOAT32 = _words("""acos asin cosh erfinv exp expm1 log log10 log2 log1p reciprocal rsqrt sinh tan pow.Tensor_Scalar
pow.Tensor_Tensor pow.Scalar softplus layer_norm native_layer_norm rms_norm group_norm frobenius_norm.dim nuclear_norm
nuclear_norm.dim cosine_similarity poisson_nll_loss cosine_embedding_loss nll_loss nll_loss2d hinge_embedding_loss
kl_div l1_loss smooth_l1_loss huber_loss mse_loss margin_ranking_loss multilabel_margin_loss soft_margin_loss
triplet_margin_loss multi_margin_loss binary_cross_entropy_with_logits dist pdist cdist renorm logsumexp
upsample_nearest1d _upsample_nearest_exact1d upsample_nearest2d _upsample_nearest_exact2d upsample_nearest3d
_upsample_nearest_exact3d upsample_linear1d upsample_bilinear2d _upsample_bilinear2d_aa upsample_trilinear3d
upsample_bicubic2d _upsample_bicubic2d_aa""")
"""Floating arguments are cast to float32."""

FLOAT32_RESULT = _words("""prod prod.dim_int softmax.int log_softmax.int cumprod cumsum linalg_vector_norm
linalg_matrix_norm linalg_matrix_norm.str_ord sum sum.dim_IntList""")
"""The result is float32 (argument `dtype`) unless a type is asked for; the arguments stay."""

FLOAT32_NORM = {"norm.Scalar": "norm.ScalarOpt_dtype", "norm.ScalarOpt_dim": "norm.ScalarOpt_dim_dtype"}
"""Replaced by the overload that takes the result's type."""

PROMOTE = _words("addcdiv addcmul atan2 bilinear cross dot vdot grid_sampler index_put tensordot scatter_add")
"""Floating arguments are cast to the widest type among them."""

REFUSED = ["binary_cross_entropy"]
"""Raises under autocast on a GPU."""

# The CPU's own kernels cast these the same way and share torch's cache of casts, which Python cannot reach.
_SAME_ON_CPU = frozenset(
    _words("""_convolution.deprecated conv1d conv2d conv3d conv_tbc conv_transpose1d conv_transpose2d.input
    conv_transpose3d.input prelu addmm matmul mm linalg_vecdot linear addbmm baddbmm bmm
    scaled_dot_product_attention""")
)
_KEY = "AutocastCPU"
_KEYS = torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastCPU)
_WIDE = torch.float64


@contextmanager
def cuda_autocast(library: Any) -> Iterator[None]:
    """Register CUDA's autocast lists for the CPU's key in `library` (of torch.library), and keep casts of weights."""
    casts = _Casts()
    for name, kernel in _kernels(casts).items():
        library.impl(name, kernel, _KEY)
    clear = torch.clear_autocast_cache

    def clear_both() -> None:
        casts.clear()
        clear()

    with replaced(torch, "clear_autocast_cache", clear_both):
        yield


def registered(key: str) -> set[str]:
    """Operators of aten with a kernel of their own for dispatch key `key`, such as `softmax.int`."""
    names = torch._C._dispatch_get_registrations_for_dispatch_key(key)
    return {name.removeprefix("aten::") for name in names if name.startswith("aten::")}


def _kernels(casts: _Casts) -> dict[str, Callable[..., Any]]:
    on_cuda = registered("AutocastCUDA")
    listed: dict[str, Callable[..., Any]] = {
        **{name: _lower_precision(_operator(name), casts) for name in LOWER_PRECISION if name not in _SAME_ON_CPU},
        **{name: _float32(_operator(name)) for name in FLOAT32},
        **{name: _float32_result(_operator(name)) for name in FLOAT32_RESULT},
        **{name: _float32_norm(_operator(name), _operator(typed)) for name, typed in FLOAT32_NORM.items()},
        **{name: _promote(_operator(name)) for name in PROMOTE},
        **dict.fromkeys(REFUSED, _refuse),
    }
    passed_through = dict.fromkeys(registered(_KEY) - on_cuda, torch.library.fallthrough_kernel)
    return passed_through | {name: kernel for name, kernel in listed.items() if name in on_cuda}


def _operator(name: str) -> Any:
    packet, _, overload = name.partition(".")
    return getattr(getattr(torch.ops.aten, packet), overload or "default")


def _eligible(value: torch.Tensor) -> bool:
    return value.device.type == "cpu" and value.is_floating_point() and value.dtype != _WIDE


def _cast_all(arguments: Any, dtype: torch.dtype) -> Any:
    def cast(value: torch.Tensor) -> torch.Tensor:
        return value.to(dtype) if _eligible(value) else value

    return tree_map_only(torch.Tensor, cast, arguments)


def _lower_precision(operator: Any, casts: _Casts) -> Callable[..., Any]:
    def kernel(*args: Any, **keywords: Any) -> Any:
        with torch._C._ExcludeDispatchKeyGuard(_KEYS):
            dtype = torch.get_autocast_dtype("cpu")
            args, keywords = tree_map_only(torch.Tensor, lambda value: casts.cast(value, dtype), (args, keywords))
            return operator(*args, **keywords)

    return kernel


def _float32(operator: Any) -> Callable[..., Any]:
    def kernel(*args: Any, **keywords: Any) -> Any:
        with torch._C._ExcludeDispatchKeyGuard(_KEYS):
            args, keywords = _cast_all((args, keywords), torch.float32)
            return operator(*args, **keywords)

    return kernel


def _float32_result(operator: Any) -> Callable[..., Any]:
    names = [argument.name for argument in operator._schema.arguments]
    place = names.index("dtype")

    def kernel(*args: Any, **keywords: Any) -> Any:
        with torch._C._ExcludeDispatchKeyGuard(_KEYS):
            given = keywords.get("dtype", args[place] if len(args) > place else None)
            if given is None and _eligible(args[0]):
                args = args[:place]
                keywords = {**keywords, "dtype": torch.float32}
            return operator(*args, **keywords)

    return kernel


def _float32_norm(operator: Any, typed: Any) -> Callable[..., Any]:
    defaults = [argument.default_value for argument in operator._schema.arguments]

    def kernel(*args: Any, **keywords: Any) -> Any:
        with torch._C._ExcludeDispatchKeyGuard(_KEYS):
            dtype = torch.float32 if _eligible(args[0]) else args[0].dtype
            return typed(*args, *defaults[len(args) :], **keywords, dtype=dtype)

    return kernel


def _promote(operator: Any) -> Callable[..., Any]:
    def kernel(*args: Any, **keywords: Any) -> Any:
        with torch._C._ExcludeDispatchKeyGuard(_KEYS):
            tensors = [leaf for leaf in tree_leaves((args, keywords)) if isinstance(leaf, torch.Tensor)]
            wide = any(_eligible(tensor) and tensor.dtype == torch.float32 for tensor in tensors)
            dtype = torch.float32 if wide else torch.get_autocast_dtype("cpu")
            args, keywords = _cast_all((args, keywords), dtype)
            return operator(*args, **keywords)

    return kernel


def _refuse(*_: Any, **__: Any) -> Any:
    raise RuntimeError(
        "binary_cross_entropy is refused under autocast on a GPU; leave out the sigmoid before it and use "
        "binary_cross_entropy_with_logits"
    )


class _Casts:
    """Casts of weights to the autocast type, each kept until the outermost region ends."""

    def __init__(self) -> None:
        self._kept: dict[int, tuple[weakref.ref[torch.Tensor], torch.Tensor]] = {}

    def clear(self) -> None:
        self._kept.clear()

    def cast(self, value: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        if not _eligible(value) or value.dtype == dtype:
            return value
        is_weight = value.dtype == torch.float32 and value.requires_grad and value.is_leaf and not value._is_view()
        if not (is_weight and torch.is_autocast_cache_enabled()):
            return value.to(dtype)
        kept = self._kept.get(id(value))
        if kept is None or kept[0]() is not value:
            kept = self._kept[id(value)] = (weakref.ref(value), value.to(dtype))
        return kept[1]
