"""The notebook on distance as its reader meets it: build on workers, three bills, an epoch without requests."""

import re

import pytest
from playwright.sync_api import expect

pytestmark = [pytest.mark.browser, pytest.mark.timeout(900)]

PLACES = ("same region", "across the ocean", "home WiFi")


def test_building_three_places_and_a_cache(notebook, artifacts):
    opened = notebook("notebooks/05_cloud.ipynb", width=1400, height=1500)
    opened.run_all(wait=False)
    page = opened.page
    chart = page.locator(".jp-OutputArea-output img:visible")
    expect(chart).to_have_count(1)
    row = page.locator("table", has_text="read cache misses")
    expect(row).to_be_visible()
    assert opened.errors() == []

    bills, epochs = page.locator("table", has_text="USD"), page.locator("table", has_text="second epoch")
    told = bills.inner_text()
    assert all(place in told for place in PLACES)
    assert re.search(r"second epoch\s+0\s+0 B", epochs.inner_text())

    panel = page.locator(".kit-live").first
    status = panel.locator("[role=status]").first
    expect(panel.get_by_text(re.compile("distance.zarr is built"))).to_be_visible()
    expect(panel.locator("tr", has_text="(chosen)")).to_contain_text("threads")

    panel.get_by_label("url").fill("gs://workshop/again.zarr")
    panel.get_by_label("url").press("Enter")
    panel.get_by_label("scheduler").select_option("distributed")
    expect(panel.locator("tr", has_text="(chosen)")).to_contain_text("distributed")
    expect(panel.get_by_text('"build.scheduler": "distributed"').first).to_be_visible()
    expect(panel.get_by_text(re.compile("again.zarr: not built yet"))).to_be_visible()
    advice = panel.locator("table", has_text="Schedule for")
    panel.get_by_label("machine").select_option("8 GPUs, 160 cores")
    expect(advice).to_contain_text("8 ranks on 160 cores")
    opened.pictures({"panel": panel, "advice": advice}, "cloud", artifacts)

    link = panel.get_by_role("link", name="Dask dashboard")
    panel.get_by_role("button", name="Build").click()
    expect(panel.get_by_role("button", name="Stop")).to_be_visible()
    expect(link).to_be_visible()
    page.screenshot(path=artifacts / "cloud_building.png")
    expect(status).to_have_text(re.compile("^built in"))
    expect(panel.get_by_text(re.compile("again.zarr is built"))).to_be_visible()
    expect(link).to_have_count(0)

    panel.get_by_label("memory", exact=True).first.fill("3 MiB")
    panel.get_by_label("memory", exact=True).first.press("Enter")
    expect(panel.get_by_role("alert").first).to_contain_text("is allowed")
    opened.pictures({"bills": bills, "cache": epochs, "chart": chart, "row": row}, "cloud", artifacts)
    assert opened.errors() == []
