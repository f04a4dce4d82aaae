"""Layouts under rules and for several readers: every candidate keeps the rules, and what each costs is said."""

import math
import re
from dataclasses import fields

import pytest
from hypothesis import given
from hypothesis import strategies as st
from properties import examples

from kit.chunks.cost import ArrayRequests
from kit.chunks.reasons import plan_layout
from kit.chunks.resources import Host, Network, Prices
from kit.chunks.search import Rules, between, sides_around
from kit.errors import PlanError

FIELDS = {
    "dims": ("time", "lat", "lon"), "shape": (8760, 721, 1440), "itemsize": 4,
    "patch": {"time": 1, "lat": 64, "lon": 64}, "batch_size": 16, "variables": 1, "order": "random", "stride": {},
    "latency_seconds": 0.03, "bandwidth_bytes_per_second": 80e6, "requests_in_flight": 64,
    "total_bandwidth_bytes_per_second": 400e6, "target_shard_bytes": 64 << 20, "chunk": "auto", "shard": "auto",
}  # fmt: skip
SERIES = {"series": {"patch": {"time": 8760}}}


def plan(**changes):
    values = {**FIELDS, **changes}
    network = Network(**{field.name: values.pop(field.name) for field in fields(Network) if field.name in values})
    return plan_layout(network=network, **values)


def one_request_a_sample(access, chunk, shard):
    """As if the chunks of a sample lay beside one another in a shard."""
    chunks = access.batch_size * math.prod(axis.mean for axis in access.axes(chunk)) * access.arrays
    requests = access.batch_size * access.arrays if shard else chunks
    return ArrayRequests(chunks, requests, 0, chunks * math.prod(chunk) * access.element_bytes)


# -- played through


def test_smaller_chunks_are_chosen_where_neighbours_share_requests():
    alone, shared = plan(), plan(play=one_request_a_sample)
    assert shared.chunk_bytes < alone.chunk_bytes
    assert shared.chosen.requests_made_per_batch == FIELDS["batch_size"]
    first = shared.candidates[0]
    assert first.seconds_per_batch == min(cost.seconds_per_batch for cost in shared.best_by_size)
    assert {cost.chunk for cost in shared.candidates} == {cost.chunk for cost in alone.candidates}


def test_what_cannot_be_played_is_priced_a_request_a_chunk():
    alone, none = plan(), plan(play=lambda *_: None)
    assert sorted(none.rows(), key=str) == sorted(alone.rows(), key=str)


def test_readers_are_judged_by_what_is_played():
    answer = plan(readers=SERIES, play=one_request_a_sample)
    for reader in answer.readers:
        assert (reader.cost.chunk, reader.cost.shard) == (answer.chunk, answer.shard)
        assert reader.slowdown >= 0.9  # a best is the plainest of those as fast as the fastest
    own, series = answer.readers
    assert own.cost.requests_made_per_batch == FIELDS["batch_size"]
    assert series.cost.requests_made_per_batch == 1
    assert answer.chosen.slowdown == pytest.approx(
        (own.weight * own.slowdown + series.weight * series.slowdown) / (own.weight + series.weight)
    )


def test_a_chunk_given_by_hand_is_played_too():
    answer = plan(chunk={"lat": 32, "lon": 32}, play=one_request_a_sample)
    assert answer.chosen.requests_made_per_batch == FIELDS["batch_size"]


# -- rules


@examples(60)
@given(
    shape=st.tuples(st.integers(2, 400), st.integers(2, 400)),
    patch=st.tuples(st.integers(1, 60), st.integers(1, 60)),
    divisibility=st.sampled_from(["any", "divides", "power-of-two"]),
    multiple=st.sampled_from([1, 2, 4]),
    limit=st.sampled_from([256, 5000, 5 << 40]),
)
def test_every_candidate_keeps_the_rules_or_the_plan_says_which_cannot_be_kept(
    shape, patch, divisibility, multiple, limit
):
    sizes = {name: min(size, extent) for name, size, extent in zip("ab", patch, shape, strict=True)}
    asked = {
        "dims": "ab", "shape": shape, "patch": sizes, "divisibility": divisibility, "multiple_of": {"a": multiple},
        "largest_object_bytes": limit,
    }  # fmt: skip
    whole = 1 << (shape[0] - 1).bit_length()
    if (divisibility == "divides" and shape[0] % multiple) or (divisibility == "power-of-two" and whole < multiple):
        with pytest.raises(PlanError, match="along a keeps .*rules"):
            plan(**asked)
        return
    answer = plan(**asked)
    for cost in answer.candidates:
        assert cost.chunk[0] % multiple == 0
        assert math.prod(cost.chunk) * 4 <= limit
        assert math.prod(cost.shard or cost.chunk) * 4 <= limit
        for side, extent in zip(cost.chunk, shape, strict=True):
            assert divisibility != "divides" or extent % side == 0
            assert divisibility != "power-of-two" or side & (side - 1) == 0
            assert divisibility != "any" or side < extent + multiple


