"""Charts of chunk sizes: the numbers behind them, and pictures with every label inside the frame."""

import itertools
import subprocess
import sys
from dataclasses import fields
from typing import NamedTuple

import pytest
from waiting import PATIENCE_SECONDS

from kit.charts.chunks import chunk_figure, plan_info
from kit.charts.style import svg
from kit.chunks.reasons import plan_layout
from kit.chunks.resources import Network
from kit.chunks.table import chunk_table
from kit.errors import PlanError

SIDES = [8, 16, 32, 64, 128, 256, 512, 1024]


def plan(**changes):
    values = {
        "dims": ("time", "lat", "lon"), "shape": (365, 720, 1440), "itemsize": 2,
        "patch": {"time": 3, "lat": 64, "lon": 64}, "batch_size": 16, "variables": 3, "order": "random", "stride": {},
        "latency_seconds": 0.03, "bandwidth_bytes_per_second": 80e6, "requests_in_flight": 32,
        "target_shard_bytes": 64 << 20, "chunk": "auto", "shard": "auto",
    }  # fmt: skip
    values |= changes
    network = Network(**{field.name: values.pop(field.name) for field in fields(Network) if field.name in values})
    return plan_layout(network=network, **values)


SUBJECTS = {
    "table": lambda: chunk_table((64, 64), SIDES),
    "table in 3-D": lambda: chunk_table((3, 64, 64), [(3, 64, 64), 16, (6, 128, 128)], 2),
    "table of one row": lambda: chunk_table((64,), [64]),
    "plan": plan,
    "plan by hand": lambda: plan(chunk={"lat": 64, "lon": 64}),
    "plan of all": lambda: plan(patch={"time": 365, "lat": 720, "lon": 1440}),
    "plan of one candidate": lambda: plan(shape=(1, 1, 1), patch={}),
    "plan of blocks": lambda: plan(order="block"),
    "plan of a tiny array": lambda: plan(shape=(4, 8, 8), patch={"time": 2, "lat": 4, "lon": 4}),
    "plan with every bound": lambda: plan(requests_per_second=900, total_bandwidth_bytes_per_second=60e6),
}


def test_the_chart_of_a_table_is_ordered_by_size():
    read = chunk_figure(chunk_table((64, 64), SIDES[::-1])).axes[0]
    lines = {line.get_label(): list(line.get_ydata()) for line in read.get_lines()}
    labels = {text.get_text(): text.get_fontweight() for text in read.get_xticklabels()}
    assert next(iter(labels)) == "8×8"
    assert lines["maximal"][:3] == [5184, 6400, 9216]
    assert [label for label, weight in labels.items() if weight == "bold"] == ["64×64"]
    assert "the sample itself, 4 KiB" in [text.get_text() for text in read.texts]


def test_plan_info_marks_the_choice_and_knows_the_best_of_each_size():
    answer = plan()
    info = plan_info(answer)
    assert info.samples_per_second[info.chosen] == answer.samples_per_second
    assert info.chosen in info.best
    sizes = [info.chunk_bytes[place] for place in info.best]
    assert sizes == sorted(sizes)
    assert len(info.chunk_bytes) == len(answer.candidates)


def test_plan_info_reads_as_a_batch_reads_and_knows_what_binds():
    answer = plan(total_bandwidth_bytes_per_second=50e6, pattern={"compression_ratio": 2.0})
    info = plan_info(answer)
    place = info.chosen
    assert info.requests_per_sample[place] == pytest.approx(answer.chosen.requests_made_per_batch / 16)
    assert info.least_requests[place] <= answer.requests_per_sample <= info.most_requests[place]
    made = answer.chosen.bytes_made_per_batch / 16
    assert info.bytes_per_sample[place] == pytest.approx(made)
    assert made <= answer.chosen.requests_made_per_batch / 16 * answer.chunk_bytes / 2
    assert info.sample_bytes == pytest.approx(3 * 64 * 64 * 2 * 3 / 2)
    assert info.bounds == tuple(cost.bound for cost in answer.candidates)


class Given(NamedTuple):
    """A measurement as `kit.data.measure_reading` tells it."""

    chunk: tuple
    samples_per_second: float
    predicted_samples_per_second: float


def measured(answer):
    """Of the plan's own layout, of the smallest, and of one that it does not consider."""
    return [
        Given(answer.chunk, 100.0, answer.samples_per_second),
        Given(answer.best_by_size[0].chunk, 7.0, answer.best_by_size[0].samples_per_second),
        Given((5, 7, 11), 50.0, 40.0),
    ]  # fmt: skip


