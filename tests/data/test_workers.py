"""Workers: jobs run in the order given, those that come first before the others, whoever waits."""

from __future__ import annotations

import threading

import pytest
from waiting import PATIENCE_SECONDS

from kit.data.stream.pool import JobGroup, ThreadPool


def test_first_jobs_run_before_those_that_wait_each_in_the_order_given():
    workers, go, ended, ran = ThreadPool(1, "test"), threading.Event(), threading.Event(), []
    owner = JobGroup[None]()
    workers.put(owner, go.wait, PATIENCE_SECONDS)
    for name in "abc":
        workers.put(owner, ran.append, name)
    for name in "xyz":
        workers.put_first(owner, ran.append, name)
    workers.put(owner, ended.set)
    go.set()
    assert ended.wait(PATIENCE_SECONDS)
    assert "".join(ran) == "xyzabc"
    workers.close()
    workers.join(PATIENCE_SECONDS)


def test_a_first_job_wakes_a_thread_that_has_nothing_to_do():
    workers, owner = ThreadPool(2, "test"), JobGroup[None]()
    for _ in range(20):
        ended = threading.Event()
        workers.put_first(owner, ended.set)
        assert ended.wait(PATIENCE_SECONDS)
    workers.close()
    workers.join(PATIENCE_SECONDS)


def test_a_first_job_that_raises_fails_its_owner_and_one_whose_owner_is_over_is_skipped():
    workers, failed, over, ran = ThreadPool(1, "test"), JobGroup[None](), JobGroup[None](), []
    over.future.cancel()

    def job():
        raise RuntimeError("as planned")

    workers.put_first(over, ran.append, "over")
    workers.put_first(failed, job)
    assert "as planned" in str(failed.future.exception(PATIENCE_SECONDS))
    assert ran == []
    workers.close()
    workers.join(PATIENCE_SECONDS)


@pytest.mark.parametrize("counts", [(1, 1, 1), (2, 1), (3,)])
def test_the_last_of_the_parts_finishes_a_group_which_fails_where_that_does(counts):
    whole, broken = JobGroup[str](), JobGroup[str]()
    whole.expect(3, lambda: "whole")
    broken.expect(3, lambda: 1 / 0)
    for count in counts:
        assert not whole.future.done()
        whole.part_done(count)
        broken.part_done(count)
    assert whole.future.result(0) == "whole"
    assert isinstance(broken.future.exception(0), ZeroDivisionError)
