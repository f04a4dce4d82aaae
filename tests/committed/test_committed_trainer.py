"""A committed file carries what the trial's Trainer was given, and runs with it in processes of its own."""

import csv
import datetime
import json
import os
import re
import shlex
import sys
from functools import partial
from pathlib import Path

import committed_parts as parts
import pytest
import torch
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import (
    Callback,
    EarlyStopping,
    GradientAccumulationScheduler,
    LambdaCallback,
    LearningRateMonitor,
    ModelCheckpoint,
    StochasticWeightAveraging,
    Timer,
)
from lightning.pytorch.loggers import CSVLogger
from properties import nightly

import kit
from kit.charts.trial import loss_info
from kit.committed.job import make_job
from kit.config import Config
from kit.errors import ConfigError
from kit.targets import load_target
from kit.train.cli import CommittedCLI, check_checkpoint, unfit_checkpoint
from kit.trial.payload import TrainerParts

pytestmark = [pytest.mark.timeout(400), pytest.mark.usefixtures("warm_runs")]
SECONDS = 300

OWN = '''
import json
import os
from pathlib import Path

import torch
from lightning.pytorch import Callback, LightningDataModule, LightningModule
from lightning.pytorch.callbacks import ModelCheckpoint


class Told(Callback):
    """Writes what a rank computes with."""

    def __init__(self, folder, width: int = 1) -> None:
        self.folder, self.width = Path(folder), width

    def on_train_start(self, trainer, pl_module):
        found = {"threads": torch.get_num_threads(), "policy": os.environ.get("OMP_WAIT_POLICY"), "width": self.width}
        found |= {"sanity": trainer.num_sanity_val_steps, "accumulate": trainer.accumulate_grad_batches}
        found["callbacks"] = [type(callback).__name__ for callback in trainer.callbacks]
        (self.folder / f"told.{trainer.global_rank}.json").write_text(json.dumps(found))


class Line(LightningModule):
    """Fits a line, and may bring a checkpoint callback or have parameters that no step uses."""

    def __init__(self, brings: bool = False, unused: bool = False) -> None:
        super().__init__()
        self.layer, self.brings = torch.nn.Linear(4, 1), brings
        self.more = torch.nn.Linear(4, 1) if unused else None

    def training_step(self, batch, batch_idx):
        loss = self.layer(batch).square().mean()
        self.log("loss", loss)
        return loss

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", self.layer(batch).square().mean())

    def test_step(self, batch, batch_idx):
        self.log("test_loss", self.layer(batch).square().mean())

    def configure_callbacks(self):
        return [ModelCheckpoint(dirpath="brought", monitor="loss")] if self.brings else []

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.01)


class Endless(torch.utils.data.IterableDataset):
    def __iter__(self):
        while True:
            yield torch.ones(4)


class Samples(LightningDataModule):
    def __init__(self, endless: bool = False) -> None:
        super().__init__()
        self.endless = endless

    def train_dataloader(self):
        return torch.utils.data.DataLoader(Endless() if self.endless else torch.ones(32, 4), batch_size=4)

    def val_dataloader(self):
        return torch.utils.data.DataLoader(torch.ones(8, 4), batch_size=4)

    test_dataloader = val_dataloader
'''


@pytest.fixture
def project(tmp_path, monkeypatch):
    """A project folder with classes of its own, which is the working folder."""
    monkeypatch.chdir(tmp_path)
    parts.make_project(tmp_path)
    (tmp_path / "own.py").write_text(OWN)
    monkeypatch.syspath_prepend(tmp_path)
    yield tmp_path
    sys.modules.pop("own", None)


@pytest.fixture
def small(project):
    """The config of one rank that fits a line: 8 batches in each of 2 epochs."""
    return Config().replace({
        "name": "line", "hardware.accelerator": "cpu", "hardware.devices": 1, "model.target": "own:Line",
        "training.max_epochs": 2, "trial.max_steps": 16, "trial.predict_memory": False, "trial.measure_memory": False,
    })  # fmt: skip


def told(project, rank=0):
    """What a rank computed with; it is written once."""
    file = project / f"told.{rank}.json"
    found = json.loads(file.read_text())
    file.unlink()
    return found


