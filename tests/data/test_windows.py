"""Block order as it is defined: every sample once, uniform over all positions, and as mixed as it says."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from properties import examples

from kit.chunks.access import fit_window
from kit.chunks.geometry import axes_of
from kit.data.epochs import Windows, mixing, pairs_of_one_visit


def windows(**changes):
    fields = {
        "shape": (20, 60), "patch": (4, 6), "stride": (1, 1), "block": (8, 12), "samples_per_block": 5, "blocks": 4,
        "samples": 203, "world_size": 1, "seed": 3,
    }  # fmt: skip
    return Windows(**(fields | changes))


@st.composite
def cases(draw):
    ndim = draw(st.integers(1, 5))
    shape = [draw(st.integers(1, 12)) for _ in range(ndim)]
    return windows(
        shape=tuple(shape), patch=tuple(draw(st.integers(1, size)) for size in shape),
        stride=tuple(draw(st.integers(1, 4)) for _ in shape), block=tuple(draw(st.integers(1, 14)) for _ in shape),
        samples_per_block=draw(st.integers(1, 9)), blocks=draw(st.integers(1, 6)), samples=draw(st.integers(1, 120)),
        world_size=draw(st.integers(1, 5)), seed=draw(st.integers(0, 2**40)),
    )  # fmt: skip


def row(case, rank, epoch=0):
    return case.offsets(epoch, rank, range(len(case.run(rank))))


def whole(case, epoch=0):
    return np.concatenate([row(case, rank, epoch) for rank in range(case.world_size)])


@given(cases(), st.integers(0, 3))
@examples(150)
def test_every_sample_is_served_once_whatever_the_ranks(case, epoch):
    assume(case.samples >= case.world_size)
    alone, _ = case.draw(epoch, range(case.samples))
    assert sorted(map(tuple, whole(case, epoch).tolist())) == sorted(map(tuple, alone.tolist()))
    assert (alone >= 0).all()
    assert (alone + np.array(case.patch) <= np.array(case.shape)).all()
    assert (alone % np.array(case.stride) == 0).all()


@given(cases(), st.data())
def test_any_run_of_places_is_a_part_of_the_row(case, data):
    assume(case.samples >= case.world_size)
    rank = data.draw(st.integers(0, case.world_size - 1))
    size = len(case.run(rank))
    start = data.draw(st.integers(0, size - 1))
    places = range(start, data.draw(st.integers(start + 1, size)))
    assert np.array_equal(case.offsets(1, rank, places), row(case, rank, 1)[start : places.stop])
    held = case.window(rank, case.window_of(rank, start))
    assert held.start <= case.run(rank).start + start < held.stop


@given(cases())
@examples(80)
def test_the_samples_of_a_visit_lie_in_one_block(case):
    offsets, visits = case.draw(0, range(case.samples))
    blocks = offsets // np.array(case.block)
    for visit in np.unique(visits):
        assert len(np.unique(blocks[visits == visit], axis=0)) == 1
    assert np.array_equal(visits, np.arange(case.samples) // case.samples_per_block)


@given(cases())
@examples(50)
def test_a_window_mixes_no_more_visits_than_it_may(case):
    assume(case.samples >= case.world_size)
    for rank in range(case.world_size):
        size = len(case.run(rank))
        visits = case.visits(0, rank, range(size))
        for window in range(case.window_of(rank, size - 1) + 1):
            mine = [place for place in range(size) if case.window_of(rank, place) == window]
            assert len(np.unique(visits[mine])) <= case.blocks


def test_offsets_are_uniform_over_all_positions():
    case = windows(shape=(10,), patch=(3,), stride=(1,), block=(3,), samples_per_block=4, samples=50_000)
    counts = np.bincount(whole(case)[:, 0], minlength=8)
    # Samples of a visit are alike: the variance of a count is at most samples_per_block times that of free draws.
    deviation = np.sqrt(4 * 50_000 * (1 / 8) * (7 / 8))
    assert np.abs(counts - 6_250).max() < 5 * deviation


def test_epochs_ranks_and_seeds_differ_and_each_is_always_the_same():
    assert not np.array_equal(whole(windows()), whole(windows(), 1))
    assert not np.array_equal(whole(windows()), whole(windows(seed=4)))
    assert np.array_equal(whole(windows()), whole(windows()))
    assert row(windows(world_size=2), 1).shape == (102, 2)


def test_the_windows_of_a_seed_never_change():
    assert whole(windows())[:3].tolist() == GOLDEN


GOLDEN = [[10, 29], [8, 28], [2, 34]]


@given(st.lists(st.integers(0, 5), min_size=1, max_size=30))
def test_pairs_are_counted_as_by_hand(visits):
    pairs = [(a, b) for place, a in enumerate(visits) for b in visits[place + 1 :]]
    assert pairs_of_one_visit(np.array(visits)) == (sum(a == b for a, b in pairs), len(pairs))


@pytest.mark.parametrize(("same", "pairs", "expected"), [(0, 10, 1.0), (10, 10, 0.2), (0, 0, 1.0)])
def test_mixing_is_one_for_free_draws_and_one_sample_for_all_alike(same, pairs, expected):
    assert mixing(same, pairs, 5) == pytest.approx(expected)


def test_the_mixing_measured_is_the_one_foretold():
    case = windows(samples=20_000, samples_per_block=20, blocks=16)
    counted = np.zeros(2, int)
    for start in range(0, 20_000, 40):
        counted += pairs_of_one_visit(case.visits(0, 0, range(start, start + 40)))
    foretold = (20 - 1) / (16 * 20 - 1)
    assert counted[0] / counted[1] == pytest.approx(foretold, rel=0.05)


def test_the_short_last_window_of_an_epoch_is_counted_in_what_is_foretold():
    shape, patch, samples = (48, 180, 360), (2, 64, 64), 1024
    asked = {"window_bytes": 40 << 20, "window_blocks": 64, "reuse": 1.0}
    axes = axes_of(shape, (8, 180, 128), patch, (1, 1, 1))
    window = fit_window(axes, 8 * 180 * 128, samples=samples, **asked)
    assert 0 < samples % window.samples < samples
    case = Windows(
        shape=shape, patch=patch, stride=(1, 1, 1), block=window.block, samples_per_block=window.samples_per_block,
        blocks=window.blocks, samples=samples, world_size=1, seed=1,
    )  # fmt: skip
    counted = np.zeros(2, int)
    for epoch in range(8):
        for start in range(0, samples, 16):
            counted += pairs_of_one_visit(case.visits(epoch, 0, range(start, start + 16)))
    assert mixing(*counted, 16) == pytest.approx(window.mixing(16), rel=0.03)
    assert window.mixing(16) < 0.95 * fit_window(axes, 8 * 180 * 128, samples=100 * samples, **asked).mixing(16)
