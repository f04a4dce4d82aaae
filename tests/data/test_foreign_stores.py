"""Any group that xarray writes opens and reads as xarray reads it: formats, packing, codecs, edges, coordinates."""

from __future__ import annotations

import contextlib
import json
import socket
import threading

import numcodecs
import numpy as np
import pytest
import xarray
import zarr
from properties import crossed

import kit
from kit.cloud.simulated import simulated_cloud
from kit.config import Config
from kit.data.build.build import build
from kit.data.build.open_source import as_source
from kit.data.open_dataset import open_dataset
from kit.data.stream.engine import Engine
from kit.errors import KitError, StoreError, UnfinishedStoreError
from kit.machine.endpoints import VARIABLE

SHAPE, PATCH = (7, 13, 17), (2, 5, 6)
DIMS = ("time", "y", "x")
CORNERS = np.array([[0, 0, 0], [5, 8, 11], [3, 4, 2], [5, 0, 11]])
ROUNDING = 2.0**-22
LOGIN = {"type": "authorized_user", "client_id": "my-own", "client_secret": "my-own", "refresh_token": "my-own"}


def values_of(dtype, seed=0):
    random = np.random.default_rng(seed)
    if np.dtype(dtype).kind == "f":
        return random.normal(280, 15, SHAPE).astype(dtype)
    return random.integers(0, 120, SHAPE).astype(dtype)


def group(**variables):
    """A Dataset with times, plain and two-dimensional coordinates, and a scalar one."""
    random = np.random.default_rng(9)
    return xarray.Dataset(
        {name: (DIMS, values) for name, values in variables.items()},
        coords={
            "time": np.array(["2001-02-28", "2001-03-01", "2001-03-02"] + ["2001-03-09"] * 4, "datetime64[ns]"),
            "x": np.linspace(0, 1, SHAPE[2]), "lon": (("y", "x"), random.normal(size=SHAPE[1:])), "depth": 5.0,
        },
        attrs={"title": "a group of others"},
    )  # fmt: skip


def read(given, variables=(), offsets=CORNERS, patch=PATCH):
    with Engine(open_dataset(given), variables) as engine:
        ((values, valid),) = engine.stream([offsets], patch)
    return values, valid


def as_xarray_reads(path, variables, offsets=CORNERS, patch=PATCH, **options):
    with xarray.open_zarr(path, chunks=None, **options) as opened:
        arrays = [opened[name].values for name in variables]
    regions = [tuple(map(slice, offset, offset + np.array(patch))) for offset in offsets]
    return np.array([[array[region].astype(np.float64) for array in arrays] for region in regions])


def assert_equal(got, expected):
    values, valid = got
    assert np.array_equal(valid, ~np.isnan(expected))
    assert (values[~valid] == 0).all()
    assert np.allclose(values[valid], expected[valid], rtol=ROUNDING, atol=ROUNDING * 300)


PACKINGS = {
    "plain float": ("f4", {}),
    "double": ("f8", {}),
    "half": ("f2", {}),
    "integer": ("i4", {}),
    "bytes": ("u1", {}),
    "switch": ("bool", {}),
    "scaled": ("f8", {"dtype": "i2", "scale_factor": 0.01, "add_offset": 273.15, "_FillValue": -32768}),
    "scaled unsigned": ("f8", {"dtype": "u2", "scale_factor": 0.01, "_FillValue": 65535}),
    "unsigned in signed": ("f8", {"dtype": "i1", "_Unsigned": "true", "scale_factor": 3.0, "_FillValue": -1}),
    "float with a number for missing": ("f4", {"_FillValue": -999.0}),
    "integers with one": ("f8", {"dtype": "i2", "_FillValue": 7}),
    "missing_value": ("f8", {"dtype": "i2", "missing_value": 7, "_FillValue": 7}),
    "NaN": ("f8", {"_FillValue": np.nan}),
}


@pytest.mark.parametrize(("consolidated", "zarr_format", "packing"), crossed([True, False], [2, 3], PACKINGS))
@pytest.mark.filterwarnings("ignore:.*(Consolidated|consolidated)")
def test_every_packing_in_either_format_reads_as_xarray_decodes_it(tmp_path, packing, zarr_format, consolidated):
    dtype, encoding = PACKINGS[packing]
    values = values_of(dtype)
    if "_FillValue" in encoding and np.dtype(dtype).kind == "f":
        values[1, 2:9, 3:12] = np.nan
    written = group(a=values, b=values[::-1])
    chunks = {"chunks": (3, 5, 8)}  # uneven at every edge
    written.to_zarr(
        tmp_path / "g.zarr", zarr_format=zarr_format, consolidated=consolidated,
        encoding={"a": encoding | chunks, "b": encoding | chunks},
    )  # fmt: skip
    expected = as_xarray_reads(tmp_path / "g.zarr", ["a", "b"], consolidated=consolidated)
    assert_equal(read(tmp_path / "g.zarr"), expected)
    assert_equal(read(tmp_path / "g.zarr", ["b"]), expected[:, 1:])


