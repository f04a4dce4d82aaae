"""fake_ranks: this process as rank 0 of any number of ranks, none of which exists.

Lightning's strategies join a process group whose collectives return at once and move nothing, so a dry run takes the
same path at 2 ranks as at 1,024, in the same time. Rank 0 is the rank to ask: it holds the largest shards.

What is refused: a world size that is no positive number, or a process that has joined a real group already. The
invariant: after the block, environment, process group and patched classes are as they were before.

Private parts of torch used here, all tested on its upgrade: the fake process group of
`torch.testing._internal.distributed`, the methods of `DeviceMesh` that compute with tensors of ranks, and how FSDP2
cuts a parameter into chunks.
"""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensor, unset_fake_temporarily
from torch.distributed import device_mesh
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp._fully_shard import _fsdp_param
from torch.testing._internal.distributed.fake_pg import FakeStore

from kit.errors import HardwareError
from kit.memory.patches import replaced

_MESH_METHODS = (
    "__getitem__",
    "__repr__",
    "_compute_coordinate_on_dim",
    "_compute_coordinates_from_mesh",
    "_concatenate",
    "_create_flatten_mesh",
    "_create_sub_mesh",
    "_create_unflatten_mesh",
    "_flatten",
    "_get_all_submeshes",
    "_unflatten",
    "from_group",
    "get_coordinate",
    "mesh",
)
"""What reads the numbers of the ranks, and so cannot run on tensors without numbers."""


@contextlib.contextmanager
def fake_ranks(world_size: int) -> Iterator[None]:
    """Inside, this process is rank 0 of `world_size` ranks on one node, as kit.fit and torchrun set it up.

    Raises:
        HardwareError: when `world_size` is below 1, or a process group is there already.
    """
    if world_size < 1:
        raise HardwareError(f"world_size={world_size}: a run has at least 1 rank")
    if dist.is_initialized():
        raise HardwareError(
            f"this process is already rank {dist.get_rank()} of {dist.get_world_size()} ({dist.get_backend()}); "
            "a dry run needs a process of its own"
        )
    with contextlib.ExitStack() as undo:
        undo.enter_context(_environment(world_size))
        undo.enter_context(_collectives_of_objects())
        undo.enter_context(_meshes_of_real_numbers())
        undo.enter_context(replaced(_fsdp_param, "_chunk_with_empty", _chunk_of_rank_0))
        undo.callback(_leave)
        # One rank without a strategy never joins a group; one rank under ddp does, when Lightning asks.
        join = _joining(world_size)
        for owner in (dist, device_mesh):
            undo.enter_context(replaced(owner, "init_process_group", join))
        if world_size > 1:
            join()
        yield


def _joining(world_size: int) -> Callable[..., None]:
    init_process_group = dist.init_process_group

    def join(*_ignored: Any, **_also_ignored: Any) -> None:
        init_process_group("fake", rank=0, world_size=world_size, store=FakeStore())

    return join


def _leave() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()


@contextlib.contextmanager
def _environment(world_size: int) -> Iterator[None]:
    """The variables that tell a process which rank it is; the address is never called."""
    ours = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": str(world_size), "LOCAL_WORLD_SIZE": str(world_size)}
    ours |= {"GROUP_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
    before = {name: os.environ.get(name) for name in ours}
    os.environ.update(ours)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


@contextlib.contextmanager
def _collectives_of_objects() -> Iterator[None]:
    """Python objects travel as pickled bytes, which fake tensors do not have: every rank answers as this one does."""
    with (
        replaced(dist, "broadcast_object_list", _broadcast_object_list),
        replaced(dist, "all_gather_object", _all_gather_object),
    ):
        yield


def _broadcast_object_list(*_ignored: Any, **_also_ignored: Any) -> None:
    """Rank 0 keeps what it sends."""


def _all_gather_object(object_list: list[Any], obj: Any, group: dist.ProcessGroup | None = None) -> None:
    object_list[:] = [obj] * dist.get_world_size(group)


def _chunk_of_rank_0(tensor: torch.Tensor, num_chunks: int, dim: int) -> list[torch.Tensor]:
    """The one chunk that FSDP2 looks at here; to cut all 1,024 on fake tensors would take a minute for a model."""
    return [tensor.narrow(dim, 0, -(-tensor.size(dim) // num_chunks))]


@contextlib.contextmanager
def _meshes_of_real_numbers() -> Iterator[None]:
    """A mesh looks ranks up in tensors of integers, also when it is made in the middle of a dry run."""
    with contextlib.ExitStack() as undo:
        undo.enter_context(replaced(DeviceMesh, "__init__", _with_real_ranks(DeviceMesh.__init__)))
        for name in _MESH_METHODS:
            if name in vars(DeviceMesh):
                undo.enter_context(replaced(DeviceMesh, name, _outside_fake_mode(vars(DeviceMesh)[name])))
        yield


def _with_real_ranks(make: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(make)
    def make_mesh(mesh: DeviceMesh, *args: Any, **options: Any) -> None:
        ranks = options.get("_rank_map")
        with unset_fake_temporarily():
            if isinstance(ranks, FakeTensor):
                # `init_device_mesh` numbers the ranks 0, 1, ... in a tensor made inside fake mode.
                options["_rank_map"] = torch.arange(ranks.numel(), dtype=torch.int, device="cpu")
            make(mesh, *args, **options)

    return make_mesh


def _outside_fake_mode(member: Any) -> Any:
    """The same function, property, static or class method, run with real tensors."""
    if isinstance(member, property):
        return property(_outside_fake_mode(member.fget))
    if isinstance(member, staticmethod | classmethod):
        return type(member)(_outside_fake_mode(member.__func__))

    @functools.wraps(member)
    def run(*args: Any, **options: Any) -> Any:
        with unset_fake_temporarily():
            return member(*args, **options)

    return run
