"""Batches of whole entities from a table, query chunk after query chunk, in an order that nothing but the plan decides.

A thread reads the query chunks of a pass, one at a time: the next one while this one is served, where `Room` holds
both. Each rank reads every query chunk and keeps its own entities of it; with a cache of query results the database is
asked once for all of them.

`state_dict` says how far the pass has come, with any number of query chunks; a loader that takes it goes on with the
batches not yet handed over, and reads only the query chunks they are in. It is refused when the table has changed
since. A read that fails, and a table that is not what it was when the batches were planned, end the pass with an error
before anything of that query chunk is handed over; the state is still right, and the pass can go on from it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

from typing_extensions import override

from kit.data.epoch_passes import EpochPasses
from kit.data.tables.event_chunks import EventChunk, Room, Stopped, arrange, copied, gather, joined, let_go, serve
from kit.data.tables.event_plan import EventPlan, Numbers
from kit.data.tables.event_table import EventTable
from kit.errors import QueryError
from kit.plan.query_chunks import ORDER_BYTES
from kit.units import format_bytes

if TYPE_CHECKING:
    import pyarrow

Encode = Callable[["pyarrow.Table"], Any]


class EventLoader(EpochPasses[Any]):
    """The batches of one rank, read from a table.

    Args:
        table: What is read.
        plan: Which entities there are, and which batch each belongs to.
        encode: Makes a batch of the events of whole entities, which stand together, in the order they are served.
        rank: This process's rank in the plan.
        memory_bytes: Host memory for query chunks.
        prefetch: Read the next query chunk while one is served, where there is room.
    """

    def __init__(
        self, table: EventTable, plan: EventPlan, encode: Encode, *, rank: int, memory_bytes: int, prefetch: bool
    ) -> None:
        super().__init__(plan, rank)
        self.table, self.plan = table, plan
        self.reasons: tuple[str, ...] = ()
        """What was chosen in the last pass, and why."""
        self._encode, self._memory_bytes, self._prefetch = encode, memory_bytes, prefetch
        self._reading: _ReadAhead | None = None

    @override
    def _batches(self, epoch: int, first_step: int) -> Iterator[Any]:
        for events in self._events(epoch, first_step):
            batch = self._encode(events)
            del events  # else the query chunk it is a part of would stay while the next is read
            yield batch

    def close(self) -> None:
        """End a pass that is under way, and its thread."""
        if self._reading is not None:
            self._reading.close()

    def _events(self, epoch: int, first_step: int) -> Iterator[pyarrow.Table]:
        """The events of each batch of this rank."""
        self.table.refuse_change()
        self.close()
        room = Room(self._memory_bytes, self.table.name, self.table.advice)
        reading = self._reading = _ReadAhead(self, epoch, first_step, room)
        held: EventChunk | None = None
        cursor = 0
        try:
            for step in range(first_step, len(self)):
                wanted, parts = len(self.plan.run(step, self.rank)), []
                while wanted:
                    if held is None or cursor == len(held):
                        held = None
                        let_go()
                        held, cursor = reading.next(self._prefetch), 0
                    count = min(wanted, len(held) - cursor)
                    part = held.part(cursor, cursor + count)
                    wanted, cursor = wanted - count, cursor + count
                    parts.append(copied(part) if wanted else part)  # the rest is in the next one: let this one go
                    del part
                yield joined(parts)
        finally:
            reading.close()
            self.reasons = reading.reasons
            if self._reading is reading:
                self._reading = None


class _ReadAhead:
    """The query chunks of one pass, read in a thread."""

    def __init__(self, loader: EventLoader, epoch: int, first_step: int, room: Room) -> None:
        self._table, self._plan, self._room = loader.table, loader.plan, room
        self._shares = loader.plan.shares(epoch, first_step, loader.rank)
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="kit-query")
        self._next: Future[EventChunk] | None = None
        self._ahead = self._alone = 0

    def next(self, prefetch: bool) -> EventChunk:
        """The next query chunk with something for this rank; the one before must have been let go."""
        self._room.hold(0)
        found = self._next or self._submit()
        assert found is not None, "no query chunk is left for a batch that is planned"
        chunk = found.result()
        self._room.hold(chunk.events.nbytes)
        ahead = prefetch and self._both_fit(chunk)
        self._ahead, self._alone = self._ahead + ahead, self._alone + (not ahead)
        self._next = self._submit() if ahead else None
        return chunk

    def close(self) -> None:
        self._room.stop()
        self._thread.shutdown(wait=True, cancel_futures=True)

    @property
    def reasons(self) -> tuple[str, ...]:
        if self._alone > 1:
            allowed = format_bytes(self._room.allowed_bytes)
            return (f"query chunks are read one at a time: two need more than the {allowed} of queries.memory_bytes",)
        return ("the next query chunk is read while one is served",) if self._ahead else ()

    def _both_fit(self, chunk: EventChunk) -> bool:
        """Whether another like it can be read and arranged beside what is held of this one."""
        reading = 2 * chunk.read_bytes + ORDER_BYTES * chunk.read_rows
        return bool(chunk.events.nbytes + reading <= self._room.allowed_bytes)

    def _submit(self) -> Future[EventChunk] | None:
        share = next(self._shares, None)
        return None if share is None else self._thread.submit(self._read, *share)

    def _read(self, number: int, chosen: Numbers) -> EventChunk:
        table = self._table
        try:
            with contextlib.closing(table.read(number)) as batches:
                events = gather(batches, table.schema, self._room)
        except Stopped:
            raise QueryError(f"{table.name}: the pass was ended while query chunk {number} was read") from None
        rows, offsets = arrange(events, table.entity, table.date)
        table.refuse_other_entities(number, len(offsets) - 1, self._plan.entities[number])
        return serve(events, rows, offsets, chosen)
