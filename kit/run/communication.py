"""What a rank waits for the others: the part of communication that training feels.

In ddp gradients travel while the backward pass still computes; what travels meanwhile costs nothing. This looks for
the rest: the backward's own work is done when autograd comes to its final callbacks, of which ours is the first (it is
queued by the first gradient, before ddp queues its wait), and the wait lasts to the end of the backward. In fsdp it is
the gathering of parameters before they are used and the scattering of gradients after, with the copies these need.

Communication that a module makes itself belongs to the part it is made in. One process alone has none.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import nn
from torch.distributed.fsdp import FSDPModule
from typing_extensions import override

from kit.run.timing import StepClock

PART = "communication"
_FSDP_WAITS = ("unshard", "wait_for_unshard", "post_backward", "finalize_backward")


class CommunicationTimer(Callback):
    """Tells the clock when this rank begins and ends to wait for others."""

    def __init__(self, clock: StepClock) -> None:
        self._clock = clock
        self._several = False

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._several = trainer.world_size > 1
        if self._several:
            for group in _groups(pl_module):
                for name in _FSDP_WAITS:
                    setattr(group, name, self._timed(getattr(group, name)))

    @override
    def on_before_backward(self, trainer: Trainer, pl_module: LightningModule, loss: torch.Tensor) -> None:
        if self._several and loss.requires_grad:
            loss.register_hook(self._on_first_gradient)  # type: ignore[no-untyped-call]

    def _on_first_gradient(self, _: torch.Tensor) -> None:
        torch.autograd.Variable._execution_engine.queue_callback(self._on_last_gradient)

    def _on_last_gradient(self) -> None:
        self._clock.turn_to(PART)

    def _timed(self, wait: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any, **options: Any) -> Any:
            self._clock.enter(PART)
            try:
                return wait(*args, **options)
            finally:
                self._clock.leave()

        return timed


def _groups(module: nn.Module) -> list[Any]:
    """Parameters that fsdp gathers together, of every unit of the module."""
    units = [unit for unit in module.modules() if isinstance(unit, FSDPModule)]
    return [group for unit in units for group in unit._get_fsdp_state()._fsdp_param_groups]
