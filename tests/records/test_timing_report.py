"""Timing of a trial: rows, shares that add to one, files that read back, and its chart."""

import csv
import io
import json
import math
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st
from ruamel.yaml import YAML
from waiting import wait_until

from kit.charts.trial import timing_figure
from kit.config import Config
from kit.errors import TrialError
from kit.memory.alongside import fit
from kit.records.timing import rounded_shares, timing, timing_of
from kit.records.trace import PHASES, throughput_info
from kit.testing import TinyData, TinyModule


class FailsAtOnce(TinyModule):
    def training_step(self, batch, batch_idx):
        raise ValueError("before the first step was done")


CONFIG = Config().replace({"trial.max_steps": 10, "trial.warmup_steps": 2})


def step(number, rank=0, **seconds):
    parts = {f"{phase}_seconds": 0.0 for phase in PHASES} | {
        f"{name}_seconds": value for name, value in seconds.items()
    }
    fields = {"step": number, "batch": number, "epoch": 0, "samples": 8, "step_seconds": sum(parts.values()), **parts}
    return {"kind": "step", "time": float(number), "rank": rank, **fields}


def test_warm_up_is_in_the_rows_and_in_no_total():
    found = timing_of([step(1, forward=9.0), step(2, forward=9.0), step(3, wait=1.0, forward=3.0)], CONFIG)
    assert [row["warmup"] for row in found.rows] == [True, True, False]
    assert found.together.steps == 1
    assert found.shares["forward"] == 0.75
    assert found.step_seconds == 4.0


def test_each_rank_has_its_own_totals_and_the_slowest_says_how_long_a_step_takes():
    events = [step(n, rank, forward=1.0 + rank, backward=1.0) for n in (3, 4) for rank in (0, 1)]
    found = timing_of(events, CONFIG)
    assert found.ranks[0].shares["forward"] == 0.5
    assert found.ranks[1].shares["forward"] == pytest.approx(2 / 3)
    assert found.step_seconds == 3.0
    assert found.together.steps == 4


def test_a_validation_counts_in_the_shares_and_in_no_step():
    events = [step(3, forward=1.0), step(4, forward=1.0, validation=1.0)]
    ended = {"kind": "fit_ended", "time": 5.0, "rank": 0, "validation_seconds": 1.0}
    found = timing_of([*events, ended], CONFIG)
    assert found.step_seconds == 1.0
    assert found.shares["validation"] == 0.5


@pytest.mark.parametrize(("share", "named"), [(0.4, True), (0.1, False)])
def test_a_hook_that_is_most_of_the_transfer_is_named_beside_it(share, named):
    hooks = {"[LightningModule]Net.on_after_batch_transfer": share, "[Callback]Other.on_train_batch_end": 0.5}
    watched = {"kind": "host_watched", "time": 9.0, "rank": 0, "hooks": hooks}
    steps = [step(number, forward=1.0, transfer=1.1) for number in (3, 4)]
    assert ("Net.on_after_batch_transfer" in timing_of([*steps, watched], CONFIG).sentence) is named
    on_gpu = [{**one, "host_seconds": {}} for one in steps]
    assert "on_after_batch_transfer" not in timing_of([*on_gpu, watched], CONFIG).sentence


def test_of_as_many_steps_as_are_measured_there_are_as_many_validations():
    """One before the first of them belongs to the warm-up step before it, or one after the last to the last."""
    ended = {"kind": "fit_ended", "time": 5.0, "rank": 0, "validation_seconds": 1.0}
    came_with = [step(3, forward=1.0, validation=1.0), step(4, forward=1.0)]
    for steps in (came_with, [step(3, forward=1.0), step(4, forward=1.0)]):
        assert timing_of([*steps, ended], CONFIG).shares["validation"] == pytest.approx(1 / 3)
        assert throughput_info([*steps, ended], CONFIG).mean_shares["validation"] == pytest.approx(1 / 3)


def test_the_step_that_is_told_is_the_one_that_the_shares_are_of():
    events = [step(3, forward=1.0), step(4, forward=1.0, validation=5.0, checkpoint=1.0)]
    found = timing_of(events, CONFIG)
    assert found.whole_step_seconds == 4.0
    assert re.search("4 s .1 s .*validation and checkpoint", found.sentence)
    columns, (row,) = found._table
    assert dict(zip(columns, row, strict=True)) == {
        "": "a step", "a step": "4 s", "without validation and checkpoint": "1 s", "±": "0 µs",
        "forward": "25.0%", "validation": "62.5%", "checkpoint": "12.5%",
    }  # fmt: skip
    assert timing_figure(found).texts[0].get_text().startswith(found.sentence[:20])
    plain = timing_of([step(3, forward=1.0), step(4, forward=1.0, logging=0.001)], CONFIG)
    assert plain.sentence.startswith("A step takes 1 s;")
    assert "without" not in repr(plain)


