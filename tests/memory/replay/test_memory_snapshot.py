"""Snapshots: torch's viewer loads them and counts what the replay counted; and what is read of one adds up."""

import pickle
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st
from properties import examples
from recordings import ACTIONS, told, training_recording

from kit.errors import TrialError
from kit.memory.replay.replay import replay
from kit.memory.replay.snapshot import (
    Holding,
    load_snapshot,
    moment_of,
    owner_here,
    predicted_holdings,
    read_snapshot,
    save_snapshot,
    to_snapshot,
)

MIB = 1 << 20


@pytest.mark.parametrize("expandable", [False, True])
def test_torchs_viewer_loads_a_snapshot_and_agrees_on_its_totals(tmp_path, expandable):
    from torch.cuda import _memory_viz as viewer

    recording = training_recording()
    path = save_snapshot(tmp_path / "snapshot.pickle", to_snapshot(recording, expandable_segments=expandable))
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


# -- reading


def frame(file, line, name):
    return {"filename": file, "line": line, "name": name}


TORCH = frame("/opt/lib/python3.11/site-packages/torch/nn/modules/linear.py", 134, "forward")
MODEL = frame("/home/ann/model.py", 12, "forward")
STEP = frame("/home/ann/train.py", 34, "training_step")
MOVED = frame("/opt/lib/python3.11/site-packages/torch/nn/modules/module.py", 900, "_apply")
ADAM = frame("/opt/lib/python3.11/site-packages/torch/optim/adamw.py", 500, "_multi_tensor_adamw")
FIT = frame("/opt/lib/python3.11/site-packages/lightning/pytorch/trainer/trainer.py", 600, "fit")


def entry(action, address, size, frames=(), batch=None, **more):
    told_batch = {} if batch is None else {"user_metadata": f"batch {batch}"}
    where = {"device_free": address} if action == "oom" else {"addr": address}
    return {"action": action, **where, "size": size, "stream": 0, "frames": list(frames), **told_batch, **more}


def block(address, size, frames, state="active_allocated"):
    return {"address": address, "size": size, "requested_size": size, "state": state, "frames": list(frames)}


# By hand, as torch writes it. Parameters 4 KiB, an activation of 1,000 bytes by the model's line, one of 2 KiB by the
# step's, a gradient of 4 KiB on autograd's thread, Adam's 8 KiB; then 6 KiB are refused, and on the way out the step's
# block is freed and another is made. Of 40 KiB, 22 are held by then: 4 + 1 + 2 + 4 + 8 + 3 that was there before.
BY_HAND = {
    "segments": [
        {
            "device": 0, "address": 0x1000, "total_size": 40960, "blocks": [
                block(0x1000, 4096, [MOVED, STEP]),
                block(0x2000, 1024, [TORCH, MODEL, STEP, FIT]),
                block(0x2400, 2048, [], "inactive"),
                block(0x3000, 4096, []),
                block(0x4000, 8192, [ADAM, FIT]),
                block(0x6000, 3072, [TORCH, FIT]),
                block(0x9000, 512, [FIT]),
            ],
        },
        {"device": 1, "address": 0x1000, "total_size": 512, "blocks": [block(0x1000, 512, [MODEL])]},
    ],
    "device_traces": [
        [
            entry("segment_alloc", 0x1000, 40960),
            entry("alloc", 0x1000, 4096, [MOVED, STEP]),
            entry("alloc", 0x2000, 1000, [TORCH, MODEL, STEP, FIT], 0),
            entry("alloc", 0x2400, 2048, [STEP, FIT], 0),
            entry("alloc", 0x8000, 4096, [], 0),
            entry("free_requested", 0x8000, 4096, [], 0),
            entry("free_completed", 0x8000, 4096, [], 0),
            entry("alloc", 0x3000, 4096, [], 0),
            entry("alloc", 0x4000, 8192, [ADAM, FIT], 1),
            entry("oom", 100, 6144, [TORCH, MODEL, STEP, FIT], 1),
            entry("free_requested", 0x2400, 2048, [], 1),
            entry("free_completed", 0x2400, 2048, [], 1),
            entry("alloc", 0x9000, 512, [FIT], 1),
        ],
        [],
    ],
}  # fmt: skip
IN_MODEL, IN_STEP = "/home/ann/model.py, line 12, in forward", "/home/ann/train.py, line 34, in training_step"


def test_who_held_what_when_memory_ran_out_is_read_as_counted_by_hand():
    memory = read_snapshot(BY_HAND)
    assert {one.owner: one.bytes for one in memory.holdings} == {
        "optimizer_state": 8192, "parameters": 4096, "gradients": 4096, "elsewhere": 3072,
        IN_STEP: 2048, IN_MODEL: 1024,
    }  # fmt: skip
    assert memory.allocated_bytes == 22528
    assert (memory.asked_bytes, memory.asked_by, memory.reserved_bytes) == (6144, IN_MODEL, 40960)
    assert memory.series.tolist() == [7168, 8192, 10240, 14336, 10240, 14336, 22528]
    assert memory.batch.tolist() == [-1, 0, 0, 0, 0, 0, 1]
    assert memory.owners[1:3] == (IN_MODEL, IN_STEP)


