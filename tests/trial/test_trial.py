import asyncio
import json
import math
import subprocess
import sys
import textwrap
import threading
import time
import warnings

import pytest
import torch
from faulty import FaultyModule
from gated import Gated
from trial_fixtures import steps_taken
from waiting import PATIENCE_SECONDS, remove, wait_until

import kit
from kit.config import Config
from kit.errors import ConfigError, EventLogError, HardwareError, KitWarning, StoreError, TargetError, TrialError
from kit.memory.alongside import fit
from kit.testing import TinyData, TinyModule
from kit.trial.directory import RunPaths, find_runs
from kit.trial.recorder import PARTS
from kit.trial.trial import Trial, warm_up

SECONDS = PATIENCE_SECONDS
LONG = 1_000_000
MODULE, DATA = "kit.testing:TinyModule", "kit.testing:TinyData"


# -- what comes out


@pytest.mark.parametrize(("ranks", "strategy"), [(1, "none"), (2, "ddp"), (2, "fsdp")])
def test_a_trial_runs_to_its_end_and_says_so(config, ranks, strategy):
    trial = fit(config(ranks, strategy), MODULE, DATA).wait(SECONDS)
    assert (trial.state, trial.cause, trial.message, trial.error) == ("COMPLETE", None, "8 steps", None)
    for rank in range(ranks):
        assert [e["step"] for e in trial.steps if e["rank"] == rank] == list(range(1, 9))
    started = trial.event("fit_started")
    assert (started["strategy"], started["world_size"], started["accelerator"]) == (strategy, ranks, "cpu")
    assert (started["precision"], started["max_steps"]) == ("32-true", 8)
    assert trial.event("fit_ended", "steps") == 8
    assert trial.event("fit_ended", "peak_host_rss_bytes") > 0
    assert trial.event("trial_ended", "exit_codes") == {str(rank): 0 for rank in range(ranks)}


@pytest.mark.parametrize("precision", ["bf16-mixed", "bf16-true"])
def test_the_precision_that_ran_is_read_back_and_stands_in_the_results(config, precision):
    asked = config(max_steps=3).replace({"hardware.precision": precision})
    trial = fit(asked, MODULE, DATA).wait(SECONDS)
    assert trial.event("fit_started", "precision") == precision
    (row,) = kit.results(asked.trial.folder)
    assert row["precision"] == precision


def test_the_parts_of_a_step_sum_to_its_wall_time(config):
    trial = fit(config(), lambda: TinyModule(seconds=0.01), DATA).wait(SECONDS)
    for step in trial.steps:
        parts = sum(step[f"{part}_seconds"] for part in (*PARTS, "other"))
        assert parts == pytest.approx(step["step_seconds"], rel=1e-9)
        assert step["forward_seconds"] >= 0.01
        assert step["samples_per_second"] == pytest.approx(step["samples"] / step["step_seconds"])
        assert step["host_rss_bytes"] > 0
        assert step["device_allocated_bytes"] is step["device_reserved_bytes"] is None
        assert math.isfinite(step["loss"])


class SlowGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx, value):
        return value.clone()

    @staticmethod
    def backward(ctx, gradient):
        time.sleep(0.01)
        return gradient


class SlowSGD(torch.optim.SGD):
    def step(self, closure=None):
        time.sleep(0.005)
        return super().step(closure)


class Manual(TinyModule):
    """Steps by itself: 10 ms in the backward pass, 5 ms in the optimizer."""

    def __init__(self):
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch, batch_idx):
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.backward_of(SlowGradient.apply(super().training_step(batch, batch_idx)))
        optimizer.step()

    def backward_of(self, loss):
        self.manual_backward(loss)

    def configure_optimizers(self):
        return SlowSGD(self.parameters(), 0.01)


class Direct(Manual):
    def backward_of(self, loss):
        loss.backward()


