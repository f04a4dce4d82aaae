"""The loss of a batch is the mean of its ranks, and a short batch is no spike."""

import pytest

from kit.charts.trial import Losses
from kit.records.trace import losses_of, metrics_of


def step(rank, batch, loss, samples=8, number=None, epoch=0):
    place = {"step": number or batch, "batch": batch, "epoch": epoch}
    return {"kind": "step", "rank": rank, "loss": loss, "samples": samples, **place}


def test_losses_of_ranks_are_their_mean_as_gradients_are():
    events = [step(0, 1, 2.0), step(0, 2, 1.0), step(1, 1, 4.0, samples=7), step(1, 2, 3.0, samples=7)]
    assert [(one.loss, one.samples) for one in losses_of(events)] == [(3.0, 15), (2.0, 15)]
    assert metrics_of(events)["loss"] == ((1, 2), (3.0, 2.0))


def test_batches_of_one_number_in_two_epochs_are_two():
    events = [step(0, 1, 2.0, epoch=epoch, number=epoch + 1) for epoch in (0, 1)]
    assert [one.epoch for one in losses_of(events)] == [0, 1]


def test_what_was_logged_last_in_a_step_counts_and_only_of_rank_0():
    logged = [{"kind": "logged", "rank": rank, "step": 2, "metrics": {"val": 5.0 + rank}} for rank in (0, 1)]
    assert metrics_of([{**step(0, 1, 1.0, number=2), "metrics": {"val": 9.0}}, *logged])["val"] == ((2,), (5.0,))


def test_a_short_batch_is_drawn_with_samples_of_the_one_before_and_kept_as_it_is():
    losses = Losses("run", (1.0, 1.0, 9.0, 1.0), samples=(8.0, 8.0, 2.0, 8.0))
    assert losses.drawn == pytest.approx((1.0, 1.0, 3.0, 1.0))
    assert losses.values[2] == 9.0
    assert Losses("run", (1.0, 2.0)).drawn == (1.0, 2.0)


def test_a_mean_of_an_epoch_weighs_its_batches_by_samples():
    epochs, values, samples = [], [], []
    for epoch in range(8):
        epochs += [epoch] * 4
        values += [1.0, 1.0, 1.0, 9.0]
        samples += [8.0, 8.0, 8.0, 2.0]
    found = Losses("run", tuple(values), epochs=tuple(epochs), samples=tuple(samples))
    assert [mean for *_, mean in found.means] == pytest.approx([(24 + 18) / 26] * 8)
