"""Chunks that are not in the store of another writer are its fill value, and are counted and said; or an error."""

from __future__ import annotations

import gc
import warnings

import dask.array
import numpy as np
import pytest
import xarray
import zarr
from waiting import wait_until

import kit
from kit.data.build.build import build
from kit.data.build.grids import ZarrSource
from kit.data.open_dataset import open_dataset
from kit.data.patches.module import PatchData
from kit.errors import KitWarning, MissingChunkError

SHAPE, CHUNK, FILL = (8, 12, 12), (2, 4, 6), -3.0
CHUNKS = 4 * 3 * 2
DIMS = ("time", "y", "x")


def values():
    """The first half is what the fill value says, so that a writer may leave those chunks out."""
    made = np.random.default_rng(5).normal(size=SHAPE).astype("f4")
    made[:4] = FILL
    return made


def by_zarr(place, **options):
    group = zarr.open_group(place, mode="w", zarr_format=options.pop("zarr_format"))
    named = (
        {"dimension_names": DIMS} if group.metadata.zarr_format == 3 else {"attributes": {"_ARRAY_DIMENSIONS": DIMS}}
    )
    array = group.create_array(
        "a", shape=SHAPE, chunks=CHUNK, dtype="f4", fill_value=FILL, config={"write_empty_chunks": False},
        **named, **options,
    )  # fmt: skip
    array[...] = values()


def version_2(place):
    by_zarr(place, zarr_format=2)


def version_2_nested(place):
    by_zarr(place, zarr_format=2, chunk_key_encoding={"name": "v2", "separator": "/"})


def version_3(place):
    by_zarr(place, zarr_format=3)


def version_3_flat(place):
    by_zarr(place, zarr_format=3, chunk_key_encoding={"name": "default", "separator": "."})


def sharded(place):
    """Half of the inner chunks of every shard are not in it."""
    by_zarr(place, zarr_format=3, shards=(8, 12, 6))


def xarray_3(place):
    written = xarray.Dataset({"a": (DIMS, values())})
    encoding = {"a": {"chunks": CHUNK, "_FillValue": None, "fill_value": FILL}}
    written.to_zarr(place, zarr_format=3, consolidated=False, encoding=encoding, write_empty_chunks=False)


def xarray_2(place):
    """In version 2 xarray's fill value is that of missing numbers."""
    made = values()
    made[:4] = np.nan
    written = xarray.Dataset({"a": (DIMS, made)})
    encoding = {"a": {"chunks": CHUNK, "_FillValue": FILL}}
    written.to_zarr(place, zarr_format=2, consolidated=True, encoding=encoding, write_empty_chunks=False)


def dask_3(place):
    group = zarr.open_group(place, mode="w")
    array = group.create_array(
        "a", shape=SHAPE, chunks=CHUNK, dtype="f4", fill_value=FILL, dimension_names=DIMS,
        config={"write_empty_chunks": False},
    )  # fmt: skip
    dask.array.from_array(values(), chunks=CHUNK).to_zarr(array)


WRITERS = (version_2, version_2_nested, version_3, version_3_flat, sharded, xarray_3, xarray_2, dask_3)


