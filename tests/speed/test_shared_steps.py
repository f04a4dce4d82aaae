"""The step of one device as several share it, beside dry runs of the strategy itself: modules of torch, MONAI, kit."""

import copy
import os
from dataclasses import replace

import pytest
import torch
from lightning.pytorch import LightningModule
from torch import nn
from torch.nn import functional
from torch.profiler import ProfilerActivity, profile
from torch.utils.checkpoint import checkpoint

from kit.config import Config
from kit.memory.record.dry_run import DryRun, record
from kit.memory.replay.cards import target_of
from kit.models import GPT, Field, RandomData, Tokens
from kit.speed.operators import shared_step, step_of, why_not_shared
from kit.speed.prediction import speed_of

DEVICES = 8
A100 = target_of("A100-40GB")


class Stepped(LightningModule):
    """Trains `model`, classes by default."""

    def __init__(self, model):
        super().__init__()
        self.model = model

    def training_step(self, batch, batch_idx):
        return functional.cross_entropy(self.model(batch[0]), batch[1])

    def configure_optimizers(self):
        return torch.optim.AdamW([one for one in self.parameters() if one.requires_grad])


class Words(nn.Module):
    """A recurrent language model whose input and output have the same weights."""

    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(256, 32)
        self.recurrent = nn.LSTM(32, 32, 2, batch_first=True)
        self.out = nn.Linear(32, 256)
        self.out.weight = self.words.weight

    def forward(self, tokens):
        return self.out(self.recurrent(self.words(tokens))[0]).transpose(1, 2)


def encoder():
    layer = nn.TransformerEncoderLayer(32, 2, 64, dropout=0.1, batch_first=True)
    return nn.Sequential(nn.Linear(16, 32), nn.TransformerEncoder(layer, 3), nn.Flatten(), nn.Linear(256, 10))


def images():
    def part(width, out):
        return nn.Sequential(nn.Conv2d(width, out, 3, padding=1), nn.BatchNorm2d(out), nn.ReLU(inplace=True))

    stages = nn.Sequential(part(3, 16), part(16, 32), part(32, 32))
    return nn.Sequential(stages, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, 10))


def tuned():
    """A trunk that is frozen, and blocks behind it that are not."""
    trunk = nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), nn.GELU()) for _ in range(3))).requires_grad_(False)
    blocks = nn.Sequential(*(nn.Sequential(nn.LayerNorm(64), nn.Linear(64, 64), nn.GELU()) for _ in range(3)))
    return nn.Sequential(trunk, blocks, nn.Linear(64, 10))


def unet():
    nets = pytest.importorskip("monai.networks.nets")
    return nets.UNet(spatial_dims=2, in_channels=3, out_channels=10, channels=(8, 16, 32), strides=(2, 2))


class Asking(Stepped):
    def training_step(self, batch, batch_idx):
        return super().training_step(batch, batch_idx) * self.trainer.world_size


class AskingTorch(Stepped):
    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        return loss / torch.distributed.get_world_size() if torch.distributed.is_initialized() else loss


class AskingLauncher(Stepped):
    def configure_optimizers(self):
        several = int(os.environ.get("WORLD_SIZE", "1")) > 1
        return (torch.optim.SGD if several else torch.optim.AdamW)(self.parameters(), lr=0.1)


class Checkpointed(Stepped):
    def training_step(self, batch, batch_idx):
        return functional.cross_entropy(checkpoint(self.model, batch[0], use_reentrant=False), batch[1])


class Unused(Stepped):
    def __init__(self, model):
        super().__init__(model)
        self.never = nn.Linear(8, 8)


VECTORS = Field(shape=(64,)), Field(below=10)
CASES = {
    "GPT": (lambda: GPT(vocabulary=256, width=64, heads=4, layers=2, context=64),
            lambda: Tokens(vocabulary=256, context=64, batch_size=4)),
    "encoder": (lambda: Stepped(encoder()), lambda: RandomData((Field(shape=(8, 16)), Field(below=10)), 4)),
    "convolutions": (lambda: Stepped(images()), lambda: RandomData((Field(shape=(3, 32, 32)), Field(below=10)), 4)),
    "LSTM with tied weights": (lambda: Stepped(Words()),
                               lambda: RandomData((Field(shape=(12,), below=256), Field(shape=(12,), below=256)), 4)),
    "frozen parts": (lambda: Stepped(tuned()), lambda: RandomData(VECTORS, 4)),
    "UNet of MONAI": (lambda: Stepped(unet()),
                      lambda: RandomData((Field(shape=(3, 32, 32)), Field(shape=(32, 32), below=10)), 2)),
}  # fmt: skip


def dry(case, strategy="none", precision="bf16-mixed", kind="cuda", **sections):
    make, data = CASES[case] if isinstance(case, str) else case
    devices = 1 if strategy == "none" else DEVICES
    config = Config.make({"hardware": {"strategy": strategy, "devices": devices}, **sections})
    run = DryRun(config, precision, devices, kind, (8, 0) if kind == "cuda" else None)
    return record(make, lambda: {"datamodule": data()}, run)


