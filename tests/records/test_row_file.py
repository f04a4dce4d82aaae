"""Rows kept in run directories: the same as computed, never older than their files, and there whatever else is lost."""

import json
import shutil
import threading

import pytest
from made_runs import COMPLETE, make_run

import kit
from kit.events import EventWriter
from kit.records.results import results
from kit.records.row import COLUMNS, read_row, row_of
from kit.testing import TinyData, TinyModule
from kit.trial.directory import RunPaths

FAILED = {"state": "FAILED", "cause": "device_oom", "message": "out of memory at step 4"}
RUNS = {
    "complete": {"end": COMPLETE},
    "read": {"end": COMPLETE, "counters": {"samples": 72, "requests": 144, "bytes_read": 7200}},
    "predicted": {"end": COMPLETE, "counters": {"samples": 10, "requests": 1}, "predicted": {"requests_per_sample": 2}},
    "device": {"end": COMPLETE, "device": True},
    "failed": {"end": FAILED, "steps": 3},
    "too short": {"end": {"state": "STOPPED", "message": "stopped"}, "steps": 1},
    "without a step": {"end": {"state": "LOST", "message": "the kernel went away"}, "steps": 0},
}


@pytest.mark.parametrize("kind", RUNS)
def test_a_kept_row_is_the_computed_one(tmp_path, kind):
    paths = make_run(tmp_path, {"model.arguments": {"width": 8}}, **RUNS[kind])
    computed = row_of(paths)
    assert read_row(paths).row == computed
    assert row_of(paths) == computed
    assert tuple(computed) == COLUMNS
    assert computed["config"]["model.arguments"] == {"width": 8}


def test_a_kept_row_is_read_and_nothing_else(tmp_path, monkeypatch):
    paths = make_run(tmp_path, end=COMPLETE)
    row = row_of(paths)
    monkeypatch.setattr("kit.records.row.Trial.open", lambda directory: pytest.fail("opened again"))
    assert row_of(paths) == row


def test_the_row_of_a_trial_is_in_its_directory_when_it_has_ended(config):
    trial = kit.fit(config(), TinyModule, TinyData).wait()
    kept = json.loads(trial.paths.row.read_text())["row"]
    (row,) = kit.results(config().trial.folder)
    assert kept == row
    assert (row["state"], row["steps"]) == ("COMPLETE", 8)
    assert (row["module"], row["data"]) == ("kit.testing:TinyModule", "kit.testing:TinyData")
    assert row["device"] == "CPU"
    assert all(row[name] for name in ("cpu", "cores", "host_memory_bytes", "host", "platform"))
    assert row["versions"].keys() >= {"kit", "python", "torch", "lightning"}
    assert row["config"]["trial.max_steps"] == 8
    assert [path.name for path in trial.run_directory.iterdir() if path.name.endswith(".tmp")] == []


def test_a_trial_that_nobody_saw_ending_has_its_row_computed_and_kept(tmp_path):
    paths = make_run(tmp_path, end=COMPLETE)
    assert not paths.row.exists()
    assert results(tmp_path)[0]["steps"] == 6
    assert paths.row.exists()


def test_a_running_trial_is_never_out_of_date(tmp_path):
    paths = make_run(tmp_path, steps=3)
    assert (results(tmp_path)[0]["state"], results(tmp_path)[0]["steps"]) == ("RUNNING", 3)
    assert not paths.row.exists()
    writer = EventWriter(paths.events(0), 0)
    writer.write("step", step=4, samples=12, step_seconds=0.6)
    assert results(tmp_path)[0]["steps"] == 4
    supervisor = EventWriter(paths.supervisor_events, -1)
    supervisor.write("trial_ended", **FAILED)
    for file in (writer, supervisor):
        file.close()
    assert results(tmp_path)[0]["state"] == "FAILED"


def test_what_arrives_after_the_end_is_in_the_row(tmp_path):
    paths = make_run(tmp_path, end=COMPLETE)
    assert row_of(paths)["device_allocated_bytes_predicted"] is None
    paths.write_prediction({"device_allocated_bytes": 1000, "device_reserved_bytes": 2000, "complete": True})
    assert row_of(paths)["device_allocated_bytes_predicted"] == 1000
    assert read_row(paths).row["device_allocated_bytes_predicted"] == 1000


@pytest.mark.parametrize(
    "damage", ["", "{", "[]", "null", "{}", '{"row": 3, "sources": {}}', '{"row": {}, "sources": []}', "\x00\xff"]
)
def test_a_damaged_row_file_is_made_anew(tmp_path, damage):
    paths = make_run(tmp_path, end=COMPLETE)
    row = row_of(paths)
    paths.row.write_text(damage)
    assert row_of(paths) == row
    assert read_row(paths).row == row


def test_a_row_outlives_its_events_and_its_config(tmp_path):
    paths = make_run(tmp_path, end=COMPLETE)
    make_run(tmp_path, {"name": "fine"}, end=COMPLETE)
    row = row_of(paths)
    for file in paths.event_files():
        file.unlink()
    assert row_of(paths) == row
    paths.config.write_text("name: [")
    assert row_of(paths) == row
    paths.row.unlink()
    assert {row["name"]: row["state"] for row in results(tmp_path)} == {None: "UNREADABLE", "fine": "COMPLETE"}


def test_a_row_of_another_version_is_made_anew_or_read_as_far_as_names_agree(tmp_path):
    paths = make_run(tmp_path, end=COMPLETE)
    row = row_of(paths)
    whole = json.loads(paths.row.read_text())
    older = {"state": "COMPLETE", "name": "old", "samples_per_second": 7.0, "colour": "green"}
    paths.row.write_text(json.dumps({**whole, "format": 0, "row": older}))
    assert row_of(paths) == row
    paths.row.write_text(json.dumps({**whole, "format": 0, "row": older}))
    paths.config.write_text("a_field_of_another_version: 3")
    found = row_of(paths)
    assert tuple(found) == COLUMNS
    assert (found["name"], found["samples_per_second"], found["steps"]) == ("old", 7.0, None)
    assert found["config"] == {}
    assert "old" in results(tmp_path).to_csv()
    assert "complete" in repr(results(tmp_path))


def test_a_run_that_was_moved_or_copied_is_found_where_it_is(tmp_path):
    paths = make_run(tmp_path / "here", end=COMPLETE)
    row = row_of(paths)
    shutil.copytree(paths.directory, tmp_path / "there" / "copied")
    (copied,) = results(tmp_path / "there")
    assert (copied["run"], copied["run_directory"]) == ("copied", str(tmp_path / "there" / "copied"))
    assert {**row, "run": "", "run_directory": ""} == {**copied, "run": "", "run_directory": ""}


def test_where_no_row_can_be_kept_it_is_computed_each_time(tmp_path):
    paths = make_run(tmp_path, end=COMPLETE)
    paths.row.mkdir()
    assert row_of(paths)["steps"] == row_of(paths)["steps"] == 6
    assert not list(paths.directory.glob(".row*"))


def test_several_readers_at_once_all_find_whole_rows(tmp_path):
    for number in range(6):
        make_run(tmp_path, {"name": f"run-{number}"}, end=COMPLETE)
    found = []
    readers = [threading.Thread(target=lambda: found.append(list(results(tmp_path)))) for _ in range(6)]
    for reader in readers:
        reader.start()
    for reader in readers:
        reader.join()
    assert len(found) == 6
    assert all(rows == found[0] for rows in found)
    assert all(read_row(RunPaths(path)) is not None for path in tmp_path.iterdir())
