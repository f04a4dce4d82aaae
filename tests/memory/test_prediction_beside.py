"""The prediction that stands beside a fit: made beside it, taken from an earlier one, or absent without harm."""

import os
from functools import partial

import pytest
import torch
from faulty import FaultyModule
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import EMAWeightAveraging, StochasticWeightAveraging
from torch.utils.data import DataLoader, TensorDataset
from trial_fixtures import ranks_alive
from waiting import PATIENCE_SECONDS, remove, wait_for_prediction, wait_until

from kit.memory import alongside, recordings
from kit.memory.alongside import fit
from kit.memory.prediction import predict_memory
from kit.memory.residual_table import residuals
from kit.records.results import results
from kit.records.row import predicted_of
from kit.testing import TinyData, TinyModule

SECONDS = PATIENCE_SECONDS
MODULE, DATA = "kit.testing:TinyModule", "kit.testing:TinyData"
LONG = 1_000_000

pytestmark = pytest.mark.usefixtures("no_predictions_left")


@pytest.fixture(autouse=True)
def nothing_known():
    recordings.cache.clear()
    alongside._predicted_beside.clear()


def wide_data():
    return TinyData(width=4096, samples=64)


def predicted(trial):
    wait_for_prediction(trial)
    return predicted_of(trial)


def test_a_fit_is_predicted_beside_itself_and_its_row_holds_both(config):
    asked = config(predict_memory=True).replace({"model.arguments": {"width": 4096}})
    trial = fit(asked, MODULE, wide_data).wait(SECONDS)
    found = predicted(trial)
    again = predict_memory(asked, MODULE, wide_data)
    assert (found.device_allocated_bytes, found.breakdown) == (again.device_allocated_bytes, again.breakdown)
    (row,) = results(asked.trial.folder)
    assert row["device_allocated_bytes_predicted"] == found.device_allocated_bytes
    assert row["device_allocated_bytes_ratio"] == pytest.approx(1, abs=0.05)
    assert row["device_reserved_bytes_measured"] is None  # the CPU's allocator reserves nothing
    (residual,) = residuals(asked.trial.folder)
    assert (residual.device, residual.count) == ("CPU", 1)
    assert residual.median_ratio == row["device_allocated_bytes_ratio"]


@pytest.mark.parametrize("averaging", [EMAWeightAveraging, partial(StochasticWeightAveraging, swa_lrs=0.1)])
def test_a_model_that_a_callback_averages_is_measured_as_predicted(config, averaging):
    asked = config(predict_memory=True).replace({"model.arguments": {"width": 4096}})
    trial = fit(asked, MODULE, wide_data, callbacks=averaging()).wait(SECONDS)
    alone = predict_memory(asked, MODULE, wide_data)
    found = predicted(trial)
    assert found.device_allocated_bytes > alone.device_allocated_bytes + 4 * 4096
    (row,) = results(asked.trial.folder)
    assert row["device_allocated_bytes_ratio"] == pytest.approx(1, abs=0.02)


class Widening(TinyModule):
    def validation_step(self, batch, batch_idx):
        self.layer(batch[0]).repeat(1, 256).sin()

    def val_dataloader(self):
        return wide_data().train_dataloader()


class Staged(TinyModule):
    """Takes most while it is tested, or while it predicts, each on batches of its own."""

    def __init__(self, width, most):
        super().__init__(width)
        self.most = most

    def test_step(self, batch, batch_idx):
        batch[0].repeat(1, 8 if self.most == "test" else 1).sin()

    def predict_step(self, batch, batch_idx):
        return batch[0].repeat(1, 8 if self.most == "predict" else 1).sin()


class Parts(TinyData):
    """Makes what it tests and predicts on when it is set up for that."""

    def setup(self, stage):
        self.stage = stage

    def _later(self):
        if self.stage != "fit":
            return DataLoader(TensorDataset(torch.randn(48, 4096), torch.randn(48, 1)), batch_size=16)
        raise RuntimeError("not set up")

    def test_dataloader(self):
        return self._later()

    def predict_dataloader(self):
        return self._later()


