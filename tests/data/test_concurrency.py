"""The limit of open requests, against a store that is played out: it finds what fills the store, and no more."""

from __future__ import annotations

from collections import deque

import numpy as np
import pytest

from kit.data.stores.transfer import CROWDED, FEWEST, REFUSED, ConcurrencyLimit

MOST = 256
LATENCY_SECONDS = 0.03


def play(limit, seconds_when_open, answers=5000, refuses=lambda _open: False, demand=10_000):
    """Requests without end, answered in turn after as long as so many open ones take; how many were open, each time.

    Returns `(open at each answer, fraction refused of the last quarter)`.
    """
    sent, opened, refusals = deque(), [], []
    for _ in range(answers):
        while len(sent) < min(limit.now, demand):
            sent.append((limit.round, seconds_when_open(len(sent) + 1), refuses(len(sent) + 1)))
        if demand > limit.now:
            limit.held_back()
        number, seconds, refused = sent.popleft()
        opened.append(len(sent) + 1)
        refusals.append(refused)
        if refused:
            limit.refused(number)
        else:
            limit.answered(number, seconds)
    return opened, float(np.mean(refusals[-answers // 4 :]))


def latency(_open):
    return LATENCY_SECONDS


def full_from(count):
    """Latency for up to `count` open requests; more share what these get."""
    return lambda opened: LATENCY_SECONDS * max(1.0, opened / count)


def test_all_that_are_allowed_are_open_where_only_latency_binds():
    limit = ConcurrencyLimit(MOST)
    opened, _ = play(limit, latency, answers=1000)
    assert opened[0] == FEWEST
    assert (limit.now, limit.reason) == (MOST, "")
    assert opened.index(MOST) < 2 * MOST  # and soon


@pytest.mark.parametrize("filling", [40, 64, 100])
def test_a_full_wire_gets_enough_to_stay_full_and_not_much_more(filling):
    limit = ConcurrencyLimit(MOST)
    opened, _ = play(limit, full_from(filling))
    assert filling < min(opened[-1000:])
    assert max(opened[-1000:]) <= 2.5 * filling
    assert limit.reason == CROWDED


def test_times_that_vary_change_nothing():
    random, limit = np.random.default_rng(0), ConcurrencyLimit(MOST)
    opened, _ = play(limit, lambda opened: full_from(64)(opened) * random.lognormal(0, 0.3), answers=20_000)
    assert np.percentile(opened[2000:], 5) > 64
    assert np.percentile(opened[2000:], 95) < 3 * 64


def test_a_wire_that_fewest_fill_is_left_to_them_and_their_double():
    limit = ConcurrencyLimit(MOST)
    opened, _ = play(limit, full_from(4))
    assert max(opened[-1000:]) <= 2.5 * FEWEST


def test_when_the_crowd_of_others_has_gone_the_limit_rises_again():
    limit = ConcurrencyLimit(MOST)
    play(limit, full_from(64))
    few = limit.now
    play(limit, latency)
    assert few < MOST == limit.now
    assert limit.reason == ""


def test_a_network_that_has_become_slower_is_not_taken_for_a_crowd():
    limit = ConcurrencyLimit(MOST)
    play(limit, latency)
    play(limit, lambda _open: 10 * LATENCY_SECONDS, answers=20_000)
    assert limit.now == MOST


def test_a_store_that_refuses_is_asked_for_about_what_it_answers():
    """150 of those open are answered within the rate; the part of them beyond it is refused."""
    random, limit = np.random.default_rng(0), ConcurrencyLimit(MOST)
    opened, refused = play(
        limit, latency, answers=20_000, refuses=lambda opened: random.random() < max(0.0, 1 - 150 / opened)
    )
    assert 0 < refused < 0.06
    assert 120 < np.mean(opened[-5000:]) < 180
    assert limit.reason == REFUSED


def test_a_refusal_now_and_then_is_none_of_the_rate():
    limit, turn = ConcurrencyLimit(MOST), iter(range(10_000))
    play(limit, latency, refuses=lambda _open: next(turn) % 500 == 499)
    assert limit.now == MOST


def test_without_demand_nothing_is_learned_and_nothing_changes():
    limit = ConcurrencyLimit(MOST)
    play(limit, latency, demand=FEWEST)
    assert (limit.now, limit.reason) == (FEWEST, "")


def test_a_limit_below_the_fewest_stays_as_it_is():
    limit = ConcurrencyLimit(8)
    play(limit, full_from(1))
    assert limit.now == 8


def test_answers_to_what_an_earlier_round_sent_do_not_count():
    limit = ConcurrencyLimit(MOST)
    play(limit, latency, answers=FEWEST)
    assert limit.now == 2 * FEWEST
    for _ in range(100):
        limit.answered(0, 100.0)
        limit.refused(0)
    assert limit.now == 2 * FEWEST
