import pytest
import torch
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader, Dataset, IterableDataset

from kit.errors import ConfigError
from kit.memory.record import samples
from kit.memory.record.batches import look_at, look_for_real
from kit.memory.record.samples import FIRST_SAMPLES, largest_samples, within


class Lengths(Dataset):
    """A vector of `lengths[i]` numbers for each i; counts how often it was asked."""

    def __init__(self, lengths, make=torch.zeros):
        self.lengths, self.make, self.asked = lengths, make, 0

    def __len__(self):
        return len(self.lengths)

    def __getitem__(self, index):
        self.asked += 1
        return self.make(self.lengths[index])


class Stream(IterableDataset):
    def __iter__(self):
        return (torch.zeros(1 + index % 50) for index in range(1000))


def test_samples_of_one_size_that_come_slowly_are_looked_at_a_few_times(monkeypatch):
    monkeypatch.setattr(samples, "_QUICK_SECONDS", 0.0)
    data = Lengths([7] * 10_000)
    found = largest_samples(DataLoader(data))
    assert [len(sample) for sample in found.candidates] == [7]
    assert found.notes == ()
    assert data.asked == FIRST_SAMPLES + 1


@pytest.mark.parametrize("place", [0, 1, 998, 999])
def test_the_longest_sample_is_found_wherever_it_is(place):
    lengths = [10 + index % 5 for index in range(1000)]
    lengths[place] = 99
    data = Lengths(lengths)
    found = largest_samples(DataLoader(data))
    assert len(found.candidates[0]) == 99
    assert data.asked == 1000
    (note,) = found.notes
    assert note.startswith("samples differ")
    assert "1000 of 1000" in note


@pytest.mark.parametrize("make", [lambda n: "x" * n, lambda n: [1] * n, lambda n: {"ids": list(range(n)), "label": 1}])
def test_texts_and_lists_of_numbers_have_lengths_too(make):
    found = largest_samples(DataLoader(Lengths([3, 9, 4], make)))
    assert found.candidates[0] == make(9)


def test_a_sample_that_is_longest_in_one_part_only_is_kept_beside_the_largest():
    data = Lengths([(100, 1), (1, 90), (50, 50)], lambda sizes: tuple(map(torch.zeros, sizes)))
    found = largest_samples(DataLoader(data))
    assert [tuple(map(len, sample)) for sample in found.candidates] == [(100, 1), (1, 90)]


def test_a_stream_is_looked_at_from_its_start():
    found = largest_samples(DataLoader(Stream(), batch_size=4))
    assert len(found.candidates[0]) == 50
    assert "longest of 1000" in found.notes[0]


def test_one_long_sample_among_many_short_ones_that_come_quickly_is_found():
    lengths = [10] * 1000
    lengths[3] = 99
    assert len(largest_samples(DataLoader(Lengths(lengths))).candidates[0]) == 99


@pytest.mark.parametrize(
    ("batch_size", "collate", "share"),
    [(1, pad_sequence, "0.55"), (2, pad_sequence, "0.72"), (64, pad_sequence, "1.00"), (64, torch.cat, "0.55")],
)
def test_a_note_says_how_large_a_batch_is_on_average(batch_size, collate, share):
    """A batch is padded to its longest sample: of two, drawn evenly from one to ten, 7.15 on average; or it holds its
    samples in a row."""
    data = Lengths([1 + index % 10 for index in range(100)])
    (note,) = look_at(DataLoader(data, batch_size, collate_fn=collate)).notes
    assert note.endswith(f"{share} of that")


def test_a_scan_ends_with_its_time(monkeypatch):
    monkeypatch.setattr(samples, "SCAN_SECONDS", 0.0)
    data = Lengths([index % 7 for index in range(10_000)])
    found = largest_samples(DataLoader(data))
    assert data.asked == FIRST_SAMPLES + 1
    assert f"longest of {FIRST_SAMPLES + 1} of 10000" in found.notes[0]


