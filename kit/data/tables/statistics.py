"""Statistics of a column, gathered in one pass by many workers: what a feature is made with.

Each takes the values of a record batch and merges with others of its column. All are exact (a sum without rounding,
counts, extremes), so the order and the cut of the rows leave no trace in the result.

ExactSum: the sum of many float64 without any rounding, so that no order and no cut of them changes it.

Means that are computed in one pass and merged (Welford 1962; Chan, Golub, LeVeque 1983) are right to about 1e-15, but
another cut of the same rows gives other last digits, and standardised columns would differ with the number of query
chunks. Here every number is split into its exponent and a whole number of 53 bits, whole numbers of one exponent are
added as such (a long accumulator: Kulisch 1971), and only the result is rounded. Its squares are exact too: a product
is the pair of its rounded value and its error (Dekker 1971).

It holds 2 x 4,400 int64, 69 KiB, and up to 2^36 numbers.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass, field
from fractions import Fraction
from typing import TYPE_CHECKING, Any, Protocol, Self

import numpy as np
from numpy.typing import NDArray

from kit.data.tables.declare import Column, Kind, compute
from kit.data.tables.source import needed
from kit.errors import ConfigError, Problem

if TYPE_CHECKING:
    import pyarrow

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


MOST_VALUES = 100_000
"""Different values of a category that are counted; beyond it the column is an identifier."""
MOST_WORDS = 1000
"""Values in the vocabulary of a category, the most frequent ones."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FittedColumn:
    """A column as its features are made: what it is taken for, and what one pass found. Only some apply to a kind."""

    name: str
    kind: Kind
    type: str
    rows: int = 0
    missing: int = 0
    """Rows without a value; of numbers also those that are not finite."""
    mean: float = 0.0
    deviation: float = 0.0
    """Standard deviation of all rows (divided by their number); 0 for a constant, whose feature is 0 then."""
    latest: int = 0
    """Microseconds since 1970, UTC."""
    values: int = 0
    """Different values of a category."""
    vocabulary: tuple[str, ...] = ()
    """Most frequent values of a category, in that order, as text."""


class Statistic(Protocol):
    """What is known of a column's rows so far."""

    def add(self, values: pyarrow.Array) -> None:
        """Take in the values of one record batch."""

    def merge(self, other: Self) -> None:
        """Take in what another one knows."""

    def fitted(self) -> dict[str, Any]:
        """The fields of `FittedColumn` that it is about."""


def new_statistic(column: Column) -> Statistic:
    """An empty one for a column of that kind."""
    if column.kind == "category":
        return CategoryStatistic(column.name)
    return NumericStatistic() if column.kind == "numeric" else TimeStatistic()


@dataclass(slots=True)
class NumericStatistic:
    """Mean and deviation."""

    rows: int = 0
    missing: int = 0
    total: ExactSum = field(default_factory=ExactSum)
    squares: ExactSum = field(default_factory=ExactSum)

    def add(self, values: pyarrow.Array) -> None:
        numbers = numbers_of(values)
        known = numbers[np.isfinite(numbers)]
        self.rows += len(numbers)
        self.missing += len(numbers) - len(known)
        self.total.add(known)
        self.squares.add_squares(known)

    def merge(self, other: Self) -> None:
        self.rows += other.rows
        self.missing += other.missing
        self.total.merge(other.total)
        self.squares.merge(other.squares)

    def fitted(self) -> dict[str, Any]:
        known = self.rows - self.missing
        mean = self.total.value() / known if known else Fraction(0)
        variance = self.squares.value() / known - mean * mean if known else Fraction(0)
        return {"rows": self.rows, "missing": self.missing, "mean": float(mean), "deviation": _root(variance)}


@dataclass(slots=True)
class CategoryStatistic:
    """How often each value occurs."""

    name: str
    rows: int = 0
    missing: int = 0
    counts: Counter[str] = field(default_factory=Counter)

    def add(self, values: pyarrow.Array) -> None:
        found = compute().value_counts(words_of(values).drop_null())
        self.rows += len(values)
        self.missing += values.null_count
        self.counts.update(dict(zip(found.field(0).to_pylist(), found.field(1).to_pylist(), strict=True)))
        self._refuse_too_many()

    def merge(self, other: Self) -> None:
        self.rows += other.rows
        self.missing += other.missing
        self.counts.update(other.counts)
        self._refuse_too_many()

    def _refuse_too_many(self) -> None:
        if len(self.counts) > MOST_VALUES:
            problem = (
                f"has more than {MOST_VALUES:,} different values, too many for a category; say identifier (a sketch of "
                "its values, without a vocabulary), text (of its words) or skip"
            )
            raise ConfigError([Problem(f"kinds.{self.name}", problem)])

    def fitted(self) -> dict[str, Any]:
        often = sorted(self.counts.items(), key=lambda item: (-item[1], item[0]))
        return {
            "rows": self.rows, "missing": self.missing, "values": len(often),
            "vocabulary": tuple(word for word, _ in often[:MOST_WORDS]),
        }  # fmt: skip


@dataclass(slots=True)
class TimeStatistic:
    """The latest moment, from which it is counted back."""

    rows: int = 0
    missing: int = 0
    latest: int | None = None

    def add(self, values: pyarrow.Array) -> None:
        self.rows += len(values)
        self.missing += values.null_count
        known = moments_of(values.drop_null())
        if len(known):
            self._see(int(known.max()))

    def merge(self, other: Self) -> None:
        self.rows += other.rows
        self.missing += other.missing
        if other.latest is not None:
            self._see(other.latest)

    def _see(self, moment: int) -> None:
        self.latest = moment if self.latest is None else max(self.latest, moment)

    def fitted(self) -> dict[str, Any]:
        return {"rows": self.rows, "missing": self.missing, "latest": self.latest or 0}


def numbers_of(values: pyarrow.Array) -> Floats:
    """float64, NaN for a null."""
    found: Floats = compute().cast(values, "float64", safe=False).to_numpy(zero_copy_only=False)
    return found


def words_of(values: pyarrow.Array) -> pyarrow.Array:
    """Each value as text."""
    return compute().cast(values, "string")


def moments_of(values: pyarrow.Array) -> np.ndarray[Any, np.dtype[np.int64]]:
    """Microseconds since 1970, UTC, of moments without nulls."""
    pyarrow = needed("pyarrow")
    zone = getattr(values.type, "tz", None)
    found: np.ndarray[Any, np.dtype[np.int64]] = (
        values.cast(pyarrow.timestamp("us", tz=zone)).cast("int64").to_numpy(zero_copy_only=False)
    )
    return found


def _root(square: Fraction) -> float:
    """The square root of a fraction that a float64 may be too small for."""
    if square <= 0:
        return 0.0
    half = (square.numerator.bit_length() - square.denominator.bit_length()) // 2
    return math.ldexp(math.sqrt(square / Fraction(4) ** half), half)
