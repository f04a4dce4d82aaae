"""Dials and what they do to time, on a clock of the test's own."""

import asyncio
import random
import re
import statistics

import pytest
from hypothesis import given
from hypothesis import strategies as st
from waiting import PATIENCE_SECONDS

from kit.cloud.dials import PRESETS, Dials, Pace, SharedLink, preset
from kit.cloud.server import Alarms
from kit.config import Config
from kit.data.build.layout import network_of
from kit.errors import ConfigError


def test_presets_are_found_by_name_and_others_answered_with_the_nearest():
    assert preset("same region") == PRESETS["same region"]
    with pytest.raises(ConfigError, match="did you mean 'home WiFi'"):
        preset("home wifi")


def test_an_unknown_dial_or_a_value_it_cannot_take_is_refused_by_name():
    with pytest.raises(ConfigError, match=r"latency_second: .*dial.*'latency_seconds'"):
        Dials().change(latency_second=1)
    for name, value in {
        "latency_seconds": -1, "slow_fraction": 2, "refusal": 404, "faults": {"50": 0.1}, "seed": "x",
        "total_bandwidth_bytes_per_second": "fast", "drip_bytes_per_second": 0, "requests_per_second": float("inf"),
    }.items():  # fmt: skip
        with pytest.raises(ConfigError, match=name):
            Dials().change(**{name: value})
    with pytest.raises(ConfigError, match="add up .*at most 1"):
        Dials(faults={"503": 0.7, "reset": 0.7})


def test_sizes_are_read_as_people_write_them_and_a_dial_says_what_it_does():
    dials = Dials().change(bandwidth_bytes_per_second="80 MB", latency_seconds=0.03, requests_per_second=50)
    assert dials.bandwidth_bytes_per_second == 80e6
    assert re.fullmatch(r"30 ms .*, 76\.3 MiB/s .*, 429 .* 50 requests/s", str(dials))


@pytest.mark.parametrize("name", PRESETS)
def test_latencies_have_the_median_and_the_tail_that_the_dials_say(name):
    dials = PRESETS[name]
    link = SharedLink(dials, 0.0)
    drawn = sorted(link.latency_seconds() for _ in range(4000))
    assert statistics.median(drawn) == pytest.approx(dials.latency_seconds, rel=0.06)
    if dials.slow_fraction:
        assert drawn[-1] > 2 * dials.latency_seconds
        assert drawn[0] < dials.latency_seconds


@pytest.mark.parametrize("name", ["same region", "home WiFi"])
def test_a_plan_can_be_told_their_mean_and_deviation(name):
    dials = PRESETS[name]
    link = SharedLink(dials, 0.0)
    drawn = [link.latency_seconds() for _ in range(40_000)]
    assert statistics.fmean(drawn) == pytest.approx(dials.latency_mean_seconds, rel=0.03)
    assert statistics.pstdev(drawn) == pytest.approx(dials.latency_deviation_seconds, rel=0.08)


@pytest.mark.parametrize("name", ["same region", "across the ocean", "home WiFi"])
def test_a_plan_that_is_told_them_expects_the_latencies_that_are_drawn(name):
    dials = PRESETS[name]
    link, count = SharedLink(dials, 0.0), 40_000
    served = sorted(link.latency_seconds() for _ in range(count))
    expected = sorted(network_of(dials.apply(Config())).latency.draw(count))
    for share in (0.05, 0.5, 0.9, 0.98, 0.998):
        assert expected[int(share * count)] == pytest.approx(served[int(share * count)], rel=0.12)


def test_the_same_seed_draws_the_same_latencies():
    first, second = (SharedLink(PRESETS["home WiFi"], 0.0) for _ in range(2))
    assert [first.latency_seconds() for _ in range(20)] == [second.latency_seconds() for _ in range(20)]


@given(pieces=st.lists(st.integers(1, 300_000), min_size=1, max_size=50), late=st.floats(0, 0.015))
def test_bytes_pass_at_the_bandwidth_even_when_timers_are_late(pieces, late):
    pace, now = Pace(1e6, 0.0), 0.0
    for count in pieces:
        when = pace.pass_(count, now)
        now = when + late if when > now else now
    ideal = sum(pieces) / 1e6
    assert ideal - 0.021 <= now <= ideal + late + 0.001


def test_connections_share_the_total_and_each_keeps_its_own():
    link = SharedLink(Dials(bandwidth_bytes_per_second=1e6, total_bandwidth_bytes_per_second=2e6), 0.0)
    paces = [link.own_pace(0.0) for _ in range(4)]
    ends = [link.passes(100_000, pace, 0.0) for _ in range(10) for pace in paces]
    assert ends[-1] == pytest.approx(2.0, abs=0.03)  # 4 MB through 2 MB/s
    alone = SharedLink(Dials(bandwidth_bytes_per_second=1e6, total_bandwidth_bytes_per_second=2e6), 0.0)
    pace = alone.own_pace(0.0)
    assert [alone.passes(100_000, pace, 0.0) for _ in range(10)][-1] == pytest.approx(1.0, abs=0.03)


@given(rate=st.floats(1, 5000), seconds=st.floats(1, 20))
def test_no_more_requests_are_admitted_than_the_rate_and_its_burst_allow(rate, seconds):
    link = SharedLink(Dials(requests_per_second=rate), 0.0)
    count = 2000
    admitted = sum(link.admits(seconds * number / count) for number in range(count))
    assert admitted <= rate * seconds + max(1.0, rate / 10) + 1
    assert admitted >= min(count, rate * seconds) * 0.9 - 2


def test_no_limit_lets_everything_pass_at_once():
    link = SharedLink(Dials(), 5.0)
    assert link.latency_seconds() == 0
    assert link.passes(1 << 40, link.own_pace(5.0), 5.0) == 5.0
    assert all(link.admits(5.0) for _ in range(10_000))


def test_many_alarms_ring_in_their_order_by_one_timer_of_the_loop(monkeypatch):
    async def rung():
        loop, found, set_at = asyncio.get_running_loop(), [], []
        call_at = loop.call_at

        def noting(when, *call, **rest):
            set_at.append(when)
            return call_at(when, *call, **rest)

        monkeypatch.setattr(loop, "call_at", noting)
        alarms, now = Alarms(loop), loop.time()
        times = [now + 0.01 + number * 1e-6 for number in range(500)]
        for when in random.Random(1).sample(times, len(times)):
            alarms.at(when, lambda when=when: found.append((when, loop.time())))
        alarms.at(now, lambda: 1 / 0)  # of which the loop tells; the others ring all the same
        loop.set_exception_handler(lambda _, told: found.append((told["exception"], now)))
        await asyncio.wait_for(_until(lambda: len(found) > len(times)), PATIENCE_SECONDS)
        assert isinstance(found.pop(0)[0], ZeroDivisionError)
        return times, found, set_at

    times, found, set_at = asyncio.run(rung())
    assert [when for when, _ in found] == times
    assert all(when <= rang for when, rang in found)
    assert len(set_at) < len(times) / 2


async def _until(holds):
    while not holds():
        await asyncio.sleep(0)


@pytest.mark.parametrize("bandwidth", [0, 1e6, 80e6])
def test_what_leaves_in_one_piece_takes_its_time_on_its_connection(bandwidth):
    link = SharedLink(Dials(bandwidth_bytes_per_second=bandwidth), 0.0)
    most = link.piece_bytes(link.own_pace(0.0))
    for count in (1, most):
        assert link.seconds_of_one_piece(count) == link.own_pace(0.0).pass_(count, 0.0)
    assert link.seconds_of_one_piece(most + 1) == 0
