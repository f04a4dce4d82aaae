import subprocess
import sys

import pytest

from kit.config import Config
from kit.train.choices import explain_attention, explain_batch, explain_strategy, global_batch


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
