"""A probe finds the dials of a store: from known times all of them, from a simulated cloud what no machine can hide."""

import itertools
import math
import random
from types import SimpleNamespace

import numpy as np
import pytest
import zarr
from hypothesis import given
from hypothesis import strategies as st

import kit
from kit.cloud.simulated import simulated_cloud
from kit.config import Config
from kit.data.patches import probe as probing
from kit.data.patches.probe import Load, Prober, probe, quantile, slow_requests, step_seconds
from kit.errors import ConfigError, StoreError
from kit.machine.endpoints import VARIABLE

SLOW = {"latency_seconds": 0.06, "bandwidth_bytes_per_second": 2e6, "total_bandwidth_bytes_per_second": 8e6}
"""Dials that the machine is never the limit of."""
MIB = 1 << 20


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A store of one variable in 12 chunks of 1 MiB, of numbers that barely compress."""
    folder = tmp_path_factory.mktemp("probed") / "x.zarr"
    values = np.random.default_rng(0).standard_normal((12, 512, 512), np.float32)
    group = zarr.create_group(str(folder))
    array = group.create_array(
        "wind", shape=values.shape, chunks=(1, 512, 512), dtype="f4", dimension_names=("time", "y", "x")
    )
    array[:] = values
    return folder


@pytest.fixture(scope="module")
def shaped():
    with simulated_cloud("no limits") as cloud:
        yield cloud


@pytest.fixture
def url(shaped, folder, monkeypatch):
    monkeypatch.delenv(VARIABLE, raising=False)
    shaped.turn("no limits").forget_scripts()
    return shaped.upload(folder, "probed/x.zarr")


@pytest.mark.parametrize("way", ["wire", "fsspec"])
def test_a_simulated_cloud_is_probed_through_either_client(shaped, url, way, monkeypatch):
    if way == "fsspec":
        monkeypatch.setattr("kit.data.stream.fetch.address_of", lambda *_: None)
    shaped.turn(**SLOW)
    mark = shaped.counts()
    found = probe(url)
    counts = shaped.counts(since=mark)
    assert SLOW["latency_seconds"] <= found.latency_seconds <= found.latency_p95_seconds
    assert found.bandwidth_bytes_per_second > 0
    assert found.total_bandwidth_bytes_per_second == max(rate for _, rate in found.steps) > 0
    assert found.parallelism >= 1
    assert not found.rate_limited
    assert found.decode_bytes_per_second > 0
    assert 1 < found.compression_ratio < 1.3
    assert found.requests <= counts.requests
    assert found.bytes_read <= counts.bytes_sent
    assert set(counts.kinds) <= {"read", "info", "list", "bucket"}


def test_it_finds_a_limit_on_requests(shaped, url):
    shaped.turn(latency_seconds=0.03, requests_per_second=100)
    found = probe(url)
    assert found.rate_limited
    assert found.requests_per_second > 0
    assert "refused" in found.how["requests_per_second"]
    assert found.apply(Config()).chunking.requests_per_second == round(found.requests_per_second)


def test_faults_are_no_limit_on_requests(shaped, url):
    shaped.turn(latency_seconds=0.03, faults={"503": 0.01, "reset": 0.01})
    assert not probe(url).rate_limited


def test_its_figures_go_into_a_config_and_nothing_else_changes(shaped, url):
    shaped.turn(latency_seconds=0.02, latency_spread=0.1)
    config = Config.make({"data": {"url": url}})
    found = kit.data.probe(config)
    changed = found.apply(config)
    assert changed.chunking.latency_seconds == pytest.approx(found.latency_mean_seconds, abs=1e-6)
    assert changed.chunking.decode_bytes_per_second == round(found.decode_bytes_per_second)
    assert changed.chunking.requests_per_second == config.chunking.requests_per_second
    assert changed.replace({"chunking": config.chunking}) == config


def test_a_url_a_config_and_a_dataset_are_the_same_store(shaped, url):
    places = (url, Config.make({"data": {"url": url}}), kit.open_dataset(url))
    assert {kit.data.probe(place, most_bytes="8 MiB").url for place in places} == {url}


def test_a_folder_is_probed_as_well_and_the_budget_of_bytes_holds(folder):
    before = sorted(folder.rglob("*"))
    found = probe(str(folder), most_bytes="16 MiB")
    assert found.bytes_read <= (16 << 20) + 128 * (1 << 20)
    assert sorted(folder.rglob("*")) == before
    table = found._repr_html_()
    assert "<table" in table
    assert str(found).startswith("Probe of ")


def test_nothing_to_probe_is_said_at_once(tmp_path):
    with pytest.raises(StoreError, match="does not exist"):
        probe(str(tmp_path / "none.zarr"))
    empty = zarr.create_group(str(tmp_path / "empty.zarr"))
    empty.create_array("a", shape=(8, 8), chunks=(8, 8), dtype="f4", dimension_names=("y", "x"))
    with pytest.raises(StoreError, match="no chunk"):
        probe(str(tmp_path / "empty.zarr"))
    with pytest.raises(ConfigError, match="allow 1 MiB at least"):
        probe(str(tmp_path / "empty.zarr"), most_bytes="1 KiB")


# -- the figures of loads whose times are known


def timed(monkeypatch, *, latency, spread=0.0, bandwidth=math.inf, total=math.inf, requests_per_second=math.inf):
    """Probes find loads as a store with these dials would give them; no request is sent but for chunks to decode."""

    class Timed(Prober):
        def telling_range(self, latency_seconds, spread_seconds):
            return MIB

        def load(self, in_flight, range_bytes, seconds, least=1):
            each = latency + range_bytes / min(bandwidth, total / in_flight)
            rate = min(in_flight / each, requests_per_second)
            refused = round((in_flight / each - rate) * seconds)
            times = [each - spread, each, each + spread] * max(least, round(rate * seconds))
            return Load(
                in_flight=in_flight, range_bytes=range_bytes, seconds=tuple([*times, 9 * each] if refused else times),
                requests_per_second=rate, bytes_per_second=rate * range_bytes, cpu_seconds_per_request=1e-4,
                busy_fraction=0.1, refused=refused,
            )  # fmt: skip

    monkeypatch.setattr("kit.data.patches.probe.Prober", Timed)


def test_latency_bandwidths_and_parallelism_follow_from_the_times_of_the_loads(folder, monkeypatch):
    timed(monkeypatch, latency=0.06, bandwidth=2e6, total=8e6)
    found = probe(str(folder))
    assert found.latency_seconds == found.latency_p95_seconds == pytest.approx(0.06, abs=2e-6)
    assert found.bandwidth_bytes_per_second == pytest.approx(2e6, rel=1e-4)
    assert [in_flight for in_flight, _ in found.steps] == [1, 4, 16]
    assert found.total_bandwidth_bytes_per_second == pytest.approx(16 * MIB / (0.06 + 16 * MIB / 8e6))
    assert found.parallelism == 5  # 4 connections fill the total, and their latency wants one more
    assert not found.rate_limited
    assert found.requests_per_second == pytest.approx(128 / (0.06 + 128 / 8e6))


def test_a_rate_that_the_store_keeps_requests_to_is_found_and_taken(folder, monkeypatch):
    timed(monkeypatch, latency=0.03, requests_per_second=100)
    found = probe(str(folder))
    assert (found.rate_limited, found.requests_per_second) == (True, 100)
    assert found.latency_seconds == pytest.approx(0.03)
    assert found.apply(Config()).chunking.requests_per_second == 100


def test_what_cannot_be_told_is_none_and_says_why(folder, monkeypatch):
    timed(monkeypatch, latency=0.05, spread=0.02, bandwidth=1e9)
    found = probe(str(folder))
    assert found.bandwidth_bytes_per_second is None
    assert "larger objects" in found.how["bandwidth_bytes_per_second"]
    config = Config()
    kept = found.apply(config).chunking
    assert kept.bandwidth_bytes_per_second == config.chunking.bandwidth_bytes_per_second
    assert "unknown" in str(found)


# -- the arithmetic of a load


@given(st.lists(st.floats(0, 1e6), min_size=1, max_size=30), st.floats(0.01, 1))
def test_a_quantile_is_a_value_that_so_many_do_not_exceed(values, share):
    found = quantile(values, share)
    assert found in values
    assert sum(value <= found for value in values) >= share * len(values) - 1e-9


def test_a_step_is_several_requests_long_within_bounds():
    lengths = [step_seconds(seconds) for seconds in (0, 0.01, 0.1, 0.15, 10)]
    assert lengths == pytest.approx([0.3, 0.3, 0.5, 0.75, 1.0])


@given(st.integers(1, 8), st.integers(1, 20), st.floats(0.01, 0.5))
def test_a_load_of_even_requests_has_the_rate_it_was_made_of(in_flight, rounds, seconds):
    run = probing._Run(rounds * seconds, in_flight, 1, itertools.repeat(0).__next__)
    now = iter([0.0, rounds * seconds])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            "kit.data.patches.probe.time", SimpleNamespace(perf_counter=now.__next__, process_time=lambda: 0.0)
        )
        run.open()
        for number, _ in itertools.product(range(rounds), range(in_flight)):
            run.done.append((number * seconds, (number + 1) * seconds, 100))
        load = run.load(100)
    assert load.requests_per_second == pytest.approx(in_flight / seconds)
    assert load.bytes_per_second == pytest.approx(100 * in_flight / seconds)


@pytest.mark.parametrize(("fraction", "factor"), [(0.0, 1.0), (0.01, 5.0), (0.03, 8.0), (0.1, 3.0)])
@pytest.mark.parametrize("spread", [0.01, 0.2, 0.5])
def test_slow_requests_are_told_from_the_spread_of_the_others(fraction, factor, spread):
    draw, count = random.Random(7), 4000
    times = [0.05 * math.exp(draw.gauss(0, spread)) * (factor if draw.random() < fraction else 1) for _ in range(count)]
    found, slower = slow_requests(times)
    apart = math.log(factor) > 4 * spread  # else some of them are no slower than others are anyway
    assert found == pytest.approx(fraction, abs=0.012 if apart else max(0.004, fraction))
    if apart and fraction:
        assert slower == pytest.approx(factor, rel=0.15)
    if not fraction:
        assert found < 0.005


def test_requests_that_all_take_the_same_time_are_none_of_them_slow():
    assert slow_requests([0.03] * 50) == (0.0, 1.0)
    assert slow_requests([0.0] * 50) == (0.0, 1.0)