def near(shared, own):
    """Of what device and host do, and of the whole step."""
    mine, theirs = shared.time, own.time
    pairs = [(mine.busy_seconds, theirs.busy_seconds), (mine.host_seconds, theirs.host_seconds),
             (shared.step_seconds, own.step_seconds)]  # fmt: skip
    return [one / other for one, other in pairs] == pytest.approx([1, 1, 1], rel=0.02)


@pytest.fixture(scope="module")
def alone():
    """Recordings of one device by case, made when first asked for."""
    made = {}
    return lambda case: made.get(case) or made.setdefault(case, dry(case))


@pytest.mark.parametrize("strategy", ["ddp", "fsdp", "fsdp:2:4"])
@pytest.mark.parametrize("case", CASES)
def test_a_step_of_one_device_tells_what_each_of_several_does(alone, case, strategy):
    one = alone(case)
    assert why_not_shared(one, strategy) == ""
    shared = speed_of(one, A100, devices=DEVICES, strategy=strategy)
    assert near(shared, speed_of(dry(case, strategy), A100, devices=DEVICES))
    assert shared.traffic.strategy == strategy
    assert not any("kernels of" in reason for reason in shared.reasons)
    assert abs(sum(shared.time.by_module.values()) / shared.time.busy_seconds - 1) < 1e-6


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
@pytest.mark.parametrize(
    "sections",
    [{"levers": {"accumulate_grad_batches": 4}}, {"training": {"gradient_clip_norm": 1.0}},
     {"levers": {"gradient_checkpointing": True}}, {"levers": {"optimizer": "adamw-fused"}}],
)  # fmt: skip
def test_whatever_else_a_config_says(sections, strategy):
    one, own = (dry("GPT", name, **sections) for name in ("none", strategy))
    assert near(speed_of(one, A100, devices=DEVICES, strategy=strategy), speed_of(own, A100, devices=DEVICES))


def test_loss_scales_are_taken_off_shares(alone):
    one, own = (dry("encoder", name, "16-mixed") for name in ("none", "fsdp"))
    assert near(speed_of(one, A100, devices=DEVICES, strategy="fsdp"), speed_of(own, A100, devices=DEVICES))


def test_more_devices_optimize_less_each(alone):
    steps = {devices: shared_step(alone("GPT"), "fsdp", devices) for devices in (2, 8)}
    optimized = {
        devices: sum(step.call_work[number].bytes for number in step.call[step.phase == 3].tolist())
        for devices, step in steps.items()
    }
    assert optimized[8] < 0.3 * optimized[2]
    assert steps[8].facts["world_size"] == 8
    assert step_of(alone("GPT")).facts["strategy"] == "none"


@pytest.mark.parametrize(
    ("module", "strategy", "said"),
    [
        (Asking, "ddp", "test_shared_steps.py"),
        (AskingTorch, "fsdp", "test_shared_steps.py"),
        (AskingLauncher, "ddp", "configure_optimizers"),
        (Unused, "ddp", "gradient"),
    ],
)
def test_a_step_that_may_differ_on_several_devices_says_why(module, strategy, said):
    one = dry((lambda: module(nn.Linear(64, 10)), lambda: RandomData(VECTORS, 4)))
    assert said in why_not_shared(one, strategy)


def test_what_a_launcher_says_is_there_where_several_are_recorded():
    step = step_of(dry((lambda: AskingLauncher(nn.Linear(64, 10)), lambda: RandomData(VECTORS, 4)), "ddp"))
    optimizing = {step.calls[number].name for number in step.call[step.phase == 3].tolist()}
    assert "_foreach_add_" in optimizing
    assert "_foreach_addcdiv_" not in optimizing


def test_what_autograd_copies_of_an_unpacked_tensor_is_no_operator():
    """As many as torch's profiler counts in a backward pass that is real."""
    made = Checkpointed(nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 10)))
    step = step_of(dry((lambda: copy.deepcopy(made), lambda: RandomData(VECTORS, 4)), kind="cpu", precision="32-true"))
    backward = step.call[step.phase == 2].tolist()
    loss = made.training_step((torch.rand(4, 64), torch.zeros(4, dtype=torch.long)), 0)
    with profile(activities=[ProfilerActivity.CPU]) as seen:
        loss.backward()
    (real,) = [entry.count for entry in seen.key_averages() if entry.key == "aten::detach"]
    assert sum(step.calls[number].name == "detach" for number in backward) == real


def test_a_step_of_several_is_not_taken_for_one_of_one_device():
    assert why_not_shared(dry("frozen parts", "ddp"), "fsdp")


def test_an_optimizer_of_whole_matrices_is_recorded_anew(alone):
    one = copy.copy(alone("GPT"))
    product = ["aten::mm", [{"t": [[8, 8], "float32", None]}] * 2, [], [{"t": [[8, 8], "float32", None]}]]
    number = int(one.operator_call[one.operator_phase == 3][-1])
    calls = [product if place == number else call for place, call in enumerate(one.calls)]
    assert "whole" in why_not_shared(replace(one, calls=tuple(calls)), "fsdp")
