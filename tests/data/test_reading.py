"""What reading a sample should cost is what the engine then counts, and what a config asks for is what is planned."""

import numpy as np
import pytest
import zarr

from kit.config import Config
from kit.data.build.build import build
from kit.data.build.layout import expected_bytes, plan_chunks, predict_reading, price_store
from kit.data.open_dataset import open_dataset
from kit.data.patches.module import PatchData
from kit.data.sampling import sample_plan
from kit.data.stream.engine import Engine
from kit.errors import PlanError

PATCHES = {"data.patch": {"y": 4, "x": 4}, "data.order": "grid", "loader.batch_size": 2}


def store(tmp_path, **arrays):
    tmp_path.mkdir(exist_ok=True)
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


@pytest.mark.slow
def test_random_patches_cost_on_average_what_the_engine_counts(tmp_path, tiny_config):
    config = tiny_config(tmp_path / "tiny.zarr", data__arguments={"time": 24, "lat": 20})
    changes = {"data.patch": {"time": 2, "lat": 5}, "data.samples_per_epoch": 1200, "loader.batch_size": 6}
    dataset = build(config.replace(changes), progress=False)
    config = config.replace(changes)
    plan = sample_plan(config, dataset, 1)
    with Engine(dataset, batches_ahead=0) as engine:  # batches read at once share chunks, which is not predicted
        for _ in engine.stream((plan.batch(0, step, 0) for step in range(plan.batches_per_epoch)), plan.patch):
            pass
        counts = engine.counters
    chunks = sum(cost.requests_per_batch for cost in price_store(config, dataset)) / 6
    assert chunks == pytest.approx(counts["chunks_decoded"] / counts["samples"], rel=0.05)
    predicted = predict_reading(config.replace({"trial.max_steps": 200}), dataset)
    assert counts["requests_saved"] > 0
    assert predicted["requests_per_sample"] == pytest.approx(counts["requests"] / counts["samples"], rel=0.15)
    assert predicted["bytes_per_sample"] > 0


def test_a_store_is_priced_as_it_is_cut_and_its_requests_are_what_is_predicted(tmp_path):
    config = store(tmp_path, u=(4, 4), v=(4, 4))
    (cost,) = price_store(config, open_dataset(config))
    assert (cost.chunk, cost.shard, cost.object_count) == ((4, 4), None, 8)
    assert cost.samples_per_second == pytest.approx(2 / cost.seconds_per_batch)
    config = store(tmp_path / "other", u=(4, 4), v=(2, 2))
    costs = price_store(config, open_dataset(config))
    assert [cost.chunk for cost in costs] == [(2, 2), (4, 4)]
    predicted = predict_reading(config, open_dataset(config))["requests_per_sample"]
    assert predicted == pytest.approx(sum(cost.requests_per_batch for cost in costs) / 2)


def test_a_grid_read_in_order_is_predicted_to_share_chunks(tmp_path):
    config = store(tmp_path, u=(8, 8)).replace({"data.stride": {"y": 1, "x": 1}})
    shuffled, plain = (
        predict_reading(config.replace({"loader.shuffle": shuffle}), open_dataset(config)) for shuffle in (True, False)
    )
    assert shuffled == plain == {"requests_per_sample": pytest.approx(1 / 25)}  # one chunk, joined by all batches
    config = store(tmp_path / "small", u=(2, 2)).replace({"data.stride": {"y": 1, "x": 1}, "loader.batch_size": 5})
    shuffled, plain = (
        predict_reading(config.replace({"loader.shuffle": shuffle}), open_dataset(config)) for shuffle in (True, False)
    )
    assert plain["requests_per_sample"] <= shuffled["requests_per_sample"]


# -- plans of a config


def test_a_config_is_planned_with_its_ranks_rules_prices_and_readers(tmp_path, tiny_config):
    config = tiny_config(tmp_path / "tiny.zarr", data__arguments={"time": 24, "lat": 20}).replace(
        {
            "hardware.devices": 4, "hardware.strategy": "ddp", "chunking.chunk": "auto", "chunking.shard": "auto",
            "chunking.divisibility": "power-of-two", "chunking.price_per_thousand_reads": 0.0004,
            "chunking.readers": {"series": {"patch": {"time": 24}, "weight": 2.0}},
        }
    )  # fmt: skip
    plan = plan_chunks(config)
    assert plan.ranks == 4
    assert all(side & (side - 1) == 0 for side in plan.chunk)
    assert plan.chosen.price_per_epoch > 0
    assert [reader.name for reader in plan.readers] == ["this plan", "series"]


def test_the_plan_of_a_folder_says_that_it_counts_a_network(tmp_path, tiny_config):
    config = tiny_config(tmp_path / "tiny.zarr", data__arguments={"time": 24, "lat": 20})
    assert "is a folder" in plan_chunks(config).reasons[-1]
    far = config.replace({"data.url": "gs://bucket/tiny.zarr"})
    assert plan_chunks(far).reasons == plan_chunks(config).reasons[:-1]


def test_another_order_can_be_planned_and_compression_measured(tmp_path, tiny_config):
    config = tiny_config(tmp_path / "tiny.zarr", data__arguments={"time": 24, "lat": 20})
    assert plan_chunks(config, order="block").order == "block"
    plain, measured = plan_chunks(config), plan_chunks(config, measure=True)
    ratio = measured.chosen.bytes_per_batch / measured.chosen.stored_bytes_per_batch
    assert ratio == pytest.approx(expected_bytes(config, plain).ratio)
    assert plain.chosen.bytes_per_batch == plain.chosen.stored_bytes_per_batch


def test_a_store_without_a_source_is_planned_with_its_own_compression(tmp_path, tiny_config):
    config = tiny_config(tmp_path / "tiny.zarr", data__arguments={"time": 24, "lat": 20})
    dataset = build(config, progress=False)
    read_only = config.replace({"data.source": None, "data.arguments": {}})
    plan = plan_chunks(read_only)
    raw = sum(info.nbytes for info in dataset.arrays.values())
    ratio = plan.chosen.bytes_per_batch / plan.chosen.stored_bytes_per_batch
    assert ratio == pytest.approx(raw / dataset.manifest.stored_bytes)
    with pytest.raises(PlanError, match=r"chunking.compression_ratio"):
        plan_chunks(read_only, measure=True)


@pytest.mark.parametrize(
    "changes",
    [{}, {"loader.batch_size": 3}, {"data.patch": {"time": 2, "lat": 11, "lon": 3}}],
)
def test_a_trial_in_a_folder_makes_the_requests_that_were_predicted(tmp_path, tiny_config, changes):
    config = tiny_config(tmp_path / "tiny.zarr", data__arguments={"time": 64, "lat": 64}).replace(
        {
            "data.patch": {"time": 2, "lat": 5, "lon": 3}, "chunking.chunk": {"time": 4, "lat": 8, "lon": 4},
            "chunking.shard": {"time": 32, "lat": 32, "lon": 8}, "data.samples_per_epoch": 5000,
            "trial.max_steps": 150, "loader.batch_size": 8, **changes,
        }
    )  # fmt: skip
    dataset = build(config, progress=False)
    loader = PatchData(config).train_dataloader()
    for step, _ in enumerate(loader, 1):
        if step == config.trial.max_steps:
            break
    counts = loader.counters()
    predicted = predict_reading(config, dataset)["requests_per_sample"]
    assert predicted == pytest.approx(counts["requests"] / counts["samples"], rel=0.15)
