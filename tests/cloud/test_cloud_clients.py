"""The real clients write, read, list, copy and delete, and check what they check."""

import random
import warnings

import pytest
from cloud_clients import obstore_of

BIG = random.Random(2).randbytes(12 << 20)


def _fsspec(cloud, scheme):
    if scheme == "gs":
        from gcsfs.core import GCSFileSystem

        return GCSFileSystem(
            **cloud.storage_options(), consistency="md5", skip_instance_cache=True, use_listings_cache=False
        )
    s3fs = pytest.importorskip("s3fs", reason="s3fs is no dependency; its S3 is checked where it is installed")
    return s3fs.S3FileSystem(**cloud.storage_options("s3"), skip_instance_cache=True, use_listings_cache=False)


@pytest.mark.filterwarnings("ignore:Sending a large body directly")  # aiohttp's advice to gcsfs
@pytest.mark.parametrize("scheme", ["gs", "s3"])
def test_fsspec_clients_do_all_that_a_store_needs(kept, scheme):
    fs = _fsspec(kept, scheme)
    kept.url("bucket")
    fs.pipe_file("bucket/a/b.bin", b"0123456789")
    assert fs.cat_file("bucket/a/b.bin", start=2, end=5) == b"234"
    assert fs.cat_file("bucket/a/b.bin", start=-3) == b"789"
    fs.pipe_file("bucket/big", BIG)  # several parts
    assert fs.cat_file("bucket/big") == BIG
    with fs.open("bucket/streamed", "wb", block_size=5 << 20) as file:
        for start in range(0, len(BIG), 1 << 20):
            file.write(BIG[start : start + (1 << 20)])
    assert fs.cat_file("bucket/streamed", start=len(BIG) - 7, end=len(BIG)) == BIG[-7:]
    assert fs.info("bucket/streamed")["size"] == len(BIG)
    assert fs.find("bucket") == ["bucket/a/b.bin", "bucket/big", "bucket/streamed"]
    assert sorted(entry["type"] for entry in fs.ls("bucket", detail=True)) == ["directory", "file", "file"]
    fs.cp_file("bucket/a/b.bin", "bucket/a/c d+é.bin")
    assert fs.cat_file("bucket/a/c d+é.bin") == b"0123456789"
    with pytest.raises(OSError):  # noqa: PT011 - each client has its own
        fs.pipe_file("bucket/a/b.bin", b"other", mode="create")
    fs.rm("bucket/a", recursive=True)
    assert fs.find("bucket") == ["bucket/big", "bucket/streamed"]
    with pytest.raises(FileNotFoundError):
        fs.cat_file("bucket/a/b.bin")


@pytest.mark.parametrize("scheme", ["gs", "s3"])
def test_obstore_does_all_that_a_store_needs(kept, scheme):
    obstore = pytest.importorskip("obstore")
    from obstore.exceptions import AlreadyExistsError, PreconditionError

    store = obstore_of(kept, scheme, "bucket")
    kept.url("bucket")
    put = obstore.put(store, "k/1", b"hello world")
    assert bytes(obstore.get_range(store, "k/1", start=3, length=4)) == b"lo w"
    assert [bytes(part) for part in obstore.get_ranges(store, "k/1", starts=[0, 6], ends=[2, 11])] == [b"he", b"world"]
    assert bytes(obstore.get(store, "k/1", options={"range": {"suffix": 3}}).bytes()) == b"rld"
    with pytest.raises(AlreadyExistsError):
        obstore.put(store, "k/1", b"2", mode="create")
    update = {key: value for key, value in put.items() if value is not None}
    obstore.put(store, "k/1", b"second", mode=update)
    with pytest.raises(PreconditionError):
        obstore.put(store, "k/1", b"third", mode=update)
    obstore.put(store, "big", BIG, use_multipart=True, chunk_size=5 << 20)
    assert bytes(obstore.get(store, "big").bytes()) == BIG
    obstore.copy(store, "k/1", "k/2 é+")
    listed = obstore.list_with_delimiter(store)
    assert (listed["common_prefixes"], [item["path"] for item in listed["objects"]]) == (["k"], ["big"])
    obstore.delete(store, ["k/1", "k/2 é+"])
    assert [item["path"] for page in obstore.list(store) for item in page] == ["big"]
    with pytest.raises(FileNotFoundError):
        obstore.get(store, "k/1")


