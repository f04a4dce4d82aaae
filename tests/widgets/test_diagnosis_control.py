"""The button of a panel that diagnoses: what it does is `kit.diagnose(trial)`, and each finding can be tried there."""

import time

import pytest
from typing_extensions import override

from kit.config import Config
from kit.errors import TrialError
from kit.run.client import close_supervisors
from kit.testing import TinyData, TinyModule
from kit.widgets.panel import panel


@pytest.fixture(scope="module", autouse=True)
def no_supervisor_left():
    yield
    close_supervisors()


class Late:
    """A loader whose first batch takes longer than a short trial."""

    def __init__(self, loader):
        self.loader = loader

    def __len__(self):
        return len(self.loader)

    def __iter__(self):
        time.sleep(1.2)
        yield from self.loader


class LateData(TinyData):
    @override
    def train_dataloader(self):
        return Late(super().train_dataloader())


@pytest.fixture
def shown(tmp_path):
    trial = {"folder": str(tmp_path / "runs"), "predict_memory": False, "max_steps": 4, "warmup_steps": 1}
    config = Config.make({"hardware": {"accelerator": "cpu", "threads_per_rank": 1}, "trial": trial})
    return panel(config, TinyModule, LateData)


def wait_until(condition, seconds=60.0):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.01)


def test_nothing_is_diagnosed_before_a_trial_has_ended(shown):
    assert shown.diagnosing.button.disabled
    with pytest.raises(TrialError, match="no trial has ended here"):
        shown.diagnose()
    assert "no trial has ended here" in shown.diagnosing.words.value


def test_a_click_names_what_the_trial_suffers_from_and_a_change_is_tried_there(shown):
    trial = shown.fit()
    shown.wait(60)
    control = shown.diagnosing
    control.button.click()
    wait_until(lambda: control.view is not None and not control.busy)
    assert control.findings.children == (control.view.ui,)
    assert "kit.diagnose(" in control.words.value
    assert str(trial.run_directory) in control.words.value

    (item,) = (item for item in control.view.findings if item.finding.name == "loader start-up")
    item.button.click()
    with pytest.raises(TrialError, match="a change tried"):
        shown.fit()
    with pytest.raises(TrialError, match="a change tried"):
        shown.profile()
    shown.wait(120)
    assert item.tried is not None
    assert item.tried.sentence.split(",")[0] in item.answer.value

    shown.fit()
    assert control.view is None, "an earlier trial is not what is on show"
    assert control.findings.children == ()
    shown.wait(60)
    assert not control.button.disabled


def test_a_change_is_not_tried_beside_a_trial(shown):
    shown.fit()
    shown.wait(60)
    (item, *_) = (item for item in _diagnosed(shown).findings if item.button in item.ui.children)
    shown.config = shown.config.replace({"trial.max_steps": 4000})
    view = shown.diagnosing.view
    shown.fit()
    view._try(item)
    assert "not tried: a trial is running" in item.answer.value
    shown.stop()
    shown.wait(60)


def _diagnosed(shown):
    shown.diagnose()
    return shown.diagnosing.view
