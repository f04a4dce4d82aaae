"""A Parquet cache of query results: what a database was asked once is read from a file in later epochs and tasks.

A result is named after everything that decides its rows: the source, the state of its data, its schema, and the query
without the size of its batches. So a table that has changed finds no old result, and nothing is ever invalidated in
place. Beside the Parquet file lies a marker with its rows, bytes and CRC-32C, written last: without it there is no
result, and a file that does not match it is discarded and asked for anew, with the reason in the `CacheUse`.

A result is written whole before its first row is handed on, under a name of its own, and moved into place, in a turn
that the kernel takes from a killed process. So a query that fails half-way leaves nothing and yields nothing, of two
processes that want the same result one asks and the other waits, and readers wait for nobody. A disk that refuses is no
error of the reader's: the rows then come from the source, and the use says why.

The one invariant: rows from the cache are those that the source gave for this query in this state.

One kept result of a query: a Parquet file, and the marker that says it is whole.

The marker has the file's rows, bytes and CRC-32C. A file is read from its beginning once to compare them, by the same
handle that its rows come from afterwards, so what was checked is what is read, whatever becomes of its name.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import importlib
import json
import math
import os
import time
import uuid
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import google_crc32c

from kit.config import resolve_path
from kit.data.stores.lock import turn_at
from kit.data.tables.source import GroupSizes, Query, checked, expected_schema, needed, refuse_difference
from kit.errors import ConfigError, Problem, QueryError, SchemaChangedError, StoreError
from kit.json_text import read_json
from kit.tables import html_table, text_table
from kit.units import format_bytes, format_count, plural

if TYPE_CHECKING:
    import pyarrow

    from kit.data.tables.source import TableSource

How = Literal["hit", "filled", "refilled", "not kept"]

_DRAFT, _RESULT, _MARKER, _TURN = ".partial", ".parquet", ".json", ".turn"
_COLUMNS = ("table", "query", "rows", "file")
_USES = 1000
"""Uses that a source remembers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheUse:
    """What one query took from the cache, and why."""

    how: How
    reason: str
    rows: int = 0
    file_bytes: int = 0

    def __str__(self) -> str:
        return f"{self.how}: {self.reason}"


