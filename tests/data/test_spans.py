"""Spans: each batch from its first request to its last byte, in the order handed over."""

import math
import pickle
import time
from concurrent.futures import Future

from kit.data.stream.engine import Spans


def test_batches_are_told_in_the_order_they_are_handed_over():
    spans, futures = Spans(), [Future(), Future()]
    for future in futures:
        spans.follow(future)
    assert spans.last is None
    futures[1].set_result(None)
    futures[0].set_result(None)
    spans.hand_over()
    first = spans.last
    spans.hand_over()
    second = spans.last
    assert first[0] <= second[0] <= second[1] <= first[1] <= time.time()


def test_a_batch_handed_over_before_its_callback_ran_is_ready_now():
    spans = Spans()
    spans.follow(Future())
    spans.hand_over()
    assert not math.isnan(spans.last[1])


def test_what_was_read_ahead_of_an_ended_stream_is_forgotten_and_a_copy_starts_empty():
    spans = Spans()
    spans.follow(Future())
    copy = pickle.loads(pickle.dumps(spans))
    spans.forget()
    for either in (spans, copy):
        either.hand_over()
        assert either.last is None