def recorded(*callbacks, **more):
    return TrainerParts.of(more.get("logger"), list(callbacks), {}).summary()["made"]


class AtHand(Callback):
    """Keeps what it is given, or a part of it."""

    def __init__(self, size, at="end", *, scale=2.0):
        self._size, self.at, self.doubled = size, at, scale * 2


@pytest.mark.parametrize(
    ("callback", "arguments"),
    [
        (LearningRateMonitor("step"), {"logging_interval": "step"}),
        (EarlyStopping("loss", mode="max", min_delta=0.5), {"monitor": "loss", "mode": "max", "min_delta": 0.5}),
        (GradientAccumulationScheduler({0: 1, 4: 2}), {"scheduling": {0: 1, 4: 2}}),
        (StochasticWeightAveraging(0.05, swa_epoch_start=1), {"swa_lrs": 0.05, "swa_epoch_start": 1}),
        (partial(EarlyStopping, "loss", min_delta=0.5), {"monitor": "loss", "min_delta": 0.5}),
        (LearningRateMonitor, {}),
        ({"class_path": "own.Told", "init_args": {"folder": "."}}, {"folder": "."}),
        (AtHand(3), {"size": 3}),
    ],
)  # fmt: skip
@pytest.mark.usefixtures("project")
def test_arguments_are_known_where_the_same_object_comes_of_them(callback, arguments):
    (found,) = recorded(callback)["callbacks"]
    assert found["arguments"] == arguments


@pytest.mark.parametrize(
    ("callback", "why"),
    [
        (AtHand(3, scale=3.0), "made with"),
        (EarlyStopping("loss", min_delta=0.5), "made with"),
        (Timer("00:00:01:00"), "made with|told"),
        (LambdaCallback(on_fit_start=print), "made with"),
        (lambda: LearningRateMonitor(), "function"),
        (partial(LambdaCallback, on_fit_start=print), "plain"),
    ],
)
def test_what_is_not_known_is_told_with_a_reason(callback, why):
    (found,) = recorded(callback)["callbacks"]
    assert "class" not in found
    assert re.search(why, found["why"])


@pytest.mark.usefixtures("project")
@pytest.mark.parametrize(
    "arguments", [{"api_key": "swordfish"}, {"tracking_uri": "https://me:swordfish@tracking.example"}]
)
def test_no_secret_of_a_callback_is_recorded(arguments):
    (found,) = recorded({"class_path": "own.Told", "init_args": arguments})["callbacks"]
    assert "environment" in found["why"]
    assert "swordfish" not in repr(found)


