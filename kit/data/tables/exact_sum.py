"""ExactSum: the sum of many float64 without any rounding, so that no order and no cut of them changes it.

Means that are computed in one pass and merged (Welford 1962; Chan, Golub, LeVeque 1983) are right to about 1e-15, but
another cut of the same rows gives other last digits, and standardised columns would differ with the number of query
chunks. Here every number is split into its exponent and a whole number of 53 bits, whole numbers of one exponent are
added as such (a long accumulator: Kulisch 1971), and only the result is rounded. Its squares are exact too: a product
is the pair of its rounded value and its error (Dekker 1971).

It holds 2 x 4,400 int64, 69 KiB, and up to 2^36 numbers.
"""

from __future__ import annotations

from fractions import Fraction

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
_MANTISSA_BITS = 53
_LOW_BITS = 27
_LOW = (1 << _LOW_BITS) - 1
_SPLITTER = float((1 << _LOW_BITS) + 1)
_OFFSET = 2304
"""Exponent -2304 is place 0: squares of the smallest float64 and their errors end above it."""
_PLACES = 4400
_MOST_AT_ONCE = 1 << 24
"""Numbers whose 27-bit parts add up to less than 2^53, exactly as float64."""


class ExactSum:
    """Add to it in any order, in any parts."""

    def __init__(self) -> None:
        self._high, self._low = np.zeros(_PLACES, np.int64), np.zeros(_PLACES, np.int64)

    def add(self, values: Floats) -> None:
        """Add finite numbers, (number,)."""
        for part in _parts(values):
            self._add(*np.frexp(part))

    def add_squares(self, values: Floats) -> None:
        """Add the squares of finite numbers, (number,)."""
        for part in _parts(values):
            fractions, exponents = np.frexp(part)
            product, error = _square(fractions)
            for share in (product, error):
                own, shifts = np.frexp(share)
                self._add(own, shifts + 2 * exponents)

    def merge(self, other: ExactSum) -> None:
        """Add what another one holds."""
        self._high += other._high
        self._low += other._low

    def value(self) -> Fraction:
        """The sum."""
        places = np.flatnonzero(self._high | self._low)
        if not len(places):
            return Fraction(0)
        first = int(places[0])
        whole = sum(
            ((int(self._high[place]) << _LOW_BITS) + int(self._low[place])) << (int(place) - first) for place in places
        )
        return whole * Fraction(2) ** (first - _OFFSET - _MANTISSA_BITS)

    def _add(self, fractions: Floats, exponents: NDArray[np.int32]) -> None:
        """Add fractions below 1, each times two to its exponent."""
        whole = np.ldexp(fractions, _MANTISSA_BITS).astype(np.int64)
        places = exponents.astype(np.int64) + _OFFSET
        for total, part in ((self._high, whole >> _LOW_BITS), (self._low, whole & _LOW)):
            total += np.bincount(places, weights=part, minlength=_PLACES).astype(np.int64)


def _parts(values: Floats) -> list[Floats]:
    return [values[start : start + _MOST_AT_ONCE] for start in range(0, len(values), _MOST_AT_ONCE)]


def _square(values: Floats) -> tuple[Floats, Floats]:
    """The rounded square of numbers below 1, and what it lacks, which is a float64 too."""
    product = values * values
    scaled = values * _SPLITTER
    high = scaled - (scaled - values)
    low = values - high
    return product, ((high * high - product) + 2 * high * low) + low * low
