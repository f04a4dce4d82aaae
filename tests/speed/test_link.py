"""Exchanges between ranks: the formulas by hand, against a ring that is played out, and names that are not there."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kit.errors import PlanError
from kit.speed.links import (
    STATED_REACHED,
    Link,
    Traffic,
    all_gather_seconds,
    all_reduce_seconds,
    find_link,
    link_within,
    meeting_seconds,
    waited_for,
)

SLOW = Link(name="slow", bytes_per_second=1e9 / STATED_REACHED["usual"], latency_seconds=0.001)
FAST = Link(name="fast", bytes_per_second=1e10 / STATED_REACHED["usual"], latency_seconds=0.0)


def test_one_rank_exchanges_nothing():
    assert all_reduce_seconds(1e9, 1, SLOW) == 0
    assert Traffic(parameter_bytes=1e9, gradient_bytes=1e9, strategy="ddp").seconds(1, SLOW, None, 8) == 0


def test_a_ring_moves_twice_what_each_rank_lacks():
    assert all_gather_seconds(1e9, 4, SLOW) == pytest.approx(0.75 + 0.003)
    assert all_reduce_seconds(1e9, 4, SLOW) == pytest.approx(1.5 + 0.006)


def test_sharding_moves_half_as_much_again_as_copies_do():
    ddp, fsdp = (Traffic(parameter_bytes=1e9, gradient_bytes=1e9, strategy=name) for name in ("ddp", "fsdp"))
    assert fsdp.seconds(8, FAST, None, 8) == pytest.approx(1.5 * ddp.seconds(8, FAST, None, 8))


def test_replicas_of_shards_gather_within_and_reduce_a_part_between():
    traffic = Traffic(parameter_bytes=1e9, gradient_bytes=1e9, strategy="fsdp:2:4")
    within = 3 * all_gather_seconds(1e9, 4, FAST)
    assert traffic.seconds(8, FAST, SLOW, 4) == pytest.approx(within + all_reduce_seconds(0.25e9, 2, SLOW))


def test_an_exchange_reads_and_writes_the_memory_of_a_device():
    of = {name: Traffic(parameter_bytes=1e9, gradient_bytes=1e9, strategy=name) for name in ("ddp", "fsdp", "fsdp:2:4")}
    assert of["ddp"].memory_bytes(1) == 0
    assert of["ddp"].memory_bytes(8) == pytest.approx(7 / 8 * 5e9)
    assert of["fsdp"].memory_bytes(8) == pytest.approx(7 / 8 * 7e9)
    assert of["fsdp:2:4"].memory_bytes(8) == pytest.approx(3 / 4 * 7e9 + 1 / 2 * 5 / 4 * 1e9)


def test_a_ring_that_crosses_nodes_goes_at_the_speed_between_them():
    traffic = Traffic(parameter_bytes=1e9, gradient_bytes=1e9, strategy="ddp")
    assert traffic.seconds(8, FAST, SLOW, 8) == pytest.approx(all_reduce_seconds(1e9, 8, FAST))
    assert traffic.seconds(16, FAST, SLOW, 8) == pytest.approx(all_reduce_seconds(1e9, 16, SLOW))


@given(st.floats(0, 10), st.floats(0, 10), st.integers(1, 40))
def test_what_is_waited_for_is_what_pieces_played_out_leave(exchange, backward, pieces):
    end = 0.0
    for piece in range(1, pieces + 1):
        end = max(end, backward * piece / pieces) + exchange / pieces
    assert waited_for(exchange, backward, pieces) == pytest.approx(end - backward, abs=1e-9)


def test_devices_are_joined_by_what_is_usual_for_them():
    assert link_within("NVIDIA H100 80GB HBM3").name == "NVLink-4"
    assert link_within("T4-16GB").name == "PCIe-3"
    assert link_within("NVIDIA Something New").name == "PCIe-4"
    assert link_within("CPU").name == "loopback"


@given(st.floats(1.1, 10), st.integers(2, 16))
def test_of_two_links_the_faster_has_more_bytes_or_waits_less(factor, ranks):
    link = Link(name="here", bytes_per_second=1e9, latency_seconds=1e-4, lateness=0.02, measured=True)
    slower = [
        replace(link, bytes_per_second=1e9 / factor), replace(link, latency_seconds=1e-4 * factor),
        replace(link, lateness=0.02 * factor), link.slowed(factor),
    ]  # fmt: skip
    assert all(meeting_seconds(one, ranks) > meeting_seconds(link, ranks) for one in slower)


def test_an_unknown_link_is_answered_with_the_closest():
    with pytest.raises(PlanError, match="did you mean 'NVLink-4'"):
        find_link("NVLink4")
    with pytest.raises(PlanError, match="known are"):
        find_link("string")
    with pytest.raises(PlanError, match="more than 0 bytes/s"):
        Link(name="cut", bytes_per_second=0, latency_seconds=0)
    with pytest.raises(PlanError, match="lateness"):
        Link(name="early", bytes_per_second=1e9, latency_seconds=0, lateness=-0.1)
