"""Statistics of a column, gathered in one pass by many workers: what a feature is made with.

A column is taken for a kind, by its Arrow type unless it is said: numeric (numbers: shifted and scaled, a null is
flagged), category (few values: a vocabulary, and a sketch), identifier (many values: a sketch only), text (a sketch of
its words and pairs of words), time (how long ago), or skip.

A statistic takes the values of a record batch and merges with others of its column. All are exact (a sum without
rounding, counts, extremes), so the order and the cut of the rows leave no trace in the result.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import TYPE_CHECKING, Any, Literal, Self, cast, get_args

import numpy as np
from numpy.typing import NDArray
from typing_extensions import override

from kit.data.tables.source import import_extra
from kit.errors import ConfigError, Problem, did_you_mean

if TYPE_CHECKING:
    import pyarrow

Kind = Literal["numeric", "category", "identifier", "text", "time", "skip"]
KINDS: tuple[Kind, ...] = get_args(Kind)
FITTED: tuple[Kind, ...] = ("numeric", "category", "time")
"""Kinds that must be read once before they are features."""
SKETCHED: tuple[Kind, ...] = ("category", "identifier", "text")


@dataclass(frozen=True, slots=True, kw_only=True)
class Column:
    """One column and what it is taken for."""

    name: str
    kind: Kind
    type: str
    """Its Arrow type in words."""


def compute() -> Any:
    """pyarrow's functions on columns."""
    return import_extra("pyarrow.compute")


def choose_columns(
    schema: pyarrow.Schema, entity_column: str, kinds: Mapping[str, str], columns: Sequence[str] = ()
) -> tuple[Column, ...]:
    """The columns that become features, in the order of the schema.

    Args:
        schema: That of the table.
        entity_column: Says whose row it is, and is no feature.
        kinds: Kind by column, where the Arrow type does not say.
        columns: Columns to take; empty for all.

    Raises:
        ConfigError: for a column that is not there, a kind that is none or does not go with the type of its column,
            and when nothing is left.
    """
    problems = [
        Problem(path, f"the table has no column {name!r}{did_you_mean(name, schema.names)}")
        for path, names in (("kinds", kinds), ("columns", columns))
        for name in names
        if name not in schema.names
    ]
    for name, kind in kinds.items():
        if kind not in KINDS:
            hint = did_you_mean(kind, KINDS, otherwise="")
            problems.append(Problem(f"kinds.{name}", f"{kind!r} is none of {', '.join(KINDS)}{hint}"))
    if problems:
        raise ConfigError(problems)
    chosen = []
    for field in schema:
        if field.name == entity_column or (columns and field.name not in columns):
            continue
        by_type, type_name = kind_of_type(field.type), str(field.type)
        kind = cast(Kind, kinds.get(field.name, by_type))
        numeric, text = by_type == "numeric" or type_name == "bool", type_name.endswith("string")
        if not {"numeric": numeric, "time": by_type == "time", "text": text}.get(kind, True):
            raise ConfigError([Problem(f"kinds.{field.name}", f"a column of {type_name} is no {kind}")])
        if kind != "skip":
            chosen.append(Column(name=field.name, kind=kind, type=type_name))
    if not chosen:
        raise ConfigError([Problem("columns", f"no column is left to make features of, beside {entity_column!r}")])
    return tuple(chosen)


def kind_of_type(type_: pyarrow.DataType) -> Kind:
    """What a column of that Arrow type is taken for when nothing is said."""
    types = import_extra("pyarrow").types
    if types.is_integer(type_) or types.is_floating(type_) or types.is_decimal(type_):
        return "numeric"
    if types.is_timestamp(type_) or types.is_date(type_):
        return "time"
    return "category" if types.is_boolean(type_) or types.is_string(type_) or types.is_large_string(type_) else "skip"


# -- sums


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
    """The sum of many float64 without any rounding, so that no order and no cut of them changes it.

    Means that are computed in one pass and merged (Welford 1962; Chan, Golub, LeVeque 1983) are right to about 1e-15,
    but another cut of the same rows gives other last digits, and standardised columns would differ with the number of
    query chunks. Here every number is split into its exponent and a whole number of 53 bits, whole numbers of one
    exponent are added as such (a long accumulator: Kulisch 1971), and only the result is rounded. Its squares are exact
    too: a product is the pair of its rounded value and its error (Dekker 1971).

    It holds 2 x 4,400 int64, 69 KiB, and up to 2^36 numbers.
    """

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
            square = fractions * fractions
            scaled = fractions * _SPLITTER
            high = scaled - (scaled - fractions)
            low = fractions - high
            error = ((high * high - square) + 2 * high * low) + low * low  # what the square lacks, a float64 too
            for share in (square, error):
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


# -- statistics

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


