"""Features: the columns of an event table as numbers, one row of each tensor for each entity.

`kit.fit_features` makes one from a pass over the table; it is small, can be pickled and written as JSON, and equal for
equal rows however they were read. `encode` takes whole entities and gives, for each,

    entity       int64 (entity,)             its id, or for ids that are no integers a hash of 63 bits
    events       int64 (entity,)             how many events the features are of
    numeric      float32 (entity, number)    `Features.numbers`: log(1 + events), and aggregates of numbers and times
    categorical  int64 (entity, category)    most frequent value: 0 missing, 1 not in the vocabulary, 2 ... the values
    sketch       float32 (entity, width)     column after column, `DEPTH` rows of buckets each, each sums to 1 or is 0
    target       float32 (entity, width)     the same of the later events, which the others know nothing of

The later events are the last `target_fraction` of an entity's events by `date_column`; events of one moment stay
together, among the earlier ones. Without a date column a hash of the sketched values decides. An entity of which none
is later has a target of zeros.

The one invariant: neither the order of the rows nor which entities are encoded together changes a bit of a row.
"""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kit.data.tables import aggregates
from kit.data.tables.columns import SKETCHED, compute
from kit.data.tables.extras import needed
from kit.data.tables.feature_rows import FeatureRows, Mask
from kit.data.tables.hashing import Hashes, Rows, mixed
from kit.data.tables.sketching import DEPTH, sketch_of, sketch_width
from kit.data.tables.statistics import FittedColumn, numbers_of, words_of
from kit.errors import ConfigError, SchemaChangedError
from kit.json_text import read_json
from kit.tables import html_table, text_table
from kit.units import format_bytes

if TYPE_CHECKING:
    import pyarrow

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
        names = {"numeric": aggregates.NUMERIC, "time": aggregates.TIME}
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
        _check_schema(self, events.schema)
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
        """Which rows are foretold."""
        if self.date_column:
            return _latest(*rows.moments(self.date_column), rows.entities, rows.count, self.target_fraction)
        chosen = mixed(self._row_hashes(rows), 7) < np.uint64(int(self.target_fraction * 2**64))
        early = np.bincount(rows.entities[~chosen], minlength=rows.count)
        mask: Mask = chosen & (early[rows.entities] > 0)
        return mask

    def _row_hashes(self, rows: FeatureRows) -> Hashes:
        found = np.zeros(len(rows.entities), np.uint64)
        for column in self.sketched:
            known, hashes = rows.hashes(column.name)
            found[known] += hashes
            found = mixed(found)
        return found

    def _numeric(self, rows: FeatureRows) -> NDArray[np.float32]:
        parts = [np.log1p(np.bincount(rows.entities, minlength=rows.count))[:, None]]
        for column in self.columns:
            if column.kind == "numeric":
                values = numbers_of(rows.column(column.name))
                parts.append(aggregates.of_numbers(values, rows.entities, rows.count, column.mean, column.deviation))
            elif column.kind == "time":
                moments, known = rows.moments(column.name)
                parts.append(aggregates.of_moments(moments, known, rows.entities, rows.count, column.latest))
        return np.concatenate(parts, axis=1).astype(np.float32)

    def _categorical(self, rows: FeatureRows) -> Rows:
        found = np.zeros((rows.count, len(self.categories)), np.int64)
        for place, column in enumerate(self.categories):
            codes = _codes(words_of(rows.column(column.name)), column.vocabulary)
            found[:, place] = aggregates.most_frequent(
                codes, rows.entities, rows.count, _FIRST_WORD + len(column.vocabulary)
            )
        return found

    def _sketch(self, rows: FeatureRows) -> NDArray[np.float32]:
        width = sketch_width(self.sketch_quality)
        found = np.zeros((rows.count, len(self.sketched), DEPTH, width), np.float32)
        for place, column in enumerate(self.sketched):
            whose, hashes = rows.values(column)
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
        return [_row(column, DEPTH * sketch_width(self.sketch_quality)) for column in self.columns]


def _row(column: FittedColumn, sketch_numbers: int) -> list[str]:
    found = {
        "numeric": f"mean {column.mean:.4g}, deviation {column.deviation:.4g}",
        "category": f"{len(column.vocabulary):,} of {column.values:,} values in the vocabulary",
        "time": f"latest {np.datetime64(column.latest, 'us').astype('datetime64[s]')}",
        "identifier": "sketched as it is", "text": "sketched as it is",
    }  # fmt: skip
    numbers = {"numeric": len(aggregates.NUMERIC), "time": len(aggregates.TIME), "category": 1 + sketch_numbers}
    rows = [f"{column.rows:,}", f"{column.missing:,}"] if column.rows else ["", ""]
    return [column.name, column.kind, *rows, found[column.kind], f"{numbers.get(column.kind, sketch_numbers):,}"]


def _check_schema(features: Features, schema: Any) -> None:
    missing = [name for name in features.query_columns if name not in schema.names]
    if missing:
        raise SchemaChangedError(
            f"the features are of a column {missing[0]!r} that the rows lack; they have {', '.join(schema.names)}. "
            "Fit the features again, or read features.query_columns"
        )
    for column in features.columns:
        now = str(schema.field(column.name).type)
        if now != column.type:
            raise SchemaChangedError(
                f"column {column.name!r} was {column.type} when its features were fitted and is {now} now; fit again"
            )


def _codes(words: Any, vocabulary: tuple[str, ...]) -> Rows:
    """Codes of texts, (row,): their place in the vocabulary, after those for missing and unknown."""
    functions, pyarrow = compute(), needed("pyarrow")
    places = functions.index_in(words, value_set=pyarrow.array(vocabulary, "string"), skip_nulls=True)
    codes = functions.fill_null(functions.add(functions.cast(places, "int64"), _FIRST_WORD), _UNKNOWN)
    found: Rows = functions.if_else(words.is_valid(), codes, _MISSING).to_numpy(zero_copy_only=False)
    return found


def _latest(moments: Rows, known: Mask, entities: Rows, count: int, fraction: float) -> Mask:
    """Which events are among the last `fraction` of their entity's, those of one moment all or none of them."""
    order = np.lexsort((moments, entities))
    sizes = np.bincount(entities, minlength=count)
    later = (sizes * fraction).astype(np.int64)
    last_early = np.cumsum(sizes) - later - 1
    mask: Mask = known & (moments > moments[order[last_early]][entities])
    return mask
