"""Which kernel computes `scaled_dot_product_attention` during a fit, and which one it was.

A preference, not a demand: a call that the preferred kernel cannot take (its dtype, head size or mask) goes to the next
one, and the reason is said. Torch's own switches are set for the whole fit, so that the backward pass and recomputed
blocks use the same kernels. Code that multiplies its scores itself is not reached.
"""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from typing_extensions import override

from kit.errors import ConfigError, KitWarning, Problem

KERNELS = {
    "math": SDPBackend.MATH,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "flash": SDPBackend.FLASH_ATTENTION,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
}
"""Torch's name of each kernel."""
AUTO = "auto"

_backends: Any = torch.backends
_THEN = {
    "math": ("math",),
    "efficient": ("efficient", "math"),
    "flash": ("flash", "efficient", "math"),
    "cudnn": ("cudnn", "flash", "efficient", "math"),
}
_OPERATORS = {
    "_scaled_dot_product_flash_attention": "flash",
    "_scaled_dot_product_flash_attention_for_cpu": "flash",
    "_scaled_dot_product_efficient_attention": "efficient",
    "_scaled_dot_product_cudnn_attention": "cudnn",
}


def preferred_kernels(name: str) -> list[SDPBackend]:
    """What torch is to try for kernel `name`, in this order."""
    return [KERNELS[kernel] for kernel in _THEN[name]]


def available_kernels(device: str) -> dict[str, str]:
    """Each kernel and why it cannot be had on a `cpu` or `cuda` device; an empty reason means that it can."""
    if device == "cpu":
        return {"math": "", "efficient": "needs a GPU", "flash": "", "cudnn": "needs a GPU"}
    flash = torch.backends.cuda.is_flash_attention_available()
    cudnn = bool(_backends.cudnn.is_available())
    return {
        "math": "",
        "efficient": "",
        "flash": "" if flash else "this torch was built without it",
        "cudnn": "" if cudnn else "this torch was built without cuDNN",
    }


class AttentionKernel(Callback):
    """Prefer one kernel for `scaled_dot_product_attention` while fitting, and count what ran in the first batch.

    Args:
        name: `math`, `efficient`, `flash` or `cudnn`; `auto` leaves the choice to torch, and only counts.
        stands_in: The CPU stands in for a GPU (a dry run): all kernels are taken for available, and nothing is counted.

    Raises:
        ConfigError: for another name.
    """

    def __init__(self, name: str, stands_in: bool = False) -> None:
        if name not in (AUTO, *KERNELS):
            raise ConfigError([Problem("levers.attention", f"{name!r} is none of {', '.join(KERNELS)}")])
        self.name = name
        self.ran: Counter[str] = Counter()
        """Calls of the first batch by the kernel that took them."""
        self._stands_in = stands_in
        self._switches = ExitStack()
        self._counting = ExitStack()
        self._counted = True
        self._silent = False

    @override
    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._silent = self.name == AUTO
        if self.name == AUTO:
            self._counted = _is_compiled(pl_module)
            return
        self._counted = self._stands_in
        device = trainer.strategy.root_device.type
        reason = "" if self._stands_in else available_kernels(device)[self.name]
        if reason:
            message = f"levers.attention: {self.name} {reason}; torch chooses among "
            message += " and ".join(name for name, why in available_kernels(device).items() if not why)
            warnings.warn(message, KitWarning, stacklevel=2)
            self._silent = True
            return
        self._switches.enter_context(sdpa_kernel(preferred_kernels(self.name), set_priority=True))

    @override
    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        if not self._counted:
            self.ran.clear()
            self._seen = self._counting.enter_context(_Calls(self.ran))

    @override
    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if not self._counted:
            self._counting.close()
            self._counted = True
            self._explain(type(pl_module).__name__)

    @override
    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        self._restore()

    @override
    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        self._restore()

    def _restore(self) -> None:
        self._counting.close()
        self._switches.close()
        self._counted = True

    def _explain(self, module_name: str) -> None:
        if self._silent:
            return
        if not self.ran:
            message = f"levers.attention: {self.name} does nothing: {module_name} does not call "
            warnings.warn(message + "scaled_dot_product_attention", KitWarning, stacklevel=3)
        elif set(self.ran) != {self.name}:
            counts = ", ".join(f"{name} {count}" for name, count in sorted(self.ran.items()))
            message = f"levers.attention: {self.name} did not take every call of the first batch ({counts}): "
            message += self._seen.why(self.name) or "its rules (type, head size, mask, dropout) were not met"
            warnings.warn(message, KitWarning, stacklevel=3)


def _is_compiled(module: LightningModule) -> bool:
    """Compiled code would be compiled anew to be counted."""
    return any(type(part).__name__ == "OptimizedModule" or part._compiled_call_impl for part in module.modules())


class _Calls(TorchFunctionMode):
    """Counts calls of attention by kernel, and keeps the arguments of one that each kernel took."""

    def __init__(self, ran: Counter[str]) -> None:
        super().__init__()
        self._ran = ran
        self._refused: dict[str, str] = {}

    def __torch_function__(
        self, func: Callable[..., Any], types: Sequence[type], args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        keywords = kwargs or {}
        direct = func is functional.scaled_dot_product_attention
        if not direct and func is not functional.multi_head_attention_forward:
            return func(*args, **keywords)
        with _Fused() as fused:
            result = func(*args, **keywords)
        # A call that returns its weights multiplies them itself: no kernel was asked for.
        asked = direct or not keywords.get("need_weights", True)
        kernels = fused.kernels or (["math"] if asked else [])
        self._ran.update(kernels)
        if direct:
            self._refused.update(dict.fromkeys(kernels, _describe(*args, **keywords)))
        return result

    def why(self, wanted: str) -> str:
        """The call that another kernel than `wanted` took."""
        other = [call for kernel, call in self._refused.items() if kernel != wanted]
        return f"it was ruled out for {other[0]}" if other else ""


class _Fused(TorchDispatchMode):
    """Names the fused kernels that run."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.kernels: list[str] = []

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kernel = _OPERATORS.get(func.overloadpacket.__name__)
        if kernel:
            self.kernels.append(kernel)
        return func(*args, **(kwargs or {}))


def _describe(query: torch.Tensor, *others: Any, **keywords: Any) -> str:
    given = dict(zip(("key", "value", "attn_mask", "dropout_p"), others, strict=False)) | keywords
    mask = "no mask" if given.get("attn_mask") is None else "a mask"
    shape, kind = "×".join(map(str, query.shape)), str(query.dtype).removeprefix("torch.")
    return f"a query of {shape} ({kind}), {mask}, dropout {given.get('dropout_p', 0.0):g}"
