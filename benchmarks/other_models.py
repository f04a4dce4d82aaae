"""Peak memory of models from other packages, predicted beside three real steps on the CPU, in three precisions.

    python benchmarks/other_models.py [--only NAME ...] [--record]

Small configurations with random weights and random data; nothing is downloaded. The truth is what the allocator of a
trial (`kit.fit`) held at its most. Models that are `held_out` were chosen after the rules, in three groups (the third:
`physics_models.py`), and are told as they were measured first: nothing in kit was changed for them before. They need
packages beside kit's, whose operators for boxes do not run:

    pip install --no-deps --target .peers transformers==5.13.1 diffusers==0.38.0 timm==1.0.31 monai x-transformers
    pip install --no-deps --target .peers conformer einops einx frozendict loguru torch-einops-utils regex pillow
    pip install --no-deps --target .peers accelerate 'huggingface_hub<2' tokenizers==0.22.1 safetensors typer httpx
    pip install --no-deps --target .peers torchvision==0.28.0
"""

from __future__ import annotations

import argparse
import contextlib
import os
import statistics
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import physics_models
import torch
from lightning.pytorch import LightningModule
from publish import publish
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

import kit
from kit.studies.series import measured_bytes

PRECISIONS = ("32-true", "bf16-mixed", "bf16-true")
CLASSES, WORDS, LENGTH, BATCHES = 5, 2000, 64, 5
Tensors = tuple[Tensor, ...]


@dataclass(frozen=True)
class Case:
    """A model by the name under which a package has it, what it is given and how a loss comes of it."""

    build: Callable[[], nn.Module]
    batch: Callable[[], Tensors]
    """One batch."""
    loss: Callable[[nn.Module, Tensors], Tensor]
    held_out: str = ""
    """"yes" for the first group, "second" and "physics" for the others."""


PEERS = str(Path(__file__).resolve().parents[1] / ".peers")


def find_packages() -> None:
    """Let them be imported here, after Lightning has looked which packages there are; with names for torchvision's
    operators, which it has rules for when it is imported and nothing calls."""
    if PEERS not in sys.path:
        sys.path.append(PEERS)
    for name in ("nms", "qnms"):
        with contextlib.suppress(RuntimeError):  # made before
            torch.library.define(f"torchvision::{name}", "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")


def transformer(model: str, config: str, **settings: Any) -> Callable[[], nn.Module]:
    def build() -> nn.Module:
        import transformers

        made: nn.Module = getattr(transformers, model)(getattr(transformers, config)(**settings))
        return made

    return build


def other(package: str, name: str, *args: Any, **settings: Any) -> Callable[[], nn.Module]:
    def build() -> nn.Module:
        import importlib

        made: nn.Module = getattr(importlib.import_module(package), name)(*args, **settings)
        return made

    return build


def pictures_model(name: str, **settings: Any) -> Callable[[], nn.Module]:
    return other("timm", "create_model", name, num_classes=CLASSES, **settings)


def sequence_model() -> nn.Module:
    from x_transformers import AutoregressiveWrapper, Decoder, TransformerWrapper

    layers = Decoder(dim=128, depth=2, heads=4)
    made: nn.Module = AutoregressiveWrapper(
        TransformerWrapper(num_tokens=WORDS, max_seq_len=LENGTH, attn_layers=layers)
    )
    return made


def tokens(count: int = 8) -> Callable[[], Tensors]:
    return lambda: (torch.randint(3, WORDS, (count, LENGTH)),)


def labelled(*shape: int) -> Callable[[], Tensors]:
    """(samples, ...) with a class for each."""
    return lambda: (torch.randn(shape), torch.randint(0, CLASSES, shape[:1]))


def pictures(side: int = 64, count: int = 8) -> Callable[[], Tensors]:
    return labelled(count, 3, side, side)


def masks(side: int = 64) -> Callable[[], Tensors]:
    return lambda: (torch.randn(8, 3, side, side), torch.randint(0, CLASSES, (8, side, side)))


def volumes(side: int = 32, count: int = 2) -> Callable[[], Tensors]:
    shape = (count, 1, side, side, side)
    return lambda: (torch.randn(shape), torch.randint(0, 2, shape).float())


def of_itself(model: nn.Module, batch: Tensors) -> Tensor:
    loss: Tensor = model(input_ids=batch[0], labels=batch[0]).loss
    return loss


def given(*names: str) -> Callable[[nn.Module, Tensors], Tensor]:
    def loss(model: nn.Module, batch: Tensors) -> Tensor:
        found: Tensor = model(**dict(zip(names, batch, strict=False))).loss
        return found

    return loss


