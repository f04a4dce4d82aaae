import re
import sysconfig
import time

import pytest

from kit.events import EventWriter
from kit.trial.directory import RunPaths
from kit.trial.verdict import Limits, RankEnd, judge, last_stack

LIMITS = Limits(timeout_seconds=60, stall_seconds=30, grace_seconds=5)
KILLED, SEGFAULT = -9, -11


@pytest.fixture
def paths(tmp_path):
    return RunPaths(tmp_path)


def say(paths, rank, *events):
    writer = EventWriter(paths.events(rank), rank)
    for kind, fields in events:
        writer.write(kind, **fields)
    writer.close()


def step(number):
    return "step", {"step": number, "host_rss_bytes": 1 << 30}


def ended(stopped=False):
    return "fit_ended", {"steps": 2, "stopped": stopped}


def failed(message, cause="error", lost_peer=False):
    return "failed", {"message": message, "cause": cause, "lost_peer": lost_peer}


def end(rank, code=0, by_us=False, moment=None):
    return RankEnd(rank, code, time.time() if moment is None else moment, by_us)


def test_ranks_that_said_so_and_left_with_zero_are_complete(paths):
    for rank in (0, 1):
        say(paths, rank, step(1), step(2), ended())
    verdict = judge(paths, [end(0), end(1)], None, LIMITS, False)
    assert (verdict.state, verdict.message, verdict.cause) == ("COMPLETE", "2 steps", None)


def test_exit_code_zero_alone_is_no_success(paths):
    say(paths, 0, step(1))
    verdict = judge(paths, [end(0)], None, LIMITS, False)
    assert (verdict.state, verdict.cause, verdict.failed_rank) == ("FAILED", "error", 0)


def test_a_rank_that_never_said_anything_has_failed(paths):
    assert judge(paths, [end(0, 1)], None, LIMITS, False).state == "FAILED"


def test_the_first_failure_in_time_is_reported(paths):
    say(paths, 1, failed("the first"))
    say(paths, 0, failed("the second"))
    verdict = judge(paths, [end(0, 1), end(1, 1)], None, LIMITS, False)
    assert (verdict.message, verdict.failed_rank) == ("the first", 1)


def test_a_lost_peer_is_never_the_root_even_when_it_spoke_first(paths):
    say(paths, 0, failed("connection closed", lost_peer=True))
    verdict = judge(paths, [end(0, 1), end(1, SEGFAULT, moment=time.time() + 5)], "sibling", LIMITS, False)
    assert re.match("rank 1 .*SIGSEGV", verdict.message)


def test_a_lost_peer_is_reported_when_there_is_nothing_else(paths):
    say(paths, 0, failed("connection closed", lost_peer=True))
    verdict = judge(paths, [end(0, 1), end(1, KILLED, by_us=True)], "sibling", LIMITS, False)
    assert verdict.message == "connection closed"


def test_a_kill_from_outside_is_host_memory_only_when_the_system_counted_it(paths):
    say(paths, 0, step(3))
    told = judge(paths, [end(0, KILLED)], None, LIMITS, True)
    assert told.cause == "host_oom"
    assert re.search("host memory .*rank 0 .*step 3, .*1 GiB$", told.message)
    assert judge(paths, [end(0, KILLED)], None, LIMITS, False).cause == "killed"


def test_leaving_on_request_is_stopped(paths):
    say(paths, 0, step(7), ended(stopped=True))
    verdict = judge(paths, [end(0)], None, LIMITS, False)
    assert (verdict.state, verdict.message) == ("STOPPED", "stopped after step 7")


def test_an_error_after_a_request_to_stop_is_still_an_error(paths):
    say(paths, 0, failed("ValueError: late"))
    assert judge(paths, [end(0, 1)], None, LIMITS, False).state == "FAILED"


def test_ranks_killed_because_the_kernel_is_gone_are_lost(paths):
    verdict = judge(paths, [end(0, KILLED, by_us=True)], "kernel", LIMITS, False)
    assert verdict.state == "LOST"
    assert "kernel" in verdict.message


def test_the_rank_furthest_behind_is_named_when_a_trial_stalls(paths):
    say(paths, 0, step(4))
    say(paths, 1, step(3))
    verdict = judge(paths, [end(0, KILLED, True), end(1, KILLED, True)], "stalled", LIMITS, False)
    assert (verdict.cause, verdict.failed_rank) == ("stalled", 1)
    assert re.search("progress for 30 s .*step 3", verdict.message)


def test_a_torn_or_damaged_event_file_does_not_prevent_a_verdict(paths):
    say(paths, 0, step(1))
    with paths.events(0).open("ab") as file:
        file.write(b'garbage\n[1]\n{"kind": "st')
    assert re.match("rank 0 .*SIGSEGV", judge(paths, [end(0, SEGFAULT)], None, LIMITS, False).message)


def test_the_last_stack_is_that_of_the_users_code_else_of_the_rank(tmp_path):
    library = sysconfig.get_paths()["stdlib"]
    idle = f'Current thread 0x1 (most recent call first):\n  File "{library}/queue.py", line 7 in get\n'
    hangs = f'Current thread 0x2 (most recent call first):\n  File "{library}/time.py", line 1 in sleep\n' + (
        '  File "/home/somebody/data.py", line 12 in __getitem__\n'
    )
    log = tmp_path / "log.0.txt"
    for written, expected in (
        (hangs + idle, ("/home/somebody/data.py", 12, "__getitem__")),
        (idle + hangs + idle, ("/home/somebody/data.py", 12, "__getitem__")),
        (idle + idle, (f"{library}/queue.py", 7, "get")),
        ("it began", None),
    ):
        log.write_text(written)
        assert last_stack(log) == expected
