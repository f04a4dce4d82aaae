import itertools

from hypothesis import given
from hypothesis import strategies as st
from noisy_loader import PLAIN, measured

from kit.studies.calibration.rules import ENOUGH, MOST_WORKERS, LoaderSetting, choose
from kit.studies.calibration.search import AHEAD, REQUESTS, sweep_engine, sweep_workers, worker_counts

MIB = 1 << 20
OWN = LoaderSetting(num_workers=3, prefetch_factor=2, requests_in_flight=64, batches_ahead=2, cache_bytes=MIB)


def follow(sweep, speed):
    """Every measurement of a sweep, where `speed` gives batches per second, or None where a setting cannot run."""
    found = []

    def measure(setting):
        gave = speed(setting)
        if gave is None:
            return None
        found.append(measured(setting, gave))
        return found[-1]

    sweep(measure)
    return found


def keep(_):
    return ""


def workers(counts, speed, prefetch=(2, 4, 8), drop=keep):
    return follow(lambda measure: sweep_workers(measure, PLAIN, iter(counts), prefetch, drop), speed)


def tried(found):
    return [(item.setting.num_workers, item.setting.prefetch_factor) for item in found]


def test_without_processes_there_is_one_candidate_whatever_the_prefetch_factors():
    assert tried(workers([0], lambda _: 1.0)) == [(0, 2)]


def test_larger_factors_are_tried_where_they_pay_most_and_not_below_where_they_bring_nothing():
    found = workers([0, 1, 2], lambda setting: setting.num_workers + 1.0)
    assert tried(found) == [(0, 2), (1, 2), (2, 2), (2, 8)]


def test_where_a_factor_pays_more_processes_then_fewer_then_smaller_factors_are_tried():
    def speed(setting):  # held up by one another, unless enough is on order
        return min(22.0, 6.0 * setting.num_workers) if setting.prefetch_factor > 2 else 6.0

    found = workers([0, 1, 2, 4, 8, 16], speed)
    rising, factor, more, fewer, smaller = [(0, 2), (1, 2), (2, 2)], [(1, 8)], [], [], []
    assert tried(found) == rising + factor + more + fewer + smaller

    def uneven(setting):
        return speed(setting) + 0.1 * (setting.num_workers == 2)

    found = workers([0, 1, 2, 4, 8, 16], uneven)
    factor, more, fewer, smaller = [(2, 8)], [(4, 8), (8, 8), (16, 8)], [], [(4, 4), (4, 2)]
    assert tried(found) == rising + factor + more + fewer + smaller
    best = choose(found, MIB).setting
    assert (best.num_workers, best.prefetch_factor) == (4, 4)


def test_a_larger_factor_may_spare_processes_where_so_many_could_be_enough():
    def speed(setting):
        return {0: 49.0, 1: 60.0 + 4 * setting.prefetch_factor}.get(setting.num_workers, 100.0)

    found = follow(lambda measure: sweep_workers(measure, PLAIN, iter([0, 1, 2, 4]), (2, 8), keep, 0.0, 100.0), speed)
    assert tried(found) == [(0, 2), (1, 2), (2, 2), (1, 8)]
    assert choose(found, MIB).setting == LoaderSetting(num_workers=1, prefetch_factor=8)


def test_processes_that_only_cost_time_get_no_larger_factors():
    assert tried(workers([0, 1, 2], lambda setting: 10.0 - 4 * (setting.num_workers > 0))) == [(0, 2), (1, 2), (2, 2)]


def test_nothing_is_tried_beyond_what_a_simulated_step_allows_and_that_is_said():
    found = follow(
        lambda measure: sweep_workers(measure, PLAIN, iter([0, 1, 2, 4]), (2, 4), keep, 0.0, 100.0),
        lambda setting: 98.0 if setting.num_workers else 30.0,
    )
    assert tried(found) == [(0, 2), (1, 2)]
    asked, reasons = ended(lambda measure: sweep_workers(measure, PLAIN, iter([0, 1]), (2,), keep, 0.0, 100.0), 99.0)
    assert (asked, "allows 100 batches/s" in reasons[0]) == (1, True)
    asked, reasons = ended(lambda measure: sweep_engine(measure, OWN, [MIB], keep, 100.0), 99.0)
    assert (asked, "allows 100 batches/s" in reasons[0]) == (1, True)