def test_measured_speeds_stand_at_their_size_beside_their_prediction_and_ratio():
    answer = plan()
    info = plan_info(answer, measured(answer))
    assert info.measured == (
        (answer.chunk_bytes, 100.0, answer.samples_per_second),
        (answer.best_by_size[0].chunk_bytes, 7.0, answer.best_by_size[0].samples_per_second),
        (5 * 7 * 11 * 2, 50.0, 40.0),
    )
    assert info.measured[2].ratio == 1.25
    chart = chunk_figure(answer, measured=iter(measured(answer)))
    throughput = chart.axes[0]
    diamonds = [line for line in throughput.get_lines() if line.get_marker() == "D"]
    assert [tuple(line.get_ydata()) for line in diamonds] == [(100.0,), (7.0,), (50.0,)]
    assert [text.get_text() for text in throughput.texts] == [f"{one.ratio:.2f}" for one in info.measured]
    text = svg(chart, "plan")
    assert "measured (ratio)" in text
    assert ">1.25<" in text


@pytest.mark.parametrize(
    ("subject", "given", "message"),
    [
        (plan, Given((3, 64), 10.0, 10.0), "belong.*time, lat, lon"),
        (plan, Given((3, 64, 64), 0.0, 10.0), "above 0"),
        (plan, Given((3, 64, 64), 10.0, 0.0), "above 0"),
        (lambda: chunk_table((64, 64), SIDES), Given((64, 64), 10.0, 10.0), "table.*samples/s"),
    ],
)
def test_measurements_that_do_not_belong_are_refused(subject, given, message):
    with pytest.raises(PlanError, match=message):
        chunk_figure(subject(), measured=[given])


def test_layouts_that_do_not_fit_are_drawn_as_such():
    answer = plan(order="block", pattern={"window_bytes": 1 << 22})
    info = plan_info(answer)
    assert "does not fit" in info.bounds
    assert "does not fit" in svg(chunk_figure(answer), "plan")


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
        for text in (text for legend in chart.legends for text in legend.get_texts()):
            box = text.get_window_extent()
            assert frame.x0 <= box.x0 < box.x1 <= frame.x1, text
        level = [text.get_window_extent() for text in drawn_labels(axes.xaxis) if not text.get_rotation()]
        assert all(left.x1 < right.x0 for left, right in itertools.pairwise(level))


@pytest.mark.parametrize("name", [name for name in SUBJECTS if name.startswith("plan") and "one" not in name])
def test_every_ratio_lies_inside_its_axes_at_the_smallest_and_the_largest_size(name):
    answer = SUBJECTS[name]()
    ends = [Given(cost.chunk, 1.3 * cost.samples_per_second, cost.samples_per_second) for cost in answer.best_by_size]
    chart = chunk_figure(answer, measured=[ends[0], ends[-1]])
    chart.draw_without_rendering()
    frame = chart.axes[0].get_window_extent()
    for text in chart.axes[0].texts:
        box = text.get_window_extent()
        assert frame.x0 <= box.x0 < box.x1 <= frame.x1
        assert frame.y0 <= box.y0 < box.y1 <= frame.y1


def test_a_chart_names_the_choice_and_the_lines():
    text = svg(chunk_figure(plan()), "plan")
    assert "samples/s predicted" in text
    assert "this plan" in text
    text = svg(chunk_figure(chunk_table((64, 64), SIDES)), "table")
    assert all(word in text for word in ("maximal", "random offsets", "minimal", "64×64", "4 MiB"))


def test_planning_and_charts_load_neither_torch_nor_pyplot_nor_matplotlib_before_it_is_needed():
    code = (
        "import sys; import kit.chunks.table, kit.charts.chunks, kit.charts.style\n"
        "assert not {'torch', 'matplotlib', 'numpy', 'zarr'} & set(sys.modules), 'on import'\n"
        "kit.charts.chunks.chunk_figure(kit.chunks.table.chunk_table((8,), [4, 8]))\n"
        "assert not {'torch', 'matplotlib.pyplot'} & set(sys.modules), 'on drawing'"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=PATIENCE_SECONDS)


@pytest.mark.parametrize("given", [3, None, [3], "abc", {"a": 3}])
@pytest.mark.parametrize("subject", ["plan", "table"])
def test_what_is_no_measurement_is_refused_with_what_makes_one(subject, given):
    with pytest.raises(PlanError, match="measure_reading" if subject == "plan" else "give a plan"):
        SUBJECTS[subject]().figure(measured=given)


def test_a_single_measurement_is_drawn_as_a_list_of_one():
    chart = plan().figure(measured=Given((3, 64, 64), 10.0, 20.0))
    assert [text.get_text() for text in chart.axes[0].texts] == ["0.50"]
