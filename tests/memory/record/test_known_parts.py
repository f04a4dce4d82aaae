from functools import partial

import pytest
import torch
from dry_parts import Perceptron, at_peak, loader, measure, peak, predict, vectors
from lightning.pytorch import LightningModule
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from kit.config import Config
from kit.memory.record.dry_run import known_parts, reason
from kit.memory.record.fakes import fake_values
from kit.memory.record.recorder import BlockRecorder
from kit.train.trainer import make_trainer


def known(make):
    with fake_values(), FakeTensorMode():
        module = make()
        trainer = make_trainer(Config(), accelerator="cpu", world_size=1, precision="32-true", module=module)
        module.trainer = trainer
        return known_parts(module, trainer, 4, 1)


def test_the_peak_is_the_sum_of_what_is_known():
    class Plain(Perceptron):
        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9, foreach=False)

    recording = known(Plain)
    size = 4 * sum(parameter.numel() for parameter in Perceptron().parameters())
    assert at_peak(recording) == {"parameters": size, "gradients": size, "optimizer_state": size}
    assert peak(recording) == 3 * size
    assert recording.batch_size == 4
    assert len(recording.batch_starts) == 2


def test_what_cannot_be_made_is_said_and_the_rest_stays():
    class Bare(Perceptron):
        def configure_optimizers(self):
            raise RuntimeError("no optimizer today")

    recording = known(Bare)
    assert set(at_peak(recording)) == {"parameters", "gradients"}
    (note,) = recording.facts["notes"]
    assert note.startswith("optimizer state")
    assert "configure_optimizers" in note
    assert note.endswith("RuntimeError: no optimizer today")


def test_an_optimizer_that_needs_a_closure_gets_one():
    class OfClosure(Perceptron):
        def configure_optimizers(self):
            return torch.optim.LBFGS(self.parameters())

    assert known(OfClosure).facts["notes"] == []


def test_an_optimizer_that_does_not_step_is_named():
    class Stuck(torch.optim.SGD):
        def step(self, closure=None):
            raise ValueError("stuck")

    class OfStuck(Perceptron):
        def configure_optimizers(self):
            return Stuck(self.parameters(), lr=0.1)

    (note,) = known(OfStuck).facts["notes"]
    assert "state of Stuck" in note
    assert note.endswith("ValueError: stuck")


def test_a_reason_is_the_first_line_and_the_place():
    with pytest.raises(ValueError, match="first") as caught:
        raise ValueError("first\nsecond")
    assert reason(caught.value, BlockRecorder()).startswith("ValueError: first at test_known_parts.py:")


class Sparse(Perceptron):
    """Its table's gradient holds only the rows that were looked up."""

    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(20_000, 256, sparse=True)

    def loss(self, batch):
        x, y = batch
        return super().loss((x + self.table(torch.arange(len(x))), y))

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


def test_sparse_gradients_do_not_make_the_lower_bound_higher_than_the_truth():
    config = Config.make({"trial": {"max_steps": 4, "warmup_steps": 0}})
    assert 20_000 * 256 * 4 <= peak(known(Sparse)) <= measure(Sparse, lambda: loader(vectors), config)


class Bagged(LightningModule):
    """Words into classes by a table whose gradient is sparse."""

    made = staticmethod(lambda: nn.EmbeddingBag(5_000, 64, sparse=True, mode="sum"))
    optimizer = staticmethod(partial(torch.optim.SGD, lr=0.1))

    def __init__(self):
        super().__init__()
        self.table, self.last = self.made(), nn.Linear(64, 10)

    def training_step(self, batch, batch_idx):
        words, kinds = batch
        found = self.table(words)
        return nn.functional.cross_entropy(self.last(found if found.ndim == 2 else found.mean(1)), kinds)

    def configure_optimizers(self):
        return self.optimizer(self.table.parameters())


TABLES = {
    "bag": Bagged.made,
    "bag of means": lambda: nn.EmbeddingBag(5_000, 64, sparse=True),
    "table": lambda: nn.Embedding(5_000, 64, sparse=True),
}
OPTIMIZERS = {"SGD": Bagged.optimizer, "momentum": partial(torch.optim.SGD, lr=0.1, momentum=0.9),
              "SparseAdam": torch.optim.SparseAdam}  # fmt: skip


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("table", TABLES)
def test_sparse_gradients_are_recorded_and_their_copies_are_said_to_be_unknown(table, optimizer):
    made = {"made": staticmethod(TABLES[table]), "optimizer": staticmethod(OPTIMIZERS[optimizer])}
    sparse = type("Bags", (Bagged,), made)

    def data():
        return loader(lambda: (torch.randint(5_000, (40,)), torch.randint(10, ())))

    config = Config.make({"trial": {"max_steps": 4, "warmup_steps": 0}})
    recording = predict(sparse, data, config)
    assert not recording.facts["unknown"]
    assert "sparse" in recording.facts["may_be_low"][-1]
    measured = measure(sparse, data, config)
    assert 0.75 * measured <= peak(recording) <= 1.01 * measured
