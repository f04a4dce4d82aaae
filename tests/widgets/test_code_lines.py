"""Every line of code that a widget shows runs in a notebook, and does what the widget does."""

import html
import re
from pathlib import Path

import pytest
from waiting import PATIENCE_SECONDS

import kit
from kit.config import Config
from kit.errors import ConfigError
from kit.studies.diagnosis.diagnose import Diagnosis
from kit.widgets.controls import make_control, read_control, write_control
from kit.widgets.files import FORMATS
from kit.widgets.live import widgets_in

WAIT = PATIENCE_SECONDS
TINY = Path(__file__).parents[1] / "data" / "tiny_source.py"


@pytest.fixture
def config(tmp_path, monkeypatch):
    (tmp_path / "pyproject.toml").touch()
    monkeypatch.chdir(tmp_path)
    return Config().replace(
        {
            "name": "lines", "hardware.accelerator": "cpu", "hardware.threads_per_rank": 1,
            "data.source": f"{TINY}:Tiny", "data.arguments": {"time": 16, "lat": 32, "lon": 32},
            "data.url": "data/tiny.zarr", "data.patch": {"time": 1, "lat": 8, "lon": 8},
            "model.target": "kit.testing:TinyModule", "loader.batch_size": 4,
            "trial.max_steps": 4, "trial.warmup_steps": 1,
        }
    )  # fmt: skip


def lines(panel):
    """Every line that some widget of a panel calls the same in code."""
    texts = (part.value for part in widgets_in(panel.ui) if isinstance(getattr(part, "value", None), str))
    found = (re.findall(r"same in code[^<]*<(?:pre|code)[^>]*>(.*?)</", text, re.DOTALL) for text in texts)
    return [html.unescape(line) for each in found for line in each]


def run(line, config, **names):
    """What a line gives in a notebook that has kit and the config that the panel was made of."""
    return eval(line, {"kit": kit, "config": config, **names})


@pytest.mark.slow
def test_the_lines_of_a_panel_fit_diagnose_and_export(config):
    data = "kit.testing:TinyData"
    panel = kit.panel(config, data=data)
    panel.form.controls["loader.batch_size"].value = 2
    panel.fit()
    panel.wait(WAIT)
    found = panel.diagnose()
    panel.wait(WAIT)
    diagnose, export, fit = lines(panel)
    trial = run(fit, config, data=data)
    trial.wait()
    assert (trial.state, trial.asked) == ("COMPLETE", panel.config)
    again = run(diagnose, config)
    assert isinstance(again, Diagnosis)
    assert [finding.name for finding in again.findings] == [finding.name for finding in found.findings]
    for finding in (finding for finding in found.findings if finding.change):
        assert run(finding.code, panel.config) == panel.config.replace(finding.change)
    run(export, config)
    for name, ending in FORMATS.items():
        panel.exporting.format.value = name
        run(lines(panel)[1], config)
        assert (Path.cwd() / f"lines.{ending}").exists()


def test_the_line_of_the_chunk_panel_plans_what_is_shown(config):
    panel = kit.data.chunk_panel(config)
    panel.form.controls["data.patch"].value = "time: 2, lat: 16, lon: 16"
    panel.wait(WAIT)
    (line,) = lines(panel)
    assert run(line, config).chunk == panel.plan.chunk


def test_the_lines_of_the_build_panel_plan_build_and_advise(config):
    panel = kit.data.build_panel(config)
    panel.form.controls["build.threads"].value = 1
    panel.machine.cores.value = 20
    panel.wait(WAIT)
    build, advise = lines(panel)
    assert "kit.data.plan_build" in panel.code.value
    assert run(build.replace("kit.build", "kit.data.plan_build"), config).threads == panel.plan.threads
    run(build, config)
    assert kit.open_dataset(panel.config).arrays
    assert run(advise, config).cores == 20


@pytest.mark.parametrize("data", [None, "kit.testing:TinyData"])
def test_the_line_of_the_memory_panel_predicts_what_is_shown(config, data):
    if data is None:
        kit.build(config)
        unet = {"variables": 2, "width": 4, "depth": 1}
        patch = {"time": 2, "lat": 8, "lon": 8}
        config = config.replace({"model.target": "kit.models:UNet", "model.arguments": unet, "data.patch": patch})
    panel = kit.memory.panel(config, data=data, device="T4", cards=[]).wait(WAIT)
    (line,) = lines(panel)
    assert run(line, config, data=data).device_reserved_bytes == panel.estimate.device_reserved_bytes


OTHER = {
    "int": 3, "float": 0.5, "text": "a 'b' \"c\"", "sizes": {"x": 2}, "names": ["u", "v"], "counts": [1, 2],
    "devices": [0, 1], "layout": {"x": 4}, "arguments": {"a": [1, None, {"b": "c"}]},
}  # fmt: skip


def test_a_change_of_any_field_is_written_as_code_that_makes_it():
    base, changed = Config(), 0
    for info in Config.fields():
        value = not info.default if info.kind == "bool" else OTHER.get(info.kind)
        value = info.choices[-1] if info.kind in ("choice", "text") and info.choices else value
        control = make_control(info, base.get(info.path))
        write_control(info, control, value)
        try:
            config = base.replace({info.path: read_control(info, control)})
        except ConfigError:
            continue  # a path or a name that is none, or what does not go with the rest
        changed += config != base
        assert run(config.as_code(against=base), base) == config
        assert run(config.as_code(), base) == config
    assert changed > 100
