"""The run directory: the files of one trial, the memory through which it is stopped, and the proof of who wrote it.

Every file name of a run is written here and nowhere else. A run directory is made in one step (`mkdir` fails when the
name is taken, then the next number is tried) and holds a marker file, so that nothing else is ever taken for a run.

**Stopping** (`Control`): kernel, supervisor and ranks share two words of memory through a file. Whoever wants the trial
to end sets `requested`. Rank 0 sees it when it has finished step k, and writes `stop_at = k + 1` before it begins that
step; every other rank reads `stop_at` after each step and leaves when it has finished exactly that one. In ddp and fsdp
no rank can finish step k + 1 before rank 0 has begun it, so all ranks leave after the same step and no collective is
left half done. No clock takes part. A trial of one rank leaves after step k.

**Signing**: a run directory holds code, the pickled module and data and import paths in its config. Opening it runs
none of that, running it again does. So what decides on the code is signed when it is written, together with the owner's
number (HMAC-SHA256), with a key that this installation makes once and only this user can read. Directories of other
users, of another machine, without a signature, or changed since, run again only with `trust=True`.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import hashlib
import hmac
import itertools
import json
import mmap
import os
import re
import secrets
import shutil
import stat
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kit.config import Config, project_folder
from kit.errors import ConfigError, ForeignRunError, Problem, TrialError, warn_caller
from kit.json_text import read_json, write_whole
from kit.units import format_bytes

EVENT_FILES = "events.*.jsonl"
CALIBRATIONS = ".calibrations"
"""Below the folder of runs: calibrations of loaders, which train nothing, and their results."""
LARGEST_WORLD = 100_000
"""Ranks that a run may name: files are looked for of each."""
_MARKER = ".kit-run"
_LOG = re.compile(r"log\.(\d+)\.txt")


class _File:
    """The path of a file of a run."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __get__(self, paths: RunPaths, owner: type[RunPaths]) -> Path:
        return paths.directory / self._name


