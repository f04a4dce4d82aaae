"""Reads of any fsspec file system through the cache: right bytes, never old ones, refused where it cannot know."""

from dataclasses import replace

import fsspec
import numpy as np
import pytest
from fsspec.implementations.local import LocalFileSystem
from fsspec.registry import _registry
from hypothesis import given
from hypothesis import strategies as st

from kit.data.build.build import build
from kit.data.build.open_source import load_source
from kit.data.stores.counters import Counters
from kit.data.stores.disk_cache import ReadCache
from kit.data.stores.url import open_store, resolve_url
from kit.data.stream.engine import Engine
from kit.data.stream.fetch import AsyncClient, identity_of
from kit.errors import ConfigError


class Share(LocalFileSystem):
    """Files under a scheme of their own, as a mounted share or another package would bring it."""

    protocol = "share"

    @classmethod
    def _strip_protocol(cls, path):
        return "/" + path.removeprefix("share://").lstrip("/").rstrip("/")


class Silent(Share):
    """A file system that tells sizes and nothing else."""

    protocol = "silent"

    @classmethod
    def _strip_protocol(cls, path):
        return super()._strip_protocol(path.removeprefix("silent://"))

    def info(self, path, **kwargs):
        found = super().info(path, **kwargs)
        return {name: found[name] for name in ("name", "size", "type")}


@pytest.fixture(autouse=True)
def _schemes():
    for kind in (Share, Silent):
        fsspec.register_implementation(kind.protocol, kind, clobber=True)
    yield
    for kind in (Share, Silent):
        _registry.pop(kind.protocol, None)


@pytest.fixture(params=["memory://share", "share"])
def url(request, tmp_path):
    place = request.param if "://" in request.param else f"{request.param}://{str(tmp_path).lstrip('/')}"
    yield f"{place}/t.zarr"
    fsspec.filesystem("memory").store.clear()


def read_all(dataset, cache):
    offsets = np.array([[time, 0, 0] for time in range(5)])
    with Engine(dataset, ("sst",), read_cache=cache) as engine:
        (batch,) = engine.stream([offsets], (1, 7, 9))
        return batch[0][:, 0, 0], engine.counters


@pytest.mark.parametrize("kit_built", [True, False])
@pytest.mark.parametrize("shard", ["none", {"time": 2, "lat": 8, "lon": 8}])
def test_a_second_reader_takes_everything_from_the_cache(url, tmp_path, tiny_config, kit_built, shard):
    dataset = build(tiny_config(url, chunking__shard=shard), progress=False)
    dataset = dataset if kit_built else replace(dataset, manifest=None)
    cache = ReadCache(size_bytes=1_000_000, folder=str(tmp_path / "cache"), eviction="lru")
    first, counts = read_all(dataset, cache)
    second, again = read_all(dataset, cache)
    assert (counts["read_cache_hits"], counts["read_cache_misses"] > 0) == (0, True)
    assert again["read_cache_hits"] == counts["read_cache_misses"]
    assert again["requests"] == 0
    assert again["bytes_read"] == 0
    np.testing.assert_array_equal(first, second)
    expected = load_source(tiny_config(url)).decoded("sst")
    np.testing.assert_allclose(first, np.nan_to_num(expected, nan=0.0), atol=1e-4)


@pytest.mark.parametrize("kit_built", [True, False])
def test_a_rebuilt_store_is_never_served_from_the_old_one(url, tmp_path, tiny_config, kit_built):
    cache = ReadCache(size_bytes=1_000_000, folder=str(tmp_path / "cache"), eviction="lru")
    for seed in (1, 2, 1):
        config = tiny_config(url, data__arguments={"seed": seed})
        dataset = build(config, overwrite=True, progress=False)
        values, _ = read_all(dataset if kit_built else replace(dataset, manifest=None), cache)
        np.testing.assert_allclose(values, np.nan_to_num(load_source(config).decoded("sst"), nan=0.0), atol=1e-4)


def test_a_file_system_that_tells_objects_not_apart_is_refused_by_name(tmp_path, tiny_config):
    url = f"silent://{str(tmp_path).lstrip('/')}/t.zarr"
    dataset = build(tiny_config(url), progress=False)
    cache = ReadCache(size_bytes=1_000_000, folder="", eviction="lru")
    with pytest.raises(ConfigError, match=r"cache\.size_bytes: .*silent:// .*tag nor time .*t\.zarr"):
        read_all(replace(dataset, manifest=None), cache)
    values, counts = read_all(dataset, cache)  # what kit built is told apart by its manifest
    assert counts["read_cache_misses"] > 0
    np.testing.assert_array_equal(values, read_all(replace(dataset, manifest=None), None)[0])


def test_ranges_are_the_same_as_of_the_object_itself(url, tiny_config):
    dataset = build(tiny_config(url), progress=False)
    counters = Counters()
    place = resolve_url(url)
    opened = AsyncClient(open_store(place), place, 4, 5.0, counters)
    whole = bytes(opened.read("zarr.json"))
    assert bytes(opened.read("zarr.json", 3, 9)) == whole[3:9]
    assert bytes(opened.read("zarr.json", -5)) == whole[-5:]
    assert opened.read("nothing.json") is None
    assert opened.identity("nothing.json") is None
    assert opened.identity("zarr.json") == opened.identity("zarr.json")
    assert counters.values()["requests"] == 7
    assert counters.values()["bytes_read"] == len(whole) + 6 + 5
    assert dataset.arrays


@pytest.mark.parametrize(
    ("info", "told"),
    [
        ({"name": "a", "size": 3, "ETag": "x"}, "x"),
        ({"name": "a", "size": 3, "mtime": 1.5, "ino": 77}, "77"),
        ({"name": "a", "size": 3, "LastModified": "Monday"}, "Monday"),
        ({"name": "a", "size": 3, "modify": "20260101"}, "20260101"),
    ],
)
def test_tags_come_before_times_and_times_with_sizes(info, told):
    assert told in identity_of(info)
    assert identity_of({**info, "size": 4}) != identity_of(info)


@given(
    st.dictionaries(st.sampled_from(["name", "size", "type", "ino", "mode", "etag", "mtime"]), st.none() | st.just(""))
)
def test_what_is_there_but_empty_identifies_nothing(info):
    assert identity_of(info) is None
    assert identity_of({"name": "a", "size": 5, "ino": 7, "type": "file"}) is None
