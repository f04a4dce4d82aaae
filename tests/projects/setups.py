"""Trainings as people write them with the libraries of the field: a module and its data each, small, made anew.

Nothing here knows of kit. Each library is imported where it is used, so that a rank loads the one that it needs.
"""

from __future__ import annotations

import copy

import numpy as np
import torch
from lightning.pytorch import LightningDataModule, LightningModule
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, Dataset, TensorDataset

BATCH, SAMPLES = 4, 64


def drawn(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def loader(*tensors, **options):
    return DataLoader(TensorDataset(*tensors), batch_size=BATCH, **options)


# -- language models


class NanoGPT(LightningModule):
    """Tied embeddings, decay for matrices alone, a schedule with warm-up, gradients logged: as nanoGPT trains."""

    def __init__(self, vocabulary=64, context=16, width=32, layers=2):
        super().__init__()
        self.token, self.place = nn.Embedding(vocabulary, width), nn.Embedding(context, width)
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(width, 2, 4 * width, dropout=0.0, batch_first=True, norm_first=True)
            for _ in range(layers)
        )
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, vocabulary, bias=False)
        self.head.weight = self.token.weight

    def forward(self, tokens):
        length = tokens.shape[1]
        mask = nn.Transformer.generate_square_subsequent_mask(length, device=tokens.device)
        values = self.token(tokens) + self.place(torch.arange(length, device=tokens.device))
        for block in self.blocks:
            values = block(values, src_mask=mask, is_causal=True)
        return self.head(self.norm(values))

    def training_step(self, batch, batch_idx):
        loss = functional.cross_entropy(self(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())
        self.log("loss", loss, prog_bar=True)
        return loss

    def configure_optimizers(self):
        decayed = [one for one in self.parameters() if one.dim() >= 2]
        others = [one for one in self.parameters() if one.dim() < 2]
        groups = [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
        optimizer = torch.optim.AdamW(groups, lr=1e-3, betas=(0.9, 0.95))
        warm = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 4))
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": warm, "interval": "step"}}


class Windows(Dataset):
    """Windows of one long row of tokens, as nanoGPT's memory map."""

    def __init__(self, context=16):
        self.tokens, self.context = np.random.default_rng(0).integers(64, size=2048).astype(np.uint16), context

    def __len__(self):
        return SAMPLES

    def __getitem__(self, index):
        first = index * self.context
        return torch.from_numpy(self.tokens[first : first + self.context + 1].astype(np.int64))


def windows():
    return DataLoader(Windows(), batch_size=BATCH)


class Translator(LightningModule):
    """Lightning's own example of a transformer, with its own loss."""

    def __init__(self):
        from lightning.pytorch.demos.transformer import Transformer

        super().__init__()
        self.model = Transformer(vocab_size=64, ninp=16, nhead=2, nhid=16, nlayers=2, dropout=0.0)

    def training_step(self, batch, batch_idx):
        inputs, target = batch
        return functional.nll_loss(self.model(inputs, target), target.view(-1))

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


def sentences():
    tokens = torch.randint(64, (SAMPLES, 9), generator=torch.Generator().manual_seed(0))
    return loader(tokens[:, :-1], tokens[:, 1:].contiguous())


class FineTuned(LightningModule):
    """Sequence classification, by the keyword arguments of a batch, with a linear schedule of transformers."""

    def __init__(self, method=None):
        from transformers import AutoModelForSequenceClassification, BertConfig

        super().__init__()
        sizes = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}
        off = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
        config = BertConfig(vocab_size=64, max_position_embeddings=32, num_labels=3, **sizes, **off)
        self.model = AutoModelForSequenceClassification.from_config(config)
        if method:
            from peft import get_peft_config, get_peft_model

            self.model = get_peft_model(self.model, get_peft_config({"task_type": "SEQ_CLS", **method}))

    def training_step(self, batch, batch_idx):
        found = self.model(**batch)
        self.log("accuracy", (found.logits.argmax(-1) == batch["labels"]).float().mean())
        return found.loss

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", self.model(**batch).loss, sync_dist=True)

    def configure_optimizers(self):
        from transformers import get_linear_schedule_with_warmup

        optimizer = torch.optim.AdamW([one for one in self.parameters() if one.requires_grad], lr=1e-3)
        steps = int(self.trainer.estimated_stepping_batches)
        rates = get_linear_schedule_with_warmup(optimizer, steps // 10, steps)
        return [optimizer], [{"scheduler": rates, "interval": "step"}]


def adapted():
    return FineTuned({"peft_type": "LORA", "r": 2, "target_modules": ["query", "value"]})


def labelled():
    """Rows of the library datasets in torch's format, for training and for validation, as its examples make them."""
    from datasets import Dataset as Rows

    random = np.random.default_rng(0)
    tokens, labels = random.integers(64, size=(SAMPLES, 8)), random.integers(3, size=SAMPLES)
    rows = Rows.from_dict(
        {"input_ids": tokens.tolist(), "attention_mask": np.ones_like(tokens).tolist(), "labels": labels}
    )
    rows = rows.with_format("torch")
    return DataLoader(rows, batch_size=BATCH), DataLoader(rows.select(range(8)), batch_size=BATCH)


class Wrapped(LightningModule):
    """A model of x-transformers, which gives its own loss."""

    def __init__(self):
        from x_transformers import AutoregressiveWrapper, Decoder, TransformerWrapper

        super().__init__()
        layers = Decoder(dim=16, depth=2, heads=2, rotary_pos_emb=True)
        self.model = AutoregressiveWrapper(TransformerWrapper(num_tokens=64, max_seq_len=17, attn_layers=layers))

    def training_step(self, batch, batch_idx):
        return self.model(batch)

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=1e-3)


