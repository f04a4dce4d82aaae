"""CUDA emulation: fake tensors on the CPU that allocate what the same step would allocate on a given GPU.

A build of torch without CUDA cannot run a backward pass on fake `cuda` tensors. So a dry run takes fake `cpu` tensors,
and inside `cuda_emulation` torch makes the choices it would make on a GPU. Whatever was chosen with a reason is in
`Emulation.notes`. What differs from the CPU:

- which operators autocast casts, and to what: the CPU's lists leave `layer_norm`, `softmax` or `sum` in half precision,
  CUDA's do not. The lists here are those of torch 2.13 (`ATen/autocast_mode.h`, `autocast_mode.cpp`); a test compares
  them with the header and with the dispatcher of the torch that is installed. An operator that only the CPU's lists
  name is passed through. Casts of weights are kept until the outermost autocast region ends, as in torch's own cache;
- which kernel computes attention (`kit.memory.record.attention`);
- `dropout` keeps a mask of one byte an element (the CPU keeps one of the input's type);
- `softmax` and `log_softmax` of float16 into float32 read it directly (other types are converted first);
- `rms_norm` keeps one number a row;
- `LSTM`, `GRU` and `RNN` run in cuDNN, which keeps a reserve for the backward pass. Its size cannot be asked without a
  GPU: the rule here counts what the backward pass needs (`_KEPT`), and every use of it is noted as an estimate;
- optimizers go over all parameters at once (foreach), and a loss scaler always steps.

What is replaced is torch's dispatcher, for the whole process and all threads; leaving the block restores all of it.
Blocks do not nest. The block is for dry runs only: on real tensors these kernels return uninitialised memory.

Private parts of torch used here, all tested on its upgrade: `Library._destroy`, `GradScaler._maybe_opt_step`,
`_get_foreach_kernels_supported_devices`, `_foreach_supported_types`, `_ExcludeDispatchKeyGuard`, `DispatchKeySet` and
`_dispatch_get_registrations_for_dispatch_key`.
"""

from __future__ import annotations

import warnings
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.amp.grad_scaler import GradScaler
from torch.autograd import Function
from torch.nn.attention import flex_attention, sdpa_kernel
from torch.optim import optimizer as optimizers
from torch.utils import _foreach_utils as foreach
from torch.utils._pytree import tree_leaves, tree_map_only

from kit.confinement.stand_ins import replaced
from kit.memory.record.attention import Call, attention_kernel, chooses_alike, flex_kernel
from kit.memory.record.fake_mode import kernel_ran
from kit.memory.replay.cards import CARDS
from kit.train.sequences import preferred_kernels

_installed: list[Emulation] = []
_library: Any = torch.library.Library


class Emulation:
    """What one emulated run chose: `attention` counts calls by kernel; `notes` holds sentences.

    `capabilities` are those of all known cards, of which every call so far has chosen alike.
    """

    def __init__(self) -> None:
        self.attention: Counter[str] = Counter()
        self.capabilities = {card.capability for card in CARDS}
        self._reasons: dict[str, dict[str, str]] = {}
        self._estimates: dict[str, None] = {}

    @property
    def notes(self) -> list[str]:
        """Which attention kernels ran and why not those before them, and what was estimated."""
        ran = []
        for name, count in self.attention.items():
            reasons = "; not ".join(f"{other}: {why}" for other, why in self._reasons[name].items())
            ran.append(f"attention: {name} × {count}" + (f" (not {reasons})" if reasons else ""))
        return [*ran, *self._estimates]

    def ran(self, name: str, refused: dict[str, str], call: Call) -> None:
        """Count a call of attention."""
        self.attention[name] += 1
        self.capabilities = {one for one in self.capabilities if chooses_alike(one, call, name, refused)}
        self._reasons.setdefault(name, refused)

    def estimated(self, sentence: str) -> None:
        """Keep a sentence about a size that is not known exactly."""
        self._estimates[sentence] = None


