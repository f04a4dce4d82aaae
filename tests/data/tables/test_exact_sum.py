"""ExactSum: equal to sums of fractions, for every float64, in every order and cut."""

from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kit.data.tables.statistics import ExactSum

FLOATS = st.lists(st.floats(allow_nan=False, allow_infinity=False), max_size=30)


def sum_of(values, squares=False):
    total = ExactSum()
    (total.add_squares if squares else total.add)(np.array(values, np.float64))
    return total


@given(FLOATS)
def test_a_sum_is_that_of_the_fractions(values):
    assert sum_of(values).value() == sum(map(Fraction, values))


@given(FLOATS)
def test_a_sum_of_squares_is_that_of_the_fractions(values):
    assert sum_of(values, squares=True).value() == sum(Fraction(value) ** 2 for value in values)


@given(FLOATS, FLOATS)
def test_parts_that_are_merged_are_the_whole(one, other):
    total = sum_of(one)
    total.merge(sum_of(other))
    assert total.value() == sum_of([*other, *one]).value()


@pytest.mark.parametrize("value", [5e-324, -2.2250738585072014e-308, 1.7976931348623157e308, -0.1])
def test_a_hundred_thousand_of_the_most_extreme_numbers_are_added(value):
    assert sum_of([value] * 100_000).value() == 100_000 * Fraction(value)
    assert sum_of([value] * 100_000, squares=True).value() == 100_000 * Fraction(value) ** 2


def test_what_float64_loses_is_kept():
    assert sum_of([1e16, 1.0, -1e16]).value() == 1
    assert np.sum([1e16, 1.0, -1e16]) == 0
