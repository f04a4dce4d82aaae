"""The memory notebook as its reader meets it: run all, slide, change a lever, compare cards; nothing jumps."""

import re

import pytest
from playwright.sync_api import expect

pytestmark = pytest.mark.browser

ANSWERED, COMPLETE = re.compile(r"answered in "), re.compile(r"^complete — ")
WATCH_SHIFTS = """() => {
  window.shifts = 0;
  new PerformanceObserver((list) => list.getEntries().forEach((entry) => { window.shifts += entry.value; }))
    .observe({ type: 'layout-shift', buffered: false });
}"""
# A picture that is swapped leaves no frame without one.
WATCH_GAPS = """(panel) => {
  window.gaps = 0;
  const look = () => {
    window.gaps += panel.querySelectorAll('svg[role=img]').length < 2 ? 1 : 0;
    requestAnimationFrame(look);
  };
  requestAnimationFrame(look);
}"""


def status(panel):
    return panel.locator("[role=status]").last


def bar(panel):
    return panel.locator("svg[role=img]").nth(0)


def wait_for_cards(panel):
    """Every box has its verdict, and none of them is one of before."""
    expect(panel.locator(".kit-waiting")).to_have_count(0)
    boxes = panel.locator("ul[aria-label='GPU models'] li")
    expect(boxes.filter(has_text="…")).to_have_count(0)
    return boxes


def picture(opened, place, path):
    place.scroll_into_view_if_needed()
    opened.page.screenshot(path=path)


@pytest.fixture(scope="module")
def memory(notebook_of_file):
    """The notebook, run from top to bottom, and its panel."""
    opened = notebook_of_file("notebooks/03_memory.ipynb", width=1280, height=1500)
    opened.run_all()
    trial = opened.page.locator(".kit-live").nth(1)
    expect(status(trial)).to_have_text(COMPLETE)
    expect(opened.page.locator("table", has_text="samples/s").last).to_be_visible()
    assert opened.errors() == []
    return opened, opened.page.locator(".kit-live").nth(0)


def test_run_all_then_slide_and_change_a_lever(memory, artifacts):
    opened, panel = memory
    expect(status(panel)).to_have_text(ANSWERED)
    boxes = wait_for_cards(panel)
    expect(boxes).to_have_count(5)
    expect(boxes.nth(0)).to_contain_text("largest batch")
    picture(opened, panel, artifacts / "memory_panel.png")

    before, place = bar(panel).get_attribute("aria-label"), bar(panel).bounding_box()
    opened.page.evaluate(WATCH_SHIFTS)
    panel.evaluate(WATCH_GAPS)
    panel.locator(".noUi-handle").nth(0).focus()
    for _ in range(12):
        opened.page.keyboard.press("ArrowRight")
    expect(panel.get_by_label("batch size", exact=True)).to_have_value("24")
    expect(panel.get_by_text(".estimate(24)")).to_be_visible()
    expect(bar(panel)).not_to_have_attribute("aria-label", before)
    wait_for_cards(panel)
    assert bar(panel).bounding_box() == place
    assert opened.page.evaluate("window.gaps") == 0
    assert opened.page.evaluate("window.shifts") < 0.01

    before = bar(panel).get_attribute("aria-label")
    panel.get_by_label("gradient checkpointing").check()
    grey = panel.locator(".kit-waiting:has(svg[role=img])").first
    expect(grey).to_have_css("opacity", "0.35")
    opened.page.screenshot(path=artifacts / "memory_recording.png")
    wait_for_cards(panel)
    assert bar(panel).get_attribute("aria-label") != before

    turn_a_dial(opened, panel, artifacts)
    levers, overlay = opened.page.get_by_text("variations by").first, opened.page.locator(".jp-OutputArea-output img")
    opened.pictures({"panel": panel, "levers": levers, "overlay": overlay.last}, "memory", artifacts)
    assert opened.errors() == []


def turn_a_dial(opened, panel, artifacts):
    """The width grows: more parameters, and a taller bar; length goes to the data as well."""
    size = panel.get_by_text(re.compile(r"^[\d,]+ parameters"))
    expect(size).to_have_text("3,099,648 parameters")
    panel.locator(".noUi-handle").nth(2).focus()
    for _ in range(4):
        opened.page.keyboard.press("ArrowRight")
    expect(panel.get_by_label("width", exact=True)).to_have_value("384")
    expect(size).to_have_text("11,507,712 parameters, 3.71 times the 3,099,648 at first")
    panel.get_by_label("context", exact=True).fill("384")
    panel.get_by_label("context", exact=True).press("Enter")
    expect(panel.get_by_text('"data.arguments": {"context": 384}')).to_be_visible()
    wait_for_cards(panel)
    picture(opened, panel, artifacts / "memory_dials.png")


def test_in_a_narrow_tab_pictures_stand_below_the_controls_and_errors_beside_them(memory):
    opened, panel = memory
    opened.page.set_viewport_size({"width": 800, "height": 1700})
    wait_for_cards(panel)
    form, drawn = panel.locator(".kit-form").bounding_box(), bar(panel).bounding_box()
    assert form["y"] + form["height"] <= drawn["y"]
    assert drawn["x"] + drawn["width"] <= 800

    panel.get_by_label("strategy").select_option("ddp")
    expect(panel.get_by_role("alert")).to_contain_text("at least 2 devices")
    panel.get_by_label("devices").fill("8")
    panel.get_by_label("devices").press("Enter")
    expect(panel.get_by_text('"hardware.strategy": "ddp"')).to_be_visible()
    expect(bar(panel)).to_have_attribute("aria-label", re.compile("communication"))
    wait_for_cards(panel)
    assert opened.errors() == []
