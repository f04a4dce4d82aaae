"""CF times become datetime64 where numpy has the calendar, and stay numbers where it has not."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from properties import examples
from xarray.coding.times import decode_cf_datetime

from kit.data.variables import decode_times


@given(
    numbers=st.lists(st.integers(-40_000, 40_000), min_size=1, max_size=5),
    unit=st.sampled_from(["days", "hours", "hour", "minutes", "seconds", "second"]),
    since=st.sampled_from(["1970-01-01", "1900-1-1 00:00:00", "2000-02-29T12:30:15", "1858-11-17 00:00:00.0"]),
    calendar=st.sampled_from(["standard", "gregorian", "proleptic_gregorian"]),
)
@examples(80)
def test_times_are_those_of_xarray(numbers, unit, since, calendar):
    units, values = f"{unit} since {since}", np.array(numbers)
    got = decode_times(values, {"units": units, "calendar": calendar})
    assert np.array_equal(got, decode_cf_datetime(values, units, calendar).astype("datetime64[us]"))


def test_parts_of_a_unit_and_missing_times_are_kept():
    got = decode_times(np.array([0.5, np.nan, 1.25]), {"units": "days since 2001-01-01"})
    assert got.astype(str).tolist() == ["2001-01-01T12:00:00.000000", "NaT", "2001-01-02T06:00:00.000000"]


@pytest.mark.parametrize(("short", "long"), [("h", "hours"), ("s", "seconds"), ("min", "minutes"), ("D", "days")])
def test_short_names_of_units_are_known(short, long):
    values = np.arange(3)
    pair = [decode_times(values, {"units": f"{unit} since 2001-01-01 UTC"}) for unit in (short, long)]
    assert np.array_equal(*pair)
    assert pair[0].dtype.kind == "M"


@pytest.mark.parametrize(
    "attributes",
    [
        {},
        {"units": "kelvin"},
        {"units": "days since whenever"},
        {"units": "days since 2001-02-30"},
        {"units": "fortnights since 2001-01-01"},
        {"units": "days since 2001-01-01", "calendar": "360_day"},
        {"units": "days since 1500-01-01"},
    ],
    ids=str,
)
def test_everything_else_stays_a_number(attributes):
    values = np.array([1, 2])
    assert decode_times(values, attributes) is values
