"""Replays: the allocator's own counts at every event, the CPU's plain sums, and the first request that fails."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from properties import examples
from recordings import ACTIONS, RecordingBuilder, told, training_recording

from kit.memory.replay.allocator import CachingAllocator
from kit.memory.replay.replay import replay

MIB = 1 << 20
LIMITS = st.one_of(st.none(), st.integers(0, 300 * MIB))


@given(ACTIONS, LIMITS, st.booleans())
def test_the_series_are_those_of_the_allocator_after_every_event(actions, limit, expandable):
    recording = told(actions)
    played = replay(recording, capacity_bytes=limit, expandable_segments=expandable)
    allocator, alive, counts = CachingAllocator(limit, expandable), {}, []
    for block, allocates in zip(recording.event_block, recording.event_allocates, strict=True):
        size, stream = int(recording.block_bytes[block]), int(recording.block_stream[block])
        if size and allocates:
            alive[block] = allocator.malloc(size, stream)
        elif size:
            allocator.free(alive.pop(block))
        if allocator.out_of_memory:
            break
        counts.append((allocator.allocated_bytes, allocator.reserved_bytes))
    assert list(zip(played.allocated_bytes.tolist(), played.reserved_bytes.tolist(), strict=True)) == counts
    assert played.out_of_memory == allocator.out_of_memory
    assert played.peak_allocated_bytes == max([0, *(allocated for allocated, _ in counts)])
    assert played.peak_reserved_bytes == allocator.peak_reserved_bytes


@given(ACTIONS)
def test_blocks_hold_at_least_what_was_asked_for_and_at_most_a_mebibyte_more(actions):
    recording = told(actions)
    more = replay(recording).held_bytes - recording.rounded_bytes
    assert ((more >= 0) & (more <= MIB)).all()
    assert not more[recording.block_bytes <= MIB].any()
    assert (replay(recording, expandable_segments=True).held_bytes == recording.rounded_bytes).all()


@examples(50)
@given(ACTIONS)
def test_a_limit_at_the_unlimited_peak_changes_nothing(actions):
    recording = told(actions)
    free = replay(recording)
    limited = replay(recording, capacity_bytes=free.peak_reserved_bytes)
    assert limited.out_of_memory is None
    assert limited.retries == 0
    assert (limited.reserved_bytes == free.reserved_bytes).all()


@examples(50)
@given(ACTIONS)
def test_the_cpu_adds_up_what_is_alive_and_reserves_no_more(actions):
    recording = told(actions, rounding_bytes=1)
    played = replay(recording)
    alive, sums = set(), []
    for block, allocates in zip(recording.event_block.tolist(), recording.event_allocates.tolist(), strict=True):
        alive ^= {block}
        assert (block in alive) == allocates
        sums.append(sum(int(recording.block_bytes[one]) for one in alive))
    assert played.allocated_bytes.tolist() == played.reserved_bytes.tolist() == sums
    assert played.peak_reserved_bytes == max([0, *sums])


def test_the_cpu_runs_out_at_the_first_block_that_passes_the_limit():
    story = RecordingBuilder(rounding_bytes=1)
    story.allocate(700)
    story.allocate(200)
    story.allocate(300)
    played = replay(story.build(), capacity_bytes=1000)
    assert played.allocated_bytes.tolist() == [700, 900]
    failed = played.out_of_memory
    assert (failed.size_bytes, failed.allocated_bytes, failed.reserved_bytes) == (300, 900, 900)


def test_a_replay_ends_where_memory_runs_out():
    recording = training_recording()
    free = replay(recording)
    limited = replay(recording, capacity_bytes=free.peak_reserved_bytes // 2)
    assert limited.out_of_memory is not None
    assert len(limited.allocated_bytes) < len(free.allocated_bytes)
    assert limited.reserved_bytes.max() <= free.peak_reserved_bytes // 2


@pytest.mark.parametrize("rounding", [512, 1])
def test_an_empty_recording_needs_nothing(rounding):
    recording = RecordingBuilder(rounding).build()
    played = replay(recording, capacity_bytes=0)
    assert (played.peak_allocated_bytes, played.peak_reserved_bytes, played.out_of_memory) == (0, 0, None)
    assert played.allocated_bytes.dtype == np.int64


def test_blocks_of_no_bytes_take_nothing_of_the_device():
    story = RecordingBuilder()
    empty = story.allocate(0)
    story.allocate(1)
    story.free(empty)
    assert replay(story.build()).allocated_bytes.tolist() == [0, 512, 512]