def test_variables_of_differing_types_and_chunks_are_channels_side_by_side(tmp_path):
    written = group(a=values_of("f4"), b=values_of("i2", 1), c=values_of("u1", 2))
    encoding = {"a": {"chunks": (1, 13, 17)}, "b": {"chunks": (7, 4, 4)}, "c": {"chunks": (2, 13, 5)}}
    written.to_zarr(tmp_path / "g.zarr", zarr_format=3, consolidated=False, encoding=encoding)
    expected = as_xarray_reads(tmp_path / "g.zarr", ["a", "b", "c"], consolidated=False)
    assert_equal(read(tmp_path / "g.zarr"), expected)


@pytest.mark.parametrize(
    "encoding",
    [
        {"compressors": numcodecs.Blosc(cname="lz4", shuffle=numcodecs.Blosc.SHUFFLE)},
        {"compressors": numcodecs.Blosc(cname="zstd", shuffle=numcodecs.Blosc.BITSHUFFLE)},
        {"compressors": numcodecs.Zlib(level=4)},
        {"compressors": numcodecs.GZip()},
        {"compressors": numcodecs.BZ2()},
        {"compressors": numcodecs.LZ4()},
        {"compressors": numcodecs.LZMA()},
        {"compressors": numcodecs.Zstd(level=2)},
        {"compressors": None},
        {"compressors": numcodecs.Zlib(), "filters": [numcodecs.Shuffle(4)]},
        {"compressors": numcodecs.Zlib(), "filters": [numcodecs.Delta("<f4")]},
        {
            "compressors": None,
            "filters": [numcodecs.FixedScaleOffset(offset=280, scale=100, dtype="<f4", astype="<i2")],
        },
        {"compressors": numcodecs.Blosc(), "filters": [numcodecs.BitRound(keepbits=10)]},
    ],
    ids=str,
)
@pytest.mark.filterwarnings("ignore:invalid value encountered in cast")  # FixedScaleOffset of the NaN beyond an edge
def test_compressors_and_filters_of_version_2(tmp_path, encoding):
    written = group(a=values_of("f4"))
    written.to_zarr(tmp_path / "g.zarr", zarr_format=2, encoding={"a": {"chunks": (3, 5, 8), **encoding}})
    assert_equal(read(tmp_path / "g.zarr"), as_xarray_reads(tmp_path / "g.zarr", ["a"]))


@pytest.mark.parametrize("order", ["C", "F"])
@pytest.mark.parametrize("separator", [".", "/"])
@pytest.mark.parametrize("dtype", [">f4", ">i2", "<f8"])
def test_orders_separators_and_byte_orders_of_version_2(tmp_path, order, separator, dtype):
    values = values_of(dtype)
    stored = zarr.open_group(tmp_path / "g.zarr", mode="w", zarr_format=2)
    array = stored.create_array(
        "a", shape=SHAPE, chunks=(3, 5, 8), dtype=dtype, order=order, fill_value=None,
        chunk_key_encoding={"name": "v2", "separator": separator}, attributes={"_ARRAY_DIMENSIONS": [*DIMS]},
    )  # fmt: skip
    array[...] = values
    zarr.consolidate_metadata(tmp_path / "g.zarr")
    assert_equal(read(tmp_path / "g.zarr"), as_xarray_reads(tmp_path / "g.zarr", ["a"]))


def test_missing_value_and_fill_value_may_both_be_named(tmp_path):
    stored = zarr.open_group(tmp_path / "g.zarr", mode="w")
    array = stored.create_array(
        "a", shape=SHAPE, chunks=(3, 5, 8), dtype="i2", dimension_names=DIMS,
        attributes={"_FillValue": 3, "missing_value": [5], "scale_factor": [0.5]},
    )  # fmt: skip
    array[...] = values = values_of("i2") % 9
    got, valid = read(tmp_path / "g.zarr", offsets=np.zeros((1, 3), int), patch=SHAPE)
    assert np.array_equal(valid[0, 0], (values != 3) & (values != 5))
    assert np.array_equal(got[valid], 0.5 * values[valid[0, 0]])


