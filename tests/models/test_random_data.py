import pytest
import torch

from kit.models import Field, RandomData
from kit.models.zoo import RandomSamples


def test_samples_have_the_form_their_fields_are_given_in():
    one, other = Field(shape=(2, 3)), Field(shape=(4,), below=7)
    assert RandomSamples(one, 1, 0)[0].shape == (2, 3)
    first, second = RandomSamples((one, other), 1, 0)[0]
    assert (first.dtype, second.dtype) == (torch.float32, torch.int64)
    named = RandomSamples({"values": one, "valid": Field(shape=(2, 3), below=2, dtype=torch.bool)}, 1, 0)[0]
    assert named["values"].shape == named["valid"].shape
    assert named["valid"].dtype is torch.bool


def test_whole_numbers_stay_below_their_bound_and_reach_all_the_others():
    drawn = torch.stack([RandomSamples(Field(below=5), 200, 0)[index] for index in range(200)])
    assert set(drawn.tolist()) == set(range(5))


def test_the_same_seed_gives_the_same_batches_every_epoch_and_another_seed_others():
    batches = [next(iter(RandomData(Field(shape=(8,)), seed=seed).train_dataloader())) for seed in (1, 1, 2)]
    assert torch.equal(batches[0], batches[1])
    assert not torch.equal(batches[0], batches[2])


def test_no_two_samples_are_alike():
    samples = RandomSamples(Field(shape=(4,)), 50, 3)
    assert len({tuple(samples[index].tolist()) for index in range(50)}) == 50


def test_an_epoch_has_as_many_samples_as_were_asked_for():
    sizes = [len(batch) for batch in RandomData(Field(), batch_size=4, samples=10).train_dataloader()]
    assert sizes == [4, 4, 2]


@pytest.mark.parametrize("index", [-1, 3])
def test_a_sample_that_is_not_there_is_refused(index):
    with pytest.raises(IndexError, match="there are 3"):
        RandomSamples(Field(), 3, 0)[index]
