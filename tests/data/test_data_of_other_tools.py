"""Stores as further tools write them, and what leads on where one cannot be taken by its path."""

from __future__ import annotations

import json

import numpy as np
import pytest
import xarray
import zarr
from test_data_people_have import DIMS, SHAPE, assert_same, built, grid, in_a_file, of_two, streamed

from kit.data.open_dataset import open_dataset
from kit.errors import KitWarning, StoreError


def virtual(folder):
    """A file, and what VirtualiZarr holds of it."""
    virtualizarr = pytest.importorskip("virtualizarr")
    from obspec_utils.registry import ObjectStoreRegistry
    from obstore.store import LocalStore
    from virtualizarr.parsers import HDFParser

    expected = in_a_file(folder)
    registry = ObjectStoreRegistry({"file://": LocalStore()})
    return virtualizarr.open_virtual_dataset(f"file://{folder}/a.nc", registry=registry, parser=HDFParser()), expected


def assert_near(given, expected, target):
    found = streamed(given)
    assert set(found) == set(expected)
    for name, values in expected.items():
        np.testing.assert_allclose(found[name], values, rtol=1e-6, atol=1e-6)
    assert_same(built(given, target).data_vars, expected)


@pytest.mark.filterwarnings("ignore:Numcodecs codecs are not in the Zarr version 3")
def test_chunks_that_icechunk_points_to_are_read_through_a_session_that_may(tmp_path):
    icechunk = pytest.importorskip("icechunk")
    held, expected = virtual(tmp_path)
    place, settings = f"file://{tmp_path}/", icechunk.RepositoryConfig.default()
    store = icechunk.local_filesystem_store(str(tmp_path))
    settings.set_virtual_chunk_container(icechunk.VirtualChunkContainer(place, store))
    made = icechunk.Repository.create(
        icechunk.local_filesystem_storage(str(tmp_path / "repo")), config=settings,
        authorize_virtual_chunk_access={place: None},
    )  # fmt: skip
    made.save_config()
    session = made.writable_session("main")
    held.vz.to_icechunk(session.store)
    session.commit("virtual")
    assert_near(made.readonly_session("main"), expected, tmp_path / "t.zarr")
    with pytest.raises(StoreError, match="authorize_virtual_chunk_access.*readonly_session"):
        streamed(tmp_path / "repo")


@pytest.mark.filterwarnings("ignore:Numcodecs codecs are not in the Zarr version 3")
def test_references_that_virtualizarr_wrote_are_read_by_their_path(tmp_path):
    held, expected = virtual(tmp_path)
    held.vz.to_kerchunk(str(tmp_path / "a.json"), format="json")
    assert_near(str(tmp_path / "a.json"), expected, tmp_path / "t.zarr")


def test_references_that_kerchunk_combined_are_read_along_time(tmp_path):
    hdf, combine = pytest.importorskip("kerchunk.hdf"), pytest.importorskip("kerchunk.combine")
    parts = []
    for place in range(2):
        part = of_two().assign_coords(time=np.arange(5) + 5 * place)
        part["n"] += place
        part.to_netcdf(tmp_path / f"{place}.nc")
        parts.append(hdf.SingleHdf5ToZarr(str(tmp_path / f"{place}.nc")).translate())
    joined = combine.MultiZarrToZarr(parts, concat_dims=["time"]).translate()
    (tmp_path / "a.json").write_text(json.dumps(joined))
    expected = {name: np.concatenate([of_two()[name]] * 2) for name in ("t", "n")}
    expected["n"][5:] += 1
    assert_near(str(tmp_path / "a.json"), expected, tmp_path / "t.zarr")


def test_lengths_of_time_are_no_data(tmp_path):
    dataset = xarray.Dataset({"t": (DIMS, grid()), "waited": (DIMS, np.zeros(SHAPE, "timedelta64[ns]"))})
    dataset.to_zarr(tmp_path / "a.zarr", consolidated=False)
    for number, given in enumerate([dataset, str(tmp_path / "a.zarr")]):
        assert_same(streamed(given), {"t": grid()})
        assert set(open_dataset(given).left_out) == {"waited"}
        with pytest.warns(KitWarning, match="Left out: waited"):
            assert_same(built(given, tmp_path / f"{number}.zarr").data_vars, {"t": grid()})


@pytest.mark.filterwarnings("ignore:Duplicate name")  # xarray writes the group's metadata twice
def test_a_file_that_is_no_store_leads_to_what_opens_it(tmp_path):
    dataset = xarray.Dataset({"t": (DIMS, grid())})
    with zarr.storage.ZipStore(str(tmp_path / "a.zarr.zip"), mode="w") as store:
        dataset.to_zarr(store, consolidated=False)
    with pytest.raises(StoreError, match=r"Give kit what zarr\.storage\.ZipStore makes"):
        open_dataset(tmp_path / "a.zarr.zip")
    opened = zarr.storage.ZipStore(str(tmp_path / "a.zarr.zip"), mode="r")
    assert_same(streamed(opened), {"t": grid()})
    assert_same(built(opened, tmp_path / "t.zarr").data_vars, {"t": grid()})
    (tmp_path / "a.tif").write_bytes(b"II*")
    with pytest.raises(StoreError, match=r"Give kit what rioxarray\.open_rasterio makes"):
        open_dataset(tmp_path / "a.tif")


def test_classic_files_and_many_files_as_one_are_read(tmp_path):
    dataset = xarray.Dataset({"t": (DIMS, grid())}, {"time": np.arange(5)})
    dataset.to_netcdf(tmp_path / "a.nc", format="NETCDF3_64BIT", engine="netcdf4")
    assert_near(str(tmp_path / "a.nc"), {"t": grid()}, tmp_path / "t.zarr")
    for time in range(5):
        dataset.isel(time=[time]).to_netcdf(tmp_path / f"part-{time}.nc")
    with xarray.open_mfdataset(str(tmp_path / "part-*.nc")) as opened:
        assert_near(opened, {"t": grid()}, tmp_path / "many.zarr")


@pytest.mark.filterwarnings("ignore::DeprecationWarning:ome_zarr")  # of a default of its own
def test_images_of_a_plate_and_their_labels_are_found_by_their_paths(tmp_path):
    writer, formats = pytest.importorskip("ome_zarr.writer"), pytest.importorskip("ome_zarr.format")
    version = formats.format_from_version("0.4")
    image = np.random.default_rng(0).integers(0, 9000, (2, 64, 96)).astype("u2")
    plate = zarr.open_group(str(tmp_path / "a.zarr"), mode="w", zarr_format=2)
    writer.write_plate_metadata(plate, ["A"], ["1"], ["A/1"], fmt=version)
    well = plate.require_group("A").require_group("1")
    writer.write_well_metadata(well, ["0"], fmt=version)
    field = well.require_group("0")
    writer.write_image(image, field, axes="cyx", fmt=version)
    writer.write_labels((image[0] > 500).astype("u1"), field, name="cells", axes="yx", fmt=version)
    with pytest.raises(StoreError, match="plate of images; .*A/1/0"):
        open_dataset(tmp_path / "a.zarr")
    for path, values in {"A/1/0": image, "A/1/0/labels/cells": image[0] > 500}.items():
        given = str(tmp_path / "a.zarr" / path)
        (found,) = streamed(given)
        assert_same(streamed(given), {found: values})
        assert_same(built(given, tmp_path / f"{len(path)}.zarr").data_vars, {found: values})
