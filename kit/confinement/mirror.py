"""Mirror: where the system gives no private view of its files, Python's own functions write to a folder instead.

A file that is written lies in the mirror, at its path below the mirror's root, and later reads find it there; a
deletion or a move is only remembered. This holds for what goes through Python's `open` and `os`, which is pathlib,
shutil, numpy, zipfile and most loggers, and for torch.save and sqlite3; not for other libraries in C, which Landlock
then refuses where there is one.
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
_ALWAYS_WRITABLE = ("/dev", "/proc")
_PATHS = (str, bytes, os.PathLike)
_READS = ("r", "rb", "rt")
Act = Callable[..., Any]
"""What is done instead of a function: it takes that function, the absolute path, and the function's own arguments."""


class Mirror:
    """What was written and deleted by this process, instead of at its place."""

    def __init__(self, root: Path, writable: Sequence[Path], refusals: Refusals) -> None:
        """
        Args:
            root: An empty folder, where the copies lie.
            writable: Folders that are written to as they are.
            refusals: Hears of everything else.
        """
        self.root, self.refusals = os.path.realpath(root), refusals
        self.writable = (self.root, *(os.path.realpath(folder) for folder in writable), *_ALWAYS_WRITABLE)
        self._gone: set[str] = set()
        self._moved: set[str] = set()
        """Where a file lies that was moved: the mirror has a link to where it was, which is no link of the user's."""
        self.used = bool(writable)
        """Whether anything was written or deleted yet, as far as one process can know."""
        self._inside = threading.local()

    # -- where a file is

    def is_writable(self, path: str) -> bool:
        """Whether it is written to as it is."""
        return any(path == folder or path.startswith(f"{folder}/") for folder in self.writable)

    def read(self, path: str) -> str:
        """Where the file now lies that is asked for under this path."""
        copy = self._copy(path)
        if not self.used or self.is_writable(path):
            return path
        if self._is_link(path):
            return self.read(os.path.realpath(copy))
        if os.path.lexists(copy) and not (os.path.isdir(copy) and os.path.isdir(path) and not self._is_gone(path)):
            return copy
        return f"{self.root}.gone" if self._is_gone(path) else path

    def write(self, path: str, doing: str = "writing", keep: bool = False) -> str:
        """Where to write instead; `keep` for what is changed, not written anew."""
        if self.is_writable(path):
            return path
        if self._is_link(path):
            return self.write(os.path.realpath(self._copy(path)), doing, keep)
        self.used = True
        self.refusals.tried(doing, path)
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
        self.refusals.tried("deleting", path)
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
        if not self.is_writable(source):
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
        acts: list[tuple[Any, str, Act]] = [
            (builtins, "open", self._open), (io, "open", self._open), (os, "open", self._open_descriptor),
            (os, "listdir", self._list), (os, "mkdir", self._make), (shutil, "rmtree", self._clear),
            (sqlite3, "connect", self._connect),
        ]  # fmt: skip
        acts += [(os, name, self._read) for name in ("stat", "lstat", "access", "readlink", "scandir")]
        acts += [(os, name, self._change) for name in ("truncate", "chmod", "chown", "utime")]
        acts += [(os, name, self._drop) for name in ("remove", "unlink", "rmdir")]
        with contextlib.ExitStack() as undo:
            for owner, name, act in acts:
                undo.enter_context(replaced(owner, name, self._through(getattr(owner, name), act)))
            for name in ("rename", "replace"):
                undo.enter_context(replaced(os, name, self._moving(getattr(os, name))))
            for name in ("link", "symlink"):
                undo.enter_context(replaced(os, name, self._linking(getattr(os, name))))
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

    def _through(self, call: Callable[..., Any], act: Act) -> Callable[..., Any]:
        """`call`, with `act` instead of it for each path that the mirror has a say in; `act` sees the true files."""
        follow = act not in (self._drop, self._clear) and call is not os.lstat
        only_reads, opens = act in (self._read, self._list), act == self._open

        def through(path: Any = ".", *rest: Any, **options: Any) -> Any:
            for name in ("file", "database"):  # as `open` and `sqlite3.connect` call it
                path = options.pop(name, path)
            reads = only_reads or (opens and (rest[0] if rest else options.get("mode", "r")) in _READS)
            if reads and not self.used:
                return call(path, *rest, **options)
            place = self._place(path, options, follow and options.get("follow_symlinks", True))
            if place is None:
                return call(path, *rest, **options)
            with self.as_it_is():
                return act(call, place, path, *rest, **options)

        return through

    def _open(
        self, call: Callable[..., Any], place: str, path: Any, mode: str = "r", *rest: Any, **options: Any
    ) -> Any:
        found = self._to_open(place, bool(set(mode) & set("wax+")), "w" not in mode, "x" in mode)
        return call(found or path, mode, *rest, **options)

    def _open_descriptor(
        self, call: Callable[..., Any], place: str, path: Any, flags: int, *rest: Any, **options: Any
    ) -> Any:
        alone = bool(flags & os.O_EXCL and flags & os.O_CREAT)
        found = self._to_open(place, bool(flags & WRITES), not flags & os.O_TRUNC, alone)
        return call(found or path, flags, *rest, **options)

    def _to_open(self, place: str, writes: bool, keep: bool, alone: bool) -> str | None:
        """Where to open it; None where it is what it was."""
        if writes and alone and os.path.lexists(self.read(place)):
            raise FileExistsError(17, os.strerror(17), place)
        found = self.write(place, keep=keep) if writes else self.read(place)
        return None if found == place else found

    def _read(self, call: Callable[..., Any], place: str, path: Any, *rest: Any, **options: Any) -> Any:
        found = self.read(place)
        return call(path if found == place else found, *rest, **options)

    def _list(self, call: Callable[..., Any], place: str, path: Any) -> Any:
        if isinstance(path, bytes):
            return call(path)
        if self._is_gone(place) or not os.path.isdir(place):
            return call(self.read(place))
        copy = self._copy(place)
        here = {name for name in call(place) if os.path.join(place, name) not in self._gone}
        return sorted(here | set(call(copy) if os.path.isdir(copy) else ()))

    def _make(self, call: Callable[..., Any], place: str, _: Any, *rest: Any, **options: Any) -> Any:
        if os.path.lexists(self.read(place)):
            raise FileExistsError(17, os.strerror(17), place)
        return call(self.write(place, "making"), *rest, **options)

    def _change(self, call: Callable[..., Any], place: str, _: Any, *rest: Any, **options: Any) -> Any:
        if not os.path.lexists(self.read(place)):
            raise FileNotFoundError(2, os.strerror(2), place)
        return call(self.write(place, "changing", keep=True), *rest, **options)

    def _drop(self, call: Callable[..., Any], place: str, path: Any, **options: Any) -> None:
        if self.is_writable(place):
            call(path, **options)
        else:
            self.drop(place)

    def _clear(
        self, call: Callable[..., Any], place: str, path: Any, ignore_errors: bool = False, *rest: Any, **options: Any
    ) -> None:
        if self.is_writable(place):
            call(path, ignore_errors, *rest, **options)
            return
        with contextlib.suppress(*([OSError] if ignore_errors else [])):
            self.drop(place)

    def _connect(self, call: Callable[..., Any], place: str, path: Any, *rest: Any, **options: Any) -> Any:
        in_file = str(path) != ":memory:" and path and not options.get("uri")
        return call(self.write(place, keep=True) if in_file else path, *rest, **options)

    def _moving(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def move(source: Any, target: Any, **options: Any) -> None:
            places = [self._place(path, options, follow=False) for path in (source, target)]
            if None in places or all(self.is_writable(place) for place in places if place):
                call(source, target, **options)
                return
            with self.as_it_is():
                self.move(*[place for place in places if place])

        return move

    def _linking(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def link(source: Any, target: Any, *rest: Any, **options: Any) -> None:
            place = self._place(target, options, follow=False)
            if place is None or self.is_writable(place):
                call(source, target, *rest, **options)
                return
            with self.as_it_is():
                os.symlink(os.path.join(os.path.dirname(place), os.fsdecode(source)), self.write(place))

        return link

    def _saving(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def save(value: Any, file: Any, *rest: Any, **options: Any) -> None:
            place = self._place(file, {})
            if place is None:
                call(value, file, *rest, **options)
                return
            with self.as_it_is():
                path = self.write(place)
            call(value, path, *rest, **options)

        return save
