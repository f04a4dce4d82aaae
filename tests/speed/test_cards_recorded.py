"""Many cards, strategies and numbers of devices are asked about, and few dry runs made."""

import logging

import pytest
import torch

import kit
from kit.memory import recordings
from kit.memory.prediction import predict_memory
from kit.speed.prediction import predict_speed
from kit.testing import TinyData, TinyModule

CARDS = ("V100-16GB", "A100-40GB", "A100-80GB", "RTX-4090-24GB", "H100-80GB")


class Attending(TinyModule):
    """A transformer layer of torch, whose attention takes another kernel on Hopper."""

    def __init__(self):
        super().__init__()
        self.encoder = torch.nn.TransformerEncoderLayer(8, 1, 16, dropout=0.0, batch_first=True)

    def training_step(self, batch, batch_idx):
        x, y = batch
        return super().training_step((self.encoder(x[None])[0], y), batch_idx)


@pytest.fixture
def dry_runs(monkeypatch):
    """The capabilities that were recorded, in turn."""
    made = []

    class Counted(recordings.PredictionJob):
        def __init__(self, query, *args):
            made.append(query.capability)
            super().__init__(query, *args)

    monkeypatch.setattr(recordings, "PredictionJob", Counted)
    recordings.cache.clear()
    return made


class Asking(TinyModule):
    def training_step(self, batch, batch_idx):
        return super().training_step(batch, batch_idx) / self.trainer.world_size


def settings(precision, strategy="none", devices=1):
    return kit.Config.make({"hardware": {"precision": precision, "strategy": strategy, "devices": devices}})


def test_five_cards_and_their_memory_cost_one_dry_run(dry_runs):
    speeds = {card: predict_speed(settings("32-true"), TinyModule, TinyData, device=card) for card in CARDS}
    assert len(dry_runs) == 1
    memory = predict_memory(settings("32-true"), TinyModule, TinyData, device="T4-16GB")
    assert len(dry_runs) == 1
    assert tuple(memory.recording.facts["capability"]) == (7, 5)
    assert [speed.device for speed in speeds.values()] == list(CARDS)
    busy = {card: speed.time.busy_seconds for card, speed in speeds.items()}
    assert busy["V100-16GB"] >= busy["A100-40GB"] >= busy["A100-80GB"]


def test_cards_whose_attention_differs_are_recorded_anew_and_no_others(dry_runs):
    speeds = {card: predict_speed(settings("bf16-mixed"), Attending, TinyData, device=card) for card in CARDS[1:]}
    assert dry_runs == [(8, 0), (9, 0)]
    kernels = {
        card: {call.name for call in speed.time.step.calls if call.name.startswith("_scaled_dot_product")}
        for card, speed in speeds.items()
    }
    assert kernels["RTX-4090-24GB"] == kernels["A100-40GB"] != kernels["H100-80GB"]
    assert any("cudnn" in name for name in kernels["H100-80GB"])


def test_a_format_that_auto_becomes_on_an_old_card_is_recorded_anew(dry_runs):
    precisions = [
        predict_speed(settings("auto"), TinyModule, TinyData, device=card).time.step.facts["precision"]
        for card in ("A100-40GB", "H100-80GB", "T4-16GB")
    ]
    assert precisions == ["bf16-mixed", "bf16-mixed", "16-mixed"]
    assert dry_runs == [(8, 0), (7, 5)]


SHARED = ("ddp", 2), ("ddp", 16), ("fsdp", 8), ("fsdp:2:4", 8), ("fsdp", 64)


def test_strategies_and_numbers_of_devices_cost_the_dry_run_of_one(dry_runs):
    speeds = [
        predict_speed(settings("32-true", *shared), TinyModule, TinyData, device="A100-40GB") for shared in SHARED
    ]
    alone = predict_speed(settings("32-true"), TinyModule, TinyData, device="H100-80GB")
    assert len(dry_runs) == 1
    assert [(speed.traffic.strategy, speed.devices) for speed in speeds] == [*SHARED]
    assert [speed.config.hardware.strategy for speed in speeds] == [strategy for strategy, _ in SHARED]
    assert all("step of one device" in " ".join(speed.reasons) for speed in speeds)
    assert "step of one device" not in " ".join(alone.reasons)
    operators = [len(speed.time.step.call) for speed in speeds]
    assert operators[0] == operators[1] > len(alone.time.step.call)
    assert operators[2] == operators[4]


def test_a_step_that_asks_how_many_devices_there_are_is_recorded_for_each_and_says_so(dry_runs):
    speed = predict_speed(settings("32-true", "fsdp", 8), Asking, TinyData, device="A100-40GB")
    assert len(dry_runs) == 2
    assert "asks how many devices" in " ".join(speed.reasons)
    assert any(call.operator.startswith("fsdp::") for call in speed.time.step.calls)


class Printing(TinyModule):
    """Rank 0 alone prints, as the loggers of diffusers have it."""

    def training_step(self, batch, batch_idx):
        logger = logging.Logger("printing")
        logger.addFilter(lambda _record: not torch.distributed.is_initialized() or torch.distributed.get_rank() == 0)
        logger.debug("a step")
        return super().training_step(batch, batch_idx)


def test_a_step_that_asks_only_to_print_costs_no_dry_run_more(dry_runs):
    speed = predict_speed(settings("32-true", "fsdp", 8), Printing, TinyData, device="A100-40GB")
    assert len(dry_runs) == 1
    assert not any("asks how many devices" in reason for reason in speed.reasons)


def test_what_memory_recorded_of_a_strategy_serves_its_speed(dry_runs):
    config = settings("32-true", "fsdp", 4)
    predict_memory(config, TinyModule, TinyData, device="A100-40GB")
    speed = predict_speed(config, TinyModule, TinyData, device="A100-40GB")
    assert len(dry_runs) == 1
    assert speed.time.step.facts["world_size"] == 4
