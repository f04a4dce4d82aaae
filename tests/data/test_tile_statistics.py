"""Statistics of tiles are those of the values, in stores of other writers, and choose patches without reading."""

from __future__ import annotations

import numpy as np
import pytest
import zarr
from lightning.pytorch import Trainer

import kit
from kit.config import Config
from kit.data.open_dataset import open_dataset
from kit.data.patches.tiles import standardized_by
from kit.data.sampling import sample_plan
from kit.data.tile_statistics import TileStatistics, find_statistics
from kit.errors import ConfigError
from kit.models.unet import UNet
from kit.studies.diagnosis.evidence import store_layout

SHAPE, CHUNK = (11, 37, 52), (4, 16, 16)
QUIET = {
    "accelerator": "cpu", "logger": False, "enable_checkpointing": False, "enable_progress_bar": False,
    "enable_model_summary": False,
}  # fmt: skip


def sea():
    """A field with land (NaN) in the west, and waves that grow towards the north."""
    time, lat, lon = np.meshgrid(*map(np.arange, SHAPE), indexing="ij")
    values = (290 + time + lat * np.sin(lon + time)).astype("float32")
    values[:, :, :20] = np.nan
    return values


def xarray_zarr(folder):
    xarray = pytest.importorskip("xarray")
    field = xarray.Dataset({"sst": (("time", "lat", "lon"), sea())})
    field.to_zarr(folder / "x.zarr", encoding={"sst": {"chunks": CHUNK}}, consolidated=False)
    return folder / "x.zarr"


def netcdf(folder):
    xarray = pytest.importorskip("xarray")
    pytest.importorskip("h5netcdf")
    field = xarray.Dataset({"sst": (("time", "lat", "lon"), sea())})
    field.to_netcdf(folder / "x.nc", engine="h5netcdf", encoding={"sst": {"chunksizes": CHUNK}})
    return folder / "x.nc"


def packed_zarr2(folder):
    """As xarray packs: whole numbers with a scale, and a number that stands for a missing value."""
    xarray = pytest.importorskip("xarray")
    field = xarray.Dataset({"sst": (("time", "lat", "lon"), sea())})
    packing = {"dtype": "int16", "scale_factor": 0.01, "add_offset": 290.0, "_FillValue": -32768, "chunks": CHUNK}
    field.to_zarr(folder / "p.zarr", encoding={"sst": packing}, zarr_format=2)
    return folder / "p.zarr"


def icechunk(folder):
    library = pytest.importorskip("icechunk")
    storage = library.local_filesystem_storage(str(folder / "ice"))
    session = library.Repository.create(storage).writable_session("main")
    group = zarr.open_group(session.store, mode="w")
    array = group.create_array(
        "sst", shape=SHAPE, chunks=CHUNK, dtype="float32", dimension_names=("time", "lat", "lon")
    )
    array[:] = sea()
    session.commit("written")
    return folder / "ice"


def kerchunk(folder):
    import json

    place = xarray_zarr(folder)
    references = {}
    for file in sorted(place.rglob("*")):
        if file.is_file():
            key = str(file.relative_to(place))
            references[key] = file.read_text() if key.endswith(".json") else [str(file)]
    (folder / "x.json").write_text(json.dumps({"version": 1, "refs": references}))
    return folder / "x.json"


def own(folder):
    group = zarr.open_group(str(folder / "z.zarr"), mode="w")
    array = group.create_array(
        "sst", shape=SHAPE, chunks=CHUNK, shards=(4, 32, 32), dtype="float32", dimension_names=("time", "lat", "lon")
    )
    array[:] = sea()
    return folder / "z.zarr"


PLACES = {maker.__name__: maker for maker in (xarray_zarr, netcdf, packed_zarr2, icechunk, kerchunk, own)}


def config_of(place, **changes):
    return Config().replace(
        {
            "data.url": str(place), "data.patch": {"time": 2, "lat": 8, "lon": 8}, "data.samples_per_epoch": 64,
            "loader.batch_size": 8, **{path.replace("__", "."): value for path, value in changes.items()},
        }
    )  # fmt: skip


def offsets_of(plan):
    return np.concatenate([plan.batch(0, step, 0) for step in range(plan.batches_per_epoch)])


@pytest.mark.parametrize("kind", PLACES)
def test_statistics_are_those_of_the_values_whoever_wrote_them(tmp_path, kind, monkeypatch):
    monkeypatch.chdir(tmp_path)  # what cannot lie beside the store lies in the project's folder
    config = config_of(PLACES[kind](tmp_path))
    calls = []
    found = kit.data.statistics(config, progress=lambda *call: calls.append(call))
    values = sea().astype(np.float64)
    mean, deviation = found.mean_and_deviation(0)
    assert mean == pytest.approx(np.nanmean(values), abs=0.01)
    assert deviation == pytest.approx(np.nanstd(values), abs=0.01)
    assert found.tile == (1, 4, 4)
    known = np.add.reduceat(np.isfinite(values), np.arange(0, SHAPE[2], 4), axis=2)
    known = np.add.reduceat(known, np.arange(0, SHAPE[1], 4), axis=1)
    assert np.array_equal(found.valid[0], known)
    assert calls[-1][0] == calls[-1][1] == 3 * 3 * 4
    kept = kit.data.statistics(config, progress=lambda *call: pytest.fail("read again"))
    assert np.array_equal(kept.total, found.total)


