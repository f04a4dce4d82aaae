"""What is no class of Lightning's (a function, a data set, a pair) is committed, and runs as in its trial."""

import ipaddress
import shlex
import shutil
import sys
from functools import partial
from pathlib import Path

import committed_parts as parts
import psutil
import pytest
import yaml
from lightning.pytorch.callbacks import EarlyStopping
from properties import at_night
from waiting import wait_until

import kit
from kit.charts.trial import loss_info
from kit.committed.job import data_entry, module_entry
from kit.config import Config
from kit.errors import ConfigError
from kit.targets import load_target

pytestmark = [pytest.mark.timeout(400), pytest.mark.usefixtures("warm_runs")]
SECONDS = 300
SETUPS = Path(__file__).parents[1] / "projects" / "setups.py"

MADE = '''
import time
from pathlib import Path

import torch
from lightning.pytorch import Callback, LightningDataModule, LightningModule
from torch.utils.data import DataLoader, Dataset


class Line(LightningModule):
    def __init__(self, rate: float = 0.01) -> None:
        super().__init__()
        self.layer, self.rate = torch.nn.Linear(4, 1), rate

    def training_step(self, batch, batch_idx):
        return self.layer(batch).square().mean()

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", self.layer(batch).square().mean(), sync_dist=True)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=self.rate)


def line(rate=0.02):
    return Line(rate)


def numbers(count=32):
    return torch.randn(count, 4, generator=torch.Generator().manual_seed(0))


class Numbers(Dataset):
    def __init__(self, count=32):
        self.values = numbers(count)

    def __len__(self):
        return len(self.values)

    def __getitem__(self, index):
        return self.values[index]


class Samples(LightningDataModule):
    def __init__(self, count=32):
        super().__init__()
        self.count = count

    def train_dataloader(self):
        return DataLoader(numbers(self.count), batch_size=4)


def told(count=32) -> LightningDataModule:
    return Samples(count)


def untold(count=32):
    return Samples(count)


def loader(count=32) -> DataLoader:
    return DataLoader(numbers(count), batch_size=4)


def pair(count=32):
    return DataLoader(numbers(count), batch_size=4), Numbers(8)


anonymous = lambda: Samples()  # noqa: E731


class Gate(Callback):
    """Waits after the first step until a file is there."""

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        Path(f"reached.{trainer.global_rank}").touch()
        while not Path("open").exists():
            time.sleep(0.01)
'''


