import pytest
from diagnosis_parts import PEAKS, evidence, shares, source, work

from kit.charts.compare import roofline_figure
from kit.studies.diagnosis.diagnose import judge, roofline_of


def test_mfu_is_the_time_at_the_peak_over_the_time_it_took():
    """5e10 FLOPs of a 1e11 FLOP/s device, in a batch of 10 samples at 10 samples/s."""
    found = roofline_of(evidence())
    assert found.mfu_fraction == pytest.approx(0.5)
    assert found.flops_per_second == pytest.approx(5e10)
    assert found.intensity == pytest.approx(50)
    assert found.ridge == pytest.approx(10)
    assert found.roof_flops_per_second == pytest.approx(1e11)
    assert "MFU 50.0%" in found.sentence


def test_each_number_format_is_held_against_its_own_peak():
    found = roofline_of(evidence(work=work(flops={"float32": 2e10, "bfloat16": 4e10})))
    assert found.dtype == "bfloat16"
    assert found.mfu_fraction == pytest.approx(0.2 + 0.1)


def test_below_the_ridge_memory_is_the_roof():
    found = roofline_of(evidence(work=work(bytes=1e10)))
    assert found.roof_flops_per_second == pytest.approx(5 * 1e10)


@pytest.mark.parametrize(
    ("change", "bound"),
    [
        ({}, "compute"),
        ({"work": work(flops={"float32": 1e10}, bytes=8e9)}, "memory bandwidth"),
        ({"work": work(flops={"float32": 1e9}, bytes=1e8)}, "calls and Python"),
        ({"work": work(flops={"float32": 1e9}, bytes=1e8), "queued_fraction": 0.5}, "a busy machine"),
        ({"queued_fraction": 0.2}, "compute"),
        ({"shares": shares(wait=0.7)}, "data"),
        ({"shares": shares(communication=0.6), "world_size": 2}, "communication"),
    ],
)
def test_the_bound_is_what_takes_the_time(change, bound):
    assert roofline_of(evidence(**change)).bound == bound


def test_gpus_have_a_peak_each_and_ranks_of_a_cpu_one_together():
    both = {"world_size": 2, "work": work(samples=20), "samples_per_second": 20.0}
    assert roofline_of(evidence(accelerator="gpu", **both)).mfu_fraction == pytest.approx(0.25)
    assert roofline_of(evidence(**both)).mfu_fraction == pytest.approx(0.5)


@pytest.mark.parametrize("change", [{"work": None}, {"peaks": None}, {"work": work(flops={})}])
def test_what_was_not_counted_has_no_roofline(change):
    found = evidence(**change)
    assert roofline_of(found) is None
    with pytest.raises(ValueError, match="no roofline"):
        roofline_figure(judge(found, source(found)))


def test_the_chart_shows_the_trial_under_its_roof_and_marks_the_bound():
    found = evidence()
    roof, parts = roofline_figure(judge(found, source(found))).axes
    assert "MFU 50.0%" in roof.get_title(loc="left")
    (line, _, dot) = roof.lines
    assert max(line.get_ydata()) == PEAKS.peak("float32")
    assert list(dot.get_ydata()) == [5e10]
    assert len({bar.get_facecolor() for bar in parts.patches}) == 2


@pytest.mark.parametrize("bytes_moved", [1e8, 1e9, 1e10])
def test_the_name_of_the_memory_roof_stands_clear_of_the_axis(bytes_moved):
    found = evidence(work=work(bytes=bytes_moved))
    roof, _ = roofline_figure(judge(found, source(found))).axes
    (label,) = [text for text in roof.texts if text.get_text().startswith("memory")]
    assert label.get_window_extent().x0 > roof.get_window_extent().x0
