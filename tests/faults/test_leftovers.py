"""The check itself: a process, a thread and a lock that stay are seen."""

import fcntl
import subprocess
import sys
import threading

from leftovers import children_here, locks_here, threads_beyond
from waiting import wait_until


def test_a_process_a_thread_and_a_lock_that_stay_are_seen(tmp_path):
    children, threads, locks = children_here(), set(threading.enumerate()), locks_here()
    end = threading.Event()
    thread = threading.Thread(target=end.wait, name="stays")
    thread.start()
    process = subprocess.Popen([sys.executable, "-c", "import sys; sys.stdin.read()"], stdin=subprocess.PIPE)
    with (tmp_path / "file").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        assert threads_beyond(threads) == ["stays"]
        assert children_here() - children == {process.pid}
        assert len(locks_here() - locks) == 1
    end.set()
    thread.join()
    process.communicate()
    assert threads_beyond(threads) == []
    wait_until(lambda: children_here() == children)
    assert locks_here() == locks
