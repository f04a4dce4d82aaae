"""Tables of one's own rows: units by the end of a name, in text and in HTML."""

import math

import pytest

import kit
from kit.tables import html_table, html_warnings


@pytest.mark.parametrize(
    ("name", "value", "heading", "shown"),
    [
        ("read_bytes", 5 << 20, "read", "5 MiB"),
        ("bytes_per_sample", 5 << 20, "bytes per sample", "5 MiB"),
        ("sent_bytes_per_second", 2 << 20, "sent", "2 MiB/s"),
        ("took_seconds", 0.25, "took", "250 ms"),
        ("wait_fraction", 0.42, "wait", "42%"),
        ("samples_per_second", 123.456, "samples/s", "123"),
        ("requests", 12345, "requests", "12.3 k"),
        ("USD", 0.123456, "USD", "0.123"),
        ("ratio", 0.4449, "ratio", "0.44"),
        ("state", "built", "state", "built"),
        ("hits", None, "hits", "–"),
        ("ratio", math.nan, "ratio", "–"),
    ],
)
def test_the_end_of_a_name_is_its_unit(name, value, heading, shown):
    lines = str(kit.table({"row": {name: value}})).splitlines()
    assert lines[0].strip() == heading
    assert lines[1].split(maxsplit=1) == ["row", shown]


def test_columns_come_as_they_first_come_and_what_is_lacking_is_empty():
    found = kit.table({"a": {"x": 1}, "b": {"y": 2, "x": 3}}, "two rows")
    assert found.columns == ("x", "y")
    assert [line.split() for line in str(found).splitlines()] == [
        ["two", "rows"],
        ["x", "y"],
        ["a", "1", "–"],
        ["b", "3", "2"],
    ]


def test_html_is_escaped():
    page = kit.table({"<b>": {"x": "<script>"}}, "<i>")._repr_html_()
    assert "<b>" not in page
    assert "<script>" not in page
    assert "&lt;i&gt;" in page


def test_no_warnings_are_no_html_and_each_stands_alone():
    assert html_warnings([]) == ""
    assert html_warnings(["a & b", "c"]).count("<div") == 2
    assert "a &amp; b" in html_warnings(["a & b"])


def test_equal_neighbours_share_a_heading_and_an_empty_one_has_no_line():
    page = html_table(("a", "b", "c"), [("1", "2", "3")], groups=("", "time", "time"))
    assert page.count('scope="colgroup"') == 2
    assert 'colspan="2"' in page.partition("time")[0].rpartition("<th")[2]
    assert "colgroup" not in html_table(("a",), [("1",)])
