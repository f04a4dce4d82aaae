"""Scaling: two recordings foretell any other to the byte, or refuse with the first thing that does not fit."""

import re
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from properties import examples
from recordings import ACTIONS, RecordingBuilder, told, training_recording

from kit.memory.replay.replay import Recording, replay
from kit.memory.replay.scaling import BatchScaling, ScalingError

BATCHES = st.integers(1, 64)


def same(one: Recording, other: Recording) -> bool:
    columns = [name for name in vars(one) if isinstance(getattr(one, name), np.ndarray)]
    plain = [name for name in vars(one) if name not in columns]
    return all(np.array_equal(getattr(one, name), getattr(other, name)) for name in columns) and all(
        getattr(one, name) == getattr(other, name) for name in plain
    )


@examples(150)
@given(ACTIONS, BATCHES, BATCHES, BATCHES)
def test_any_batch_size_is_foretold_exactly_from_two_others(actions, first, second, third):
    if first == second:
        second = first + 1
    scaling = BatchScaling(told(actions, first), told(actions, second))
    truth = told(actions, third)
    assert same(scaling.at(third), truth)
    assert scaling.differs_from(truth) == ""


def test_peaks_of_a_training_run_are_foretold_exactly_although_rounding_is_not_affine():
    scaling = BatchScaling(training_recording(2), training_recording(3))
    for batch in (1, 2, 7, 32):
        truth = training_recording(batch)
        for expandable in (False, True):
            ours, theirs = (replay(one, expandable_segments=expandable) for one in (scaling.at(batch), truth))
            assert ours.peak_allocated_bytes == theirs.peak_allocated_bytes
            assert ours.peak_reserved_bytes == theirs.peak_reserved_bytes


def test_blocks_that_do_not_depend_on_the_batch_stay():
    recording = BatchScaling(training_recording(2), training_recording(3)).at(50)
    fixed = training_recording(2).block_bytes == training_recording(3).block_bytes
    assert fixed.any()
    assert (recording.block_bytes[fixed] == training_recording(2).block_bytes[fixed]).all()


def test_names_may_be_numbered_differently():
    recording = training_recording(3)
    turned = tuple(reversed(recording.names))
    place = {name: number for number, name in enumerate(turned)}
    columns = {
        column: np.array([place[recording.names[name]] for name in getattr(recording, column)], dtype=np.int32)
        for column in ("block_operator", "block_module", "operator_name", "operator_module")
    }
    scaling = BatchScaling(training_recording(2), replace(recording, names=turned, **columns))
    assert same(scaling.at(5), training_recording(5))


def test_frees_at_one_operator_may_come_in_another_order():
    def story(batch, order):
        builder = RecordingBuilder(batch_size=batch)
        builder.operator("mm", "forward")
        blocks = [builder.allocate(1000 * batch), builder.allocate(500)]
        builder.operator("exit", "forward")
        builder.free(*(blocks[place] for place in order))
        return builder.build()

    assert same(BatchScaling(story(2, (0, 1)), story(3, (1, 0))).at(4), story(4, (0, 1)))


@given(
    st.lists(st.tuples(st.integers(0, 10**6), st.integers(0, 10**6)), min_size=1, max_size=8),
    st.permutations([2, 3]),
    BATCHES,
)
def test_what_is_unsure_is_never_understated(operators, batches, batch):
    def unsure(size):
        return max(fixed + slope * size for fixed, slope in operators)

    scaling = BatchScaling(*(told([], one, unsure_workspace_bytes=unsure(one)) for one in batches))
    foretold = scaling.at(batch).facts.get("unsure_workspace_bytes", 0)
    assert unsure(batch) <= foretold <= max(unsure(2), -(-unsure(3) * batch // 3))
    if batch in batches:
        assert foretold == unsure(batch)


# -- refusals


def story_of(
    batch, sizes=(1000,), operator="mm", module="a", phase="forward", category="temporaries", stream=0, free=1
):
    builder = RecordingBuilder(batch_size=batch)
    builder.operator(operator, phase, module)
    blocks = [builder.allocate(size, category, stream) for size in sizes]
    for number in range(3):
        builder.operator("end", "optimizer", "")
        if number == free:
            builder.free(blocks[0])
    return builder.build()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"sizes": (1000, 1000)}, "number of blocks: 1 and 2"),
        ({"operator": "bmm"}, "operator 0 differs: 'mm' and 'bmm'"),
        ({"module": "b"}, "operator 0 differs: 'a' and 'b'"),
        ({"phase": "backward"}, "operator 0 .*phase"),
        ({"category": "activations"}, "category"),
        ({"stream": 1}, "stream"),
        ({"free": 2}, "freed at another"),
        ({"free": 5}, "number of events: 2 and 1"),
    ],
)
def test_stories_that_differ_are_refused_with_the_first_difference(change, message):
    with pytest.raises(ScalingError, match=message):
        BatchScaling(story_of(2), story_of(3, **change))


