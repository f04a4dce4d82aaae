"""Sampling: which samples an epoch has, and which batch of which rank each belongs to. Pure numpy, no store.

A sample is the offset of a patch, in elements, one number per dimension. Nothing is kept per sample: the offsets of a
batch are computed when it is needed, so an epoch of 1e8 samples costs no memory.

The invariant: a step's global batch is a run of consecutive positions of the epoch, cut into one run per rank. So every
sample comes exactly once per epoch over all ranks, every rank takes the same number of steps, no rank ever gets an
empty batch, and 1 rank × 2B sees the same global batches as 2 ranks × B. A remainder smaller than the world size cannot
be given to every rank; it joins the last batch, which then holds one sample more on some ranks.

Random order: position i of epoch e has an offset that is a pure function of (seed, e, i), drawn from a counter-based
generator (Philox 4x64, Salmon et al. 2011), uniform over all valid offsets. The remainder of a 64-bit draw by n is
biased by less than n / 2^64. Grid order: all stride-th offsets once each; shuffled by a true permutation up to
`LARGEST_PERMUTATION` samples (8 bytes each, kept for one epoch), beyond that by a keyed bijection: a Feistel network
with cycle walking (Black and Rogaway 2002), which is not uniform over all permutations but needs no memory.

Block order (defined, with its cost, in `kit.chunks.access`): an epoch is a row of visits to blocks of the array, and
`Windows` mixes some visits at a time, so that a chunk is read once for many samples while it is held. A window is a
pure function of (seed, epoch, rank, window), every sample of the epoch is in exactly one window of one rank, and
nothing is kept but the last few windows. Ranks then own runs of the epoch, so 2 ranks × B see the samples of
1 rank × 2B in other batches. A *place* counts samples in the row that one rank is served, a *sample* over all ranks.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from functools import cached_property, lru_cache
from math import prod
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from numpy.typing import NDArray

from kit.chunks.access import VALUE_BYTES, Blocks, fit_window
from kit.chunks.geometry import axes_of, most_chunks
from kit.errors import ConfigError, Problem, did_you_mean
from kit.units import format_bytes

if TYPE_CHECKING:
    from kit.config import Config
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
_ANCHORS, _SAMPLES, _ORDER = 1, 2, 3
Offsets = NDArray[np.int64]
"""Offsets of samples `(sample, dimension)`, in elements."""
Whole = NDArray[np.int64]


def steps_per_epoch(samples: int, batch_size: int, world_size: int, drop_last: bool) -> int:
    """Steps of an epoch, the same on every rank."""
    full, rest = divmod(samples, batch_size * world_size)
    return full + (rest >= world_size and not drop_last)


def batch_positions(samples: int, batch_size: int, world_size: int, drop_last: bool, step: int, rank: int) -> range:
    """The run of positions in the epoch that `rank` takes at `step`."""
    last = step == steps_per_epoch(samples, batch_size, world_size, drop_last) - 1 and not drop_last
    first = step * batch_size * world_size
    end = samples if last else first + batch_size * world_size
    return range(*(first + (end - first) * part // world_size for part in (rank, rank + 1)))


def resume_step(
    samples: int, drop_last: bool, mine: tuple[int, int], theirs: tuple[int, int], step: int
) -> tuple[int | None, int]:
    """The step that follows the first `step` global batches of another (batch size, world size), and the samples seen.

    None for the step when those samples end inside a batch.
    """
    steps, seen = steps_per_epoch(samples, *mine, drop_last), step * prod(theirs)
    if mine == theirs:
        return step, seen
    if step >= steps_per_epoch(samples, *theirs, drop_last):
        return steps, samples
    following, inside = divmod(seen, prod(mine))
    # A remainder joins the last batch where it is smaller than the ranks: then that batch has begun.
    begun = following >= steps and not drop_last
    return None if inside or begun else min(following, steps), seen


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
    origin: tuple[int, ...] = ()
    """Where `shape` begins in the array; empty for its first element."""

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
        return steps_per_epoch(self.samples, self.batch_size, self.world_size, self.drop_last)

    def positions(self, step: int, rank: int) -> range:
        """The run of positions in the epoch that `rank` reads at `step`."""
        if not 0 <= step < self.batches_per_epoch or not 0 <= rank < self.world_size:
            raise IndexError(
                f"step {step} of {self.batches_per_epoch}, rank {rank} of {self.world_size}: no such batch"
            )
        if self.windows is None:
            return batch_positions(self.samples, self.batch_size, self.world_size, self.drop_last, step, rank)
        run = self.windows.run(rank)
        first, last_step = run.start + step * self.batch_size, step == self.batches_per_epoch - 1
        return range(first, run.stop if last_step and not self.drop_last else first + self.batch_size)

    def batch(self, epoch: int, step: int, rank: int) -> Offsets:
        """Offsets `(sample, dimension)` of the batch that `rank` reads at `step` of `epoch`, in elements.

        Raises:
            IndexError: for a step or rank that the plan does not have.
        """
        offsets = self._offsets(epoch, step, rank)
        return offsets + np.array(self.origin, np.int64) if self.origin else offsets

    def _offsets(self, epoch: int, step: int, rank: int) -> Offsets:
        shown, run = epoch if self.shuffle else 0, self.positions(step, rank)
        if self.windows is not None:
            return self.windows.offsets(shown, rank, self._places(step, rank))
        if self.order == "random":
            choices = np.array(self.shape, np.uint64) - np.array(self.patch, np.uint64) + np.uint64(1)
            blocks = -(-len(choices) // _WORDS_PER_BLOCK)
            generator = np.random.Philox(key=_key(self.seed, shown), counter=run.start * blocks)
            words = generator.random_raw(len(run) * blocks * _WORDS_PER_BLOCK).reshape(len(run), -1)
            offsets: Offsets = (words[:, : len(choices)] % choices).astype(np.int64)
            return offsets
        index = np.arange(run.start, run.stop, dtype=np.int64)
        if self.shuffle and self.samples <= LARGEST_PERMUTATION:
            index = _permutation(self.samples, self.seed, shown)[index]
        elif self.shuffle:
            index = bijection(self.samples, _key(self.seed, shown), index)
        cells = np.stack(np.unravel_index(index, self.grid), axis=1)
        return cells.astype(np.int64) * np.array(self.stride, np.int64)

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
        problems = [
            Problem(
                path,
                f"{name} is {mine[name]}, but {other.get(name)} in the state to resume from; resume with the same data "
                "and order, or begin the epoch anew",
            )
            for name, path in _PATHS.items()
            if mine[name] != other.get(name)
        ]
        if problems:
            raise ConfigError(problems)
        sizes, others = (self.batch_size, self.world_size), (int(other["batch_size"]), int(other["world_size"]))
        following, seen = resume_step(self.samples, self.drop_last, sizes, others, step)
        why = f"{seen} samples end inside one of them"
        if self.windows is not None:
            following, why = None, "in block order every rank has a part of its own"
        if following is None:
            ours, theirs = (f"{batch_size} × {ranks} ranks" for batch_size, ranks in (sizes, others))
            message = (
                f"batches are {ours}, but {theirs} in the state to resume from, and {why}; resume with {theirs}, or "
                "begin the epoch anew"
            )
            raise ConfigError([Problem("loader.batch_size", message)])
        return following

    def _places(self, step: int, rank: int) -> range:
        """The batch in the row of samples that its rank is served."""
        run = self.positions(step, rank)
        first = step * self.batch_size
        return range(first, first + len(run))


def sample_plan(config: Config, dataset: Dataset, world_size: int, *, validates: bool = False) -> SamplePlan:
    """The samples that `config` asks of `dataset`, for `world_size` ranks. Opens nothing.

    Args:
        validates: Those of the part that is kept for validation.

    Raises:
        ConfigError: for an unknown variable or dimension, a patch larger than its array, a global batch larger than an
            epoch, or a window too small for two blocks, each under the dotted path of its field.
    """
    arrays = dataset.select(config.data.variables)
    widest = widest_of(dataset, config)
    chunk_bytes = 0
    for info in arrays:  # decoded bytes of the chunks that one chunk of the widest touches
        sides = [(widest.chunk[axis], info.chunk[axis]) for axis in info.stored_axes]
        touched = (whole // part if whole % part == 0 else most_chunks(whole, part) for whole, part in sides)
        chunk_bytes += prod(touched) * info.chunk_bytes
    train = plan_samples(config, widest, world_size, chunk_bytes)
    return _plan_validation(train, config, widest) if validates else train


def widest_of(dataset: Dataset, config: Config) -> ArrayInfo:
    """The variable with the largest chunks, by whose shape samples are planned; it has every dimension."""
    arrays = dataset.select(config.data.variables)
    return max((info for info in arrays if not info.repeated), key=lambda info: prod(info.chunk))


@dataclass(frozen=True, kw_only=True)
class Split:
    """Where along one dimension training ends and validation begins."""

    dimension: str
    place: int
    """Of the dimension among those of the array."""
    start: int
    """The first element that is kept for validation."""
    size: int
    chunk: int

    @property
    def sentence(self) -> str:
        border = "at a border of chunks, so that no chunk is read for both" if self.start % self.chunk == 0 else (
            f"inside a chunk of {self.chunk}, which is read for both"
        )  # fmt: skip
        kept = f"{self.dimension} {self.start:,} to {self.size - 1:,} of {self.size:,}"
        return f"validation: {kept}, {(self.size - self.start) / self.size:.0%}; training ends before it, {border}"


def split_of(config: Config, array: ArrayInfo) -> Split | None:
    """The split that the config asks for; None where all is trained on.

    Raises:
        ConfigError: for a dimension that there is not, and where one part cannot hold a patch.
    """
    fraction, name = config.data.validation_fraction, config.data.validation_dimension or array.dims[0]
    if not fraction:
        return None
    if name not in array.dims:
        hint = did_you_mean(name, array.dims, "the array has {}")
        raise ConfigError([Problem("data.validation_dimension", f"unknown dimension {name!r}{hint}")])
    place = array.dims.index(name)
    size, chunk, patch = array.shape[place], array.chunk[place], config.data.patch.get(name, 1)
    if size < 2 * patch:
        message = f"{fraction}, but {size} elements along {name!r} do not hold a patch of {patch} on each side; "
        problem = Problem("data.validation_fraction", message + "take another data.validation_dimension, or 0")
        raise ConfigError([problem])
    asked = min(max(round(size * (1 - fraction)), patch), size - patch)
    border = round(asked / chunk) * chunk
    start = border if patch <= border <= size - patch else asked
    return Split(dimension=name, place=place, start=start, size=size, chunk=chunk)


def _plan_validation(train: SamplePlan, config: Config, array: ArrayInfo) -> SamplePlan:
    """Patches of the part that is kept, the same at each validation: in grid order all, else as many as its share.

    Raises:
        ConfigError: where none is kept.
    """
    split = split_of(config, array)
    if split is None:
        raise ConfigError([Problem("data.validation_fraction", "0 keeps nothing to validate on; give it a part")])
    shape, origin = list(array.shape), [0] * len(array.shape)
    shape[split.place], origin[split.place] = split.size - split.start, split.start
    whole = replace(
        train, shape=tuple(shape), origin=tuple(origin), order="grid" if train.order == "grid" else "random", block=(),
        samples_per_block=1, blocks_per_window=1, shuffle=False, drop_last=False, batch_size=1, world_size=1,
        samples_per_epoch=max(train.world_size, round(train.samples_per_epoch * config.data.validation_fraction)),
    )  # fmt: skip
    size = max(1, min(train.batch_size, whole.samples // train.world_size))
    return replace(whole, batch_size=size, world_size=train.world_size)


def plan_samples(config: Config, array: ArrayInfo, world_size: int, chunk_bytes: int | None = None) -> SamplePlan:
    """As `sample_plan`, for an array whose shape and dimension names are known.

    Args:
        chunk_bytes: Decoded bytes of one chunk of every variable; this array's own without it. For block order.

    Raises:
        ConfigError: see `sample_plan`.
    """
    data, loader = config.data, config.loader
    problems = [
        Problem(path, f"unknown dimension {name!r}{did_you_mean(name, array.dims, 'the array has {}', cutoff=0.5)}")
        for path, sizes in (("data.patch", data.patch), ("data.stride", data.stride))
        for name in sizes
        if name not in array.dims
    ]
    if problems:
        raise ConfigError(problems)
    patch = tuple(data.patch.get(name, 1) for name in array.dims)
    for name, side, size in zip(array.dims, patch, array.shape, strict=True):
        if size == 0:
            message = f"{array.name} is empty: it has no elements along {name!r}"
            problems.append(Problem("data.variables", message))
        elif side > size:
            message = f"{side} elements along {name!r}, but {array.name} has {size}; use at most {size}"
            problems.append(Problem("data.patch", message))
    if problems:
        raise ConfigError(problems)
    shape, split = list(array.shape), split_of(config, array)
    if split is not None:
        shape[split.place] = split.start
    in_blocks = data.order == "block"
    ones = (1,) * len(patch)
    spacing = zip(array.dims, ones if in_blocks else patch, strict=True)
    plan = SamplePlan(
        shape=tuple(shape), patch=patch, order=data.order,
        stride=tuple(data.stride.get(name, side) for name, side in spacing),
        samples_per_epoch=data.samples_per_epoch, batch_size=loader.batch_size, world_size=world_size,
        seed=config.training.seed, shuffle=loader.shuffle, drop_last=loader.drop_last, block=ones if in_blocks else (),
    )  # fmt: skip
    if not in_blocks:
        return plan
    axes = axes_of(plan.shape, array.chunk, plan.patch, plan.stride)
    chunk_bytes = chunk_bytes or array.chunk_bytes
    window = fit_window(
        axes, chunk_bytes, window_bytes=loader.window_bytes, window_blocks=loader.window_blocks,
        reuse=loader.block_reuse, samples=-(-plan.samples // plan.world_size),
    )  # fmt: skip
    if window is None:
        least = 2 * Blocks(axes, ones).footprint * chunk_bytes
        message = (
            f"{format_bytes(loader.window_bytes)} cannot hold two blocks of one chunk with what their patches reach; "
            f"use at least {format_bytes(least)}, a smaller patch, or order random"
        )
        raise ConfigError([Problem("loader.window_bytes", message)])
    return replace(
        plan, block=window.block, samples_per_block=window.samples_per_block, blocks_per_window=window.blocks
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
        most = plan.samples // plan.world_size
        more = "raise data.samples_per_epoch" if plan.order != "grid" else "take a smaller data.stride"
        less = f"use at most {most}" if most else f"use at most {plan.samples} ranks"
        yield Problem(
            "loader.batch_size",
            f"a batch that does not fit the data: {plan.batch_size} samples × {plan.world_size} ranks = "
            f"{plan.global_batch_size}, but an epoch has {plan.samples} samples; {less}, or {more}",
        )


# -- pseudo-random numbers


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
    for key in keys:  # the finaliser of SplitMix64 (Steele et al. 2014): every input bit reaches every output bit
        word = right + key
        word = (word ^ word >> np.uint64(30)) * np.uint64(0xBF58476D1CE4E5B9)
        word = (word ^ word >> np.uint64(27)) * np.uint64(0x94D049BB133111EB)
        left, right = right, left ^ ((word ^ word >> np.uint64(31)) & mask)
    return left << bits | right


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
