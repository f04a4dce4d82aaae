import threading

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from properties import examples

from kit.memory.record.truth import AllocatorTrace, MeasuredMemory, storages_of

KIB = 1024


def block(kib):
    return torch.empty(kib * KIB, dtype=torch.uint8)


@pytest.fixture(autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@examples(25)
@given(st.lists(st.tuples(st.integers(1, 64), st.integers(0, 5)), min_size=1, max_size=40))
def test_every_block_is_counted_while_it_lives(plan):
    held, expected, now = {}, [], 0
    trace = AllocatorTrace()
    trace.start(torch.empty(0))
    for kib, place in plan:
        freed = held.pop(place, None)
        now -= len(freed) if freed is not None else 0
        del freed
        held[place] = block(kib)
        now += kib * KIB
        expected.append(now)
    measured = trace.stop()
    assert measured.peak_bytes == max(expected)
    assert measured.allocated_bytes[-1] == now
    assert measured.requested_bytes[-1] == sum(kib for kib, _ in plan) * KIB


def test_what_is_held_at_the_start_counts_and_what_is_not_named_does_not():
    model, other = torch.nn.Linear(256, 256, bias=False), block(100)
    trace = AllocatorTrace()
    trace.start(model)
    del other
    assert trace.stop().peak_bytes == 256 * 256 * 4


def test_without_names_every_tensor_counts():
    first, second = block(100), block(200)
    trace = AllocatorTrace()
    trace.start()
    measured = trace.stop()
    assert measured.peak_bytes >= len(first) + len(second)


def test_a_kernels_own_buffer_is_seen():
    weight, image = torch.randn(32, 32, 3, 3, dtype=torch.float64), torch.randn(1, 32, 64, 64, dtype=torch.float64)
    trace = AllocatorTrace()
    trace.start(weight, image)
    out = torch.nn.functional.conv2d(image, weight)  # unfolds the image, as no operator shows
    assert trace.stop().peak_bytes > weight.nbytes + image.nbytes + 4 * out.nbytes


def test_the_peak_of_sgd_steps_is_parameters_gradients_and_activations():
    layer = torch.nn.Linear(512, 512, bias=False)
    trace = AllocatorTrace()
    trace.start(layer)
    layer(torch.ones(1, 512)).sum().backward()
    assert abs(trace.stop().peak_bytes - 2 * layer.weight.nbytes) < 16 * KIB


def test_what_was_freed_before_the_first_batch_is_set_up_and_what_is_left_of_it_counts():
    trace = AllocatorTrace()
    trace.start(torch.empty(0))
    block(500)
    kept = block(10)
    trace.note(torch.empty(0))
    step = block(20)
    measured = trace.stop()
    assert measured.allocated_bytes[0] == len(kept)
    assert measured.peak_bytes == len(kept) + len(step)


def test_a_batch_made_by_another_thread_counts_while_it_lives():
    made = []
    maker = threading.Thread(target=lambda: made.append(block(300)))
    trace = AllocatorTrace()
    trace.start(torch.empty(0))
    maker.start()
    maker.join()
    batch = made.pop()
    trace.note({"x": batch})
    del batch
    block(10)
    measured = trace.stop()
    assert measured.peak_bytes == 300 * KIB
    assert measured.allocated_bytes[-1] == 0


def test_parts_join_and_what_a_part_left_behind_still_counts():
    trace = AllocatorTrace()
    trace.start(torch.empty(0))
    buckets = block(30)
    trace.pause()
    host = block(500)
    layer = block(40)
    trace.resume(layer)
    step = block(5)
    measured = trace.stop(optimizer_steps=2)
    assert measured.peak_bytes == len(buckets) + len(layer) + len(step)
    assert measured.optimizer_steps == 2
    assert len(host) > measured.peak_bytes


def test_optimizer_state_and_gradients_are_found():
    layer = torch.nn.Linear(64, 64, bias=False)
    optimizer = torch.optim.AdamW(layer.parameters())
    layer(torch.ones(1, 64)).sum().backward()
    optimizer.step()
    found = storages_of([layer, optimizer])
    assert sum(found.values()) == 4 * layer.weight.nbytes + 4


def test_it_reads_back_as_written(tmp_path):
    trace = AllocatorTrace()
    trace.start(torch.empty(0))
    block(3)
    block(4)
    measured = trace.stop(optimizer_steps=1, device="CPU")
    measured.save(tmp_path / "measured.npz")
    again = MeasuredMemory.load(tmp_path / "measured.npz")
    assert (again.peak_bytes, again.optimizer_steps, again.facts) == (4 * KIB, 1, {"device": "CPU"})
    assert np.array_equal(again.allocated_bytes, measured.allocated_bytes)
    assert again.clock[-1] == 1
    assert [path.name for path in tmp_path.iterdir()] == ["measured.npz"]