# -- images


class Adversaries(LightningModule):
    """Two networks and two optimizers by hand, as Lightning's GAN."""

    def __init__(self):
        super().__init__()
        self.automatic_optimization = False
        self.generator = nn.Sequential(nn.Linear(4, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 8))
        self.discriminator = nn.Sequential(nn.Linear(8, 16), nn.LeakyReLU(0.2), nn.Linear(16, 1))

    def training_step(self, batch, batch_idx):
        (real,) = batch
        first, second = self.optimizers()
        noise = torch.linspace(-1, 1, real.shape[0] * 4, device=real.device).view(-1, 4)
        ones, zeros = torch.ones(len(real), 1, device=real.device), torch.zeros(len(real), 1, device=real.device)
        self.toggle_optimizer(first)
        loss = functional.binary_cross_entropy_with_logits(self.discriminator(self.generator(noise)), ones)
        self.log("generator_loss", loss)
        self.manual_backward(loss)
        first.step()
        first.zero_grad()
        self.untoggle_optimizer(first)
        self.toggle_optimizer(second)
        known = functional.binary_cross_entropy_with_logits(self.discriminator(real), ones)
        false = self.discriminator(self.generator(noise).detach())
        loss = (known + functional.binary_cross_entropy_with_logits(false, zeros)) / 2
        self.log("discriminator_loss", loss)
        self.manual_backward(loss)
        second.step()
        second.zero_grad()
        self.untoggle_optimizer(second)

    def configure_optimizers(self):
        rate = {"lr": 2e-3, "betas": (0.5, 0.999)}
        networks = self.generator, self.discriminator
        return [torch.optim.Adam(network.parameters(), **rate) for network in networks], []


def reals():
    return loader(drawn(SAMPLES, 8))


class Segmenter(LightningModule):
    """MONAI's U-Net, loss and metric on its dictionaries."""

    def __init__(self):
        from monai.losses import DiceCELoss
        from monai.networks.nets import UNet

        super().__init__()
        self.model = UNet(spatial_dims=2, in_channels=1, out_channels=2, channels=(4, 8), strides=(2,), norm="batch")
        self.loss = DiceCELoss(to_onehot_y=True, softmax=True)

    def training_step(self, batch, batch_idx):
        return self.loss(self.model(batch["image"]), batch["label"])

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=1e-3)


def scans():
    from monai.data import CacheDataset
    from monai.data import DataLoader as Loader
    from monai.transforms import Compose, EnsureChannelFirstd, ScaleIntensityd

    random = np.random.default_rng(0)
    items = [
        {"image": random.random((16, 16), "float32"), "label": random.integers(2, size=(16, 16)).astype("float32")}
        for _ in range(SAMPLES)
    ]
    steps = [EnsureChannelFirstd(("image", "label"), channel_dim="no_channel"), ScaleIntensityd("image")]
    return Loader(CacheDataset(items, Compose(steps), progress=False), batch_size=BATCH)


class Denoiser(LightningModule):
    """A U-Net and a noise schedule of diffusers."""

    def __init__(self):
        from diffusers import DDPMScheduler, UNet2DModel

        super().__init__()
        shape = {"sample_size": 8, "in_channels": 1, "out_channels": 1, "layers_per_block": 1, "norm_num_groups": 4}
        blocks = {"block_out_channels": (4, 8), "down_block_types": ("DownBlock2D", "AttnDownBlock2D")}
        self.model = UNet2DModel(**shape, **blocks, up_block_types=("AttnUpBlock2D", "UpBlock2D"), attention_head_dim=4)
        self.schedule = DDPMScheduler(num_train_timesteps=100)

    def training_step(self, batch, batch_idx):
        images, noise, times = batch
        noisy = self.schedule.add_noise(images, noise, times)
        return functional.mse_loss(self.model(noisy, times).sample, noise)

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


def noisy():
    times = torch.randint(100, (SAMPLES,), generator=torch.Generator().manual_seed(0))
    return loader(drawn(SAMPLES, 1, 8, 8), drawn(SAMPLES, 1, 8, 8, seed=1), times)


class Filters(LightningModule):
    """A model of segmentation_models_pytorch with its own loss."""

    def __init__(self):
        import segmentation_models_pytorch as smp

        super().__init__()
        self.model = smp.Unet("resnet18", encoder_weights=None, in_channels=1, classes=1)
        self.loss = smp.losses.DiceLoss("binary")

    def training_step(self, batch, batch_idx):
        return self.loss(self.model(batch[0]), batch[1])

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=1e-4)


