"""Lightning's profilers with their accounting put right, each looking on at a real fit."""

import json
import pstats
import time
from pathlib import Path

import pytest
import torch
from lightning.pytorch import Trainer
from lightning.pytorch.profilers import AdvancedProfiler, PyTorchProfiler

from kit.config import Config
from kit.studies.profiling.profilers import Both, OwnTimeProfiler, WholeFitProfiler, make_profiler, schedule
from kit.testing import TinyData, TinyModule
from kit.trial.recorder import StepClock

CONFIG = Config().replace({"trial.max_steps": 12, "trial.warmup_steps": 5})


class Busy(TinyModule):
    """Every step takes time that no action inside of training_step has; its optimizer takes some too."""

    def training_step(self, batch, batch_idx):
        spin(0.004)
        return super().training_step(batch, batch_idx)

    def optimizer_step(self, *args, **options):
        super().optimizer_step(*args, **options)
        spin(0.002)


NOW = [0.0]


def spin(seconds):
    NOW[0] += seconds


@pytest.fixture
def clock(monkeypatch):
    """A clock by which nothing but `spin` takes time."""
    monkeypatch.setattr(time, "perf_counter", lambda: NOW[0])


def run(profiler, steps=10):
    torch.set_num_threads(1)
    trainer = Trainer(
        accelerator="cpu", devices=1, max_steps=steps, profiler=profiler, logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False, limit_val_batches=0,
    )  # fmt: skip
    trainer.fit(Busy(), TinyData())


def read(folder, which):
    return json.loads((folder / f"fit-{which}_profiler_output.json").read_text())


def test_the_time_of_an_action_is_its_own_and_all_of_them_are_the_fit(tmp_path, clock):
    run(make_profiler("simple", tmp_path, CONFIG))
    found = read(tmp_path, "simple")
    actions = {row["action"]: row for row in found["actions"]}
    step, optimizer = (
        actions["[Strategy]SingleDeviceStrategy.training_step"],
        actions["[LightningModule]Busy.optimizer_step"],
    )
    assert step["calls"] == optimizer["calls"] == 10
    assert [step["own_seconds"], step["total_seconds"]] == pytest.approx([0.04, 0.04])
    assert optimizer["own_seconds"] == pytest.approx(0.02)
    assert optimizer["total_seconds"] == pytest.approx(0.06)
    assert sum(row["own_seconds"] for row in actions.values()) == pytest.approx(found["fit_seconds"])
    assert found["fit_seconds"] == pytest.approx(0.06)


def test_the_text_is_lightnings_own_under_its_own_name(tmp_path):
    run(make_profiler("simple", tmp_path, CONFIG))
    text = (tmp_path / "fit-simple_profiler_output.txt").read_text()
    assert text.startswith("FIT Profiler Report")
    assert "[_TrainingEpochLoop].train_dataloader_next" in text


def test_percentages_are_of_the_fit_and_not_of_the_life_of_the_profiler(tmp_path, clock):
    profiler = OwnTimeProfiler(tmp_path, "simple_profiler_output")
    profiler.start_time -= 1000.0
    run(profiler)
    assert read(tmp_path, "simple")["fit_seconds"] == pytest.approx(0.06)


def test_the_advanced_pass_accounts_for_the_whole_fit_where_lightnings_does_not(tmp_path):
    run(make_profiler("advanced", tmp_path, CONFIG))
    mine = read(tmp_path, "advanced")
    theirs = Accounting(str(tmp_path), "theirs")
    run(theirs)
    times = [row["own_seconds"] for row in mine["functions"]]
    assert times == sorted(times, reverse=True)
    assert sum(times) - 1e-6 <= mine["accounted_seconds"] <= mine["fit_seconds"]
    calls = {row["function"]: row["calls"] for row in mine["functions"] if row["file"].endswith(Path(__file__).name)}
    assert calls == {"spin": 20, "training_step": 10, "optimizer_step": 10}
    assert "spin" not in theirs.seen["[LightningModule]Busy.optimizer_step"]  # half of the calls are lost there
    stats = pstats.Stats(str(tmp_path / "fit-advanced_profiler_output.prof"))
    assert any(name == "spin" for _, _, name in stats.stats)


class Accounting(AdvancedProfiler):
    """Lightning's own, keeping which functions it saw in each action."""

    def summary(self):
        self.seen = {}
        for action, profile in self.profiled_actions.items():
            profile.disable()
            stats = pstats.Stats(profile).stats if profile.getstats() else ()
            self.seen[action] = {name for _, _, name in stats}
        return super().summary()


def test_an_end_without_a_beginning_changes_nothing(tmp_path):
    for profiler in (OwnTimeProfiler(tmp_path, "x"), WholeFitProfiler(tmp_path, "x")):
        profiler.start("outer")
        profiler.stop("never began")
        profiler.start("inner")
        profiler.stop("outer")  # inner was never ended
        profiler.stop("inner")


def test_the_trace_holds_the_steps_that_were_asked_for(tmp_path):
    asked = make_profiler("pytorch", tmp_path, CONFIG)
    assert isinstance(asked, PyTorchProfiler)
    run(Both(StepClock(), asked), steps=12)
    (trace,) = tmp_path.glob(
        "fit-pytorch_profiler_output-[[]Strategy]SingleDeviceStrategy.training_step.*.pt.trace.json"
    )
    names = [event.get("name", "") for event in json.loads(trace.read_text())["traceEvents"]]
    assert sum(name.startswith("ProfilerStep#") for name in names) == 3
    assert (tmp_path / "fit-pytorch_profiler_output.txt").exists()


def test_the_clock_of_the_trial_hears_the_same(tmp_path, clock):
    steps = StepClock()
    run(Both(steps, make_profiler("simple", tmp_path, CONFIG)))
    assert steps.take()["forward_seconds"] == pytest.approx(0.04)


@pytest.mark.parametrize(
    ("steps", "warmup", "accumulated", "expected"),
    [(12, 5, 1, (5, 3)), (6, 5, 1, (1, 3)), (3, 2, 1, (0, 1)), (4, 3, 4, (3, 3))],
)
def test_a_short_trial_keeps_fewer_steps(steps, warmup, accumulated, expected):
    changes = {"max_steps": steps, "warmup_steps": warmup}
    config = Config.make({"trial": changes, "levers": {"accumulate_grad_batches": accumulated}})
    assert schedule(config) == expected
