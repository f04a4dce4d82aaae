"""Checkpoints: what they make of a recording is what a dry run with the lever shows, for any subset of blocks."""

import copy
import itertools

import numpy as np
import pytest
import torch
from lightning.pytorch import LightningModule
from torch import nn

from kit.config import Config
from kit.memory.record.dry_run import DryRun, record
from kit.memory.replay.checkpointing import Checkpoints, Rung, climb
from kit.memory.replay.replay import PHASES, replay
from kit.models import GPT, Field, RandomData, Tokens

LAYERS = 6


@pytest.fixture(scope="module", autouse=True)
def _one_thread():
    torch.set_num_threads(1)


def dry(kind, precision, **levers):
    config = Config.make({"levers": levers, "trial": {"max_steps": 4, "warmup_steps": 0}})
    return record(
        lambda: GPT(vocabulary=256, width=64, heads=4, layers=LAYERS, context=128),
        lambda: {"datamodule": Tokens(vocabulary=256, context=128, batch_size=4)},
        DryRun(config, precision, 1, kind, (8, 0) if kind == "cuda" else None),
    )


@pytest.fixture(scope="module", params=[("cuda", "bf16-mixed", 1), ("cpu", "32-true", 1), ("cpu", "32-true", 2)])
def case(request):
    kind, precision, parts = request.param
    return kind, precision, {"accumulate_grad_batches": parts}


def peak(recording):
    return replay(recording).peak_allocated_bytes


@pytest.mark.slow
def test_any_subset_needs_what_a_dry_run_of_it_needs(case):
    kind, precision, more = case
    plain = dry(kind, precision, **more)
    checkpoints = Checkpoints(plain)
    assert plain.facts["blocks"] == {str(number): f"blocks.{number}" for number in range(LAYERS)}
    for blocks in (["0-5"], ["0-2"], ["1", "4"]):
        real = dry(kind, precision, gradient_checkpointing=True, checkpoint_blocks=blocks, **more)
        ranges = [list(map(int, block.split("-"))) for block in blocks]
        numbers = [number for ends in ranges for number in range(ends[0], ends[-1] + 1)]
        thought = checkpoints.checkpointed([f"blocks.{number}" for number in numbers])
        assert 0.98 * peak(real) <= peak(thought) <= 1.1 * peak(real)
        assert peak(thought) < peak(plain)


def test_a_checkpointed_recording_is_whole(case):
    kind, precision, more = case
    plain = dry(kind, precision, **more)
    checkpoints = Checkpoints(plain)
    found = checkpoints.checkpointed(["blocks.1", "blocks.3"])
    again = sum(len(call.repeated) for name in ("blocks.1", "blocks.3") for call in checkpoints.calls[name])
    assert len(found.operator_name) == len(found.operator_module) == len(found.operator_phase)
    assert len(found.operator_name) == len(plain.operator_name) + again
    backward = np.count_nonzero(found.operator_phase == PHASES.index("backward"))
    assert backward == np.count_nonzero(plain.operator_phase == PHASES.index("backward")) + again
    assert (np.diff(found.event_time) >= 0).all()
    alive = set()
    for block, allocates in zip(found.event_block.tolist(), found.event_allocates.tolist(), strict=True):
        assert (block in alive) != allocates
        alive ^= {block}
    assert len(alive) == len(plain.event_block[plain.event_allocates]) - len(plain.event_block[~plain.event_allocates])


@pytest.mark.slow
def test_modules_inside_blocks_need_what_a_dry_run_of_them_needs(case):
    kind, precision, more = case
    plain = dry(kind, precision, **more)
    checkpoints = Checkpoints(plain)
    seconds = np.full(len(plain.operator_name), 1e-3)
    ladder = checkpoints.ladder("blocks.2", seconds, np.ones(len(seconds)), lambda _: 1e-4)
    assert ladder[-1].names == ("blocks.2",)
    assert len(ladder) > 1
    for before, after in itertools.pairwise(ladder):
        assert before.saved_bytes < after.saved_bytes
        assert before.seconds < after.seconds
    part = ladder[0].names[0].removeprefix("blocks.2")
    names = [f"blocks.{number}{part}" for number in range(LAYERS)]
    real = dry(kind, precision, gradient_checkpointing=True, checkpoint_blocks=names, **more)
    thought = checkpoints.checkpointed(names)
    assert 0.98 * peak(real) <= peak(thought) <= 1.1 * peak(real)
    assert peak(thought) < peak(plain)


def test_steps_up_ladders_cost_ever_more_for_a_byte():
    cheap, dear = Rung(("a",), 10, 1.0), Rung(("b",), 20, 5.0)
    passed = Rung(("c",), 12, 4.0)
    """Twice as dear a byte as going on to `dear`."""
    steps = climb([[cheap, passed, dear], [Rung(("d",), 10, 2.0)]])
    assert [(place, rung.names) for place, rung in steps] == [(0, ("a",)), (1, ("d",)), (0, ("b",))]
    assert Rung.of([cheap, dear]) == Rung(("a", "b"), 30, 6.0)


def test_a_module_that_changes_its_input_or_is_shared_is_not_run_twice_on_its_own():
    def of(module):
        config = Config.make({"trial": {"max_steps": 4, "warmup_steps": 0}})
        words = (Field(shape=(64,)), Field(shape=(64,)))
        return record(
            lambda: module, lambda: {"datamodule": RandomData(words, 4)}, DryRun(config, "32-true", 1, "cpu", None)
        )

    for activation, able in ((nn.SiLU(), True), (nn.SiLU(inplace=True), False)):
        recording = of(Stacked(activation, shared=False))
        found = Checkpoints(recording)._of("blocks.0.outer.1")
        assert bool(found) == able
    assert not Checkpoints(of(Stacked(nn.SiLU(), shared=True)))._of("blocks.0.outer.1")


class Composed(nn.Module):
    """Keeps what lies between its operators."""

    def __init__(self, activation):
        super().__init__()
        self.activation = activation

    def forward(self, x):
        return torch.sigmoid(self.activation(x)) * x


class Stacked(LightningModule):
    def __init__(self, activation, shared):
        super().__init__()
        one = Composed(activation)
        self.blocks = nn.ModuleList(Part(one if shared else Composed(copy.deepcopy(activation))) for _ in range(3))

    def training_step(self, batch, batch_idx):
        x = batch[0]
        for block in self.blocks:
            x = block(x)
        return nn.functional.mse_loss(x, batch[1])

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Part(nn.Module):
    def __init__(self, composed):
        super().__init__()
        self.outer = nn.Sequential(nn.Linear(64, 64), composed, nn.Linear(64, 64))

    def forward(self, x):
        return x + self.outer(x)


def test_what_checkpoints_say_of_a_block_adds_up():
    plain = dry("cpu", "32-true")
    checkpoints = Checkpoints(plain)
    assert checkpoints.checkpointed([]) is plain
    saved = [checkpoints.saved_bytes(f"blocks.{number}") for number in range(LAYERS)]
    assert len(set(saved)) == 1
    # At the end of the last forward pass, the first five blocks have dropped what they kept; the last begins again.
    less = peak(plain) - peak(checkpoints.checkpointed([f"blocks.{number}" for number in range(LAYERS - 1)]))
    assert less == pytest.approx((LAYERS - 1) * saved[0], rel=0.1)