@pytest.mark.parametrize("module", [Manual, Direct])
def test_a_manual_optimization_has_a_backward_pass_and_optimizer_steps_of_its_own(config, module):
    trial = kit.fit(config(max_steps=6), module, TinyData).wait()
    for event in trial.steps:
        assert event["backward_seconds"] >= 0.01, "what its gradient sleeps"
        assert event["optimizer_seconds"] >= 0.005, "what its optimizer sleeps"
        parts = [value for name, value in event.items() if name.endswith("_seconds") and name != "step_seconds"]
        assert sum(parts) == pytest.approx(event["step_seconds"], abs=1e-6)


class Threads(TinyModule):
    def training_step(self, batch, batch_idx):
        self.log("threads", float(torch.get_num_threads()))
        return super().training_step(batch, batch_idx)


def test_several_ranks_compute_with_as_many_threads_as_the_config_says(config):
    """Lightning gives each rank its share of the cores where nobody else has said a number."""
    changed = config().replace(
        {"hardware.strategy": "ddp", "hardware.devices": 2, "hardware.threads_per_rank": 3, "trial.max_steps": 2}
    )
    trial = kit.fit(changed, Threads, TinyData).wait()
    assert kit.results(trial)[0]["metrics"]["threads"] == 3


def test_time_spent_waiting_for_data_is_called_so(config):
    trial = fit(config(), MODULE, SlowData).wait(SECONDS)
    assert all(step["wait_seconds"] >= 0.02 for step in trial.steps)
    for step in trial.steps:  # no second is charged twice, so the wait is in no other part
        parts = sum(step[f"{part}_seconds"] for part in (*PARTS, "other"))
        assert parts == pytest.approx(step["step_seconds"], rel=1e-9)


class SlowData(TinyData):
    def train_dataloader(self):
        for batch in super().train_dataloader():
            time.sleep(0.02)
            yield batch


def test_with_accumulation_there_is_one_event_a_batch_and_the_loss_is_not_divided(config):
    alone = fit(config(), MODULE, DATA).wait(SECONDS)
    changed = config().replace({"levers.accumulate_grad_batches": 4, "trial.max_steps": 2})
    trial = fit(changed, MODULE, DATA).wait(SECONDS)
    assert [(e["step"], e["batch"]) for e in trial.steps] == [
        (1, 1),
        (1, 2),
        (1, 3),
        (1, 4),
        (2, 5),
        (2, 6),
        (2, 7),
        (2, 8),
    ]
    assert trial.steps[0]["loss"] == pytest.approx(alone.steps[0]["loss"], rel=1e-6)


def test_the_same_config_gives_the_same_losses(config):
    first, second = (fit(config(), MODULE, DATA).wait(SECONDS) for _ in range(2))
    assert [e["loss"] for e in first.steps] == [e["loss"] for e in second.steps]


def test_more_steps_than_an_epoch_has_go_on_in_the_next(config):
    trial = fit(config(), MODULE, lambda: TinyData(samples=12)).wait(SECONDS)
    assert len(trial.steps) == 8
    assert trial.event("fit_started", "batches_per_epoch") == 3


# -- what goes in


def loader():
    from torch.utils.data import DataLoader

    return DataLoader(dataset(), batch_size=4)


def dataset():
    import torch
    from torch.utils.data import TensorDataset

    return TensorDataset(torch.zeros(64, 8), torch.zeros(64, 1))


@pytest.mark.parametrize(
    ("module", "data"),
    [
        (MODULE, DATA),
        (TinyModule, TinyData),
        (lambda: TinyModule(width=8), lambda: TinyData()),
        (TinyModule(), TinyData()),
        (TinyModule, loader),
        (TinyModule, loader()),
        (TinyModule, dataset()),
    ],
    ids=["paths", "classes", "factories", "instances", "loader factory", "loader", "dataset"],
)
def test_module_and_data_come_in_many_forms(config, module, data):
    assert fit(config(), module, data).wait(SECONDS).state == "COMPLETE"


def test_a_class_is_made_with_the_arguments_of_the_config(config):
    changed = config().replace({"model.arguments": {"width": 3}})
    assert fit(changed, TinyModule, lambda: TinyData(width=3)).wait(SECONDS).state == "COMPLETE"


