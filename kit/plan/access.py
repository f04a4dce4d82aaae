"""Access: what batches read, how the samples of an epoch are ordered, and how many ranks read them.

Sizes are elements in dimension order. The one invariant: a pattern that cannot be is refused when it is made, whether
by a config, a reader or by hand; whether the patch fits the array is checked when the array is cut (`Access.axes`)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, get_args

from kit.errors import PlanError
from kit.plan.geometry import Axis, axes_of

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
    def batches(self) -> int:
        """Batches of all epochs on one rank."""
        return max(1, -(-self.rank_samples // self.batch_size)) * self.epochs

    def axes(self, sides: Sequence[int]) -> tuple[Axis, ...]:
        """The dimensions cut into pieces of these sides.

        Raises:
            PlanError: for sides below 1 or a patch larger than its array.
        """
        return axes_of(self.shape, sides, self.patch, self.steps)

    def objects(self, sides: Sequence[int]) -> int:
        """Objects that hold data when each holds this many elements, all variables."""
        return math.prod(-(-extent // side) for extent, side in zip(self.shape, sides, strict=True)) * self.arrays
