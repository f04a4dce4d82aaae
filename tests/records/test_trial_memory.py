"""What a run directory holds about memory, read back and drawn: the prediction, and the rank that needed most."""

import json
import os

import numpy as np
import pytest
from recordings import training_recording

from kit.charts.timeline import breakdown_figure, memory_figure, timeline_figure
from kit.config import Config
from kit.errors import TrialError
from kit.machine.processes import identify, machine
from kit.memory.replay.cards import target_of
from kit.memory.replay.estimate import MeasuredMemory, estimate
from kit.records.row import measured_of, predicted_of
from kit.trial.directory import Control, RunPaths
from kit.trial.trial import Trial


def make_trial(folder, *, predicted=None, measured=(), **changes):
    config = Config().replace({"trial.folder": str(folder), **changes})
    paths = RunPaths.create(config)
    paths.config.write_text(config.to_yaml())
    environment = {"world_size": max(1, len(measured)), "machine": machine(), "supervisor": identify(os.getpid())}
    paths.environment.write_text(json.dumps(environment))
    Control.create(paths.control)
    if predicted is not None:
        paths.write_prediction(predicted.to_dict())
    for rank, peak in enumerate(measured):
        held = np.array([0, peak // 2, peak, peak // 3])
        MeasuredMemory(held, np.cumsum(held), 0.1, optimizer_steps=2).save(paths.measured_memory(rank))
    return Trial.open(paths.directory)


@pytest.fixture
def predicted():
    return estimate(training_recording(8, rounding_bytes=1), target_of("this machine"))


def test_prediction_and_measurement_of_a_trial_are_read_and_drawn(tmp_path, predicted):
    peak = round(predicted.device_allocated_bytes * 1.01)
    trial = make_trial(tmp_path, predicted=predicted, measured=[peak])
    assert predicted_of(trial) == predicted
    assert measured_of(trial).peak_bytes == peak
    texts = [text.get_text() for text in breakdown_figure(trial).axes[0].texts]
    assert any("ratio 1.010" in text for text in texts)
    for figure in (timeline_figure(trial), memory_figure(trial)):
        lines = [line for axes in figure.axes for line in axes.lines if line.get_label() == "measured"]
        assert max(lines[0].get_ydata()) == peak


def test_of_several_ranks_the_one_that_needed_most_counts(tmp_path, predicted):
    trial = make_trial(tmp_path, predicted=predicted, measured=[300, 900, 600])
    assert measured_of(trial).peak_bytes == 900


def test_a_trial_without_a_measurement_shows_its_prediction_alone(tmp_path, predicted):
    trial = make_trial(tmp_path, predicted=predicted)
    assert measured_of(trial) is None
    assert not any("measured" in text.get_text() for text in breakdown_figure(trial).axes[0].texts)


def test_a_trial_without_a_prediction_says_why_and_what_to_do(tmp_path):
    with pytest.raises(TrialError, match="call kit.predict_memory before kit.fit"):
        timeline_figure(make_trial(tmp_path))
    with pytest.raises(TrialError, match="trial.predict_memory is off"):
        timeline_figure(make_trial(tmp_path, **{"trial.predict_memory": False}))
