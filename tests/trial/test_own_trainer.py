"""Loggers, callbacks and arguments of the Trainer reach a trial as they reach a Trainer, or are refused before it."""

import csv
import re
import time

import pytest
import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.callbacks import (
    EarlyStopping,
    LearningRateMonitor,
    ModelCheckpoint,
    ModelSummary,
    StochasticWeightAveraging,
)
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger
from lightning.pytorch.loggers.logger import DummyLogger
from lightning.pytorch.plugins.io import AsyncCheckpointIO
from own_training import Direct, Logging, Parted, Seen, Staged, Validated
from waiting import PATIENCE_SECONDS, wait_for_prediction

from kit.errors import ConfigError, TrialError
from kit.memory.alongside import fit
from kit.memory.prediction import predict_memory
from kit.records.results import results
from kit.testing import TinyData, TinyModule
from kit.trial.settings_used import settings_used

SECONDS = PATIENCE_SECONDS


def logged(trial, name):
    return [event["metrics"][name] for event in trial.events if event["kind"] == "logged" and name in event["metrics"]]


def complete(trial):
    trial.wait(SECONDS)
    assert trial.state == "COMPLETE", trial.message
    return trial


@pytest.mark.slow
@pytest.mark.parametrize(("ranks", "strategy"), [(1, "none"), (2, "ddp"), (2, "fsdp")])
def test_loggers_and_callbacks_of_lightning_do_in_a_trial_what_they_do(config, tmp_path, ranks, strategy):
    best = ModelCheckpoint(tmp_path / "best", monitor="val_loss", filename="best")
    callbacks = [LearningRateMonitor("step"), EarlyStopping("val_loss", patience=9), ModelSummary(), best]
    asked = config(ranks, strategy, validate_every_steps=4, validation_batches=2)
    logger = CSVLogger(tmp_path, name="mine", version=0)
    trial = complete(fit(asked, Logging, Validated, logger=logger, callbacks=callbacks))
    with (tmp_path / "mine" / "version_0" / "metrics.csv").open() as file:
        columns = {name for row in csv.DictReader(file) for name, value in row.items() if value}
    assert {"val_loss", "train_loss_step", "lr-SGD"} <= columns
    assert (tmp_path / "best" / "best.ckpt").exists()
    assert "Trainable params" in trial.paths.log(0).read_text()
    assert len(logged(trial, "val_loss")) == 2
    assert len(logged(trial, "lr-SGD")) >= 8
    assert [event["metrics"]["train_loss_step"] for event in trial.steps if event["rank"] == 0] == pytest.approx(
        [event["loss"] for event in trial.steps if event["rank"] == 0]
    )
    assert "callbacks: LearningRateMonitor, EarlyStopping, ModelSummary, ModelCheckpoint" in settings_used(trial)


def test_without_a_logger_the_experiment_works_and_its_numbers_become_events(config):
    trial = complete(fit(config(), Direct, Validated))
    assert logged(trial, "direct") == [float(place) for place in range(8)]


@pytest.mark.parametrize(("ranks", "strategy"), [(1, "none"), (2, "fsdp")])
def test_a_trial_tests_and_predicts_with_the_weights_that_its_steps_ended_with(config, ranks, strategy):
    asked = config(ranks, strategy, validate_every_steps=8, test_batches=2, validation_batches=2, predict_batches=1)
    trial = complete(fit(asked, Staged, Parted))
    (tested,), validated = logged(trial, "test_loss"), logged(trial, "val_loss")
    assert validated == pytest.approx([tested, tested])  # of the same samples, after the last step and in the test
    assert trial.paths.log(0).read_text().count("predicted ") == 1
    assert [event["name"] for event in trial.events if event["kind"] == "span" and event["rank"] == 0][-2:] == [
        "test", "predict",
    ]  # fmt: skip


def test_a_stage_without_a_step_or_a_loader_is_refused_before_the_first_step(config, own):
    trial = fit(config(test_batches=2, predict_batches=1), Logging, Validated)
    with pytest.raises(TrialError, match=r"trial\.test_batches: 2.*no test_step.*no test_dataloader"):
        trial.wait(SECONDS)
    assert not trial.steps
    with pytest.raises(ConfigError, match="keeps nothing for test"):
        fit(own(**{"trial.test_batches": 2}))


