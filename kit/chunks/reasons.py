"""The way in: which chunks and shards to cut a dataset into, what a batch then costs, and why: a `ChunkPlan`.

A chunk is what a reader fetches, a shard what a writer writes. Candidates (`kit.chunks.search`) are priced
(`kit.chunks.cost`) with the shard each would get. An automatic chunk is the lightest of those predicted within 10 % of
the fewest seconds per batch: the prediction errs by more than that, and what it does not count grows with the bytes.
With other readers, the mean slowdown of all takes the place of seconds. A chunk given by hand is priced in the same
way, and the automatic one is named beside it.

Reasons decide nothing. Each is a sentence with numbers of `kit.chunks.cost`, some of them for a layout or an order that
was not chosen; one that does not apply is left out.

Sizes are elements in dimension order; a patch dimension left out has size 1, a chunk dimension left out the patch's
size, a shard dimension left out the chunk's. The one invariant: the same arguments give the same plan on any machine;
nothing is read and nothing is measured.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from kit.chunks.access import Access, Order, seen_fraction
from kit.chunks.cost import LayoutCost, assembling_seconds, balanced_ratio, price
from kit.chunks.geometry import check_patch, named_shape, ordered
from kit.chunks.resources import Host, Network, Prices
from kit.chunks.search import (
    CLOSE,
    LARGEST_OBJECT_BYTES,
    LEAST_CHUNK_BYTES,
    OWN,
    Choice,
    Chooser,
    ChunkPlan,
    Divisibility,
    Play,
    Rules,
    WeightedPattern,
    named,
    reader_of,
)
from kit.units import format_bytes, format_count, format_price, format_seconds, plural

_NOTABLE = 1.10
"""Ratios nearer to one are not worth a sentence: the prediction is not that good."""
_EASY_BYTES_PER_SECOND = 500e6
"""Below this, one core decodes and most networks carry what is read."""
_WELL_MIXED = 0.8
_MORE_REUSE, _WORTH_REUSE = 4, 1.5


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A finished choice and everything it was made with."""

    dims: tuple[str, ...]
    access: Access
    chooser: Chooser
    choice: Choice
    automatic: bool

    @property
    def network(self) -> Network:
        return self.chooser.network

    @property
    def host(self) -> Host:
        return self.chooser.host

    @property
    def chosen(self) -> LayoutCost:
        return self.choice.chosen

    def price(self, access: Access, chunk: tuple[int, ...]) -> LayoutCost:
        """Another access or layout with the same network and host, in shards of its own."""
        return replace(self.chooser, rules=replace(self.chooser.rules, shard=None)).played(access, chunk)


def explain(case: Case) -> tuple[str, ...]:
    """The reasons of a plan, the most important first."""
    parts = (
        _unlikely, _trade, _choice, _rules, _time, _fit, _chunk_as_patch, _readers, _block, _idle, _sharing, _cache,
        _together, _padding, _shards, _epoch, _load,
    )  # fmt: skip
    return tuple(reason for part in parts for reason in part(case))


def _unlikely(case: Case) -> Iterator[str]:
    """What was probably forgotten or mistaken."""
    access = case.access
    if math.prod(access.patch) == 1 and math.prod(access.shape) > 1:
        sides = ", ".join(f"{name}: 64" for name in case.dims[-2:])
        yield f"a sample is a single value, since data.patch names no side above 1; such as {{{sides}}}"
    if access.batch_size > access.rank_samples > 0:
        yield (
            f"a batch of {access.batch_size} (loader.batch_size) is more than a rank has in an epoch, "
            f"{plural(access.rank_samples, 'sample')} (data.samples_per_epoch): what is told of one is never read"
        )


def _trade(case: Case) -> Iterator[str]:
    chosen, arrays = case.chosen, case.access.arrays
    each = " of each variable" if arrays > 1 else ""
    yield (
        f"{'×'.join(map(str, chosen.chunk))} chunks: {plural(chosen.requests_per_sample / arrays, 'request')} and "
        f"{format_count(chosen.amplification)} × the patch's bytes per sample{each}; "
        "smaller = more requests (latency binds), larger = more wasted bytes (bandwidth binds)"
    )


