"""The engine reads what zarr and xarray read, faster, and never anything else: an equal batch or a named error."""

from __future__ import annotations

import asyncio
import gc
import multiprocessing
import pickle
import shutil
import tempfile
import threading
import weakref
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import zarr
from hypothesis import given
from hypothesis import strategies as st
from properties import examples
from waiting import PATIENCE_SECONDS, wait_until
from zarr.codecs import BloscCodec, BytesCodec, Crc32cCodec, GzipCodec, TransposeCodec, ZstdCodec
from zarr.core.sync import sync
from zarr_stores import ZSTD, AsyncStore, GatedStore, by_xarray, by_zarr, seen_through, write_array

from kit.data.build.build import build
from kit.data.open_dataset import open_dataset
from kit.data.stream.codec import StoredArray
from kit.data.stream.engine import Engine
from kit.data.stream.receive import ReceiveQueue
from kit.errors import ConfigError, CorruptChunkError, MissingChunkError, StoreError

SHAPE, PATCH = (6, 10, 12), (2, 4, 5)
ROUNDING = 2.0**-24
CHECKED_TWICE = (ZstdCodec(level=0, checksum=True), Crc32cCodec())


@pytest.fixture(autouse=True)
def no_thread_is_left(new_threads):
    yield
    gc.collect()
    kit_threads = new_threads("kit-read", "kit-decode")
    for thread in kit_threads:
        thread.join(PATIENCE_SECONDS)
    assert not [thread for thread in kit_threads if thread.is_alive()]


def some_offsets(shape=SHAPE, patch=PATCH, samples=5, seed=0):
    random = np.random.default_rng(seed)
    return np.stack([random.integers(0, size - side + 1, samples) for size, side in zip(shape, patch, strict=True)], 1)


def read(dataset, offsets=None, patch=PATCH, **options):
    with Engine(dataset, **options) as engine:
        ((values, valid),) = engine.stream([some_offsets() if offsets is None else offsets], patch)
    return values, valid


def write_folder(folder, **options):
    values = np.random.default_rng(1).integers(-500, 500, SHAPE).astype(np.int16)
    write_array(folder, "sst", values, **({"chunks": (1, 5, 6), "shards": (2, 10, 12)} | options))
    return open_dataset(str(folder))


@pytest.fixture
def built(tiny_config, tmp_path):
    """A store that kit built, with its manifest."""
    return build(tiny_config(tmp_path / "tiny.zarr"), progress=False)


# -- equal to zarr and xarray


@st.composite
def stores(draw):
    """Shape, chunk, shard, patch and dtype, and CF attributes, of an array and the batch to read."""
    ndim = draw(st.integers(1, 3))
    sides = partial(st.lists, min_size=ndim, max_size=ndim)
    chunk = draw(sides(st.integers(1, 4)))
    shape = draw(sides(st.integers(1, 9)))
    shard = draw(st.none() | sides(st.integers(1, 3)))
    dtype = draw(st.sampled_from(["int8", "uint8", "int16", "uint16", "int32", "int64", "float32", "float64", ">i2"]))
    attributes = {}
    if draw(st.booleans()):
        attributes |= {"scale_factor": draw(st.sampled_from([0.01, 0.5, 3.0]))}
    if draw(st.booleans()):
        attributes |= {"add_offset": draw(st.sampled_from([-273.15, 10.0]))}
    if draw(st.booleans()) and np.dtype(dtype).kind in "iu":
        attributes |= {"_FillValue": draw(st.integers(0, 3))}
    return {
        "shape": shape, "dtype": dtype, "attributes": attributes, "chunks": tuple(chunk),
        "shards": None if shard is None else tuple(side * count for side, count in zip(chunk, shard, strict=True)),
        "patch": tuple(draw(st.integers(1, size)) for size in shape), "seed": draw(st.integers(0, 1000)),
        "compressors": draw(st.sampled_from([ZSTD, None, CHECKED_TWICE, (GzipCodec(),)])),
        "as_folder": draw(st.booleans()),
    }  # fmt: skip


def random_values(dtype, shape, seed):
    random = np.random.default_rng(seed)
    if np.dtype(dtype).kind == "f":
        values = random.normal(0, 100, shape).astype(dtype)
        values[random.random(shape) < 0.2] = np.nan
        return values
    return random.integers(0, 100, shape).astype(dtype)


