"""The trace viewer in a browser without network: it draws, zooms, finds, and saves what others can open."""

import json

import pytest

from kit.studies.profiling.viewer import TraceViewer

pytestmark = [pytest.mark.browser, pytest.mark.timeout(900)]


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


def test_the_timeline_is_drawn_zoomed_and_searched(page, artifacts):
    frame = page.frame_locator("iframe")
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
    frame = page.frame_locator("iframe")
    frame.locator("#said").get_by_text("of 4.000 ms").wait_for()
    box = frame.locator("canvas").bounding_box()
    page.mouse.move(box["x"] + box["width"] * 0.15, box["y"] + 20 + 60 + 17 + 15 + 6 + 17 + 4)
    tip = frame.locator("#tip")
    tip.get_by_text("aten::linear: 1.000 ms, from 100 µs (cpu_op)").wait_for()


def test_what_is_drawn_can_be_saved_for_other_viewers(page, tmp_path):
    with page.expect_download() as started:
        page.frame_locator("iframe").locator("#save").click()
    started.value.save_as(tmp_path / "saved.json")
    events = json.loads((tmp_path / "saved.json").read_text())["traceEvents"]
    assert {event["name"] for event in events if event["ph"] == "X"} >= {"aten::mm", "gemm", "ProfilerStep#0"}
    assert sum(event["ph"] == "C" for event in events) == 1
