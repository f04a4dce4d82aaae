"""A room: equal shares of cores, folders that are made once, and servers that end with it."""

import contextlib
import json
import os
import random
import signal
import socket
import subprocess
import sys
import urllib.request
from pathlib import Path
from types import SimpleNamespace

import pytest
from waiting import wait_until

from kit.course.room import furnish, main, plan_room
from kit.errors import ConfigError, KitError
from kit.machine.machine import Seat
from kit.memory import recordings


def test_every_place_has_a_folder_a_port_a_token_and_a_share(tmp_path):
    places = plan_room(3, ["ada", "ben"], tmp_path, 9000)
    assert [place.folder.name for place in places] == ["ada", "ben", "person-3"]
    assert [place.port for place in places] == [9000, 9001, 9002]
    assert [str(place.seat) for place in places] == [
        "share 1 of 3 (ada)", "share 2 of 3 (ben)", "share 3 of 3 (person-3)",
    ]  # fmt: skip
    assert len({place.token for place in places}) == 3


@pytest.mark.parametrize(
    ("people", "names", "words"),
    [(0, [], "must be 1 to 100"), (1, ["a", "b"], "only 1 people"), (2, ["a", "a"], "twice"), (1, ["../x"], "letters")],
)
def test_what_makes_no_room_is_refused(tmp_path, people, names, words):
    with pytest.raises(ConfigError, match=words):
        plan_room(people, names, tmp_path, 9000)
    assert main([str(people), "--names", ",".join(names), "--folder", str(tmp_path / "room")]) == 2
    assert not (tmp_path / "room").exists()


def test_a_folder_is_furnished_once(tmp_path):
    (place,) = plan_room(1, ["ada"], tmp_path, 9000)
    assert furnish(place)
    (place.folder / "notebooks" / "00_start.ipynb").write_text("mine")
    assert not furnish(place)
    assert (place.folder / "notebooks" / "00_start.ipynb").read_text() == "mine"


@pytest.mark.parametrize("cores", [{0, 1}, set(range(16)), {3}, {8, 9, 10, 11}, set(range(0, 64, 2))])
@pytest.mark.parametrize("of", [1, 2, 8])
def test_shares_are_even_and_a_share_of_a_share_is_itself(cores, of):
    shares = [Seat(number, of).cores(cores) for number in range(1, of + 1)]
    load = {core: sum(core in share for share in shares) for core in cores}
    if of >= len(cores):
        assert max(load.values()) - min(load.values()) <= 1
    if of <= len(cores) and cores == set(range(len(cores))):
        assert set(load.values()) == {1}
    assert all(Seat(place, of).cores(share) == share for place, share in enumerate(shares, start=1))


@pytest.mark.parametrize(
    ("text", "cores", "people"), [("", 2, 1), ("1/2", 16, 1), ("3/8", 2, 4), ("8/8", 4, 2), ("1/3", 2, 1.5)]
)
def test_a_prediction_has_more_time_where_people_share_cores(text, cores, people, monkeypatch):
    monkeypatch.setenv("KIT_SEAT", text)
    monkeypatch.setattr("os.cpu_count", lambda: cores)
    asked = []

    class Ended:
        answer = KitError("not asked")

        def __init__(self, request, timeout_seconds):
            asked.append(timeout_seconds)

        def look(self):
            return True

    monkeypatch.setattr(recordings, "_Running", Ended)
    request = SimpleNamespace(query=SimpleNamespace(key="one"), batch_sizes=(None,))
    assert recordings.record_all([request], 60.0) == [Ended.answer]
    assert asked == [60 * people]


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_servers_open_with_their_share_and_end_with_the_room(tmp_path):
    command = [
        sys.executable,
        "-m",
        "kit.course.room",
        "2",
        "--folder",
        str(tmp_path),
        "--port",
        str(_two_free_ports()),
    ]
    room = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        lines = [room.stdout.readline() for _ in range(4)]
        assert "Ctrl+C closes the room" in lines[3]
        address = lines[2].split()[-1]
        status = address.replace("/lab/tree/notebooks/00_start.ipynb", "/api/status")
        assert wait_until(lambda: _answer(status))["kernels"] == 0
        assert not _answer(status.partition("?")[0]), "nobody comes in without the token"
        servers = _children(room.pid)
        assert len(servers) == 2
        variables = Path(f"/proc/{servers[1]}/environ").read_bytes()
        assert b"KIT_SEAT=2/2 person-2" in variables
        assert b"JUPYTER_TOKEN" not in Path(f"/proc/{servers[1]}/cmdline").read_bytes()
        assert os.sched_getaffinity(servers[0]) == set(Seat(1, 2).cores(os.sched_getaffinity(0)))
    finally:
        room.send_signal(signal.SIGTERM)
        room.communicate(timeout=120)
    assert wait_until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in servers))


def _two_free_ports():
    """The first of two ports in a row that nobody listens on; below those of clients, who may meet themselves there."""
    while True:
        port = random.randrange(20_000, 30_000)
        with socket.socket() as one, socket.socket() as next_one, contextlib.suppress(OSError):
            one.bind(("127.0.0.1", port))
            next_one.bind(("127.0.0.1", port + 1))
            return port


def _answer(url):
    try:
        with urllib.request.urlopen(url, timeout=5) as answer:
            return json.load(answer)
    except OSError:
        return None


def _children(pid):
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def test_the_process_that_starts_trials_keeps_to_the_share():
    command = [sys.executable, "-P", "-m", "kit.trial.supervisor", "cold", str(os.getpid())]
    mine = set(Seat(2, 8).cores(os.sched_getaffinity(0)))
    supervisor = subprocess.Popen(command, stdin=subprocess.PIPE, env={**os.environ, "KIT_SEAT": "2/8"})
    try:
        assert wait_until(lambda: os.sched_getaffinity(supervisor.pid) == mine)
    finally:
        supervisor.stdin.close()
        supervisor.wait()