@pytest.mark.parametrize("zarr_format", [2, 3])
def test_coordinates_are_known_and_are_no_channels(tmp_path, zarr_format):
    written = group(a=values_of("f4"))
    flat = written[["a"]].isel(time=0, drop=True)
    for number, given in enumerate((written, flat)):
        place = tmp_path / f"{number}.zarr"
        given.to_zarr(place, zarr_format=zarr_format, consolidated=zarr_format == 2)
        dataset = open_dataset(place)
        assert [info.name for info in dataset.select()] == ["a"]
        assert set(dataset.coordinates) == set(given.coords)
        for name in given.coords:
            assert np.array_equal(dataset.coordinate(name), given[name].values)
    assert np.array_equal(dataset.coordinate("y"), np.arange(SHAPE[1]))
    assert dataset.attributes["title"] == "a group of others"


@pytest.mark.parametrize("zarr_format", [2, 3])
def test_packed_coordinates_and_times_beside_the_data_are_decoded_as_xarray_does(tmp_path, zarr_format):
    when = np.datetime64("2003-01-01", "ns") + np.arange(np.prod(SHAPE)).reshape(SHAPE) * np.timedelta64(1, "h")
    written = group(a=values_of("f4")).assign(when=(DIMS, when))
    packed = {"dtype": "i2", "scale_factor": 0.25, "add_offset": 10.0, "_FillValue": -7}
    heights = np.array([10.25, 10.5, np.nan, 11.0, 12.0] + [13.0] * 8)
    written = written.assign_coords(height=("y", heights))
    written.to_zarr(tmp_path / "g.zarr", zarr_format=zarr_format, consolidated=False, encoding={"height": packed})
    dataset = open_dataset(tmp_path / "g.zarr")
    assert np.array_equal(dataset.coordinate("height"), heights, equal_nan=True)
    assert [info.name for info in dataset.select()] == ["a"]  # when holds times, which are no channel
    assert read(tmp_path / "g.zarr")[0].shape[1] == 1


def test_shards_that_xarray_wrote_read_as_xarray_decodes_them(tmp_path):
    dtype, encoding = PACKINGS["scaled"]
    cut = {"chunks": (1, 4, 4), "shards": (2, 8, 12)}  # uneven at every edge
    group(a=values_of(dtype)).to_zarr(
        tmp_path / "g.zarr", zarr_format=3, consolidated=False, encoding={"a": encoding | cut}
    )
    assert open_dataset(tmp_path / "g.zarr").arrays["a"].shard == (2, 8, 12)
    assert_equal(read(tmp_path / "g.zarr"), as_xarray_reads(tmp_path / "g.zarr", ["a"], consolidated=False))


@pytest.mark.parametrize("zarr_format", [2, 3])
def test_a_group_within_a_store_opens_by_its_place(tmp_path, zarr_format):
    group(a=values_of("f4")).to_zarr(tmp_path / "g.zarr", group="deep/er", zarr_format=zarr_format, consolidated=False)
    expected = as_xarray_reads(tmp_path / "g.zarr", ["a"], group="deep/er", consolidated=False)
    assert_equal(read(tmp_path / "g.zarr" / "deep" / "er"), expected)


@pytest.mark.parametrize("named_by", ["_ARRAY_DIMENSIONS", "dimension_names"])
def test_dimensions_of_version_3_are_named_in_either_way(tmp_path, named_by):
    names = {"attributes": {named_by: [*DIMS]}} if named_by.startswith("_") else {named_by: DIMS}
    stored = zarr.open_group(tmp_path / "g.zarr", mode="w")
    stored.create_array("a", data=values_of("f4"), chunks=(3, 5, 8), **names)
    assert open_dataset(tmp_path / "g.zarr").select()[0].dims == DIMS


def test_an_array_without_dimension_names_gets_plain_ones(tmp_path):
    stored = zarr.open_group(tmp_path / "g.zarr", mode="w")
    stored.create_array("a", data=values_of("f4"), chunks=(3, 5, 8))
    assert open_dataset(tmp_path / "g.zarr").select()[0].dims == ("dim_0", "dim_1", "dim_2")
    assert read(tmp_path / "g.zarr")[1].all()


@pytest.mark.parametrize("kind", ["text", "complex"])
def test_what_is_no_number_is_left_out_of_the_channels(tmp_path, kind):
    other = {"text": np.full(SHAPE, "ab", "U2"), "complex": np.zeros(SHAPE, complex)}[kind]
    stored = zarr.open_group(tmp_path / "g.zarr", mode="w", zarr_format=2)
    for name, values in {"a": values_of("f4"), "other": other}.items():
        stored.create_array(name, data=values, chunks=(3, 5, 8), attributes={"_ARRAY_DIMENSIONS": [*DIMS]})
    assert [info.name for info in open_dataset(tmp_path / "g.zarr").select()] == ["a"]


