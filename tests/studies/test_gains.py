"""When a gain that short trials measure is known: pairs in turn, and what a machine that drifts does to them."""

import math
import multiprocessing
import random
import time
from dataclasses import replace

import pytest
import torch
from diagnosis_parts import evidence, host, line, shares, source, work
from lightning.pytorch import Callback, LightningDataModule
from lightning.pytorch.loggers import TensorBoardLogger
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset

import kit
from kit.studies.diagnosis import gains as room
from kit.studies.diagnosis.gains import (
    LEAST_PAIRS,
    PAIRS,
    decided,
    difference,
    few_steps,
    in_whole_steps,
    measured_gains,
    training_alone,
    worth_measuring,
)
from kit.studies.diagnosis.host_rules import drawing_hook, slowest_hook
from kit.studies.repeats import RunSource
from kit.testing import TinyModule
from kit.trial.submit import Altered

THRESHOLD = 1.15


def pair(gain, drift=0.0, noise=0.0, seed=0):
    """Eight steps before, and eight after, when the machine had become faster by `drift`."""
    draw = random.Random(seed)
    before, after = ([math.log(speed) + noise * draw.gauss(0, 1) for _ in range(8)] for speed in (100, 100 * gain))
    return before, [value + drift for value in after]


def pairs_until_decided(of_pair):
    found = []
    while not decided(found, THRESHOLD):
        found.append(of_pair(len(found)))
    return found


def test_a_gain_is_that_of_the_medians():
    low, high = difference([pair(1.5)])
    assert (low, high) == pytest.approx((1.5, 1.5))
    low, high = difference([pair(1.5, noise=0.1), pair(1.5, noise=0.1, seed=1)])
    assert low < 1.5 < high


def test_one_step_that_was_held_up_moves_no_gain():
    held_up = difference([([0.0, 0.01, 0.0, -0.01, -3.0], [0.7, 0.71, 0.7, 0.69, 0.7])])
    assert held_up == pytest.approx((math.exp(0.7),) * 2, rel=0.05)


def test_no_gain_takes_one_pair_and_a_gain_two():
    assert len(pairs_until_decided(lambda _: pair(0.9))) == 1
    assert len(pairs_until_decided(lambda turn: pair(1.8, noise=0.05, seed=turn))) == LEAST_PAIRS


def test_a_machine_that_becomes_faster_makes_no_gain():
    """In turn, what ran second was first in the pair before."""
    found = pairs_until_decided(lambda turn: pair(1.02, drift=0.25 if turn % 2 == 0 else -0.25, seed=turn))
    assert len(found) > 1
    low, high = difference(found)
    assert low < THRESHOLD
    assert low < 1.02 < high


def test_what_stays_undecided_ends():
    assert len(pairs_until_decided(lambda turn: pair(1.15, noise=0.3, seed=turn))) <= PAIRS


@pytest.mark.parametrize("gain", [1.0, 1.05, 1.5, 2.0])
def test_of_a_hundred_drifting_machines_few_are_told_a_gain_that_is_none_or_miss_one(gain):
    """A drift of 10 % from run to run, noise of 10 % from step to step."""
    named = 0
    for seed in range(100):
        draw = random.Random(seed)
        found = pairs_until_decided(lambda turn: pair(gain, draw.gauss(0, 0.1), 0.1, 1000 * seed + turn))  # noqa: B023
        named += difference(found)[0] >= THRESHOLD
    assert named <= 3 if gain < THRESHOLD else named >= 95


OWN = evidence(whose_batches="your DataLoader", given_loader=True, work=work(samples=4))


def measured_with(monkeypatch, samples_of):
    """Gains where a step takes as long whatever its batch, of `samples_of` what is asked for."""

    def few_steps(source, _):
        return [{"samples": samples_of(source.altered.batch_size or 4), "step_seconds": 0.1}] * 8

    monkeypatch.setattr(room, "few_steps", few_steps)
    return measured_gains(OWN, source(OWN))


def test_a_larger_batch_of_the_callers_own_data_is_tried(monkeypatch):
    gains, notes = measured_with(monkeypatch, lambda asked: asked)
    assert gains["batch too small"] == pytest.approx((4, 4))
    assert notes == []


def test_data_that_makes_the_same_batches_whatever_is_asked_gets_no_gain_but_a_way_out(monkeypatch):
    gains, (note,) = measured_with(monkeypatch, lambda _: 4)
    assert "batch too small" not in gains
    assert "a batch of 16 from your DataLoader" in note
    assert "new_data" in note


