"""A Parquet cache of query results: what a database gave once is read from a file in later epochs and tasks.

A result is named after everything that decides its rows: the source, the state of its data, its schema, and the query
without the size of its batches. So a table that has changed finds no old result, and nothing is ever invalidated in
place. Beside the Parquet file lies a marker with its rows, bytes and CRC-32C, written last: without it there is no
result, and a file that does not match it is discarded and the source is queried again, with the reason in the
`CacheUse`. A file is read from its beginning once to compare them, by the same handle that its rows come from
afterwards, so what was checked is what is read, whatever becomes of its name.

A result is written whole before its first row is handed on, as a draft that is moved into place, under a lock that the
kernel takes from a killed process. So a query that fails half-way leaves nothing and yields nothing, of two processes
that need the same result one queries and the other waits, and readers wait for nobody. A disk that refuses is no error
of the reader's: the rows then come from the source, and the use says why.

The one invariant: rows from the cache are those that the source gave for this query in this state.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import math
import os
import time
import uuid
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args

import google_crc32c

from kit.config import project_path, resolve_path
from kit.data.stores.lock import turn_at
from kit.data.tables.source import Query, checked, expected_schema, import_extra, refuse_difference
from kit.errors import ConfigError, Problem, QueryError, SchemaChangedError, StoreError, first_line
from kit.json_text import read_json
from kit.tables import html_table, text_table
from kit.units import format_bytes, format_count, plural

if TYPE_CHECKING:
    import pyarrow

    from kit.data.tables.source import TableSource

How = Literal["hit", "filled", "refilled", "not kept"]

_FORMAT = 1
_DRAFT, _RESULT, _MARKER, _LOCK = ".partial", ".parquet", ".json", ".turn"
_COLUMNS = ("table", "query", "rows", "file")
_USES = 1000
"""Uses that a source remembers."""
_READ_BYTES = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheUse:
    """What one query took from the cache, and why."""

    how: How
    reason: str
    rows: int = 0
    file_bytes: int = 0

    def __str__(self) -> str:
        return f"{self.how}: {self.reason}"


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


class _DamagedError(Exception):
    """A file that is not what its marker says."""


class _NotKeptError(Exception):
    """A result that cannot be written."""

    def __init__(self, error: BaseException) -> None:
        super().__init__(f"the result cannot be written: {getattr(error, 'strerror', None) or first_line(error)}")


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

    # -- what there is

    @property
    def size_bytes(self) -> int:
        """Bytes of all results on disk."""
        return sum(entry.file_bytes for entry in self.entries())

    def entries(self, source: TableSource | None = None) -> tuple[CacheEntry, ...]:
        """The results that are kept, of one source or of all, the oldest first."""
        found = (_read_marker(path) for path in self.folder.glob(f"*{_MARKER}"))
        key = None if source is None else _source_key(source)
        kept = (entry for entry in found if entry is not None and key in (None, entry.source_key))
        return tuple(sorted(kept, key=lambda entry: (entry.created, entry.key)))

    def drop(self, source: TableSource | None = None, *, stale: bool = False) -> int:
        """Remove results, of one source or of all; with `stale` those of a source whose state is another by now.

        Returns:
            The bytes freed. Who is reading a result reads it to its end.

        Raises:
            ConfigError: for `stale` without a source, whose state decides.
        """
        if stale and source is None:
            raise ConfigError([Problem("source", "stale results are those of one source; say which")])
        now = source.state() if stale and source is not None else None
        dropped = [entry for entry in self.entries(source) if now is None or entry.state != now]
        for entry in dropped:
            self._remove(entry.key)
        return sum(entry.file_bytes for entry in dropped)

    def _described(self) -> tuple[str, list[list[str]]]:
        """A headline, and a row for each result."""
        entries = self.entries()
        size = format_bytes(sum(entry.file_bytes for entry in entries))
        rows = [[e.source, e.query, format_count(e.rows), format_bytes(e.file_bytes)] for e in entries]
        return f"{plural(len(entries), 'result')}, {size}, in {project_path(self.folder)}", rows

    def __repr__(self) -> str:
        headline, rows = self._described()
        return "\n".join([headline, *[text_table(_COLUMNS, rows)] * bool(rows)])

    def _repr_html_(self) -> str:
        headline, rows = self._described()
        return html_table(_COLUMNS, rows, caption=headline)

    # -- reading

    def obtain(self, source: TableSource, query: Query) -> tuple[_Result | None, CacheUse]:
        """The result of a query, which is run and kept where it is not yet; None where it cannot be kept.

        Raises:
            QueryError: when the source fails; nothing is kept then.
        """
        state, expected = source.state(), expected_schema(source, query)
        columns = [(field.name, str(field.type)) for field in expected]
        decided = dataclasses.asdict(dataclasses.replace(query, batch_rows=1))
        key = _hash([_FORMAT, _source_key(source), state, columns, decided])
        found = self._open(key, expected)
        try:
            with contextlib.ExitStack() as lock:
                if not isinstance(found, _Result):
                    try:
                        lock.enter_context(turn_at(self._path(key, _LOCK), math.inf))
                    except StoreError as error:
                        return None, CacheUse(how="not kept", reason=str(error))
                    found = self._open(key, expected)  # another may have filled it meanwhile
                if isinstance(found, _Result):
                    kept = found.entry
                    reason = "kept from before"
                    return found, CacheUse(how="hit", reason=reason, rows=kept.rows, file_bytes=kept.file_bytes)
                return self._fill(source, query, state, key, expected, found)
        except _NotKeptError as error:
            return None, CacheUse(how="not kept", reason=str(error))

    def _open(self, key: str, expected: pyarrow.Schema) -> _Result | str:
        """The result if it is whole, else why it is not; empty when there is none."""
        entry = _read_marker(self._path(key, _MARKER))
        if entry is None:
            return "its marker is damaged" if self._path(key, _MARKER).exists() else ""
        try:
            return _Result(self._path(key, _RESULT), entry, expected)
        except FileNotFoundError:
            return "its file is gone"
        except _DamagedError as error:
            return str(error)

    def _fill(
        self, source: TableSource, query: Query, state: str, key: str, expected: pyarrow.Schema, damage: str
    ) -> tuple[_Result, CacheUse]:
        """Run the query and keep its result, within the lock of its key."""
        self._remove_drafts(key)
        self._remove(key)
        draft = self._path(key, f".{os.getpid()}.{uuid.uuid4().hex[:8]}{_DRAFT}")
        marker = draft.with_name(f"{draft.name}{_MARKER}{_DRAFT}")
        how: How = "refilled" if damage else "filled"
        reason = f"the result was discarded and is queried again: {damage}" if damage else "queried for the first time"
        try:
            rows = _write(draft, expected, checked(source.read(query), expected, source.name), query.batch_rows)
            with draft.open("rb") as file:
                file_bytes, crc32c = _summed(file)
            entry = CacheEntry(
                key=key, source=source.name, source_key=_source_key(source), state=state, query=describe(query),
                rows=rows, file_bytes=file_bytes, crc32c=crc32c, created=time.time(),
            )  # fmt: skip
            changed = source.state() != state
            if changed:
                how, reason = "not kept", "the table changed while it was read"
            try:
                result = _Result(draft, entry, expected)
                if not changed:
                    marker.write_text(json.dumps({"format": _FORMAT, **dataclasses.asdict(entry)}))
                    draft.replace(self._path(key, _RESULT))
                    marker.replace(self._path(key, _MARKER))
            except (OSError, _DamagedError) as error:
                raise _NotKeptError(error) from error
        finally:
            draft.unlink(missing_ok=True)
            marker.unlink(missing_ok=True)
        return result, CacheUse(how=how, reason=reason, rows=rows, file_bytes=file_bytes)

    # -- removing

    def _path(self, key: str, end: str) -> Path:
        return self.folder / f"{key}{end}"

    def _remove(self, key: str) -> None:
        """The marker first: without it the file is no result."""
        for end in (_MARKER, _RESULT):
            with contextlib.suppress(OSError):
                self._path(key, end).unlink(missing_ok=True)

    def _remove_drafts(self, key: str) -> None:
        """What a killed process left; only under the lock of this key, under which nobody else writes."""
        for path in self.folder.glob(f"{key}.*{_DRAFT}"):
            with contextlib.suppress(OSError):
                path.unlink(missing_ok=True)

    def _remove_leftovers(self) -> None:
        """What killed processes left: locks, drafts, results without a marker; what is being written is left alone."""
        begun = {path.name.partition(".")[0] for end in (_DRAFT, _LOCK) for path in self.folder.glob(f"*{end}")}
        results = {path.stem for path in self.folder.glob(f"*{_RESULT}")}
        marked = {path.stem for path in self.folder.glob(f"*{_MARKER}")}
        for key in begun | (results - marked):
            with contextlib.suppress(StoreError), turn_at(self._path(key, _LOCK), 0.0):
                self._remove_drafts(key)
                if not self._path(key, _MARKER).exists():
                    self._remove(key)


class CachedSource:
    """A table whose query results are kept: itself a `TableSource`, with the rows of the one it stands before.

    All but `read` is passed on to the source, the state of its data too.
    """

    def __init__(self, source: TableSource, cache: QueryCache) -> None:
        self.source, self.cache = source, cache
        self.uses: deque[CacheUse] = deque(maxlen=_USES)
        """What the last queries took from the cache, the latest last."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name == "source":  # while it is unpickled
            raise AttributeError(name)
        return getattr(self.source, name)

    def read(self, query: Query = Query()) -> Iterator[pyarrow.RecordBatch]:  # noqa: B008 - frozen
        """The rows of the query; none before all of them are there.

        Raises:
            QueryError: when the source fails, or a file changes while it is read.
        """
        result, use = self.cache.obtain(self.source, query)
        self.uses.append(use)
        if result is not None:
            return result.batches(query.batch_rows)
        return checked(self.source.read(query), expected_schema(self.source, query), self.source.name)

    @property
    def counts(self) -> dict[How, int]:
        """How often the last queries found their result, and how often not."""
        return {how: sum(use.how == how for use in self.uses) for how in get_args(How)}


