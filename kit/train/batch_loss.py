"""The loss of one batch, as a module returned it: what events and logs of losses write down."""

from __future__ import annotations

from typing import Any

import torch
from lightning.pytorch import Trainer


def batch_loss(outputs: Any, trainer: Trainer) -> torch.Tensor | None:
    """The loss of one micro-batch, without the division by accumulation that Lightning has applied.

    Args:
        outputs: What callbacks get at the end of a training batch.

    Returns:
        A tensor without dimensions, still on its device; None where there is no single number.
    """
    loss = outputs.get("loss") if isinstance(outputs, dict) else outputs
    if not isinstance(loss, torch.Tensor) or loss.numel() != 1:
        return None
    automatic = trainer.lightning_module.automatic_optimization
    scale = trainer.accumulate_grad_batches if automatic else 1
    return loss.detach().reshape(()) * scale
