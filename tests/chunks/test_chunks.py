"""Chunks: the published table to the digit, counts against brute force, and plans whose choice is really the best."""

import itertools
import math
import random
from dataclasses import fields

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from properties import examples

from kit.chunks.access import Access
from kit.chunks.cost import balanced_ratio, price
from kit.chunks.geometry import Axis, axes_of
from kit.chunks.reasons import plan_layout
from kit.chunks.resources import Network
from kit.chunks.search import CLOSE, LEAST_CHUNK_BYTES, fill_shard
from kit.chunks.sharing import Shuffled
from kit.chunks.table import chunk_table
from kit.errors import PlanError

PUBLISHED = """
8x8 64 81 4096 5184
16x16 16 25 4096 6400
32x32 4 9 4096 9216
64x64 1 4 4096 16384
128x128 1 4 16384 65536
256x256 1 4 65536 262144
512x512 1 4 262144 1048576
1024x1024 1 4 1048576 4194304
"""
SIDES = [8, 16, 32, 64, 128, 256, 512, 1024]


def distinct_chunks(axes, samples, *, replacement):
    return Shuffled(tuple(axes), replacement).distinct(samples)


def expected_distinct_chunks(shape, chunk, patch, samples):
    return distinct_chunks(axes_of(shape, chunk, patch, [1] * len(shape)), samples, replacement=True)


def touched(offset, size, chunk):
    """Chunks a patch touches, by listing its elements."""
    return {element // chunk for element in range(offset, offset + size)}


@st.composite
def axis_strategy(draw, most=40):
    extent = draw(st.integers(1, most))
    return Axis(extent, draw(st.integers(1, extent)), draw(st.integers(1, most)), draw(st.integers(1, 9)))


# -- the table


def test_the_published_table_is_reproduced_to_the_digit():
    table = chunk_table(sample=(64, 64), chunk_sides=SIDES, itemsize=1)
    names = ("chunk_size", "minimal_chunks", "maximal_chunks", "minimal_bytes", "maximal_bytes")
    ours = [" ".join(str(row[name]) for name in names) for row in table.rows()]
    assert ours == PUBLISHED.split("\n")[1:-1]


def test_the_expected_columns_say_that_random_offsets_nearly_always_meet_the_maximum():
    rows = {row.chunk_size: row for row in chunk_table((64, 64), SIDES)}
    assert rows["64x64"].expected_chunks == pytest.approx((1 + 63 / 64) ** 2)
    assert rows["64x64"].expected_bytes == pytest.approx(16129)
    assert rows["256x256"].expected_bytes == pytest.approx(101761)


def test_the_best_balance_is_the_chunk_of_the_sample_size():
    assert chunk_table((64, 64), SIDES).best.chunk_size == "64x64"


@given(st.integers(1, 30), st.integers(1, 30))
def test_table_counts_are_the_extremes_and_the_mean_over_all_offsets_in_a_chunk(size, chunk):
    counts = [len(touched(offset, size, chunk)) for offset in range(chunk)]
    (row,) = chunk_table((size,), [chunk])
    assert (row.minimal_chunks, row.maximal_chunks) == (min(counts), max(counts))
    assert row.expected_chunks == pytest.approx(sum(counts) / chunk)


def test_item_size_multiplies_bytes_and_leaves_chunks_alone():
    small, large = chunk_table((5, 6, 7), [(2, 3, 4)], 1)[0], chunk_table((5, 6, 7), [(2, 3, 4)], 8)[0]
    assert small.chunk_size == "2x3x4"
    assert (large.minimal_chunks, large.maximal_bytes) == (small.minimal_chunks, 8 * small.maximal_bytes)


@pytest.mark.parametrize("sides", [(64, [64]), ((64, 64), 64)])
def test_a_table_of_numbers_alone_is_refused(sides):
    with pytest.raises(PlanError, match="several sizes"):
        chunk_table(*sides)


@pytest.mark.parametrize("sides", [((64, 64), [8.5]), ((64, 64), [(8, 8.0)]), ((64, 6.4), [8]), ((64, 64), ["8x8"])])
def test_a_side_that_is_no_whole_number_is_refused(sides):
    with pytest.raises(PlanError, match="no side of .* whole numbers"):
        chunk_table(*sides)


def test_a_side_may_be_a_whole_number_of_numpy():
    assert chunk_table((64, 64), np.array([32, 64])).rows() == chunk_table((64, 64), [32, 64]).rows()


def test_a_shape_counts_only_offsets_that_exist():
    free, fixed = chunk_table((8, 8), [8])[0], chunk_table((8, 8), [8], shape=(8, 16))[0]
    assert (free.maximal_chunks, fixed.maximal_chunks) == (4, 2)
    assert fixed.expected_chunks == pytest.approx((1 + 7 * 2 + 1) / 9)


def test_a_table_prints_and_marks_the_best_row_in_both_forms():
    table = chunk_table((64, 64), SIDES)
    marked = [line for line in str(table).splitlines() if line.startswith("→")]
    assert len(marked) == 1
    assert "64x64" in marked[0]
    assert "64x64 <span" in table._repr_html_()
    assert "var(--jp-ui-font-color1, #222)" in table._repr_html_()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (((64, 64), [0]), "chunk is 0"),
        (((64, 64), [(8,)]), "differ in length"),
        (((64, 64), []), "at least one"),
        (((64, 64), [8], 0), "itemsize is 0"),
        (((64, 64), [8], 1, (32, 64)), "patch of 64 .*array of 32"),
    ],
)
def test_a_table_that_cannot_be_is_refused(arguments, message):
    with pytest.raises(PlanError, match=message):
        chunk_table(*arguments)


