"""What fits measure of their own memory."""

import pytest
import torch
from waiting import PATIENCE_SECONDS

from kit.memory.alongside import fit
from kit.memory.replay.estimate import MeasuredMemory
from kit.testing import TinyData, TinyModule

SECONDS = PATIENCE_SECONDS
DATA = "kit.testing:TinyData"
KIB = 1024


class Wide(TinyModule):
    """512 × 512 weights whose gradients and momentum add two more copies."""

    def __init__(self, big_data=False):
        super().__init__()
        self.layer = torch.nn.Linear(512, 512, bias=False)

    def training_step(self, batch, batch_idx):
        return self.layer(batch[0]).square().mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=1e-6, momentum=0.9)


def measured(trial, rank=0):
    event = next(e for e in trial.events if e["kind"] == "memory_measured" and e["rank"] == rank)
    found = MeasuredMemory.load(trial.paths.measured_memory(rank))
    assert found.peak_bytes == event["device_allocated_bytes"]
    assert event["optimizer_steps"] == found.optimizer_steps == 2
    return found


def data():
    return TinyData(width=512, samples=4096)


def test_a_fit_measures_parameters_gradients_and_optimizer_state(config):
    found = measured(fit(config(), Wide, data).wait(SECONDS))
    weights = 512 * 512 * 4
    assert 3 * weights < found.peak_bytes < 4.2 * weights  # the data set of 8 MiB is none of it
    assert found.allocated_bytes[0] == pytest.approx(weights, abs=16 * KIB)


def test_the_buckets_of_ddp_count(config):
    trial = fit(config(2), Wide, data).wait(SECONDS)
    weights = 512 * 512 * 4
    for rank in range(2):
        assert 4 * weights < measured(trial, rank).peak_bytes < 5.2 * weights


def test_a_batch_that_came_from_a_loader_process_counts(config):
    big = {"width": 512, "samples": 4096, "batch_size": 1024}
    alone = measured(fit(config(max_steps=3), Wide, lambda: TinyData(**big)).wait(SECONDS))
    helped = measured(fit(config(max_steps=3), Wide, lambda: TinyData(**big, num_workers=1)).wait(SECONDS))
    assert helped.peak_bytes == pytest.approx(alone.peak_bytes, rel=0.02)


def test_a_fit_of_one_step_has_not_seen_its_peak_and_measures_nothing(config):
    trial = fit(config(max_steps=1, warmup_steps=0), Wide, data).wait(SECONDS)
    assert trial.event("memory_measured") is None
    assert not trial.paths.measured_memory(0).exists()


def test_accumulated_micro_batches_are_all_seen(config):
    asked = config(max_steps=3).replace({"levers.accumulate_grad_batches": 3})
    found = measured(fit(asked, Wide, data).wait(SECONDS))
    assert found.facts["batches"] == 6


def test_measuring_can_be_switched_off(config):
    trial = fit(config(measure_memory=False), Wide, data).wait(SECONDS)
    assert trial.event("memory_measured") is None


class Profiled(Wide):
    """Runs a profiler of its own: over the whole fit, or inside one step."""

    def __init__(self, whole):
        super().__init__()
        self.whole = whole

    def on_fit_start(self):
        self.own = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU])
        if self.whole:
            self.own.start()

    def training_step(self, batch, batch_idx):
        if self.whole or batch_idx != 1:
            return super().training_step(batch, batch_idx)
        with self.own:
            return super().training_step(batch, batch_idx)

    def on_train_end(self):
        if self.whole:
            self.own.stop()
        names = {event.name for event in self.own.events()}
        assert "aten::linear" in names, names


class Validated(Wide):
    def validation_step(self, batch, batch_idx):
        self.layer(batch[0]).repeat(512, 1).sin()

    def val_dataloader(self):
        return data().train_dataloader()


@pytest.mark.parametrize("every", [2, 3])
def test_the_first_validation_after_two_steps_counts_beside_them(config, every):
    trial = fit(config(max_steps=4, validate_every_steps=every), Validated, data().train_dataloader()).wait(SECONDS)
    steps, validation = (e["device_allocated_bytes"] for e in trial.events if e["kind"] == "memory_measured")
    assert steps == measured(trial).peak_bytes < 2 * 512 * 512 * 4 * 4
    assert validation > 512 * 512 * 4 * 8


@pytest.mark.parametrize(("whole", "reason"), [(True, "runs already"), (False, "something else")])
def test_a_module_that_profiles_itself_keeps_its_profile_and_is_told(config, whole, reason):
    trial = fit(config(), lambda: Profiled(whole), data).wait(SECONDS)
    assert trial.state == "COMPLETE"
    (warning,) = trial.warnings
    assert "not measured" in warning
    assert reason in warning
    assert "trial.measure_memory" in warning
    assert trial.event("memory_measured") is None
