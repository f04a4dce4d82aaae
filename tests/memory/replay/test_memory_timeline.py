"""Timelines: categories that add up at every event, a peak that is never thinned away, and what is alive at it."""

from dataclasses import asdict

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from properties import examples
from recordings import ACTIONS, RecordingBuilder, told, training_recording

from kit.memory.replay.estimate import Timeline, breakdown_at, category_series, largest_at, peak_of, thin, timeline
from kit.memory.replay.replay import CATEGORIES, replay

MIB = 1 << 20


@given(ACTIONS, st.sampled_from([1, 512]))
def test_categories_add_up_to_what_is_allocated_at_every_event(actions, rounding):
    recording = told(actions, rounding_bytes=rounding)
    played = replay(recording)
    series = category_series(recording, played.held_bytes)
    assert series.shape == (len(CATEGORIES), len(recording.event_block))
    assert (series.sum(axis=0) == played.allocated_bytes).all()
    assert (series >= 0).all()


@given(ACTIONS)
def test_the_breakdown_at_the_peak_adds_up_to_the_peak(actions):
    recording = told(actions)
    played = replay(recording)
    peak = peak_of(recording, played.allocated_bytes)
    breakdown = breakdown_at(recording, peak.event, played.held_bytes)
    assert sum(breakdown.values()) == played.peak_allocated_bytes
    assert list(breakdown.values()) == sorted(breakdown.values(), reverse=True)
    largest = largest_at(recording, peak.event, played.held_bytes, most=1000)
    assert sum(block.bytes for block in largest) == played.peak_allocated_bytes


@examples(200)
@given(st.lists(st.integers(0, 1 << 40), max_size=300), st.integers(1, 50))
def test_thinning_keeps_the_highest_and_the_order(values, most):
    kept = thin(np.array(values, dtype=np.int64), most)
    assert len(kept) <= max(most, 0)
    assert (np.diff(kept) > 0).all()
    if values:
        assert max(values) == max(values[place] for place in kept)


def test_the_peak_is_named_by_the_block_that_made_it():
    story = RecordingBuilder(accumulate_grad_batches=2)
    story.operator("empty", "setup", "model")
    story.allocate(4 * MIB, "parameters")
    for number in range(4):
        story.batch()
        story.operator("mm", "forward", "head")
        first = story.allocate(MIB, "activations")
        story.operator("softmax", "backward", "loss")
        second = story.allocate((3 if number == 3 else 1) * MIB)
        story.free(first, second)
    recording = story.build()
    played = replay(recording)
    peak = peak_of(recording, played.allocated_bytes)
    assert (peak.operator, peak.module, peak.phase) == ("softmax", "loss", "backward")
    assert (peak.step, peak.micro_batch) == (1, 3)
    assert str(peak) == "softmax in loss (backward of step 2)"
    assert breakdown_at(recording, peak.event, played.held_bytes) == {
        "parameters": 4 * MIB,
        "temporaries": 3 * MIB,
        "activations": MIB,
    }


def test_before_the_first_batch_there_is_no_step():
    story = RecordingBuilder()
    story.operator("empty", "setup")
    story.allocate(MIB, "parameters")
    peak = peak_of(story.build(), replay(story.build()).allocated_bytes)
    assert (peak.step, peak.micro_batch, peak.phase) == (-1, -1, "setup")


def test_nothing_recorded_has_no_peak():
    recording = RecordingBuilder().build()
    played = replay(recording)
    assert peak_of(recording, played.allocated_bytes).event == -1
    drawn = timeline(recording, played)
    assert (drawn.peak, drawn.clock_bytes, drawn.batch_starts) == (-1, (), ())


def test_a_long_recording_is_thinned_with_its_peak_and_its_sums():
    recording = training_recording(layers=300)
    played = replay(recording)
    drawn = timeline(recording, played, most_points=500)
    assert 250 <= len(drawn.allocated_bytes) <= 500 < len(played.allocated_bytes)
    assert drawn.allocated_bytes[drawn.peak] == played.peak_allocated_bytes
    assert [sum(point) for point in zip(*drawn.categories.values(), strict=True)] == list(drawn.allocated_bytes)
    assert all(len(series) == len(drawn.clock_bytes) for series in drawn.categories.values())
    assert list(drawn.clock_bytes) == sorted(drawn.clock_bytes)
    assert [drawn.phases[start] for start in drawn.batch_starts] == ["forward", "forward"]


def test_the_clock_starts_with_the_first_batch_and_counts_every_byte_asked_for():
    story = RecordingBuilder()
    story.operator("empty", "setup")
    story.allocate(1000, "parameters")
    story.batch()
    story.operator("mm", "forward")
    story.free(story.allocate(300))
    story.allocate(50)
    drawn = timeline(story.build(), replay(story.build()))
    assert drawn.clock_bytes == (0, 300, 300, 350)
    assert drawn.batch_starts == (1,)


def test_a_timeline_survives_its_dictionary():
    recording = training_recording(layers=2)
    drawn = timeline(recording, replay(recording))
    assert Timeline.from_dict(asdict(drawn)) == drawn
