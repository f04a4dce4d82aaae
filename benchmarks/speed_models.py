"""Thirty models whose steps are predicted and measured (`benchmarks/speed.py`), chosen before the prediction was tuned.

Each has two batch sizes. Twelve are `held out`: no cost of kit is fitted to them, and they are reported apart. Models
of transformers, timm, MONAI, x-transformers and others are built from configurations with random weights; nothing is
downloaded. A batch is drawn once and given again, so that a step waits for no data.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule
from published_models import name_operators_of_torchvision
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader, IterableDataset

from kit.machine.processes import slowed
from kit.models import Field
from kit.trial.meters import CpuPace
from kit.trial.trial import Trial

PEERS = Path(__file__).parents[1] / ".peers"
if str(PEERS) not in sys.path:
    sys.path.append(str(PEERS))
name_operators_of_torchvision()  # timm imports it, and so does transformers

Made = tuple[nn.Module, tuple[Field, ...]]
"""A model and the fields of its samples."""


class Step(LightningModule):
    """Trains a model of the list on a loss of its kind."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.made = MODELS[name]
        self.model = self.made.make()[0]

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:  # noqa: ARG002
        return LOSSES[self.made.loss](self.model, batch)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-4)


class _SameBatch(IterableDataset[Any]):
    """Prints the pace of the CPU before each batch."""

    def __init__(self, name: str, batch_size: int) -> None:
        self.name, self.batch_size = name, batch_size

    def __iter__(self) -> Iterator[Any]:
        generator = torch.Generator().manual_seed(0)
        fields = MODELS[self.name].fields()
        rows = [[field.draw(generator) for field in fields] for _ in range(self.batch_size)]
        batch = tuple(torch.stack(column) for column in zip(*rows, strict=True))
        while True:
            print_pace()
            yield batch


_PACE, _CPU = "pace", CpuPace(torch.device("cpu"))


def print_pace() -> None:
    """In the time that a step waits for data, which counts for none. Of several ranks one asks while others wait."""
    _meet()
    if not (dist.is_initialized() and dist.get_rank()):
        print(_PACE, _CPU.seconds(), flush=True)
    _meet()


def _meet() -> None:
    if dist.is_initialized():
        dist.barrier()


def steps_at_paces(trial: Trial, warm_up: int) -> list[tuple[float, float]]:
    """(seconds without the wait for data, pace before and after) of each step after warm-up."""
    lines = [line.split() for line in trial.paths.log(0).read_text().splitlines()]
    paces = [float(line[1]) for line in lines if len(line) == 2 and line[0] == _PACE]
    found = []
    for step in trial.steps:
        number = int(step["step"])
        before = paces[number : number + 2]  # a batch is fetched while the one before it is not trained on yet
        if number > warm_up and before:
            parts = sum(float(step.get(f"{part}_seconds") or 0.0) for part in _PARTS)
            found.append((parts, statistics.fmean(before)))
    return found


def at_fastest(seconds: float, pace_seconds: float, fastest_seconds: float, computing_fraction: float) -> float:
    """A step as it would be with the CPU at its fastest."""
    return seconds / slowed(max(1.0, pace_seconds / fastest_seconds), computing_fraction)


_PARTS = ("transfer", "forward", "backward", "communication", "optimizer", "other")


def loader(name: str, batch_size: int) -> DataLoader[Any]:
    """Gives the same batch for ever."""
    return DataLoader(_SameBatch(name, batch_size), batch_size=None)


def _next_token(model: nn.Module, batch: Any) -> Tensor:
    out = model(batch[0])
    logits = getattr(out, "logits", out)
    return functional.cross_entropy(logits[:, :-1].flatten(0, 1).float(), batch[0][:, 1:].flatten())


def _classes(model: nn.Module, batch: Any) -> Tensor:
    out = model(batch[0])
    return functional.cross_entropy(getattr(out, "logits", out).float(), batch[1])


def _dense(model: nn.Module, batch: Any) -> Tensor:
    return functional.mse_loss(model(batch[0]).float(), batch[1])


def _own(model: nn.Module, batch: Any) -> Tensor:
    return model(*batch)


LOSSES: dict[str, Callable[[nn.Module, Any], Tensor]] = {
    "next token": _next_token, "classes": _classes, "dense": _dense, "own": _own,
}  # fmt: skip


@dataclass(frozen=True)
class Model:
    make: Callable[[], Made]
    loss: str
    batch_sizes: tuple[int, int]
    family: str
    held_out: bool = False

    def fields(self) -> tuple[Field, ...]:
        with torch.device("meta"):
            return self.make()[1]


