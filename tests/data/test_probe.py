"""A probe finds the dials of a simulated cloud. Bounds are one-sided where a busy machine could only make it worse."""

import itertools

import numpy as np
import pytest
import zarr
from hypothesis import given
from hypothesis import strategies as st

import kit
from kit.cloud.simulated_cloud import simulated_cloud
from kit.config import Config
from kit.data import probing
from kit.data.probe import probe
from kit.data.probing import quantile, step_seconds
from kit.endpoints import VARIABLE
from kit.errors import StoreError

SLOW = {"latency_seconds": 0.06, "bandwidth_bytes_per_second": 2e6, "total_bandwidth_bytes_per_second": 8e6}
"""Dials that the machine is never the limit of."""


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
def test_it_finds_latency_bandwidths_and_parallelism(shaped, url, way, monkeypatch):
    if way == "fsspec":
        monkeypatch.setattr("kit.data.requests.address_of", lambda *_: None)
    shaped.turn(**SLOW)
    mark = shaped.counts()
    found = probe(url)
    counts = shaped.counts(since=mark)
    assert 0.06 <= found.latency_seconds < 0.06 * 1.5  # alone on its machine: within 10 %, as the bandwidths
    assert found.latency_seconds <= found.latency_p95_seconds
    assert 2e6 * 0.4 < found.bandwidth_bytes_per_second < 2e6 * 1.25
    assert 8e6 * 0.5 < found.total_bandwidth_bytes_per_second < 8e6 * 1.1
    assert 2 <= found.parallelism <= 12  # 4 connections fill the total, and their latency wants some more
    assert not found.held_back
    assert found.decode_bytes_per_second > 1e6
    assert 1 < found.compression_ratio < 1.3
    assert found.requests <= counts.requests
    assert found.bytes_read <= counts.bytes_sent
    assert set(counts.kinds) <= {"read", "info", "list", "bucket"}


def test_it_finds_a_limit_on_requests(shaped, url):
    shaped.turn(latency_seconds=0.03, requests_per_second=100)
    found = probe(url)
    assert found.held_back
    assert 50 < found.requests_per_second < 125
    assert "were refused" in found.how["requests_per_second"]
    assert found.apply(Config()).chunking.requests_per_second == round(found.requests_per_second)


def test_faults_are_no_limit_on_requests(shaped, url):
    shaped.turn(latency_seconds=0.03, faults={"503": 0.01, "reset": 0.01})
    assert not probe(url).held_back


def test_what_cannot_be_told_is_none_and_says_why(shaped, tmp_path):
    small = tmp_path / "small.zarr"
    group = zarr.create_group(str(small))
    array = group.create_array("a", shape=(8, 8), chunks=(8, 8), dtype="f4", dimension_names=("y", "x"))
    array[:] = np.arange(64, dtype="f4").reshape(8, 8)
    shaped.turn("no limits").turn(latency_seconds=0.05, latency_spread=0.5)
    found = probe(shaped.upload(small, "probed/small.zarr"))
    assert found.bandwidth_bytes_per_second is None
    assert "larger objects are needed" in found.how["bandwidth_bytes_per_second"]
    config = Config()
    kept = found.apply(config).chunking
    assert kept.bandwidth_bytes_per_second == config.chunking.bandwidth_bytes_per_second
    assert "not told" in str(found)


def test_its_figures_go_into_a_config_and_nothing_else_changes(shaped, url):
    shaped.turn(latency_seconds=0.02, latency_spread=0.1)
    config = Config.make({"data": {"url": url}})
    found = kit.probe(config)
    changed = found.apply(config)
    assert changed.chunking.latency_seconds == pytest.approx(found.latency_mean_seconds, abs=1e-6)
    assert changed.chunking.decode_bytes_per_second == round(found.decode_bytes_per_second)
    assert changed.chunking.requests_per_second == config.chunking.requests_per_second
    assert changed.replace({"chunking": config.chunking}) == config


def test_a_url_a_config_and_a_dataset_are_the_same_store(shaped, url):
    places = (url, Config.make({"data": {"url": url}}), kit.open_dataset(url))
    assert {kit.probe(place, most_bytes="8 MiB").url for place in places} == {url}


def test_a_folder_is_probed_as_well_and_the_budget_of_bytes_holds(folder):
    before = sorted(folder.rglob("*"))
    found = probe(str(folder), most_bytes="16 MiB")
    assert found.bytes_read <= (16 << 20) + 128 * (1 << 20)
    assert sorted(folder.rglob("*")) == before
    table = found._repr_html_()
    assert "<table" in table
    assert found.steps_table()
    assert str(found).startswith("Probe of ")


def test_nothing_to_probe_is_said_at_once(tmp_path):
    with pytest.raises(StoreError, match="does not exist"):
        probe(str(tmp_path / "none.zarr"))
    empty = zarr.create_group(str(tmp_path / "empty.zarr"))
    empty.create_array("a", shape=(8, 8), chunks=(8, 8), dtype="f4", dimension_names=("y", "x"))
    with pytest.raises(StoreError, match="no chunk in the store"):
        probe(str(tmp_path / "empty.zarr"))
    with pytest.raises(StoreError, match="allow 1 MiB at least"):
        probe(str(tmp_path / "empty.zarr"), most_bytes="1 KiB")


# -- the arithmetic of a load


@given(st.lists(st.floats(0, 1e6), min_size=1, max_size=30), st.floats(0.01, 1))
def test_a_quantile_is_a_value_that_so_many_do_not_exceed(values, share):
    found = quantile(values, share)
    assert found in values
    assert sum(value <= found for value in values) >= share * len(values) - 1e-9


def test_a_step_is_several_requests_long_within_bounds():
    lengths = [step_seconds(seconds) for seconds in (0, 0.01, 0.1, 0.15, 10)]
    assert lengths == sorted(lengths)
    assert (lengths[0], lengths[-1]) == (probing._LEAST_SECONDS, probing._MOST_SECONDS)


@given(st.integers(1, 8), st.integers(1, 20), st.floats(0.01, 0.5))
def test_a_load_of_even_requests_has_the_rate_it_was_made_of(in_flight, rounds, seconds):
    run = probing._Run(rounds * seconds, in_flight, 1, itertools.repeat(0).__next__)
    run.open()
    run._start = 0.0
    for number, _ in itertools.product(range(rounds), range(in_flight)):
        run.done.append((number * seconds, (number + 1) * seconds, 100))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(probing.time, "perf_counter", lambda: rounds * seconds)
        load = run.load(100)
    assert load.requests_per_second == pytest.approx(in_flight / seconds)
    assert load.bytes_per_second == pytest.approx(100 * in_flight / seconds)
