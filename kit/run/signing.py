"""Signing: which run directories this user wrote here, so that no other's code runs without being asked for.

A run directory holds code: the pickled module and data, and import paths in its config. Opening it runs none of that;
running it again does. So what decides on the code is signed when it is written (HMAC-SHA256), with a key that this
installation makes once and only this user can read, and the owner's number with it. Run directories of colleagues, of
another machine, from before there were signatures, or changed since, are run again only by whoever says `trust=True`.
"""

from __future__ import annotations

import functools
import hashlib
import hmac
import json
import os
import secrets
import stat
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kit.config import Config
from kit.errors import ForeignRunError, KitWarning, TrialError
from kit.json_text import read_json
from kit.run.paths import RunPaths

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
    """Say that this user wrote the run here, as it is now."""
    paths.signature.write_text(Contents.of(paths).signature(_owner(paths)), encoding="ascii")


def replace_config(paths: RunPaths, config: Config) -> None:
    """Put the config that really runs in the place of the one that was asked for; what was signed stays signed.

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
        trust: Whoever asks knows what is in it.

    Raises:
        ForeignRunError: when this user did not write it here, or somebody changed it since.
        TrialError: when something of it is no longer there.
    """
    contents = Contents.of(paths)
    if trust:
        return contents
    owner = _owner(paths)
    try:
        given = paths.signature.read_bytes()
    except FileNotFoundError:
        raise _foreign(paths, owner, "it has no signature") from None
    except OSError as error:
        raise _foreign(paths, owner, f"its signature cannot be read ({error.strerror})") from None
    if not hmac.compare_digest(given, contents.signature(owner).encode()):
        raise _foreign(paths, owner, "its signature is of another installation, or it was changed since")
    return contents


def _foreign(paths: RunPaths, owner: int, why: str) -> ForeignRunError:
    return ForeignRunError(
        f"{paths.directory} was not written by you here, so its code is not run unasked: {why}; it belongs to "
        f"{_called(owner)}. If you know what is in it, pass trust=True, or give module, data and config yourself"
    )


def _owner(paths: RunPaths) -> int:
    """The number of whom the directory and all that is run belongs to; -1 when these are several."""
    files = (paths.directory, paths.config, paths.payload, paths.environment)
    owners = {file.lstat().st_uid for file in files}
    return owners.pop() if len(owners) == 1 else -1


def _called(owner: int) -> str:
    if owner < 0:
        return "several users"
    you = " (you)" if hasattr(os, "getuid") and owner == os.getuid() else ""
    try:
        import pwd

        return f"{pwd.getpwuid(owner).pw_name}{you}"
    except (ImportError, KeyError):
        return f"user {owner}{you}"


# -- the key


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
        try:
            return _kept(path)
        except FileNotFoundError:
            _make(path)
            return _kept(path)
    except OSError as error:
        message = (
            f"{path} cannot hold the key that run directories are signed with ({error.strerror or error}); those of "
            "this session can be run again by this session, later ones have to pass trust=True"
        )
        warnings.warn(message, KitWarning, stacklevel=2)
        return secrets.token_bytes(_KEY_BYTES)


def _kept(path: Path) -> bytes:
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    with os.fdopen(descriptor, "rb") as file:
        found, key = os.fstat(file.fileno()), file.read(_KEY_BYTES + 1)
    if hasattr(os, "getuid") and (found.st_uid != os.getuid() or stat.S_IMODE(found.st_mode) & 0o077):
        raise PermissionError("others can read or change it; remove it, and a new one is made")
    if len(key) != _KEY_BYTES:
        raise OSError("it is damaged; remove it, and a new one is made")
    return key


def _make(path: Path) -> None:
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
