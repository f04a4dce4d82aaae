import pytest
import torch
from lightning.pytorch import LightningDataModule
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, SequentialSampler, TensorDataset

from kit.errors import ConfigError
from kit.models import Tokens
from kit.trial.fit_job import resize


def numbers(count=10):
    return TensorDataset(torch.arange(count))


def test_a_loader_keeps_its_order_collation_and_end():
    collate = len
    loader = DataLoader(numbers(), batch_size=2, sampler=[3, 1, 2, 0, 4], drop_last=True, collate_fn=collate)
    resized = resize({"train_dataloaders": loader}, 3)["train_dataloaders"]
    assert list(resized.sampler) == [3, 1, 2, 0, 4]
    assert list(resized) == [3]
    assert resized.drop_last
    assert loader.batch_size == 2


def test_a_data_module_stays_itself_and_makes_other_batches():
    data = Tokens(vocabulary=8, context=4, batch_size=2, sequences=12)
    assert resize({"datamodule": data}, 6) == {"datamodule": data}
    assert [len(batch) for batch in data.train_dataloader()] == [6, 6]


class Endless(IterableDataset):
    def __iter__(self):
        return iter(range(7))


def test_a_data_set_that_only_iterates_can_be_batched_anew():
    resized = resize({"train_dataloaders": DataLoader(Endless(), batch_size=2)}, 4)["train_dataloaders"]
    assert [len(batch) for batch in resized] == [4, 3]


class OwnBatches(BatchSampler):
    pass


@pytest.mark.parametrize(
    "loader",
    [
        [torch.zeros(2)],
        DataLoader(numbers(), batch_size=None),
        DataLoader(numbers(), batch_sampler=OwnBatches(SequentialSampler(numbers()), 2, False)),
    ],
)
def test_what_makes_its_batches_itself_is_refused(loader):
    with pytest.raises(ConfigError, match="batch"):
        resize({"train_dataloaders": loader}, 4)


def test_a_data_module_that_makes_its_batches_itself_is_refused_when_asked():
    class Own(LightningDataModule):
        def train_dataloader(self):
            return [torch.zeros(2)]

    data = resize({"datamodule": Own()}, 4)["datamodule"]
    with pytest.raises(ConfigError, match="list"):
        data.train_dataloader()
