"""How a reader asks a wire for chunks: without a thread that waits, each told of its bytes where they arrive.

The index of a shard is fetched once whoever asks, before the chunks that wait already; what it says then becomes one
request for each run of neighbours. A request whose chunks nobody wants any more is dropped when its turn comes, and one
for which there is no room in memory holds up those behind it.
"""

from __future__ import annotations

from collections.abc import Iterable
from concurrent.futures import Future
from functools import partial

from kit.data.cache import Chunk
from kit.data.codec import Index, decode_index
from kit.data.indexes import ShardIndexes
from kit.data.intake import Intake
from kit.data.octets import Octets
from kit.data.room import Claim
from kit.data.wanted import Wanted
from kit.data.wire import Ask, Wire
from kit.plan.coalescing import Run


class WireReads:
    """The requests of one reader."""

    def __init__(self, wire: Wire, url: str, intake: Intake) -> None:
        self._wire, self._url, self._intake = wire, url, intake

    def ask(self, found: Iterable[Wanted]) -> None:
        """Ask for objects, or for what is wanted of shards.

        Raises:
            StoreError: when the wire is closed.
        """
        whole: list[Ask] = []
        for item in found:
            if item.stored.per_shard is None:
                whole.append(_Bytes(self._intake, item, None))
                continue
            future, mine = self._intake.indexes.claim(item.key)
            if mine:
                self._wire.ask([_IndexBytes(self._intake.indexes, item, self._url)], soon=True)
            future.add_done_callback(partial(self._ask_runs, item))
        self._wire.ask(whole)

    def give_up_unwanted(self) -> None:
        """Nothing to do: what nobody wants any more is left out when its turn comes."""

    def close(self) -> None:
        """End the connections."""
        self._wire.close()

    def _ask_runs(self, item: Wanted, index: Future[Index | None]) -> None:
        wanted = item.part(self._intake.cache.still_wanted(item.chunks))
        try:
            found = self._intake.runs(wanted, index.result()) if wanted.chunks else []
            self._wire.ask([_Bytes(self._intake, item.part(chunk for _, _, chunk in run.items), run) for run in found])
        except BaseException as error:
            item.fail(error)


class _Bytes(Ask):
    """One object, or neighbours in a shard."""

    __slots__ = ("_claim", "_intake", "_run", "_wanted")

    def __init__(self, intake: Intake, wanted: Wanted, run: Run[Chunk] | None) -> None:
        super().__init__(wanted.key, *(() if run is None else (run.first, run.last)))
        self._intake, self._wanted, self._run = intake, wanted, run
        self._claim: Claim | None = None

    def begin(self) -> bool | None:
        if self._claim is None:  # else it has been sent before
            if not self._intake.cache.still_wanted(self._wanted.chunks):
                return False
            self._claim = self._intake.room.try_take(self._intake.size_of(self._wanted, self._run))
        return True if self._claim is not None else None

    def done(self, data: Octets | None) -> None:
        claim, self._claim = self._claim, None  # from here on it is the answer's
        assert claim is not None
        self._intake.deliver(self._wanted, self._run, data, claim)

    def fail(self, error: BaseException) -> None:
        if self._claim is not None:
            self._claim.done()
        self._wanted.fail(error)


class _IndexBytes(Ask):
    """The index of a shard."""

    __slots__ = ("_indexes", "_url", "_wanted")

    def __init__(self, indexes: ShardIndexes, wanted: Wanted, url: str) -> None:
        super().__init__(wanted.key, *wanted.stored.index_span)
        self._indexes, self._wanted, self._url = indexes, wanted, url

    def done(self, data: Octets | None) -> None:
        index = None if data is None else decode_index(self._wanted.stored, self.key, data, self._url)
        self._indexes.give(self.key, index)

    def fail(self, error: BaseException) -> None:
        self._indexes.give(self.key, error)
