"""Runs: requests of a batch in shards, against a count of its own over many batches."""

import random

import numpy as np
import pytest
import zarr
from hypothesis import given
from hypothesis import strategies as st
from properties import examples
from zarr.core.indexing import morton_order_iter

from kit.chunks.geometry import axes_of
from kit.chunks.requests import _MOST_RANKED, ALONE, Coalescing, _code, expected_runs, morton_numbers

SIZE = 100


def counted(shape, chunk, patch, shard, batch_size, gap, batches=300):
    """Requests and bytes per chunk when no gap of more than `gap` chunks is read over."""
    generator, chunks, requests, bytes_asked = random.Random(7), 0, 0, 0
    for _ in range(batches):
        wanted = set()
        for _ in range(batch_size):
            y, x = (generator.randint(0, extent - side) for extent, side in zip(shape, patch, strict=True))
            wanted |= {
                (row, column)
                for row in range(y // chunk[0], (y + patch[0] - 1) // chunk[0] + 1)
                for column in range(x // chunk[1], (x + patch[1] - 1) // chunk[1] + 1)
            }
        rows, columns = shard[0] // chunk[0], shard[1] // chunk[1]
        numbers = {inside: number for number, inside in enumerate(morton_order_iter((rows, columns)))}
        last = {}
        lying = [((row // rows, column // columns), numbers[row % rows, column % columns]) for row, column in wanted]
        for place, number in sorted(lying):
            skipped = number - last.get(place, -(10**9)) - 1
            last[place] = number
            chunks += 1
            requests += skipped > gap
            bytes_asked += SIZE * (1 + (skipped if skipped <= gap else 0))
    return requests / chunks, bytes_asked / (chunks * SIZE)


@pytest.mark.parametrize("batch_size", [4, 32])
@pytest.mark.parametrize("gap", [0, 1, 5])
def test_expected_runs_are_those_of_many_batches(batch_size, gap):
    shape, chunk, patch, shard = (96, 96), (8, 8), (8, 8), (32, 48)
    found = expected_runs(
        axes_of(shape, chunk, patch, (1, 1)), shard, batch_size, SIZE, Coalescing(gap * SIZE, 10**9), "random", True
    )
    requests, bytes_asked = counted(shape, chunk, patch, shard, batch_size, gap)
    assert found.requests_per_chunk == pytest.approx(requests, rel=0.1)
    assert found.bytes_per_chunk == pytest.approx(bytes_asked, rel=0.1)


@pytest.mark.parametrize("per_shard", [(1,), (7,), (4, 4), (3, 5), (1, 4, 16), (2, 3, 9)])
def test_inner_chunks_lie_in_a_shard_as_zarr_writes_them(tmp_path, per_shard):
    shape = tuple(2 * count for count in per_shard)
    array = zarr.create_array(
        tmp_path, shape=shape, chunks=(2,) * len(shape), shards=shape, dtype="f4", compressors=None, fill_value=-1
    )
    array[...] = np.random.default_rng(0).random(shape, np.float32)
    shard = tmp_path.joinpath("c", *"0" * len(shape))
    entries = np.fromfile(shard, "<u8", offset=4 * array.size, count=2 * len(morton_numbers(per_shard, per_shard)))
    first_bytes = entries.reshape(*per_shard, 2)[..., 0]
    chunk_bytes = 4 * 2 ** len(shape)
    assert {place: int(first) // chunk_bytes for place, first in np.ndenumerate(first_bytes)} == morton_numbers(
        per_shard, per_shard
    )


def test_numbers_of_powers_of_two_need_no_table():
    per_shard = (4, 2, 8)
    assert {place: _code(place, per_shard) for place in np.ndindex(per_shard)} == morton_numbers(per_shard, per_shard)


def test_a_shard_of_very_many_chunks_is_counted_without_a_table():
    axes = axes_of((1 << 18,), (1,), (1,), (1,))
    found = expected_runs(axes, (2 * _MOST_RANKED,), 8, SIZE, Coalescing(0, 1 << 20), "random", True)
    assert found.requests_per_chunk == pytest.approx(1, abs=0.01)


def test_a_patch_of_a_whole_shard_is_one_request_unless_it_is_too_long():
    axes = axes_of((64, 64), (8, 8), (32, 32), (32, 32))
    whole = expected_runs(axes, (32, 32), 1, SIZE, Coalescing(0, 16 * SIZE), "grid", False)
    assert (whole.requests_per_chunk, whole.bytes_per_chunk) == (1 / 16, 1)
    cut = expected_runs(axes, (32, 32), 1, SIZE, Coalescing(0, 4 * SIZE), "grid", False)
    assert cut.requests_per_chunk == 4 / 16


@examples(40)
@given(
    chunk=st.integers(1, 9), per_shard=st.integers(1, 5), patch=st.integers(1, 20), batch_size=st.integers(1, 20),
    gap=st.integers(0, 8), order=st.sampled_from(["random", "grid"]), shuffle=st.booleans(),
)  # fmt: skip
def test_runs_are_never_more_than_chunks_and_never_ask_for_less(
    chunk, per_shard, patch, batch_size, gap, order, shuffle
):
    axes = axes_of((40, 40), (chunk, chunk), (patch, patch), (3, 3))
    asked = (tuple(axes), (chunk * per_shard,) * 2, batch_size, SIZE, Coalescing(gap * SIZE, 1 << 20), order, shuffle)
    found = expected_runs(*asked)
    assert 0 < found.requests_per_chunk <= 1 <= found.bytes_per_chunk
    assert found.bytes_per_chunk <= 1 + gap
    assert found == expected_runs.__wrapped__(*asked)


def test_the_fewer_chunks_are_fetched_the_less_they_share_requests():
    axes = axes_of((512, 512), (64, 64), (16, 16), (1, 1))
    asked = (tuple(axes), (256, 256), 8, SIZE, Coalescing(2 * SIZE, 1 << 20), "random", True)
    alike, all_of_them, half, few = (expected_runs(*asked, *part) for part in ((), (1.0,), (0.5,), (0.05,)))
    assert alike == all_of_them
    assert all_of_them.requests_per_chunk < half.requests_per_chunk < few.requests_per_chunk <= 1
    assert expected_runs(*asked, 0.0) == ALONE
