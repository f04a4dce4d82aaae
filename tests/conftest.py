"""What holds for every test."""

from __future__ import annotations

import signal


def pytest_configure() -> None:
    # What a shell runs in the background ignores interrupts from birth, and so would all that the tests interrupt.
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