def _choice(case: Case) -> Iterator[str]:
    """Automatic: what it was preferred to. By hand: what it is up against."""
    first, best = case.choice.candidates[0], case.choice.best
    if case.automatic:
        if best is not first:
            single = len(case.choice.readers) == 1
            finalists = case.choice.candidates[: case.choice.finalists]
            scores = [cost.seconds_per_batch if single else cost.slowdown for cost in finalists]
            yield (
                f"the lightest of {sum(score <= scores[0] * CLOSE for score in scores)} layouts predicted within 10 % "
                f"of the {'fastest' if single else 'best'}, {named(case.dims, first.chunk)} with "
                f"{format_count(first.amplification)} × the patch's bytes"
            )
        if case.chooser.rules.grown(case.access.patch) != case.access.patch:
            yield (
                f"chunks below {format_bytes(LEAST_CHUNK_BYTES)} were left out: each costs more to name and write "
                "than it saves to read"
            )
        return
    gain = _ratio(case.chosen, best)
    if gain < _NOTABLE:
        yield f"given by hand; the automatic choice, {named(case.dims, best.chunk)}, is predicted no faster by 10 %"
        return
    yield (
        f"given by hand; {named(case.dims, best.chunk)} is predicted {_short(gain)} × as fast "
        f"({format_count(best.samples_per_second)} samples/s), with {plural(best.requests_per_sample, 'request')} and "
        f"{format_bytes(best.bytes_per_sample)} per sample"
    )


def _rules(case: Case) -> Iterator[str]:
    free, best = case.choice.unruled, case.choice.best
    if free.chunk != best.chunk:
        loss = _ratio(best, free)
        price = f"{_short(loss)} × its time" if loss >= _NOTABLE else "no more than 10 % of its time"
        yield f"without the rules it would be {named(case.dims, free.chunk)}; keeping them costs {price}"


def _time(case: Case) -> Iterator[str]:
    chosen, network, host = case.chosen, case.network, case.host
    transfer = chosen.bytes_made_per_batch / chosen.requests_made_per_batch / network.bandwidth_bytes_per_second
    whole = network.latency_seconds + transfer
    decoding = f"decoding {format_bytes(host.decode_bytes_per_second)}/s in each of "
    decoding += plural(host.decode_threads, "thread")
    making = "making batches of chunks that are there, in one thread"
    asking = f"{format_seconds(host.request_cpu_seconds)} a request in one thread"
    of_making = assembling_seconds(case.access, host, chosen.requests_per_sample * case.access.batch_size)
    of_asking = (chosen.requests_per_batch + chosen.index_requests_per_batch) * host.request_cpu_seconds
    of_decoding = chosen.bytes_per_batch / (host.decode_bytes_per_second * host.decode_threads)
    cpu = decoding if of_decoding > of_making + of_asking else making if of_making > of_asking else asking
    rate = format_count(network.requests_per_second / case.access.ranks)
    binds = {
        "latency": f"latency binds ({network.latency_seconds / whole:.0%} of each request)",
        "bandwidth": f"bandwidth binds ({transfer / whole:.0%} of each request)",
        "memory": f"memory binds: it holds {format_count(chosen.in_flight)} requests in flight",
        "total bandwidth": "the total bandwidth binds",
        "request rate": f"the store's request rate binds ({rate}/s for each rank)",
        "CPU": f"the CPU binds ({cpu})",
        "slow requests": "batches wait for their slowest requests",
    }[chosen.bound]
    name, seconds = chosen.seconds_by_resource[1]
    share = seconds / chosen.seconds_per_batch
    runner_up = f", {name} next with {share:.0%} of that time" if share > 0.5 else ""
    shared = ""
    if chosen.requests_made_per_batch < 0.95 * chosen.requests_per_batch:
        made = plural(chosen.requests_made_per_batch, "request")
        shared = f" in {made}, since {'neighbours in a shard and ' * bool(chosen.shard)}batches in flight share them"
    yield (
        f"a batch of {case.access.batch_size}: {plural(chosen.requests_per_batch, 'chunk')} of "
        f"{format_bytes(chosen.chunk_bytes)}{shared}, predicted {format_seconds(chosen.seconds_per_batch)} with "
        f"{network}: {binds}{runner_up}"
    )


def _fit(case: Case) -> Iterator[str]:
    chosen, window = case.chosen, case.chosen.window
    if chosen.fits:
        return
    if case.access.order == "block" and (window is None or not window.full):
        held = "not even two blocks of one chunk" if window is None else f"only {plural(window.blocks, 'block')}"
        yield (
            f"windows of {format_bytes(case.access.window_bytes)} hold {held} where {case.access.window_blocks} are "
            "asked for: allow more window_bytes, ask for fewer window_blocks, or cut smaller chunks"
        )
        return
    yield (
        f"does not fit: {format_bytes(chosen.memory_bytes)} are needed on each rank and "
        f"{format_bytes(case.host.memory_bytes)} allowed; read fewer batches ahead, keep a smaller cache, or allow more"
    )