@pytest.fixture
def public(tmp_path, monkeypatch):
    """Two groups in a bucket that asks nobody who they are: version 2 consolidated, version 3 not."""
    monkeypatch.delenv(VARIABLE, raising=False)
    written = group(a=values_of("f4"), b=values_of("i2", 1))
    written.to_zarr(tmp_path / "public" / "2.zarr", zarr_format=2, consolidated=True)
    written.to_zarr(tmp_path / "public" / "3.zarr", zarr_format=3, consolidated=False)
    with simulated_cloud("no limits", folder=tmp_path) as cloud:
        yield cloud


@pytest.mark.parametrize(("zarr_format", "scheme"), crossed([2, 3], ["gs", "s3", "http"]))
def test_a_public_bucket_is_read_without_a_key(public, tmp_path, scheme, zarr_format):
    url = public.url(f"public/{zarr_format}.zarr", scheme)
    dataset = open_dataset(url, "anonymous", ["a", "b"])
    with Engine(dataset, ["a", "b"]) as engine:
        ((values, valid),) = engine.stream([CORNERS], PATCH)
    local = tmp_path / "public" / f"{zarr_format}.zarr"
    assert_equal((values, valid), as_xarray_reads(local, ["a", "b"], consolidated=zarr_format == 2))
    if (scheme, zarr_format) != ("http", 3):  # whose variables nothing lists
        assert np.array_equal(dataset.coordinate("time"), group().time.values)


def pass_on(source, target, kept, name, known):
    """Everything that comes from one side of a connection, to `kept` and under its `known` name to the other side."""
    with contextlib.suppress(OSError):
        while data := source.recv(1 << 16):
            kept += data
            target.sendall(data.replace(name, known))
        target.shutdown(socket.SHUT_WR)


@pytest.fixture
def overheard(public, monkeypatch):
    """The public buckets behind a relay: its address, and what was sent to it, connection by connection."""
    server, said, sides = socket.create_server(("127.0.0.1", 0)), [], []

    mine, its = (f"127.0.0.1:{port}".encode() for port in (server.getsockname()[1], public.port))

    def relay():
        with contextlib.suppress(OSError):
            while True:
                here, there = server.accept()[0], socket.create_connection(("127.0.0.1", public.port))
                sides.extend((here, there))
                said.append(bytearray())
                for source, target, kept in ((here, there, said[-1]), (there, here, bytearray())):
                    names = (mine, its) if source is here else (its, its)
                    threading.Thread(target=pass_on, args=(source, target, kept, *names), daemon=True).start()

    thread = threading.Thread(target=relay, daemon=True)
    thread.start()
    address = f"http://127.0.0.1:{server.getsockname()[1]}"
    monkeypatch.setenv(VARIABLE, json.dumps({"gs://public": address, "s3://public": address}))
    yield address, said
    server.shutdown(socket.SHUT_RDWR)
    for side in (server, *sides):
        side.close()
    thread.join()


@pytest.mark.parametrize(("by", "scheme"), crossed(["wire", "fsspec"], ["gs", "s3", "http"]))
def test_anonymous_shows_no_key_though_there_are_some(overheard, tmp_path, monkeypatch, scheme, by):
    address, said = overheard
    if by == "fsspec":
        monkeypatch.setattr("kit.data.stream.fetch.address_of", lambda *_: None)
    (tmp_path / "login.json").write_text(json.dumps(LOGIN))
    monkeypatch.setenv("GOOGLE_APPLICATION_CREDENTIALS", str(tmp_path / "login.json"))
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN", "KEY"):
        monkeypatch.setenv(name, "my-own:my-own")
    url = f"{address if scheme == 'http' else f'{scheme}:/'}/public/2.zarr"
    expected = as_xarray_reads(tmp_path / "public" / "2.zarr", ["a"])
    for credentials, shown in (("anonymous", False), ("env:KEY", True)):
        said.clear()
        with Engine(open_dataset(url, credentials), ["a"]) as engine:
            ((values, valid),) = engine.stream([CORNERS], PATCH)
        assert_equal((values, valid), expected)
        heard = b"".join(said).lower()
        assert heard.count(b"get /") > 3
        assert (b"authorization:" in heard) is shown
        assert (b"my-own" in heard) is shown


def test_a_group_whose_variables_nothing_lists_says_what_to_do(public):
    with pytest.raises(StoreError, match=r"name .*in data\.variables"):
        open_dataset(public.url("public/3.zarr", "http"), "anonymous")