@pytest.fixture
def small(tmp_path, monkeypatch):
    """The config of one rank that fits a line on 8 batches, in a project folder with a module of its own."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "pyproject.toml").touch()
    (tmp_path / "made.py").write_text(MADE)
    shutil.copy(SETUPS, tmp_path / "setups.py")
    monkeypatch.syspath_prepend(tmp_path)
    config = Config().replace({
        "name": "line", "hardware.accelerator": "cpu", "hardware.devices": 1, "model.target": "made:Line",
        "loader.batch_size": 4, "trial.max_steps": 8, "trial.warmup_steps": 1, "trial.predict_memory": False,
        "trial.measure_memory": False, "hardware.threads_per_rank": 1, "trial.count_work": False,
    })  # fmt: skip
    yield config
    for name in ("made", "setups"):
        sys.modules.pop(name, None)


ACCUMULATED = {"levers.accumulate_grad_batches": 2}
DATA = {
    "a function that says what it gives": "told",
    "a function that gives a data module": "untold",
    "a function that gives a loader": "loader",
    "loader and data set": "pair",
    "a data set": "Numbers",
}


@pytest.mark.slow
@pytest.mark.parametrize("kind", at_night(DATA, ["loader and data set", "a data set"]))
def test_it_trains_on_the_same_batches_as_its_trial(small, kind):
    config = small.replace({"data.arguments": {"count": 32}, "training.monitor": "val_loss" if "pair" in kind else ""})
    data = f"made:{DATA[kind]}"
    trial = kit.fit(config.replace({"training.monitor": ""}), None, data).wait()
    run = kit.commit(config, data=data).run().wait(SECONDS)
    parts.assert_exact(loss_info(trial, run), 8)
    saved = [file.name for file in Path("output").rglob("*.ckpt")]
    assert ("best.ckpt" in saved) is ("pair" in kind)  # it has validated


@pytest.mark.slow
def test_a_run_of_steps_validates_as_its_trial_did(small):
    """It ends within an epoch, before whose end Lightning validates nothing by itself."""
    config = small.replace(
        {"data.arguments": {"count": 64}, "training.max_steps": 6, "trial.validate_every_steps": 2, **ACCUMULATED}
    )
    committed = kit.commit(config, data="made:pair", callbacks=[EarlyStopping("val_loss")])
    assert yaml.safe_load(committed.text)["trainer"]["val_check_interval"] == 4
    assert committed.run().wait(SECONDS).state == "COMPLETE"
    of_epochs = kit.commit(config.replace({"training.max_steps": 0}), data="made:pair")
    assert "val_check_interval" not in of_epochs.text


@pytest.mark.parametrize("kind", DATA)
def test_an_object_and_its_path_are_written_alike(small, kind):
    config = small.replace({"data.arguments": {"count": 8}})
    name = DATA[kind]
    by_path, value = data_entry(f"made:{name}", config), load_target(f"made:{name}")
    called = {"class_path": "kit.train.made.made_data", "init_args": {"function": f"made:{name}"}}
    called["init_args"]["arguments"] = {"count": 8}
    assert by_path == ({"class_path": "made.told", "init_args": {"count": 8}} if name == "told" else called)
    own = load_target("made:told") if name == "told" else value
    if isinstance(own, type):
        assert data_entry(own, config) == called
    else:
        assert data_entry(partial(own, count=8), config) == called


def test_a_function_that_makes_the_module_is_called_by_the_file(small):
    wanted = {"class_path": "kit.train.made.made_module", "init_args": {"function": "made:line"}}
    assert module_entry("made:line", small) == ("made:line", wanted)
    assert module_entry(load_target("made:line"), small)[1] == wanted
    given = {**wanted["init_args"], "arguments": {"rate": 0.5}}
    assert module_entry(partial(load_target("made:line"), rate=0.5), small)[1]["init_args"] == given


def test_a_model_by_name_is_its_class_with_the_name(small):
    pytest.importorskip("transformers")
    config = small.replace({"model.target": "hf:gpt2", "model.arguments": {"settings": {"n_layer": 1}}})
    path, made = module_entry(None, config)
    assert path == "kit.models.named:Transformer"
    assert made["init_args"] == {"name": "gpt2", "settings": {"n_layer": 1}}


def test_what_a_file_cannot_call_is_refused_with_the_way(small, tmp_path):
    rows = load_target("made:loader")()
    for data in (lambda: rows, load_target("made:anonymous"), partial(load_target("made:loader"), rows), rows):
        with pytest.raises(ConfigError, match=r"data: .*(a function with a name|numbers and text)"):
            kit.commit(small, data=data)

    def only_here():
        return rows

    with pytest.raises(ConfigError, match=r"function only_here .*commit\(config, data="):
        kit.commit(small, data=only_here)


def listening(process):
    """The addresses on which a process and those it started take connections."""
    found = [one for each in (process, *process.children(recursive=True)) for one in each.net_connections("tcp")]
    return [ipaddress.ip_address(one.laddr.ip) for one in found if one.status == psutil.CONN_LISTEN]


@pytest.mark.slow
@pytest.mark.parametrize("by", at_night(["python", "torchrun"], ["python"]))
def test_ranks_of_one_machine_listen_on_loopback_only(small, tmp_path, by):
    ddp = small.replace({"hardware.devices": 2, "hardware.strategy": "ddp"})
    committed = kit.commit(ddp, data="made:Samples", callbacks=[{"class_path": "made.Gate"}])
    line = shlex.split(getattr(committed.launch, by))
    # What a cluster's login shell says.
    process = parts.start(line, tmp_path, GLOO_SOCKET_IFNAME="eth0", **parts.fresh())
    reached = [tmp_path / f"reached.{rank}" for rank in range(2)]
    wait_until(lambda: process.poll() is not None or all(file.exists() for file in reached), SECONDS)
    found = [] if process.poll() is not None else listening(psutil.Process(process.pid))
    (tmp_path / "open").touch()
    parts.finish(process)
    ranks_only = found if by == "python" else [one for one in found if not one.is_unspecified]
    assert len(ranks_only) > 2  # the store, and each rank for the other
    assert all(address.is_loopback for address in ranks_only)
    assert by == "torchrun" or found == ranks_only  # torchrun's own store listens everywhere


@pytest.mark.slow
@pytest.mark.parametrize("strategy", at_night(["ddp", "fsdp"], ["fsdp"]))
def test_optimizers_that_take_turns_train_on_two_ranks_as_in_their_trial(small, strategy):
    asked = {"hardware.devices": 2, "hardware.strategy": strategy, "model.target": "setups:Adversaries"}
    config = small.replace({**asked, "hardware.ddp_find_unused_parameters": strategy == "ddp"})
    trial = kit.fit(config, None, "setups:reals", trainer={"log_every_n_steps": 1}).wait()
    committed = kit.commit(config, trial, data="setups:reals")
    committed.run().wait(SECONDS)
    (metrics,) = Path("output").rglob("metrics.csv")
    rows = [dict(zip(*pair, strict=True)) for pair in lines(metrics)]
    for name in ("generator_loss", "discriminator_loss"):
        seen = [event["metrics"][name] for event in trial.steps if event["rank"] == 0]
        assert len(seen) == 4  # Lightning counts the steps of both optimizers
        assert [float(row[name]) for row in rows][:4] == pytest.approx(seen, rel=1e-4)


def lines(file):
    head, *rest = (line.split(",") for line in file.read_text().splitlines())
    return [(head, row) for row in rest]