@given(stores())
@examples(60)
def test_values_are_those_of_xarray_for_any_layout(case):
    with tempfile.TemporaryDirectory() as folder:
        values = random_values(case["dtype"], case["shape"], case["seed"])
        layout = {name: case[name] for name in ("chunks", "shards", "compressors", "attributes")}
        write_array(folder, "a", values, **layout)
        dataset = open_dataset(folder)
        source = dataset if case["as_folder"] else seen_through(dataset, AsyncStore)
        offsets = some_offsets(case["shape"], case["patch"], samples=4, seed=case["seed"])
        got, valid = read(source, offsets, case["patch"])
        expected = by_xarray(dataset, offsets, case["patch"])
    assert np.array_equal(valid, ~np.isnan(expected))
    assert (got[~valid] == 0).all()
    info = dataset.arrays["a"]
    largest = np.abs(expected[valid]).max(initial=0) + abs(info.add_offset)
    assert np.abs(got[valid] - expected[valid]).max(initial=0) <= 4 * ROUNDING * (2 * largest + 1)


@pytest.mark.parametrize("shards", [None, (4, 10, 12)])
@pytest.mark.parametrize(
    ("codecs", "fast"),
    [
        ({"compressors": ZSTD}, True),
        ({"compressors": None}, True),
        ({"compressors": (Crc32cCodec(),)}, True),
        ({"compressors": (ZstdCodec(level=3), Crc32cCodec())}, True),
        ({"compressors": ZSTD, "serializer": BytesCodec(endian="big")}, True),
        ({"compressors": (BloscCodec(cname="lz4"),)}, True),
        ({"compressors": (GzipCodec(level=1),)}, True),
        ({"compressors": ZSTD, "filters": (TransposeCodec(order=(2, 0, 1)),)}, False),
    ],
)
@pytest.mark.parametrize("wrap", [None, AsyncStore])
def test_every_chain_of_codecs_gives_the_elements_that_zarr_gives(tmp_path, shards, codecs, fast, wrap):
    dataset = write_folder(tmp_path, shards=shards, **codecs)
    source = seen_through(dataset, wrap) if wrap else dataset
    with Engine(source) as engine:
        ((values, _),) = engine.stream([some_offsets()], PATCH)
        assert all((stored.steps is not None) == fast for stored in engine._open()._stored)
    assert np.array_equal(values, np.array(by_zarr(dataset, some_offsets(), PATCH), np.float32))


def test_an_index_at_the_start_of_a_shard_is_found(tmp_path):
    shards = {"shape": (4, 10, 12), "index_location": "start"}
    dataset = write_folder(tmp_path, shards=shards)
    for source in (dataset, seen_through(dataset, AsyncStore)):
        values, _ = read(source)
        assert np.array_equal(values, np.array(by_zarr(dataset, some_offsets(), PATCH), np.float32))


def test_a_store_of_version_2_is_read_and_its_fill_value_is_missing(tmp_path):
    group = zarr.open_group(str(tmp_path), mode="w", zarr_format=2)
    values = np.random.default_rng(0).integers(0, 9, SHAPE).astype(np.int16)
    array = group.create_array("a", shape=SHAPE, chunks=(2, 5, 5), dtype="int16", fill_value=3)
    array[...] = values
    got, valid = read(open_dataset(str(tmp_path)))
    expected = np.array(by_zarr(open_dataset(str(tmp_path)), some_offsets(), PATCH))
    assert np.array_equal(valid, expected != 3)
    assert np.array_equal(got[valid], expected[valid].astype(np.float32))


def test_variables_with_different_chunks_and_types_are_stacked_in_the_order_asked(tmp_path):
    write_array(tmp_path, "a", np.arange(720, dtype=np.int32).reshape(SHAPE), chunks=(1, 5, 6))
    write_array(tmp_path, "b", -np.arange(720, dtype=np.float32).reshape(SHAPE), chunks=(6, 2, 12), shards=(6, 10, 12))
    values, _ = read(open_dataset(str(tmp_path)), variables=["b", "a"])
    assert np.array_equal(values[:, 0], -values[:, 1])
    assert values.shape == (5, 2, *PATCH)


def test_wide_types_are_rounded_once(tmp_path):
    exact = np.array([16_777_217, 2**31 - 1, -5, 123_456_789] * 180, np.int32).reshape(SHAPE)
    write_array(tmp_path, "a", exact, chunks=(6, 10, 12), attributes={"scale_factor": 1e-3, "add_offset": 7.0})
    values, _ = read(open_dataset(str(tmp_path)), np.zeros((1, 3), np.int64), SHAPE)
    assert np.array_equal(values[0, 0], (exact * 1e-3 + 7.0).astype(np.float32))


