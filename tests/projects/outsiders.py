"""Trainings of libraries that were chosen before a line was written to suit them, each as its own pages show it.

Like `setups`, this knows nothing of kit, and imports a library where it is used.
"""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import numpy as np
import torch
from lightning.pytorch import LightningModule
from setups import BATCH, SAMPLES, drawn, loader
from torch import nn
from torch.nn import functional


class Measured(LightningModule):
    """A classifier with collections of torchmetrics, logged as objects, and the best of them watched."""

    def __init__(self):
        from torchmetrics import MaxMetric, MetricCollection
        from torchmetrics.classification import MulticlassAccuracy, MulticlassCalibrationError, MulticlassF1Score

        super().__init__()
        self.net = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 3))
        found = {"accuracy": MulticlassAccuracy(3), "f1": MulticlassF1Score(3), "ece": MulticlassCalibrationError(3)}
        metrics = MetricCollection(found)
        self.train_metrics, self.val_metrics = metrics.clone("train_"), metrics.clone("val_")
        self.best = MaxMetric()

    def training_step(self, batch, batch_idx):
        found = self.net(batch[0])
        loss = functional.cross_entropy(found, batch[1])
        self.train_metrics.update(found.softmax(-1), batch[1])
        self.log("train_loss", loss)
        self.log_dict(self.train_metrics, on_step=False, on_epoch=True)
        return loss

    def validation_step(self, batch, batch_idx):
        self.val_metrics.update(self.net(batch[0]).softmax(-1), batch[1])
        self.log_dict(self.val_metrics)

    def on_validation_epoch_end(self):
        self.best.update(self.val_metrics["accuracy"].compute())
        self.log("val_best", self.best)

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=1e-2)


def classes():
    values = drawn(SAMPLES, 8)
    labels = values[:, :3].argmax(-1)
    return loader(values, labels), loader(values[:32], labels[:32])


class Flat(LightningModule):
    """Classifies rows of numbers."""

    def __init__(self, features=8, classes=3):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(features, 16), nn.GELU(), nn.Linear(16, classes))

    def training_step(self, batch, batch_idx):
        return functional.cross_entropy(self.net(batch[0]), batch[1])

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)


def tars():
    """Samples in tar files, a share of the files for each rank, in batches that the pipeline makes."""
    import webdataset

    folder = Path(tempfile.gettempdir()) / f"webdataset-{os.getpid()}"
    folder.mkdir(exist_ok=True)
    values = drawn(SAMPLES, 8)
    with webdataset.ShardWriter(str(folder / "part-%02d.tar"), maxcount=SAMPLES // 4, verbose=0) as writer:
        for place, value in enumerate(values):
            sample = {"__key__": f"{place:03}", "x.npy": value.numpy(), "y.cls": int(value[:3].argmax())}
            writer.write(sample)
    files = sorted(map(str, folder.glob("*.tar")))
    found = webdataset.WebDataset(files, shardshuffle=False, nodesplitter=webdataset.split_by_node, empty_check=False)
    found = found.decode().to_tuple("x.npy", "y.cls").map_tuple(torch.from_numpy, lambda label: label).batched(BATCH)
    return webdataset.WebLoader(found, batch_size=None, num_workers=0)


class Contrast(LightningModule):
    """SimCLR: two views of each sample, and the loss of pytorch-metric-learning."""

    def __init__(self):
        from pytorch_metric_learning.losses import NTXentLoss, SelfSupervisedLoss

        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8))
        self.loss = SelfSupervisedLoss(NTXentLoss(temperature=0.1))

    def training_step(self, batch, batch_idx):
        loss = self.loss(self.encoder(batch[0]), self.encoder(batch[1]))
        self.log("loss", loss, prog_bar=True)
        return loss

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


def views():
    values = drawn(SAMPLES, 8)
    return loader(values + 0.1 * drawn(SAMPLES, 8, seed=1), values + 0.1 * drawn(SAMPLES, 8, seed=2))


class Lit(LightningModule):
    """A Pythia of litgpt, made smaller, with its loss in pieces."""

    def __init__(self):
        import litgpt

        super().__init__()
        sizes = {"n_layer": 2, "n_head": 2, "n_embd": 16, "block_size": 32, "intermediate_size": 32}
        self.model = litgpt.GPT(litgpt.Config.from_name("pythia-14m", padded_vocab_size=64, **sizes))

    def training_step(self, batch, batch_idx):
        from litgpt.utils import chunked_cross_entropy

        return chunked_cross_entropy(self.model(batch[:, :-1]), batch[:, 1:], chunk_size=8)

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-3, weight_decay=0.1, betas=(0.9, 0.95))


def estimator():
    """DeepAR of gluonts, whose module and loader are made by it."""
    from gluonts.torch.model.deepar import DeepAREstimator

    return DeepAREstimator(
        freq="h", prediction_length=4, context_length=8, hidden_size=8, num_layers=1, dropout_rate=0.0, lags_seq=[1, 2],
        batch_size=BATCH, num_batches_per_epoch=16,
    )  # fmt: skip


def deep_ar():
    return estimator().create_lightning_module()


def endless():
    """Windows drawn from series without end, of which each rank has its own."""
    from gluonts.dataset.common import ListDataset

    ranks, rank = int(os.environ.get("WORLD_SIZE", 1)), int(os.environ.get("RANK", 0))
    values = np.random.default_rng(0).normal(size=(8, 64)).cumsum(1)
    series = [{"start": "2026-01-01", "target": row} for row in values[rank::ranks]]
    made = estimator()
    np.random.seed(0)
    known = made.create_transformation().apply(ListDataset(series, freq="h"))
    return made.create_training_data_loader(known, made.create_lightning_module())