def test_data_indexed_by_names_are_asked_through_their_sampler():
    data = Lengths({"a": 3, "b": 5})
    found = largest_samples(DataLoader(data, sampler=["a", "b"]))
    assert len(found.candidates[0]) == 5


def test_no_samples_are_refused():
    with pytest.raises(ConfigError, match="no samples"):
        largest_samples(DataLoader(Lengths([])))


@pytest.mark.parametrize("look", [look_at, look_for_real])
def test_samples_that_fit_no_batch_are_refused_where_they_are_drawn_at_random(look):
    data = Lengths([3, 5, 4, 5])
    with pytest.raises(ConfigError, match=r"equal size.*collate_fn"):
        look(DataLoader(data, batch_size=2, shuffle=True))
    assert look(DataLoader(data, batch_size=1, shuffle=True)).tensors[0].shape == (1, 5)
    in_order = look(DataLoader(Lengths([3, 3, 5, 5]), batch_size=2))
    assert in_order.tensors[0].shape == (2, 5)
    assert "equal size" in in_order.notes[-1]


def test_a_loader_that_takes_no_single_sample_is_taken_to_pad():
    def pairs_only(samples):
        first, second, *_ = samples
        return pad_sequence([first, second])

    (note,) = look_at(DataLoader(Lengths([3, 5, 4, 5]), 2, shuffle=True, collate_fn=pairs_only)).notes
    assert "on average" in note


def test_samples_that_are_padded_fit_a_batch():
    padded = look_at(DataLoader(Lengths([3, 5, 4, 5]), 2, shuffle=True, collate_fn=pad_sequence))
    assert padded.tensors[0].shape == (5, 2)
    assert len(padded.notes) == 1


def test_at_least_one_value_is_looked_at():
    assert list(within(range(5), 3, -1.0)) == [0]
    assert list(within(range(5), 3, 60.0)) == [0, 1, 2]


def told(lengths, **options):
    """The lengths of the batch of eight that is predicted with."""

    def collate(samples):
        return pad_sequence(samples, batch_first=True), torch.tensor([len(sample) for sample in samples])

    found = look_at(DataLoader(Lengths(lengths), batch_size=8, collate_fn=collate, **options))
    values, counts = found.tensors
    assert values.shape == (8, max(lengths))
    return counts.values.tolist()


def test_the_lengths_of_a_batch_are_those_of_one_as_large_as_they_come():
    lengths = [1 + index * 7 % 100 for index in range(400)]
    sums = [sum(lengths[first : first + 8]) for first in range(0, 400, 8)]
    assert max(sums) <= sum(told(lengths)) <= max(sums) + 10, "in order: one of its batches, with the longest sample"
    order = torch.Generator().manual_seed(3)
    drawn = [sum(lengths[index] for index in torch.randperm(400, generator=order)[:8]) for _ in range(100)]
    assert max(drawn) <= sum(told(lengths, shuffle=True)) < 800


@pytest.mark.parametrize(
    ("lengths", "options"),
    [
        ([5] * 8 + [9, 7] * 50, {}),
        ([9] * 50 + [7] * 50, {"shuffle": True}),
        ([9, 8, 7, 6] * 25, {"sampler": range(100)}),
    ],
    ids=["a batch of one length", "perhaps one", "a sampler of another kind"],
)
def test_where_a_batch_may_be_of_one_length_all_are_as_long_as_the_longest(lengths, options):
    assert told(lengths, **options) == [9] * 8


def test_a_loader_in_order_whose_first_batch_cannot_be_put_together_is_refused():
    data = Lengths([5, 9] * 40)
    with pytest.raises(ConfigError, match="pads"):
        look_at(DataLoader(data, batch_size=4, collate_fn=torch.stack))
    alike = look_at(DataLoader(Lengths([5] * 40 + [9] * 40), batch_size=4, collate_fn=torch.stack))
    assert alike.tensors[0].shape == (4, 9)
    assert "one size" in alike.notes[1]
