"""Features: the columns of an event table as numbers, one row of each tensor for each entity.

`kit.data.fit_features` makes one from a pass over the table; it is small, can be pickled and written as JSON, and equal
for equal rows however they were read. `encode` takes whole entities and gives, for each,

    entity       int64 (entity,)             its id, or for ids that are no integers a hash of 63 bits
    events       int64 (entity,)             how many events the features are of
    numeric      float32 (entity, number)    `Features.numbers`: log(1 + events), and aggregates of numbers and times
    categorical  int64 (entity, category)    most frequent value: 0 missing, 1 not in the vocabulary, 2 ... the values
    sketch       float32 (entity, width)     column after column, `DEPTH` rows of buckets each, each sums to 1 or is 0
    target       float32 (entity, width)     the same of the later events, which the others know nothing of

The later events are the last `target_fraction` of an entity's events by `date_column`; events of one moment stay
together, among the earlier ones. Without a date column a hash of the sketched values decides. An entity of which none
is later has a target of zeros.

The one invariant: neither the order of the rows nor which entities are encoded together changes a bit of a row. Sums of
floats depend on their order, so the values of an entity are sorted before they are added.

A sketch says which values an entity's events hold and how often, in a fixed number of numbers. Each value falls into
one of `width` buckets, in `DEPTH` independent ways, and each row of buckets is counted and divided by its sum (a count
sketch without signs: Cormode, Muthukrishnan 2005; normalised as in EMDE: Dabrowski et al. 2021). Two values share a
bucket with probability 1 / width, and all buckets with probability 1 / width^DEPTH.

Values are hashed alike in every process, on every machine, in every version: a text by BLAKE2b to 64 bits, once for
each different text of a column; numbers are mixed by splitmix64 (Steele, Lea, Flood 2014), which changes half of the
bits when one changes.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kit.data.tables.source import import_extra
from kit.data.tables.statistics import SKETCHED, FittedColumn, Floats, compute, moments_of, numbers_of, words_of
from kit.errors import ConfigError, PartitionError, Problem, SchemaChangedError
from kit.json_text import read_json
from kit.tables import html_table, text_table
from kit.units import format_bytes

if TYPE_CHECKING:
    import pyarrow

Hashes = NDArray[np.uint64]
Rows = NDArray[np.int64]
Mask = NDArray[np.bool_]
NUMERIC = ("mean", "lowest", "highest", "missing")
TIME = ("since_last", "since_first", "missing")
DEPTH = 4
"""Independent ways in which values are shared out."""
LARGEST = 10.0
"""Standard deviations from the mean beyond which a number is cut off: an outlier of one entity is none of the batch."""
_DAY = 86_400_000_000
_EARLIEST = np.iinfo(np.int64).min
_WIDTH = 128
_STEP = 8
"""What matrix units take at a time."""
_LARGEST_QUALITY = 512.0
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_BETWEEN_WORDS = r"[^\p{L}\p{N}]+"
_VERSION = 1
_MISSING, _UNKNOWN, _FIRST_WORD = 0, 1, 2
_COLUMNS = ("column", "taken for", "rows", "missing", "found", "numbers")


@dataclass(frozen=True, slots=True, kw_only=True)
class Features:
    """How the columns of a table become numbers."""

    entity_column: str
    date_column: str
    """Empty for none."""
    columns: tuple[FittedColumn, ...]
    sketch_quality: float
    target_fraction: float

    # -- what is read, and what comes out

    @property
    def query_columns(self) -> tuple[str, ...]:
        """What a query must read for `encode`."""
        names = (self.entity_column, *(column.name for column in self.columns), self.date_column)
        return tuple(dict.fromkeys(filter(None, names)))

    @property
    def numbers(self) -> tuple[str, ...]:
        """What each number of `numeric` is."""
        names = {"numeric": NUMERIC, "time": TIME}
        return ("events", *(f"{c.name}.{part}" for c in self.columns for part in names.get(c.kind, ())))

    @property
    def categories(self) -> tuple[FittedColumn, ...]:
        """The columns of `categorical`."""
        return tuple(column for column in self.columns if column.kind == "category")

    @property
    def sketched(self) -> tuple[FittedColumn, ...]:
        """The columns of `sketch`."""
        return tuple(column for column in self.columns if column.kind in SKETCHED)

    @property
    def sketch_numbers(self) -> int:
        """Numbers of `sketch`, for each entity."""
        return len(self.sketched) * DEPTH * sketch_width(self.sketch_quality)

    def model_arguments(self) -> dict[str, Any]:
        """What `kit.models.SketchModel` is made with to fit these."""
        return {
            "sketched_columns": len(self.sketched), "numbers": len(self.numbers),
            "categories": [_FIRST_WORD + len(column.vocabulary) for column in self.categories],
            "sketch_quality": self.sketch_quality,
        }  # fmt: skip

    def memory_bytes(self, entities: int) -> int:
        """What `encode` returns for so many entities."""
        sketches = (2 if self.target_fraction else 1) * self.sketch_numbers
        return entities * (8 * 2 + 4 * len(self.numbers) + 8 * len(self.categories) + 4 * sketches)

    def with_quality(self, sketch_quality: float) -> Features:
        """The same with sketches of another width, without another pass."""
        sketch_width(sketch_quality)
        return dataclasses.replace(self, sketch_quality=float(sketch_quality))

    # -- encoding

    def encode(self, events: pyarrow.Table | pyarrow.RecordBatch) -> dict[str, Tensor]:
        """The features of each entity, in the order of their first rows.

        Args:
            events: All rows of some entities, in any order, with `query_columns`.

        Raises:
            SchemaChangedError: for a column that is missing or has another type than it was fitted with.
            PartitionError: for a row without an entity.
        """
        missing = [name for name in self.query_columns if name not in events.schema.names]
        if missing:
            raise SchemaChangedError(
                f"the features are of a column {missing[0]!r} that the rows lack; they have "
                f"{', '.join(events.schema.names)}. Fit the features again, or read features.query_columns"
            )
        for column in self.columns:
            now = str(events.schema.field(column.name).type)
            if now != column.type:
                raise SchemaChangedError(
                    f"column {column.name!r} was {column.type} when its features were fitted and is {now} now; fit "
                    "again"
                )
        rows = FeatureRows.of(events, self.entity_column)
        late = self._late(rows) if self.target_fraction else np.zeros(len(rows.entities), bool)
        early = rows.only(~late)
        found = {
            "entity": rows.ids, "events": np.bincount(early.entities, minlength=rows.count),
            "numeric": self._numeric(early), "categorical": self._categorical(early), "sketch": self._sketch(early),
        }  # fmt: skip
        if self.target_fraction:
            found["target"] = self._sketch(rows.only(late))
        return {name: torch.from_numpy(np.ascontiguousarray(values)) for name, values in found.items()}

    def _late(self, rows: FeatureRows) -> Mask:
        """Which rows are later events, which the target is made of; those of one moment are all or none of them."""
        if self.date_column:
            moments, known = rows.moments(self.date_column)
            sizes = np.bincount(rows.entities, minlength=rows.count)
            last_early = np.cumsum(sizes) - (sizes * self.target_fraction).astype(np.int64) - 1
            order = np.lexsort((moments, rows.entities))
            later: Mask = known & (moments > moments[order[last_early]][rows.entities])
            return later
        hashes = np.zeros(len(rows.entities), np.uint64)
        for column in self.sketched:
            known, found = rows.hashes(column.name)
            hashes[known] += found
            hashes = mixed(hashes)
        chosen = mixed(hashes, 7) < np.uint64(int(self.target_fraction * 2**64))
        early = np.bincount(rows.entities[~chosen], minlength=rows.count)
        late: Mask = chosen & (early[rows.entities] > 0)
        return late

    def _numeric(self, rows: FeatureRows) -> NDArray[np.float32]:
        parts = [np.log1p(np.bincount(rows.entities, minlength=rows.count))[:, None]]
        for column in self.columns:
            if column.kind == "numeric":
                values = numbers_of(rows.column(column.name))
                parts.append(of_numbers(values, rows.entities, rows.count, column.mean, column.deviation))
            elif column.kind == "time":
                moments, known = rows.moments(column.name)
                parts.append(of_moments(moments, known, rows.entities, rows.count, column.latest))
        return np.concatenate(parts, axis=1).astype(np.float32)

    def _categorical(self, rows: FeatureRows) -> Rows:
        functions, pyarrow = compute(), import_extra("pyarrow")
        found = np.zeros((rows.count, len(self.categories)), np.int64)
        for place, column in enumerate(self.categories):
            words, vocabulary = words_of(rows.column(column.name)), pyarrow.array(column.vocabulary, "string")
            places = functions.cast(functions.index_in(words, value_set=vocabulary, skip_nulls=True), "int64")
            codes = functions.fill_null(functions.add(places, _FIRST_WORD), _UNKNOWN)
            codes = functions.if_else(words.is_valid(), codes, _MISSING).to_numpy(zero_copy_only=False)
            found[:, place] = most_frequent(codes, rows.entities, rows.count, _FIRST_WORD + len(column.vocabulary))
        return found

    def _sketch(self, rows: FeatureRows) -> NDArray[np.float32]:
        width = sketch_width(self.sketch_quality)
        found = np.zeros((rows.count, len(self.sketched), DEPTH, width), np.float32)
        for place, column in enumerate(self.sketched):
            if column.kind == "text":
                texts = rows.column(column.name)
                places, hashes = word_hashes(words_of(texts.drop_null()))
                whose = rows.entities[texts.is_valid().to_numpy(zero_copy_only=False)][places]
            else:
                known, hashes = rows.hashes(column.name)
                whose = rows.entities[known]
            found[:, place] = sketch_of(whose, hashes, rows.count, width)
        return found.reshape(rows.count, self.sketch_numbers)

    # -- kept

    def to_json(self) -> str:
        """As text that `from_json` reads."""
        return json.dumps({"version": _VERSION, **dataclasses.asdict(self)}, allow_nan=False, indent=1)

    @classmethod
    def from_json(cls, text: str) -> Self:
        """What `to_json` wrote.

        Raises:
            ConfigError: for a text that is cut off, of another version, or no features at all.
        """
        try:
            values = read_json(text)
            version = values.pop("version")
            columns = [FittedColumn(**{**one, "vocabulary": tuple(one["vocabulary"])}) for one in values.pop("columns")]
            found = cls(columns=tuple(columns), **values)
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise ConfigError(f"these are no features that kit wrote ({error}); fit them again") from error
        if version != _VERSION:
            raise ConfigError(f"features of version {version}, but this kit reads {_VERSION}; fit them again")
        return found

    # -- shown

    def __repr__(self) -> str:
        return text_table(_COLUMNS, self._table) + f"\n- {self._sentence}"

    def _repr_html_(self) -> str:
        return html_table(_COLUMNS, self._table, caption=self._sentence)

    @property
    def _sentence(self) -> str:
        shape = (
            f"{len(self.numbers)} numbers, most frequent values of {len(self.categories)} and a sketch of "
            f"{len(self.sketched)} x {DEPTH} x {sketch_width(self.sketch_quality)} numbers"
        )
        return f"each {self.entity_column}: {shape}, {format_bytes(self.memory_bytes(1))} with its target"

    @property
    def _table(self) -> list[list[str]]:
        sketch_numbers, rows = DEPTH * sketch_width(self.sketch_quality), []
        for column in self.columns:
            found = {
                "numeric": f"mean {column.mean:.4g}, deviation {column.deviation:.4g}",
                "category": f"{len(column.vocabulary):,} of {column.values:,} values in the vocabulary",
                "time": f"latest {np.datetime64(column.latest, 'us').astype('datetime64[s]')}",
            }.get(column.kind, "sketched as it is")
            numbers = {"numeric": len(NUMERIC), "time": len(TIME), "category": 1 + sketch_numbers}
            counts = [f"{column.rows:,}", f"{column.missing:,}"] if column.rows else ["", ""]
            count = numbers.get(column.kind, sketch_numbers)
            rows.append([column.name, column.kind, *counts, found, f"{count:,}"])
        return rows


@dataclass(frozen=True, slots=True, kw_only=True)
class FeatureRows:
    """The events that features are made of, column by column, and whose each of them is."""

    table: Any
    entities: Rows
    """(row,), from 0 to count - 1."""
    count: int
    """Entities."""
    ids: Rows
    """(entity,)"""

    @classmethod
    def of(cls, events: Any, entity_column: str) -> FeatureRows:
        """Those of a table or a record batch.

        Raises:
            PartitionError: for a row without an entity.
        """
        pyarrow = import_extra("pyarrow")
        table = pyarrow.table(events) if isinstance(events, pyarrow.RecordBatch) else events
        ids = _flat(table.column(entity_column))
        if ids.null_count:
            raise PartitionError(
                f"{ids.null_count:,} of {len(ids):,} events have no {entity_column}, so they are nobody's; "
                f"leave them out with where: '\"{entity_column}\" IS NOT NULL'"
            )
        encoded = ids.dictionary_encode()
        distinct, entities = encoded.dictionary, encoded.indices.to_numpy(zero_copy_only=False).astype(np.int64)
        if pyarrow.types.is_integer(distinct.type):
            numbers = np.array(distinct.to_numpy(zero_copy_only=False), np.int64)
        else:
            numbers = (hashes_of(words_of(distinct)) >> np.uint64(1)).astype(np.int64)
        return cls(table=table, entities=entities, count=len(distinct), ids=numbers)

    def only(self, mask: Mask) -> FeatureRows:
        """Some of the rows; entities keep their places."""
        table = self.table.filter(import_extra("pyarrow").array(mask))
        return dataclasses.replace(self, table=table, entities=self.entities[mask])

    def column(self, name: str) -> Any:
        """A column as one Arrow array."""
        return _flat(self.table.column(name))

    def moments(self, name: str) -> tuple[Rows, Mask]:
        """Microseconds, (row,), and which rows have one."""
        column = self.column(name)
        known: Mask = column.is_valid().to_numpy(zero_copy_only=False)
        found = np.full(len(column), _EARLIEST)
        found[known] = moments_of(column.drop_null())
        return found, known

    def hashes(self, name: str) -> tuple[Mask, Hashes]:
        """Which rows have a value, and its hash of those."""
        column = self.column(name)
        known: Mask = column.is_valid().to_numpy(zero_copy_only=False)
        return known, hashes_of(words_of(column.drop_null()))


def _flat(column: Any) -> Any:
    """One array of a column of several."""
    flat = column.combine_chunks()
    return flat.chunk(0) if hasattr(flat, "num_chunks") else flat


def of_numbers(values: Floats, entities: Rows, count: int, mean: float, deviation: float) -> Floats:
    """Mean, lowest, highest and the share that is missing, (entity, 4), in standard deviations from the column's mean.

    `values` are one number an event, (event,), of which those that are not finite are missing; `entities` says whose
    event it is, (event,).
    """
    known = np.isfinite(values)
    with np.errstate(over="ignore"):
        scaled = np.clip((values[known] - mean) / (deviation or np.inf), -LARGEST, LARGEST)
    extremes = _extremes(scaled, entities[known], count)
    return np.column_stack([*extremes, _missing(known, entities, count)])


def of_moments(moments: Rows, known: Mask, entities: Rows, count: int, latest: int) -> Floats:
    """log(1 + days) since the last event and since the first, and the share that is missing, (entity, 3).

    `moments` are microseconds, (event,), of any value where they are not `known`. Days are counted back from `latest`;
    later events count as of that moment.
    """
    ago = np.maximum(latest - moments[known], 0) / _DAY
    _, shortest, longest = _extremes(ago, entities[known], count)
    return np.column_stack([np.log1p(shortest), np.log1p(longest), _missing(known, entities, count)])


def most_frequent(codes: Rows, entities: Rows, count: int, values: int) -> Rows:
    """The most frequent code of each entity, the lowest among equals, (entity,); 0 for one without events.

    `codes` are one an event, (event,), each from 0 to `values` - 1.
    """
    pairs, often = np.unique(entities * values + codes, return_counts=True)
    whose, what = pairs // values, pairs % values
    order = np.lexsort((what, -often, whose))
    first = order[np.unique(whose[order], return_index=True)[1]]
    found = np.zeros(count, np.int64)
    found[whose[first]] = what[first]
    return found


def _extremes(values: Floats, entities: Rows, count: int) -> tuple[Floats, Floats, Floats]:
    """Mean, lowest and highest of each entity, (entity,) each; 0 for one without values."""
    order = np.lexsort((values, entities))
    values = values[order]
    sizes = np.bincount(entities, minlength=count)
    some = np.flatnonzero(sizes)
    ends = np.cumsum(sizes)[some]
    starts = ends - sizes[some]
    mean, lowest, highest = np.zeros(count), np.zeros(count), np.zeros(count)
    if len(some):
        mean[some] = np.add.reduceat(values, starts) / sizes[some]
        lowest[some], highest[some] = values[starts], values[ends - 1]
    return mean, lowest, highest


def _missing(known: Mask, entities: Rows, count: int) -> Floats:
    events = np.bincount(entities, minlength=count)
    return np.bincount(entities[~known], minlength=count) / np.maximum(events, 1)


def sketch_width(quality: float) -> int:
    """Buckets of a row at that quality: 128 times it, in multiples of 8.

    Raises:
        ConfigError: when it is not above 0, or above 512.
    """
    if not 0 < quality <= _LARGEST_QUALITY:
        raise ConfigError([Problem("sketch_quality", f"is {quality}, but must be above 0, and at most 512")])
    return max(_STEP, round(_WIDTH * quality / _STEP) * _STEP)


def sketch_of(entities: Rows, hashes: Hashes, count: int, width: int) -> NDArray[np.float32]:
    """Sketches of `count` entities, (entity, depth, bucket); each row of buckets sums to 1, or is 0 without values."""
    found = np.empty((count, DEPTH, width), np.float32)
    for way in range(DEPTH):
        buckets = (mixed(hashes, way) % np.uint64(width)).astype(np.int64)
        counts = np.bincount(entities * width + buckets, minlength=count * width).reshape(count, width)
        found[:, way] = counts / np.maximum(counts.sum(axis=1, keepdims=True), 1)
    return found


def mixed(hashes: Hashes, turn: int = 0) -> Hashes:
    """Other hashes of the same, independent of those of another turn."""
    with np.errstate(over="ignore"):
        found = hashes + _GOLDEN * np.uint64(turn + 1)
        found = (found ^ (found >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        found = (found ^ (found >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return found ^ (found >> np.uint64(31))


def hashes_of(words: pyarrow.Array) -> Hashes:
    """A hash of each text, (row,), of a column without nulls."""
    encoded = words.dictionary_encode()
    digests = b"".join(
        hashlib.blake2b(word.encode(), digest_size=8).digest() for word in encoded.dictionary.to_pylist()
    )
    table = np.frombuffer(digests, "<u8").astype(np.uint64)
    found: Hashes = table[encoded.indices.to_numpy(zero_copy_only=False)]
    return found


def word_hashes(texts: pyarrow.Array) -> tuple[Rows, Hashes]:
    """A hash of each word, and of each two in a row, of texts without nulls: the row it is of, and the hash.

    Words are runs of letters and digits, whatever their case.
    """
    functions = compute()
    lists = functions.split_pattern_regex(functions.utf8_lower(texts), pattern=_BETWEEN_WORDS)
    words, rows = functions.list_flatten(lists), functions.list_parent_indices(lists)
    full = functions.not_equal(words, "")
    of_rows = functions.filter(rows, full).to_numpy(zero_copy_only=False).astype(np.int64)
    hashes = hashes_of(functions.filter(words, full))
    with np.errstate(over="ignore"):
        pairs = mixed(hashes[:-1], 1) * np.uint64(3) + hashes[1:]
    together = of_rows[:-1] == of_rows[1:]
    return np.concatenate([of_rows, of_rows[1:][together]]), np.concatenate([hashes, pairs[together]])
