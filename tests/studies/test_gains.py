"""When a gain that short trials measure is known: pairs in turn, and what a machine that drifts does to them."""

import math
import random

import pytest

from kit.studies.diagnosis.gains import LEAST_PAIRS, PAIRS, decided, difference

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
