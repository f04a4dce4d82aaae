from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from noisy_loader import PLAIN, measured

from kit.studies.calibration.rules import (
    ENOUGH,
    MOST_WORKERS,
    LoaderSetting,
    MemoryCap,
    choose,
    cpu_cap,
    finalists,
    in_doubt,
    why_chosen,
)

MIB = 1 << 20
OWN = LoaderSetting(num_workers=3, prefetch_factor=2, requests_in_flight=64, batches_ahead=2, cache_bytes=MIB)


@given(st.integers(1, 200), st.floats(0, 2))
def test_the_cap_by_cpus_never_leaves_none_and_never_exceeds_the_most(cores, busy):
    cap = cpu_cap(cores, busy)
    assert 1 <= cap <= MOST_WORKERS
    assert cap >= min(cores, MOST_WORKERS)
    assert cap >= cpu_cap(cores, min(1.0, busy + 0.1))


def test_processes_that_wait_half_of_the_time_may_be_twice_as_many():
    assert cpu_cap(4, 1.0) == 4
    assert cpu_cap(4, 0.5) == 8


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


def test_a_setting_names_the_fields_that_it_changes():
    assert PLAIN.changes == {"loader.num_workers": 0, "loader.prefetch_factor": 2}
    assert OWN.changes["loader.requests_in_flight"] == 64
    assert str(OWN) == "3 processes × 2, 64 requests, 2 ahead, cache 1 MiB"


def test_the_warm_up_passes_over_what_was_on_order_before_the_first_batch():
    assert PLAIN.warmup_batches == 2
    assert LoaderSetting(num_workers=4, prefetch_factor=8).warmup_batches == 34


def at(workers, speed, error=0.01, turns=0):
    return measured(LoaderSetting(num_workers=workers, prefetch_factor=2), speed, error, turns)


def numbers(found):
    return [item.setting.num_workers for item in finalists(found, MIB)]


def test_the_choice_and_the_fastest_are_measured_again_and_what_is_plainly_slower_is_not():
    found = [at(0, 10.0), at(1, 50.0), at(2, 95.0), at(4, 100.0)]
    assert numbers(found) == [2, 4]
    assert in_doubt(found, MIB), "they were not measured in turn"
    assert not in_doubt([replace(item, turns=1) for item in found], MIB)


def test_a_choice_that_is_the_fastest_is_compared_with_the_fastest_of_the_dearer():
    assert numbers([at(0, 10.0), at(1, 50.0), at(2, 100.0), at(4, 80.0), at(8, 90.0)]) == [2, 8]
    assert numbers([at(0, 10.0), at(1, 50.0), at(2, 100.0)]) == []
    assert numbers([at(0, 100.0), at(1, 60.0), at(2, 70.0)]) == [], "no second is so much faster than the next"


def test_what_a_choice_that_cannot_be_measured_again_has_beaten_is_measured_once_more():
    found = [at(0, 40.0), at(1, 50.0), at(4, 100.0)]
    slow = found[2].setting

    def quick(item):
        return item.setting != slow

    assert finalists(found, MIB, quick) == [found[1]]
    assert finalists([found[0], replace(found[1], turns=1), found[2]], MIB, quick) == []


@pytest.mark.parametrize(("speed", "error", "doubted"), [(88.0, 0.06, True), (88.0, 0.03, False), (50.0, 0.1, False)])
def test_what_is_cheaper_and_may_be_enough_is_in_doubt(speed, error, doubted):
    found = [at(1, speed, error, 1), at(2, 99.0, 0.001, 1), at(4, 100.0, 0.001, 1)]
    assert in_doubt(found, MIB) == doubted
    assert (1 in numbers(found)) == doubted


def test_a_choice_near_the_line_is_in_doubt_and_one_alone_is_not():
    assert in_doubt([at(0, 91.0, 0.03), at(2, 100.0)], MIB)
    assert not in_doubt([at(0, 91.0, 0.01), at(2, 70.0)], MIB)
    assert numbers([at(0, 91.0)]) == []
