"""Rechunking: groups tile the array once, stay within the budget, and what they read is counted exactly."""

from dataclasses import replace
from itertools import product
from math import prod

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from properties import examples

from kit.data.build.rechunk import CHUNK_BYTES, Recut, group_regions, intermediate_chunk, two_passes
from kit.errors import PlanError

SIZES = st.integers(1, 40)


@st.composite
def layouts(draw):
    rank = draw(st.integers(1, 3))

    def sizes():
        return tuple(draw(SIZES) for _ in range(rank))

    return Recut(shape=sizes(), itemsize=4, source_chunk=draw(st.none() | st.just(sizes())), target=sizes())


def read_by_hand(layout, boxes):
    """Elements of all source chunks that each box touches, counted one chunk at a time."""
    chunk = layout.source_chunk or (1,) * len(layout.shape)
    total = 0
    for box in boxes:
        spans = [range(part.start // side, -(-part.stop // side)) for part, side in zip(box, chunk, strict=True)]
        for place in product(*spans):
            bounds = zip(place, chunk, layout.shape, strict=True)
            total += prod(min((at + 1) * side, size) - at * side for at, side, size in bounds)
    return total * layout.itemsize


@examples(150)
@given(layout=layouts(), budget=st.integers(1, 400_000))
def test_groups_tile_the_array_once_within_the_budget_and_read_what_is_promised(layout, budget):
    if layout.least_task_bytes > budget:
        with pytest.raises(PlanError, match="to encode .* ="):
            group_regions(layout, budget)
        return
    plan = group_regions(layout, budget)
    assert plan.task_bytes <= budget
    assert all(side % cut == 0 for side, cut in zip(plan.group, layout.target, strict=True))
    count = np.zeros(layout.shape, int)
    boxes = [*plan.boxes()]
    for box in boxes:
        count[box] += 1
    assert (count == 1).all()
    assert len(boxes) == plan.groups
    assert plan.read_bytes == read_by_hand(layout, boxes)
    assert plan.read_bytes <= 1.05 * layout.read_bytes(layout.target)


def test_many_chunks_in_a_region_take_memory_each():
    whole = Recut(shape=(64, 64), itemsize=2, source_chunk=None, target=(32, 32))
    assert replace(whole, chunk=(1, 5)).task_bytes((32, 32)) == whole.task_bytes((32, 32)) + (32 * 7 - 1) * CHUNK_BYTES


def test_a_source_that_is_not_cut_is_read_a_region_at_a_time():
    layout = Recut(shape=(100, 100), itemsize=4, source_chunk=None, target=(10, 10))
    plan = group_regions(layout, 1 << 30)
    assert plan.group == (10, 10)
    assert plan.read_ratio == 1


def test_more_memory_reads_a_transposed_source_fewer_times():
    layout = Recut(shape=(1000, 500, 500), itemsize=4, source_chunk=(1, 500, 500), target=(1000, 50, 50))
    ratios = [group_regions(layout, mib << 20).read_ratio for mib in (64, 256, 1024, 4096)]
    assert ratios[-1] == 1
    assert ratios == sorted(ratios, reverse=True)
    assert ratios[0] > 10


def test_an_intermediate_copy_spares_reading_the_source_again_and_again():
    layout = Recut(shape=(1000, 500, 500), itemsize=4, source_chunk=(1, 500, 500), target=(1000, 50, 50))
    budget = 64 << 20
    once = group_regions(layout, budget)
    plan = two_passes(layout, budget, once, intermediate_chunk(layout, budget))
    assert plan is not None
    assert plan.first.read_ratio == 1
    assert max(plan.first.task_bytes, plan.second.task_bytes) <= budget
    assert plan.moved_bytes < once.read_bytes / 2


def test_no_copy_is_made_where_chunks_are_aligned():
    layout = Recut(shape=(64, 512), itemsize=4, source_chunk=(8, 64), target=(16, 64))
    once = group_regions(layout, 1 << 26)
    assert once.read_ratio == 1
    assert two_passes(layout, 1 << 26, once, intermediate_chunk(layout, 1 << 26)) is None


def test_sizes_of_another_rank_are_refused():
    with pytest.raises(PlanError, match="one size, .*1, per dimension"):
        Recut(shape=(4, 4), itemsize=4, source_chunk=(4,), target=(2, 2))
