"""Tables of one's own rows, with units by the end of a name, and the line that is shown while one waits."""

import contextlib
import io
import math
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest

import kit
from kit import tables
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


class Terminal(io.StringIO):
    def isatty(self):
        return True

    def __call__(self):
        """What was written since one looked last."""
        text = self.getvalue()
        self.seek(0)
        self.truncate()
        return text


@contextlib.contextmanager
def terminal(monkeypatch):
    """Somebody looks at standard error, and sees a line at once; another test may have left a shell of IPython."""
    monkeypatch.setattr(tables, "_SILENT_SECONDS", 0.0)
    monkeypatch.setattr(tables, "_SHOWN_SECONDS", 0.0)
    monkeypatch.delitem(sys.modules, "IPython", raising=False)
    with contextlib.redirect_stderr(Terminal()) as shown:
        yield shown


def test_a_line_in_another_is_told_as_a_part_of_it(monkeypatch):
    with terminal(monkeypatch) as shown:
        with tables.WaitingLine("4 at most") as outer:
            outer.show("1 of 4 runs")
            with tables.WaitingLine() as inner:
                inner.show("step 3 of 20")
                assert "1 of 4 runs: 0 µs so far, 4 at most; step 3 of 20" in shown()
            outer.show("2 of 4 runs")
            assert "step" not in shown()
        assert shown().endswith("2 of 4 runs: 0 µs\n")


def test_of_two_that_are_waited_for_at_once_the_second_is_shown_when_the_first_has_ended(monkeypatch):
    first, second = tables.WaitingLine(), tables.WaitingLine()
    with terminal(monkeypatch) as shown:
        first.__enter__()
        with second:
            first.show("one")
            second.show("two")
            assert "one: 0 µs so far; two" in shown()
            first.__exit__()
            second.show("two")
            assert "\x1b[Ktwo: 0 µs so far" in shown()
        with tables.WaitingLine() as line:
            line.show("the next")
            assert "\x1b[Kthe next: 0 µs so far" in shown()


def test_waiting_in_a_thread_says_nothing(monkeypatch):
    def wait():
        with tables.WaitingLine() as other:
            other.show("elsewhere")

    with terminal(monkeypatch) as shown:
        with tables.WaitingLine() as outer, ThreadPoolExecutor(1) as thread:
            thread.submit(wait).result()
            outer.show("here")
        said = shown()
    assert "here" in said
    assert "elsewhere" not in said


def test_an_error_ends_a_line(monkeypatch):
    with terminal(monkeypatch) as shown, contextlib.suppress(ValueError), tables.WaitingLine() as line:
        line.show("broken off")
        raise ValueError
    assert "broken off: 0 µs\n" in shown()