def _chunk_as_patch(case: Case) -> Iterator[str]:
    """Whether the rule "chunk = sample" holds here, and the closed-form optimum, where its assumptions hold."""
    access = case.access
    if not access.free_dimensions:
        return
    rule = ""
    if access.order == "random" and case.chosen.bound in ("latency", "bandwidth"):
        rule = (
            "; at random offsets it is the fastest when a patch holds latency × bandwidth = "
            f"{format_bytes(case.network.break_even_bytes)}; this one holds "
            f"{format_bytes(access.patch_bytes / access.compression_ratio)}, which "
            f"asks for about {_short(balanced_ratio(access, case.network))} × its sides"
        )
    plain = case.price(access, access.patch)
    own = case.choice.readers[0].best.chunk
    ratio = _ratio(plain, case.price(access, own))
    if ratio < _NOTABLE:
        yield f"chunk = patch holds here: nothing considered is faster by 10 %{rule}"
        return
    yield (
        f"chunk = patch does not hold here: it takes {_short(ratio)} × the time of {named(case.dims, own)} "
        f"({plural(plain.requests_per_sample, 'request')} a sample, bound by {plain.bound}){rule}"
    )


def _readers(case: Case) -> Iterator[str]:
    readers = case.choice.readers
    if len(readers) > 1:
        parts = (f"{reader.name} {_short(reader.slowdown)} ×" for reader in readers)
        yield (
            f"one layout for {len(readers)} readers takes {_short(case.chosen.slowdown)} × the time of a store "
            f"for each ({', '.join(parts)})"
        )


def _block(case: Case) -> Iterator[str]:
    """What block-shuffled order gains or would gain, and what mixing it costs."""
    access, chosen = case.access, case.chosen
    if access.order == "grid" or not access.free_dimensions:
        return
    if access.order == "random":
        block = case.price(replace(access, order="block", stride=(1,) * len(access.shape)), chosen.chunk)
        gain = _ratio(case.price(access, chosen.chunk), block)
        if block.window is not None and gain >= 2:
            yield (
                f"block-shuffled order would read this layout {_short(gain)} × as fast ({_reuse(block, access)}), with "
                f"{format_bytes(block.window.window_bytes)} of windows on each rank"
            )
        return
    if chosen.window is None:
        return
    gain = _ratio(case.price(replace(access, order="random"), chosen.chunk), chosen)
    yield f"block-shuffled order is {_short(gain)} × as fast as random order on this layout: {_reuse(chosen, access)}"
    mixing = chosen.window.mixing(access.batch_size)
    if mixing < _WELL_MIXED and chosen.window.full:
        yield (
            f"batches draw on few places: at worst one is worth {mixing:.0%} of its samples; a larger window_blocks or "
            "a smaller batch mixes better"
        )
    more = case.price(replace(access, block_reuse=_MORE_REUSE * access.block_reuse), chosen.chunk)
    gain = _ratio(chosen, more)
    if more.window is not None and gain >= _WORTH_REUSE:
        seen, now = (
            seen_fraction(access.shape, access.patch, window.block, window.samples_per_block, access.epoch_samples)
            for window in (more.window, chosen.window)
        )
        yield (
            f"with block_reuse {_MORE_REUSE * access.block_reuse:g} it would be {_short(gain)} × as fast again, mixing "
            f"{more.window.mixing(access.batch_size):.0%}; an epoch would then see {seen:.0%} of the "
            f"array instead of {now:.0%}"
        )


def _reuse(cost: LayoutCost, access: Access) -> str:
    assert cost.window is not None
    window = cost.window
    return (
        f"{plural(cost.requests_per_batch / access.batch_size, 'request')} a sample, windows of "
        f"{plural(window.blocks, 'block')} of {'×'.join(map(str, window.block))} with "
        f"{plural(window.samples_per_block, 'sample')} each, mixing {window.mixing(access.batch_size):.0%}"
    )


def _idle(case: Case) -> Iterator[str]:
    """When a batch is too small to keep every connection busy."""
    if case.chosen.bound == "memory" or case.access.order == "block":
        return
    open_at_once = case.network.in_flight(case.chosen.requests_made_per_batch)
    if case.access.free_dimensions and open_at_once < case.network.requests_in_flight / _NOTABLE:
        yield (
            f"a batch has too few requests for {case.network.requests_in_flight} in flight: about "
            f"{format_count(open_at_once)} are open; a larger batch, or more batches ahead, would use the rest"
        )


def _sharing(case: Case) -> Iterator[str]:
    if case.host.cache_bytes or case.access.order == "block":
        return
    alone, together = case.chosen.requests_per_sample * case.access.batch_size, case.chosen.requests_per_batch
    if alone > together * _NOTABLE:
        yield f"samples of a batch share chunks: {plural(together, 'chunk')} instead of {format_count(alone)}"


