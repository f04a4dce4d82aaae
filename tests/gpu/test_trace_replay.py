import numpy as np
import pytest
from trace_replay import replay_trace

from kit.memory.replay.replay import Recording, replay
from kit.memory.replay.snapshot import to_snapshot

MIB = 1 << 20


def entry(action, address, size, stream=0):
    """A line of `device_traces`, with what torch writes there besides."""
    return {
        "action": action, "addr": address, "size": size, "stream": stream, "frames": [], "time_us": 0,
        "compile_context": "N/A", "user_metadata": "",
    }  # fmt: skip


def snapshot_of(*entries):
    return {"segments": [], "device_traces": [list(entries), []], "allocator_settings": {}}


def freed(address, size, stream=0):
    return [entry("free_requested", address, size, stream), entry("free_completed", address, size, stream)]


# What torch 2.13 writes for: two small tensors, one of 30 MiB that is freed, one of 29 MiB in its place.
REUSED = snapshot_of(
    entry("segment_alloc", 0x7F00_0000_0000, 2 * MIB),
    entry("alloc", 0x7F00_0000_0000, 1000),
    entry("alloc", 0x7F00_0000_0400, 4),
    entry("segment_alloc", 0x7F00_1000_0000, 30 * MIB),
    entry("alloc", 0x7F00_1000_0000, 30 * MIB),
    *freed(0x7F00_1000_0000, 30 * MIB),
    entry("snapshot", 0, 0),
    entry("alloc", 0x7F00_1000_0000, 29 * MIB),
)


def test_requests_and_reuse_are_counted_as_torch_counts_them():
    played = replay_trace(REUSED)
    assert played.requests == 4
    assert played.allocated_bytes == 1024 + 512 + 30 * MIB
    assert played.reserved_bytes == played.traced_reserved_bytes == 32 * MIB
    assert played.out_of_memory is None


def test_a_limit_that_the_trace_passes_runs_out_and_one_that_it_keeps_does_not():
    assert replay_trace(REUSED, capacity_bytes=32 * MIB).out_of_memory is None
    failed = replay_trace(REUSED, capacity_bytes=31 * MIB).out_of_memory
    assert failed.size_bytes == 30 * MIB
    assert failed.reserved_bytes == 2 * MIB


def test_memory_given_back_to_the_driver_is_no_longer_reserved():
    trace = snapshot_of(
        entry("segment_alloc", 0x10_0000_0000, 40 * MIB),
        entry("alloc", 0x10_0000_0000, 40 * MIB),
        *freed(0x10_0000_0000, 40 * MIB),
        entry("segment_free", 0x10_0000_0000, 40 * MIB),
        entry("segment_map", 0x20_0000_0000, 20 * MIB),
    )
    assert replay_trace(trace).traced_reserved_bytes == 40 * MIB


def test_a_block_that_another_stream_still_uses_is_not_free_yet():
    first, second = 0x10_0000_0000, 0x20_0000_0000
    waiting = snapshot_of(
        entry("alloc", first, 30 * MIB),
        entry("free_requested", first, 30 * MIB),
        entry("alloc", second, 30 * MIB),
        entry("free_completed", first, 30 * MIB),
    )
    done = snapshot_of(entry("alloc", first, 30 * MIB), *freed(first, 30 * MIB), entry("alloc", first, 30 * MIB))
    assert replay_trace(waiting).reserved_bytes == 60 * MIB
    assert replay_trace(done).reserved_bytes == 30 * MIB


def test_streams_do_not_share_what_is_free():
    first, second = 0x10_0000_0000, 0x20_0000_0000
    trace = snapshot_of(entry("alloc", first, 30 * MIB), *freed(first, 30 * MIB), entry("alloc", second, 30 * MIB, 7))
    assert replay_trace(trace).reserved_bytes == 60 * MIB


def test_a_trace_that_begins_after_the_first_allocation_is_refused():
    with pytest.raises(ValueError, match=r"0x1000, .*never allocated.*max_entr"):
        replay_trace(snapshot_of(*freed(0x1000, 512)))


def test_an_empty_trace_reserves_nothing():
    played = replay_trace(REUSED, device=1)
    assert (played.requests, played.reserved_bytes, played.traced_reserved_bytes) == (0, 0, 0)


def random_recording(blocks, seed):
    """Blocks of many sizes on two streams, most of them freed, in the form of a recording for CUDA."""
    rng = np.random.default_rng(seed)
    sizes = (2 ** rng.uniform(3, 26, blocks)).astype(np.int64)
    events, alive = [], []
    for block in range(blocks):
        events.append((block, True))
        alive.append(block)
        while alive and rng.random() < 0.45:
            events.append((alive.pop(int(rng.integers(len(alive)))), False))
    zeros = np.zeros(blocks, dtype=np.int32)
    return Recording(
        block_bytes=sizes, block_category=zeros.astype(np.uint8), block_operator=zeros, block_module=zeros,
        block_phase=zeros.astype(np.uint8), block_stream=rng.integers(0, 2, blocks).astype(np.uint8),
        event_block=np.array([block for block, _ in events], dtype=np.int32),
        event_allocates=np.array([allocates for _, allocates in events]),
        event_time=np.arange(len(events), dtype=np.int32), operator_name=np.zeros(len(events), dtype=np.int32),
        operator_module=np.zeros(len(events), dtype=np.int32),
        operator_phase=np.zeros(len(events), dtype=np.uint8), names=("op",), batch_starts=(0,), batch_size=1,
        rounding_bytes=512,
    )  # fmt: skip


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("expandable", [False, True])
def test_a_written_trace_plays_as_the_recording_it_was_written_from(seed, expandable):
    recording = random_recording(300, seed)
    played = replay_trace(to_snapshot(recording, expandable_segments=expandable))
    expected = replay(recording, expandable_segments=expandable)
    assert played.requests == 300
    assert played.allocated_bytes == expected.peak_allocated_bytes
    assert played.reserved_bytes == expected.peak_reserved_bytes == played.traced_reserved_bytes
