"""The four answers on top of a panel, from real estimates, plans and trials."""

import math
from dataclasses import replace

import numpy as np
import pytest
import xarray
from waiting import PATIENCE_SECONDS

import kit
from kit.config import Config
from kit.records.row import row_of
from kit.speed.prediction import speed_beside
from kit.studies.calibration.result import Calibration
from kit.studies.calibration.rules import LoaderSetting, Measurement
from kit.widgets.memory_view import CardAnswer
from kit.widgets.overview import (
    Overview,
    calibrated_card,
    card_html,
    data_card,
    measure_speed,
    memory_card,
    run_card,
    speed_card,
    speed_expected,
)
from kit.widgets.panel import Panel
from kit.widgets.parts import WAITING

FEW = {
    "model.target": "kit.testing:TinyModule", "trial.max_steps": 12, "trial.warmup_steps": 2,
    "hardware.accelerator": "cpu", "hardware.threads_per_rank": 1,
}  # fmt: skip


@pytest.fixture(scope="module")
def trial(tmp_path_factory):
    folder = tmp_path_factory.mktemp("overview")
    (folder / "pyproject.toml").touch()
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        found = kit.fit(Config().replace(FEW), data="kit.testing:TinyData")
        found.wait(PATIENCE_SECONDS)
        yield found


@pytest.fixture(scope="module")
def estimate(trial):
    return kit.predict_memory(trial.asked, data="kit.testing:TinyData", device="A100-40GB")


def test_before_anything_is_known_every_card_says_why(trial):
    config = trial.asked
    cards = [
        memory_card(None, None, "predicting …"), speed_card(None, config), data_card((), 1, None, config, "no store"),
        run_card(None, config),
    ]  # fmt: skip
    assert [card.value for card in cards] == ["not known"] * 4
    assert all(card.why for card in cards)


def test_memory_says_the_verdict_the_size_and_the_largest_batch(estimate):
    card = memory_card(CardAnswer("A100-40GB", estimate, 92), estimate)
    assert "fits" in card.value
    assert card.unit.endswith("of 39.2 GiB")
    assert "largest batch 92" in card.why
    assert 0 < sum(fraction for fraction, _ in card.bar) <= 1


def test_memory_of_settings_before_is_grey_and_under_no_other_name(estimate):
    card = memory_card(None, estimate, "predicting …", elsewhere="T4-16GB")
    assert card.stale
    assert not card.colour
    assert "T4" not in card.title
    assert (card.unit.endswith("before the change"), card.why) == (True, "predicting …")
    shown = Overview()
    shown.show(memory=card)
    assert WAITING in shown.places["memory"]._dom_classes
    shown.show(memory=memory_card(None, estimate))
    assert WAITING not in shown.places["memory"]._dom_classes


def test_speed_is_what_a_trial_of_these_settings_gave(trial):
    speed = measure_speed(trial)
    card = speed_card(speed, trial.asked)
    assert card.title == "speed, measured"
    assert card.unit == "samples/s here"
    longer = trial.asked.replace({"trial.max_steps": 99, "training.max_epochs": 7, "name": "other"})
    assert speed_card(speed, longer) == card
    other = speed_card(speed, trial.asked.replace({"loader.batch_size": 3}))
    assert other.value == "not known"
    assert trial.name in other.why


def test_on_a_gpu_model_that_is_not_here_nothing_that_was_measured_here_is_its_speed(trial, estimate):
    speed = measure_speed(trial)
    card = speed_card(speed, trial.asked, elsewhere="A100-40GB")
    assert (card.value, card.unit) == ("not known", "on A100-40GB")
    assert "this machine gave" in card.why
    assert run_card(speed, trial.asked, "A100-40GB").value == "not known"
    assert "A100-40GB" in memory_card(None, estimate, elsewhere="A100-40GB").title


def test_on_a_gpu_model_that_is_not_here_the_operators_of_the_step_are_priced(trial, estimate):
    predicted, speed = speed_beside(estimate, trial.asked), measure_speed(trial)
    card = speed_card(speed, trial.asked, elsewhere="A100-40GB", predicted=predicted)
    assert card.title == "speed of A100-40GB, predicted"
    assert " to " in card.value
    assert "bound by host" in card.why
    assert "cores" not in card.why
    beside = speed_card(None, trial.asked, predicted=replace(predicted, busy_cores=2.3))
    assert "others used 2.3 cores" in beside.why
    run = run_card(speed, trial.asked, "A100-40GB", predicted)
    assert " to " in run.value
    assert "data sheet of A100-40GB" in run.why


def test_speed_is_predicted_by_trials_of_the_same_that_have_run_here(trial):
    row = {**row_of(trial.paths), "measured_batches": 40, "samples_per_second_error_fraction": 0.05}
    known = speed_expected(trial.asked, None, "kit.testing:TinyData", [row])
    assert known.samples_per_second == row["samples_per_second"]
    assert known.low < known.samples_per_second < known.high
    card = speed_card(None, trial.asked, known)
    assert card.title == "speed, predicted"
    assert " to " in card.value
    longer = trial.asked.replace({"trial.max_steps": 99, "name": "other"})
    assert speed_expected(longer, None, "kit.testing:TinyData", [row]) == known
    assert speed_expected(trial.asked.replace({"loader.batch_size": 3}), None, "kit.testing:TinyData", [row]) is None
    assert speed_expected(trial.asked, "kit.testing:TinyModule", None, [row]) is None, "other data"
    few = {**row, "measured_batches": 2}
    assert speed_expected(trial.asked, None, "kit.testing:TinyData", [few]) is None


