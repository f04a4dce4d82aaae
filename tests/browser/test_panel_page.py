"""The panel as a workshop sees it: four answers on top, settings that are found, tabs, keys, themes, widths."""

import re
from pathlib import Path

import axe_playwright_python
import nbformat
import pytest
from lab import SCROLLED, end_kernels
from playwright.sync_api import expect

pytestmark = pytest.mark.browser

PANEL = """import kit
config = kit.Config().replace({"model.target": "kit.testing:TinyModule", "model.arguments": {"width": 8},
    "trial.max_steps": 20, "trial.warmup_steps": 2, "hardware.accelerator": "cpu"})
panel = kit.panel(config, data="kit.testing:TinyData")
panel"""
SERIOUS = """async (box) => (await axe.run(box)).violations
  .filter((found) => ['serious', 'critical'].includes(found.impact))
  .map((found) => `${found.id}: ${found.nodes[0].html}`)"""
PLACE = """(box) => [...box.querySelectorAll('button, input, select, textarea, summary, a[href], [tabindex]')]
  .filter((one) => one.tabIndex >= 0 && !one.disabled && one.checkVisibility({ visibilityProperty: true }))
  .indexOf(document.activeElement)"""
"""Where in a panel the focus is, counted in what Tab stops at; -1 outside."""
GONE = "The kernel that drew this is gone. Run this cell again."
SAID = """(box) => { const own = getComputedStyle(box), said = getComputedStyle(box, '::before');
  return [own.visibility, own.fontSize, said.visibility, said.content]; }"""
TABS = ("Live", "Memory", "Data", "Advice", "Trials", "Commit")


@pytest.fixture(scope="module")
def opened(notebook_of_file, lab):
    kernel = {"name": "kit", "display_name": "kit (training experiments)", "language": "python"}
    cells = [nbformat.v4.new_code_cell(text) for text in (PANEL, "1 + 1")]
    nbformat.write(nbformat.v4.new_notebook(cells=cells, metadata={"kernelspec": kernel}), lab.root / "one.ipynb")
    one = notebook_of_file("one.ipynb", width=1280, height=720)
    one.run_all()
    return one


@pytest.fixture
def panel(opened):
    box = opened.page.locator(".kit-live").first
    expect(card(box, "memory, predicted")).to_contain_text("fits")
    return box


def card(panel, name):
    return panel.locator(f"section[aria-label='{name}']")


def tab(panel, name):
    return panel.get_by_role("tab", name=re.compile(f"^{name}"))


def test_memory_is_known_before_anything_runs_and_speed_after_a_trial(opened, panel, artifacts):
    expect(card(panel, "memory, predicted")).to_contain_text("fits")
    expect(card(panel, "speed")).to_contain_text("not known before a trial")
    opened.page.screenshot(path=artifacts / "panel_before.png")
    panel.get_by_role("button", name="Fit").click()
    expect(card(panel, "speed, measured")).to_contain_text("samples/s")
    expect(card(panel, "whole run, predicted")).to_contain_text("1 epoch, 1 device")
    expect(tab(panel, "Trials")).to_contain_text("Trials (1)")
    expect(panel.get_by_label(re.compile("logged"))).to_be_visible()
    opened.page.screenshot(path=artifacts / "panel_after.png")


def test_another_device_is_judged_without_a_trial(opened, panel, artifacts):
    panel.get_by_label("predict for").select_option("A100-40GB")
    expect(card(panel, "memory of A100-40GB, predicted")).to_contain_text("39.2 GiB")
    expect(card(panel, "speed of A100-40GB, predicted")).to_contain_text("samples/s")
    expect(card(panel, "whole run on A100-40GB, predicted")).to_contain_text("1 epoch")
    panel.get_by_role("button", name="where a step's time goes").click()
    part = panel.locator("summary", has_text="layer")
    expect(part).to_contain_text("%")
    part.click()
    expect(panel.get_by_text("testing.py, line ").first).to_be_visible()
    opened.page.screenshot(path=artifacts / "panel_breakdown.png")
    panel.get_by_role("button", name="where a step's time goes").click()
    panel.get_by_label("predict for").select_option("this machine")
    expect(card(panel, "speed, measured")).to_contain_text("samples/s here")


def test_a_setting_is_found_changed_marked_and_taken_back(panel):
    search = panel.get_by_placeholder("find a setting")
    expect(panel.get_by_label("gradient clip norm")).to_be_hidden()
    search.fill("clip")
    panel.get_by_label("gradient clip norm").fill("0.5")
    panel.get_by_label("gradient clip norm").press("Enter")
    expect(panel.get_by_text("1 setting changed")).to_be_visible()
    expect(panel.get_by_text('"training.gradient_clip_norm": 0.5').last).to_be_visible()
    search.press("Escape")
    expect(search).to_have_value("")
    expect(panel.get_by_label("gradient clip norm")).to_be_hidden()
    panel.get_by_role("button", name="reset").click()
    expect(panel.get_by_text("unchanged")).to_be_visible()
    search.fill("pin memory")
    checkbox = panel.locator(".widget-checkbox", has_text="pin memory")
    checkbox.hover()
    expect(checkbox).to_have_attribute("title", re.compile("faster"))  # it was made after the page was told of tooltips
    search.press("Escape")
    expect(checkbox).to_be_hidden()


