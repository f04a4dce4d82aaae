"""Functions of torch.func in a training step, as torch's tutorials have them, beside the allocator's own events."""

import pytest
import torch
from dry_parts import Samples, measure, peak, predict
from lightning.pytorch import LightningModule
from torch import nn
from torch.func import functional_call, grad, hessian, jacfwd, jacrev, jvp, stack_module_state, vmap
from torch.nn import functional
from torch.utils.data import DataLoader

from kit.config import Config


class Net(LightningModule):
    """Two numbers in, one out, and a loss of both."""

    def __init__(self, loss):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(2, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 1))
        self.loss = loss

    def of_one(self, weights, point):
        return functional_call(self.layers, weights, (point,)).squeeze(-1)

    def solution(self, point):
        return self.of_one(dict(self.layers.named_parameters()), point)

    def training_step(self, batch, batch_idx):
        return self.loss(self, batch)

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters())


def poisson(net, points):
    """A network informed by physics: the sum of its second derivatives is what a source is."""
    curvature = vmap(hessian(net.solution))(points).diagonal(dim1=1, dim2=2).sum(1)
    return (curvature + points.prod(1).sin()).square().mean()


def transport(net, points):
    return vmap(jacfwd(net.solution))(points).sum(1).square().mean()


def slopes(net, points):
    return vmap(jacrev(net.solution))(points).square().mean()


def along(net, points):
    return jvp(lambda x: net.layers(x), (points,), (torch.ones_like(points),))[1].square().mean()


def tangent_kernel(net, points):
    """The empirical neural tangent kernel of two halves of a batch."""
    weights = dict(net.layers.named_parameters())
    first, second = (vmap(jacrev(net.of_one), (None, 0))(weights, half) for half in points.chunk(2))
    return sum(torch.einsum("nf,mf->nm", first[k].flatten(1), second[k].flatten(1)) for k in first).square().mean()


def ensemble(net, points):
    weights, buffers = stack_module_state([net.layers, net.layers])
    stacked = {name: value.detach().requires_grad_() for name, value in weights.items()}
    outputs = vmap(lambda w, b: functional_call(net.layers, (w, b), (points,)))(stacked, buffers)
    return outputs.square().mean() + net.layers(points).mean()


class Private(LightningModule):
    """A gradient for each sample, cut to a norm, as differential privacy has it."""

    def __init__(self):
        super().__init__()
        self.automatic_optimization = False
        self.net = nn.Sequential(
            nn.Conv2d(1, 8, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(8 * 13 * 13, 32), nn.ReLU(),
            nn.Linear(32, 10),
        )  # fmt: skip

    def training_step(self, batch, batch_idx):
        def loss(weights, image, label):
            return functional.cross_entropy(functional_call(self.net, weights, (image[None],)), label[None])

        weights = {name: value.detach() for name, value in self.net.named_parameters()}
        each = vmap(grad(loss), (None, 0, 0))(weights, *batch)
        norms = torch.stack([one.flatten(1).norm(dim=1) for one in each.values()]).norm(dim=0)
        scale = (1 / (norms + 1e-6)).clamp(max=1)
        for name, value in self.net.named_parameters():
            value.grad = torch.einsum("n,n...->...", scale, each[name]) / len(scale)
        self.optimizers().step()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


def points():
    return {"train_dataloaders": DataLoader(Samples(lambda: torch.rand(2)), batch_size=512)}


def pictures():
    return {"train_dataloaders": DataLoader(Samples(lambda: (torch.rand(1, 28, 28), torch.randint(10, ()))), 32)}


CASES = {
    **{loss.__name__: (lambda loss=loss: Net(loss), points)
       for loss in (poisson, transport, slopes, along, tangent_kernel, ensemble)},
    "private": (Private, pictures),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_transforms_of_functions_are_predicted_as_measured(case):
    make, data = CASES[case]
    recording = predict(make, data, Config())
    assert recording.facts["unknown"] == ""
    measured = measure(make, data, Config())
    # One convolution of all samples is not the one of each.
    assert peak(recording) == pytest.approx(measured, rel=0.02 if case == "private" else 0.0005)