def classified(model: nn.Module, batch: Tensors) -> Tensor:
    return functional.cross_entropy(model(batch[0]), batch[1])


def segmented(model: nn.Module, batch: Tensors) -> Tensor:
    found = model(batch[0])
    found = found[:, 0] if found.dim() > batch[1].dim() else found  # with outputs of lower layers
    return functional.binary_cross_entropy_with_logits(found, batch[1])


def denoised(model: nn.Module, batch: Tensors) -> Tensor:
    steps = torch.zeros(len(batch[0]), dtype=torch.long)
    return functional.mse_loss(model(batch[0], steps).sample, batch[0])


def restored(model: nn.Module, batch: Tensors) -> Tensor:
    return functional.mse_loss(model(batch[0]).sample, batch[0])


def squared(model: nn.Module, batch: Tensors) -> Tensor:
    found: Tensor = model(batch[0]).square().mean()
    return found


TEXT: dict[str, Any] = {"vocab_size": WORDS, "hidden_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
WIDE = {"intermediate_size": 256}
VISION: dict[str, Any] = {
    "image_size": 64, "hidden_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 192,
}  # fmt: skip
NETS = "monai.networks.nets"

CASES: dict[str, Case] = {
    "T5": Case(
        transformer("T5ForConditionalGeneration", "T5Config", vocab_size=WORDS, d_model=128, d_kv=32, d_ff=384,
                    num_layers=2, num_heads=4, decoder_start_token_id=0, pad_token_id=0), tokens(), of_itself),
    "Whisper": Case(
        transformer("WhisperForConditionalGeneration", "WhisperConfig", vocab_size=WORDS, d_model=128, encoder_layers=2,
                    decoder_layers=2, encoder_attention_heads=4, decoder_attention_heads=4, encoder_ffn_dim=512,
                    decoder_ffn_dim=512, max_source_positions=200, max_target_positions=LENGTH, pad_token_id=0,
                    bos_token_id=1, eos_token_id=2, decoder_start_token_id=1),
        lambda: (torch.randn(8, 80, 400), torch.randint(3, WORDS, (8, 20))), given("input_features", "labels")),
    "wav2vec 2": Case(
        transformer("Wav2Vec2ForSequenceClassification", "Wav2Vec2Config", hidden_size=128, num_hidden_layers=2,
                    num_attention_heads=4, conv_dim=(64,) * 7, num_labels=CLASSES, mask_time_prob=0.0, **WIDE),
        labelled(4, 16000), given("input_values", "labels")),
    "ConvBERT": Case(
        transformer("ConvBertForMaskedLM", "ConvBertConfig", embedding_size=128, **TEXT, **WIDE), tokens(), of_itself),
    "SegFormer": Case(
        transformer("SegformerForSemanticSegmentation", "SegformerConfig", num_labels=CLASSES, decoder_hidden_size=64,
                    hidden_sizes=[16, 32, 64, 128]), masks(), given("pixel_values", "labels")),
    "VideoMAE": Case(
        transformer("VideoMAEForVideoClassification", "VideoMAEConfig", num_frames=4, num_labels=CLASSES, **VISION),
        labelled(4, 4, 3, 64, 64), given("pixel_values", "labels")),
    "Mamba": Case(
        transformer("MambaForCausalLM", "MambaConfig", vocab_size=WORDS, hidden_size=64, num_hidden_layers=2,
                    state_size=8), tokens(), of_itself),
    "PatchTST": Case(
        transformer("PatchTSTForPrediction", "PatchTSTConfig", num_input_channels=4, context_length=128, patch_length=8,
                    patch_stride=8, prediction_length=24, d_model=64, num_hidden_layers=2, num_attention_heads=4,
                    ffn_dim=128),
        lambda: (torch.randn(8, 128, 4), torch.randn(8, 24, 4)), given("past_values", "future_values")),
    "x-transformers": Case(sequence_model, tokens(), lambda model, batch: model(batch[0])),
    "Conformer": Case(
        other("conformer", "Conformer", dim=64, depth=2, dim_head=16, heads=4, ff_mult=2, conv_expansion_factor=2,
              conv_kernel_size=15), labelled(8, 100, 64), squared),
    "diffusers U-Net": Case(
        other("diffusers", "UNet2DModel", sample_size=32, block_out_channels=(32, 64, 64), layers_per_block=1,
              down_block_types=("DownBlock2D", "AttnDownBlock2D", "DownBlock2D"),
              up_block_types=("UpBlock2D", "AttnUpBlock2D", "UpBlock2D")), pictures(32), denoised),
    "diffusers VAE": Case(
        other("diffusers", "AutoencoderKL", block_out_channels=(32, 64), norm_num_groups=16,
              down_block_types=("DownEncoderBlock2D",) * 2, up_block_types=("UpDecoderBlock2D",) * 2), pictures(),
        restored),
    "MONAI U-Net": Case(other(NETS, "UNet", 3, 1, 1, (8, 16, 32), (2, 2), num_res_units=1), volumes(), segmented),
    "SegResNet": Case(
        other(NETS, "SegResNet", spatial_dims=3, init_filters=8, in_channels=1, out_channels=1), volumes(), segmented),
    "V-Net": Case(other(NETS, "VNet", spatial_dims=3, in_channels=1, out_channels=1), volumes(), segmented),
    "MaxViT": Case(pictures_model("maxvit_rmlp_pico_rw_256", img_size=64), pictures(), classified),
    "NFNet": Case(pictures_model("dm_nfnet_f0"), pictures(), classified),
    "EfficientViT": Case(pictures_model("efficientvit_b0"), pictures(), classified),
    "Inception": Case(pictures_model("inception_v4"), pictures(96), classified),
    "VGG": Case(pictures_model("vgg11_bn"), pictures(160, 4), classified),
    "GPT-NeoX": Case(
        transformer("GPTNeoXForCausalLM", "GPTNeoXConfig", **TEXT, **WIDE), tokens(), of_itself, held_out="yes"),
    "Longformer": Case(
        transformer("LongformerForMaskedLM", "LongformerConfig", attention_window=16, max_position_embeddings=130,
                    **TEXT, **WIDE), tokens(), of_itself, held_out="yes"),
    "DINOv2": Case(
        transformer("Dinov2ForImageClassification", "Dinov2Config", image_size=56, hidden_size=96, num_hidden_layers=2,
                    num_attention_heads=4, num_labels=CLASSES), pictures(56), given("pixel_values", "labels"),
        held_out="yes"),
    "BEiT": Case(
        transformer("BeitForImageClassification", "BeitConfig", num_labels=CLASSES, patch_size=16, **VISION),
        pictures(), given("pixel_values", "labels"), held_out="yes"),
    "PatchTSMixer": Case(
        transformer("PatchTSMixerForPrediction", "PatchTSMixerConfig", context_length=128, prediction_length=24,
                    num_input_channels=4, patch_length=8, patch_stride=8, d_model=32, num_layers=2),
        lambda: (torch.randn(8, 128, 4), torch.randn(8, 24, 4)), given("past_values", "future_values"), held_out="yes"),
    "MONAI Attention U-Net": Case(
        other(NETS, "AttentionUnet", spatial_dims=3, in_channels=1, out_channels=1, channels=(8, 16, 32),
              strides=(2, 2)), volumes(), segmented, held_out="yes"),
    "MONAI DynUNet": Case(
        other(NETS, "DynUNet", spatial_dims=3, in_channels=1, out_channels=1, kernel_size=(3, 3, 3), strides=(1, 2, 2),
              upsample_kernel_size=(2, 2), filters=(8, 16, 32)), volumes(), segmented, held_out="yes"),
    "CoaT": Case(pictures_model("coat_lite_tiny", img_size=64), pictures(), classified, held_out="yes"),
    "XCiT": Case(pictures_model("xcit_nano_12_p8_224", img_size=64), pictures(), classified, held_out="yes"),
    "RegNet X": Case(pictures_model("regnetx_002"), pictures(), classified, held_out="yes"),
    "Hiera": Case(pictures_model("hiera_tiny_224", img_size=64), pictures(), classified, held_out="second"),
    "FocalNet": Case(pictures_model("focalnet_tiny_srf"), pictures(), classified, held_out="second"),
    "DaViT": Case(pictures_model("davit_tiny"), pictures(), classified, held_out="second"),
    "FastViT": Case(pictures_model("fastvit_t8"), pictures(), classified, held_out="second"),
    "FNet": Case(
        transformer("FNetForMaskedLM", "FNetConfig", vocab_size=WORDS, hidden_size=128, num_hidden_layers=2, **WIDE),
        tokens(), of_itself, held_out="second"),
    "BigBird": Case(
        transformer("BigBirdForMaskedLM", "BigBirdConfig", block_size=4, num_random_blocks=2, **TEXT, **WIDE), tokens(),
        of_itself, held_out="second"),
    "Nyströmformer": Case(
        transformer("NystromformerForMaskedLM", "NystromformerConfig", segment_means_seq_len=LENGTH, num_landmarks=16,
                    **TEXT, **WIDE), tokens(), of_itself, held_out="second"),
    "ViTMAE": Case(
        transformer("ViTMAEForPreTraining", "ViTMAEConfig", decoder_hidden_size=64, decoder_num_hidden_layers=2,
                    decoder_num_attention_heads=4, decoder_intermediate_size=128, **VISION),
        pictures(), given("pixel_values"), held_out="second"),
    "RWKV": Case(
        transformer("RwkvForCausalLM", "RwkvConfig", vocab_size=WORDS, hidden_size=64, num_hidden_layers=2), tokens(),
        of_itself, held_out="second"),
    "Mamba 2": Case(
        transformer("Mamba2ForCausalLM", "Mamba2Config", vocab_size=WORDS, hidden_size=64, num_hidden_layers=2,
                    state_size=8, num_heads=8, head_dim=16, n_groups=1, chunk_size=16),
        tokens(), of_itself, held_out="second"),
    "diffusers 1-D U-Net": Case(
        other("diffusers", "UNet1DModel", sample_size=256, in_channels=2, out_channels=2, extra_in_channels=64),
        lambda: (torch.randn(4, 2, 256),), denoised, held_out="second"),
    "UNETR": Case(
        other(NETS, "UNETR", in_channels=1, out_channels=1, img_size=(32, 32, 32), feature_size=8, hidden_size=96,
              mlp_dim=192, num_heads=4), volumes(), segmented, held_out="second"),
}  # fmt: skip


CASES |= {name: Case(*parts, held_out="physics") for name, parts in physics_models.CASES.items()}


class Training(LightningModule):
    """One of CASES, with AdamW."""

    def __init__(self, name: str) -> None:
        super().__init__()
        find_packages()
        self.case = CASES[name]
        self.model = self.case.build()

    def training_step(self, batch: Tensors, _: int) -> Tensor:
        return self.case.loss(self.model, batch)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-5)  # random data diverges soon


