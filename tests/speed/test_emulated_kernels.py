"""Kernels that only a GPU has take time in a prediction, though a dry run of them is made of what they allocate."""

import pytest
import torch
from lightning.pytorch import LightningModule
from torch import nn
from torch.nn.attention.flex_attention import flex_attention
from torch.nn.utils.rnn import pack_padded_sequence

from kit.config import Config
from kit.memory.record.dry_run import DryRun, record
from kit.memory.replay.calls import OperatorCall, TensorSpec
from kit.memory.replay.cards import target_of
from kit.models import Field, RandomData
from kit.speed.card_costs import KERNEL_SECONDS
from kit.speed.operators import step_of
from kit.speed.prediction import speed_of
from kit.speed.work import work_of

BATCH, STEPS, WIDTH, HIDDEN = 16, 20, 24, 32


class Recurrent(LightningModule):
    def __init__(self, kind, packed=False, **options):
        super().__init__()
        self.recurrent = getattr(nn, kind)(WIDTH, HIDDEN, **options)
        self.batch_first, self.packed = options.get("batch_first", False), packed

    def training_step(self, batch, batch_idx):
        values = batch[0] if self.batch_first else batch[0].transpose(0, 1)
        if self.packed:
            lengths = torch.full((BATCH,), STEPS)
            values = pack_padded_sequence(values, lengths, batch_first=self.batch_first)
        out = self.recurrent(values)[0]
        return (out.data if self.packed else out).square().mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Normalized(Recurrent):
    def __init__(self):
        super().__init__("RNN")
        self.recurrent = nn.Identity()
        self.norm = nn.RMSNorm(WIDTH)

    def training_step(self, batch, batch_idx):
        return self.norm(batch[0]).square().mean()


class Flexible(Recurrent):
    def __init__(self):
        super().__init__("RNN")
        self.recurrent = nn.Linear(WIDTH, WIDTH)
        self.attend = torch.compile(flex_attention)

    def training_step(self, batch, batch_idx):
        heads = self.recurrent(batch[0]).unsqueeze(1)
        return self.attend(heads, heads, heads).square().mean()


def on_a_card(make, precision="32-true"):
    data = lambda: {"datamodule": RandomData((Field(shape=(STEPS, WIDTH)),), BATCH)}  # noqa: E731
    return record(make, data, DryRun(Config.make({}), precision, 1, "cuda", (8, 0)))


def called(recording, start):
    """Work of each call of operators whose names begin so."""
    step = step_of(recording)
    return {
        call.name: work for call, work in zip(step.calls, step.call_work, strict=True) if call.name.startswith(start)
    }


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize(
    ("kind", "gates", "options", "matrices"),
    [
        ("LSTM", 4, {"batch_first": True}, WIDTH + HIDDEN),
        ("GRU", 3, {"num_layers": 2}, WIDTH + 3 * HIDDEN),
        ("RNN", 1, {"bidirectional": True}, 2 * (WIDTH + HIDDEN)),
    ],
)
def test_recurrent_layers_meet_their_weights_at_every_step(kind, gates, options, matrices, packed):
    recording = on_a_card(lambda: Recurrent(kind, packed, **options))
    found = called(recording, "_cudnn_rnn")
    once = 2 * BATCH * STEPS * gates * HIDDEN * matrices
    assert {name: (work.kind, work.flops) for name, work in found.items()} == {
        "_cudnn_rnn": ("recurrent", once), "_cudnn_rnn_backward": ("recurrent", 2 * once)
    }  # fmt: skip
    by_operator = speed_of(recording, target_of("A100-40GB")).time.by_operator
    turns = STEPS * options.get("num_layers", 1)
    assert by_operator["_cudnn_rnn"] >= 2 * turns * KERNEL_SECONDS


@pytest.mark.parametrize(
    ("make", "names", "kind"),
    [
        (Normalized, {"_fused_rms_norm", "_fused_rms_norm_backward"}, "normalization"),
        (Flexible, {"_scaled_dot_product_flex_attention", "_scaled_dot_product_flex_attention_backward"}, "attention"),
    ],
)
def test_fused_kernels_move_what_they_read_and_write(make, names, kind):
    recording = on_a_card(make)
    found = called(recording, ("_fused_rms_norm", "_scaled_dot_product_flex"))
    assert set(found) == names
    assert {work.kind for work in found.values()} == {kind}
    assert all(work.bytes >= 2 * 4 * BATCH * STEPS * WIDTH for work in found.values())
    assert (kind == "attention") == all(work.flops for work in found.values())
    said = any("mask" in reason for reason in speed_of(recording, target_of("A100-40GB")).reasons)
    assert said == (kind == "attention")


@pytest.mark.parametrize("name", ["_grouped_mm", "_scaled_mm", "_scaled_grouped_mm"])
def test_products_with_scales_or_groups_are_products(name):
    left, out = TensorSpec((64, 32), "bfloat16"), TensorSpec((64, 16), "bfloat16")
    right = TensorSpec((32, 16), "bfloat16") if name == "_scaled_mm" else TensorSpec((4, 32, 16), "bfloat16")
    ends = TensorSpec((4,), "int32")
    work = work_of(OperatorCall(f"aten::{name}", (left, right, ends), (), (out,)))
    assert (work.kind, work.flops) == ("matmul", 2 * 64 * 32 * 16)


class Halving(Recurrent):
    def __init__(self):
        super().__init__("RNN")

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        return loss / 2 if loss > 1 else loss


def test_what_a_step_decides_by_its_numbers_is_named():
    reasons = speed_of(on_a_card(Halving), target_of("A100-40GB")).reasons
    assert any("numbers" in reason and "test_emulated_kernels.py" in reason for reason in reasons)
