"""The trace viewer in a browser without network: it draws, zooms, finds, and saves what others can open."""

import json

import pytest

from kit.studies.profiling.viewer import TraceViewer

pytestmark = pytest.mark.browser


def bar(name, begin, length, kind="cpu_op", thread=1):
    return {"ph": "X", "name": name, "cat": kind, "ts": 1000 + begin, "dur": length, "pid": 1, "tid": thread}


@pytest.fixture
def page(chromium, tmp_path):
    """The viewer as a notebook frames it, and every address that it asks for."""
    held = {"ph": "i", "name": "[memory]", "ts": 1050, "args": {"Total Allocated": 4096, "Device Type": 0}}
    events = [
        bar("ProfilerStep#0", 0, 4000, "user_annotation"), bar("aten::linear", 100, 1000), bar("aten::mm", 200, 800),
        bar("gemm", 1500, 2000, "kernel", "stream 7"), held,
    ]  # fmt: skip
    path = tmp_path / "made.pt.trace.json"
    path.write_text(json.dumps({"traceEvents": events}))
    (tmp_path / "notebook.html").write_text(f"<!doctype html>{TraceViewer(path)._repr_html_()}", encoding="utf-8")
    context = chromium.new_context(accept_downloads=True, viewport={"width": 1000, "height": 520})
    opened = context.new_page()
    opened.asked, opened.wrong = [], []
    opened.on("request", lambda request: opened.asked.append(request.url))
    opened.on("pageerror", lambda error: opened.wrong.append(str(error)))
    opened.goto((tmp_path / "notebook.html").as_uri())
    yield opened
    assert not opened.wrong
    assert [url for url in opened.asked if url.startswith(("http:", "https:"))] == []
    context.close()


def timeline(page):
    frame = page.frame_locator("iframe")
    frame.get_by_role("tab", name="timeline").click()
    return frame


def test_each_view_says_what_it_holds(page, artifacts):
    frame = page.frame_locator("iframe")
    frame.get_by_text("The GPU works 50% of the time").wait_for()
    page.screenshot(path=artifacts / "trace_overview.png")
    frame.get_by_role("tab", name="overview").press("ArrowRight")
    rows = frame.get_by_role("tabpanel", name="operators").get_by_role("row")
    rows.filter(has_text="aten::linear").get_by_text("200 µs").wait_for()  # its own
    rows.filter(has_text="aten::linear").get_by_text("1.000 ms").wait_for()  # with aten::mm inside
    frame.get_by_role("tab", name="kernels").click()
    frame.get_by_role("tabpanel", name="kernels").get_by_text("gemm").wait_for()
    frame.get_by_role("tab", name="memory").click()
    frame.get_by_role("img", name="allocated memory").wait_for()
    assert frame.get_by_role("tab").count() == 5  # no ranks and nothing compared


def test_a_table_is_sorted_by_the_heading_that_is_clicked(page):
    frame = page.frame_locator("iframe")
    frame.get_by_role("tab", name="operators").click()
    panel = frame.get_by_role("tabpanel", name="operators")
    names = panel.locator("tbody tr td:first-child")
    for first in ("aten::linear", "aten::mm"):  # the longest with all inside, then the shortest
        panel.get_by_role("button", name="with all inside").click()
        assert names.first.text_content() == first


def test_the_timeline_is_drawn_zoomed_and_searched(page, artifacts):
    frame = timeline(page)
    said = frame.locator("#said")
    said.get_by_text("0.00 µs to 4.000 ms of 4.000 ms").wait_for()
    colours = frame.locator("canvas").evaluate(
        "canvas => new Set(new Uint32Array(canvas.getContext('2d')"
        ".getImageData(0, 0, canvas.width, canvas.height).data.buffer)).size"
    )
    assert colours > 6
    frame.locator("#find").fill("mm")
    said.get_by_text("2 bars in view match").wait_for()
    frame.locator("canvas").press("+")
    said.get_by_text("400 µs to 3.600 ms").wait_for()
    page.screenshot(path=artifacts / "trace_viewer.png")


def test_hovering_names_a_bar_and_how_long_it_took(page):
    frame = timeline(page)
    frame.locator("#said").get_by_text("of 4.000 ms").wait_for()
    box = frame.locator("canvas").bounding_box()
    page.mouse.move(box["x"] + box["width"] * 0.15, box["y"] + 20 + 60 + 17 + 15 + 6 + 17 + 4)
    tip = frame.locator("#tip")
    tip.get_by_text("aten::linear: 1.000 ms, from 100 µs (cpu_op)").wait_for()


def test_what_is_drawn_can_be_saved_for_other_viewers(page, tmp_path):
    with page.expect_download() as started:
        timeline(page).locator("#save").click()
    started.value.save_as(tmp_path / "saved.json")
    events = json.loads((tmp_path / "saved.json").read_text())["traceEvents"]
    assert {event["name"] for event in events if event["ph"] == "X"} >= {"aten::mm", "gemm", "ProfilerStep#0"}
    assert sum(event["ph"] == "C" for event in events) == 1
