import math
import re

import pytest
import torch
from faulty import FaultyModule
from hypothesis import given
from hypothesis import strategies as st
from lightning.pytorch import Callback
from torch.utils.data import DataLoader, TensorDataset

import kit
from kit.config import Config
from kit.errors import ConfigError, TrialError
from kit.studies.repeats import RunSource, Side, Tried
from kit.testing import TinyData, TinyModule
from kit.trial.submit import Altered


def tried(before, after, note=""):
    sides = [
        Side(name=name, config=Config(), samples_per_second=tuple(speeds), run_directories=(), note=note)
        for name, speeds in (("before", before), ("after", after))
    ]
    return Tried(before=sides[0], after=sides[1], predicted=None)


@pytest.mark.parametrize(
    ("before", "after", "verdict"),
    [
        ([100, 102, 98], [150, 149, 152], "helps"),
        ([100, 102, 98], [70, 71, 69], "hurts"),
        ([100, 102, 98], [101, 103, 99], "within the noise"),
        ([100, 140, 80], [120, 90, 160], "within the noise"),
        ([100, 101], [100.5, 300], "within the noise"),
    ],
)
def test_a_change_helps_only_beyond_the_noise_of_repeated_runs(before, after, verdict):
    assert tried(before, after).verdict == verdict


def test_a_difference_within_the_noise_is_said_not_to_help():
    text = tried([100, 140, 80], [120, 90, 160]).sentence
    assert re.search(r"No difference .*[0-9]+%", text)
    assert "noise" in text


def test_runs_that_differ_too_much_to_compare_name_no_difference_that_would_have_been_seen():
    text = tried([1.0, 9.0], [2.0, 8.0]).sentence
    assert "differ too much" in text
    assert "%" not in text


def test_the_interval_is_students_on_the_logarithms():
    """Two and two runs: pooled variance of ln 2 and ln 2 about their means, t(2) = 4.303."""
    found = tried([1.0, 4.0], [2.0, 8.0])
    half = 4.303 * math.sqrt(2 * math.log(2) ** 2)
    assert found.gain == pytest.approx(2)
    assert found.noise == pytest.approx((2 * math.exp(-half), 2 * math.exp(half)))


speeds = st.lists(st.floats(1, 1000), min_size=2, max_size=5)


@given(before=speeds, after=speeds, factor=st.floats(0.01, 100))
def test_the_verdict_does_not_depend_on_the_unit_and_turns_round_with_the_sides(before, after, factor):
    found, back = tried(before, after), tried(after, before)
    low, high = found.noise
    assert low <= found.gain * (1 + 1e-9)
    assert high >= found.gain * (1 - 1e-9)
    scaled = tried([value * factor for value in before], [value * factor for value in after])
    assert scaled.noise == pytest.approx(found.noise, rel=1e-6)
    assert back.noise == pytest.approx((1 / high, 1 / low), rel=1e-6)


def slow():
    return TinyModule(seconds=0.03)


def slower():
    """So much that whatever else a machine does is little beside either."""
    return TinyModule(seconds=0.3)


@pytest.mark.slow
def test_a_faster_module_is_seen_to_help_and_its_runs_are_kept(config):
    found = kit.studies.try_change(config(max_steps=5), slower, TinyData, new_module=slow, repeats=2)
    assert found.verdict == "helps"
    assert found.gain > 3
    for side in (found.before, found.after):
        assert len(side.samples_per_second) == len(side.run_directories) == 2
    assert "helps" in repr(found)
    assert "before" in found._repr_html_()


@pytest.mark.slow
def test_a_trial_is_run_again_with_what_it_was_given(config):
    trial = kit.fit(config(max_steps=4), slow, TinyData).wait()
    found = kit.studies.try_change(trial, change={"trial.max_steps": 6}, repeats=2)
    assert [len(kit.Trial.open(folder).steps) for folder in found.after.run_directories] == [6, 6]
    assert [len(kit.Trial.open(folder).steps) for folder in found.before.run_directories] == [4, 4]
    assert found.before.mean < 1.2 * 4 / 0.03, "the module of the trial, not another one"
    assert "trial.max_steps: 4 → 6" in found.sentences


def test_batches_of_the_callers_own_data_are_made_larger_at_once_and_for_an_earlier_trial(config):
    data = DataLoader(TensorDataset(torch.rand(64, 8), torch.rand(64, 1)), batch_size=2)
    first = RunSource(TinyModule, data, config(max_steps=3), altered=Altered(6)).start(config(max_steps=3)).wait()
    second = RunSource(None, None, first.config, first, altered=Altered(5)).start(first.config).wait()
    assert [{step["samples"] for step in trial.steps} for trial in (first, second)] == [{6}, {5}]


@pytest.mark.slow
def test_other_data_takes_the_place_of_what_a_trial_was_given_and_the_rest_stays(config):
    samples = TensorDataset(torch.rand(64, 8), torch.rand(64, 1))
    trial = kit.fit(config(max_steps=3), slow, DataLoader(samples, batch_size=2), callbacks=Told()).wait()
    found = kit.studies.try_change(trial, new_data=DataLoader(samples, batch_size=4), repeats=2)
    for side, size in ((found.before, 2), (found.after, 4)):
        for folder in side.run_directories:
            run = kit.Trial.open(folder)
            assert {step["samples"] for step in run.steps} == {size}
            assert "told of a batch" in run.paths.log(0).read_text()
    refused = kit.studies.try_change(trial, new_data=7, repeats=2)
    assert refused.verdict == "did not run"
    assert "int" in refused.sentence


class Told(Callback):
    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        print("told of a batch")


def broken():
    return FaultyModule({(0, 2): "raise"})


def test_a_change_that_fails_is_told_and_one_failure_is_enough(config):
    found = kit.studies.try_change(config(max_steps=4), TinyModule, TinyData, new_module=broken, repeats=3)
    assert found.verdict == "did not run"
    assert "a scripted fault" in found.sentence
    assert found.after.run_directories == ()


def test_what_fails_before_the_change_is_raised(config):
    with pytest.raises(TrialError, match="a scripted fault"):
        kit.studies.try_change(config(max_steps=4), broken, TinyData, change={"loader.pin_memory": True}, repeats=2)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"change": {"loader.batch_size": 2}, "repeats": 1}, "too few"),
        ({}, "nothing is changed"),
        ({"change": {"loader.batchsize": 2}}, "mean loader.batch_size"),
        ({"new_batch_size": 0}, "a batch of 0 is empty"),
        ({"module": TinyModule(), "change": {"model.arguments.width": 2}}, "model.arguments: .*made without"),
        ({"data": TinyData(), "change": {"data.arguments.batch_size": 2}}, "data.arguments: .*made without"),
    ],
)
def test_what_says_nothing_is_refused_before_anything_runs(config, options, words):
    with pytest.raises(ConfigError, match=words):
        kit.studies.try_change(config(), **{"module": TinyModule, "data": TinyData, **options})


def test_arguments_that_are_no_trial_are_refused(config):
    with pytest.raises(ConfigError, match="a trial.* module and data"):
        kit.studies.try_change(TinyModule, config(), change={"loader.batch_size": 2})


def test_a_run_without_its_payload_cannot_be_run_again(config):
    trial = kit.fit(config(max_steps=4), TinyModule, TinyData).wait()
    trial.paths.payload.unlink()
    with pytest.raises(TrialError, match="run again"):
        kit.studies.try_change(trial, change={"trial.max_steps": 6}, repeats=2)
