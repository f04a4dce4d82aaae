"""Courier: one at a time, the newest next, and nobody who offers waits."""

import threading

import pytest
from waiting import PATIENCE_SECONDS

from kit.checkpoints.callback import LatestOnlyWorker


@pytest.fixture
def held():
    """A courier that delivers only what it is allowed to, and the two events around a delivery."""
    began, allowed = threading.Semaphore(0), threading.Semaphore(0)

    def deliver(item, cancelled):
        began.release()
        while not allowed.acquire(timeout=0.01):
            if cancelled.is_set():
                raise RuntimeError("given up")
        if item == "bad":
            raise ValueError(item)
        return item.upper()

    before = {*threading.enumerate()}
    courier = LatestOnlyWorker(deliver)
    yield courier, began, allowed
    courier.stop(PATIENCE_SECONDS)
    assert not [thread for thread in {*threading.enumerate()} - before if thread.name == "kit-courier"]


def test_a_newer_one_takes_the_place_of_the_one_that_waits(held):
    courier, began, allowed = held
    assert courier.offer("a") is None
    assert began.acquire(timeout=PATIENCE_SECONDS)
    assert courier.offer("b") is None
    assert courier.offer("c") == "b"
    assert not courier.finish(0.05)
    allowed.release(2)
    assert courier.finish(PATIENCE_SECONDS)
    assert [outcome.result for outcome in courier.take_outcomes()] == ["A", "C"]
    assert courier.take_outcomes() == []


def test_what_fails_is_told_and_the_next_is_delivered(held):
    courier, _, allowed = held
    allowed.release(2)
    courier.offer("bad")
    assert courier.finish(PATIENCE_SECONDS)
    courier.offer("good")
    assert courier.finish(PATIENCE_SECONDS)
    bad, good = courier.take_outcomes()
    assert (bad.item, str(bad.error), bad.result) == ("bad", "bad", None)
    assert (good.result, good.error) == ("GOOD", None)


def test_stopping_gives_up_what_is_under_way_and_what_waits(held):
    courier, began, _ = held
    courier.offer("a")
    assert began.acquire(timeout=PATIENCE_SECONDS)
    courier.offer("b")
    courier.stop(PATIENCE_SECONDS)
    (only,) = courier.take_outcomes()
    assert (only.item, str(only.error)) == ("a", "given up")
