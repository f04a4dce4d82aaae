"""The first notebook as its reader meets it: run all, change a setting, fit, watch, stop; and nothing gets lost."""

import json
import re

import nbformat
import pytest
from playwright.sync_api import expect

pytestmark = [pytest.mark.browser, pytest.mark.timeout(900)]

STEP, STOPPED, COMPLETE = (
    re.compile(r"^step \d+/"),
    re.compile(r"^stopped after step \d+ — "),
    re.compile(r"^complete — "),
)
PATH_POINTS = """(box) => [...box.querySelectorAll('svg path')]
  .map((path) => (path.getAttribute('d') || '').split(/[ML]/).length).reduce((a, b) => a + b, 0)"""
PANEL = """import kit
config = kit.Config().replace({"model.target": "kit.testing:TinyModule", "model.arguments": {"seconds": 0.02},
    "trial.max_steps": 5000, "trial.warmup_steps": 2, "hardware.accelerator": "cpu"})
panel = kit.panel(config, data="kit.testing:TinyData")
panel"""


def status(box):
    """What the trial says; a panel with a store has a status of its build before it."""
    return box.locator("[role=status]").last


def button(box, name):
    return box.get_by_role("button", name=re.compile(name))


def test_run_all_then_change_fit_watch_and_stop(notebook, artifacts):
    start = notebook("notebooks/00_start.ipynb", width=1280, height=1400)
    start.run_all()
    panel, trial = start.page.locator(".kit-live").nth(0), start.page.locator(".kit-live").nth(1)
    expect(status(trial)).to_have_text(COMPLETE)
    expect(start.page.locator("table", has_text="samples/s").last).to_be_visible()
    assert start.errors() == []

    expect(panel.get_by_text("is built")).to_be_visible()
    panel.get_by_label("precision").select_option("bf16-mixed")
    expect(panel.get_by_text(re.compile('"hardware.precision": "bf16-mixed"'))).to_be_visible()
    panel.get_by_label("max steps").fill("5000")
    panel.get_by_label("max steps").press("Enter")
    expect(panel.get_by_text('"trial.max_steps": 5000')).to_be_visible()

    before = panel.evaluate(PATH_POINTS)
    button(panel, "Fit").click()
    expect(status(panel)).to_have_text(STEP)
    start.page.wait_for_function(
        f"([box, before]) => ({PATH_POINTS})(box) > before + 20",
        arg=[panel.element_handle(), before],
    )
    panel.scroll_into_view_if_needed()
    start.page.screenshot(path=artifacts / "start_running.png")
    button(panel, "Stop").click()
    expect(status(panel)).to_have_text(STOPPED)
    expect(button(panel, "Fit")).to_be_focused()
    start.page.screenshot(path=artifacts / "start_stopped.png")

    start.use_theme("JupyterLab Dark")
    start.page.screenshot(path=artifacts / "start_dark.png")
    start.command("docmanager:save")
    assert start.errors() == []


def test_a_saved_notebook_holds_a_picture_and_a_sentence_beside_the_live_view(notebook, lab):
    write(lab, "still.ipynb", PANEL.replace("5000", "20"), "panel.fit()\npanel.wait()")
    page = notebook("still.ipynb")
    page.run_all()
    panel = page.page.locator(".kit-live")
    expect(status(panel)).to_have_text(COMPLETE)
    expect(page.page.locator(".jp-OutputArea-child:has(.kit-live) + .jp-OutputArea-child")).to_be_hidden()
    page.command("docmanager:save")
    saved = json.loads((lab.root / "still.ipynb").read_text())
    live, still = saved["cells"][0]["outputs"]
    assert "application/vnd.jupyter.widget-view+json" in live["data"]
    assert still["data"]["image/png"]
    assert "complete — " in "".join(still["data"]["text/plain"])


def test_keys_pressed_in_a_control_do_not_edit_the_notebook(notebook, lab):
    write(lab, "keys.ipynb", PANEL)
    page = notebook("keys.ipynb")
    page.run_all()
    panel = page.page.locator(".kit-live")
    expect(status(panel)).to_have_text("ready")
    cells = page.page.locator(".jp-Notebook .jp-Cell").count()
    for label in ("precision", "strategy", "gradient checkpointing"):
        panel.get_by_label(label).focus()
        for key in ("b", "ArrowDown", "d", "d"):
            page.page.keyboard.press(key)
    assert page.page.locator(".jp-Notebook .jp-Cell").count() == cells
    expect(panel).to_be_visible()


def test_an_error_stands_beside_the_control_and_the_last_valid_config_stays(notebook, lab):
    write(lab, "error.ipynb", PANEL)
    page = notebook("error.ipynb", width=800)
    page.run_all()
    panel = page.page.locator(".kit-live")
    expect(status(panel)).to_have_text("ready")
    panel.get_by_label("strategy").select_option("ddp")
    expect(panel.get_by_role("alert")).to_contain_text("at least 2 devices")
    button(panel, "Fit").click()
    expect(status(panel)).to_have_text("not started")
    panel.get_by_label("devices").fill("2")
    panel.get_by_label("devices").press("Enter")
    expect(panel.get_by_text(re.compile('"hardware.strategy": "ddp"'))).to_be_visible()


def test_the_loader_is_calibrated_by_a_button_and_the_form_takes_the_choice_over(notebook, lab, artifacts):
    few = '"calibration.candidate_workers": [0, 2], "calibration.max_measure_batches": 60, "loader.num_workers": 3})'
    write(lab, "calibrate.ipynb", PANEL.replace("})", ", " + few))
    page = notebook("calibrate.ipynb", width=1280, height=1400)
    page.run_all()
    panel = page.page.locator(".kit-live")
    expect(panel.get_by_label("num workers")).to_have_value("3")
    button(panel, "Calibrate loader").click()
    expect(panel.get_by_text("loader calibrated: no processes")).to_be_visible()
    expect(panel.get_by_label("num workers")).to_have_value("0")
    expect(panel.locator("table tr", has_text="2 processes × 2")).to_be_visible()
    expect(panel.get_by_text("is the fastest")).to_be_visible()
    panel.get_by_text("loader calibrated: no processes").scroll_into_view_if_needed()
    page.page.screenshot(path=artifacts / "start_calibrated.png")


def write(lab, name, *cells):
    kernel = {"name": "kit", "display_name": "kit (training experiments)", "language": "python"}
    notebook = nbformat.v4.new_notebook(
        cells=[nbformat.v4.new_code_cell(cell) for cell in cells], metadata={"kernelspec": kernel}
    )
    nbformat.write(notebook, lab.root / name)
