"""The levers notebook as its reader meets it: tables, a chart, a search with a button that goes when it has ended."""

import re

import pytest
from playwright.sync_api import expect
from properties import nightly

from kit.units import parse_bytes

pytestmark = pytest.mark.browser

STOPPABLE = """import kit
config = kit.Config.load("datasets/tokens/recipe.yaml").replace({
    "hardware.accelerator": "cpu", "hardware.device_memory_bytes": "256 MiB",
})
found = kit.studies.find_batch_size(config, data="datasets/tokens/source.py:Tokens", start=1, resolution=0)
found"""


def test_run_all_shows_the_levers_the_search_and_the_back_off(notebook, artifacts):
    opened = notebook("notebooks/04_levers.ipynb", width=1280, height=1400)
    opened.run_all()
    expect(opened.page.locator(".jp-OutputArea-output").last).to_contain_text("off their default")
    assert opened.errors() == []
    steps = opened.page.get_by_role("rowheader", name=re.compile(r"^\+ "))
    expect(steps).to_have_count(4)
    saved = [parse_bytes(row.locator("xpath=..").locator("td").nth(3).inner_text()) for row in steps.all()]
    assert all(one > parse_bytes("5 MiB") for one in saved), "each lever shows"
    expect(opened.page.get_by_role("rowheader", name=re.compile("in chunks of"))).to_have_count(3 if nightly() else 2)
    live = opened.page.locator(".kit-live").first
    expect(live).to_contain_text("samples on each device")
    expect(live.get_by_role("button", name="Stop")).to_have_count(0)
    expect(live).to_contain_text("out of memory")
    backed_off = opened.page.locator(".kit-live").nth(1)
    expect(backed_off).to_contain_text("gradients stay")
    expect(backed_off.get_by_role("row", name=re.compile("out of memory"))).to_have_count(0)
    live.scroll_into_view_if_needed()
    opened.page.screenshot(path=artifacts / "levers_search.png")


def test_the_button_stops_a_search_and_keeps_what_it_found(notebook, project):
    import nbformat

    book = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(STOPPABLE)])
    book.metadata.kernelspec = {"name": "kit", "display_name": "kit (training experiments)", "language": "python"}
    nbformat.write(book, project / "notebooks" / "stoppable.ipynb")
    opened = notebook("notebooks/stoppable.ipynb")
    opened.run_all()
    live = opened.page.locator(".kit-live").first
    expect(live.get_by_role("rowheader", name=re.compile(r"^\d+$")).first).to_be_visible()
    live.get_by_role("button", name="Stop").click()
    expect(live).to_contain_text("(STOPPED)")
    expect(live.get_by_role("button", name="Stop")).to_have_count(0)
    assert opened.errors() == []
