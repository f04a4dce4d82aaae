"""The guard of a command: the command cannot outlive its parent, and its end is known."""

import json
import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
from waiting import PATIENCE_SECONDS, wait_until

import kit
from kit.machine.processes import alive, identify

HOME = str(Path(kit.__file__).parents[1])
SECONDS = PATIENCE_SECONDS
CHILDREN = "import os, sys, time; print(os.getpid(), flush=True); os.fork(); time.sleep(600)"


def guarded(file, code, **options):
    line = [sys.executable, "-m", "kit.machine.processes", str(os.getpid()), str(file), sys.executable, "-c", code]
    return subprocess.Popen(
        line, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, start_new_session=True,
        env={**os.environ, "PYTHONPATH": HOME}, **options,
    )  # fmt: skip


@pytest.fixture
def file(tmp_path):
    return tmp_path / "ended.json"


def members(group):
    found = []
    for entry in Path("/proc").iterdir():
        try:
            fields = (entry / "stat").read_text().rpartition(")")[2].split()
        except OSError:
            continue
        if fields[2] == str(group) and fields[0] not in "ZX":
            found.append(entry.name)
    return found


@pytest.mark.parametrize("code", [0, 3])
def test_the_end_of_a_command_is_written_down_and_what_it_started_ends_with_it(file, code):
    orphan = f"import os, sys, time; os.fork() or time.sleep(600); sys.exit({code})"
    with guarded(file, orphan) as process:
        process.wait(SECONDS)
    assert json.loads(file.read_bytes())["code"] == code
    wait_until(lambda: not members(process.pid))


def test_all_of_it_ends_when_stdin_closes(file):
    with guarded(file, CHILDREN) as process:
        process.stdout.readline()
        assert len(members(process.pid)) >= 2
        process.stdin.close()
        process.wait(SECONDS)
        wait_until(lambda: not members(process.pid))
    assert not file.exists()


def test_all_of_it_ends_when_who_asked_is_killed(file):
    """Though another process still holds the pipe."""
    code = f"""
        import os, subprocess, sys, time
        command = [sys.executable, "-c", {CHILDREN!r}]
        line = [sys.executable, "-m", "kit.machine.processes", str(os.getpid()), {str(file)!r}, *command]
        process = subprocess.Popen(line, stdin=subprocess.PIPE, start_new_session=True)
        if os.fork() == 0:
            time.sleep(600)
        print(process.pid, flush=True)
        time.sleep(600)
    """
    variables = {**os.environ, "PYTHONPATH": HOME}
    asking = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(code)], stdout=subprocess.PIPE, text=True, env=variables,
        start_new_session=True,
    )  # fmt: skip
    with asking:
        numbers = sorted(int(asking.stdout.readline()) for _ in range(2))
        group = identify(next(number for number in numbers if os.getpgid(number) == number))
        assert alive(group)
        os.kill(asking.pid, signal.SIGKILL)
        wait_until(lambda: not alive(group))
        os.killpg(asking.pid, signal.SIGKILL)
    wait_until(lambda: not members(group["pid"]))
    assert not file.exists()


def test_a_request_to_end_reaches_the_command_and_its_answer_is_awaited(file):
    code = "import signal, sys, time; signal.signal(15, lambda *_: sys.exit(7)); print(1, flush=True); time.sleep(600)"
    with guarded(file, code) as process:
        process.stdout.readline()
        os.killpg(process.pid, signal.SIGTERM)
        process.wait(SECONDS)
    assert json.loads(file.read_bytes())["code"] == 7
