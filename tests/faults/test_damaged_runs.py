"""Files of a run directory, damaged in every way: whoever reads them skips with a notice or raises a named error."""

from __future__ import annotations

import contextlib
import json
import random
import shutil
import warnings
from pathlib import Path

import numpy as np
import pytest
import zarr
from hypothesis import given
from hypothesis import strategies as st
from properties import examples, nightly
from waiting import PATIENCE_SECONDS, wait_for_prediction

import kit
from kit.errors import KitError
from kit.events import EventReader
from kit.json_text import DEEPEST
from kit.memory.residual_table import residuals
from kit.records.row import UNREADABLE, measured_of, predicted_of
from kit.studies.calibration.result import Calibration
from kit.trial.directory import RunPaths
from kit.trial.submit import again


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A run directory with every file that one may hold, left by a real trial."""
    folder = tmp_path_factory.mktemp("whole")
    group = zarr.open_group(folder / "store.zarr", mode="w")
    values = np.random.default_rng(0).standard_normal((8, 16, 16)).astype("float32")
    group.create_array("sst", data=values, chunks=(4, 8, 8), dimension_names=("time", "lat", "lon"))
    config = kit.Config().replace({
        "data.url": str(folder / "store.zarr"), "data.patch": {"time": 2, "lat": 8, "lon": 8},
        "data.standardize": False, "data.samples_per_epoch": 64, "loader.batch_size": 2,
        "model.arguments": {"variables": 1, "width": 4, "depth": 1}, "hardware.accelerator": "cpu",
        "trial.max_steps": 6, "trial.warmup_steps": 1, "trial.folder": str(folder / "runs"),
        "calibration.enabled": True, "calibration.candidate_workers": [0], "calibration.candidate_prefetch": [2],
        "calibration.max_measure_batches": 4,
    })  # fmt: skip
    trial = kit.fit(config).wait(PATIENCE_SECONDS)
    wait_for_prediction(trial)
    assert kit.results(folder / "runs")[0]["state"] == "COMPLETE"
    return trial.run_directory


FILES = (
    ".kit-run", "config.yaml", "environment.json", "events.0.jsonl", "events.supervisor.jsonl", "row.json",
    "prediction.json", "calibration.json", "payload.pkl", "control", "log.0.txt", "memory.0.npz",
    "signature.txt", "predicting.txt",
)  # fmt: skip


def test_the_files_that_are_damaged_here_are_all_that_a_run_holds(whole):
    held = {path.name for path in whole.iterdir()}
    assert held == {*FILES}


def cut_short(file):
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])


def emptied(file):
    file.write_bytes(b"")


def random_bytes(file):
    file.write_bytes(random.Random(1).randbytes(2000))


def of_another_type(file):
    """JSON, and so YAML, of any type but the one it had; a line for files of lines."""
    file.write_text('[1, "two", null]\n' * 2 if file.suffix == ".jsonl" else '[1, "two", null]')


def values_of_another_type(file):
    """Every value another: keys are right, and nothing else is."""

    def spoil(value):
        if isinstance(value, dict):
            return {key: spoil(inner) for key, inner in value.items()}
        return [value] if not isinstance(value, list) else "text"

    if file.suffix == ".jsonl":
        lines = [json.loads(line) for line in file.read_text().splitlines()]
        file.write_text("".join(json.dumps({**spoil(line), "kind": line["kind"]}) + "\n" for line in lines))
    elif file.suffix == ".json":
        file.write_text(json.dumps(spoil(json.loads(file.read_bytes()))))
    else:
        file.write_text("loader: [1]\n")


def deep(file):
    text = "[" * 3000 + "]" * 3000
    file.write_text(f'{{"kind": {text}}}\n')


def huge_numbers(file):
    """Where numbers were, some that no float holds, and what JSON has no word for."""
    huge = iter([10**400, float("inf"), float("nan"), -(10**5000)] * 10_000)

    def spoil(value):
        if isinstance(value, dict):
            return {key: spoil(inner) for key, inner in value.items()}
        return next(huge) if isinstance(value, int | float) and not isinstance(value, bool) else value

    def written(value):
        import sys

        limit = sys.get_int_max_str_digits()
        sys.set_int_max_str_digits(0)
        try:
            return json.dumps(value)
        finally:
            sys.set_int_max_str_digits(limit)

    if file.suffix in (".json", ".jsonl"):
        lines = [json.loads(line) for line in file.read_text().splitlines()] if file.suffix == ".jsonl" else None
        whole = [spoil(json.loads(file.read_bytes()))] if lines is None else map(spoil, lines)
        file.write_text("".join(written(one) + "\n" for one in whole))
    else:
        file.write_text("loader: {batch_size: 1" + "0" * 400 + "}\ntraining: {max_epochs: 1e999}\n")


def a_folder(file):
    file.unlink()
    file.mkdir()


def unreadable(file):
    """For root too, whom no rights stop: a link that leads nowhere but to itself."""
    file.unlink()
    file.symlink_to(file.name)


def gone(file):
    file.unlink()


DAMAGES = (
    cut_short, emptied, random_bytes, of_another_type, values_of_another_type, deep, huge_numbers, a_folder, unreadable,
    gone,
)  # fmt: skip


STILL_OPENS = {
    "prediction.json", "calibration.json", "memory.0.npz", "log.0.txt", "payload.pkl", "control", "signature.txt",
}  # fmt: skip
CASES = [
    pytest.param(name, damage, id=f"{name}-{damage.__name__}")
    for row, name in enumerate(FILES)
    for column, damage in enumerate(DAMAGES)
    if nightly() or (row + column) % 3 == 0
]
"""Every damage of every file at night; in CI each file has three or four, and each damage four or five files."""


def readers(folder, run):
    """Everything that reads a run directory."""
    opened = []

    def trial():
        return opened[0] if opened else opened.append(kit.Trial.open(run)) or opened[0]

    return {
        "results": lambda: (
            repr(kit.results(folder)),
            kit.results(folder)._repr_html_(),
            kit.results(folder).to_json(),
        ),
        "best": lambda: kit.results(folder).where(state="COMPLETE").best(),
        "trial": lambda: (repr(trial()), trial().warnings, trial().traceback),
        "compare": lambda: (repr(kit.studies.compare(folder)), kit.studies.compare(folder)._repr_html_()),
        "compare one": lambda: repr(kit.studies.compare(run)),
        "timing": lambda: kit.studies.timing(run),
        "diagnose": lambda: kit.studies.diagnose(trial(), peaks=False),
        "report": lambda: kit.html_report(folder, folder.parent / "report.html", overwrite=True),
        "timing figure": lambda: kit.Trial.open(run).figure("timing"),
        "pipeline figure": lambda: trial().figure("pipeline"),
        "memory figure": lambda: trial().figure("memory"),
        "loss figure": lambda: trial().figure("loss"),
        "predicted": lambda: predicted_of(trial()),
        "measured": lambda: measured_of(trial()),
        "calibration": lambda: Calibration.load(RunPaths(run).calibration),
        "residuals": lambda: residuals(folder),
        "predict_run": lambda: kit.studies.predict_run([trial()], devices=[1, 2]),
        "commit": lambda: kit.commit(trial().config.replace({"commit.folder": str(folder.parent / "kept")}), trial()),
        "again": lambda: again(RunPaths.open(run), trial().config),
        "stop": lambda: trial().stop(),
    }


DRAWERS = {
    "report",
    "timing figure",
    "pipeline figure",
    "memory figure",
    "loss figure",
    "predict_run",
    "commit",
    "diagnose",
}
"""Those that take long, and see nothing of a run that the others do not open."""


def unnamed_errors(folder, run, but=frozenset()):
    """What reading raises that is no error of kit's, by who read."""
    found = {}
    for name, read in readers(folder, run).items():
        if name in but:
            continue
        try:
            read()
        except KitError:
            pass
        except Exception as error:
            found[name] = error
    return found


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("name", "damage"), CASES)
def test_a_damaged_file_is_a_row_that_says_so_or_a_named_error(whole, tmp_path, name, damage):
    run = tmp_path / "runs" / "one"
    shutil.copytree(whole, run)
    if name != "row.json":
        (run / "row.json").unlink()
    damage(run / name)
    still_opens = name in (
        "prediction.json",
        "calibration.json",
        "memory.0.npz",
        "log.0.txt",
        "payload.pkl",
        "control",
        "signature.txt",
        "predicting.txt",
    )
    drawn = still_opens or damage in (values_of_another_type, cut_short, gone)
    assert unnamed_errors(tmp_path / "runs", run, but=frozenset() if drawn else DRAWERS) == {}
    if name != ".kit-run":
        assert len(kit.results(tmp_path / "runs")) == 1


