import contextlib
import math

import numpy as np
import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parallel import distributed as data_parallel

from kit.memory.record.ranks import collective_notes, fake_ranks, label_collectives
from kit.memory.record.recorder import BlockRecorder
from kit.memory.replay.replay import CATEGORIES

WIDTH = 48
COMMUNICATION, GATHERED = CATEGORIES.index("communication"), CATEGORIES.index("gathered_parameters")


def layers(count=3):
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(count)))


def number_of(module):
    return sum(parameter.numel() for parameter in module.parameters())


def record(world_size, make, steps=3, accumulate=1):
    """Trains what `make` returns for a few steps on fake ranks; the recording and the module."""
    recorder = BlockRecorder()
    with contextlib.ExitStack() as inside:
        for part in (fake_ranks(world_size), FakeTensorMode(allow_non_fake_inputs=True), recorder):
            inside.enter_context(part)
        inside.enter_context(label_collectives(recorder))
        module = make()
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
        recorder.track(module)
        for number in range(steps * accumulate):
            recorder.begin_batch()
            last = number % accumulate == accumulate - 1
            quiet = isinstance(module, DistributedDataParallel) and not last
            with module.no_sync() if quiet else contextlib.nullcontext():
                module(torch.zeros(4, WIDTH)).sum().backward()
            if last:
                optimizer.step()
                optimizer.zero_grad()
    return recorder.recording(4, 1), module


def most_alive(recording, category):
    """Bytes of a category at its own peak, and at the end."""
    mine = recording.block_category[recording.event_block] == category
    sizes = recording.block_bytes[recording.event_block] * np.where(recording.event_allocates, 1, -1) * mine
    series = np.cumsum(sizes)
    return int(series.max()), int(series[-1])


def blocks_of(recording, category):
    return np.flatnonzero((recording.block_category == category) & (recording.block_bytes > 0))


@pytest.mark.parametrize("accumulate", [1, 2])
def test_buckets_of_data_parallelism_take_four_bytes_per_parameter_and_are_counted_once(accumulate):
    recording, module = record(8, lambda: DistributedDataParallel(layers()), accumulate=accumulate)
    assert most_alive(recording, COMMUNICATION) == (4 * number_of(module),) * 2


def test_buckets_are_laid_anew_after_the_first_backward_on_the_computing_stream():
    """As torch does: the first buckets follow the order of definition, the second that of the gradients."""

    def wide():
        return DistributedDataParallel(nn.Sequential(*(nn.Linear(WIDTH, WIDTH * 90) for _ in range(1)), nn.Flatten()))

    recording, _ = record(2, wide)
    first, second = blocks_of(recording, COMMUNICATION)
    assert recording.block_stream[[first, second]].tolist() == [1, 0]
    laid = recording.event_time[(recording.event_block == second) & recording.event_allocates].item()
    freed = recording.event_time[(recording.event_block == first) & ~recording.event_allocates].item()
    assert recording.batch_starts[1] <= freed <= laid < recording.batch_starts[1] + 5


def test_buckets_are_as_large_as_torch_makes_them():
    """One of at least 1 MiB, then of at least 25 MiB, whole parameters each."""
    sizes = [64, 700_000, 8_000_000, 300, 9_000_000]

    class Loose(nn.Module):
        def __init__(self):
            super().__init__()
            self.weights = nn.ParameterList(nn.Parameter(torch.zeros(size)) for size in sizes)

        def forward(self, values):
            return values.sum() + sum(weight.sum() for weight in self.weights)

    recording, _ = record(2, lambda: DistributedDataParallel(Loose()))
    blocks = blocks_of(recording, COMMUNICATION)
    laid_anew = recording.block_bytes[blocks[recording.block_stream[blocks] == 0]]
    assert sum(laid_anew) == 4 * sum(sizes)
    assert all(size >= 2**20 for size in laid_anew[:-1])


