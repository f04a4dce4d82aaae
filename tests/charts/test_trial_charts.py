"""The numbers behind the chart of a trial, and that the chart keeps its place while it fills."""

import dataclasses
import math
import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kit.charts.trial import TrialChart, byte_limit, memory_band, rate_limit, step_limit
from kit.config import Config
from kit.memory.replay.cards import DeviceTarget
from kit.memory.replay.estimate import estimate as estimated
from kit.memory.replay.replay import Recording
from kit.records.ratios import SpeedRange
from kit.records.trace import LARGEST_SERIES, PHASE_LABELS, PHASES, Trace, throughput_info, trace_of

MIB, GIB = 1 << 20, 1 << 30
CPU = DeviceTarget(
    name="this machine", capacity_bytes=8 * GIB, device_kind="cpu", capability=None,
    outside_bytes=(64 * MIB, 512 * MIB), cublas_workspace_bytes=0, reasons=(),
)  # fmt: skip
CONFIG = Config().replace({"trial.max_steps": 10, "trial.warmup_steps": 2})


def step(number, rank=0, seconds=0.1, wait=0.04, rss=500 * MIB, samples=8, **more):
    phases = {f"{phase}_seconds": 0.0 for phase in PHASES}
    phases |= {"wait_seconds": wait, "backward_seconds": seconds - wait}
    fields = {"step": number, "samples": samples, "step_seconds": seconds, "host_rss_bytes": rss, **phases, **more}
    return {"kind": "step", "time": float(number), "rank": rank, **fields}


def test_memory_is_kept_per_rank_and_a_cpu_run_has_no_device_series():
    info = trace_of([step(1, 0, rss=3 * MIB), step(1, 1, rss=5 * MIB), step(2, 0, rss=4 * MIB)], CONFIG).memory()
    assert info.ranks == (0, 1)
    assert info.host_rss_bytes[0] == ((1, 2), (3 * MIB, 4 * MIB))
    assert info.peak("host_rss_bytes") == 5 * MIB
    assert not info.has_device
    assert math.isnan(info.peak("device_allocated_bytes"))


def test_warmup_steps_are_shown_but_left_out_of_every_average():
    slow = [step(1, seconds=10.0, wait=9.0), step(2, seconds=10.0, wait=9.0)]
    info = throughput_info([*slow, step(3), step(4)], CONFIG)
    assert info.steps == (1, 2, 3, 4)
    assert info.mean_samples_per_second == pytest.approx(80)
    assert info.data_wait_fraction == pytest.approx(0.4)
    assert info.measured_steps == 2


def test_a_step_lasts_as_long_as_its_slowest_rank_and_counts_the_samples_of_all():
    info = throughput_info([step(n, rank, seconds=0.1 + rank * 0.1) for n in (1, 2, 3) for rank in (0, 1)], CONFIG)
    assert info.samples_per_second == pytest.approx([80, 80, 80])


def test_a_step_counts_once_every_rank_has_reported_it():
    trace = Trace(0, 10, world_size=2).add([step(1, 0), step(1, 1), step(2, 0)])
    assert trace.last_step == 1
    assert trace.add([step(2, 1)]).last_step == 2


def test_nothing_measured_is_said_so():
    info = throughput_info([step(1)], CONFIG)
    assert math.isnan(info.mean_samples_per_second)
    assert "nothing measured yet" in info.sentence
    assert "nothing measured yet" in trace_of([], CONFIG).memory().sentence


def test_numbers_that_are_not_finite_are_left_out():
    info = trace_of([step(1, rss="nan"), step(2, rss=None), step(3, rss=MIB)], CONFIG).memory()
    assert info.host_rss_bytes[0] == ((3,), (MIB,))


def test_a_long_series_is_binned_without_losing_its_peak():
    events = [step(n, rss=(7 * GIB if n == 1234 else GIB)) for n in range(1, 5001)]
    info, throughput = trace_of(events, CONFIG).memory(), throughput_info(events, CONFIG)
    assert len(info.host_rss_bytes[0][0]) <= LARGEST_SERIES
    assert info.peak("host_rss_bytes") == 7 * GIB
    assert len(throughput.steps) <= LARGEST_SERIES
    assert throughput.mean_samples_per_second == pytest.approx(80)