def test_damaged_runs_hide_no_other_and_are_counted(whole, tmp_path):
    for number, name in enumerate(("config.yaml", "environment.json", "events.0.jsonl")):
        shutil.copytree(whole, tmp_path / "runs" / str(number))
        (tmp_path / "runs" / str(number) / "row.json").unlink()
        random_bytes(tmp_path / "runs" / str(number) / name)
    shutil.copytree(whole, tmp_path / "runs" / "whole")
    states = [row["state"] for row in kit.results(tmp_path / "runs")]
    assert sorted(states) == ["COMPLETE", *[UNREADABLE] * 3]
    comparison = kit.studies.compare(tmp_path / "runs")
    assert (len(comparison.groups), len(comparison.unreadable)) == (1, 3)


def test_a_row_of_a_damaged_run_is_kept_until_a_file_changes(whole, tmp_path):
    run = tmp_path / "runs" / "one"
    shutil.copytree(whole, run)
    good = (run / "environment.json").read_bytes()
    (run / "row.json").unlink()
    (run / "environment.json").write_bytes(b"{")
    (row,) = kit.results(tmp_path / "runs")
    kept = json.loads((run / "row.json").read_bytes())
    assert row["state"] == kept["row"]["state"] == UNREADABLE
    kept["row"]["message"] = "read from the kept row"
    (run / "row.json").write_text(json.dumps(kept))
    assert kit.results(tmp_path / "runs")[0]["message"] == "read from the kept row"
    (run / "environment.json").write_bytes(good)
    assert kit.results(tmp_path / "runs")[0]["state"] == "COMPLETE"


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)