@pytest.mark.parametrize("scheme", ["gs", "s3"])
def test_a_listing_of_many_objects_comes_in_pages(cloud, ask, scheme):
    bucket = f"many-{scheme}"
    cloud.url(bucket)
    for number in range(2100):
        ask("PUT", f"/{bucket}/x/{number:05d}", b"")
    cloud.reset_counts()
    assert len(obstore_listing(cloud, scheme, bucket)) == 2100
    assert cloud.counts().kinds["list"].requests == 3


def obstore_listing(cloud, scheme, bucket):
    obstore = pytest.importorskip("obstore")
    return [item["path"] for page in obstore.list(obstore_of(cloud, scheme, bucket)) for item in page]


@pytest.mark.parametrize("driver", ["gcs", "s3"])
def test_tensorstore_writes_and_reads_an_array(cloud, monkeypatch, driver):
    np = pytest.importorskip("numpy")
    ts = pytest.importorskip("tensorstore", reason="tensorstore is no dependency; it is checked where it is installed")
    for name, value in cloud.variables.items():
        monkeypatch.setenv(name, value)
    cloud.url(f"tensorstore-{driver}")
    place = {"driver": driver, "bucket": f"tensorstore-{driver}", "path": "x.zarr/"}
    if driver == "s3":
        place |= {"endpoint": cloud.address, "aws_region": "us-east-1", "aws_credentials": {"type": "anonymous"}}
    chunks = {"name": "regular", "configuration": {"chunk_shape": [32, 32]}}
    layout = {"shape": [100, 100], "data_type": "float32", "chunk_grid": chunks}
    array = ts.open({"driver": "zarr3", "kvstore": place, "metadata": layout, "create": True}).result()
    values = np.arange(10_000, dtype="f4").reshape(100, 100)
    array[...].write(values).result()
    again = ts.open({"driver": "zarr3", "kvstore": place}).result()
    assert (again.read().result() == values).all()
    keys = ts.KvStore.open(place).result()
    assert len(keys.list().result()) == 17
    keys.delete_range(ts.KvStore.KeyRange()).result()
    assert keys.list().result() == []


@pytest.mark.parametrize("scheme", ["gs", "s3", "http"])
def test_a_dataset_is_built_once_and_streamed_through_each_scheme(kept, scheme):
    if scheme == "s3":
        pytest.importorskip("s3fs")
    kit, config = pytest.importorskip("kit"), _tiny_config(kept.url("bucket/tiny.zarr"))
    pytest.importorskip("torch")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        kit.build(config, progress=False)
        reading = config.replace({"data.url": kept.url("bucket/tiny.zarr", scheme)})
        assert "all" in str(kit.data.verify(config))
        batches = list(kit.data.PatchData(reading).train_dataloader())
    assert sum(len(next(iter(batch.values()))) for batch in batches) == 8
    assert kept.counts().kinds["read"].requests > 10


def _tiny_config(url):
    from pathlib import Path

    from kit.config import Config

    source = Path(__file__).parents[1] / "data" / "tiny_source.py"
    return Config.make({
        "data": {"source": f"{source}:Tiny", "url": url, "patch": {"time": 1, "lat": 3, "lon": 3},
                 "samples_per_epoch": 8},
        "chunking": {"chunk": {"time": 1, "lat": 4, "lon": 4}, "shard": {"time": 2, "lat": 8, "lon": 8}},
        "loader": {"batch_size": 4},
    })  # fmt: skip
