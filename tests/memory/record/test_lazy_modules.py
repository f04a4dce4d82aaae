"""Modules whose parameters get their shape with the first batch: as torch has them, and as other packages make them."""

import pytest
import torch
from dry_parts import images, loader, measure, peak, predict, vectors
from lightning.pytorch import LightningModule
from torch import nn
from torch.nn import functional
from torch.nn.parameter import UninitializedParameter

from kit.config import Config


class Hooked(nn.Module):
    """Gets its weight in a hook of its own, as torch_geometric's layers do."""

    def __init__(self, out):
        super().__init__()
        self.out, self.weight = out, UninitializedParameter()
        self.hook = self.register_forward_pre_hook(self.shape_weight)

    def shape_weight(self, _, given):
        with torch.no_grad():
            self.weight.materialize((self.out, given[0].shape[-1]))
            nn.init.kaiming_uniform_(self.weight)
        self.hook.remove()

    def forward(self, x):
        return functional.linear(x, self.weight)


class Lazy(LightningModule):
    def __init__(self, layers, example=None):
        super().__init__()
        self.layers = nn.Sequential(*layers())
        if example is not None:
            self.layers(example)

    def training_step(self, batch, batch_idx):
        x, y = batch
        out = self.layers(x)
        return functional.cross_entropy(out, y) if y.dtype == torch.long else functional.mse_loss(out, y)

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters())


def wide():
    return nn.LazyLinear(512), nn.GELU(), nn.LazyLinear(8, bias=False)


def seeing():
    layers = (
        nn.LazyConv2d(16, 3),
        nn.LazyBatchNorm2d(),
        nn.ReLU(),
        nn.LazyConvTranspose2d(8, 3),
        nn.LazyInstanceNorm2d(),
    )
    return *layers, nn.Flatten(), nn.LazyLinear(10)


def hooked():
    return Hooked(512), nn.GELU(), Hooked(8)


CASES = {"linear": (wide, vectors), "images": (seeing, images), "hooked": (hooked, vectors)}


@pytest.mark.parametrize("warm", [True, False])
@pytest.mark.parametrize("name", CASES)
def test_lazy_modules_hold_what_real_ones_do(name, warm):
    """With an example in their constructor, as torch advises, or shaped by the first batch of the training."""
    layers, one = CASES[name]

    def make():
        return Lazy(layers, torch.stack([one()[0]] * 8) if warm else None)

    def data():
        return loader(one)

    assert peak(predict(make, data, Config())) == pytest.approx(measure(make, data, Config()), rel=0.01)


def test_torch_is_as_it_was_after_a_dry_run():
    before = UninitializedParameter.__new__, UninitializedParameter.materialize
    predict(lambda: Lazy(wide), lambda: loader(vectors), Config())
    assert before == (UninitializedParameter.__new__, UninitializedParameter.materialize)
