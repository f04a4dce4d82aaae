"""NpyDraft: a `.npy` file on its way, written beside its place block by block, and moved there when it is whole.

Beside the rows lies a list of the blocks that were written, each with its checksum. A write that was ended (killed,
interrupted, failed) is gone on with by one that asks for the same shape, type and blocks: blocks are kept from the
first on, as long as each is there with its checksum. The list alone is never believed, so a block that was half
written, and all that follow it, are made again. One row of the last block kept is asked for again: rows of a source
that has changed since are refused rather than mixed. At every moment the place holds what it held before, or all rows.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
from collections.abc import Iterator
from itertools import takewhile
from pathlib import Path
from typing import IO, Any, Protocol

import google_crc32c
import numpy as np
from numpy.typing import NDArray

from kit.data.progress import Progress
from kit.data.rows.size import free_disk_bytes
from kit.errors import BuildError
from kit.units import format_bytes

_READ_BYTES = 4 << 20
_SYNC_BYTES = 64 << 20
_LINE_BYTES = 9
"""Of a checksum in the list."""


class Made(Protocol):
    """Rows that can be asked for in any block, and again."""

    shape: tuple[int, ...]
    """(rows, *columns)."""
    dtype: np.dtype[Any]
    row_bytes: int

    def rows(self, start: int, stop: int) -> NDArray[Any]:
        """(stop - start, *columns), of that type."""


class NpyDraft:
    """What is there of one array, and what is still to be written.

    Args:
        file: Its place.
        made: Its rows.
        row_block: Rows made and written at a time.
    """

    def __init__(self, file: Path, made: Made, row_block: int) -> None:
        self.file, self._made, self._row_block = file, made, row_block
        self.partial = file.with_name(f".{file.name}.partial")
        self._list = file.with_name(f".{file.name}.blocks")
        asked = {"shape": made.shape, "dtype": made.dtype.str, "row_block": row_block}
        self._asked = f"{json.dumps(asked)}\n".encode()
        self._header = _header(made)
        self.blocks = -(-made.shape[0] // row_block)
        self.kept = 0
        """Blocks from the first on that are written."""

    def take_up(self) -> None:
        """Find what an ended write has left of this array; what is of another one is removed.

        Raises:
            BuildError: when the source gives other rows than it did then, or the disk has no room for the rest.
        """
        self.kept = self._whole_blocks()
        if self.kept:
            self._refuse_other_rows()
        else:
            self.forget()
        self._refuse_full()

    def forget(self) -> None:
        """Remove what is there."""
        for path in (self._list, self.partial):
            path.unlink(missing_ok=True)

    def write(self, progress: Progress) -> None:
        """Make and write every block that is not there, and move the file to its place."""
        try:
            with self._opened() as (file, listed):
                progress(self.kept, self.blocks, self._rows_of(self.kept) * self._made.row_bytes)
                self._write_blocks(file, listed, progress)
            self.partial.replace(self.file)
        except BaseException as error:
            self._leave(error)
            raise
        self._list.unlink(missing_ok=True)

    # -- writing

    @contextlib.contextmanager
    def _opened(self) -> Iterator[tuple[IO[bytes], IO[bytes]]]:
        """The file and the list, each at the end of what is kept."""
        with self.partial.open("ab") as file, self._list.open("ab") as listed:
            if self.kept:
                file.truncate(self._place_of(self.kept))
                listed.truncate(len(self._asked) + self.kept * _LINE_BYTES)
            else:
                file.write(self._header)
                listed.write(self._asked)
            yield file, listed

    def _write_blocks(self, file: IO[bytes], listed: IO[bytes], progress: Progress) -> None:
        """By plain writes, each block on the disk before the next but few: no mapped page adds up."""
        unsynced = 0
        for number in range(self.kept, self.blocks):
            rows = np.ascontiguousarray(self._made.rows(self._rows_of(number), self._rows_of(number + 1)))
            data = rows.reshape(-1).view(np.uint8)
            file.write(data.data)
            file.flush()
            listed.write(_line(google_crc32c.value(data)))
            listed.flush()
            self.kept, unsynced = number + 1, unsynced + rows.nbytes
            if unsynced >= _SYNC_BYTES:
                os.fsync(file.fileno())
                unsynced = 0
            progress(self.kept, self.blocks, self._rows_of(self.kept) * self._made.row_bytes)
        os.fsync(file.fileno())

    def _leave(self, error: BaseException) -> None:
        """What is written stays for the next call, and the error says so."""
        if self.kept:
            error.add_note(f"{self.kept} of {self.blocks} row blocks of {self.file} are kept; the same call goes on")
        else:
            self.forget()

    # -- what is there

    def _whole_blocks(self) -> int:
        """Blocks from the first on that are there as they were written."""
        try:
            asked, *lines = self._list.read_bytes().splitlines(keepends=True) or [b""]
            with self.partial.open("rb") as file:
                if asked != self._asked or file.read(len(self._header)) != self._header:
                    return 0
                numbered = enumerate(lines[: self.blocks])
                return sum(1 for _ in takewhile(lambda pair: self._sum(file, pair[0]) == pair[1], numbered))
        except OSError:
            return 0

    def _sum(self, file: IO[bytes], number: int) -> bytes:
        """The line that a block has in the list, from the bytes that the file has next; empty for too few."""
        left, crc32c = self._place_of(number + 1) - self._place_of(number), 0
        while left and (data := file.read(min(left, _READ_BYTES))):
            left, crc32c = left - len(data), google_crc32c.extend(crc32c, data)
        return b"" if left else _line(crc32c)

    def _refuse_other_rows(self) -> None:
        start = self._rows_of(self.kept - 1)
        made = self._made.rows(start, start + 1)
        with self.partial.open("rb") as file:
            file.seek(self._place_of(self.kept - 1))
            there = np.frombuffer(file.read(self._made.row_bytes), self._made.dtype).reshape(made.shape)
        # One row alone may be rounded otherwise than in its block.
        if not np.allclose(made, there, rtol=1e-3, atol=1e-6, equal_nan=True):
            raise BuildError(
                f"{self.file}: row {start:,} comes out different from when this write began, {self.kept} of "
                f"{self.blocks} row blocks ago, so the source has changed; use overwrite=True to begin again"
            )

    def _refuse_full(self) -> None:
        needed_bytes = (self._made.shape[0] - self._rows_of(self.kept)) * self._made.row_bytes
        free_bytes = free_disk_bytes(self.file.parent)
        if needed_bytes > free_bytes:
            what = "the rest of the array" if self.kept else "the array"
            raise BuildError(
                f"{self.file}: {what} takes {format_bytes(needed_bytes)} and {format_bytes(free_bytes)} is free; free "
                "some space, choose another path, or write fewer rows"
            )

    def _rows_of(self, blocks: int) -> int:
        """Rows in the first blocks."""
        return min(blocks * self._row_block, self._made.shape[0])

    def _place_of(self, block: int) -> int:
        """Where a block begins in the file."""
        return len(self._header) + self._rows_of(block) * self._made.row_bytes


def _header(made: Made) -> bytes:
    header = io.BytesIO()
    told = {"descr": made.dtype.str, "fortran_order": False, "shape": made.shape}
    np.lib.format.write_array_header_1_0(header, told)
    return header.getvalue()


def _line(crc32c: int) -> bytes:
    return f"{crc32c:08x}\n".encode()
