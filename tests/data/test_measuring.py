"""Measuring a store: rows that hold together, beside their predictions; times themselves are not asserted."""

import re
from dataclasses import replace

import pytest

import kit
from kit.cloud.dials import PRESETS
from kit.data.patches.reading import Readings, measure_reading
from kit.data.stores.transfer import ConcurrencyLimit
from kit.errors import ConfigError, PlanError, StoreError

CHUNKS = ({"time": 1, "lat": 4, "lon": 4}, {"time": 2, "lat": 7, "lon": 9})


@pytest.fixture
def stores(tiny_config, tmp_path):
    """Configs of one array, cut in two ways and built."""
    configs = [
        tiny_config(tmp_path / f"{place}.zarr", chunking__chunk=chunk, chunking__shard="none", loader__batch_size=4)
        for place, chunk in enumerate(CHUNKS)
    ]
    for config in configs:
        kit.build(config, progress=False)
    return configs


def test_each_config_is_a_row_with_prediction_measurement_and_ratio(stores):
    readings = measure_reading(*stores, seconds=0.05)
    assert [reading.chunk for reading in readings] == [(1, 4, 4), (2, 7, 9)]
    for reading in readings:
        assert reading.samples_per_second > 0
        assert reading.ratio == reading.samples_per_second / reading.predicted_samples_per_second
        assert reading.batches >= 2
        assert reading.seconds > 0
    assert readings[0].requests_per_sample > readings[1].requests_per_sample
    assert f"median ratio {readings.median_ratio:.2f}" in repr(readings)
    assert re.findall("predicted|measured|ratio", repr(readings).splitlines()[1]) == [
        "predicted", "measured", "ratio", "predicted", "measured",
    ]  # fmt: skip
    assert readings._repr_html_().count("<tr") == 4
    assert "mixing" not in repr(readings)
    busy, quiet = (Readings([replace(readings[0], queued_fraction=share)]) for share in (0.9, 0.2))
    assert "busy" in repr(busy)
    assert "waited 90%" in repr(busy)
    assert "busy" not in repr(quiet)
    several = repr(Readings([replace(readings[0], queued_fraction=share) for share in (0.9, 0.2, 0.6)]))
    assert several.count("busy") == 1
    assert re.search("2 of 3.*60% to 90%", several)


def test_of_an_epoch_that_is_read_ahead_whole_passes_count(tiny_config):
    sizes = {"loader.batch_size": 4, "loader.batches_ahead": 2, "data.samples_per_epoch": 24}
    with kit.cloud.simulate("no limits") as cloud:
        config = tiny_config(cloud.url("b/tiny.zarr"), chunking__chunk=CHUNKS[0], chunking__shard="none")
        kit.build(config, progress=False)
        short = config.replace(sizes | {"chunking.latency_seconds": 10.0, "loader.requests_in_flight": 1024})
        (one,) = measure_reading(short, seconds=1e-9)
        (two,) = measure_reading(short.replace({"data.samples_per_epoch": 8}), seconds=1e-9)
        (long,) = measure_reading(short.replace({"data.samples_per_epoch": 24_000}), seconds=1e-9)
    assert one.batches == 6
    assert 2 * 4 / two.predicted_samples_per_second >= 10
    assert long.batches == 2


def test_a_folder_is_predicted_without_the_network_that_is_planned_for(stores):
    near, far = (stores[1].replace({"chunking.latency_seconds": seconds}) for seconds in (0.0, 10.0))
    found = measure_reading(near, far, seconds=1e-9)
    assert found[0].predicted_samples_per_second == found[1].predicted_samples_per_second
    assert found[1].predicted_samples_per_second > 8  # far more than latency would allow
    planned = kit.plan_chunks(far).chosen
    assert planned.seconds_per_batch > 1


@pytest.mark.slow
def test_requests_that_are_not_opened_are_told_with_the_reason(tiny_config, tmp_path, monkeypatch):
    answered = ConcurrencyLimit.answered
    # As long as the store takes: how long this machine takes is no crowd.
    monkeypatch.setattr(ConcurrencyLimit, "answered", lambda limit, sent_in, _: answered(limit, sent_in, 0.05))
    cuts = {"time": 1, "lat": 4, "lon": 4}
    with kit.cloud.simulate("no limits") as cloud:
        config = tiny_config(
            cloud.url("b/tiny.zarr"), chunking__chunk=cuts, chunking__shard="none", loader__batch_size=4,
            loader__requests_in_flight=256, loader__batches_ahead=8, data__samples_per_epoch=4000,
            data__arguments={"time": 24, "lat": 20},
        )  # fmt: skip
        kit.build(config, progress=False)
        cloud.turn(latency_seconds=0.05, requests_per_second=200)
        (refused,) = readings = measure_reading(config, seconds=1.5)
        few_asked = config.replace({"loader.requests_in_flight": 8, "loader.batches_ahead": 1})
        (few,) = alone = measure_reading(few_asked, seconds=0.2)
    assert (few.open_requests, few.open_reason) == (8, "")
    assert "requests allowed" not in repr(alone)
    assert 32 <= refused.open_requests < refused.requests_in_flight == 256
    assert re.search(rf"{refused.open_requests} of .*256 requests allowed .*store refuses", repr(readings))
    assert "store refuses" in readings._repr_html_()


def test_the_order_and_the_processes_of_the_config_are_those_measured(stores):
    block, processes = stores[0].replace({"data.order": "block"}), stores[0].replace({"loader.num_workers": 1})
    readings = measure_reading(block, seconds=0.05) + measure_reading(processes, seconds=0.05)
    assert [reading.order for reading in readings] == ["block", "random"]
    assert readings[0].requests_per_sample < readings[1].requests_per_sample
    assert isinstance(readings[:1], Readings)
    assert "in block order" in repr(readings) or "in random order" in repr(readings)


