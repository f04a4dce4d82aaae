"""cuBLAS workspaces: one per thread that multiplies, from its first product on, and nothing else is touched."""

import numpy as np
from hypothesis import given
from properties import examples
from recordings import ACTIONS, RecordingBuilder, told, training_recording

from kit.memory.replay.replay import CATEGORIES, OPERATOR, PHASES, replay, with_cublas_workspaces

AMPERE = 8_519_680


def test_forward_and_backward_threads_get_one_each_after_their_first_output():
    story = RecordingBuilder()
    story.batch()
    story.operator("gelu", "forward", "a")
    story.allocate(1)
    story.operator("addmm", "forward", "b")
    output = story.allocate(2)
    story.free(output)
    story.operator("mm.out", "backward", "c")
    story.operator("mm", "backward", "d")
    story.operator("bmm", "optimizer", "")
    recording = with_cublas_workspaces(story.build(), AMPERE)
    assert recording.block_bytes.tolist() == [1, 2, AMPERE, AMPERE]
    assert recording.event_block.tolist() == [0, 1, 2, 1, 3]
    assert recording.event_allocates.tolist() == [True, True, True, False, True]
    assert recording.event_time.tolist() == [0, 1, 1, 1, 2]
    made = [(recording.names[recording.block_module[b]], PHASES[recording.block_phase[b]]) for b in (2, 3)]
    assert made == [("b", "forward"), ("c", "backward")]
    assert {recording.names[recording.block_operator[block]] for block in (2, 3)} == {OPERATOR}
    assert {CATEGORIES[recording.block_category[block]] for block in (2, 3)} == {"workspace"}


def test_a_recording_without_products_or_a_device_without_cublas_stays_as_it_is():
    story = RecordingBuilder()
    story.operator("convolution", "forward")
    story.allocate(1)
    recording = story.build()
    assert with_cublas_workspaces(recording, AMPERE) is recording
    products = training_recording()
    assert with_cublas_workspaces(products, 0) is products


@examples(80)
@given(ACTIONS)
def test_nothing_but_workspaces_is_added_and_all_else_keeps_its_place(actions):
    before = told(actions)
    after = with_cublas_workspaces(before, AMPERE)
    count = after.blocks - before.blocks
    assert 0 <= count <= 2
    own = after.event_block >= before.blocks
    assert (after.event_block[~own] == before.event_block).all()
    assert (after.event_time[~own] == before.event_time).all()
    assert (np.diff(after.event_time) >= 0).all()
    assert (after.block_bytes[: before.blocks] == before.block_bytes).all()
    more = replay(after, expandable_segments=True), replay(before, expandable_segments=True)
    grown = more[0].peak_allocated_bytes - more[1].peak_allocated_bytes
    assert 0 <= grown <= count * AMPERE
