"""Sparse matrices: adjacencies of graphs and sparse weights, a dry run beside the allocator's own events."""

import numpy as np
import pytest
import torch
from dry_parts import Samples, measure, peak, predict
from lightning.pytorch import LightningModule
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader

from kit.config import Config
from kit.memory.record.dry_run import DryRun, record
from kit.memory.record.fake_mode import FakeMode
from kit.memory.record.fakes import fake_values
from kit.memory.record.truth import sparse_parts, storages_of

NODES, FEATURES, LINKS = 1024, 32, 16384
A_FEW_BYTES = 512


def links():
    """Nodes in pairs, each pair once."""
    step = torch.arange(LINKS)
    return torch.stack((step // 16, (step // 16 + 37 * (step % 16) + 1) % NODES))


def coordinates():
    return torch.sparse_coo_tensor(links(), torch.full((LINKS,), 1 / 16), (NODES, NODES)).coalesce()


def by_hand():
    begins = torch.arange(0, LINKS + 1, 16)
    return torch.sparse_csr_tensor(begins, links()[1], torch.full((LINKS,), 1 / 16), (NODES, NODES))


class Graph(LightningModule):
    """Two layers on the features of all nodes: a graph's adjacency times values times weights."""

    def __init__(self, adjacency, product):
        super().__init__()
        self.register_buffer("adjacency", adjacency())
        self.product = product
        self.first, self.last = nn.Linear(FEATURES, 64), nn.Linear(64, 8)

    def training_step(self, batch, batch_idx):
        values = self.product(self.adjacency, self.first(batch)).relu()
        return self.product(self.adjacency, self.last(values)).square().mean()

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters())


class Pruned(LightningModule):
    """A layer of which only a part of the weights is there."""

    def __init__(self, weight, product):
        super().__init__()
        self.weight, self.product = nn.Parameter(weight()), product
        self.first = nn.Linear(FEATURES, 64)

    def training_step(self, batch, batch_idx):
        return self.product(self.weight, self.first(batch)).square().mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=1e-3)


class Masked(LightningModule):
    """A matrix that becomes sparse in each step."""

    def __init__(self, convert):
        super().__init__()
        self.convert, self.first = convert, nn.Linear(FEATURES, 64)

    def training_step(self, batch, batch_idx):
        matrix = self.convert(torch.eye(NODES).mul(0.5))
        return (matrix @ self.first(batch)).square().mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=1e-3)


class Given(Graph):
    """The adjacency comes with each batch."""

    def training_step(self, batch, batch_idx):
        adjacency, values = batch
        return (adjacency @ self.last(self.first(values))).square().mean()


def features():
    return {"train_dataloaders": DataLoader(Samples(lambda: torch.rand(FEATURES), 8 * NODES), batch_size=NODES)}


def graphs():
    return {"train_dataloaders": DataLoader(Samples(lambda: (by_hand(), torch.rand(NODES, FEATURES))), batch_size=None)}


def matmul(first, second):
    return first @ second


def from_the_right(matrix, values):
    return (values.t() @ matrix).t()


def linear(matrix, values):
    return functional.linear(values.t(), matrix).t()


CASES = {
    "graph, @": lambda: Graph(by_hand, matmul),
    "graph, sparse.mm": lambda: Graph(by_hand, torch.sparse.mm),
    "graph, from coordinates": lambda: Graph(lambda: coordinates().to_sparse_csr(), matmul),
    "graph, by columns": lambda: Graph(lambda: by_hand().to_sparse_csc(), matmul),
    "graph, coordinates, @": lambda: Graph(coordinates, matmul),
    "graph, coordinates, sparse.mm": lambda: Graph(coordinates, torch.sparse.mm),
    "graph, from the right": lambda: Graph(by_hand, from_the_right),
    "graph, linear": lambda: Graph(by_hand, linear),
    "weights, sparse.mm": lambda: Pruned(by_hand, torch.sparse.mm),
    "weights, coordinates, sparse.mm": lambda: Pruned(coordinates, torch.sparse.mm),
    "in the batch": lambda: Given(lambda: torch.zeros(()), None),
}


def made_bytes(matrix):
    return sum(part.nbytes for part in sparse_parts(matrix))


@pytest.mark.filterwarnings("ignore:Sparse:UserWarning")
def test_a_sum_in_place_keeps_room_for_both_and_on_a_gpu_it_may_grow():
    run = DryRun(Config(), "32-true", device_kind="cuda")
    case = CASES["weights, coordinates, sparse.mm"]
    here, there = predict(case, features, Config()), record(case, features, run)
    kept = here.block_bytes[np.isin(np.arange(here.blocks), here.event_block[~here.event_allocates], invert=True)]
    assert np.isin([2 * part.nbytes for part in sparse_parts(coordinates())], kept).all()
    assert not here.facts["may_be_low"]
    assert any("add_" in low for low in there.facts["may_be_low"])


@pytest.mark.filterwarnings("ignore:Sparse:UserWarning")
@pytest.mark.parametrize("case", CASES)
def test_sparse_matrices_are_predicted_as_measured_or_said_to_be_low(case):
    data = graphs if case == "in the batch" else features
    recording = predict(CASES[case], data, Config())
    measured = measure(CASES[case], data, Config())
    assert recording.facts["unknown"] == ""
    off_bytes = peak(recording) - measured
    if recording.facts["may_be_low"]:
        assert -0.2 * measured < off_bytes <= A_FEW_BYTES
    elif case == "in the batch":  # of which the dry run holds one more
        assert 0 <= off_bytes < 0.05 * measured
    elif case == "weights, coordinates, sparse.mm":
        # The first sum in place gives back the weight as it was made, which the profiler does not see.
        assert -made_bytes(coordinates()) - A_FEW_BYTES <= off_bytes <= A_FEW_BYTES
    else:
        assert abs(off_bytes) <= A_FEW_BYTES


@pytest.mark.filterwarnings("ignore:Sparse:UserWarning")
def test_of_a_dense_matrix_all_numbers_are_taken():
    def make():
        return Masked(lambda matrix: matrix.to_sparse_csr())

    recording = predict(make, features, Config())
    assert peak(recording) > measure(make, features, Config())
    (note,) = recording.facts["notes"]
    assert "upper bound" in note


@pytest.mark.filterwarnings("ignore:Sparse:UserWarning")
def test_operators_on_sparse_matrices_that_were_not_measured_are_told():
    recording = predict(lambda: Graph(by_hand, lambda matrix, values: (matrix @ matrix) @ values), features, Config())
    assert recording.facts["unknown"] == ""
    (told,) = recording.facts["may_be_low"]
    assert "sparse" in told
    assert told.endswith(" mm")


@pytest.mark.filterwarnings("ignore:Sparse:UserWarning")
@pytest.mark.parametrize("layout", [torch.sparse_csr, torch.sparse_csc, torch.sparse_bsr, torch.sparse_bsc])
def test_a_sparse_matrix_holds_its_indices_and_values(layout):
    block = (2, 2) if layout in (torch.sparse_bsr, torch.sparse_bsc) else None
    real = torch.eye(8).to_sparse(layout=layout, blocksize=block)
    with fake_values(), FakeMode() as mode:
        made = mode.from_tensor(real)
        assert [part.shape for part in sparse_parts(made)] == [part.shape for part in sparse_parts(real)]
        assert [part.shape for part in sparse_parts(made.detach().clone())] == [p.shape for p in sparse_parts(real)]
    assert sorted(storages_of([real]).values()) == sorted(p.untyped_storage().nbytes() for p in sparse_parts(real))
