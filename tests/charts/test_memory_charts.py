"""The numbers behind the charts of memory, and pictures that keep their place, their looks and every word inside."""

import dataclasses
import itertools
import re

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from matplotlib.backends.backend_agg import FigureCanvasAgg
from recordings import training_recording

from kit.charts import style as look
from kit.charts.memory import (
    LOOKS,
    VERDICTS,
    BreakdownChart,
    breakdown_info,
    breakdown_limit,
    peak_words,
    short_operator,
    ticks_of,
)
from kit.charts.timeline import (
    LARGEST_SERIES,
    TimelineChart,
    breakdown_figure,
    memory_figure,
    thin,
    timeline_figure,
    timeline_info,
)
from kit.memory.replay.cards import target_of
from kit.memory.replay.estimate import MeasuredMemory, MemoryEstimate, estimate
from kit.memory.replay.replay import CATEGORIES

MIB, GIB = 1 << 20, 1 << 30


def predict(batch_size=4, device="T4", **changes):
    recording = training_recording(batch_size, **changes)
    return estimate(recording, target_of(device))


def measure(recording):
    """What an allocator would have seen of a recording: the truth a perfect prediction is laid beside."""
    sizes = recording.rounded_bytes[recording.event_block]
    first = int(np.flatnonzero(recording.event_time >= recording.batch_starts[0])[0])
    held = np.cumsum(np.where(recording.event_allocates, sizes, -sizes))[first - 1 :]
    asked = np.where(recording.event_allocates, recording.block_bytes[recording.event_block], 0)
    return MeasuredMemory(held, np.cumsum(np.append(0, asked[first:])), 1.0, optimizer_steps=2)


def of_every_category(**changes):
    """An estimate in which no category is empty."""
    part = 64 * MIB
    found = predict()
    points = len(found.timeline.clock_bytes)
    line = dataclasses.replace(
        found.timeline,
        categories=dict.fromkeys(CATEGORIES, (part,) * points),
        allocated_bytes=(part * len(CATEGORIES),) * points,
    )
    return dataclasses.replace(
        found, breakdown=dict.fromkeys(CATEGORIES, part), device_allocated_bytes=part * len(CATEGORIES),
        device_reserved_bytes=900 * MIB, timeline=line, **changes,
    )  # fmt: skip


# -- looks


def test_no_two_categories_look_alike_and_none_is_told_by_colour_alone_from_its_family():
    looks = [(style.colour, style.hatch) for style in LOOKS.values()]
    assert len(set(looks)) == len(looks) == len(CATEGORIES)


def luminance(colour):
    channels = [int(colour[place : place + 2], 16) / 255 for place in (1, 3, 5)]
    linear = [value / 12.92 if value <= 0.04045 else ((value + 0.055) / 1.055) ** 2.4 for value in channels]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


@pytest.mark.parametrize("name", LOOKS)
def test_words_on_a_colour_can_be_read(name):
    low, high = sorted([luminance(LOOKS[name].colour), luminance(LOOKS[name].text_colour)])
    assert (high + 0.05) / (low + 0.05) > 3


@pytest.mark.parametrize("name", LOOKS)
def test_no_pattern_runs_through_words(name):
    found = predict()
    whole = dataclasses.replace(found, breakdown={**dict.fromkeys(CATEGORIES, 0), name: found.device_allocated_bytes})
    chart = BreakdownChart()
    chart.show([breakdown_info(whole)])
    (words,) = [text for text in chart.axes.texts if text.get_text() == LOOKS[name].label]
    words.set_color(LOOKS[name].colour)  # what is seen beside the letters
    canvas = FigureCanvasAgg(chart.figure)
    canvas.draw()
    left, bottom, right, top = words.get_window_extent().extents.astype(int)
    height = canvas.get_width_height()[1]
    pixels = np.asarray(canvas.buffer_rgba())[height - top : height - bottom, left:right, :3]
    assert len(np.unique(pixels.reshape(-1, 3), axis=0)) == 1


def test_every_verdict_has_a_sign_of_its_own_beside_its_colour():
    assert len({sign for sign, _ in VERDICTS.values()}) == len(VERDICTS)


@given(st.floats(min_value=1024, max_value=1e15))
def test_ticks_are_few_rise_from_zero_and_stay_on_the_axis(limit):
    places, words, unit = ticks_of(limit)
    assert 3 <= len(places) <= 7
    assert places[0] == 0
    assert places == sorted(places)
    assert places[-1] <= limit * 1.000001
    assert len(set(words)) == len(words)
    assert unit in ("KiB", "MiB", "GiB", "TiB")


