"""What holds for every test."""

from __future__ import annotations

import os
import signal

import pytest

from kit.cloud.simulated_cloud import simulated_cloud
from kit.endpoints import VARIABLE

# With tiles (AMX) oneDNN lays bfloat16 out in another way: what convolutions and LSTMs hold meanwhile was measured
# without, and the tests compare with that on every machine. It is read before the first operator, so it is set here.
os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_FP16")


def pytest_configure() -> None:
    # What a shell runs in the background ignores interrupts from birth, and so would all that the tests interrupt.
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="module")
def running_cloud():
    """A simulated cloud for a whole file of tests; each asks for it as `cloud`."""
    with simulated_cloud("no limits") as running:
        yield running


@pytest.fixture
def cloud(running_cloud, monkeypatch):
    """A simulated cloud without limits, faults or counts; what the test names a bucket of it is forgotten after it.

    Objects of earlier tests of the same file stay in their own buckets.
    """
    monkeypatch.setenv(VARIABLE, "")
    return running_cloud.turn("no limits", faults={}).forget_scripts().reset_counts()