def test_a_built_store_streams_the_values_of_its_source(built, tiny_config, tmp_path):
    from kit.data.build.open_source import load_source

    source = load_source(tiny_config(tmp_path / "tiny.zarr"))
    patch = (2, 3, 4)
    offsets = some_offsets(source.shape, patch)
    values, valid = read(built, offsets, patch)
    for variable, name in enumerate(built.arrays):
        expected = [source.decoded(name)[tuple(map(slice, o, o + np.array(patch)))] for o in offsets]
        assert np.array_equal(valid[:, variable], ~np.isnan(expected))
        np.testing.assert_allclose(values[:, variable], np.nan_to_num(np.array(expected)), atol=1e-5)


def test_standardised_values_have_no_mean_and_unit_deviation(built):
    values, valid = read(built, np.zeros((1, 3), np.int64), (5, 7, 9), standardize=True)
    for variable in range(2):
        known = values[0, variable][valid[0, variable]]
        assert abs(known.mean()) < 1e-3
        assert abs(known.std() - 1) < 1e-3


def test_a_store_without_statistics_cannot_be_standardised(tmp_path):
    with pytest.raises(ConfigError, match=r"data\.standardize: sst .*mean"):
        Engine(write_folder(tmp_path), standardize=True)


def test_only_real_numbers_can_be_a_channel(tmp_path):
    write_array(tmp_path, "waves", np.zeros(3, np.complex64), chunks=(3,))
    with pytest.raises(ConfigError, match=r"data\.variables: .*waves of complex64"):
        Engine(open_dataset(str(tmp_path)))


@pytest.mark.parametrize("offset", [(-1, 0, 0), (5, 0, 0), (0, 0, 8)])
def test_a_patch_outside_the_array_is_refused(tmp_path, offset):
    with pytest.raises(IndexError, match="reaches outside"):
        read(write_folder(tmp_path), np.array([offset]))


# -- from other places


def test_batches_come_from_every_kind_of_store(tiny_config, place):
    dataset = build(tiny_config(f"{place}/tiny.zarr"), progress=False)
    offsets = some_offsets(dataset.select()[0].shape, (1, 3, 3))
    values, valid = read(dataset, offsets, (1, 3, 3))
    expected = np.array(by_zarr(dataset, offsets, (1, 3, 3)), dtype=object)
    packed = np.stack([np.asarray(sample[1], np.float32) for sample in expected])
    assert np.array_equal(values[:, 1][valid[:, 1]], packed[valid[:, 1]])


def test_a_folder_behind_http_without_ranges_is_an_error_and_never_wrong(tmp_path, folder_server):
    write_folder(tmp_path / "sst.zarr")
    attributes = zarr.open_group(str(tmp_path / "sst.zarr"), mode="r")
    dataset = replace(open_dataset(str(tmp_path / "sst.zarr")), url=f"{folder_server}/sst.zarr")
    assert attributes["sst"].shape == SHAPE
    with pytest.raises(StoreError, match=r"index is|range .*requested"):
        read(dataset)


def test_an_unsharded_store_is_read_over_http(tmp_path, folder_server):
    here = write_folder(tmp_path / "sst.zarr", shards=None)
    values, _ = read(replace(here, url=f"{folder_server}/sst.zarr"))
    assert np.array_equal(values, np.array(by_zarr(here, some_offsets(), PATCH), np.float32))


# -- each chunk once, concurrently, bounded, ahead


def test_a_batch_reads_each_chunk_and_each_index_once(tmp_path):
    dataset = write_folder(tmp_path)
    everything = np.zeros((7, 3), np.int64)
    for source in (dataset, seen_through(dataset, AsyncStore)):
        with Engine(source, batches_ahead=0) as engine:
            (_,) = engine.stream([everything], SHAPE)
            counts = engine.counters
            (_,) = engine.stream([everything], SHAPE)
            more = {name: engine.counters[name] - counts[name] for name in ("requests", "requests_saved")}
        chunks, shards = 6 * 2 * 2, 3
        assert counts["requests"] + counts["requests_saved"] == chunks + shards
        assert (counts["cache_hits"], counts["cache_misses"]) == (0, chunks)
        assert (counts["chunks_decoded"], counts["chunks_filled"]) == (chunks, 0)
        assert counts["samples"] == 7
        assert counts["bytes_read"] > 0
        # Chunks of a batch that the reader has not let go of yet serve the next one.
        assert sum(more.values()) <= chunks, "an index was read again"


