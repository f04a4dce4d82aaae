"""Processes: what one says of itself, not of who started it."""

from __future__ import annotations

import mmap
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

from waiting import wait_until

from kit.machine.processes import members_of, peak_rss_bytes, rss_bytes, scheduled_seconds

TALK = """
import tempfile
from multiprocessing.connection import Client, Listener
from kit.machine.processes import shorten_socket_paths

shorten_socket_paths()
with Listener(family="AF_UNIX") as listener:
    Client(listener.address).close()
    print(listener.address.rpartition("/")[0], tempfile.gettempdir(), sep="\\n")
"""
ASK = "from kit.machine.processes import peak_rss_bytes; print(peak_rss_bytes())"


def test_the_peak_of_a_program_is_its_own_and_not_that_of_the_one_that_started_it():
    held = bytearray(300 << 20)
    held[::4096] = b"x" * len(held[::4096])
    assert peak_rss_bytes() > len(held)
    answer = subprocess.run([sys.executable, "-c", ASK], capture_output=True, text=True, check=True)
    assert 0 < int(answer.stdout) < len(held) // 2


def test_a_process_knows_how_long_its_threads_had_a_core_and_waited_for_one():
    (before, queued), used = scheduled_seconds(), time.thread_time()
    while time.thread_time() < used + 0.1:
        pass
    after, waited = scheduled_seconds()
    assert after - before > 0.09
    assert waited >= queued > 0
    alone, _ = scheduled_seconds(threading.get_native_id())
    assert 0.1 < alone <= after
    assert scheduled_seconds(-1) == (0.0, 0.0)


def test_the_peak_stays_when_the_memory_is_given_back():
    held = mmap.mmap(-1, 64 << 20)  # what malloc is given back it may keep
    for place in range(0, len(held), 4096):
        held[place] = 1
    before, holding = peak_rss_bytes(), rss_bytes()
    held.close()
    near = 1 << 20  # Linux counts pages by core, and adds up now and then
    assert peak_rss_bytes() >= before - near >= holding - 2 * near
    assert rss_bytes() < holding - (32 << 20)


def test_processes_talk_to_each_other_where_the_temporary_folder_has_a_long_path(tmp_path, monkeypatch):
    folder = tmp_path / ("long" * 30)
    folder.mkdir()
    monkeypatch.setenv("TMPDIR", str(folder))
    answer = subprocess.run([sys.executable, "-c", TALK], capture_output=True, text=True, check=True)
    places = [Path(place) for place in answer.stdout.splitlines()]
    assert places[0].is_relative_to("/tmp")
    assert places[1] == folder, "everything else stays where it was asked for"
    assert not places[0].exists()


def test_the_members_of_a_group_are_those_that_live_eldest_first():
    line = "sleep 60 & sleep 60 & echo ready; wait"
    with subprocess.Popen(["sh", "-c", line], stdout=subprocess.PIPE, text=True, start_new_session=True) as leader:
        assert leader.stdout.readline() == "ready\n"
        found = members_of(leader.pid)
        assert found[0] == leader.pid
        assert len(found) == 3
        os.killpg(leader.pid, signal.SIGKILL)
    wait_until(lambda: members_of(leader.pid) == [])
