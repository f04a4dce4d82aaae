"""Packing: from stored numbers to float32 values and a mask, by the CF conventions, once per batch.

    value = packed × scale_factor + add_offset,   standardised = (value - mean) / deviation

Both together are packed × a + b, with a and b computed in float64. Types that float32 holds exactly (float32, integers
of 16 bits and less) are computed in float32: the error is at most (2·|packed·a| + |b| + |result|) × 2^-24. Wider types
are computed in float64 and rounded once. A missing element (the packed missing value; NaN in float data) is 0 and not
valid.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kit.data.dataset import NUMBERS, ArrayInfo
from kit.errors import ConfigError, Problem


@dataclass(frozen=True, slots=True)
class Packing:
    """How one variable's packed numbers become values."""

    factor: float
    shift: float
    missing: tuple[float | int, ...]
    exact_in_float32: bool

    @classmethod
    def of(cls, info: ArrayInfo, standardize: bool) -> Packing:
        """The packing of a variable, with its standardisation folded in.

        Raises:
            ConfigError: when the variable is not numeric, or is to be standardised without known statistics.
        """
        if info.dtype.kind not in NUMBERS:
            raise ConfigError([Problem("data.variables", f"{info.name} holds {info.dtype}, which is no number")])
        mean, deviation = _statistics(info) if standardize else (0.0, 1.0)
        return cls(
            factor=info.scale_factor / deviation,
            shift=(info.add_offset - mean) / deviation,
            missing=() if info.missing is None else (info.missing, *info.also_missing),
            exact_in_float32=info.dtype.itemsize <= 2 or info.dtype == np.dtype(np.float32),
        )

    def unpack(self, packed: NDArray[Any], values: NDArray[np.float32], valid: NDArray[np.bool_]) -> None:
        """Write `values` and `valid`, both of the shape of `packed`; `packed` may be `values` itself."""
        with np.errstate(over="ignore", invalid="ignore"):
            all_valid = self._mark(packed, valid)
            if self.exact_in_float32:
                self._scale(packed, values)
            else:
                values[...] = packed.astype(np.float64) * self.factor + self.shift
        if not all_valid:
            values[~valid] = 0

    def _scale(self, packed: NDArray[Any], values: NDArray[np.float32]) -> None:
        if self.factor != 1 or packed is not values:
            np.multiply(packed, np.float32(self.factor), out=values, dtype=np.float32, casting="unsafe")
        if self.shift != 0:
            values += np.float32(self.shift)

    def _mark(self, packed: NDArray[Any], valid: NDArray[np.bool_]) -> bool:
        """Write which elements are there; returns whether all are."""
        gaps = packed.dtype.kind == "f" and bool(np.isnan(packed.min()))  # the least of any is NaN where one is
        if gaps:
            np.logical_not(np.isnan(packed), out=valid)
        else:
            valid[...] = True
        for missing in self.missing:
            # A float32 array holds the missing value rounded to float32: compare with that.
            valid &= packed != (packed.dtype.type(missing) if packed.dtype.kind == "f" else missing)
        return not gaps and (not self.missing or bool(valid.all()))


def _statistics(info: ArrayInfo) -> tuple[float, float]:
    if info.mean is None or info.deviation is None:
        raise ConfigError(
            [
                Problem(
                    "data.standardize",
                    f"{info.name} has no known mean and deviation, since kit did not build its store; set it to false",
                )
            ]
        )
    return info.mean, info.deviation or 1.0
