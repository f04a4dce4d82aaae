"""Loggers that people have: those of Lightning for services, kept in files, and one written for Trackio."""

from __future__ import annotations

import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.loggers.logger import Logger, rank_zero_experiment
from lightning.pytorch.utilities import rank_zero_only
from setups import SAMPLES, drawn, loader
from torch import nn
from torch.nn import functional


class Line(LightningModule):
    """Logs its loss, keeps its hyperparameters, and asks the experiment of its logger by what that calls it."""

    def __init__(self, rate: float = 0.1):
        super().__init__()
        self.save_hyperparameters()
        self.layer = nn.Linear(4, 1)

    def training_step(self, batch, batch_idx):
        loss = functional.mse_loss(self.layer(batch[0]), batch[0].sum(-1, keepdim=True))
        self.log("loss", loss)
        if self.global_rank == 0:
            self.note(self.logger.experiment, float(batch_idx))
        return loss

    def note(self, experiment, value):
        if hasattr(experiment, "add_scalar"):
            experiment.add_scalar("direct", value, self.global_step)
        elif hasattr(experiment, "log_metric"):
            experiment.log_metric(self.logger.run_id, "direct", value, step=self.global_step)
        elif hasattr(experiment, "log"):
            experiment.log({"direct": value})
        else:
            experiment.log_metrics({"direct": value}, self.global_step)  # of CSVLogger

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=self.hparams.rate)


def rows():
    return loader(drawn(SAMPLES, 4))


class Trackio(Logger):
    """Trackio has no logger for Lightning; this is how one is written."""

    def __init__(self, project: str):
        super().__init__()
        self.project, self._run = project, None

    @property
    @rank_zero_experiment
    def experiment(self):
        import trackio

        if self._run is None:
            self._run = trackio.init(project=self.project, name="trial", embed=False, auto_log_gpu=False)
        return self._run

    @property
    def name(self):
        return self.project

    @property
    def version(self):
        return "trial"

    @rank_zero_only
    def log_hyperparams(self, params):
        self.experiment.config.update(dict(params))

    @rank_zero_only
    def log_metrics(self, metrics, step=None):
        self.experiment.log(dict(metrics), step=step)

    @rank_zero_only
    def finalize(self, status):
        if self._run is not None:
            self._run.finish()