MODELS: dict[str, Model] = {}


def model(
    loss: str, sizes: tuple[int, int], family: str, *, held_out: bool = False
) -> Callable[[Callable[[], Made]], Callable[[], Made]]:
    def note(make: Callable[[], Made]) -> Callable[[], Made]:
        MODELS[make.__name__] = Model(make, loss, sizes, family, held_out)
        return make

    return note


def _image(side: int, channels: int = 3, classes: int = 100) -> tuple[Field, ...]:
    return Field(shape=(channels, side, side)), Field(below=classes)


def _tokens(length: int, vocabulary: int) -> tuple[Field, ...]:
    return (Field(shape=(length,), below=vocabulary),)


# -- transformers


@model("next token", (4, 8), "transformer")
def gpt2() -> Made:
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(vocab_size=4000, n_positions=128, n_embd=256, n_layer=4, n_head=4)
    return GPT2LMHeadModel(config), _tokens(128, 4000)


@model("next token", (2, 4), "transformer")
def llama() -> Made:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=4000,
        hidden_size=256,
        intermediate_size=688,
        num_hidden_layers=4,
        num_attention_heads=8,
        num_key_value_heads=2,
    )
    return LlamaForCausalLM(config), _tokens(256, 4000)


@model("classes", (8, 16), "transformer")
def bert() -> Made:
    from transformers import BertConfig, BertForSequenceClassification

    config = BertConfig(
        vocab_size=5000,
        hidden_size=256,
        num_hidden_layers=4,
        num_attention_heads=4,
        intermediate_size=1024,
        num_labels=10,
    )
    return BertForSequenceClassification(config), (*_tokens(64, 5000), Field(below=10))


@model("classes", (8, 16), "transformer", held_out=True)
def vit() -> Made:
    from transformers import ViTConfig, ViTForImageClassification

    config = ViTConfig(
        hidden_size=192,
        num_hidden_layers=6,
        num_attention_heads=3,
        intermediate_size=768,
        image_size=96,
        patch_size=16,
        num_labels=100,
    )
    return ViTForImageClassification(config), _image(96)


