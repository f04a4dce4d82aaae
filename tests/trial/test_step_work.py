import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch
from lightning.pytorch import LightningModule
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

import kit
from kit.config import Config
from kit.machine.processes import BUSY_CORES
from kit.records.row import row_of_trial
from kit.testing import TinyData, TinyModule
from kit.trial import meters
from kit.trial.meters import StepWork, WorkMode

CPU = torch.device("cpu")


def counted(work, backward=False):
    with WorkMode(CPU) as mode:
        mode.backward = backward
        work()
    return mode.found({})


def test_flops_of_a_convolution_are_those_that_torch_counts():
    net = torch.nn.Sequential(torch.nn.Conv2d(3, 8, 3), torch.nn.ReLU(), torch.nn.Flatten(), torch.nn.Linear(288, 4))
    x = torch.randn(2, 3, 8, 8)

    def work():
        net(x).sum().backward()

    with FlopCounterMode(display=False) as truth:
        work()
    assert counted(work)["flops"] == {"float32": truth.get_total_flops()}


def test_attention_on_the_cpu_counts_as_on_a_gpu():
    """Two products of (8 × 64) with (64 × 8) per head, forward; torch's own counter knows no formula for the CPU."""
    q = torch.randn(1, 2, 8, 64)
    found = counted(lambda: torch.nn.functional.scaled_dot_product_attention(q, q, q))
    assert found["flops"] == {"float32": 2 * 2 * (8 * 64 * 8) * 2}


def test_flops_are_told_by_number_format():
    layer, x = torch.nn.Linear(8, 4), torch.randn(2, 8)

    def mixed():
        with torch.autocast("cpu", torch.bfloat16):
            layer(x)

    assert counted(lambda: layer(x))["flops"] == {"float32": 2 * 2 * 8 * 4}
    assert counted(mixed)["flops"] == {"bfloat16": 2 * 2 * 8 * 4}


def test_bytes_are_those_that_an_operation_reads_and_writes_and_views_move_none():
    x = torch.ones(1000)
    assert counted(lambda: x + x)["bytes"] == 3 * 4000
    assert counted(lambda: x.view(10, 100)[3:5].T)["bytes"] == 0
    wide = torch.ones(1).expand(1000)
    assert counted(lambda: x + wide)["bytes"] == 2 * 4000 + 4


def test_a_sync_is_put_down_to_the_line_that_asks():
    x = torch.ones(4)
    found = counted(lambda: [bool(value > 0) for value in x])
    assert found["own_syncs"] == found["syncs"] == 4
    (line,) = [line for line in found["lines"] if line["syncs"]]
    assert line["place"].startswith("test_step_work.py, line ")
    assert line["syncs"] == 4


def test_batch_norm_that_runs_again_in_the_backward_pass_is_seen():
    block = torch.nn.Sequential(torch.nn.Conv2d(1, 2, 3), torch.nn.BatchNorm2d(2))
    x = torch.randn(2, 1, 8, 8, requires_grad=True)
    loss, again = block(x).sum(), checkpoint(block, x, use_reentrant=False).sum()
    assert counted(loss.backward, backward=True)["batch_norms_again"] == 0
    assert counted(again.backward, backward=True)["batch_norms_again"] == 1


def test_what_cannot_be_counted_ends_no_step(monkeypatch):
    def broken(*_):
        raise ValueError("no formula")

    monkeypatch.setattr(WorkMode, "_flops_of", broken)
    assert counted(lambda: torch.ones(2, 2) @ torch.ones(2, 2))["flops"] == {}


def test_counting_that_takes_long_ends_and_tells_what_it_has(monkeypatch):
    """A recurrent net of many steps took 21 times as long as it does uncounted."""
    monkeypatch.setattr(meters, "MOST_COUNTING_SECONDS", 0.0)
    monkeypatch.setattr(meters, "_MOST_COUNTING_FRACTION", 0.0)
    found = counted(lambda: [torch.ones(2, 2) @ torch.ones(2, 2) for _ in range(10)])
    assert found["calls"] == 30
    assert found["flops"] == {}
    assert "places" not in found
    assert found["bytes"] <= 32
    assert found["counted_seconds"] > 0


