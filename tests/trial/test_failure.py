import contextlib
import queue
import re
import sys
import threading
from types import SimpleNamespace

import pytest
import torch
from torch.utils.data import DataLoader

from kit import Config
from kit.errors import CorruptChunkError
from kit.trial.verdict import DivergedError, describe_failure, root_cause


def caught(function):
    try:
        function()
    except BaseException as error:
        return error
    raise AssertionError("nothing was raised")


def fail():
    raise KeyError("sst")


def test_the_message_leads_with_the_error_and_the_users_own_line():
    told = describe_failure(caught(fail), None)
    line = fail.__code__.co_firstlineno + 1
    assert told["message"] == f"KeyError: 'sst' (test_failure.py, line {line}, in fail)"
    assert told["cause"] == "error"
    assert "in fail" in told["traceback"]


def test_an_error_in_a_library_is_told_at_the_users_line_that_led_to_it():
    def ask():
        torch.zeros(2) @ torch.zeros(3)

    assert "test_failure.py" in describe_failure(caught(ask), None)["message"]


def test_an_error_of_a_teardown_does_not_hide_the_first_one():
    def _teardown():
        raise RuntimeError("call iter() first")

    def run():
        try:
            fail()
        except KeyError:
            _teardown()
            raise

    assert isinstance(root_cause(caught(run)), KeyError)


def test_an_error_raised_while_handling_another_on_purpose_is_the_cause_itself():
    def run():
        try:
            fail()
        except KeyError:
            raise ValueError("no such variable")  # noqa: B904 - the idiom under test

    assert isinstance(root_cause(caught(run)), ValueError)


def test_a_suppressed_context_stays_hidden():
    def run():
        try:
            fail()
        except KeyError:
            raise ValueError("no such variable") from None

    assert isinstance(root_cause(caught(run)), ValueError)


def test_an_explicit_cause_comes_first_and_what_it_became_is_told_too():
    def run():
        try:
            fail()
        except KeyError as error:
            raise ValueError("no such variable") from error

    message = describe_failure(caught(run), None)["message"]
    assert message.startswith("KeyError: 'sst'")
    assert "raised again" in message
    assert message.endswith("ValueError: no such variable")


def test_an_error_of_kit_is_told_before_what_it_was_raised_from():
    def run():
        try:
            fail()
        except KeyError as error:
            raise CorruptChunkError("chunk 3 is damaged") from error

    told = describe_failure(caught(run), None)
    assert told["message"].startswith("CorruptChunkError: chunk 3 is damaged")
    assert told["cause"] == "data"


@pytest.mark.parametrize(
    ("error", "cause"),
    [
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB"), "device_oom"),
        (RuntimeError("CUDA error: out of memory"), "device_oom"),
        (RuntimeError("cuBLAS error: CUBLAS_STATUS_ALLOC_FAILED when calling cublasCreate"), "device_oom"),
        (
            RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried to allocate 4"),
            "host_oom",
        ),
        (MemoryError(), "host_oom"),
        (OSError(12, "Cannot allocate memory"), "host_oom"),
        (RuntimeError("DataLoader worker (pid 12) is killed by signal: Killed."), "data"),
        (DivergedError("the loss is nan at step 3"), "diverged"),
        (RuntimeError("out of luck"), "error"),
        (SystemExit(0), "error"),
    ],
)
def test_each_error_has_its_cause(error, cause):
    assert describe_failure(error, None)["cause"] == cause


@pytest.mark.parametrize(
    ("text", "lost"),
    [
        ("[../third_party/gloo/gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:4", True),
        ("NCCL communicator was aborted on rank 1", True),
        ("mat1 and mat2 shapes cannot be multiplied", False),
    ],
)
def test_a_lost_connection_is_told_apart_from_a_first_failure(text, lost):
    assert describe_failure(RuntimeError(text), None)["lost_peer"] is lost


@pytest.mark.parametrize("first", [ConnectionResetError(104, "Connection reset by peer"), EOFError(), queue.Empty()])
@pytest.mark.parametrize("words", ["(pid 12) is killed by signal: Killed. ", "(pid(s) 12) exited unexpectedly"])
def test_a_killed_loader_process_is_told_though_the_read_from_it_failed_first(first, words):
    def run():
        try:
            raise first
        except type(first):
            raise RuntimeError(f"DataLoader worker {words}")  # noqa: B904 - in a handler of a signal

    told = describe_failure(caught(run), None)
    assert (told["cause"], told["lost_peer"]) == ("data", False)
    assert told["message"].startswith("RuntimeError: DataLoader worker (pid")
    assert "memory" in told["message"]


def test_a_loader_process_that_ended_with_an_error_is_told_by_that_error(tmp_path):
    log = tmp_path / "log.0.txt"
    log.write_text(
        'a line\nTraceback (most recent call last):\n  File "spawn.py", line 1, in main\n    import scipy\n'
        "ModuleNotFoundError: No module named 'scipy'\nanother line\n"
    )
    paths = SimpleNamespace(log=lambda rank: log, memory_snapshot=lambda rank: log)
    context = SimpleNamespace(cells={}, clock=None, rank=0, paths=paths, config=Config(), environment={})
    words = "(pid(s) 12) exited unexpectedly with exit code 1. Details are lost due to multiprocessing"
    told = describe_failure(RuntimeError(f"DataLoader worker {words}"), context)
    assert told["message"].startswith("ModuleNotFoundError: No module named 'scipy'")
    assert "loader process" in told["message"]
    log.unlink()
    assert "memory" in describe_failure(RuntimeError(f"DataLoader worker {words}"), context)["message"]


def test_a_chain_that_loops_ends():
    first, second = ValueError("a"), ValueError("b")
    first.__cause__, second.__cause__ = second, first
    assert root_cause(first) is second


def test_a_deep_recursion_is_described():
    def forever():
        forever()

    assert describe_failure(caught(forever), None)["type"] == "RecursionError"
    assert sys.getrecursionlimit() > 0


@pytest.mark.parametrize("orderly", [False, True])
def test_a_loader_process_that_is_being_killed_is_named_also_when_its_connection_breaks_first(monkeypatch, orderly):
    iterator = iter(DataLoader(torch.zeros(100_000), num_workers=2))
    killed = iterator._workers[0]

    def break_first(timeout):
        threading.Timer(0.2, killed.kill).start()
        raise ConnectionResetError(104, "Connection reset by peer")

    def read():
        try:
            next(iterator)
        finally:
            if orderly:  # as Lightning's teardown does before the rank tells its failure
                killed.join()
                iterator._shutdown_workers()

    monkeypatch.setattr(iterator._data_queue, "get", break_first)
    try:
        told = describe_failure(caught(read), None)
    finally:
        # The end of any loader process makes torch raise anew for the killed one, also in a collected iterator.
        with contextlib.suppress(RuntimeError):
            iterator._shutdown_workers()
    assert re.search(rf"DataLoader worker \(pid(\(s\))? {killed.pid}\).*memory", told["message"])
    assert told["cause"] == "data"
    assert not told["lost_peer"]


def test_a_connection_that_broke_with_every_loader_process_alive_is_told_as_it_is(monkeypatch):
    iterator = iter(DataLoader(torch.zeros(100_000), num_workers=1))

    def break_only(timeout):
        raise ConnectionResetError(104, "Connection reset by peer")

    monkeypatch.setattr(iterator._data_queue, "get", break_only)
    assert describe_failure(caught(lambda: next(iterator)), None)["message"].startswith("ConnectionResetError")
