"""The map of a batch: the field under it is the store's own, and the counts are the engine's."""

import numpy as np
import pytest

import kit
from kit.charts import maps as module
from kit.charts.maps import batch_figure, batch_map
from kit.data.sampling import sample_plan
from kit.data.stream.engine import Engine
from kit.errors import StoreError


@pytest.fixture(scope="module")
def config(tmp_path_factory):
    config = kit.Config.load("datasets/ocean/recipe.yaml").replace(
        {
            "data.arguments": {"time": 4, "lat": 40, "lon": 60, "seed": 3},
            "data.url": str(tmp_path_factory.mktemp("ocean") / "ocean.zarr"),
            "data.patch": {"time": 2, "lat": 16, "lon": 16},
            "data.samples_per_epoch": 32,
            "chunking.chunk": {"time": 2, "lat": 16, "lon": 16},
        }
    )
    kit.build(config, progress=False)
    return config


def test_the_background_is_the_field_at_the_first_patch(config):
    drawn = batch_map(config)
    dataset = kit.open_dataset(config)
    offsets = sample_plan(config, dataset, 1).batch(0, 0, 0)
    info = dataset.select()[0]
    packed = dataset.open_array(info.name)[int(offsets[0, 0])]
    expected = np.where(packed == info.missing, np.nan, packed * info.scale_factor + info.add_offset)
    np.testing.assert_allclose(drawn.values, expected, rtol=1e-5, atol=1e-5)
    assert drawn.patches == tuple(map(tuple, offsets[:, 1:].tolist()))


def test_the_chunks_counted_are_the_chunks_read(config):
    dataset = kit.open_dataset(config)
    plan = sample_plan(config, dataset, 1)
    with Engine(dataset) as engine:
        list(engine.stream([plan.batch(0, 0, 0)], plan.patch))
        assert engine.counters["chunks_decoded"] == batch_map(config).chunks_read * 3


def test_a_large_array_is_cut_to_a_window_that_holds_the_first_patch(config, monkeypatch):
    monkeypatch.setattr(module, "LARGEST_SIDE", 20)
    drawn = batch_map(config)
    assert drawn.values.shape == (20, 20)
    for start, at in zip(drawn.origin, drawn.patches[0], strict=True):
        assert start <= at < start + 20


def test_every_patch_is_drawn_and_told(config):
    chart = batch_figure(config)
    axes = chart.axes[0]
    assert len(axes.patches) == 2 * 16
    assert axes.get_title(loc="left").startswith("16 patches")


def test_without_a_store_it_says_what_to_do(config, tmp_path):
    with pytest.raises(StoreError, match=r"kit\.build"):
        batch_figure(config.replace({"data.url": str(tmp_path / "nothing.zarr")}))
