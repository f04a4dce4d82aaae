"""A module and data that train as people do: validation, metrics, a schedule over the whole training, an experiment."""

import torch
from lightning.pytorch import Callback, LightningDataModule

from kit.testing import TinyData, TinyModule


class Logging(TinyModule):
    """Logs by step and by epoch, with a schedule of the whole training."""

    def __init__(self, learning_rate=0.01):
        super().__init__(learning_rate=learning_rate)

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        self.log("train_loss", loss, on_step=True, on_epoch=True)
        return loss

    def validation_step(self, batch, batch_idx):
        x, y = batch
        self.log("val_loss", torch.nn.functional.mse_loss(self.layer(x), y), sync_dist=True)

    def configure_optimizers(self):
        optimizer = super().configure_optimizers()
        steps = self.trainer.estimated_stepping_batches
        rates = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=int(steps))
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": rates, "interval": "step"}}


class Staged(Logging):
    """Tests and predicts."""

    def test_step(self, batch, batch_idx):
        self.validation_step(batch, batch_idx)
        self.log("test_loss", torch.nn.functional.mse_loss(self.layer(batch[0]), batch[1]), sync_dist=True)

    def predict_step(self, batch, batch_idx):
        print(f"predicted {tuple(self.layer(batch[0]).shape)} of batch {batch_idx}", flush=True)


class Direct(Logging):
    """Uses the experiment as TensorBoard's."""

    def on_train_batch_end(self, outputs, batch, batch_idx):
        self.logger.experiment.add_scalar("direct", float(batch_idx), self.global_step)
        self.logger.experiment.add_histogram("weights", self.layer.weight, self.global_step)


class Validated(LightningDataModule):
    """TinyData with samples to validate on."""

    def __init__(self, samples=64):
        super().__init__()
        self.parts = TinyData(samples), TinyData(16)

    def train_dataloader(self):
        return self.parts[0].train_dataloader()

    def val_dataloader(self):
        return self.parts[1].train_dataloader()


class Parted(Validated):
    """Samples for each stage."""

    def test_dataloader(self):
        return self.parts[1].train_dataloader()

    predict_dataloader = test_dataloader


class Seen(Callback):
    """Writes what a hook sees of the training to stdout."""

    def on_train_end(self, trainer, pl_module):
        print(f"seen: {trainer.max_epochs} epochs, {trainer.estimated_stepping_batches} steps", flush=True)
