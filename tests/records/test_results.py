"""Rows of run directories: read from real files, complete for any state a run was left in, safe in a spreadsheet."""

import csv
import io
import json
import os
import re
import sys
import threading
import time
from collections import Counter

import pytest
from made_runs import COMPLETE, make_run

from kit.errors import ConfigError
from kit.events import EventWriter
from kit.memory.replay.replay import DIFFERING
from kit.records.ratios import LARGEST_ERROR_FRACTION, LEAST_BATCHES, SPEED, doubt, doubt_note
from kit.records.results import KINDS, MOST_ROWS, UNDER_WAY, Results, differences, results
from kit.records.row import COLUMNS
from kit.trial.directory import CALIBRATIONS, RunPaths
from kit.trial.submit import notebook_here
from kit.trial.trial import Trial


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


def test_a_trial_several_and_a_run_directory_are_their_own_rows(tmp_path):
    made = [make_run(tmp_path, {"name": name}, end=COMPLETE) for name in ("a", "b")]
    environment = json.loads(made[1].environment.read_text())
    made[1].environment.write_text(json.dumps({**environment, "kind": "repeat"}))
    trials = [Trial.open(paths.directory) for paths in made]
    assert [(row["name"], row["kind"]) for row in results(trials[1])] == [("b", "repeat")]
    assert sorted(row["name"] for row in results(trials)) == ["a", "b"]
    assert [row["name"] for row in results(made[0].directory)] == ["a"]
    with pytest.raises(ConfigError, match="list"):
        results([trials[0], "b"])


def test_one_row_is_a_dict_that_shows_itself_as_the_table_does(tmp_path):
    make_run(tmp_path, end=COMPLETE)
    found = results(tmp_path)
    row = found[0]
    assert isinstance(row, dict)
    assert json.loads(json.dumps(row)) == json.loads(found.to_json())[0]
    lines = repr(row).splitlines()
    assert lines[:2] == repr(found).splitlines()[:2]
    assert str(len(row)) in lines[-1]
    assert "<table" in row._repr_html_()
    assert repr(found.best()) == repr(row)


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
    assert results(tmp_path).to_csv(tmp_path / "new" / "folder" / "results.csv") == text
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
    counters = {"samples": 160, "requests": 640, "bytes_read": 1}
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
    assert "≥ 1000 B" in repr(results(tmp_path))
    assert re.search("≥: .*recorded in time", repr(results(tmp_path)))
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


@pytest.mark.parametrize("notes", [[], [f"{DIFFERING[0]}x"]])
def test_batches_that_were_smaller_than_the_largest_explain_less_memory(tmp_path, notes):
    paths = make_run(tmp_path, end=COMPLETE, device=True)
    paths.write_prediction(
        {"device_allocated_bytes": 2000, "device_reserved_bytes": 2000, "complete": True, "notes": notes}
    )
    writer = EventWriter(paths.events(0), 0)
    writer.write("memory_measured", device_allocated_bytes=1000, device_reserved_bytes=1000, outside_bytes=None)
    writer.close()
    (row,) = results(tmp_path)
    assert row["device_allocated_bytes_ratio"] == 0.5
    assert ("held less" in row["ratio_notes"]) == bool(notes)


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


def test_what_differs_between_trials_of_one_experiment_is_said_in_words(tmp_path):
    for changes in ({"trial.max_steps": 9}, {"levers.gradient_checkpointing": True}, {"loader.batch_size": 4}):
        make_run(tmp_path, changes, end=COMPLETE)
    make_run(tmp_path, {"name": "alone", "training.max_epochs": 7}, end=COMPLETE)
    found = results(tmp_path)
    words = dict(zip([row["run"] for row in found], differences(found), strict=True))
    by_steps = {row["config"]["trial.max_steps"]: words[row["run"]] for row in found if row["name"] != "alone"}
    assert "max steps 9" in by_steps[9]
    assert any("gradient checkpointing on" in text for text in words.values())
    assert not any("batch" in text for text in words.values()), "it has a column"
    (alone,) = (words[row["run"]] for row in found if row["name"] == "alone")
    assert alone == "–", "nothing of its experiment differs from it"
    assert "what differs" in repr(found)
    assert "what differs" not in repr(found.where(name="alone"))


