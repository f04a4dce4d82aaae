"""Which guesses decide the memory, on real dry runs: branches, numbers, checks, selections, and an optimizer's."""

import re

import pytest
import torch
from dry_parts import Perceptron, loader, measure, peak, predict, vectors
from torch import nn
from torch.nn import functional

from kit.config import Config
from kit.memory.record.dry_run import DryRun, record
from kit.memory.replay.cards import target_of
from kit.memory.replay.estimate import estimate
from kit.memory.replay.replay import settle

CONFIG = Config.make({"trial": {"max_steps": 4, "warmup_steps": 0}})


def settled(module, kind="cpu"):
    run = DryRun(CONFIG, "32-true", 1, kind)
    return settle(
        record(module, lambda: loader(vectors), run),
        lambda guess: record(module, lambda: loader(vectors), run, None, guess),
    )


class Harmless(Perceptron):
    def loss(self, batch):
        loss = super().loss(batch)
        self.last, self.good = loss.item(), bool(loss < 1)
        return loss


class Branching(Perceptron):
    """Takes the wide way when its input is positive, which the data always are."""

    def __init__(self):
        super().__init__()
        self.wide = nn.Sequential(nn.Linear(256, 4096), nn.ReLU(), nn.Linear(4096, 8))

    def loss(self, batch):
        x, y = batch
        out = self.wide(x) if (x.abs().sum() > 0) else self.layers(x) + 0 * self.wide[2].bias
        return functional.mse_loss(out, y)


class Waiting(Perceptron):
    """Goes on until a number is large, which takes many operators."""

    def loss(self, batch):
        x, _ = batch
        with torch.no_grad():
            while not x.sum() > 1e9:
                for _ in range(100):
                    x = x + 1
        return super().loss(batch)


class Switched(Perceptron):
    """An adapter beside a frozen layer, which a random number switches on, as peft's LoHa and LoKr have it."""

    def __init__(self):
        super().__init__()
        self.layers.requires_grad_(False)
        self.adapter = nn.Linear(256, 8)

    def loss(self, batch):
        x, y = batch
        out = self.layers(x)
        if not self.training or torch.rand(1) > 0.0:
            out = out + self.adapter(x)
        return functional.mse_loss(out, y)


class Checking(Perceptron):
    def loss(self, batch):
        if (batch[0] > 1e9).any():
            raise ValueError("too large")
        return super().loss(batch)


class Counting(Perceptron):
    def loss(self, batch):
        x, y = batch
        times = int((x.abs() > 0).any().long().sum())
        return functional.mse_loss(self.layers(x.repeat(64 * times, 1)), y.repeat(64 * times, 1))


class Selecting(Perceptron):
    def loss(self, batch):
        x, y = batch
        return super().loss(batch) + self.layers[0](x.repeat(200, 1)[y.repeat(200, 1)[:, 0] > 1]).sum()


class SelectingOften(Selecting):
    """What is selected decides how many operators run."""

    def loss(self, batch):
        loss = super().loss(batch)
        for _ in range(min(3, len(torch.nonzero(batch[1] > 1)))):
            loss = loss * 2
        return loss


class SelectingKnown(Perceptron):
    def loss(self, batch):
        return super().loss(batch) + batch[0][:3, torch.eye(3).nonzero()[:, 0]].sum()


class Remembering(Perceptron):
    history = 5

    def configure_optimizers(self):
        return torch.optim.LBFGS(self.parameters(), history_size=self.history)


class RememberingAll(Remembering):
    history = 100


def test_what_changes_nothing_is_no_condition():
    found = settled(Harmless)
    assert len(found.facts["guesses"]) == 2
    assert (found.facts["conditions"], found.facts["bounds"]) == ([], [])


def test_of_two_branches_the_one_that_needs_more_is_kept():
    assert peak(predict(Branching, lambda: loader(vectors), CONFIG)) < peak(found := settled(Branching))
    assert found.facts["conditions"] == []
    assert peak(found) >= 0.99 * measure(Branching, lambda: loader(vectors), CONFIG)


def test_a_check_that_ends_the_training_is_no_condition():
    found = settled(Checking)
    assert found.facts["guesses"] == []
    assert found.facts["conditions"] == []


def test_a_count_that_sets_a_size_is_a_condition_of_the_verdict():
    found = estimate(settled(Counting, "cuda"), target_of("H100-80GB"))
    assert (found.verdict, found.fits, found.may_fit) == ("fits if", False, True)
    assert "count at test_guesses.py:" in str(found).splitlines()[0]
    assert type(found).from_dict(found.to_dict()).conditions == found.conditions


def test_a_selection_taken_whole_is_an_upper_bound_that_makes_nothing_too_large():
    found = settled(Selecting, "cuda")
    assert found.facts["conditions"] == []
    assert found.facts["least_fraction"] < 1
    roomy = estimate(found, target_of("A100-80GB"))
    assert roomy.verdict == "fits"
    assert any("upper bound" in reason for reason in roomy.reasons)
    too_small_for_all = roomy.outside_bytes[1] + roomy.device_reserved_bytes - (1 << 20)
    assert estimate(found, target_of(too_small_for_all)).verdict == "unknown"


def test_operators_whose_sizes_a_selection_decides_are_known():
    found = settled(Selecting)
    sized = [found.operator_name[place] for place in found.facts["selected"]]
    names = {found.names[name].partition(".")[0] for name in sized}
    assert {"index", "addmm", "mm"} <= names
    assert not {"mse_loss", "_foreach_add_"} & names
    assert 0 < len(sized) < len(found.operator_name) / 2
    assert settled(SelectingKnown).facts["selected"] == []


def test_a_selection_that_decides_what_runs_tells_no_sizes():
    assert settled(SelectingOften).facts["selected"] is None


@pytest.mark.slow
def test_an_optimizer_that_keeps_more_with_every_step_is_a_condition():
    full = settled(Remembering)
    assert any("lbfgs.py" in condition for condition in full.facts["conditions"])
    # A tenth is open: two flat gradients of nine that a real step holds at its peak.
    assert peak(full) == pytest.approx(measure(Remembering, lambda: loader(vectors), CONFIG), rel=0.11)
    assert any("optimizer keeps" in condition for condition in settled(RememberingAll).facts["conditions"])


@pytest.mark.parametrize("verdict", ["fits if", "fits"])
def test_without_second_answers_every_guess_but_an_upper_bound_is_a_condition(verdict):
    module = Harmless if verdict == "fits if" else Perceptron
    recording = predict(module, lambda: loader(vectors), CONFIG, device_kind="cuda")
    assert estimate(recording, target_of("H100-80GB")).verdict == verdict


def test_a_branch_without_which_nothing_is_trained_is_taken_and_told():
    found = settled(Switched)
    assert not found.facts["unknown"]
    (condition,) = found.facts["conditions"]
    assert condition.startswith("the condition at test_guesses.py")
    assert condition.endswith(" is True")
    assert peak(found) == pytest.approx(measure(Switched, lambda: loader(vectors), CONFIG), rel=0.01)
    assert estimate(settled(Switched, "cuda"), target_of("H100-80GB")).verdict == "fits if"


def test_a_loop_that_was_not_followed_to_its_end_stays_a_condition():
    [condition] = settled(Waiting).facts["conditions"]
    assert re.search(r"what waits at test_guesses.py:\d+ goes on no longer than 50 rounds", condition)
