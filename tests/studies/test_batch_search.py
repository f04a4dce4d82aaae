import itertools
import json
import re
import threading

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from lightning.pytorch import LightningModule
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from waiting import PATIENCE_SECONDS

import kit
from kit.errors import ConfigError, TrialError
from kit.studies.batch_size import growing, shrinking
from kit.trial.verdict import advice

MIB = 1 << 20


class Wide(LightningModule):
    """Keeps 64 KiB for every sample: activations are nearly all that it holds."""

    def __init__(self):
        super().__init__()
        self.one, self.two = nn.Linear(64, 16384), nn.Linear(16384, 1)

    def training_step(self, batch, batch_idx):
        return self.two(self.one(batch[0])).square().mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=1e-4)


class Failing(Wide):
    def training_step(self, batch, batch_idx):
        raise KeyError("not memory")


def loader(samples=4096, batch_size=8):
    return DataLoader(TensorDataset(torch.zeros(samples, 64)), batch_size=batch_size)


def follow(rule, fits):
    """The sizes a rule asks for when those up to `fits` fit."""
    asked = []
    try:
        size = next(rule)
        while True:
            asked.append(size)
            size = rule.send(size <= fits)
    except StopIteration:
        return asked


@given(st.integers(1, 3000), st.integers(0, 3000), st.integers(1, 3000), st.floats(0, 0.3))
def test_the_largest_that_fits_is_found_to_the_resolution_and_no_size_is_tried_twice(start, fits, most, resolution):
    asked = follow(growing(start, most, resolution), fits)
    assert len(set(asked)) == len(asked)
    assert all(1 <= size <= most for size in asked)
    found = max((size for size in asked if size <= fits), default=0)
    best = min(fits, most)
    assert found <= best
    if found < best:
        fails = min(size for size in asked if size > fits)
        assert fails - found <= max(1, int(fails * resolution))
    assert len(asked) <= 4 + 2 * max(start, most, fits).bit_length()


