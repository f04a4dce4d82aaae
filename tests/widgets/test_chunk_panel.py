"""The chunk panel without a kernel or a browser: edit, wait, read; plans, probes and measurements are real."""

import html
import re
from pathlib import Path

import pytest
from waiting import PATIENCE_SECONDS

import kit
from kit.config import Config
from kit.data.build.layout import plan_chunks
from kit.errors import ConfigError, PlanError, StoreError
from kit.widgets.chunk_panel import ChunkPanel, chunk_panel
from kit.widgets.parts import WAITING

WAIT = PATIENCE_SECONDS
TINY = Path(__file__).parents[1] / "data" / "tiny_source.py"


@pytest.fixture
def config(tmp_path):
    return Config.make(
        {
            "data": {
                "source": f"{TINY}:Tiny", "arguments": {"time": 16, "lat": 64, "lon": 64},
                "url": str(tmp_path / "tiny.zarr"), "patch": {"time": 1, "lat": 8, "lon": 8},
            },
            "loader": {"batch_size": 4},
        }
    )  # fmt: skip


@pytest.fixture
def panel(config):
    return chunk_panel(config).wait(WAIT)


def text(widget):
    return html.unescape(re.sub(r"<[^>]+>", " ", widget.value))


def test_it_shows_the_plan_of_the_config_with_its_reasons_and_the_code(panel, config):
    plan = plan_chunks(config)
    assert str(panel.plan) == str(plan)
    assert "samples/s predicted" in text(panel.view.headline)
    assert all(reason in text(panel.view.reasons) for reason in plan.reasons)
    assert panel.view.chart.value.count("<svg") == 1
    assert "kit.plan_chunks(config)" in text(panel.code)


def test_every_edit_plans_anew_and_the_code_line_gives_the_same_plan(panel, config):
    before = str(panel.plan)
    panel.form.controls["data.patch"].value = "time: 4, lat: 32, lon: 32"
    panel.form.controls["data.order"].value = "block"
    panel.wait(WAIT)
    assert str(panel.plan) != before
    code = text(panel.code).partition("the same in code: ")[2].strip().removesuffix("copy")
    assert str(eval(code, {"kit": kit, "config": config})) == str(panel.plan)


def test_automatic_sizes_say_what_they_came_to(panel):
    notes = panel.form._notes["chunking.chunk"]
    assert ", ".join(f"{name}: {size}" for name, size in zip(panel.plan.dims, panel.plan.chunk, strict=True)) in text(
        notes
    )


def test_setting_the_config_sets_every_control(panel, config):
    panel.config = config.replace({"chunking.latency_seconds": 0.5})
    assert panel.form.controls["chunking.latency_seconds"].value == "0.5"
    assert panel.wait(WAIT).plan.seconds_per_batch > 0.1


def test_what_does_not_fit_is_said_beside_the_chart_and_goes_with_the_next_edit(panel, config):
    panel.config = config.replace({"data.patch": {"time": 99}})
    with pytest.raises(PlanError):
        panel.wait(WAIT)
    assert "99" in text(panel.view.error)
    assert WAITING in panel.view.chart._dom_classes
    panel.config = config
    panel.wait(WAIT)
    assert panel.view.error.value == ""
    assert WAITING not in panel.view.chart._dom_classes


def test_an_edit_that_is_no_config_waits_beside_its_field(panel, config):
    panel.form.controls["loader.batch_size"].value = 8
    panel.form.controls["data.patch"].value = "time 1"
    with pytest.raises(ConfigError, match="time 1"):
        panel.wait(WAIT)
    assert panel.config.loader.batch_size == 8


def test_measuring_sets_a_diamond_and_a_ratio_beside_the_prediction_until_the_pattern_changes(panel, config):
    kit.build(config, progress=False)
    before = panel.view.chart.value
    (reading,) = panel.measure(seconds=0.05)
    panel.wait(WAIT)
    assert panel.view.chart.value != before
    assert "measured" in text(panel.view.table)
    assert f"{reading.ratio:.2f}" in text(panel.view.table)
    assert f">{reading.ratio:.2f}<" in panel.view.chart.value
    panel.config = panel.config.replace({"loader.batch_size": 8})
    panel.wait(WAIT)
    assert "measured" not in text(panel.view.table)
    panel.config = config
    panel.wait(WAIT)
    assert "measured" in text(panel.view.table)


@pytest.mark.slow
def test_probing_fills_the_network_with_figures_that_say_how_they_were_found(panel, config):
    kit.build(config, progress=False)
    found = panel.probe()
    panel.wait(WAIT)
    assert panel.config == found.apply(config)
    note = panel.form._notes["chunking.latency_seconds"]
    assert text(note).strip() == f"probed: {found.how['latency_mean_seconds']}"
    panel.config = panel.config.replace({"chunking.latency_seconds": 0.123})
    panel.wait(WAIT)
    assert text(note).strip() == ""


@pytest.mark.slow
def test_what_a_button_found_is_said_until_the_next_edit(panel, config):
    kit.build(config, progress=False)
    panel.buttons["measure"].click()
    panel.wait(WAIT)
    assert "samples/s measured" in text(panel.view.status)
    panel.form.controls["loader.batch_size"].value = 8
    panel.wait(WAIT)
    assert text(panel.view.status).strip() == ""


@pytest.mark.parametrize("name", ["probe", "measure"])
def test_a_click_on_a_store_that_is_not_there_returns_at_once_and_says_so(panel, name):
    panel.buttons[name].click()
    panel.wait(WAIT)
    assert "tiny.zarr" in text(panel.view.status)
    with pytest.raises(StoreError):
        getattr(panel, name)()


@pytest.mark.slow
def test_the_still_is_the_chart_with_a_sentence(panel, tmp_path):
    sentence, picture = panel._still()
    assert sentence.startswith("chunks of time ")
    assert picture == panel.view.still()
    assert panel.save_png(tmp_path / "chunks.png").read_bytes() == panel.view.png()
    assert Config.load(panel.save(tmp_path / "chunks.yaml")) == panel.config


def test_before_there_is_a_plan_there_is_no_picture(config, tmp_path):
    bad = ChunkPanel(config.replace({"data.patch": {"time": 99}}))
    with pytest.raises(PlanError, match="time"):
        bad.wait(WAIT)
    assert bad._still() == ("nothing planned yet", None)
    with pytest.raises(PlanError, match="nothing is planned"):
        bad.save_png(tmp_path / "none.png")
