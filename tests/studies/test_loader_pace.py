import pytest
from hypothesis import given
from hypothesis import strategies as st

from kit.studies.calibration.rules import (
    LARGEST_TURN,
    LEAST_BATCHES,
    LOOK_FRACTION,
    MOST_ROUNDS,
    LoaderSetting,
    block_size,
    long_enough,
    standard_error,
    together,
)

UNEVEN = [0.5, 1.5, 0.5, 1.5, 0.5, 1.5]


@given(st.integers(0, 100), st.integers(1, 64), st.one_of(st.none(), st.integers(1, 32)))
def test_a_block_holds_whole_bursts_of_batches_and_few_of_them(workers, factor, ahead):
    setting = LoaderSetting(num_workers=workers, prefetch_factor=factor, batches_ahead=ahead)
    burst, block = together(setting), block_size(setting)
    assert burst <= block <= 40
    assert block >= LEAST_BATCHES
    assert block % burst == 0 or block == 40
    assert block < burst + LEAST_BATCHES


def test_the_first_look_and_all_turns_stay_within_what_is_allowed():
    assert LOOK_FRACTION + MOST_ROUNDS * LARGEST_TURN <= 1


@pytest.mark.parametrize(
    ("paces", "seconds", "enough"),
    [
        ([1.0] * 5, 5.0, True), ([1.0] * 4, 4.0, False), ([0.01] * 5, 0.05, False), (UNEVEN, 6.0, False),
        (UNEVEN * 2, 12.0, True), ([], 0.0, False),
    ],
)  # fmt: skip
def test_a_pace_is_known_after_blocks_that_agree_or_enough_that_do_not(paces, seconds, enough):
    assert long_enough(paces, seconds) == enough


@pytest.mark.parametrize(("rival", "enough"), [(1.0, False), (0.5, True), (4.0, True), (0.0, False)])
def test_a_pace_that_is_plainly_slower_or_faster_than_the_rival_needs_no_precision(rival, enough):
    assert long_enough(UNEVEN, 6.0, rival) == enough


def test_the_error_of_too_few_blocks_is_everything():
    assert standard_error([1.0]) == 1.0
    assert standard_error([1.0, 1.0]) == 0.0
    assert standard_error([0.0, 0.0]) == 1.0
