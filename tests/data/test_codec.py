"""Codec: chunks that are decoded together are those decoded one by one, and damage is that of its chunk alone."""

from __future__ import annotations

import re
import threading

import numpy as np
import pytest
import zstandard
from waiting import PATIENCE_SECONDS, wait_until
from zarr.codecs import BloscCodec, BytesCodec, Crc32cCodec, GzipCodec, ZstdCodec
from zarr_stores import ZSTD, GatedStore, by_zarr, seen_through, write_array

from kit.data.open_dataset import open_dataset
from kit.data.stream.codec import StoredArray
from kit.data.stream.engine import Engine
from kit.errors import CorruptChunkError

SHAPE, CHUNK = (4, 8), (1, 8)
ROWS = [np.array([[row, 0]]) for row in range(SHAPE[0])]


@pytest.fixture
def values():
    return np.random.default_rng(0).integers(-500, 500, SHAPE).astype(np.int32)


def stored_array(dataset):
    with Engine(dataset) as engine:
        return engine._open()._stored[0]


@pytest.mark.parametrize(
    "codecs",
    [
        {"compressors": ZSTD},
        {"compressors": (ZstdCodec(level=3),), "serializer": BytesCodec(endian="big")},
        {"compressors": (ZstdCodec(level=3), Crc32cCodec())},
        {"compressors": (BloscCodec(cname="zstd"),)},
        {"compressors": (GzipCodec(level=1),)},
    ],
)
def test_chunks_decoded_together_are_those_decoded_one_by_one(tmp_path, values, codecs):
    write_array(tmp_path, "a", values, chunks=CHUNK, **codecs)
    stored = stored_array(open_dataset(str(tmp_path)))
    data = [np.fromfile(tmp_path / "a" / "c" / str(row) / "0", np.uint8) for row in range(SHAPE[0])]
    together, alone = stored.decode_together(data), [stored.decode(one) for one in data]
    for found, expected, row in zip(together, alone, values, strict=True):
        assert found.dtype == expected.dtype
        assert np.array_equal(found[0], row)
        assert np.array_equal(expected[0], row)


@pytest.fixture
def held_up(monkeypatch):
    """Reads with the one decoding thread held up until all is there; how many were decoded together is noted."""
    together, noted = StoredArray.decode_together, []

    def noting(stored, data):
        noted.append(len(data))
        return together(stored, data)

    monkeypatch.setattr(StoredArray, "decode_together", noting)

    def read(dataset):
        """What each row's batch gave, an error where there is no batch; all rows wait to be decoded at once."""
        stores = []
        seen = seen_through(dataset, lambda store: stores.append(GatedStore(store)) or stores[0])
        with Engine(seen, decode_threads=1, requests_in_flight=8) as engine:
            queue, asleep, go = engine._open()._queue, threading.Event(), threading.Event()
            futures = [engine._open().start(row, CHUNK) for row in ROWS]
            wait_until(lambda: stores[0].in_flight == len(ROWS))
            queue.decoders.put(_Anybody(), lambda: asleep.set() or go.wait(PATIENCE_SECONDS))
            assert asleep.wait(PATIENCE_SECONDS)
            stores[0].gate.set()
            wait_until(lambda: len(queue._undecoded) == len(ROWS))
            go.set()
            return [future.exception(PATIENCE_SECONDS) or future.result()[0][0, 0, 0] for future in futures]

    return read, noted


class _Anybody:
    """Owns a job and does not mind how it goes."""

    cancelled = False

    def fail(self, error):
        raise AssertionError from error


def test_what_waits_for_a_decoding_thread_is_decoded_in_one_call(tmp_path, values, held_up):
    read, noted = held_up
    write_array(tmp_path, "a", values, chunks=CHUNK)
    dataset = open_dataset(str(tmp_path))
    found = read(dataset)
    assert noted == [len(ROWS)]
    assert np.array_equal(found, np.array(by_zarr(dataset, np.concatenate(ROWS), CHUNK))[:, 0, 0])


def test_a_damaged_chunk_among_those_decoded_together_fails_its_own_batch_only(tmp_path, values, held_up):
    read, noted = held_up
    write_array(tmp_path, "a", values, chunks=CHUNK)
    (tmp_path / "a" / "c" / "2" / "0").write_bytes(b"no frame of zstd")
    found = read(open_dataset(str(tmp_path)))
    assert noted == [len(ROWS)]
    assert isinstance(found[2], CorruptChunkError)
    assert re.search(r"chunk \(2, 0\) of a .*damaged", str(found[2]))
    for row in (0, 1, 3):
        assert np.array_equal(found[row], values[row])


def test_frames_that_do_not_tell_their_size_are_decoded_as_well(tmp_path, values, held_up):
    read, _ = held_up
    write_array(tmp_path, "a", values, chunks=CHUNK)
    for row in (1, 2):
        plain, pieces = values[row].tobytes(), zstandard.ZstdCompressor().compressobj()
        (tmp_path / "a" / "c" / str(row) / "0").write_bytes(pieces.compress(plain) + pieces.flush())
    assert np.array_equal(read(open_dataset(str(tmp_path))), values)


def test_a_chunk_of_two_frames_among_others_is_decoded_as_well(tmp_path, values, held_up):
    read, _ = held_up
    write_array(tmp_path, "a", values, chunks=CHUNK)
    plain = values[1].tobytes()
    frames = [zstandard.ZstdCompressor().compress(part) for part in (plain[:12], plain[12:])]
    (tmp_path / "a" / "c" / "1" / "0").write_bytes(b"".join(frames))
    assert np.array_equal(read(open_dataset(str(tmp_path))), values)
