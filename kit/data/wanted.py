"""Wanted: what a reader asks a store for, and what it gets, as jobs of its threads.

A `Wanted` holds chunks that lie in one object, an `Answer` the bytes of one chunk. Both are owners of jobs that fail by
telling the cache, which tells every batch that waits; so no batch waits for a job that died.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from kit.data.cache import Chunk, ChunkCache
from kit.data.codec import StoredArray
from kit.data.octets import Octets
from kit.data.room import Claim


@dataclass(slots=True)
class Wanted:
    """Chunks to read from one object: all of a shard, or the one that the object is."""

    cache: ChunkCache
    stored: StoredArray
    key: str
    chunks: list[Chunk]

    @property
    def over(self) -> bool:
        """Never: a chunk that nobody wants any more is forgotten when its turn comes, not skipped."""
        return False

    def fail(self, error: BaseException) -> None:
        """Tell all who wait for these chunks."""
        for chunk in self.chunks:
            self.cache.fail(chunk, error)

    def part(self, chunks: Iterable[Chunk]) -> Wanted:
        """Some of the chunks."""
        return Wanted(self.cache, self.stored, self.key, [*chunks])


@dataclass(slots=True)
class Answer:
    """The bytes of one chunk."""

    cache: ChunkCache
    stored: StoredArray
    chunk: Chunk
    data: Octets
    size_bytes: int
    shared: bool
    """Whether they are part of a longer answer."""
    claim: Claim | None
    """The memory of that answer."""

    @property
    def complete(self) -> bool:
        """Whether the store gave all of it."""
        return len(self.data) == self.size_bytes

    @property
    def over(self) -> bool:
        """Never: it has been read, and is soon decoded."""
        return False

    def fail(self, error: BaseException) -> None:
        """Tell all who wait for this chunk."""
        self.cache.fail(self.chunk, error)

    def give_room_back(self) -> None:
        """It needs no room of requests any more; safe to call twice."""
        claim, self.claim = self.claim, None
        if claim is not None:
            claim.done()
