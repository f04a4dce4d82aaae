import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kit.plan.calibration import (
    AHEAD,
    ENOUGH,
    MOST_WORKERS,
    REQUESTS,
    LoaderSetting,
    Measurement,
    MemoryCap,
    choose,
    cpu_cap,
    settled,
    standard_error,
    sweep_engine,
    sweep_workers,
    why_chosen,
    worker_counts,
)

MIB = 1 << 20
PLAIN = LoaderSetting(num_workers=0, prefetch_factor=2)
OWN = LoaderSetting(num_workers=3, prefetch_factor=2, requests_in_flight=64, batches_ahead=2, cache_bytes=MIB)


def measured(setting, speed):
    return Measurement(
        setting=setting, batches_per_second=speed, batches=10, seconds=1.0, error=0.0, first_batch_seconds=0.1,
        whole_seconds=1.0,
    )  # fmt: skip


def follow(looks, speed):
    """Every measurement a rule asks for, where `speed` gives batches per second, or None where it cannot run."""
    found = []
    try:
        setting = next(looks)
        while True:
            gave = speed(setting)
            if gave is not None:
                found.append(measured(setting, gave))
            setting = looks.send(None if gave is None else found[-1])
    except StopIteration:
        return found


def keep(_):
    return ""


def workers(counts, speed, prefetch=(2, 4, 8), drop=keep):
    return follow(sweep_workers(PLAIN, iter(counts), prefetch, drop), speed)


def tried(found):
    return [(item.setting.num_workers, item.setting.prefetch_factor) for item in found]


def test_without_processes_there_is_one_candidate_whatever_the_prefetch_factors():
    assert tried(workers([0], lambda _: 1.0)) == [(0, 2)]


def test_a_larger_prefetch_factor_is_tried_until_it_does_not_pay():
    found = workers([1], lambda setting: {2: 1.0, 4: 2.0, 8: 2.01, 16: 9.0}[setting.prefetch_factor], (2, 4, 8, 16))
    assert tried(found) == [(1, 2), (1, 4), (1, 8)]


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


@given(st.integers(1, 200), st.floats(0, 2))
def test_the_cap_by_cpus_never_leaves_none_and_never_exceeds_the_most(cores, busy):
    cap = cpu_cap(cores, busy)
    assert 1 <= cap <= MOST_WORKERS
    assert cap >= min(cores, MOST_WORKERS)
    assert cap >= cpu_cap(cores, min(1.0, busy + 0.1))


def test_processes_that_wait_half_of_the_time_may_be_twice_as_many():
    assert cpu_cap(4, 1.0) == 4
    assert cpu_cap(4, 0.5) == 8


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


@given(
    free=st.integers(0, 1 << 34), shared=st.integers(0, 1 << 32), margin=st.floats(0, 0.99),
    worker=st.integers(1, 1 << 30), batch=st.integers(0, 1 << 28), factor=st.integers(1, 64),
)  # fmt: skip
def test_the_processes_that_fit_hold_no_more_than_is_allowed_and_one_more_would(
    free, shared, margin, worker, batch, factor
):
    cap = MemoryCap(free_bytes=free, shared_bytes=shared, margin=margin, worker_bytes=worker, batch_bytes=batch)
    most = cap.most(factor)

    def fits(count):
        return count * (worker + factor * batch) <= int(free * (1 - margin)) and count * factor * batch <= int(
            shared * (1 - margin)
        )

    assert fits(most)
    assert not fits(most + 1)
    for count in (most, most + 1):
        setting = LoaderSetting(num_workers=count, prefetch_factor=factor)
        assert bool(cap.why_not(setting)) == (count > most)


def test_a_smaller_margin_allows_more_processes():
    tight, loose = (
        MemoryCap(
            free_bytes=1000 * MIB, shared_bytes=1000 * MIB, margin=margin, worker_bytes=90 * MIB, batch_bytes=5 * MIB
        )
        for margin in (0.5, 0.2)
    )
    assert (tight.most(2), loose.most(2)) == (5, 8)


@given(st.lists(st.tuples(st.integers(0, 8), st.integers(1, 4), st.floats(0.1, 1000)), min_size=1))
def test_the_choice_is_the_cheapest_of_those_that_reach_enough_of_the_peak(points):
    found = [measured(LoaderSetting(num_workers=w, prefetch_factor=p), speed) for w, p, speed in points]
    chosen, peak = choose(found, MIB), max(speed for *_, speed in points)
    assert chosen.batches_per_second >= ENOUGH * peak
    cheaper = [item for item in found if item.setting.cost(MIB) < chosen.setting.cost(MIB)]
    assert all(item.batches_per_second < ENOUGH * peak for item in cheaper)
    assert str(chosen.setting) in why_chosen(chosen, found)


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
    found = follow(sweep_engine(OWN, caches, keep), speed)
    settings_tried = [item.setting for item in found]
    assert len(settings_tried) == len(set(settings_tried))
    assert all(setting.num_workers == 0 for setting in settings_tried)
    reached = choose(found, MIB).batches_per_second
    best = max(speed(combined(*pair, caches)) for pair in itertools.product(REQUESTS, AHEAD))
    assert reached >= ENOUGH * best / 1.05  # a gain of less than 5 % is not gone after
    assert len(found) <= 2 * len(REQUESTS) + len(AHEAD)


def test_where_memory_holds_no_more_batches_requests_rise_alone():
    def speed(setting):
        return float(setting.requests_in_flight) if setting.batches_ahead <= 2 else None

    found = follow(sweep_engine(OWN, [], keep), speed)
    assert choose(found, MIB).setting.requests_in_flight == REQUESTS[-1]


def combined(requests, ahead, caches):
    return LoaderSetting(
        num_workers=0, prefetch_factor=2, requests_in_flight=requests, batches_ahead=ahead, cache_bytes=sum(caches)
    )


def test_a_setting_names_the_fields_that_it_changes():
    assert PLAIN.changes == {"loader.num_workers": 0, "loader.prefetch_factor": 2}
    assert OWN.changes["loader.requests_in_flight"] == 64
    assert str(OWN) == "3 processes × 2, 64 requests, 2 ahead, cache 1 MiB"


def test_the_warm_up_passes_over_what_was_on_order_before_the_first_batch():
    assert PLAIN.warmup_batches == 2
    assert LoaderSetting(num_workers=4, prefetch_factor=8).warmup_batches == 34


@pytest.mark.parametrize(
    ("blocks", "enough"),
    [([1.0] * 5, True), ([1.0] * 4, False), ([0.01] * 5, False), ([1.0, 2.0] * 3, False), ([], False)],
)
def test_a_pace_has_settled_after_enough_blocks_that_agree(blocks, enough):
    assert settled(blocks) == enough


def test_the_error_of_too_few_blocks_is_everything():
    assert standard_error([1.0]) == 1.0
    assert standard_error([1.0, 1.0]) == 0.0
