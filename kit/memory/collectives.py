"""label_collectives: what data parallelism and sharding add to a step, named, on fake ranks as on real ones.

DDP keeps one bucket of gradients beside the gradients (4 bytes per parameter in 32 bits) and lays the buckets anew
after the first backward. FSDP2 gathers a unit's parameters (`gathered_parameters`) through a buffer of the same size,
and scatters its gradients through another (`communication`). All of it is Python or passes the dispatcher, so a
recorder sees it; here it gets its category and the stream it is made on.

Streams: torch keeps one "current stream" for the CPU as it does for CUDA, and FSDP2 switches it. Blocks made while it
is switched carry its number, so that a replay has a pool of memory per stream, as CUDA has. Blocks return to their
pool when Python lets them go; that a stream may still be busy with them then is not seen (`collective_notes`).

Under fake tensors DDP's reducer, which is C++, needs three things put right: the comparison of shapes between ranks,
the result of an all-reduce, and the numbers of the parameters in each bucket, which have to be real.

Private parts of torch used here, all tested on its upgrade: methods of `FSDPParamGroup` and `FSDPParam`, of
`DistributedDataParallel` and its reducer, and `torch.cpu.StreamContext`.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch._guards import active_fake_mode
from torch._subclasses.fake_tensor import FakeTensor, unset_fake_temporarily
from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup
from torch.futures import Future
from torch.nn.parallel import distributed as data_parallel
from torch.nn.parallel.distributed import DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

from kit.memory.patches import replaced
from kit.memory.recorder import Recorder

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
def label_collectives(recorder: Recorder) -> Iterator[None]:
    """Inside, what collectives allocate has its category and stream; DDP works on fake tensors too."""
    with contextlib.ExitStack() as undo:
        for owner, name, category in _LABELS:
            undo.enter_context(replaced(owner, name, _labelled(recorder, category, vars(owner)[name])))
        for owner, name, value in (*_streams(recorder), *_data_parallel(recorder)):
            undo.enter_context(replaced(owner, name, value))
        yield


def _labelled(recorder: Recorder, category: str, method: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(method)
    def run(*args: Any, **options: Any) -> Any:
        with recorder.labelled(category):
            return method(*args, **options)

    return run


def _streams(recorder: Recorder) -> list[tuple[Any, str, Any]]:
    """Keep `recorder.stream` at the number of the CPU's current stream: 0 computes."""
    context: Any = torch.cpu.StreamContext
    enter, leave = context.__enter__, context.__exit__
    numbers: dict[Any, int] = {}

    def follow() -> None:
        stream = torch.cpu.current_stream()
        default = stream is torch.cpu._default_cpu_stream
        recorder.stream = 0 if default else numbers.setdefault(stream, 1 + len(numbers) % _CUDA_STREAMS)

    def enter_stream(self: torch.cpu.StreamContext) -> None:
        enter(self)
        follow()

    def leave_stream(self: torch.cpu.StreamContext, *raised: Any) -> None:
        leave(self, *raised)
        follow()

    return [(context, "__enter__", enter_stream), (context, "__exit__", leave_stream)]


def _data_parallel(recorder: Recorder) -> list[tuple[Any, str, Any]]:
    make, compare = DistributedDataParallel.__init__, _private._verify_param_shape_across_processes

    def make_on_a_stream_of_its_own(self: Any, *args: Any, **options: Any) -> None:
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
        (DistributedDataParallel, "__init__", make_on_a_stream_of_its_own),
        (data_parallel, "_verify_param_shape_across_processes", compare_shapes),
    ]


def _reduced(_state: object, bucket: Any) -> Future[torch.Tensor]:
    """The all-reduce of a bucket, in place and done. A fake process group answers None, which the reducer refuses."""
    answer: Future[torch.Tensor] = Future()
    answer.set_result(bucket.buffer())
    return answer


def collective_notes(strategy: str, device_kind: str) -> list[str]:
    """What a recording of `strategy` ("ddp", "fsdp", ...) cannot hold, in sentences for `Recording.facts["notes"]`."""
    if strategy == "none":
        return []
    if device_kind == "cpu":
        return ["gloo frees its copies on threads of its own: a step may hold one more for a moment than is shown"]
    notes = ["NCCL keeps buffers of its own outside torch's allocator: they are in the range outside it"]
    if strategy == "ddp":
        return [*notes, "DDP sends the first weights through a buffer of up to 250 MiB before the first step"]
    return [*notes, "streams that communicate may lag: memory returns to their pools when Python lets it go, no later"]


class _Reducer:
    """DDP's own reducer, with its second layout of buckets labelled, and possible under fake tensors."""

    def __init__(self, reducer: Any, recorder: Recorder) -> None:
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
        if _is_about_indices(func, args, options):
            with unset_fake_temporarily():
                return func(*args, **options)
        return func(*args, **options)


def _is_about_indices(func: Any, args: tuple[Any, ...], options: dict[str, Any]) -> bool:
    if func is torch.ops.aten.empty.memory_format:
        return options.get("dtype") is torch.int32
    tensors = [value for value in tree_iter((args, options)) if isinstance(value, torch.Tensor)]
    return bool(tensors) and not any(isinstance(tensor, FakeTensor) for tensor in tensors)
