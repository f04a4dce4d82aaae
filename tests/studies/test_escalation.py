"""The escalation: the order of its steps, what each sets, and targets that make no sense."""

import pytest

from kit.config import Config
from kit.errors import ConfigError, PlanError
from kit.studies.scaling.escalation import (
    CHECKPOINTING_TIME,
    PART_TIME,
    RunTarget,
    escalation_steps,
    parts_of,
    target_from,
)

PLAIN = Config()


def digits(config, devices):
    return [
        (step.strategy, step.most_parts > 8, step.eight_bit, step.checkpointing)
        for step in escalation_steps(config, devices)
    ]


def test_steps_rise_by_the_dearest_change_in_them():
    found = digits(PLAIN, 1)
    assert found[:5] == [
        ("none", False, False, False),
        ("none", False, False, False),  # with gradients freed after the step, as in all that follow
        ("none", False, False, True),
        ("none", False, True, False),
        ("none", False, True, True),
    ]
    assert found == sorted(found)
    assert len(found) == 9
    steps = list(escalation_steps(PLAIN, 1))
    assert [step.zero_grad for step in steps] == [False, *[True] * 8]
    assert steps[0].changes() == {"hardware.strategy": "none", "hardware.devices": 1}
    assert steps[0].most_parts == 1
    assert not any(step.zero_grad for step in escalation_steps(PLAIN, 1, manual=True))


def test_sharding_comes_last_and_one_device_never_shards():
    found = digits(PLAIN, 4)
    assert [strategy for strategy, *_ in found] == ["ddp"] * 9 + ["fsdp"] * 8
    assert {strategy for strategy, *_ in digits(PLAIN, 1)} == {"none"}


def test_what_a_config_has_already_is_no_step_and_is_not_taken_back():
    config = PLAIN.replace({"levers.gradient_checkpointing": True, "levers.optimizer": "adamw-8bit"})
    assert {(eight_bit, again) for _, _, eight_bit, again in digits(config, 1)} == {(False, True)}
    sharded = PLAIN.replace({"hardware.strategy": "fsdp:2:2", "hardware.devices": 4})
    assert {strategy for strategy, *_ in digits(sharded, 4)} == {"fsdp:2:2"}
    assert {strategy for strategy, *_ in digits(sharded, 8)} == {"fsdp"}


def test_an_optimizer_with_less_state_is_left_alone():
    assert not any(eight_bit for _, _, eight_bit, _ in digits(PLAIN.replace({"levers.optimizer": "sgd"}), 1))


def test_every_step_makes_a_config_that_holds():
    for devices in (1, 2, 6):
        for step in escalation_steps(PLAIN, devices):
            config = PLAIN.replace(step.changes())
            assert config.levers.gradient_checkpointing == step.checkpointing


def test_time_is_that_of_the_changes_that_are_new():
    step = next(step for step in escalation_steps(PLAIN, 1) if step.checkpointing)
    assert step.time_factor(PLAIN, 1) == CHECKPOINTING_TIME
    assert step.time_factor(PLAIN, 4) == pytest.approx(CHECKPOINTING_TIME * PART_TIME**2)
    assert step.time_factor(PLAIN.replace({"levers.gradient_checkpointing": True}), 1) == 1


def test_parts_are_equal():
    assert parts_of(12, 8) == [1, 2, 3, 4, 6]
    assert parts_of(1, 8) == [1]
    assert parts_of(7, 1 << 30) == [1, 7]


def test_a_target_is_a_device_or_a_mapping():
    assert target_from("H100-80GB") == RunTarget(device="H100-80GB")
    assert target_from(1 << 30).device == 1 << 30
    found = target_from({"device": "T4", "devices": 8, "hours": 2, "money": 10, "prices": 3.0})
    assert found.limits == "2 h and 10.00"
    assert found.over(3600, 8) == pytest.approx(2.4)  # 24 of 10
    assert found.over(7200, 1) == pytest.approx(1.0)  # 2 h of 2 h
    assert not target_from("T4").limited


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"devcies": 2}, "did you mean 'devices'"),
        ({"devices": 0}, "0 devices"),
        ({"hours": -1}, "hours is -1"),
        ({"money": 5}, "has no price"),
        (3.5, "is no target"),
        (True, "is no target"),
    ],
)
def test_a_target_that_makes_no_sense_is_refused(wrong, words):
    with pytest.raises(PlanError, match=words):
        target_from(wrong)


def test_a_price_that_is_none_is_refused():
    with pytest.raises(ConfigError, match="no example"):
        target_from({"money": 5, "prices": "nobody"})
