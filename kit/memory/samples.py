"""largest_samples: the longest samples of a data set, found within a time budget.

A few samples from all over it show whether they differ in size. Where they do, as many as the budget allows are looked
at: a prediction that holds for average data only is none. Sizes are the shapes of tensors and arrays, and the lengths
of texts and lists of numbers, because a loader may turn those into tensors. Units: seconds.
"""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from torch.utils.data import DataLoader, IterableDataset

from kit.errors import ConfigError, Problem

LOOK_SECONDS = 0.5
"""For the first samples: enough to see whether they differ."""
SCAN_SECONDS = 1.5
"""For the longest sample, when they do."""
FIRST_SAMPLES = 32
_MOST_CANDIDATES = 4
_ENDLESS = 1 << 20

Sizes = tuple[tuple[int, ...], ...]
"""The shape of each part of a sample."""


@dataclass(frozen=True)
class Samples:
    """The samples to predict with: the first is the longest, others are longer in some part only."""

    candidates: list[Any]
    notes: tuple[str, ...] = ()


def largest_samples(loader: DataLoader[Any]) -> Samples:
    """The samples to predict with, out of a loader that collates samples.

    Raises:
        ConfigError: when there is none.
    """
    dataset: Any = loader.dataset
    if isinstance(dataset, IterableDataset):
        return _largest(iter(dataset), None)
    return _largest(_spread_over(dataset, loader, len(dataset)), len(dataset))


def _spread_over(dataset: Any, loader: DataLoader[Any], total: int) -> Iterator[Any]:
    """Samples from all over the data set, each once, so that the first few are like the rest."""
    if not total:
        return
    try:
        yield dataset[0]
    except (KeyError, IndexError, TypeError):  # indexed by something else; its sampler knows by what
        yield from (dataset[index] for index in itertools.islice(iter(loader.sampler), total))
        return
    step = _coprime(total)
    yield from (dataset[index * step % total] for index in range(1, total))


def _coprime(total: int) -> int:
    """A stride near the golden section of `total` that meets every index once."""
    step = max(1, round(total * 0.618))
    while math.gcd(step, total) != 1:
        step += 1
    return step


def within(values: Iterable[Any], count: int, seconds: float) -> Iterator[Any]:
    """At most `count` values and about `seconds`; at least one."""
    deadline = time.monotonic() + seconds
    for value in itertools.islice(iter(values), count):
        yield value
        if time.monotonic() > deadline:
            return


def _largest(samples: Iterator[Any], total: int | None) -> Samples:
    sizes: dict[Sizes, Any] = {}
    looked = 0
    for sample in within(samples, FIRST_SAMPLES, LOOK_SECONDS):
        sizes.setdefault(_sizes(sample), sample)
        looked += 1
    if not sizes:
        raise ConfigError([Problem("data", "the loader yields no samples; there must be one to look at")])
    if len(sizes) == 1:
        return Samples([*sizes.values()])
    for sample in within(samples, total or _ENDLESS, SCAN_SECONDS):
        looked += 1
        size = _sizes(sample)
        if size not in sizes:
            sizes[size] = sample
            sizes = _pruned(sizes)
    of = f" of {total}" if total is not None else ""
    note = f"samples differ in size: every one is as long as the longest of {looked}{of}"
    return Samples(_candidates(sizes), (note,))


def _pruned(sizes: dict[Sizes, Any]) -> dict[Sizes, Any]:
    """Keep the largest only, so that a scan holds a few samples."""
    if len(sizes) <= 4 * _MOST_CANDIDATES:
        return sizes
    kept = _candidates(sizes)
    return {size: sample for size, sample in sizes.items() if any(sample is other for other in kept)}


def _candidates(sizes: Mapping[Sizes, Any]) -> list[Any]:
    """The largest sample first, then those that are the largest in one of their parts."""

    def elements(size: Sizes) -> int:
        return sum(math.prod(part) for part in size)

    chosen = [max(sizes, key=elements)]
    parts = len(chosen[0])
    alike = [size for size in sizes if len(size) == parts]
    for part in range(parts):
        for axis in range(len(chosen[0][part])):
            able = [size for size in alike if len(size[part]) > axis]
            longest = max(able, key=lambda size: size[part][axis])
            if all(longest[part][axis] > other[part][axis] for other in chosen if len(other[part]) > axis):
                chosen.append(longest)
    return [sizes[size] for size in chosen[:_MOST_CANDIDATES]]


def _sizes(sample: Any) -> Sizes:
    """The shape of every part of a sample: tensors, arrays, lists of numbers, texts."""
    if isinstance(sample, Mapping):
        return tuple(itertools.chain.from_iterable(_sizes(value) for value in sample.values()))
    if isinstance(sample, str | bytes):
        return ((len(sample),),)
    if isinstance(sample, list | tuple):
        if all(isinstance(value, int | float) for value in sample):
            return ((len(sample),),)
        return tuple(itertools.chain.from_iterable(_sizes(value) for value in sample))
    shape = getattr(sample, "shape", None)
    if isinstance(shape, tuple):
        return (tuple(int(size) for size in shape),)
    fields = getattr(sample, "__dict__", None)
    return () if not fields or isinstance(sample, type) else _sizes(fields)
