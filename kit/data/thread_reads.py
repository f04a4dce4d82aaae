"""How a reader asks a folder, a cache or a file system for chunks: by threads, each waiting for its answer."""

from __future__ import annotations

from collections.abc import Iterable

from kit.data.cache import Chunk
from kit.data.codec import Index
from kit.data.intake import Intake
from kit.data.requests import Blocking, read_index
from kit.data.wanted import Wanted
from kit.data.workers import Workers
from kit.plan.coalescing import Run


class ThreadReads:
    """The requests of one reader, `threads` of them at once."""

    def __init__(self, source: Blocking, url: str, intake: Intake, threads: int) -> None:
        self._source, self._url, self._intake = source, url, intake
        self._threads = Workers(threads, "kit-read")

    def ask(self, found: Iterable[Wanted]) -> None:
        """Ask for objects, or for what is wanted of shards."""
        for item in found:
            self._threads.put(item, self._read_object, item)

    def give_up_unwanted(self) -> None:
        """Nothing to do: what nobody wants any more is left out when its turn comes."""

    def close(self) -> None:
        """End the threads after the requests they are at."""
        self._threads.close()

    def _read_object(self, item: Wanted) -> None:
        if item.stored.per_shard is None:
            self._read_run(item, None)
            return
        wanted = item.part(self._intake.cache.still_wanted(item.chunks))
        if not wanted.chunks:
            return
        index = self._intake.indexes.get(wanted.key, lambda: self._read_index(wanted))
        for run in self._intake.runs(wanted, index)[::-1]:
            part = wanted.part(chunk for _, _, chunk in run.items)
            self._threads.put(part, self._read_run, part, run)

    def _read_index(self, wanted: Wanted) -> Index | None:
        return read_index(self._source, wanted.stored, wanted.key, self._url)

    def _read_run(self, wanted: Wanted, run: Run[Chunk] | None) -> None:
        if not self._intake.cache.still_wanted(wanted.chunks):
            return
        claim = self._intake.room.take(self._intake.size_of(wanted, run))
        try:
            data = self._source.read(wanted.key, *(() if run is None else (run.first, run.last)))
        except BaseException:
            claim.done()
            raise
        self._intake.deliver(wanted, run, data, claim)
