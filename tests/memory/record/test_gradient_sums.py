"""Gradients of what is used more than once: their sum is written to the first of two where nobody else holds that."""

import pytest
import torch
from dry_parts import loader, measure, one_thread, peak, predict
from lightning.pytorch import LightningModule
from torch import nn
from torch.autograd import Function
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from kit.config import Config

SIDE, ROWS = 512, 4
A_FEW_BYTES = 256  # numbers that Lightning counts and logs with


class Shared(LightningModule):
    """A weight of a megabyte beside little else, and how it is used."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.rand(SIDE, SIDE) / SIDE)

    def training_step(self, batch, batch_idx):
        return self.uses(self.weight, batch)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=1e-6)


class Weighed(Function):
    """Adds up two gradients itself, in Python."""

    @staticmethod
    def forward(ctx, values):
        return values.clone()

    @staticmethod
    def backward(ctx, gradient):
        return gradient * 2 + gradient * 3


def repeated(weight, rows, times):
    for _ in range(times):
        rows = torch.tanh(rows @ weight)
    return rows.sum()


def tied(weight, rows):
    words = functional.embedding(torch.arange(ROWS), weight)
    return ((words + rows) @ weight.T).exp().sum()


def hooked(weight, rows):
    kept = []
    wide = weight * 2
    wide.register_hook(kept.append)
    return (torch.tanh(wide) + torch.relu(wide)).sum()


def retained(weight, rows):
    wide = weight * 2
    wide.retain_grad()
    return (torch.tanh(wide) * torch.relu(wide)).sum() + torch.sigmoid(wide).mean()


def rerun(weight, rows, reentrant):
    rows.requires_grad_()
    for _ in range(3):
        rows = checkpoint(
            lambda values: torch.tanh(values @ weight), rows, use_reentrant=reentrant, preserve_rng_state=False
        )
    return rows.sum()


USES = {
    "once": lambda weight, rows: repeated(weight, rows, 1),
    "twice": lambda weight, rows: repeated(weight, rows, 2),
    "four times": lambda weight, rows: repeated(weight, rows, 4),
    "embedding and head": tied,
    "residual": lambda weight, rows: (weight + torch.tanh(weight)).exp().sum(),
    "two branches": lambda weight, rows: (torch.tanh(weight) + torch.relu(weight) * 2).sum(),
    "spread out": lambda weight, rows: weight.sum() + torch.tanh(weight).sum(),
    "spread out last": lambda weight, rows: torch.tanh(weight).sum() + weight.sum(),
    "turned": lambda weight, rows: (torch.tanh(weight.T) * weight).sum(),
    "parts": lambda weight, rows: (weight[: SIDE // 2].tanh() * weight[SIDE // 2 :]).sum(),
    "its own formula": lambda weight, rows: sum(torch.var_mean(weight * 2, 1)).sum(),
    "a formula in Python": lambda weight, rows: Weighed.apply(weight * 2).sum(),
    "held by a hook": hooked,
    "kept": retained,
    "checkpointed": lambda weight, rows: rerun(weight, rows, False),
    "checkpointed, reentrant": lambda weight, rows: rerun(weight, rows, True),
    "gated": lambda weight, rows: (functional.silu(weight) * torch.sigmoid(weight) * weight).sum(),
    "normed": lambda weight, rows: (functional.layer_norm(weight, (SIDE,)) + weight).pow(2).sum(),
}


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
@pytest.mark.parametrize("uses", USES.values(), ids=USES)
def test_a_dry_run_adds_gradients_up_where_autograd_does(uses, precision):
    module = type("Using", (Shared,), {"uses": staticmethod(uses)})
    data = loader(lambda: torch.rand(SIDE), ROWS)
    with one_thread():  # as the fit that is measured
        predicted = peak(predict(module, lambda: data, Config(), precision))
    assert abs(measure(module, lambda: data, Config(), precision) - predicted) <= A_FEW_BYTES