def test_the_model_of_the_config_is_taken_when_none_is_given(config):
    changed = config().replace({"model.target": MODULE, "model.arguments": {"width": 3}})
    assert fit(changed, None, lambda: TinyData(width=3)).wait(SECONDS).state == "COMPLETE"


@pytest.mark.slow
def test_classes_of_a_script_travel_by_value_and_the_kernel_needs_no_torch_for_paths(config):
    """A script stands for a notebook: its classes live in __main__."""
    code = textwrap.dedent(f"""
        import sys
        from kit.config import Config
        from kit.memory.alongside import fit
        config = Config.from_yaml({config().to_yaml(comments=False)!r})
        assert fit(config, {MODULE!r}, {DATA!r}).wait({SECONDS}).state == "COMPLETE"
        assert "torch" not in sys.modules
        import torch
        from kit.testing import TinyModule, TinyData
        SCALE = 2.0
        class Base(TinyModule):
            def __init__(self):
                super().__init__()
        class Mine(Base):
            def training_step(self, batch, batch_idx):
                return super().training_step(batch, batch_idx) * SCALE
        class MyData(TinyData):
            def __init__(self):
                super().__init__(num_workers=1)
        print(fit(config, Mine, MyData).wait({SECONDS}).state)
    """)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300)
    assert done.stdout.strip() == "COMPLETE", done.stderr


def test_a_module_beside_the_notebook_is_imported_afresh_by_each_trial(config, tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(tmp_path))
    source = (
        "from kit.testing import TinyModule\nclass Edited(TinyModule):\n    def on_train_start(self): print({!r})\n"
    )
    for text in ("first", "second"):
        (tmp_path / "edited_module.py").write_text(source.format(text))
        trial = fit(config(), "edited_module:Edited", DATA).wait(SECONDS)
        assert text in trial.paths.log(0).read_text().split()


# -- what is refused, before anything is started


@pytest.mark.parametrize(
    ("module", "data", "changes", "error", "message"),
    [
        ("kit.testing:TinyModul", DATA, {}, TargetError, "did you mean"),
        (MODULE, "kit.nowhere:Data", {}, TargetError, "kit.nowhere"),
        (TinyModule, DATA, {"model.arguments": {"hidth": 1}}, ConfigError, r"model\.arguments: class TinyModule"),
        (lambda: threading.Lock(), threading.Lock(), {}, ConfigError, "data: lock is .*data set"),
        (MODULE, DATA, {"hardware.accelerator": "gpu"}, HardwareError, "GPU"),
        (
            MODULE,
            None,
            {"data.url": "memory://here"},
            ConfigError,
            r"data\.url: memory://here .*this process",
        ),
        (MODULE, None, {"data.url": "nowhere/at/all.zarr"}, StoreError, "nowhere"),
    ],
)
def test_what_cannot_run_is_refused_without_a_run_directory(config, module, data, changes, error, message):
    asked = config().replace(changes)
    with pytest.raises(error, match=message):
        fit(asked, module, data)
    assert list(find_runs(asked.trial.folder)) == []


def test_fit_of_another_thing_than_a_config_says_what_it_takes():
    with pytest.raises(ConfigError, match=r"Config.load\('config.yaml'\)"):
        fit("config.yaml", TinyModule, TinyData)


def test_something_that_is_no_module_fails_in_one_line(config):
    trial = fit(config(), lambda: 3, DATA)
    with pytest.raises(TrialError, match="int.*no LightningModule"):
        trial.wait(SECONDS)


def test_a_large_payload_is_warned_of_and_goes_on(config):
    weights = bytes(11_000_000)
    with pytest.warns(KitWarning, match=r"module and data .*10\.\d MiB"):
        trial = fit(config(), lambda: TinyModule(width=8 + 0 * len(weights)), DATA)
    trial.wait(SECONDS)
    assert "MiB when sent" in trial.warnings[0]


