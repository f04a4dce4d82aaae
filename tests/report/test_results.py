"""Rows of run directories: read from real files, complete for any state a run was left in, safe in a spreadsheet."""

import csv
import io
import json
import os
import re

import pytest
from made_runs import COMPLETE, make_run

from kit.errors import ConfigError
from kit.events import EventWriter
from kit.records.results import MOST_ROWS, Results, results
from kit.records.row import COLUMNS
from kit.trial.directory import RunPaths


def test_a_complete_run_is_one_row_of_measurements(tmp_path):
    make_run(tmp_path, end=COMPLETE, counters={"samples": 72, "requests": 144, "bytes_read": 7200, "retries": 3})
    (row,) = results(tmp_path)
    assert tuple(row) == COLUMNS
    assert (row["requests"], row["retries"], row["bytes_read"], row["cache_hits"]) == (144, 3, 7200, None)
    assert (row["state"], row["steps"], row["batch_size"], row["global_batch_size"]) == ("COMPLETE", 6, 16, 16)
    assert row["samples_per_second"] == pytest.approx(20)
    assert row["data_wait_fraction"] == pytest.approx(1 / 6)
    assert row["host_rss_peak_bytes"] == 1 << 30
    assert row["device_allocated_peak_bytes"] is None
    assert (row["requests_per_sample_measured"], row["bytes_per_sample_measured"]) == (2, 100)


def test_newest_comes_first_and_a_slice_is_still_results(tmp_path):
    made = [make_run(tmp_path, {"name": name}, end=COMPLETE) for name in ("first", "second")]
    for age, paths in enumerate(made):
        os.utime(paths.marker, (1000 + age, 1000 + age))
    found = results(tmp_path)
    assert [row["name"] for row in found] == ["second", "first"]
    assert isinstance(found[:1], Results)
    assert [row["name"] for row in found[1:]] == ["first"]


def test_a_failed_run_keeps_its_cause_and_what_it_measured(tmp_path):
    make_run(tmp_path, steps=3, end={"state": "FAILED", "cause": "device_oom", "message": "out of memory at step 4"})
    found = results(tmp_path)
    assert (found[0]["state"], found[0]["cause"], found[0]["steps"]) == ("FAILED", "device_oom", 3)
    assert "failed (device_oom)" in repr(found)
    assert re.search("out of memory .*step 4", repr(found))
    assert re.search("out of memory .*step 4", found._repr_html_())


def test_a_run_with_no_step_after_warmup_has_no_throughput(tmp_path):
    make_run(tmp_path, steps=2, end={"state": "STOPPED", "message": "stopped"})
    assert results(tmp_path)[0]["samples_per_second"] is None


def test_device_peaks_are_shown_only_when_there_are_devices(tmp_path):
    make_run(tmp_path, end=COMPLETE)
    assert "device" not in repr(results(tmp_path)).splitlines()[0].split()
    make_run(tmp_path, {"name": "gpu"}, end=COMPLETE, device=True)
    assert "device" in repr(results(tmp_path)).splitlines()[0].split()
    assert results(tmp_path)._repr_html_().count(">peak<") == 1
    assert {row["device_reserved_peak_bytes"] for row in results(tmp_path)} == {None, 1 << 32}


def test_a_damaged_run_is_a_row_that_says_so(tmp_path):
    broken = make_run(tmp_path, end=COMPLETE)
    make_run(tmp_path, {"name": "fine"}, end=COMPLETE)
    broken.config.write_text("name: [")
    states = {row["name"]: row["state"] for row in results(tmp_path)}
    assert states == {None: "UNREADABLE", "fine": "COMPLETE"}


def test_a_pickle_in_a_run_directory_is_never_opened(tmp_path):
    paths = make_run(tmp_path, end=COMPLETE)
    paths.payload.write_bytes(b"cos\nsystem\n(S'touch " + str(tmp_path / "pwned").encode() + b"'\ntR.")
    assert len(results(tmp_path)) == 1
    assert not (tmp_path / "pwned").exists()


def test_an_empty_folder_says_how_to_make_a_trial(tmp_path):
    found = results(tmp_path / "none")
    assert len(found) == 0
    assert "kit.fit(config)" in repr(found)
    assert "kit.fit(config)" in found._repr_html_()


def test_csv_reads_back_and_cannot_hold_a_formula(tmp_path):
    make_run(tmp_path, end={"state": "FAILED", "cause": "error", "message": "=cmd|' /C calc'!A0"})
    text = results(tmp_path).to_csv(tmp_path / "results.csv")
    assert (tmp_path / "results.csv").read_text() == text
    (row,) = csv.DictReader(io.StringIO(text))
    assert row["message"].startswith("'=")
    assert float(row["samples_per_second"]) == pytest.approx(20)


def test_json_reads_back_as_the_same_rows(tmp_path):
    make_run(tmp_path, end=COMPLETE)
    found = results(tmp_path)
    assert json.loads(found.to_json()) == list(found)


def test_markdown_escapes_what_would_break_its_table(tmp_path):
    make_run(tmp_path, end=COMPLETE)
    row = {**results(tmp_path)[0], "run": "a|b<c>"}
    lines = Results([row]).to_markdown().splitlines()
    assert r"a\|b&lt;c>" in lines[2]
    assert len({line.count(" | ") for line in lines}) == 1


def test_html_escapes_what_a_run_says(tmp_path):
    make_run(tmp_path, end={"state": "FAILED", "cause": "error", "message": "<script>alert(1)</script>"})
    assert "<script>" not in results(tmp_path)._repr_html_()