@contextmanager
def cuda_emulation(
    capability: tuple[int, int], attention: str = "auto", is_compiled: Callable[[], bool] = bool, for_real: bool = False
) -> Iterator[Emulation]:
    """Inside, fake `cpu` tensors allocate as on a GPU of `capability`, such as (9, 0).

    `attention` is the kernel to prefer, as in `levers.attention`; `auto` leaves torch's switches as they are.
    `is_compiled` says whether what calls would be compiled by `torch.compile`. `for_real` is for real tensors:
    attention, recurrent layers and other kernels that only a GPU has stay those of the CPU.

    Raises:
        RuntimeError: when the block is nested in another.
    """
    if _installed:
        raise RuntimeError("CUDA is being emulated already in this process; leave that block first")
    emulation = Emulation()
    library: Any = _library("aten", "IMPL")
    _installed.append(emulation)
    with ExitStack() as undo:
        undo.callback(_installed.clear)
        undo.callback(library._destroy)
        with warnings.catch_warnings():
            # Torch warns of each kernel that is replaced, which is what this is for.
            warnings.filterwarnings("ignore", message=r"(?s).*[Oo]verriding a previously registered kernel")
            attention_of = attention_kernel(capability, emulation.ran)
            replacing = {"scaled_dot_product_attention": attention_of, **kernels(emulation.estimated)}
            for name, kernel in ({"dropout": _dropout} if for_real else replacing).items():
                # Below autocast and above autograd, so that backward passes and recomputed blocks choose the same.
                for key in ("AutogradCPU", "CPU"):
                    library.impl(name, kernel, key)
            undo.enter_context(cuda_autocast(library))
        for module in (optimizers, foreach):
            # Fake tensors count as tensors of a device that has foreach kernels.
            devices = [*module._get_foreach_kernels_supported_devices(), "cpu"]
            types = [*module._foreach_supported_types, FakeTensor]
            undo.enter_context(replaced(module, "_get_foreach_kernels_supported_devices", partial(list, devices)))
            undo.enter_context(replaced(module, "_foreach_supported_types", types))
        if not for_real:
            flex = flex_kernel(capability, is_compiled, emulation.ran)
            undo.enter_context(replaced(flex_attention, "flex_attention_hop", flex))
        # Else torch would itself compile the call of those who do not.
        undo.enter_context(replaced(flex_attention, "_FLEX_ATTENTION_DISABLE_COMPILE_DEBUG", True))
        undo.enter_context(replaced(flex_attention, "_validate_device", lambda *_: None))  # a CPU has no backward pass
        undo.enter_context(replaced(GradScaler, "_maybe_opt_step", _step))
        if attention != "auto":
            undo.enter_context(sdpa_kernel(preferred_kernels(attention), set_priority=True))
        yield emulation


def _step(_: GradScaler, optimizer: torch.optim.Optimizer, __: dict[str, Any], *args: Any, **keywords: Any) -> Any:
    """The step is taken: whether a fake gradient overflowed is not known, and skipping it would hide its memory."""
    return optimizer.step(*args, **keywords)


aten = torch.ops.aten

_GATES = {"lstm": 4, "gru": 3, "rnn_tanh": 1, "rnn_relu": 1}
_KEPT = {"lstm": 6, "gru": 5, "rnn_tanh": 1, "rnn_relu": 1}
"""Values kept for each hidden unit, step, layer and direction: an LSTM's four gates, cell and its activation; a GRU's
three gates, the candidate's recurrent part and the previous output."""