def loader_of(case: Case) -> DataLoader[Tensors]:
    tensors = case.batch()
    return DataLoader(TensorDataset(*(torch.cat([one] * BATCHES) for one in tensors)), batch_size=len(tensors[0]))


def compare(name: str, precision: str) -> dict[str, Any]:
    case = CASES[name]
    loader = loader_of(case)
    config = kit.Config().replace({
        "hardware.accelerator": "cpu", "hardware.precision": precision, "model.arguments": {"name": name},
        "trial.max_steps": 3, "trial.warmup_steps": 1, "loader.batch_size": loader.batch_size,
        "trial.predict_memory": False,
    })  # fmt: skip
    told = measured = None
    try:  # of what cannot be trained so, as a transform of Fourier's in half precision, both say so
        predicted = kit.predict_memory(config, Training, loader)
        told = None if predicted.verdict == "unknown" else predicted.device_allocated_bytes
    except kit.KitError as error:
        print(name, precision, "is not predicted:", str(error).splitlines()[0], file=sys.stderr)
    try:
        measured = measured_bytes(kit.fit(config, Training, loader).wait())
    except kit.KitError as error:
        print(name, precision, "does not run:", str(error).splitlines()[0], file=sys.stderr)
    return {
        "model": name, "precision": precision, "held out": case.held_out,
        "measured MiB": None if measured is None else round(measured / 2**20, 1),
        "predicted / measured": round(told / measured, 4) if told and measured else None,
    }  # fmt: skip


def in_short(rows: list[dict[str, Any]], held_out: str) -> dict[str, Any]:
    found = [row for row in rows if row["held out"] == held_out and row["measured MiB"] is not None]
    errors = [100 * (row["predicted / measured"] - 1) for row in found if row["predicted / measured"] is not None]
    groups = {"": "looked at", "yes": "held out", "second": "held out, second group", "physics": "weather, physics"}
    return {
        "models": groups[held_out], "predicted": f"{len(errors)} of {len(found)}",
        "median |error| %": statistics.median(map(abs, errors)), "worst %": max(errors, key=abs),
        "low by more than 1 %": sum(error < -1 for error in errors),
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=CASES, default=list(CASES), metavar="NAME")
    parser.add_argument("--record", action="store_true")
    options = parser.parse_args()
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    rows = []
    for name in options.only:
        for precision in PRECISIONS:
            rows.append(compare(name, precision))
            print(*rows[-1].values(), flush=True)
    publish("peak memory of models of other packages", rows, record=options.record)
    held = dict.fromkeys(row["held out"] for row in rows)
    publish("the same, in short", [in_short(rows, which) for which in held], record=options.record)


if __name__ == "__main__":
    main()