def _cache(case: Case) -> Iterator[str]:
    chosen = case.chosen
    if not case.host.cache_bytes or case.access.order == "block":
        return
    without = price(case.access, case.network, chosen.chunk, replace(case.host, cache_bytes=0))
    saved = 1 - chosen.requests_per_batch / without.requests_per_batch
    low, high = chosen.least_requests_per_batch, chosen.most_requests_per_batch
    yield (
        f"a cache of {format_bytes(case.host.cache_bytes)} saves {saved:.0%} of the requests: "
        f"{plural(chosen.requests_per_batch, 'request')} a batch (surely from {format_count(low)} to "
        f"{format_count(high)}) instead of {format_count(without.requests_per_batch)}"
    )


def _together(case: Case) -> Iterator[str]:
    """Variables apart or together: what the other way would give, each with its best size of chunk."""
    access = case.access
    if access.variables == 1:
        return
    other = replace(access, together=not access.together)
    chunks = {cost.chunk for cost in case.choice.candidates[:6]} | {case.chosen.chunk, access.patch}
    best = min((case.price(other, chunk) for chunk in chunks), key=lambda cost: cost.seconds_per_batch)
    gain = _ratio(case.price(access, case.chosen.chunk), best)
    if gain >= _NOTABLE:
        way, chunk = "together in one array" if other.together else "apart", "×".join(map(str, best.chunk))
        more = f" ({plural(best.requests_per_sample, 'request')} a sample); readers of one variable would pay for all"
        yield (
            f"with the variables {way}, chunks of {chunk} would be read {_short(gain)} × as fast{more * other.together}"
        )


def _padding(case: Case) -> Iterator[str]:
    for name, extent, side in zip(case.dims, case.access.shape, case.chosen.chunk, strict=True):
        if side > extent:
            yield f"the chunk reaches past the array along {name} ({side} > {extent}): the rest is padding"


def _shards(case: Case) -> Iterator[str]:
    chosen = case.chosen
    chunks = case.access.objects(chosen.chunk)
    if chosen.shard is None:
        yield f"no shards: each chunk is an object, {plural(chunks, 'object')} in all"
        return
    inside = math.prod(chosen.shard) // math.prod(chosen.chunk)
    size = math.prod(chosen.shard) * case.access.element_bytes
    share = chosen.index_requests_per_batch / (chosen.requests_per_batch + chosen.index_requests_per_batch)
    indexes = f"; {share:.0%} of the requests fetch their indexes" if share > 0.05 else ""
    yield (
        f"shards of {named(case.dims, chosen.shard)} hold {plural(inside, 'chunk')}, "
        f"{format_bytes(size)} (target {format_bytes(case.chooser.target_shard_bytes)}): "
        f"{plural(chosen.object_count, 'object')} instead of {format_count(chunks)}{indexes}"
    )


def _epoch(case: Case) -> Iterator[str]:
    chosen, access = case.chosen, case.access
    ranks = f" on {access.ranks} ranks" if access.ranks > 1 else ""
    price = "" if chosen.price_per_epoch is None else f", for {format_price(chosen.price_per_epoch)}"
    yield (
        f"an epoch of {plural(access.epoch_samples, 'sample')}{ranks}: "
        f"{plural(chosen.requests_per_epoch, 'request')} and {format_bytes(chosen.stored_bytes_per_epoch)} in "
        f"{format_seconds(chosen.seconds_per_epoch)}{price}; the store holds {_held(case)}"
    )


def _held(case: Case) -> str:
    """What all objects hold; the padding of the last chunks apart, which takes no room once it is compressed."""
    access, padded = case.access, case.chosen.stored_bytes
    held = math.prod(access.shape) * access.element_bytes * access.arrays / access.compression_ratio
    most = f", at most {format_bytes(padded)} with the padding of its last chunks" if padded > _NOTABLE * held else ""
    return format_bytes(held) + most


def _load(case: Case) -> Iterator[str]:
    rate = case.chosen.bytes_per_batch / case.chosen.seconds_per_batch
    unknown = ["decoding"] * math.isinf(case.host.decode_bytes_per_second)
    unknown += ["the network's total bandwidth"] * math.isinf(case.network.total_bandwidth_bytes_per_second)
    if rate > _EASY_BYTES_PER_SECOND and unknown:
        yield (
            f"not counted: {' and '.join(unknown)}; the prediction needs {format_bytes(rate)}/s of it, and with less "
            "smaller chunks win"
        )