def test_the_price_of_the_rules_is_said():
    answer = plan(divisibility="divides", patch={"lat": 60, "lon": 60})  # 721 = 7 × 103
    assert answer.chunk[1] in (1, 7, 103, 721)
    assert any(reason.startswith("without the rules") for reason in answer.reasons)


def test_a_small_object_limit_cuts_chunks_and_shards():
    answer = plan(largest_object_bytes=4096)
    assert answer.shard is None or answer.shard_bytes <= 4096
    assert answer.chunk_bytes <= 4096


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"chunk": {"lat": 60}, "divisibility": "divides"}, r"chunk.lat is 60, .*divides 721; .* is 103"),
        ({"chunk": {"lat": 60, "lon": 64}, "divisibility": "power-of-two"}, r"chunk.lat is 60.*is 64"),
        ({"chunk": {"lat": 60}, "multiple_of": {"lat": 8}}, r"multiple of 8; .*closest .* 6"),
        ({"chunk": {"lat": 64}, "largest_object_bytes": 1000}, r"the chunk holds 16 KiB, more than .* 1000 B"),
        (
            {"chunk": {"lat": 64}, "shard": {"lat": 640}, "largest_object_bytes": 20_000},
            r"the shard holds 160 KiB, more than",
        ),
        ({"divisibility": "divides", "multiple_of": {"lat": 8}}, r"along lat keeps .*rules: .*divides 721; .* of 8"),
        ({"multiple_of": {"lat": 64, "lon": 64}, "largest_object_bytes": 1000}, r"smallest object .* 16 KiB"),
        ({"divisibility": "power"}, r"divisibility is 'power'"),
        ({"multiple_of": {"lta": 8}}, r"multiple_of: .*no dimension 'lta'; .* 'lat'"),
    ],
)
def test_rules_that_cannot_be_kept_are_refused(changes, message):
    with pytest.raises(PlanError, match=message):
        plan(**changes)


@given(low=st.lists(st.integers(1, 50), min_size=1, max_size=3), factor=st.integers(1, 200), most=st.integers(8, 300))
def test_layouts_between_two_contain_both_and_stay_few(low, factor, most):
    high = tuple(side * factor for side in low)
    rules = Rules(dims=tuple("abc"[: len(low)]), shape=high, element_bytes=1)
    sides = between(rules, [tuple(low), high], most)
    assert [(choices[0], choices[-1]) for choices in sides] == list(zip(low, high, strict=True))
    assert math.prod(map(len, sides)) <= max(most, 3 ** len(low))


def test_candidates_spread_around_the_patch_and_end_at_the_array():
    rules = Rules(dims=("a", "b"), shape=(100, 10**6), element_bytes=1)
    small, large = sides_around(rules, (100, 64))
    assert small == [100]
    assert (large[0], large[-1]) == (8, 2048)


# -- readers


def test_one_layout_for_two_readers_is_dearer_for_each_and_the_price_is_said():
    answer = plan(readers=SERIES)
    own, series = answer.readers
    assert (own.name, series.name) == ("this plan", "series")
    assert own.slowdown > 1
    assert series.slowdown > 1
    assert answer.chosen.slowdown == pytest.approx((own.slowdown + series.slowdown) / 2)
    assert series.best.chunk[0] > 100 * series.best.chunk[1]
    assert own.best.chunk[0] < own.best.chunk[1]
    assert any(reason.startswith("one layout for 2 readers") for reason in answer.reasons)


def test_the_shared_layout_is_better_for_both_together_than_either_best_alone():
    answer = plan(readers=SERIES)
    for other in answer.readers:
        chunk = dict(zip(answer.dims, other.best.chunk, strict=True))
        alone = plan(readers=SERIES, chunk=chunk)
        assert answer.chosen.slowdown <= alone.chosen.slowdown * 1.1


def test_weight_draws_the_layout_towards_its_reader():
    light, heavy = (plan(readers={"series": {"patch": {"time": 8760}, "weight": w}}) for w in (0.01, 100))
    assert light.readers[0].slowdown < 1.2
    assert heavy.readers[1].slowdown < 1.2
    assert heavy.chunk[0] > light.chunk[0]


def test_readers_are_shown_in_both_forms_each_with_its_price():
    answer = plan(readers=SERIES)
    lines = str(answer).splitlines()
    for reader in answer.readers:
        (line,) = [line for line in lines if line.startswith(f"{reader.name} ")]
        assert line.endswith(f"{reader.slowdown:.3g} × the time")
        assert f"{reader.slowdown:.3g} × the time" in answer._repr_html_()
    assert "price of sharing" in str(answer)
    assert "price of sharing" in answer._repr_html_()
    assert "slowdown" in str(answer)


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        ({}, r"readers\.series .*patch"),
        ({"patch": {"time": 1}, "wieght": 2}, r"no field 'wieght'; .* 'weight'"),
        ({"patch": {"time": 1}, "weight": 0}, r"readers.series.weight is 0"),
        ({"patch": {"time": 9000}}, r"readers.series.patch.time is 9000, larger .* 8760"),
        ({"patch": {"tiem": 1}}, r"readers.series.patch: .* did you mean 'time'"),
        ({"patch": {"time": 1}, "order": "rows"}, r"readers.series: order is 'rows'"),
        ({"patch": {"time": 1}, "batch_size": 0}, r"readers.series: batch_size is 0"),
    ],
)
def test_readers_that_cannot_be_are_refused(entry, message):
    with pytest.raises(PlanError, match=message):
        plan(readers={"series": entry})


