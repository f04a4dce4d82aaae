"""entry_points: where torch says that a backward pass or an optimizer step runs, a module is called, a storage resized.

A recorder listens there instead of asking its user, so that plain loops, Lightning and manual optimization are all
understood. Leaving puts every entry point back. Private: `ShardingPropagator._propagate_tensor_meta_non_cached`.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from typing import Any, Protocol

import torch
from torch import UntypedStorage, nn
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from kit.memory.module_path import ModulePath
from kit.memory.patches import overridden


class Listener(Protocol):
    """What a recorder does when told."""

    modules: ModulePath

    def backward(self) -> contextlib.AbstractContextManager[None]: ...
    def paused(self) -> contextlib.AbstractContextManager[None]: ...
    def before_step(self, optimizer: Any, args: tuple[Any, ...], options: dict[str, Any]) -> None: ...
    def after_step(self, optimizer: Any, args: tuple[Any, ...], options: dict[str, Any]) -> None: ...
    def storage_resized(self, storage: UntypedStorage) -> None: ...


def entry_points(recorder: Listener) -> contextlib.ExitStack:
    """Where torch says that a storage is resized, a backward pass or an optimizer step runs, or a module is called."""
    undo = contextlib.ExitStack()
    for owner, name, value in _replacements(recorder):
        undo.enter_context(overridden(owner, name, value))
    parts = recorder.modules
    for handle in (
        register_optimizer_step_pre_hook(recorder.before_step),
        register_optimizer_step_post_hook(recorder.after_step),
        nn.modules.module.register_module_forward_pre_hook(parts.enter),
        nn.modules.module.register_module_forward_hook(parts.leave, always_call=True),
    ):
        undo.callback(handle.remove)
    return undo


def _replacements(recorder: Listener) -> Iterator[tuple[Any, str, Any]]:
    kind: Any = UntypedStorage
    resize, backward, gradients = kind.resize_, torch.autograd.backward, torch.autograd.grad

    def resize_and_tell(storage: UntypedStorage, size: int) -> Any:
        # FSDP2 frees and fills its gathered parameters by resizing storages, which no operator does.
        answer = resize(storage, size)
        recorder.storage_resized(storage)
        return answer

    def tell_backward(*args: Any, **options: Any) -> Any:
        with recorder.backward():
            return backward(*args, **options)

    def tell_gradients(*args: Any, **options: Any) -> Any:
        # With a graph of its own, such as a gradient penalty has, it is a part of the forward pass.
        with contextlib.nullcontext() if options.get("create_graph") else recorder.backward():
            return gradients(*args, **options)

    yield UntypedStorage, "resize_", resize_and_tell
    yield torch.autograd, "backward", tell_backward
    yield torch.autograd, "grad", tell_gradients
    if "torch.distributed.tensor" in sys.modules:
        yield _quiet_propagation(recorder)


def _quiet_propagation(recorder: Listener) -> tuple[Any, str, Any]:
    """DTensor finds shapes by running operators on whole fake tensors, which are on no device."""
    from torch.distributed.tensor._sharding_prop import ShardingPropagator

    name = "_propagate_tensor_meta_non_cached"
    propagate = vars(ShardingPropagator)[name]

    def propagate_unseen(*args: Any, **options: Any) -> Any:
        with recorder.paused():
            return propagate(*args, **options)

    return ShardingPropagator, name, propagate_unseen