def _ratio(slower: LayoutCost, faster: LayoutCost) -> float:
    return slower.seconds_per_batch / faster.seconds_per_batch


def _short(value: float) -> str:
    """Two digits, written out: `130`, `1.4`."""
    return format_count(float(f"{value:.2g}"))


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
    network: Network,
    target_shard_bytes: int,
    chunk: Literal["auto"] | Mapping[str, int],
    shard: Literal["auto", "none"] | Mapping[str, int],
    host: Host | None = None,
    prices: Prices | None = None,
    pattern: Mapping[str, Any] | None = None,
    divisibility: Divisibility = "any",
    multiple_of: Mapping[str, int] | None = None,
    largest_object_bytes: int = LARGEST_OBJECT_BYTES,
    readers: Mapping[str, Mapping[str, Any]] | None = None,
    play: Play | None = None,
) -> ChunkPlan:
    """Chunks and shards for arrays of `shape` from which batches of patches are read, priced and explained.

    Args:
        dims: names of the dimensions, such as `("time", "lat", "lon")`; `shape` follows them.
        itemsize: bytes of one stored element.
        patch: size of a sample along each dimension; 1 where left out.
        variables: arrays of this shape that every sample reads.
        order: random offsets anywhere; a grid of offsets `stride` apart (the patch's size where left out); or blocks of
            offsets in random order (`kit.chunks.access`), every element or `stride` apart.
        network: what lies between the store and the readers.
        chunk: "auto", or sizes to price as given.
        shard: "auto" fills `target_shard_bytes`, "none" makes each chunk an object, or sizes as given.
        host: decoding, memory and cache of a rank; without limits when left out.
        prices: what the store charges.
        pattern: more fields of `kit.chunks.access.Access`, such as ranks, epochs, together and compression_ratio.
        divisibility: "divides": the chunk divides the array; "power-of-two": its sides are powers of two.
        multiple_of: along each dimension, a number that the chunk's side is a multiple of.
        largest_object_bytes: no chunk or shard is larger, uncompressed.
        readers: other patterns that the layout must serve too, with weights, as `{name: {patch: {...}, weight: 1}}`.
        play: what says how many requests are made of a layout; without it, each chunk is taken to be one.

    Raises:
        PlanError: for a patch larger than the array, unknown dimensions, sizes below 1, a shard that is not a multiple
            of the chunk, or rules that no chunk can keep.
    """
    names, extents = named_shape(dims, shape)
    ones = [1] * len(names)
    sizes = ordered("patch", patch, names, ones)
    check_patch("patch", names, extents, sizes)
    access = Access(
        shape=extents, itemsize=itemsize, patch=sizes, order=order, batch_size=batch_size, variables=variables,
        stride=ordered("stride", stride, names, ones if order == "block" else sizes), **(pattern or {}),
    )  # fmt: skip
    rules = Rules(
        dims=names, shape=extents, element_bytes=access.element_bytes, divisibility=divisibility,
        shard=None if isinstance(shard, str) else ordered("shard", shard, names, [0] * len(names)),
        multiple_of=ordered("multiple_of", multiple_of or {}, names, ones), largest_object_bytes=largest_object_bytes,
    )  # fmt: skip
    own = WeightedPattern(name=OWN, access=access, weight=1.0)
    others = (reader_of(name, entry, access, names) for name, entry in (readers or {}).items())
    chooser = Chooser(
        network=network, host=host or Host(), prices=prices or Prices(), rules=rules, sharded=shard != "none",
        target_shard_bytes=min(target_shard_bytes, largest_object_bytes), readers=(own, *others), play=play,
    )  # fmt: skip
    choice = chooser.choose(None if isinstance(chunk, str) else ordered("chunk", chunk, names, sizes))
    case = Case(dims=names, access=access, chooser=chooser, choice=choice, automatic=isinstance(chunk, str))
    chosen = choice.chosen
    return ChunkPlan(
        dims=names, shape=extents, itemsize=itemsize, variables=variables, together=access.together, patch=sizes,
        chunk=chosen.chunk, shard=chosen.shard, order=order, batch_size=batch_size, ranks=access.ranks,
        requests_per_sample=chosen.requests_per_sample, bytes_per_sample=chosen.bytes_per_sample,
        requests_per_batch=chosen.requests_per_batch, seconds_per_batch=chosen.seconds_per_batch,
        samples_per_second=chosen.samples_per_second, amplification=chosen.amplification, bound=chosen.bound,
        object_count=chosen.object_count, readers=choice.readers, reasons=explain(case),
        candidates=choice.candidates, finalists=choice.finalists,
    )  # fmt: skip