def ended(sweep, speed):
    """(settings measured, reasons)"""
    tried = []

    def measure(setting):
        tried.append(setting)
        return measured(setting, speed)

    reasons = sweep(measure)
    return len(tried), reasons


def test_the_sweep_ends_when_two_numbers_of_processes_in_a_row_bring_nothing():
    found = workers([0, 1, 2, 4, 8, 16], lambda setting: min(setting.num_workers, 2) + 1.0, (2,))
    assert tried(found) == [(0, 2), (1, 2), (2, 2), (4, 2), (8, 2)]


def test_more_processes_are_not_tried_where_fewer_do_not_fit():
    found = workers(
        [0, 1, 2, 4, 8], lambda setting: setting.num_workers + 1.0, (2,), lambda s: "no" * (s.num_workers > 1)
    )
    assert tried(found) == [(0, 2), (1, 2)]
    found = workers([0, 1, 2, 4], lambda setting: None if setting.num_workers > 1 else 1.0 + setting.num_workers, (2,))
    assert tried(found) == [(0, 2), (1, 2)]


@given(st.integers(1, 100))
def test_numbers_of_processes_double_up_to_the_cap_and_end_with_it(cap):
    counts = list(worker_counts((), lambda: cap))
    assert counts == sorted(set(counts))
    assert counts[0] == 0
    assert counts[-1] == cap or cap > MOST_WORKERS
    assert all(later <= 2 * count or count == 0 for count, later in itertools.pairwise(counts[:-1]))


def test_named_numbers_are_tried_as_they_are():
    def cap():
        raise AssertionError("named numbers are not capped by CPUs")

    assert list(worker_counts((8, 0, 4, 4), cap)) == [0, 4, 8]


def engine_speed(per_batch, most):
    """Requests under way are limited by the dial and by the batches on order; the store gives so much and no more."""

    def speed(setting):
        under_way = min(setting.requests_in_flight, per_batch * (setting.batches_ahead + 1))
        return min(most, under_way / per_batch) * (2.0 if setting.cache_bytes else 1.0)

    return speed


@given(st.floats(0.5, 64), st.floats(0.5, 400), st.booleans())
def test_the_engines_dials_climb_to_the_best_of_all_their_combinations(per_batch, most, cached):
    speed = engine_speed(per_batch, most)
    caches = [MIB] if cached else []
    found = follow(lambda measure: sweep_engine(measure, OWN, caches, keep), speed)
    settings_tried = [item.setting for item in found]
    assert len(settings_tried) == len(set(settings_tried))
    assert all(setting.num_workers == 0 for setting in settings_tried)
    reached = choose(found, MIB).batches_per_second
    best = max(speed(combined(*pair, caches)) for pair in itertools.product(REQUESTS, AHEAD))
    assert reached >= ENOUGH * best / 1.05  # a gain of less than 5 % is not gone after
    assert len(found) <= 2 * len(REQUESTS) + 2 * len(AHEAD)


def test_where_a_cache_pays_batches_ahead_rise_with_it_until_they_do_not():
    def speed(setting):  # the store gives 40 a second, the cache what is asked of it, and 8 ahead are all it takes
        return 50.0 * min(8, setting.batches_ahead) if setting.cache_bytes else 40.0

    found = [item.setting for item in follow(lambda measure: sweep_engine(measure, OWN, [MIB], keep), speed)]
    assert [setting.batches_ahead for setting in found if setting.cache_bytes] == [1, 2, 4, 8, 16]
    useless = [item.setting for item in follow(lambda measure: sweep_engine(measure, OWN, [MIB], keep), lambda _: 40.0)]
    assert sum(bool(setting.cache_bytes) for setting in useless) == 1


def test_where_memory_holds_no_more_batches_requests_rise_alone():
    def speed(setting):
        return float(setting.requests_in_flight) if setting.batches_ahead <= 2 else None

    found = follow(lambda measure: sweep_engine(measure, OWN, [], keep), speed)
    assert choose(found, MIB).setting.requests_in_flight == REQUESTS[-1]


def combined(requests, ahead, caches):
    return LoaderSetting(
        num_workers=0, prefetch_factor=2, requests_in_flight=requests, batches_ahead=ahead, cache_bytes=sum(caches)
    )
