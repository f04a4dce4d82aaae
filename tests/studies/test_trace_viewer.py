"""The page that shows a trace: all it needs is in it, and nothing it shows can run."""

import html
import json
import re

import pytest

from kit.errors import TrialError
from kit.studies.profiling import viewer as trace_viewer
from kit.studies.profiling.viewer import TraceViewer


def bar(name, begin, length, kind="cpu_op", thread=1):
    return {"ph": "X", "name": name, "cat": kind, "ts": 1000 + begin, "dur": length, "pid": 1, "tid": thread}


@pytest.fixture
def view(tmp_path):
    def make(*events):
        path = tmp_path / "made.pt.trace.json"
        path.write_text(json.dumps({"traceEvents": list(events)}))
        return TraceViewer(path)

    return make


def whole(viewer):
    return json.loads(re.search(r'type="application/json">(.*?)</script>', viewer.page, re.DOTALL)[1])


def data(viewer):
    return whole(viewer)["ranks"][0]["timeline"]


STEP = bar("ProfilerStep#3", 0, 100, "user_annotation")


def test_bars_lie_inside_of_those_that_hold_them(view):
    found = data(view(STEP, bar("aten::linear", 10, 50), bar("aten::mm", 20, 30), bar("aten::add", 60, 10)))
    assert [row[0] for row in found["rows"]] == ["steps", "thread 1"]
    depths = {found["names"][name][0]: depth for _, depth, _, _, name in found["bars"]}
    assert depths == {"ProfilerStep#3": 0, "aten::linear": 0, "aten::mm": 1, "aten::add": 0}


def test_streams_of_the_device_come_after_the_host(view):
    found = data(view(bar("gemm", 0, 5, "kernel", "stream 7"), STEP, bar("aten::mm", 0, 9)))
    assert [row[0] for row in found["rows"]] == ["steps", "thread 1", "GPU 1, stream 7"]


def test_the_shortest_bars_are_left_out_and_counted(view, monkeypatch):
    monkeypatch.setattr(trace_viewer, "MOST_BARS", 2)
    found = data(view(STEP, bar("long", 0, 50), bar("short", 60, 1), bar("short", 70, 1)))
    assert found["left_out"] == 2
    assert len(found["bars"]) == 2


def test_the_page_needs_nothing_from_elsewhere(view):
    page = view(STEP).page
    assert not re.search(r"https?://|src=|@import|fetch\(|<link", page)


def test_a_name_cannot_leave_its_place(view):
    wicked = "</script><script>alert(1)</script>"
    viewer = view(STEP, bar(wicked, 1, 2))
    assert wicked not in viewer.page
    assert data(viewer)["names"][1][0] == wicked
    shown = viewer._repr_html_()
    assert 'sandbox="allow-scripts allow-downloads"' in shown
    assert html.unescape(re.search(r'srcdoc="(.*?)"></iframe>', shown, re.DOTALL)[1]) == viewer.page


def test_the_page_can_be_kept(view, tmp_path):
    viewer = view(STEP)
    assert viewer.save(tmp_path / "trace.html").read_text() == viewer.page
    assert "Perfetto" in repr(viewer)


def test_a_trace_without_bars_is_refused(view):
    with pytest.raises(TrialError, match="nothing .*took time"):
        view()
