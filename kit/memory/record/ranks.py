"""fake_ranks: this process as rank 0 of any number of ranks, none of which exists; label_collectives: what they add.

Lightning's strategies join a process group whose collectives return at once and move nothing, so a dry run takes the
same path at 2 ranks as at 1,024, in the same time. Rank 0 holds the largest shards, so it is the rank to record. After
the block, environment, process group and patched classes are as they were before. Refused: a world size below 1, and a
process that has joined a real group already.

DDP keeps one bucket of gradients beside the gradients (4 bytes per parameter in 32 bits) and lays the buckets anew
after the first backward. FSDP2 gathers a unit's parameters (`gathered_parameters`) through a buffer of the same size,
and scatters its gradients through another (`communication`). All of it is Python or passes the dispatcher, so a
recorder sees it; `label_collectives` gives it a category and a stream, on fake ranks as on real ones.

Streams: torch keeps one "current stream" for the CPU as it does for CUDA, and FSDP2 switches it. Blocks made while it
is switched carry its number, so that a replay has a pool of memory per stream, as CUDA has. Blocks return to their
pool when Python releases them; that a stream may still use them then is not seen (`collective_notes`).

Under fake tensors DDP's reducer, which is C++, needs three replacements: the comparison of shapes between ranks, the
result of an all-reduce, and the numbers of the parameters in each bucket, which have to be real.

Private parts of torch used here, all tested on its upgrade: the fake process group of
`torch.testing._internal.distributed`, the methods of `DeviceMesh` that compute with tensors of ranks, how FSDP2 cuts a
parameter into chunks, methods of `FSDPParamGroup`, `FSDPParam` and `DistributedDataParallel` and its reducer, and
`torch.cpu.StreamContext`.
"""

from __future__ import annotations

import contextlib
import functools
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch._guards import active_fake_mode
from torch._subclasses.fake_tensor import FakeTensor, unset_fake_temporarily
from torch.distributed import device_mesh
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp._fully_shard import _fsdp_param
from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup
from torch.futures import Future
from torch.nn.parallel import distributed as data_parallel
from torch.nn.parallel.distributed import DistributedDataParallel
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

from kit.confinement.stand_ins import replaced
from kit.errors import HardwareError
from kit.memory.record.recorder import BlockRecorder

_MESH_METHODS = (
    "__getitem__", "__repr__", "_compute_coordinate_on_dim", "_compute_coordinates_from_mesh", "_concatenate",
    "_create_flatten_mesh", "_create_sub_mesh", "_create_unflatten_mesh", "_flatten", "_get_all_submeshes",
    "_unflatten", "from_group", "get_coordinate", "mesh",
)  # fmt: skip
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
    init_process_group, make_mesh = dist.init_process_group, DeviceMesh.__init__

    def join(*_ignored: Any, **_also_ignored: Any) -> None:
        init_process_group("fake", rank=0, world_size=world_size, store=FakeStore())

    def leave() -> None:
        if dist.is_initialized():
            dist.destroy_process_group()

    @functools.wraps(make_mesh)
    def make_mesh_of_real_ranks(mesh: DeviceMesh, *args: Any, **options: Any) -> None:
        ranks = options.get("_rank_map")
        with unset_fake_temporarily():
            if isinstance(ranks, FakeTensor):
                # `init_device_mesh` numbers the ranks 0, 1, ... in a tensor made inside fake mode.
                options["_rank_map"] = torch.arange(ranks.numel(), dtype=torch.int, device="cpu")
            make_mesh(mesh, *args, **options)

    with contextlib.ExitStack() as undo:
        undo.enter_context(_environment(world_size))
        # Each process group that begins puts one more "[rank0]: " before what uncaught errors print, for good.
        undo.enter_context(replaced(sys, "excepthook", sys.excepthook))
        # Python objects travel as pickled bytes, which fake tensors do not have: every rank answers as this one does.
        undo.enter_context(replaced(dist, "broadcast_object_list", lambda *_, **__: None))
        undo.enter_context(replaced(dist, "all_gather_object", _all_gather_object))
        # A mesh looks ranks up in tensors of integers, also when it is made in the middle of a dry run.
        undo.enter_context(replaced(DeviceMesh, "__init__", make_mesh_of_real_ranks))
        for name in _MESH_METHODS:
            if name in vars(DeviceMesh):
                undo.enter_context(replaced(DeviceMesh, name, _outside_fake_mode(vars(DeviceMesh)[name])))
        undo.enter_context(replaced(_fsdp_param, "_chunk_with_empty", _chunk_of_rank_0))
        undo.callback(leave)
        # One rank without a strategy never joins a group; one rank under ddp does, when Lightning asks.
        for owner in (dist, device_mesh):
            undo.enter_context(replaced(owner, "init_process_group", join))
        if world_size > 1:
            join()
        yield