def _source_key(source: TableSource) -> str:
    """Identifies a source, whatever the state of its data; holds no secret."""
    return _hash(source.identity())


def _hash(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True, default=str).encode()).hexdigest()[:40]


def describe(query: Query) -> str:
    """The query in a few words, without the values of its partition."""
    parts = [", ".join(query.columns) or "all columns", f"where {query.where}" if query.where else ""]
    if query.partition is not None:
        part = query.partition
        parts.append(f"{part.transformation} of {part.column}, query chunk {part.number + 1} of {part.count}")
    return "; ".join(filter(None, parts))


def _read_marker(path: Path) -> CacheEntry | None:
    """What a marker says; None when there is none that can be read."""
    try:
        values: Mapping[str, Any] = read_json(path.read_bytes())
        known = {name: values[name] for name in CacheEntry.__slots__}
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return CacheEntry(**known) if values.get("format") == _FORMAT else None


class _Result:
    """An open file that was whole when it was opened; it is read to its end whatever becomes of its name.

    Raises:
        FileNotFoundError: when there is none.
        _DamagedError: saying how the file differs from what was written.
    """

    def __init__(self, path: Path, entry: CacheEntry, expected: pyarrow.Schema) -> None:
        pyarrow, parquet = import_extra("pyarrow"), import_extra("pyarrow.parquet")
        self.entry, self._path, self._file = entry, path, pyarrow.OSFile(str(path))
        try:
            if self._file.size() != entry.file_bytes:
                raise _DamagedError(f"its file has {self._file.size()} bytes, {entry.file_bytes} were written")
            if _summed(self._file)[1] != entry.crc32c:
                raise _DamagedError("its file is not what was written: the checksum differs")
            self._file.seek(0)
            self._parquet = parquet.ParquetFile(self._file, pre_buffer=False)  # else it is in memory whole
            refuse_difference(expected, self._parquet.schema_arrow, entry.source)
        except BaseException as error:
            self._file.close()
            if isinstance(error, OSError | pyarrow.ArrowException | SchemaChangedError):
                raise _DamagedError(first_line(error)) from None
            raise

    def batches(self, batch_rows: int) -> Iterator[pyarrow.RecordBatch]:
        """Raises: QueryError: when the file is damaged after it was opened."""
        try:
            yield from self._parquet.iter_batches(batch_size=batch_rows)
        except (OSError, import_extra("pyarrow").ArrowException) as error:
            changed = f"the kept result {self._path} changed while it was read: {first_line(error)}"
            message = f"{self.entry.source}: {changed}; read it again, which queries the source"
            raise QueryError(message) from error
        finally:
            self._file.close()


