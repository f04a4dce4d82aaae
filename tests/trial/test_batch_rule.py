"""Which batch size rules, asked of what nobody made for a test: in a fit, a prediction, a table and the panel alike."""

import functools

import pytest
import torch
from any_data import (
    LOADERS,
    Anything,
    batch_sampler,
    iterable,
    nested,
    plain,
    random_data,
    several,
    time_first,
    vectors,
)
from faulty import FaultyModule
from lightning.pytorch.demos.boring_classes import BoringDataModule, RandomDataset, RandomIterableDataset
from torch.utils.data import DataLoader
from waiting import PATIENCE_SECONDS

import kit
from kit.data.patches.module import PatchData
from kit.errors import KitWarning, TrialError
from kit.memory import recordings
from kit.memory.alongside import fit
from kit.testing import TinyData
from kit.trial.payload import Part, batch_rule
from kit.widgets.panel import panel

pytestmark = pytest.mark.usefixtures("no_predictions_left")
ASKED = 32
CARD = "A100-80GB"


@pytest.fixture(autouse=True)
def nothing_known():
    recordings.cache.clear()


@pytest.fixture
def asked(config):
    return config(max_steps=2, warmup_steps=0).replace({"loader.batch_size": ASKED})


def rows(**given):
    return kit.data.RowData(torch.zeros(64, 4), **given)


@pytest.mark.parametrize(
    ("data", "size", "by_config"),
    [
        (None, ASKED, True),
        (vectors(), ASKED, True),
        (RandomIterableDataset(8, 64), ASKED, True),
        (RandomDataset, ASKED, True),
        (PatchData, ASKED, True),
        (plain(), 4, False),
        (batch_sampler(), 6, False),
        (iterable(), 5, False),
        (DataLoader(vectors(), batch_size=None), None, False),
        (torch.zeros(4, 3, 2), None, False),
        (TinyData, 4, False),
        (functools.partial(TinyData, batch_size=9), 9, False),
        (functools.partial(kit.data.RowData, batch_size=9), 9, False),
        (TinyData(batch_size=7), 7, False),
        (rows(batch_size=5), 5, False),
        (BoringDataModule(), None, False),
        (plain, None, False),
        ("any_data:plain", None, False),
    ],
    ids=lambda given: getattr(given, "__name__", type(given).__name__),
)
def test_the_rule_of_each_kind_of_data(asked, data, size, by_config):
    rule = batch_rule(Part.of(data), asked)
    assert (rule.size, rule.by_config) == (size, by_config)
    assert bool(rule.note) is not by_config
    assert rule.is_worth_a_warning is (size not in (None, ASKED))


def test_rows_that_were_given_no_size_take_the_configs(asked):
    for data in (rows(), kit.data.RowData):
        assert batch_rule(Part.of(data), asked).note == ""


def test_a_size_that_is_the_configs_after_all_is_no_news(asked):
    assert batch_rule(Part.of(plain), asked).made(ASKED).note == ""
    assert batch_rule(Part.of(TinyData(batch_size=ASKED)), asked).note == ""


def test_the_default_of_a_config_is_noted_and_not_warned_of(config):
    rule = batch_rule(Part.of(plain()), config())
    assert f"batches of {LOADERS[plain]}" in rule.note
    assert "set loader.batch_size" not in rule.note, "nobody chose it"
    assert not rule.is_worth_a_warning


def says(text, size):
    return f"loader.batch_size is {ASKED}" in text and f"batches of {size}" in text


@pytest.mark.parametrize(
    "make", [plain, batch_sampler, iterable, nested, time_first, random_data], ids=lambda make: make.__name__
)
def test_all_four_say_before_anything_runs_that_the_size_of_a_loader_rules(asked, make):
    data, size = make(), LOADERS[make]
    with pytest.warns(KitWarning, match=f"batches of {size}"):
        trial = fit(asked, Anything, data)
    trial.poll()
    assert says(trial.warnings[0], size)
    assert trial.wait(PATIENCE_SECONDS).config.loader.batch_size == size
    with pytest.warns(KitWarning, match=f"batches of {size}"):
        found = kit.predict_memory(asked, Anything, data, device=CARD)
    assert found.batch_size == size
    assert says(str(found), size)
    with pytest.warns(KitWarning, match=f"batches of {size}"):
        table = kit.memory.what_if(asked, Anything, data, device=CARD, variations={"loader.batch_size": [size, 99]})
    assert {row.estimate.batch_size for row in table} == {size}
    assert says(table.given.reason, size)
    reasons = {row.changes["loader.batch_size"]: row.reason for row in table if row.changes}
    assert reasons[size] == ""
    assert "is 99" in reasons[99]
    assert says(panel(asked, Anything, data).form.hints["loader.batch_size"], size)


@pytest.mark.parametrize("make", [plain, several, BoringDataModule], ids=lambda make: make.__name__)
def test_what_only_a_loader_knows_is_said_as_soon_as_there_is_one(asked, make):
    size = LOADERS[make]
    trial = fit(asked, Anything, make)
    assert f"is {ASKED}" in repr(trial)
    (warning,) = trial.wait(PATIENCE_SECONDS).warnings
    assert says(warning, size)
    told = min(event["time"] for event in trial.events if event["kind"] == "warned")
    assert told < min(event["time"] for event in trial.steps)
    found = kit.predict_memory(asked, Anything, make, device=CARD)
    assert found.batch_size == size
    assert says(str(found), size)
    assert f"is {ASKED}" in panel(asked, Anything, make).form.hints["loader.batch_size"]


def test_a_data_set_is_read_in_the_configs_batches_by_all_four(asked):
    trial = fit(asked, Anything, vectors())
    assert trial.wait(PATIENCE_SECONDS).warnings == []
    assert {event["samples"] for event in trial.steps} == {ASKED}
    found = kit.predict_memory(asked, Anything, vectors(), device=CARD)
    table = kit.memory.what_if(asked, Anything, vectors(), device=CARD, variations={"loader.batch_size": [8]})
    assert found.batch_size == ASKED
    assert "loader.batch_size" not in str(found)
    assert sorted((row.estimate.batch_size, row.reason) for row in table) == [(8, ""), (ASKED, "")]
    assert f"sees {ASKED} samples" in panel(asked, Anything, vectors()).form.hints["loader.batch_size"]


def test_advice_when_memory_runs_out_speaks_of_the_batch_that_ran(config):
    faulty = functools.partial(FaultyModule, {(0, 2): "device_oom"})
    trial = fit(config(max_steps=3), faulty, TinyData(batch_size=6))
    with pytest.raises(TrialError, match="batches of 3 from your TinyData"):
        trial.wait(PATIENCE_SECONDS)
