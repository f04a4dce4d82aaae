"""Cost: each resource by its formula, the slowest binds, and the published measurements beside the prediction."""

import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from properties import examples

from kit.chunks.access import VALUE_BYTES, Access
from kit.chunks.cost import ArrayRequests, assembling_seconds, price
from kit.chunks.resources import HOLES_SHARE, Host, Network, Prices
from kit.errors import PlanError


def access(**changes):
    values = {
        "shape": (4000, 4000), "itemsize": 4, "patch": (64, 64), "stride": (64, 64), "order": "random",
        "batch_size": 32, "variables": 2,
    }  # fmt: skip
    return Access(**{**values, **changes})


def network(**changes):
    values = {"latency_seconds": 0.03, "bandwidth_bytes_per_second": 80e6, "requests_in_flight": 64}
    return Network(**{**values, **changes})


CHUNK = (128, 128)


# -- what binds


@pytest.mark.parametrize(
    ("bound", "net", "host"),
    [
        ("latency", {}, {}),
        ("bandwidth", {"bandwidth_bytes_per_second": 1e6}, {}),
        ("total bandwidth", {"total_bandwidth_bytes_per_second": 1e7}, {}),
        ("request rate", {"requests_per_second": 100}, {}),
        ("CPU", {}, {"decode_bytes_per_second": 1e7}),
        ("CPU", {}, {"request_cpu_seconds": 0.1}),
        ("memory", {}, {"memory_bytes": 5e6}),
    ],
)
def test_the_slowest_resource_binds_and_gives_the_seconds(bound, net, host):
    cost = price(access(), network(**net), CHUNK, Host(**host))
    assert cost.bound == bound
    assert cost.seconds_per_batch == max(seconds for _, seconds in cost.seconds_by_resource)
    assert cost.samples_per_second == pytest.approx(32 / cost.seconds_per_batch)


@pytest.mark.parametrize("ahead", [0, 2])
def test_each_resource_takes_what_its_formula_says(ahead):
    net = network(total_bandwidth_bytes_per_second=400e6, requests_per_second=5000, batches_ahead=ahead)
    host = Host(decode_bytes_per_second=1e9, decode_threads=2, request_cpu_seconds=3e-4)
    cost = price(access(ranks=4, compression_ratio=2.0), net, CHUNK, host)
    seconds, requests = dict(cost.seconds_by_resource), cost.requests_made_per_batch
    stored = requests * 128 * 128 * 4 / 2
    assert cost.bytes_made_per_batch == pytest.approx(stored)
    assert seconds["latency"] == pytest.approx((requests * 0.03 + stored / 80e6) / 64)
    assert seconds["total bandwidth"] == pytest.approx(stored * 4 / 400e6)
    assert seconds["request rate"] == pytest.approx(requests * 4 / 5000)
    python = requests * 3e-4 + assembling_seconds(access(), host, 32 * cost.requests_per_sample)
    decoding = 2 * stored / 2e9
    assert seconds["CPU"] == pytest.approx(max(python, decoding) if ahead else python + decoding)


def test_in_block_order_the_first_window_of_an_epoch_is_waited_for():
    host, net = Host(request_cpu_seconds=1e-4), network(batches_ahead=2, requests_in_flight=1)
    one, many = (
        price(access(order="block", samples_per_epoch=samples, stride=(1, 1)), net, CHUNK, host)
        for samples in (512, 1 << 24)
    )
    making = assembling_seconds(access(), host, 32 * one.requests_per_sample)
    fetching = [cost.requests_per_batch * (0.03 + 128 * 128 * 4 / 80e6) for cost in (one, many)]
    assert one.bound == many.bound == "latency"
    assert one.seconds_per_batch == pytest.approx(fetching[0] + making)
    assert fetching[1] < many.seconds_per_batch < fetching[1] + 0.01 * making


def test_ranks_share_the_request_rate_and_the_total_bandwidth():
    net = network(requests_per_second=2000)
    one, eight = (price(access(ranks=ranks), net, CHUNK) for ranks in (1, 8))
    assert one.bound == eight.bound == "request rate" or one.seconds_per_batch < eight.seconds_per_batch
    assert eight.samples_per_second * 8 <= 2000 * 32 / eight.requests_per_batch * (1 + 1e-9)


