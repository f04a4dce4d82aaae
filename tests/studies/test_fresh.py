"""A measurement in a process of its own: what it returns, how it fails, and what of it stays here."""

import os

import pytest

from kit.errors import ConfigError, Problem, TrialError
from kit.studies.calibration.fresh import fastest_run, in_fresh_process
from kit.studies.calibration.job import busy_reasons


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


def test_a_step_takes_as_long_as_in_its_fastest_run():
    """Other programs slow some of them; a single fast step tells nothing."""
    slowed, quiet = [0.5, 0.4, 0.6, 0.5], [0.11, 0.1, 0.1, 0.3]
    assert fastest_run([*slowed, *quiet, *slowed]) == pytest.approx(0.105)
    assert fastest_run([*slowed, 0.01]) == pytest.approx(0.5)
    assert fastest_run([0.3, 0.1]) == pytest.approx(0.2)


def test_a_busy_machine_is_told_and_what_was_started_here_is_none_of_it():
    began, ended = (100.0, {1: 10.0, 2: 5.0}), (120.0, {1: 18.0, 3: 6.0})
    (reason,) = busy_reasons(began, ended, seconds=10.0)
    assert "other programs used 1.1 cores" in reason
    assert "machine was busy" in reason
    assert busy_reasons(began, (110.0, {1: 20.0, 2: 5.0}), seconds=10.0) == []