def test_the_backward_pass_is_left_alone_when_counting_has_ended(monkeypatch):
    monkeypatch.setattr(meters, "MOST_COUNTING_SECONDS", 0.0)
    monkeypatch.setattr(meters, "_MOST_COUNTING_FRACTION", 0.0)
    written = []
    config = Config().replace({"trial.warmup_steps": 4})
    context = SimpleNamespace(config=config, cells={}, writer=SimpleNamespace(write=lambda *a, **f: written.append(f)))
    callback, module = StepWork(context), TinyModule()
    batch = (torch.zeros(4, 8), torch.zeros(4, 1))
    data = SimpleNamespace(dataset=None, batch_size=4)
    trainer = SimpleNamespace(global_step=2, train_dataloader=data, is_last_batch=False)
    callback.on_train_batch_start(trainer, module, batch, 0)
    loss = module.training_step(batch, 0)
    callback.on_before_backward(trainer, module, loss)
    assert not torch.utils._python_dispatch._get_current_dispatch_mode_stack()
    loss.backward()
    callback.on_after_backward(trainer, module)
    callback.on_train_batch_end(trainer, module, loss, batch, 0)
    callback.on_train_batch_start(trainer, module, batch, 1)
    callback.on_train_batch_end(trainer, module, loss, batch, 1)
    (found,) = written
    assert found["flops"] == {}
    assert found["calls"] > 0


class Asking(TinyModule):
    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        self.last = loss.item()
        return loss


def test_a_trial_counts_one_warm_up_step_and_only_the_users_syncs(config):
    trial = kit.fit(config(warmup_steps=4), Asking(), TinyData(width=8, batch_size=4)).wait()
    (event,) = [event for event in trial.events if event["kind"] == "work_counted"]
    assert event["samples"] == 4
    assert event["flops"] == {"float32": 2 * (2 * 4 * 8 * 1)}, "forward and the gradient of the weights"
    assert event["own_syncs"] == 1


@pytest.mark.parametrize("change", [{"warmup_steps": 2}, {"warmup_steps": 4, "count_work": False}])
def test_without_a_warm_up_step_to_spare_or_when_switched_off_nothing_is_counted(config, change):
    trial = kit.fit(config(**change), TinyModule(), TinyData()).wait()
    assert trial.event("work_counted") is None


class Failing(LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(8, 1)

    def training_step(self, batch, batch_idx):
        if batch_idx == 2:
            raise ValueError("the counted step")
        return self.layer(batch[0]).sum()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.0)


def test_a_step_that_fails_while_it_is_counted_fails_as_any_other(config):
    trial = kit.fit(config(warmup_steps=4), Failing(), TinyData())
    with pytest.raises(kit.KitError, match="the counted step"):
        trial.wait()
    assert trial.cause == "error"


def test_cpu_seconds_of_a_rank_and_its_loader_processes_are_told(config):
    trial = kit.fit(config(warmup_steps=2), TinyModule(seconds=0.02), TinyData(num_workers=1)).wait()
    used = trial.event("cpu_used")
    assert used["workers"] == 1
    assert 0 < used["thread_seconds"] <= used["process_seconds"]
    slept = 0.02 * (trial.event("fit_ended", "steps") - 2)
    assert used["wall_seconds"] - used["thread_seconds"] >= slept, "a step that sleeps uses no CPU"


def test_a_row_tells_the_cores_that_other_programs_used_but_not_those_of_the_trial(config):
    command = [sys.executable, "-c", "while True: pass"]
    with subprocess.Popen(command) as other:
        beside = kit.fit(config(warmup_steps=2, max_steps=30), TinyModule(seconds=0.02), TinyData()).wait()
        other.kill()
    assert row_of_trial(beside)["other_cores"] > BUSY_CORES
    used = kit.fit(config(warmup_steps=2), Starts(), TinyData()).wait().event("cpu_used")
    assert used["family_seconds"] - used["process_seconds"] - used["workers_seconds"] > 0.9 * STARTED_SECONDS
    assert used["machine_seconds"] > 0.9 * used["family_seconds"]


STARTED_SECONDS = 0.3


class Starts(TinyModule):
    """Has a program of its own compute once, in a step that is measured."""

    def training_step(self, batch, batch_idx):
        if batch_idx == 3:
            program = f"import time\nwhile time.process_time() < {STARTED_SECONDS}: pass"
            subprocess.run([sys.executable, "-c", program], check=True)
        return super().training_step(batch, batch_idx)
