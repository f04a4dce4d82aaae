from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from lightning.pytorch import LightningDataModule
from lightning.pytorch.utilities import CombinedLoader
from properties import examples
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import BatchSampler, DataLoader, Dataset, IterableDataset, SequentialSampler

import kit
from kit.config import Config
from kit.data.patches.module import PatchData
from kit.errors import ConfigError, StoreError
from kit.memory.record import batches
from kit.memory.record.batches import (
    FakeLoader,
    SizedFakeLoader,
    describe,
    fake_loaders,
    loaders_of,
    look_at,
    patch_batches,
)

RECIPE = Path(__file__).parents[3] / "datasets" / "ocean" / "recipe.yaml"


class Items(Dataset):
    """`items`, again and again; counts how often it was asked."""

    def __init__(self, items, count=100):
        self.items, self.count, self.asked = items, count, 0

    def __len__(self):
        return self.count

    def __getitem__(self, index):
        self.asked += 1
        return self.items[index % len(self.items)]


class Whole(IterableDataset):
    """Whole batches."""

    def __init__(self, *lengths):
        self.lengths = lengths

    def __iter__(self):
        return iter([{"x": torch.zeros(8, length), "scale": torch.zeros(3)} for length in self.lengths])


def shapes(found):
    return [item.shape for item in found.tensors]


def packed(samples):
    """Sequences one after the other, with their lengths."""
    return torch.cat(samples), torch.tensor([len(sample) for sample in samples])


def pairwise(samples):
    return torch.zeros(len(samples), len(samples))


def named(samples):
    return {"x": torch.stack(samples), "names": ["x"] * len(samples)}


def apart(samples):
    return list(samples)


@examples(60)
@given(
    lengths=st.lists(st.integers(1, 6), min_size=1, max_size=8),
    size=st.integers(1, 40),
    collate=st.sampled_from([lambda samples: pad_sequence(samples, batch_first=True), packed, pairwise, apart]),
)
def test_a_batch_of_any_size_is_the_batch_of_as_many_longest_samples(lengths, size, collate):
    samples = [torch.zeros(length) for length in lengths]
    found = look_at(DataLoader(Items(samples), batch_size=3, collate_fn=collate), size)
    longest = max(samples, key=len)
    truth = describe(collate([longest] * size), size)
    assert shapes(found) == shapes(truth)
    assert found.batch_size == size
    for item, other in zip(found.tensors, truth.tensors, strict=True):
        assert other.values is None or item.values is None or torch.equal(item.values, other.values)


def test_a_large_batch_is_foretold_from_a_few_samples():
    data = Items([(torch.zeros(3, 16, 16), 1)])  # 100 of them
    found = look_at(DataLoader(data, batch_size=4), 1 << 20)
    assert shapes(found) == [(1 << 20, 3, 16, 16), (1 << 20,)]
    assert found.length == 25
    assert data.asked <= 110


def test_a_batch_with_more_in_it_than_tensors_is_collated_whole():
    found = look_at(DataLoader(Items([torch.zeros(2)]), collate_fn=named), 10)
    assert len(found.make()[0]["names"]) == 10


def test_a_batch_too_large_to_collate_is_refused(monkeypatch):
    monkeypatch.setattr(batches, "_LARGEST_COLLATION_BYTES", 1000)
    with pytest.raises(ConfigError, match=r"batch of 500 .*smaller"):
        look_at(DataLoader(Items([torch.zeros(2)]), collate_fn=named), 500)


def test_each_part_of_a_batch_is_as_long_as_its_longest_sample():
    def pair(samples):
        return tuple(pad_sequence(side, batch_first=True) for side in zip(*samples, strict=True))

    data = Items([(torch.zeros(100), torch.zeros(1)), (torch.zeros(1), torch.zeros(90))])
    found = look_at(DataLoader(data, batch_size=16, collate_fn=pair))
    assert shapes(found) == [(16, 100), (16, 90)]
    assert "samples differ" in found.notes[0]


