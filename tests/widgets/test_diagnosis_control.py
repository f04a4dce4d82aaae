"""The button of a panel that diagnoses: it does `kit.studies.diagnose(trial)`, and each finding can be tried there."""

import re
from dataclasses import replace

import pytest
from waiting import PATIENCE_SECONDS, wait_until

from kit.config import Config
from kit.errors import TrialError
from kit.studies.diagnosis import diagnose
from kit.testing import TinyData, TinyModule
from kit.widgets.panel import panel


@pytest.fixture
def shown(tmp_path, monkeypatch):
    """Its trials are judged as short beside their start-up, which how busy the machine is has no part in."""
    told = diagnose.evidence_of
    monkeypatch.setattr(
        diagnose, "evidence_of", lambda *given: replace(told(*given), start_up_seconds=4.0, total_seconds=10.0)
    )
    trial = {"folder": str(tmp_path / "runs"), "predict_memory": False, "max_steps": 4, "warmup_steps": 1}
    config = Config.make({"hardware": {"accelerator": "cpu", "threads_per_rank": 1}, "trial": trial})
    return panel(config, TinyModule, TinyData)


def test_nothing_is_diagnosed_before_a_trial_has_ended(shown):
    assert shown.diagnosing.button.disabled
    with pytest.raises(TrialError, match="no trial .*ended"):
        shown.diagnose()
    assert "ended" in shown.diagnosing.words.value


@pytest.mark.slow
def test_a_click_names_what_the_trial_suffers_from_and_a_change_is_tried_there(shown):
    trial = shown.fit()
    shown.wait(PATIENCE_SECONDS)
    control = shown.diagnosing
    control.button.click()
    wait_until(lambda: control.view is not None and not control.busy)
    assert control.findings.children == (control.view.ui,)
    assert "kit.studies.diagnose(" in control.code.value
    assert str(trial.run_directory) in control.code.value

    (item,) = (item for item in control.view.findings if item.finding.name == "loader start-up")
    item.button.click()
    with pytest.raises(TrialError, match="a change tried"):
        shown.fit()
    with pytest.raises(TrialError, match="a change tried"):
        shown.profile()
    shown.wait(PATIENCE_SECONDS)
    assert item.tried is not None
    assert item.tried.sentence.split(",")[0] in item.answer.value

    shown.fit()
    assert control.view is None, "an earlier trial is not what is on show"
    assert control.findings.children == ()
    shown.wait(PATIENCE_SECONDS)
    assert not control.button.disabled


@pytest.mark.slow
def test_a_change_is_not_tried_beside_a_trial(shown):
    shown.fit()
    shown.wait(PATIENCE_SECONDS)
    (item, *_) = (item for item in _diagnosed(shown).findings if item.button in item.ui.children)
    shown.config = shown.config.replace({"trial.max_steps": 100_000})
    shown.fit()
    item.button.click()
    assert re.search("not tried: .*running", item.answer.value)
    shown.stop()
    shown.wait(PATIENCE_SECONDS)


def _diagnosed(shown):
    shown.diagnose()
    return shown.diagnosing.view
