import dataclasses
from collections import namedtuple

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from kit.errors import ConfigError
from kit.memory.record.batches import LARGEST_CONSTANT, describe

Pair = namedtuple("Pair", "x y")


@dataclasses.dataclass
class Drawn:
    picture: Tensor
    caption: str


@pytest.mark.parametrize(
    "batch",
    [
        torch.zeros(3, 4),
        {"x": torch.zeros(3, 4), "name": ["a", "b", "c"]},
        Pair(torch.zeros(3, 4), [torch.zeros(3, dtype=torch.int32)]),
        Drawn(torch.zeros(3, 4), "a whale"),
    ],
    ids=lambda batch: type(batch).__name__,
)
def test_a_batch_is_made_again_as_it_was(batch):
    shapes = describe(batch)
    with FakeTensorMode():
        again, tensors = shapes.make()
    assert isinstance(again, type(batch))
    assert shapes.batch_size == 3
    assert tensors[0].shape == (3, 4)
    assert all(isinstance(tensor, FakeTensor) for tensor in tensors)


def test_a_tensor_that_is_there_twice_is_one():
    x = torch.zeros(2, 2)
    (first, second), tensors = describe((x, x)).make()
    assert first is second
    assert len(tensors) == 1


def test_each_batch_has_tensors_of_its_own():
    shapes = describe(torch.zeros(2))
    assert shapes.make()[0] is not shapes.make()[0]


def test_lengths_keep_their_numbers_and_pictures_do_not():
    shapes = describe(
        {"lengths": torch.tensor([3, 5]), "x": torch.zeros(2, 5), "many": torch.arange(LARGEST_CONSTANT + 1)}
    )
    assert [item.values is not None for item in shapes.tensors] == [True, False, False]
    with FakeTensorMode():
        batch, _ = shapes.make()
        assert batch["lengths"].max().item() == 5


def test_bytes_are_those_of_all_tensors():
    assert describe((torch.zeros(2, 3), torch.zeros(4, dtype=torch.bool))).nbytes == 2 * 3 * 4 + 4


def test_what_cannot_be_copied_is_refused():
    with pytest.raises(ConfigError, match=r"^data: .*generator .*copied"):
        describe(x for x in ())
