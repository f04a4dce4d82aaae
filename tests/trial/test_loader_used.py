"""The record of a trial says how its loader stood: batch, processes, order; for loaders that nobody made for a test."""

import re

import pytest
import yaml
from any_data import LOADERS, Anything, Growing, plain, vectors
from slow_data import Waiting
from torch.utils.data import DataLoader
from waiting import PATIENCE_SECONDS

import kit
from kit.data.patches.module import PatchData
from kit.errors import KitWarning
from kit.memory.alongside import fit
from kit.records.row import row_of
from kit.records.trace import pipeline_info
from kit.testing import TinyModule
from kit.trial.payload import BatchRule
from kit.trial.settings_used import used_event, with_values
from kit.trial.trial import Trial
from kit.widgets.trial_view import notes_html

CALIBRATED = {
    "calibration.enabled": True, "calibration.candidate_workers": [2], "calibration.candidate_prefetch": [3],
    "calibration.max_measure_batches": 6, "calibration.timeout_seconds": 3.0,
}  # fmt: skip


def batches(trial):
    """What the row, the file, the trial in hand and the trial opened again say of the batch."""
    written = yaml.safe_load(trial.paths.config.read_text())["loader"]["batch_size"]
    return {row_of(trial.paths)["batch_size"], written, trial.config.loader.batch_size, again(trial).loader.batch_size}


def again(trial):
    return Trial.open(trial.run_directory).config


@pytest.mark.parametrize("make", LOADERS, ids=lambda make: make.__name__)
def test_the_batch_is_the_one_that_the_loader_gave(config, make):
    asked = config(measure_memory=False).replace({"levers.accumulate_grad_batches": 2, "trial.max_steps": 2})
    asked = asked.replace({"trial.warmup_steps": 0})
    trial = fit(asked, Anything, make).wait(PATIENCE_SECONDS)
    assert batches(trial) == {LOADERS[make]}
    assert row_of(trial.paths)["global_batch_size"] == 2 * LOADERS[make]
    assert {event["samples"] for event in trial.steps} == {LOADERS[make]}
    assert trial.asked == Trial.open(trial.run_directory).asked == asked


def test_two_ranks_make_the_global_batch(config):
    trial = fit(config(ranks=2), Anything, plain).wait(PATIENCE_SECONDS)
    row = row_of(trial.paths)
    assert (row["batch_size"], row["global_batch_size"]) == (4, 8)
    assert row["config"]["loader.num_workers"] == 1
    assert row["config"]["loader.shuffle"]  # Lightning's own sampler does, also where the caller's did not


def test_batches_that_grow_count_as_large_as_the_largest(config):
    def growing():
        return DataLoader(vectors(), batch_sampler=Growing(2, by=3))

    trial = fit(config(max_steps=4), Anything, growing).wait(PATIENCE_SECONDS)
    assert [event["samples"] for event in trial.steps] == [2, 5, 8, 11]
    assert batches(trial) == {11}


def test_a_last_batch_that_is_smaller_is_not_the_size(config):
    def short():
        return DataLoader(vectors(10), batch_size=4)

    trial = fit(config(max_steps=6), Anything, short).wait(PATIENCE_SECONDS)
    assert [event["samples"] for event in trial.steps] == [4, 4, 2, 4, 4, 2]
    assert batches(trial) == {4}


def test_kits_own_data_says_what_it_was_given(own):
    made = own(**{"loader.batch_size": 4, "loader.batches_ahead": 5})
    with pytest.warns(KitWarning, match="makes batches of 4"):
        trial = fit(own(), None, PatchData(made)).wait(PATIENCE_SECONDS)
    assert batches(trial) == {4}
    assert trial.config.loader.batches_ahead == again(trial).loader.batches_ahead == 5


def test_a_config_that_ran_as_it_was_asked_stays_as_it_was(own):
    asked = own()
    trial = fit(asked).wait(PATIENCE_SECONDS)
    assert trial.config == trial.asked == again(trial) == asked
    assert trial.event("loader_used", "used") == {}


# -- calibrated


@pytest.fixture
def calibrated(config):
    """A trial of another's loader, whose config asks for no process."""
    loader = DataLoader(Waiting(0), batch_size=2)
    return fit(config().replace(CALIBRATED), TinyModule, loader).wait(PATIENCE_SECONDS)


def test_a_calibrated_trial_shows_the_processes_that_it_ran_with(calibrated):
    trial = calibrated
    assert not [text for text in trial.warnings if "from writing" in text]  # nobody but kit has
    assert trial.asked.loader.num_workers == 0
    for found in (trial.config, again(trial), kit.Config.load(trial.paths.config)):
        assert (found.loader.num_workers, found.loader.prefetch_factor, found.loader.batch_size) == (2, 3, 2)
    assert row_of(trial.paths)["config"]["loader.num_workers"] == 2
    assert "num_workers 2, not 0" in repr(trial)
    assert "num_workers 2, not 0" in notes_html(trial)  # as the panel shows it
    for given in (trial.config, trial.asked):
        settings = dict(pipeline_info([*trial.events, *trial.steps], given).settings)
        assert settings == {"batch size": "2", "loader processes": "2 × 3 ahead"}


@pytest.mark.slow
def test_comparison_and_page_show_the_processes_that_ran(calibrated, config, tmp_path):
    plain = fit(config(), TinyModule, DataLoader(Waiting(0), batch_size=2)).wait(PATIENCE_SECONDS)
    assert kit.studies.compare(calibrated, plain).differences["loader.num_workers"] == (2, 0)
    page = kit.html_report([calibrated, plain], tmp_path / "page.html").read_text()
    assert re.search(r"loader\.num_workers.*?>2<.*?>0<", page, re.DOTALL)
    assert "num_workers: 2" in page


@pytest.mark.slow
def test_kits_own_loader_shows_what_calibration_chose(own):
    trial = fit(own(**CALIBRATED)).wait(PATIENCE_SECONDS)
    chosen = trial.event("calibrated", "changes")
    assert {path: again(trial).get(path) for path in chosen} == chosen
    assert {path: row_of(trial.paths)["config"][path] for path in chosen} == chosen


def test_what_no_config_can_hold_is_left_out_of_it():
    asked = kit.Config()
    found = with_values(asked, {"loader.num_workers": 3, "loader.prefetch_factor": 1000})
    assert (found.loader.num_workers, found.loader.prefetch_factor) == (3, asked.loader.prefetch_factor)
    assert with_values(asked, {}) == asked


@pytest.mark.parametrize("damage", [{"used": 3}, {"asked": None}, {"used": {"loader.num_workers": 3}}, {}])
def test_an_event_that_lost_a_part_changes_nothing(config, damage):
    trial = fit(config(max_steps=2, warmup_steps=0), TinyModule, DataLoader(Waiting(0), batch_size=2))
    done = trial.wait(PATIENCE_SECONDS).config
    event = {"kind": "loader_used", "rank": 0, "time": 0.0, **damage}
    trial._take([event])
    assert trial.config == done
    assert used_event([event]) is None


@pytest.mark.parametrize("kept", [None, 3, [], {}, {"asked": "many"}])
def test_a_rule_that_lost_a_part_is_none(kept):
    assert BatchRule.of_environment({"batch": kept}) is None
