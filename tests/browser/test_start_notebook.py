"""The first notebook as its reader meets it: run all, change a setting, fit, watch, stop; and nothing gets lost."""

import re

import nbformat
import pytest
from playwright.sync_api import expect

pytestmark = pytest.mark.browser

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
    """What the trial says; a panel has other lines of the kind in its other tabs."""
    return box.locator(".kit-trial [role=status]")


def button(box, name):
    return box.get_by_role("button", name=re.compile(name))


def test_run_all_then_change_fit_watch_and_stop(notebook, artifacts):
    start = notebook("notebooks/00_start.ipynb", width=1280, height=1400)
    start.run_all()
    panel, trial = start.page.locator(".kit-live").nth(0), start.page.locator(".kit-live").nth(1)
    expect(status(trial)).to_have_text(COMPLETE)
    expect(start.page.locator("table", has_text="samples/s").last).to_be_visible()
    assert start.errors() == []

    panel.get_by_role("tab", name="Data").click()
    expect(panel.get_by_text("ocean.zarr is built")).to_be_visible()
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


def test_a_cell_that_raises_is_an_error(notebook, lab):
    write(lab, "raises.ipynb", "import sys\nprint('beside the point', file=sys.stderr)", "raise ValueError('planted')")
    opened = notebook("raises.ipynb")
    opened.run_all()
    opened.saved()
    assert opened.errors() == ["ValueError: planted"]


@pytest.fixture(scope="module")
def panels(notebook_of_file, lab):
    """A notebook of three panels: one whose trial has ended, one that is ready, one with a loader to be calibrated."""
    few = (  # with steps of no length the fastest is looked for, and no busy machine decides whether a loader keeps up
        '"calibration.candidate_workers": [0, 2], "calibration.max_measure_batches": 60, '
        '"calibration.step_seconds": 0.0, "loader.num_workers": 3})'
    )
    calibrated = PANEL.replace("})", ", " + few)
    write(lab, "panels.ipynb", PANEL.replace("5000", "20"), "panel.fit()\npanel.wait()", PANEL, calibrated)
    opened = notebook_of_file("panels.ipynb", width=1280, height=1400)
    opened.run_all()
    expect(status(panel_of(opened, 3))).to_have_text("ready")
    return opened


def panel_of(opened, cell):
    return opened.page.locator(".jp-Notebook .jp-CodeCell").nth(cell).locator(".kit-live")


def test_a_saved_notebook_holds_a_picture_and_a_sentence_beside_the_live_view(panels):
    expect(status(panel_of(panels, 0))).to_have_text(COMPLETE)
    expect(panels.page.locator(".jp-OutputArea-child:has(.kit-live) + .jp-OutputArea-child").first).to_be_hidden()
    live, still, rule = panels.saved()["cells"][0]["outputs"]
    assert "application/vnd.jupyter.widget-view+json" in live["data"]
    assert still["data"]["image/png"]
    assert list(rule["data"]) == ["text/html"]
    assert "complete — " in "".join(still["data"]["text/plain"])


def test_keys_pressed_in_a_control_do_not_edit_the_notebook(panels):
    panel = panel_of(panels, 2)
    expect(status(panel)).to_have_text("ready")
    panels.page.locator(".jp-Notebook .jp-CodeCell").nth(2).locator(".jp-InputPrompt").click()  # in command mode
    cells = panels.page.locator(".jp-Notebook .jp-Cell")
    before = cells.count()
    for label in ("precision", "strategy", "gradient checkpointing"):
        panel.get_by_label(label).focus()
        for key in ("b", "ArrowDown", "d", "d", "a"):  # each inserts, moves to or deletes a cell
            panels.page.keyboard.press(key)
            assert cells.count() == before, f"{key} in {label}"
    expect(panel).to_be_visible()