def test_memory_counts_batches_chunks_in_flight_threads_and_cache():
    net, host = network(batches_ahead=2), Host(decode_threads=3, cache_bytes=10_000_000)
    cost = price(access(compression_ratio=2.0), net, CHUNK, host)
    batch = 32 * 64 * 64 * 2 * VALUE_BYTES
    chunk = 128 * 128 * 4
    cache = 10_000_000 // (2 * chunk) * 2 * chunk
    assert cost.cache_bytes == cache
    used = 4 * batch + 3 * chunk + cache + cost.in_flight * chunk / 2
    assert cost.memory_bytes == pytest.approx(used * HOLES_SHARE / (HOLES_SHARE - 1))
    assert cost.fits


def test_too_little_memory_does_not_fit():
    assert not price(access(), network(), CHUNK, Host(memory_bytes=1e6)).fits


def test_compression_makes_fewer_bytes_travel_and_the_same_decode():
    plain, packed = (price(access(compression_ratio=ratio), network(), CHUNK) for ratio in (1.0, 3.0))
    assert packed.stored_bytes_per_batch == pytest.approx(plain.stored_bytes_per_batch / 3)
    assert packed.bytes_per_batch == plain.bytes_per_batch
    assert packed.stored_bytes == pytest.approx(plain.stored_bytes / 3)