def test_a_usual_trial_warns_of_nothing(config):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        trial = fit(config(), MODULE, DATA)
    assert trial.wait(SECONDS).warnings == []


# -- waiting and watching


def test_fit_and_warm_up_return_before_a_step_is_taken(config, tmp_path):
    warm_up()
    trial = fit(config(), lambda: Gated(tmp_path / "gate"), DATA)
    assert trial.state in ("WAITING", "RUNNING")
    assert not trial.steps
    (tmp_path / "gate").touch()
    assert trial.wait(SECONDS).state == "COMPLETE"


def test_waiting_too_long_raises_and_leaves_the_trial_alone(config):
    trial = fit(config(max_steps=LONG), lambda: TinyModule(seconds=0.01), DATA)
    with pytest.raises(TimeoutError, match="it goes on"):
        trial.wait(0.5)
    wait_until(steps_taken(trial, 1))
    trial.kill()
    trial.wait(SECONDS)


def test_state_and_progress_are_of_now_without_a_poll(config):
    trial = fit(config(max_steps=6), MODULE, DATA)
    wait_until(lambda: trial.ended, SECONDS)
    assert trial.state == "COMPLETE"
    assert trial.progress.endswith("step 6 of 6")
    assert [event["step"] for event in trial.steps] == [1, 2, 3, 4, 5, 6]


def test_what_is_of_now_is_read_a_few_times_a_second_and_not_after_the_end(config, monkeypatch):
    trial = fit(config(max_steps=6), MODULE, DATA)
    now, reads = [time.monotonic() + 60], []
    monkeypatch.setattr("kit.trial.trial.time.monotonic", lambda: now[0])
    poll = trial.poll
    monkeypatch.setattr(trial, "poll", lambda: (reads.append(1), poll())[1])
    before = [trial.state for _ in range(5)]
    assert len(reads) == 1
    assert len({*before}) == 1
    monkeypatch.undo()
    trial.wait(SECONDS)
    monkeypatch.setattr(trial, "poll", None)
    monkeypatch.setattr("kit.trial.trial.time.monotonic", lambda: now[0] + 1000)
    assert (trial.state, trial.ended, trial.error) == ("COMPLETE", True, None)


def test_a_trial_can_be_awaited(config):
    async def wait():
        return await fit(config(), MODULE, DATA)

    assert asyncio.run(wait()).state == "COMPLETE"


def test_callbacks_come_while_it_runs_and_at_its_end(config, tmp_path):
    seen = []
    trial = fit(config(max_steps=20), lambda: Gated(tmp_path / "gate", step=10), DATA)
    trial.on_change(lambda changed: seen.append((changed.state, len(changed.steps))))
    wait_until(lambda: ("RUNNING", 9) in seen)
    (tmp_path / "gate").touch()
    wait_until(lambda: seen[-1][0] == "COMPLETE")
    assert seen[-1] == ("COMPLETE", 20)


def test_a_callback_that_raises_is_reported_once_and_the_others_go_on(config, capsys):
    trial = fit(config(), MODULE, DATA)
    seen = []
    trial.on_change(lambda changed: 1 / 0)
    trial.on_change(lambda changed: seen.append(changed.state))
    wait_until(lambda: seen and seen[-1] == "COMPLETE")
    assert capsys.readouterr().err.count("ZeroDivisionError") == 1


def test_the_end_is_told_though_it_was_read_by_another_thread_while_a_callback_ran(config):
    told, held = [], threading.Event()

    def slow(trial):
        told.append(trial.state)
        if not trial.ended:
            held.wait(PATIENCE_SECONDS)

    trial = fit(config(), TinyModule, TinyData)
    trial.on_change(slow)
    wait_until(lambda: told)
    trial.wait(PATIENCE_SECONDS)
    held.set()
    wait_until(lambda: told[-1] == "COMPLETE")