# -- counts


@given(axis_strategy())
def test_an_axis_counts_what_listing_every_offset_counts(axis):
    offsets = range(0, axis.extent - axis.size + 1, axis.stride)
    counts = [len(touched(offset, axis.size, axis.chunk)) for offset in offsets]
    assert axis.positions == len(counts)
    assert (axis.fewest, axis.most) == (min(counts), max(counts))
    assert axis.mean == pytest.approx(sum(counts) / len(counts))
    assert sum(axis.touches().values()) == axis.chunks


@examples(60)
@given(st.lists(axis_strategy(most=7), min_size=1, max_size=2), st.integers(0, 3), st.booleans())
def test_distinct_chunks_equal_the_mean_over_every_possible_batch(axes, samples, replacement):
    places = list(itertools.product(*(range(0, a.extent - a.size + 1, a.stride) for a in axes)))
    sets = [
        set(itertools.product(*(touched(o, a.size, a.chunk) for o, a in zip(place, axes, strict=True))))
        for place in places
    ]
    draws = (
        list(itertools.product(sets, repeat=samples))
        if replacement
        else list(itertools.combinations(sets, min(samples, len(sets))))
    )
    truth = sum(len(set().union(*draw)) for draw in draws) / len(draws)
    assert distinct_chunks(axes, samples, replacement=replacement) == pytest.approx(truth)


def test_distinct_chunks_agree_with_a_simulation():
    shape, chunk, patch, samples = (100, 90), (16, 8), (20, 30), 12
    dice = random.Random(7)
    total, rounds = 0, 800
    for _ in range(rounds):
        union = set()
        for _ in range(samples):
            spans = [touched(dice.randint(0, n - s), s, c) for n, s, c in zip(shape, patch, chunk, strict=True)]
            union |= set(itertools.product(*spans))
        total += len(union)
    assert expected_distinct_chunks(shape, chunk, patch, samples) == pytest.approx(total / rounds, rel=0.02)


def test_one_sample_has_as_many_distinct_chunks_as_it_touches():
    axes = axes_of((1000, 700), (64, 32), (64, 48), (1, 1))
    assert expected_distinct_chunks((1000, 700), (64, 32), (64, 48), 1) == pytest.approx(axes[0].mean * axes[1].mean)


