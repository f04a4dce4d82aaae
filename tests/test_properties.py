"""What CI tries of cases that cross parameters still shows every value, and every pair where there are three."""

from itertools import combinations, product

import pytest
from properties import at_night, crossed, nightly

THREE = ("rgb", [8, 50, 90, 7], {"a": 1, "b": 2})


def test_every_pair_of_three_parameters_meets():
    cases = crossed(*THREE)
    for one, other in combinations(range(3), 2):
        assert {(case[one], case[other]) for case in cases} == {*product(list(THREE[one]), list(THREE[other]))}
    assert nightly() or len(cases) < 24


def test_every_value_of_two_parameters_comes():
    cases = crossed(*THREE[:2])
    assert [{case[at] for case in cases} for at in range(2)] == [set(THREE[0]), set(THREE[1])]
    assert nightly() or len(cases) == 4


def test_cases_are_the_same_each_time():
    assert crossed(*THREE) == crossed(*THREE)


def test_what_ci_tries_is_a_case():
    with pytest.raises(AssertionError, match="'c'"):
        at_night(["a", "b"], ["c"])