def test_kits_own_model_is_tested_on_the_part_that_is_kept(own):
    trial = complete(fit(own(**{"trial.test_batches": 2, "data.test_fraction": 0.25, "trial.max_steps": 2})))
    assert len(logged(trial, "test_loss")) == 1


def test_weights_are_averaged_over_the_end_of_the_training(config):
    averaging = StochasticWeightAveraging(swa_lrs=0.5, swa_epoch_start=1, annealing_epochs=1)
    asked = config().replace({"training.max_epochs": 4})
    callbacks = [averaging, LearningRateMonitor("epoch")]
    trial = complete(fit(asked, TinyModule, lambda: TinyData(samples=12), callbacks=callbacks))
    assert max(logged(trial, "lr-SGD")) == pytest.approx(0.5)


def test_early_stopping_ends_a_trial_before_its_steps(config):
    def stopping():
        return EarlyStopping("val_loss", patience=1, divergence_threshold=-1.0)

    asked = config(validate_every_steps=2)
    trial = complete(fit(asked, Logging, Validated, callbacks=stopping))
    assert trial.steps[-1]["step"] == 2


def test_schedules_see_the_real_training_and_the_trial_ends_before(config):
    asked = config().replace({"training.max_epochs": 5})
    trial = complete(fit(asked, Logging, Validated, callbacks=[Seen]))
    assert "seen: 5 epochs, 80 steps" in trial.paths.log(0).read_text()
    assert trial.steps[-1]["step"] == 8
    assert trial.event("fit_started", "max_epochs") == 5


@pytest.mark.parametrize(("steps", "seen"), [(80, 80), (3, 8)])
def test_schedules_see_a_training_of_steps_and_never_one_shorter_than_the_trial(config, steps, seen):
    asked = config().replace({"training.max_steps": steps, "training.max_epochs": 7})
    trial = complete(fit(asked, Logging, lambda: Validated(samples=12), callbacks=[Seen()]))
    assert f"seen: -1 epochs, {seen} steps" in trial.paths.log(0).read_text()
    assert trial.steps[-1]["step"] == 8


def test_a_training_shorter_than_the_trial_is_taken_as_long_as_it(config):
    trial = complete(fit(config(), Logging, lambda: Validated(samples=12), callbacks=[Seen()]))
    assert "seen: 3 epochs, 9 steps" in trial.paths.log(0).read_text()
    assert trial.steps[-1]["step"] == 8


