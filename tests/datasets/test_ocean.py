"""The synthetic ocean: cut-independent, packed as it says, and like an ocean."""

import functools
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from properties import examples

from kit.config import Config
from kit.data.build.layout import plan_chunks
from kit.data.build.open_source import load_source
from kit.targets import load_target

RECIPE = Path(__file__).parents[2] / "datasets" / "ocean" / "recipe.yaml"
Ocean = load_target(f"{RECIPE.with_name('source.py')}:Ocean")
MISSING = -32768


@functools.cache
def small():
    return Ocean(time=6, lat=45, lon=90)


def everything():
    return tuple(slice(0, size) for size in small().shape)


@functools.cache
def whole():
    return {name: small().read(name, everything()) for name in small().variables}


def decoded(ocean, name, region):
    packed, spec = ocean.read(name, region), ocean.variables[name]
    return np.where(packed == MISSING, np.nan, packed * spec.scale_factor + spec.add_offset)


@st.composite
def regions(draw):
    bounds = [
        sorted(draw(st.lists(st.integers(0, size), min_size=2, max_size=2, unique=True))) for size in small().shape
    ]
    return tuple(slice(start, stop) for start, stop in bounds)


@examples(60)
@given(region=regions(), name=st.sampled_from(["sst", "u", "v"]))
def test_a_piece_read_alone_equals_the_same_piece_of_the_whole(region, name):
    block = small().read(name, region)
    assert block.dtype == np.int16
    np.testing.assert_array_equal(block, whole()[name][region])


def test_a_new_instance_gives_the_same_values_and_another_seed_another_planet():
    again, other = Ocean(time=6, lat=45, lon=90), Ocean(time=6, lat=45, lon=90, seed=3)
    np.testing.assert_array_equal(again.read("sst", everything()), whole()["sst"])
    assert (other.read("sst", everything()) != whole()["sst"]).mean() > 0.2


def test_a_finer_grid_is_the_same_planet():
    fine = Ocean(time=6, lat=135, lon=270)
    centres = fine.read("sst", (slice(0, 6), slice(0, 135), slice(0, 270)))[:, 1::3, 1::3]
    np.testing.assert_array_equal(centres == MISSING, whole()["sst"] == MISSING)
    assert np.abs(centres.astype(int) - whole()["sst"]).max() <= 1


def test_a_block_of_a_terabyte_is_read_alone():
    huge = Ocean(time=20_000, lat=8640, lon=17_280)
    assert np.prod(huge.shape) * 6 > 2**44
    block = huge.read("u", (slice(19_999, 20_000), slice(4000, 4064), slice(17_216, 17_280)))
    assert block.shape == (1, 64, 64)


def test_three_tenths_are_land_the_same_for_every_variable_and_time():
    land = whole()["sst"] == MISSING
    weight = np.cos(np.radians(small().coordinates["lat"]))[:, None] * np.ones(land.shape[1:])
    assert 0.26 < (land[0] * weight).sum() / weight.sum() < 0.34
    for values in whole().values():
        np.testing.assert_array_equal(values == MISSING, np.broadcast_to(land[0], land.shape))


def test_longitude_closes_and_the_south_pole_is_a_cap():
    ocean = Ocean(time=1, lat=180, lon=360)
    field = decoded(ocean, "sst", (slice(0, 1), slice(0, 180), slice(0, 360)))[0]
    step = np.abs(np.diff(field, axis=1))
    seam = np.abs(field[:, 0] - field[:, -1])
    assert np.nanmax(seam) < 2 * np.nanmax(step)
    assert np.isnan(field[:8]).all()


def test_temperatures_and_currents_are_those_of_an_ocean():
    ocean = Ocean(time=73, lat=60, lon=120)
    everything = tuple(slice(0, size) for size in ocean.shape)
    sst = decoded(ocean, "sst", everything)
    lat = ocean.coordinates["lat"]
    assert np.nanmin(sst) >= -1.81
    assert 27 < np.nanmax(sst) < 36
    assert np.nanmean(sst[:, np.abs(lat) < 10]) > np.nanmean(sst[:, np.abs(lat) > 50]) + 15
    north, south = (
        np.nanmean(sst[:, (lat > 30) & (lat < 50)], (1, 2)),
        np.nanmean(sst[:, (lat < -30) & (lat > -50)], (1, 2)),
    )
    assert np.corrcoef(north, south)[0, 1] < -0.9
    for name in ("u", "v"):
        current = decoded(ocean, name, everything)
        assert 0.5 < np.nanmax(np.abs(current)) < 3
        assert abs(np.nanmean(current)) < 0.1


def test_eddies_drift_westward():
    ocean = Ocean(time=2, lat=180, lon=720)
    row = int(np.argmin(np.abs(ocean.coordinates["lat"] + 12)))
    fields = np.nan_to_num(decoded(ocean, "v", (slice(0, 2), slice(row - 2, row + 3), slice(0, 720))))
    match = [float((fields[0] * np.roll(fields[1], shift, axis=-1)).sum()) for shift in range(-8, 9)]
    assert int(np.argmax(match)) - 8 > 0


def test_currents_slow_down_at_the_coast():
    ocean = Ocean(time=4, lat=180, lon=360)
    u, v = (decoded(ocean, name, (slice(0, 4), slice(30, 150), slice(0, 360))) for name in ("u", "v"))
    speed = np.hypot(u, v).mean(axis=0)
    sea = ~np.isnan(speed)
    beside_land = sea & (~np.roll(sea, 1, 1) | ~np.roll(sea, -1, 1))
    assert speed[beside_land].mean() < 0.6 * speed[sea].mean()


@pytest.mark.parametrize("name", ["time", "lat", "lon"])
def test_a_size_below_one_is_refused(name):
    with pytest.raises(ValueError, match=f"{name} is 0"):
        Ocean(**{name: 0})


def test_the_recipe_loads_plans_and_says_what_the_readme_says():
    config = Config.load(RECIPE)
    assert config.name == "ocean"
    source = load_source(config)
    assert source.shape == (48, 180, 360)
    assert plan_chunks(config).dims == ("time", "lat", "lon")
