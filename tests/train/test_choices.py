import inspect
import subprocess
import sys

import pytest
from lightning.pytorch import Trainer
from lightning.pytorch.plugins.environments import LightningEnvironment
from lightning.pytorch.plugins.io import AsyncCheckpointIO

from kit.config import Config
from kit.errors import ConfigError
from kit.train.choices import (
    PASSED,
    REFUSED,
    SAID_BY_CONFIG,
    explain_attention,
    explain_batch,
    explain_strategy,
    global_batch,
    trainer_flags,
)


@pytest.mark.parametrize(
    ("strategy", "words"),
    [
        ("none", ("whole model", "ddp when", "fsdp when")),
        ("ddp", ("full copy", "slice of")),
        ("fsdp", ("sharded", "2 replicas", "sharded over 4")),
        ("fsdp:2:4", ("2 replicas × 4 devices each = 8 devices", "1/4 of a model")),
        ("fsdp:1:2", ("1 replica × 2 devices each = 2 devices", "fsdp:2:4 on 8 devices")),
        ("fsdp:3:1", ("3 replicas × 1 device each = 3 devices", "a whole model")),
    ],
)
def test_each_strategy_says_what_a_device_holds(strategy, words):
    text = explain_strategy(strategy)
    for part in words:
        assert part in text


def of(devices, **more):
    strategy = "ddp" if devices > 1 else "none"
    return Config.make({"hardware": {"devices": devices, "strategy": strategy}, **more})


def test_a_step_sees_batch_times_devices_times_accumulation():
    config = of(4, loader={"batch_size": 32}, levers={"accumulate_grad_batches": 2})
    assert global_batch(config, 4) == 256
    assert "256 samples: 32 a device × 4 devices × 2 accumulated" in explain_batch(config, 4)


def test_four_devices_instead_of_one_take_four_times_the_learning_rate():
    config = of(4, loader={"batch_size": 32})
    text = explain_batch(config, 4)
    assert "4 times the 32" in text
    assert "linear scaling" in text
    assert "4 times the learning" in text
    known = config.replace({"model.arguments": {"learning_rate": 0.0003}})
    assert "0.0012 instead of 0.0003" in explain_batch(known, 4)


def test_nothing_is_said_of_the_rate_while_the_step_sees_as_much_as_before():
    assert "learning rate" not in explain_batch(of(1), 1)
    halved = of(2, loader={"batch_size": 8})
    assert "learning rate" not in explain_batch(halved, 2, before=(of(1, loader={"batch_size": 16}), 1))


def test_explaining_needs_no_torch():
    code = "import sys, kit.train.choices; print('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout.strip() == "False"


def test_the_kernels_of_attention_that_are_here_are_said():
    text = explain_attention("cpu", "auto")
    assert "math and flash" in text
    assert "efficient and cudnn" in text
    assert explain_attention("cpu", "cudnn").endswith("so torch chooses")
    assert "which ran" in explain_attention("gpu", "cudnn")


# -- arguments of the Trainer


def test_every_argument_of_the_trainer_is_in_one_part_of_the_table():
    parts = [*SAID_BY_CONFIG, *REFUSED, *PASSED]
    assert sorted(parts) == sorted(set(inspect.signature(Trainer.__init__).parameters) - {"self"})
    assert set(SAID_BY_CONFIG.values()) <= {info.path for info in Config.fields()}


@pytest.mark.parametrize("name", [*SAID_BY_CONFIG, *REFUSED, "ckpt_path", "resume_from_checkpoint"])
def test_an_argument_that_a_trial_does_not_take_is_refused_with_what_says_it(name):
    with pytest.raises(ConfigError, match=SAID_BY_CONFIG.get(name) or "trial|kit.fit") as caught:
        trainer_flags({name: 77}, Config())
    assert caught.value.problems[0].path == f"trainer.{name}"


def test_what_says_nothing_or_what_the_config_says_is_passed_over():
    given = {"devices": "auto", "profiler": None, "barebones": False, "accumulate_grad_batches": 1, "max_epochs": 1}
    assert trainer_flags({**given, "limit_val_batches": 3}, Config()) == {"limit_val_batches": 3}


def test_gradients_are_clipped_by_value_where_the_config_clips_no_norm():
    by_value = {"gradient_clip_val": 0.5, "gradient_clip_algorithm": "value"}
    assert trainer_flags(by_value, Config()) == by_value
    for config, manual in ((Config.make({"training": {"gradient_clip_norm": 1.0}}), False), (Config(), True)):
        with pytest.raises(ConfigError, match="gradient_clip_norm"):
            trainer_flags(by_value, config, manual)


def test_a_plugin_that_says_where_the_ranks_are_is_refused():
    with pytest.raises(ConfigError, match="LightningEnvironment"):
        trainer_flags({"plugins": [AsyncCheckpointIO(), LightningEnvironment()]}, Config())
