"""The figures of `benchmarks/published.py`: each says where it stands, and a cheap one is predicted within its band."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from properties import nightly

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
ROWS = [json.loads(line) for line in (BENCHMARKS / "published.jsonl").read_text().splitlines()]
UNITS = {"bytes": 1, "MB": 10**6, "MiB": 2**20, "GB": 10**9, "GiB": 2**30}
TEXTS = ("source", "case", "repository", "path", "measure", "unit", "device", "torch")


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row["case"])
def test_a_row_says_where_its_figure_stands_and_what_it_counts(row: dict) -> None:
    assert all(isinstance(row[name], str) and row[name] for name in TEXTS)
    assert re.fullmatch("[0-9a-f]{40}", row["commit"])
    assert re.fullmatch(r"[\w.-]+/[\w.-]+", row["repository"])
    assert isinstance(row["held_out"], bool)
    assert {"family", "batch_size", "precision", "clears", "optimizer"} <= set(row["configuration"])
    if row["measure"] == "fits":
        ran, failed = row["figure"]
        assert row["unit"] == "samples"
        assert 0 < ran < failed
        assert ran == row["configuration"]["batch_size"]
    elif row["measure"] == "speed":
        assert re.fullmatch(r"\w[\w/ ]*", row["unit"])
        assert row["figure"] > 0
    else:
        assert row["measure"] in ("allocated", "reserved", "NVML")
        assert 2**30 < row["figure"] * UNITS[row["unit"]] < 2**37
        assert ("context_bytes" in row) == (row["measure"] == "NVML")


def test_there_are_many_and_no_case_twice() -> None:
    assert len(ROWS) >= 120
    assert len({row["case"] for row in ROWS}) == len(ROWS)


def test_rows_that_nothing_is_fitted_to_are_kept_apart() -> None:
    assert sum(row["held_out"] for row in ROWS) >= 40


def test_the_table_that_the_notebook_shows_is_the_one_recorded_last(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(BENCHMARKS)
    publish = pytest.importorskip("publish")
    recorded = [json.loads(line) for line in (BENCHMARKS / "results.jsonl").read_text().splitlines()]
    newest = {
        line["benchmark"]: line["rows"] for line in recorded if re.match("published b.*, in short", line["benchmark"])
    }
    assert len(newest) == 2
    shown = (BENCHMARKS.parent / "datasets" / "published" / "memory.txt").read_text()
    assert shown == publish.page(newest, shown.splitlines()[-1])


def test_a_cheap_row_is_predicted_within_its_band(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (row,) = (row for row in ROWS if "band" in row)
    answers = tmp_path / "answers.jsonl"
    if nightly():
        command = [sys.executable, str(BENCHMARKS / "published.py"), "--row", row["case"], "--measure", "memory"]
        subprocess.run([*command, "--answers", str(answers)], check=True)
    else:
        monkeypatch.syspath_prepend(str(BENCHMARKS))
        import published

        list(published.answers_of([row], answers))
    (found,) = map(json.loads, answers.read_text().splitlines())
    published_bytes = row["figure"] * UNITS[row["unit"]]
    assert found["reserved"] / published_bytes == pytest.approx(1, abs=row["band"])