def test_a_stream_of_samples_is_collated():
    class Stream(IterableDataset):
        def __iter__(self):
            return iter([torch.zeros(5)] * 20)

    found = look_at(DataLoader(Stream(), batch_size=6))
    assert shapes(found) == [(6, 5)]
    assert found.length is None


def test_whole_batches_are_as_large_as_the_largest_looked_at():
    found = look_at(DataLoader(Whole(4, 9, 7), batch_size=None))
    assert shapes(found) == [(8, 9), (3,)]
    assert found.batch_size == 8
    (note,) = found.notes
    assert "batches differ" in note
    assert "largest of 3" in note


def test_whole_batches_are_rescaled_along_the_sizes_of_their_samples():
    found = look_at([*Whole(4)], 32)
    assert shapes(found) == [(32, 4), (3,)]
    assert "whole batches of 8" in found.notes[0]


def masked(*hidden):
    """Samples of equal length, of which one in ten may hide its end."""
    masks = torch.ones(100, 6, dtype=torch.int64)
    for index in hidden:
        masks[index, -2:] = 0
    return [{"ids": torch.zeros(6, dtype=torch.int64), "mask": mask} for mask in masks]


@pytest.mark.parametrize("size", [2, 16])
def test_a_mask_is_known_to_hide_nothing_where_no_sample_hides_anything(size):
    def ones(samples):
        return [item.is_ones for item in look_at(DataLoader(Items(samples), batch_size=size)).tensors]

    assert ones(masked()) == [False, True]
    assert ones(masked(*range(3, 100, 10))) == [False, False]
    longer = {"ids": torch.zeros(8, dtype=torch.int64), "mask": torch.ones(8, dtype=torch.int64)}
    loader = DataLoader(Items([longer, *masked()]), batch_size=size, collate_fn=padded)
    assert not any(item.is_ones for item in look_at(loader).tensors)


def padded(samples):
    return {name: pad_sequence([sample[name] for sample in samples], batch_first=True) for name in samples[0]}


def test_a_mask_of_whole_batches_hides_nothing_where_none_of_them_does():
    whole = DataLoader(masked(), batch_size=10)
    found = look_at([*whole])
    assert [item.is_ones for item in found.tensors] == [False, True]
    assert torch.equal(found.make()[0]["mask"], next(iter(whole))["mask"])
    assert not any(item.is_ones for item in look_at([*DataLoader(masked(15), batch_size=10)]).tensors)


def test_batches_chosen_by_a_sampler_of_their_own_are_looked_at_whole():
    class Buckets(BatchSampler):
        def __iter__(self):
            return iter([[0, 1, 2, 3], [4], [5, 6]])

        def __len__(self):
            return 3

    data = Items([torch.zeros(5)])
    loader = DataLoader(data, batch_sampler=Buckets(SequentialSampler(data), 1, False))
    assert shapes(look_at(loader)) == [(4, 5)]
    assert shapes(look_at(loader, 10)) == [(10, 5)]


@pytest.mark.parametrize("tokens", [64, 256])
def test_batches_of_fewer_samples_the_longer_they_are_are_as_large_as_one_that_there_is(tokens):
    lengths = [2 + (7 * place) % 31 for place in range(400)]
    data = Items([{"ids": torch.ones(length, dtype=torch.int64)} for length in lengths])
    order, batches = sorted(range(len(lengths)), key=lengths.__getitem__), [[]]
    for index in order:
        if (len(batches[-1]) + 1) * lengths[index] > tokens:
            batches.append([])
        batches[-1].append(index)
    loader = DataLoader(data, batch_sampler=batches, collate_fn=padded)
    found = look_at(loader)
    ((count, length),) = shapes(found)
    assert (count, length) in {(len(batch), max(lengths[index] for index in batch)) for batch in batches}
    assert 0.8 * tokens < count * length <= tokens
    assert length > 25, "nearly the longest"
    assert found.epoch_samples == 400
    assert found.mean_samples == pytest.approx(400 / len(batches))
    assert found.batch_size == count
    with pytest.raises(ConfigError, match="batch sampler"):
        look_at(loader, 4)


