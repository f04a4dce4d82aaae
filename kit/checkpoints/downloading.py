"""Downloads: what is at a URL, brought to a path once for all processes that ask, whole or not at all.

Processes of a machine take turns at a lock file beside the path: the first one downloads, the others find it there and
read nothing. So it needs no process group, and nobody waits for a process that has died. What arrives goes to
`path.partial` and is renamed when every size, and every checksum that is known, is right. A small record beside it,
`path.download.json`, says what was brought from where; later calls compare the files with it and ask the store nothing,
so a change at the URL is not seen. What is at the path is never replaced: whatever differs from the record is refused.

What is there may be a parcel (see `kit.checkpoints.parts`: each part has its sha256), a folder of objects, or one
object.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import shutil
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from zarr.abc.store import RangeByteRequest
from zarr.core.buffer import default_buffer_prototype

from kit.checkpoints.parts import LIST_NAME, Bundle, part_key, signature, spans
from kit.checkpoints.uploading import last_parcel
from kit.config import Checkpoint, resolve_path
from kit.data.stores.local import check_names, make_file
from kit.data.stores.lock import turn_at
from kit.data.stores.url import (
    ask,
    list_objects,
    local_folder,
    open_store,
    read_object,
    redact,
    resolve_url,
    sizes_of_objects,
    store_error,
)
from kit.errors import CorruptChunkError, MissingChunkError, StoreError
from kit.json_text import read_json
from kit.units import format_bytes

if TYPE_CHECKING:
    from zarr.abc.store import Store

_DEFAULTS = Checkpoint()
_PIECE_SECONDS = 120.0
Found = TypeVar("Found")
WAIT_SECONDS = 3600.0
"""How long a process waits for the one that downloads."""


def download_once(
    url: str,
    path: str | Path,
    *,
    credentials: str = "default",
    sha256: str = "",
    together: bool = False,
    wait_seconds: float = WAIT_SECONDS,
) -> Path:
    """What is at `url`, at `path`: brought by the first process of a machine that asks, found there by all others.

    Call it in `prepare_data`, in `setup`, or in any number of processes; each returns when it is there.

    Args:
        url: A path or URL of a parcel, a folder of objects or one object.
        path: Where it goes, under its final name; a relative one starts at the project folder.
        credentials: As `data.credentials`.
        sha256: Of one object, when it is known.
        together: All ranks of a torch.distributed group call this, and go on when every one has it; when one fails,
            all do. Not for `prepare_data`, which Lightning calls in one rank of a node, with a barrier of its own.
        wait_seconds: How long to wait for another process that downloads it.

    Raises:
        StoreError: when there is nothing, it cannot be read, does not match, or something else is at the path.
        StoreLockedError: when another process still downloads it after `wait_seconds`.
    """
    source, target = resolve_url(url), resolve_path(path)

    def bring() -> None:
        with turn_at(target.with_name(f"{target.name}.lock"), wait_seconds):
            if not _is_there(target, source, sha256):
                _bring(source, target, credentials, sha256)

    _all_or_none(bring) if together else bring()
    return target


def fetch_checkpoint(
    url: str, folder: str | Path = "fetched", *, credentials: str = "default", together: bool = False
) -> Path | None:
    """The checkpoint below `url` that was saved last, brought to below `folder`; None when there is none yet.

    For `trainer.fit(module, data, ckpt_path=kit.fetch_checkpoint(url))`: a run goes on where the cloud has it. Each
    state of a checkpoint gets a folder of its own, so a newer one of the same name is never taken for an older one.

    Args:
        url: Where `CheckpointUpload` copies to, or one checkpoint below it.
        folder: Where it goes, under its own name.
        credentials: As `data.credentials`.
        together: As in `download_once`; all ranks get what the first one found.

    Raises:
        StoreError: when the store cannot be read, or what comes does not match its checksums.
    """

    def find() -> tuple[str, str] | None:
        found = last_parcel(url, credentials)
        if found is None:
            return None
        source, parcel = found
        return source, f"{hashlib.sha256(parcel.dump()).hexdigest()[:12]}/{parcel.name}"

    found = _of_rank_0(find) if together else find()
    if found is None:
        return None
    source, place = found
    return download_once(source, Path(folder) / place, credentials=credentials, together=together)


# -- what is there


@dataclass(frozen=True, slots=True)
class _Piece:
    """Some bytes of a file, and how they are read and checked."""

    path: str
    offset: int
    size_bytes: int
    key: str
    span: tuple[int, int] | None = None
    sha256: str = ""


@dataclass(frozen=True, slots=True)
class _Load:
    """Everything that is to come: sizes by path (empty for one file), and its pieces."""

    store: Store
    url: str
    files: dict[str, int]
    pieces: list[_Piece]
    is_folder: bool
    identity: str = ""


def _find(url: str, credentials: str) -> _Load:
    folder = local_folder(url)
    if not url.startswith(("http://", "https://")) and (folder is None or folder.is_dir()):
        store = open_store(url, credentials)
        data = read_object(store, LIST_NAME, url)
        if data is not None:
            return _of_parcel(store, url, Bundle.load(data, redact(url)))
        sizes = _sizes_below(store, url)
        if sizes:
            pieces = [piece for key, size in sizes.items() for piece in _cut(key, key, size)]
            return _Load(store, url, sizes, pieces, True)
    above, _, name = url.rpartition("/")
    store = open_store(above, credentials)
    size = sizes_of_objects(store, [name], above).get(name)
    if size is None:
        raise MissingChunkError(f"{redact(url)}: there is nothing; correct the URL")
    return _Load(store, above, {"": size}, _cut("", name, size), False)


def _sizes_below(store: Store, url: str) -> dict[str, int]:
    """Bytes of each object, all of which can be files within a folder.

    Consoles mark an empty folder by an object of no bytes whose key ends in a slash: it is left out.
    """
    keys = list_objects(store, "", url)
    check_names((key for key in keys if not key.endswith("/")), redact(url))
    sizes = sizes_of_objects(store, keys, url)
    files = {key: size for key, size in sizes.items() if size or not key.endswith("/")}
    check_names(files, redact(url))
    return files


def _of_parcel(store: Store, url: str, parcel: Bundle) -> _Load:
    pieces = []
    for file in parcel.files:
        offset = 0
        for part in file.parts:
            key = part_key(parcel.name, part.sha256).partition("/")[2]
            pieces.append(_Piece(file.path, offset, part.size_bytes, key, sha256=part.sha256))
            offset += part.size_bytes
    sizes = {file.path: file.size_bytes for file in parcel.files}
    return _Load(store, url, sizes, pieces, parcel.is_folder)


def _cut(path: str, key: str, size: int) -> list[_Piece]:
    cuts = spans(size, _DEFAULTS.part_bytes)
    if len(cuts) == 1:
        return [_Piece(path, 0, size, key)]
    return [_Piece(path, first, last - first, key, (first, last)) for first, last in cuts]


# -- bringing it


def _bring(url: str, target: Path, credentials: str, sha256: str) -> None:
    load = _find(url, credentials)
    if sha256 and load.is_folder:
        raise StoreError(f"{redact(url)} is a folder; sha256 is of one object")
    draft = target.with_name(f"{target.name}.partial")
    try:
        _remove(draft)
        _make_files(load, draft)
        _fill(load, draft)
        _check(url, draft, sha256)
        _write_record(target, {"url": url, "sha256": sha256, "files": _looks(draft)})
        draft.rename(target)
    except StoreError:
        _remove(draft)
        raise
    except OSError as error:
        _remove(draft)
        raise store_error(str(target), error) from None


def _make_files(load: _Load, draft: Path) -> None:
    if load.is_folder:
        draft.mkdir(parents=True)
    free, needed = shutil.disk_usage(draft.parent).free, sum(load.files.values())
    if needed > free:
        raise StoreError(
            f"{draft.parent} has {format_bytes(free)} free and {format_bytes(needed)} are to come; free some space or "
            "give another path"
        )
    for path, size in load.files.items():
        file = make_file(draft, path) if path else make_file(draft.parent, draft.name)
        os.truncate(file, size)


def _fill(load: _Load, draft: Path) -> None:
    over = threading.Event()
    try:
        ask(lambda: _all_pieces(load, draft, over), load.url, None)
    except BaseException:  # an interrupt of this thread is unknown to the loop
        over.set()
        raise


async def _all_pieces(load: _Load, draft: Path, over: threading.Event) -> None:
    slots = asyncio.Semaphore(_DEFAULTS.parts_in_flight)

    async def one(piece: _Piece) -> None:
        async with slots:
            if over.is_set():
                return
            span = None if piece.span is None else RangeByteRequest(*piece.span)
            async with asyncio.timeout(_PIECE_SECONDS):
                data = await load.store.get(piece.key, default_buffer_prototype(), span)
            if data is None:
                raise MissingChunkError(f"{redact(load.url)}/{piece.key} is not there any more; download it again")
            await asyncio.to_thread(_write, load, draft / piece.path if piece.path else draft, piece, data.to_bytes())

    tasks = [asyncio.ensure_future(one(piece)) for piece in load.pieces]
    try:
        await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def _write(load: _Load, file: Path, piece: _Piece, data: bytes) -> None:
    if len(data) != piece.size_bytes or (piece.sha256 and hashlib.sha256(data).hexdigest() != piece.sha256):
        raise CorruptChunkError(
            f"{redact(load.url)}/{piece.key}: {len(data)} bytes, not the {piece.size_bytes} that were stored; it "
            "was replaced or damaged, so upload it again"
        )
    with file.open("r+b") as opened:
        opened.seek(piece.offset)
        opened.write(data)


def _check(url: str, draft: Path, sha256: str) -> None:
    if not sha256:
        return
    with draft.open("rb") as opened:
        found = hashlib.file_digest(opened, "sha256").hexdigest()
    if found != sha256.lower():
        raise CorruptChunkError(f"{redact(url)}: its sha256 is {found}, not {sha256}; correct the one or the other")


# -- what was brought before


def _record(target: Path) -> Path:
    return target.with_name(f"{target.name}.download.json")


def _write_record(target: Path, record: dict[str, Any]) -> None:
    place = _record(target)
    place.unlink(missing_ok=True)  # a link that someone put there would be followed
    with place.open("x") as made:
        json.dump(record, made)


def _looks(target: Path) -> list[list[str | int]]:
    """As JSON gives it back."""
    return [list(seen) for seen in signature(target)]


def _is_there(target: Path, url: str, sha256: str) -> bool:
    """Whether it is what such a call brought.

    Raises:
        StoreError: when something else is there, or it has been changed or damaged since.
    """
    if not target.exists():
        return False
    try:
        record: dict[str, Any] = read_json(_record(target).read_bytes())
        before, files = record["url"], record["files"]
    except (OSError, ValueError, KeyError, TypeError):
        raise StoreError(
            f"{target} is there and was not downloaded by kit; move it away or give another path"
        ) from None
    if before != url or (sha256 and record.get("sha256") != sha256):
        raise StoreError(f"{target} was downloaded from {redact(before)}; move it away or give another path")
    if _looks(target) != files:
        raise StoreError(f"{target} has changed since it was downloaded; remove it to download it again")
    return True


def _remove(place: Path) -> None:
    if place.is_dir() and not place.is_symlink():
        shutil.rmtree(place)
    else:
        place.unlink(missing_ok=True)


# -- all ranks of a group


def _all_or_none(work: Callable[[], None]) -> None:
    """`work()` here; then wait for every rank, and fail when one did."""
    import torch.distributed as dist

    failed: Exception | None = None
    try:
        work()
    except Exception as error:
        failed = error
    if dist.is_available() and dist.is_initialized():
        told: list[str] = [""] * dist.get_world_size()
        dist.all_gather_object(told, str(failed or ""))
        others = [text for text in told if text]
        if failed is None and others:
            raise StoreError(f"another rank failed: {others[0]}")
    if failed is not None:
        raise failed


def _of_rank_0(find: Callable[[], Found]) -> Found:
    """What rank 0 finds, in every rank; where it fails, all do."""
    import torch.distributed as dist

    if not (dist.is_available() and dist.is_initialized()):
        return find()
    box: list[Any] = [None, None]
    if dist.get_rank() == 0:
        try:
            box[0] = find()
        except StoreError as error:
            box[1] = str(error)
    dist.broadcast_object_list(box, src=0)
    if box[1] is not None:
        raise StoreError(box[1])
    found: Found = box[0]
    return found
