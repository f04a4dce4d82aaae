"""One kept result of a query: a Parquet file, and the marker that says it is whole.

The marker has the file's rows, bytes and CRC-32C. A file is read from its beginning once to compare them, by the same
handle that its rows come from afterwards, so what was checked is what is read, whatever becomes of its name.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import google_crc32c

from kit.data.tables.expected import refuse_difference
from kit.data.tables.extras import needed
from kit.errors import QueryError, SchemaChangedError
from kit.json_text import read_json

if TYPE_CHECKING:
    import pyarrow

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
