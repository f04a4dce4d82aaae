"""The button of a panel that profiles: what it does is `kit.studies.profile`, and what was found stands under it."""

import re

import pytest
from waiting import PATIENCE_SECONDS, wait_until

from kit.config import Config
from kit.errors import TrialError
from kit.studies.profiling.profile import Profile
from kit.testing import TinyData, TinyModule
from kit.widgets.panel import panel


@pytest.fixture
def shown(tmp_path):
    def make(module=TinyModule, **trial):
        folder = str(tmp_path / "runs")
        settings = {"max_steps": 8, "warmup_steps": 1, "folder": folder, "predict_memory": False, **trial}
        hardware = {"accelerator": "cpu", "devices": 1, "threads_per_rank": 1}
        profiler = {"folder": str(tmp_path / "profiler")}
        return panel(Config.make({"hardware": hardware, "trial": settings, "profiler": profiler}), module, TinyData)

    return make


@pytest.mark.slow
def test_the_panel_runs_all_passes_and_shows_what_they_found(shown):
    mine = shown()
    found = mine.profile()
    assert mine.profiling.button.description == "Stop"
    assert mine.profile() is found  # a second call is no second profile
    mine.wait(PATIENCE_SECONDS)
    view = mine.profiling
    assert isinstance(found, Profile)
    assert view.button.description == "Profile"
    assert view.chart.value.startswith("<svg")
    assert "Python functions" in view.tables.value
    view.open_button.click()
    assert "<iframe" in view.trace.value
    view.open_button.click()
    assert view.trace.value == ""


def test_what_is_refused_stands_beside_the_button(shown):
    mine = shown(max_steps=2, warmup_steps=1)
    mine.profiling.button.click()
    wait_until(lambda: re.search("2 steps .*too few", mine.profiling.words.value))
    wait_until(lambda: not mine.profiling.busy)


@pytest.mark.slow
def test_a_trial_and_a_profile_never_run_at_once(shown):
    mine = shown(lambda: TinyModule(seconds=0.05), max_steps=200)
    mine.fit()
    with pytest.raises(TrialError, match="trial is running"):
        mine.profile()
    mine.stop()
    mine.wait(PATIENCE_SECONDS)
    mine.profile()
    with pytest.raises(TrialError, match="profile is running"):
        mine.fit()
    mine.profiling.button.click()
    mine.wait(PATIENCE_SECONDS)
    assert mine.profiling.profile.state == "STOPPED"
