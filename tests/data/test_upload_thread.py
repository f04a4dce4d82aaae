"""UploadThread: one at a time, the newest next, and nobody who offers waits."""

import threading

import pytest
from waiting import PATIENCE_SECONDS

from kit.checkpoints.callback import UploadThread


@pytest.fixture
def held():
    """A worker that finishes only what it is allowed to, and the two events around a delivery."""
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
    worker = UploadThread(deliver)
    yield worker, began, allowed
    worker.stop(PATIENCE_SECONDS)
    assert not [thread for thread in {*threading.enumerate()} - before if thread.name == "kit-upload"]


def test_a_newer_one_takes_the_place_of_the_one_that_waits(held):
    worker, began, allowed = held
    assert worker.offer("a") is None
    assert began.acquire(timeout=PATIENCE_SECONDS)
    assert worker.offer("b") is None
    assert worker.offer("c") == "b"
    assert not worker.finish(0.05)
    allowed.release(2)
    assert worker.finish(PATIENCE_SECONDS)
    assert worker.take_outcomes() == [("a", "A"), ("c", "C")]
    assert worker.take_outcomes() == []


def test_what_fails_is_told_and_the_next_is_delivered(held):
    worker, _, allowed = held
    allowed.release(2)
    worker.offer("bad")
    assert worker.finish(PATIENCE_SECONDS)
    worker.offer("good")
    assert worker.finish(PATIENCE_SECONDS)
    (item, error), good = worker.take_outcomes()
    assert (item, type(error), str(error)) == ("bad", ValueError, "bad")
    assert good == ("good", "GOOD")


def test_stopping_gives_up_what_is_under_way_and_what_waits(held):
    worker, began, _ = held
    worker.offer("a")
    assert began.acquire(timeout=PATIENCE_SECONDS)
    worker.offer("b")
    worker.stop(PATIENCE_SECONDS)
    ((item, error),) = worker.take_outcomes()
    assert (item, str(error)) == ("a", "given up")