class QueryCache:
    """Results of queries in a folder that all processes of a machine share; call from any thread of any process.

    Args:
        folder: Where they are kept; made if need be. Relative paths start at the project folder.

    Raises:
        ConfigError: when the folder cannot be made.
    """

    def __init__(self, folder: str | Path) -> None:
        self.folder = resolve_path(folder)
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            message = f"{self.folder} cannot be written: {error.strerror}"
            raise ConfigError([Problem("queries.cache_path", message)]) from None
        self._remove_leftovers()

    def over(self, source: TableSource) -> CachedSource:
        """The source, read through this cache."""
        return CachedSource(source, self)

    # -- what is there

    @property
    def size_bytes(self) -> int:
        """Bytes of all results on disk."""
        return sum(entry.file_bytes for entry in self.entries())

    def entries(self, source: TableSource | None = None) -> tuple[CacheEntry, ...]:
        """The results that are kept, of one source or of all, the oldest first."""
        found = (read_entry(path) for path in self.folder.glob(f"*{_MARKER}"))
        mine = None if source is None else source_key(source)
        kept = (entry for entry in found if entry is not None and mine in (None, entry.source_key))
        return tuple(sorted(kept, key=lambda entry: (entry.created, entry.key)))

    def drop(self, source: TableSource | None = None, *, stale: bool = False) -> int:
        """Remove results, of one source or of all; with `stale` those of a source whose state is another by now.

        Returns:
            The bytes freed. Who is reading a result reads it to its end.

        Raises:
            ConfigError: for `stale` without a source, whose state would have to be asked.
        """
        if stale and source is None:
            raise ConfigError([Problem("source", "stale results are those of one source; say which")])
        now = source.state() if stale and source is not None else None
        dropped = [entry for entry in self.entries(source) if now is None or entry.state != now]
        for entry in dropped:
            self._remove(entry.key)
        return sum(entry.file_bytes for entry in dropped)

    def __repr__(self) -> str:
        entries = self.entries()
        return "\n".join([self._headline(entries), *[text_table(_COLUMNS, _rows(entries))] * bool(entries)])

    def _repr_html_(self) -> str:
        entries = self.entries()
        return html_table(_COLUMNS, _rows(entries), caption=escape(self._headline(entries)))

    def _headline(self, entries: Sequence[CacheEntry]) -> str:
        size_bytes = sum(entry.file_bytes for entry in entries)
        return f"{plural(len(entries), 'result')}, {format_bytes(size_bytes)}, in {self.folder}"

    # -- reading

    def obtain(self, source: TableSource, query: Query) -> tuple[Result | None, CacheUse]:
        """The result of a query, asked for and kept if it is not; None where it cannot be kept.

        Raises:
            QueryError: when the source fails; nothing is kept then.
        """
        state, expected = source.state(), expected_schema(source, query)
        key = _key(source, state, expected, query)
        found = self._open(key, expected)
        if isinstance(found, Result):
            return found, _hit(found)
        try:
            with contextlib.ExitStack() as turn:
                self._take_turn(turn, key)
                found = self._open(key, expected)  # another may have filled it meanwhile
                if isinstance(found, Result):
                    return found, _hit(found)
                return self._fill(source, query, state, key, expected, found)
        except NotKeptError as error:
            return None, CacheUse(how="not kept", reason=str(error))

    def _open(self, key: str, expected: pyarrow.Schema) -> Result | str:
        """The result if it is whole, else why it is not; empty when there is none."""
        entry = read_entry(self._path(key, _MARKER))
        if entry is None:
            return "its marker is damaged" if self._path(key, _MARKER).exists() else ""
        try:
            return Result.open(self._path(key, _RESULT), entry, expected)
        except FileNotFoundError:
            return "its file is gone"
        except DamagedError as error:
            return str(error)

    def _take_turn(self, turn: contextlib.ExitStack, key: str) -> None:
        try:
            turn.enter_context(turn_at(self._path(key, _TURN), math.inf))
        except StoreError as error:
            raise NotKeptError(str(error)) from None

    def _fill(
        self, source: TableSource, query: Query, state: str, key: str, expected: pyarrow.Schema, damage: str
    ) -> tuple[Result, CacheUse]:
        self._remove_drafts(key)
        self._remove(key)
        draft = self._path(key, f".{os.getpid()}.{uuid.uuid4().hex[:8]}{_DRAFT}")
        try:
            rows = write_result(draft, expected, checked(source.read(query), expected, source.name), query.batch_rows)
            file_bytes, crc32c = digest(draft)
            entry = CacheEntry(
                key=key, source=source.name, source_key=source_key(source), state=state, query=describe(query),
                rows=rows, file_bytes=file_bytes, crc32c=crc32c, created=time.time(),
            )  # fmt: skip
            result = reopened(draft, entry, expected)
            if source.state() != state:
                reason = "the table changed while it was read"
                return result, CacheUse(how="not kept", reason=reason, rows=rows, file_bytes=file_bytes)
            self._publish(draft, entry)
        finally:
            draft.unlink(missing_ok=True)
        how: How = "refilled" if damage else "filled"
        reason = f"the result was discarded and asked for anew: {damage}" if damage else "asked for the first time"
        return result, CacheUse(how=how, reason=reason, rows=rows, file_bytes=file_bytes)

    def _publish(self, draft: Path, entry: CacheEntry) -> None:
        marker = draft.with_name(f"{draft.name}{_MARKER}{_DRAFT}")
        try:
            marker.write_text(marker_text(entry))
            draft.replace(self._path(entry.key, _RESULT))
            marker.replace(self._path(entry.key, _MARKER))
        except OSError as error:
            raise NotKeptError(why_not_kept(error)) from None
        finally:
            marker.unlink(missing_ok=True)

    # -- removing

    def _path(self, key: str, end: str) -> Path:
        return self.folder / f"{key}{end}"

    def _remove(self, key: str) -> None:
        """The marker first: without it the file is no result."""
        for end in (_MARKER, _RESULT):
            with contextlib.suppress(OSError):
                self._path(key, end).unlink(missing_ok=True)

    def _remove_drafts(self, key: str) -> None:
        """What a killed process left; only in the turn of this key, in which nobody else writes."""
        for path in self.folder.glob(f"{key}.*{_DRAFT}"):
            with contextlib.suppress(OSError):
                path.unlink(missing_ok=True)

    def _remove_leftovers(self) -> None:
        """What killed processes left: turns, drafts, results without a marker; what is being written is left alone."""
        begun = {path.name.partition(".")[0] for end in (_DRAFT, _TURN) for path in self.folder.glob(f"*{end}")}
        results = {path.stem for path in self.folder.glob(f"*{_RESULT}")}
        marked = {path.stem for path in self.folder.glob(f"*{_MARKER}")}
        for key in begun | (results - marked):
            with contextlib.suppress(StoreError), turn_at(self._path(key, _TURN), 0.0):
                self._remove_drafts(key)
                if not self._path(key, _MARKER).exists():
                    self._remove(key)


