"""An epoch that is stopped and resumed in another way: every sample once, and in the order it would have had."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from properties import examples

from kit.data.samples import SamplePlan, WindowLimit


@st.composite
def epochs(draw, orders=("random", "grid", "block")):
    """A plan, and what it is resumed with again and again: (steps taken before, ranks, batch size, blocks, reuse)."""
    order = draw(st.sampled_from(orders))
    shape = (draw(st.integers(8, 12)), draw(st.integers(8, 12)))
    plan = SamplePlan(
        shape=shape, patch=(draw(st.integers(1, 3)), draw(st.integers(1, 3))), order=order, stride=(1, 1),
        samples_per_epoch=draw(st.integers(20, 50)), batch_size=draw(st.integers(1, 5)),
        world_size=draw(st.integers(1, 4)), seed=draw(st.integers(0, 99)), shuffle=draw(st.booleans()),
        drop_last=draw(st.booleans()), limit=WindowLimit(chunk=(2, 2), chunks=1_000, blocks=6),
        **({"block": (4, 2), "samples_per_block": draw(st.integers(1, 9)), "blocks_per_window": draw(st.integers(1, 5))}
           if order == "block" else {}),
    )  # fmt: skip
    ways = st.tuples(
        st.floats(0, 1), st.integers(1, 4), st.integers(1, 5), st.integers(1, 5), st.sampled_from([(4, 2), (2, 6)])
    )
    return plan, draw(st.lists(ways, min_size=1, max_size=3))


def served(plan, epoch, first, stop):
    """Offsets of these steps, over all ranks, in the order of the row."""
    batches = [plan.batch(epoch, step, rank) for step in range(first, stop) for rank in range(plan.world_size)]
    assert all(len(batch) for batch in batches)
    return [tuple(offset) for batch in batches for offset in batch.tolist()]


def play(plan, ways, epoch=1):
    """What an epoch gives that is stopped before each of these ways, what it should give, and the plan of its end."""
    seen, step, under_way = [], 0, plan
    for fraction, world_size, batch_size, blocks, block in ways:
        stop = step + int((under_way.batches_per_epoch - step) * fraction)
        seen += served(under_way, epoch, step, stop)
        step = stop
        changes = {"world_size": world_size, "batch_size": batch_size}
        if plan.order == "block":
            changes |= {"block": block, "blocks_per_window": blocks, "samples_per_block": 3 + blocks}
        under_way = replace(plan, **changes).resume(under_way.identity(), step)
    seen += served(under_way, epoch, step, under_way.batches_per_epoch)
    alone = replace(under_way, batch_size=1, world_size=1, blocks_per_window=1, drop_last=False, earlier=())
    return seen, served(alone, epoch, 0, alone.batches_per_epoch), under_way


@pytest.mark.slow
@given(epochs())
@examples(2_000)
def test_every_sample_of_a_stopped_epoch_comes_once_whatever_it_is_resumed_with(case):
    plan, ways = case
    seen, whole, last = play(plan, ways)
    missing = Counter(whole)
    missing.subtract(seen)
    assert min(missing.values()) >= 0  # none twice
    left_out = missing.total()
    if not plan.drop_last:
        assert left_out == last.steps.left_out < last.world_size
    if plan.order != "block":
        assert seen == whole[: len(seen)]  # also in the same order
    elif last.windows.cuts:
        assert any("another order" in note for note in last.notes)


@given(epochs(orders=("block",)))
@examples(500)
def test_in_block_order_the_ranks_go_on_as_they_would_have_with_another_batch_size(case):
    plan, ways = case
    rows = [
        [tuple(offset) for step in range(plan.batches_per_epoch) for offset in plan.batch(1, step, rank).tolist()]
        for rank in range(plan.world_size)
    ]
    step = int(plan.batches_per_epoch * ways[0][0])
    other = replace(plan, batch_size=ways[0][2]).resume(plan.identity(), step)
    assert other.notes == other.steps.notes
    for rank, row in enumerate(rows):
        rest = [
            tuple(offset)
            for following in range(step, other.batches_per_epoch)
            for offset in other.batch(1, following, rank).tolist()
        ]
        taken = step * plan.batch_size
        if step < plan.batches_per_epoch and not plan.drop_last and not other.steps.left_out:
            assert rest == row[taken:]
        assert rest[: len(row) - taken] == row[taken:][: len(rest)]


def test_a_state_of_an_earlier_version_is_resumed():
    plan = SamplePlan(
        shape=(20, 20), patch=(4, 4), order="random", stride=(4, 4), samples_per_epoch=50, batch_size=4, world_size=2,
        seed=3, shuffle=True, drop_last=False,
    )  # fmt: skip
    kept = {name: value for name, value in plan.identity().items() if name not in ("earlier", "places")}
    alike, other = plan.resume(kept, 3), replace(plan, batch_size=3, world_size=3).resume(kept, 3)
    assert np.array_equal(alike.batch(1, 3, 0), plan.batch(1, 3, 0))
    whole = replace(plan, batch_size=1, world_size=1)
    assert served(other, 1, 3, other.batches_per_epoch) == served(whole, 1, 24, 50)


def numbers(count, batch_size, world_size, **changes):
    """A plan whose samples are told by their offset, as items of a data set are by their index."""
    fields = {
        "shape": (count,), "patch": (1,), "order": "grid", "stride": (1,), "samples_per_epoch": count,
        "batch_size": batch_size, "world_size": world_size, "seed": 42, "shuffle": True, "drop_last": False,
    }  # fmt: skip
    return SamplePlan(**(fields | changes))


LITDATA = {
    "two ranks to one": (80, [(2, 4), (1, 4)], [4]),
    "one rank to two": (80, [(1, 4), (2, 4)], [5]),
    "eight to two to eight": (64, [(8, 4), (2, 4), (8, 4)], [1, 3]),
    "the same global batch on other ranks": (64, [(8, 4), (4, 8)], [1]),
    "a cursor inside a batch of the new ranks": (40, [(1, 13), (2, 4)], [1]),
    "chunks of uneven size": (27, [(1, 5), (2, 2)], [1]),
    "a second checkpoint": (96, [(1, 4), (3, 4), (1, 4)], [6, 9]),
    "after the last batch": (10, [(2, 2), (1, 2)], [3]),
}
"""What litdata resumes in its tests (Lightning-AI/litData#878): samples, (ranks, batch size), steps at a stop.

There a cursor inside a batch is rounded down to one, so that samples come twice, and a chunk that was begun is left.
"""


@pytest.mark.parametrize("case", LITDATA)
def test_what_litdata_resumes_elastically_is_resumed_to_the_sample(case):
    count, ways, stops = LITDATA[case]
    (world_size, batch_size), *others = ways
    plan = numbers(count, batch_size, world_size)
    order = served(numbers(count, 1, 1), 2, 0, count)
    seen, step = [], 0
    for stop, (world_size, batch_size) in zip(stops, others, strict=True):
        seen += served(plan, 2, step, stop)
        plan, step = numbers(count, batch_size, world_size).resume(plan.identity(), stop), stop
    seen += served(plan, 2, step, plan.batches_per_epoch)
    assert seen == order


def test_samples_that_are_fewer_than_the_ranks_are_left_out_and_told():
    rest = numbers(10, 1, 4).resume(numbers(10, 8, 1).identity(), 1)
    assert (rest.batches_per_epoch, rest.steps.left_out) == (1, 2)
    assert "2 of 10 samples" in rest.notes[0]
