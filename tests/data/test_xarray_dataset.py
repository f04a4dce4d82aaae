"""What xarray holds is streamed as a store is: in memory, by dask, or lazily from a file behind it."""

import pickle

import numpy as np
import pytest
import torch
import xarray

from kit.config import Config
from kit.data.dataset import LARGEST_PIECE_BYTES
from kit.data.open_dataset import open_dataset
from kit.data.patches.module import PatchData
from kit.data.stream.engine import Engine
from kit.errors import ConfigError, StoreError

SHAPE = (9, 70, 80)
CONFIG = Config().replace(
    {"data.patch": {"time": 2, "y": 16, "x": 16}, "data.samples_per_epoch": 10, "data.standardize": False,
     "loader.batch_size": 4}
)  # fmt: skip


@pytest.fixture
def held():
    random = np.random.default_rng(4)
    values = random.normal(size=SHAPE).astype("f4")
    values[3, 10:20, 30:50] = np.nan
    dims = ("time", "y", "x")
    return xarray.Dataset(
        {
            "warmth": (dims, values, {"units": "K", "long_name": "how warm"}),
            "kind": (dims, random.integers(0, 9, SHAPE)),
            "when": (dims, np.zeros(SHAPE, "datetime64[ns]")),
            "mean": ((), 3.0),
        },
        coords={"time": np.arange("2020-01-01", "2020-01-10", dtype="datetime64[D]").astype("datetime64[ns]")},
        attrs={"title": "held"},
    )


def in_memory(held, tmp_path):
    return held


def by_dask(held, tmp_path):
    return held.chunk({"time": 4, "y": 33})


def from_a_file(held, tmp_path):
    chunks = {"warmth": {"chunks": (2, 20, 30)}, "kind": {"chunks": (9, 70, 80)}}
    held.drop_vars("when").to_zarr(tmp_path / "held.zarr", zarr_format=2, encoding=chunks)
    return xarray.open_zarr(tmp_path / "held.zarr", chunks=None)


@pytest.mark.parametrize("kind", [in_memory, by_dask, from_a_file])
def test_batches_are_the_values_that_xarray_gives(held, kind, tmp_path):
    dataset = open_dataset(kind(held, tmp_path))
    offsets = np.random.default_rng(1).integers(0, (8, 55, 65), (20, 3))
    with Engine(dataset) as engine:
        assert set(engine.variables) == {"warmth", "kind"}
        ((values, valid),) = engine.stream([offsets], (2, 16, 16))
        warmth, number = engine.variables.index("warmth"), engine.variables.index("kind")
    for sample, offset in enumerate(offsets):
        region = tuple(slice(first, first + side) for first, side in zip(offset, (2, 16, 16), strict=True))
        expected = held["warmth"].values[region]
        assert np.array_equal(valid[sample, warmth], ~np.isnan(expected))
        assert np.array_equal(values[sample, warmth], np.nan_to_num(expected))
        assert np.array_equal(values[sample, number], held["kind"].values[region])
    assert engine.counters["requests"] == engine.counters["chunks_decoded"] > 0
    assert engine.counters["chunks_filled"] == 0


def test_a_lazy_object_is_cut_as_its_file_and_nothing_else_is_read(held, tmp_path):
    dataset = open_dataset(from_a_file(held, tmp_path))
    assert dataset.arrays["warmth"].chunk == (2, 20, 30)
    with Engine(dataset, ["warmth"]) as engine:
        next(engine.stream([np.zeros((1, 3), int)], (2, 16, 16)))
        assert (engine.counters["requests"], engine.counters["bytes_read"]) == (1, 2 * 20 * 30 * 4)


def test_an_object_in_memory_is_cut_into_small_pieces():
    big = xarray.DataArray(np.zeros((512, 1024), "f8"), dims=("y", "x"), name="big")
    info = open_dataset(big).arrays["big"]
    assert np.prod(info.chunk) * 8 <= LARGEST_PIECE_BYTES
    assert min(info.chunk) >= 64


def test_it_is_described_as_any_dataset(held):
    dataset = open_dataset(held)
    info = dataset.arrays["warmth"]
    assert (info.dims, info.units, info.long_name) == (("time", "y", "x"), "K", "how warm")
    assert dataset.attributes == {"title": "held"}
    assert np.array_equal(dataset.coordinate("time"), held.time.values)
    assert np.array_equal(dataset.coordinate("y"), np.arange(70))
    assert np.array_equal(dataset.open_array("kind")[...], held["kind"].values)
    assert "warmth (time 9, y 70, x 80) float32" in str(dataset)


def test_a_data_array_is_a_dataset_of_one(held):
    assert [*open_dataset(held["warmth"]).arrays] == ["warmth"]
    assert [*open_dataset(held["warmth"].rename(None)).arrays] == ["data"]


def test_it_pickles_with_its_values(held):
    copy = pickle.loads(pickle.dumps(open_dataset(held)))
    with Engine(copy, ["kind"]) as engine:
        ((values, _),) = engine.stream([np.zeros((1, 3), int)], SHAPE)
    assert np.array_equal(values[0, 0], held["kind"].values)


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("order", ["random", "grid", "block"])
def test_lightning_data_takes_it_instead_of_a_store(held, order, num_workers):
    torch.set_num_threads(1)
    config = CONFIG.replace({"data.order": order, "data.variables": ["warmth"], "loader.num_workers": num_workers})
    data = PatchData(config, held)
    loader = data.train_dataloader()
    batches = [batch["values"] for batch in loader]
    data.teardown()
    assert [len(batch) for batch in batches] == [4] * (len(batches) - 1) + [loader.plan.samples % 4 or 4]
    offsets = loader.plan.batch(0, 0, 0)
    first = tuple(slice(start, start + side) for start, side in zip(offsets[0], (2, 16, 16), strict=True))
    assert np.array_equal(batches[0][0, 0].numpy(), np.nan_to_num(held["warmth"].values[first]))


def test_what_does_not_fit_it_is_refused_before_it_is_read(held):
    for changes, message in [
        ({"data.patch": {"times": 2}}, r"data\.patch: .*did you mean 'time'"),
        ({"data.patch": {"time": 10}}, r"data\.patch: 10 elements along 'time', but .* has 9"),
        ({"data.variables": ["warmt"]}, r"data\.variables: no variable 'warmt' .*did you mean 'warmth'"),
        ({"data.standardize": True}, r"data\.standardize"),
    ]:
        with pytest.raises(ConfigError, match=message):
            PatchData(CONFIG.replace(changes), held).train_dataloader()


@pytest.mark.parametrize("given", [7, None, [1, 2], np.zeros(3)])
def test_what_holds_no_data_is_refused(given):
    with pytest.raises(StoreError, match="Config.*URL.*xarray"):
        open_dataset(given)


class Broken:
    """An array that fails when it is read."""

    shape, dtype, ndim = SHAPE, np.dtype("f4"), 3

    def __array__(self, *args, **kwargs):
        raise OSError("the disk is gone")

    def __getitem__(self, key):
        raise OSError("the disk is gone")

    def __array_function__(self, *args, **kwargs):
        raise OSError("the disk is gone")

    __array_ufunc__ = None


def test_an_object_that_cannot_be_read_is_a_named_error():
    lazy = xarray.DataArray(Broken(), dims=("time", "y", "x"), name="lost")
    with Engine(open_dataset(lazy)) as engine, pytest.raises(StoreError, match="could not read .*lost"):
        next(engine.stream([np.zeros((1, 3), int)], (2, 16, 16)))
