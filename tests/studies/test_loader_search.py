"""The rules as a whole, on loaders whose truth is known."""

from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from noisy_loader import BATCH_BYTES, BOUNDS, PLAIN, NoisyLoader, measured
from properties import examples

from kit.studies.calibration.rules import ENOUGH, GAIN, MOST_ROUNDS, LoaderSetting, choose, standard_error
from kit.studies.calibration.search import Bounds, search, with_turn

LOADERS = 300
FAST = LoaderSetting(num_workers=2, prefetch_factor=2)


@pytest.fixture(scope="module")
def judged():
    """(true throughput over the best, seconds over those of exhaustive search) of each loader."""
    found = []
    for seed in range(LOADERS):
        loader = NoisyLoader(seed)
        chosen, *_, seconds = loader.calibrate()
        found.append((loader.true(chosen) / loader.best(), seconds / loader.exhaustive_seconds()))
    return found


@pytest.mark.slow
def test_the_choice_is_within_a_tenth_of_the_best_on_nineteen_of_twenty_noisy_machines(judged):
    assert sum(speed >= ENOUGH for speed, _ in judged) >= 0.95 * LOADERS


@pytest.mark.slow
def test_a_third_of_the_time_of_exhaustive_search_is_enough_on_nineteen_of_twenty(judged):
    assert sum(time <= 1 / 3 for _, time in judged) >= 0.95 * LOADERS


@given(st.integers(0, 10**9))
@examples(60)
def test_without_noise_every_choice_is_within_a_tenth_of_the_best_but_for_gains_too_small_to_go_after(seed):
    loader = NoisyLoader(seed, noise=0.0)
    chosen, *_ = loader.calibrate()
    assert loader.true(chosen) >= ENOUGH * loader.best() / GAIN


@given(st.integers(0, 10**9), st.floats(0, 3))
@examples(60)
def test_each_setting_is_looked_at_once_and_none_gets_more_than_is_allowed(seed, noise):
    _, figures, asks, _ = NoisyLoader(seed, noise).calibrate()
    looked = [ask.setting for ask in asks if not ask.again]
    assert looked == list(figures)
    assert len(looked) == len(set(looked))
    spent = Counter()
    for ask in asks:
        spent[ask.setting] += ask.fraction
    assert max(spent.values()) <= 1
    turns = Counter(ask.setting for ask in asks if ask.again)
    assert max(turns.values(), default=0) <= MOST_ROUNDS
    assert {setting: item.turns for setting, item in figures.items() if item.turns} == turns


@given(st.integers(0, 10**9))
@examples(60)
def test_who_is_measured_in_turn_is_alone_only_beside_what_starts_too_slowly(seed):
    _, figures, asks, _ = NoisyLoader(seed).calibrate()
    runs = ["".join(group) for group in "".join(str(int(ask.again)) for ask in asks).split("0")]
    assert "1" not in runs or not all(map(BOUNDS.may_turn, figures.values()))


def follow(speeds, bounds=BOUNDS, eligible=lambda _: True, first_batch_seconds=0.1):
    """Asks of a search over `speeds`: a setting's figures, one after another, the last again and again."""
    given = {setting: list(figures) for setting, figures in speeds.items()}

    def sweep(measure):
        for setting in given:
            measure(setting)
        return ["the end"]

    figures, asks = {}, []

    def measure(ask):
        asks.append(ask)
        of = given[ask.setting]
        speed = of.pop(0) if len(of) > 1 else of[0]
        found = speed and replace(measured(ask.setting, speed, standard_error(paces(speed))), paces=paces(speed))
        return found and replace(found, first_batch_seconds=first_batch_seconds)

    reasons = search(sweep, measure, bounds, figures, eligible, lambda: BATCH_BYTES)
    return figures, asks, reasons


def paces(speed):
    return (0.9 / speed, 1.1 / speed) * 3


def turns(asks):
    return [ask.setting for ask in asks if ask.again]


def test_a_choice_that_was_the_luck_of_one_second_falls_when_it_is_measured_in_turn():
    figures, asks, reasons = follow({PLAIN: [90.0, 50.0], FAST: [80.0, 80.0]})
    assert choose(list(figures.values()), BATCH_BYTES).setting == FAST
    assert turns(asks) == [PLAIN, FAST]
    assert "in turn" in reasons[0]
    assert reasons[1:] == ["the end"]


def test_who_is_in_doubt_gets_further_turns_and_no_more_than_three():
    _, asks, _ = follow({PLAIN: [10.0, 9.05, 9.05, 9.02], FAST: [10.0]})
    assert turns(asks) == [PLAIN, FAST] * MOST_ROUNDS


def test_nothing_is_measured_in_turn_where_it_would_not_pay():
    assert not turns(follow({PLAIN: [1.0]})[1])
    few = Bounds(timeout_seconds=20.0, most_batches=8)
    found = follow({PLAIN: [1.0], FAST: [1.0]}, few)[1]
    assert [ask.fraction for ask in found] == [1.0, 1.0]
    assert not turns(follow({PLAIN: [1.0], FAST: [1.0]}, first_batch_seconds=5.0)[1])
    assert not turns(follow({PLAIN: [1.0], FAST: [0.7]})[1]), "no second is so much faster than the next"
    cached = replace(PLAIN, requests_in_flight=8, batches_ahead=1, cache_bytes=1 << 20)
    assert BOUNDS.first_look(cached) == 1.0
    filled = replace(measured(cached, 1.0), warmup_seconds=BOUNDS.slow_start_seconds)
    assert (BOUNDS.may_turn(filled), BOUNDS.may_turn(replace(filled, warmup_seconds=0.5))) == (False, True)
    assert BOUNDS.may_turn(replace(filled, setting=PLAIN)), "what it reads before it counts is part of a turn"


def test_what_cannot_run_or_may_not_be_chosen_takes_no_turns():
    third = LoaderSetting(num_workers=4, prefetch_factor=2)
    figures, asks, _ = follow({PLAIN: [1.0], FAST: [None], third: [1.0]}, eligible=lambda setting: setting != third)
    assert list(figures) == [PLAIN, third]
    assert not turns(asks)


def test_what_fails_in_its_turn_keeps_its_first_figures():
    figures, asks, _ = follow({PLAIN: [1.0, None], FAST: [1.0]})
    assert turns(asks) == [PLAIN, FAST]
    assert figures[PLAIN].turns == 0


def test_the_fastest_so_far_is_what_a_first_look_is_compared_with():
    _, asks, _ = follow({PLAIN: [3.0], FAST: [2.0], LoaderSetting(num_workers=4, prefetch_factor=2): [1.0]})
    assert [ask.rival for ask in asks if not ask.again] == [0.0, 3.0, 3.0]


def test_figures_of_turns_replace_the_first_look_and_add_up():
    first = replace(measured(PLAIN, 9.0), first_batch_seconds=0.5, paces=(1.0,))
    turn = replace(measured(PLAIN, 4.0), batches=8, seconds=2.0, paces=(0.2, 0.3))
    once = with_turn(first, turn)
    assert (once.batches_per_second, once.turns, once.first_batch_seconds) == (4.0, 1, 0.5)
    assert once.whole_seconds == first.whole_seconds + turn.whole_seconds
    twice = with_turn(once, replace(turn, batches=4, seconds=2.0, paces=(0.5,)))
    assert (twice.batches, twice.seconds, twice.batches_per_second, twice.turns) == (12, 4.0, 3.0, 2)
    assert twice.error == standard_error((0.2, 0.3, 0.5))
