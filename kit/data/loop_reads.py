"""How a reader asks any other store for chunks: by tasks of the event loop that the store belongs to."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence

from kit.data.cache import Chunk
from kit.data.intake import Intake
from kit.data.requests import Requests
from kit.data.room import Claim
from kit.data.wanted import Wanted
from kit.plan.coalescing import Run

_PAUSE_SECONDS = 0.001


class LoopReads:
    """The requests of one reader, on a loop that runs in another thread."""

    def __init__(self, loop: asyncio.AbstractEventLoop, requests: Requests, intake: Intake) -> None:
        self._loop, self._requests, self._intake = loop, requests, intake
        self._gate = asyncio.Lock()
        self._tasks: dict[asyncio.Task[None], Wanted] = {}
        self._closed = False

    def ask(self, found: Iterable[Wanted]) -> None:
        """Ask for objects, or for what is wanted of shards."""
        if not self._closed:
            self._loop.call_soon_threadsafe(self._request_objects, [*found])

    def give_up_unwanted(self) -> None:
        """End requests that nobody waits for any more."""
        if not self._closed:
            self._loop.call_soon_threadsafe(self._cancel_unwanted)

    def close(self) -> None:
        """Ask for nothing more; before the loop ends."""
        self._closed = True

    def _request_objects(self, found: Sequence[Wanted]) -> None:
        for item in found:
            task = self._loop.create_task(self._request_object(item))
            self._tasks[task] = item
            task.add_done_callback(self._tasks.pop)

    def _cancel_unwanted(self) -> None:
        cache = self._intake.cache
        for task, item in [*self._tasks.items()]:
            if not any(chunk.wanted for chunk in item.chunks) and not cache.still_wanted(item.chunks):
                task.cancel()

    async def _request_object(self, item: Wanted) -> None:
        try:
            await self._get_object(item)
        except Exception as error:
            item.fail(error)

    async def _get_object(self, wanted: Wanted) -> None:
        if wanted.stored.per_shard is None:
            await self._request_run(wanted, None)
            return
        index = await self._requests.index(self._intake.indexes, wanted.stored, wanted.key)
        found = self._intake.runs(wanted, index)
        parts = [wanted.part(chunk for _, _, chunk in run.items) for run in found]
        await asyncio.gather(*map(self._request_run, parts, found))

    async def _request_run(self, wanted: Wanted, run: Run[Chunk] | None) -> None:
        claim = await self._take(self._intake.size_of(wanted, run))
        try:
            data = await self._requests.read(wanted.key, *(() if run is None else (run.first, run.last)))
        except BaseException as error:
            claim.done()
            if not isinstance(error, Exception):
                raise
            wanted.fail(error)
        else:
            self._intake.deliver(wanted, run, data, claim)

    async def _take(self, size_bytes: int) -> Claim:
        async with self._gate:  # one task watches, the others wait for it
            while (claim := self._intake.room.try_take(size_bytes)) is None:
                await asyncio.sleep(_PAUSE_SECONDS)
            return claim
