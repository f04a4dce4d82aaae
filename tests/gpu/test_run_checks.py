import argparse
import json
import sys
import time
from pathlib import Path

import checks
import pytest
import run_checks

from kit.machine.gpus import read_gpus

HERE = Path(__file__).parent
HAS_GPU = bool(read_gpus().gpus)
PRINTS = f"print({run_checks.LINE!r} + '7', flush=True);"


def watched(code, seconds=60.0):
    """What became of a process, its error, and the lines it gave before."""
    lines = []
    state, error = run_checks.watch([sys.executable, "-c", code], seconds, lines.append)
    return state, error, lines


def options(**chosen):
    return argparse.Namespace(**{"only": "", "again": False, "device": "cpu", **chosen})


def test_what_a_check_gave_before_it_crashed_is_kept_with_its_last_words():
    assert watched(PRINTS) == ("done", "", [7])
    state, error, lines = watched(f"{PRINTS} import ctypes; ctypes.string_at(0)")
    assert (state, lines) == ("failed", [7])
    assert "exit code -" in error
    assert "ValueError: lost" in watched("raise ValueError('lost')")[1]


def test_a_check_that_hangs_is_ended_with_what_it_started(tmp_path):
    other = f"import pathlib, time; time.sleep(3); pathlib.Path({str(tmp_path / 'alive')!r}).touch()"
    code = f"{PRINTS} import subprocess, sys; subprocess.run([sys.executable, '-c', {other!r}])"
    state, _, lines = watched(code, 1.5)
    assert (state, lines) == ("out of time", [7])
    time.sleep(3.5)
    assert not (tmp_path / "alive").exists()


def test_a_second_run_begins_with_what_is_new_and_then_repeats_what_failed():
    first, second, *rest = checks.CHECKS
    states = {first: "failed", second: "done", rest[0]: "needs CUDA"}
    results = {"checks": {name: {"state": state} for name, state in states.items()}}
    assert run_checks.todo(results, options()) == [*rest[1:], first]
    assert run_checks.todo(results, options(again=True)) == list(checks.CHECKS)
    assert run_checks.todo(results, options(only=second)) == []


@pytest.mark.parametrize(
    ("predicted", "measured", "unit", "cells"),
    [
        (1 << 30, 1 << 29, "bytes", ["1 GiB", "512 MiB", "0.500"]),
        ("gpu", "cpu", "", ["gpu", "cpu", "differs"]),
        (None, 3.0, "samples/s", ["–", "3 samples/s", "–"]),
        (0, 3.0, "", ["0", "3", "–"]),
        (4, None, "", ["4", "–", "–"]),
    ],
)
def test_a_line_of_the_table(predicted, measured, unit, cells):
    assert run_checks._cells(checks.line("", predicted, measured, unit)) == cells


def test_wheels_are_of_the_versions_that_the_tests_ran_with_and_the_page_names_every_check():
    wheels = (HERE / "wheels.txt").read_text().split()
    assert set(wheels) <= set((HERE.parents[1] / "constraints.txt").read_text().split())
    assert not {"torch", "numpy", "jupyterlab", "ipywidgets"} & {wheel.partition("==")[0] for wheel in wheels}
    page = (HERE / "README.md").read_text()
    assert [name for name in checks.CHECKS if f"| {name} |" not in page] == []


@pytest.mark.skipif(HAS_GPU, reason="there is a GPU")
def test_without_a_gpu_it_says_so_in_one_sentence(tmp_path):
    with pytest.raises(SystemExit, match="no NVIDIA GPU.* --device cpu"):
        run_checks.main(["--out", str(tmp_path / "gpu")])
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_on_the_cpu_ranks_are_forked_and_what_is_done_is_not_run_again(tmp_path, capsys):
    command = ["--device", "cpu", "--out", str(tmp_path), "--only"]
    assert run_checks.main([*command, "start up"]) == 0
    found = json.loads((tmp_path / "cpu.json").read_text())["checks"]["start up"]
    told = {line["what"]: line for line in found["lines"]}
    assert found["state"] == "done"
    assert told["forked: start"]["measured"] == "warm"
    assert all(line["predicted"] in (None, line["measured"]) for line in told.values())
    assert run_checks.main([*command, "clocks"]) == 0
    capsys.readouterr()
    assert run_checks.main([*command, "start up"]) == 0
    out = capsys.readouterr().out
    assert "needs CUDA" in out
    assert "start up: done" not in out
    assert json.loads((tmp_path / "cpu.json").read_text())["checks"]["start up"] == found