def test_an_error_stands_beside_the_control_and_the_last_valid_config_stays(panels, lab):
    panels.page.set_viewport_size({"width": 800, "height": 1400})
    panel = panel_of(panels, 2)
    panel.get_by_label("precision").select_option("32-true")  # keys of the test before went to both
    panel.get_by_label("strategy").select_option("none")
    panel.get_by_label("devices").fill("1")
    panel.get_by_label("devices").press("Enter")
    expect(panel.get_by_text("at least 2 devices").first).to_be_hidden()  # else Fit may move while it is clicked
    panel.get_by_label("strategy").select_option("ddp")
    expect(panel.get_by_role("alert")).to_contain_text("at least 2 devices")
    button(panel, "Fit").click()
    expect(status(panel)).to_have_text("not started")
    panel.get_by_role("tab", name="Commit").click()
    button(panel, "Commit").click()
    expect(panel.locator("span", has_text=re.compile("^hardware.strategy: ")).last).to_be_visible()
    assert not (lab.root / "committed").exists()
    panel.get_by_label("devices").fill("2")
    panel.get_by_label("devices").press("Enter")
    expect(panel.get_by_text(re.compile('"hardware.strategy": "ddp"'))).to_be_visible()
    type_numbers_out_of_bounds(panel)
    hover_over_controls(panel)


def type_numbers_out_of_bounds(panel):
    """The number that is used stands in the control, and beside it what became of the one that was typed."""
    for typed, used, said in (("0", "1", "0 is below 1"), ("0", "1", "0 is below 1"), ("1e3", "1000", "")):
        panel.locator(".kit-form").get_by_label("batch size").fill(typed)
        panel.locator(".kit-form").get_by_label("batch size").press("Enter")
        expect(panel.get_by_text(f'"loader.batch_size": {used}')).to_be_visible()
        expect(panel.locator(".kit-form").get_by_label("batch size")).to_have_value("1" if said else typed)
        expect(panel.get_by_text("is used")).to_have_text([re.compile(said)] if said else [])


def hover_over_controls(panel):
    """What the pointer rests on says in a sentence what it is for."""
    for name, word in (("gradient checkpointing", "activations"), ("calibration.enabled", "Measure")):
        panel.get_by_placeholder("find a setting").fill(name)
        box = panel.locator(".widget-checkbox").locator("visible=true")
        expect(box).to_have_text(name.removeprefix("calibration."))
        for part in (box.locator("input"), box.locator("span")):
            part.hover()
            expect(part).to_have_attribute("title", re.compile(word))
    panel.get_by_placeholder("find a setting").press("Escape")
    size = panel.locator(".kit-form label.widget-label", has_text=re.compile("^batch size$"))
    choice = panel.locator(".widget-dropdown", has=panel.page.get_by_label("strategy"))
    for place, word in ((size, "Samples"), (choice, "one device")):
        place.hover()
        expect(place).to_have_attribute("title", re.compile(word))
    for name, word in (("Fit", "trial"), ("Commit", "evidence")):
        button(panel, name).hover()
        expect(button(panel, name)).to_have_attribute("title", re.compile(word))


def test_the_loader_is_calibrated_by_a_button_and_the_form_takes_the_choice_over(panels, artifacts):
    panels.page.set_viewport_size({"width": 1280, "height": 1400})
    panel = panel_of(panels, 3)
    expect(panel.get_by_label("num workers")).to_have_value("3")
    button(panel, "Calibrate loader").click()
    expect(panel.get_by_text(re.compile("^loader calibrated: "))).to_be_visible()
    expect(panel.get_by_label("num workers")).to_have_value(re.compile("^[02]$"))  # a busy machine may choose either
    expect(panel.locator("table tr", has_text="2 processes × 2")).to_be_visible()
    expect(panel.get_by_text("is the fastest")).to_be_visible()
    panel.get_by_text(re.compile("^loader calibrated: ")).scroll_into_view_if_needed()
    panels.page.screenshot(path=artifacts / "start_calibrated.png")


def write(lab, name, *cells):
    kernel = {"name": "kit", "display_name": "kit (training experiments)", "language": "python"}
    notebook = nbformat.v4.new_notebook(
        cells=[nbformat.v4.new_code_cell(cell) for cell in cells], metadata={"kernelspec": kernel}
    )
    nbformat.write(notebook, lab.root / name)
