import pytest
import torch
import train_parts
from lightning.pytorch import LightningModule
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from kit.config import Config
from kit.errors import ConfigError
from kit.memory.replay.snapshot import read_snapshot
from kit.train import DeviceLimit, make_trainer
from kit.train.device_limit import LiveStorages

MIB = 1 << 20


@pytest.fixture(autouse=True)
def _one_thread():
    torch.set_num_threads(1)


class Wide(LightningModule):
    """8 MiB of activations for 128 samples, little else."""

    def __init__(self):
        super().__init__()
        self.one, self.two = nn.Linear(4, 16384), nn.Linear(16384, 1)

    def training_step(self, batch, batch_idx):
        return self.two(self.one(batch[0])).square().mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=1e-4)


def fit(limit_bytes, module=None, **options):
    limit = DeviceLimit(limit_bytes)
    trainer = make_trainer(
        Config(), accelerator="cpu", world_size=1, precision="32-true", callbacks=[limit], max_steps=3
    )
    trainer.fit(module or Wide(), DataLoader(TensorDataset(torch.zeros(256, 4)), batch_size=128, **options))
    return trainer, limit


def test_a_step_that_holds_more_fails_in_its_middle_as_on_a_gpu():
    with pytest.raises(torch.OutOfMemoryError, match=r"of the 8 MiB of hardware.device_memory_bytes"):
        fit(8 * MIB)


def test_a_step_that_holds_less_is_left_alone():
    trainer, _ = fit(32 * MIB)
    assert trainer.global_step == 3


def test_learning_is_the_same_under_a_limit():
    losses = []
    for callbacks in ([], [DeviceLimit(64 * MIB)]):
        torch.manual_seed(0)
        kept = train_parts.Losses()
        trainer = make_trainer(
            Config(), accelerator="cpu", world_size=1, precision="32-true", callbacks=[*callbacks, kept], max_steps=4
        )
        trainer.fit(train_parts.Net(), train_parts.regression(8))
        losses.append(kept.values)
    assert losses[0] == losses[1]


def test_after_a_failure_nothing_is_watched_any_more():
    with pytest.raises(torch.OutOfMemoryError):
        fit(8 * MIB)
    torch.zeros(16 * MIB).add(1)


def test_a_module_larger_than_the_device_fails_before_its_first_step():
    with pytest.raises(torch.OutOfMemoryError):
        fit(MIB // 4, Wide())


def test_samples_that_a_loader_process_makes_are_no_device_memory():
    trainer, _ = fit(32 * MIB, num_workers=1, multiprocessing_context="fork")
    assert trainer.global_step == 3


def test_what_is_held_counts_each_storage_once_and_forgets_what_is_gone():
    held = LiveStorages()
    whole = torch.zeros(1024)
    assert held.add([whole, {"view": whole[:8]}, (whole.reshape(32, 32),)]) == 4096
    other = torch.zeros(16)
    held.add([other])
    assert held.bytes == 4096 + 64
    del other
    assert held.bytes == 4096


def test_a_storage_that_was_emptied_in_place_is_asked_anew():
    held, tensor = LiveStorages(), torch.zeros(1024)
    held.add([tensor])
    tensor.untyped_storage().resize_(0)
    assert (held.bytes, held.recount()) == (4096, 0)


def test_a_device_without_memory_is_refused():
    with pytest.raises(ConfigError, match="0 bytes"):
        DeviceLimit(0)


def test_what_was_held_when_memory_ran_out_is_kept_with_the_line_that_asked():
    module, limit = Wide(), DeviceLimit(8 * MIB)
    trainer = make_trainer(
        Config(), accelerator="cpu", world_size=1, precision="32-true", callbacks=[limit], max_steps=3
    )
    with pytest.raises(torch.OutOfMemoryError):
        trainer.fit(module, DataLoader(TensorDataset(torch.zeros(256, 4)), batch_size=128))
    memory = read_snapshot(limit.snapshot)
    assert memory.allocated_bytes <= 8 * MIB < memory.allocated_bytes + memory.asked_bytes
    assert memory.asked_by.endswith(f"line {Wide.training_step.__code__.co_firstlineno + 1}, in training_step")
    held = {one.owner: one.bytes for one in memory.holdings}
    assert held == {"parameters": (5 * 16384 + 16385) * 4, "inputs": 128 * 4 * 4}
