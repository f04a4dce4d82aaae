"""The drawing of a pipeline: of real trials, read back from their directories too, and of many ranks and steps."""

import dataclasses
import re

import pytest
from pipeline_events import CONFIG, begin, steps
from waiting import PATIENCE_SECONDS

from kit.charts import style as look
from kit.charts.pipeline import MOST_RANKS, draw_pipeline, pipeline_figure
from kit.errors import TrialError
from kit.memory.alongside import fit
from kit.records.trace import pipeline_info
from kit.trial.trial import Trial

SECONDS = PATIENCE_SECONDS


def words(chart):
    return [text.get_text() for text in chart.texts]


def titles(chart):
    return [axes.get_title(loc="left") for axes in chart.axes]


@pytest.mark.slow
@pytest.mark.parametrize(("ranks", "workers"), [(1, 0), (2, 0), (1, 1)])
def test_a_trial_of_kits_own_loader_draws_every_row_and_the_wire(own, ranks, workers):
    trial = fit(own(ranks, **{"loader.num_workers": workers})).wait(SECONDS)
    info = pipeline_info([*trial.events, *trial.steps], trial.config)
    assert info.ranks == tuple(range(ranks))
    assert info.overlaps is (workers == 0)
    assert all(len(info.train[rank]) == len(info.get_batch[rank]) == 8 for rank in info.ranks)
    assert all(read[1] <= train[0] + 1e-3 for read, train in zip(info.get_batch[0], info.train[0], strict=True))
    assert sum(info.rates.requests_per_second) > 0
    chart = pipeline_figure(trial)
    assert words(chart)[0] == info.finding
    assert re.search("store: at most .*", titles(chart)[2])
    assert look.png(Trial.open(trial.run_directory).figure("pipeline")) == look.png(chart)
    assert look.png(pipeline_figure(str(trial.run_directory))) == look.png(chart)


def test_a_trial_of_another_loader_draws_without_the_wire(config):
    trial = fit(config(), "kit.testing:TinyModule", "kit.testing:TinyData").wait(SECONDS)
    chart = pipeline_figure(trial)
    assert len(chart.axes) == 2
    assert "loader start-up" in words(chart)[1]


def test_the_warm_up_is_shaded_and_said(config):
    trial = fit(config(max_steps=8, warmup_steps=3), "kit.testing:TinyModule", "kit.testing:TinyData").wait(SECONDS)
    info = pipeline_info([*trial.events, *trial.steps], trial.config)
    assert info.train[0][2][1] == pytest.approx(info.warmup_seconds)
    assert "warm-up" in titles(draw_pipeline(info))[0]
    without = dataclasses.replace(info, warmup_seconds=0.0)
    assert "warm-up" not in titles(draw_pipeline(without))[0]


def test_a_trial_without_a_step_and_a_part_without_one_are_refused(config):
    trial = fit(config(), "kit.testing:TinyModule", "kit.testing:TinyData")
    trial.kill()
    with pytest.raises(TrialError, match="no step .*finished"):
        pipeline_figure(trial)
    done = fit(config(), "kit.testing:TinyModule", "kit.testing:TinyData").wait(SECONDS)
    with pytest.raises(TrialError, match="no step .*between"):
        pipeline_figure(done, seconds=(1e6, 2e6))


def test_many_ranks_and_steps_stay_readable_and_small():
    events = [event for rank in range(20) for event in (*begin(rank), *steps(2000, rank, wait=0.001))]
    chart = draw_pipeline(pipeline_info(events, CONFIG))
    assert f"the first {MOST_RANKS}" in titles(chart)[0]
    assert len(look.svg(chart, "pipeline")) < 1_000_000


@pytest.mark.parametrize(
    ("place", "field", "near", "unit"),
    [(2, "total_bandwidth_bytes_per_second", 30_000, "B/s"), (3, "requests_per_second", 120, "/s")],
)
def test_a_near_limit_of_bytes_or_of_requests_is_a_line_and_a_far_one_is_words(place, field, near, unit):
    def lines(limit):
        chart = draw_pipeline(pipeline_info([*begin(), *steps()], CONFIG.replace({f"chunking.{field}": limit})))
        before, _, after = titles(chart)[place].partition(", of the config's ")
        assert before.endswith(unit)
        assert after.endswith(unit)
        return len(chart.axes[place].lines)

    assert (lines(near), lines(10**9)) == (1, 0)


def test_the_gantt_has_the_waits_beside_it_and_the_wire_below_it():
    chart = draw_pipeline(pipeline_info([*begin(), *steps()], CONFIG))
    gantt, waits, bytes_, requests = chart.axes
    assert [label.get_text() for label in gantt.get_yticklabels()] == ["set-up", "get batch", "train", "epoch"]
    named = [text.get_text() for text in chart.legends[0].get_texts()]
    assert named == ["set-up", "loader start-up", "get batch", "train", "waiting for data", "epoch"]
    boxes = [axes.get_position() for axes in (gantt, waits, bytes_, requests)]
    assert boxes[0].x1 < boxes[1].x0
    assert (boxes[0].y0, boxes[0].y1) == (boxes[1].y0, boxes[1].y1)
    assert boxes[0].y0 > boxes[2].y1 > boxes[2].y0 > boxes[3].y1
    assert sum(patch.get_data().values.sum() for patch in waits.patches) == 8  # steps after warm-up
    assert {axes.get_xlim() for axes in (gantt, bytes_, requests)} == {gantt.get_xlim()}


def test_long_set_up_is_cut_and_its_length_is_said():
    chart = draw_pipeline(pipeline_info([*begin(set_up=200.0), *steps()], CONFIG))
    assert any("3 min 20 s" in text.get_text() for text in chart.axes[0].texts)
    assert chart.axes[0].get_xlim()[0] > -2
