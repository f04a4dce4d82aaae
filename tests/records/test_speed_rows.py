"""The speed that the operators of a step predicted, in the rows of trials."""

import math
import re

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from lightning.pytorch import Callback
from properties import examples

import kit
from kit.json_text import write_json
from kit.machine.processes import slowed
from kit.records.ratios import correction, with_speeds
from kit.records.row import row_of_trial
from kit.speed.prediction import SPEED_FIELDS
from kit.testing import TinyData, TinyModule
from kit.widgets.trial_view import TrialView

OTHERS = ("requests_per_sample", "bytes_per_sample", "device_allocated_bytes", "device_reserved_bytes")


def row(run, speed, predicted, key="a", **more):
    given = {"low": predicted * 0.8, "high": predicted * 1.25, "predicted": predicted}
    return {
        "run": run, "speed_key": key, "state": "COMPLETE", "kind": "trial", "samples_per_second": speed,
        "module": "Net",
        "host": "here", "accelerator": "cpu", "world_size": 1, "measured_batches": 40,
        "samples_per_second_error_fraction": 0.01, "data_wait_fraction": 0.0, "samples_per_second_ratio": None,
        **{f"samples_per_second_{name}": value for name, value in given.items()},
        **{f"{name}_ratio": None for name in OTHERS},
        **more,
    }  # fmt: skip


def test_the_first_trial_of_its_kind_is_predicted_by_its_operators_and_told_where_it_lies_outside():
    (found,) = with_speeds([row("1", 50.0, 100.0)])
    assert found["samples_per_second_predicted"] == 100.0
    assert found["samples_per_second_ratio"] == pytest.approx(0.5)
    assert re.search("outside.* 80 to 125", found["ratio_notes"])


def test_a_slower_trial_is_told_beside_the_cores_that_others_used():
    beside, alone = (with_speeds([row("1", 50.0, 100.0, other_cores=cores)])[0] for cores in (0.76, 0.1))
    assert "0.8 cores" in beside["ratio_notes"]
    assert "cores" not in alone["ratio_notes"]
    (faster,) = with_speeds([row("1", 600.0, 100.0, other_cores=0.8, other_cores_when_predicted=3.26)])
    assert "3.3 cores" in faster["ratio_notes"], "what made the prediction too low"
    _, faster = with_speeds([row("1", 50.0, 100.0, other_cores=1.2), row("2", 90.0, 100.0, other_cores=0.5)])
    assert "1.2 cores" in faster["ratio_notes"], "what slowed the trial that predicted this one"


def test_a_trial_on_slower_cores_is_held_against_what_is_predicted_at_their_pace():
    slower, usual = (with_speeds([row("1", 52.0, 100.0, slowdown=pace)])[0] for pace in (1.9, 1.02))
    assert slower["samples_per_second_ratio"] == pytest.approx(0.52), "the ratio is of what was seen"
    assert "0.99 of what" in slower["ratio_notes"]
    assert "pace" not in usual["ratio_notes"]
    *_, other = with_speeds([row("1", 52.0, 100.0, slowdown=2.0), row("2", 40.0, 50.0, key="b")])
    assert 50.0 < other["samples_per_second_predicted"] < 52.0, "a slow moment is no fault of the model's"


def test_what_the_operators_were_off_by_corrects_the_next_setting_of_the_same_module():
    _, other, stranger = with_speeds([
        row("1", 50.0, 100.0), row("2", 26.0, 50.0, key="b"), row("3", 70.0, 80.0, key="c", module="Other"),
    ])  # fmt: skip
    assert other["samples_per_second_predicted"] == pytest.approx(25.0, rel=0.02)
    assert other["samples_per_second_ratio"] == pytest.approx(1.04, rel=0.02)
    assert stranger["samples_per_second_predicted"] == 80.0


class Slow(Callback):
    """Stands for one that takes its time."""


def test_a_trial_with_a_callback_says_nothing_of_those_without(config):
    asked = config()
    keys = [
        row_of_trial(kit.fit(asked, TinyModule, TinyData, callbacks=own).wait())["speed_key"]
        for own in (Slow(), Slow(), None)
    ]
    assert keys[0] == keys[1] != keys[2]
    with_own, again, without, other = with_speeds([
        row("1", 20.0, 100.0, key=keys[0]), row("2", 21.0, 100.0, key=keys[1]), row("3", 101.0, 100.0, key=keys[2]),
        row("4", 51.0, 50.0, key="b"),
    ])  # fmt: skip
    assert again["samples_per_second_predicted"] == 20.0
    assert [one["samples_per_second_predicted"] for one in (with_own, without)] == [100.0, 100.0]
    assert other["samples_per_second_predicted"] == pytest.approx(50.0, rel=0.02)