@pytest.mark.parametrize(
    ("flags", "seen"),
    [
        ({"limit_train_batches": 2, "deterministic": True}, 1),
        ({"limit_val_batches": 0.5, "check_val_every_n_epoch": 1}, 1),
        ({"val_check_interval": 4, "num_sanity_val_steps": 1}, 2),
        ({"gradient_clip_val": 0.1, "gradient_clip_algorithm": "value"}, 0),
        ({"max_time": "00:01:00:00", "min_steps": 99, "min_epochs": 7, "detect_anomaly": True}, 0),
        ({"plugins": [AsyncCheckpointIO()], "enable_checkpointing": True, "benchmark": False}, 0),
        ({"enable_model_summary": True, "reload_dataloaders_every_n_epochs": 1, "inference_mode": False}, 0),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else "",
)
def test_arguments_of_the_trainer_pass_through(config, flags, seen):
    trial = complete(fit(config(), Logging, Validated, trainer=flags))
    assert trial.steps[-1]["step"] == 8
    assert len(logged(trial, "val_loss")) == seen or "limit_train_batches" in flags
    shown = " ".join(settings_used(trial))
    assert all(name in shown for name in flags)


@pytest.mark.parametrize(
    ("more", "path", "word"),
    [
        ({"trainer": {"devices": 4}}, "trainer.devices", "hardware.devices"),
        ({"trainer": {"fast_dev_run": True}}, "trainer.fast_dev_run", "trial.max_steps"),
        ({"trainer": {"max_steps": 50}}, "trainer.max_steps", "training.max_steps"),
        ({"trainer": {"limit_val_batch": 1}}, "trainer.limit_val_batch", "limit_val_batches"),
        ({"trainer": [1]}, "trainer", "mapping"),
        ({"logger": "kit.testing:TinyData", "callbacks": [3]}, "callbacks", "Callback"),
        ({"callbacks": [(one for one in "ab")]}, "callbacks", "Callback"),
        ({"callbacks": [TinyModule]}, "callbacks", "Callback"),
        ({"callbacks": EarlyStopping}, "callbacks", r"'monitor'.*EarlyStopping\(\.\.\.\)"),
        ({"callbacks": [ModelSummary, EarlyStopping]}, "callbacks", "'monitor'"),
        ({"callbacks": lambda trainer: None}, "callbacks", "'trainer'"),
        ({"callbacks": [{"class_path": "lightning.pytorch.callbacks.EarlyStoping"}]}, "", "mean 'EarlyStopping'"),
        ({"trainer": {"gpus": 1}}, "trainer.gpus", "hardware.devices"),
    ],
)
def test_what_a_trial_does_not_take_is_refused_before_any_run(config, tmp_path, more, path, word):
    with pytest.raises(ConfigError, match=word) as caught:
        fit(config(), TinyModule, TinyData, **more)
    assert caught.value.problems[0].path == path
    assert not (tmp_path / "runs").exists()


def test_a_callback_that_cannot_be_sent_is_named_and_a_function_that_makes_it_is_taken(config):
    holding = Seen()
    holding.file = (one for one in "ab")
    with pytest.raises(ConfigError, match="file"):
        fit(config(), TinyModule, TinyData, callbacks=[holding])
    trial = complete(fit(config(), TinyModule, TinyData, callbacks=lambda: [Seen(), ModelSummary()]))
    assert "seen:" in trial.paths.log(0).read_text()


class Service(DummyLogger):
    """Its run has to be finished, as one of W&B, before the process is gone."""

    def __init__(self, file):
        super().__init__()
        self.file = file

    @property
    def experiment(self):
        return self

    def finish(self):
        self.file.write_text("finished")


def test_the_run_of_a_service_is_finished_before_the_process_ends(config, tmp_path):
    file = tmp_path / "service"
    complete(fit(config(), TinyModule, TinyData, logger=lambda: Service(file)))
    assert file.read_text() == "finished"


def test_tensorboard_has_the_curves_of_a_trial(config, tmp_path):
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    logger = TensorBoardLogger(tmp_path, name="", version="board")
    complete(fit(config(validate_every_steps=4), Direct, Validated, logger=logger))
    found = EventAccumulator(str(tmp_path / "board"))
    found.Reload()
    assert len(found.Scalars("val_loss")) == 2
    assert len(found.Scalars("direct")) == 8


# -- validation, of kit's own data too


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 2])
def test_kits_own_model_validates_on_the_part_that_is_kept_and_the_row_has_it(own, ranks):
    split = {"data.patch": {"time": 2, "lat": 8, "lon": 8}, "data.validation_fraction": 0.4, "trial.max_steps": 6}
    more = {"trial.validate_every_steps": 3, "training.monitor": "val_loss", "trial.keep_best": True}
    asked = own(ranks, **split, **more)
    trial = complete(fit(asked))
    assert any("time 5 to 7 of 8" in sentence for sentence in settings_used(trial))
    values = logged(trial, "val_loss")
    assert len(values) == 2
    (row,) = results(asked.trial.folder)
    assert (row["monitor"], row["monitor_last"], row["monitor_best"]) == ("val_loss", values[-1], min(values))
    assert row["metrics"]["val_loss.highest"] == max(values)
    assert row["validation_fraction"] > 0
    assert row["checkpoint_fraction"] > 0
    assert (trial.paths.checkpoints / "best.ckpt").exists()
    assert trial.figure("metrics").axes[0].lines