def test_the_whole_run_counts_its_epochs(trial):
    speed = measure_speed(trial)
    assert speed.run is not None, speed.run_unknown
    epochs = trial.asked.replace({"training.max_epochs": 5})
    assert run_card(speed, epochs).unit == "5 epochs, 1 device"
    one = run_card(speed, trial.asked)
    steps = trial.asked.replace({"training.max_steps": math.ceil(speed.run.samples_per_epoch / speed.run.batch_size)})
    assert run_card(speed, steps).unit.endswith("steps, 1 device")
    assert (run_card(speed, steps).value, run_card(speed, steps).why) == (one.value, one.why)  # an epoch in steps
    assert run_card(speed, trial.asked.replace({"loader.batch_size": 3})).value == "not known"


def test_an_epoch_of_unknown_length_is_said(trial):
    speed = measure_speed(trial)
    unknown = type(speed)(
        config=speed.config,
        name=speed.name,
        samples_per_second=1.0,
        sentence="",
        run_unknown="the loader tells no length",
    )
    assert "no length" in run_card(unknown, trial.asked).why


def test_what_the_store_can_give_stands_beside_what_training_takes(trial):
    config = trial.asked.replace({"data.patch": {"time": 2, "y": 8, "x": 8}})
    source = xarray.DataArray(np.zeros((64, 64, 64), "float32"), dims=("time", "y", "x"), name="u").to_dataset()
    plan = kit.plan_chunks(config, source=source)
    speed = measure_speed(trial)
    alone, beside = (
        data_card((plan.chosen,), plan.ranks, known, one, "") for known, one in ((None, config), (speed, trial.asked))
    )
    assert alone.unit == "samples/s can be read"
    assert "of it used" not in alone.why
    assert "of it used" in beside.why
    assert "requests" in beside.why


def test_cards_are_escaped_and_replaced_one_by_one(trial):
    shown = Overview()
    shown.show(speed=speed_card(None, trial.asked), run=run_card(None, trial.asked))
    shown.show(speed=data_card((), 1, None, trial.asked, "<b>bad</b>"))
    assert "<b>bad" not in shown.places["speed"].value
    assert "whole run" in shown.text
    assert "<section" in card_html(speed_card(None, trial.asked))


@pytest.mark.slow
def test_a_panel_fills_its_cards_as_it_goes(tmp_path, monkeypatch):
    (tmp_path / "pyproject.toml").touch()
    monkeypatch.chdir(tmp_path)
    made = Panel(Config().replace(FEW), data="kit.testing:TinyData")
    assert "once the panel is shown" in made.overview.cards["memory"].why
    made._ipython_display_()
    made.memory.wait(PATIENCE_SECONDS)
    assert "fits" in made.overview.cards["memory"].value
    made.fit()
    assert made.tabs.titles[made.tabs.selected_index] == "Live"
    made.wait(PATIENCE_SECONDS)
    assert made.overview.cards["speed"].unit == "samples/s here"
    assert made.overview.cards["run"].value != "not known"
    made.exporting.wait()
    assert "Trials (1)" in made.tabs.titles
    made.form.edit({"loader.batch_size": 3})
    assert made.overview.cards["speed"].value == "not known"
    assert "1 setting changed" in made.changes.value
    made.reset_button.click()
    assert made.overview.cards["speed"].unit == "samples/s here"
    made.close()


def test_the_speed_of_another_card_shows_with_its_memory(tmp_path, monkeypatch):
    (tmp_path / "pyproject.toml").touch()
    monkeypatch.chdir(tmp_path)
    made = Panel(Config().replace(FEW), data="kit.testing:TinyData")
    made._ipython_display_()
    made.memory.wait(PATIENCE_SECONDS)
    made.memory.device_control.value = "A100-40GB"
    made.memory.wait(PATIENCE_SECONDS)
    assert made.overview.cards["speed"].title == "speed of A100-40GB, predicted"
    made.close()


def test_the_data_card_is_what_a_calibration_of_these_settings_gave():
    chosen = LoaderSetting(num_workers=2, prefetch_factor=3)
    item = Measurement(
        setting=chosen, batches_per_second=12.5, batches=10, seconds=0.8, error=0.02, first_batch_seconds=0.1,
        whole_seconds=1.0,
    )  # fmt: skip
    found, config = Calibration(chosen=chosen, measured=(item,)), Config().replace({"loader.batch_size": 4})
    card = calibrated_card(found, found.apply(config))
    assert (card.title, card.value) == ("data, calibrated", "50")
    assert "2 loader processes" in card.why
    for other in (None, Calibration(chosen=None), found):
        assert calibrated_card(other, config) is None
