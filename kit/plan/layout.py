"""Which chunks and shards to cut a dataset into, what a batch then costs, and why: a `ChunkPlan`.

The chunk is what a reader fetches, the shard what a writer writes. Candidates are the patch's sides times powers of
two, clipped to the array. An automatic chunk is the lightest of those predicted within 10 % of the fewest seconds per
batch (`kit.plan.cost`): the prediction errs by more than that, and what it does not count grows with the bytes. A chunk
given by hand is priced the same way and the automatic one named beside it.

Sizes are elements in dimension order; a patch dimension left out has size 1, a chunk dimension left out the patch's
size, a shard dimension left out the chunk's. Patches larger than the array, unknown dimensions, empty chunks and shards
that cut through a chunk are refused.

The one invariant: the same arguments give the same plan, on any machine; nothing is read and nothing is measured.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Iterator, Mapping, Sequence
from itertools import product
from typing import Any, Literal

from kit.errors import PlanError
from kit.plan.chunk_plan import ChunkPlan
from kit.plan.cost import Access, LayoutCost, Network, price
from kit.plan.reasons import Case, explain

CLOSE = 1.10
"""Predictions closer than this count as equal."""


def plan_layout(
    *,
    dims: Sequence[str],
    shape: Sequence[int],
    itemsize: int,
    patch: Mapping[str, int],
    batch_size: int,
    variables: int,
    order: Literal["random", "grid"],
    stride: Mapping[str, int],
    latency_seconds: float,
    bandwidth_bytes_per_second: float,
    requests_in_flight: int,
    target_shard_bytes: int,
    chunk: Literal["auto"] | Mapping[str, int],
    shard: Literal["auto", "none"] | Mapping[str, int],
    total_bandwidth_bytes_per_second: float | None = None,
    batches_ahead: int = 0,
) -> ChunkPlan:
    """Chunks and shards for arrays of `shape` from which batches of patches are read, priced and explained.

    Args:
        dims: names of the dimensions, such as `("time", "lat", "lon")`; `shape` follows them.
        itemsize: bytes of one stored element.
        patch: size of a sample along each dimension; 1 where left out.
        variables: arrays of this shape that every sample reads.
        order: random offsets anywhere, or a shuffled grid of offsets `stride` apart (the patch's size where left out).
        chunk: "auto", or sizes to price as given.
        shard: "auto" fills `target_shard_bytes`, "none" makes each chunk an object, or sizes as given.
        total_bandwidth_bytes_per_second: what all connections carry together; None for no limit.
        batches_ahead: batches read before they are asked for, which keep more requests in flight.

    Raises:
        PlanError: for a patch larger than the array, unknown dimensions, sizes below 1, or a shard that is not a
            multiple of the chunk.
    """
    names, extents = _named_shape(dims, shape)
    sizes = _ordered("patch", patch, names, [1] * len(names))
    _check_patch(names, extents, sizes)
    access = Access(
        shape=extents, itemsize=itemsize, patch=sizes, stride=_ordered("stride", stride, names, sizes), order=order,
        batch_size=batch_size, variables=variables,
    )  # fmt: skip
    network = Network(
        latency_seconds=latency_seconds, bandwidth_bytes_per_second=bandwidth_bytes_per_second,
        requests_in_flight=requests_in_flight, batches_ahead=batches_ahead,
        total_bandwidth_bytes_per_second=total_bandwidth_bytes_per_second or math.inf,
    )  # fmt: skip
    given_shard = None if isinstance(shard, str) else _ordered("shard", shard, names, [0] * len(names))
    candidates = _candidates(access, network)
    if isinstance(chunk, str):
        chosen = lightest(_fitting(candidates, given_shard, names))
    else:
        chosen = price(access, network, _ordered("chunk", chunk, names, sizes))
    shards = _shard(shard, given_shard, chosen, access, target_shard_bytes, names)
    best = chosen if isinstance(chunk, str) else lightest(candidates)
    case = Case(
        dims=names, access=access, network=network, chosen=chosen, best=best, candidates=candidates, shard=shards,
        target_shard_bytes=target_shard_bytes, automatic=isinstance(chunk, str),
    )  # fmt: skip
    return _plan(case)


def _plan(case: Case) -> ChunkPlan:
    access, chosen = case.access, case.chosen
    considered = case.candidates if chosen in case.candidates else (*case.candidates, chosen)
    return ChunkPlan(
        dims=case.dims, shape=access.shape, itemsize=access.itemsize, variables=access.variables, patch=access.patch,
        chunk=chosen.chunk, shard=case.shard, order=access.order, batch_size=access.batch_size,
        requests_per_sample=chosen.requests_per_sample, bytes_per_sample=chosen.bytes_per_sample,
        requests_per_batch=chosen.requests_per_batch, seconds_per_batch=chosen.seconds_per_batch,
        samples_per_second=chosen.samples_per_second, amplification=chosen.amplification, bound=chosen.bound,
        object_count=case.objects(case.shard or chosen.chunk), candidates=considered, reasons=explain(case),
    )  # fmt: skip


# -- candidates


def lightest(candidates: Sequence[LayoutCost]) -> LayoutCost:
    """Of the candidates about as fast as the fastest, the one that reads the fewest bytes, then has fewest requests."""
    limit = min(cost.seconds_per_batch for cost in candidates) * CLOSE
    close = (cost for cost in candidates if cost.seconds_per_batch <= limit)
    return min(close, key=lambda cost: (cost.bytes_per_batch, cost.requests_per_batch, cost.seconds_per_batch))


def _candidates(access: Access, network: Network) -> tuple[LayoutCost, ...]:
    """Every candidate priced, the fastest first; of equals the one with fewer requests."""
    free = access.free_dimensions
    powers = range(-3, 6) if free <= 2 else range(-2, 5) if free == 3 else range(-1, 3) if free <= 5 else range(2)
    sides = [_sides(size, extent, powers) for size, extent in zip(access.patch, access.shape, strict=True)]
    priced = [price(access, network, chunk) for chunk in product(*sides)]
    return tuple(sorted(priced, key=lambda cost: (cost.seconds_per_batch, cost.requests_per_batch)))


def _sides(size: int, extent: int, powers: Sequence[int]) -> list[int]:
    """Sides worth pricing along one dimension: all of it when the patch covers it, else around the patch's size."""
    if size >= extent:
        return [extent]
    scaled = (size << power if power >= 0 else -(-size >> -power) for power in powers)
    return sorted({min(max(1, side), extent) for side in scaled})


def _fitting(
    candidates: Sequence[LayoutCost], shard: tuple[int, ...] | None, dims: Sequence[str]
) -> Sequence[LayoutCost]:
    """The candidates that divide a shard given by hand."""
    if shard is None:
        return candidates
    fits = [cost for cost in candidates if all(s % c == 0 for s, c in zip(shard, cost.chunk, strict=True))]
    if not fits:
        given = ", ".join(f"{name}: {side}" for name, side in zip(dims, shard, strict=True) if side)
        raise PlanError(
            f"no automatic chunk divides the shard {{{given}}}; give chunk sizes that divide it, or shard: auto"
        )
    return fits


# -- shards


def _shard(
    wish: Literal["auto", "none"] | Mapping[str, int],
    given: tuple[int, ...] | None,
    chosen: LayoutCost,
    access: Access,
    target_bytes: int,
    dims: Sequence[str],
) -> tuple[int, ...] | None:
    if given is not None:
        return _checked_shard(given, chosen.chunk, dims)
    if wish == "none":
        return None
    shard = fill_shard(access.shape, chosen.chunk, chosen.chunk_bytes, target_bytes)
    return None if shard == chosen.chunk else shard


def fill_shard(shape: Sequence[int], chunk: Sequence[int], chunk_bytes: int, target_bytes: int) -> tuple[int, ...]:
    """Chunks packed into a shard of at most `target_bytes`, whole rows first, in C order.

    A row that does not fit is cut into parts as equal as they can be; a shard never passes the last chunk of the array.
    A chunk above the target is a shard by itself.
    """
    room, sides = max(1, target_bytes // chunk_bytes), []
    for extent, side in reversed(list(zip(shape, chunk, strict=True))):
        available = -(-extent // side)
        parts = -(-available // min(available, room))
        take = -(-available // parts)
        sides.append(take * side)
        room = room // take if parts == 1 else 1
    return tuple(reversed(sides))


def _checked_shard(shard: tuple[int, ...], chunk: tuple[int, ...], dims: Sequence[str]) -> tuple[int, ...]:
    filled = tuple(side or inner for side, inner in zip(shard, chunk, strict=True))
    for name, side, inner in zip(dims, filled, chunk, strict=True):
        if side % inner:
            near = sorted({max(1, side // inner) * inner, -(-side // inner) * inner})
            raise PlanError(
                f"shard.{name} is {side}, which cuts through a chunk of {inner}; a shard is a multiple of the chunk, "
                f"such as {' or '.join(map(str, near))}"
            )
    return filled


# -- arguments


def _named_shape(dims: Sequence[str], shape: Sequence[int]) -> tuple[tuple[str, ...], tuple[int, ...]]:
    names, extents = tuple(dims), tuple(int(extent) for extent in shape)
    if not names or len(names) != len(extents) or len(set(names)) != len(names):
        raise PlanError(f"dims {names} and shape {extents} must name each dimension once and have equal lengths")
    return names, extents


def _ordered(what: str, sizes: Mapping[str, int], dims: Sequence[str], default: Sequence[int]) -> tuple[int, ...]:
    """A mapping of sizes as a tuple in dimension order."""
    for problem in _unfit(what, sizes, dims):
        raise PlanError(problem)
    return tuple(int(sizes.get(name, size)) for name, size in zip(dims, default, strict=True))


def _unfit(what: str, sizes: Mapping[str, Any], dims: Sequence[str]) -> Iterator[str]:
    for name, size in sizes.items():
        if name not in dims:
            close = difflib.get_close_matches(name, dims, n=1)
            hint = f"did you mean {close[0]!r}?" if close else f"the dimensions are {', '.join(dims)}"
            yield f"{what}: the array has no dimension {name!r}; {hint}"
        if isinstance(size, bool) or not isinstance(size, int) or size < 1:
            yield f"{what}.{name} is {size!r}, but must be a whole number of elements, at least 1"


def _check_patch(dims: Sequence[str], shape: Sequence[int], patch: Sequence[int]) -> None:
    for name, extent, size in zip(dims, shape, patch, strict=True):
        if size > extent:
            raise PlanError(
                f"patch.{name} is {size}, larger than the array's {extent}; take a patch of at most {extent} along it"
            )