def gated(dataset):
    """The dataset through one gated store, and that store."""
    stores = []

    def wrap(store):
        stores.append(GatedStore(store))
        return stores[0]

    return seen_through(dataset, wrap), stores


@pytest.mark.parametrize("requests_in_flight", [1, 5])
def test_requests_are_concurrent_and_bounded(tmp_path, requests_in_flight):
    source, stores = gated(write_folder(tmp_path, shards=None))
    with Engine(source, requests_in_flight=requests_in_flight, batches_ahead=3) as engine:
        stream = engine.stream([some_offsets(seed=seed) for seed in range(4)], PATCH)
        consumer = threading.Thread(target=lambda: next(stream))
        consumer.start()
        wait_until(lambda: stores and stores[0].in_flight == requests_in_flight)
        stores[0].gate.set()
        consumer.join(PATIENCE_SECONDS)
        assert len([*stream]) == 3
    assert stores[0].most_in_flight == requests_in_flight


@pytest.mark.parametrize("batches_ahead", [0, 2])
def test_batches_are_read_ahead_while_the_consumer_works(tmp_path, batches_ahead):
    source, stores = gated(write_folder(tmp_path, shards=None))
    taken = []

    def batches():
        for seed in range(6):
            taken.append(seed)
            yield some_offsets(seed=seed)

    with Engine(source, batches_ahead=batches_ahead) as engine:
        engine._open()
        stores[0].gate.set()
        stream = engine.stream(batches(), PATCH)
        next(stream)
        assert taken == [*range(batches_ahead + 1)]
        wait_until(lambda: engine.counters["samples"] == 5 * (batches_ahead + 1))
        stream.close()


def noting_threads(decode, where):
    def noted(stored, data):
        where.append(threading.current_thread().name)
        return decode(stored, data)

    return noted


@pytest.mark.parametrize("way", ["folder", "loop", "wire"])
def test_chunks_are_decoded_by_threads_of_their_own_and_never_on_the_loop(tmp_path, way, cloud, monkeypatch):
    where = []
    for name in ("decode", "decode_together"):
        monkeypatch.setattr(StoredArray, name, noting_threads(getattr(StoredArray, name), where))
    dataset = write_folder(tmp_path)
    dataset = seen_through(dataset, AsyncStore) if way == "loop" else dataset
    read(open_dataset(cloud.upload(tmp_path, "decoded/x.zarr")) if way == "wire" else dataset)
    assert where
    assert all(name.startswith("kit-read" if way == "folder" else "kit-decode") for name in where)


def test_batches_come_in_order_though_a_later_one_is_ready_first(tmp_path):
    dataset = write_folder(tmp_path, shards=None)
    batches = [some_offsets(seed=seed) for seed in range(8)]
    with Engine(dataset, batches_ahead=7, decode_threads=4) as engine:
        got = [values for values, _ in engine.stream(batches, PATCH)]
    for offsets, values in zip(batches, got, strict=True):
        assert np.array_equal(values, np.array(by_zarr(dataset, offsets, PATCH), np.float32))


# -- faults


def test_a_missing_object_is_an_error_in_a_store_that_kit_built(built):
    victim = next(path for path in sorted(Path(built.url, "sst", "c").rglob("*")) if path.is_file())
    victim.unlink()
    for source in (built, seen_through(built, AsyncStore)):
        with pytest.raises(MissingChunkError, match=r"chunk \(0, 0, 0\) of sst .*missing: .*object sst/c"):
            read(source, np.zeros((1, 3), np.int64), (1, 3, 3))


def test_an_inner_chunk_that_its_shard_does_not_hold_is_an_error_in_a_store_that_kit_built(built):
    group = zarr.open_group(built.url, mode="r+")
    values = group["sst"][...]
    values[2, :4, :4] = group["sst"].fill_value
    group["sst"].with_config({"write_empty_chunks": False})[...] = values
    for source in (built, seen_through(built, AsyncStore)):
        with pytest.raises(MissingChunkError, match=r"chunk \(2, 0, 0\) of sst .*missing: the shard .*not hold"):
            read(source, np.array([[2, 0, 0]]), (1, 3, 3))


