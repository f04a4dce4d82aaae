"""The numbers behind the chart of a pipeline: spans of every rank, waits without warm-up, rates that add up."""

import math
import re
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pipeline_events import CONFIG, START, begin, steps

from kit.records.trace import MOST_BINS, histogram, merged, pipeline_info


def info_of(*events, config=CONFIG, **options):
    return pipeline_info([*begin(), *events], config, **options)


def test_set_up_and_the_loaders_start_up_are_told_apart_from_the_waits():
    info = info_of(*steps())
    assert info.set_up[0] == ((-2.0, 0.0),)
    assert info.set_up_seconds == pytest.approx(2)
    assert info.start_up_seconds == pytest.approx(1)
    assert info.waits == (0.03,) * 8
    assert len(info.wait[0]) == 9


def test_the_finding_is_the_share_of_time_after_warmup():
    info = info_of(*steps())
    assert info.data_wait_fraction == pytest.approx(0.75)
    assert re.search("Waiting .*75 %", info.finding)
    assert "less than 1 %" in info_of(*steps(wait=0.00001)).finding
    assert "warm-up" in info_of(*steps(2)).finding


def test_waiting_and_training_fill_the_time_between_the_first_batch_and_the_end():
    info = info_of(*steps())
    spans = sorted([*info.train[0], *info.wait[0]])
    assert all(before[1] == pytest.approx(after[0], abs=1e-6) for before, after in pairwise(spans))
    assert spans[0][0] == pytest.approx(info.start_up_seconds)


def test_get_batch_is_the_reading_where_the_loader_tells_and_the_wait_elsewhere():
    told, other = info_of(*steps()), info_of(*steps(counted=False))
    assert told.overlaps
    assert told.mean_get_batch_seconds == pytest.approx(0.05, abs=1e-6)
    assert not other.overlaps
    assert other.mean_get_batch_seconds == pytest.approx(0.03, abs=1e-6)
    assert other.rates is None
    assert other.settings == ()


def test_an_epoch_lasts_from_the_end_of_the_one_before():
    info = info_of(*steps(10, epoch_steps=4))
    assert len(info.epoch[0]) == 3
    assert info.epoch[0][0][0] == 0
    assert all(before[1] == after[0] for before, after in pairwise(info.epoch[0]))


def test_every_rank_has_its_spans_and_rates_are_of_all_together():
    both = pipeline_info([*begin(0), *begin(1), *steps(), *steps(rank=1)], CONFIG)
    one = info_of(*steps())
    assert both.ranks == (0, 1)
    assert both.rates.bytes_per_second == pytest.approx([2 * rate for rate in one.rates.bytes_per_second])
    assert len(both.waits) == 16


@given(count=st.integers(2, 300), start_up=st.floats(0.01, 100), train=st.floats(0.001, 1))
def test_rates_times_widths_are_everything_that_was_read(count, start_up, train):
    rates = info_of(*steps(count, start_up=start_up, train=train)).rates
    widths = [after - before for before, after in pairwise(rates.edges)]
    assert len(rates.bytes_per_second) == len(rates.requests_per_second) == len(widths) <= MOST_BINS
    read = sum(rate * width for rate, width in zip(rates.bytes_per_second, widths, strict=True))
    assert read == pytest.approx(1000 * count, rel=1e-3)


def test_limits_are_the_configs_and_a_folder_has_none():
    remote = info_of(*steps())
    assert (remote.limit_bytes_per_second, remote.limit_requests_per_second) == (400e6, 5000)
    unlimited = info_of(*steps(), config=CONFIG.replace({"chunking.requests_per_second": 0}))
    assert unlimited.limit_requests_per_second is None
    local = info_of(*steps(), config=CONFIG.replace({"data.url": "data/store.zarr"}))
    assert (local.limit_bytes_per_second, local.limit_requests_per_second) == (None, None)


def test_a_part_shows_what_reaches_into_it_and_keeps_the_shares_of_the_whole():
    whole, part = info_of(*steps()), info_of(*steps(), seconds=(1.0, 1.1))
    assert 0 < len(part.train[0]) < len(whole.train[0])
    assert part.finding == whole.finding


@pytest.mark.parametrize("name", ["save", "validation"])
def test_what_is_told_whole_is_a_row_of_its_own(name):
    told = {"kind": "span", "rank": 0, "time": START + 2, "name": name, "started": START + 1, "ended": START + 2}
    info = info_of(*steps(), told)
    assert getattr(info, name)[0] == ((1.0, 2.0),)
    assert {"save": info.validation, "validation": info.save}[name][0] == ()


def test_without_a_finished_step_there_is_nothing_to_show():
    with pytest.raises(ValueError, match="no step"):
        pipeline_info(begin(), CONFIG)


@given(st.lists(st.floats(0, 1e3), min_size=1, max_size=200))
def test_every_wait_is_in_one_bin_of_the_histogram(waits):
    edges, counts = histogram(waits)
    assert sum(counts) == len(waits)
    assert len(edges) == len(counts) + 1
    assert edges[0] == 0
    assert all(before < after for before, after in pairwise(edges))


@given(st.lists(st.tuples(st.floats(0, 100), st.floats(0, 5)), max_size=60), st.floats(0.001, 2))
def test_merging_covers_the_same_moments_and_leaves_no_narrow_gap(pairs, gap):
    spans = tuple((begin, begin + length) for begin, length in pairs)
    joined = merged(spans, gap)
    assert all(after[0] - before[1] >= gap for before, after in pairwise(joined))
    assert all(any(low <= begin and end <= high for low, high in joined) for begin, end in spans)
    if spans:
        assert min(begin for begin, _ in joined) == min(begin for begin, _ in spans)
        assert max(end for _, end in joined) == max(end for _, end in spans)
    assert not any(math.isnan(moment) for span in joined for moment in span)