@pytest.mark.slow
def test_it_runs_with_the_loggers_callbacks_and_flags_of_its_trial(small, project):
    callbacks = [
        LearningRateMonitor("step"), GradientAccumulationScheduler({0: 1, 1: 2}), EarlyStopping("loss", patience=50),
        StochasticWeightAveraging(0.05, swa_epoch_start=1), load_target("own:Told")(project / "told"),
        partial(ModelCheckpoint, "mine"),
    ]  # fmt: skip
    (project / "told").mkdir()
    flags = {"deterministic": True, "log_every_n_steps": 1, "limit_val_batches": 2}
    logger = CSVLogger("logs", name="mine", version="trial")
    trial = kit.fit(small, None, "own:Samples", logger=logger, callbacks=callbacks, trainer=flags).wait()
    in_trial = told(project / "told")
    committed = kit.commit(small, trial, data="own:Samples")
    trainer = committed.values["trainer"]
    assert {name: trainer[name] for name in flags} == flags
    assert str(project) not in committed.text
    run = committed.run().wait(SECONDS)
    parts.assert_exact(loss_info(trial, run), 16)
    in_run = told(project / "told")
    assert in_run.pop("callbacks")
    assert in_run == {name: in_trial[name] for name in in_run}
    assert in_run["policy"] == os.environ.get("OMP_WAIT_POLICY")  # libraries wait as in any other script
    with (project / "logs" / "mine" / "trial" / "metrics.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [row["step"] for row in rows if row["lr-SGD"]]
    assert list((project / "mine").glob("*.ckpt"))


@pytest.mark.slow
def test_a_module_that_brings_a_checkpoint_callback_keeps_its_own_and_a_restart_goes_on(small, project):
    committed = kit.commit(small.replace({"model.arguments": {"brings": True}}), data="own:Samples")
    assert committed.run().wait(SECONDS).steps == 16
    assert list((project / "brought").glob("*.ckpt"))
    again = committed.run().wait(SECONDS)
    assert (again.state, again.losses) == ("COMPLETE", [])


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # of Lightning, on what is small
def test_what_the_trial_did_after_its_fit_is_a_command_that_wants_a_trained_run(small):
    tested = small.replace({"trial.test_batches": 2})
    trial = kit.fit(tested, None, "own:Samples").wait()
    committed = kit.commit(tested, trial, data="own:Samples")
    line = shlex.split(committed.launch.stage("test"))
    assert shlex.join(line) in committed.text.partition("seed_everything")[0]
    assert any("test is a command" in note for note in committed.notes)
    with pytest.raises(ConfigError, match="ckpt_path: .*train first"):
        CommittedCLI(args=line[3:])
    CommittedCLI(args=["fit", *line[4:], *parts.QUIET])
    found = CommittedCLI(args=[*line[3:], *parts.QUIET]).trainer.callback_metrics["test_loss"]
    of_trial = [event["metrics"]["test_loss"] for event in trial.events if "test_loss" in event.get("metrics", ())]
    assert [float(found)] == pytest.approx(of_trial)
    assert not kit.commit(small, data="own:Samples").launch.stages


@pytest.mark.slow
def test_an_epoch_that_never_ends_is_bounded_by_steps_and_goes_on_within_it(small, project):
    endless = small.replace({"data.arguments": {"endless": True}, "training.max_steps": 12})
    committed = kit.commit(endless, data="own:Samples")
    assert "12 steps" in repr(committed)
    parts.finish(parts.start([*shlex.split(committed.launch.python), "--trainer.max_steps=7"], project))
    run = committed.run().wait(SECONDS)
    assert (run.state, run.first_step, run.steps) == ("COMPLETE", 7, 12)


@pytest.mark.slow
@pytest.mark.skipif(not nightly(), reason="bounded by steps in CI")
def test_an_epoch_that_never_ends_is_bounded_by_time_which_a_restart_does_not_give_again(small):
    endless = small.replace({"data.arguments": {"endless": True}})
    committed = kit.commit(endless, data="own:Samples", trainer={"max_time": datetime.timedelta(seconds=1)})
    assert committed.values["trainer"]["max_time"] == {"days": 0, "seconds": 1}
    run, again = committed.run().wait(SECONDS), committed.run().wait(SECONDS)
    assert (run.state, bool(run.losses)) == ("COMPLETE", True)
    assert (again.state, again.losses) == ("COMPLETE", [])


@pytest.mark.slow
def test_two_ranks_run_with_every_setting_of_ddp_that_their_trial_had(small, project):
    (project / "told").mkdir()
    asked = {"devices": 2, "strategy": "ddp", "ddp_find_unused_parameters": True, "ddp_bucket_bytes": "1 MiB"}
    asked["ddp_static_graph"] = True
    config = small.replace({f"hardware.{name}": value for name, value in asked.items()})
    config = config.replace({"model.arguments": {"unused": True}, "trial.max_steps": 8})
    told_by = [{"class_path": "own.Told", "init_args": {"folder": "told"}}]
    trial = kit.fit(config, None, "own:Samples", callbacks=told_by).wait()
    in_trial = [told(project / "told", rank)["threads"] for rank in range(2)]
    committed = kit.commit(config, trial, data="own:Samples")
    strategy = committed.values["trainer"]["strategy"]["init_args"]
    names = ("find_unused_parameters", "static_graph", "bucket_cap_mb")
    assert [strategy[name] for name in names] == [True, True, 1.0]
    line = committed.launch.torchrun.replace("torchrun", f"{parts.PYTHON} -m torch.distributed.run")
    losses = ["--trainer.callbacks+=kit.train.LossLog", "--trainer.callbacks.file=events.0.jsonl"]
    parts.finish(parts.start([*shlex.split(line), *losses], project, OMP_NUM_THREADS="2"))
    steps = [event["loss"] for event in parts.lines_of(project / "events.0.jsonl") if event["kind"] == "step"]
    assert steps == [event["loss"] for event in trial.steps if event["rank"] == 0]
    found = [told(project / "told", rank) for rank in range(2)]
    assert [one["threads"] for one in found] == in_trial
    assert {one["policy"] for one in found} == {os.environ.get("OMP_WAIT_POLICY")}


def saved(file, **more):
    """What a plain Trainer saves after 5 of the 8 batches of an epoch."""
    trainer = Trainer(
        accelerator="cpu", max_steps=5, logger=False, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False,
    )  # fmt: skip
    trainer.fit(load_target("own:Line")(), datamodule=load_target("own:Samples")())
    trainer.save_checkpoint(file, **more)


@pytest.mark.slow
def test_it_goes_on_from_a_checkpoint_of_a_plain_trainer(small, project):
    saved("plain.ckpt")
    committed = kit.commit(small, data="own:Samples")
    losses = ["--trainer.callbacks+=kit.train.LossLog", "--trainer.callbacks.file=events.jsonl"]
    line = [*shlex.split(committed.launch.python), "--ckpt_path=plain.ckpt", *losses]
    parts.finish(parts.start(line, project))
    events = parts.lines_of(project / "events.jsonl")
    assert (events[0]["step"], events[-1]["step"]) == (5, 13)  # the loader has no state, and begins its epoch again


def test_what_no_training_can_go_on_from_is_refused_in_one_line(project):
    saved("weights.ckpt", weights_only=True)
    torch.save({"weight": torch.ones(2)}, "state.pt")
    torch.save({"own": project}, "more.ckpt")
    Path("text.ckpt").write_text("no checkpoint")
    wrong = {"weights": "weights alone", "mores": "not there.*more.ckpt", "more": "weights_only=false", "text": "read"}
    for name, says in wrong.items():
        with pytest.raises(ConfigError, match=f"ckpt_path: {name}.*{says}"):
            check_checkpoint({"ckpt_path": f"{name}.ckpt"})
    with pytest.raises(ConfigError, match="not saved by a Trainer"):
        check_checkpoint({"ckpt_path": "state.pt"})
    for fine in ("last", None, "gs://bucket/run"):
        check_checkpoint({"ckpt_path": fine})
    check_checkpoint({"ckpt_path": "more.ckpt", "weights_only": False})


def test_weights_of_another_module_are_told_in_one_line():
    module = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.Linear(3, 1))
    for other, says in ((torch.nn.Linear(2, 3), "0.weight"), (torch.nn.Sequential(torch.nn.Linear(4, 3)), "1.weight")):
        with pytest.raises(RuntimeError) as refused:
            module.load_state_dict(other.state_dict())
        told = str(unfit_checkpoint(refused.value))
        assert "ckpt_path" in told
        assert "Sequential" in told
        assert says in told
        assert "\n" not in told
    assert unfit_checkpoint(RuntimeError("shapes differ")) is None


