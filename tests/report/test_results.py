"""Rows of run directories: read from real files, complete for any state a run was left in, safe in a spreadsheet."""

import csv
import io
import json
import os

import pytest

from kit.config import Config
from kit.events import EventWriter
from kit.processes import identify, machine
from kit.report.results import COLUMNS, Results, results
from kit.run.control import Control
from kit.run.paths import RunPaths

PHASES = ("wait", "transfer", "forward", "backward", "optimizer", "other")


def make_run(folder, changes=None, steps=6, end=None, counters=None, device=False, predicted=None):
    config = Config().replace(
        {"trial.max_steps": 6, "trial.warmup_steps": 2, "trial.folder": str(folder), **(changes or {})}
    )
    paths = RunPaths.create(config)
    paths.config.write_text(config.to_yaml())
    environment = {"world_size": 1, "accelerator": "cpu", "precision": "32-true", "machine": machine()}
    environment["predicted"] = predicted or {}
    paths.environment.write_text(json.dumps({**environment, "supervisor": identify(os.getpid())}))
    Control.create(paths.control)
    rank, supervisor = EventWriter(paths.events(0), 0), EventWriter(paths.supervisor_events, -1)
    supervisor.write("trial_started", processes=[identify(os.getpid())])
    rank.write("fit_started", strategy="auto", accelerator="cpu", precision="32-true", world_size=1, max_steps=6)
    seconds = {f"{phase}_seconds": 0.1 for phase in PHASES}
    memory = {"device_allocated_bytes": 1 << 31, "device_reserved_bytes": 1 << 32} if device else {}
    for step in range(1, steps + 1):
        rank.write("step", step=step, samples=12, step_seconds=0.6, host_rss_bytes=step << 20, **seconds, **memory)
    if counters is not None:
        rank.write("fit_ended", steps=steps, counters=counters, peak_host_rss_bytes=1 << 30)
    if end is not None:
        supervisor.write("trial_ended", **{"cause": None, "message": "", **end})
    rank.close()
    supervisor.close()
    return paths


COMPLETE = {"state": "COMPLETE", "message": "6 steps"}


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
    assert "out of memory at step 4" in repr(found)
    assert "out of memory at step 4" in found._repr_html_()


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