def test_a_best_checkpoint_of_what_nobody_logs_is_missed_aloud(config):
    changes = {"training.monitor": "val_loss", "trial.keep_best": True}
    trial = complete(fit(config().replace(changes), lambda: Logging(0.1), Validated))
    (said,) = [warning for warning in trial.warnings if "keep_best" in warning]
    assert "val_loss" in said
    assert "validate_every_steps" in said


def test_a_trial_that_validates_data_of_which_nothing_is_kept_is_refused(own):
    with pytest.raises(ConfigError, match="nothing") as caught:
        fit(own(**{"trial.validate_every_steps": 2}))
    assert caught.value.problems[0].path == "data.validation_fraction"


def test_patience_ends_the_training_early_and_the_trial_says_why(config):
    changes = {"training.monitor": "val_loss", "training.early_stopping_patience": 1, "trial.max_steps": 400}
    asked = config(validate_every_steps=2, validation_batches=1).replace(changes)
    trial = complete(fit(asked, lambda: Logging(0.0), Unlearnable))
    assert trial.steps[-1]["step"] == 4
    assert "val_loss" in trial.message


class Unlearnable(Validated):
    """Its validation never gets better: there is nothing to learn."""

    def val_dataloader(self):
        return torch.utils.data.DataLoader(torch.utils.data.TensorDataset(torch.zeros(4, 8), torch.ones(4, 1) * 1e9))


def test_samples_per_second_is_by_the_clock_on_the_wall(config):
    class Slow(Logging):
        def validation_step(self, batch, batch_idx):
            time.sleep(0.1)
            return super().validation_step(batch, batch_idx)

    asked = config(validate_every_steps=1, validation_batches=1, sanity_batches=0)
    complete(fit(asked, Slow, Validated))
    (row,) = results(asked.trial.folder)
    assert row["samples_per_second"] < 4 / 0.1
    assert row["validation_fraction"] > 0.3


# -- parameters that ddp waits for


class Headless(TinyModule):
    """Has a head that the loss does not use."""

    def __init__(self):
        super().__init__()
        self.head = torch.nn.Linear(8, 3)


def test_a_head_without_a_gradient_is_named_with_the_setting_that_it_needs(config):
    trial = fit(config(2), Headless, TinyData)
    with pytest.raises(TrialError, match="got no gradient"):
        trial.wait(SECONDS)
    assert "head.weight, head.bias" in trial.message
    assert "hardware.ddp_find_unused_parameters" in trial.message


def test_a_prediction_names_the_same_setting(config):
    with pytest.raises(ConfigError, match=r"hardware\.ddp_find_unused_parameters: .*head\.weight, head\.bias"):
        predict_memory(config(2), Headless, TinyData, device="A100-40GB")


class Forgetful(TinyModule):
    """Returns no loss."""

    def training_step(self, batch, batch_idx):
        super().training_step(batch, batch_idx)


class Unoptimized(TinyModule):
    def configure_optimizers(self):
        return None


@pytest.mark.parametrize(("module", "named"), [(Forgetful, "training_step"), (Unoptimized, "configure_optimizers")])
def test_a_fit_that_trains_nothing_says_so_before_and_after(config, module, named):
    assert re.search(f"nothing is trained: {module.__name__}.{named}", repr(predict_memory(config(), module, TinyData)))
    trial = complete(fit(config(), module, TinyData))
    assert [warning for warning in trial.warnings if f"nothing was trained: {module.__name__}.{named}" in warning]


class ManyLosses(TinyModule):
    def training_step(self, batch, batch_idx):
        return torch.stack([super().training_step(batch, batch_idx)] * 2)


class Detached(TinyModule):
    def training_step(self, batch, batch_idx):
        return super().training_step(batch, batch_idx).detach()


@pytest.mark.parametrize(("module", "way_out"), [(ManyLosses, r"loss\.mean\(\)"), (Detached, "detach")])
def test_a_loss_that_torch_refuses_is_told_with_a_way_out(config, module, way_out):
    with pytest.raises(TrialError, match=f"RuntimeError.*; .*{way_out}"):
        fit(config(), module, TinyData).wait(SECONDS)
    with pytest.raises(TrialError, match=f"RuntimeError.*; .*{way_out}"):
        predict_memory(config(), module, TinyData)