def _summed(file: Any) -> tuple[int, int]:
    """(bytes, CRC-32C) of what is left of a file."""
    size = crc32c = 0
    while data := file.read(_READ_BYTES):
        size, crc32c = size + len(data), google_crc32c.extend(crc32c, data)
    return size, crc32c


def _write(path: Path, schema: pyarrow.Schema, batches: Iterable[pyarrow.RecordBatch], group_rows: int) -> int:
    """Rows written, in groups of at least `group_rows`, also of a database that sends few at a time.

    Raises:
        _NotKeptError: when the disk refuses, or Parquet has no such type; what the source raises goes through.
    """
    rows, parquet = 0, import_extra("pyarrow.parquet")
    with contextlib.ExitStack() as open_files:
        with _writing():
            writer = open_files.enter_context(parquet.ParquetWriter(path, schema, compression="zstd"))
        for group in _groups(batches, group_rows):
            with _writing():
                table = import_extra("pyarrow").Table.from_batches(group).cast(schema)
                writer.write_table(table, row_group_size=max(group_rows, table.num_rows))
            rows += table.num_rows
        with _writing():
            writer.close()
    return rows


def _groups(batches: Iterable[pyarrow.RecordBatch], group_rows: int) -> Iterator[Sequence[pyarrow.RecordBatch]]:
    group: list[pyarrow.RecordBatch] = []
    for batch in batches:
        group.append(batch)
        if sum(part.num_rows for part in group) >= group_rows:
            yield group
            group = []
    if group:
        yield group


@contextlib.contextmanager
def _writing() -> Iterator[None]:
    try:
        yield
    except (OSError, import_extra("pyarrow").ArrowException) as error:
        raise _NotKeptError(error) from error