class Process(LightningModule):
    """A variational Gaussian process of gpytorch with inducing points, which it learns."""

    def __init__(self):
        import gpytorch

        super().__init__()

        class Approximate(gpytorch.models.ApproximateGP):
            def __init__(self, places):
                distribution = gpytorch.variational.CholeskyVariationalDistribution(len(places))
                super().__init__(gpytorch.variational.VariationalStrategy(self, places, distribution))
                self.mean_module = gpytorch.means.ConstantMean()
                self.covar_module = gpytorch.kernels.ScaleKernel(gpytorch.kernels.RBFKernel())

            def forward(self, x):
                return gpytorch.distributions.MultivariateNormal(self.mean_module(x), self.covar_module(x))

        self.model = Approximate(drawn(8, 2, seed=3))
        self.likelihood = gpytorch.likelihoods.GaussianLikelihood()
        self.bound = gpytorch.mlls.VariationalELBO(self.likelihood, self.model, num_data=SAMPLES)

    def training_step(self, batch, batch_idx):
        loss = -self.bound(self.model(batch[0]), batch[1])
        self.log("loss", loss)
        return loss

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=0.01)


def heights():
    places = drawn(SAMPLES, 2)
    return loader(places, places.sin().sum(-1))


class Operator(LightningModule):
    """A Fourier neural operator, whose weights are complex numbers."""

    def __init__(self):
        from neuralop import H1Loss, LpLoss
        from neuralop.models import FNO

        super().__init__()
        self.model = FNO(n_modes=(4, 4), in_channels=1, out_channels=1, hidden_channels=8, n_layers=2)
        self.loss, self.other = LpLoss(d=2, p=2), H1Loss(d=2)

    def training_step(self, batch, batch_idx):
        found = self.model(batch[0])
        self.log("h1", self.other(found.detach(), batch[1]))
        return self.loss(found, batch[1])

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=5e-3)
        return [optimizer], [torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=30)]


def flows():
    fields = drawn(SAMPLES, 1, 8, 8)
    return loader(fields, fields.cumsum(-1))


class Tetris(LightningModule):
    """The tetris of e3nn: shapes of four blocks, told apart by a network that turns with them."""

    def __init__(self):
        from e3nn import o3
        from e3nn.nn import FullyConnectedNet

        super().__init__()
        self.edges, self.hidden = o3.Irreps.spherical_harmonics(2), o3.Irreps("8x0e + 4x1o + 2x2e")
        self.first = o3.FullyConnectedTensorProduct("1x0e", self.edges, self.hidden, shared_weights=False)
        self.radial = FullyConnectedNet([3, 16, self.first.weight_numel], torch.relu)
        self.second = o3.FullyConnectedTensorProduct(self.hidden, self.edges, "7x0e")

    def forward(self, places):
        from e3nn import o3
        from e3nn.math import soft_one_hot_linspace

        apart = places[:, :, None] - places[:, None]
        samples, far, _, _ = apart.shape
        found = o3.spherical_harmonics(self.edges, apart, normalize=True, normalization="component")
        lengths = soft_one_hot_linspace(apart.norm(dim=-1), 0.0, 3.0, 3, basis="smooth_finite", cutoff=True)
        values = self.first(torch.ones(samples, far, far, 1, device=places.device), found, self.radial(lengths)).mean(1)
        return self.second(values[:, None].expand(-1, far, -1, -1), found).mean((1, 2))

    def training_step(self, batch, batch_idx):
        return functional.cross_entropy(self(batch[0]), batch[1])

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=0.01)


def blocks():
    return loader(drawn(SAMPLES, 4, 3), torch.arange(SAMPLES) % 7)


class Flow(LightningModule):
    """An ordinary differential equation of torchdiffeq, whose gradient is solved backwards."""

    def __init__(self):
        super().__init__()
        self.right = Right()

    def training_step(self, batch, batch_idx):
        from torchdiffeq import odeint_adjoint

        times = torch.linspace(0.0, 1.0, 4, device=self.device)
        found = odeint_adjoint(self.right, batch[0], times, method="rk4")
        loss = (found[-1] - batch[1]).abs().mean()
        self.log("loss", loss)
        return loss

    def configure_optimizers(self):
        return torch.optim.RMSprop(self.parameters(), lr=1e-3)


class Right(nn.Module):
    """The right side of the equation."""

    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(2, 16), nn.Tanh(), nn.Linear(16, 2))

    def forward(self, time, values):
        return self.net(values**3)


def spirals():
    values = drawn(SAMPLES, 2)
    return loader(values, values.flip(-1))


class Codes(LightningModule):
    """An autoencoder through a codebook of vector-quantize-pytorch, an average over batches and ranks."""

    def __init__(self):
        from vector_quantize_pytorch import VectorQuantize

        super().__init__()
        self.encoder, self.decoder = nn.Conv2d(1, 8, 2, 2), nn.ConvTranspose2d(8, 1, 2, 2)
        several = int(os.environ.get("WORLD_SIZE", 1)) > 1  # Lightning joins the ranks only after this
        options = {"decay": 0.8, "commitment_weight": 0.25, "accept_image_fmap": True, "sync_codebook": several}
        self.quantize = VectorQuantize(8, codebook_size=16, **options)

    def training_step(self, batch, batch_idx):
        codes, places, commitment = self.quantize(self.encoder(batch[0]))
        self.log("active", float(places.unique().numel()))
        return functional.l1_loss(self.decoder(codes), batch[0]) + commitment.sum()

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=3e-3)


def images():
    return loader(drawn(SAMPLES, 1, 8, 8))
