"""Training, validation and test: no patch of one reaches another, whatever the split, the order and the guard."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from properties import examples

from kit.config import Config
from kit.data.places import Places
from kit.data.sampling import plan_samples
from kit.data.splits import PARTS, split_of
from kit.errors import ConfigError

ARRAY = SimpleNamespace(
    name="field", dims=("time", "lat", "lon"), shape=(40, 30, 36), chunk=(5, 10, 12), chunk_bytes=2400,
    together=(),
)  # fmt: skip
BASE = {
    "data.validation_fraction": 0.2, "data.test_fraction": 0.2, "data.patch": {"time": 2, "lat": 4, "lon": 4},
    "data.samples_per_epoch": 60, "loader.batch_size": 4,
}  # fmt: skip


def config_with(**changes):
    return Config().replace(BASE | {path.replace("__", "."): value for path, value in changes.items()})


def parts_of(split):
    """The number of the part of each element."""
    found = np.zeros(ARRAY.shape, np.int8)
    for index in np.ndindex(*split.regions.shape):
        where = tuple(slice(starts[at], starts[at + 1]) for starts, at in zip(split.borders, index, strict=True))
        found[where] = split.regions[index]
    return found


def epoch_of(plan):
    steps, ranks = range(plan.batches_per_epoch), range(plan.world_size)
    return np.concatenate([plan.batch(0, step, rank) for step in steps for rank in ranks])


@pytest.mark.parametrize("order", ["random", "grid", "block"])
@pytest.mark.parametrize("region", [{}, {"time": 8}, {"lat": 9, "lon": 13}, {"time": 10, "lat": 15, "lon": 18}])
def test_every_patch_lies_within_its_part(order, region):
    config = config_with(
        data__split="regions", data__split_region=region, data__order=order, data__guard={"lat": 2},
        data__stride={"time": 1, "lat": 2, "lon": 3} if order == "grid" else {},
    )  # fmt: skip
    split = split_of(config, ARRAY)
    parts, plan = parts_of(split), plan_samples(config, ARRAY, 2)
    offsets = epoch_of(plan)
    for first in offsets:
        lat = slice(max(0, first[1] - 1), first[1] + 5)  # half of the guard on each side
        assert (parts[first[0] : first[0] + 2, lat, first[2] : first[2] + 4] == PARTS.index("train")).all()
    if order == "grid":
        assert len(np.unique(offsets, axis=0)) == len(offsets) == plan.samples


@given(st.integers(0, 99), st.integers(1, 5), st.sampled_from(["end", "regions"]), st.integers(3, 12), st.data())
@examples(60)
def test_patches_of_different_parts_are_a_guard_apart(seed, guard, way, side, data):
    axis = data.draw(st.integers(0, 2))
    name = ARRAY.dims[axis]
    config = config_with(
        data__split=way, data__split_seed=seed, data__guard={name: guard}, data__validation_dimension=name,
        data__patch={name: 2}, data__split_region={name: side},
    )  # fmt: skip
    try:
        split = split_of(config, ARRAY)
        spans = {}
        for part in PARTS:
            (origin, shape), patch = split.extent(part), tuple(2 if one == axis else 1 for one in range(3))
            places = split.allowed(part, patch, (1, 1, 1))
            first, size = origin[axis], shape[axis]
            spans[part] = set(range(first, first + size - 1))
            if places is not None:
                found = places.at(np.arange(places.count))[:, axis]
                spans[part] = set(found.tolist())
    except ConfigError as error:
        assume(not any(words in str(error) for words in ("no patch fits", "hold a patch", "cannot be divided")))
        raise
    for part, places in spans.items():
        for other, theirs in spans.items():
            between = min((abs(a - b) for a in places for b in theirs), default=99)
            assert part == other or between >= 2 + guard


def test_regions_are_drawn_by_their_own_seed_and_told():
    config = config_with(data__split="regions", data__split_region={"lat": 10, "lon": 12})
    one, other = split_of(config, ARRAY), split_of(config.replace({"training.seed": 99}), ARRAY)
    assert np.array_equal(one.regions, other.regions)
    assert not np.array_equal(one.regions, split_of(config.replace({"data.split_seed": 1}), ARRAY).regions)
    assert one.sentence == (
        "9 regions of lat 10 × lon 12, drawn: training 56%, validation 22%, test 22%; cut at borders of chunks"
    )
    assert one.figure().axes


def test_three_parts_follow_one_another_in_time():
    split = split_of(config_with(data__guard={"time": 3}), ARRAY)
    assert [(split.extent(part)[0][0], split.extent(part)[1][0]) for part in PARTS] == [(0, 25), (28, 4), (35, 5)]
    assert "time 28 to 31 of 40, 10%" in split.sentence
    assert split.figure().axes
    none = split_of(config_with(data__guard={"time": 0, "lat": 0}), ARRAY)
    assert none.guard == split_of(config_with(), ARRAY).guard


@pytest.mark.parametrize("chunk", [5, 20, 40])
@pytest.mark.parametrize(("validation", "test"), [(0.2, 0.0), (0.2, 0.1), (0.1, 0.1), (0.3, 0.3)])
def test_parts_are_of_the_size_asked_for_whatever_the_chunks(chunk, validation, test):
    array = SimpleNamespace(**{**vars(ARRAY), "shape": (200, 30, 36), "chunk": (chunk, 10, 12)})
    split = split_of(config_with(data__validation_fraction=validation, data__test_fraction=test), array)
    asked = {"train": 1 - validation - test, "validation": validation, "test": test}
    for part, share in split.fractions.items():
        assert share == pytest.approx(asked[part], rel=0.45, abs=1e-9)  # a fifth of the smaller part at either end
    borders = split.borders[0][1:-1]
    assert ("inside a chunk" in split.sentence) == bool((borders % chunk).any())
    assert f"{split.fractions['validation']:.0%}" in split.sentence


@pytest.mark.parametrize("way", ["end", "regions"])
def test_what_a_guard_leaves_out_is_in_no_part(way):
    free, guarded = (
        split_of(config_with(data__split=way, data__guard=guard), ARRAY).fractions
        for guard in ({}, {"time": 3, "lat": 3})
    )
    assert sum(free.values()) == pytest.approx(1)
    assert sum(guarded.values()) < 0.95
    assert all(0 < guarded[part] < free[part] for part in ("validation", "test"))


@pytest.mark.parametrize(
    ("changes", "path"),
    [
        ({"data__test_fraction": 0.9}, "data.test_fraction"),
        ({"data__guard": {"height": 1}}, "data.guard"),
        ({"data__split": "regions", "data__split_region": {"depth": 3}}, "data.split_region"),
        ({"data__split": "regions", "data__guard": {"time": 80, "lat": 60, "lon": 72}}, "data.split_region"),
        ({"data__split": "regions", "data__split_region": {"lat": 30}}, "data.split_region"),
    ],
)
def test_a_split_that_cannot_be_is_refused_by_its_field(changes, path):
    with pytest.raises(ConfigError) as caught:
        plan_samples(config_with(**changes), ARRAY, 1)
    assert caught.value.problems[0].path == path


@given(st.integers(1, 4), st.integers(0, 1000))
@examples(40)
def test_places_number_each_position_once_and_draw_none_of_weight_zero(dims, seed):
    generator = np.random.default_rng(seed)
    starts = tuple(np.cumsum([0, *generator.integers(1, 4, size=3)]) for _ in range(dims))
    weights = generator.integers(0, 3, size=(3,) * dims).astype(float)
    weights.reshape(-1)[0] = 1.0
    places = Places(starts, weights)
    whole = places.at(np.arange(places.count))
    assert len(np.unique(whole, axis=0)) == places.count
    cells = [np.searchsorted(begins, whole[:, axis], "right") - 1 for axis, begins in enumerate(starts)]
    assert (weights[tuple(cells)] > 0).all()
    drawn = places.draw(generator.integers(0, 2**64, size=(500, 1 + dims), dtype=np.uint64))
    assert {tuple(row) for row in drawn.tolist()} <= {tuple(row) for row in whole.tolist()}


def test_places_are_drawn_in_proportion_to_their_weight():
    places = Places((np.array([0, 4, 6, 10]),), np.array([1.0, 3.0, 0.0]))
    drawn = places.draw(np.random.default_rng(1).integers(0, 2**64, size=(20_000, 2), dtype=np.uint64))[:, 0]
    counts = np.bincount(drawn, minlength=10) / 20_000
    assert counts[:4] == pytest.approx([0.1] * 4, abs=0.01)
    assert counts[4:6] == pytest.approx([0.3] * 2, abs=0.015)
    assert not counts[6:].any()