class CachedSource:
    """A table whose query results are kept: itself a `TableSource`, with the rows of the one it stands before.

    Args:
        source: What is asked for what is not kept, and for the state of the data each time.
        cache: Where results are kept.
    """

    def __init__(self, source: TableSource, cache: QueryCache) -> None:
        self.source, self.cache = source, cache
        self.name, self.date_column = source.name, source.date_column
        self.main_entity_column = source.main_entity_column
        self.partition_column = source.partition_column
        self.partition_transformation = source.partition_transformation
        self.shares_process = source.shares_process
        self.uses: deque[CacheUse] = deque(maxlen=_USES)
        """What the last queries took from the cache, the latest last."""

    def schema(self) -> pyarrow.Schema:
        return self.source.schema()

    def row_count(self) -> int:
        return self.source.row_count()

    def null_count(self, column: str) -> int:
        return self.source.null_count(column)

    def value_counts(self, column: str) -> list[tuple[Any, int]]:
        return self.source.value_counts(column)

    def group_sizes(self, column: str, where: str = "") -> GroupSizes:
        return self.source.group_sizes(column, where)

    def identity(self) -> str:
        return self.source.identity()

    def state(self) -> str:
        return self.source.state()

    def memory_bytes(self) -> int | None:
        return self.source.memory_bytes()

    def close(self) -> None:
        self.source.close()

    def read(self, query: Query = Query()) -> Iterator[pyarrow.RecordBatch]:  # noqa: B008 - frozen
        """The rows of the query; none before all of them are there.

        Raises:
            QueryError: when the source fails, or a file changes while it is read.
        """
        result, use = self.cache.obtain(self.source, query)
        self.uses.append(use)
        return (
            checked(self.source.read(query), expected_schema(self.source, query), self.name)
            if result is None
            else (result.batches(query.batch_rows))
        )

    @property
    def counts(self) -> dict[How, int]:
        """How often the last queries found their result, and how often not."""
        hows: tuple[How, ...] = ("hit", "filled", "refilled", "not kept")
        return {how: sum(use.how == how for use in self.uses) for how in hows}


def _rows(entries: Sequence[CacheEntry]) -> list[list[str]]:
    return [[entry.source, entry.query, format_count(entry.rows), format_bytes(entry.file_bytes)] for entry in entries]


def source_key(source: TableSource) -> str:
    """What tells a source from all others, whatever the state of its data; names no secret."""
    return _hash(source.identity())


def describe(query: Query) -> str:
    """The query in a few words, without the values of its partition."""
    parts = [", ".join(query.columns) or "all columns", f"where {query.where}" if query.where else ""]
    if query.partition is not None:
        part = query.partition
        parts.append(f"{part.transformation} of {part.column}, query chunk {part.number + 1} of {part.count}")
    return "; ".join(filter(None, parts))


def _key(source: TableSource, state: str, expected: pyarrow.Schema, query: Query) -> str:
    columns = [(field.name, str(field.type)) for field in expected]
    asked = dataclasses.asdict(dataclasses.replace(query, batch_rows=1))
    return _hash([FORMAT, source_key(source), state, columns, asked])


def _hash(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True, default=str).encode()).hexdigest()[:40]


def _hit(result: Result) -> CacheUse:
    entry = result.entry
    return CacheUse(how="hit", reason="kept from before", rows=entry.rows, file_bytes=entry.file_bytes)


FORMAT = 1
_READ_BYTES = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheEntry:
    """One result that is kept, as its marker says."""

    key: str
    source: str
    source_key: str
    """Which source it is of, whatever the state of that."""
    state: str
    query: str
    rows: int
    file_bytes: int
    crc32c: int
    created: float
    """Seconds since 1970."""


