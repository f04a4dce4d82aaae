"""Opening stores, kit's own and others', and choosing variables."""

import pickle
import warnings

import numpy as np
import pytest
import zarr

from kit.config import Config
from kit.data.build.build import build
from kit.data.build.verify import verify
from kit.data.open_dataset import open_dataset
from kit.data.sampling import sample_plan
from kit.data.variables import decode_float, encode_float
from kit.errors import ConfigError, CorruptChunkError, MissingChunkError, StoreError


def test_an_array_is_described_as_its_reader_needs_it(place, tiny_config):
    dataset = build(tiny_config(f"{place}/t.zarr"), progress=False)
    info = dataset.arrays["sst"]
    assert [*dataset.arrays] == ["sst", "wind"]
    assert (info.shape, info.dims, info.dtype) == ((5, 7, 9), ("time", "lat", "lon"), np.dtype("int16"))
    assert (info.chunk, info.shard) == ((1, 4, 4), (2, 8, 8))
    assert (info.scale_factor, info.add_offset, info.missing) == (0.01, 10.0, -32768)
    assert (info.units, info.long_name) == ("degree_Celsius", "temperature")
    assert info.nbytes == 5 * 7 * 9 * 2
    assert dataset.arrays["wind"].missing is None
    assert {*dataset.coordinates} == {"time", "lat", "lon"}
    assert dataset.attributes["title"] == "tiny"
    np.testing.assert_array_equal(dataset.coordinate("lon"), np.arange(9) * 10.0)


def test_an_unsharded_store_has_chunks_for_objects(tmp_path, tiny_config):
    info = build(tiny_config(tmp_path / "t.zarr", chunking__shard="none"), progress=False).arrays["sst"]
    assert (info.chunk, info.shard) == ((1, 4, 4), None)


def test_a_dataset_pickles_small_and_opens_again(tmp_path, tiny_config):
    dataset = build(tiny_config(tmp_path / "t.zarr"), progress=False)
    data = pickle.dumps(dataset)
    again = pickle.loads(data)
    assert len(data) < 10_000
    assert again == dataset
    np.testing.assert_array_equal(again.open_array("sst")[...], dataset.open_array("sst")[...])


def test_variables_are_chosen_by_name_in_order_or_all_of_the_largest_shape(tmp_path, tiny_config):
    dataset = build(tiny_config(tmp_path / "t.zarr"), progress=False)
    assert [info.name for info in dataset.select(["wind", "sst"])] == ["wind", "sst"]
    assert [info.name for info in dataset.select()] == ["sst", "wind"]
    with pytest.raises(ConfigError, match=r"data\.variables: no variable 'sts' .*did you mean 'sst'"):
        dataset.select(["sts"])


def test_nothing_there_says_how_to_build_it(place):
    with pytest.raises(StoreError, match=r"kit\.build\(config\)"):
        open_dataset(f"{place}/none.zarr")


@pytest.mark.parametrize("scheme", ["gs", "s3"])
@pytest.mark.parametrize(
    ("path", "hint"),
    [
        ("shelf/ocen.zarr", "did you mean 'ocean.zarr'"),
        ("shelf/deep/else.zarr", "shelf/deep is empty"),
        ("shelf/unlike", "beside it are notes.txt, ocean.zarr"),
        ("shelf", "it holds notes.txt, ocean.zarr"),
        ("no-such-bucket/ocean.zarr", "no-such-bucket is empty"),
        ("no-such-bucket", "no-such-bucket is empty"),
    ],
)
def test_a_wrong_address_in_a_bucket_says_what_is_there(cloud, tmp_path, scheme, path, hint):
    (tmp_path / "ocean.zarr").mkdir()
    (tmp_path / "ocean.zarr" / "zarr.json").write_text("{}")
    (tmp_path / "notes.txt").write_text("of the shelf")
    cloud.upload(tmp_path, "shelf")
    with pytest.raises(StoreError, match="no Zarr group") as told:
        open_dataset(cloud.url(path, scheme), "anonymous")
    assert hint in str(told.value)


def test_a_store_behind_a_plain_web_server_opens_and_verifies(tmp_path, tiny_config, folder_server):
    dataset = build(tiny_config(tmp_path / "t.zarr"), progress=False)
    far = open_dataset(f"{folder_server}/t.zarr")
    assert far.arrays == dataset.arrays
    np.testing.assert_array_equal(far.coordinate("lat"), dataset.coordinate("lat"))
    assert verify(far.url, progress=False).faults == ()
    with pytest.raises(StoreError, match="no Zarr group"):
        open_dataset(f"{folder_server}/none.zarr")