def test_a_metric_of_validation_that_a_trial_never_has_is_told_with_the_setting(config):
    with pytest.raises(TrialError, match=r"val_loss.*; .*trial\.validate_every_steps"):
        fit(config(), TinyModule, TinyData, callbacks=[EarlyStopping("val_loss")]).wait(SECONDS)


@pytest.mark.parametrize("setting", ["ddp_find_unused_parameters", "ddp_static_graph"])
def test_with_the_setting_it_trains_and_the_cheaper_one_is_proposed(config, setting):
    asked = config(2).replace({f"hardware.{setting}": True, "hardware.ddp_bucket_bytes": "1 MiB"})
    trial = complete(fit(asked, Headless, TinyData))
    assert any("ddp_static_graph" in warning for warning in trial.warnings) == (setting != "ddp_static_graph")


# -- optimizers that take turns


class Adversaries(LightningModule):
    """A generator and a discriminator, as Lightning's documentation trains them."""

    def __init__(self, toggled):
        super().__init__()
        self.automatic_optimization = False
        self.toggled = toggled
        self.generator = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 8))
        self.discriminator = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.LeakyReLU(), torch.nn.Linear(16, 1))

    def configure_optimizers(self):
        return [torch.optim.Adam(part.parameters(), 0.01) for part in (self.generator, self.discriminator)]

    def training_step(self, batch, place):
        real = batch[0]
        noise = real.flip(0)
        fooled = self.turn(0, lambda: self.told(self.generator(noise), 1.0))
        caught = self.turn(1, lambda: self.told(real, 1.0) + self.told(self.generator(noise).detach(), 0.0))
        self.log("loss", fooled + caught)

    def told(self, samples, truth):
        answers = self.discriminator(samples)
        return torch.nn.functional.binary_cross_entropy_with_logits(answers, torch.full_like(answers, truth))

    def turn(self, place, loss_of):
        optimizer = self.optimizers()[place]
        if self.toggled:
            self.toggle_optimizer(optimizer)
        loss = loss_of()
        optimizer.zero_grad()
        self.manual_backward(loss)
        optimizer.step()
        if self.toggled:
            self.untoggle_optimizer(optimizer)
        return loss.detach()


@pytest.mark.slow
@pytest.mark.parametrize("toggled", [True, False])
def test_a_gan_trains_alike_under_ddp_and_fsdp(config, toggled):
    def losses(strategy, **settings):
        asked = config(2, strategy).replace({f"hardware.{name}": value for name, value in settings.items()})
        return logged(complete(fit(asked, lambda: Adversaries(toggled), TinyData)), "loss")

    losses_of_ddp = losses("ddp", ddp_find_unused_parameters=True)
    assert len(losses_of_ddp) > 2
    assert losses("fsdp") == pytest.approx(losses_of_ddp, rel=1e-5)


def test_a_gan_under_ddp_is_told_the_setting_that_it_needs(config):
    trial = fit(config(2), Adversaries(True), TinyData)
    with pytest.raises(TrialError, match="take turns"):
        trial.wait(SECONDS)
    assert "hardware.ddp_find_unused_parameters" in trial.message


# -- predictions


class Appending(Seen):
    """Leaves a line for each training that it is part of."""

    def __init__(self, file):
        self.file = file

    def on_train_start(self, trainer, pl_module):
        with self.file.open("a") as file:
            file.write("once\n")


@pytest.mark.usefixtures("no_predictions_left")
def test_callbacks_act_in_the_trial_and_not_in_the_prediction_beside_it(config, tmp_path):
    asked = config().replace({"trial.predict_memory": True})
    trial = complete(fit(asked, Direct, Validated, callbacks=Appending(tmp_path / "lines")))
    wait_for_prediction(trial)
    assert (tmp_path / "lines").read_text() == "once\n"


@pytest.mark.usefixtures("no_predictions_left")
def test_a_module_that_uses_its_logger_is_predicted_whole(config):
    found = predict_memory(config(), Direct, Validated)
    assert found.complete, found
