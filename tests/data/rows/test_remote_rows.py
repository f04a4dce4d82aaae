"""Rows of a Zarr array in a bucket or behind HTTP: each chunk once for a batch, and never the whole."""

import uuid

import numpy as np
import psutil
import pytest
import torch
import zarr
from row_files import numbers

import kit
from kit.data.stores.url import delete_object, open_store
from kit.errors import MissingChunkError, RowsError, StoreError

SCHEMES = ("gs", "s3", "http")
CHUNK = 8
VALUES = numbers(64) + 1.0


@pytest.fixture
def bucket(cloud, tmp_path):
    """Gives the URL of a path in a fresh bucket, which holds VALUES as the array `x.zarr`, in chunks of 8 rows."""
    zarr.create_array(tmp_path / "x.zarr", data=VALUES, chunks=(CHUNK, 7))
    name = uuid.uuid4().hex
    cloud.upload(tmp_path / "x.zarr", f"{name}/x.zarr")
    return lambda path="x.zarr", scheme="gs": cloud.url(f"{name}/{path}", scheme)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_a_block_of_rows_asks_for_each_of_its_chunks_once(bucket, cloud, scheme):
    rows = kit.data.open_rows(bucket(scheme=scheme))
    assert (rows.shape, rows.nbytes) == ((64, 7), VALUES.nbytes)
    rows.take([40])  # opens it
    opened = cloud.counts()
    taken = rows.take([63, 9, 1, 0, 7, 9])
    assert np.array_equal(taken.numpy(), VALUES[[63, 9, 1, 0, 7, 9]])
    asked = cloud.counts(opened)
    assert asked.kinds["read"].requests == 3
    assert asked.bytes_sent < VALUES.nbytes / 2
    rows.close()


@pytest.mark.parametrize("scheme", SCHEMES)
def test_batches_are_those_of_the_same_rows_on_a_disk(bucket, cloud, tmp_path, scheme):
    settings = {"batch_size": 16, "seed": 5, "row_block": CHUNK}
    near, far = kit.data.RowData(tmp_path / "x.zarr", **settings), kit.data.RowData(bucket(scheme=scheme), **settings)
    far.use_config(kit.Config().replace({"loader.cache_bytes": "1 MiB"}))
    pairs = [*zip(near, far, strict=True)]
    once = cloud.counts()
    pairs += zip(near, far, strict=True)
    assert cloud.counts(once).requests == 0  # what is kept is not asked for again
    assert len(pairs) == 8
    for one, other in pairs:
        assert torch.equal(one[0], other[0])
        assert torch.equal(one[1], other[1])
    for data in (near, far):
        data.close()


def test_loader_processes_find_a_bucket_that_was_named_after_their_server_began(cloud, tmp_path):
    zarr.create_array(tmp_path / "x.zarr", data=VALUES, chunks=(CHUNK, 7))
    near = kit.data.RowData(tmp_path / "x.zarr", batch_size=16, num_workers=1)
    expected = [*near]
    near.close()
    far = kit.data.RowData(
        cloud.upload(tmp_path / "x.zarr", f"{uuid.uuid4().hex}/x.zarr"), batch_size=16, num_workers=1
    )
    found = [*far]
    far.close()
    assert all(torch.equal(one[0], other[0]) for one, other in zip(found, expected, strict=True))


@pytest.mark.parametrize("scheme", SCHEMES)
def test_what_passes_is_asked_for_again_and_not_noticed(bucket, cloud, scheme):
    rows = kit.data.open_rows(bucket(scheme=scheme))
    cloud.script("*/x.zarr/c/*", [503, "reset", "truncate", 429])
    assert np.array_equal(rows.take(slice(None)).numpy(), VALUES)
    assert cloud.counts().faults == dict.fromkeys(("503", "reset", "truncate", "429"), 64 // CHUNK)
    rows.close()


@pytest.mark.parametrize("scheme", SCHEMES)
def test_what_is_refused_is_said_at_once_with_the_way_out(bucket, cloud, scheme):
    rows = kit.data.open_rows(bucket(scheme=scheme))
    cloud.script("*/x.zarr/c/3/*", [403] * 9)
    assert np.array_equal(rows.take([1]).numpy(), VALUES[[1]])
    with pytest.raises(StoreError, match=r"403 Forbidden.*data\.credentials .*rights"):
        rows.take([25])
    cloud.forget_scripts()
    assert np.array_equal(rows.take([25]).numpy(), VALUES[[25]])
    rows.close()


@pytest.mark.parametrize("scheme", SCHEMES)
def test_an_array_that_is_not_there_is_named(bucket, scheme):
    url = bucket("absent.zarr", scheme)
    with pytest.raises(StoreError, match=r"absent\.zarr.*no Zarr array"):
        kit.data.open_rows(url)
    with pytest.raises(RowsError, match=r"x\.npy: .*disk.*kit\.data\.download_once"):
        kit.data.open_rows(bucket("x.npy", scheme))


def test_a_bucket_and_a_server_that_are_not_there_are_named(cloud):
    with pytest.raises(StoreError, match="no-such-bucket"):
        kit.data.open_rows(cloud.url("a/x.zarr", "http").replace("/a/", "/no-such-bucket/"))
    with pytest.raises(StoreError, match=r"127\.0\.0\.1:1\b.*check the network"):
        kit.data.open_rows("http://127.0.0.1:1/x.zarr")


@pytest.mark.parametrize("scheme", ["gs", "s3"])
def test_rows_are_written_to_a_bucket_and_a_chunk_that_is_gone_is_named(cloud, scheme):
    url = cloud.url(f"{uuid.uuid4().hex}/made.zarr", scheme)
    rows = kit.data.write_rows(url, VALUES, row_block=CHUNK, progress=False)
    assert np.array_equal(rows.take(slice(None)).numpy(), VALUES)
    rows.close()
    delete_object(open_store(url, read_only=False), "values/c/2/0", url)
    rows = kit.data.open_rows(url)
    with pytest.raises(MissingChunkError, match=r"chunk \(2, 0\) of values"):
        rows.take([17])
    assert np.array_equal(rows.take([1]).numpy(), VALUES[[1]])
    rows.close()


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*were absent from the store")
def test_an_array_of_two_gigabytes_is_read_in_a_fraction_of_its_size(cloud, tmp_path):
    # Chunks that were never written hold the fill value, so the array takes no room here.
    array = zarr.create_array(
        tmp_path / "large.zarr", shape=(1 << 19, 1024), chunks=(64, 1024), dtype="float32", fill_value=3
    )
    array[:64] = 7
    url = cloud.upload(tmp_path / "large.zarr", f"{uuid.uuid4().hex}/large.zarr", "s3")
    data = kit.data.RowData(url, batch_size=256, row_block=64, window_blocks=8)
    assert data.rows.nbytes == 2 << 30
    data.use_config(kit.Config().replace({"loader.memory_bytes": "128 MiB", "loader.cache_bytes": "32 MiB"}))
    before, most, seen = psutil.Process().memory_info().rss, 0, 0
    for values, rows in data:
        assert bool((values == torch.where(rows < 64, 7.0, 3.0)[:, None]).all())
        most, seen = max(most, psutil.Process().memory_info().rss), seen + len(rows)
        if seen >= 1 << 15:
            break
    data.close()
    assert seen * data.rows.row_bytes == 128 << 20
    assert most - before < 256 << 20
