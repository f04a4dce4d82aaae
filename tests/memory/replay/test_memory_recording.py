"""Recordings: kept whole in one file that no pickle is opened for, and rounded as the device rounds."""

import numpy as np
import pytest
from hypothesis import given
from properties import examples
from recordings import ACTIONS, RecordingBuilder, told, training_recording

from kit.memory.replay.replay import Recording


@examples(25)
@given(actions=ACTIONS)
def test_a_recording_survives_its_file(tmp_path_factory, actions):
    recording = told(actions, batch_size=3, notes=["a branch was taken blindly"], world_size=8)
    path = tmp_path_factory.mktemp("recording") / "first.npz"
    recording.save(path)
    again = Recording.load(path)
    for name, value in vars(recording).items():
        if isinstance(value, np.ndarray):
            assert np.array_equal(getattr(again, name), value)
            assert getattr(again, name).dtype == value.dtype
        else:
            assert getattr(again, name) == value
    assert [file.name for file in path.parent.iterdir()] == ["first.npz"]


def test_a_file_with_a_pickle_in_it_is_refused(tmp_path):
    np.savez(tmp_path / "bad.npz", meta=np.array([{"names": []}], dtype=object))
    with pytest.raises(ValueError, match="allow_pickle"):
        Recording.load(tmp_path / "bad.npz")


@pytest.mark.parametrize(("rounding", "bytes_"), [(512, [0, 512, 512, 1024]), (1, [0, 1, 512, 513])])
def test_bytes_are_rounded_as_the_device_does(rounding, bytes_):
    story = RecordingBuilder(rounding)
    for size in (0, 1, 512, 513):
        story.allocate(size)
    assert story.build().rounded_bytes.tolist() == bytes_


def test_the_training_story_frees_what_it_should():
    recording = training_recording(layers=2)
    alive = np.bincount(recording.event_block, weights=np.where(recording.event_allocates, 1, -1))
    # Two layers leave parameters, gradients and two optimizer states each.
    assert alive.sum() == 2 * 4
    assert set(alive.tolist()) == {0.0, 1.0}
