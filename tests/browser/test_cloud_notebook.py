"""The notebooks on distance and on building as their reader meets them: bills, an epoch without requests, workers."""

import re

import pytest
from playwright.sync_api import expect

from kit.units import parse_bytes

pytestmark = pytest.mark.browser

PLACES = ("same region", "across the ocean", "home WiFi")


def cells(row):
    return row.locator("th, td").all_inner_texts()


def test_three_places_have_one_work_and_three_bills_and_a_cache_spares_the_second_epoch(notebook, artifacts):
    opened = notebook("notebooks/05_cloud.ipynb", width=1400, height=1500)
    opened.run_all(wait=False)
    page = opened.page
    chart = page.locator(".jp-OutputArea-output img:visible")
    expect(chart).to_have_count(1)
    served = page.locator("table", has_text="from the cache")
    expect(served).to_have_count(2)
    bills, cached = served.first, served.last
    places = {name: cells(bills.locator("tr", has_text=name)) for name in PLACES}
    for shown in places.values():
        assert shown[5:8] == places["same region"][5:8], "requests, hits and bytes are the same from everywhere"
    assert float(places["home WiFi"][-1]) == float(places["across the ocean"][-1]) > float(places["same region"][-1])
    second = cells(cached.locator("tbody tr").last)
    assert second[4:6] == ["2", "0"]
    assert int(second[6]) > 0
    assert parse_bytes(second[7]) == 0
    opened.pictures({"bills": bills, "cache": cached, "chart": chart}, "cloud", artifacts)
    assert opened.errors() == []


def test_a_store_is_cut_anew_in_less_memory_and_by_workers(notebook, artifacts):
    opened = notebook("notebooks/11_build.ipynb", width=1400, height=1500)
    opened.run_all()
    page = opened.page
    assert opened.errors() == []
    less = page.locator("table", has_text="sent by the cloud")
    planned, sent = (float(cells(less.locator("tr", has_text=name))[-1]) for name in ("planned to be", "sent by the"))
    assert planned > 1.5, "with less memory the source is read more than once"
    assert sent == pytest.approx(planned, rel=0.1)

    panel = page.locator(".kit-live").first
    status = panel.locator("[role=status]").first
    expect(panel.get_by_text(re.compile("series.zarr is built"))).to_be_visible()
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
    opened.pictures({"panel": panel, "advice": advice}, "build", artifacts)

    link = panel.get_by_role("link", name="Dask dashboard")
    panel.get_by_role("button", name="Build").click()
    expect(panel.get_by_role("button", name="Stop")).to_be_visible()
    expect(link).to_be_visible()
    page.screenshot(path=artifacts / "build_building.png")
    expect(status).to_have_text(re.compile("^built in"))
    expect(panel.get_by_text(re.compile("again.zarr is built"))).to_be_visible()
    expect(link).to_have_count(0)

    panel.get_by_label("memory", exact=True).first.fill("3 MiB")
    panel.get_by_label("memory", exact=True).first.press("Enter")
    expect(panel.get_by_role("alert").first).to_contain_text("is allowed")
    opened.pictures({"less": less}, "build", artifacts)
    assert opened.errors() == []