@given(data=st.data())
@examples(25)
def test_any_value_anywhere_in_a_run_is_a_row_or_a_named_error(whole, tmp_path_factory, data):
    name = data.draw(st.sampled_from([name for name in FILES if name.endswith((".json", ".jsonl"))]))
    run = tmp_path_factory.mktemp("any") / "runs" / "one"
    shutil.copytree(whole, run)
    if name != "row.json":
        (run / "row.json").unlink()
    lines = (run / name).read_text().splitlines() if name.endswith("l") else [(run / name).read_text()]
    place = data.draw(st.integers(0, len(lines) - 1))
    value = json.loads(lines[place])
    value[data.draw(st.sampled_from(sorted(value)))] = data.draw(JSON)
    lines[place] = json.dumps(value)
    (run / name).write_text("\n".join(lines) + "\n")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert unnamed_errors(run.parent, run, but=DRAWERS) == {}
    shutil.rmtree(run.parent.parent)


@given(st.binary(max_size=200))
@examples(100)
def test_any_line_of_an_event_file_is_an_event_or_a_named_error(tmp_path_factory, line):
    folder = tmp_path_factory.mktemp("lines")
    (folder / "events.0.jsonl").write_bytes(line + b"\n")
    with contextlib.suppress(KitError):
        assert all({"kind", "time", "rank"} <= event.keys() for event in EventReader(folder).read())


def test_what_kit_writes_is_far_from_the_deepest_that_is_read(whole):
    def depth(value):
        inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
        return 1 + max(map(depth, inner), default=0)

    deepest = max(depth(json.loads(path.read_bytes())) for path in Path(whole).glob("*.json"))
    assert deepest * 5 < DEEPEST
