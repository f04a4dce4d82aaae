"""A measurement in a process of its own: what it returns, how it fails, and what of it stays here."""

import os

import pytest

from kit.errors import ConfigError, Problem, TrialError
from kit.studies.calibration.fresh import in_fresh_process


def test_the_answer_is_of_another_process_and_nothing_it_did_stays():
    kept = []

    def work():
        kept.append("read")
        return os.getpid(), kept

    process, there = in_fresh_process(work)
    assert process != os.getpid()
    assert there == ["read"]
    assert kept == []


def test_an_error_is_raised_here():
    def refuse():
        raise ConfigError([Problem("data", "gives no batch")])

    with pytest.raises(ConfigError, match="gives no batch"):
        in_fresh_process(refuse)


def test_an_error_that_cannot_travel_is_told():
    class Odd(Exception):
        pass

    def fail():
        raise Odd("in a class that only this function knows")

    with pytest.raises(TrialError, match="Odd: in a class"):
        in_fresh_process(fail)


def test_a_process_that_dies_or_never_answers_is_an_error():
    with pytest.raises(TrialError, match="exit code 3"):
        in_fresh_process(lambda: os._exit(3))
    with pytest.raises(TrialError, match="longer than"):
        in_fresh_process(lambda: os.read(os.pipe()[0], 1), seconds=0.2)
