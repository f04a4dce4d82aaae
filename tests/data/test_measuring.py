"""Measuring a store: rows that hold together, beside their predictions; times themselves are not asserted."""

import pytest

import kit
from kit.data.measuring import Readings, measure_reading
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
    assert set(readings.by_chunk) == {(1, 4, 4), (2, 7, 9)}
    assert f"median ratio {readings.median_ratio:.2f}" in repr(readings)
    assert readings._repr_html_().count("<tr") == 3
    plan = kit.plan_chunks(stores[0])
    assert kit.chunk_figure(plan, measured=readings.by_chunk).axes


def test_the_order_and_the_processes_of_the_config_are_those_measured(stores):
    block, processes = stores[0].replace({"data.order": "block"}), stores[0].replace({"loader.num_workers": 1})
    readings = measure_reading(block, seconds=0.05) + measure_reading(processes, seconds=0.05)
    assert [reading.order for reading in readings] == ["block", "random"]
    assert readings[0].requests_per_sample < readings[1].requests_per_sample
    assert isinstance(readings[:1], Readings)
    assert "in block order" in repr(readings) or "in random order" in repr(readings)


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