def kernels(note: Callable[[str], None]) -> dict[str, Callable[..., Any]]:
    """What to register for which operator; `note` takes sentences about estimates."""
    return {
        "dropout": _dropout,
        "softmax.int": _softmax(aten._softmax.default),
        "log_softmax.int": _softmax(aten._log_softmax.default),
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


def _softmax(operator: Any) -> Callable[..., Tensor]:
    def kernel(values: Tensor, dim: int, dtype: torch.dtype | None = None) -> Tensor:
        widens = values.dtype == torch.float16 and dtype == torch.float32
        converted = values if widens or dtype is None else values.to(dtype)
        result: Tensor = operator(converted, dim, widens)
        return result

    return kernel


def _rms_norm(values: Tensor, shape: Sequence[int], weight: Tensor | None = None, eps: float | None = None) -> Tensor:
    layouts = (torch.channels_last, torch.channels_last_3d)
    strided = any(values.dim() == 4 + axis and values.is_contiguous(memory_format=layout) and not values.is_contiguous()
                  for axis, layout in enumerate(layouts))  # fmt: skip
    if strided or values.is_complex() or (weight is not None and weight.dtype != values.dtype):
        composed: Tensor = aten._fused_rms_norm(values, list(shape), weight, eps)[0]
        return composed
    function: Any = _FusedRmsNorm
    normalized: Tensor = function.apply(values, list(shape), weight)
    return normalized


class _FusedRmsNorm(Function):
    """Allocates as CUDA's `_fused_rms_norm`: the output, and one reciprocal root a row."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, shape: list[int], weight: Tensor | None) -> Tensor:
        rows = (*values.shape[: values.dim() - len(shape)], *(1 for _ in shape))
        wide = torch.float64 if values.dtype == torch.float64 else torch.float32
        roots = values.new_empty(rows, dtype=wide)
        ctx.save_for_backward(values, roots, weight)
        ctx.shape = shape
        out = torch.empty_like(values, memory_format=torch.contiguous_format)
        kernel_ran("_fused_rms_norm", (values, shape, weight, None), (out, roots))
        return out

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        values, roots, weight = ctx.saved_tensors
        asked = ctx.needs_input_grad[0], ctx.needs_input_grad[2]
        made = [torch.empty_like(one) if wanted else None for one, wanted in zip((values, weight), asked, strict=True)]
        kernel_ran("_fused_rms_norm_backward", (gradient, values, ctx.shape, roots, weight, asked), tuple(made))
        return made[0], None, made[1]


@dataclass(frozen=True)
class _Shape:
    """One recurrent call; `reserve_bytes` are kept for the backward pass."""

    kind: str
    output: tuple[int, ...]
    state: tuple[int, ...]
    reserve_bytes: int
    turns: int
    """Steps of a sequence times layers: each waits for the one before it."""


def _recurrent(kind: str, form: str, note: Callable[[str], None]) -> Callable[..., Any]:
    def run(
        values: Tensor, states: Any, weights: Sequence[Tensor], layers: int, train: bool, both: bool, steps: int
    ) -> tuple[Tensor, ...]:
        start, cell = states if kind == "lstm" else (states, states.new_empty(0))
        if torch.is_autocast_enabled("cpu"):
            # Everything is cast to half precision, the weights into one new buffer (`AutocastRNN.cpp`).
            dtype = torch.get_autocast_dtype("cpu")
            values, start, cell = values.to(dtype), start.to(dtype), cell.to(dtype)
            weights = [weight.to(dtype) for weight in weights]
        hidden = weights[0].shape[0] // _GATES[kind]
        kept = _KEPT[kind] * values.shape[:-1].numel() * hidden * layers * (1 + both) * values.element_size()
        output_shape = (*values.shape[:-1], start.shape[-1] * (1 + both))
        shape = _Shape(kind, output_shape, (*start.shape[:-1], hidden), kept if train else 0, steps * layers)
        name = kind.upper() if kind in ("lstm", "gru") else "RNN"
        note(
            f"what cuDNN keeps for the backward pass of the {name} is an estimate of {_KEPT[kind]} values for each "
            "hidden unit, step, layer and direction; its own figure may differ"
        )
        function: Any = _FusedRecurrent
        output, last, last_cell = function.apply(shape, values, start, cell, *weights)
        return (output, last, last_cell) if kind == "lstm" else (output, last)

    def from_padded(
        values: Tensor, states: Any, weights: Sequence[Tensor], _: bool, layers: int, __: float, train: bool,
        both: bool, batch_first: bool,
    ) -> tuple[Tensor, ...]:  # fmt: skip
        return run(values, states, weights, layers, train, both, values.shape[1 if batch_first else 0])

    def from_packed(
        values: Tensor, sizes: Tensor, states: Any, weights: Sequence[Tensor], _: bool, layers: int, __: float,
        train: bool, both: bool,
    ) -> tuple[Tensor, ...]:  # fmt: skip
        return run(values, states, weights, layers, train, both, len(sizes))

    return from_padded if form == "input" else from_packed


class _FusedRecurrent(Function):
    """Allocates as `_cudnn_rnn` and its backward: outputs, the reserve, and one buffer for all weight gradients."""

    @staticmethod
    def forward(
        ctx: Any, shape: _Shape, values: Tensor, start: Tensor, cell: Tensor, *weights: Tensor
    ) -> tuple[Tensor, ...]:
        output, last = values.new_empty(shape.output), torch.empty_like(start)
        last_cell = values.new_empty(shape.state) if shape.kind == "lstm" else values.new_empty(0)
        reserve = torch.empty(shape.reserve_bytes, dtype=torch.uint8, device=values.device)
        ctx.save_for_backward(values, start, cell, output, reserve, *weights)
        ctx.turns = shape.turns
        kernel_ran("_cudnn_rnn", (values, weights, start, cell, shape.turns), (output, last, last_cell))
        return output, last, last_cell

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        values, start, cell, output, _reserve, *weights = ctx.saved_tensors
        inputs, asked = (values, start, cell), ctx.needs_input_grad[1:4]
        made = [torch.empty_like(one) if wanted else None for one, wanted in zip(inputs, asked, strict=True)]
        sizes = [weight.numel() for weight in weights]
        whole = values.new_zeros(sum(sizes))
        given = (values, tuple(weights), start, cell, output, *gradients, ctx.turns)
        kernel_ran("_cudnn_rnn_backward", given, (*made, whole))
        parts = whole.split(sizes)
        return (None, *made, *(part.view(weight.shape) for part, weight in zip(parts, weights, strict=True)))


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
_AUTOCAST_KEYS = torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastCPU)
_WIDE = torch.float64


@contextmanager
def cuda_autocast(library: Any) -> Iterator[None]:
    """Register CUDA's autocast lists for the CPU's key in `library` (of torch.library), and keep casts of weights."""
    casts, on_cuda = _Casts(), registered("AutocastCUDA")
    listed: dict[str, Callable[..., Any]] = {
        **{name: _lower_precision(name, casts) for name in LOWER_PRECISION if name not in _SAME_ON_CPU},
        **{name: _float32(name) for name in FLOAT32},
        **{name: _float32_result(name) for name in FLOAT32_RESULT},
        **{name: _float32_norm(name, typed) for name, typed in FLOAT32_NORM.items()},
        **{name: _promote(name) for name in PROMOTE},
        **dict.fromkeys(REFUSED, _refuse),
    }
    passed_through = dict.fromkeys(registered(_KEY) - on_cuda, torch.library.fallthrough_kernel)
    for name, kernel in (passed_through | {name: listed[name] for name in listed.keys() & on_cuda}).items():
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


def _operator(name: str) -> Any:
    packet, _, overload = name.partition(".")
    return getattr(getattr(torch.ops.aten, packet), overload or "default")


def _eligible(value: torch.Tensor) -> bool:
    return value.device.type == "cpu" and value.is_floating_point() and value.dtype != _WIDE


def _cast_all(arguments: Any, dtype: torch.dtype) -> Any:
    return tree_map_only(torch.Tensor, lambda value: value.to(dtype) if _eligible(value) else value, arguments)


def _under_autocast(operator: Any, change: Callable[[Any, Any], tuple[Any, Any]]) -> Callable[..., Any]:
    """A kernel that runs `operator`, outside autocast, on what `change` makes of its arguments."""

    def kernel(*args: Any, **keywords: Any) -> Any:
        with torch._C._ExcludeDispatchKeyGuard(_AUTOCAST_KEYS):
            args, keywords = change(args, keywords)
            return operator(*args, **keywords)

    return kernel


def _lower_precision(name: str, casts: _Casts) -> Callable[..., Any]:
    def change(args: Any, keywords: Any) -> Any:
        dtype = torch.get_autocast_dtype("cpu")
        return tree_map_only(torch.Tensor, lambda value: casts.cast(value, dtype), (args, keywords))

    return _under_autocast(_operator(name), change)


def _float32(name: str) -> Callable[..., Any]:
    return _under_autocast(_operator(name), lambda args, keywords: _cast_all((args, keywords), torch.float32))


def _float32_result(name: str) -> Callable[..., Any]:
    operator = _operator(name)
    place = [argument.name for argument in operator._schema.arguments].index("dtype")

    def change(args: Any, keywords: Any) -> Any:
        given = keywords.get("dtype", args[place] if len(args) > place else None)
        if given is None and _eligible(args[0]):
            return args[:place], {**keywords, "dtype": torch.float32}
        return args, keywords

    return _under_autocast(operator, change)


def _float32_norm(name: str, typed: str) -> Callable[..., Any]:
    defaults = [argument.default_value for argument in _operator(name)._schema.arguments]

    def change(args: Any, keywords: Any) -> Any:
        dtype = torch.float32 if _eligible(args[0]) else args[0].dtype
        return (*args, *defaults[len(args) :]), {**keywords, "dtype": dtype}

    return _under_autocast(_operator(typed), change)


def _promote(name: str) -> Callable[..., Any]:
    def change(args: Any, keywords: Any) -> Any:
        tensors = [leaf for leaf in tree_leaves((args, keywords)) if isinstance(leaf, torch.Tensor)]
        wide = any(_eligible(tensor) and tensor.dtype == torch.float32 for tensor in tensors)
        return _cast_all((args, keywords), torch.float32 if wide else torch.get_autocast_dtype("cpu"))

    return _under_autocast(_operator(name), change)


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
