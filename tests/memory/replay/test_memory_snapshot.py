"""Snapshots: torch's own memory viewer loads them, and counts in them what the replay counted."""

import pickle

import pytest
from hypothesis import given
from hypothesis import strategies as st
from properties import examples
from recordings import ACTIONS, told, training_recording

from kit.memory.replay.replay import replay
from kit.memory.replay.snapshot import to_snapshot, write_snapshot

MIB = 1 << 20


@pytest.mark.parametrize("expandable", [False, True])
def test_torchs_viewer_loads_a_snapshot_and_agrees_on_its_totals(tmp_path, expandable):
    from torch.cuda import _memory_viz as viewer

    recording = training_recording()
    path = write_snapshot(tmp_path / "snapshot.pickle", recording, expandable_segments=expandable)
    assert [file.name for file in tmp_path.iterdir()] == ["snapshot.pickle"]
    snapshot = pickle.loads(path.read_bytes())
    played = replay(recording, expandable_segments=expandable)
    summary = viewer.segsum(snapshot)
    assert f"total_reserved: {viewer.Bytes(int(played.reserved_bytes[-1]))}" in summary
    # What the viewer calls allocated is what was asked for.
    alive = set(recording.event_block) - set(recording.event_block[~recording.event_allocates])
    assert f"total_allocated: {viewer.Bytes(sum(int(recording.block_bytes[block]) for block in alive))}" in summary
    assert "<!DOCTYPE html>" in viewer.trace_plot(snapshot)
    assert len(viewer.trace(snapshot).splitlines()) > len(recording.event_block)


@examples(60)
@given(ACTIONS, st.booleans())
def test_the_trace_adds_up_to_the_segments_and_to_the_replay(actions, expandable):
    recording = told(actions)
    snapshot = to_snapshot(recording, expandable_segments=expandable)
    played = replay(recording, expandable_segments=expandable)
    trace, segments = snapshot["device_traces"][0], snapshot["segments"]
    total = {action: sum(entry["size"] for entry in trace if entry["action"] == action) for action in ACTION_NAMES}
    given_bytes = total["segment_alloc"] + total["segment_map"]
    reserved = sum(segment["total_size"] for segment in segments)
    assert given_bytes - total["segment_free"] - total["segment_unmap"] == reserved
    assert reserved == (played.reserved_bytes[-1] if len(played.reserved_bytes) else 0)
    requested = sum(segment["requested_size"] for segment in segments)
    assert total["alloc"] - total["free_completed"] == requested
    for segment in segments:
        blocks = segment["blocks"]
        assert segment["total_size"] == sum(block["size"] for block in blocks)
        assert segment["address"] == blocks[0]["address"]
        active = sum(block["size"] for block in blocks if block["state"] == "active_allocated")
        assert segment["allocated_size"] == active


ACTION_NAMES = ("alloc", "free_completed", "segment_alloc", "segment_free", "segment_map", "segment_unmap")


def test_every_block_carries_its_operator_category_module_and_phase():
    trace = to_snapshot(training_recording())["device_traces"][0]
    seen = {(entry["frames"][0]["name"], entry["frames"][0]["filename"]) for entry in trace if entry["frames"]}
    assert ("addmm", "activations") in seen
    assert ("mm", "gradients") in seen
    where = {(entry["frames"][1]["name"], entry["frames"][1]["filename"]) for entry in trace if entry["frames"]}
    assert ("layer3", "backward") in where


def test_a_snapshot_under_a_limit_ends_with_the_failure():
    snapshot = to_snapshot(training_recording(), capacity_bytes=60 * MIB)
    last = snapshot["device_traces"][0][-1]
    assert last["action"] == "oom"
    assert last["device_free"] + sum(segment["total_size"] for segment in snapshot["segments"]) == 60 * MIB


def test_a_recording_of_the_cpu_and_an_empty_one_can_be_drawn_too():
    assert to_snapshot(training_recording(rounding_bytes=1))["segments"]
    assert to_snapshot(told([]))["segments"] == []
