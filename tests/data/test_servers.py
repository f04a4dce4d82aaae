"""Servers of others, each through both clients; and what the simulated cloud answers beside what they answer."""

import http.client
import re
import uuid
from dataclasses import replace
from urllib.parse import urlsplit
from xml.etree import ElementTree

import numpy as np
import pytest
from waiting import PATIENCE_SECONDS

from kit.cloud.simulated import simulated_cloud
from kit.data.build.build import build
from kit.data.build.open_source import load_source
from kit.data.build.verify import verify
from kit.data.open_dataset import open_dataset
from kit.data.patches.module import PatchData
from kit.data.stores.disk_cache import ReadCache
from kit.data.stores.http import HttpClient
from kit.data.stream.engine import Engine
from kit.data.stream.fetch import open_client
from kit.errors import StoreError
from kit.machine.endpoints import VARIABLE


@pytest.fixture(params=["gcs", "s3"])
def bucket(request):
    """A fresh prefix on a server that is not ours."""
    return request.getfixturevalue(request.param)


@pytest.mark.parametrize("way", ["wire", "fsspec"])
def test_a_dataset_is_built_verified_and_streamed(bucket, way, tiny_config, tmp_path, monkeypatch):
    if way == "fsspec":
        monkeypatch.setattr("kit.data.stream.fetch.address_of", lambda *_: None)
    changes = {"data__samples_per_epoch": 16, "loader__batch_size": 4}
    here = tiny_config(tmp_path / "here.zarr", **changes)
    there = tiny_config(f"{bucket}/there.zarr", **changes)
    for config in (here, there):
        build(config, progress=False)
    assert "all" in repr(verify(there))
    client = open_client(open_dataset(there.data.url).open_store(), there.data.url, 20.0, None, 4)
    assert isinstance(client, HttpClient) == (way == "wire")
    pairs = zip(PatchData(here).train_dataloader(), PatchData(there).train_dataloader(), strict=True)
    assert all((one[name] == other[name]).all() for one, other in pairs for name in one)


def test_a_bucket_that_is_not_there_is_an_error_within_seconds(bucket):
    scheme = bucket.partition("://")[0]
    with pytest.raises(StoreError):
        open_dataset(f"{scheme}://no-such-bucket-here/x.zarr")


# -- a cache over what fsspec reads


@pytest.fixture(params=["gcs", "s3", "http"])
def by_fsspec(request, monkeypatch):
    """Where to build and where to read the same bucket, with no wire: over HTTP one can only read."""
    monkeypatch.setattr("kit.data.stream.fetch.address_of", lambda *_: None)
    if request.param == "gcs":
        place = request.getfixturevalue("gcs")
        return place, place
    cloud, path = request.getfixturevalue("cloud"), f"kept/{uuid.uuid4().hex}"
    return cloud.url(path), cloud.url(path, request.param)


def read_all(config, url, kit_built, cache):
    """The last of two variables, and what was counted."""
    dataset = open_dataset(url, variables=["wind"])
    dataset = dataset if kit_built else replace(dataset, manifest=None)
    with Engine(dataset, ["wind"], read_cache=cache, requests_in_flight=4) as engine:
        ((values, valid),) = engine.stream([np.zeros((1, 3), int)], (2, 7, 9))
    expected = load_source(config).decoded("wind")
    assert np.array_equal(valid[0, 0], ~np.isnan(expected))
    assert np.array_equal(values[0, 0], np.nan_to_num(expected).astype("f4"))
    return engine.counters


@pytest.mark.parametrize(("kit_built", "shard"), [(True, "none"), (False, {"time": 2, "lat": 8, "lon": 8})])
def test_what_fsspec_read_is_kept_by_a_cache_and_never_served_for_what_is_new(
    by_fsspec, kit_built, shard, tiny_config, tmp_path
):
    write, read = (f"{place}/t.zarr" for place in by_fsspec)
    cache = ReadCache(size_bytes=1_000_000, folder=str(tmp_path / "cache"), eviction="lru")
    for seed in (1, 2):
        config = tiny_config(write, data__arguments={"time": 2, "seed": seed}, chunking__shard=shard)
        build(config, overwrite=True, progress=False)
        first, second = (read_all(config, read, kit_built, cache) for _ in range(2))
        assert (first["read_cache_hits"], first["read_cache_misses"] > 0) == (0, True)
        assert (second["read_cache_hits"], second["read_cache_misses"]) == (first["read_cache_misses"], 0)
        assert second["bytes_read"] == 0
        assert (second["requests"] == 0) is kit_built  # others are asked which object it is


