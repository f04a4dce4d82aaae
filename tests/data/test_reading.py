"""What reading a sample should cost is what the engine then counts."""

import numpy as np
import pytest
import zarr

from kit.config import Config
from kit.data.build import build
from kit.data.dataset import open_dataset
from kit.data.engine import Engine
from kit.data.reading import predict_reading
from kit.data.sampling import sample_plan

PATCHES = {"data.patch": {"y": 4, "x": 4}, "data.order": "grid", "loader.batch_size": 2}


def store(tmp_path, **arrays):
    group = zarr.open_group(tmp_path / "store.zarr", mode="w")
    for name, chunks in arrays.items():
        group.create_array(name, data=np.zeros((8, 8), "f4"), chunks=chunks, dimension_names=("y", "x"))
    return Config().replace({"data.url": str(tmp_path / "store.zarr"), **PATCHES})


def test_a_grid_on_the_chunks_costs_one_request_a_variable(tmp_path):
    config = store(tmp_path, u=(4, 4), v=(4, 4))
    assert predict_reading(config, open_dataset(config)) == pytest.approx({"requests_per_sample": 2})


def test_each_variable_is_priced_with_its_own_chunks(tmp_path):
    config = store(tmp_path, u=(4, 4), v=(2, 2))
    assert predict_reading(config, open_dataset(config)) == pytest.approx({"requests_per_sample": 1 + 4})


def test_random_patches_cost_on_average_what_the_engine_counts(tmp_path, tiny_config):
    config = tiny_config(tmp_path / "tiny.zarr", data__arguments={"time": 24, "lat": 20})
    changes = {"data.patch": {"time": 2, "lat": 5}, "data.samples_per_epoch": 1200, "loader.batch_size": 6}
    dataset = build(config.replace(changes), progress=False)
    config = config.replace(changes)
    plan = sample_plan(config, dataset, 1)
    with Engine(dataset) as engine:
        for _ in engine.stream((plan.batch(0, step, 0) for step in range(plan.batches_per_epoch)), plan.patch):
            pass
        counted = engine.counters["chunks_decoded"] / engine.counters["samples"]
    predicted = predict_reading(config, dataset)
    assert predicted["requests_per_sample"] == pytest.approx(counted, rel=0.05)
    assert predicted["bytes_per_sample"] > 0
