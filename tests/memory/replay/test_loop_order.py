"""When gradients are freed: read from recordings of each order of the loop, and what freeing them sooner saves."""

import pytest
from hypothesis import given
from recordings import ACTIONS, MIB, RecordingBuilder, told, training_recording

from kit.memory.replay.cards import target_of
from kit.memory.replay.estimate import estimate
from kit.memory.replay.loop_order import freed_after_step, loop_order, saved_bytes
from kit.memory.replay.replay import replay

ORDERS = ("after the step", "before the forward pass", "between forward and backward pass", "never")


def loop(order, steps=2):
    """A step of 4 MiB of gradients beside 10 MiB of activations."""
    story, gradient = RecordingBuilder(), None
    story.operator("empty", "setup")
    story.allocate(4 * MIB, "parameters")
    for _ in range(steps):
        story.batch()
        story.operator("copy", "forward", "")
        batch = story.allocate(MIB, "inputs")
        if gradient is not None and order == ORDERS[1]:
            story.free(gradient)
        story.operator("mm", "forward", "layer")
        kept = story.allocate(10 * MIB, "activations")
        story.operator("loss", "forward", "")
        if gradient is not None and order == ORDERS[2]:
            story.free(gradient)
        story.operator("mm", "backward", "layer")
        if gradient is None or order != ORDERS[3]:
            story.free(kept)
            gradient = story.allocate(4 * MIB, "gradients")
        else:
            story.free(kept)
        story.operator("_foreach_add", "optimizer", "")
        if order == ORDERS[0]:
            story.free(gradient)
        story.free(batch)
    return story.build()


@pytest.mark.parametrize("order", ORDERS)
def test_each_order_is_told_apart_and_only_what_is_kept_and_freed_can_be_saved(order):
    found = estimate(loop(order), target_of("T4-16GB"))
    assert found.gradients_freed == order
    kept = order == ORDERS[2]
    assert found.breakdown.get("last_gradients", 0) == (4 * MIB if kept else 0)
    assert found.zero_grad_saves_bytes == (4 * MIB if kept else 0)
    assert sum(found.breakdown.values()) == found.device_allocated_bytes
    assert any("zero_grad_after_step" in reason for reason in found.reasons) == kept


def test_without_a_second_step_nothing_is_said():
    found = estimate(loop(ORDERS[2], steps=1), target_of("T4-16GB"))
    assert (found.gradients_freed, found.zero_grad_saves_bytes) == ("", 0)


def test_freed_sooner_a_recording_is_the_one_of_a_loop_in_that_order():
    recording = training_recording(batch_size=8)
    order = loop_order(recording)
    sooner = freed_after_step(recording, order)
    assert loop_order(sooner).gradients_freed == ORDERS[0]
    played, before = replay(sooner), replay(recording)
    saved = saved_bytes(recording, order, before.peak_allocated_bytes)
    assert before.peak_allocated_bytes - played.peak_allocated_bytes == saved > 0
    assert (sooner.event_time[1:] >= sooner.event_time[:-1]).all()


@given(ACTIONS)
def test_freeing_sooner_never_needs_more(actions):
    recording = told(actions)
    order = loop_order(recording)
    assert saved_bytes(recording, order, replay(recording).peak_allocated_bytes) >= 0
    assert (order.ends >= order.begins).all()