@given(
    st.lists(
        st.fixed_dictionaries({f"{phase}_seconds": st.floats(0, 10) for phase in PHASES}).filter(
            lambda phases: sum(phases.values()) > 1e-6
        ),
        min_size=1,
        max_size=20,
    )
)
def test_the_shares_of_a_step_add_to_one(all_phases):
    events = [
        {"kind": "step", "time": 0.0, "rank": 0, "step": n, "samples": 1, "step_seconds": 1.0, **phases}
        for n, phases in enumerate(all_phases, 1)
    ]
    shares = throughput_info(events, CONFIG).shares
    for point in zip(*shares.values(), strict=True):
        assert sum(point) == pytest.approx(1)
        assert all(0 <= share <= 1 + 1e-9 for share in point)


@given(st.floats(1, 1e15))
def test_limits_leave_a_little_room_and_never_more_than_two_and_a_half_times_the_need(value):
    assert value * 1.1 <= byte_limit(value) <= value * 1.1 * 2
    assert value * 1.05 <= rate_limit(value) <= value * 1.05 * 2.5


def paths(svg):
    return sorted(len(path) for path in re.findall(r'<path d="([^"]*)"', svg))


def test_the_chart_fills_without_moving_and_says_in_words_what_it_shows():
    chart = TrialChart(CONFIG, world_size=2)
    empty = chart.svg()
    boxes = [axes.get_position().bounds for axes in chart.figure.axes]
    chart.add([step(n, rank) for n in (1, 2, 3, 4) for rank in (0, 1)])
    filled = chart.svg()
    assert [axes.get_position().bounds for axes in chart.figure.axes] == boxes
    assert chart.figure.axes[-2].get_xlim() == (0, 10)
    assert "peak host RSS 500 MiB" in filled
    assert 'role="img"' in filled
    assert "currentColor" in filled
    assert paths(filled) != paths(empty)


def test_limits_only_grow():
    chart = TrialChart(CONFIG)
    chart.add([step(1, rss=3 * GIB, seconds=0.01)])
    chart.svg()
    limits = [axes.get_ylim() for axes in chart.figure.axes[:2]]
    chart.add([step(2, rss=MIB, seconds=10)])
    chart.svg()
    assert [axes.get_ylim() for axes in chart.figure.axes[:2]] == limits == [(0, 4 * GIB), (0, 1000)]


def test_a_single_fast_step_leaves_the_axis_and_is_told():
    chart = TrialChart(CONFIG)
    chart.add([step(number) for number in (1, 2, 3, 4, 5)])
    chart.add([step(6, seconds=0.001, wait=0.0)])
    chart.svg()
    speed = chart.figure.axes[1]
    assert speed.get_ylim() == (0, 10_000)
    chart.add([step(number) for number in range(7, 40)])
    assert "spikes to 8000" in chart.svg()
    assert speed.get_ylim() == (0, 500)


def test_the_peak_a_rank_reports_at_its_end_counts_and_does_not_move_the_chart():
    ended = {"kind": "fit_ended", "time": 9.0, "rank": 0, "peak_host_rss_bytes": 3 * GIB}
    info = trace_of([step(1, rss=GIB), ended], CONFIG).memory()
    assert info.peak("host_rss_bytes") == 3 * GIB
    assert info.largest("host_rss_bytes") == GIB


def test_a_long_trial_shows_its_start_and_makes_room_in_steps():
    assert [step_limit(last, 5000) for last in (0, 50, 51, 180, 4000, 5000)] == [50, 50, 100, 200, 5000, 5000]
    assert step_limit(3, 8) == 8


def test_each_line_of_a_rank_differs_in_colour_and_in_dashes():
    lines = list(TrialChart(CONFIG, world_size=4).figure.axes[0].get_lines())
    assert len({line.get_color() for line in lines}) == len({line.get_linestyle() for line in lines}) == 4