def test_without_a_step_after_warm_up_there_are_no_shares_and_a_way_out():
    found = timing_of([step(1, forward=1.0)], CONFIG)
    assert math.isnan(found.shares["forward"])
    assert "trial more" in repr(found)
    assert found.summary()["all ranks"]["shares"] == {}
    assert json.loads(found.to_json())["summary"]["all ranks"]["mean_step_seconds"] is None


parts = st.lists(st.floats(0, 1e4), min_size=len(PHASES), max_size=len(PHASES)).filter(lambda values: sum(values) > 0)


@given(st.lists(parts, min_size=1, max_size=5))
def test_shares_add_to_one_however_they_are_written(steps):
    events = [step(n, **dict(zip(PHASES, values, strict=True))) for n, values in enumerate(steps, start=3)]
    found = timing_of(events, CONFIG)
    assert math.fsum(found.shares.values()) == 1
    written = found.summary()["all ranks"]["shares"]
    assert round(math.fsum(written.values()), 4) == 1
    assert min(written.values()) >= 0
    assert all(abs(written[part] - found.shares[part]) < 1e-4 for part in PHASES)


def test_rounding_gives_what_is_left_to_those_it_wronged_most():
    assert rounded_shares({"a": 1 / 3, "b": 1 / 3, "c": 1 / 3}, 2) == {"a": 0.34, "b": 0.33, "c": 0.33}


def test_files_hold_the_same_numbers(tmp_path):
    found = timing_of([step(n, rank, forward=0.1, wait=0.3) for n in (1, 3, 4) for rank in (0, 1)], CONFIG, "mine")
    folder = found.save(tmp_path / "timing")
    rows = list(csv.DictReader(io.StringIO((folder / "timing_results.csv").read_text())))
    assert len(rows) == len(json.loads((folder / "timing_results.json").read_text())["batches"]) == 6
    assert float(rows[0]["forward_seconds"]) == 0.1
    summary = YAML(typ="safe").load((folder / "timing_summary.yaml").read_text())
    assert summary["all ranks"]["shares"]["wait"] == 0.75
    assert set(summary) >= {"rank 0", "rank 1"}
    assert summary == found.summary()


def test_on_a_gpu_the_clock_is_the_devices():
    found = timing_of([{**step(3, forward=1.0), "host_seconds": {"forward": 0.1}}], CONFIG)
    assert found.clock == "device"


def test_the_chart_shows_every_batch_and_every_rank():
    found = timing_of([step(n, rank, forward=0.1, wait=0.1 * rank) for n in range(1, 9) for rank in (0, 1)], CONFIG)
    chart = timing_figure(found)
    batches, totals = chart.axes
    assert re.fullmatch("each batch .*rank 1, ms", batches.get_title(loc="left"))
    assert [label.get_text() for label in totals.get_yticklabels()] == ["rank 0", "rank 1"]
    heights = [bar.get_height() for container in batches.containers for bar in container]
    assert sum(heights) == pytest.approx(8 * 200)


def test_a_long_trial_is_drawn_in_groups_and_a_rank_that_is_not_there_is_refused():
    found = timing_of([step(n, forward=0.1) for n in range(1, 1001)], CONFIG)
    assert "mean of 9" in timing_figure(found).axes[0].get_title(loc="left")
    with pytest.raises(TrialError, match="no rank 3; it has 0"):
        timing_figure(found, rank=3)


class Slow(TinyModule):
    def __init__(self):
        super().__init__(seconds=0.01)


def test_a_trial_of_any_module_and_data_tells_where_its_time_went(config):
    trial = fit(config(), Slow, TinyData).wait()
    found = timing(trial.run_directory)
    assert all(row["forward_seconds"] >= 0.01 for row in found.rows), "what a step sleeps is in its forward pass"
    most = max(found.shares, key=found.shares.get)
    assert f"{most} takes" in repr(found)
    assert "<table" in found._repr_html_()


def test_a_trial_without_a_step_has_nothing_to_tell(config):
    trial = fit(config(), FailsAtOnce, TinyData)
    wait_until(lambda: trial.poll() == "FAILED")
    with pytest.raises(TrialError, match="no step .*finished"):
        timing(trial)