def test_many_samples_touch_every_chunk_and_never_more():
    assert expected_distinct_chunks((100, 100), (10, 10), (5, 5), 10**9) == pytest.approx(100)


def test_billions_of_chunks_are_counted_without_being_listed():
    axis = Axis(10**12, 64, 1, 64)
    assert axis.mean == pytest.approx(64)
    assert sum(axis.touches().values()) == 10**12


@given(axis_strategy(), st.integers(1, 50))
def test_a_batch_never_reads_more_than_its_samples_alone(axis, samples):
    union = distinct_chunks([axis], samples, replacement=True)
    assert axis.mean <= union * (1 + 1e-12)
    assert union <= min(samples * axis.mean, axis.chunks) * (1 + 1e-12)


# -- cost

OCEAN = {
    "dims": ("time", "lat", "lon"), "shape": (120, 360, 720), "itemsize": 2,
    "patch": {"time": 3, "lat": 64, "lon": 64}, "batch_size": 16, "variables": 3, "order": "random", "stride": {},
    "latency_seconds": 0.03, "bandwidth_bytes_per_second": 80e6, "requests_in_flight": 32,
    "target_shard_bytes": 64 << 20, "chunk": "auto", "shard": "auto",
}  # fmt: skip


def plan(**changes):
    values = {**OCEAN, **changes}
    network = Network(**{field.name: values.pop(field.name) for field in fields(Network) if field.name in values})
    return plan_layout(network=network, **values)


@pytest.mark.parametrize(
    ("changes", "said", "unsaid"),
    [
        ({}, "nothing were compressed", "compressed 2 times"),
        ({"pattern": {"compression_ratio": 2.0}}, "compressed 2 times", "nothing were compressed"),
        ({"shard": "none"}, "× patch", "neighbours in a shard"),
    ],
)
def test_the_key_says_what_the_bytes_and_requests_leave_out(changes, said, unsaid):
    answer = plan(**changes)
    for shown in (repr(answer), answer._repr_html_()):
        assert said in shown
        assert unsaid not in shown
    assert ("neighbours in a shard" in repr(answer)) == (answer.shard is not None)


def access(**changes):
    values = {
        "shape": (20_000, 20_000), "itemsize": 4, "patch": (64, 64), "stride": (64, 64), "order": "random",
        "batch_size": 64, "variables": 1,
    }  # fmt: skip
    return Access(**{**values, **changes})


def test_seconds_follow_the_documented_formula():
    network = Network(latency_seconds=0.03, bandwidth_bytes_per_second=80e6, requests_in_flight=32)
    cost = price(access(), network, (64, 64))
    requests = expected_distinct_chunks((20_000, 20_000), (64, 64), (64, 64), 64)
    assert cost.requests_per_batch == pytest.approx(requests)
    assert cost.seconds_per_batch == pytest.approx(requests * (0.03 + 64 * 64 * 4 / 80e6) / 32)
    assert cost.bound == "latency"


def test_the_total_bandwidth_caps_the_connections_together():
    network = Network(
        latency_seconds=0.03, bandwidth_bytes_per_second=80e6, requests_in_flight=64,
        total_bandwidth_bytes_per_second=1e6,
    )  # fmt: skip
    cost = price(access(), network, (64, 64))
    assert cost.bound == "total bandwidth"
    assert cost.seconds_per_batch == pytest.approx(cost.bytes_per_batch / 1e6)


def test_a_small_batch_cannot_use_every_connection_unless_batches_are_read_ahead():
    network = {"latency_seconds": 0.03, "bandwidth_bytes_per_second": 80e6, "requests_in_flight": 1000}
    alone = price(access(batch_size=1), Network(**network), (64, 64))
    ahead = price(access(batch_size=1), Network(**network, batches_ahead=3), (64, 64))
    assert alone.seconds_per_batch == pytest.approx(0.03 + 64 * 64 * 4 / 80e6)
    assert ahead.seconds_per_batch == pytest.approx(alone.seconds_per_batch / 4)


