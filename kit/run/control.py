"""The stop protocol: two words of memory that the kernel, the supervisor and every rank share through a file.

Whoever wants the trial to end sets `requested`. Rank 0 sees it when it has finished step k and writes
`stop_at = k + 1` before it begins that step; every other rank reads `stop_at` after each step and leaves when it has
finished exactly that one. In ddp and fsdp no rank can finish step k + 1 before rank 0 has begun it, so all ranks leave
after the same step and no collective is left half done. No clock takes part. A trial of one rank leaves after step k.
"""

from __future__ import annotations

import mmap
from pathlib import Path

STOP = 1
KILL = 2
_REQUESTED, _STOP_AT = 0, 1
_WORD_BYTES = 8


class Control:
    """The shared memory in the file `control` of a run directory; aligned words, so no read is torn."""

    def __init__(self, path: Path) -> None:
        with path.open("r+b") as file:
            self._map = mmap.mmap(file.fileno(), 2 * _WORD_BYTES)
        self._words = memoryview(self._map).cast("Q")

    @staticmethod
    def create(path: Path) -> None:
        path.write_bytes(bytes(2 * _WORD_BYTES))

    @property
    def requested(self) -> int:
        """0, `STOP` or `KILL`."""
        return self._words[_REQUESTED]

    def request(self, level: int) -> None:
        self._words[_REQUESTED] = max(level, self.requested)

    def should_leave(self, step: int, rank: int, world_size: int) -> bool:
        """Whether this rank, having just finished optimizer step `step`, leaves the fit now."""
        if rank == 0 and self.requested and not self._words[_STOP_AT]:
            self._words[_STOP_AT] = step if world_size == 1 else step + 1
        return self._words[_STOP_AT] == step

    def close(self) -> None:
        self._words.release()
        self._map.close()
