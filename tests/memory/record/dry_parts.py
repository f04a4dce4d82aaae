"""Modules to run dry and for real, and the truth about the real run: what the CPU's allocator did."""

import contextlib
import copy
import warnings

import torch
from lightning.pytorch import Callback, LightningModule
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, Dataset

from kit.memory.record.dry_run import DryRun, record
from kit.memory.record.truth import AllocatorTrace
from kit.memory.replay.replay import CATEGORIES
from kit.train.trainer import make_trainer


class Samples(Dataset):
    """Samples made when asked for; nothing is kept."""

    def __init__(self, make, count=1024):
        self.make, self.count = make, count

    def __len__(self):
        return self.count

    def __getitem__(self, index):
        if index >= self.count:
            raise IndexError(index)
        return self.make()


def loader(make, batch_size=8, **options):
    return {"train_dataloaders": DataLoader(Samples(make), batch_size=batch_size, **options)}


def vectors():
    return torch.randn(256), torch.randn(8)


def images():
    return torch.randn(3, 64, 64), torch.randint(10, ())


def tokens():
    return torch.randint(512, (65,))


class Perceptron(LightningModule):
    """The base of the variants below: three layers and a loss."""

    width = 256

    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(256, self.width),
            nn.GELU(),
            nn.Linear(self.width, self.width),
            nn.ReLU(),
            nn.Linear(self.width, 8),
        )

    def loss(self, batch):
        x, y = batch
        return functional.mse_loss(self.layers(x), y)

    def training_step(self, batch, batch_idx):
        loss = self.loss(batch)
        self.log("loss", loss, prog_bar=True)
        return loss

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


class Scheduled(Perceptron):
    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)
        return {"optimizer": optimizer, "lr_scheduler": torch.optim.lr_scheduler.LambdaLR(optimizer, lambda epoch: 1.0)}


class Averaged(Perceptron):
    """Keeps an average of its weights, as a copy of its layers."""

    def __init__(self):
        super().__init__()
        self.average = copy.deepcopy(self.layers).requires_grad_(False)

    def on_train_batch_end(self, *_):
        with torch.no_grad():
            for kept, now in zip(self.average.parameters(), self.layers.parameters(), strict=True):
                kept.lerp_(now, 0.1)

    def configure_optimizers(self):
        return torch.optim.AdamW(self.layers.parameters())


class Frozen(Perceptron):
    def __init__(self):
        super().__init__()
        self.layers[0].requires_grad_(False)


class Tied(Perceptron):
    def __init__(self):
        super().__init__()
        self.layers[2].weight = self.layers[0].weight


class Manual(Perceptron):
    """Two optimizers, stepped by hand, as a generator and its critic."""

    def __init__(self):
        super().__init__()
        self.automatic_optimization = False
        self.critic = nn.Sequential(nn.Linear(8, 512), nn.ReLU(), nn.Linear(512, 1))

    def training_step(self, batch, batch_idx):
        x, y = batch
        first, second = self.optimizers()
        loss = -self.critic(self.layers(x)).mean()
        first.zero_grad()
        self.manual_backward(loss)
        first.step()
        made = self.layers(x).detach()
        loss = functional.relu(1 - self.critic(y)).mean() + functional.relu(1 + self.critic(made)).mean()
        second.zero_grad()
        self.manual_backward(loss)
        second.step()

    def configure_optimizers(self):
        return torch.optim.Adam(self.layers.parameters()), torch.optim.Adam(self.critic.parameters())


class Convolutional(LightningModule):
    def __init__(self):
        super().__init__()
        self.blocks = nn.Sequential(
            *(
                nn.Sequential(
                    nn.Conv2d(3 if i == 0 else 32, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU(inplace=True)
                )
                for i in range(4)
            )
        )
        self.head = nn.Linear(32, 10)

    def training_step(self, batch, batch_idx):
        x, y = batch
        return functional.cross_entropy(self.head(self.blocks(x).mean((2, 3))), y)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)


class Recurrent(LightningModule):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(512, 64)
        self.layers = nn.LSTM(64, 128, num_layers=2, batch_first=True)
        self.head = nn.Linear(128, 512)

    def training_step(self, batch, batch_idx):
        values, _ = self.layers(self.embedding(batch[:, :-1]))
        return functional.cross_entropy(self.head(values).flatten(0, 1), batch[:, 1:].flatten())

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters())


@contextlib.contextmanager
def one_thread():
    """oneDNN's matrix products in bfloat16 take up to 100 KiB for each thread, whatever the model."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


class _Watch(Callback):
    def __init__(self):
        self.trace, self.measured = AllocatorTrace(), None

    def on_sanity_check_start(self, trainer, pl_module):
        self.trace.start(pl_module)

    def on_train_start(self, trainer, pl_module):
        if not self.trace.running:
            self.trace.start(pl_module)

    def on_validation_batch_start(self, trainer, pl_module, batch, batch_idx, dataloader_idx=0):
        self.trace.note(batch)

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        self.trace.note(batch)

    def on_train_epoch_end(self, trainer, pl_module):
        self.measured = self.trace.stop()


def measure(make_module, make_data, config, precision="32-true", batches=2):
    """Peak bytes of a real fit on the CPU, from the allocator's own events."""
    torch.manual_seed(0)
    module, watch = make_module(), _Watch()
    with warnings.catch_warnings(), one_thread():
        warnings.simplefilter("ignore")
        trainer = make_trainer(
            config, accelerator="cpu", world_size=1, precision=precision, module=module, callbacks=[watch], max_steps=2
        )
        if not module.automatic_optimization:
            trainer.fit_loop.epoch_loop.max_steps = -1
            trainer.limit_train_batches = batches
            trainer.fit_loop.max_epochs = 1
        trainer.fit(module, **make_data())
    return watch.measured.peak_bytes


def predict(make_module, make_data, config, precision="32-true", **options):
    batch_size, otherwise = options.pop("batch_size", None), options.pop("otherwise", "")
    return record(make_module, make_data, DryRun(config, precision, **options), batch_size, otherwise)


def series(recording):
    """Bytes alive after each event."""
    signs = [1 if allocates else -1 for allocates in recording.event_allocates]
    return (recording.rounded_bytes[recording.event_block] * signs).cumsum()


def peak(recording):
    return int(series(recording).max())


def at_peak(recording):
    """Bytes by category at the peak."""
    alive = set()
    last = int(series(recording).argmax())
    for block, allocates in zip(recording.event_block[: last + 1], recording.event_allocates[: last + 1], strict=True):
        (alive.add if allocates else alive.remove)(int(block))
    found = dict.fromkeys(CATEGORIES, 0)
    for block in alive:
        found[CATEGORIES[recording.block_category[block]]] += int(recording.rounded_bytes[block])
    return {name: size for name, size in found.items() if size}


def asserted(x):
    """A guard of Python's own kind; in a file of tests pytest would write it anew."""
    assert (x > 0).all(), "positive"
