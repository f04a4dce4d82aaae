"""Small modules and data that the tests of kit.train fit, here and in child processes."""

import os
from contextlib import ExitStack

import torch
from lightning.pytorch import Callback, LightningModule
from sketch_data import Sketches
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from kit.models import GPT, SketchModel, Tokens

SIDE = 16
_SKETCHES = {"sketched_columns": 1, "numbers": 3, "sketch_quality": 0.125}
_BUCKETS = 16


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(SIDE)
        self.body = nn.Sequential(nn.Linear(SIDE, 4 * SIDE), nn.GELU(), nn.Linear(4 * SIDE, SIDE))

    def forward(self, values):
        return values + self.body(self.norm(values))


class Net(LightningModule):
    """Never calls itself, has a loose parameter, and ties the weight of two layers."""

    def __init__(self, layers: int = 3):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(SIDE))
        self.first = nn.Linear(SIDE, SIDE)
        self.layers = nn.ModuleList(Layer() for _ in range(layers))
        self.last = nn.Linear(SIDE, SIDE)
        self.last.weight = self.first.weight

    def training_step(self, batch, batch_idx):
        values, target = batch
        values = self.first(values) * self.scale
        for layer in self.layers:
            values = layer(values)
        return functional.mse_loss(self.last(values), target)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.9)


class TiedNet(Net):
    """Ties a weight inside one block to a weight outside all blocks."""

    def __init__(self):
        super().__init__()
        self.last = nn.Linear(4 * SIDE, SIDE)
        self.first = nn.Linear(4 * SIDE, SIDE)
        self.first.weight = self.layers[1].body[2].weight
        self.last = nn.Linear(SIDE, SIDE)

    def training_step(self, batch, batch_idx):
        values, target = batch
        return super().training_step((values.repeat(1, 4), target), batch_idx)


class Manual(LightningModule):
    """Two nets, two optimizers, and the backward inside training_step."""

    def __init__(self):
        super().__init__()
        self.automatic_optimization = False
        self.one = nn.Sequential(Layer(), Layer(), nn.Linear(SIDE, SIDE))
        self.two = nn.Linear(SIDE, SIDE)

    def training_step(self, batch, batch_idx):
        values, target = batch
        for optimizer in self.optimizers():
            loss = functional.mse_loss(self.two(self.one(values)), target)
            optimizer.zero_grad()
            self.manual_backward(loss)
            optimizer.step()
        return loss

    def configure_optimizers(self):
        return [torch.optim.SGD(net.parameters(), lr=0.05) for net in (self.one, self.two)]


class ManualByMethod(Manual):
    """Calls a method of its own that is not `forward`; it says so."""

    fsdp_forward_methods = ("chain",)

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(SIDE))

    def chain(self, values):
        return self.two(self.one(values) * self.scale)

    def training_step(self, batch, batch_idx):
        values, target = batch
        optimizer = self.optimizers()
        loss = functional.mse_loss(self.chain(values), target)
        optimizer.zero_grad()
        self.manual_backward(loss)
        optimizer.step()
        return loss

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.05)


class ManualByForward(ManualByMethod):
    """Holds a loose parameter and calls itself."""

    fsdp_forward_methods = ()

    def forward(self, values):
        return super().chain(values)

    def chain(self, values):
        return self(values)


class Late(Net):
    """Makes a layer in configure_model and leaves the rest to the strategy, as Lightning's documentation has it too."""

    def configure_model(self):
        if len(self.layers) == 3:
            layer = Layer()
            for parameter in layer.parameters():
                nn.init.constant_(parameter, 0.1)
            self.layers.append(layer)


class Promising(Net):
    """Shards nothing, though it is about to."""

    def configure_model(self):
        fully_shard = None
        assert fully_shard is None


class SelfSharded(Net):
    """Shards itself, as Lightning's documentation has it."""

    def configure_model(self):
        from torch.distributed.fsdp import FSDPModule, fully_shard, register_fsdp_forward_method

        if not isinstance(self, FSDPModule):
            fully_shard(self, mesh=self.device_mesh["data_parallel"])
            register_fsdp_forward_method(self, "training_step")


class BatchNormLayer(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(SIDE, SIDE), nn.BatchNorm1d(SIDE), nn.ReLU())

    def forward(self, values):
        return self.body(values)


class BatchNormNet(Net):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(BatchNormLayer() for _ in range(3))


class SmallGPT(GPT):
    def __init__(self):
        super().__init__(vocabulary=32, width=16, heads=2, layers=2, context=8)


class SmallSketches(SketchModel):
    def __init__(self):
        super().__init__(**_SKETCHES, hidden_dim=16, num_layers=2)


