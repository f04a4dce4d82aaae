"""CUDA emulation: fake tensors on the CPU that allocate what the same step would allocate on a given GPU.

A build of torch without CUDA cannot run a backward pass on fake `cuda` tensors. So a dry run takes fake `cpu` tensors,
and inside `cuda_emulation` torch makes the choices it would make on a GPU: which operators autocast casts, which kernel
computes attention, what dropout, softmax, RMSNorm and recurrent layers keep, that optimizers go over all parameters at
once (foreach), and that a loss scaler steps. Whatever was chosen with a reason is in `Emulation.notes`.

What is replaced is torch's dispatcher, for the whole process and all threads; leaving the block puts all of it back, so
that several configurations can be recorded one after the other. Blocks do not nest. The block is for dry runs only: on
real tensors these kernels return memory that nothing has written.

Private parts of torch used here, all tested on its upgrade: `Library._destroy`, `GradScaler._maybe_opt_step`, and in
two modules `_get_foreach_kernels_supported_devices` and `_foreach_supported_types`.
"""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.amp.grad_scaler import GradScaler
from torch.nn.attention import sdpa_kernel
from torch.optim import optimizer as optimizers
from torch.utils import _foreach_utils as foreach

from kit.memory.cuda_attention import Call, attention_kernel
from kit.memory.cuda_autocast import cuda_autocast
from kit.memory.cuda_kernels import kernels
from kit.memory.patches import replaced
from kit.train.attention import preferred_kernels

_KEYS = ("AutogradCPU", "CPU")
_installed: list[Emulation] = []
_library: Any = torch.library.Library


class Emulation:
    """What one emulated run chose: `attention` counts calls by kernel; `notes` holds sentences."""

    def __init__(self, capability: tuple[int, int], attention: str = "auto") -> None:
        self.capability = capability
        self.wanted = attention
        self.attention: Counter[str] = Counter()
        self._reasons: dict[str, dict[str, str]] = {}
        self._estimates: dict[str, None] = {}

    @property
    def notes(self) -> list[str]:
        """Which attention kernels ran and why not those before them, and what was estimated."""
        return [*(self._about(name, count) for name, count in self.attention.items()), *self._estimates]

    def ran(self, name: str, refused: dict[str, str], _: Call) -> None:
        """Count a call of attention."""
        self.attention[name] += 1
        self._reasons.setdefault(name, refused)

    def estimated(self, sentence: str) -> None:
        """Keep a sentence about a size that is not known exactly."""
        self._estimates[sentence] = None

    def _about(self, name: str, count: int) -> str:
        reasons = [f"{other}: {why}" for other, why in self._reasons[name].items()]
        return f"attention: {name} × {count}" + (f" (not {'; not '.join(reasons)})" if reasons else "")


@contextmanager
def cuda_emulation(capability: tuple[int, int], attention: str = "auto") -> Iterator[Emulation]:
    """Inside, fake `cpu` tensors allocate as on a GPU of `capability`, such as (9, 0).

    Args:
        capability: Major and minor compute capability of the GPU.
        attention: Kernel to prefer, as `levers.attention`; `auto` leaves torch's switches as they are.

    Raises:
        RuntimeError: when the block is nested in another.
    """
    if _installed:
        raise RuntimeError("CUDA is being emulated already in this process; leave that block first")
    emulation = Emulation(capability, attention)
    library: Any = _library("aten", "IMPL")
    _installed.append(emulation)
    with ExitStack() as undo:
        undo.callback(_installed.clear)
        undo.callback(library._destroy)
        with warnings.catch_warnings():
            # Torch warns of each kernel that is replaced, which is what this is for.
            warnings.filterwarnings("ignore", message=r"(?s).*[Oo]verriding a previously registered kernel")
            _register(library, emulation)
            undo.enter_context(cuda_autocast(library))
        for owner, name, value in _changes():
            undo.enter_context(replaced(owner, name, value))
        if attention != "auto":
            undo.enter_context(sdpa_kernel(preferred_kernels(attention), set_priority=True))
        yield emulation


def _register(library: Any, emulation: Emulation) -> None:
    attention = attention_kernel(emulation.capability, emulation.ran)
    chosen = {"scaled_dot_product_attention": attention, **kernels(emulation.estimated)}
    for name, kernel in chosen.items():
        # Below autocast and above autograd, so that backward passes and recomputed blocks choose the same.
        for key in _KEYS:
            library.impl(name, kernel, key)


def _changes() -> Iterator[tuple[Any, str, Any]]:
    """Python names to replace: fake tensors count as tensors of a device that has foreach kernels, scalers step."""
    for module in (optimizers, foreach):
        devices = [*module._get_foreach_kernels_supported_devices(), "cpu"]
        yield module, "_get_foreach_kernels_supported_devices", partial(list, devices)
        yield module, "_foreach_supported_types", [*module._foreach_supported_types, FakeTensor]
    yield GradScaler, "_maybe_opt_step", _step


def _step(_: GradScaler, optimizer: torch.optim.Optimizer, __: dict[str, Any], *args: Any, **keywords: Any) -> Any:
    """The step is taken: whether a fake gradient overflowed is not known, and skipping it would hide its memory."""
    return optimizer.step(*args, **keywords)
