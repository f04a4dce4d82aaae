"""Requests: asynchronous reads of a store on the loop that runs them, at most so many at once.

An answer is bytes, or None where there is no such object; anything else is a StoreError without secrets, and a request
without an answer is given up. Shard indexes are fetched once and kept (16 bytes an inner chunk). Retrying is left to
the file system below: gcsfs does it, plain HTTP does not.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable

from zarr.abc.store import ByteRequest, Store
from zarr.core.buffer import Buffer, default_buffer_prototype
from zarr.storage import FsspecStore

from kit.data.codec import Index, StoredArray, decode_index
from kit.data.counters import Counters
from kit.data.stores import redact, store_error
from kit.errors import KitError, StoreError


class Requests:
    """A store as seen from one event loop; every method runs on it."""

    def __init__(self, store: Store, url: str, in_flight: int, seconds: float, counters: Counters) -> None:
        self._store = store
        self._url = url
        self._seconds = seconds
        self._counters = counters
        self._slots = asyncio.Semaphore(in_flight)
        self._indexes: dict[str, asyncio.Task[Index | None]] = {}

    async def open_arrays(self, names: Iterable[str]) -> tuple[StoredArray, ...]:
        """How each array is stored, by its metadata."""
        try:
            async with asyncio.timeout(self._seconds):
                return tuple(await asyncio.gather(*(StoredArray.open(self._store, name) for name in names)))
        except KitError:
            raise
        except TimeoutError:
            raise self._late("") from None
        except Exception as error:
            raise store_error(self._url, error) from None

    async def get(self, key: str, span: ByteRequest | None = None) -> Buffer | None:
        """One request; None when there is no such object."""
        async with self._slots:
            try:
                async with asyncio.timeout(self._seconds):
                    data = await self._store.get(key, default_buffer_prototype(), span)
            except TimeoutError:
                raise self._late(f" for {key}") from None
            except Exception as error:
                raise store_error(self._url, error) from None  # its text may carry a secret; this one's does not
        self._counters.add(requests=1, bytes_read=0 if data is None else len(data))
        return data

    async def index(self, stored: StoredArray, key: str) -> Index | None:
        """The index of a shard, fetched once whoever asks; a failure is forgotten, so that the next ask tries again."""
        task = self._indexes.get(key)
        if task is None:
            task = self._indexes[key] = asyncio.create_task(self._fetch_index(stored, key))
            task.add_done_callback(lambda done: self._forget_failure(key, done))
        return await asyncio.shield(task)

    async def close(self) -> None:
        """Close the connections on the loop they belong to, which fsspec leaves to its user."""
        session = getattr(self._store.fs, "_session", None) if isinstance(self._store, FsspecStore) else None
        if session is not None and hasattr(session, "close"):
            await session.close()
        self._store.close()

    async def _fetch_index(self, stored: StoredArray, key: str) -> Index | None:
        data = await self.get(key, stored.index_range)
        return None if data is None else decode_index(stored, key, data.as_numpy_array(), self._url)

    def _forget_failure(self, key: str, task: asyncio.Task[Index | None]) -> None:
        if task.cancelled() or task.exception() is not None:
            self._indexes.pop(key, None)

    def _late(self, request: str) -> StoreError:
        return StoreError(f"{redact(self._url)}: no answer{request} within {self._seconds:g} s; check the network")
