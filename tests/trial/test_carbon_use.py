"""codecarbon as a second opinion on energy: refused with the way out where it is not there, an event where it is."""

import importlib.util

import pytest

from kit.config import Config
from kit.errors import ConfigError
from kit.memory.alongside import fit
from kit.studies.scaling.predict import predict_run
from kit.testing import TinyData, TinyModule

INSTALLED = importlib.util.find_spec("codecarbon") is not None


@pytest.fixture
def config(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    trial = {"trial.max_steps": 8, "trial.warmup_steps": 1, "trial.codecarbon": "DEU"}
    return Config().replace({**trial, "hardware.accelerator": "cpu", "trial.predict_memory": False})


@pytest.mark.skipif(INSTALLED, reason="codecarbon is installed")
def test_without_codecarbon_a_trial_that_asks_for_it_is_refused_before_it_starts(config, tmp_path):
    with pytest.raises(ConfigError, match=r"trial.codecarbon: DEU: .*not installed .*pip install"):
        fit(config, TinyModule, TinyData)
    assert not (tmp_path / "runs").exists()


def test_a_country_is_three_capital_letters():
    with pytest.raises(ConfigError, match=r"trial.codecarbon"):
        Config().replace({"trial.codecarbon": "Germany"})


@pytest.mark.skipif(not INSTALLED, reason="codecarbon is not installed (pip install 'kit[co2]')")
class TestInstalled:
    def test_energy_and_grams_are_told_beside_the_assumptions(self, config):
        trial = fit(config.replace({"model.arguments": {"seconds": 0.2}}), TinyModule, TinyData).wait()
        found = trial.event("carbon_estimated")
        assert found["country"] == "Germany"
        assert found["joules"] == pytest.approx(sum(found[f"{part}_joules"] for part in ("cpu", "gpu", "ram")))
        assert 100 < found["grams"] / found["joules"] * 3.6e6 < 1000  # per kWh
        reasons = predict_run(trial, devices=[1], epochs=10, samples_per_epoch=1000, memory=False).reasons
        assert [text for text in reasons if text.startswith("codecarbon 3") and "Germany's grid" in text]
        assert [text for text in reasons if "Xeon" in text]

    def test_a_country_without_a_grid_is_refused(self, config):
        with pytest.raises(ConfigError, match="grid of XXX"):
            fit(config.replace({"trial.codecarbon": "XXX"}), TinyModule, TinyData)
