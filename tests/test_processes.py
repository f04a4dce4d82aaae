"""Processes: what one says of itself, not of who started it."""

from __future__ import annotations

import subprocess
import sys

from kit.processes import peak_rss_bytes, rss_bytes

ASK = "from kit.processes import peak_rss_bytes; print(peak_rss_bytes())"


def test_the_peak_of_a_program_is_its_own_and_not_that_of_the_one_that_started_it():
    held = bytearray(300 << 20)
    held[::4096] = b"x" * len(held[::4096])
    assert peak_rss_bytes() > len(held)
    answer = subprocess.run([sys.executable, "-c", ASK], capture_output=True, text=True, check=True)
    assert 0 < int(answer.stdout) < len(held) // 2


def test_the_peak_stays_when_the_memory_is_given_back():
    held = bytearray(64 << 20)
    held[::4096] = b"x" * len(held[::4096])
    before, holding = peak_rss_bytes(), rss_bytes()
    del held
    assert peak_rss_bytes() >= before >= holding
    assert rss_bytes() < holding - (32 << 20)
