"""Sampling: which samples an epoch has, and which batch of which rank each belongs to. Pure numpy, no store.

A sample is the offset of a patch, in elements, one number per dimension. Nothing is kept per sample: the offsets of a
batch are computed when it is asked for, so an epoch of 1e8 samples costs no memory.

The invariant: a step's global batch is a run of consecutive positions of the epoch, cut into one run per rank. So every
sample comes exactly once per epoch over all ranks, every rank takes the same number of steps, no rank ever gets an
empty batch, and 1 rank × 2B sees the same global batches as 2 ranks × B. A remainder smaller than the world size cannot
be given to every rank; it joins the last batch, which then holds one sample more on some ranks.

Random order: position i of epoch e has an offset that is a pure function of (seed, e, i), drawn from a counter-based
generator (Philox 4x64, Salmon et al. 2011), uniform over all valid offsets. The remainder of a 64-bit draw by n is
biased by less than n / 2^64. Grid order: all stride-th offsets once each; shuffled by a true permutation up to
`LARGEST_PERMUTATION` samples (8 bytes each, kept for one epoch), beyond that by a keyed bijection: a Feistel network
with cycle walking (Black and Rogaway 2002), which is not uniform over all permutations but needs no memory.

Block order (`kit.data.sampling`): samples of a rank come from a window of places at a time, so that a chunk is read
once for many of them. Ranks then own runs of the epoch, so 2 ranks × B see the samples of 1 rank × 2B in other batches.

Windows: block-shuffled order, to the sample. What it is and what it costs is defined in `kit.chunks.access`.

A chunk that was read serves many samples while it is held: an epoch is a row of visits to blocks of the array, a window
mixes some visits, and only windows are held. Offsets, strides and block sides are in elements, one number per
dimension; a *place* counts samples in the row that one rank is served, a *sample* counts them over all ranks.

The invariant: a window is a pure function of (seed, epoch, rank, window), and every sample of the epoch is in exactly
one window of one rank. Nothing is kept per sample but the last few windows.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property, lru_cache
from math import prod
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from numpy.typing import NDArray

from kit.chunks.access import VALUE_BYTES, Blocks, fit_window
from kit.chunks.geometry import Axis, axes_of, most_chunks
from kit.errors import ConfigError, Problem
from kit.units import format_bytes

if TYPE_CHECKING:
    from kit.config import Config, Loader
    from kit.data.dataset import ArrayInfo, Dataset

LARGEST_PERMUTATION = 10_000_000
_PATHS = {
    "shape": "data.url", "patch": "data.patch", "order": "data.order", "stride": "data.stride",
    "samples_per_epoch": "data.samples_per_epoch", "seed": "training.seed", "shuffle": "loader.shuffle",
    "drop_last": "loader.drop_last", "block": "loader.window_bytes", "samples_per_block": "loader.block_reuse",
    "blocks_per_window": "loader.window_blocks",
}  # fmt: skip
"""The fields of a config that decide the samples and their order."""
_FEISTEL_ROUNDS = 8
_WORDS_PER_BLOCK = 4


@dataclass(frozen=True, kw_only=True)
class SamplePlan:
    """The samples of every epoch and their batches; equal on every rank."""

    shape: tuple[int, ...]
    patch: tuple[int, ...]
    order: Literal["random", "grid", "block"]
    stride: tuple[int, ...]
    """Distance between positions; unused in random order."""
    samples_per_epoch: int
    """Samples of an epoch in random and block order; grid order counts its own (see `samples`)."""
    batch_size: int
    """Samples per batch on each rank."""
    world_size: int
    seed: int
    shuffle: bool
    """Whether each epoch has its own order (grid) or its own offsets (random); else all are like epoch 0."""
    drop_last: bool
    block: tuple[int, ...] = ()
    """Block order: sides of a block."""
    samples_per_block: int = 1
    blocks_per_window: int = 1

    def batch_bytes(self, variables: int) -> int:
        """Of a batch as it is handed over: values and validity."""
        return self.batch_size * prod(self.patch) * variables * VALUE_BYTES

    def __post_init__(self) -> None:
        problems = list(_problems(self))
        if problems:
            raise ConfigError(problems)

    @cached_property
    def windows(self) -> Windows | None:
        """What a rank holds while it serves a run of samples; None but in block order."""
        if self.order != "block":
            return None
        return Windows(
            shape=self.shape, patch=self.patch, stride=self.stride, block=self.block, samples=self.samples,
            samples_per_block=self.samples_per_block, blocks=self.blocks_per_window, world_size=self.world_size,
            seed=self.seed,
        )  # fmt: skip

    @property
    def grid(self) -> tuple[int, ...]:
        """Number of grid offsets along each dimension."""
        sides = zip(self.shape, self.patch, self.stride, strict=True)
        return tuple((size - patch) // stride + 1 for size, patch, stride in sides)

    @property
    def samples(self) -> int:
        """Samples that exist in an epoch; with drop_last, those past the last full global batch are not delivered."""
        return prod(self.grid) if self.order == "grid" else self.samples_per_epoch

    @property
    def global_batch_size(self) -> int:
        return self.batch_size * self.world_size

    @cached_property
    def batches_per_epoch(self) -> int:
        """Steps of an epoch, the same on every rank."""
        return _steps(self.samples, self.global_batch_size, self.world_size, self.drop_last)

    def positions(self, step: int, rank: int) -> range:
        """The run of positions in the epoch that `rank` reads at `step`."""
        if not 0 <= step < self.batches_per_epoch or not 0 <= rank < self.world_size:
            raise IndexError(
                f"step {step} of {self.batches_per_epoch}, rank {rank} of {self.world_size}: no such batch"
            )
        last_step = step == self.batches_per_epoch - 1
        if self.windows is not None:
            run = self.windows.run(rank)
            first = run.start + step * self.batch_size
            return range(first, run.stop if last_step and not self.drop_last else first + self.batch_size)
        first = step * self.global_batch_size
        end = self.samples if last_step and not self.drop_last else first + self.global_batch_size
        cuts = [first + (end - first) * part // self.world_size for part in (rank, rank + 1)]
        return range(*cuts)

    def batch(self, epoch: int, step: int, rank: int) -> Offsets:
        """Offsets `(sample, dimension)` of the batch that `rank` reads at `step` of `epoch`, in elements.

        Raises:
            IndexError: for a step or rank that the plan does not have.
        """
        shown, run = epoch if self.shuffle else 0, self.positions(step, rank)
        if self.windows is not None:
            return self.windows.offsets(shown, rank, self._places(step, rank))
        return self._random(shown, run) if self.order == "random" else self._grid(shown, run)

    def window(self, step: int, rank: int) -> int:
        """The last window that the batch draws from; 0 where there are none."""
        return 0 if self.windows is None else self.windows.window_of(rank, self._places(step, rank).stop - 1)

    def pairs_of_one_visit(self, epoch: int, step: int, rank: int) -> tuple[int, int]:
        """(pairs of the batch drawn from one visit to a block, all its pairs); see `kit.data.sampling.mixing`."""
        places = self._places(step, rank)
        if self.windows is None:
            return 0, len(places) * (len(places) - 1) // 2
        return pairs_of_one_visit(self.windows.visits(epoch if self.shuffle else 0, rank, places))

    def identity(self) -> dict[str, Any]:
        """What decides the samples and their order, in plain values, for `step_after`."""
        return {name: [*value] if isinstance(value, tuple) else value for name, value in asdict(self).items()}

    def step_after(self, other: Mapping[str, Any], step: int) -> int:
        """The step that follows the first `step` global batches of another plan, of which `other` is the identity.

        Raises:
            ConfigError: when the other plan has other samples or another order, or its batches end inside one of ours.
        """
        mine = self.identity()
        if other == mine:
            return step
        problems = [*_changes(mine, other)]
        if problems:
            raise ConfigError(problems)
        ranks = int(other["world_size"])
        theirs = int(other["batch_size"]) * ranks
        if self.windows is None and step >= _steps(self.samples, theirs, ranks, self.drop_last):
            return self.batches_per_epoch
        seen = step * theirs
        following, inside = divmod(seen, self.global_batch_size)
        # A remainder joins the last batch where it is smaller than the ranks: then that batch has begun.
        begun = following >= self.batches_per_epoch and not self.drop_last
        if self.windows is not None or inside or begun:
            raise ConfigError([_other_batches(self, other, seen)])
        return min(following, self.batches_per_epoch)

    def _places(self, step: int, rank: int) -> range:
        """The batch in the row of samples that its rank is served."""
        run = self.positions(step, rank)
        first = step * self.batch_size
        return range(first, first + len(run))

    def _random(self, epoch: int, run: range) -> Offsets:
        choices = np.array(self.shape, np.uint64) - np.array(self.patch, np.uint64) + np.uint64(1)
        blocks = -(-len(choices) // _WORDS_PER_BLOCK)
        generator = np.random.Philox(key=_key(self.seed, epoch), counter=run.start * blocks)
        words = generator.random_raw(len(run) * blocks * _WORDS_PER_BLOCK).reshape(len(run), -1)
        offsets: Offsets = (words[:, : len(choices)] % choices).astype(np.int64)
        return offsets

    def _grid(self, epoch: int, run: range) -> Offsets:
        index = np.arange(run.start, run.stop, dtype=np.int64)
        if self.shuffle:
            index = _shuffled(self.samples, self.seed, epoch, index)
        cells = np.stack(np.unravel_index(index, self.grid), axis=1)
        return cells.astype(np.int64) * np.array(self.stride, np.int64)


def sample_plan(config: Config, dataset: Dataset, world_size: int) -> SamplePlan:
    """The samples that `config` asks of `dataset`, for `world_size` ranks. Opens nothing.

    Raises:
        ConfigError: for an unknown variable or dimension, a patch larger than its array, a global batch larger than an
            epoch, or a window too small for two blocks, each under the dotted path of its field.
    """
    arrays = dataset.select(config.data.variables)
    widest = max(arrays, key=lambda info: prod(info.chunk))
    return plan_samples(config, widest, world_size, sum(_bytes_per_chunk(info, widest.chunk) for info in arrays))


def plan_samples(config: Config, array: ArrayInfo, world_size: int, chunk_bytes: int | None = None) -> SamplePlan:
    """As `sample_plan`, for an array whose shape and dimension names are known.

    Args:
        chunk_bytes: Decoded bytes of one chunk of every variable; this array's own without it. For block order.

    Raises:
        ConfigError: see `sample_plan`.
    """
    data = config.data
    unknown = [
        *_unknown("data.patch", data.patch, array.dims),
        *_unknown("data.stride", data.stride, array.dims),
    ]
    if unknown:
        raise ConfigError(unknown)
    patch = tuple(data.patch.get(name, 1) for name in array.dims)
    too_large = list(_too_large(array, patch))
    if too_large:
        raise ConfigError(too_large)
    spacing = (1,) * len(patch) if data.order == "block" else patch
    plan = SamplePlan(
        shape=tuple(array.shape),
        patch=patch,
        order=data.order,
        stride=tuple(data.stride.get(name, side) for name, side in zip(array.dims, spacing, strict=True)),
        samples_per_epoch=data.samples_per_epoch,
        batch_size=config.loader.batch_size,
        world_size=world_size,
        seed=config.training.seed,
        shuffle=config.loader.shuffle,
        drop_last=config.loader.drop_last,
        block=(1,) * len(patch) if data.order == "block" else (),
    )
    if data.order != "block":
        return plan
    return _in_blocks(plan, config.loader, array.chunk, chunk_bytes or prod(array.chunk) * array.dtype.itemsize)


def _in_blocks(plan: SamplePlan, loader: Loader, chunk: Sequence[int], chunk_bytes: int) -> SamplePlan:
    """The plan with the blocks that the loader's settings allow.

    Raises:
        ConfigError: when a window of one block does not fit half of `loader.window_bytes`.
    """
    axes = axes_of(plan.shape, chunk, plan.patch, plan.stride)
    window = fit_window(
        axes, chunk_bytes, window_bytes=loader.window_bytes, window_blocks=loader.window_blocks,
        reuse=loader.block_reuse, samples=-(-plan.samples // plan.world_size),
    )  # fmt: skip
    if window is None:
        raise ConfigError([_window_too_small(loader.window_bytes, axes, chunk_bytes)])
    return replace(
        plan, block=window.block, samples_per_block=window.samples_per_block, blocks_per_window=window.blocks
    )


def _window_too_small(window_bytes: int, axes: tuple[Axis, ...], chunk_bytes: int) -> Problem:
    least = 2 * Blocks(axes, (1,) * len(axes)).footprint * chunk_bytes
    return Problem(
        "loader.window_bytes",
        f"{format_bytes(window_bytes)} cannot hold two blocks of one chunk with what their patches reach; use at least "
        f"{format_bytes(least)}, a smaller patch, or order random",
    )


def _bytes_per_chunk(info: ArrayInfo, cell: Sequence[int]) -> int:
    """Decoded bytes of the chunks of one variable that a cell of this size touches."""
    sides = zip(cell, info.chunk, strict=True)
    touched = prod(whole // part if whole % part == 0 else most_chunks(whole, part) for whole, part in sides)
    return touched * prod(info.chunk) * info.dtype.itemsize


def _unknown(path: str, sizes: Mapping[str, int], dims: Sequence[str]) -> Iterator[Problem]:
    for name in sizes:
        if name not in dims:
            close = difflib.get_close_matches(name, dims, n=1, cutoff=0.5)
            hint = f"; did you mean {close[0]!r}?" if close else ""
            yield Problem(path, f"unknown dimension {name!r}{hint} The array has {', '.join(dims)}.")


def _too_large(array: ArrayInfo, patch: tuple[int, ...]) -> Iterator[Problem]:
    for name, side, size in zip(array.dims, patch, array.shape, strict=True):
        if size == 0:
            yield Problem("data.variables", f"{array.name} is empty: it has no elements along {name!r}")
        elif side > size:
            yield Problem(
                "data.patch",
                f"{side} elements along {name!r}, but {array.name} has {size}; use at most {size}",
            )


def _problems(plan: SamplePlan) -> Iterator[Problem]:
    """Why a plan cannot hold; the fields are named as in a config."""
    if plan.world_size < 1:
        yield Problem("hardware.devices", f"{plan.world_size} ranks cannot train; use at least 1")
        return
    if any(side > size or side < 1 for side, size in zip(plan.patch, plan.shape, strict=True)):
        yield Problem("data.patch", f"a patch of {plan.patch} does not fit an array of {plan.shape}")
        return
    if any(step < 1 for step in plan.stride):
        yield Problem("data.stride", f"{plan.stride} must be at least 1 along every dimension")
        return
    if plan.order == "block" and (len(plan.block) != len(plan.shape) or min(plan.block, default=1) < 1):
        yield Problem("data.order", f"block {plan.block} must have a side of at least 1 along every dimension")
        return
    if plan.global_batch_size > plan.samples:
        yield _batch_too_large(plan)


def _steps(samples: int, global_batch_size: int, world_size: int, drop_last: bool) -> int:
    full, rest = divmod(samples, global_batch_size)
    return full + (rest >= world_size and not drop_last)


def _changes(mine: Mapping[str, Any], other: Mapping[str, Any]) -> Iterator[Problem]:
    """Why a plan cannot go on where another one stopped."""
    for name, path in _PATHS.items():
        if mine[name] != other.get(name):
            yield Problem(
                path,
                f"{name} is {mine[name]}, but {other.get(name)} in the state to resume from; resume with the same data "
                "and order, or begin the epoch anew",
            )


def _other_batches(plan: SamplePlan, other: Mapping[str, Any], seen: int) -> Problem:
    sizes = ((each["batch_size"], each["world_size"]) for each in (plan.identity(), other))
    ours, theirs = (f"{batch_size} × {ranks} ranks" for batch_size, ranks in sizes)
    why = f"{seen} samples end inside one of them"
    if plan.windows is not None:
        why = "in block order every rank has a part of its own"
    return Problem(
        "loader.batch_size",
        f"batches are {ours}, but {theirs} in the state to resume from, and {why}; resume with {theirs}, or begin the "
        "epoch anew",
    )


def _batch_too_large(plan: SamplePlan) -> Problem:
    most = plan.samples // plan.world_size
    more = "raise data.samples_per_epoch" if plan.order != "grid" else "take a smaller data.stride"
    less = f"use at most {most}" if most else f"use at most {plan.samples} ranks"
    return Problem(
        "loader.batch_size",
        f"a batch that does not fit the data: {plan.batch_size} samples × {plan.world_size} ranks = "
        f"{plan.global_batch_size}, but an epoch has {plan.samples} samples; {less}, or {more}",
    )


# -- pseudo-random numbers


def _shuffled(samples: int, seed: int, epoch: int, index: NDArray[np.int64]) -> NDArray[np.int64]:
    if samples <= LARGEST_PERMUTATION:
        return _permutation(samples, seed, epoch)[index]
    return bijection(samples, _key(seed, epoch), index)


@lru_cache(maxsize=1)
def _permutation(samples: int, seed: int, epoch: int) -> NDArray[np.int64]:
    return np.random.Generator(np.random.Philox(key=_key(seed, epoch))).permutation(samples)


def bijection(size: int, key: int, index: NDArray[np.int64]) -> NDArray[np.int64]:
    """The images of `index` under a pseudo-random bijection of `range(size)` that `key` names.

    A balanced Feistel network permutes the smallest even-bit power of two that holds `size` (less than 4 × size);
    images outside are permuted again until they fall inside, which keeps the map one-to-one.
    """
    half = max(1, (max(size - 1, 1).bit_length() + 1) // 2)
    keys = np.random.Philox(key=key).random_raw(_FEISTEL_ROUNDS)
    image = _feistel(index.astype(np.uint64), half, keys)
    outside = np.flatnonzero(image >= size)
    while outside.size:
        image[outside] = _feistel(image[outside], half, keys)
        outside = outside[image[outside] >= size]
    return image.astype(np.int64)


def _feistel(value: NDArray[np.uint64], half: int, keys: NDArray[np.uint64]) -> NDArray[np.uint64]:
    bits, mask = np.uint64(half), np.uint64((1 << half) - 1)
    left, right = value >> bits, value & mask
    for key in keys:
        left, right = right, left ^ (_mix(right + key) & mask)
    return left << bits | right


def _mix(word: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """The finaliser of SplitMix64 (Steele et al. 2014): every input bit reaches every output bit."""
    word = (word ^ word >> np.uint64(30)) * np.uint64(0xBF58476D1CE4E5B9)
    word = (word ^ word >> np.uint64(27)) * np.uint64(0x94D049BB133111EB)
    return word ^ word >> np.uint64(31)


Offsets = NDArray[np.int64]
"""Offsets of samples `(sample, dimension)`, in elements."""
Whole = NDArray[np.int64]

_ANCHORS, _SAMPLES, _ORDER = 1, 2, 3


@dataclass(frozen=True, kw_only=True)
class Windows:
    """The windows of every epoch and rank."""

    shape: tuple[int, ...]
    patch: tuple[int, ...]
    stride: tuple[int, ...]
    """Distance between positions; 1 allows every offset."""
    block: tuple[int, ...]
    """Sides of a block."""
    samples_per_block: int
    """Samples of a visit."""
    blocks: int
    """Visits of a window."""
    samples: int
    """Of an epoch, all ranks together."""
    world_size: int
    seed: int

    @cached_property
    def positions(self) -> Whole:
        """Offsets that a patch may take along each dimension."""
        sides = zip(self.shape, self.patch, self.stride, strict=True)
        return np.array([(size - patch) // stride + 1 for size, patch, stride in sides], np.int64)

    def run(self, rank: int) -> range:
        """The samples of an epoch that a rank owns."""
        return range(*(self.samples * part // self.world_size for part in (rank, rank + 1)))

    def window_of(self, rank: int, place: int) -> int:
        """The window that serves a place of the rank's row."""
        first = self.run(rank).start
        return ((first + place) // self.samples_per_block - first // self.samples_per_block) // self.blocks

    def window(self, rank: int, window: int) -> range:
        """The samples that a window of a rank mixes."""
        run = self.run(rank)
        visit = run.start // self.samples_per_block + window * self.blocks
        ends = (visit * self.samples_per_block, (visit + self.blocks) * self.samples_per_block)
        return range(max(run.start, ends[0]), min(run.stop, ends[1]))

    def offsets(self, epoch: int, rank: int, places: range) -> Offsets:
        """Offsets of a run of places of the rank's row."""
        return np.concatenate([served[0][part] for served, part in self._parts(epoch, rank, places)])

    def visits(self, epoch: int, rank: int, places: range) -> Whole:
        """The visit that each of these places belongs to."""
        return np.concatenate([served[1][part] for served, part in self._parts(epoch, rank, places)])

    def _parts(self, epoch: int, rank: int, places: range) -> Iterator[tuple[tuple[Offsets, Whole], slice]]:
        """The windows that these places are served from, and the part of each."""
        first = self.run(rank).start
        for index in range(self.window_of(rank, places.start), self.window_of(rank, places.stop - 1) + 1):
            held = self.window(rank, index)
            start = max(places.start, held.start - first) - (held.start - first)
            stop = min(places.stop, held.stop - first) - (held.start - first)
            yield _serve(self, epoch, rank, index), slice(start, stop)

    def draw(self, epoch: int, samples: range) -> tuple[Offsets, Whole]:
        """Offsets and visits of a run of samples, in the order of their numbers."""
        each = self.samples_per_block
        visits = np.arange(samples.start, samples.stop) // each
        anchors = self._words(epoch, _ANCHORS, range(samples.start // each, (samples.stop - 1) // each + 1))
        anchors = anchors % self.positions.astype(np.uint64)
        stride, side = np.array(self.stride, np.int64), np.array(self.block, np.int64)
        blocks = anchors.astype(np.int64) * stride // side
        first = -(-blocks * side // stride)
        last = np.minimum(self.positions - 1, ((blocks + 1) * side - 1) // stride)
        which = visits - visits[0]
        inside = self._words(epoch, _SAMPLES, samples) % (last - first + 1).astype(np.uint64)[which]
        return (first[which] + inside.astype(np.int64)) * stride, visits

    def _words(self, epoch: int, purpose: int, numbers: range) -> NDArray[np.uint64]:
        """Pseudo-random words `(number, dimension)`, a pure function of (seed, epoch, purpose, number)."""
        blocks = -(-len(self.shape) // _WORDS_PER_BLOCK)
        generator = np.random.Philox(key=_key(self.seed, epoch, purpose), counter=numbers.start * blocks)
        words = generator.random_raw(len(numbers) * blocks * _WORDS_PER_BLOCK)
        return words.reshape(len(numbers), -1)[:, : len(self.shape)]


def pairs_of_one_visit(visits: Whole) -> tuple[int, int]:
    """(pairs of a batch that are of one visit, all its pairs)."""
    _, counts = np.unique(visits, return_counts=True)
    return int((counts * (counts - 1)).sum()) // 2, len(visits) * (len(visits) - 1) // 2


def mixing(same: int, pairs: int, batch_size: int) -> float:
    """Independent samples that a batch is worth at least, over its size, when `same` of `pairs` are of one visit.

    Kish's design effect: `1 / (1 + (batch_size - 1) × same / pairs)`; 1 in random order.
    """
    return 1 / (1 + (batch_size - 1) * same / pairs) if pairs else 1.0


@lru_cache(maxsize=4)
def _serve(windows: Windows, epoch: int, rank: int, window: int) -> tuple[Offsets, Whole]:
    """A window's samples, in the order they are served."""
    offsets, visits = windows.draw(epoch, windows.window(rank, window))
    order = np.random.Generator(np.random.Philox(key=_key(windows.seed, epoch, _ORDER, rank, window)))
    shuffled = order.permutation(len(offsets))
    return offsets[shuffled], visits[shuffled]


@lru_cache(maxsize=64)
def _key(*words: int) -> int:
    """A 128-bit Philox key; numpy guarantees the words of a SeedSequence."""
    low, high = np.random.SeedSequence(words).generate_state(2, np.uint64)
    return int(low) | int(high) << 64
