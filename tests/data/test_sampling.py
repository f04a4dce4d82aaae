"""Which samples exist and which batch each belongs to: exactly once, equal steps, never empty, the same everywhere."""

from __future__ import annotations

import dataclasses
import re
import tracemalloc
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from properties import examples

from kit.config import Config
from kit.data import samples
from kit.data.places import bijection
from kit.data.samples import SamplePlan
from kit.data.sampling import plan_samples
from kit.errors import ConfigError

OCEAN = SimpleNamespace(name="temperature", dims=("time", "lat", "lon"), shape=(20, 30, 40))


def plan(**changes):
    fields = {
        "shape": (20, 30, 40), "patch": (2, 8, 8), "order": "random", "stride": (2, 8, 8), "samples_per_epoch": 100,
        "batch_size": 4, "world_size": 1, "seed": 13, "shuffle": True, "drop_last": False,
    }  # fmt: skip
    return SamplePlan(**(fields | changes))


def epoch_of(a_plan, epoch=0):
    """Per step, per rank: the offsets."""
    ranks, steps = range(a_plan.world_size), range(a_plan.batches_per_epoch)
    return [[a_plan.batch(epoch, step, rank) for rank in ranks] for step in steps]


@st.composite
def plans(draw):
    order = draw(st.sampled_from(["random", "grid"]))
    ndim = draw(st.integers(1, 5))
    shape = tuple(draw(st.lists(st.integers(1, 6), min_size=ndim, max_size=ndim)))
    patch = tuple(draw(st.integers(1, size)) for size in shape)
    stride = tuple(draw(st.integers(1, 4)) for _ in shape)
    fields = {
        "shape": shape, "patch": patch, "order": order, "stride": stride,
        "samples_per_epoch": draw(st.integers(1, 60)), "batch_size": draw(st.integers(1, 7)),
        "world_size": draw(st.integers(1, 5)), "seed": draw(st.integers(0, 2**32 - 1)),
        "shuffle": draw(st.booleans()), "drop_last": draw(st.booleans()),
    }  # fmt: skip
    try:
        return SamplePlan(**fields)
    except ConfigError as error:
        assume("does not fit" not in str(error))
        raise


@given(plans(), st.integers(0, 3))
@examples(150)
def test_every_sample_comes_exactly_once_in_batches_that_are_never_empty(a_plan, epoch):
    runs = [
        a_plan.positions(step, rank) for step in range(a_plan.batches_per_epoch) for rank in range(a_plan.world_size)
    ]
    delivered = [position for run in runs for position in run]
    whole = a_plan.samples - a_plan.samples % a_plan.global_batch_size if a_plan.drop_last else a_plan.samples
    assert delivered == list(range(whole))
    assert all(0 < len(run) <= a_plan.batch_size + 1 for run in runs)
    assert all(len(run) <= a_plan.batch_size for run in runs[: -a_plan.world_size])
    sizes = [len(batch) for step in epoch_of(a_plan, epoch) for batch in step]
    assert sizes == [len(run) for run in runs]


@given(plans(), st.integers(0, 3))
def test_offsets_are_valid_and_a_grid_epoch_visits_every_stride_th_one_once(a_plan, epoch):
    offsets = np.concatenate([batch for step in epoch_of(a_plan, epoch) for batch in step])
    assert (offsets >= 0).all()
    assert (offsets + np.array(a_plan.patch) <= np.array(a_plan.shape)).all()
    if a_plan.order == "grid" and not a_plan.drop_last:
        axes = [
            range(0, size - side + 1, step)
            for size, side, step in zip(a_plan.shape, a_plan.patch, a_plan.stride, strict=True)
        ]
        expected = np.stack(np.meshgrid(*axes, indexing="ij"), axis=-1).reshape(-1, len(axes))
        assert sorted(map(tuple, offsets.tolist())) == sorted(map(tuple, expected.tolist()))


@given(plans(), st.integers(1, 4))
def test_one_rank_with_twice_the_batch_sees_the_same_global_batches_as_two_ranks(a_plan, batch_size):
    assume(a_plan.samples >= 2 * batch_size)
    one = dataclasses.replace(a_plan, world_size=1, batch_size=2 * batch_size)
    two = dataclasses.replace(a_plan, world_size=2, batch_size=batch_size)
    split = [np.concatenate(step) for step in epoch_of(two, 1)]
    whole = [np.concatenate(step) for step in epoch_of(one, 1)]
    if a_plan.samples % (2 * batch_size) == 1 and not a_plan.drop_last:
        # one sample cannot be shared by two ranks: it joins the last batch
        whole[-2:] = [np.concatenate(whole[-2:])]
    assert len(split) == len(whole)
    assert all(np.array_equal(mine, theirs) for mine, theirs in zip(split, whole, strict=True))


@given(plans())
@examples(50)
def test_a_batch_is_a_function_of_seed_epoch_step_and_rank_alone(a_plan):
    again = dataclasses.replace(a_plan)
    last, rank = a_plan.batches_per_epoch - 1, a_plan.world_size - 1
    expected = a_plan.batch(3, last, rank)
    again.batch(1, 0, 0)
    assert np.array_equal(again.batch(3, last, rank), expected)