@pytest.mark.parametrize("part", ["wait", "validation", "checkpoint"])
def test_no_larger_batch_is_tried_where_most_of_a_step_is_no_training(part):
    few = {"forward": 0.1, "optimizer": 0.05, part: 0.6, "other": 0.0}
    found = evidence(work=work(samples=4), shares={**few, "backward": 1 - sum(few.values())})
    assert "batch too small" not in worth_measuring(found)
    assert "batch too small" in worth_measuring(evidence(work=work(samples=4)))


class SlowToRead(Dataset):
    """Three batches of four, each sample another."""

    def __len__(self):
        return 12

    def __getitem__(self, index):
        time.sleep(0.04)
        return torch.full((8,), float(index + 1)), torch.ones(1)


class Writing(TinyModule):
    """Changes its batch in place, and logs what that was before and how many processes live beside."""

    def training_step(self, batch, batch_idx):
        self.log("seen", batch[0].sum())
        self.log("processes", float(len(multiprocessing.active_children())))
        batch[0].div_(100)
        return super().training_step(batch, batch_idx)


@pytest.mark.parametrize("workers", [0, 2])
def test_a_repeated_batch_is_as_it_was_read_and_nothing_is_read_beside(config, workers):
    """Over more than one epoch, while each epoch has three batches."""
    given = RunSource(Writing, DataLoader(SlowToRead(), batch_size=4, num_workers=workers), config())
    found = evidence(shares=shares(wait=0.5), workers=workers)
    read, repeated = (few_steps(replace(given, altered=Altered(repeats_batch=one)), found) for one in (False, True))
    assert len({step["metrics"]["seen"] for step in read}) > 1
    assert {step["metrics"]["seen"] for step in repeated} == {8 * (1 + 2 + 3 + 4)}
    assert len(repeated) >= 2
    assert {step["metrics"]["processes"] for step in repeated} == {0}


class Endless(IterableDataset):
    def __iter__(self):
        return ((torch.full((8,), float(number)), torch.ones(1)) for number in range(1, 1000))


def test_ranks_that_repeat_a_batch_of_no_known_number_time_as_many_steps(config):
    again = Altered(repeats_batch=True)
    given = RunSource(Writing, DataLoader(Endless(), batch_size=4), config(ranks=2), altered=again)
    steps = few_steps(given, evidence(world_size=2))
    counts = [sum(step["rank"] == rank for step in steps) for rank in (0, 1)]
    assert counts[0] == counts[1] >= 2
    assert {step["metrics"]["seen"] for step in steps if "metrics" in step} == {8 * (1 + 2 + 3 + 4)}


def test_kits_own_loader_ends_once_its_first_batch_is_repeated(own):
    steps = few_steps(RunSource(None, None, own(), altered=Altered(repeats_batch=True)), evidence(own_loader=True))
    assert len(steps) >= 2
    assert len({step.get("requests") for step in steps}) == 1, "nothing is read beside"


def test_the_training_alone_bounds_what_a_diagnosis_promises_of_reading(config):
    """A batch is read in 160 ms by a process; the module takes 50."""
    data = DataLoader(SlowToRead(), batch_size=4, num_workers=1, persistent_workers=True)
    trial = kit.fit(config(max_steps=12, warmup_steps=2), lambda: TinyModule(seconds=0.05), data).wait()
    found = kit.studies.diagnose(trial, peaks=False)
    alone, step = found.evidence.alone_seconds, found.evidence.step_seconds
    assert 0.05 <= alone < step / 2
    of_reading = [one for one in found.findings if one.rule.part == "wait"]
    assert of_reading
    for finding in of_reading:
        assert "training alone takes" in finding.sentence
        assert finding.predicted_gain is None or finding.predicted_gain <= step / alone
    opened = RunSource.of([trial])
    quiet = replace(found.evidence, shares=shares(wait=0.01), queued_fraction=0.0)
    assert training_alone(quiet, opened) == (None, [])
    beside, _ = training_alone(replace(quiet, queued_fraction=0.5), opened)
    assert beside >= 0.05, "also where it waits for cores beside its loader"
    own, _ = training_alone(replace(found.evidence, workers=0), opened)
    assert own >= 0.05, "also where the training thread reads"


def test_a_module_that_takes_the_loader_itself_is_a_note(config):
    class Taking(TinyModule):
        def training_step(self, dataloader_iter):
            batch, _, _ = next(dataloader_iter)
            return super().training_step(batch, 0)

    given = RunSource(Taking, DataLoader(SlowToRead(), batch_size=4), config())
    alone, (note,) = training_alone(evidence(shares=shares(wait=0.5)), given)
    assert alone is None
    assert "takes the loader" in note