def test_chunk_equal_to_patch_is_best_exactly_when_the_patch_holds_latency_times_bandwidth():
    """The closed form against a fine search over square chunks, away from edges and shared chunks."""
    for patch_bytes_over_break_even in (0.05, 1.0, 20.0):
        itemsize = 8
        break_even = 64 * 64 * itemsize / patch_bytes_over_break_even
        network = Network(latency_seconds=break_even / 80e6, bandwidth_bytes_per_second=80e6, requests_in_flight=4)
        asked = access(shape=(10**9, 10**9), itemsize=itemsize, batch_size=8)
        best = min(range(8, 400), key=lambda side: price(asked, network, (side, side)).seconds_per_batch)
        assert best == pytest.approx(64 * balanced_ratio(asked, network), rel=0.03)


def test_a_sample_reads_at_best_on_average_and_at_worst_what_its_offsets_say():
    shape, patch, chunk, itemsize = (20, 30), (5, 6), (4, 7), 3
    counts = [
        len(touched(y, patch[0], chunk[0])) * len(touched(x, patch[1], chunk[1]))
        for y, x in itertools.product(*(range(n - s + 1) for n, s in zip(shape, patch, strict=True)))
    ]
    asked = access(shape=shape, patch=patch, stride=(1, 1), itemsize=itemsize, variables=2)
    cost = price(asked, Network(latency_seconds=0.03, bandwidth_bytes_per_second=8e7, requests_in_flight=8), chunk)
    expected = [2 * count for count in (min(counts), sum(counts) / len(counts), max(counts))]
    requests = [cost.least_requests_per_sample, cost.requests_per_sample, cost.most_requests_per_sample]
    assert requests == pytest.approx(expected)
    chunk_bytes, sample_bytes = 4 * 7 * itemsize, 2 * 5 * 6 * itemsize
    assert cost.bytes_per_sample == pytest.approx(expected[1] * chunk_bytes)
    amplification = [cost.least_amplification, cost.amplification, cost.most_amplification]
    assert amplification == pytest.approx([count * chunk_bytes / sample_bytes for count in expected])


# -- plans


def test_the_automatic_chunk_is_the_lightest_of_the_fastest():
    answer = plan()
    fastest = answer.candidates[0].seconds_per_batch
    close = [cost for cost in answer.candidates if cost.seconds_per_batch <= fastest * CLOSE]
    assert answer.seconds_per_batch <= fastest * CLOSE
    assert answer.bytes_per_sample <= min(cost.bytes_per_sample for cost in close) * (1 + 1e-9)
    assert [cost.seconds_per_batch for cost in answer.candidates] == sorted(
        cost.seconds_per_batch for cost in answer.candidates
    )


@pytest.mark.parametrize("batch_size", [1, 4, 16])
@pytest.mark.parametrize("patch", [{}, {"time": 24}, {"time": 2, "lat": 2, "lon": 2}, {"lat": 64, "lon": 64}])
def test_no_automatic_chunk_is_smaller_than_what_it_costs_to_keep(patch, batch_size):
    answer = plan(patch=patch, batch_size=batch_size)
    assert all(cost.chunk_bytes >= LEAST_CHUNK_BYTES for cost in answer.candidates)
    assert any("left out" in reason for reason in answer.reasons) == (2 * math.prod(patch.values()) < LEAST_CHUNK_BYTES)
    small = plan(shape=(4, 5, 6), patch={"lat": 2}, batch_size=batch_size)
    assert small.chunk == (4, 5, 6)
    by_hand = plan(patch=patch, chunk={"time": 1, "lat": 1, "lon": 1}, batch_size=batch_size)
    assert by_hand.chunk == (1, 1, 1)
    cut = plan(patch=patch, shard={"time": 2, "lat": 4, "lon": 4}, batch_size=batch_size)
    assert cut.chunk == (2, 4, 4)