class _T5(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        from transformers import T5Config, T5ForConditionalGeneration

        self.model = T5ForConditionalGeneration(
            T5Config(
                vocab_size=4000,
                d_model=192,
                d_kv=32,
                d_ff=768,
                num_layers=3,
                num_heads=6,
                decoder_start_token_id=0,
                pad_token_id=0,
            )
        )

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        return self.model(input_ids=source, labels=target).loss


@model("own", (4, 8), "transformer", held_out=True)
def t5() -> Made:
    return _T5(), (Field(shape=(96,), below=4000), Field(shape=(48,), below=4000))


@model("next token", (4, 8), "transformer", held_out=True)
def x_transformer() -> Made:
    from x_transformers import Decoder, TransformerWrapper

    return TransformerWrapper(
        num_tokens=3000, max_seq_len=160, attn_layers=Decoder(dim=192, depth=4, heads=6)
    ), _tokens(160, 3000)


@model("next token", (2, 6), "transformer")
def kit_gpt() -> Made:
    from kit.models.gpt import GPT

    return GPT(vocabulary=2048, width=384, heads=6, layers=3, context=192), _tokens(192, 2048)


@model("classes", (16, 32), "transformer")
def torch_encoder() -> Made:
    layer = nn.TransformerEncoderLayer(128, 4, 512, batch_first=True)
    body = nn.Sequential(nn.Embedding(2000, 128), nn.TransformerEncoder(layer, 3), _Pool(), nn.Linear(128, 10))
    return body, (*_tokens(64, 2000), Field(below=10))


class _Pool(nn.Module):
    def forward(self, values: Tensor) -> Tensor:
        return values.mean(1)


# -- convolutions


def _timm(name: str, side: int, **arguments: Any) -> Made:
    import timm

    return timm.create_model(name, num_classes=100, **arguments), _image(side)


@model("classes", (4, 8), "convolution")
def resnet18() -> Made:
    return _timm("resnet18", 96)


@model("classes", (4, 12), "convolution")
def mobilenet() -> Made:
    return _timm("mobilenetv3_small_100", 96)


@model("classes", (4, 8), "convolution", held_out=True)
def efficientnet() -> Made:
    return _timm("efficientnet_b0", 64)


@model("classes", (4, 8), "convolution", held_out=True)
def convnext() -> Made:
    return _timm("convnext_atto", 96)


@model("classes", (4, 8), "convolution")
def regnet() -> Made:
    return _timm("regnetx_002", 96)


@model("classes", (4, 8), "transformer")
def timm_vit() -> Made:
    return _timm("vit_tiny_patch16_224", 112, img_size=112)


@model("classes", (2, 4), "convolution", held_out=True)
def mixer() -> Made:
    return _timm("gmixer_12_224", 112, img_size=112)


@model("classes", (2, 4), "convolution")
def densenet() -> Made:
    return _timm("densenet121", 64)


@model("dense", (2, 4), "convolution")
def monai_unet() -> Made:
    from monai.networks.nets import UNet

    fields = Field(shape=(1, 96, 96)), Field(shape=(2, 96, 96))
    return UNet(
        spatial_dims=2, in_channels=1, out_channels=2, channels=(16, 32, 64, 128), strides=(2, 2, 2), num_res_units=2
    ), fields


@model("dense", (1, 2), "convolution", held_out=True)
def monai_segresnet_3d() -> Made:
    from monai.networks.nets import SegResNet

    fields = Field(shape=(1, 32, 32, 32)), Field(shape=(2, 32, 32, 32))
    return SegResNet(spatial_dims=3, in_channels=1, out_channels=2, init_filters=8), fields


@model("dense", (2, 4), "convolution")
def kit_unet() -> Made:
    from kit.models.unet import ConvolutionBlock

    body = nn.Sequential(
        ConvolutionBlock(4, 32),
        nn.MaxPool2d(2),
        ConvolutionBlock(32, 64),
        nn.Upsample(scale_factor=2),
        ConvolutionBlock(64, 32),
        nn.Conv2d(32, 4, 1),
    )
    return body, (Field(shape=(4, 96, 96)), Field(shape=(4, 96, 96)))


@model("classes", (32, 64), "convolution")
def mnist() -> Made:
    body = nn.Sequential(
        nn.Conv2d(1, 32, 3), nn.ReLU(), nn.Conv2d(32, 64, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Dropout(0.25),
        nn.Flatten(), nn.Linear(9216, 128), nn.ReLU(), nn.Dropout(0.5), nn.Linear(128, 10),
    )  # fmt: skip
    return body, _image(28, 1, 10)


@model("dense", (64, 256), "dense")
def lightning_autoencoder() -> Made:
    body = nn.Sequential(
        nn.Linear(784, 512), nn.ReLU(), nn.Linear(512, 64), nn.Linear(64, 512), nn.ReLU(), nn.Linear(512, 784)
    )
    return body, (Field(shape=(784,)), Field(shape=(784,)))


# -- recurrent


class _Recurrent(nn.Module):
    def __init__(self, kind: str, inputs: int, width: int, out: int, layers: int, vocabulary: int = 0) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocabulary, inputs) if vocabulary else nn.Identity()
        self.body = getattr(nn, kind)(inputs, width, layers, batch_first=True)
        self.head, self.whole = nn.Linear(width, out), bool(vocabulary)

    def forward(self, values: Tensor) -> Tensor:
        found = self.body(self.embed(values))[0]
        return self.head(found if self.whole else found[:, -1])


@model("next token", (8, 16), "recurrent")
def lstm_language() -> Made:
    return _Recurrent("LSTM", 192, 192, 2000, 2, vocabulary=2000), _tokens(48, 2000)


@model("classes", (16, 64), "recurrent", held_out=True)
def gru() -> Made:
    return _Recurrent("GRU", 32, 128, 10, 2), (Field(shape=(40, 32)), Field(below=10))


@model("classes", (16, 64), "recurrent")
def lstm_series() -> Made:
    return _Recurrent("LSTM", 16, 96, 10, 1), (Field(shape=(64, 16)), Field(below=10))


# -- recommenders and tables


class _TwoTowers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.users, self.items = nn.Embedding(50_000, 64), nn.Embedding(20_000, 64)
        self.body = nn.Sequential(nn.Linear(128, 256), nn.ReLU(), nn.Linear(256, 64), nn.ReLU(), nn.Linear(64, 1))

    def forward(self, users: Tensor, items: Tensor, clicked: Tensor) -> Tensor:
        logits = self.body(torch.cat([self.users(users), self.items(items)], -1))[:, 0]
        return functional.binary_cross_entropy_with_logits(logits.float(), clicked)


@model("own", (256, 1024), "recommender")
def two_towers() -> Made:
    return _TwoTowers(), (Field(below=50_000), Field(below=20_000), Field())


class _CrossNetwork(nn.Module):
    """Deep and cross network (Wang et al. 2017) over eight categories and sixteen numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.tables = nn.ModuleList(nn.Embedding(2000, 16) for _ in range(8))
        self.cross = nn.ModuleList(nn.Linear(144, 144) for _ in range(3))
        self.deep = nn.Sequential(nn.Linear(144, 256), nn.BatchNorm1d(256), nn.ReLU(), nn.Linear(256, 128), nn.ReLU())
        self.head = nn.Linear(272, 1)

    def forward(self, categories: Tensor, numbers: Tensor, clicked: Tensor) -> Tensor:
        first = torch.cat([table(categories[:, at]) for at, table in enumerate(self.tables)] + [numbers], -1)
        crossed = first
        for layer in self.cross:
            crossed = first * layer(crossed) + crossed
        logits = self.head(torch.cat([crossed, self.deep(first)], -1))[:, 0]
        return functional.binary_cross_entropy_with_logits(logits.float(), clicked)


@model("own", (256, 1024), "recommender", held_out=True)
def cross_network() -> Made:
    return _CrossNetwork(), (Field(shape=(8,), below=2000), Field(shape=(16,)), Field())


class _TabNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        from pytorch_tabnet.tab_network import TabNet

        self.body = TabNet(input_dim=32, output_dim=10, n_d=16, n_a=16, group_attention_matrix=torch.eye(32))

    def forward(self, values: Tensor) -> Tensor:
        return self.body(values)[0]


@model("classes", (256, 1024), "table", held_out=True)
def tabnet() -> Made:
    return _TabNet(), (Field(shape=(32,)), Field(below=10))


class _FeatureTransformer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        from rtdl_revisiting_models import FTTransformer

        settings = FTTransformer.get_default_kwargs(n_blocks=2)
        self.body = FTTransformer(n_cont_features=20, cat_cardinalities=[], d_out=10, **settings)

    def forward(self, values: Tensor) -> Tensor:
        return self.body(values, None)


@model("classes", (64, 128), "table", held_out=True)
def ft_transformer() -> Made:
    return _FeatureTransformer(), (Field(shape=(20,)), Field(below=10))


@model("classes", (256, 1024), "table")
def perceptron() -> Made:
    body = nn.Sequential(
        nn.Linear(64, 512),
        nn.BatchNorm1d(512),
        nn.SiLU(),
        nn.Linear(512, 512),
        nn.BatchNorm1d(512),
        nn.SiLU(),
        nn.Linear(512, 10),
    )
    return body, (Field(shape=(64,)), Field(below=10))


class _Topics(nn.Module):
    """A topic model of counts by a variational encoder (ProdLDA, Srivastava and Sutton 2017)."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(
            nn.Linear(2000, 128), nn.Softplus(), nn.Linear(128, 128), nn.Softplus(), nn.Dropout(0.2)
        )
        self.mean, self.log_variance = nn.Linear(128, 32), nn.Linear(128, 32)
        self.topics = nn.Linear(32, 2000, bias=False)

    def forward(self, counts: Tensor) -> Tensor:
        hidden = self.encoder(counts)
        mean, log_variance = self.mean(hidden), self.log_variance(hidden)
        shares = torch.softmax(mean + torch.randn_like(mean) * (0.5 * log_variance).exp(), -1)
        words = torch.log_softmax(self.topics(shares).float(), -1)
        away = 0.5 * (mean**2 + log_variance.exp() - log_variance - 1).sum(-1)
        return (away - (words * counts).sum(-1)).mean()


@model("own", (64, 256), "topics")
def topics() -> Made:
    return _Topics(), (Field(shape=(2000,)),)


@model("dense", (2, 4), "graph", held_out=True)
def graph_convolution() -> Made:
    return _Graph(), (Field(shape=(256, 32)), Field(shape=(256, 8)))


class _Graph(nn.Module):
    """Two graph convolutions (Kipf and Welling 2017) on a ring of 256 nodes, by gather and scatter."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(32, 128), nn.Linear(128, 8)])
        nodes = torch.arange(256)
        self.register_buffer("source", nodes.repeat(8))
        self.register_buffer("target", torch.cat([(nodes + step) % 256 for step in range(8)]))

    def forward(self, values: Tensor) -> Tensor:
        for layer in self.layers:
            messages = layer(values)[:, self.source]
            values = (
                torch.zeros(*values.shape[:2], messages.shape[-1], dtype=messages.dtype, device=messages.device)
                .index_add(1, self.target, messages)
                .relu()
            )
        return values
