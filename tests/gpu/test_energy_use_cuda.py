"""The energy that a real card says a trial took."""

import pytest

import kit
from kit.config import Config
from kit.machine.gpus import read_joules
from kit.machine.machine import hardware
from kit.testing import TinyData, TinyModule

COUNTED = [gpu.uuid for gpu in hardware().gpus if read_joules(gpu.uuid) is not None]

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not COUNTED, reason="needs an NVIDIA GPU that counts its energy")]


def test_a_trial_takes_the_watts_of_a_card(tmp_path):
    trial = {"max_steps": 60, "warmup_steps": 5, "folder": str(tmp_path), "predict_memory": False}
    config = Config.make({"hardware": {"accelerator": "gpu", "devices": 1}, "trial": trial})
    event = kit.fit(config, TinyModule(seconds=0.05), TinyData()).wait().event("energy_measured")
    assert event["seconds"] > 2
    assert 3 < event["joules"] / event["seconds"] < 2000