# -- orders, memory, money


def test_block_order_says_what_it_gains_and_keeps_the_places_asked_for():
    answer = plan(order="block", pattern={"samples_per_epoch": 10**6})
    assert answer.chosen.window.full
    assert any("random order" in reason for reason in answer.reasons)
    assert "mixing" in str(answer)
    assert answer.samples_per_second > 2 * plan(pattern={"samples_per_epoch": 10**6}).samples_per_second


def test_block_order_says_what_more_samples_of_a_block_gain_and_what_an_epoch_then_sees():
    answer = plan(order="block", pattern={"samples_per_epoch": 10**6})
    (said,) = [reason for reason in answer.reasons if "block_reuse 4" in reason]
    ((then, now),) = re.findall(r"see (\d+)% of the array instead of (\d+)%", said)
    assert 0 < int(then) < int(now)


def test_random_order_says_what_block_order_would_gain():
    assert any(reason.startswith("block-shuffled order") for reason in plan().reasons)


def test_no_layout_that_fits_gives_way_to_one_that_does_not():
    answer = plan(host=Host(memory_bytes=60e6))
    assert answer.chosen.fits
    assert answer.chosen.memory_bytes <= 60e6
    cramped = plan(host=Host(memory_bytes=6e5))
    assert not cramped.chosen.fits
    assert any(reason.startswith("does not fit") for reason in cramped.reasons)
    assert "does not fit" in str(cramped)


def test_the_request_limit_is_shared_by_all_ranks_and_named():
    answer = plan(requests_per_second=5000, pattern={"ranks": 8}, total_bandwidth_bytes_per_second=math.inf)
    assert answer.chosen.bound == "request rate"
    assert any(re.search(r"request rate .*\(625/s .*rank", reason) for reason in answer.reasons)
    assert "on each of 8 ranks" in str(answer)


def test_money_is_shown_only_with_prices():
    assert "price/epoch" not in str(plan())
    assert "price/epoch" in str(plan(prices=Prices(per_thousand_reads=0.0004)))


def test_rows_hold_every_candidate_the_best_first():
    answer = plan()
    rows = answer.rows()
    assert len(rows) == len(answer.candidates)
    assert rows[0]["seconds_per_batch"] == min(row["seconds_per_batch"] for row in rows)
    told = {"chunk", "shard", "bound", "price_per_epoch", "memory_bytes", "cache_bytes", "object_count", "mixing"}
    assert told <= set(rows[0])


def test_variables_together_are_offered_where_they_pay():
    answer = plan(variables=4)
    assert any("in one array" in reason for reason in answer.reasons)
    assert plan(variables=4, pattern={"together": True}).samples_per_second > answer.samples_per_second


@pytest.mark.parametrize("order", ["random", "grid", "block"])
def test_a_trillion_elements_are_planned_without_listing_them(order):
    answer = plan(
        dims="tzyx", shape=(10_000, 100, 1000, 1000), patch={"t": 3, "z": 10, "y": 64, "x": 64}, order=order,
        pattern={"ranks": 8, "samples_per_epoch": 10**6, "epochs": 3}, host=Host(cache_bytes=1 << 30),
    )  # fmt: skip
    assert 40 < len(answer.candidates) < 400
    assert answer.samples_per_second > 0


def test_any_item_size_and_one_dimension():
    answer = plan(dims="x", shape=(10**6,), itemsize=24, patch={"x": 1000}, chunk="auto")
    assert answer.patch_bytes == 24_000
    assert answer.chunk_bytes == answer.chunk[0] * 24


def test_padding_is_told_apart_from_what_a_store_holds():
    def held(extent):
        reasons = plan(dims="x", shape=(extent,), itemsize=4, patch={"x": 8}, chunk={"x": 1024}, shard="none").reasons
        return next(re.search("store holds .*", reason)[0] for reason in reasons if "store holds" in reason)

    assert held(2048).split(" ", 2)[2] == "8 KiB"
    assert re.search("4.02 KiB, .* 8 KiB .*padding", held(1028))


def test_chunks_that_samples_share_are_counted_as_chunks_beside_the_requests_of_a_batch():
    patch, chunk = {"time": 2, "lat": 48, "lon": 80}, {"time": 4, "lat": 180, "lon": 320}
    answer = plan(shape=(48, 180, 360), patch=patch, chunk=chunk, batch_size=5, variables=3)
    (told,) = [reason for reason in answer.reasons if "batch share" in reason]
    chunks = answer.chosen.requests_per_batch
    assert f"{chunks:.3g} chunks" in told