@pytest.mark.parametrize("lost", range(1, 9))
def test_a_trace_that_has_lost_its_beginning_tells_the_same_of_the_end(lost):
    shorter = {**BY_HAND, "device_traces": [BY_HAND["device_traces"][0][lost:], []]}
    held = {one.owner: one.bytes for one in read_snapshot(shorter).holdings}
    whole = {one.owner: one.bytes for one in read_snapshot(BY_HAND).holdings}
    assert sum(held.values()) == sum(whole.values())
    assert lost > 3 or held == whole  # who made a block that was freed since stands in the trace alone


@examples(60)
@given(ACTIONS, st.one_of(st.none(), st.integers(1, 400)), st.booleans())
def test_a_predicted_run_is_read_as_it_was_played(actions, capacity, expandable):
    recording = told(actions)
    capacity_bytes = capacity and capacity * MIB
    memory = read_snapshot(to_snapshot(recording, capacity_bytes=capacity_bytes, expandable_segments=expandable))
    played = replay(recording, capacity_bytes=capacity_bytes, expandable_segments=expandable)
    sized = recording.block_bytes[recording.event_block[: len(played.allocated_bytes)]] > 0
    assert memory.allocated_bytes == (played.allocated_bytes[-1] if len(played.allocated_bytes) else 0)
    assert sum(one.bytes for one in memory.holdings) == memory.allocated_bytes
    assert memory.reserved_bytes == (played.reserved_bytes[-1] if len(played.reserved_bytes) else 0)
    assert len(memory.series) == sized.sum()
    failed = played.out_of_memory
    assert bool(memory.asked_bytes) == (failed is not None)
    if failed is not None:
        assert -(-memory.asked_bytes // 512) * 512 == failed.size_bytes


@pytest.mark.parametrize("share", [0.5, 0.7, 0.95])
def test_the_moment_of_a_prediction_is_found_by_what_both_have_asked_for(share):
    recording = training_recording()
    memory = read_snapshot(to_snapshot(recording, capacity_bytes=int(replay(recording).peak_reserved_bytes * share)))
    event = moment_of(recording, memory)
    limited = replay(recording, capacity_bytes=int(replay(recording).peak_reserved_bytes * share))
    assert event == len(limited.allocated_bytes) - 1
    held = predicted_holdings(recording, event, limited.held_bytes)
    assert {one.owner: one.bytes for one in memory.holdings} == held
    assert recording.block_bytes[recording.event_block[event + 1]] == memory.asked_bytes


def test_what_only_the_measurement_knows_moves_no_moment():
    recording = training_recording()
    snapshot = to_snapshot(recording, capacity_bytes=60 * MIB)
    trace = snapshot["device_traces"][0]
    event = moment_of(recording, read_snapshot(snapshot))
    leak = [entry("alloc", 0x7F00_0000_0000 + at * MIB, MIB, [MODEL], 0) for at in range(500)]
    segment = {"device": 0, "address": leak[0]["addr"], "total_size": 500 * MIB, "blocks": [
        block(one["addr"], MIB, [MODEL]) for one in leak
    ]}  # fmt: skip
    more = {
        **snapshot,
        "device_traces": [[*trace[:-1], *leak, trace[-1]]],
        "segments": [*snapshot["segments"], segment],
    }
    memory = read_snapshot(more)
    assert memory.holdings[0] == Holding(IN_MODEL, 500 * MIB, 500)
    assert moment_of(recording, memory) == event


def test_a_file_is_bounded_and_keeps_the_end(tmp_path):
    snapshot = to_snapshot(training_recording(layers=40), capacity_bytes=170 * MIB)
    whole = save_snapshot(tmp_path / "whole.pickle", snapshot)
    bound = whole.stat().st_size // 2
    small = save_snapshot(tmp_path / "small.pickle", snapshot, bound)
    assert small.stat().st_size <= bound
    full, kept = load_snapshot(whole), load_snapshot(small)
    assert kept.holdings == full.holdings
    assert (kept.asked_bytes, kept.series[-1]) == (full.asked_bytes, full.series[-1])
    assert 0 < len(kept.series) < len(full.series)


class Evil:
    def __reduce__(self):
        return print, ("run",)


@pytest.mark.parametrize("content", [pickle.dumps({"segments": [Evil()]}), b"no pickle", pickle.dumps([1]), b""])
def test_a_file_that_is_no_snapshot_is_refused_and_runs_nothing(tmp_path, capsys, content):
    (tmp_path / "odd.pickle").write_bytes(content)
    with pytest.raises(TrialError, match="no snapshot of memory"):
        load_snapshot(tmp_path / "odd.pickle")
    assert capsys.readouterr().out == ""


def test_a_line_is_the_innermost_outside_of_torch():
    from torch.utils.checkpoint import checkpoint

    here = sys._getframe()
    assert checkpoint(owner_here, use_reentrant=False) == f"{__file__}, line {here.f_lineno}, in {here.f_code.co_name}"