class Before:
    """A trial of an earlier version, as far as a commit asks it, or one that was given what is not known."""

    state, run_directory = "COMPLETE", "runs/a"

    def __init__(self, config, **given):
        self.config = self.asked = config
        known = {"accelerator": "cpu", "world_size": 1, "precision": "32-true", "reasons": []}
        self.environment = {**known, "trainer": given}

    def event(self, kind):
        return None


def test_what_is_not_known_is_asked_for_and_taken(small):
    given = {"callbacks": ["Told"], "made": recorded(lambda: LearningRateMonitor())}
    told_again = {"class_path": "own.Told", "init_args": {"folder": "told", "width": 3}}
    for trial in (Before(small, **given), Before(small, callbacks=["Told"]), Before(small, loggers=["CSVLogger"])):
        with pytest.raises(ConfigError, match=r"(callbacks|logger): how .* not known.*class_path"):
            make_job(small, trial)
        job, _ = make_job(small, trial, callbacks=[told_again], logger=False)
        assert (job.callbacks, job.loggers) == ((told_again,), ())


def test_checkpoints_are_kept_though_the_trial_had_none(small):
    trial = Before(small, **TrainerParts.of(None, (), {"enable_checkpointing": False}).summary())
    job, notes = make_job(small, trial)
    assert "enable_checkpointing" not in job.flags
    assert "enable_checkpointing" in notes[-1]
