"""What the device's own clock says of a step, with marks that remember when the device came by."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kit.trial.recorder import PARTS, DeviceClock, with_device_seconds


class Device:
    """A stream: work that is launched is done one piece after another, and the host may run ahead."""

    def __init__(self):
        self.host = self.free = 0.0
        self.waited = 0

    def mark(self):
        device = self

        class Mark:
            def record(self):
                device.free = self.passed = max(device.free, device.host)

            def synchronize(self):
                device.waited += 1

            def elapsed_time(self, end):
                return 1000 * (end.passed - self.passed)

        return Mark()

    def launch(self, host_seconds, device_seconds):
        self.host += host_seconds
        self.free = max(self.free, self.host) + device_seconds


def test_a_part_costs_what_the_device_worked_and_idled_in_it():
    device = Device()
    clock = DeviceClock(device.mark, "other")
    clock.turn("wait")
    device.host += 3.0  # the device stands idle meanwhile
    clock.turn("forward")
    device.launch(0.1, 2.0)
    clock.turn("backward")
    device.launch(0.1, 4.0)
    seconds = clock.take().seconds()
    assert seconds == pytest.approx({"other": 0.0, "wait": 3.0, "forward": 2.1, "backward": 4.0})


def test_a_wait_the_device_never_felt_costs_nothing():
    device = Device()
    clock = DeviceClock(device.mark, "forward")
    device.launch(0.1, 10.0)
    clock.turn("wait")
    device.host += 5.0  # the device is still at work
    clock.turn("forward")
    assert clock.take().seconds()["wait"] == 0.0


def test_the_host_waits_only_when_seconds_are_asked_for():
    device = Device()
    clock = DeviceClock(device.mark, "forward")
    clock.turn("backward")
    step = clock.take()
    assert device.waited == 0
    step.seconds()
    assert device.waited == 1


@given(st.lists(st.tuples(st.sampled_from("abc"), st.floats(0, 10), st.floats(0, 10)), max_size=20), st.integers(0, 20))
def test_nothing_is_lost_between_two_steps(work, cut):
    device = Device()
    clock = DeviceClock(device.mark, "a")
    steps = []
    for place, (part, host, seconds) in enumerate(work):
        clock.turn(part)
        device.launch(host, seconds)
        if place == cut:
            steps.append(clock.take())
    steps.append(clock.take())
    total = sum(sum(step.seconds().values()) for step in steps)
    assert total == pytest.approx(max(device.free, device.host), abs=1e-9)


def test_a_step_event_has_the_devices_seconds_and_keeps_the_hosts_beside_them():
    device = Device()
    clock = DeviceClock(device.mark, "forward")
    device.launch(0.1, 2.0)
    clock.turn("validation")
    device.launch(0.0, 1.0)
    host = {f"{part}_seconds": 0.01 for part in (*PARTS, "other", "step")}
    fields = with_device_seconds({"samples": 8, **host}, clock.take())
    assert fields["forward_seconds"] == pytest.approx(2.1)
    assert fields["wait_seconds"] == 0.0
    assert fields["step_seconds"] == pytest.approx(3.1)
    assert fields["samples_per_second"] == pytest.approx(8 / 3.1)
    assert fields["host_seconds"] == dict.fromkeys((*PARTS, "other", "step"), 0.01)
