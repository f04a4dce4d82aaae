"""Access: what batches read, how the samples of an epoch are ordered, and how many ranks read them.

Sizes are elements in dimension order. The one invariant: a pattern that cannot be is refused when it is made, whether
by a config, a reader or by hand; whether the patch fits the array is checked when the array is cut (`Access.axes`).

Block-shuffled order is defined here, to the sample; `kit.data.epochs` draws it, and this module counts the chunks
that it reads. Its aim: a chunk that was fetched yields many samples while it is in memory, and the samples are still
well mixed.

*Positions* are the offsets a patch may take: every element in each dimension, or multiples of the stride where one is
given. *Blocks* tile them: block `b` along a dimension holds the positions with `b × side <= offset < (b + 1) × side`,
side being a whole number of chunks. A block's footprint is every chunk one of its patches touches, so footprints of
neighbours overlap by the patch's reach. An epoch of N samples is a row of *visits* of `samples_per_block` samples each:

1. Sample s belongs to visit `v = s // samples_per_block`. Visit v has an anchor, a position drawn uniformly from all
   positions by (seed, epoch, v); its block is the one that holds the anchor. Sample s is a position drawn uniformly
   from that block by (seed, epoch, s). So every sample is uniform over all positions, as in random order, and a pure
   function of (seed, epoch, s): the same set of samples for any number of ranks, nothing kept per sample.
2. Rank r of R owns the samples `N × r // R` to `N × (r + 1) // R`: the same number on all, but for one. At most R - 1
   visits are shared by two ranks.
3. A rank's visits are cut into *windows* of `window_blocks` visits, in order; its first and last visit may be parts,
   its last window shorter. Inside a window the samples are put in an order drawn by (seed, epoch, r, window), all
   orders equally likely; batches are consecutive runs of the result. Without shuffling every epoch is like epoch 0.
4. A chunk is fetched once per window, and is dropped when the window no longer needs it. While a window is served the
   next one may be read: two windows fit `window_bytes` of decoded chunks, all variables together, on each rank.

The block is as large as memory allows: starting from one chunk, the dimension with the largest share of overlap grows
while `window_blocks` footprints (or the whole array) fit half of `window_bytes` and the array still has that many
blocks. A block yields `reuse` times as many samples as patches fit in it side by side.

What mixing is lost: two samples of a batch come from one visit with probability
`(samples_per_block - 1) / (window_blocks × samples_per_block - 1)`, almost never in random order, and more often in
the last window of an epoch, which has the visits that are left. If samples of a visit were all alike, a batch of n
would be worth `n / (1 + (n - 1) × probability)` independent ones (Kish's design effect); that over n is the `mixing`, 1
in random order. It is a lower bound, since patches of one block differ. Measured: the share of pairs in a batch that
are of one visit, in the same formula.

Chunks per window are bounded from both sides and the upper bound is shown. For a visit the expected union is exact. For
a window, chunk j is touched by a visit with probability q_j, so the mean is `Σ 1 - (1 - q_j)^B`; only Σ q_j = U and the
largest q_j ≤ ρ are known, and by concavity `U (1 - (1 - ρ)^B) / ρ <= mean <= C (1 - (1 - U / C)^B)`, C chunks in all.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import product
from typing import Literal, get_args

from kit.chunks.geometry import Axis, axes_of, in_steps, product_of
from kit.errors import PlanError

Order = Literal["random", "grid", "block"]

VALUE_BYTES = 5
"""Of one element in a delivered batch: a 32-bit float and its validity."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Access:
    """What a batch reads: `batch_size` patches of `variables` arrays of one shape. Sequences are in dimension order."""

    shape: tuple[int, ...]
    itemsize: int
    patch: tuple[int, ...]
    stride: tuple[int, ...]
    """Distance between positions; unused in random order."""
    order: Order
    batch_size: int
    """Samples of a batch on each rank."""
    variables: int
    together: bool = False
    """Whether the variables lie in one array, so that a chunk holds all of them."""
    shuffle: bool = True
    """False in grid order: positions one after another, the last dimension fastest."""
    samples_per_epoch: int | None = None
    """Of all ranks; None: as many as patches fit the array side by side. A grid counts its own."""
    epochs: int = 1
    ranks: int = 1
    compression_ratio: float = 1.0
    """Decoded bytes per stored byte."""
    window_bytes: int = 512 << 20
    """Block order: decoded chunks of two windows, on each rank."""
    window_blocks: int = 64
    """Block order: places a window mixes."""
    block_reuse: float = 1.0
    """Block order: samples of a block over the patches that fit it side by side."""

    def __post_init__(self) -> None:
        for name in ("itemsize", "batch_size", "variables", "epochs", "ranks", "window_bytes", "window_blocks"):
            if getattr(self, name) < 1:
                raise PlanError(f"{name} is {getattr(self, name)}, but must be at least 1")
        if self.samples_per_epoch is not None and self.samples_per_epoch < 1:
            raise PlanError(f"samples_per_epoch is {self.samples_per_epoch}, but must be at least 1")
        for name in ("compression_ratio", "block_reuse"):
            if not getattr(self, name) > 0:
                raise PlanError(f"{name} is {getattr(self, name)}, but must be above 0")
        if self.order not in get_args(Order):
            raise PlanError(f"order is {self.order!r}, but must be one of {', '.join(get_args(Order))}")

    @property
    def arrays(self) -> int:
        """Arrays that every sample reads."""
        return 1 if self.together else self.variables

    @property
    def element_bytes(self) -> int:
        """Bytes a chunk holds per element of its sides."""
        return self.itemsize * (self.variables if self.together else 1)

    @property
    def patch_bytes(self) -> int:
        """Bytes of the patch in one variable."""
        return math.prod(self.patch) * self.itemsize

    @property
    def sample_bytes(self) -> int:
        """Bytes of the patch in all variables, as stored uncompressed."""
        return self.patch_bytes * self.variables

    @property
    def batch_bytes(self) -> int:
        """Memory of one delivered batch."""
        return self.batch_size * math.prod(self.patch) * self.variables * VALUE_BYTES

    @property
    def free_dimensions(self) -> int:
        """Dimensions along which a patch can move."""
        return sum(size < extent for size, extent in zip(self.patch, self.shape, strict=True))

    @property
    def steps(self) -> tuple[int, ...]:
        """Distance between offsets: the stride, or every element in random order."""
        return (1,) * len(self.shape) if self.order == "random" else self.stride

    @property
    def epoch_samples(self) -> int:
        """Samples of an epoch, all ranks."""
        sides = tuple(zip(self.shape, self.patch, self.steps, strict=True))
        if self.order == "grid":
            return math.prod((extent - size) // step + 1 for extent, size, step in sides)
        return self.samples_per_epoch or math.prod(max(1, extent // size) for extent, size, _ in sides)

    @property
    def rank_samples(self) -> int:
        """Samples of an epoch on one rank."""
        return max(1, -(-self.epoch_samples // self.ranks))

    @property
    def epoch_batches(self) -> int:
        """Batches of an epoch on one rank."""
        return -(-self.rank_samples // self.batch_size)

    @property
    def batches(self) -> int:
        """Batches of all epochs on one rank."""
        return self.epoch_batches * self.epochs

    def axes(self, sides: Sequence[int]) -> tuple[Axis, ...]:
        """The dimensions cut into pieces of these sides.

        Raises:
            PlanError: for sides below 1 or a patch larger than its array.
        """
        return axes_of(self.shape, sides, self.patch, self.steps)

    def objects(self, sides: Sequence[int]) -> int:
        """Objects that hold data when each holds this many elements, all variables."""
        return math.prod(-(-extent // side) for extent, side in zip(self.shape, sides, strict=True)) * self.arrays


@dataclass(frozen=True)
class Blocks:
    """Blocks of one size over an array's positions. `chunks_each` counts chunks along each side of a block."""

    axes: tuple[Axis, ...]
    chunks_each: tuple[int, ...]
    reuse: float = 1.0

    @property
    def sides(self) -> tuple[int, ...]:
        """Sides of a block, in elements."""
        return tuple(axis.chunk * chunks for axis, chunks in zip(self.axes, self.chunks_each, strict=True))

    @property
    def counts(self) -> tuple[int, ...]:
        """Blocks along each dimension."""
        return tuple(axis.last_offset // side + 1 for axis, side in zip(self.axes, self.sides, strict=True))

    @property
    def samples_per_block(self) -> int:
        """Samples of a visit: `reuse` times the patches that fit the block side by side."""
        fitting = (
            max(1.0, min(side, axis.positions * axis.stride) / axis.size)
            for axis, side in zip(self.axes, self.sides, strict=True)
        )
        return max(1, round(self.reuse * math.prod(fitting)))

    @property
    def reached(self) -> tuple[int, ...]:
        """Chunks that a full block's patches can touch along each dimension."""
        return tuple(
            min(axis.chunks, (min(axis.last_offset, side - 1) + axis.size - 1) // axis.chunk + 1)
            for axis, side in zip(self.axes, self.sides, strict=True)
        )

    @property
    def footprint(self) -> int:
        """Chunks a full block's patches can touch."""
        return math.prod(self.reached)

    @property
    def everything(self) -> int:
        """Chunks of the array."""
        return math.prod(axis.chunks for axis in self.axes)

    @cached_property
    def chunks_per_visit(self) -> float:
        """Expected different chunks of one visit; exact."""
        positions = math.prod(axis.positions for axis in self.axes)
        union = []
        for block in product(*map(_classes, self.axes, self.sides)):
            inside = math.prod(one.positions for one in block)
            touches = product_of(one.touches for one in block)
            chunks = [times * _at_least_once(n / inside, self.samples_per_block) for n, times in touches.items()]
            union.append(inside * math.prod(one.times for one in block) / positions * math.fsum(chunks))
        return math.fsum(union)

    def chunks_per_window(self, visits: int) -> tuple[float, float]:
        """Bounds on the expected different chunks of this many visits; one visit is exact."""
        likeliest = 1.0  # no chunk is touched by a visit with a higher probability
        for axis, side in zip(self.axes, self.sides, strict=True):
            reaching = (axis.chunk + axis.size - 3) // side + 2
            likeliest *= min(1.0, reaching * -(-side // axis.stride) / axis.positions)
        each = self.chunks_per_visit
        low = each * _at_least_once(likeliest, visits) / likeliest
        high = self.everything * _at_least_once(min(1.0, each / self.everything), visits)
        return max(low, each), max(high, each)


@dataclass(frozen=True, slots=True, kw_only=True)
class Window:
    """What block-shuffled order comes to for one size of chunk, on each rank."""

    block: tuple[int, ...]
    """Sides of a block, in elements."""
    samples_per_block: int
    blocks: int
    """Blocks a window mixes."""
    full: bool
    """Whether these are `window_blocks`, or all blocks of an epoch."""
    window_bytes: int
    """Decoded chunks of the window served and the one being read, at most."""
    chunks_per_sample: float
    """Expected chunks read per sample, of one variable: the upper bound."""
    least_chunks_per_sample: float
    """The lower bound of the same."""
    epoch_samples: int
    """Of one rank; the last window of an epoch has what is left of them."""

    @property
    def samples(self) -> int:
        return self.blocks * self.samples_per_block

    def mixing(self, batch_size: int) -> float:
        """Independent samples a batch is worth at least, over its size, on average over an epoch."""
        left = self.epoch_samples % self.samples
        whole = self.epoch_samples - left
        same = (whole * self._same_visit(self.samples) + left * self._same_visit(left)) / self.epoch_samples
        return 1 / (1 + (batch_size - 1) * same)

    def _same_visit(self, samples: int) -> float:
        """Share of the pairs of a window of so many samples that are of one visit."""
        if samples < 2:
            return 1.0
        visits, rest = divmod(samples, self.samples_per_block)
        pairs = visits * self.samples_per_block * (self.samples_per_block - 1) + rest * (rest - 1)
        return pairs / (samples * (samples - 1))


def fit_window(
    axes: Sequence[Axis], chunk_bytes: int, *, window_bytes: int, window_blocks: int, reuse: float, samples: int
) -> Window | None:
    """The window of an epoch of `samples` on one rank; None when not even two blocks of one chunk fit `window_bytes`.

    `chunk_bytes` are those of one chunk of every variable.
    """
    most_chunks = window_bytes // 2 // chunk_bytes
    blocks = _grown(tuple(axes), most_chunks, window_blocks, reuse)
    most_visits = min(window_blocks, -(-samples // blocks.samples_per_block))
    fits = blocks.everything <= most_chunks
    visits = most_visits if fits else min(most_visits, most_chunks // blocks.footprint)
    if visits < 1:
        return None
    low, high = blocks.chunks_per_window(visits)
    return Window(
        block=blocks.sides, samples_per_block=blocks.samples_per_block, blocks=visits,
        full=visits == most_visits,
        window_bytes=2 * min(visits * blocks.footprint, blocks.everything) * chunk_bytes,
        chunks_per_sample=high / (visits * blocks.samples_per_block),
        least_chunks_per_sample=low / (visits * blocks.samples_per_block), epoch_samples=samples,
    )  # fmt: skip


def seen_fraction(
    shape: Sequence[int], patch: Sequence[int], block: Sequence[int], samples_per_block: int, samples: int
) -> float:
    """Share of an array's elements that the `samples` of an epoch touch at all.

    A visit reaches over `block + patch - 1` elements along each dimension, and covers a place there with probability
    `c = 1 - exp(-samples_per_block × patch / reach)`; a place is within reach of a Poisson number of visits, v on
    average: `1 - exp(-v c)`. That all of the reach is covered alike, and the array's edges like the rest, is not quite
    so: within 0.08 where an array is several blocks wide.
    """
    reach = math.prod(min(side + size - 1, extent) for side, size, extent in zip(block, patch, shape, strict=True))
    visits = samples / samples_per_block * reach / math.prod(shape)
    return -math.expm1(visits * math.expm1(-samples_per_block * math.prod(patch) / reach))


def _grown(axes: tuple[Axis, ...], most_chunks: int, window_blocks: int, reuse: float) -> Blocks:
    """The largest block of which `window_blocks` fit, grown where neighbours overlap most."""
    blocks = Blocks(axes, (1,) * len(axes), reuse)
    growing = set(range(len(axes)))
    while growing:
        reached, each = blocks.reached, blocks.chunks_each
        place = max(growing, key=lambda place: reached[place] / min(each[place], axes[place].chunks))
        grown = tuple(n + max(1, n // 4) if index == place else n for index, n in enumerate(each))
        larger = Blocks(axes, grown, reuse)
        fits = min(larger.footprint * window_blocks, larger.everything) <= most_chunks
        if fits and math.prod(larger.counts) >= window_blocks and blocks.counts[place] > 1:
            blocks = larger
        else:
            growing.remove(place)
    return blocks


_MOST_PHASES = 32


@dataclass(frozen=True, slots=True)
class _Class:
    """Blocks alike along one dimension: positions in each, how many there are, `{positions touching: chunks}`."""

    positions: int
    times: int
    touches: Counter[int]


@lru_cache(maxsize=1 << 14)
def _classes(axis: Axis, side: int) -> tuple[_Class, ...]:
    """All blocks along one dimension, alike ones once; kept, because candidates share sides.

    Full blocks repeat with the stride's phase, and of very many phases some stand for their neighbours; the last block
    may be shorter.
    """
    full, rest = divmod(axis.last_offset + 1, side)
    period = min(full, axis.stride // math.gcd(axis.stride, side))
    groups = min(period, _MOST_PHASES)
    bounds = []
    for group in range(groups):
        phase, end = (period * edge // groups for edge in (group, group + 1))
        times = sum((full - step - 1) // period + 1 for step in range(phase, end))
        bounds.append((phase * side, (phase + 1) * side - 1, times))
    if rest:
        bounds.append((full * side, axis.last_offset, 1))
    found = []
    for low, high, times in bounds:  # the block whose offsets lie from low to high; some hold no position
        first, last = -(-low // axis.stride), high // axis.stride
        if first > last:
            continue
        touches: Counter[int] = Counter()
        reached = range(first * axis.stride // axis.chunk, (last * axis.stride + axis.size - 1) // axis.chunk + 1)
        for chunk, alike in in_steps(reached):
            start = max(first, -(-(chunk * axis.chunk - axis.size + 1) // axis.stride))
            stop = min(last, ((chunk + 1) * axis.chunk - 1) // axis.stride)
            touches[max(0, stop - start + 1)] += alike
        found.append(_Class(last - first + 1, times, touches))
    return tuple(found)


def _at_least_once(probability: float, times: int) -> float:
    """`1 - (1 - probability)^times`, without losing small probabilities."""
    return 1.0 if probability >= 1 else -math.expm1(times * math.log1p(-probability))
