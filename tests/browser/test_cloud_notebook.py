"""The notebook on distance and caching as its reader meets it: run all, three bills, an epoch without requests."""

import re

import pytest
from playwright.sync_api import expect

pytestmark = [pytest.mark.browser, pytest.mark.timeout(420)]

SECOND = 1000
PLACES = ("same region", "across the ocean", "home WiFi")


def test_three_places_cost_the_same_requests_and_the_second_epoch_none(notebook, artifacts):
    opened = notebook("notebooks/05_cloud.ipynb", width=1400, height=1500)
    opened.run_all(wait=False)
    page = opened.page
    chart = page.locator(".jp-OutputArea-output img:visible")
    expect(chart).to_have_count(1, timeout=240 * SECOND)
    row = page.locator(".jp-OutputArea-output pre", has_text="data_wait_fraction")
    expect(row).to_be_visible(timeout=30 * SECOND)
    assert opened.errors() == []

    bills = page.locator(".jp-OutputArea-output pre", has_text="USD")
    epochs = page.locator(".jp-OutputArea-output pre", has_text="second epoch")
    told = bills.inner_text()
    assert all(place in told for place in PLACES)
    assert min(map(int, re.findall(r"(\d+) requests", told))) > 0
    assert re.search(r"'second epoch': '0 requests, 0\.0 MB", epochs.inner_text())
    for part, place in {"bills": bills, "cache": epochs, "chart": chart}.items():
        for theme in ("Light", "Dark"):
            opened.use_theme(f"JupyterLab {theme}")
            place.scroll_into_view_if_needed()
            page.screenshot(path=artifacts / f"cloud_{part}_{theme.lower()}.png")