@dataclass(frozen=True, slots=True)
class RunPaths:
    """The files of one run."""

    directory: Path

    marker = _File(_MARKER)
    config = _File("config.yaml")
    payload = _File("payload.pkl")
    """The pickled module and data."""
    signature = _File("signature.txt")
    """Proves that this user wrote the run here."""
    environment = _File("environment.json")
    """Versions, the machine, and what `auto` was resolved to, with reasons."""
    control = _File("control")
    """The shared memory of the stop protocol."""
    supervisor_events = _File("events.supervisor.jsonl")
    prediction = _File("prediction.json")
    """The memory estimate of the run."""
    predicting = _File("predicting.txt")
    """Names the run directory of the process that makes the estimate."""
    calibration = _File("calibration.json")
    """The loader setting that was chosen, with its evidence."""
    checkpoints = _File("checkpoints")
    """Checkpoints that the trial was told to keep."""
    scratch = _File("scratch")
    """Where a job that is confined keeps what it may not write elsewhere; gone when it has ended."""
    row = _File("row.json")
    """The row of `kit.results`, once the trial has ended."""

    @classmethod
    def create(cls, config: Config) -> RunPaths:
        """A new, empty run directory named after the experiment, the time and the fingerprint.

        Raises:
            ConfigError: when `trial.folder` cannot be written to.
        """
        folder = runs_folder(config.trial.folder)
        stem = f"{config.name}-{time.strftime('%Y%m%d-%H%M%S')}-{config.fingerprint[:6]}"
        try:
            folder.mkdir(parents=True, exist_ok=True)
            for number in itertools.count(1):
                run = cls(folder / (stem if number == 1 else f"{stem}-{number}"))
                with contextlib.suppress(FileExistsError):
                    run.directory.mkdir()
                    break
        except OSError as error:
            raise cannot_write(folder, error) from error
        with run.whole_or_gone():
            run.marker.touch()
        return run

    @classmethod
    def open(cls, directory: str | Path) -> RunPaths:
        """An existing run directory.

        Raises:
            TrialError: when the directory is not there or is not a run.
        """
        try:
            run = cls(Path(directory).expanduser().absolute())
            is_run, exists = run.marker.is_file(), run.directory.exists()
        except (OSError, ValueError, TypeError, RuntimeError) as error:
            raise TrialError(f"{str(directory)[:200]!r} is no path of a run: {error}") from None
        if not is_run:
            state = "does not exist" if not exists else f"is not a run: it holds no {_MARKER}"
            raise TrialError(f"{run.directory} {state}; give the run_directory of a trial, such as one below runs/")
        return run

    @contextlib.contextmanager
    def whole_or_gone(self, needed_bytes: int = 0) -> Iterator[None]:
        """Remove the directory when what is written into it meanwhile cannot be; `needed_bytes` is how much that is.

        Raises:
            ConfigError: in place of the system's error, with what is free.
        """
        try:
            yield
        except OSError as error:
            shutil.rmtree(self.directory, ignore_errors=True)
            raise cannot_write(self.directory.parent, error, needed_bytes) from error

    def read_environment(self) -> dict[str, Any]:
        """What `environment` holds.

        Raises:
            TrialError: when it cannot be read, or is not what submission wrote.
        """
        try:
            found = read_json(self.environment.read_bytes())
        except FileNotFoundError:
            raise TrialError(
                f"{self.environment.name} is missing, so the run was broken off before its processes began; run the "
                "trial anew, and remove the folder"
            ) from None
        except (OSError, ValueError) as error:
            raise TrialError(f"{self.environment} cannot be read: {error}") from error
        wrong = "no mapping" if not isinstance(found, dict) else next(_wrong(found), "")
        if wrong:
            raise TrialError(f"{self.environment} is damaged: {wrong}; run the trial anew")
        return dict(found)

    def write_prediction(self, estimate: Mapping[str, Any]) -> None:
        """Keep an estimate with the run, in one step."""
        write_whole(self.prediction, json.dumps(estimate))

    @property
    def predicted_speed(self) -> Path:
        """What the operators of its step said about its speed, before it ran."""
        return self.directory / "predicted_speed.json"

    def measured_memory(self, rank: int) -> Path:
        """What the rank's allocator did in the first steps."""
        return self.directory / f"memory.{rank}.npz"

    def memory_snapshot(self, rank: int) -> Path:
        """What the rank's device held when it ran out of memory."""
        return self.directory / f"memory.{rank}.pickle"

    def recording(self, number: int) -> Path:
        """A recording that a prediction has made."""
        return self.directory / f"recording.{number}.npz"

    def events(self, rank: int) -> Path:
        return self.directory / f"events.{rank}.jsonl"

    def log(self, rank: int) -> Path:
        """What the rank wrote to stdout and stderr."""
        return self.directory / f"log.{rank}.txt"

    def event_files(self) -> list[Path]:
        return sorted(self.directory.glob(EVENT_FILES))

    def logs(self) -> list[Path]:
        return sorted(path for path in self.directory.glob("log.*.txt") if _LOG.fullmatch(path.name))


_ENVIRONMENT = {
    "world_size": int, "precision": str, "accelerator": str, "platform": str, "machine": dict, "hardware": dict,
    "given": dict, "predicted": dict, "versions": dict, "supervisor": dict, "claims": list, "devices": list,
    "reasons": list, "folder": str, "kind": str, "notebook": str, "sys_path": list, "threads_per_rank": int,
}  # fmt: skip
"""Types of what is read of an environment; any of it may be left out."""


def _wrong(found: Mapping[str, Any]) -> Iterator[str]:
    for name, kind in _ENVIRONMENT.items():
        if not isinstance(found.get(name), kind | None):
            yield f"{name} is {found[name]!r:.60}"
    if not 1 <= (found.get("world_size") or 1) <= LARGEST_WORLD:
        yield f"world_size is {found['world_size']!r:.60}, not 1 to {LARGEST_WORLD:,}"
    predicted = found.get("predicted") or {}
    yield from (f"predicted is {value!r:.60}" for value in predicted.values() if not isinstance(value, int | float))


