"""Downloads: what is at a URL, brought to a path once for all processes that ask, complete or not at all.

What is at the URL may be a bundle (`kit.checkpoints.parts`: each part has its sha256), a folder of objects, or one
object. The processes of a machine take turns at a lock file beside the path: the first downloads, the others find the
result and read nothing, so it needs no process group, and nobody waits for a process that has died.

What arrives goes to `path.partial`, and is renamed when every size and every known checksum is right. What is at the
path is never replaced. A record beside it, `path.download.json`, says what was brought from where; later calls compare
the files with the record alone and refuse any difference, so a change at the URL is not seen.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from zarr.abc.store import RangeByteRequest
from zarr.core.buffer import default_buffer_prototype

from kit.checkpoints.parts import LIST_NAME, Bundle, signature, spans
from kit.checkpoints.uploading import latest_bundle, run_all
from kit.config import resolve_path
from kit.data.stores.local import check_names, make_file
from kit.data.stores.lock import turn_at
from kit.data.stores.url import (
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
from kit.sections import Checkpoint
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
    """Download what is at a URL once for all processes of a machine.

    The first process that calls it downloads, and the others wait for it. Call it in `prepare_data`, in `setup`, or in
    any number of processes.

    Args:
        url: A path or URL of an uploaded checkpoint, a folder of objects, or one object.
        path: Where it goes, under its final name. A relative path starts at the project folder.
        credentials: As `data.credentials`.
        sha256: Checksum of one object, when it is known.
        together: All ranks of a torch.distributed group call this, and go on when every one has it; when one fails,
            all do. Not for `prepare_data`, which Lightning calls in one rank of a node, with a barrier of its own.
        wait_seconds: How long to wait for another process that downloads it.

    Returns:
        The path. It appears whole or not at all.

    Raises:
        StoreError: when there is nothing, it cannot be read or does not match, or something else is at the path.
        StoreLockedError: when another process still downloads it after `wait_seconds`.

    Example:
        >>> kit.data.download_once("last.ckpt", "copies/last.ckpt").name
        'last.ckpt'
    """
    source, target = resolve_url(url), resolve_path(path)

    def bring() -> None:
        with turn_at(target.with_name(f"{target.name}.lock"), wait_seconds):
            if not _is_there(target, source, sha256):
                _bring(source, target, credentials, sha256)

    _in_all_ranks(bring) if together else bring()
    return target


def fetch_checkpoint(
    url: str, folder: str | Path = "fetched", *, credentials: str = "default", together: bool = False
) -> Path | None:
    """Download the newest checkpoint below a URL, so that `trainer.fit(..., ckpt_path=...)` goes on from it.

    Each state of a checkpoint gets a folder of its own, so that an older download is never mistaken for a newer one.

    Args:
        url: Where `CheckpointUpload` copies to, or one checkpoint below it.
        folder: Where the checkpoint goes, under its own name.
        credentials: As `data.credentials`.
        together: All ranks call this, as for `download_once`, and all get what the first one found.

    Returns:
        The path of the checkpoint, or None when there is none yet.

    Raises:
        StoreError: when the store cannot be read, or the bytes do not match their checksums.

    Example:
        >>> kit.checkpoints.download(bucket) is None
        True
        >>> upload = kit.checkpoints.upload("last.ckpt", bucket)
        >>> kit.checkpoints.download(bucket).name
        'last.ckpt'
    """

    def find() -> tuple[str, str] | None:
        found = latest_bundle(url, credentials)
        if found is None:
            return None
        source, bundle = found
        return source, f"{hashlib.sha256(bundle.dump()).hexdigest()[:12]}/{bundle.name}"

    found = _in_all_ranks(find, only_rank_0=True) if together else find()
    if found is None:
        return None
    source, place = found
    return download_once(source, Path(folder) / place, credentials=credentials, together=together)


# -- bringing it


@dataclass(frozen=True, slots=True)
class _Piece:
    """Some bytes of a file, and the request that reads them."""

    path: str
    offset: int
    size_bytes: int
    key: str
    span: tuple[int, int] | None = None
    sha256: str = ""


def _find(url: str, credentials: str) -> tuple[Store, str, dict[str, int], list[_Piece]]:
    """What is at the URL: the store, its URL, the size of each file by path (empty for one file), and all pieces."""
    folder = local_folder(url)
    if not url.startswith(("http://", "https://")) and (folder is None or folder.is_dir()):
        store = open_store(url, credentials)
        data = read_object(store, LIST_NAME, url)
        if data is not None:
            pieces = []
            bundle = Bundle.load(data, redact(url))
            for file in bundle.files:
                offsets = accumulate((part.size_bytes for part in file.parts), initial=0)
                for offset, part in zip(offsets, file.parts, strict=False):
                    key = f"parts/{part.sha256}"
                    pieces.append(_Piece(file.path, offset, part.size_bytes, key, sha256=part.sha256))
            return store, url, {file.path: file.size_bytes for file in bundle.files}, pieces
        keys = list_objects(store, "", url)
        check_names((key for key in keys if not key.endswith("/")), redact(url))
        # Consoles mark an empty folder by an object of no bytes whose key ends in a slash.
        sizes = {key: size for key, size in sizes_of_objects(store, keys, url).items() if size or key[-1] != "/"}
        check_names(sizes, redact(url))
        if sizes:
            return store, url, sizes, [piece for key, size in sizes.items() for piece in _cut(key, key, size)]
    above, _, name = url.rpartition("/")
    store = open_store(above, credentials)
    size = sizes_of_objects(store, [name], above).get(name)
    if size is None:
        raise MissingChunkError(f"{redact(url)}: there is nothing; correct the URL")
    return store, above, {"": size}, _cut("", name, size)


def _cut(path: str, key: str, size: int) -> list[_Piece]:
    cuts = spans(size, _DEFAULTS.part_bytes)
    if len(cuts) == 1:
        return [_Piece(path, 0, size, key)]
    return [_Piece(path, first, last - first, key, (first, last)) for first, last in cuts]


def _bring(url: str, target: Path, credentials: str, sha256: str) -> None:
    store, store_url, sizes, pieces = _find(url, credentials)
    is_folder = [*sizes] != [""]
    if sha256 and is_folder:
        raise StoreError(f"{redact(url)} is a folder; sha256 is of one object")
    draft = target.with_name(f"{target.name}.partial")

    async def bring(piece: _Piece) -> None:
        span = None if piece.span is None else RangeByteRequest(*piece.span)
        async with asyncio.timeout(_PIECE_SECONDS):
            data = await store.get(piece.key, default_buffer_prototype(), span)
        if data is None:
            raise MissingChunkError(f"{redact(store_url)}/{piece.key} is not there any more; download it again")
        file = draft / piece.path if piece.path else draft
        await asyncio.to_thread(_write, file, piece, data.to_bytes(), f"{redact(store_url)}/{piece.key}")

    try:
        _remove(draft)
        if is_folder:
            draft.mkdir(parents=True)
        free, needed = shutil.disk_usage(draft.parent).free, sum(sizes.values())
        if needed > free:
            raise StoreError(
                f"{draft.parent} has {format_bytes(free)} free and {format_bytes(needed)} are to come; free some space "
                "or give another path"
            )
        for path, size in sizes.items():
            os.truncate(make_file(draft, path) if path else make_file(draft.parent, draft.name), size)
        run_all([partial(bring, piece) for piece in pieces], _DEFAULTS.parts_in_flight, store_url)
        if sha256:
            with draft.open("rb") as opened:
                found = hashlib.file_digest(opened, "sha256").hexdigest()
            if found != sha256.lower():
                raise CorruptChunkError(
                    f"{redact(url)}: its sha256 is {found}, not {sha256}; correct the one or the other"
                )
        record = _record(target)
        record.unlink(missing_ok=True)  # a link that someone put there would be followed
        with record.open("x") as made:
            json.dump({"url": url, "sha256": sha256, "files": _looks(draft)}, made)
        draft.rename(target)
    except StoreError:
        _remove(draft)
        raise
    except OSError as error:
        _remove(draft)
        raise store_error(str(target), error) from None


def _write(file: Path, piece: _Piece, data: bytes, where: str) -> None:
    if len(data) != piece.size_bytes or (piece.sha256 and hashlib.sha256(data).hexdigest() != piece.sha256):
        raise CorruptChunkError(
            f"{where}: {len(data)} bytes, not the {piece.size_bytes} that were stored; it was replaced or damaged, so "
            "upload it again"
        )
    with file.open("r+b") as opened:
        opened.seek(piece.offset)
        opened.write(data)


# -- what was brought before


def _record(target: Path) -> Path:
    return target.with_name(f"{target.name}.download.json")


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


def _in_all_ranks(work: Callable[[], Found], *, only_rank_0: bool = False) -> Found:
    """What `work()` gives here, or what it gives in rank 0; waits for every rank, and fails in all when one fails."""
    import torch.distributed as dist

    if not (dist.is_available() and dist.is_initialized()):
        return work()
    found: Any = None
    failed: Exception | None = None
    if not only_rank_0 or dist.get_rank() == 0:
        try:
            found = work()
        except Exception as error:
            failed = error
    everywhere: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everywhere, (found if only_rank_0 else None, str(failed or "")))
    if failed is not None:
        raise failed
    others = [text for _, text in everywhere if text]
    if others:
        raise StoreError(f"another rank failed: {others[0]}")
    result: Found = everywhere[0][0] if only_rank_0 else found
    return result
