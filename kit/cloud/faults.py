"""Faults: what a store does wrong, by chance or by script, and to which request.

    403 … 504   that status, with the provider's error body; a write is not done
    reset       the connection is reset before the first byte; a write is not done
    lost        the request is done, and the connection is reset instead of the answer
    truncate    the head promises all bytes, half of them come, and the connection closes
    drip        the body comes at `drip_bytes_per_second`

By chance: the n-th request of a key draws a number that depends on the seed, the key and n alone, so the same requests
fail whatever order they come in. By script: the n-th request of each key that matches a pattern meets the n-th entry;
`ok` and everything after the end pass. Only requests that name an object are counted and fail.
"""

from __future__ import annotations

import difflib
import fnmatch
import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

STATUSES = ("403", "404", "408", "429", "500", "502", "503", "504")
KINDS = (*STATUSES, "reset", "lost", "truncate", "drip")
KINDS_OF_REQUEST = ("read", "info", "list", "write", "delete", "bucket")
"""Of bytes, of an object's metadata, of keys; uploads and copies; deletions; everything about buckets."""


@dataclass(frozen=True, slots=True)
class Script:
    """What the first, second, … request of each key that matches meets."""

    pattern: str
    """`bucket/key`, with `*` and `?`."""
    entries: tuple[str, ...]
    kind: str = ""
    """Only requests of this kind; empty for all."""

    def matches(self, name: str, kind: str) -> bool:
        return self.kind in ("", kind) and fnmatch.fnmatchcase(name, self.pattern)


def check_fractions(faults: Any) -> list[str]:
    """What is wrong with a mapping from fault to fraction."""
    if not isinstance(faults, Mapping):
        return [f"{faults!r} is no mapping; write {{'503': 0.01}}"]
    found = [_unknown(kind) for kind in faults if kind not in KINDS]
    numbers = [share for share in faults.values() if isinstance(share, int | float) and not isinstance(share, bool)]
    if len(numbers) < len(faults) or not all(0 <= share <= 1 for share in numbers) or sum(numbers) > 1:
        found.append(f"{dict(faults)} are not fractions that add up to at most 1")
    return found


def check_script(entries: Sequence[Any], kind: str) -> list[str]:
    """What is wrong with the entries of a script."""
    found = [_unknown(entry) for entry in map(str, entries) if entry not in (*KINDS, "ok")]
    if not entries:
        found.append("has no entries; write [503, 'ok', 'reset']")
    if kind and kind not in KINDS_OF_REQUEST:
        found.append(f"{kind!r} is no kind of request; choose one of {', '.join(KINDS_OF_REQUEST)}")
    return found


def _unknown(kind: str) -> str:
    close = difflib.get_close_matches(str(kind), KINDS, n=1)
    return f"{kind!r} is no fault; " + (f"did you mean {close[0]}?" if close else f"choose from {', '.join(KINDS)}")


class FaultPlan:
    """Which fault a request meets. Counts the requests of each key while there is anything to meet."""

    def __init__(self, fractions: Mapping[str, float], seed: int, scripts: Sequence[Script] = ()) -> None:
        self._fractions = {kind: share for kind, share in fractions.items() if share}
        self._seed = seed
        self._scripts = list(scripts)
        self._requests: dict[str, int] = {}
        self._scripted: dict[tuple[int, str], int] = {}

    def add(self, script: Script) -> None:
        self._scripts.append(script)

    @property
    def scripts(self) -> tuple[Script, ...]:
        return tuple(self._scripts)

    def draw(self, name: str, kind: str) -> str:
        """The fault that this request of `bucket/key` meets; empty for none."""
        for place, script in enumerate(self._scripts):
            if script.matches(name, kind):
                number = self._scripted.get((place, name), 0)
                self._scripted[place, name] = number + 1
                if number < len(script.entries):
                    return "" if script.entries[number] == "ok" else script.entries[number]
        return self._by_chance(name) if self._fractions else ""

    def _by_chance(self, name: str) -> str:
        number = self._requests[name] = self._requests.get(name, 0) + 1
        digest = hashlib.blake2b(f"{self._seed}\0{name}\0{number}".encode(), digest_size=8).digest()
        left = int.from_bytes(digest) / 2**64
        for kind, share in self._fractions.items():
            if left < share:
                return kind
            left -= share
        return ""