def test_a_plan_says_and_shows_that_smaller_costs_requests_and_larger_wastes_bytes():
    answer = plan()
    smallest, chosen, largest = answer.best_by_size[0], answer.chosen, answer.best_by_size[-1]
    assert smallest.requests_per_sample > chosen.requests_per_sample > largest.requests_per_sample
    assert smallest.amplification < chosen.amplification < largest.amplification
    assert (smallest.bound, largest.bound) == ("latency", "bandwidth")
    assert "smaller = more requests (latency binds), larger = more wasted bytes (bandwidth binds)" in answer.reasons[0]
    least, mean, most = (chosen.least_requests_per_sample, chosen.requests_per_sample, chosen.most_requests_per_sample)
    assert f"{least} · {mean:.3g} · {most}" in str(answer).replace("\u00a0", " ")


def test_grid_samples_on_chunks_of_their_size_read_nothing_in_vain():
    answer = plan(order="grid", shape=(120, 320, 640))
    assert answer.chunk == (3, 64, 64)
    assert answer.amplification == pytest.approx(1)
    assert answer.requests_per_sample == pytest.approx(3)
    assert any("chunk = patch holds here" in reason for reason in answer.reasons)


def test_a_slow_connection_asks_for_small_chunks_and_a_far_one_for_large():
    slow = plan(latency_seconds=0.0, bandwidth_bytes_per_second=1e6)
    far = plan(latency_seconds=5.0)
    assert math.prod(slow.chunk) < math.prod(plan().chunk) < math.prod(far.chunk)
    assert (slow.bound, far.bound) == ("bandwidth", "latency")


def test_a_chunk_given_by_hand_is_priced_and_the_better_one_is_named():
    automatic, given_chunk = plan(), plan(chunk={"lat": 64, "lon": 64})
    assert given_chunk.chunk == (3, 64, 64)  # a dimension left out takes the patch's size
    assert given_chunk.seconds_per_batch > automatic.seconds_per_batch
    assert any(cost.chunk == given_chunk.chunk for cost in given_chunk.candidates)
    best = " × ".join(f"{name} {side}" for name, side in zip(automatic.dims, automatic.chunk, strict=True))
    assert any(reason.startswith("given by hand") and best in reason for reason in given_chunk.reasons)


def test_the_whole_dimension_is_one_chunk_where_the_patch_covers_it():
    assert plan(patch={"time": 1, "lat": 360, "lon": 64}).chunk[1] == 360


def test_a_patch_dimension_left_out_has_size_one():
    assert plan(patch={"lat": 64, "lon": 64}).patch == (1, 64, 64)


def test_a_plan_shows_its_choice_as_text_and_as_a_table():
    answer = plan()
    chosen = "×".join(map(str, answer.chunk))
    assert f"→ {chosen}" in str(answer)
    assert f"{chosen} <span" in answer._repr_html_()
    assert all(f"- {reason}" in str(answer) for reason in answer.reasons)
    assert any(cost.chunk == answer.chunk for cost in answer.best_by_size)


def test_the_published_verdict_is_judged_by_what_binds():
    reasons = plan(chunk={"time": 3, "lat": 64, "lon": 64}).reasons
    assert any("chunk = patch" in reason and "bound by latency" in reason for reason in reasons)