def test_the_peak_is_named_in_words():
    found = predict()
    peak = dataclasses.replace(found.peak, phase="optimizer", operator="aten::_foreach_sqrt.default", module="")
    words = peak_words(dataclasses.replace(found, peak=peak, device_allocated_bytes=int(4.2 * GIB)))
    assert re.fullmatch("4.2 GiB .*optimizer.* _foreach_sqrt", words)
    assert re.search("backward.* mm .*layer11", peak_words(predict(40)))


def test_an_operator_without_a_namespace_keeps_its_name():
    assert [short_operator(name) for name in ("mm", "aten.mm.default", "")] == ["mm", "mm", ""]


# -- breakdown


def test_the_parts_of_a_bar_add_up_to_its_peak_in_the_order_of_the_categories():
    info = breakdown_info(predict(40))
    names = [name for name, _ in info.parts]
    assert sum(size for _, size in info.parts) == info.allocated_bytes
    assert names == [name for name in CATEGORIES if name in names]
    assert all(size for _, size in info.parts)


def test_the_axis_ends_at_the_capacity_where_that_leaves_the_bar_readable():
    near = breakdown_info(predict(40, width_bytes=32 * MIB))
    assert near.largest_bytes > near.capacity_bytes / 4
    assert breakdown_limit([near]) == pytest.approx(near.capacity_bytes * 1.1)


def test_a_small_model_on_a_large_card_gets_an_axis_of_its_own():
    small = breakdown_info(predict(2, device="H100"))
    assert breakdown_limit([small]) < 3 * small.largest_bytes < small.capacity_bytes / 10


def test_what_is_outside_the_allocator_does_not_squeeze_a_small_bar():
    small = breakdown_info(predict(1, layers=2))
    assert not small.shows_outside
    assert small.largest_bytes == small.reserved_bytes
    assert breakdown_info(predict(200)).shows_outside


def test_an_incomplete_estimate_is_a_lower_bound_and_says_so():
    found = predict(unknown="operator mine::fused has no fake implementation")
    assert not found.complete
    assert breakdown_info(found).headline.startswith("at least ")
    assert "activations unknown" in breakdown_info(found).headline
    assert peak_words(found).startswith("at least ")


def test_a_measured_bar_stands_below_its_prediction_with_the_ratio():
    found = predict(40)
    info = breakdown_info(found, measured_bytes=round(found.device_allocated_bytes * 1.02))
    assert info.measured_words.endswith("ratio 1.020")
    figure = breakdown_figure({"as given": found, "more": predict(80)}, [info.measured_bytes, None])
    texts = [text.get_text() for text in figure.axes[0].texts]
    assert any(text.startswith("as given: ") for text in texts)
    assert sum("ratio 1.020" in text for text in texts) == 1


def test_a_bar_changes_in_place():
    chart = BreakdownChart()
    chart.show([breakdown_info(predict(4))])
    box, before = chart.axes.get_position().bounds, chart.svg()
    chart.show([breakdown_info(predict(400, device="A100-80GB"))])
    after = chart.svg()
    assert chart.axes.get_position().bounds == box
    assert after != before
    assert size_of(after) == size_of(before)


def size_of(svg):
    return re.search(r'width="(\d+)" height="(\d+)', svg).groups()


def test_the_same_estimate_gives_the_same_picture_whatever_was_shown_between():
    chart, first = BreakdownChart(), breakdown_info(predict(4))
    chart.show([first])
    before = chart.svg()
    chart.show([breakdown_info(of_every_category())])
    chart.show([first])
    assert chart.svg() == before


def test_a_chart_says_in_words_what_it_shows():
    found = predict(40)
    chart = BreakdownChart()
    chart.show([breakdown_info(found)])
    text = chart.svg()
    assert 'role="img"' in text
    assert "activations 3" in text
    assert "capacity 14.6 GiB" in text
    assert "currentColor" in text


# -- timeline


def test_the_areas_add_up_to_the_allocated_bytes_and_the_peak_is_among_the_points():
    found = predict(40)
    info = timeline_info(found)
    total = sum(info.category_bytes.values())
    assert total.max() == info.peak_bytes == found.device_allocated_bytes
    assert info.clock[int(total.argmax())] == info.peak_clock
    assert (np.diff(info.clock) >= 0).all()
    assert info.clock[0] < 0.01
    assert info.clock[-1] == 1


def test_a_measurement_of_what_was_predicted_lies_on_the_prediction():
    found = predict(40, device="this machine", rounding_bytes=1)
    info = timeline_info(found, measure(found.recording))
    predicted = np.interp(info.measured_clock, info.clock, sum(info.category_bytes.values()))
    assert info.measured_peak_bytes == info.peak_bytes
    assert abs(predicted - info.measured_bytes).max() < 0.02 * info.peak_bytes


