"""The calibration beside a panel: real loaders in real processes, no kernel."""

import pytest
from waiting import PATIENCE_SECONDS

from kit.config import Config
from kit.errors import TrialError
from kit.widgets.panel import Panel

WAIT = PATIENCE_SECONDS


@pytest.fixture
def config(tmp_path):
    return Config.make(
        {
            "hardware": {"accelerator": "cpu", "threads_per_rank": 1},
            "model": {"target": "kit.testing:TinyModule"},
            "loader": {"num_workers": 3},
            "trial": {"max_steps": 4, "warmup_steps": 1, "folder": str(tmp_path / "runs"), "predict_memory": False},
            "calibration": {
                "candidate_workers": [0],
                "timeout_seconds": 60.0,
                "max_measure_batches": 10,
                "step_seconds": 0.0,  # the fastest is looked for, whether or not the loader keeps up with a step
            },
        }
    )


def test_a_click_measures_and_takes_the_choice_over_into_the_form(config):
    panel = Panel(config, data="kit.testing:TinyData")
    assert panel.calibration.button.description == "Calibrate loader"
    panel.calibration.button.click()
    assert panel.calibration.wait(WAIT)
    assert panel.calibration.error is None
    assert panel.config.loader.num_workers == 0
    assert "loader.num_workers" in panel.code.value
    shown = panel.calibration.result.value
    assert "<table" in shown
    assert "<svg" in shown
    assert "loader calibrated" in panel.calibration.progress.value
    assert panel.calibration.button.description == "Calibrate loader"


def test_the_switch_in_the_form_is_off_and_calibrates_a_fit_when_it_is_on(config):
    panel = Panel(config, data="kit.testing:TinyData")
    switch = panel.form.controls["calibration.enabled"]
    assert not switch.value
    switch.value = True
    panel.fit().wait()
    panel.wait()
    assert panel.trial.event("calibrated") is not None
    assert "loader calibrated" in panel.view.notes.value or "loader calibrated" in repr(panel.trial)


def test_what_went_wrong_is_said_and_the_form_stays(config):
    panel = Panel(config, data="kit.testing:Batch")
    panel.calibrate()
    assert panel.calibration.wait(WAIT)
    assert panel.calibration.error is not None
    assert "not calibrated" in panel.calibration.progress.value
    assert panel.config == config


def test_a_second_click_stops_it_and_nothing_is_fitted_meanwhile(config):
    slow = config.replace(
        {
            "calibration.timeout_seconds": 3600.0,
            "calibration.step_seconds": 0.2,
            "calibration.max_measure_batches": 9999,
        }
    )
    panel = Panel(slow, data="kit.testing:TinyData")
    panel.calibration.button.click()
    assert panel.calibration.button.description == "Stop"
    with pytest.raises(TrialError, match="being calibrated"):
        panel.fit()
    panel.calibration.button.click()
    assert panel.calibration.wait(WAIT)
    assert panel.config == slow
    assert "stopped" in panel.calibration.progress.value


def test_a_list_of_numbers_is_edited_as_text(config):
    panel = Panel(config, data="kit.testing:TinyData")
    control = panel.form.controls["calibration.candidate_workers"]
    assert control.value == "0"
    control.value = "0, 4, 8"
    assert panel.config.calibration.candidate_workers == (0, 4, 8)
    control.value = "0, four"
    assert panel.config.calibration.candidate_workers == (0, 4, 8)
    assert panel.form.problems
