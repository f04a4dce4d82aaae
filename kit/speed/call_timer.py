"""ReadyCall: a call that is made again with tensors of its own, and timed; and a watch over the machine meanwhile.

Tensors get numbers from 0.5 to 1.5, so that no logarithm or root fails and nothing underflows; whole numbers stay
within what they index. Sets of arguments take turns, and so do results, in memory that is kept: no call waits for
pages. What cannot be made again (a generator's state, a handle) is not timed. Known limit: numbers without zeros. A
CPU's square root of zeros takes five times as long, as an optimizer has them of an embedding's rows that no batch
reached.

On a CPU a call is made once at a time, among others (`kit.speed.timing_job`), as its code and its numbers are in no
cache after these: a small convolution takes 1.4 to 1.7 times as long as one that follows itself. Kernels of a GPU are
put into a queue, so there as many follow each other as hide the wait for the last. `OtherLoad` tells how many cores
other programs used: a table taken beside them is not kept.
"""

from __future__ import annotations

import itertools
import time
from collections import deque
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from kit.machine.processes import cpu_seconds
from kit.memory.replay.calls import OperatorCall, TensorSpec

CACHE_BYTES, MOST_SETS, LEAST_BYTES = 64 << 20, 64, 1 << 16
_SAMPLE_SECONDS, _MOST_QUEUED = 2e-4, 2000
_MOST_BYTES, _DRAWN = 4 << 30, 1 << 20
_BYTE = 0x3F
"""Four of them are the float 0.75. What a recurrent kernel keeps for its backward pass is given as bytes, and most
others read as numbers too small for a processor to be fast with."""


class ReadyCall:
    """A call with its arguments.

    Args:
        call: What to make.
        device: Where.
        sets: Of arguments that take turns; one of what is so small that a cache keeps it anyway.
    """

    def __init__(self, call: OperatorCall, device: torch.device, sets: int = 1) -> None:
        self._function, self._device = _function(call.operator), device
        sets = 1 if bytes_of(call) < LEAST_BYTES else max(1, min(MOST_SETS, sets))
        given = [_arguments(call, device)]
        given += [_copied(given[0]) for _ in range(sets - 1)]
        self._turns = itertools.cycle(given)
        self._results: deque[Any] = deque(maxlen=sets)  # the next result goes where no cache has numbers
        self._times = 1
        self.first_seconds = self.seconds()
        """The first time, in which its kernel is prepared."""
        if device.type == "cuda":
            once = self.seconds()
            hiding = sets if once < 0.01 else 1
            self._times = max(hiding, min(_MOST_QUEUED, int(_SAMPLE_SECONDS / max(once, 1e-7))))

    @classmethod
    def of(cls, call: OperatorCall, device: torch.device, sets: int = 1) -> ReadyCall | None:
        """None where it cannot be made again."""
        if bytes_of(call) > _MOST_BYTES or not call.operator.startswith("aten::"):
            return None
        try:
            with torch.no_grad():
                return cls(call, device, sets)
        except Exception:  # whatever an operator refuses
            return None

    def seconds(self) -> float:
        """Of the call, made now."""
        function, turns, results = self._function, self._turns, self._results
        if self._device.type == "cpu":
            args, named = next(turns)
            began = time.perf_counter()
            result = function(*args, **named)
            took = time.perf_counter() - began
            results.append(result)
            return took
        began = time.perf_counter()
        for _ in range(self._times):
            args, named = next(turns)
            results.append(function(*args, **named))
        torch.cuda.synchronize(self._device)
        return (time.perf_counter() - began) / self._times


def bytes_of(call: OperatorCall) -> int:
    """Of all that it reads and writes."""
    return sum(spec.bytes for spec in (*call.inputs, *call.outputs))


def _function(operator: str) -> Any:
    namespace, _, rest = operator.partition("::")
    name, _, overload = rest.partition(".")
    return getattr(getattr(getattr(torch.ops, namespace), name), overload or "default")


def _arguments(call: OperatorCall, device: torch.device) -> tuple[list[Any], dict[str, Any]]:
    bound = _bound(call)
    args = [_made(value, device, bound) for value in call.arguments]
    named = {name: _made(value, device, bound) for name, value in call.named}
    return args, {name: value for name, value in named.items() if value is not None}


def _copied(value: Any) -> Any:
    if isinstance(value, Tensor):
        numbers = value.untyped_storage().clone()  # type: ignore[no-untyped-call]
        return value.new_empty(0).set_(numbers, value.storage_offset(), value.shape, value.stride())
    if isinstance(value, dict):
        return {name: _copied(item) for name, item in value.items()}
    return type(value)(map(_copied, value)) if isinstance(value, list | tuple) else value


def _made(value: Any, device: torch.device, bound: int) -> Any:
    if isinstance(value, TensorSpec):
        return _tensor(value, device, bound)
    if isinstance(value, tuple):
        return [_made(item, device, bound) for item in value]
    if isinstance(value, str) and value.startswith("torch."):
        return getattr(torch, value.removeprefix("torch."))
    return value


def _tensor(spec: TensorSpec, device: torch.device, bound: int) -> Tensor:
    dtype = getattr(torch, spec.dtype)
    strides = spec.strides
    length = spec.elements
    if strides is not None:
        length = 1 + sum((size - 1) * stride for size, stride in zip(spec.shape, strides, strict=True)) if length else 0
    if dtype.is_floating_point or dtype.is_complex:
        whole = _random(length, device).add_(0.5).to(dtype)
    elif dtype is torch.bool:
        whole = _random(length, device) > 0.2
    elif dtype is torch.uint8:
        whole = torch.full((length,), max(0, min(bound - 1, _BYTE)), dtype=dtype, device=device)
    else:
        whole = torch.randint(max(1, bound), (length,), device=device).to(dtype)
    return whole.view(spec.shape) if strides is None else whole.as_strided(spec.shape, strides)


def _random(length: int, device: torch.device) -> Tensor:
    """From 0 to 1; a million of them again and again, as drawing takes longer than most calls."""
    drawn = torch.rand(min(length, _DRAWN), device=device)
    return drawn if length <= _DRAWN else drawn.repeat(-(-length // _DRAWN))[:length]


def _bound(call: OperatorCall) -> int:
    """What whole numbers among the arguments stay below, so that they index what is there."""
    name, inputs = call.name.removesuffix("_"), call.inputs
    if name in ("embedding", "_embedding_bag"):
        return inputs[0].shape[0]
    if name == "embedding_dense_backward":
        return int(call.arguments[2])
    if name.startswith("nll_loss"):
        return inputs[1 if "backward" in name else 0].shape[1]
    if name.startswith(("max_pool", "_adaptive_max_pool", "adaptive_max_pool")) and "backward" in name:
        *_, height, width = inputs[1].shape
        return height * width
    if "rnn" in name:
        return _BYTE + 1
    floats = [spec.shape for spec in inputs if spec.dtype not in ("int64", "int32", "bool")]
    return min((size for shape in floats for size in shape if size > 0), default=2)


class OtherLoad:
    """How many cores other programs used while it was entered.

    Args:
        total: The sum over the ranks that measure together, which are no others.
    """

    def __init__(self, total: Callable[[float], float] = float) -> None:
        self.cores = 0.0
        self._total = total

    def __enter__(self) -> OtherLoad:
        self._busy, own = cpu_seconds()
        self._own, self._wall = sum(own.values()), time.monotonic()
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        if kind is None:
            wall = max(time.monotonic() - self._wall, 1e-6)
            busy, own = cpu_seconds()
            self.cores = max(0.0, (busy - self._busy - self._total(sum(own.values()) - self._own)) / wall)
