"""Samples: which of a loader's own stand for the rest, with as little read as that takes.

A few from all over the data set show whether they differ in size. Where they do, as many as a time budget allows are
looked at: the longest are what a batch is predicted with, and the others tell how large one is on average, and how
large one is that holds shorter samples too.
"""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from torch.utils.data import DataLoader, IterableDataset, RandomSampler, SequentialSampler

from kit.errors import ConfigError, Problem
from kit.memory.replay.replay import DIFFERING

LOOK_SECONDS = 0.5
"""For the first samples: enough to see whether they differ."""
_QUICK_SECONDS = 0.1
"""For more where the first are alike."""
SCAN_SECONDS = 1.5
"""For the longest sample, when they do."""
FIRST_SAMPLES = 32
_MOST_CANDIDATES = 4
ENDLESS = 1 << 20
"""As many as there are."""
_DRAWS, _MOST_DRAWN, _RARE = 1000, 1 << 22, 1e-5
"""Batches that are drawn to find one as large as they come, how many samples are drawn for them in all, and the chance
of a batch of the longest samples alone below which none is expected."""
AS_LONG = "every one is as long as "
SEVERAL_LENGTHS = "; its lengths are those of the largest of many batches"

Sizes = tuple[tuple[int, ...], ...]
"""The shape of each part of a sample."""


@dataclass(frozen=True)
class Samples:
    """The samples to predict with: the first is the longest, others are longer in some part only."""

    candidates: list[Any]
    notes: tuple[str, ...] = ()
    unlike: tuple[Any, ...] = ()
    """The largest and the smallest of the first ones, where these differ."""
    mean_fraction: float = 1.0
    """Of the largest: how large a sample is on average. A batch of samples in a row is of as many such."""
    padded_fraction: float = 1.0
    """The same of the longest sample in a batch, to which the others are padded."""
    fullest: tuple[Any, ...] = ()
    """Indices of the samples of a batch as large as they come, the largest first, where the sampler tells which are put
    together."""


def largest_samples(loader: DataLoader[Any], batch_size: int = 1) -> Samples:
    """The samples to predict with, out of a loader that collates so many samples.

    Raises:
        ConfigError: when there is none.
    """
    dataset: Any = loader.dataset
    total = None if isinstance(dataset, IterableDataset) else len(dataset)
    samples = spread_over(loader)
    sizes: dict[Sizes, Any] = {}
    looked: list[int] = []
    indices: list[Any] = []

    def look(index: Any, sample: Any) -> None:
        sizes.setdefault(size := _sizes(sample), sample)
        looked.append(_numel(size))
        indices.append(index)

    for index, sample in within(samples, FIRST_SAMPLES, LOOK_SECONDS):
        look(index, sample)
    if not sizes:
        raise ConfigError([Problem("data", "the loader yields no samples; there must be one to look at")])
    if len(sizes) == 1:  # a long one in a hundred may not be among them
        for index, sample in within(samples, total or ENDLESS, _QUICK_SECONDS):
            look(index, sample)
            if len(sizes) > 1:
                break
    if len(sizes) == 1:
        return Samples([*sizes.values()])
    smallest = min(sizes.items(), key=lambda item: _numel(item[0]))[1]
    for index, sample in within(samples, total or ENDLESS, SCAN_SECONDS):
        look(index, sample)
        if len(sizes) > 4 * _MOST_CANDIDATES:  # keep the largest only, so that a scan holds a few samples
            kept = dict(_candidates(sizes))
            sizes = {size: sample for size, sample in sizes.items() if size in kept}
    of = f" of {total}" if total is not None else ""
    note = f"{DIFFERING[0]}{AS_LONG}the longest of {len(looked)}{of}"
    candidates, most = [sample for _, sample in _candidates(sizes)], max(1, *looked)
    return Samples(
        candidates, (note,), (candidates[0], smallest), mean_fraction=sum(looked) / len(looked) / most,
        padded_fraction=_largest_of(looked, batch_size) / most,
        fullest=tuple(
            indices[place]
            for place in sorted(_fullest(looked, indices, loader, batch_size), key=looked.__getitem__, reverse=True)
        ),
    )  # fmt: skip


def _fullest(sizes: Sequence[int], indices: Sequence[Any], loader: DataLoader[Any], count: int) -> list[int]:
    """Places of the samples of one batch that is as large as they come: of many drawn at random, or of all where the
    loader goes through the data set in order. None where a sampler of another kind decides, and where a batch may be of
    samples of one size, for which there are kernels that hold more."""
    numbers = np.array(sizes)
    if isinstance(loader.dataset, IterableDataset):
        return []
    if type(loader.sampler) is RandomSampler:
        if float(np.mean(numbers == numbers.max())) ** count > _RARE:
            return []
        draws = max(1, min(_DRAWS, _MOST_DRAWN // count))
        drawn = np.random.default_rng(0).integers(len(numbers), size=(draws, count))
        return [int(place) for place in drawn[numbers[drawn].sum(1).argmax()]]
    if type(loader.sampler) is SequentialSampler and len(numbers) == len(loader.sampler) >= count:
        places = np.argsort(np.array(indices))
        rows = places[: len(places) // count * count].reshape(-1, count)
        if not (numbers[rows] == numbers[rows[:, :1]]).all(1).any():
            return [int(place) for place in rows[numbers[rows].sum(1).argmax()]]
    return []


def spread_over(loader: DataLoader[Any]) -> Iterator[tuple[Any, Any]]:
    """Samples from all over the data set with their indices, each once, so that the first few are like the rest; an
    iterable's as they come."""
    dataset: Any = loader.dataset
    if isinstance(dataset, IterableDataset):
        yield from enumerate(dataset)
        return
    if not (total := len(dataset)):
        return
    try:
        yield 0, dataset[0]
    except (KeyError, IndexError, TypeError):  # indexed by something else; its sampler knows by what
        yield from ((index, dataset[index]) for index in itertools.islice(iter(loader.sampler), total))
        return
    # A stride near the golden section of the data set that meets every index once.
    step = max(1, round(total * 0.618))
    while math.gcd(step, total) != 1:
        step += 1
    for number in range(1, total):
        yield (index := number * step % total), dataset[index]


def within(values: Iterable[Any], count: int, seconds: float) -> Iterator[Any]:
    """At most `count` values and about `seconds`; at least one."""
    deadline = time.monotonic() + seconds
    for value in itertools.islice(iter(values), count):
        yield value
        if time.monotonic() > deadline:
            return


def _largest_of(sizes: Sequence[int], count: int) -> float:
    """The mean largest of so many drawn from these: a batch is padded to its longest sample."""
    below = np.arange(len(sizes) + 1) / len(sizes)
    return float(np.sort(sizes) @ np.diff(below**count))


def _numel(sizes: Sizes) -> int:
    return sum(map(math.prod, sizes))


def _candidates(sizes: Mapping[Sizes, Any]) -> list[tuple[Sizes, Any]]:
    """The largest sample first, then those that are the largest in one of their parts."""
    chosen = [max(sizes, key=_numel)]
    alike = [size for size in sizes if len(size) == len(chosen[0])]
    for part in range(len(chosen[0])):
        for axis in range(len(chosen[0][part])):
            longest = max((size for size in alike if len(size[part]) > axis), key=lambda size: size[part][axis])
            if all(longest[part][axis] > other[part][axis] for other in chosen if len(other[part]) > axis):
                chosen.append(longest)
    return [(size, sizes[size]) for size in chosen[:_MOST_CANDIDATES]]


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
