"""Mirror: where the system gives no private view of its files, Python's own functions keep what they write in a folder.

A file that is written lies in the mirror, at its path below the mirror's root, and is found there by whoever reads it
afterwards; what is deleted or moved is only remembered to be. It holds for what goes through Python's `open` and `os`,
which is pathlib, shutil, numpy, zipfile and most loggers, and for torch.save and sqlite3; not for other libraries in C,
which Landlock then refuses where there is one.
"""

from __future__ import annotations

import builtins
import contextlib
import io
import os
import shutil
import sqlite3
import stat
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from kit.confinement.stand_ins import Refusals, RefusedError, replaced

_LARGEST_COPY_BYTES = 1 << 28
WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
"""Flags of `os.open` that change a file, or may."""
_FREE = ("/dev", "/proc")
_PATHS = (str, bytes, os.PathLike)


class Mirror:
    """What was written and deleted by this process, instead of at its place."""

    def __init__(self, root: Path, free: Sequence[Path], kept: Refusals) -> None:
        """
        Args:
            root: An empty folder, where the copies lie.
            free: Folders that are written to as they are.
            kept: Hears of everything else.
        """
        self.root, self.kept = os.path.realpath(root), kept
        self.free = (self.root, *(os.path.realpath(folder) for folder in free), *_FREE)
        self._gone: set[str] = set()
        self._moved: set[str] = set()
        """Where a file lies that was moved: the mirror has a link to where it was, which is no link of the user's."""
        self.used = bool(free)
        """Whether anything was written or deleted yet, as far as one process can know."""
        self._inside = threading.local()

    # -- where a file is

    def is_free(self, path: str) -> bool:
        """Whether it is written to as it is."""
        return any(path == folder or path.startswith(f"{folder}/") for folder in self.free)

    def read(self, path: str) -> str:
        """Where the file now lies that is asked for under this path."""
        copy = self._copy(path)
        if not self.used or self.is_free(path):
            return path
        if self._is_link(path):
            return self.read(os.path.realpath(copy))
        if os.path.lexists(copy) and not (os.path.isdir(copy) and os.path.isdir(path) and not self._is_gone(path)):
            return copy
        return f"{self.root}.gone" if self._is_gone(path) else path

    def write(self, path: str, doing: str = "writing", keep: bool = False) -> str:
        """Where to write instead; `keep` for what is changed, not written anew."""
        if self.is_free(path):
            return path
        if self._is_link(path):
            return self.write(os.path.realpath(self._copy(path)), doing, keep)
        self.used = True
        self.kept.tried(doing, path)
        before, copy = self.read(path), self._copy(path)
        folder = os.path.dirname(path)
        if os.path.isdir(self.read(folder)):
            os.makedirs(os.path.dirname(copy), exist_ok=True)
        if path in self._moved:
            before = os.path.realpath(copy)
            os.unlink(copy)
            self._moved.discard(path)
        if before != copy and os.path.lexists(before) and keep:
            self._take_over(before, copy)
        self._gone.discard(path)
        return copy

    def drop(self, path: str) -> None:
        """It is no longer there.

        Raises:
            FileNotFoundError: when it was not there.
        """
        before = self.read(path)
        if not os.path.lexists(before):
            raise FileNotFoundError(2, os.strerror(2), path)
        self.used = True
        self.kept.tried("deleting", path)
        copy = self._copy(path)
        if os.path.isdir(copy) and not os.path.islink(copy):
            shutil.rmtree(copy)
        elif os.path.lexists(copy):
            os.unlink(copy)
        self._gone.add(path)
        self._moved.discard(path)

    def move(self, source: str, target: str) -> None:
        """It lies at `target` from now on."""
        before, after = self.read(source), self.write(target)
        if not os.path.lexists(before):
            raise FileNotFoundError(2, os.strerror(2), source)
        if os.path.lexists(after):
            os.unlink(after)
        if before == self._copy(source):
            os.rename(before, after)
        else:
            os.symlink(before, after)  # read where it is, written nowhere
            self._moved.add(target)
        if not self.is_free(source):
            self._gone.add(source)

    def _is_link(self, path: str) -> bool:
        return path not in self._moved and os.path.islink(self._copy(path))

    def _copy(self, path: str) -> str:
        return self.root + path

    def _is_gone(self, path: str) -> bool:
        while path != "/":
            if path in self._gone:
                return True
            path = os.path.dirname(path)
        return False

    @staticmethod
    def _take_over(before: str, copy: str) -> None:
        found = os.stat(before)
        if stat.S_ISDIR(found.st_mode):
            os.makedirs(copy, exist_ok=True)
            return
        if found.st_size > _LARGEST_COPY_BYTES:
            raise RefusedError(13, f"a file of {found.st_size} bytes is not copied to be changed in private", before)
        shutil.copy2(before, copy)

    # -- Python's functions

    @contextlib.contextmanager
    def in_place(self) -> Iterator[None]:
        """Inside, Python's functions for files read and write through the mirror, in every thread."""
        with contextlib.ExitStack() as undo:
            opening = self._opening(builtins.open)
            undo.enter_context(replaced(builtins, "open", opening))
            undo.enter_context(replaced(io, "open", opening))
            undo.enter_context(replaced(os, "open", self._opening_descriptor(os.open)))
            for name in ("stat", "lstat", "access", "readlink", "scandir"):
                undo.enter_context(replaced(os, name, self._reading(getattr(os, name), name != "lstat")))
            undo.enter_context(replaced(os, "listdir", self._listing(os.listdir)))
            for name in ("truncate", "chmod", "chown", "utime", "mkdir"):
                undo.enter_context(replaced(os, name, self._changing(getattr(os, name), name != "mkdir")))
            for name in ("remove", "unlink", "rmdir"):
                undo.enter_context(replaced(os, name, self._dropping(getattr(os, name))))
            for name in ("rename", "replace"):
                undo.enter_context(replaced(os, name, self._moving(getattr(os, name))))
            for name in ("link", "symlink"):
                undo.enter_context(replaced(os, name, self._linking(getattr(os, name))))
            undo.enter_context(replaced(shutil, "rmtree", self._clearing(shutil.rmtree)))
            undo.enter_context(replaced(sqlite3, "connect", self._connecting(sqlite3.connect)))
            torch = sys.modules.get("torch")
            if torch is not None:
                undo.enter_context(replaced(torch, "save", self._saving(torch.save)))
            yield

    @contextlib.contextmanager
    def as_it_is(self) -> Iterator[None]:
        """Inside, this thread sees the files as they are."""
        before = getattr(self._inside, "now", False)
        self._inside.now = True
        try:
            yield
        finally:
            self._inside.now = before

    def _place(self, path: Any, options: dict[str, Any], follow: bool = True) -> str | None:
        """The absolute path of what is named, links followed; None for what is left as it is."""
        if getattr(self._inside, "now", False) or not isinstance(path, _PATHS):
            return None
        if options.get("dir_fd") is not None or options.get("src_dir_fd") is not None:
            return None  # the audit hook looks at it
        text = os.fsdecode(path)
        with self.as_it_is():
            folder, name = os.path.split(os.path.abspath(text))
            place = os.path.realpath(text) if follow else os.path.join(os.path.realpath(folder), name)
        return place.removeprefix(self.root) if place.startswith(f"{self.root}/") else place

    def _opening(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def opened(file: Any, mode: str = "r", *rest: Any, **options: Any) -> Any:
            place = self._place(file, options)
            if place is None:
                return call(file, mode, *rest, **options)
            with self.as_it_is():
                path = self._to_open(place, bool(set(mode) & set("wax+")), "w" not in mode, "x" in mode)
                return call(path or file, mode, *rest, **options)

        return opened

    def _opening_descriptor(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def opened(path: Any, flags: int, *rest: Any, **options: Any) -> Any:
            place = self._place(path, options)
            if place is None:
                return call(path, flags, *rest, **options)
            with self.as_it_is():
                found = self._to_open(
                    place, bool(flags & WRITES), not flags & os.O_TRUNC, bool(flags & os.O_EXCL and flags & os.O_CREAT)
                )
                return call(found or path, flags, *rest, **options)

        return opened

    def _to_open(self, place: str, writes: bool, keep: bool, alone: bool) -> str | None:
        """Where to open it; None where it is what it was."""
        if writes and alone and os.path.lexists(self.read(place)):
            raise FileExistsError(17, os.strerror(17), place)
        found = self.write(place, keep=keep) if writes else self.read(place)
        return None if found == place else found

    def _reading(self, call: Callable[..., Any], follow: bool) -> Callable[..., Any]:
        def read(path: Any = ".", *rest: Any, **options: Any) -> Any:
            if not self.used:
                return call(path, *rest, **options)
            place = self._place(path, options, follow and options.get("follow_symlinks", True))
            if place is None:
                return call(path, *rest, **options)
            with self.as_it_is():
                found = self.read(place)
                return call(path if found == place else found, *rest, **options)

        return read

    def _listing(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def listed(path: Any = ".") -> list[Any]:
            place = self._place(path, {}) if self.used else None
            if place is None or isinstance(path, bytes):
                return call(path)  # type: ignore[no-any-return]
            with self.as_it_is():
                if self._is_gone(place) or not os.path.isdir(place):
                    return call(self.read(place))  # type: ignore[no-any-return]
                copy = self._copy(place)
                here = {name for name in call(place) if os.path.join(place, name) not in self._gone}
                return sorted(here | set(call(copy) if os.path.isdir(copy) else ()))

        return listed

    def _changing(self, call: Callable[..., Any], keep: bool) -> Callable[..., Any]:
        def change(path: Any, *rest: Any, **options: Any) -> Any:
            place = self._place(path, options)
            if place is None:
                return call(path, *rest, **options)
            with self.as_it_is():
                if not keep and os.path.lexists(self.read(place)):
                    raise FileExistsError(17, os.strerror(17), place)
                if keep and not os.path.lexists(self.read(place)):
                    raise FileNotFoundError(2, os.strerror(2), place)
                return call(self.write(place, "changing" if keep else "making", keep), *rest, **options)

        return change

    def _dropping(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def drop(path: Any, **options: Any) -> None:
            place = self._place(path, options, follow=False)
            if place is None or self.is_free(place):
                call(path, **options)
                return
            with self.as_it_is():
                self.drop(place)

        return drop

    def _clearing(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def clear(path: Any, ignore_errors: bool = False, *rest: Any, **options: Any) -> None:
            place = self._place(path, options, follow=False)
            if place is None or self.is_free(place):
                with self.as_it_is():
                    call(path, ignore_errors, *rest, **options)
                return
            with self.as_it_is(), contextlib.suppress(*([OSError] if ignore_errors else [])):
                self.drop(place)

        return clear

    def _moving(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def move(source: Any, target: Any, **options: Any) -> None:
            places = [self._place(path, options, follow=False) for path in (source, target)]
            if None in places or all(self.is_free(place) for place in places if place):
                call(source, target, **options)
                return
            with self.as_it_is():
                self.move(*[place for place in places if place])

        return move

    def _linking(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def link(source: Any, target: Any, *rest: Any, **options: Any) -> None:
            place = self._place(target, options, follow=False)
            if place is None or self.is_free(place):
                call(source, target, *rest, **options)
                return
            with self.as_it_is():
                os.symlink(os.path.join(os.path.dirname(place), os.fsdecode(source)), self.write(place))

        return link

    def _connecting(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def connected(database: Any, *rest: Any, **options: Any) -> Any:
            if str(database) == ":memory:" or not database or options.get("uri"):
                return call(database, *rest, **options)
            place = self._place(database, {})
            if place is None:
                return call(database, *rest, **options)
            with self.as_it_is():
                return call(self.write(place, keep=True), *rest, **options)

        return connected

    def _saving(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def save(value: Any, file: Any, *rest: Any, **options: Any) -> None:
            place = self._place(file, {}) if isinstance(file, _PATHS) else None
            if place is None:
                call(value, file, *rest, **options)
                return
            with self.as_it_is():
                path = self.write(place)
            call(value, path, *rest, **options)

        return save
