"""Scaling on recordings of real modules: what two dry runs foretell is what a third one records, to the byte."""

import pytest
import torch
from properties import crossed
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.checkpoint import checkpoint

from kit.memory.record.recorder import BlockRecorder
from kit.memory.record.workspace import Workspaces
from kit.memory.replay.cards import target_of
from kit.memory.replay.estimate import estimate
from kit.memory.replay.scaling import BatchScaling, ScalingError


class Pairs(nn.Module):
    """Compares every sample with every other one."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(16, 16)

    def forward(self, samples):
        features = self.layer(samples)
        return features @ features.T


class Checkpointed(nn.Module):
    def __init__(self):
        super().__init__()
        self.parts = nn.ModuleList(nn.Sequential(nn.Linear(24, 96), nn.GELU(), nn.Linear(96, 24)) for _ in range(3))

    def forward(self, samples):
        for part in self.parts:
            samples = checkpoint(part, samples, use_reentrant=False)
        return samples


class Uneven(nn.Module):
    """Runs one more operator when the batch is odd."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, samples):
        out = self.layer(samples)
        return out.relu() if len(samples) % 2 else out


def convolutions():
    return nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 8, 3, 2), nn.Flatten(), nn.Linear(448, 5)
    )


def attention():
    return nn.TransformerEncoderLayer(32, 4, 64, batch_first=True, dropout=0.1)


MODULES = {
    "convolutions": (convolutions, (3, 17, 19)),
    "attention": (attention, (13, 32)),
    "checkpointed": (Checkpointed, (24,)),
}


def deep():
    """Ever more channels on ever smaller pictures: which convolution is at the peak depends on the batch."""
    sizes = ((3, 16), (16, 32), (32, 64), (64, 256))
    parts = [(nn.Conv2d(given, made, 3, 2, 1), nn.ReLU(), nn.Conv2d(made, made, 3, 1, 1)) for given, made in sizes]
    return nn.Sequential(*(layer for part in parts for layer in part), nn.Flatten(), nn.Linear(1024, 10))


def recorded(make, shape, batch_size, autocast=False, workspace=None):
    with FakeTensorMode(), BlockRecorder(workspace) as recorder:
        module = make()
        recorder.track(module)
        optimizer = torch.optim.AdamW(module.parameters(), foreach=True)
        for _ in range(2):
            batch = torch.zeros(batch_size, *shape)
            recorder.begin_batch()
            recorder.note(batch, "inputs")
            with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
                loss = module(batch).float().square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            del loss
        return recorder.recording(batch_size, 512, {"device_kind": "cuda"})


@pytest.mark.parametrize(("autocast", "name"), crossed([False, True], MODULES))
def test_real_modules_scale_exactly(name, autocast):
    make, shape = MODULES[name]
    scaling = BatchScaling(*(recorded(make, shape, batch, autocast) for batch in (2, 3)))
    target = target_of("T4-16GB")
    for batch in (5, 64):
        truth = recorded(make, shape, batch, autocast)
        assert scaling.differs_from(truth) == ""
        ours, theirs = estimate(scaling.at(batch), target), estimate(truth, target)
        assert ours.device_allocated_bytes == theirs.device_allocated_bytes > 0
        assert ours.device_reserved_bytes == theirs.device_reserved_bytes
        assert ours.breakdown == theirs.breakdown


def test_convolutions_on_the_cpu_scale_though_their_workspace_leaves_out_the_gradient_of_the_bias():
    shape, target = (3, 32, 32), target_of("T4-16GB")
    scaling = BatchScaling(*(recorded(deep, shape, batch, workspace=Workspaces(None)) for batch in (16, 17)))
    for batch in (1, 2, 32, 256):
        truth = recorded(deep, shape, batch, workspace=Workspaces(None))
        ours, theirs = estimate(scaling.at(batch), target), estimate(truth, target)
        if batch > 1:
            assert ours.device_allocated_bytes == theirs.device_allocated_bytes > 0
        else:  # another kernel may compute one sample, and hold less
            assert ours.device_allocated_bytes >= theirs.device_allocated_bytes > 0


@pytest.mark.parametrize(
    ("make", "shape", "message"),
    [(Pairs, (16,), "grows faster"), (Uneven, (8,), "number of operators")],
)
def test_modules_that_do_not_scale_are_refused(make, shape, message):
    with pytest.raises(ScalingError, match=message):
        BatchScaling(recorded(make, shape, 2), recorded(make, shape, 3))
