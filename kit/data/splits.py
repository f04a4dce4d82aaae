"""Splits: which part of an array is trained on, validated on and tested on. Pure arithmetic, no store.

Two ways. `end`: training, validation and test follow one another along a dimension, as the future follows the past.
`regions`: the array is cut into regions, and each is given to one part as a whole, drawn by `data.split_seed` alone; a
region that is a chunk is never read for two parts.

The invariant: a patch belongs to a part when all that it touches does, and `data.guard` elements around it too. So no
patch of one part overlaps one of another, and at least `guard` elements lie between them along some dimension.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import TYPE_CHECKING, Literal, get_args

import numpy as np
from numpy.typing import NDArray

from kit.arguments import takes_config
from kit.data.open_dataset import open_dataset
from kit.data.places import MOST_CELLS, Places, cell_starts, generator_of
from kit.errors import ConfigError, Problem, did_you_mean
from kit.registry import Drawable

if TYPE_CHECKING:
    from kit.config import Config
    from kit.data.dataset import Dataset
    from kit.data.variables import ArrayInfo

Part = Literal["train", "validation", "test"]
PARTS: tuple[Part, ...] = get_args(Part)
_MOST_MOVED = 0.2
"""Of the smaller part beside a border: so far it is moved at most to lie between chunks. A chunk read for two parts
costs bytes, a part of another size than was asked for changes what is learned."""
_WORDS = {"train": "training", "validation": "validation", "test": "test"}


@dataclass(frozen=True, kw_only=True, eq=False)
class Split(Drawable):
    """The parts of one array: `regions` holds for each region the number of its part in `PARTS`."""

    dims: tuple[str, ...]
    shape: tuple[int, ...]
    chunk: tuple[int, ...]
    sides: tuple[int, ...]
    """Of a region, in elements."""
    borders: tuple[NDArray[np.int64], ...]
    """Where regions begin along each dimension, then the end."""
    regions: NDArray[np.int8]
    guard: tuple[int, ...]
    dimension: str
    """Along which the parts follow one another; empty where regions are drawn."""

    def extent(self, part: Part) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """(first element, number of elements) of a part along each dimension; of all, where regions are drawn."""
        if not self.dimension:
            return (0,) * len(self.shape), self.shape
        axis = self.dims.index(self.dimension)
        starts = self.borders[axis]
        own = np.flatnonzero(self.regions.reshape(-1) == PARTS.index(part))
        first, end = int(starts[own[0]]), int(starts[own[-1] + 1])
        first += self.guard[axis] if first else 0  # what is nearer to the part before is left out
        origin, shape = [0] * len(self.shape), [*self.shape]
        origin[axis], shape[axis] = first, end - first
        return tuple(origin), tuple(shape)

    def allowed(self, part: Part, patch: tuple[int, ...], stride: tuple[int, ...]) -> Places | None:
        """The positions of a part; None where they are all of its extent.

        Raises:
            ConfigError: when no patch fits.
        """
        if self.dimension:
            return None
        starts = []
        sides = zip(self.shape, self.borders, patch, stride, self.guard, strict=True)
        for size, borders, side, step, guard in sides:
            changes = np.concatenate([borders[1:-1] - side - _half(guard) + 1, borders[1:-1] + _half(guard)])
            starts.append(cell_starts(changes, step, (size - side) // step + 1))
        if prod(len(begins) for begins in starts) > MOST_CELLS:
            message = f"regions of {self._named(self.sides)} cut the array too finely; take larger ones"
            raise ConfigError([Problem("data.split_region", message)])
        firsts = [begins[:-1] * step for begins, step in zip(starts, stride, strict=True)]
        touched = self.holds(part, firsts, [first + side for first, side in zip(firsts, patch, strict=True)])
        if not touched.any():
            guarded = tuple(side + between for side, between in zip(patch, self.guard, strict=True))
            message = (
                f"no patch fits the part for {_WORDS[part]}: regions are {self._named(self.sides)}, and a patch with "
                f"its guard is {self._named(guarded)}; take larger regions, a larger part, or less guard"
            )
            raise ConfigError([Problem("data.split_region", message)])
        return Places(tuple(starts), touched.astype(np.float64))

    def holds(
        self, part: Part, firsts: Sequence[NDArray[np.int64]], ends: Sequence[NDArray[np.int64]]
    ) -> NDArray[np.bool_]:
        """Whether boxes lie within a part where regions are drawn, and half of the guard around them too.

        Args:
            part: Of which.
            firsts: The first element of each box along each dimension.
            ends: The element behind its last, alike.

        Returns:
            (boxes along dimension 0, boxes along dimension 1, ...).
        """
        inside: NDArray[np.bool_] = self.regions == PARTS.index(part)
        for axis, (size, borders, guard) in enumerate(zip(self.shape, self.borders, self.guard, strict=True)):
            first = np.searchsorted(borders, np.maximum(firsts[axis] - _half(guard), 0), "right") - 1
            last = np.searchsorted(borders, np.minimum(ends[axis] + _half(guard), size) - 1, "right") - 1
            # Of all the regions from the first to the last that a box touches, none is of another part.
            others = np.cumsum(np.moveaxis(~inside, axis, 0), axis=0)
            others = np.concatenate([np.zeros_like(others[:1]), others])
            inside = np.moveaxis(others[last + 1] == others[first], 0, axis)
        return inside

    def _named(self, sides: tuple[int, ...]) -> str:
        """Sizes that differ from 1, by dimension."""
        return " × ".join(f"{name} {side}" for name, side in zip(self.dims, sides, strict=True) if side > 1) or "1"

    @cached_property
    def fractions(self) -> Mapping[Part, float]:
        """The share of the array that each part has; what a guard leaves out is in none."""
        if any(self.guard):
            return {part: self._reached(part) for part in PARTS}
        sizes = np.ones(())
        for borders in self.borders:
            sizes = np.multiply.outer(sizes, np.diff(borders).astype(np.float64))
        return {part: float(sizes[self.regions == number].sum() / sizes.sum()) for number, part in enumerate(PARTS)}

    def _reached(self, part: Part) -> float:
        """Of the array, what patches of a part may touch."""
        if not (self.regions == PARTS.index(part)).any():
            return 0.0
        if self.dimension:
            return prod(self.extent(part)[1]) / prod(self.shape)
        ones = (1,) * len(self.shape)
        try:
            places = self.allowed(part, ones, ones)
        except ConfigError:  # the guard leaves nothing
            return 0.0
        return 0.0 if places is None else places.share

    @property
    def sentence(self) -> str:
        """What is kept for what, and what is read for two parts."""
        shares = {part: share for part, share in self.fractions.items() if share}
        guard = f", {self._named(self.guard)} left out between parts" if any(self.guard) else ""
        if not self.dimension:
            parts = ", ".join(f"{_WORDS[part]} {share:.0%}" for part, share in shares.items())
            cut = all(
                side % chunk == 0 or side >= size
                for side, chunk, size in zip(self.sides, self.chunk, self.shape, strict=True)
            )
            border = "at borders of chunks" if cut else "through chunks, which are read for both sides"
            along = zip(self.dims, self.sides, self.shape, strict=True)
            sides = " × ".join(f"{name} {side}" for name, side, size in along if side < size)
            return f"{self.regions.size:,} regions of {sides}, drawn: {parts}; cut {border}{guard}"
        axis = self.dims.index(self.dimension)
        told, inside = [], []
        for part in [part for part in shares if part != "train"]:
            (first, size), whole = (pair[axis] for pair in self.extent(part)), self.shape[axis]
            told.append(
                f"{_WORDS[part]}: {self.dimension} {first:,} to {first + size - 1:,} of {whole:,}, {shares[part]:.0%}"
            )
            inside += [_WORDS[part]] if (first - self.guard[axis]) % self.chunk[axis] else []
        border = f"before {' and '.join(inside)} inside a chunk of {self.chunk[axis]}, which is read for both sides"
        border = border if inside else "at borders of chunks, so that no chunk is read for two parts"
        return f"{'; '.join(told)}; cut {border}{guard}"

    def __repr__(self) -> str:
        return self.sentence


def widest_of(dataset: Dataset, config: Config) -> ArrayInfo:
    """The variable with the largest chunks, by whose shape samples are planned; it has every dimension."""
    arrays = dataset.select(config.data.variables)
    whole = [info for info in arrays if not info.repeated and not any(info.matched)]
    if not whole:
        message = f"no variable of the first store has all of {', '.join(arrays[0].dims)}; name one, or fewer others"
        raise ConfigError([Problem("data.variables", message)])
    return max(whole, key=lambda info: prod(info.chunk))


def _half(guard: int) -> int:
    """What each side of a border keeps free."""
    return (guard + 1) // 2


def split_of(config: Config, array: ArrayInfo) -> Split | None:
    """The split that the config asks for; None where all is trained on.

    Raises:
        ConfigError: for a dimension that there is not, and where one part cannot hold a patch.
    """
    data = config.data
    wanted = {"validation": data.validation_fraction, "test": data.test_fraction}
    if not any(wanted.values()):
        return None
    for path, names in (
        ("data.validation_dimension", [data.validation_dimension] if data.validation_dimension else []),
        ("data.split_region", data.split_region), ("data.guard", data.guard),
    ):  # fmt: skip
        for name in names:
            if name not in array.dims:
                hint = did_you_mean(name, array.dims, "the array has {}")
                raise ConfigError([Problem(path, f"unknown dimension {name!r}{hint}")])
    # What shares an element of a coarser store is of one part.
    shared = array.together or (1,) * len(array.dims)
    guard = tuple(max(data.guard.get(name, 0), most - 1) for name, most in zip(array.dims, shared, strict=True))
    if sum(wanted.values()) >= 1:
        message = (
            f"{data.test_fraction} and data.validation_fraction {data.validation_fraction} leave nothing to train on"
        )
        raise ConfigError([Problem("data.test_fraction", message)])
    cut = _ends if data.split == "end" else _regions
    return cut(config, array, wanted, guard)


def _ends(config: Config, array: ArrayInfo, wanted: Mapping[str, float], guard: tuple[int, ...]) -> Split:
    """Training, validation and test one after another, at borders of chunks where the parts allow it."""
    name = config.data.validation_dimension or array.dims[0]
    axis = array.dims.index(name)
    size, chunk, patch = array.shape[axis], array.chunk[axis], config.data.patch.get(name, 1)
    parts = [number for number, part in enumerate(PARTS) if part == "train" or wanted[part]]
    least = [patch + (guard[axis] if number else 0) for number in parts]
    if size < sum(least):
        fraction = config.data.validation_fraction or config.data.test_fraction
        guarded = f" and a guard of {guard[axis]}" if guard[axis] else ""
        message = (
            f"{fraction}, but {size} elements along {name!r} do not hold a patch of {patch}{guarded} on each side; "
            "take another data.validation_dimension, or 0"
        )
        which = "validation" if config.data.validation_fraction else "test"
        raise ConfigError([Problem(f"data.{which}_fraction", message)])
    ends = [size]
    for number, room in zip(reversed(parts[1:]), reversed(least[1:]), strict=True):
        low = sum(least[: parts.index(number)])
        kept = sum(wanted[PARTS[later]] for later in parts if later >= number)
        asked = min(max(round(size * (1 - kept)), low), ends[0] - room)
        border = round(asked / chunk) * chunk
        shares = [1 - sum(wanted.values()), *(wanted[PARTS[later]] for later in parts[1:])]
        smaller = size * min(shares[parts.index(number) - 1 : parts.index(number) + 1])
        near = abs(border - asked) <= _MOST_MOVED * smaller
        ends.insert(0, border if near and low <= border <= ends[0] - room else asked)
    borders = [np.array([0, whole], np.int64) for whole in array.shape]
    borders[axis] = np.array([0, *ends], np.int64)
    regions = np.array(parts, np.int8).reshape([-1 if place == axis else 1 for place in range(len(array.dims))])
    return Split(
        dims=array.dims, shape=array.shape, chunk=array.chunk, sides=array.shape, borders=tuple(borders),
        regions=regions, guard=guard, dimension=name,
    )  # fmt: skip


def _regions(config: Config, array: ArrayInfo, wanted: Mapping[str, float], guard: tuple[int, ...]) -> Split:
    """Regions in an order that the seed draws: first those of test, then of validation, the rest for training."""
    given = config.data.split_region
    sides = tuple(
        min(size, given.get(name, size) if given else chunk)
        for name, size, chunk in zip(array.dims, array.shape, array.chunk, strict=True)
    )
    borders = tuple(
        np.unique(np.append(np.arange(0, size, side), size)).astype(np.int64)
        for size, side in zip(array.shape, sides, strict=True)
    )
    counts = tuple(len(starts) - 1 for starts in borders)
    number = int(np.prod(counts))
    kept = {part: max(1, round(number * fraction)) if fraction else 0 for part, fraction in wanted.items()}
    if sum(kept.values()) >= number:
        message = f"{number} regions cannot be divided among training and what is kept; take smaller ones"
        raise ConfigError([Problem("data.split_region", message)])
    order = generator_of(config.data.split_seed).permutation(number)
    flat = np.zeros(number, np.int8)
    flat[order[: kept["test"]]] = PARTS.index("test")
    flat[order[kept["test"] : kept["test"] + kept["validation"]]] = PARTS.index("validation")
    return Split(
        dims=array.dims, shape=array.shape, chunk=array.chunk, sides=sides, borders=borders,
        regions=flat.reshape(counts), guard=guard, dimension="",
    )  # fmt: skip


@takes_config
def split(config: Config) -> Split | None:
    """Which parts of the store of a config are trained on, validated on and tested on.

    Args:
        config: `data.split` and the fields about it decide.

    Returns:
        The parts, in a sentence and as a map with `.figure()`; None where nothing is kept.

    Raises:
        ConfigError: where one part cannot hold a patch.
        StoreError: when the store cannot be opened.

    Example:
        >>> kept = {"data.validation_fraction": 0.5, "data.validation_dimension": "lon"}
        >>> parts = kit.data.split(ocean.replace({"data.patch": {"time": 2, "lat": 32, "lon": 32}, **kept}))
        >>> sum(parts.fractions.values())
        1.0
    """
    return split_of(config, widest_of(open_dataset(config), config))
