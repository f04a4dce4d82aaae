"""Why a plan is what it is: sentences with the numbers that decided, and what the prediction does not know.

Nothing here decides; each sentence restates a number of `kit.plan.cost`. A reason that does not apply is left out.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from kit.plan.chunk_plan import named
from kit.plan.cost import Access, LayoutCost, Network, balanced_ratio, describe, price
from kit.units import format_bytes, format_count, format_seconds

_NOTABLE = 1.10
"""Ratios nearer to one are not worth a sentence: the prediction is not that good."""
_EASY_BYTES_PER_SECOND = 500e6
"""Below this, one core decodes and most networks carry what is read."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A finished choice and everything it was chosen from."""

    dims: tuple[str, ...]
    access: Access
    network: Network
    chosen: LayoutCost
    best: LayoutCost
    """What automatic planning would choose."""
    candidates: tuple[LayoutCost, ...]
    shard: tuple[int, ...] | None
    target_shard_bytes: int
    automatic: bool

    def objects(self, sides: Sequence[int]) -> int:
        """Objects that hold data when each holds this many elements, all variables."""
        counts = (-(-extent // side) for extent, side in zip(self.access.shape, sides, strict=True))
        return math.prod(counts) * self.access.variables


def explain(case: Case) -> tuple[str, ...]:
    """The reasons of a plan, the most important first."""
    parts = (_trade, _choice, _time, _chunk_as_patch, _idle, _sharing, _padding, _shards, _load)
    return tuple(reason for part in parts for reason in part(case))


def _trade(case: Case) -> Iterator[str]:
    """The layout in one line, as its reader will repeat it."""
    chosen, variables = case.chosen, case.access.variables
    each = " of each variable" if variables > 1 else ""
    yield (
        f"{'×'.join(map(str, chosen.chunk))} chunks: {plural(chosen.requests_per_sample / variables, 'request')} and "
        f"{chosen.amplification:.3g} × the patch's bytes per sample{each}; "
        "smaller = more requests (latency binds), larger = more wasted bytes (bandwidth binds)"
    )


def _choice(case: Case) -> Iterator[str]:
    """Automatic: what it was preferred to. By hand: what it is up against."""
    fastest, best = case.candidates[0], case.best
    if case.automatic and best is not fastest:
        close = sum(cost.seconds_per_batch <= fastest.seconds_per_batch * _NOTABLE for cost in case.candidates)
        yield (
            f"the lightest of {close} layouts predicted within 10 % of the fastest, {named(case.dims, fastest.chunk)} "
            f"with {fastest.amplification:.3g} × the patch's bytes"
        )
    if case.automatic:
        return
    gain = _ratio(case.chosen, best)
    if gain < _NOTABLE:
        yield f"given by hand; the automatic choice, {named(case.dims, best.chunk)}, is predicted no faster by 10 %"
        return
    yield (
        f"given by hand; {named(case.dims, best.chunk)} is predicted {gain:.2g} × as fast "
        f"({format_count(best.samples_per_second)} samples/s), with {plural(best.requests_per_sample, 'request')} and "
        f"{format_bytes(best.bytes_per_sample)} per sample"
    )


def _time(case: Case) -> Iterator[str]:
    chosen, network = case.chosen, case.network
    transfer = chosen.chunk_bytes / network.bandwidth_bytes_per_second
    whole = network.latency_seconds + transfer
    binds = {
        "latency": f"latency binds ({network.latency_seconds / whole:.0%} of each request)",
        "bandwidth": f"bandwidth binds ({transfer / whole:.0%} of each request)",
        "total bandwidth": "the total bandwidth binds",
    }[chosen.bound]
    yield (
        f"a batch of {case.access.batch_size}: {plural(chosen.requests_per_batch, 'request')} of "
        f"{format_bytes(chosen.chunk_bytes)}, predicted {format_seconds(chosen.seconds_per_batch)} with "
        f"{describe(network)}: {binds}"
    )


def _chunk_as_patch(case: Case) -> Iterator[str]:
    """Whether the rule "chunk = sample" holds here, and what decides when it does not."""
    if not case.access.free_dimensions:
        return
    plain = price(case.access, case.network, case.access.patch)
    ratio = _ratio(plain, case.best)
    if ratio < _NOTABLE:
        yield f"chunk = patch holds here: nothing considered is faster by 10 %{_rule(case)}"
        return
    yield (
        f"chunk = patch does not hold here: it takes {ratio:.2g} × the time of {named(case.dims, case.best.chunk)} "
        f"({plural(plain.requests_per_sample, 'request')} a sample, bound by {plain.bound}){_rule(case)}"
    )


def _rule(case: Case) -> str:
    """The closed-form optimum, where its assumptions hold."""
    if case.access.order == "grid" or case.chosen.bound == "total bandwidth":
        return ""
    return (
        "; at random offsets it is the fastest when a patch holds latency × bandwidth = "
        f"{format_bytes(case.network.break_even_bytes)}; this one holds {format_bytes(case.access.patch_bytes)}, which "
        f"asks for about {balanced_ratio(case.access, case.network):.2g} × its sides"
    )


def _idle(case: Case) -> Iterator[str]:
    """When a batch is too small to keep every connection busy."""
    open_at_once = case.network.in_flight(case.chosen.requests_per_batch)
    if case.access.free_dimensions and open_at_once < case.network.requests_in_flight / _NOTABLE:
        yield (
            f"a batch has too few requests for {case.network.requests_in_flight} in flight: about "
            f"{format_count(open_at_once)} are open; a larger batch, or more batches ahead, would use the rest"
        )


def _sharing(case: Case) -> Iterator[str]:
    alone, together = case.chosen.requests_per_sample * case.access.batch_size, case.chosen.requests_per_batch
    if alone > together * _NOTABLE:
        yield f"samples of a batch share chunks: {plural(together, 'request')} instead of {format_count(alone)}"


def _padding(case: Case) -> Iterator[str]:
    for name, extent, side in zip(case.dims, case.access.shape, case.chosen.chunk, strict=True):
        if side > extent:
            yield f"the chunk reaches past the array along {name} ({side} > {extent}): the rest is padding"


def _shards(case: Case) -> Iterator[str]:
    chunks = case.objects(case.chosen.chunk)
    if case.shard is None:
        yield f"no shards: each chunk is an object, {plural(chunks, 'object')} in all"
        return
    inside = math.prod(case.shard) // math.prod(case.chosen.chunk)
    size = math.prod(case.shard) * case.access.itemsize
    yield (
        f"shards of {named(case.dims, case.shard)} hold {plural(inside, 'chunk')}, "
        f"{format_bytes(size)} (target {format_bytes(case.target_shard_bytes)}): "
        f"{plural(case.objects(case.shard), 'object')} instead of {format_count(chunks)}"
    )


def _load(case: Case) -> Iterator[str]:
    chosen = case.chosen
    rate = chosen.bytes_per_batch / chosen.seconds_per_batch
    if rate > _EASY_BYTES_PER_SECOND and math.isinf(case.network.total_bandwidth_bytes_per_second):
        yield (
            f"not counted: decoding and the network's total bandwidth; the prediction needs {format_bytes(rate)}/s of "
            "both, and with less of either smaller chunks win"
        )


def _ratio(slower: LayoutCost, faster: LayoutCost) -> float:
    return slower.seconds_per_batch / faster.seconds_per_batch


def plural(count: float, noun: str) -> str:
    """`1 request`, `3.94 requests`."""
    text = format_count(count)
    return f"{text} {noun}" if text == "1" else f"{text} {noun}s"