@pytest.fixture(params=WRITERS, ids=lambda writer: writer.__name__)
def store(request, tmp_path):
    """A store of another writer, half of whose chunks were never written, and one object that was deleted since."""
    place = tmp_path / "foreign.zarr"
    request.param(place)
    objects = [path for path in sorted((place / "a").rglob("*")) if path.is_file() and path.name[0] not in ".z"]
    assert len(objects) == (2 if request.param is sharded else CHUNKS // 2)
    objects[-1].unlink()
    return place, CHUNKS // 2 + (6 if request.param is sharded else 1)


def reading(place, **changes):
    return kit.Config().replace({
        "data.url": str(place), "data.patch": dict(zip(DIMS, SHAPE, strict=True)), "data.order": "grid",
        "data.standardize": False, "loader.batch_size": 1, **changes,
    })  # fmt: skip


def read(config, given=None):
    """The batches, what was counted, and what was warned of."""
    data = PatchData(config, given)
    data.setup()
    loader = data.train_dataloader()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        batches = [*loader]
    counts = loader.counters()
    loader.close()
    return batches, counts, [str(item.message) for item in caught if item.category is KitWarning]


@pytest.mark.filterwarnings("ignore:.*(Consolidated|consolidated)")
@pytest.mark.parametrize("processes", [0, 2])
def test_absent_chunks_read_as_zarr_reads_them_and_are_said(store, processes):
    place, absent = store
    (batch,), counts, said = read(reading(place, **{"loader.num_workers": processes}))
    by_zarr = zarr.open_group(place, mode="r")["a"][...]
    assert (by_zarr == FILL).sum() == absent * np.prod(CHUNK)
    missing = open_dataset(place).arrays["a"].missing == FILL
    assert np.array_equal(batch["valid"][0, 0], (by_zarr != FILL) | (not missing))
    assert np.array_equal(batch["values"][0, 0], np.where(batch["valid"][0, 0], by_zarr, 0))
    assert (counts["chunks_filled"], counts["chunks_decoded"]) == (absent, CHUNKS - absent)
    (sentence,) = said
    assert f"{absent} of the {CHUNKS} chunks" in sentence
    assert "data.strict" in sentence


@pytest.mark.filterwarnings("ignore:.*(Consolidated|consolidated)")
@pytest.mark.parametrize("how", ["config", "dataset"])
def test_strict_makes_an_absent_chunk_an_error_that_names_it(store, how):
    config = reading(store[0], **{"data.strict": how == "config"})
    with pytest.raises(MissingChunkError, match=r"chunk \(\d, \d, \d\) of a .*data\.strict"):
        read(config, open_dataset(store[0], strict=how == "dataset"))
    if how == "config":
        with pytest.raises(MissingChunkError, match="data.strict"):
            read(config)


def test_a_loader_that_failed_and_was_forgotten_leaves_no_thread(tmp_path, new_threads):
    sharded(tmp_path / "absent.zarr")
    with pytest.raises(MissingChunkError):
        read(reading(tmp_path / "absent.zarr", **{"data.strict": True}))

    def collected():
        gc.collect()
        return not new_threads("kit-")

    wait_until(collected)


@pytest.mark.filterwarnings("ignore:.*(Consolidated|consolidated)")
def test_rows_of_absent_chunks_are_said_once_or_strictly_an_error(store):
    place, absent = store
    rows = kit.data.open_rows(place, variable="a")
    with pytest.warns(KitWarning, match=f"{absent} of the {CHUNKS} chunks") as caught:
        values = rows.take(range(SHAPE[0])), rows.take(range(2))
    assert len(caught) == 1
    assert np.array_equal(values[0].numpy(), zarr.open_group(place, mode="r")["a"][...])
    with pytest.raises(MissingChunkError, match="of a"):
        kit.data.open_rows(place, variable="a", strict=True).take(range(SHAPE[0]))


@pytest.mark.filterwarnings("ignore:.*(Consolidated|consolidated)")
def test_a_source_says_how_much_of_it_is_absent_before_it_is_built(store, request):
    place, absent = store
    if "sharded" in request.node.name:
        absent = CHUNKS // 2  # of the shard that is gone; what the other leaves out is not looked at
    with pytest.warns(KitWarning, match=f"{absent} of the {CHUNKS} chunks"):
        source = ZarrSource(str(place))
    whole = tuple(slice(0, size) for size in SHAPE)
    assert np.array_equal(source.read("a", whole), zarr.open_group(place, mode="r")["a"][...])
    with pytest.raises(MissingChunkError, match=f"{absent} of the {CHUNKS} chunks"):
        ZarrSource(str(place), strict=True)


def test_a_whole_store_of_another_writer_says_nothing_and_strict_reads_it(tmp_path):
    group = zarr.open_group(tmp_path / "whole.zarr", mode="w")
    group.create_array("a", data=np.ones(SHAPE, "f4"), chunks=CHUNK, dimension_names=DIMS)
    for strict in (False, True):
        batches, counts, said = read(reading(tmp_path / "whole.zarr", **{"data.strict": strict}))
        assert (len(batches), counts["chunks_filled"], said) == (1, 0, [])


@pytest.mark.parametrize("strict", [False, True])
def test_a_missing_chunk_of_a_store_that_kit_built_is_an_error_always(tiny_config, tmp_path, strict):
    config = tiny_config(str(tmp_path / "own.zarr")).replace({"data.strict": strict})
    dataset = build(config, progress=False)
    info = dataset.select()[0]
    for path in [path for path in (tmp_path / "own.zarr" / info.name / "c").rglob("*") if path.is_file()]:
        path.unlink()
    with pytest.raises(MissingChunkError, match="build it anew"):
        read(config.replace({"data.patch": dict(zip(info.dims, info.shape, strict=True)), "loader.batch_size": 1}))