def test_many_differences_are_counted(tmp_path):
    make_run(tmp_path, end=COMPLETE)
    many = {"training.seed": 5, "trial.max_steps": 9, "trial.warmup_steps": 1}
    many |= {"loader.num_workers": 1, "loader.requests_in_flight": 5, "training.max_epochs": 2}
    make_run(tmp_path, many, end=COMPLETE)
    assert all(text.endswith("2 more") for text in differences(results(tmp_path)))


def test_a_pass_of_a_profiler_says_so_and_is_compared_with_its_like(tmp_path):
    make_run(tmp_path, end=COMPLETE)
    watched = make_run(tmp_path, {"trial.predict_memory": False}, end=COMPLETE)
    note(watched, profile={"pass": "simple", "folder": "x"})
    found = results(tmp_path, kind="all")
    assert sorted(row["profiler"] or "" for row in found) == ["", "simple"]
    assert "profile (simple)" in repr(found)
    assert "what differs" not in repr(found)


def note(run, **fields):
    """Write more into the environment of a run that has ended."""
    run.environment.write_text(json.dumps({**json.loads(run.environment.read_text()), **fields}))


def test_what_is_no_trial_is_counted_below_and_shown_when_asked_for(tmp_path):
    plain = make_run(tmp_path, end=COMPLETE)
    assert "not shown" not in repr(results(tmp_path))
    note(make_run(tmp_path, end=COMPLETE), kind="repeat")
    note(make_run(tmp_path, end=COMPLETE), profile={"pass": "simple", "folder": "x"})
    note(make_run(tmp_path / CALIBRATIONS, end=COMPLETE), job="calibrate")
    found = results(tmp_path)
    assert [row["run"] for row in found] == [plain.directory.name]
    for shown in (repr(found), found._repr_html_()):
        assert all(words in shown for words in ("1 repeat", "1 pass of", "1 calibration", "kind="))
    assert Counter(row["kind"] for row in results(tmp_path, kind="all")) == dict.fromkeys(KINDS, 1)
    assert [row["kind"] for row in results(tmp_path, kind="profile")] == ["profile"]
    assert "not shown" not in repr(results(tmp_path, kind="all"))
    with pytest.raises(ConfigError, match="did you mean 'repeat'"):
        results(tmp_path, kind="repeats")


def test_trials_of_an_experiment_and_of_a_notebook_are_told_apart(tmp_path):
    for name, notebook in (("a", "one.ipynb"), ("b", "one.ipynb"), ("b", notebook_here())):
        note(make_run(tmp_path, {"name": name}, end=COMPLETE), notebook=notebook)
    assert len(results(tmp_path, name="b")) == 2
    assert [row["name"] for row in results(tmp_path, notebook="one.ipynb")] == ["b", "a"]
    assert [row["name"] for row in results(tmp_path, name="b", notebook="this")] == ["b"]


def speeds(tmp_path, *milliseconds):
    """Trials of the same, one after another, of so long a step each."""
    for number, each in enumerate(milliseconds):
        made = make_run(tmp_path, {"trial.max_steps": 14}, steps=14, end=COMPLETE, step_seconds=each / 1000)
        os.utime(made.marker, (1000 + number, 1000 + number))
    return [*reversed(results(tmp_path))]


def test_speed_is_predicted_by_earlier_trials_of_the_same(tmp_path):
    first, second, third = speeds(tmp_path, 100, 110, 105)
    assert first["samples_per_second_predicted"] is None
    assert second["samples_per_second_predicted"] == pytest.approx(120)
    assert second["samples_per_second_ratio"] == pytest.approx(100 / 110)
    assert third["samples_per_second_predicted"] == pytest.approx((120 + 12 / 0.11) / 2)
    assert third["ratio_notes"] is None
    assert "samples/s predicted" in repr(results(tmp_path))
    make_run(tmp_path, {"trial.max_steps": 14, "loader.num_workers": 1}, steps=14, end=COMPLETE)
    assert results(tmp_path)[0]["samples_per_second_predicted"] is None, "other settings"


def test_a_speed_far_from_that_of_the_trial_before_is_explained(tmp_path):
    _, slower = speeds(tmp_path, 100, 200)
    assert "2.00 times" in slower["ratio_notes"]
    assert slower["ratio_notes"] in repr(results(tmp_path))