def test_a_place_without_a_group_is_named(tmp_path):
    (tmp_path / "g.zarr").mkdir()
    with pytest.raises(StoreError, match="no Zarr group"):
        open_dataset(tmp_path / "g.zarr")


@pytest.mark.parametrize(("zarr_format", "shards"), [(2, None), (3, None), (3, (4, 10, 16))])
def test_an_array_that_is_in_no_group_reads_by_its_own_address(tmp_path, zarr_format, shards):
    values = values_of("f4")
    named = {"dimension_names": DIMS} if zarr_format == 3 else {"attributes": {"_ARRAY_DIMENSIONS": [*DIMS]}}
    zarr.create_array(
        tmp_path / "lone.zarr", data=values, chunks=(2, 5, 8), shards=shards, zarr_format=zarr_format, **named
    )
    dataset = open_dataset(tmp_path / "lone.zarr")
    assert (dataset.select()[0].dims, [*dataset.arrays]) == (DIMS, ["lone.zarr"])
    assert np.array_equal(dataset.open_array("lone.zarr")[...], values)
    got, valid = read(tmp_path / "lone.zarr")
    assert valid.all()
    for patch, offset in zip(got[:, 0], CORNERS, strict=True):
        assert np.array_equal(patch, values[tuple(map(slice, offset, offset + np.array(PATCH)))])


@pytest.mark.parametrize("scheme", ["gs", "s3", "http"])
def test_an_array_of_a_bucket_reads_by_its_own_address(public, tmp_path, scheme):
    url = public.url("public/3.zarr/b", scheme)
    with Engine(open_dataset(url, "anonymous")) as engine:
        ((got, _),) = engine.stream([CORNERS], PATCH)
    expected = as_xarray_reads(tmp_path / "public" / "3.zarr", ["b"], consolidated=False)
    assert_equal((got, np.ones(got.shape, bool)), expected)


def test_an_array_of_a_store_that_kit_built_keeps_what_kit_knows_of_it(tiny_config, tmp_path):
    built = build(tiny_config(str(tmp_path / "own.zarr")), progress=False)
    info = built.select()[0]
    alone = open_dataset(tmp_path / "own.zarr" / info.name)
    assert (alone.arrays, alone.manifest) == ({info.name: info}, built.manifest)
    (tmp_path / "own.zarr" / ".kit" / "manifest.json").unlink()
    with pytest.raises(UnfinishedStoreError):
        open_dataset(tmp_path / "own.zarr" / info.name)


TEXTS = {
    "fixed": np.full(SHAPE, "ab", "U2"), "bytes": np.full(SHAPE, b"ab", "S2"), "any length": np.full(SHAPE, "ab", "T"),
}  # fmt: skip


@pytest.mark.filterwarnings("ignore:The data type:zarr.errors.UnstableSpecificationWarning")
@pytest.mark.filterwarnings("ignore:.*does not have a Zarr V3 specification")
@pytest.mark.parametrize("kind", TEXTS)
def test_a_store_that_holds_only_text_is_a_named_error_for_every_reader(tmp_path, kind):
    stored = zarr.open_group(tmp_path / "g.zarr", mode="w")
    array = stored.create_array("words", shape=SHAPE, chunks=SHAPE, dtype=TEXTS[kind].dtype, dimension_names=DIMS)
    array[...] = TEXTS[kind]
    config = Config().replace({"data.url": str(tmp_path / "g.zarr"), "data.patch": {"x": 2}})
    source = Config().replace({"data.source": str(tmp_path / "g.zarr"), "data.url": str(tmp_path / "new.zarr")})
    for read_it in (
        lambda: open_dataset(config).select(), lambda: kit.plan_chunks(config), lambda: kit.fit(config),
        lambda: kit.build(source, progress=False), lambda: kit.data.RowData(str(tmp_path / "g.zarr")),
        lambda: as_source(TEXTS[kind]), lambda: as_source(xarray.DataArray(TEXTS[kind])),
    ):  # fmt: skip
        with pytest.raises(KitError, match=r"numbers?|numeric|integers"):
            read_it()
    assert not (tmp_path / "new.zarr").exists()


def test_a_key_of_s3_without_its_secret_is_refused_and_no_other_key_taken(monkeypatch):
    monkeypatch.setenv("MINE", "only-one-half")
    with pytest.raises(StoreError, match="MINE") as caught:
        kit.open_dataset("s3://box/a.zarr", credentials="env:MINE")
    assert "half" not in str(caught.value)