@pytest.mark.parametrize("shards", [None, (2, 10, 12)])
@pytest.mark.parametrize("compressors", [ZSTD, (GzipCodec(),)])
def test_a_store_that_kit_did_not_build_may_leave_chunks_out_and_they_are_counted(tmp_path, shards, compressors):
    values = np.zeros(SHAPE, np.int16)
    values[4:] = 7
    group = zarr.open_group(str(tmp_path), mode="w")
    options = {"chunks": (1, 5, 6), "shards": shards, "compressors": compressors, "fill_value": 5, "dtype": "int16"}
    array = group.create_array("a", shape=SHAPE, dimension_names=["x", "y", "z"], **options)
    array[4:] = values[4:]
    for wrap in (None, AsyncStore):
        dataset = open_dataset(str(tmp_path))
        with Engine(seen_through(dataset, wrap) if wrap else dataset) as engine:
            ((got, valid),) = engine.stream([np.zeros((1, 3), np.int64)], SHAPE)
        assert np.array_equal(got[0, 0], array[...])
        assert valid.all()
        assert (engine.counters["chunks_filled"], engine.counters["chunks_decoded"]) == (16, 8)


def test_zeros_are_data(tmp_path):
    write_array(tmp_path, "a", np.zeros(SHAPE, np.int16), chunks=(2, 5, 6), shards=(2, 10, 12))
    with Engine(open_dataset(str(tmp_path))) as engine:
        ((values, valid),) = engine.stream([some_offsets()], PATCH)
    assert valid.all()
    assert (values == 0).all()
    assert engine.counters["chunks_filled"] == 0


@pytest.mark.fault
@pytest.mark.parametrize("wrap", [None, AsyncStore])
@pytest.mark.parametrize("shards", [None, (3, 10, 12)])
def test_a_flipped_bit_is_an_error_or_changes_nothing(tmp_path, shards, wrap):
    dataset = write_folder(tmp_path, chunks=(3, 5, 6), shards=shards)
    source = seen_through(dataset, wrap) if wrap else dataset
    offsets, patch = np.zeros((1, 3), np.int64), (3, 10, 12)
    expected, _ = read(source, offsets, patch)
    victim = next(path for path in sorted((tmp_path / "sst" / "c").rglob("*")) if path.is_file())
    whole = victim.read_bytes()
    random = np.random.default_rng(0)
    places = {*random.integers(0, len(whole), 60).tolist(), *range(24), *range(len(whole) - 72, len(whole))}
    errors = 0
    for place in sorted(places):
        victim.write_bytes(whole[:place] + bytes([whole[place] ^ 1 << int(random.integers(8))]) + whole[place + 1 :])
        try:
            got, _ = read(source, offsets, patch)
        except (CorruptChunkError, MissingChunkError) as error:
            errors += "sst" in str(error) and str(tmp_path) in str(error)
        else:
            assert np.array_equal(got, expected)
    assert errors > 0.9 * len(places)


@pytest.mark.fault
@pytest.mark.parametrize("wrap", [None, AsyncStore])
@pytest.mark.parametrize("shards", [None, (3, 10, 12)])
@pytest.mark.parametrize("keep", [0, 1, 7, 0.5, 0.95, -1])
def test_a_truncated_object_is_an_error(tmp_path, shards, keep, wrap):
    dataset = write_folder(tmp_path, chunks=(3, 5, 6), shards=shards)
    victim = next(path for path in sorted((tmp_path / "sst" / "c").rglob("*")) if path.is_file())
    whole = victim.read_bytes()
    victim.write_bytes(whole[: int(len(whole) * keep) if isinstance(keep, float) else keep])
    with pytest.raises(CorruptChunkError, match="of sst .*damaged"):
        read(seen_through(dataset, wrap) if wrap else dataset, np.zeros((1, 3), np.int64), (3, 10, 12))


def test_an_object_of_another_size_is_an_error_though_its_checksum_holds(tmp_path):
    dataset = write_folder(tmp_path / "a", chunks=(3, 5, 6), shards=None)
    write_folder(tmp_path / "b", chunks=(3, 5, 12), shards=None)
    for size, place in (("larger", "0"), ("smaller", "0")):
        source, target = ("b", "a") if size == "larger" else ("a", "b")
        paths = [tmp_path / name / "sst" / "c" / "0" / "0" / place for name in (source, target)]
        keep = paths[1].read_bytes()
        shutil.copy(*paths)
        with pytest.raises(CorruptChunkError, match="bytes decoded instead"):
            read(open_dataset(str(tmp_path / target)), np.zeros((1, 3), np.int64), (1, 1, 1))
        paths[1].write_bytes(keep)
    assert read(dataset)[1].all()