@pytest.mark.parametrize(("most", "ranks", "strategy"), [("test", 1, "none"), ("predict", 2, "fsdp")])
def test_a_test_and_a_prediction_after_the_fit_are_predicted_and_measured(config, most, ranks, strategy):
    asked = config(ranks, strategy, max_steps=3, predict_memory=True, test_batches=2, predict_batches=2)
    asked = asked.replace({"model.arguments": {"width": 4096, "most": most}})
    found = predicted(fit(asked, Staged, lambda: Parts(width=4096, samples=64)).wait(SECONDS))
    (row,) = results(asked.trial.folder)
    assert found.peak.phase == most
    assert row["device_allocated_bytes_ratio"] == pytest.approx(1, abs=0.02)
    assert any(f"{most} takes batches" in note and "of 16" in note for note in found.notes)


class Reading(Callback):
    """Ends a training whose weights are no numbers."""

    def on_fit_start(self, trainer, pl_module):
        if float(pl_module.layer.weight.sum()) == 1.0:
            raise ValueError("no numbers")


def test_what_beside_the_steps_takes_memory_is_in_the_prediction_or_said_to_be_missing(config):
    asked = config(predict_memory=True).replace({"model.arguments": {"width": 4096}, "trial.validate_every_steps": 2})
    trial = fit(asked, Widening, wide_data().train_dataloader(), callbacks=[Reading()]).wait(SECONDS)
    found = predicted(trial)
    (row,) = results(asked.trial.folder)
    assert found.peak.phase == "validation"
    assert row["device_allocated_bytes_ratio"] == pytest.approx(1, abs=0.05)
    assert any("Reading" in reason and "no numbers" in reason for reason in found.reasons)


def test_a_known_answer_is_there_when_fit_returns(config):
    asked = config(predict_memory=True, max_steps=LONG)
    known = predict_memory(asked, MODULE, DATA)
    trial = fit(asked, MODULE, DATA)
    assert trial.paths.prediction.is_file()
    assert predicted(trial).device_allocated_bytes == known.device_allocated_bytes
    trial.kill()
    trial.wait(SECONDS)


def test_an_equal_fit_takes_the_answer_of_the_first(config):
    asked = config(predict_memory=True)
    first = predicted(fit(asked, MODULE, DATA).wait(SECONDS))
    trial = fit(asked.replace({"trial.max_steps": 9}), MODULE, DATA)
    assert trial.paths.prediction.is_file()
    assert predicted(trial) == first
    trial.wait(SECONDS)


def test_a_prediction_waits_for_the_first_step_and_goes_when_the_trial_is_removed(config, no_predictions_left):
    trial = fit(config(predict_memory=True, max_steps=LONG), lambda: TinyModule(seconds=3600), DATA)
    wait_until(lambda: trial.poll() == "RUNNING" and len(ranks_alive()) >= 2)
    assert len(list(no_predictions_left.iterdir())) == 1
    assert not trial.paths.prediction.exists()
    remove(trial.run_directory)
    wait_until(lambda: not list(no_predictions_left.iterdir()))


class Shy(TinyModule):
    """Ends the process of any dry run."""

    def __init__(self):
        super().__init__()
        if type(self.layer.weight.data).__name__ == "FakeTensor":
            os._exit(3)


def test_a_fit_that_cannot_be_predicted_runs_all_the_same(config, no_predictions_left):
    trial = fit(config(predict_memory=True), Shy, DATA).wait(SECONDS)
    assert trial.state == "COMPLETE"
    wait_until(lambda: not list(no_predictions_left.iterdir()))
    assert not trial.paths.prediction.exists()


def test_what_goes_wrong_after_two_steps_leaves_prediction_and_measurement(config):
    asked = config(predict_memory=True)
    trial = fit(asked, lambda: FaultyModule({(0, 3): "raise"}), TinyData)
    wait_until(lambda: trial.poll() == "FAILED")
    predicted(trial)
    assert results(asked.trial.folder)[0]["device_allocated_bytes_ratio"] is not None


def test_predicting_can_be_switched_off(config, no_predictions_left):
    trial = fit(config(), MODULE, DATA).wait(SECONDS)
    assert not trial.paths.prediction.exists()
    assert list(no_predictions_left.iterdir()) == []
