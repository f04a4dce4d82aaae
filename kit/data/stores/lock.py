"""One writer per store: a lock that names its holder, and that outlives no holder for long.

On a local disk the kernel keeps the lock (`flock`) and drops it with its process, however that ends. Elsewhere the lock
is an object with a token, created where there is none: by one request with a condition, which one of any number of
writers wins (Google, S3), or by a look before writing, where a file system has no such condition. It is read back after
a pause, for stores that ignore conditions: of two that wrote, the last reads its own token and the other gives way. The
holder rewrites it every half minute; after two minutes without, it belongs to nobody. A writer that takes it over says
so first, in an object named after the lost lock and created in the same way, so only one does.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import threading
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kit.data.stores import manifest as records
from kit.data.stores.manifest import crc32c
from kit.data.stores.url import (
    create_object,
    delete_object,
    is_shared,
    local_folder,
    read_object,
    redact,
    store_error,
    write_object,
)
from kit.errors import StoreError, StoreLockedError
from kit.json_text import read_json

if TYPE_CHECKING:
    from zarr.abc.store import Store

SETTLE_SECONDS = 0.5
BEAT_SECONDS = 30.0
STALE_SECONDS = 120.0
_TURN_SECONDS = 0.05


@contextlib.contextmanager
def write_lock(store: Store, url: str) -> Iterator[None]:
    """Hold the store for writing.

    Raises:
        StoreLockedError: naming the holder, when another process has it.
        StoreError: when the store cannot be written.
    """
    folder = local_folder(url)
    with turn_at(folder / records.LOCK_KEY, 0.0) if folder is not None else _object_lock(store, url):
        yield


def _holder(token: str = "") -> bytes:
    values = {"host": socket.gethostname(), "pid": os.getpid(), "token": token, "beat": time.time()}
    return json.dumps(values).encode()


def _locked(url: str, data: bytes | None) -> StoreLockedError:
    held = _parse(data)
    who = f"process {held['pid']} on {held['host']}" if {"pid", "host"} <= held.keys() else "another process"
    return StoreLockedError(f"{redact(url)} is being written by {who}; wait for it, or end it, then build again")


def _parse(data: bytes | None) -> dict[str, Any]:
    try:
        values = read_json(data or b"{}")
    except ValueError:
        return {}
    return values if isinstance(values, dict) else {}


# -- on a local disk


@contextlib.contextmanager
def turn_at(path: Path, seconds: float) -> Iterator[None]:
    """Hold the lock file `path`, after all who hold it before; it goes with the process that holds it.

    Raises:
        StoreLockedError: naming the holder, when one keeps it for longer than `seconds`.
        StoreError: when the file cannot be made.
    """
    give_up = time.monotonic() + seconds
    while True:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            descriptor = _take(path)
            break
        except StoreLockedError:
            if time.monotonic() >= give_up:
                raise
            time.sleep(_TURN_SECONDS)
        except OSError as error:
            raise store_error(str(path), error) from None
    try:
        yield
    finally:
        path.unlink(missing_ok=True)
        os.close(descriptor)


def _take(path: Path) -> int:
    """A descriptor that holds the lock of the file now at `path`."""
    import fcntl

    while True:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            held = os.read(descriptor, 4096)
            os.close(descriptor)
            raise _locked(str(path.parent.parent), held) from None
        except BaseException:
            os.close(descriptor)
            raise
        with contextlib.suppress(FileNotFoundError):  # the last holder removed it between our opening and locking
            if path.stat().st_ino == os.fstat(descriptor).st_ino:
                os.truncate(descriptor, 0)
                os.write(descriptor, _holder())
                return descriptor
        os.close(descriptor)


# -- elsewhere


@contextlib.contextmanager
def _object_lock(store: Store, url: str) -> Iterator[None]:
    token = uuid.uuid4().hex
    _claim(store, url, token)
    released = threading.Event()

    def renew() -> None:
        """While the lock is ours; one that was taken over, because this machine slept, is left alone."""
        while not released.wait(BEAT_SECONDS):
            with contextlib.suppress(StoreError):
                if not _is_ours(read_object(store, records.LOCK_KEY, url), token):
                    return
                write_object(store, records.LOCK_KEY, _holder(token), url)

    renewing = threading.Thread(target=renew, name="kit-lock", daemon=True)
    renewing.start()
    try:
        yield
    finally:
        released.set()
        renewing.join()
        if _is_ours(read_object(store, records.LOCK_KEY, url), token):
            delete_object(store, records.LOCK_KEY, url)


def _claim(store: Store, url: str, token: str) -> None:
    found = read_object(store, records.LOCK_KEY, url)
    if found is None and not create_object(store, records.LOCK_KEY, _holder(token), url):
        found = read_object(store, records.LOCK_KEY, url)
    if found is not None and not _is_ours(found, token):  # ours, when the answer to our first attempt was lost
        if not _is_stale(_parse(found)):
            raise _locked(url, found)
        _take_over(store, url, token, found)
    time.sleep(SETTLE_SECONDS if is_shared(url) else 0.0)
    found = read_object(store, records.LOCK_KEY, url)
    if not _is_ours(found, token):
        raise _locked(url, found)


def _take_over(store: Store, url: str, token: str, lost: bytes) -> None:
    """Put our lock in the place of one whose holder is gone, unless another is about to."""
    claim = f"{records.LOCK_KEY}.{crc32c(lost):08x}.partial"  # as drafts are named, which nobody takes for data
    if not create_object(store, claim, _holder(token), url):
        found = read_object(store, claim, url)
        if found is not None and not _is_ours(found, token) and not _is_stale(_parse(found)):
            raise _locked(url, found)
        write_object(store, claim, _holder(token), url)  # its writer is gone too
    try:
        found = read_object(store, records.LOCK_KEY, url)
        if found == lost:
            write_object(store, records.LOCK_KEY, _holder(token), url)
        elif found is not None or not create_object(store, records.LOCK_KEY, _holder(token), url):
            raise _locked(url, found)
    finally:
        delete_object(store, claim, url)


def _is_ours(found: bytes | None, token: str) -> bool:
    return _parse(found).get("token") == token


def _is_stale(held: dict[str, Any]) -> bool:
    beat = held.get("beat")
    return not isinstance(beat, int | float) or time.time() - beat > STALE_SECONDS
