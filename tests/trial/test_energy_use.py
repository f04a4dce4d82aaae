"""The energy of a rank's own GPU: what two looks at its counter tell, and when nothing is said."""

import sys
from types import SimpleNamespace

import pytest
import torch
from fake_nvml import FakeNvml, card

import kit
from kit.config import Config
from kit.events import EventReader, EventWriter
from kit.testing import TinyData, TinyModule
from kit.trial import meters
from kit.trial.context import Context
from kit.trial.meters import LEAST_SECONDS, EnergyUse

COUNTER = "nvmlDeviceGetTotalEnergyConsumption"


class Fit:
    """Batches of a second rank's fit, whose card has taken `watts`."""

    def __init__(self, folder, monkeypatch, device="cuda:1", cards=None):
        self.cards = [card(nvmlDeviceGetUUID="GPU-a", **{COUNTER: 0}), card(nvmlDeviceGetUUID="GPU-b", **{COUNTER: 0})]
        self.cards = self.cards if cards is None else cards
        monkeypatch.setitem(sys.modules, "pynvml", FakeNvml(self.cards))
        monkeypatch.setattr(meters, "time", SimpleNamespace(perf_counter=lambda: self.seconds))
        self.folder, self.seconds = folder, 100.0
        config = Config().replace({"trial.warmup_steps": 2})
        environment = {"devices": ["GPU-a", "GPU-b"]}
        self.writer = EventWriter(folder / "events.1.jsonl", 1)
        self.use = EnergyUse(Context(None, config, environment, 1, self.writer, None))
        strategy = SimpleNamespace(root_device=torch.device(device))
        self.trainer = SimpleNamespace(strategy=strategy, global_step=0)

    def steps(self, seconds, watts=(50, 400)):
        for step, one in enumerate(seconds):
            self.trainer.global_step = step
            self.use.on_train_batch_start(self.trainer, None, None, step)
            self.seconds += one
            for of_card, taken in zip(self.cards, watts, strict=False):
                if COUNTER in of_card:
                    of_card[COUNTER] += int(1000 * taken * one)
        return self

    def end(self):
        self.use.on_train_end(self.trainer, None)
        self.use.on_exception(self.trainer, None, KeyboardInterrupt())
        self.writer.close()
        return EventReader(self.folder).read()


def test_joules_and_seconds_after_the_warm_up_are_those_of_the_ranks_own_card(tmp_path, monkeypatch):
    (event,) = Fit(tmp_path, monkeypatch).steps([9.0, 9.0, 1.0, 1.5]).end()
    assert (event["kind"], event["rank"]) == ("energy_measured", 1)
    assert event["seconds"] == pytest.approx(2.5)
    assert event["joules"] == pytest.approx(2.5 * 400)


def test_nothing_is_said_of_too_short_a_time(tmp_path, monkeypatch):
    assert Fit(tmp_path, monkeypatch).steps([9.0, 9.0, LEAST_SECONDS / 4, LEAST_SECONDS / 4]).end() == []


def test_nothing_is_said_when_all_was_warm_up(tmp_path, monkeypatch):
    assert Fit(tmp_path, monkeypatch).steps([9.0, 9.0]).end() == []


@pytest.mark.parametrize("cards", [[], [card(nvmlDeviceGetUUID="GPU-a", **{COUNTER: 1}), card()]])
def test_nothing_is_said_of_a_card_that_is_not_there_or_has_no_counter(tmp_path, monkeypatch, cards):
    assert Fit(tmp_path, monkeypatch, cards=cards).steps([2.0] * 4).end() == []


def test_nothing_is_said_when_the_card_is_lost_meanwhile(tmp_path, monkeypatch):
    fit = Fit(tmp_path, monkeypatch).steps([2.0] * 4)
    fit.cards[1][COUNTER] = "lost"
    assert fit.end() == []


def test_a_rank_on_the_cpu_asks_no_card(tmp_path, monkeypatch):
    assert Fit(tmp_path, monkeypatch, device="cpu").steps([2.0] * 4).end() == []


def test_a_trial_on_the_cpu_writes_no_energy(config):
    trial = kit.fit(config(), TinyModule(), TinyData()).wait()
    assert trial.event("cpu_used") is not None
    assert trial.event("energy_measured") is None