# -- the simulated cloud beside an S3 server of others


@pytest.fixture(scope="module")
def both(_s3_address):
    """`ask(method, path, **headers)` to both servers: (status, headers, body) of the other one and of ours."""
    with pytest.MonkeyPatch.context() as patch, simulated_cloud("no limits") as cloud:
        patch.delenv(VARIABLE, raising=False)
        addresses = (_s3_address, cloud.address)

        def ask(method, path, body=None, **headers):
            headers |= {"x_amz_acl": "public-read"} if method == "PUT" else {}
            return [_ask(address, method, path, body, headers) for address in addresses]

        ask("PUT", "/same")
        for number in range(12):
            ask("PUT", f"/same/a/{number:02d}", bytes(range(number, 100 + number)))
        ask("PUT", "/same/b", b"")
        yield ask


def _ask(address, method, path, body, headers):
    parts = urlsplit(address)
    connection = http.client.HTTPConnection(parts.hostname, parts.port, timeout=PATIENCE_SECONDS)
    try:
        connection.request(method, path, body, {name.replace("_", "-"): text for name, text in headers.items()})
        answer = connection.getresponse()
        return answer.status, answer.headers, answer.read()
    finally:
        connection.close()


@pytest.mark.parametrize(
    "asked",
    ["", "bytes=0-9", "bytes=5-", "bytes=-7", "bytes=90-200", "bytes=99-99", "bytes=-200", "bytes=100-"],
)
def test_ranges_are_answered_as_the_other_server_does(both, asked):
    theirs, ours = both("GET", "/same/a/03", **({"Range": asked} if asked else {}))
    assert ours[0] == theirs[0]
    if ours[0] < 400:
        assert ours[2] == theirs[2]
        for name in ("Content-Length", "Content-Range", "ETag"):
            assert ours[1][name] == theirs[1][name]


def test_heads_and_things_that_are_not_there_are_answered_as_the_other_server_does(both):
    for method, path in (("HEAD", "/same/a/01"), ("HEAD", "/same/none"), ("GET", "/same/none"), ("GET", "/none/a")):
        theirs, ours = both(method, path)
        assert ours[0] == theirs[0]
        assert len(ours[2]) == 0 or re.search(rb"<Code>(\w+)", ours[2])[1] == re.search(rb"<Code>(\w+)", theirs[2])[1]
    theirs, ours = both("HEAD", "/same/b")
    assert ours[1]["Content-Length"] == theirs[1]["Content-Length"] == "0"


@pytest.mark.parametrize(
    "query",
    ["", "&prefix=a/", "&delimiter=/", "&prefix=a/&delimiter=/&max-keys=5", "&prefix=a/1", "&start-after=a/10",
     "&prefix=none", "&max-keys=1", "&delimiter=/&max-keys=1"],
)  # fmt: skip
def test_listings_are_those_of_the_other_server(both, query):
    theirs, ours = (_listing(body) for _, _, body in both("GET", f"/same?list-type=2{query}"))
    assert ours == theirs


def _listing(body):
    """Keys with their sizes and tags, common prefixes, and whether there is more."""
    root = ElementTree.fromstring(re.sub(rb' xmlns="[^"]*"', b"", body))
    contents = [tuple(item.findtext(name) for name in ("Key", "Size", "ETag")) for item in root.iter("Contents")]
    prefixes = [item.findtext("Prefix") for item in root.iter("CommonPrefixes")]
    return contents, prefixes, root.findtext("IsTruncated"), root.findtext("KeyCount")


def test_conditions_of_a_write_hold_as_on_the_other_server(both):
    statuses = [[answer[0] for answer in both("PUT", "/same/once", b"1", If_None_Match="*")] for _ in range(2)]
    assert statuses == [[200, 200], [412, 412]]
