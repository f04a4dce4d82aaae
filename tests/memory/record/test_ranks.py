import os
import sys

import pytest
import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.fsdp._fully_shard import _fsdp_param

from kit.errors import HardwareError
from kit.memory.record.ranks import fake_ranks

VARIABLES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "MASTER_ADDR", "MASTER_PORT")


@pytest.mark.parametrize("world_size", [2, 1024])
def test_this_process_is_rank_0_of_any_number(world_size):
    with fake_ranks(world_size):
        assert (dist.get_rank(), dist.get_world_size()) == (0, world_size)
        assert os.environ["WORLD_SIZE"] == str(world_size)
        assert os.environ["RANK"] == os.environ["LOCAL_RANK"] == "0"
    assert not dist.is_initialized()


def test_one_rank_joins_a_group_only_when_something_asks_for_it():
    with fake_ranks(1):
        assert not dist.is_initialized()
        dist.init_process_group("nccl", rank=0, world_size=1)
        assert (dist.get_backend(), dist.get_world_size()) == ("fake", 1)
    assert not dist.is_initialized()


def test_everything_is_as_it_was_afterwards_also_after_an_error(monkeypatch):
    monkeypatch.setenv("RANK", "7")
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    before = {name: os.environ.get(name) for name in VARIABLES}
    owners = (DeviceMesh, dist, _fsdp_param)
    members, print_uncaught = [dict(vars(owner)) for owner in owners], sys.excepthook
    with pytest.raises(ZeroDivisionError), fake_ranks(4):
        assert dict(vars(DeviceMesh)) != members[0]
        1 / 0  # noqa: B018
    assert {name: os.environ.get(name) for name in VARIABLES} == before
    assert [dict(vars(owner)) for owner in owners] == members
    assert sys.excepthook is print_uncaught
    assert not dist.is_initialized()


def test_a_world_without_ranks_is_refused():
    with pytest.raises(HardwareError, match="world_size=0: .*at least 1"), fake_ranks(0):
        pass


def test_a_process_that_is_a_rank_already_is_refused():
    with fake_ranks(2), pytest.raises(HardwareError, match=r"already rank 0 of 2 \(fake\)"), fake_ranks(4):
        pass


def test_a_mesh_made_on_fake_tensors_knows_its_ranks():
    with fake_ranks(1024), FakeTensorMode():
        mesh = init_device_mesh("cpu", (32, 32), mesh_dim_names=("replicate", "shard"))
        assert mesh["shard"].size() == 32
        assert mesh["shard"].mesh.tolist() == list(range(32))
        assert mesh["replicate"].mesh.tolist() == list(range(0, 1024, 32))
        assert mesh.get_coordinate() == (0, 0)
        assert mesh._flatten("all").size() == 1024
        assert "DeviceMesh" in repr(mesh)


def test_objects_are_answered_as_if_all_ranks_sent_the_same():
    with fake_ranks(3), FakeTensorMode():
        sent, gathered = ["path"], [None] * 3
        dist.broadcast_object_list(sent, src=0)
        dist.all_gather_object(gathered, {"rank": 0})
    assert sent == ["path"]
    assert gathered == [{"rank": 0}] * 3


@pytest.mark.parametrize("world_size", [2, 7, 1024])
@pytest.mark.parametrize("shape", [(64, 8), (5, 3), (1,)])
def test_the_shard_of_rank_0_is_the_one_fsdp_itself_would_cut(world_size, shape):
    whole = torch.nn.Linear(1, 1)
    whole.weight = torch.nn.Parameter(torch.ones(shape))
    whole.bias = None
    with fake_ranks(world_size), FakeTensorMode(allow_non_fake_inputs=True):
        module = fully_shard(whole, mesh=init_device_mesh("cpu", (world_size,)))
        local = module.weight.to_local()
    assert local.shape == torch.ones(shape).chunk(world_size)[0].shape