class Counted(TinyModule):
    """Logs what is in a batch, and what hooks have counted by then."""

    calls = 0

    def training_step(self, batch, batch_idx):
        self.log("seen", batch[0].sum() + self.calls)
        return super().training_step(batch, batch_idx)


class Counting(Callback):
    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        pl_module.calls += 1


class Hooked(Counted):
    def on_before_optimizer_step(self, optimizer):
        self.calls += 1


class Doubling(LightningDataModule):
    """Doubles each batch on its way to the module."""

    def train_dataloader(self):
        return ones()

    def on_after_batch_transfer(self, batch, dataloader_idx):
        return 2 * batch[0], batch[1]


def ones():
    return DataLoader(TensorDataset(torch.ones(64, 8), torch.ones(64, 1)), batch_size=4)


@pytest.mark.parametrize(
    ("name", "options", "seen"),
    [
        ("[Callback]Counting.on_train_batch_end", {"callbacks": [Counting()]}, 4 * 8 + 1),
        ("[LightningModule]Hooked.on_before_optimizer_step", {"module": Hooked}, 4 * 8 + 1),
        ("[LightningDataModule]Doubling.on_after_batch_transfer", {"data": Doubling}, 4 * 8),
    ],
)
def test_a_hook_is_called_once_and_then_left_out(config, name, options, seen):
    trial = kit.fit(config(max_steps=4, warmup_steps=1), **{"module": Counted, "data": ones(), **options}).wait()
    given = RunSource.of([trial])
    with_it, without = (few_steps(replace(given, altered=Altered(without_hook=one)), evidence()) for one in ("", name))
    assert {step["metrics"]["seen"] for step in without} == {seen}
    assert {step["metrics"]["seen"] for step in with_it} != {seen}


def test_a_slow_hook_gains_what_a_diagnosis_measured_without_it(config):
    class Slow(TinyModule):
        def on_before_optimizer_step(self, optimizer):
            time.sleep(0.2)

    trial = kit.fit(config(max_steps=6, warmup_steps=2), Slow, ones()).wait()
    found = kit.studies.diagnose(trial, peaks=False)
    assert slowest_hook(found.evidence)[0] == "[LightningModule]Slow.on_before_optimizer_step"
    low, high = found.evidence.measured_gains["slow hook"]
    assert low - 0.01 <= found["slow hook"].predicted_gain <= high + 0.01


class Logged(TinyModule):
    """Its logger takes most of a step."""

    def training_step(self, batch, batch_idx):
        self.logger.experiment.add_image("x", torch.ones(3, 1024, 1024), self.global_step)
        return super().training_step(batch, batch_idx)


def test_what_loggers_draw_is_left_out_to_measure_what_that_gains(config, tmp_path):
    logger = TensorBoardLogger(tmp_path)
    trial = kit.fit(config(max_steps=12, warmup_steps=2), lambda: Logged(seconds=0.01), ones(), logger=logger).wait()
    found = kit.studies.diagnose(trial, peaks=False)
    drawn = found["drawing or logging in the step"]
    assert drawing_hook(found.evidence) == ""
    low, high = found.evidence.measured_gains[drawn.name]
    assert low - 0.01 <= drawn.predicted_gain <= high + 0.01


def test_a_gain_of_a_short_trial_is_less_in_steps_that_also_log_and_validate():
    """A fifth is validation and two fifths are a logger's: twice as fast without them is 1 / 0.8 with them."""
    logged = host(lines=[line(package="tensorboard", fraction=0.4), line(package="matplotlib", fraction=0.1)])
    found = evidence(shares=shares(validation=0.2), hosts={0: logged})
    assert in_whole_steps((2.0, 2.0), evidence()) == pytest.approx((2, 2))
    assert in_whole_steps((2.0, 2.0), found) == pytest.approx((1.25, 1.25))
    assert in_whole_steps((2.0, 2.0), found, times=4) == pytest.approx([4 / (0.6 + 4 * 0.4 / 2)] * 2), "once a step"
    assert in_whole_steps((3.0, 6.0), evidence(), times=4) == pytest.approx((3, 4)), "no step is faster by more samples"


def test_a_hook_that_is_not_there_is_a_note_and_its_share_tells_the_gain(config):
    watched = {0: host(hooks={"[Callback]Gone.on_train_batch_end": 0.5})}
    given = RunSource(TinyModule, DataLoader(Endless(), batch_size=4), config())
    gains, (note,) = measured_gains(evidence(hosts=watched, work=None), given)
    assert gains == {}
    assert "leaving out [Callback]Gone.on_train_batch_end" in note
