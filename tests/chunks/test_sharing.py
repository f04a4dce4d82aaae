"""Sharing: chunks fetched by a batch, a run and a cache, against every offset listed and against simulations."""

import itertools
import random
from collections import OrderedDict

import pytest
from hypothesis import given
from hypothesis import strategies as st
from properties import examples

from kit.chunks.geometry import Axis, axes_of
from kit.chunks.sharing import Sequential, Shuffled, fetches, reading_of


@st.composite
def axis_strategy(draw, most=14):
    extent = draw(st.integers(1, most))
    return Axis(extent, draw(st.integers(1, extent)), draw(st.integers(1, most)), draw(st.integers(1, 4)))


def chunks_of(axes):
    """The set of chunks of every position, positions in C order."""
    places = itertools.product(*(range(0, a.extent - a.size + 1, a.stride) for a in axes))
    spans = (
        [range(o // a.chunk, (o + a.size - 1) // a.chunk + 1) for o, a in zip(place, axes, strict=True)]
        for place in places
    )
    return [set(itertools.product(*span)) for span in spans]


def counted(order, batch_size, cached_chunks):
    """Chunks fetched when `order` (sets of chunks, one a sample) is read through a cache that forgets the oldest."""
    cache, fetched = OrderedDict(), 0
    for start in range(0, len(order), batch_size):
        for chunk in sorted(set().union(*order[start : start + batch_size])):
            fetched += chunk not in cache
            cache[chunk] = None
            cache.move_to_end(chunk)
        while len(cache) > cached_chunks:
            cache.popitem(last=False)
    return fetched


@examples(150)
@given(st.lists(axis_strategy(most=9), min_size=1, max_size=3), st.integers(1, 12))
def test_runs_of_a_sequential_grid_touch_exactly_what_listing_them_touches(axes, samples):
    """The mean over where the first run begins, which is what the formula promises."""
    positions = chunks_of(axes)
    samples = min(samples, len(positions))
    total = 0
    for phase in range(samples):
        cuts = [0, *range(phase or samples, len(positions), samples), len(positions)]
        total += sum(len(set().union(*positions[a:b])) for a, b in itertools.pairwise(cuts))
    per_run = total / samples / len(positions) * samples
    everything = len(set().union(*positions))
    assert Sequential(tuple(axes)).distinct(samples) == pytest.approx(min(per_run, everything))


def test_a_sequential_batch_shares_more_than_a_shuffled_one():
    axes = axes_of((512, 512), (64, 64), (64, 64), (16, 16))
    assert Sequential(axes).distinct(16) < 0.35 * Shuffled(axes, replacement=False).distinct(16)


@pytest.mark.parametrize("cached", [5, 20, 45])
@pytest.mark.parametrize(("order", "shuffle"), [("random", True), ("grid", True)])
def test_a_cache_saves_what_a_simulated_cache_saves_within_its_bounds(cached, order, shuffle):
    axes = axes_of((60, 90), (8, 16), (8, 10), (2, 3) if order == "grid" else (1, 1))
    dice, positions, batch, epochs = random.Random(3), chunks_of(axes), 4, 12
    rows = []
    for _ in range(epochs):
        rows += dice.sample(positions, len(positions)) if order == "grid" else dice.choices(positions, k=600)
    batches = -(-len(rows) // batch)
    expected = fetches(reading_of(axes, order, shuffle), batch, batches, cached)
    measured = counted(rows, batch, cached) / batches
    assert expected.per_batch == pytest.approx(measured, rel=0.1)
    assert expected.least * 0.98 <= measured <= expected.most * 1.02
    assert expected.per_batch < 0.95 * fetches(reading_of(axes, order, shuffle), batch, batches, 0).per_batch


@examples(60)
@given(
    st.lists(axis_strategy(most=20), min_size=1, max_size=2), st.integers(1, 6), st.integers(1, 40), st.integers(0, 60)
)
def test_bounds_of_a_cache_are_in_order_and_a_larger_cache_never_fetches_more(axes, batch, batches, cached):
    reading = Shuffled(tuple(axes), replacement=True)
    small, large = fetches(reading, batch, batches, cached), fetches(reading, batch, batches, cached + 7)
    assert small.least <= small.per_batch <= small.most <= reading.distinct(batch) * (1 + 1e-9)
    assert large.per_batch <= small.per_batch * 1.03  # what a cache holds is found to within 2 %
    assert small.per_batch * batches >= reading.distinct(batch * batches) * (1 - 1e-9)


def test_a_cache_of_the_whole_array_fetches_each_chunk_once():
    axes = axes_of((80, 80), (8, 8), (8, 8), (1, 1))
    run = fetches(Shuffled(axes, replacement=True), 16, 4000, 100)
    assert run.per_batch * 4000 == pytest.approx(100)
    assert run.least == pytest.approx(run.most)


def test_without_a_cache_the_union_of_a_batch_is_exact():
    axes = axes_of((50, 50), (8, 8), (9, 9), (1, 1))
    run = fetches(Shuffled(axes, replacement=True), 16, 100, 0)
    assert run.least == run.per_batch == run.most


def test_long_edges_are_counted_in_steps_and_unions_stay_within_one_per_cent():
    axis = Axis(30_000, 10_000, 7)
    exact = [sum(o <= 7 * j + 6 and 7 * j <= o + 9999 for o in range(0, 20_001, 50)) / 401 for j in range(axis.chunks)]
    for samples in (1, 3, 20):
        union = Shuffled((axis,), replacement=True).distinct(samples)
        assert union == pytest.approx(sum(1 - (1 - p) ** samples for p in exact), rel=0.01)
    assert sum(axis.touches().values()) == axis.chunks
    assert axis.mean == sum((o + 9999) // 7 - o // 7 + 1 for o in range(20_001)) / 20_001


def fetched_and_lent(order, size, batches, kept_for):
    """Chunks of a long run where each stays until `kept_for` batches after the last that joined it on its way."""
    fetched, free_until, joinable_until = 0, {}, {}
    for number in range(len(order) // size):
        for chunk in set().union(*order[number * size : (number + 1) * size]):
            if number > free_until.get(chunk, -1):
                fetched += 1
                joinable_until[chunk], free_until[chunk] = number + batches, number + kept_for
            elif number <= joinable_until[chunk]:
                free_until[chunk] = number + kept_for
    return fetched


@pytest.mark.parametrize(("batches", "kept_for"), [(0, 1), (1, 2), (5, 6)])
def test_chunks_kept_until_a_batch_is_whole_are_fetched_as_seldom_as_a_simulation_fetches_them(batches, kept_for):
    axes = axes_of((96, 96), (8, 16), (8, 8), (1, 1))
    size, count = 16, 400
    order = random.Random(6).choices(chunks_of(axes), k=size * count)
    reading = Shuffled(tuple(axes), True)
    expected = reading.joining(size, batches, kept_for=kept_for)
    assert fetched_and_lent(order, size, batches, kept_for) / count == pytest.approx(expected, rel=0.04)
    assert expected < reading.joining(size, batches)


def fetched_while_on_their_way(order, batch_size, batches):
    """Chunks fetched when one that was is joined by so many batches after, and then forgotten."""
    fetched_at, fetched = {}, 0
    for number, start in enumerate(range(0, len(order), batch_size)):
        for chunk in set().union(*order[start : start + batch_size]):
            if number - fetched_at.get(chunk, -batches - 1) > batches:
                fetched_at[chunk] = number
                fetched += 1
    return fetched


@pytest.mark.parametrize("batches", [0, 1, 6])
def test_chunks_on_their_way_are_joined_as_a_simulation_joins_them(batches):
    axes = axes_of((96, 96), (8, 16), (8, 8), (1, 1))
    size, count = 16, 400
    order = random.Random(5).choices(chunks_of(axes), k=size * count)
    expected = Shuffled(tuple(axes), True).joining(size, batches)
    assert fetched_while_on_their_way(order, size, batches) / count == pytest.approx(expected, rel=0.04)


def test_a_grid_of_whole_chunks_joins_nothing():
    axes = axes_of((96, 96), (8, 8), (8, 8), (8, 8))
    assert Shuffled(tuple(axes), False).joining(16, 4) == pytest.approx(16)


def test_a_sequential_batch_finds_the_chunks_of_the_batch_before_on_their_way():
    axes = axes_of((64, 64), (16, 16), (4, 4), (4, 4))
    reading = Sequential(tuple(axes))
    assert reading.joining(16, 0) == pytest.approx(reading.distinct(16))
    assert reading.joining(16, 2) < reading.joining(16, 0)


@pytest.mark.parametrize("reading", [Shuffled, Sequential])
def test_a_chunk_that_every_batch_wants_is_fetched_anew_once_those_it_served_are_gone(reading):
    axes = (Axis(16, 4, 16, 4),)
    whole = reading(axes, False) if reading is Shuffled else reading(axes)
    assert whole.joining(2, 3) == pytest.approx(1 / 4)