class Wide(Net):
    """Two groups of different rates and decays, one scheduler a step, and a layer large enough for 8 bits."""

    def __init__(self):
        super().__init__()
        self.wide = nn.Sequential(nn.Linear(SIDE, 1024), nn.Linear(1024, SIDE))
        self.rates = []

    def training_step(self, batch, batch_idx):
        self.rates.append([group["lr"] for group in self.mine.param_groups])
        values, target = batch
        return super().training_step((self.wide(values), target), batch_idx)

    def configure_optimizers(self):
        wide = list(self.wide.parameters())
        rest = [p for name, p in self.named_parameters() if not name.startswith("wide.")]
        groups = [{"params": wide, "lr": 1e-3, "weight_decay": 0.5}, {"params": rest, "lr": 2e-3}]
        self.mine = torch.optim.Adam(groups, betas=(0.8, 0.9))
        schedule = torch.optim.lr_scheduler.StepLR(self.mine, step_size=1, gamma=0.5)
        return {"optimizer": self.mine, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


def state_bytes(optimizer):
    """Bytes that this rank holds of an optimizer's state, scalars left out."""
    from kit.memory.record.truth import storages_of

    return sum(size for size in storages_of(optimizer).values() if size > 4)


class WindowedGPT(GPT):
    def __init__(self):
        super().__init__(vocabulary=32, width=16, heads=2, layers=2, context=8, window=3)


class Losses(Callback):
    """Keeps the loss of every batch and the number of parameters this rank holds while it trains."""

    def __init__(self):
        self.values = []
        self.held = 0

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        loss = outputs["loss"] if isinstance(outputs, dict) else outputs
        self.values.append(float(loss))
        self.held = sum(getattr(p, "_local_tensor", p).numel() for p in pl_module.parameters())


class Save(Callback):
    """Saves at the end of the first epoch, as a checkpoint callback does."""

    def __init__(self, path):
        self.path = path

    def on_train_epoch_end(self, trainer, pl_module):
        if trainer.current_epoch == 0:
            trainer.save_checkpoint(self.path)


class Collectives(Callback):
    """Counts the reductions of gradients in the third step, by the name of the collective."""

    def __init__(self):
        self.counts = {}
        self._seen = ExitStack()

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        if batch_idx == 2:
            self._profile = self._seen.enter_context(torch.profiler.profile())

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        if batch_idx == 2:
            self._seen.close()
            for event in self._profile.events():
                if event.name.startswith("gloo:"):
                    self.counts[event.name] = self.counts.get(event.name, 0) + 1


def regression(batch_size: int, samples: int = 64) -> DataLoader:
    """(batch, feature) inputs and targets, always in the same order."""
    generator = torch.Generator().manual_seed(0)
    values = torch.randn(samples, SIDE, generator=generator)
    return _loader(TensorDataset(values, values.roll(1, dims=1) ** 2), batch_size)


def fields(batch_size: int, samples: int = 32) -> DataLoader:
    """Patches of a pattern that moves east, every element valid."""
    generator = torch.Generator().manual_seed(0)
    now = torch.randn(samples, 2, 1, 6, 10, generator=generator)
    values = torch.cat([now, now.roll(1, dims=-1)], dim=2)
    return _loader(
        [{"values": value, "valid": torch.ones(value.shape, dtype=torch.bool)} for value in values], batch_size
    )


def coasts(batch_size: int) -> DataLoader:
    """The same, of which the first rank of two sees a tenth and the second nearly all."""
    samples = fields(batch_size).dataset
    generator = torch.Generator().manual_seed(1)
    for place, sample in enumerate(samples):
        share = 0.9 if place % 2 else 0.1
        sample["valid"] = torch.rand(sample["valid"].shape, generator=generator) < share
    return _loader(samples, batch_size)


def entities(batch_size: int) -> DataLoader:
    """Entities, of which the first rank of two has few later events and the second nearly all."""
    data = Sketches(**_SKETCHES, batch_size=1, entities=64).dataset
    generator, samples = torch.Generator().manual_seed(1), [data[place] for place in range(64)]
    for place, sample in enumerate(samples):
        known = torch.rand(sample["target"].shape[0] // _BUCKETS, generator=generator) < (0.9 if place % 2 else 0.1)
        sample["target"] = sample["target"] * known.repeat_interleave(_BUCKETS)
    return _loader(samples, batch_size)


def tokens(batch_size: int) -> DataLoader:
    """Sequences of random tokens, always in the same order."""
    return _loader(Tokens(vocabulary=32, context=8, sequences=64).dataset, batch_size)


def _loader(dataset, batch_size: int) -> DataLoader:
    """A slice of every global batch for this rank, unshuffled (Lightning's own sampler would shuffle)."""
    replicas, rank = int(os.environ.get("WORLD_SIZE", 1)), int(os.environ.get("RANK", 0))
    sampler = DistributedSampler(dataset, num_replicas=replicas, rank=rank, shuffle=False)
    return DataLoader(dataset, batch_size=batch_size, sampler=sampler)


def plain(batch_size: int) -> DataLoader:
    """A loader that knows nothing of ranks."""
    return DataLoader(regression(batch_size).dataset, batch_size=batch_size)


class Series(LightningModule):
    """An LSTM that keeps the contract of sequence chunks; whole sequences go the same way."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(Layer() for _ in range(2))
        self.memory = nn.LSTM(SIDE, SIDE, batch_first=True)
        self.head = nn.Linear(SIDE, SIDE)

    def chunk_step(self, chunk, state):
        values, target = chunk
        for block in self.blocks:
            values = block(values)
        values, state = self.memory(values, state)
        return functional.mse_loss(self.head(values), target), state

    def training_step(self, batch, batch_idx):
        return self.chunk_step(batch, None)[0]

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.9)


def series(batch_size: int, positions: int = 40) -> DataLoader:
    """(batch, position, feature) inputs and the same, one position later."""
    generator = torch.Generator().manual_seed(0)
    values = torch.randn(32, positions + 1, SIDE, generator=generator)
    return _loader(TensorDataset(values[:, :-1], values[:, 1:]), batch_size)
