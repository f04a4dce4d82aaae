"""What torch and Lightning refuse on several ranks is said before any: sparse gradients, and batches of one's own."""

import pytest
import torch
from lightning.pytorch import LightningModule
from torch.utils.data import BatchSampler, DataLoader, RandomSampler, Sampler, SequentialSampler

import kit
from kit.errors import ConfigError
from kit.testing import TinyData, TinyModule

ON_TWO = {"hardware.devices": 2, "hardware.strategy": "ddp"}


class Table(LightningModule):
    def __init__(self, sparse=True):
        super().__init__()
        self.items = torch.nn.Embedding(1000, 8, sparse=sparse)

    def training_step(self, batch, batch_idx):
        return self.items(batch[:, 0].long()).sum()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Own(Sampler):
    """Batches of its own, and nothing else that Lightning asks for."""

    def __init__(self, data):
        self.data = data

    def __iter__(self):
        return iter([[0, 1], [2, 3]])

    def __len__(self):
        return 2


class Named(BatchSampler):
    """As torch's own."""


def numbers(sampler):
    data = torch.zeros(4, 8), torch.zeros(4, 1)
    return DataLoader(torch.utils.data.TensorDataset(*data), batch_sampler=sampler)


def numbers_of_rows():
    return DataLoader(torch.zeros(64, 1), batch_size=8)


@pytest.mark.parametrize(("strategy", "device"), [("ddp", "H100"), ("fsdp", "H100"), ("fsdp", "this machine")])
@pytest.mark.parametrize("ask", [kit.predict_memory, kit.predict_speed])
def test_sparse_gradients_that_nothing_adds_up_are_refused(config, ask, strategy, device):
    asked = config().replace({**ON_TWO, "hardware.strategy": strategy})
    with pytest.raises(ConfigError, match="items with sparse=False"):
        ask(asked, Table, numbers_of_rows(), device=device)
    assert ask(asked, lambda: Table(sparse=False), numbers_of_rows(), device="H100")


def test_sparse_gradients_are_no_traffic_and_said_where_one_device_is_asked_about(config):
    speed = kit.predict_speed(config(), Table, numbers_of_rows(), device="H100")
    dense = kit.predict_speed(config(), lambda: Table(sparse=False), numbers_of_rows(), device="H100")
    assert (speed.traffic.gradient_bytes, dense.traffic.gradient_bytes) == (0, 4 * 8 * 1000)
    assert "several devices cannot" in str(speed)
    assert "several devices cannot" not in str(dense)
    assert [row.devices for row in kit.studies.predict_run(speed, devices=[1, 8]).rows] == [1]
    with pytest.raises(ConfigError, match="sparse=False"):
        kit.studies.predict_run(speed, devices=8)
    assert kit.predict_memory(config().replace(ON_TWO), Table, numbers_of_rows()).fits, "gloo adds them up"


@pytest.mark.parametrize(
    ("make", "stops"),
    [
        (lambda: [[0, 1], [2, 3]], True),
        (lambda: Own([]), True),
        (lambda: Named(SequentialSampler(range(4)), 2, False), False),
        (lambda: BatchSampler(RandomSampler(range(4)), 2, True), False),
    ],
)
def test_batches_that_lightning_cannot_divide_are_said_on_several_ranks(config, make, stops):
    for answer in (
        kit.predict_memory(config().replace(ON_TWO), TinyModule, numbers(make()), device="H100"),
        kit.predict_speed(config().replace(ON_TWO), TinyModule, numbers(make()), device="H100"),
    ):
        assert ("use_distributed_sampler" in str(answer)) is stops
    assert "use_distributed_sampler" not in str(kit.predict_memory(config(), TinyModule, numbers(make())))


def test_lightning_stops_where_it_is_said_to_and_nowhere_in_the_callback_that_ends(config):
    trial = kit.fit(config(2), TinyModule, numbers(Own([])))
    with pytest.raises(kit.KitError, match="batch sampler") as error:
        trial.wait()
    assert "on_exception" not in str(error.value)
    assert kit.fit(config(2), TinyModule, TinyData).wait().state == "COMPLETE"