def test_the_batches_of_a_seed_never_change():
    assert plan().batch(0, 0, 0).tolist() == plan(batch_size=2).batch(0, 0, 0).tolist() + (
        plan(batch_size=2).batch(0, 1, 0).tolist()
    )
    assert plan().batch(2, 3, 0).tolist() == GOLDEN


GOLDEN = [[5, 11, 4], [10, 13, 2], [2, 13, 24], [9, 7, 15]]


def test_random_offsets_are_uniform_over_all_valid_offsets():
    a_plan = plan(shape=(5, 9), patch=(2, 4), stride=(1, 1), samples_per_epoch=48_000, batch_size=48_000)
    offsets = a_plan.batch(0, 0, 0)
    counts = np.bincount(np.ravel_multi_index(tuple(offsets.T), (4, 6)), minlength=24)
    expected = 48_000 / 24
    chi_squared = ((counts - expected) ** 2 / expected).sum()
    assert chi_squared < 60  # 23 degrees of freedom: above this once in 30,000 seeds


def test_epochs_differ_when_shuffled_and_agree_when_not():
    for order in ("random", "grid"):
        shuffled, still = plan(order=order), plan(order=order, shuffle=False)
        assert not np.array_equal(shuffled.batch(0, 0, 0), shuffled.batch(1, 0, 0))
        assert np.array_equal(still.batch(0, 0, 0), still.batch(1, 0, 0))


def test_seeds_give_different_samples():
    assert not np.array_equal(plan(seed=1).batch(0, 0, 0), plan(seed=2).batch(0, 0, 0))


def test_an_unshuffled_grid_runs_through_the_array_in_order():
    a_plan = plan(order="grid", shuffle=False, shape=(2, 4), patch=(1, 2), stride=(1, 2), batch_size=4)
    assert a_plan.batch(0, 0, 0).tolist() == [[0, 0], [0, 2], [1, 0], [1, 2]]


def test_an_epoch_of_a_hundred_million_samples_is_never_materialised():
    huge = {"shape": (1000, 1000, 1000), "patch": (1, 1, 1), "batch_size": 64}
    tracemalloc.start()
    for order in ("random", "grid"):
        a_plan = plan(order=order, stride=(2, 2, 2), samples_per_epoch=10**8, **huge)
        assert a_plan.samples >= 10**8
        batch = a_plan.batch(5, a_plan.batches_per_epoch - 1, 0)
        assert len(np.unique(batch, axis=0)) == len(batch)
    peak_bytes = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak_bytes < 16 << 20


@given(st.integers(1, 3000), st.integers(0, 2**128 - 1))
def test_the_bijection_is_one_to_one(size, key):
    image = bijection(size, key, np.arange(size))
    assert np.array_equal(np.sort(image), np.arange(size))


def test_a_long_grid_is_shuffled_by_the_bijection_and_still_visits_everything(monkeypatch):
    monkeypatch.setattr(samples, "LARGEST_PERMUTATION", 10)
    a_plan = plan(order="grid", stride=(1, 1, 1))
    offsets = np.concatenate([batch for step in epoch_of(a_plan) for batch in step])
    assert len(np.unique(offsets, axis=0)) == len(offsets) == a_plan.samples
    assert not np.array_equal(offsets, np.sort(offsets, axis=0))


def test_a_batch_past_the_end_is_refused():
    with pytest.raises(IndexError, match="step 25 of 25"):
        plan().batch(0, 25, 0)
    with pytest.raises(IndexError, match="rank 1 of 1"):
        plan().batch(0, 0, 1)


def config_with(**changes):
    return Config().replace({path.replace("__", "."): value for path, value in changes.items()})


def test_a_plan_follows_the_config():
    config = config_with(
        data__patch={"lat": 8, "lon": 4}, data__order="grid", data__stride={"lat": 2}, loader__batch_size=3
    )
    a_plan = plan_samples(config, OCEAN, 2)
    assert (a_plan.patch, a_plan.stride) == ((1, 8, 4), (1, 2, 4))
    assert (a_plan.samples, a_plan.global_batch_size) == (20 * 12 * 10, 6)


@pytest.mark.parametrize(
    ("changes", "path", "words"),
    [
        ({"data__patch": {"lat": 31}}, "data.patch", "31 .*'lat', .*temperature has 30"),
        ({"data__patch": {"latt": 8}}, "data.patch", r"did you mean 'lat'\?"),
        ({"loader__batch_size": 600}, "loader.batch_size", "batch .*not fit"),
        ({"loader__batch_size": 600}, "loader.batch_size", "use at most 512"),
        ({"loader__batch_size": 4, "data__samples_per_epoch": 1}, "loader.batch_size", "use at most 1 ranks"),
    ],
)
def test_what_does_not_fit_is_refused_under_the_path_of_its_field(changes, path, words):
    with pytest.raises(ConfigError) as caught:
        plan_samples(config_with(**changes), OCEAN, 2)
    assert [problem.path for problem in caught.value.problems] == [path]
    assert re.search(words, str(caught.value))


def test_every_dimension_at_fault_is_named_at_once():
    with pytest.raises(ConfigError) as caught:
        plan_samples(config_with(data__patch={"lat": 31, "lon": 41}), OCEAN, 1)
    assert len(caught.value.problems) == 2