def test_the_line_of_code_is_copied(opened, panel):
    copy = panel.locator(".kit-copy").locator("visible=true").last
    copy.click()
    expect(copy).to_have_text("copied")
    panel.get_by_placeholder("find a setting").focus()
    opened.page.keyboard.press("Control+V")
    expect(panel.get_by_placeholder("find a setting")).to_have_value(
        re.compile(r"^kit\.fit\(config, data=\"kit\.testing")
    )
    title = panel.get_by_role("button", name="chunking")
    expect(title).to_be_hidden()  # nothing is found; a later test needs the titles
    opened.page.keyboard.press("Escape")
    expect(title).to_be_visible()


def test_keys_do_what_they_do_elsewhere(opened, panel, artifacts):
    cells = opened.page.locator(".jp-Notebook .jp-Cell")
    title = panel.get_by_role("button", name="▸ chunking")
    for place in (title, panel.get_by_role("button", name="Fit"), tab(panel, "Live")):
        place.focus()
        expect(place).to_be_focused()
        opened.page.keyboard.press("d")
        opened.page.keyboard.press("d")
        assert cells.count() == 2
    title.focus()
    opened.page.keyboard.press("Enter")
    expect(panel.get_by_role("button", name="▾ chunking")).to_be_focused()
    expect(panel.get_by_label("target shard")).to_be_visible()
    opened.page.screenshot(path=artifacts / "panel_group.png")
    opened.page.keyboard.press("Space")
    expect(title).to_be_focused()
    tab(panel, "Live").click()
    tab(panel, "Live").focus()
    opened.page.keyboard.press("ArrowRight")
    opened.page.keyboard.press("Enter")
    expect(tab(panel, "Memory")).to_have_attribute("aria-selected", "true")


def test_tab_goes_on_from_control_to_control_and_back(opened, panel):
    panel.get_by_placeholder("find a setting").focus()
    there = [panel.evaluate(PLACE)]
    for _ in range(6):
        opened.page.keyboard.press("Tab")
        there.append(panel.evaluate(PLACE))
    assert there == [*range(there[0], there[0] + 7)]
    for place in reversed(there[:-1]):
        opened.page.keyboard.press("Shift+Tab")
        assert panel.evaluate(PLACE) == place


def test_nothing_scrolls_without_need_and_nothing_serious_is_found_on_any_tab(opened, panel, artifacts):
    opened.page.evaluate((Path(axe_playwright_python.__file__).parent / "axe.min.js").read_text())
    for width, theme in ((700, "Light"), (1280, "Dark"), (1600, "Light")):
        opened.page.set_viewport_size({"width": width, "height": 1000})
        opened.use_theme(f"JupyterLab {theme}")
        for name in TABS:
            tab(panel, name).click()
            expect(tab(panel, name)).to_have_attribute("aria-selected", "true")
            output = panel.locator("xpath=ancestor::*[contains(@class, 'jp-OutputArea-output')]")
            assert output.evaluate(SCROLLED) == [], f"{name} at {width}"
            if width >= 1280:  # one in each theme
                assert panel.evaluate(SERIOUS) == [], name
        opened.page.screenshot(path=artifacts / f"panel_{width}_{theme.lower()}.png")


def test_after_a_restart_the_panel_says_what_to_do(opened, panel):
    content = "(box) => getComputedStyle(box, '::before').content"
    assert panel.evaluate(content) == "none"
    assert opened.page.locator(".jp-OutputArea-child:has(.kit-saved)").is_hidden()
    opened.page.evaluate("window.jupyterapp.shell.currentWidget.sessionContext.session.kernel.restart()")
    opened.page.wait_for_function(f"(box) => ({content})(box) === '\"{GONE}\"'", arg=panel.element_handle())


def test_opened_again_it_is_a_picture_and_says_what_to_do(opened, panel, lab, notebook, artifacts):
    """In place of the view, whose widgets are gone, JupyterLab writes "Error displaying widget: model not found"."""
    opened.saved()
    end_kernels(lab.url, {f"{lab.root.name}/one.ipynb"})
    again = notebook("one.ipynb", width=1280, height=720)
    gone = again.page.locator(".jp-OutputArea-output.jupyter-widgets")
    expect(gone).to_contain_text("model not found")
    for theme in ("Light", "Dark"):
        again.use_theme(f"JupyterLab {theme}")
        assert gone.evaluate(SAID) == ["hidden", "0px", "visible", f'"{GONE}"']
        expect(again.page.locator(".jp-RenderedImage img")).to_be_visible()
        again.page.screenshot(path=artifacts / f"panel_again_{theme.lower()}.png")
