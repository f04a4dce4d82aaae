"""Block order: the definition simulated sample by sample, and the formulas against what it reads."""

import itertools
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st
from properties import examples

from kit.chunks.access import Blocks, fit_window, seen_fraction
from kit.chunks.geometry import Axis, axes_of


def visit(dice, blocks):
    """Offsets of one visit, drawn as the module says."""
    bounds = []
    for axis, side in zip(blocks.axes, blocks.sides, strict=True):
        anchor = dice.randrange(axis.positions) * axis.stride
        low, high = anchor // side * side, (anchor // side + 1) * side
        last = (axis.positions - 1) * axis.stride
        bounds.append([o for o in range(0, last + 1, axis.stride) if low <= o < high])
    return [tuple(dice.choice(inside) for inside in bounds) for _ in range(blocks.samples_per_block)]


def union(axes, offsets):
    chunks = set()
    for place in offsets:
        spans = (range(o // a.chunk, (o + a.size - 1) // a.chunk + 1) for o, a in zip(place, axes, strict=True))
        chunks |= set(itertools.product(*spans))
    return len(chunks)


CASES = {
    "chunk of the patch": Blocks(axes_of((90, 70), (8, 8), (8, 8), (1, 1)), (2, 1), 2.0),
    "small chunks, cut edges": Blocks(axes_of((61, 53), (4, 5), (9, 12), (1, 1)), (3, 2)),
    "strides": Blocks(axes_of((100, 80), (8, 8), (10, 6), (3, 5)), (2, 3), 1.5),
    "one position": Blocks(axes_of((9, 200), (4, 16), (9, 20), (1, 1)), (1, 2)),
}


@pytest.mark.parametrize("name", CASES)
def test_a_visit_reads_what_simulated_visits_read_and_no_more_than_its_footprint(name):
    blocks, dice = CASES[name], random.Random(11)
    counts = [union(blocks.axes, visit(dice, blocks)) for _ in range(3000)]
    assert blocks.chunks_per_visit == pytest.approx(sum(counts) / len(counts), rel=0.02)
    assert max(counts) <= blocks.footprint


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("visits", [2, 9])
def test_a_window_reads_what_simulated_windows_read_within_the_bounds(name, visits):
    blocks, dice = CASES[name], random.Random(5)
    counts = [union(blocks.axes, [o for _ in range(visits) for o in visit(dice, blocks)]) for _ in range(600)]
    mean = sum(counts) / len(counts)
    low, high = blocks.chunks_per_window(visits)
    assert low * 0.98 <= mean <= high * 1.02
    assert high == pytest.approx(mean, rel=0.12)


def test_samples_of_visits_are_uniform_over_all_positions():
    blocks, dice = Blocks((Axis(30, 5, 4),), (2,), 3.0), random.Random(2)
    counts = [0] * 26
    for _ in range(6000):
        for (offset,) in visit(dice, blocks):
            counts[offset] += 1
    mean = sum(counts) / len(counts)
    assert all(abs(count - mean) < 0.12 * mean for count in counts)


@examples(80)
@given(
    st.lists(
        st.tuples(st.integers(1, 60), st.integers(1, 60), st.integers(1, 20), st.integers(1, 5)), min_size=1, max_size=3
    ),
    st.integers(100, 200_000),
    st.integers(1, 20),
    st.integers(1, 5000),
)
def test_two_windows_fit_what_they_may_use_and_reading_is_bounded(sides, window_bytes, window_blocks, samples):
    axes = [Axis(extent, min(size, extent), chunk, stride) for extent, size, chunk, stride in sides]
    chunk_bytes = 4
    for axis in axes:
        chunk_bytes *= axis.chunk
    window = fit_window(
        axes, chunk_bytes, window_bytes=window_bytes, window_blocks=window_blocks, reuse=1.0, samples=samples
    )
    if window is None:
        smallest = Blocks(tuple(axes), (1,) * len(axes)).footprint
        assert 2 * smallest * chunk_bytes > window_bytes
        return
    assert window.window_bytes <= window_bytes
    assert 1 <= window.blocks <= window_blocks
    assert 0 < window.least_chunks_per_sample <= window.chunks_per_sample * (1 + 1e-9)
    assert 0 < window.mixing(16) <= 1
    everything = 1
    for axis in axes:
        everything *= axis.chunks
    assert window.chunks_per_sample * window.samples <= everything * (1 + 1e-9)


def test_more_memory_makes_larger_blocks_and_fewer_requests():
    axes = axes_of((5000, 5000), (64, 64), (64, 64), (1, 1))
    args = {"window_blocks": 32, "reuse": 1.0, "samples": 10**6}
    small, large = (fit_window(axes, 16384, window_bytes=size << 20, **args) for size in (16, 256))
    assert large.block > small.block
    assert large.chunks_per_sample < small.chunks_per_sample
    assert small.blocks == large.blocks == 32


def test_more_places_mix_better_and_pairs_of_one_visit_are_as_likely_as_said():
    axes = axes_of((5000, 5000), (64, 64), (64, 64), (1, 1))
    few, many = (
        fit_window(axes, 16384, window_bytes=256 << 20, window_blocks=blocks, reuse=1.0, samples=10**6)
        for blocks in (8, 64)
    )
    assert few.mixing(16) < many.mixing(16)
    dice, batch = random.Random(1), 16
    visits = [number for number in range(few.blocks) for _ in range(few.samples_per_block)]
    pairs = same = 0
    for _ in range(3000):
        drawn = dice.sample(visits, batch)
        for one, other in itertools.combinations(drawn, 2):
            pairs, same = pairs + 1, same + (one == other)
    assert few.mixing(batch) == pytest.approx(1 / (1 + (batch - 1) * same / pairs), rel=0.03)


@pytest.mark.parametrize(("reuse", "passes"), [(1.0, 1), (4.0, 1), (4.0, 6)])
def test_an_epoch_sees_as_much_of_the_array_as_said(reuse, passes):
    shape, patch = (480, 400), (16, 16)
    blocks, dice = Blocks(axes_of(shape, (32, 32), patch, (1, 1)), (2, 1), reuse), random.Random(7)
    visits = round(passes * 480 * 400 / 16**2 / blocks.samples_per_block)
    seen = set()
    for _ in range(visits):
        for y, x in visit(dice, blocks):
            seen.update(itertools.product(range(y, y + 16), range(x, x + 16)))
    samples = visits * blocks.samples_per_block
    told = seen_fraction(shape, patch, blocks.sides, blocks.samples_per_block, samples)
    assert told == pytest.approx(len(seen) / (480 * 400), abs=0.08)