def test_patches_without_enough_sea_are_left_out_and_nothing_is_read_for_that(tmp_path):
    place = own(tmp_path)
    with pytest.raises(ConfigError, match=r"least_valid_fraction: .*kit\.data\.statistics"):
        sample_plan(config_of(place, data__least_valid_fraction=0.5), open_dataset(str(place)), 1)
    kit.data.statistics(config_of(place), progress=False)
    known = np.isfinite(sea())
    for order in ("random", "grid", "block"):
        config = config_of(place, data__least_valid_fraction=0.99, data__order=order)
        offsets = offsets_of(sample_plan(config, open_dataset(config), 1))
        shares = [known[tuple(slice(a, a + b) for a, b in zip(one, (2, 8, 8), strict=True))].mean() for one in offsets]
        assert min(shares) > 0.75  # tiles are 4 wide, and a cell has the share of the patch in its middle
        assert np.mean(shares) > 0.97
    with pytest.raises(ConfigError, match="leaves no patch"):
        whole = config_of(place, data__least_valid_fraction=1.0, data__patch={"lon": 52})
        sample_plan(whole, open_dataset(whole), 1)


@pytest.mark.parametrize("changes", [{"data__least_valid_fraction": 0.5}, {"data__weight_by": "valid"}])
def test_a_store_with_a_filter_is_compared_with_one_cut_again(tmp_path, changes):
    config = config_of(own(tmp_path), **changes)
    kit.data.statistics(config, progress=False)
    layout = store_layout(config)
    assert layout.seconds_per_batch > 0
    assert layout.planned_seconds_per_batch > 0


def test_patches_are_drawn_in_proportion_to_their_deviation(tmp_path):
    place = own(tmp_path)
    config = config_of(place, data__weight_by="deviation", data__samples_per_epoch=4000)
    kit.data.statistics(config, progress=False)
    weighted = offsets_of(sample_plan(config, open_dataset(config), 1))
    alike = offsets_of(sample_plan(config.replace({"data.weight_by": "nothing"}), open_dataset(config), 1))
    values = sea()

    def deviation(one):
        inside = values[tuple(slice(a, a + b) for a, b in zip(one, (2, 8, 8), strict=True))]
        return np.nanstd(inside) if np.isfinite(inside).any() else 0.0

    plain = np.array([deviation(one) for one in alike])
    expected = (plain**2).mean() / plain.mean()  # of draws in proportion to it
    found = np.mean([deviation(one) for one in weighted])
    assert found == pytest.approx(expected, rel=0.08)  # a cell has the weight of the patch in its middle
    assert found > 1.15 * plain.mean()


@pytest.mark.parametrize("split", ["end", "regions"])
def test_standardize_takes_the_means_of_the_part_for_training(tmp_path, split):
    place = own(tmp_path)
    config = config_of(place, data__validation_fraction=0.3, data__split=split, data__split_region={"time": 2})
    assert standardized_by(config, open_dataset(config)).arrays["sst"].mean is None
    kit.data.statistics(config, progress=False)
    taken = standardized_by(config, open_dataset(config)).arrays["sst"]
    parts = kit.data.split(config)
    whole = np.zeros(SHAPE[0], bool)
    for number, (first, end) in enumerate(zip(parts.borders[0][:-1], parts.borders[0][1:], strict=True)):
        whole[first:end] = parts.regions.reshape(-1)[number] == 0
    expected = sea().astype(np.float64)[whole]
    assert taken.mean == pytest.approx(np.nanmean(expected), abs=1e-3)
    assert taken.deviation == pytest.approx(np.nanstd(expected), abs=1e-3)
    assert taken.mean != pytest.approx(np.nanmean(sea()), abs=1e-3)


def test_a_trainer_tests_on_patches_that_were_kept(tmp_path):
    place = own(tmp_path)
    config = config_of(
        place, data__validation_fraction=0.2, data__test_fraction=0.2, data__split="regions",
        data__split_region={"lat": 12, "lon": 13}, data__samples_per_epoch=32,
    )  # fmt: skip
    kit.data.statistics(config, progress=False)
    data = kit.data.PatchData(config)

    class Tested(UNet):
        def test_step(self, batch, batch_idx):
            self.log("seen", float(len(batch["values"])), reduce_fx="sum")

    trainer = Trainer(max_epochs=1, num_sanity_val_steps=0, **QUIET)
    module = Tested(variables=1, history=1, width=4, depth=1)
    trainer.fit(module, datamodule=data)
    (seen,) = trainer.test(module, datamodule=data, verbose=False)
    assert seen == {"seen": 6.0}
    with pytest.raises(ConfigError, match="test_fraction"):
        kit.data.PatchData(config_of(place)).test_dataloader()


def test_statistics_of_several_variables_are_those_of_each_and_in_any_order(tmp_path):
    xarray = pytest.importorskip("xarray")
    path, dims = tmp_path / "two.zarr", ("time", "lat", "lon")
    stored = xarray.Dataset({"sst": (dims, sea()), "air": (dims, sea() * 2 + 1)})
    stored.to_zarr(path, encoding={name: {"chunks": CHUNK} for name in stored}, consolidated=False)
    config = Config().replace({"data.url": str(path), "data.patch": {"lat": 8, "lon": 8}})
    both = kit.data.statistics(config.replace({"data.variables": ["sst", "air"]}), progress=False)
    dataset = open_dataset(config)
    for names in (("air",), ("sst",), ("air", "sst")):
        found = find_statistics(dataset, names)
        assert found.variables == names
        for number, name in enumerate(names):
            assert found.mean_and_deviation(number) == both.mean_and_deviation(both.variables.index(name))
        made = kit.data.statistics(config.replace({"data.variables": [*names]}), progress=False, again=True)
        assert (made.valid == found.valid).all()
        np.testing.assert_allclose(made.mean_and_deviation(0), found.mean_and_deviation(0))
    for file in tmp_path.glob("*.npz"):
        if TileStatistics.load(file).variables != ("sst", "air"):
            file.unlink()
    zarr.open_group(path)["air"].attrs["scale_factor"] = 2.0
    assert find_statistics(open_dataset(config), ("air",)) is None