def test_a_last_batch_that_is_smaller_trades_nothing():
    loader = DataLoader(masked(), batch_sampler=[[*range(40)], [*range(40, 80)], [*range(80, 100)]])
    found = look_at(loader)
    assert found.batch_size == 40
    assert found.mean_samples is None
    assert shapes(look_at(loader, 4))[0] == (4, 6)


def test_a_loader_without_batches_is_refused():
    with pytest.raises(ConfigError, match="no batch"):
        look_at([])


# -- patches of a config


@pytest.fixture
def ocean(tmp_path):
    config = Config.load(RECIPE).replace({"data.url": str(tmp_path / "ocean.zarr")})
    return config.replace(
        {"data.arguments": {"time": 8, "lat": 45, "lon": 90}, "data.patch": {"time": 2, "lat": 16, "lon": 16}}
    )


def test_patches_are_known_before_the_store_is_built(ocean):
    found = patch_batches(ocean, 5)
    with pytest.raises(StoreError):
        kit.open_dataset(ocean)
    batch, _ = found.make()
    assert batch["values"].shape == batch["valid"].shape
    assert batch["values"].shape[0] == 5
    assert batch["valid"].dtype == torch.bool


def test_patches_are_as_the_loader_yields_them(ocean):
    kit.build(ocean)
    module = PatchData(ocean)
    module.setup()
    real = next(iter(module.train_dataloader()))
    module.teardown()
    for config in (ocean, ocean.replace({"data.source": None})):
        made, _ = patch_batches(config).make()
        assert {name: (part.shape, part.dtype) for name, part in made.items()} == {
            name: (part.shape, part.dtype) for name, part in real.items()
        }


def test_patches_that_do_not_fit_are_refused(ocean):
    with pytest.raises(ConfigError, match=r"^data\.patch: no dimension depth"):
        patch_batches(ocean.replace({"data.patch": {"depth": 2}}))
    with pytest.raises(ConfigError, match=r"^data\.variables: .*no rain"):
        patch_batches(ocean.replace({"data.variables": ["rain"]}))
    with pytest.raises(ConfigError, match=r"^data\.patch: larger .*lat 4500 > 45"):
        patch_batches(ocean.replace({"data.patch": {"lat": 4500}}))


# -- what Trainer.fit takes


def made(batches):
    return batches.make()[0]


def test_loaders_keep_their_order_names_and_mode():
    looked = []
    loaders = {"a": [*Whole(4)], "b": DataLoader(Items([torch.zeros(2)]), batch_size=3)}
    loaders = CombinedLoader({"a": DataLoader(Whole(4), batch_size=None), "b": loaders["b"]}, "min_size")
    fakes = fake_loaders(loaders, None, made, 16, looked)
    assert fakes._mode == "min_size"
    assert isinstance(fakes.iterables["a"], FakeLoader)
    assert next(iter(fakes.iterables["b"])).shape == (3, 2)
    assert [item.batch_size for item in looked] == [8, 3]
    listed = fake_loaders([DataLoader(Whole(4), batch_size=None)], 2, made, 16, [])
    assert next(iter(listed[0]))["x"].shape == (2, 4)


def test_an_epoch_is_long_enough_for_the_steps_to_come():
    fakes = fake_loaders(DataLoader(Items([torch.zeros(2)], count=4), batch_size=2), None, made, 16, [])
    assert isinstance(fakes, SizedFakeLoader)
    assert len(fakes) == 16


def test_a_data_module_is_set_up_once_and_patches_need_no_loader(ocean):
    class Data(LightningDataModule):
        def __init__(self):
            super().__init__()
            self.called = []

        def prepare_data(self):
            self.called.append("prepare_data")

        def setup(self, stage):
            self.called.append(stage)

        def train_dataloader(self):
            return [1]

    data = Data()
    assert loaders_of({"datamodule": data}, None) == [1]
    assert data.called == ["prepare_data", "fit"]
    assert loaders_of({"datamodule": PatchData(ocean)}, 3).batch_size == 3
    assert loaders_of({"train_dataloaders": [2]}, None) == [2]
