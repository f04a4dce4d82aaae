"""Objects by obstore and by fsspec are the same bytes from the same server; a fork after obstore reads by fsspec."""

from __future__ import annotations

import multiprocessing
import subprocess
import sys

import numpy as np
import pytest
from zarr_stores import write_array

from kit.cloud.simulated_cloud import simulated_cloud
from kit.data import objects
from kit.data.counters import Counters
from kit.data.dataset import open_dataset
from kit.data.engine import Engine
from kit.data.objects import Objects, open_objects
from kit.data.stores import open_store
from kit.endpoints import VARIABLE
from kit.errors import CorruptChunkError, MissingChunkError, StoreError

SHAPE, PATCH = (6, 40, 50), (2, 9, 11)
SCHEMES = ["gs", "s3", "http"]


@pytest.fixture
def cloud(tmp_path, monkeypatch):
    """A bucket `b` with an array in chunks and one in shards, on a server of our own."""
    monkeypatch.delenv(VARIABLE, raising=False)
    random = np.random.default_rng(0)
    for name, shards in {"chunks": None, "shards": (6, 20, 50)}.items():
        values = random.normal(size=SHAPE).astype("f4")
        write_array(tmp_path / "b" / name, "a", values, chunks=(2, 10, 25), shards=shards)
    with simulated_cloud("no limits", folder=tmp_path) as running:
        yield running


def url_of(cloud, scheme, layout):
    """Plain HTTP lists nothing, so its readers name the variable."""
    return cloud.url(f"b/{layout}", scheme)


def some_offsets(seed=0):
    return np.random.default_rng(seed).integers(0, np.array(SHAPE) - PATCH + 1, (20, 3))


def read(dataset):
    with Engine(dataset, requests_in_flight=8) as engine:
        ((values, valid),) = engine.stream([some_offsets()], PATCH)
        return values, valid, engine.counters, type(engine._open()._source)


@pytest.mark.parametrize("layout", ["chunks", "shards"])
@pytest.mark.parametrize("scheme", SCHEMES)
def test_both_clients_give_the_values_of_the_folder(cloud, tmp_path, scheme, layout, monkeypatch):
    dataset = open_dataset(url_of(cloud, scheme, layout), variables=["a"])
    by_obstore = read(dataset)
    monkeypatch.setattr(objects, "_unusable", [1])
    by_fsspec = read(dataset)
    local = read(open_dataset(str(tmp_path / "b" / layout)))
    assert (by_obstore[3], by_fsspec[3]) == (Objects, type(None))
    for got in (by_obstore, by_fsspec):
        assert np.array_equal(got[0], local[0])
        assert np.array_equal(got[1], local[1])
        assert got[2]["chunks_decoded"] == local[2]["chunks_decoded"]


@pytest.mark.parametrize("scheme", SCHEMES)
def test_an_object_is_read_whole_in_part_and_from_its_end(cloud, tmp_path, scheme):
    (tmp_path / "b" / "x").mkdir()
    (tmp_path / "b" / "x" / "k").write_bytes(b"0123456789")
    counters, url = Counters(), url_of(cloud, scheme, "x")
    source = open_objects(open_store(url), url, 5.0, counters)
    assert bytes(source.read("k")) == b"0123456789"
    assert bytes(source.read("k", 2, 5)) == b"234"
    assert bytes(source.read("k", -3)) == b"789"
    assert source.read("nothing") is None
    assert (counters.values()["requests"], counters.values()["bytes_read"]) == (4, 16)


@pytest.mark.parametrize("by", ["obstore", "fsspec"])
@pytest.mark.parametrize("scheme", ["gs", "s3"])
def test_a_refusal_is_an_error_without_a_secret(cloud, scheme, by, monkeypatch):
    if by == "fsspec":
        monkeypatch.setattr(objects, "_unusable", [1])
    dataset = open_dataset(url_of(cloud, scheme, "chunks"))
    cloud.script("b/chunks/a/c/*", [403] * 50)
    with pytest.raises(StoreError) as caught:
        read(dataset)
    assert not isinstance(caught.value, MissingChunkError | CorruptChunkError)
    assert "rights" in str(caught.value)


@pytest.mark.parametrize("by", ["obstore", "fsspec"])
@pytest.mark.parametrize("scheme", SCHEMES)
def test_a_truncated_object_on_the_store_is_named_as_damage(cloud, tmp_path, scheme, by, monkeypatch):
    if by == "fsspec":
        monkeypatch.setattr(objects, "_unusable", [1])
    dataset = open_dataset(url_of(cloud, scheme, "chunks"), variables=["a"])
    for path in (tmp_path / "b" / "chunks" / "a" / "c").rglob("*"):
        if path.is_file():
            path.write_bytes(path.read_bytes()[:-5])
    with pytest.raises(CorruptChunkError, match="of a is damaged"):
        read(dataset)


def _read_in_child(dataset, connection):
    values, _, _, source = read(dataset)
    connection.send((float(values.sum()), source.__name__))


@pytest.mark.parametrize("scheme", ["gs", "http"])
def test_a_process_forked_after_obstore_was_used_reads_by_fsspec(cloud, scheme):
    dataset = open_dataset(url_of(cloud, scheme, "chunks"), variables=["a"])
    values, *_ = read(dataset)
    here, there = multiprocessing.Pipe()
    child = multiprocessing.get_context("fork").Process(target=_read_in_child, args=(dataset, there))
    child.start()
    try:
        assert here.poll(60)
        assert here.recv() == (float(values.sum()), "NoneType")
        child.join(20)
        assert child.exitcode == 0
    finally:
        child.kill()
    assert np.array_equal(read(dataset)[0], values)


def test_loading_what_ranks_are_forked_from_does_not_load_obstore():
    code = "import sys, kit.data.module, kit.run.worker; print('obstore' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"