def test_variables_together_are_one_request_of_all_of_them():
    apart, together = (price(access(together=both), network(), CHUNK) for both in (False, True))
    assert together.requests_per_batch == pytest.approx(apart.requests_per_batch / 2)
    assert together.bytes_per_batch == pytest.approx(apart.bytes_per_batch)
    assert together.amplification == pytest.approx(apart.amplification)
    assert (together.object_count, together.chunk_bytes) == (apart.object_count // 2, apart.chunk_bytes * 2)


def test_indexes_of_shards_are_fetched_once_a_run():
    short, long = (price(access(samples_per_epoch=n), network(), CHUNK, shard=(512, 512)) for n in (320, 320_000))
    assert short.index_requests_per_batch > 5
    assert long.index_requests_per_batch * 10_000 == pytest.approx(64 * 2, rel=1e-6)  # every shard of both arrays
    assert price(access(), network(), CHUNK).index_requests_per_batch == 0


def test_more_epochs_spread_the_indexes_of_shards_and_let_a_cache_pay():
    one, many = (
        price(
            access(samples_per_epoch=320, epochs=epochs), network(), CHUNK, Host(cache_bytes=1 << 30), shard=(512, 512)
        )
        for epochs in (1, 50)
    )
    assert many.index_requests_per_batch < one.index_requests_per_batch / 5
    assert many.requests_per_batch < one.requests_per_batch / 5  # the cache holds all, so each chunk comes once
    assert price(access(epochs=50), network(), CHUNK) == price(access(), network(), CHUNK)


@pytest.mark.parametrize("ahead", [1, 4, 16])
def test_what_is_said_to_travel_fits_through_the_wire_in_the_time_that_is_said(ahead):
    wire = network(total_bandwidth_bytes_per_second=5e7, batches_ahead=ahead)
    cost = price(access(samples_per_epoch=32_000), wire, CHUNK)
    epoch_seconds = cost.seconds_per_batch * 32_000 / access().batch_size
    assert cost.stored_bytes_per_epoch / epoch_seconds <= 5e7 * 1.0001
    assert cost.requests_per_epoch <= cost.requests_per_batch * 32_000 / access().batch_size


def test_an_epoch_is_priced_for_all_ranks_and_only_with_prices():
    asked = access(samples_per_epoch=64_000, ranks=4, compression_ratio=2.0)
    cost = price(asked, network(), CHUNK, prices=Prices(per_thousand_reads=0.5, per_gigabyte=2.0))
    assert cost.requests_per_epoch == pytest.approx(cost.requests_per_batch * 2000)
    assert cost.stored_bytes_per_epoch == pytest.approx(cost.requests_per_epoch * 128 * 128 * 4 / 2)
    assert cost.price_per_epoch == pytest.approx(
        cost.requests_per_epoch / 1000 * 0.5 + cost.stored_bytes_per_epoch / 1e9 * 2
    )
    assert price(asked, network(), CHUNK).price_per_epoch is None
    assert price(asked, network(), CHUNK, prices=Prices(per_gigabyte=0.0)).price_per_epoch == 0


# -- orders


def test_block_order_reads_a_layout_far_less_often_than_random_order():
    block = price(access(order="block", stride=(1, 1), samples_per_epoch=10**6), network(), CHUNK)
    plain = price(access(samples_per_epoch=10**6), network(), CHUNK)
    assert block.requests_per_batch < plain.requests_per_batch / 4
    assert block.window.blocks == 64
    assert block.cache_bytes <= 512 << 20


def test_windows_without_room_read_as_random_order_does_and_do_not_fit():
    block = price(access(order="block", stride=(1, 1), window_bytes=1 << 16), network(), CHUNK)
    assert not block.fits
    assert block.window is None
    assert block.requests_per_batch == price(access(), network(), CHUNK).requests_per_batch


def test_a_sequential_grid_needs_fewer_requests_than_a_shuffled_one():
    shuffled, plain = (price(access(order="grid", shuffle=shuffle), network(), (256, 256)) for shuffle in (True, False))
    assert plain.requests_per_batch < shuffled.requests_per_batch / 2


@examples(60)
@given(
    sides=st.lists(st.tuples(st.integers(1, 300), st.integers(1, 300), st.integers(1, 80)), min_size=1, max_size=4),
    order=st.sampled_from(["random", "grid", "block"]),
    shuffle=st.booleans(),
    batch_size=st.integers(1, 64),
    ranks=st.integers(1, 16),
    itemsize=st.sampled_from([1, 2, 3, 8, 16]),
    cache=st.sampled_from([0, 10_000, 10**9]),
)
def test_every_price_is_consistent(sides, order, shuffle, batch_size, ranks, itemsize, cache):
    shape = tuple(extent for extent, _, _ in sides)
    patch = tuple(min(size, extent) for extent, size, _ in sides)
    chunk = tuple(min(side, extent) for extent, _, side in sides)
    asked = Access(
        shape=shape, itemsize=itemsize, patch=patch, stride=(1,) * len(shape) if order == "block" else patch,
        order=order, shuffle=shuffle, batch_size=batch_size, variables=2, ranks=ranks, samples_per_epoch=5000,
    )  # fmt: skip
    cost = price(asked, network(), chunk, Host(cache_bytes=cache), shard=chunk)
    assert 1 <= cost.least_requests_per_sample <= cost.requests_per_sample * (1 + 1e-9)
    assert cost.requests_per_sample <= cost.most_requests_per_sample * (1 + 1e-9)
    assert cost.amplification >= 1 - 1e-9
    slack = 1 + 1e-9
    assert cost.least_requests_per_batch <= cost.requests_per_batch * slack
    assert cost.requests_per_batch <= cost.most_requests_per_batch * slack
    assert order != "random" or cost.most_requests_per_batch <= cost.requests_per_sample * batch_size * 1.01
    assert all(math.isfinite(seconds) for _, seconds in cost.seconds_by_resource)
    assert cost.memory_bytes > 0


# -- beside measurements

MEASURED = {  # chunk: best of plain GETs and two engines with 64 requests in flight and no batch ahead, samples/s
    (4, 64, 64): 514, (4, 128, 128): 754, (4, 256, 256): 394, (4, 512, 512): 183,
}  # fmt: skip


def host_with_nothing_to_spare(asked, cloud, chunk):
    """Memory for the batches and the requests: those engines keep nothing that has come."""
    chunk_bytes = math.prod(chunk) * asked.element_bytes
    batches = (2 + cloud.batches_ahead) * asked.batch_bytes
    needed = batches + 2 * chunk_bytes + 2 * cloud.requests_in_flight * chunk_bytes / asked.compression_ratio
    return Host(
        decode_bytes_per_second=1e9, decode_threads=2, request_cpu_seconds=3.5e-4,
        memory_bytes=needed * HOLES_SHARE / (HOLES_SHARE - 1),
    )  # fmt: skip


def test_predictions_stand_beside_measurements_of_other_engines():
    asked = Access(
        shape=(4, 8192, 8192), itemsize=4, patch=(4, 64, 64), stride=(4, 64, 64), order="random", batch_size=64,
        variables=1, compression_ratio=1.19, samples_per_epoch=64_000,
    )  # fmt: skip
    cloud = network(latency_seconds=0.0314, total_bandwidth_bytes_per_second=400e6, batches_ahead=2)
    predicted = {
        chunk: price(asked, cloud, chunk, host_with_nothing_to_spare(asked, cloud, chunk)).samples_per_second
        for chunk in MEASURED
    }
    ratios = sorted(MEASURED[chunk] / rate for chunk, rate in predicted.items())
    assert 0.85 < ratios[0] < ratios[-1] < 1.8
    assert max(MEASURED, key=MEASURED.get) == max(predicted, key=predicted.get) == (4, 128, 128)


def test_memory_to_spare_keeps_chunks_for_the_batches_that_are_not_whole_and_saves_requests():
    asked, cloud = access(samples_per_epoch=64_000), network(batches_ahead=8)
    tight = host_with_nothing_to_spare(asked, cloud, CHUNK)
    spare, none = price(asked, cloud, CHUNK), price(asked, cloud, CHUNK, tight)
    assert spare.requests_made_per_batch < 0.97 * none.requests_made_per_batch < none.requests_per_batch
    assert spare.requests_per_batch == none.requests_per_batch
    half = Host(memory_bytes=none.memory_bytes + 8 * none.bytes_per_batch / 2)
    assert spare.requests_made_per_batch < price(asked, cloud, CHUNK, half).requests_made_per_batch
    for each in (network(batches_ahead=0), network(batches_ahead=1)):
        cost = price(asked, each, CHUNK)
        assert cost.requests_made_per_batch <= cost.requests_per_batch
        assert (cost.requests_made_per_batch == pytest.approx(cost.requests_per_batch)) == (each.batches_ahead == 0)


def test_chunks_on_their_way_and_neighbours_in_a_shard_make_reading_faster_but_not_the_chunks_fewer():
    asked = Access(
        shape=(2048, 2048), itemsize=4, patch=(64, 64), stride=(1, 1), order="random", batch_size=64, variables=1,
        samples_per_epoch=64_000,
    )  # fmt: skip
    alone, ahead = (price(asked, network(batches_ahead=count), (64, 64)) for count in (2, 8))
    assert ahead.samples_per_second > 1.2 * alone.samples_per_second
    made = alone.requests_made_per_batch
    fewer = ArrayRequests(made, made / 4, 0, alone.bytes_made_per_batch)  # as a store may be found to share requests
    sharded = price(asked, network(batches_ahead=2), (64, 64), shard=(1024, 1024), asked=fewer)
    assert sharded.samples_per_second > 1.5 * alone.samples_per_second
    assert alone.requests_per_batch == ahead.requests_per_batch == sharded.requests_per_batch


# -- refusals


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"ranks": 0}, "ranks is 0"), ({"samples_per_epoch": 0}, "samples_per_epoch is 0"),
        ({"compression_ratio": 0}, "compression_ratio is 0"), ({"window_blocks": 0}, "window_blocks is 0"),
        ({"order": "blok"}, "order is 'blok', .*one of"),
    ],
)  # fmt: skip
def test_a_pattern_that_cannot_be_is_refused(changes, message):
    with pytest.raises(PlanError, match=message):
        access(**changes)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Host(decode_threads=0), "decode_threads is 0"),
        (lambda: Host(cache_bytes=-1), "cache_bytes.*at least 0"),
        (lambda: network(requests_per_second=0), "requests_per_second is 0"),
        (lambda: replace(network(), latency_seconds=-1), "latency_seconds.*at least 0"),
    ],
)
def test_a_host_or_network_that_cannot_be_is_refused(make, message):
    with pytest.raises(PlanError, match=message):
        make()