class Result:
    """An open file that was whole when it was opened; it is read to its end whatever becomes of its name."""

    def __init__(self, path: Path, file: Any, parquet: Any, entry: CacheEntry) -> None:
        self._path, self._file, self._parquet = path, file, parquet
        self.entry = entry

    @classmethod
    def open(cls, path: Path, entry: CacheEntry, expected: pyarrow.Schema) -> Result:
        """Raises: FileNotFoundError; DamagedError, saying how the file differs from what was written."""
        pyarrow = needed("pyarrow")
        file = pyarrow.OSFile(str(path))
        try:
            _refuse_damage(file, entry)
            parquet = _parquet().ParquetFile(file, pre_buffer=False)  # else it is in memory whole
            refuse_difference(expected, parquet.schema_arrow, entry.source)
            return cls(path, file, parquet, entry)
        except (OSError, pyarrow.ArrowException, SchemaChangedError) as error:
            file.close()
            raise DamagedError(str(error).splitlines()[0]) from None
        except BaseException:
            file.close()
            raise

    def batches(self, batch_rows: int) -> Iterator[pyarrow.RecordBatch]:
        """Raises: QueryError: when the file is damaged after it was opened."""
        try:
            yield from self._parquet.iter_batches(batch_size=batch_rows)
        except (OSError, needed("pyarrow").ArrowException) as error:
            reason = str(error).splitlines()[0]
            message = f"{self.entry.source}: the kept result {self._path} changed while it was read: {reason}"
            raise QueryError(f"{message}; read it again, and it is asked for anew") from error
        finally:
            self._file.close()


class DamagedError(Exception):
    """A file that is not what its marker says."""


class NotKeptError(Exception):
    """A result that cannot be written."""


def read_entry(path: Path) -> CacheEntry | None:
    """What a marker says; None when there is none that can be read."""
    try:
        values: Mapping[str, Any] = read_json(path.read_bytes())
        known = {name: values[name] for name in CacheEntry.__slots__}
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return CacheEntry(**known) if values.get("format") == FORMAT else None


def marker_text(entry: CacheEntry) -> str:
    """What `read_entry` reads."""
    return json.dumps({"format": FORMAT, **dataclasses.asdict(entry)})


def _parquet() -> Any:
    needed("pyarrow")
    return importlib.import_module("pyarrow.parquet")


def write_result(path: Path, schema: pyarrow.Schema, batches: Iterable[pyarrow.RecordBatch], group_rows: int) -> int:
    """Rows written.

    Raises:
        NotKeptError: when the disk refuses, or Parquet has no such type; what the source raises goes through.
    """
    rows = 0
    with contextlib.ExitStack() as open_files:
        with _writing():
            writer = open_files.enter_context(_parquet().ParquetWriter(path, schema, compression="zstd"))
        for table in _groups(batches, schema, group_rows):
            with _writing():
                writer.write_table(table, row_group_size=max(group_rows, table.num_rows))
            rows += table.num_rows
        with _writing():
            writer.close()
    return rows


def _groups(batches: Iterable[pyarrow.RecordBatch], schema: pyarrow.Schema, group_rows: int) -> Iterator[pyarrow.Table]:
    """Batches put together to groups of so many rows, for a database that sends few at a time."""
    held: list[pyarrow.RecordBatch] = []
    for batch in batches:
        held.append(batch)
        if sum(part.num_rows for part in held) >= group_rows:
            yield _table(held, schema)
            held = []
    if held:
        yield _table(held, schema)


def _table(batches: list[pyarrow.RecordBatch], schema: pyarrow.Schema) -> pyarrow.Table:
    return needed("pyarrow").Table.from_batches(batches).cast(schema)


@contextlib.contextmanager
def _writing() -> Iterator[None]:
    try:
        yield
    except (OSError, needed("pyarrow").ArrowException) as error:
        raise NotKeptError(why_not_kept(error)) from error


def why_not_kept(error: BaseException) -> str:
    text = getattr(error, "strerror", None) or (str(error).splitlines() or [type(error).__name__])[0]
    return f"the result cannot be written: {text}"


def reopened(draft: Path, entry: CacheEntry, expected: pyarrow.Schema) -> Result:
    try:
        return Result.open(draft, entry, expected)
    except (OSError, DamagedError) as error:
        raise NotKeptError(why_not_kept(error)) from error


def digest(path: Path) -> tuple[int, int]:
    """(bytes, CRC-32C) of a file."""
    with path.open("rb") as file:
        return _summed(file)


def _summed(file: Any) -> tuple[int, int]:
    size = crc32c = 0
    while data := file.read(_READ_BYTES):
        size, crc32c = size + len(data), google_crc32c.extend(crc32c, data)
    return size, crc32c


def _refuse_damage(file: Any, entry: CacheEntry) -> None:
    """Raises: DamagedError: when length or checksum are not those of the marker; leaves the file at its start."""
    if file.size() != entry.file_bytes:
        raise DamagedError(f"its file has {file.size()} bytes, {entry.file_bytes} were written")
    if _summed(file)[1] != entry.crc32c:
        raise DamagedError("its file is not what was written: the checksum differs")
    file.seek(0)