def test_a_measurement_of_more_steps_is_laid_over_their_first_two():
    found = predict(40, device="this machine", rounding_bytes=1)
    longer = measure(training_recording(40, steps=4, rounding_bytes=1))
    info = timeline_info(found, dataclasses.replace(longer, optimizer_steps=4))
    assert info.measured_clock.max() <= 1
    assert abs(info.measured_clock[info.measured_bytes.argmax()] - info.peak_clock) < 0.1


def test_phases_follow_each_other_along_the_clock():
    spans = timeline_info(predict(40)).spans
    assert [phase for phase, _, _ in spans][:3] == ["forward", "backward", "optimizer"]
    assert all(start < end for _, start, end in spans)
    assert all(end <= start for (_, _, end), (_, start, _) in itertools.pairwise(spans))


@given(st.lists(st.tuples(st.floats(0, 1), st.integers(0, 10**9)), max_size=200), st.integers(1, 50))
def test_thinning_keeps_the_highest_of_each_stretch_and_never_too_many(points, most):
    points = sorted(points, key=lambda point: point[0])
    clock = np.array([place for place, _ in points])
    height = np.array([value for _, value in points], dtype=float)
    kept = thin(clock, height, most)
    assert len(kept) <= most
    assert (np.diff(kept) > 0).all()
    if points:
        assert height[kept].max() == height.max()


def test_a_long_recording_is_thinned_without_losing_its_peak():
    found = predict(40, layers=600, width_bytes=MIB)
    info = timeline_info(found)
    assert len(info.clock) <= LARGEST_SERIES
    assert sum(info.category_bytes.values()).max() == found.device_allocated_bytes


def test_an_estimate_read_from_a_file_draws_the_same_charts():
    found = predict(40)
    read = MemoryEstimate.from_dict(found.to_dict())
    charts = TimelineChart(), TimelineChart()
    for chart, subject in zip(charts, (found, read), strict=True):
        chart.show(timeline_info(subject))
    assert charts[0].svg() == charts[1].svg()


# -- pictures


LONG = "_scaled_dot_product_efficient_attention_backward"
SUBJECTS = {
    "small": lambda: predict(1, layers=2),
    "of the CPU": lambda: predict(40, device="this machine", rounding_bytes=1),
    "too large": lambda: predict(400, width_bytes=8 * MIB),
    "incomplete": lambda: predict(unknown="operator mine::fused has no fake implementation"),
    "of every category": of_every_category,
    "with a long name": lambda: dataclasses.replace(
        predict(), peak=dataclasses.replace(predict().peak, operator=LONG, module="model.encoder.layers.11.attention")
    ),
    "of ten thousand ranks' worth": lambda: dataclasses.replace(of_every_category(), capacity_bytes=10_000 * GIB),
}


@pytest.mark.parametrize("name", SUBJECTS)
def test_every_text_lies_inside_the_picture(name):
    subject = SUBJECTS[name]()
    figures = {
        "breakdown": breakdown_figure(subject, round(subject.device_allocated_bytes * 1.01)),
        "timeline": timeline_figure(subject, measure(subject.recording)),
        "both": memory_figure(subject, measure(subject.recording)),
    }
    for kind, figure in figures.items():
        figure.draw_without_rendering()
        for text in figure.findobj(lambda item: hasattr(item, "get_text") and item.get_visible() and item.get_text()):
            if text.axes is not None and text in (tick.label2 for tick in text.axes.xaxis.get_major_ticks()):
                continue
            box = text.get_window_extent()
            if box.width:
                assert figure.bbox.x0 <= box.x0 < box.x1 <= figure.bbox.x1 + 0.5, (kind, text)
                assert figure.bbox.y0 <= box.y0 < box.y1 <= figure.bbox.y1 + 0.5, (kind, text)


def test_the_one_legend_of_both_charts_names_what_is_only_in_the_timeline():
    parts = dict(predict(40).breakdown)
    parts["activations"] += parts.pop("gradients")
    found = dataclasses.replace(predict(40), breakdown=parts)
    page = memory_figure(found)
    words = [text.get_text() for text in page.findobj(lambda item: hasattr(item, "get_text")) if text.get_visible()]
    assert any(re.fullmatch("gradients  none.*", text) for text in words)
    assert "gradients" in [text.get_text() for text in timeline_figure(found).legends[0].get_texts()]


def test_both_charts_on_one_page_are_as_wide_as_each():
    page = memory_figure(predict(40))
    assert page.get_size_inches()[0] == breakdown_figure(predict(40)).get_size_inches()[0]
    assert look.png(page).startswith(b"\x89PNG")
