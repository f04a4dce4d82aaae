"""Rows as text: what is written reads back, in one order, and no cell of it is a formula."""

import csv
import io
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st
from made_runs import COMPLETE, make_run

from kit.json_text import write_whole
from kit.records.results import Results, as_csv, results
from kit.records.row import COLUMNS, MAPPINGS

PLAIN = [name for name in COLUMNS if name not in MAPPINGS]
EMPTY = {**dict.fromkeys(COLUMNS), "versions": {}, "config": {}}
values = st.one_of(
    st.none(), st.integers(), st.floats(allow_nan=False, allow_infinity=False),
    st.text(st.characters(exclude_categories=("Cs",), exclude_characters="\x00")),
)  # fmt: skip


def fed(text):
    """Line breaks as they are written."""
    return text.replace("\r\n", "\n").replace("\r", "\n")


@given(st.dictionaries(st.sampled_from(PLAIN), values))
def test_csv_reads_back_as_the_same_values(found):
    (row,) = csv.DictReader(io.StringIO(as_csv([{**EMPTY, **found}]), newline=""))
    assert list(row) == PLAIN
    for name, value in found.items():
        if isinstance(value, float):
            assert float(row[name]) == value
        elif isinstance(value, int):
            assert int(row[name]) == value
        else:
            assert row[name].removeprefix("'") == fed(value or "").removeprefix("'")


@given(st.sampled_from("=+-@\t\r\n"), st.text(st.characters(exclude_categories=("Cs",), exclude_characters="\x00")))
def test_no_text_begins_as_a_formula_does(first, rest):
    row = {**EMPTY, "message": first + rest, "config": {"data.source": first + rest}}
    (found,) = csv.DictReader(io.StringIO(as_csv([row]), newline=""))
    assert found["message"] == found["config.data.source"] == "'" + fed(first + rest)


def test_settings_off_their_default_and_versions_are_columns_in_one_order(tmp_path):
    make_run(tmp_path, {"loader.batch_size": 4}, end=COMPLETE)
    make_run(tmp_path, {"model.arguments": {"width": 8}}, end=COMPLETE)
    rows = [{**row, "versions": {"torch": "2.13", "kit": "0.1"}} for row in results(tmp_path)]
    text = as_csv(rows)
    heading = next(csv.reader(io.StringIO(text)))
    settings = ["loader.batch_size", "model.arguments", "trial.max_steps", "trial.warmup_steps"]
    assert heading[len(PLAIN) :] == ["version.kit", "version.torch", *(f"config.{path}" for path in settings)]
    by_batch = {row["config.loader.batch_size"]: row for row in csv.DictReader(io.StringIO(text))}
    assert by_batch["16"]["config.model.arguments"] == '{"width": 8}'
    assert as_csv(rows) == text


def test_units_are_in_the_names_of_columns():
    known = ("_bytes", "_per_second", "_fraction", "_ratio", "_predicted", "_measured", "_low", "_high")
    numbers = [name for name in PLAIN if "bytes" in name or "second" in name or "fraction" in name]
    assert all(name.endswith(known) or name == "bytes_read" for name in numbers)


def test_no_row_at_all_is_a_heading(tmp_path):
    assert as_csv([]).splitlines() == [",".join(PLAIN)]
    assert Results([]).to_json() == "[]\n"


def test_a_file_is_replaced_whole_or_not_at_all(tmp_path):
    file = tmp_path / "results.csv"
    with pytest.raises(OSError, match=r"no such folder.x\.txt'$"):
        write_whole(tmp_path / "no such folder" / "x.txt", "text")
    write_whole(file, "before")
    with pytest.raises(UnicodeEncodeError):
        write_whole(file, "\ud800")
    assert file.read_text() == "before"
    assert [path.name for path in tmp_path.iterdir()] == ["results.csv"]


def test_nothing_measured_is_an_empty_cell(tmp_path):
    make_run(tmp_path, steps=1, end=COMPLETE)
    (row,) = csv.DictReader(io.StringIO(results(tmp_path).to_csv()))
    assert row["samples_per_second"] == ""
    assert not math.isnan(float(row["host_rss_peak_bytes"]))
