"""What running blocks again costs a step: what a planner adds up, beside the price of dry runs with checkpoints."""

from collections import Counter

import numpy as np
import pytest
import torch
from lightning.pytorch import LightningModule
from torch import nn
from torch.nn import functional

from kit.config import Config
from kit.memory.record.dry_run import DryRun, record
from kit.memory.replay.cards import find_card
from kit.memory.replay.checkpointing import Checkpoints
from kit.models import Field, RandomData
from kit.speed.card_costs import CardCosts
from kit.speed.cost_table import CostTable
from kit.speed.operators import step_of
from kit.speed.pricing import price


class Block(nn.Module):
    """Of ConvNeXt (Liu et al. 2022)."""

    def __init__(self, width):
        super().__init__()
        self.deep, self.norm = nn.Conv2d(width, width, 7, padding=3, groups=width), nn.GroupNorm(1, width)
        self.widen, self.narrow = nn.Conv2d(width, 4 * width, 1), nn.Conv2d(4 * width, width, 1)

    def forward(self, x):
        return x + self.narrow(functional.gelu(self.widen(self.norm(self.deep(x)))))


class Images(LightningModule):
    def __init__(self):
        super().__init__()
        self.stem = nn.Conv2d(3, 32, 4, stride=4)
        self.blocks = nn.Sequential(*(Block(32) for _ in range(4)))
        self.head = nn.Linear(32, 10)

    def forward(self, x):
        return self.head(self.blocks(self.stem(x)).mean((2, 3)))

    def training_step(self, batch, batch_idx):
        return functional.cross_entropy(self(batch[0]), batch[1])

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters())


class Words(Images):
    def __init__(self):
        super().__init__()
        self.stem = nn.Embedding(128, 64)
        layer = nn.TransformerEncoderLayer(64, 4, 256, dropout=0.1, batch_first=True, norm_first=True)
        self.blocks = nn.TransformerEncoder(layer, 4, enable_nested_tensor=False)
        self.head = nn.Linear(64, 10)

    def forward(self, x):
        return self.head(self.blocks(self.stem(x)).mean(1))


CASES = {
    "convolutions": (Images, (Field(shape=(3, 128, 128)), Field(below=10))),
    "transformer": (Words, (Field(shape=(128,), below=128), Field(below=10))),
}
HERE = CostTable(
    "here", {}, backward_call_seconds=1e-5, forward_call_seconds=2e-5, step_seconds=1e-3, checkpoint_call_seconds=1e-4,
    checkpoint_operator_seconds=1e-5,
)  # fmt: skip


def dry(case, kind, **levers):
    make, fields = CASES[case]
    config = Config.make({"levers": levers})
    run = DryRun(config, "32-true", 1, kind, (8, 0) if kind == "cuda" else None)
    return record(make, lambda: {"datamodule": RandomData(fields, 4)}, run)


def run_again(step):
    """How often each operator runs again in a step; what is saved is detached by the hooks that do so."""
    places = np.flatnonzero(step.recomputes > 0).tolist()
    found = Counter()
    for place in places:
        found[step.calls[step.call[place]].operator] += int(step.repeats[place])
    del found["aten::detach"]
    return found


@pytest.mark.parametrize("kind", ["cuda", "cpu"])
@pytest.mark.parametrize("parts", [1, 4])
@pytest.mark.parametrize("case", CASES)
def test_what_is_thought_to_run_again_is_what_does(case, parts, kind):
    plain = dry(case, kind, accumulate_grad_batches=parts)
    real = step_of(dry(case, kind, accumulate_grad_batches=parts, gradient_checkpointing=True))
    thought = step_of(Checkpoints(plain).checkpointed(plain.facts["blocks"].values()))
    assert run_again(thought) == run_again(real)
    assert len(np.unique(thought.recomputes)) == len(np.unique(real.recomputes))
    costs = CardCosts(find_card("A100-40GB")) if kind == "cuda" else HERE
    before, mine, theirs = (price(step, costs).busy_seconds for step in (step_of(plain), thought, real))
    assert mine > before
    assert mine == pytest.approx(theirs, rel=1e-3 if kind == "cuda" else 0.02)  # a detach takes a CPU a little


@pytest.mark.parametrize("parts", [1, 4])
@pytest.mark.parametrize("case", CASES)
def test_a_rung_costs_what_a_step_takes_longer_with_it(case, parts):
    plain = dry(case, "cpu", accumulate_grad_batches=parts)
    checkpoints, step = Checkpoints(plain), step_of(plain)
    before = price(step, HERE)
    seconds, repeats = np.zeros(len(plain.operator_name)), np.zeros(len(plain.operator_name))
    seconds[step.place] = before.operator_seconds + HERE.host_seconds("backward") * step.repeats
    repeats[step.place] = step.repeats
    (block, *_) = plain.facts["blocks"].values()
    ladder = checkpoints.ladder(block, seconds, repeats, HERE.checkpoint_seconds)
    assert len(ladder) > 1
    for rung in (ladder[0], ladder[-1]):
        after = price(step_of(checkpoints.checkpointed(rung.names)), HERE)
        assert after.seconds - before.seconds == pytest.approx(rung.seconds, rel=1e-6)
