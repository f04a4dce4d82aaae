"""Claims: which trial holds which GPU, so that two notebooks never take the same one by themselves.

A claim is a small file, one for each trial and GPU (for a MIG instance, that instance), in a folder of this user on
this machine. It names the process with which it ends: first the kernel that chose the GPU, then the supervisor of the
ranks. It counts as long as that process lives, which is known by its id, its start time and the boot of the machine. So
a kill leaves nothing to clean up by hand: claims of dead processes are removed by the next one that chooses.

The one invariant: looking and claiming happen under one lock, which the operating system takes back from a process that
dies. Claims of other users are not seen; what their processes hold on a GPU is.
"""

from __future__ import annotations

import contextlib
import json
import os
import stat
import time
import uuid
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any
from urllib.parse import quote, unquote

from kit.errors import HardwareError
from kit.json_text import read_json, write_whole
from kit.machine.processes import alive, identify, machine

FOLDER = Path(f"/tmp/kit-claims-{os.getuid() if hasattr(os, 'getuid') else 0}")
"""The same for every kernel of this user, whatever its environment says of temporary files."""
LOCK_SECONDS = 10.0
_TICK_SECONDS = 0.01


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuLease:
    """One trial's hold on one GPU."""

    gpu: str
    """UUID of the GPU or MIG instance."""
    name: str
    """Of what was claimed for: the experiment."""
    kernel: int
    """Process id of the kernel that claimed it."""
    holder: Mapping[str, Any]
    """The process with which it ends, as `kit.machine.processes.identify` names it."""
    machine: Mapping[str, str]

    def __str__(self) -> str:
        return f"{self.name} (kernel {self.kernel})"

    @property
    def counts(self) -> bool:
        return self.machine == machine() and alive(dict(self.holder))


def claims() -> dict[str, tuple[GpuLease, ...]]:
    """The claims that count now, by GPU; empty before the first."""
    return _live() if FOLDER.is_dir() else {}


class LockedClaims:
    """The claims as they are while nobody else looks or claims."""

    def __init__(self) -> None:
        self.claims = _live()

    def take(self, gpus: Iterable[str], name: str) -> list[Path]:
        """Claim these for this process; the files, to be handed over or released."""
        token = uuid.uuid4().hex
        return [_write(_claim_of(gpu, name), FOLDER / f"{quote(gpu, safe='')}.{token}.json") for gpu in gpus]


@contextlib.contextmanager
def choosing() -> Iterator[LockedClaims]:
    """Inside, nobody else looks or claims.

    Raises:
        HardwareError: when the folder is not ours, or another process keeps the lock.
    """
    _own_folder()
    lock = os.open(FOLDER / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        _wait_for(lock)
        for file in FOLDER.iterdir():  # what the dead have left; nobody writes now, so every draft is theirs
            claim = _read(file) if file.suffix == ".json" else None
            if file.suffix == ".tmp" or (claim is not None and not claim.counts):
                file.unlink(missing_ok=True)
        yield LockedClaims()
    finally:
        os.close(lock)


def hand_over(files: Iterable[Path], holder: Mapping[str, Any], name: str) -> None:
    """From now on the claims end with `holder`.

    Raises:
        HardwareError: when a claim had ended with its holder, and its GPU is another trial's by now.
    """
    files = list(files)
    if not files:
        return
    with choosing() as locked:
        for file in files:
            gpu = unquote(file.name.split(".")[0])
            others = locked.claims.get(gpu, ())
            if others and not file.exists():
                raise HardwareError(
                    f"{gpu} was claimed by {', '.join(map(str, others))} meanwhile; run the trial again"
                )
            _write(replace(_claim_of(gpu, name), holder=dict(holder)), file)


def release(files: Iterable[Path]) -> None:
    """Give GPUs back; what is gone already is no matter."""
    for file in files:
        with contextlib.suppress(OSError):
            file.unlink()


# -- the files


def _claim_of(gpu: str, name: str) -> GpuLease:
    return GpuLease(gpu=gpu, name=name, kernel=os.getpid(), holder=identify(os.getpid()), machine=machine())


def _live() -> dict[str, tuple[GpuLease, ...]]:
    found: dict[str, tuple[GpuLease, ...]] = {}
    for file in sorted(FOLDER.glob("*.json")):
        claim = _read(file)
        if claim is not None and claim.counts:
            found[claim.gpu] = (*found.get(claim.gpu, ()), claim)
    return found


def _read(file: Path) -> GpuLease | None:
    try:
        return GpuLease(**read_json(file.read_bytes()))
    except (OSError, ValueError, TypeError):  # gone meanwhile, or not one of ours
        return None


def _write(claim: GpuLease, file: Path) -> Path:
    return write_whole(file, json.dumps(asdict(claim)))


# -- the folder and its lock


def _own_folder() -> None:
    """Make the folder; refuse one that another user could have put there."""
    with contextlib.suppress(FileExistsError):
        FOLDER.mkdir(mode=0o700)
    found = FOLDER.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o022:
        raise HardwareError(
            f"{FOLDER}, where kernels of this user tell each other which GPU they hold, is not a folder that only this "
            "user can write to; remove it, or have it removed"
        )


def _wait_for(lock: int) -> None:
    import fcntl  # not on Windows, where there is no trial that could claim

    deadline = time.monotonic() + LOCK_SECONDS
    while True:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() > deadline:
                raise HardwareError(
                    f"another process has been choosing a GPU for {LOCK_SECONDS:g} s ({FOLDER / 'lock'}); it may be "
                    "suspended: end it, or let it go on"
                ) from None
            time.sleep(_TICK_SECONDS)
        else:
            return
