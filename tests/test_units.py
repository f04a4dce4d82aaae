"""Units: what people write and what people read."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kit.units import format_bytes, format_count, format_price, format_seconds, parse_bytes, plural


@pytest.mark.parametrize(
    ("text", "number_of_bytes"),
    [("64 MiB", 64 << 20), ("5 GB", 5 * 10**9), ("512", 512), ("1.5kib", 1536), (7, 7), ("0 B", 0), (4e9, 4 * 10**9)],
)
def test_sizes_are_parsed_as_written(text, number_of_bytes):
    assert parse_bytes(text) == number_of_bytes


@pytest.mark.parametrize("text", ["", "GiB", "-3 MiB", "5 parsecs", "1e3", True, None, 2.5, -1, float("nan")])
def test_what_is_no_size_is_refused_with_the_units(text):
    with pytest.raises(ValueError, match="MiB"):
        parse_bytes(text)


@given(st.integers(0, 1 << 59))
def test_a_formatted_size_reads_back_within_its_three_digits(number_of_bytes):
    assert parse_bytes(format_bytes(number_of_bytes)) == pytest.approx(number_of_bytes, rel=0.005, abs=0.5)


@given(st.integers(0, 1 << 59))
def test_a_size_written_rounded_up_is_enough_when_it_is_read_back(number_of_bytes):
    assert number_of_bytes <= parse_bytes(format_bytes(number_of_bytes, up=True)) <= 1.01 * number_of_bytes + 1


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0, "0 µs"), (0.00123, "1.23 ms"), (12.345, "12.3 s"), (75, "1 min 15 s"), (59.9, "1 min"), (4000, "1 h 7 min")],
)
def test_durations_read_as_people_say_them(seconds, text):
    assert format_seconds(seconds) == text


@pytest.mark.parametrize(
    ("count", "text"), [(9999, "9999"), (0.5, "0.5"), (1234567, "1.23 M"), (3e12, "3 T"), (1718.2, "1720")]
)
def test_counts_are_short(count, text):
    assert format_count(count) == text


@pytest.mark.parametrize(
    ("amount", "text"), [(7.68e-5, "0.0000768"), (0, "0"), (0.12, "0.12"), (99.95, "100"), (1234.5, "1,230")]
)
def test_prices_are_written_out(amount, text):
    assert format_price(amount) == text


def test_one_of_a_thing_has_no_s():
    assert [plural(count, "result") for count in (0, 1, 1.0, 2, 3.94)] == [
        "0 results", "1 result", "1 result", "2 results", "3.94 results",
    ]  # fmt: skip


@pytest.mark.parametrize("formatter", [format_bytes, format_seconds, format_count, format_price])
def test_what_is_not_finite_is_said_so(formatter):
    assert formatter(float("nan")) == "nan"
    assert formatter(float("inf")) == "inf"