@given(st.integers(1, 5000), st.integers(0, 5000))
def test_a_batch_shrinks_by_seven_tenths_then_halves_down_to_one(start, fits):
    asked = follow(shrinking(start), fits)
    assert asked[0] == start
    assert all(later < size for size, later in itertools.pairwise(asked))
    assert asked[-1] == 1 or asked[-1] <= fits
    if len(asked) > 2:
        assert asked[1] == max(1, int(start * 0.7))
        assert asked[2] == max(1, asked[1] // 2)


@given(st.integers(1, 300), st.integers(1, 8), st.integers(0, 300))
def test_batches_that_keep_the_global_batch_divide_it(batch_size, accumulate, fits):
    whole = batch_size * accumulate
    assert all(whole % size == 0 for size in follow(shrinking(batch_size, whole), fits))


def small(config, limit, ranks=1, strategy=None, **changes):
    return config(ranks, strategy, max_steps=3).replace(
        {"hardware.device_memory_bytes": limit, "loader.batch_size": 8, **changes}
    )


@pytest.mark.slow
def test_a_search_finds_what_fits_and_says_how(config):
    asked = small(config, 96 * MIB)
    found = kit.studies.find_batch_size(asked, Wide, loader()).wait(PATIENCE_SECONDS)
    assert found.state == "COMPLETE"
    fitting = [attempt.batch_size for attempt in found.attempts if attempt.outcome == "fits"]
    failing = [attempt.batch_size for attempt in found.attempts if attempt.outcome == "out of memory"]
    assert found.batch_size == max(fitting)
    assert min(failing) - max(fitting) <= max(1, 0.02 * min(failing))
    assert "predicted to fit" in found.reasons[0]
    best = next(attempt for attempt in found.attempts if attempt.batch_size == found.batch_size)
    assert best.measured_bytes <= 97 * MIB
    assert best.ratio == pytest.approx(1, abs=0.1)
    assert found.config.loader.batch_size == found.batch_size
    assert found.config.trial == asked.trial
    written = json.loads(found.path.read_text())
    assert [attempt["batch_size"] for attempt in written["attempts"]] == [a.batch_size for a in found.attempts]
    assert written["state"] == "COMPLETE"
    assert str(found.batch_size) in repr(found)
    assert "out of memory" in found._repr_html_()


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_a_search_runs_under_any_strategy(config, strategy):
    found = kit.studies.find_batch_size(small(config, 96 * MIB, 2, strategy), Wide, loader(), resolution=0.2).wait(240)
    outcomes = {attempt.outcome for attempt in found.attempts}
    assert outcomes == {"fits", "out of memory"}


@pytest.mark.slow
def test_a_search_ends_where_the_data_does(config):
    found = kit.studies.find_batch_size(small(config, 96 * MIB), Wide, loader(samples=20), start=16).wait(
        PATIENCE_SECONDS
    )
    assert found.batch_size == 20
    assert any("data does" in reason for reason in found.reasons)


def test_a_search_can_be_stopped_and_keeps_what_it_found(config):
    found = kit.studies.find_batch_size(small(config, 96 * MIB), Wide, loader(), start=1, resolution=0)
    seen = threading.Event()
    found.on_change(lambda series: seen.set() if series.attempts else None)
    assert seen.wait(PATIENCE_SECONDS)
    found.stop()
    assert found.wait(PATIENCE_SECONDS).state == "STOPPED"
    assert json.loads(found.path.read_text())["state"] == "STOPPED"
    assert found.batch_size >= 1


def test_a_search_whose_trial_fails_for_another_reason_says_so(config):
    with pytest.raises(TrialError, match="not memory"):
        kit.studies.find_batch_size(small(config, 96 * MIB), Failing, loader(), start=2).wait(PATIENCE_SECONDS)


def test_nothing_fits_is_a_failure_with_advice(config):
    with pytest.raises(TrialError, match="not even .*1 fits") as caught:
        kit.studies.find_batch_size(small(config, 1 * MIB), Wide, loader(), start=4).wait(PATIENCE_SECONDS)
    assert "gradient_checkpointing" in caught.value.details


def test_a_cpu_without_a_limit_is_refused_before_any_process(config):
    with pytest.raises(ConfigError, match="no device memory"):
        kit.studies.find_batch_size(config(), Wide, loader())


@pytest.mark.parametrize("bounds", [{"start": 0}, {"start": 9, "most": 8}, {"most": 0}, {"resolution": 1.0}])
def test_bounds_that_leave_nothing_are_refused(config, bounds):
    with pytest.raises(ConfigError):
        kit.studies.find_batch_size(small(config, 96 * MIB), Wide, loader(), **bounds)


@pytest.mark.slow
def test_a_trial_backs_off_until_it_fits_and_starts_there_the_next_time(config):
    asked = small(config, 48 * MIB, **{"loader.batch_size": 512})
    done = kit.studies.back_off(asked, Wide, loader()).wait(PATIENCE_SECONDS)
    sizes = [attempt.batch_size for attempt in done.attempts]
    assert sizes[:3] == [512, 358, 179]
    assert [attempt.outcome for attempt in done.attempts] == ["out of memory"] * (len(sizes) - 1) + ["fits"]
    assert done.batch_size == sizes[-1] == done.config.loader.batch_size
    assert done.trial.state == "COMPLETE"
    again = kit.studies.back_off(asked, Wide, loader()).wait(PATIENCE_SECONDS)
    assert [attempt.batch_size for attempt in again.attempts] == [done.batch_size]
    assert "last safe batch" in again.reasons[0]
    other = kit.studies.back_off(small(config, 96 * MIB, **{"loader.batch_size": 512}), Wide, loader()).wait(
        PATIENCE_SECONDS
    )
    assert other.attempts[0].batch_size == 512, "another device is another configuration"


def test_the_global_batch_can_be_kept(config):
    asked = small(config, 48 * MIB, **{"loader.batch_size": 512})
    done = kit.studies.back_off(asked, Wide, loader(), keep_global_batch=True).wait(PATIENCE_SECONDS)
    assert done.batch_size < 512
    assert {a.batch_size * a.accumulate_grad_batches for a in done.attempts} == {512}
    assert done.config.levers.accumulate_grad_batches == 512 // done.batch_size


@pytest.mark.slow
def test_the_largest_batch_is_not_started_from_where_gradients_must_stay_beside_it(config):
    asked = small(config, 20 * MIB)
    found = kit.studies.find_batch_size(asked, Wide, loader()).wait(PATIENCE_SECONDS)
    large = asked.replace({"loader.batch_size": 4 * found.batch_size})
    done = kit.studies.back_off(large, Wide, loader(), keep_global_batch=True).wait(PATIENCE_SECONDS)
    (attempt,) = done.attempts
    assert attempt.outcome == "fits"
    assert attempt.ratio == pytest.approx(1, abs=0.05), "it was predicted, too"
    assert attempt.batch_size < found.batch_size
    assert attempt.batch_size * attempt.accumulate_grad_batches == 4 * found.batch_size
    told = " ".join(done.reasons)
    assert "gradients stay" in told
    fits = int(re.search(r"(\d+) is predicted to fit", told)[1])
    assert ("divides" in told) == (attempt.batch_size < fits)
    again = kit.studies.back_off(large, Wide, loader(), keep_global_batch=True).wait(PATIENCE_SECONDS)
    assert [one.batch_size for one in again.attempts] == [attempt.batch_size]
    alone = kit.studies.back_off(large, Wide, loader()).wait(PATIENCE_SECONDS)
    assert [one.batch_size for one in alone.attempts] == [found.batch_size], "without accumulation it does fit"


def test_a_back_off_that_reaches_one_fails_with_advice_in_order(config):
    with pytest.raises(TrialError, match="batch of 1") as caught:
        kit.studies.back_off(small(config, 1 * MIB), Wide, loader()).wait(PATIENCE_SECONDS)
    lines = caught.value.details.splitlines()
    assert [line.split(".")[0].strip() for line in lines[1:]] == [str(place) for place in range(1, len(lines))]


def test_advice_leaves_out_what_is_done_already():
    plain = kit.Config()
    assert advice(plain)[0].startswith("gradients freed")
    assert advice(plain)[1].startswith("a smaller batch")
    assert advice(plain)[-1].startswith("a smaller model")
    tried = kit.Config().replace({
        "levers.gradient_checkpointing": True, "levers.optimizer": "adamw-8bit", "hardware.precision": "bf16-mixed",
        "levers.zero_grad_after_step": True,
    })  # fmt: skip
    text = " ".join(advice(tried, 1))
    assert not any(word in text for word in ("gradient_checkpointing", "8bit", "smaller batch", "zero_grad"))


def test_a_plain_trial_that_runs_out_of_memory_says_what_helps(config):
    asked = small(config, 1 * MIB)
    with pytest.raises(TrialError, match="out of memory") as caught:
        kit.fit(asked, Wide, loader()).wait(PATIENCE_SECONDS)
    assert "What helps" in caught.value.details
    assert "a smaller batch: batches of 4" in caught.value.details