class FaultyStore(AsyncStore):
    """Fails on chunks until told otherwise."""

    fault: Exception | None = None

    async def get(self, key, prototype, byte_range=None):
        if self.fault is not None:
            raise self.fault
        return await self._store.get(key, prototype, byte_range)


def test_an_error_of_the_store_is_named_without_secrets_and_a_later_read_succeeds(tmp_path):
    faulty = []

    def wrap(store):
        faulty.append(FaultyStore(store))
        return faulty[0]

    with Engine(seen_through(write_folder(tmp_path), wrap)) as engine:
        engine._open()
        faulty[0].fault = OSError("503 from https://user:hunter2@host/x?token=abc")
        with pytest.raises(StoreError, match="503") as caught:
            next(engine.stream([some_offsets()], PATCH))
        assert "hunter2" not in str(caught.value)
        assert "abc" not in str(caught.value)
        faulty[0].fault = None
        sync(asyncio.sleep(0))  # a request that is being refused on the loop's thread is one of the first read
        assert len([*engine.stream([some_offsets()], PATCH)]) == 1


def test_a_request_without_an_answer_is_given_up(tmp_path):
    source, stores = gated(write_folder(tmp_path))
    late = pytest.raises(StoreError, match="no answer .*sst/c/.* 1 s")
    with Engine(source, request_seconds=1) as engine, late:  # enough to open it on a busy machine
        next(engine.stream([some_offsets()], PATCH))
    assert stores[0].in_flight == 0


class SilentStore(AsyncStore):
    """Never answers."""

    async def get(self, key, prototype, byte_range=None):
        await asyncio.Event().wait()


def test_a_store_that_never_answers_is_given_up_when_it_is_opened(tmp_path):
    source = seen_through(write_folder(tmp_path), SilentStore)
    late = pytest.raises(StoreError, match=r"no answer within 0\.05 s")
    with Engine(source, request_seconds=0.05) as engine, late:
        next(engine.stream([some_offsets()], PATCH))


def test_one_bad_batch_does_not_spoil_those_before_it(tmp_path):
    dataset = write_folder(tmp_path, shards=None)
    (tmp_path / "sst" / "c" / "5" / "1" / "1").write_bytes(b"torn")
    good, bad = np.zeros((1, 3), np.int64), np.array([[4, 6, 7]])
    with Engine(dataset, batches_ahead=2) as engine:
        stream = engine.stream([good, bad, good], PATCH)
        next(stream)
        with pytest.raises(CorruptChunkError, match=r"chunk \(5, 1, 1\)"):
            next(stream)
        assert [*stream] == []


# -- life and death


def test_leaving_the_stream_cancels_what_was_read_ahead(tmp_path):
    source, stores = gated(write_folder(tmp_path, shards=None))
    batches = [some_offsets(seed=seed) for seed in range(6)]
    with Engine(source) as engine:
        engine._open()
        stores[0].gate.set()
        next(engine.stream(batches[:1], PATCH))
    store = stores[0]
    store.gate.clear()
    store.let_through = set(store.keys)
    with Engine(source, batches_ahead=3, requests_in_flight=64) as engine:
        stream = engine.stream(batches, PATCH)
        next(stream)
        wait_until(lambda: store.in_flight > 0)
        stream.close()
        wait_until(lambda: store.in_flight == 0)


def test_an_exception_in_the_consumer_leaves_no_thread(tmp_path, new_threads):
    source, stores = gated(write_folder(tmp_path, shards=None))

    def consume():
        with Engine(source, batches_ahead=3) as engine:
            engine._open()
            stores[0].gate.set()
            for _ in engine.stream([some_offsets(seed=seed) for seed in range(6)], PATCH):
                stores[0].gate.clear()
                raise RuntimeError("the model diverged")

    with pytest.raises(RuntimeError, match="diverged"):
        consume()
    assert stores[0].in_flight == 0
    assert not new_threads("kit-decode")


