"""The notebooks on arrays, topics and tables as their reader meets them: what is foreseen beside what was measured."""

import re

import pytest
from playwright.sync_api import expect

from kit.units import parse_bytes

pytestmark = pytest.mark.browser

ANSWERED, COMPLETE = re.compile(r"answered in "), re.compile(r"^complete — ")
LEAST_PIXELS = 600
"""Of a figure on a wide page, below which its labels cannot be read."""


@pytest.fixture
def ran(notebook):
    """A function that runs a notebook from first to last cell, in which so many figures come."""
    wrong = []

    def run(name, figures):
        opened = notebook(f"notebooks/{name}.ipynb", width=1400, height=1500)
        opened.page.on("pageerror", lambda error: wrong.append(str(error)))
        opened.run_all(wait=False)
        charts = opened.page.locator(".jp-OutputArea-output img:visible")
        expect(charts).to_have_count(figures)
        assert opened.errors() == []
        for place in range(figures):
            assert charts.nth(place).bounding_box()["width"] >= LEAST_PIXELS
        return opened, charts

    yield run
    assert wrong == []


def table(page, text):
    return page.locator(".jp-OutputArea-output table", has_text=text).last


def rows_of(found):
    """Cells by the name of their row, which is the first."""
    cells = [row.locator("th, td").all_inner_texts() for row in found.locator("tbody tr").all()]
    return {name: rest for name, *rest in cells}


def status(box):
    return box.locator("[role=status]").last


def test_arrays_three_cases_stand_in_one_table_with_their_peaks(ran, artifacts):
    opened, charts = ran("08_larger_than_memory", figures=2)
    page = opened.page
    assert rows_of(table(page, "500,000 × 100,000"))["in memory"][-1] == "does not fit"
    assert rows_of(table(page, "6,000 × 1,000"))["in memory"][-1] == "fits"
    expect(page.get_by_text("Writing 9 of 9 row blocks")).to_be_visible()

    peaks, counted = table(page, "host peak"), table(page, "read from the disk")
    rows = rows_of(peaks)
    assert [*rows] == [
        "would fit: some.npy on the device", "fits the device: some.npy in memory", "fits the device: some.npy on disk",
        "would not fit: many.npy on the device", "fits memory: many.npy in memory", "fits memory: many.npy on disk",
        "fits neither: many.npy on disk, page cache 4 MiB",
    ]  # fmt: skip
    for name, numbers in rows.items():
        if not name.endswith("on the device"):
            assert "–" not in numbers
            device, host = numbers[3:6], numbers[6:]
            assert 0.9 < float(device[2]) < 1.1
            assert 0.9 < float(host[2]) < 1.1
            assert parse_bytes(device[1]) < parse_bytes("7 MiB"), "no array is ever on the device"
    read = {name: parse_bytes(numbers[1]) for name, numbers in rows_of(counted).items()}
    held = {name: parse_bytes(numbers[6]) for name, numbers in rows_of(counted).items()}
    mebibytes = 1 << 20
    assert read["many.npy in memory"] < mebibytes < 15 * mebibytes < held["many.npy in memory"]
    assert max(held["many.npy on disk"], held["many.npy on disk, page cache 4 MiB"]) < 8 * mebibytes
    assert read["many.npy on disk, page cache 4 MiB"] > 60 * mebibytes > 2 * read["many.npy on disk"]

    opened.pictures(
        {"peaks": peaks, "counted": counted, "bars": charts.first, "losses": charts.last}, "rows", artifacts
    )
    assert opened.errors() == []


def test_topics_are_found_and_drawn_and_their_memory_was_foreseen(ran, artifacts):
    opened, charts = ran("09_topics", figures=3)
    page = opened.page
    expect(status(page.locator(".kit-live"))).to_have_text(COMPLETE)
    expect(page.locator("li", has_text="documents, terms are no dials: the data decides it")).to_be_visible()
    ran_as = table(page, "device allocated")
    ((predicted, measured, ratio, *_),) = rows_of(ran_as).values()
    assert 0.9 < parse_bytes(measured) / parse_bytes(predicted) < 1.1
    assert 0.9 < float(ratio) < 1.1
    recovered = table(page, "cosine of terms")
    rows = rows_of(recovered)
    assert sorted(rows) == sorted(cells[0] for cells in rows.values()) == [str(topic) for topic in range(8)]
    assert all(float(cells[2]) > 0.9 for cells in rows.values())

    places = {"needs": table(page, "at the peak"), "loss": charts.nth(0), "recovered": recovered}
    opened.pictures(places, "topics", artifacts)
    assert opened.errors() == []


def test_tables_are_cut_measured_and_cached_and_a_dial_changes_code_and_figures(ran, artifacts):
    opened, charts = ran("10_tables", figures=2)
    page = opened.page
    parts = table(page, "query chunk 0")
    customers, rows = (
        [int(cell.replace(",", "")) for cell in column] for column in zip(*rows_of(parts).values(), strict=True)
    )
    assert sum(customers) == 2000
    assert max(rows) - min(rows) <= 0.02 * sum(rows), "equally large, though few customers buy most"
    expect(page.get_by_text(re.compile(r"At most \d+ workers? in all"))).to_be_visible()
    costs, advice = table(page, "database predicted"), table(page, "64 MiB allowed")
    for predicted, measured, ratio, *_ in rows_of(costs).values():
        assert parse_bytes(measured) / parse_bytes(predicted) == pytest.approx(float(ratio), abs=0.02)
    assert set(rows_of(costs)) == {"1", "4", "16"}
    assert len(rows_of(advice)) == 3
    expect(page.get_by_text(re.compile(r"^\d+ results, .* in ")).first).to_be_visible()
    trial = page.locator(".kit-live").nth(1)
    expect(status(trial)).to_have_text(COMPLETE)
    ((_, _, ratio, *_),) = rows_of(table(page, "device allocated")).values()
    assert 0.9 < float(ratio) < 1.1

    panel = page.locator(".kit-live").nth(0)
    expect(status(panel)).to_have_text(ANSWERED)
    expect(panel.get_by_text("change hidden_dim, then num_layers, then sketch_quality")).to_be_visible()
    turn_a_dial(opened, panel)
    places = {"parts": parts, "advice": advice, "panel": panel, "loss": charts.last}
    opened.pictures(places, "tables", artifacts)
    assert opened.errors() == []


def turn_a_dial(opened, panel):
    """More numbers to carry a customer as: more parameters, another breakdown, another line of code."""
    bar = panel.locator("svg[role=img]").first
    size, before = panel.get_by_text(re.compile(r"^[\d,]+ parameters")).inner_text(), bar.get_attribute("aria-label")
    panel.locator(".noUi-handle").nth(2).focus()
    for _ in range(4):
        opened.page.keyboard.press("ArrowRight")
    expect(panel.get_by_label("hidden dim", exact=True)).to_have_value("512")
    expect(panel.locator("pre", has_text='"hidden_dim": 512')).to_be_visible()
    larger = re.compile(rf"^[\d,]+ parameters, [\d.]+ times the {re.escape(size.split()[0])} at first")
    expect(panel.get_by_text(larger)).to_be_visible()
    expect(bar).not_to_have_attribute("aria-label", before)
    expect(panel.locator(".kit-waiting")).to_have_count(0)