class Statistic:
    """What is known of a column's rows so far."""

    def __init__(self, column: Column) -> None:
        self.column = column
        self.rows = self.missing = 0

    def add(self, values: pyarrow.Array) -> None:
        """Take in the values of one record batch."""
        self.rows += len(values)
        self.missing += values.null_count

    def merge(self, other: Self) -> None:
        """Take in what another one of the same column knows."""
        self.rows += other.rows
        self.missing += other.missing

    def fitted(self) -> FittedColumn:
        column, found = self.column, self._found()
        return FittedColumn(
            name=column.name, kind=column.kind, type=column.type, rows=self.rows, missing=self.missing, **found
        )

    def _found(self) -> dict[str, Any]:
        """The fields of `FittedColumn` that this kind of column has."""
        return {}


class NumericStatistic(Statistic):
    """Mean and deviation."""

    def __init__(self, column: Column) -> None:
        super().__init__(column)
        self.total, self.squares = ExactSum(), ExactSum()

    @override
    def add(self, values: pyarrow.Array) -> None:
        super().add(values)
        numbers = numbers_of(values)
        known = numbers[np.isfinite(numbers)]
        self.missing += len(values) - values.null_count - len(known)
        self.total.add(known)
        self.squares.add_squares(known)

    @override
    def merge(self, other: Self) -> None:
        super().merge(other)
        self.total.merge(other.total)
        self.squares.merge(other.squares)

    @override
    def _found(self) -> dict[str, Any]:
        known = self.rows - self.missing
        mean = self.total.value() / known if known else Fraction(0)
        variance = self.squares.value() / known - mean * mean if known else Fraction(0)
        return {"mean": float(mean), "deviation": _root(variance)}


class CategoryStatistic(Statistic):
    """How often each value occurs."""

    def __init__(self, column: Column) -> None:
        super().__init__(column)
        self.counts: Counter[str] = Counter()

    @override
    def add(self, values: pyarrow.Array) -> None:
        super().add(values)
        found = compute().value_counts(words_of(values).drop_null())
        self._count(dict(zip(found.field(0).to_pylist(), found.field(1).to_pylist(), strict=True)))

    @override
    def merge(self, other: Self) -> None:
        super().merge(other)
        self._count(other.counts)

    def _count(self, counts: Mapping[str, int]) -> None:
        self.counts.update(counts)
        if len(self.counts) > MOST_VALUES:
            problem = (
                f"has more than {MOST_VALUES:,} different values, too many for a category; say identifier (a sketch of "
                "its values, without a vocabulary), text (of its words) or skip"
            )
            raise ConfigError([Problem(f"kinds.{self.column.name}", problem)])

    @override
    def _found(self) -> dict[str, Any]:
        often = sorted(self.counts, key=lambda word: (-self.counts[word], word))
        return {"values": len(often), "vocabulary": tuple(often[:MOST_WORDS])}


class TimeStatistic(Statistic):
    """The latest moment, from which it is counted back."""

    latest: int | None = None

    @override
    def add(self, values: pyarrow.Array) -> None:
        super().add(values)
        known = moments_of(values.drop_null())
        self._see(int(known.max()) if len(known) else None)

    @override
    def merge(self, other: Self) -> None:
        super().merge(other)
        self._see(other.latest)

    def _see(self, moment: int | None) -> None:
        self.latest = max((each for each in (self.latest, moment) if each is not None), default=None)

    @override
    def _found(self) -> dict[str, Any]:
        return {"latest": self.latest or 0}


def new_statistic(column: Column) -> Statistic:
    """An empty one for a column of a kind in `FITTED`."""
    kinds = {"numeric": NumericStatistic, "category": CategoryStatistic, "time": TimeStatistic}
    return kinds[column.kind](column)


def numbers_of(values: pyarrow.Array) -> Floats:
    """float64, NaN for a null."""
    found: Floats = compute().cast(values, "float64", safe=False).to_numpy(zero_copy_only=False)
    return found


def words_of(values: pyarrow.Array) -> pyarrow.Array:
    """Each value as text."""
    return compute().cast(values, "string")


def moments_of(values: pyarrow.Array) -> NDArray[np.int64]:
    """Microseconds since 1970, UTC, of moments without nulls."""
    moments = values.cast(import_extra("pyarrow").timestamp("us", tz=getattr(values.type, "tz", None)))
    found: NDArray[np.int64] = moments.cast("int64").to_numpy(zero_copy_only=False)
    return found


def _root(square: Fraction) -> float:
    """The square root of a fraction that a float64 may be too small for."""
    if square <= 0:
        return 0.0
    half = (square.numerator.bit_length() - square.denominator.bit_length()) // 2
    return math.ldexp(math.sqrt(square / Fraction(4) ** half), half)