def test_a_foreign_zarr_3_store_opens_without_a_warning(tmp_path):
    url = str(tmp_path / "f.zarr")
    group = zarr.create_group(url)
    names = {"dimension_names": ("y", "x"), "chunks": (2, 2)}
    group.create_array("a", shape=(4, 6), dtype="i2", attributes={"_FillValue": -1, "scale_factor": 0.5}, **names)
    group.create_array("b", shape=(4, 6), dtype="f4", attributes={"_FillValue": encode_float(-9.5)}, **names)
    group.create_array("c", shape=(3,), dtype="f8", dimension_names=("z",))
    group.create_array("x", shape=(6,), dtype="f8", dimension_names=("x",))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        dataset = open_dataset(url)
    assert dataset.manifest is None
    assert {*dataset.arrays} == {"a", "b", "c"}
    assert {*dataset.coordinates} == {"x"}
    assert (dataset.arrays["a"].missing, dataset.arrays["b"].missing) == (-1, -9.5)
    assert dataset.arrays["a"].mean is None
    assert [info.name for info in dataset.select()] == ["a", "b"]
    with pytest.raises(ConfigError, match="one shape"):
        dataset.select(["a", "c"])


def test_a_foreign_zarr_2_store_opens_too(tmp_path):
    url = str(tmp_path / "f.zarr")
    group = zarr.create_group(url, zarr_format=2)
    dims = {"_ARRAY_DIMENSIONS": ["y", "x"]}
    group.create_array("a", shape=(4, 6), chunks=(2, 3), dtype="i2", fill_value=-7, attributes=dims)
    group.create_array("b", shape=(2,), dtype="i2")
    info = open_dataset(url).arrays["a"]
    assert (info.dims, info.missing, info.chunk, info.shard) == (("y", "x"), -7, (2, 3), None)
    assert open_dataset(url).arrays["b"].dims == ("dim_0",)


def test_what_xarray_wrote_is_described_as_xarray_reads_it(tmp_path):
    import xarray

    values = np.array([[1.5, np.nan], [2.0, 3.0]])
    frame = xarray.Dataset({"t": (("y", "x"), values), "f": (("y", "x"), values.astype("f4"))})
    packing = {"dtype": "int16", "scale_factor": 0.5, "add_offset": 1.0, "_FillValue": -5}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        frame.to_zarr(tmp_path / "x.zarr", encoding={"t": packing}, zarr_format=3)
    dataset = open_dataset(str(tmp_path / "x.zarr"))
    info = dataset.arrays["t"]
    assert (info.missing, info.scale_factor, info.add_offset) == (-5, 0.5, 1.0)
    assert dataset.arrays["f"].missing is None


def test_metadata_that_is_not_what_was_published_is_refused(tmp_path, tiny_config):
    config = tiny_config(tmp_path / "t.zarr")
    build(config, progress=False)
    document = tmp_path / "t.zarr/sst/zarr.json"
    text = document.read_text()
    document.write_text(text.replace('"scale_factor": 0.01', '"scale_factor": 0.02'))
    assert document.read_text() != text
    with pytest.raises(CorruptChunkError, match=r"sst/zarr\.json .*published"):
        open_dataset(config)
    document.unlink()
    with pytest.raises(MissingChunkError, match=r"sst/zarr\.json is gone"):
        open_dataset(config)


@pytest.mark.parametrize("value", [0.0, -9.5, 1e300, 9.969209968386869e36])
def test_float_fill_values_survive_json(value):
    assert decode_float(encode_float(value)) == value
    assert decode_float(str(value)) == value


def test_a_fill_value_that_is_no_number_is_refused():
    with pytest.raises(StoreError, match="neither a number"):
        decode_float("soon")


def test_names_with_markup_are_escaped_in_html(tmp_path):
    group = zarr.create_group(str(tmp_path / "f.zarr"))
    group.create_array("a", shape=(2,), dtype="i2", attributes={"long_name": "<img onerror=x>", "units": "m"})
    shown = open_dataset(str(tmp_path / "f.zarr"))._repr_html_()
    assert "<img" not in shown
    assert "&lt;img" in shown


def test_an_empty_selection_is_refused_before_anything_is_read(tmp_path):
    group = zarr.open_group(tmp_path / "none.zarr", mode="w")
    with pytest.raises(ConfigError, match=r"data\.variables: .*no data variables"):
        open_dataset(tmp_path / "none.zarr").select()
    group.create_array("a", shape=(0, 4), chunks=(1, 2), dtype="f4", dimension_names=["time", "x"])
    config = Config().replace({"data.url": str(tmp_path / "none.zarr"), "data.patch": {"x": 2}})
    with pytest.raises(ConfigError, match=r"a is empty: .*elements along 'time'"):
        sample_plan(config, open_dataset(config), 1)
