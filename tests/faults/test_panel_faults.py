"""The panel when something fails behind it, is changed while it runs, or is opened again after its kernel died."""

import subprocess
import sys
import threading

import pytest
from test_trial_faults import kernel_code
from trial_fixtures import steps_taken
from waiting import PATIENCE_SECONDS, remove, wait_until

import kit
from kit.errors import TrialError
from kit.trial.trial import Trial
from kit.widgets import panel as panels
from kit.widgets.panel import Panel
from kit.widgets.trial_view import TrialView

LONG = 1_000_000
WAIT = PATIENCE_SECONDS


@pytest.fixture
def made(config):
    """Makes a panel of a small trial."""

    def make(**trial):
        base = config(**trial).replace({"model.target": "kit.testing:TinyModule", "model.arguments": {"seconds": 0.01}})
        return Panel(base, data="kit.testing:TinyData")

    return make


def test_an_error_that_nobody_foresaw_stands_in_the_panel_and_the_button_is_back(made, monkeypatch):
    broken = made()

    def fail(*_):
        raise RuntimeError("the back end <b>broke</b>")

    monkeypatch.setattr(panels, "fit", fail)
    broken.button.click()
    broken.wait(WAIT)
    assert "RuntimeError: the back end" in broken.view.error.value
    assert "<b>broke" not in broken.view.error.value
    assert (broken.button.description, broken.button.disabled, broken.busy) == ("Fit", False, False)
    with pytest.raises(RuntimeError, match="broke"):  # by code it raises
        broken.fit()
    monkeypatch.undo()
    broken.fit()
    broken.wait(WAIT)
    assert broken.trial.state == "COMPLETE"
    assert broken.view.error.value == ""


def test_many_clicks_at_once_start_one_trial(made):
    mine = made(max_steps=LONG)
    clicks = [threading.Thread(target=mine.fit) for _ in range(8)]
    for click in clicks:
        click.start()
    for click in clicks:
        click.join()
    assert len(list(mine.trial.run_directory.parent.iterdir())) == 1
    mine.trial.kill()
    mine.wait(WAIT)


def test_an_edit_while_a_trial_runs_is_of_the_next_and_two_views_of_the_one_agree(made):
    mine = made(max_steps=LONG)
    before = mine.config
    trial = mine.fit()
    second = TrialView(before)
    second.watch(Trial.open(trial.run_directory))
    wait_until(steps_taken(trial, 2))
    mine.form.controls["loader.batch_size"].value = 7
    assert mine.config.loader.batch_size == 7
    assert trial.asked == before
    assert trial.config.diff(before).keys() <= {"loader.batch_size", "loader.shuffle"}  # as its own loader stood
    mine.stop()
    mine.wait(WAIT)
    wait_until(lambda: "stopped after step" in second.progress.value)
    assert "stopped after step" in mine.view.progress.value
    assert second.chart.value.split("aria-label")[1:] == mine.view.chart.value.split("aria-label")[1:]


def test_a_run_that_is_deleted_under_the_panel_is_told_and_the_next_one_starts(made):

    mine = made(max_steps=LONG)
    trial = mine.fit()
    wait_until(steps_taken_or_ended(trial))
    remove(trial.run_directory)
    with pytest.raises(TrialError, match="removed"):
        mine.wait(WAIT)
    wait_until(lambda: mine.button.description == "Fit")
    mine.form.controls["trial.max_steps"].value = 5
    mine.fit()
    mine.wait(WAIT)
    assert mine.trial.state == "COMPLETE"


def steps_taken_or_ended(trial):
    return lambda: trial.poll() and len(trial.steps) >= 1


def test_after_the_kernel_died_a_new_panel_has_its_trial_as_lost_and_offers_nothing_that_needs_it(config):
    asked = config(2, max_steps=LONG)
    code = kernel_code(asked) + "import time; time.sleep(600)\n"
    kernel = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    trial = Trial.open(kernel.stdout.readline().strip())
    wait_until(steps_taken(trial, 2))
    kernel.kill()
    kernel.communicate()
    wait_until(lambda: Trial.open(trial.run_directory).state == "LOST")
    again = Panel(asked, data="kit.testing:TinyData")
    assert again.exporting.wait(WAIT)
    assert "lost" in again.exporting.table.value.lower()
    assert (again.trial, again.busy, again.button.description) == (None, False, "Fit")
    lost = Trial.open(trial.run_directory)
    lost.stop()
    lost.kill()
    (row,) = kit.results(asked.trial.folder)
    assert (row["state"], row["steps"] >= 2) == ("LOST", True)