def test_predicted_and_measured_speeds_are_drawn_tied_with_their_ratio(stores):
    readings = measure_reading(*stores, seconds=0.05)
    chart = kit.plan_chunks(stores[0]).figure(measured=readings)
    drawn = chart.axes[0]
    pairs = [(one.predicted_samples_per_second, one.samples_per_second) for one in readings]
    assert [tuple(line.get_ydata()) for line in drawn.get_lines() if line.get_linestyle() == ":"] == pairs
    assert [line.get_ydata()[0] for line in drawn.get_lines() if line.get_marker() == "D"] == [
        one.samples_per_second for one in readings
    ]
    assert [text.get_text() for text in drawn.texts] == [f"{one.ratio:.2f}" for one in readings]


def test_how_well_block_order_mixed_stands_beside_how_well_it_was_to(stores):
    wide = stores[0].replace({"loader.window_blocks": 4, "data.samples_per_epoch": 400, "loader.block_reuse": 3.0})
    orders = [wide.replace({"data.order": order}) for order in ("random", "block", "grid")]
    free, mixed, none = measure_reading(*orders, seconds=1e-9)  # one pass, whose pairs do not depend on time
    assert (free.mixing, free.predicted_mixing) == (1, 1)
    assert (none.mixing, none.predicted_mixing) == (None, None)
    assert 0 < mixed.mixing < 1
    assert mixed.mixing == pytest.approx(mixed.predicted_mixing, rel=0.15)
    shown = repr(Readings([free, mixed, none]))
    assert f"in block order: mixing {mixed.mixing:.0%}, predicted {mixed.predicted_mixing:.0%}" in shown
    assert shown.count("mixing") == 1


def test_several_ranks_are_measured_as_one(stores):
    (reading,) = measure_reading(stores[0].replace({"hardware.devices": 2, "hardware.strategy": "ddp"}), seconds=0.05)
    assert reading.batch_size == 4


def test_what_cannot_be_measured_is_refused(stores, tiny_config, tmp_path):
    with pytest.raises(PlanError, match="measure nothing"):
        measure_reading()
    with pytest.raises(PlanError, match="0 s"):
        measure_reading(stores[0], seconds=0)
    with pytest.raises(PlanError, match="too short"):
        measure_reading(stores[0].replace({"data.samples_per_epoch": 4}))
    with pytest.raises(ConfigError, match=r"data\.variables"):
        measure_reading(stores[0].replace({"data.variables": ["salt"]}))
    with pytest.raises(StoreError):
        measure_reading(tiny_config(tmp_path / "none.zarr"))


def on_chunks(tiny_config, cloud):
    """A store in the cloud, read patch by patch and chunk by chunk."""
    cuts = {"time": 1, "lat": 4, "lon": 4}
    config = tiny_config(
        cloud.url("b/tiny.zarr"), chunking__chunk=cuts, chunking__shard="none", loader__batch_size=4,
        data__order="grid", data__patch=cuts, data__arguments={"time": 8, "lat": 12},
    )  # fmt: skip
    kit.build(config, progress=False)
    return config


@pytest.mark.slow
def test_networks_serve_the_same_and_cost_other_time_and_money(tiny_config, cloud):
    config = on_chunks(tiny_config, cloud)
    prices = {"same region": 0.0, "home WiFi": 5e4}
    served = kit.data.measure_networks(config, cloud, prices, price_per_thousand_reads=1.0, seconds=0.1)
    near, far = served
    assert (near.network, far.network, near.epoch, far.epoch) == ("same region", "home WiFi", 1, 1)
    assert near.sent_bytes == far.sent_bytes > 0
    assert near.requests == far.requests > 8, "at least one for every batch"
    assert near.price == pytest.approx(near.requests / 1000)
    assert far.price == pytest.approx(far.requests / 1000 + far.sent_bytes / 1e9 * 5e4)
    assert far.reading.predicted_samples_per_second < near.reading.predicted_samples_per_second
    assert cloud.dials == PRESETS["no limits"]
    assert "no limits" in str(cloud)
    for shown in (repr(served), served._repr_html_()):
        assert "home WiFi" in shown
        assert "price" in shown


def test_a_later_epoch_asks_the_cache_and_every_network_begins_without_one(tiny_config, cloud):
    config = on_chunks(tiny_config, cloud).replace({"cache.size_bytes": "1 MiB"})
    served = kit.data.measure_networks(config, cloud, ["no limits", "same region"], epochs=2, seconds=0.1)
    assert [(one.network, one.epoch) for one in served] == [
        ("no limits", 1), ("no limits", 2), ("same region", 1), ("same region", 2),
    ]  # fmt: skip
    for first, second in (served[:2], served[2:]):
        assert first.requests > first.cache_hits == 0
        assert (second.requests, second.sent_bytes) == (0, 0)
        assert second.cache_hits == len(kit.open_dataset(config).arrays) * 8 * 3 * 2
    assert "price" not in repr(served)


def test_what_no_network_can_tell_is_refused_before_anything_is_read(tiny_config, cloud, tmp_path):
    config = on_chunks(tiny_config, cloud)
    cloud.reset_counts()
    with pytest.raises(ConfigError, match="home WiFi"):
        kit.data.measure_networks(config, cloud, ["home wifi"])
    with pytest.raises(ConfigError, match="not in the cloud"):
        kit.data.measure_networks(config.replace({"data.url": str(tmp_path)}), cloud)
    with pytest.raises(PlanError, match="at least one"):
        kit.data.measure_networks(config, cloud, epochs=0)
    assert cloud.counts().requests == 0