def test_running_statistics_are_broadcast_as_communication():
    recording, _ = record(4, lambda: DistributedDataParallel(nn.Sequential(nn.BatchNorm1d(WIDTH), layers(1))))
    sizes = recording.block_bytes[blocks_of(recording, COMMUNICATION)].tolist()
    assert sizes.count(2 * 4 * WIDTH) == 3


def shard(module, *shape):
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard")[-len(shape) :])
    for layer in module:
        fully_shard(layer, mesh=mesh)
    return fully_shard(module, mesh=mesh)


def padded_bytes(shape, shard_size):
    """Bytes of a parameter on each device: its first dimension is cut, and padded to equal parts."""
    return 4 * math.ceil(shape[0] / shard_size) * math.prod(shape[1:])


@pytest.mark.parametrize("mesh", [(2,), (7,), (1024,), (2, 4), (8, 1)])
def test_shards_and_what_is_gathered_of_them_follow_their_formula(mesh):
    recording, _ = record(math.prod(mesh), lambda: shard(layers(), *mesh))
    shards = [padded_bytes((WIDTH, WIDTH), mesh[-1]), padded_bytes((WIDTH,), mesh[-1])]
    held, _ = most_alive(recording, CATEGORIES.index("parameters"))
    assert held == 3 * sum(shards)
    unit = sum(shards) * mesh[-1]
    gathered, left = most_alive(recording, GATHERED)
    # Backward gathers the next unit while this one computes: its buffer is there, its parameters are not yet.
    assert (gathered, left) == (unit, 0)
    buffers = sorted(recording.block_bytes[blocks_of(recording, COMMUNICATION)].tolist())
    assert buffers[-1] == unit
    assert most_alive(recording, COMMUNICATION)[1] == 0


def test_gradients_end_as_shards():
    recording, _ = record(4, lambda: shard(layers(), 4))
    most, _ = most_alive(recording, CATEGORIES.index("gradients"))
    assert most == 4 * number_of(layers()) // 4


def test_collectives_run_on_streams_of_their_own_and_computing_on_stream_0():
    recording, _ = record(8, lambda: shard(layers(), 2, 4))

    def streams(category):
        return set(recording.block_stream[blocks_of(recording, category)].tolist())

    gradients = streams(CATEGORIES.index("gradients"))
    # What goes into a reduce-scatter is made by what computes, what comes out of it on the stream it runs on.
    (gathers,) = streams(COMMUNICATION) - {0}
    assert len(gradients) == 1
    assert not gradients & {0, gathers}
    others = set(range(len(CATEGORIES))) - {COMMUNICATION, CATEGORIES.index("gradients")}
    assert all(streams(category) <= {0} for category in others)


def test_world_size_changes_neither_operators_nor_blocks():
    few, many = (record(size, lambda size=size: shard(layers(), size))[0] for size in (2, 1024))
    assert len(few.operator_name) == len(many.operator_name)
    np.testing.assert_array_equal(few.block_category, many.block_category)
    np.testing.assert_array_equal(few.event_allocates, many.event_allocates)


def test_torch_is_as_it_was_afterwards_also_after_an_error():
    owners = (FSDPParamGroup, FSDPParam, DistributedDataParallel, data_parallel, torch.cpu.StreamContext)
    before = [dict(vars(owner)) for owner in owners]
    with pytest.raises(ZeroDivisionError), label_collectives(BlockRecorder()):
        assert [dict(vars(owner)) for owner in owners] != before
        1 / 0  # noqa: B018
    assert [dict(vars(owner)) for owner in owners] == before


@pytest.mark.parametrize("strategy", ["ddp", "fsdp", "fsdp:2:4"])
def test_what_a_recording_cannot_hold_is_said(strategy):
    assert collective_notes(strategy, "cpu") == []  # gloo's copy is among what may be low
    assert "NCCL" in collective_notes(strategy, "cuda")[0]


def test_one_device_has_nothing_to_say_about_collectives():
    assert collective_notes("none", "cuda") == []