def cannot_write(folder: Path, error: OSError, needed_bytes: int = 0) -> ConfigError:
    """The error that says where a run cannot be kept, what it needs and what is free."""
    there = next((path for path in (folder, *folder.parents) if path.exists()), Path("/"))
    free = format_bytes(shutil.disk_usage(there).free)
    room = f"{format_bytes(needed_bytes)} needed, {free} free" if needed_bytes else f"{free} free"
    reason = error.strerror or str(error)
    way_out = "make room" if error.errno in (errno.ENOSPC, errno.EDQUOT) else "change its rights"
    message = f"cannot make a run directory in {folder}: {reason} ({room}); {way_out}, or choose another folder"
    return ConfigError([Problem("trial.folder", message)])


def runs_folder(folder: str | Path = "runs") -> Path:
    """Where run directories are kept: as given when absolute, else below the project folder.

    Raises:
        ConfigError: for what is no path.
    """
    asked: Any = folder  # by a user, who may give anything
    if not isinstance(asked, str | os.PathLike):
        raise ConfigError([Problem("folder", f"{type(asked).__name__} is no folder; give such as 'runs'")])
    given = Path(folder).expanduser()
    return given if given.is_absolute() else project_folder() / given


def find_runs(folder: str | Path = "runs") -> Iterator[RunPaths]:
    """Every run directory in a folder, oldest first, or the folder itself; other folders are passed over."""
    root = runs_folder(folder)
    if (root / _MARKER).is_file():
        yield RunPaths(root)
    if not root.is_dir():
        return
    marked = [path for path in root.iterdir() if (path / _MARKER).is_file()]
    yield from (RunPaths(path) for path in sorted(marked, key=lambda path: ((path / _MARKER).stat().st_mtime_ns, path)))


STOP = 1
KILL = 2
_REQUESTED, _STOP_AT = 0, 1
_WORD_BYTES = 8


class Control:
    """The shared memory in the file `control` of a run directory; aligned words, so no read is torn."""

    def __init__(self, path: Path) -> None:
        with path.open("r+b") as file:
            self._map = mmap.mmap(file.fileno(), 2 * _WORD_BYTES)
        self._words = memoryview(self._map).cast("Q")

    @staticmethod
    def create(path: Path) -> None:
        path.write_bytes(bytes(2 * _WORD_BYTES))

    @property
    def requested(self) -> int:
        """0, `STOP` or `KILL`."""
        return self._words[_REQUESTED]

    def request(self, level: int) -> None:
        self._words[_REQUESTED] = max(level, self.requested)

    def should_leave(self, step: int, rank: int, world_size: int) -> bool:
        """Whether this rank, having just finished optimizer step `step`, leaves the fit now."""
        if rank == 0 and self.requested and not self._words[_STOP_AT]:
            self._words[_STOP_AT] = step if world_size == 1 else step + 1
        return self._words[_STOP_AT] == step

    def close(self) -> None:
        self._words.release()
        self._map.close()


_KEY_BYTES = 32
_VERSION = b"kit run 1"
_UNSIGNED = ("supervisor",)
"""What is noted in the environment after a run was written."""


@dataclass(frozen=True, slots=True)
class Contents:
    """What a run directory says is to be run."""

    config: bytes
    payload: bytes
    environment: dict[str, Any]

    @classmethod
    def of(cls, paths: RunPaths) -> Contents:
        """Read, not run.

        Raises:
            TrialError: when something of it is no longer there.
        """
        try:
            environment = read_json(paths.environment.read_bytes())
            return cls(paths.config.read_bytes(), paths.payload.read_bytes(), dict(environment))
        except (OSError, ValueError, TypeError) as error:
            raise TrialError(f"{paths.directory} cannot be run again: {error}") from error

    def signature(self, owner: int) -> str:
        decides = {name: value for name, value in self.environment.items() if name not in _UNSIGNED}
        parts = (self.config, self.payload, json.dumps(decides, sort_keys=True).encode())
        digests = b"".join(hashlib.sha256(part).digest() for part in parts)
        return hmac.new(_key(key_path()), _VERSION + digests + str(owner).encode(), hashlib.sha256).hexdigest()


def sign(paths: RunPaths) -> None:
    """Sign the run, as it is now, as written by this user here."""
    paths.signature.write_text(Contents.of(paths).signature(_owner(paths)), encoding="ascii")


