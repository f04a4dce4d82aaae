"""Lazy modules among fake tensors: torch.nn.LazyLinear and the like, whose parameters get a shape with the first batch.

A parameter without a shape is a real tensor without elements: torch cannot make it of a fake one. When it gets its
shape a fake one takes its place wherever it is kept: in its module and, where it had none before the optimizer was
made, in that.
"""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import UninitializedBuffer, UninitializedParameter

from kit.confinement.stand_ins import replaced

_private: Any = torch._C
_torch: Any = nn.parameter


@contextlib.contextmanager
def lazy_parameters() -> Iterator[None]:
    """Inside, lazy modules can be made and run in a fake mode."""
    with contextlib.ExitStack() as undo:
        for kind in (UninitializedParameter, UninitializedBuffer):
            undo.enter_context(replaced(kind, "__new__", _of_real_tensors(kind.__new__)))
        undo.enter_context(replaced(_torch.UninitializedTensorMixin, "materialize", _materialize))
        yield


def _of_real_tensors(make: Callable[..., Any]) -> Callable[..., Any]:
    def new(*args: Any, **options: Any) -> Any:
        with _private._DisableTorchDispatch():
            return make(*args, **options)

    return new


def _materialize(
    lazy: Any, shape: Any, device: torch.device | None = None, dtype: torch.dtype | None = None
) -> None:  # fmt: skip
    with _private._DisableTorchDispatch():
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
