"""Runs: neighbours that share a request, and where the chunks of a shard lie."""

import math
from itertools import pairwise

import numpy as np
import pytest
import zarr
from hypothesis import given
from hypothesis import strategies as st
from properties import examples

from kit.chunks.requests import Coalescing, c_numbers, morton_numbers, runs

SIZE = 100


@pytest.mark.parametrize("per_shard", [(1,), (7,), (4, 4), (3, 5), (1, 4, 16), (2, 3, 9)])
def test_inner_chunks_lie_in_a_shard_as_zarr_writes_them(tmp_path, per_shard):
    shape = tuple(2 * count for count in per_shard)
    array = zarr.create_array(
        tmp_path, shape=shape, chunks=(2,) * len(shape), shards=shape, dtype="f4", compressors=None, fill_value=-1
    )
    array[...] = np.random.default_rng(0).random(shape, np.float32)
    shard = tmp_path.joinpath("c", *"0" * len(shape))
    entries = np.fromfile(shard, "<u8", offset=4 * array.size, count=2 * math.prod(per_shard))
    first_bytes = entries.reshape(*per_shard, 2)[..., 0]
    chunk_bytes = 4 * 2 ** len(shape)
    assert (first_bytes // chunk_bytes == morton_numbers(per_shard, per_shard)).all()


def test_what_lies_outside_the_array_takes_no_place_in_its_shard():
    whole, part = morton_numbers((4, 4), (4, 4)), morton_numbers((4, 4), (3, 2))
    assert sorted(part.ravel()) == [*range(6)]
    assert (np.argsort(part, axis=None) == np.argsort(whole[:3, :2], axis=None)).all()


def test_in_c_order_the_last_dimension_is_the_fastest():
    assert c_numbers((2, 3)).tolist() == [[0, 1, 2], [3, 4, 5]]


@examples(40)
@given(numbers=st.sets(st.integers(0, 60), min_size=1), gap=st.integers(0, 8), longest=st.integers(1, 30))
def test_runs_hold_each_chunk_once_and_read_over_no_more_than_the_gap(numbers, gap, longest):
    how = Coalescing(gap * SIZE, longest * SIZE)
    found = runs([(number * SIZE, (number + 1) * SIZE, number) for number in numbers], how)
    assert [item for run in found for _, _, item in run.items] == sorted(numbers)
    assert all(run.last - run.first <= longest * SIZE for run in found)
    for run in found:
        lying = [item for _, _, item in run.items]
        assert all(after - before - 1 <= gap for before, after in pairwise(lying))
        assert run.wasted_bytes == SIZE * (lying[-1] - lying[0] + 1 - len(lying))
