"""A pipeline played out agrees with the formulas where they are exact, and is slower where they are not."""

from __future__ import annotations

import math
import statistics

import pytest
from hypothesis import given
from hypothesis import strategies as st
from properties import examples

from kit.chunks.requests import Latency, Pipeline, play


def pipeline(**changes):
    plain = {
        "requests_per_batch": 40, "in_flight": 16, "batches_ahead": 4, "latency": Latency(mean_seconds=0.03),
        "transfer_seconds": 0.0, "line_seconds": 0.0, "admission_seconds": 0.0, "thread_seconds": 0.0,
        "decode_seconds": 0.0, "batches": 100,
    }  # fmt: skip
    return Pipeline(**{**plain, **changes})


def uneven(deviation):
    return Latency(mean_seconds=0.03, deviation_seconds=deviation)


@pytest.mark.parametrize(
    ("changes", "seconds"),
    [
        ({}, 40 * 0.03 / 16),  # Little's law
        ({"transfer_seconds": 0.01}, 40 * 0.04 / 16),
        ({"line_seconds": 0.004}, 40 * 0.004),
        ({"admission_seconds": 0.005}, 40 * 0.005),
        ({"decode_seconds": 0.006}, 40 * 0.006),
        ({"thread_seconds": 0.006}, 40 * 0.006),
        ({"in_flight": 1000}, 0.03 / 5),  # five batches under way at once
    ],
)
def test_one_resource_that_decides_gives_its_formula(changes, seconds):
    assert play(pipeline(**changes)).seconds_per_batch == pytest.approx(seconds, rel=0.08)


@examples(40)
@given(
    requests=st.integers(1, 150), in_flight=st.integers(1, 200), ahead=st.integers(0, 8),
    spread=st.floats(0, 2), line=st.floats(0, 0.002), transfer=st.floats(0, 0.05), thread=st.floats(0, 0.002),
)  # fmt: skip
def test_never_faster_than_any_resource_alone(requests, in_flight, ahead, spread, line, transfer, thread):
    latency = 0.03
    played = play(pipeline(
        requests_per_batch=requests, in_flight=in_flight, batches_ahead=ahead, transfer_seconds=transfer,
        latency=uneven(spread * latency), line_seconds=line, thread_seconds=thread,
    ))  # fmt: skip
    alone = requests * (latency + transfer) / min(in_flight, requests * (1 + ahead))
    drawn = 0.75 if spread else 0.98  # the mean of a finite draw
    if played is not None:
        assert played.seconds_per_batch >= drawn * max(alone, requests * line)
        # Batches that are under way in the end have had some of the thread.
        assert played.seconds_per_batch >= min(drawn, 0.93) * requests * thread


def test_batches_wait_for_the_slowest_of_their_requests():
    alone = {"in_flight": 1000, "batches_ahead": 0}
    even, spread = (play(pipeline(latency=uneven(of * 0.03), **alone)).seconds_per_batch for of in (0, 1))
    assert even == pytest.approx(0.03)
    sigma = math.sqrt(math.log(2))
    expected_largest_of_40 = 2.16  # of a standard normal
    assert spread == pytest.approx(0.03 * math.exp(expected_largest_of_40 * sigma - sigma**2 / 2), rel=0.15)


def test_reading_further_ahead_hides_slow_requests():
    slow = {"in_flight": 64, "requests_per_batch": 20, "latency": uneven(0.06)}
    shallow, deep = (play(pipeline(batches_ahead=ahead, **slow)).seconds_per_batch for ahead in (2, 16))
    assert deep < 0.8 * shallow


def test_many_requests_need_no_playing():
    assert play(pipeline(requests_per_batch=3000)) is None


def test_the_same_question_has_the_same_answer():
    asked = pipeline(latency=uneven(0.02))
    assert play(asked) == play(asked)


@pytest.mark.parametrize(
    ("batches", "changes", "seconds"),
    [
        (5, {"in_flight": 1000}, 0.03),  # five batches under way at once: all come after a latency
        (6, {"in_flight": 1000}, 0.06),
        (16, {"in_flight": 1000}, 4 * 0.03),
        (1000, {"in_flight": 1000}, 200 * 0.03),
        (3, {"batches_ahead": 0, "in_flight": 40}, 3 * 0.03),
        (3, {"line_seconds": 0.004}, 0.03 + 3 * 40 * 0.004),
    ],
)
def test_an_epoch_begins_with_an_empty_pipeline(batches, changes, seconds):
    played = play(pipeline(batches=batches, **changes))
    assert batches * played.seconds_per_batch + played.waited_seconds == pytest.approx(seconds, rel=0.02)


@examples(40)
@given(
    deviation=st.floats(0, 0.03), slow=st.floats(0, 0.1), factor=st.floats(1, 4), count=st.integers(1000, 5000),
)  # fmt: skip
def test_latencies_have_the_mean_that_was_given_and_no_smaller_deviation(deviation, slow, factor, count):
    drawn = Latency(mean_seconds=0.03, deviation_seconds=deviation, slow_fraction=slow, slow_factor=factor).draw(count)
    assert statistics.fmean(drawn) == pytest.approx(0.03, rel=0.08)
    assert statistics.pstdev(drawn) >= 0.7 * deviation - 1e-9  # which is less than numbers near 0.03 tell
    if slow == 0 or factor == 1:  # which ranks are slow is no matter of chance then
        assert statistics.fmean(drawn) == pytest.approx(0.03, rel=0.005)
        assert statistics.pstdev(drawn) >= 0.95 * deviation - 1e-9
    usual = statistics.median(drawn)
    assert all(seconds > 0 for seconds in drawn)
    if deviation == 0:
        assert sum(seconds > 1.01 * usual for seconds in drawn) <= math.ceil(slow * count)


def test_a_few_slow_requests_hold_up_more_batches_than_the_same_deviation_spread_over_all():
    plain = {"in_flight": 32, "requests_per_batch": 12}
    deviation = 0.03 * math.sqrt((1 + 0.01 * 24) / 1.04**2 - 1)  # of one in a hundred, five times as long
    few = Latency(mean_seconds=0.03, deviation_seconds=deviation, slow_fraction=0.01, slow_factor=5)
    spread, tail = (play(pipeline(latency=latency, **plain)).seconds_per_batch for latency in (uneven(deviation), few))
    assert tail > 1.05 * spread
