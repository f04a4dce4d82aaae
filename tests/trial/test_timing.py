import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kit.trial.recorder import PARTS, StepClock

EPOCH = "run_training_epoch"
FETCH = "[_TrainingEpochLoop].train_dataloader_next"
MOVE = "[Strategy]SingleDeviceStrategy.batch_to_device"
STEP = "[LightningModule]UNet.optimizer_step"
FORWARD = "[Strategy]SingleDeviceStrategy.training_step"
BACKWARD = "[Strategy]SingleDeviceStrategy.backward"
AFTER = "[LightningModule]UNet.on_after_backward"
CALLBACK = "[Callback]Mine.on_before_optimizer_step"


@pytest.fixture
def clock(monkeypatch):
    """A clock that reads `now[0]`."""
    now = [0.0]
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])
    made = StepClock()
    made.now = now
    return made


def spend(clock, action, seconds, inside=()):
    clock.start(action)
    clock.now[0] += seconds
    for name, inner in inside:
        spend(clock, name, inner)
    clock.stop(action)


def test_time_is_charged_to_the_innermost_named_action(clock):
    clock.start(EPOCH)
    spend(clock, FETCH, 1.0)
    spend(clock, MOVE, 2.0)
    spend(clock, STEP, 4.0, inside=[(FORWARD, 8.0), (BACKWARD, 16.0), (AFTER, 32.0)])
    clock.now[0] += 64.0
    taken = clock.take()
    assert [taken[f"{part}_seconds"] for part in PARTS] == [1.0, 2.0, 8.0, 48.0, 4.0, 0.0, 0.0, 0.0, 0.0]
    assert taken["other_seconds"] == 64.0
    assert taken["step_seconds"] == 127.0


def test_a_hook_of_a_callback_belongs_to_what_called_it(clock):
    spend(clock, STEP, 1.0, inside=[(CALLBACK, 2.0)])
    assert clock.take()["optimizer_seconds"] == 3.0


def test_taking_in_the_middle_of_an_action_splits_it(clock):
    clock.start(FORWARD)
    clock.now[0] += 1.0
    assert clock.take()["forward_seconds"] == 1.0
    clock.now[0] += 2.0
    clock.stop(FORWARD)
    assert clock.take()["forward_seconds"] == 2.0


def test_a_stop_without_a_start_changes_nothing(clock):
    clock.start(FORWARD)
    clock.stop("never started")
    clock.now[0] += 1.0
    clock.stop(FORWARD)
    assert clock.take()["forward_seconds"] == 1.0


def test_the_action_that_an_exception_left_first_is_remembered(clock):
    error = ValueError("damaged")
    with pytest.raises(ValueError, match="damaged"), clock.profile(EPOCH), clock.profile(FETCH):
        raise error
    assert clock.failed == (error, FETCH)


def test_the_end_of_the_data_is_no_failure(clock):
    with pytest.raises(RuntimeError), clock.profile(EPOCH):
        clock.start(FETCH)
        try:
            raise StopIteration
        except StopIteration:
            clock.stop(FETCH)
        raise RuntimeError
    assert clock.failed[1] == EPOCH


actions = st.recursive(
    st.tuples(st.sampled_from([FETCH, MOVE, STEP, FORWARD, BACKWARD, AFTER, CALLBACK, "user's own"]), st.just([])),
    lambda inner: st.tuples(st.sampled_from([EPOCH, STEP, FORWARD]), st.lists(inner, max_size=3)),
    max_leaves=12,
)


@given(st.lists(actions, max_size=5))
def test_the_parts_always_sum_to_the_wall_time(nested):
    clock = StepClock()

    def run(action):
        clock.start(action[0])
        for inner in action[1]:
            run(inner)
        clock.stop(action[0])

    for action in nested:
        run(action)
    taken = clock.take()
    parts = sum(taken[f"{part}_seconds"] for part in (*PARTS, "other"))
    assert parts == pytest.approx(taken["step_seconds"], abs=1e-9)
    assert min(taken.values()) >= 0


def test_saving_a_checkpoint_is_told_whole_and_once(clock, monkeypatch):
    moments = iter([10.0, 12.5])
    monkeypatch.setattr(time, "time", lambda: next(moments))
    spend(clock, "save_checkpoint", 1.0)
    assert clock.take_spans() == [("save", 10.0, 12.5)]
    assert clock.take_spans() == []


def test_what_is_entered_takes_everything_until_it_is_left(clock):
    clock.start(EPOCH)
    clock.enter("validation")
    spend(clock, MOVE, 2.0, inside=[(FORWARD, 3.0)])
    clock.enter("communication")  # inside of the other: that one has it
    clock.now[0] += 4.0
    clock.leave()
    clock.leave()
    clock.leave()  # nothing was entered any more
    spend(clock, MOVE, 1.0)
    taken = clock.take()
    assert taken["validation_seconds"] == 9.0
    assert taken["transfer_seconds"] == 1.0
    assert taken["communication_seconds"] == taken["forward_seconds"] == 0.0


def test_the_rest_of_an_action_can_turn_out_to_be_something_else(clock):
    clock.start(STEP)
    clock.start(BACKWARD)
    clock.now[0] += 5.0
    clock.turn_to("communication")
    clock.now[0] += 2.0
    clock.stop(BACKWARD)
    clock.now[0] += 1.0
    clock.stop(STEP)
    taken = clock.take()
    assert [taken[f"{part}_seconds"] for part in ("backward", "communication", "optimizer")] == [5.0, 2.0, 1.0]


def test_a_device_clock_hears_of_every_turn(clock):
    class Listening:
        def __init__(self):
            self.heard = []

        def turn(self, part):
            self.heard.append(part)

    clock.device = Listening()
    spend(clock, STEP, 1.0, inside=[(FORWARD, 1.0), (BACKWARD, 1.0)])
    assert clock.device.heard == ["optimizer", "forward", "optimizer", "backward", "optimizer", "other"]
