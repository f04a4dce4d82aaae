"""RowAdamW beside torch's AdamW with dense gradients, whichever rows are touched and whenever."""

from copy import deepcopy

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from properties import examples
from topic_model import topics
from torch.optim import AdamW

RowAdamW = topics.RowAdamW
ROWS, WIDTH = 40, 3


@pytest.fixture(autouse=True)
def _one_thread():
    torch.set_num_threads(1)


class Pair:
    """The same table and vector, stepped by both."""

    def __init__(self, weight_decay=0.01, dtype=torch.float64):
        start = torch.randn(ROWS, WIDTH, dtype=dtype, generator=torch.Generator().manual_seed(1))
        self.goal = torch.randn(ROWS, WIDTH, dtype=dtype, generator=torch.Generator().manual_seed(2))
        self.dense, self.lazy = (torch.nn.Parameter(start.clone()) for _ in range(2))
        self.scales = [torch.nn.Parameter(torch.ones(WIDTH, dtype=dtype)) for _ in range(2)]
        self.adamw = AdamW([self.dense, self.scales[0]], lr=0.05, weight_decay=weight_decay)
        self.rows = RowAdamW([self.scales[1]], self.lazy, lr=0.05, weight_decay=weight_decay)

    def step(self, *micro_batches, rate=0.05):
        """One optimizer step on the rows of some micro-batches; returns both losses."""
        losses = []
        for optimizer in (self.adamw, self.rows):
            optimizer.param_groups[0]["lr"] = rate
            optimizer.zero_grad()
            losses.append(sum(self._backward(optimizer, torch.tensor(batch)) for batch in micro_batches))
            optimizer.step()
        return losses

    def _backward(self, optimizer, batch):
        lazy = optimizer is self.rows
        found = optimizer.touch(batch) if lazy else self.dense[batch]
        loss = ((found * self.scales[lazy] - self.goal[batch]) ** 2).sum()
        loss.backward()
        return loss.item()

    def check(self):
        self.rows.settle()
        torch.testing.assert_close(self.lazy.detach(), self.dense.detach(), rtol=1e-6, atol=1e-6)
        for name in ("exp_avg", "exp_avg_sq", "step"):
            one, other = self.rows.state[self.lazy][name], self.adamw.state[self.dense][name]
            torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-7, check_dtype=False)


batches = st.lists(st.integers(0, ROWS - 1), min_size=1, max_size=6)


@examples(40)
@given(st.lists(st.tuples(batches, st.floats(0, 0.2)), min_size=1, max_size=30), st.sampled_from([0.0, 1e-5, 0.5]))
def test_losses_and_tables_are_those_of_dense_updates(steps, weight_decay):
    pair = Pair(weight_decay)
    for batch, rate in steps:
        ours, theirs = pair.step(batch, rate=rate)
        assert ours == pytest.approx(theirs, rel=1e-6, abs=1e-9)
    pair.check()


def test_a_row_that_waits_for_a_thousand_steps_is_where_dense_updates_have_it():
    pair = Pair()
    pair.step([0, 1, 2])
    for step in range(1000):
        pair.step([3 + step % 7], rate=0.01 + step % 50 / 1000)
    losses = pair.step([0, 5])
    assert losses[0] == pytest.approx(losses[1], rel=1e-6)
    pair.check()


def test_a_row_twice_in_a_batch_and_in_two_micro_batches_gets_all_its_gradients():
    pair = Pair()
    for _ in range(3):
        pair.step([4, 4, 7], [7, 9])
    pair.check()


def test_what_is_remembered_is_bounded_and_forgetting_changes_nothing(monkeypatch):
    monkeypatch.setattr(topics, "SPAN", 8)
    pair = Pair()
    for step in range(50):
        pair.step([step % ROWS, (step * 7) % ROWS])
    assert pair.rows._steps < 8
    pair.check()


def test_strong_decay_is_settled_before_it_leaves_the_range_of_numbers():
    pair = Pair(weight_decay=10.0)
    for step in range(100):
        pair.step([step % 5], rate=0.05)
    pair.check()


def test_in_32_bits_it_is_as_near_to_the_exact_table_as_dense_updates_are():
    exact, narrow = Pair(), Pair(dtype=torch.float32)
    for step in range(400):
        rows = [(step * 3) % ROWS, (step * 5) % ROWS]
        exact.step(rows)
        narrow.step(rows)
    narrow.rows.settle()
    wrong = [(table.double() - exact.dense).abs().max().item() for table in (narrow.lazy, narrow.dense)]
    assert wrong[0] < max(2 * wrong[1], 1e-5)


def test_a_saved_state_goes_on_here_and_in_a_plain_adamw():
    pair, again = Pair(), Pair()
    for step in range(20):
        pair.step([step % 9, 11])
    with torch.no_grad():
        pair.rows.settle()
        again.lazy.copy_(pair.lazy)
        again.dense.copy_(pair.lazy)
        for scale in again.scales:
            scale.copy_(pair.scales[1])
    saved = pair.rows.state_dict()
    again.rows.load_state_dict(deepcopy(saved))
    swapped = {0: saved["state"][1], 1: saved["state"][0]}  # there the table is the first parameter
    groups = again.adamw.state_dict()["param_groups"]
    again.adamw.load_state_dict({"state": swapped, "param_groups": groups})
    for step in range(20):
        again.step([step % 5, 20])
    again.check()


def test_rows_that_were_looked_up_and_never_had_a_gradient_change_nothing():
    pair = Pair()
    pair.step([1, 2])
    pair.rows.touch(torch.tensor([3, 4]))
    pair.step([5])
    pair.check()
