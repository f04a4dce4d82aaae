"""Data as people have it: a pair of loaders, a module that makes its own, and what is of pytorch_lightning."""

import re
import sys
from importlib.metadata import version

import pytest
import torch
from own_training import Logging, Seen
from torch.utils.data import DataLoader, IterableDataset, TensorDataset
from waiting import PATIENCE_SECONDS

from kit.config import Config
from kit.errors import ConfigError, TrialError
from kit.memory.alongside import fit
from kit.memory.prediction import predict_memory
from kit.testing import TinyData, TinyModule
from kit.train.made import loader_of
from kit.train.one_lightning import real_name
from kit.trial.payload import Part, brings_loaders
from kit.trial.settings_used import settings_used


def pairs(count):
    values = torch.randn(count, 8, generator=torch.Generator().manual_seed(0))
    return TensorDataset(values, values.sum(1, keepdim=True))


def logged(trial, name):
    return [event for event in trial.events if event["kind"] == "logged" and name in event["metrics"]]


@pytest.mark.parametrize(("ranks", "strategy"), [(1, "none"), (2, "fsdp")])
def test_a_pair_is_trained_and_validated_on(config, ranks, strategy):
    asked = config(ranks, strategy, validate_every_steps=4).replace({"loader.batch_size": 4})
    trial = fit(asked, Logging, (DataLoader(pairs(64), batch_size=4), pairs(16))).wait(PATIENCE_SECONDS)
    assert trial.state == "COMPLETE"
    assert len(logged(trial, "val_loss")) == 2
    assert {event["samples"] for event in trial.steps} == {4}


def test_a_pair_whose_loader_kit_makes_has_the_batch_size_of_the_config(config):
    asked = config().replace({"loader.batch_size": 2})
    trial = fit(asked, TinyModule, (pairs(64), pairs(16))).wait(PATIENCE_SECONDS)
    assert {event["samples"] for event in trial.steps} == {2}
    assert not [event for event in trial.events if event["kind"] == "warned"]


@pytest.mark.parametrize(("data", "word"), [((pairs(4),) * 3, "3 values"), ((pairs(4), 7), "int")])
def test_what_is_no_pair_is_refused_with_what_would_be(config, data, word):
    with pytest.raises(ConfigError, match=rf"data: .*{word}.*\(training, validation\)"):
        fit(config(), TinyModule, data)


def test_an_iterable_data_set_keeps_its_own_order(config):
    asked = config(max_steps=4).replace({"loader.batch_size": 4})
    trial = fit(asked, TinyModule, Unshared()).wait(PATIENCE_SECONDS)
    assert {event["samples"] for event in trial.steps} == {4}
    assert predict_memory(asked, TinyModule, Unshared()).complete


class Unshared(IterableDataset):
    """Gives every rank the same samples."""

    def __iter__(self):
        yield from pairs(64)


def test_ranks_that_train_on_the_same_samples_are_told(config):
    asked = config(2, "ddp")
    told = "all 2 ranks had the same losses in 8 batches.*share its samples out by rank"
    trial = fit(asked, TinyModule, lambda: DataLoader(Unshared(), batch_size=4)).wait(PATIENCE_SECONDS)
    assert re.search(told, " ".join(settings_used(trial)))
    trial = fit(asked, TinyModule, pairs(64)).wait(PATIENCE_SECONDS)
    assert not re.search("same losses", " ".join(settings_used(trial)))


class Whole(Logging):
    """Makes its loaders from what its setup has made."""

    def setup(self, stage):
        self.data = pairs(64)

    def train_dataloader(self):
        return DataLoader(self.data, batch_size=4)

    def val_dataloader(self):
        return DataLoader(self.data, batch_size=8)


@pytest.mark.parametrize("module", [Whole, Whole(), "test_given_data:Whole"], ids=["class", "instance", "path"])
def test_a_module_that_makes_its_loaders_needs_no_data(config, module):
    asked = config(validate_every_steps=4)
    trial = fit(asked, module, callbacks=[Seen()]).wait(PATIENCE_SECONDS)
    assert trial.state == "COMPLETE"
    assert trial.environment["given"]["data"] == "module"
    assert len(logged(trial, "val_loss")) == 2
    assert "seen: 1 epochs, 16 steps" in trial.paths.log(0).read_text()  # of its own 64 samples


def test_the_memory_of_a_module_that_makes_its_loaders_is_predicted(config):
    estimate = predict_memory(config(), Whole)
    given = predict_memory(config(), Whole, DataLoader(pairs(64), batch_size=4))
    assert estimate.device_allocated_bytes == given.device_allocated_bytes > 0


def test_a_module_without_loaders_has_the_data_of_the_config(config):
    assert not brings_loaders(Part.of(TinyModule), config())
    assert not brings_loaders(Part.of(None), config())
    assert brings_loaders(Part.of("test_given_data:Whole"), config())


OF_THE_OTHER_NAME = """
import pytorch_lightning as pl
import torch
from pytorch_lightning.callbacks import Callback
from pytorch_lightning.utilities import rank_zero_only

from kit.testing import TinyData


class Net(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(8, 1)

    def training_step(self, batch, batch_idx):
        x, y = batch
        loss = torch.nn.functional.mse_loss(self.layer(x), y)
        self.log("loss", loss)
        return loss

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.01)


class Data(pl.LightningDataModule):
    def train_dataloader(self):
        return TinyData().train_dataloader()


class Told(Callback):
    def on_train_end(self, trainer, pl_module):
        print(f"told: {type(pl_module).__mro__[1].__module__}, {pl.__name__}", flush=True)
"""


@pytest.mark.skipif(version("pytorch-lightning") != version("lightning"), reason="of another release")
def test_what_was_written_for_pytorch_lightning_trains_as_it_is(config, tmp_path, monkeypatch):
    (tmp_path / "other_name.py").write_text(OF_THE_OTHER_NAME)
    monkeypatch.syspath_prepend(tmp_path)
    callbacks = [{"class_path": "other_name.Told"}]
    trial = fit(config(), "other_name:Net", "other_name:Data", callbacks=callbacks).wait(PATIENCE_SECONDS)
    assert trial.state == "COMPLETE"
    assert "told: lightning.pytorch.core.module, lightning.pytorch" in trial.paths.log(0).read_text()
    assert "other_name" not in sys.modules


def test_a_name_of_pytorch_lightning_is_that_of_lightning():
    assert real_name("pytorch_lightning.callbacks.EarlyStopping") == "lightning.pytorch.callbacks.EarlyStopping"
    assert real_name("pytorch_lightning_bolts.x") == "pytorch_lightning_bolts.x"
    assert TinyData.__module__ == real_name(TinyData.__module__)


@pytest.mark.parametrize(
    ("loader", "reason"),
    [
        (DataLoader(pairs(0), batch_size=4), "empty"),
        (DataLoader(pairs(8), batch_size=9, drop_last=True), "8 samples .* batch of 9"),
    ],
)
def test_a_loader_without_a_batch_trains_nothing_and_fails(config, loader, reason):
    with pytest.raises(TrialError, match=reason):
        fit(config(), TinyModule, loader).wait(PATIENCE_SECONDS)


def test_a_data_set_without_samples_is_named_before_its_loader_is_made():
    with pytest.raises(ConfigError, match="data: TensorDataset .*no samples"):
        loader_of(pairs(0), Config().loader)
