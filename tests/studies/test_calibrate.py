"""Calibrating in processes of its own, and before a fit: one rank, two ranks, again, and in vain."""

import json

import pytest
from slow_data import Waiting, WaitingData
from torch.utils.data import DataLoader

import kit
from kit.errors import ConfigError, TrialError
from kit.memory.alongside import fit
from kit.studies.calibration.result import Calibration, calibrate, saved_path
from kit.testing import TinyModule
from kit.trial.trial import Trial

QUICK = {
    "calibration.enabled": True,
    "calibration.candidate_workers": [0, 1],
    "calibration.candidate_prefetch": [2],
    "calibration.max_measure_batches": 6,
    "calibration.timeout_seconds": 3.0,
    "calibration.step_seconds": 0.0,
}


class Batches:
    """Batches that no setting changes."""

    def __iter__(self):
        loader = DataLoader(Waiting(0), batch_size=2)
        return iter(loader)

    def __len__(self):
        return 2048


def result(trial):
    return Calibration.load(trial.paths.calibration)


@pytest.mark.slow
def test_a_fit_is_calibrated_before_it_trains_and_says_what_it_chose(config):
    trial = fit(config().replace(QUICK), TinyModule, WaitingData).wait()
    found = result(trial)
    assert [item.setting.num_workers for item in found.measured] == [0, 1]
    assert found.headline in repr(trial)
    assert trial.event("calibrated", "changes") == found.chosen.changes
    kinds = [event["kind"] for event in sorted([*trial.events, *trial.steps], key=lambda event: event["time"])]
    assert kinds.index("calibrated") < kinds.index("fit_started") < kinds.index("step")
    assert kinds.count("calibration_step") == 2


def test_a_fit_without_it_measures_nothing(config):
    trial = fit(config(), TinyModule, WaitingData).wait()
    assert not trial.paths.calibration.exists()
    assert trial.event("calibrated") is None


def test_the_chosen_setting_is_what_trains(config):
    only = config().replace({**QUICK, "calibration.candidate_workers": [2], "calibration.candidate_prefetch": [3]})
    trial = fit(only, Seeing, DataLoader(Waiting(0), batch_size=2)).wait()
    log = trial.paths.log(0).read_text()
    assert "trains with 2 and 3" in log


class Seeing(TinyModule):
    def on_train_start(self):
        loader = self.trainer.train_dataloader
        print(f"trains with {loader.num_workers} and {loader.prefetch_factor}", flush=True)


def test_the_next_run_takes_the_result_up_again_until_something_changes(config):
    asked = config().replace(QUICK)
    first = fit(asked, TinyModule, WaitingData).wait()
    again = fit(asked.replace({"trial.max_steps": 5, "loader.num_workers": 3}), TinyModule, WaitingData).wait()
    assert result(again).reloaded
    assert result(again).measured == result(first).measured
    assert "from an earlier run" in repr(again)
    assert again.event("calibration_step") is None
    longer = fit(asked.replace({"calibration.max_measure_batches": 7}), TinyModule, WaitingData).wait()
    assert not result(longer).reloaded
    assert "again, since config.calibration.max_measure_batches was 6, now 7" in repr(longer)


def test_another_machine_or_a_torn_file_is_measured_again_and_said(config):
    asked = config().replace(QUICK)
    fit(asked, TinyModule, WaitingData).wait()
    path = saved_path(asked)
    values = json.loads(path.read_text())
    values["identity"]["machine"]["cores"] = 512
    path.write_text(json.dumps(values))
    assert "machine.cores was 512" in repr(fit(asked, TinyModule, WaitingData).wait())
    path.write_text("{")
    assert "holds no calibration" in repr(fit(asked, TinyModule, WaitingData).wait())


def test_two_ranks_train_with_what_the_first_measured(config):
    trial = fit(config(ranks=2).replace(QUICK), TinyModule, WaitingData).wait()
    assert result(trial).chosen is not None
    assert {event["rank"] for event in trial.events if event["kind"] == "calibration_step"} == {0}
    assert {event["rank"] for event in trial.steps} == {0, 1}


def test_kits_own_data_is_read_at_the_setting_that_was_found(own):
    trial = fit(own(**{**QUICK, "calibration.candidate_workers": [0]})).wait()
    assert "loader.requests_in_flight" in trial.event("calibrated", "changes")


@pytest.mark.slow
def test_where_the_step_sets_the_pace_the_loader_is_left_as_it_is_and_that_is_said(config):
    # A step is long beside what a busy machine adds to a batch that takes no time.
    changes = {
        "calibration.step_seconds": None,
        "calibration.timeout_seconds": 10.0,
        "data.arguments": {"seconds": 0.0},
    }
    asked = config().replace({**QUICK, **changes, "calibration.max_measure_batches": 3})
    found = calibrate(asked, TinyModule(seconds=0.8), WaitingData)
    assert "not what holds" in found.headline
    assert len(found.measured) == 1
    assert found.apply(asked).loader.num_workers == 0
    assert any("measured on batches in memory" in reason for reason in found.reasons)


def test_a_step_that_cannot_be_timed_leaves_the_fastest_loader_and_says_why(config):
    asked = config().replace({**QUICK, "calibration.step_seconds": None})
    found = calibrate(asked, Unwilling, WaitingData)
    assert [item.setting.num_workers for item in found.measured] == [0, 1]
    assert any("could not be timed: not on one device" in reason for reason in found.reasons)


class Unwilling(TinyModule):
    def training_step(self, batch, batch_idx):
        raise RuntimeError("not on one device")


def test_what_cannot_be_calibrated_trains_as_it_is_with_a_warning(config):
    trial = fit(config().replace(QUICK), TinyModule, Batches).wait()
    assert trial.state == "COMPLETE"
    assert any("not calibrated" in text and "Batches" in text for text in trial.warnings)
    assert result(trial).chosen is None


def test_calibrate_alone_answers_keeps_the_answer_and_is_no_trial(config):
    asked = config().replace(QUICK)
    found = calibrate(asked, TinyModule, WaitingData)
    assert len(found.measured) == 2
    assert found.apply(asked).loader.num_workers == found.chosen.num_workers
    assert len(list(kit.results(asked.trial.folder))) == 0
    trained = fit(asked, TinyModule, WaitingData).wait()
    assert result(trained).reloaded


def test_calibrate_alone_refuses_what_it_cannot_set(config):
    with pytest.raises(TrialError, match="give a DataLoader"):
        calibrate(config(), TinyModule, Batches)
    with pytest.raises(ConfigError, match="takes a Config"):
        calibrate("config.yaml", TinyModule, WaitingData)


def test_a_calibration_can_be_stopped(config):
    endless = config().replace(
        {**QUICK, "calibration.timeout_seconds": 3600.0, "calibration.max_measure_batches": 10**5}
    )
    slow = endless.replace({"data.arguments": {"seconds": 0.05}})
    with pytest.raises(TrialError, match="stopped"):
        calibrate(slow, TinyModule, WaitingData, on_start=Trial.stop)