@contextlib.contextmanager
def _environment(world_size: int) -> Iterator[None]:
    """The variables that tell a process which rank it is; the address is never called."""
    ours = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": str(world_size), "LOCAL_WORLD_SIZE": str(world_size)}
    ours |= {"GROUP_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
    before = {name: os.environ[name] for name in ours if name in os.environ}
    os.environ.update(ours)
    try:
        yield
    finally:
        for name in ours:
            os.environ.pop(name, None)
        os.environ.update(before)


def _all_gather_object(object_list: list[Any], obj: Any, group: dist.ProcessGroup | None = None) -> None:
    object_list[:] = [obj] * dist.get_world_size(group)


def _chunk_of_rank_0(tensor: torch.Tensor, num_chunks: int, dim: int) -> list[torch.Tensor]:
    """The one chunk that FSDP2 looks at here; to cut all 1,024 on fake tensors would take a minute for a model."""
    return [tensor.narrow(dim, 0, -(-tensor.size(dim) // num_chunks))]


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


_private: Any = data_parallel  # what has no type stub, or is not exported
_CUDA_STREAMS = 64
"""CUDA hands out 32 streams of each of two priorities, in turn (c10/cuda/CUDAStream.cpp)."""

_LABELS: tuple[tuple[type, str, str], ...] = (
    (FSDPParamGroup, "unshard", "communication"),
    (FSDPParamGroup, "wait_for_unshard", "gathered_parameters"),
    (FSDPParamGroup, "post_backward", "communication"),
    (FSDPParam, "init_all_gather_outputs", "gathered_parameters"),
    (FSDPParam, "alloc_all_gather_outputs", "gathered_parameters"),
    (FSDPParam, "init_unsharded_param", "gathered_parameters"),
    (DistributedDataParallel, "_ddp_init_helper", "communication"),
    (DistributedDataParallel, "_sync_buffers", "communication"),
)
"""(class, method, category) of what a method makes; an inner method's category wins."""


@contextlib.contextmanager
def label_collectives(recorder: BlockRecorder) -> Iterator[None]:
    """Inside, what collectives allocate has its category and stream; DDP works on fake tensors too."""
    with contextlib.ExitStack() as undo:
        for owner, name, category in _LABELS:
            undo.enter_context(replaced(owner, name, _labelled(recorder, category, vars(owner)[name])))
        for owner, name, value in (*_streams(recorder), *_data_parallel(recorder)):
            undo.enter_context(replaced(owner, name, value))
        yield


def _labelled(recorder: BlockRecorder, category: str, method: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(method)
    def run(*args: Any, **options: Any) -> Any:
        with recorder.labelled(category):
            return method(*args, **options)

    return run


def _streams(recorder: BlockRecorder) -> list[tuple[Any, str, Any]]:
    """Keep the recorder on the CPU's current stream: 0 computes."""
    context: Any = torch.cpu.StreamContext
    numbers: dict[Any, int] = {}

    def following(switch: Callable[..., None]) -> Callable[..., None]:
        def run(self: torch.cpu.StreamContext, *raised: Any) -> None:
            switch(self, *raised)
            stream = torch.cpu.current_stream()
            default = stream is torch.cpu._default_cpu_stream
            recorder.on_stream(0 if default else numbers.setdefault(stream, 1 + len(numbers) % _CUDA_STREAMS))

        return run

    return [(context, name, following(getattr(context, name))) for name in ("__enter__", "__exit__")]


def _data_parallel(recorder: BlockRecorder) -> list[tuple[Any, str, Any]]:
    make, compare = DistributedDataParallel.__init__, _private._verify_param_shape_across_processes

    def make_on_own_stream(self: Any, *args: Any, **options: Any) -> None:
        # Lightning does so on CUDA; the first buckets lie in that stream's pool, those laid anew do not.
        with torch.cpu.stream(torch.cpu.Stream()):
            make(self, *args, **options)
        if active_fake_mode() is not None:
            _private.dist._register_comm_hook(self.reducer, None, _reduced)
        self.reducer = _Reducer(self.reducer, recorder)

    def compare_shapes(*args: Any, **options: Any) -> None:
        # All ranks are this one, so there is nothing to compare, and on fake tensors no number to compare it by.
        if active_fake_mode() is None:
            compare(*args, **options)

    return [
        (DistributedDataParallel, "__init__", make_on_own_stream),
        (data_parallel, "_verify_param_shape_across_processes", compare_shapes),
    ]


def _reduced(_state: object, bucket: Any) -> Future[torch.Tensor]:
    """The all-reduce of a bucket, in place and done. A fake process group answers None, which the reducer refuses."""
    answer: Future[torch.Tensor] = Future()
    answer.set_result(bucket.buffer())
    return answer


LATE_COPY = "gloo frees its copies on threads of its own: a step may hold one more for a moment than is shown"


def collective_notes(strategy: str, device_kind: str) -> list[str]:
    """What a recording of `strategy` ("ddp", "fsdp", ...) cannot hold, in sentences for `Recording.facts["notes"]`."""
    if strategy == "none" or device_kind == "cpu":  # what gloo holds is among what may be low
        return []
    notes = ["NCCL keeps buffers of its own outside torch's allocator: they are in the range outside it"]
    if strategy == "ddp":
        return [*notes, "DDP sends the first weights through a buffer of up to 250 MiB before the first step"]
    return [*notes, "streams that communicate may lag: memory returns to their pools when Python lets it go, no later"]


class _Reducer:
    """DDP's own reducer, with its second layout of buckets labelled, and possible under fake tensors."""

    def __init__(self, reducer: Any, recorder: BlockRecorder) -> None:
        self._reducer = reducer
        self._recorder = recorder

    def __getattr__(self, name: str) -> Any:
        return getattr(self._reducer, name)

    def _rebuild_buckets(self) -> bool:
        indices = contextlib.nullcontext() if active_fake_mode() is None else _RealIndices()  # type: ignore[no-untyped-call]
        with self._recorder.labelled("communication"), indices:
            return bool(self._reducer._rebuild_buckets())


class _RealIndices(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Integers are made and sent outside fake mode: the reducer reads which parameter goes into which bucket."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        options = dict(kwargs or {})
        if func is torch.ops.aten.empty.memory_format:
            is_index = options.get("dtype") is torch.int32
        else:
            tensors = [value for value in tree_iter((args, options)) if isinstance(value, torch.Tensor)]
            is_index = bool(tensors) and not any(isinstance(tensor, FakeTensor) for tensor in tensors)
        with unset_fake_temporarily() if is_index else contextlib.nullcontext():
            return func(*args, **options)