@examples(40)
@given(
    shape=st.tuples(st.integers(1, 60), st.integers(1, 60)),
    data=st.data(),
    order=st.sampled_from(["random", "grid"]),
    latency=st.sampled_from([0.0, 0.01, 1.0]),
)
def test_every_plan_is_consistent(shape, data, order, latency):
    patch = {name: data.draw(st.integers(1, extent)) for name, extent in zip("ab", shape, strict=True)}
    answer = plan(
        dims="ab", shape=shape, patch=patch, order=order, latency_seconds=latency, target_shard_bytes=4096, variables=2
    )
    assert all(1 <= side <= extent for side, extent in zip(answer.chunk, shape, strict=True))
    assert answer.amplification >= 1 - 1e-9
    assert answer.requests_per_batch <= answer.requests_per_sample * answer.batch_size * (1 + 1e-9)
    assert answer.samples_per_second == pytest.approx(answer.batch_size / answer.seconds_per_batch)
    objects = math.prod(-(-n // s) for n, s in zip(shape, answer.shard or answer.chunk, strict=True))
    assert answer.object_count == 2 * objects
    assert answer.reasons


# -- shards


@given(st.lists(st.tuples(st.integers(1, 50), st.integers(1, 20)), min_size=1, max_size=3), st.integers(1, 5000))
def test_a_shard_is_whole_chunks_within_the_target_and_the_array(sides, target):
    shape, chunk = [extent for extent, _ in sides], [side for _, side in sides]
    shard = fill_shard(shape, chunk, math.prod(chunk), target)
    assert all(s % c == 0 and s <= -(-n // c) * c for s, c, n in zip(shard, chunk, shape, strict=True))
    assert math.prod(shard) <= max(target, math.prod(chunk))


def test_a_shard_fills_whole_rows_first_and_cuts_what_is_left_evenly():
    assert fill_shard((100, 100), (10, 10), 100, 3500) == (30, 100)  # 4 parts of 10 rows: 3, 3, 3 and 1
    assert fill_shard((100, 100), (10, 10), 100, 700) == (10, 50)  # 7 chunks fit, 2 parts of 5 do


def test_none_leaves_each_chunk_an_object():
    answer = plan(shard="none", chunk={"time": 10, "lat": 90, "lon": 90})
    assert answer.shard is None
    assert answer.object_count == 3 * 12 * 4 * 8


def test_a_chunk_above_the_target_needs_no_shard():
    assert plan(chunk={"lat": 360, "lon": 720}, target_shard_bytes=1024).shard is None


def test_a_shard_given_by_hand_is_kept_and_completed_from_the_chunk():
    answer = plan(chunk={"time": 6, "lat": 60, "lon": 60}, shard={"lat": 180, "lon": 360})
    assert answer.shard == (6, 180, 360)


@pytest.mark.parametrize("shard", [{"time": 12, "lat": 192, "lon": 320}, {"lat": 97, "lon": 101}])
def test_an_automatic_chunk_divides_a_shard_given_by_hand(shard):
    answer = plan(shard=shard)
    assert all(s % c == 0 for s, c in zip(answer.shard, answer.chunk, strict=True))


# -- refusals


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"patch": {"lat": 361}}, r"patch\.lat is 361, larger .* 360"),
        ({"patch": {"lta": 3}}, r"no dimension 'lta'; .* 'lat'"),
        ({"chunk": {"depth": 3}}, r"no dimension 'depth'; .* time, lat, lon"),
        ({"chunk": {"lat": 0}}, r"chunk\.lat is 0, .*whole number"),
        ({"chunk": {"lat": 2.5}}, r"chunk.lat is 2.5"),
        ({"chunk": {"lat": 64}, "shard": {"lat": 100}}, r"shard.lat is 100, which cuts .* such as 64 or 128"),
        ({"stride": {"time": 0}}, r"stride.time is 0"),
        ({"batch_size": 0}, r"batch_size is 0"),
        ({"requests_in_flight": 0}, r"requests_in_flight is 0"),
        ({"bandwidth_bytes_per_second": 0}, r"bandwidth_bytes_per_second is 0"),
        ({"shape": (1, 2)}, r"equal lengths"),
        ({"dims": ("lat", "lat", "lon")}, r"each dimension once"),
    ],
)
def test_a_plan_that_cannot_hold_is_refused_with_the_way_out(changes, message):
    with pytest.raises(PlanError, match=message):
        plan(**changes)
