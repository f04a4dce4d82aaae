"""The page cache from epoch to epoch: a formula beside a cache that is played row by row."""

import re
from collections import OrderedDict

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kit.chunks.resources import DiskRates, WorkingSet, hit_fraction
from kit.errors import PlanError

RATES = DiskRates(memory_bytes_per_second=1e9, random_bytes_per_second=1e8, ordered_bytes_per_second=5e8)


def played(rows, kept, in_order, epochs=6):
    """Hits of the later epochs of a cache that drops what was read longest ago."""
    cache, hits, rng = OrderedDict(), 0, np.random.default_rng(0)
    for epoch in range(epochs):
        for row in range(rows) if in_order else rng.permutation(rows):
            hits += row in cache and epoch > 0
            cache[row] = None
            cache.move_to_end(row)
            if len(cache) > kept:
                cache.popitem(last=False)
    return hits / (rows * (epochs - 1))


@pytest.mark.parametrize("fraction", [0.1, 0.35, 0.6, 0.9, 1.0])
def test_the_formula_is_what_a_cache_does(fraction):
    rows = 3000
    assert hit_fraction(fraction) == pytest.approx(played(rows, int(rows * fraction), False), abs=0.01)
    assert hit_fraction(fraction, "in order") == played(rows, int(rows * fraction), True)


@given(st.floats(0, 2), st.floats(0, 2))
def test_a_larger_cache_never_answers_less_and_never_more_than_it_holds(one, other):
    small, large = sorted((one, other))
    assert 0 <= hit_fraction(small) <= hit_fraction(large) + 1e-12
    assert hit_fraction(large) <= min(1, large)


def working_set(**changes):
    given_as = {
        "rows": 1000, "row_bytes": 10_000, "batch_size": 100, "step_seconds": 0.001, "free_memory_bytes": 5_000_000,
        "device_bytes": 1_000_000,
    }  # fmt: skip
    return WorkingSet(**given_as | changes)


def test_there_are_three_cases():
    assert working_set(device_bytes=10_000_000).case == "fits the device"
    assert working_set(free_memory_bytes=10_000_000).case == "fits memory"
    assert working_set().case == "fits neither"


def test_an_epoch_takes_the_longer_of_computing_and_reading():
    memory = working_set(free_memory_bytes=10_000_000)
    assert memory.read_seconds(RATES) == pytest.approx(0.001)
    assert memory.epoch_seconds(RATES) == pytest.approx(11 * 0.001)
    disk = working_set(free_memory_bytes=0)
    assert disk.epoch_seconds(RATES) == pytest.approx(10 * 0.01 + 0.001)
    assert disk.disk_bytes() == 10_000_000
    ordered = working_set(free_memory_bytes=0, order="in order", step_seconds=1)
    assert ordered.epoch_seconds(RATES) == pytest.approx(10 + 0.002)


def test_what_is_foreseen_is_said_in_words():
    assert re.fullmatch("9.54 MiB fits neither: 15% .*memory.*, .*epoch.* 87.2 ms", working_set().sentence(RATES))


def test_what_cannot_be_is_refused():
    with pytest.raises(PlanError, match="at least 1"):
        working_set(rows=0)
    with pytest.raises(PlanError, match="in the cache"):
        hit_fraction(-0.1)
    with pytest.raises(PlanError, match="random_bytes_per_second"):
        DiskRates(memory_bytes_per_second=1, random_bytes_per_second=0, ordered_bytes_per_second=1)
