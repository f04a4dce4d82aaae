"""Charts of chunk sizes: the numbers behind them, and pictures with every label inside the frame."""

import itertools
import subprocess
import sys

import pytest

from kit.plan.chunks import chunk_table, plan_layout
from kit.report.chunk_chart import chunk_figure, chunk_table_figure, chunk_table_info, plan_figure, plan_info
from kit.report.figure import svg

SIDES = [8, 16, 32, 64, 128, 256, 512, 1024]


def plan(**changes):
    values = {
        "dims": ("time", "lat", "lon"), "shape": (365, 720, 1440), "itemsize": 2,
        "patch": {"time": 3, "lat": 64, "lon": 64}, "batch_size": 16, "variables": 3, "order": "random", "stride": {},
        "latency_seconds": 0.03, "bandwidth_bytes_per_second": 80e6, "requests_in_flight": 32,
        "target_shard_bytes": 64 << 20, "chunk": "auto", "shard": "auto",
    }  # fmt: skip
    return plan_layout(**{**values, **changes})


SUBJECTS = {
    "table": lambda: chunk_table((64, 64), SIDES),
    "table in 3-D": lambda: chunk_table((3, 64, 64), [(3, 64, 64), 16, (6, 128, 128)], 2),
    "table of one row": lambda: chunk_table((64,), [64]),
    "plan": plan,
    "plan by hand": lambda: plan(chunk={"lat": 64, "lon": 64}),
    "plan with one candidate": lambda: plan(patch={"time": 365, "lat": 720, "lon": 1440}),
}


def test_table_info_is_the_table_ordered_by_size():
    info = chunk_table_info(chunk_table((64, 64), SIDES[::-1]))
    assert info.labels[0] == "8×8"
    assert info.maximal_bytes[:3] == (5184, 6400, 9216)
    assert info.labels[info.best] == "64×64"
    assert info.sample_bytes == 4096


def test_plan_info_marks_the_choice_and_climbs_the_ladder():
    answer = plan()
    info = plan_info(answer)
    assert info.samples_per_second[info.chosen] == answer.samples_per_second
    assert info.chosen in info.ladder
    sizes = [info.chunk_bytes[place] for place in info.ladder]
    assert sizes == sorted(sizes)
    assert len(info.chunk_bytes) == len(answer.candidates)


def drawn_labels(axis):
    """Tick labels that are really drawn: ticks beyond the view exist, and are not."""
    low, high = sorted(axis.get_view_interval())
    return [
        tick.label1 for tick in axis.get_major_ticks() if low <= tick.get_loc() <= high and tick.label1.get_visible()
    ]


@pytest.mark.parametrize("name", SUBJECTS)
def test_every_text_lies_inside_the_picture_and_no_tick_label_covers_another(name):
    chart = chunk_figure(SUBJECTS[name]())
    chart.draw_without_rendering()
    frame = chart.bbox
    for axes in chart.axes:
        labels = [text for axis in (axes.xaxis, axes.yaxis) for text in drawn_labels(axis)]
        for text in filter(lambda text: text.get_text(), [axes.xaxis.label, axes.title, axes._left_title, *labels]):
            box = text.get_window_extent()
            assert frame.x0 <= box.x0 < box.x1 <= frame.x1, text
            assert frame.y0 <= box.y0 < box.y1 <= frame.y1, text
        level = [text.get_window_extent() for text in drawn_labels(axes.xaxis) if not text.get_rotation()]
        assert all(left.x1 < right.x0 for left, right in itertools.pairwise(level))


def test_info_can_be_drawn_on_its_own():
    assert len(chunk_table_figure(chunk_table_info(chunk_table((64, 64), SIDES))).axes) == 2
    assert len(plan_figure(plan_info(plan())).axes) == 3


def test_a_chart_names_the_choice_and_the_lines():
    text = svg(plan_figure(plan()), "plan")
    assert "samples/s predicted" in text
    assert "this plan" in text
    text = svg(chunk_table_figure(chunk_table((64, 64), SIDES)), "table")
    assert all(word in text for word in ("maximal", "expected at random offsets", "minimal", "64×64", "4 MiB"))


def test_planning_and_charts_load_neither_torch_nor_pyplot_nor_matplotlib_before_it_is_needed():
    code = (
        "import sys; import kit.plan.chunks, kit.report.chunk_chart, kit.report.figure\n"
        "assert not {'torch', 'matplotlib', 'numpy', 'zarr'} & set(sys.modules), 'on import'\n"
        "kit.report.chunk_chart.chunk_figure(kit.plan.chunks.chunk_table((8,), [4, 8]))\n"
        "assert not {'torch', 'matplotlib.pyplot'} & set(sys.modules), 'on drawing'"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