def test_unsubscribed_callbacks_are_not_called_and_no_thread_stays(config, new_threads):
    trial = fit(config(), lambda: TinyModule(seconds=0.02), DATA)
    seen = []
    unsubscribe = trial.on_change(seen.append)
    unsubscribe()
    unsubscribe()
    count = len(seen)
    trial.wait(SECONDS)
    assert len(seen) == count
    wait_until(lambda: not new_threads("kit-watch"))


# -- opening again


def test_an_opened_trial_knows_what_the_first_one_knew(config):
    trial = fit(config(), MODULE, DATA).wait(SECONDS)
    again = Trial.open(trial.run_directory)
    assert (again.state, again.message, again.config) == (trial.state, trial.message, trial.config)
    assert (again.steps, again.events) == (trial.steps, trial.events)
    assert repr(again) == repr(trial)


def test_a_run_that_was_never_started_is_lost(config, tmp_path):
    trial = fit(config(), MODULE, DATA).wait(SECONDS)
    environment = json.loads(trial.paths.environment.read_text())
    environment.pop("supervisor")
    trial.paths.environment.write_text(json.dumps(environment))
    for path in trial.paths.event_files():
        path.unlink()
    assert Trial.open(trial.run_directory).state == "LOST"


def test_a_process_that_reused_the_id_is_not_taken_for_the_supervisor(config):
    trial = fit(config(), MODULE, DATA).wait(SECONDS)
    lines = trial.paths.supervisor_events.read_text().splitlines()
    started = json.loads(lines[0])
    for process in started["processes"]:
        process["started"] -= 1
    trial.paths.supervisor_events.write_text(json.dumps(started) + "\n")
    environment = json.loads(trial.paths.environment.read_text())
    environment["supervisor"]["started"] -= 1
    trial.paths.environment.write_text(json.dumps(environment))
    assert Trial.open(trial.run_directory).state == "LOST"


def test_a_run_from_before_a_restart_of_the_machine_is_lost(config):
    trial = fit(config(), MODULE, DATA).wait(SECONDS)
    trial.paths.supervisor_events.write_text(trial.paths.supervisor_events.read_text().splitlines()[0] + "\n")
    environment = json.loads(trial.paths.environment.read_text())
    environment["machine"]["boot"] = "another"
    trial.paths.environment.write_text(json.dumps(environment))
    assert "restarted" in Trial.open(trial.run_directory).error


def test_a_torn_last_line_is_dropped_and_a_damaged_middle_one_is_told(config):
    trial = fit(config(), MODULE, DATA).wait(SECONDS)
    path = trial.paths.events(0)
    with path.open("ab") as file:
        file.write(b'{"kind": "st')
    assert len(Trial.open(trial.run_directory).steps) == 8
    with path.open("ab") as file:
        file.write(b'\n{"kind": "step"}\n')
    with pytest.raises(EventLogError, match=r"events\.0\.jsonl, line \d+"):
        Trial.open(trial.run_directory)


def test_a_removed_run_directory_ends_its_trial_and_no_other(config):

    removed = fit(config(max_steps=LONG), lambda: TinyModule(seconds=0.01), DATA)
    other = fit(config(max_steps=100), lambda: TinyModule(seconds=0.01), DATA)
    wait_until(steps_taken(removed, 1))
    remove(removed.run_directory)
    assert "removed" in wait_until(lambda: removed.poll() == "LOST" and removed.error)
    assert other.wait(SECONDS).state == "COMPLETE"


def test_an_incomplete_run_directory_says_so(config):
    run = RunPaths.create(config())
    with pytest.raises(TrialError, match=r"incomplete.*environment\.json is missing.*broken off") as caught:
        Trial.open(run.directory)
    assert caught.value.__cause__ is None  # one sentence, and no tracebacks of files above it


def test_the_run_directory_holds_the_config_and_no_secret(config, monkeypatch):
    monkeypatch.setenv("MY_SECRET_KEY", "hunter2-hunter2")
    trial = fit(config(), lambda: FaultyModule({}), DATA).wait(SECONDS)
    assert Config.load(trial.paths.config) == trial.config
    for path in trial.run_directory.iterdir():
        assert b"hunter2-hunter2" not in path.read_bytes()