def test_a_trial_of_the_same_class_with_other_arguments_is_none_of_the_same(config):
    keys = [
        row_of_trial(kit.fit(config(), module, data).wait())["speed_key"]
        for module, data in [
            (TinyModule(), TinyData()), (TinyModule(), TinyData()), (TinyModule(learning_rate=0.5), TinyData()),
            (TinyModule(), TinyData(batch_size=8)),
        ]
    ]  # fmt: skip
    assert keys[0] == keys[1]
    assert len({*keys}) == 3


@examples(60)
@given(ratio=st.floats(0.1, 10), trials=st.integers(1, 8))
def test_a_trial_corrects_by_what_is_more_than_chance(ratio, trials):
    found = correction([ratio] * trials)
    assert min(1.0, ratio) <= found <= max(1.0, ratio)
    assert abs(math.log(correction([ratio] * (trials + 1)))) >= abs(math.log(found))
    assert correction([1 / ratio] * trials) == pytest.approx(1 / found)


def test_a_ratio_far_from_one_is_believed_and_one_that_trials_differ_by_half():
    assert correction([0.5]) == pytest.approx(0.5, rel=0.01)
    assert correction([1.07]) == pytest.approx(1.035, rel=0.01)
    assert correction([1.01]) == pytest.approx(1.0, abs=0.001)
    assert correction([1.07] * 9) > 1.06
    assert correction([1.0]) == 1.0


def test_an_earlier_trial_of_the_same_says_more_than_operators():
    _, again = with_speeds([row("1", 50.0, 100.0), row("2", 51.0, 100.0)])
    assert again["samples_per_second_predicted"] == 50.0


def test_trials_beside_other_programs_predict_only_where_there_are_no_others():
    busy = row("1", 20.0, 100.0, other_cores=1.7)
    _, quiet, last = with_speeds([busy, row("2", 90.0, 100.0), row("3", 95.0, 100.0)])
    assert quiet["samples_per_second_predicted"] == 20.0
    assert last["samples_per_second_predicted"] == 90.0
    *_, other = with_speeds([busy, row("2", 100.0, 100.0), row("3", 50.0, 50.0, key="b")])
    assert other["samples_per_second_predicted"] == 50.0


@examples(60)
@given(speeds=st.lists(st.tuples(st.floats(1, 1e4), st.sampled_from("ab")), min_size=1, max_size=6))
def test_what_is_predicted_lies_within_its_own_range(speeds):
    rows = with_speeds([row(str(number), speed, 100.0, key=key) for number, (speed, key) in enumerate(speeds)])
    for one in rows:
        low, middle, high = (one[f"samples_per_second_{name}"] for name in ("low", "predicted", "high"))
        assert low <= middle <= high


def test_a_row_reads_it_from_the_run_directory(config):
    trial = kit.fit(config(), TinyModule, TinyData).wait()
    write_json(trial.paths.predicted_speed, dict(zip(SPEED_FIELDS, (100.0, 80.0, 125.0), strict=True)))
    chart = TrialView(trial.config)
    chart.watch(trial)
    assert "predicted 80 to 125" in chart.chart.value
    found = row_of_trial(trial)
    assert [found[f"samples_per_second_{name}"] for name in ("predicted", "low", "high")] == [100.0, 80.0, 125.0]
    trial.paths.predicted_speed.unlink()
    assert row_of_trial(trial)["samples_per_second_predicted"] is None


def test_a_row_tells_how_much_slower_a_step_was_by_the_pace_of_its_cores(config):
    asked = config().replace({"trial.max_steps": 60, "trial.warmup_steps": 2})
    trial = kit.fit(asked, TinyModule, TinyData).wait()
    pace = trial.event("cpu_used")["pace_seconds"]
    assert 0 < pace < 1
    told = dict(zip(SPEED_FIELDS, (10.0, 8.0, 12.0), strict=True))
    write_json(trial.paths.predicted_speed, {**told, "pace_seconds": pace / 2, "computing_fraction": 0.5})
    assert row_of_trial(trial)["slowdown"] == pytest.approx(slowed(2.0, 0.5))
    write_json(trial.paths.predicted_speed, told)
    assert row_of_trial(trial)["slowdown"] is None
    two = kit.fit(config(ranks=2), TinyModule, TinyData).wait()
    assert two.event("cpu_used")["pace_seconds"] is None, "what ranks do to one another is no pace"


class Lazy(TinyModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Sequential(torch.nn.LazyLinear(5), torch.nn.LazyLinear(1))


def test_parameters_that_get_their_shape_with_the_first_batch_are_counted(config):
    trial = kit.fit(config(), Lazy, TinyData).wait()
    assert row_of_trial(trial)["parameters"] == 8 * 5 + 5 + 5 + 1