@pytest.mark.parametrize(
    ("first", "second", "batches", "message"),
    [
        (4000, 9000, (2, 3), "grows faster"),
        (1000, 900, (2, 3), "shrinks"),
        (1000, 1001, (2, 5), "whole bytes"),
    ],
)
def test_a_block_that_is_not_proportional_is_refused(first, second, batches, message):
    with pytest.raises(ScalingError, match=message):
        BatchScaling(story_of(batches[0], (first,)), story_of(batches[1], (second,)))


def test_a_workspace_may_be_less_than_nothing_without_a_sample_but_not_with_one():
    one, other = (story_of(batch, (1000 * batch - 64,), category="workspace") for batch in (2, 3))
    assert BatchScaling(one, other).at(1).block_bytes.tolist() == [936]
    one, other = (story_of(batch, (1000 * batch**2,), category="workspace") for batch in (4, 5))
    with pytest.raises(ScalingError, match="grows faster"):
        BatchScaling(one, other)


def grown(batch, bytes_of, category="activations"):
    """A recording of one block of so many bytes beside one that grows in proportion."""
    story = RecordingBuilder(1, batch)
    story.operator("mm", "forward", "layer")
    story.allocate(7 * batch + 3, "activations")
    story.allocate(bytes_of(batch), category)
    return story.build()


def bent(bytes_of, sizes, category="activations"):
    return BatchScaling(*(grown(size, bytes_of, category) for size in sizes))


@examples(50)
@given(st.integers(1, 40), st.integers(0, 999), st.integers(0, 999), st.integers(0, 999), st.integers(1, 4096))
def test_further_recordings_foretell_all_pairs_exactly(first, square, linear, constant, batch):
    def bytes_of(batch):
        return square * batch**2 + linear * batch + constant

    scaling = bent(bytes_of, (first, first + 1, 8 * first, 8 * first + 1, 3 * first))
    assert scaling.at(batch).block_bytes.tolist() == grown(batch, bytes_of).block_bytes.tolist()


@examples(50)
@given(
    st.lists(st.tuples(st.integers(-(10**5), 10**5), st.integers(0, 10**4)), min_size=1, max_size=2),
    st.integers(4, 40),
    st.integers(1, 1000),
)
def test_the_larger_of_two_terms_is_exact_on_both_sides_of_its_kink_and_beyond(terms, first, batch):
    def bytes_of(batch):
        return max(0, *(constant + slope * batch for constant, slope in terms)) + 64 * batch

    def leads(size):
        return max(range(len(terms)), key=lambda place: terms[place][0] + terms[place][1] * size)

    sizes = (first, first + 1, 2, 3, 8 * first, 8 * first + 1, 3 * first)
    found = bent(bytes_of, sizes, "workspace").at(batch).block_bytes[1]
    assert found <= bytes_of(batch), "a tangent is never above"
    pairs = [(2, 3), (first, first + 1), (8 * first, 8 * first + 1)]
    whole = [leads(one) for one, other in pairs if leads(one) == leads(other) and bytes_of(one) > 64 * one]
    if 3 <= batch <= 8 * first and set(range(len(terms))) <= set(whole) and bytes_of(2) > 128:
        assert found == bytes_of(batch)


def test_the_kink_between_two_recordings_at_which_two_lines_were_three_times_too_high():
    def bytes_of(batch):
        return max(100_000, 100_000 * batch - 1_900_000)

    scaling = bent(bytes_of, (16, 17, 2, 3, 128, 129, 45), "workspace")
    for batch in (1, 8, 19, 20, 21, 40, 64, 500):
        assert scaling.at(batch).block_bytes[1] == bytes_of(batch)


def test_what_grows_ever_slower_follows_no_parabola():
    with pytest.raises(ScalingError, match=r"follows no parabola .*record each"):
        bent(lambda batch: int(1000 * batch**0.5), (16, 17, 2, 3, 128, 129, 45))


def test_stairs_look_flat_between_two_points_but_a_third_tells():
    scaling = BatchScaling(story_of(2, (8000,)), story_of(3, (8000,)))
    assert scaling.differs_from(story_of(8, (8000,))) == ""
    told = scaling.differs_from(story_of(9, (16000,)))
    assert re.search("predicted .*8000 bytes .*batch size 9, .*16000", told)
    assert "number of blocks" in scaling.differs_from(story_of(9, (8000, 1)))


def test_one_batch_size_is_not_enough_and_below_one_there_is_none():
    with pytest.raises(ScalingError, match="both recordings .*batch size 2"):
        BatchScaling(story_of(2), story_of(2))
    with pytest.raises(ScalingError, match="batch_size is 0"):
        BatchScaling(story_of(2), story_of(3)).at(0)


def test_other_rounding_is_another_device():
    with pytest.raises(ScalingError, match="rounding: 512 and 1"):
        BatchScaling(training_recording(2), training_recording(3, rounding_bytes=1))