def test_a_gpu_trial_shows_device_memory_above_host_memory():
    device = {"device_allocated_bytes": 2 * GIB, "device_reserved_bytes": 3 * GIB}
    chart = TrialChart(CONFIG, has_device=True)
    chart.add([step(n, **device) for n in (1, 2, 3)])
    chart.svg()
    titles = [axes.get_title(loc="left") for axes in chart.figure.axes]
    assert re.fullmatch("device memory.*, GiB", titles[0])
    assert re.fullmatch("host RSS.*, MiB", titles[1])


def test_more_ranks_than_fit_the_legend_are_counted_there():
    (legend, *_) = TrialChart(CONFIG, world_size=9).figure.legends
    assert [text.get_text() for text in legend.get_texts()][-1] == "and 4 more"


def test_the_length_a_fit_reports_replaces_the_configured_one():
    chart = TrialChart(CONFIG)
    chart.add([{"kind": "fit_started", "time": 0.0, "rank": 0, "world_size": 1, "max_steps": 6}])
    chart.svg()
    assert chart.figure.axes[-2].get_xlim() == (0, 6)


def test_a_png_stands_alone():
    chart = TrialChart(CONFIG)
    chart.add([step(1)])
    assert chart.still().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("world_size", "every", "absent"), [(1, 0, {"communication", "validation"}), (2, 0, {"validation"}), (2, 4, set())]
)
def test_the_legend_names_what_a_trial_can_spend_time_on(world_size, every, absent):
    chart = TrialChart(CONFIG.replace({"trial.validate_every_steps": every}), world_size)
    named = {text.get_text() for text in chart.figure.legends[-1].get_texts()}
    assert named == {PHASE_LABELS[phase] for phase in PHASES} - absent - {"checkpoint", "logging"}


def test_a_validation_counts_for_throughput_and_its_share_is_told_also_after_the_last_step():
    steps = [step(n, seconds=0.2, wait=0.0, validation_seconds=0.1 * (n == 4)) for n in (3, 4)]
    info = throughput_info(steps, CONFIG)
    assert info.mean_samples_per_second == pytest.approx(40)
    ended = {"kind": "fit_ended", "rank": 0, "validation_seconds": 0.2, "checkpoint_seconds": 0.2}
    whole = throughput_info([*steps, ended], CONFIG)
    assert whole.mean_samples_per_second == pytest.approx(20)
    assert "validation" in whole.sentence
    assert whole.mean_shares["checkpoint"] > 0


@pytest.fixture(scope="module")
def estimate():
    recording = Recording.load(Path(__file__).parents[1] / "kept" / "recording.npz")
    return dataclasses.replace(estimated(recording, CPU), complete=True, device_kind="cpu")


def test_what_was_predicted_stands_behind_the_lines_and_limits_make_room_for_it():
    chart = TrialChart(CONFIG)
    chart.add([step(number) for number in range(1, 6)])
    memory, speed = chart._memory[0].band, chart._speed.band
    chart.expect(None, SpeedRange(samples_per_second=900, low=800, high=1100, source="an earlier trial"))
    text = chart.svg()
    assert (speed.get_y(), speed.get_height(), speed.get_visible()) == (800, 300, True)
    assert speed.axes.get_ylim()[1] >= 1100
    assert not memory.get_visible()
    assert "predicted 800 to 1100" in text
    assert "no prediction" in text
    chart.expect(soon=True)
    assert "being predicted" in chart.svg()


def test_the_band_of_memory_is_that_of_the_line_before_it(estimate):
    assert memory_band(estimate) == estimate.total_bytes, "of the process, on the CPU"
    on_gpu = dataclasses.replace(estimate, device_kind="cuda")
    assert memory_band(on_gpu) == (on_gpu.device_allocated_bytes, on_gpu.device_reserved_bytes)
    assert memory_band(dataclasses.replace(estimate, complete=False)) is None
    chart = TrialChart(CONFIG)
    chart.expect(estimate)
    assert chart._memory[0].band.get_y() == estimate.total_bytes[0]
