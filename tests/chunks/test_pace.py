"""A pipeline played out agrees with the formulas where they are exact, and is slower where they are not."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st
from properties import examples

from kit.chunks.requests import Pipeline, play


def pipeline(**changes):
    plain = {
        "requests_per_batch": 40, "in_flight": 16, "batches_ahead": 4, "latency_seconds": 0.03,
        "latency_deviation_seconds": 0.0, "transfer_seconds": 0.0, "line_seconds": 0.0, "admission_seconds": 0.0,
        "decode_seconds": 0.0, "batches": 100,
    }  # fmt: skip
    return Pipeline(**{**plain, **changes})


@pytest.mark.parametrize(
    ("changes", "seconds"),
    [
        ({}, 40 * 0.03 / 16),  # Little's law
        ({"transfer_seconds": 0.01}, 40 * 0.04 / 16),
        ({"line_seconds": 0.004}, 40 * 0.004),
        ({"admission_seconds": 0.005}, 40 * 0.005),
        ({"decode_seconds": 0.006}, 40 * 0.006),
        ({"in_flight": 1000}, 0.03 / 5),  # five batches under way at once
    ],
)
def test_one_resource_that_decides_gives_its_formula(changes, seconds):
    assert play(pipeline(**changes)).seconds_per_batch == pytest.approx(seconds, rel=0.08)


@examples(40)
@given(
    requests=st.integers(1, 150), in_flight=st.integers(1, 200), ahead=st.integers(0, 8),
    spread=st.floats(0, 2), line=st.floats(0, 0.002), transfer=st.floats(0, 0.05),
)  # fmt: skip
def test_never_faster_than_any_resource_alone(requests, in_flight, ahead, spread, line, transfer):
    latency = 0.03
    played = play(pipeline(
        requests_per_batch=requests, in_flight=in_flight, batches_ahead=ahead, transfer_seconds=transfer,
        latency_deviation_seconds=spread * latency, line_seconds=line,
    ))  # fmt: skip
    alone = requests * (latency + transfer) / min(in_flight, requests * (1 + ahead))
    drawn = 0.75 if spread else 0.98  # the mean of a finite draw
    assert played is None or played.seconds_per_batch >= drawn * max(alone, requests * line)


def test_batches_wait_for_the_slowest_of_their_requests():
    alone = {"in_flight": 1000, "batches_ahead": 0}
    even, uneven = (
        play(pipeline(latency_deviation_seconds=spread * 0.03, **alone)).seconds_per_batch for spread in (0, 1)
    )
    assert even == pytest.approx(0.03)
    sigma = math.sqrt(math.log(2))
    expected_largest_of_40 = 2.16  # of a standard normal
    assert uneven == pytest.approx(0.03 * math.exp(expected_largest_of_40 * sigma - sigma**2 / 2), rel=0.15)


def test_reading_further_ahead_hides_slow_requests():
    slow = {"in_flight": 64, "requests_per_batch": 20, "latency_deviation_seconds": 0.06}
    shallow, deep = (play(pipeline(batches_ahead=ahead, **slow)).seconds_per_batch for ahead in (2, 16))
    assert deep < 0.8 * shallow


def test_many_requests_need_no_playing():
    assert play(pipeline(requests_per_batch=3000)) is None


def test_the_same_question_has_the_same_answer():
    asked = pipeline(latency_deviation_seconds=0.02)
    assert play(asked) == play(asked)


@pytest.mark.parametrize(
    ("batches", "changes", "seconds"),
    [
        (5, {"in_flight": 1000}, 0.03),  # five batches under way at once: all come after a latency
        (6, {"in_flight": 1000}, 0.06),
        (16, {"in_flight": 1000}, 4 * 0.03),
        (1000, {"in_flight": 1000}, 200 * 0.03),
        (3, {"batches_ahead": 0, "in_flight": 40}, 3 * 0.03),
        (3, {"line_seconds": 0.004}, 3 * 40 * 0.004),
    ],
)
def test_an_epoch_begins_with_an_empty_pipeline(batches, changes, seconds):
    played = play(pipeline(batches=batches, **changes))
    assert batches * played.seconds_per_batch + played.waited_seconds == pytest.approx(seconds, rel=0.02)