def test_too_few_batches_and_uneven_ones_have_no_ratio_but_a_reason(tmp_path):
    predicted, counters = {"requests_per_sample": 2.0}, {"samples": 32, "requests": 64}
    for _ in range(2):
        make_run(tmp_path, end=COMPLETE, predicted=predicted, counters=counters)
    found = results(tmp_path)
    assert (found[0]["measured_batches"], found[0]["batches_read"]) == (4, 2)
    assert (found[0]["samples_per_second_ratio"], found[0]["requests_per_sample_ratio"]) == (None, None)
    assert "too few batches" in repr(found)
    assert f"fewer than {LEAST_BATCHES}" in repr(found)
    uneven = {**found[0], "measured_batches": 99, "samples_per_second_error_fraction": 2 * LARGEST_ERROR_FRACTION}
    assert doubt(uneven, SPEED) == "too uneven"
    assert "chance" in doubt_note("too uneven")


def test_requests_far_from_predicted_are_explained_by_what_was_counted(tmp_path):
    reads = {"samples": 1600, "requests": 1600}
    reasons = {
        "warm cache": {"read_cache_hits": 60, "read_cache_misses": 40},
        "shared": {"cache_hits": 60, "cache_misses": 40},
        "absent": {"chunks_filled": 60, "chunks_decoded": 40},
        "nothing": {},
    }
    for name, counts in reasons.items():
        make_run(tmp_path / name, end=COMPLETE, predicted={"requests_per_sample": 2.0}, counters={**reads, **counts})
        (row,) = results(tmp_path / name)
        assert row["requests_per_sample_ratio"] == pytest.approx(0.5)
        assert name in row["ratio_notes"]
        assert ("60%" in row["ratio_notes"]) == bool(counts)
    failing = {"samples": 1600, "requests": 4800, "retries": 2400}
    make_run(tmp_path / "more", end=COMPLETE, predicted={"requests_per_sample": 2.0}, counters=failing)
    assert "sent again" in results(tmp_path / "more")[0]["ratio_notes"]
    make_run(tmp_path / "near", end=COMPLETE, predicted={"requests_per_sample": 1.1}, counters=reads)
    assert results(tmp_path / "near")[0]["ratio_notes"] is None


def test_a_prediction_that_is_being_made_is_waited_for(tmp_path, monkeypatch):
    made = make_run(tmp_path / "runs", end=COMPLETE)
    making = make_run(tmp_path / "making")
    made.predicting.write_text(str(making.directory))
    found = results(tmp_path / "runs", patience_seconds=0)
    assert found[0]["prediction"] == UNDER_WAY
    assert UNDER_WAY in repr(found)

    said = io.StringIO()  # not capsys: what is printed while another thread reads from it may be lost
    said.isatty = lambda: True
    monkeypatch.setattr("sys.stderr", said)
    monkeypatch.setattr("kit.tables._SILENT_SECONDS", 0.0)
    monkeypatch.delitem(sys.modules, "IPython", raising=False)  # another test may have left a shell

    def answer():
        while "memory prediction" not in said.getvalue():
            time.sleep(0.01)
        made.write_prediction({"device_allocated_bytes": 1000, "device_reserved_bytes": 2000, "complete": True})

    thread = threading.Thread(target=answer, daemon=True)
    thread.start()
    assert results(tmp_path / "runs")[0]["device_allocated_bytes_predicted"] == 1000
    thread.join()
    assert made.directory.name in said.getvalue()
    made.prediction.unlink()
    writer = EventWriter(making.supervisor_events, -1)
    writer.write("trial_ended", **COMPLETE, cause=None)
    writer.close()
    assert results(tmp_path / "runs")[0]["prediction"] is None, "it ended without an answer"


def test_runs_that_a_name_leaves_out_are_not_said_to_be_none_yet(tmp_path):
    for name in ("first", "second"):
        make_run(tmp_path, {"name": name}, end=COMPLETE)
    for shown in (repr(results(tmp_path, name="frist")), results(tmp_path, name="frist")._repr_html_()):
        assert "frist" in shown
        assert "second" in shown
        assert f"kit.results(&#x27;{tmp_path}&#x27;)" in shown or f"kit.results('{tmp_path}')" in shown
    assert "frist" not in repr(results(tmp_path, name="first"))
    assert str(tmp_path) not in repr(results(tmp_path).where(name="frist"))
