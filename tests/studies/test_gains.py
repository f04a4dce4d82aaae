"""When a gain that short trials measure is known: pairs in turn, and what a machine that drifts does to them."""

import math
import random

import pytest
from diagnosis_parts import evidence, source, work

from kit.studies.diagnosis import gains as room
from kit.studies.diagnosis.gains import LEAST_PAIRS, PAIRS, decided, difference, measured_gains, worth_measuring

THRESHOLD = 1.15


def pair(gain, drift=0.0, noise=0.0, seed=0):
    """Eight steps before, and eight after, when the machine had become faster by `drift`."""
    draw = random.Random(seed)
    before, after = ([math.log(speed) + noise * draw.gauss(0, 1) for _ in range(8)] for speed in (100, 100 * gain))
    return before, [value + drift for value in after]


def pairs_until_decided(of_pair):
    found = []
    while not decided(found, THRESHOLD):
        found.append(of_pair(len(found)))
    return found


def test_a_gain_is_that_of_the_medians():
    low, high = difference([pair(1.5)])
    assert (low, high) == pytest.approx((1.5, 1.5))
    low, high = difference([pair(1.5, noise=0.1), pair(1.5, noise=0.1, seed=1)])
    assert low < 1.5 < high


def test_one_step_that_was_held_up_moves_no_gain():
    held_up = difference([([0.0, 0.01, 0.0, -0.01, -3.0], [0.7, 0.71, 0.7, 0.69, 0.7])])
    assert held_up == pytest.approx((math.exp(0.7),) * 2, rel=0.05)


def test_no_gain_takes_one_pair_and_a_gain_two():
    assert len(pairs_until_decided(lambda _: pair(0.9))) == 1
    assert len(pairs_until_decided(lambda turn: pair(1.8, noise=0.05, seed=turn))) == LEAST_PAIRS


def test_a_machine_that_becomes_faster_makes_no_gain():
    """In turn, what ran second was first in the pair before."""
    found = pairs_until_decided(lambda turn: pair(1.02, drift=0.25 if turn % 2 == 0 else -0.25, seed=turn))
    assert len(found) > 1
    low, high = difference(found)
    assert low < THRESHOLD
    assert low < 1.02 < high


def test_what_stays_undecided_ends():
    assert len(pairs_until_decided(lambda turn: pair(1.15, noise=0.3, seed=turn))) <= PAIRS


@pytest.mark.parametrize("gain", [1.0, 1.05, 1.5, 2.0])
def test_of_a_hundred_drifting_machines_few_are_told_a_gain_that_is_none_or_miss_one(gain):
    """A drift of 10 % from run to run, noise of 10 % from step to step."""
    named = 0
    for seed in range(100):
        draw = random.Random(seed)
        found = pairs_until_decided(lambda turn: pair(gain, draw.gauss(0, 0.1), 0.1, 1000 * seed + turn))  # noqa: B023
        named += difference(found)[0] >= THRESHOLD
    assert named <= 3 if gain < THRESHOLD else named >= 95


OWN = evidence(whose_batches="your DataLoader", given_loader=True, work=work(samples=4))


def measured_with(monkeypatch, samples_of):
    """Gains where a step takes as long whatever its batch, of `samples_of` what is asked for."""

    def few_steps(source, _):
        return [{"samples": samples_of(source.batch_size or 4), "step_seconds": 0.1}] * 8

    monkeypatch.setattr(room, "few_steps", few_steps)
    return measured_gains(OWN, source(OWN))


def test_a_larger_batch_of_the_callers_own_data_is_tried(monkeypatch):
    gains, notes = measured_with(monkeypatch, lambda asked: asked)
    assert gains["batch too small"] == pytest.approx((4, 4))
    assert notes == []


def test_data_that_makes_the_same_batches_whatever_is_asked_gets_no_gain_but_a_way_out(monkeypatch):
    gains, (note,) = measured_with(monkeypatch, lambda _: 4)
    assert "batch too small" not in gains
    assert "a batch of 16 from your DataLoader" in note
    assert "new_data" in note


@pytest.mark.parametrize("part", ["wait", "validation", "checkpoint"])
def test_no_larger_batch_is_tried_where_most_of_a_step_is_no_training(part):
    few = {"forward": 0.1, "optimizer": 0.05, part: 0.6, "other": 0.0}
    found = evidence(work=work(samples=4), shares={**few, "backward": 1 - sum(few.values())})
    assert "batch too small" not in worth_measuring(found)
    assert "batch too small" in worth_measuring(evidence(work=work(samples=4)))