def masks():
    return loader(drawn(SAMPLES, 1, 32, 32), (drawn(SAMPLES, 1, 32, 32, seed=1) > 0).float())


def pictures():
    return loader(drawn(SAMPLES, 3, 32, 32), torch.arange(SAMPLES) % 4)


# -- graphs, tables and series


class Graphs(LightningModule):
    """Graphs of unequal size, classified by convolutions of torch_geometric."""

    def __init__(self):
        from torch_geometric.nn import GCNConv, global_mean_pool

        super().__init__()
        self.first, self.second, self.pool = GCNConv(3, 16), GCNConv(16, 16), global_mean_pool
        self.head = nn.Linear(16, 2)

    def training_step(self, data, batch_idx):
        values = self.first(data.x, data.edge_index).relu()
        values = self.pool(self.second(values, data.edge_index), data.batch)
        loss = functional.cross_entropy(self.head(values), data.y)
        self.log("loss", loss, batch_size=data.num_graphs)
        return loss

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=1e-2)


def graphs() -> LightningDataModule:
    """torch_geometric's own data module for Lightning."""
    from torch_geometric.data import Data
    from torch_geometric.data.lightning import LightningDataset

    made = []
    for place in range(SAMPLES):
        nodes = 4 + place % 5
        ring = torch.stack([torch.arange(nodes), (torch.arange(nodes) + 1) % nodes])
        made.append(Data(x=drawn(nodes, 3, seed=place), edge_index=ring, y=torch.tensor([place % 2])))
    return LightningDataset(made, batch_size=BATCH, shuffle=False)


def forecast():
    """A network of pytorch-forecasting, which is a LightningModule of its own."""
    from pytorch_forecasting import NBeats

    return NBeats.from_dataset(series(), learning_rate=1e-3, widths=[16, 16], backcast_loss_ratio=0.1)


def series():
    import pandas
    from pytorch_forecasting import TimeSeriesDataSet

    rows = 64
    values = np.sin(np.arange(rows) / 5) + np.random.default_rng(0).normal(scale=0.1, size=rows)
    table = pandas.DataFrame({"time": np.arange(rows), "value": values, "group": "a"})
    return TimeSeriesDataSet(
        table, time_idx="time", target="value", group_ids=["group"], time_varying_unknown_reals=["value"],
        max_encoder_length=8, max_prediction_length=4, min_encoder_length=8, min_prediction_length=4,
    )  # fmt: skip


def forecasts():
    return series().to_dataloader(train=True, batch_size=BATCH, shuffle=False, num_workers=0)


class Patches(Dataset):
    """Patches of an xarray object, by xbatcher."""

    def __init__(self):
        import xarray
        import xbatcher

        values = np.random.default_rng(0).random((SAMPLES, 8, 8), "float32")
        given = xarray.DataArray(values, dims=("time", "y", "x"), name="v")
        self.batches = xbatcher.BatchGenerator(given, {"time": 1, "y": 8, "x": 8})

    def __len__(self):
        return len(self.batches)

    def __getitem__(self, index):
        return torch.from_numpy(self.batches[index].values.copy())


class Filled(LightningModule):
    """An autoencoder with an average of its weights, and a head that no step uses."""

    def __init__(self, unused=False):
        super().__init__()
        self.encoder = nn.Sequential(nn.Conv2d(1, 4, 3, padding=1), nn.ReLU(), nn.Conv2d(4, 1, 3, padding=1))
        self.teacher = copy.deepcopy(self.encoder).requires_grad_(False)
        self.unused = nn.Linear(4, 4) if unused else None

    def training_step(self, batch, batch_idx):
        values = batch[0] if isinstance(batch, list) else batch
        with torch.no_grad():
            wanted = self.teacher(values)
        made = self.encoder(values)
        return functional.mse_loss(made, values) + functional.mse_loss(made, wanted)

    @torch.no_grad()
    def on_train_batch_end(self, outputs, batch, batch_idx):
        for mine, theirs in zip(self.teacher.parameters(), self.encoder.parameters(), strict=True):
            mine.lerp_(theirs, 0.1)

    def configure_optimizers(self):
        return torch.optim.SGD(self.encoder.parameters(), lr=0.1)


def with_unused_head():
    return Filled(unused=True)


def streamed():
    """Objects that litdata wrote, read back by its streaming data set."""
    import litdata

    folder = written()
    return litdata.StreamingDataLoader(litdata.StreamingDataset(folder), batch_size=BATCH)


def written():
    import tempfile
    from pathlib import Path

    from litdata.streaming import Cache

    folder = Path(tempfile.gettempdir()) / f"litdata-{SAMPLES}"
    if not (folder / "index.json").exists():
        cache = Cache(str(folder), chunk_size=16)
        for place in range(SAMPLES):
            cache[place] = drawn(1, 8, 8, seed=place)
        cache.done()
        cache.merge()
    return str(folder)


def steps():
    """Series and the same one step later."""
    values = drawn(SAMPLES, 13, 4)
    return loader(values[:, :-1], values[:, 1:].contiguous())