def test_closing_ends_a_stream_that_is_waiting(tmp_path):
    source, stores = gated(write_folder(tmp_path, shards=None))
    engine = Engine(source)
    engine._open()
    caught = []

    def consume():
        try:
            next(engine.stream([some_offsets()], PATCH))
        except StoreError as error:
            caught.append(str(error))

    consumer = threading.Thread(target=consume)
    consumer.start()
    wait_until(lambda: stores[0].in_flight > 0)
    engine.close()
    consumer.join(PATIENCE_SECONDS)
    assert "closed while" in caught[0]


def test_samples_count_as_read_when_their_chunks_have_come_and_are_not_decoded(tmp_path, monkeypatch):
    """A trial that ends meanwhile has counted their requests."""
    gate, decode = threading.Event(), ReceiveQueue._decode

    def late(*arguments):
        gate.wait(PATIENCE_SECONDS)
        decode(*arguments)

    monkeypatch.setattr(ReceiveQueue, "_decode", late)
    with Engine(write_folder(tmp_path, shards=None, chunks=(6, 10, 6))) as engine:  # two, each in a thread of its own
        batch = engine._open().start(some_offsets(), PATCH)
        wait_until(lambda: engine.counters["samples_read"] == 5)
        assert (engine.counters["samples"], engine.counters["requests"]) == (0, 2)
        gate.set()
        batch.result(PATIENCE_SECONDS)
        assert engine.counters["samples_read"] == engine.counters["samples"] == 5


def test_a_closed_engine_opens_again_and_goes_on_counting(tmp_path):
    engine = Engine(write_folder(tmp_path))
    for _ in range(2):
        with engine:
            assert len([*engine.stream([some_offsets()], PATCH)]) == 1
    assert engine.counters["samples"] == 10


def test_a_forgotten_engine_ends_its_threads(tmp_path):
    engine = Engine(write_folder(tmp_path))
    [*engine.stream([some_offsets()], PATCH)]
    reader = weakref.ref(engine._open())
    threads = [*engine._open()._queue.decoders._threads, *engine._open()._client._threads._threads]
    assert threads
    del engine
    gc.collect()
    for thread in threads:
        thread.join(PATIENCE_SECONDS)
    assert not any(thread.is_alive() for thread in threads)
    gc.collect()
    assert reader() is None


@pytest.mark.parametrize("wrap", [None, AsyncStore])
def test_a_batch_that_nobody_holds_is_freed_without_the_garbage_collector(tmp_path, wrap):
    dataset, seen = write_folder(tmp_path), []
    gc.disable()
    try:
        with Engine(seen_through(dataset, wrap) if wrap else dataset, cache_bytes=1 << 20) as engine:
            for values, _ in engine.stream([some_offsets()] * 6, PATCH):
                seen.append(weakref.ref(values))
            wait_until(lambda: [batch() is not None for batch in seen] == [False] * 5 + [True])
            assert seen[-1]() is values
    finally:
        gc.enable()


def test_an_engine_pickles_without_its_handles(tmp_path):
    with Engine(write_folder(tmp_path)) as engine:
        (first,) = engine.stream([some_offsets()], PATCH)
        copy = pickle.loads(pickle.dumps(engine))
    assert copy.counters["samples"] == 0
    with copy:
        (second,) = copy.stream([some_offsets()], PATCH)
    assert np.array_equal(first[0], second[0])


def _sum_in_child(engine, connection):
    (batch,) = engine.stream([some_offsets()], PATCH)
    engine.close()
    connection.send((float(batch[0].sum()), engine.counters["samples"]))


def test_a_forked_process_opens_the_store_for_itself(tmp_path):
    context = multiprocessing.get_context("fork")
    here, there = context.Pipe()
    with Engine(write_folder(tmp_path)) as engine:
        (batch,) = engine.stream([some_offsets()], PATCH)
        child = context.Process(target=_sum_in_child, args=(engine, there))
        child.start()
        assert here.poll(PATIENCE_SECONDS)
        assert here.recv() == (float(batch[0].sum()), 5)
        child.join(PATIENCE_SECONDS)
        assert child.exitcode == 0
        assert len([*engine.stream([some_offsets()], PATCH)]) == 1


def test_opening_what_is_not_there_leaves_nothing_behind(tmp_path):
    dataset = write_folder(tmp_path)
    shutil.rmtree(tmp_path / "sst")
    with pytest.raises(StoreError, match="sst"):
        read(dataset)
