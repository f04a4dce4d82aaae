"""What every fault must leave: no process, no thread and no lock that was not there before."""

import gc
import threading
from pathlib import Path

import pytest
from leftovers import children_here, locks_here, threads_beyond
from trial_fixtures import config, no_predictions_left, no_survivors, own
from waiting import wait_until

from kit.data.stores.manifest import LOCK_KEY


def pytest_collection_modifyitems(items):
    for item in items:
        if item.path.parent == Path(__file__).parent:
            item.add_marker(pytest.mark.fault)


__all__ = ["config", "no_predictions_left", "no_survivors", "nothing_left", "own"]


@pytest.fixture(autouse=True)
def nothing_left(tmp_path):
    children, threads, locks = children_here(), set(threading.enumerate()), locks_here()
    yield
    gc.collect()
    wait_until(lambda: children_here() <= children)
    wait_until(lambda: not threads_beyond(threads))
    wait_until(lambda: locks_here() <= locks)
    assert [*tmp_path.rglob(LOCK_KEY)] == []
