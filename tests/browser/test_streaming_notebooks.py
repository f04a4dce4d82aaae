"""The notebooks on chunks and streaming as their reader meets them: change the pattern, probe, measure, wait less."""

import re

import pytest
from playwright.sync_api import expect

pytestmark = pytest.mark.browser

COMPLETE = re.compile(r"^complete — ")


def status(box):
    return box.locator("[role=status]").last


def drawn(panel):
    return panel.locator("svg[role=img]")


def test_chunks_run_all_then_change_the_order_probe_and_measure(notebook, artifacts):
    opened = notebook("notebooks/01_chunks.ipynb", width=1400, height=1500)
    opened.run_all(wait=False)
    page = opened.page
    measured = page.locator("table", has_text="first batch")
    expect(measured).to_be_visible()
    expect(measured.locator("caption")).to_have_text(re.compile(r"samples/s measured; median ratio \d"))
    sharing = page.locator("table", has_text="price of sharing")
    expect(sharing.locator("tbody tr")).to_have_count(2)
    expect(page.locator(".jp-OutputArea-output img:visible")).to_have_count(2)
    assert opened.errors() == []

    panel = page.locator(".kit-live")
    before = drawn(panel).get_attribute("aria-label")
    panel.get_by_label("order").select_option("block")
    expect(drawn(panel)).not_to_have_attribute("aria-label", before)
    expect(panel.get_by_text('config.replace({"data.order": "block"})')).to_be_visible()
    panel.get_by_role("button", name="probe").click()
    expect(status(panel)).to_have_text(re.compile(r"^Probe of gs://"))
    expect(panel.get_by_text(re.compile("^probed: mean of")).first).to_be_visible()
    panel.get_by_role("button", name="measure").click()
    expect(status(panel)).to_have_text(re.compile(r"samples/s measured"))
    expect(panel.locator("th", has_text="ratio")).to_be_visible()

    panel.get_by_label("patch").fill("time: 99")
    panel.get_by_label("patch").press("Enter")
    expect(panel.get_by_role("alert")).to_contain_text("99")
    panel.get_by_label("patch").fill("time: 2, lat: 64, lon: 64")
    panel.get_by_label("patch").press("Enter")
    expect(panel.get_by_role("alert")).to_have_count(0)
    chart = page.locator(".jp-OutputArea-output img:visible").last
    places = {"panel": panel, "sharing": sharing, "measured": measured, "chart": chart}
    opened.pictures(places, "chunks", artifacts)
    assert opened.errors() == []


def test_streaming_run_all_draws_the_pipeline_before_and_after(notebook, artifacts):
    opened = notebook("notebooks/02_streaming.ipynb", width=1400, height=1500)
    opened.run_all(wait=False)
    page = opened.page
    rows = page.locator("table", has_text="data wait").last
    expect(rows).to_be_visible()
    expect(status(page.locator(".kit-live"))).to_have_text(COMPLETE)
    charts = page.locator(".jp-OutputArea-output img:visible")
    expect(charts).to_have_count(2)
    assert opened.errors() == []
    factor = page.locator("table", has_text="as a multiple of block order")
    told, counted = (float(factor.locator("td").nth(place).inner_text().split()[0]) for place in (1, 2))
    assert min(told, counted) > 1.5  # bytes, which are counted: a busy machine may wait for cores instead of data
    read = page.locator("table", has_text="first batch")
    expect(page.get_by_text(re.compile(r"in block order: mixing \d+%, predicted \d+%"))).to_be_visible()
    compared = page.locator("table", has_text="predicted and measured").last
    places = {"read": read, "before": charts.nth(0), "after": charts.nth(1), "rows": rows, "compared": compared}
    opened.pictures(places, "streaming", artifacts)
