"""A real CUDA trace played through kit's model of the allocator, to tell its error from that of the prediction.

Takes what `torch.cuda.memory._snapshot()` returns after `torch.cuda.memory._record_memory_history()` was called before
the first allocation. Requests and releases are the trace's; what they hold and reserve is kit's answer, and beside it
stands what torch itself reserved in that trace. A block that another stream still uses is free when that stream is done
(`free_completed`), as it is for torch.
"""

from dataclasses import dataclass
from itertools import accumulate

from kit.memory.replay.allocator import CachingAllocator, OutOfMemory

_GIVEN = {"segment_alloc", "segment_map"}
_TAKEN = {"segment_free", "segment_unmap"}


@dataclass(frozen=True, kw_only=True)
class TraceReplay:
    requests: int
    """Allocations in the trace."""
    allocated_bytes: int
    """Peak in kit's model."""
    reserved_bytes: int
    """Peak in kit's model."""
    traced_reserved_bytes: int
    """Peak that torch took from the driver in the trace."""
    out_of_memory: OutOfMemory | None
    """Where the model ran out under the capacity given."""


def replay_trace(snapshot, *, device=0, capacity_bytes=None):
    """Play the trace of one device, up to its end or to the first request that cannot be met, in segments as they were.

    Raises:
        ValueError: when the trace does not begin with the first allocation.
    """
    trace = snapshot["device_traces"][device]
    expandable = bool(snapshot.get("allocator_settings", {}).get("expandable_segments"))
    allocator = CachingAllocator(capacity_bytes, expandable)
    requests = _play(trace, allocator)
    return TraceReplay(
        requests=requests,
        allocated_bytes=allocator.peak_allocated_bytes,
        reserved_bytes=allocator.peak_reserved_bytes,
        traced_reserved_bytes=max(accumulate(map(_driver_bytes, trace)), default=0),
        out_of_memory=allocator.out_of_memory,
    )


def _play(trace, allocator):
    alive, requests = {}, 0
    for entry in trace:
        if entry["action"] == "alloc":
            requests += 1
            block = allocator.malloc(entry["size"], entry.get("stream", 0))
            if block is None:
                break
            alive[entry["addr"]] = block
        elif entry["action"] == "free_completed":
            if entry["addr"] not in alive:
                raise ValueError(
                    f"the trace frees {entry['addr']:#x}, which it never allocated: it does not begin with the first "
                    "allocation; record the history before CUDA is used, with more max_entries"
                )
            allocator.free(alive.pop(entry["addr"]))
    return requests


def _driver_bytes(entry):
    sign = (entry["action"] in _GIVEN) - (entry["action"] in _TAKEN)
    return sign * entry["size"]
