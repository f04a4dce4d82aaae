"""What ranks wait for each other, in trials of two ranks; and a validation that is told apart."""

import pytest
import torch

from kit.memory.alongside import fit
from kit.testing import TinyData, TinyModule


class Wide(TinyModule):
    """Gradients of a megabyte, so that there is something to send."""

    def __init__(self):
        super().__init__()
        self.body = torch.nn.Sequential(torch.nn.Linear(8, 512), torch.nn.Linear(512, 512), torch.nn.Linear(512, 8))

    def training_step(self, batch, batch_idx):
        x, y = batch
        return torch.nn.functional.mse_loss(self.layer(self.body(x)), y)

    def validation_step(self, batch, batch_idx):
        self.training_step(batch, batch_idx)


class Both(TinyData):
    def val_dataloader(self):
        return self.train_dataloader()


def seconds(trial, part):
    return [event[f"{part}_seconds"] for event in trial.steps]


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_ranks_that_wait_for_each_other_say_so(config, strategy):
    trial = fit(config(ranks=2, strategy=strategy), Wide, TinyData).wait()
    assert len(trial.steps) == 16
    assert min(seconds(trial, "communication")) > 0
    for event in trial.steps:
        parts = [value for name, value in event.items() if name.endswith("_seconds") and name != "step_seconds"]
        assert sum(parts) == pytest.approx(event["step_seconds"], abs=1e-6)


def test_a_rank_alone_has_no_communication(config):
    trial = fit(config(), Wide, TinyData).wait()
    assert set(seconds(trial, "communication")) == {0.0}


def test_a_validation_is_told_apart_from_the_step_before_and_after_it(config):
    trial = fit(config(validate_every_steps=4, validation_batches=2), Wide, Both).wait()
    validated = [event["step"] for event in trial.steps if event["validation_seconds"] > 0]
    assert validated == [5]  # the one after step 8 comes after the last batch
    assert trial.event("fit_ended", "validation_seconds") > 0
    assert [event["name"] for event in trial.events if event["kind"] == "span"] == ["validation"] * 2


def test_data_without_validation_batches_is_only_trained_on(config):
    trial = fit(config(validate_every_steps=4), Wide, TinyData).wait()
    assert set(seconds(trial, "validation")) == {0.0}
