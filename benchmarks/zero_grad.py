"""What `levers.zero_grad_after_step` saves, predicted and measured, on models of other packages.

    python benchmarks/zero_grad.py [--model NAME] [--strategy none|ddp|fsdp] [--answers FILE] [--record]

Five models, chosen before any was run, train alone, under ddp and under fsdp on two CPU ranks, with the lever and
without. Measured is the peak of rank 0's allocator during the first two steps of a real fit; predicted is
`zero_grad_saves_bytes` of the dry run without the lever, which knows nothing of the one with it. `--answers` keeps
rows, one JSON line each, so that a run can be stopped and resumed. Packages: transformers, timm, diffusers, monai and
x-transformers.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import LightningModule
from publish import publish
from torch import Tensor, nn
from torch.nn import functional
from typing_extensions import override

import kit
from kit.models import Field, RandomData

LEVER = "levers.zero_grad_after_step"
STRATEGIES = ("none", "ddp", "fsdp")
WORDS = 2048
TIMEOUT_SECONDS = 600.0
"""Of a prediction and of a trial, on a machine that does other things too."""
PLAIN = {
    "name": "zero-grad", "hardware": {"accelerator": "cpu", "precision": "32-true"},
    "trial": {"max_steps": 3, "warmup_steps": 0, "predict_memory": False, "timeout_seconds": TIMEOUT_SECONDS},
}  # fmt: skip


class Trained(LightningModule):
    """A model of another package with its loss."""

    def __init__(self, model: nn.Module, loss: Callable[[nn.Module, Any], Tensor]) -> None:
        super().__init__()
        self.model, self.loss = model.train(), loss

    @override
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.loss(self.model, batch)

    @override
    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.01, momentum=0.9)


def gpt2() -> Trained:
    from transformers import GPT2Config, GPT2LMHeadModel

    shape = GPT2Config(n_layer=6, n_embd=256, n_head=4, vocab_size=WORDS, n_positions=128)
    return Trained(GPT2LMHeadModel(shape), lambda model, batch: model(input_ids=batch, labels=batch).loss)


def convnext() -> Trained:
    import timm

    return Trained(timm.create_model("convnext_atto"), lambda model, batch: model(batch).square().mean())


def unet_of_diffusers() -> Trained:
    from diffusers import UNet2DModel

    model = UNet2DModel(
        sample_size=32, block_out_channels=(64, 128, 128), down_block_types=("DownBlock2D",) * 3,
        up_block_types=("UpBlock2D",) * 3,
    )  # fmt: skip
    return Trained(model, lambda unet, batch: functional.mse_loss(unet(batch, 10).sample, batch))


def unet_of_monai() -> Trained:
    from monai.losses import DiceLoss
    from monai.networks.nets import BasicUNet

    def loss(model: nn.Module, batch: Tensor) -> Tensor:
        dice: Tensor = DiceLoss(sigmoid=True)(model(batch), (batch > 0).float())
        return dice

    return Trained(BasicUNet(spatial_dims=3, in_channels=1, out_channels=1), loss)


def decoder() -> Trained:
    from x_transformers import AutoregressiveWrapper, Decoder, TransformerWrapper

    layers = Decoder(dim=256, depth=6, heads=4, rotary_pos_emb=True)
    model = AutoregressiveWrapper(TransformerWrapper(num_tokens=WORDS, max_seq_len=128, attn_layers=layers))
    return Trained(model, lambda model, batch: model(batch))


MODELS: dict[str, tuple[Callable[[], Trained], Field, int]] = {
    "transformers GPT-2": (gpt2, Field(shape=(128,), below=WORDS), 8),
    "timm convnext_atto": (convnext, Field(shape=(3, 128, 128)), 8),
    "diffusers UNet2D": (unet_of_diffusers, Field(shape=(3, 32, 32)), 8),
    "monai BasicUNet": (unet_of_monai, Field(shape=(1, 32, 32, 32)), 2),
    "x-transformers decoder": (decoder, Field(shape=(128,), below=WORDS), 8),
}
"""Name: (what is trained, its sample, samples per rank)"""


def kept_case(name: str, strategy: str, path: Path | None) -> dict[str, Any]:
    """The row, from `path` where it stands there already."""
    kept = [json.loads(line) for line in path.read_text().splitlines()] if path and path.exists() else []
    for row in kept:
        if (row["model"], row["strategy"].partition(" ")[0]) == (name, strategy):
            return dict(row)
    row = case(name, strategy)
    if path:
        with path.open("a") as file:
            file.write(json.dumps(row) + "\n")
    return row


def case(name: str, strategy: str) -> dict[str, Any]:
    make, field, batch_size = MODELS[name]
    hardware = {"hardware.strategy": strategy, "hardware.devices": 1 if strategy == "none" else 2}
    config = kit.Config.make(PLAIN).replace(hardware)

    def data() -> RandomData:
        return RandomData(field, batch_size)

    found, freed = (
        kit.predict_memory(config.replace({LEVER: lever}), make, data, timeout_seconds=TIMEOUT_SECONDS)
        for lever in (False, True)
    )
    before, after = (measured_bytes(config.replace({LEVER: lever}), make, data) for lever in (False, True))
    saved = before - after
    return {
        "model": name,
        "strategy": strategy if strategy == "none" else f"{strategy} × 2",
        "peak MiB": mib(before),
        "predicted": mib(found.device_allocated_bytes),
        "with the lever": mib(after),
        "predicted with it": mib(freed.device_allocated_bytes),
        "saved": mib(saved),
        "predicted to save": mib(found.zero_grad_saves_bytes),
        "ratio": round(found.zero_grad_saves_bytes / saved, 3) if saved else "–",
        "off, of the peak %": round(100 * (found.zero_grad_saves_bytes - saved) / before, 2),
    }


def measured_bytes(config: kit.Config, module: Any, data: Any) -> int:
    """The peak of a real fit."""
    trial = kit.fit(config, module, data)
    trial.wait()
    if trial.state != "COMPLETE":
        raise RuntimeError(f"{trial.state}: {trial.message}")
    return int(trial.event("memory_measured", "device_allocated_bytes"))


def mib(size: int) -> float:
    return round(size / 2**20, 2)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=MODELS, help="only this one")
    parser.add_argument("--strategy", choices=STRATEGIES, help="only this one")
    parser.add_argument("--record", action="store_true", help="append the table to benchmarks/results.jsonl")
    parser.add_argument("--answers", type=Path, help="where rows are kept and taken from")
    asked = parser.parse_args()
    names, strategies = [asked.model] if asked.model else MODELS, [asked.strategy] if asked.strategy else STRATEGIES
    rows = [kept_case(name, strategy, asked.answers) for strategy in strategies for name in names]
    publish("what freeing gradients after the step saves", rows, record=asked.record)


if __name__ == "__main__":
    main()
