"""The levers in dry runs of the real Trainer: each changes what it says and nothing else, on a GPU and on the CPU."""

import pytest
import torch
from lightning.pytorch import LightningModule
from torch.utils.data import DataLoader

from kit.config import Config
from kit.memory.record.dry_run import DryRun, record
from kit.memory.replay.loop_order import loop_order, saved_bytes
from kit.memory.replay.replay import CATEGORIES, replay
from kit.models import GPT, Tokens

A100, T4 = (8, 0), (7, 5)


@pytest.fixture(autouse=True)
def _one_thread():
    torch.set_num_threads(1)


def dry(precision="bf16-mixed", capability=A100, **levers):
    config = Config.make({"levers": levers, "trial": {"max_steps": 4, "warmup_steps": 0}})
    kind = "cpu" if capability is None else "cuda"
    return record(
        lambda: GPT(vocabulary=512, width=128, heads=4, layers=2, context=128),
        lambda: {"datamodule": Tokens(vocabulary=512, context=128, batch_size=4)},
        DryRun(config, precision, 1, kind, capability),
    )


def kept(recording, category):
    return int(recording.block_bytes[recording.block_category == CATEGORIES.index(category)].sum())


def peak(recording):
    return replay(recording).peak_allocated_bytes


@pytest.mark.parametrize(
    ("optimizer", "made", "bytes_an_element"),
    [("adamw", "AdamW", 8), ("adamw-fused", "AdamW", 8), ("adamw-8bit", "AdamW8bit", 2.1), ("sgd", "SGD", 0)],
)
def test_each_optimizer_keeps_its_state(optimizer, made, bytes_an_element):
    recording = dry(optimizer=optimizer)
    assert recording.facts["unknown"] == ""
    assert recording.facts["optimizers"] == [made]
    state = kept(recording, "optimizer_state") / recording.facts["parameters"]
    assert state == pytest.approx(bytes_an_element, abs=0.2)


def test_optimizers_rank_as_their_state_and_temporaries_do():
    peaks = [peak(dry("32-true", optimizer=name)) for name in ("adamw", "adamw-fused", "adamw-8bit", "sgd")]
    assert peaks == sorted(peaks, reverse=True)
    assert peaks[0] > peaks[2]


@pytest.mark.parametrize("attention", ["math", "efficient", "flash", "cudnn"])
def test_each_kernel_runs_in_every_block_of_both_steps(attention):
    recording = dry(attention=attention)
    assert recording.facts["unknown"] == ""
    assert f"attention: {attention} × 4" in recording.facts["notes"][0]


def test_math_costs_more_than_every_fused_kernel():
    peaks = {name: peak(dry(attention=name)) for name in ("math", "efficient", "flash")}
    assert peaks["math"] > max(peaks["efficient"], peaks["flash"])


def test_16_mixed_runs_with_its_scaler_and_steps():
    recording = dry("16-mixed", capability=T4)
    assert recording.facts["unknown"] == ""
    assert kept(recording, "optimizer_state") == pytest.approx(8 * recording.facts["parameters"], rel=0.01)
    assert any("efficient" in note and "needs capability 8.0" in note for note in recording.facts["notes"])
    scale = [name for name in recording.names if "amp" in name]
    assert "_amp_foreach_non_finite_check_and_unscale_" in scale


def test_gradients_freed_after_the_step_are_what_the_plain_recording_says_they_save():
    plain, freed = dry("32-true"), dry("32-true", zero_grad_after_step=True)
    order = loop_order(plain)
    assert order.gradients_freed == "between forward and backward pass"
    assert loop_order(freed).gradients_freed == "after the step"
    assert peak(plain) - peak(freed) == saved_bytes(plain, order, peak(plain))


class OwnProducts(LightningModule):
    """Multiplies in its own step, in no part of it."""

    def __init__(self, manual=False):
        super().__init__()
        self.weight, self.automatic_optimization = torch.nn.Parameter(torch.zeros(64, 512)), not manual

    def training_step(self, batch, batch_idx):
        if self.automatic_optimization:
            return (batch @ self.weight).relu().mean()
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward((batch @ self.weight).relu().mean())
        optimizer.step()
        return None

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


@pytest.mark.parametrize(
    ("manual", "order"), [(False, "between forward and backward pass"), (True, "before the forward pass")]
)
def test_a_step_that_computes_in_no_part_of_the_module_is_a_forward_pass_too(manual, order):
    config = Config.make({"trial": {"max_steps": 4, "warmup_steps": 0}})
    data = {"train_dataloaders": DataLoader(torch.zeros(64, 64), batch_size=16)}
    recording = record(lambda: OwnProducts(manual), lambda: data, DryRun(config, "32-true", 1, "cpu", None))
    assert loop_order(recording).gradients_freed == order


def test_on_the_cpu_what_needs_a_gpu_is_said():
    recording = dry("32-true", capability=None, attention="efficient")
    (note,) = recording.facts["notes"]
    assert note.startswith("levers.attention: efficient")
    assert "GPU" in note
    assert "math and flash" in note


def test_runs_do_not_leave_a_trace_in_each_other():
    first = dry("32-true", capability=None)
    dry(attention="math", optimizer="adamw-8bit")
    again = dry("32-true", capability=None)
    assert first.block_bytes.tolist() == again.block_bytes.tolist()
    assert peak(first) == peak(again)
