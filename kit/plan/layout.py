"""Which chunks and shards to cut a dataset into, what a batch then costs, and why: a `ChunkPlan`.

The chunk is what a reader fetches, the shard what a writer writes. Candidates (`kit.plan.candidates`) keep the rules
given and are priced (`kit.plan.cost`) with the shard each would get. An automatic chunk is the lightest of those
predicted within 10 % of the fewest seconds per batch: the prediction errs by more than that, and what it does not
count grows with the bytes. With other readers, seconds give way to the mean slowdown of all (`kit.plan.readers`). A
chunk given by hand is priced the same way and the automatic one named beside it.

Sizes are elements in dimension order; a patch dimension left out has size 1, a chunk dimension left out the patch's
size, a shard dimension left out the chunk's. Patches larger than the array, unknown dimensions, empty chunks, shards
that cut through a chunk, and chunks or objects that break a rule are refused.

The one invariant: the same arguments give the same plan, on any machine; nothing is read and nothing is measured.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from kit.plan.access import Access, Order
from kit.plan.candidates import LARGEST_OBJECT_BYTES, Divisibility, Rules, Sizes
from kit.plan.choice import Chooser
from kit.plan.chunk_plan import ChunkPlan
from kit.plan.named_sizes import check_patch, named_shape, ordered
from kit.plan.readers import OWN, Reader, readers_of
from kit.plan.reasons import Case, explain
from kit.plan.resources import Host, Network, Prices


def plan_layout(
    *,
    dims: Sequence[str],
    shape: Sequence[int],
    itemsize: int,
    patch: Mapping[str, int],
    batch_size: int,
    variables: int,
    order: Order,
    stride: Mapping[str, int],
    latency_seconds: float,
    bandwidth_bytes_per_second: float,
    requests_in_flight: int,
    target_shard_bytes: int,
    chunk: Literal["auto"] | Mapping[str, int],
    shard: Literal["auto", "none"] | Mapping[str, int],
    total_bandwidth_bytes_per_second: float | None = None,
    batches_ahead: int = 0,
    requests_per_second: float | None = None,
    host: Host | None = None,
    prices: Prices | None = None,
    pattern: Mapping[str, Any] | None = None,
    divisibility: Divisibility = "any",
    multiple_of: Mapping[str, int] | None = None,
    largest_object_bytes: int = LARGEST_OBJECT_BYTES,
    readers: Mapping[str, Mapping[str, Any]] | None = None,
) -> ChunkPlan:
    """Chunks and shards for arrays of `shape` from which batches of patches are read, priced and explained.

    Args:
        dims: names of the dimensions, such as `("time", "lat", "lon")`; `shape` follows them.
        itemsize: bytes of one stored element.
        patch: size of a sample along each dimension; 1 where left out.
        variables: arrays of this shape that every sample reads.
        order: random offsets anywhere; a grid of offsets `stride` apart (the patch's size where left out); or blocks of
            offsets in random order (`kit.plan.block_order`), every element or `stride` apart.
        chunk: "auto", or sizes to price as given.
        shard: "auto" fills `target_shard_bytes`, "none" makes each chunk an object, or sizes as given.
        total_bandwidth_bytes_per_second: what all connections carry together; None for no limit.
        batches_ahead: batches read before they are asked for, which keep more requests in flight.
        requests_per_second: what the store answers, all ranks together; None for no limit.
        host: decoding, memory and cache of a rank; without limits when left out.
        prices: what the store charges.
        pattern: more of `kit.plan.cost.Access`: ranks, epochs, samples_per_epoch, shuffle, together, compression_ratio,
            window_bytes, window_blocks, block_reuse.
        divisibility: "divides": the chunk divides the array; "power-of-two": its sides are powers of two.
        multiple_of: along each dimension, a number that the chunk's side is a multiple of.
        largest_object_bytes: no chunk or shard is larger, uncompressed.
        readers: other patterns that the layout must serve too, with weights (`kit.plan.readers`).

    Raises:
        PlanError: for a patch larger than the array, unknown dimensions, sizes below 1, a shard that is not a multiple
            of the chunk, or rules that no chunk can keep.
    """
    names, extents = named_shape(dims, shape)
    sizes = ordered("patch", patch, names, [1] * len(names))
    check_patch("patch", names, extents, sizes)
    access = Access(
        shape=extents, itemsize=itemsize, patch=sizes, order=order, batch_size=batch_size, variables=variables,
        stride=ordered("stride", stride, names, [1] * len(names) if order == "block" else sizes), **(pattern or {}),
    )  # fmt: skip
    network = Network(
        latency_seconds=latency_seconds, bandwidth_bytes_per_second=bandwidth_bytes_per_second,
        requests_in_flight=requests_in_flight, batches_ahead=batches_ahead,
        total_bandwidth_bytes_per_second=_unless_none(total_bandwidth_bytes_per_second),
        requests_per_second=_unless_none(requests_per_second),
    )  # fmt: skip
    given_shard = None if isinstance(shard, str) else ordered("shard", shard, names, [0] * len(names))
    rules = Rules(
        dims=names, shape=extents, element_bytes=access.element_bytes, divisibility=divisibility, shard=given_shard,
        multiple_of=ordered("multiple_of", multiple_of or {}, names, [1] * len(names)),
        largest_object_bytes=largest_object_bytes,
    )  # fmt: skip
    own = Reader(name=OWN, access=access, weight=1.0)
    chooser = Chooser(
        network=network, host=host or Host(), prices=prices or Prices(), rules=rules, sharded=shard != "none",
        target_shard_bytes=min(target_shard_bytes, largest_object_bytes),
        readers=(own, *readers_of(readers or {}, access, names)),
    )  # fmt: skip
    by_hand = None if isinstance(chunk, str) else ordered("chunk", chunk, names, sizes)
    return _plan(chooser, by_hand)


def _unless_none(limit: float | None) -> float:
    return math.inf if limit is None else limit


def _plan(chooser: Chooser, by_hand: Sizes | None) -> ChunkPlan:
    choice = chooser.choose(by_hand)
    access, chosen = chooser.readers[0].access, choice.chosen
    case = Case(
        dims=chooser.rules.dims, access=access, network=chooser.network, host=chooser.host, prices=chooser.prices,
        choice=choice, target_shard_bytes=chooser.target_shard_bytes, automatic=by_hand is None,
    )  # fmt: skip
    return ChunkPlan(
        dims=chooser.rules.dims, shape=access.shape, itemsize=access.itemsize, variables=access.variables,
        together=access.together, patch=access.patch, chunk=chosen.chunk, shard=chosen.shard, order=access.order,
        batch_size=access.batch_size, ranks=access.ranks, requests_per_sample=chosen.requests_per_sample,
        bytes_per_sample=chosen.bytes_per_sample, requests_per_batch=chosen.requests_per_batch,
        seconds_per_batch=chosen.seconds_per_batch, samples_per_second=chosen.samples_per_second,
        amplification=chosen.amplification, bound=chosen.bound, object_count=chosen.object_count,
        candidates=choice.considered, readers=choice.readers, reasons=explain(case),
    )  # fmt: skip