def test_the_ratio_is_measured_over_predicted(tmp_path):
    counters = {"samples": 10, "requests": 40, "bytes_read": 1}
    make_run(tmp_path, end=COMPLETE, counters=counters, predicted={"requests_per_sample": 2.0})
    (row,) = results(tmp_path)
    assert row["requests_per_sample_ratio"] == pytest.approx(2)
    assert row["bytes_per_sample_predicted"] is None
    assert "2.00" in repr(results(tmp_path))


def test_a_prediction_that_was_not_measured_has_no_ratio(tmp_path):
    make_run(tmp_path, end=COMPLETE, counters={}, predicted={"requests_per_sample": 2.0})
    (row,) = results(tmp_path)
    assert (row["requests_per_sample_predicted"], row["requests_per_sample_ratio"]) == (2.0, None)


def test_memory_stands_as_predicted_measured_and_ratio(tmp_path):
    paths = make_run(tmp_path, end=COMPLETE)
    estimate = {"device_allocated_bytes": 1000, "device_reserved_bytes": 2000, "complete": True}
    paths.write_prediction(estimate)
    writer = EventWriter(paths.events(1), 1)
    writer.write("memory_measured", device_allocated_bytes=1100, device_reserved_bytes=1900, outside_bytes=None)
    writer.close()
    found = results(tmp_path)
    row = found[0]
    assert [row[f"device_allocated_bytes_{part}"] for part in ("predicted", "measured", "ratio")] == [1000, 1100, 1.1]
    assert [row[f"device_reserved_bytes_{part}"] for part in ("predicted", "measured", "ratio")] == [2000, 1900, 0.95]
    assert "device allocated predicted" in repr(found)
    paths.write_prediction({**estimate, "complete": False})
    lower_bound = results(tmp_path)[0]
    assert (lower_bound["device_allocated_bytes_predicted"], lower_bound["device_allocated_bytes_ratio"]) == (
        1000,
        None,
    )


def test_on_a_cpu_reserved_bytes_that_nothing_measures_are_not_shown_and_predictions_have_a_table_of_their_own(
    tmp_path,
):
    paths = make_run(tmp_path, end=COMPLETE)
    paths.write_prediction({"device_allocated_bytes": 1000, "device_reserved_bytes": 2000, "complete": True})
    found = results(tmp_path)
    assert found[0]["device_reserved_bytes_predicted"] == 2000
    assert "device reserved" not in repr(found)
    assert "device allocated" in repr(found)
    tables = found._repr_html_().split("<table")[1:]
    assert ["predicted" in table for table in tables] == [False, True]
    assert all(found[0]["run"].rpartition("-")[0] in table for table in tables)


def test_rows_are_chosen_by_columns_by_settings_and_by_conditions(tmp_path):
    for name, batch in (("small", 8), ("large", 32)):
        make_run(tmp_path, {"name": name, "loader.batch_size": batch}, end=COMPLETE)
    make_run(tmp_path, {"name": "failed"}, end={"state": "FAILED", "cause": "error", "message": "no"})
    found = results(tmp_path)
    assert [row["name"] for row in found.where(state="FAILED")] == ["failed"]
    assert [row["name"] for row in found.where(**{"loader.batch_size": 32})] == ["large"]
    assert [row["name"] for row in found.where(lambda row: row["batch_size"] < 10, state="COMPLETE")] == ["small"]
    assert isinstance(found.where(state="LOST"), Results)
    assert found.best("batch_size")["name"] == "large"
    assert found.best("batch_size", lowest=True)["name"] == "small"


def test_an_unknown_name_is_answered_with_the_one_that_was_meant(tmp_path):
    make_run(tmp_path, end=COMPLETE)
    with pytest.raises(ConfigError, match="did you mean 'samples_per_second'"):
        results(tmp_path).best("sample_per_second")
    with pytest.raises(ConfigError, match="did you mean 'loader.batch_size'"):
        results(tmp_path).where(**{"loader.batchsize": 1})
    with pytest.raises(ConfigError, match="none of 1 rows"):
        results(tmp_path).best("device_memory_bytes")


def test_of_very_many_rows_the_first_are_shown_and_markdown_has_them_all(tmp_path):
    make_run(tmp_path, end=COMPLETE)
    many = Results(list(results(tmp_path)) * (MOST_ROWS + 7))
    assert "7 more" in repr(many)
    assert "7 more" in many._repr_html_()
    assert len(repr(many).splitlines()) == MOST_ROWS + 2
    assert len(many.to_markdown().splitlines()) == MOST_ROWS + 7 + 2


def test_no_secret_is_in_a_row(tmp_path):
    asked = {
        "data.url": "https://host/data.zarr",
        "data.arguments": {"token": "hunter2", "inner": [{"API_KEY": "hunter2"}], "tokens": 3, "key": "sst"},
    }
    make_run(tmp_path, asked, end={"state": "FAILED", "cause": "data", "message": "no s3://a:hunter2@b/c?X=hunter2"})
    found = results(tmp_path)
    assert "hunter2" not in found.to_json() + found.to_csv() + found.to_markdown() + found._repr_html_()
    assert "hunter2" not in (RunPaths.open(found[0]["run_directory"]).row).read_text()
    assert found[0]["config"]["data.url"] == "https://host/data.zarr"
    assert found[0]["config"]["data.arguments"]["tokens"] == 3
    assert found[0]["config"]["data.arguments"]["key"] == "sst"
    assert found[0]["message"] == "no s3://b/c"