def replace_config(paths: RunPaths, config: Config) -> None:
    """Put the config that really runs in the place of the submitted one; what was signed stays signed.

    Raises:
        OSError: when it cannot be written.
    """
    try:
        contents_to_run(paths)
    except (ForeignRunError, TrialError):
        config.save(paths.config)
        return
    config.save(paths.config)
    sign(paths)


def contents_to_run(paths: RunPaths, trust: bool = False) -> Contents:
    """What is in a run directory, when it may be run again; look at nothing else of it, as that may change meanwhile.

    Args:
        paths: The run directory.
        trust: Whether the caller knows what is in it, so that its signature does not matter.

    Raises:
        ForeignRunError: when this user did not write it here, or somebody changed it since.
        TrialError: when something of it is no longer there.
    """
    contents = Contents.of(paths)
    if trust:
        return contents
    owner = _owner(paths)
    signature = contents.signature(owner).encode()
    try:
        if hmac.compare_digest(paths.signature.read_bytes(), signature):
            return contents
        why = "its signature is of another installation, or it was changed since"
    except FileNotFoundError:
        why = "it has no signature"
    except OSError as error:
        why = f"its signature cannot be read ({error.strerror})"
    raise ForeignRunError(
        f"{paths.directory} was not written by you here, so its code is not run unasked: {why}; it belongs to "
        f"{_user_name(owner)}. If you know what is in it, pass trust=True, or give module, data and config yourself"
    )


def _owner(paths: RunPaths) -> int:
    """The number of the user whom the directory and all that is run belongs to; -1 when these are several."""
    files = (paths.directory, paths.config, paths.payload, paths.environment)
    owners = {file.lstat().st_uid for file in files}
    return owners.pop() if len(owners) == 1 else -1


def _user_name(number: int) -> str:
    if number < 0:
        return "several users"
    name = f"user {number}"
    with contextlib.suppress(ImportError, KeyError):
        import pwd

        name = pwd.getpwuid(number).pw_name
    return f"{name} (you)" if hasattr(os, "getuid") and number == os.getuid() else name


def key_path() -> Path:
    """Where this installation's key is kept, by the XDG rules; a relative path for a user without a home."""
    given = Path(os.environ.get("XDG_STATE_HOME", ""))
    state = given if given.is_absolute() else Path(os.path.expanduser("~"), ".local", "state")  # noqa: PTH111 - never raises
    return state / "kit" / "run-key"


@functools.cache
def _key(path: Path) -> bytes:
    """The key of this installation, made on first use; one of this process where none can be kept."""
    try:
        if not path.is_absolute():
            raise OSError("this user has no home folder; set XDG_STATE_HOME to one that lasts")
        with contextlib.suppress(FileNotFoundError):
            return _read_key(path)
        _make_key(path)
        return _read_key(path)
    except OSError as error:
        message = (
            f"{path} cannot hold the key that run directories are signed with ({error.strerror or error}); those of "
            "this session can be run again by this session, later ones have to pass trust=True"
        )
        warn_caller(message)
        return secrets.token_bytes(_KEY_BYTES)


def _read_key(path: Path) -> bytes:
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    with os.fdopen(descriptor, "rb") as file:
        found, key = os.fstat(file.fileno()), file.read(_KEY_BYTES + 1)
    if hasattr(os, "getuid") and (found.st_uid != os.getuid() or stat.S_IMODE(found.st_mode) & 0o077):
        raise PermissionError("others can read or change it; remove it, and a new one is made")
    if len(key) != _KEY_BYTES:
        raise OSError("it is damaged; remove it, and a new one is made")
    return key


def _make_key(path: Path) -> None:
    """Whole or not at all; of two processes that make one at the same time, the first is believed by both."""
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    draft = path.with_name(f"{path.name}.{secrets.token_hex(8)}")
    descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(secrets.token_bytes(_KEY_BYTES))
        try:
            os.link(draft, path)
        except FileExistsError:
            return
        except OSError:  # a file system without hard links
            draft.replace(path)
    finally:
        draft.unlink(missing_ok=True)
