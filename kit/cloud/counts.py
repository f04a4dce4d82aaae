"""What a simulated cloud was asked for and sent, by kind, status and fault; and which requests meet a fault.

`bytes_sent` are body bytes handed to the network, `bytes_received` those of uploads; heads are not counted. The faults
of a store:

    403 … 504   that status, with the provider's error body; a write is not done
    reset       the connection is reset before the first byte; a write is not done
    lost        the request is done, and the connection is reset instead of the answer
    truncate    the head promises all bytes, half of them come, and the connection closes
    drip        the body comes at `drip_bytes_per_second`

They come by chance or by script. By chance, the n-th request of a key draws a number that depends on the seed, the key
and n alone, so the same requests fail whatever order they come in. By script, the n-th request of each key that matches
a pattern meets the n-th entry; `ok` passes, and so does every request after the last entry. Only requests that name an
object are counted and fail.
"""

from __future__ import annotations

import fnmatch
import hashlib
import operator
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, Self

from kit.errors import did_you_mean
from kit.tables import html_table, text_table
from kit.units import format_bytes, format_count

_COLUMNS = ("kind", "requests", "sent", "received")


class LiveCounts:
    """The server's own counts."""

    def __init__(self, now: float) -> None:
        self._began = now
        self.kinds: dict[str, list[int]] = {}
        self.statuses: Counter[str] = Counter()
        self.faults: Counter[str] = Counter()
        self.in_flight = self.most_in_flight = self.connections = self.refused = 0

    def reset(self, now: float) -> None:
        """Back to zero; what is in flight and connected stays."""
        in_flight, connections = self.in_flight, self.connections
        self.__init__(now)  # type: ignore[misc]
        self.in_flight = self.most_in_flight = in_flight
        self.connections = connections

    def began(self, kind: str, received: int) -> None:
        self.in_flight += 1
        self.most_in_flight = max(self.most_in_flight, self.in_flight)
        cell = self.kinds.setdefault(kind, [0, 0, 0])
        cell[0] += 1
        cell[2] += received

    def sent(self, kind: str, count: int) -> None:
        self.kinds.setdefault(kind, [0, 0, 0])[1] += count

    def to_dict(self, now: float) -> dict[str, Any]:
        names = ("kinds", "statuses", "faults", "in_flight", "most_in_flight", "connections", "refused")
        return {name: getattr(self, name) for name in names} | {"elapsed_seconds": now - self._began}


class Usage(NamedTuple):
    """Requests and bytes of one kind."""

    requests: int = 0
    bytes_sent: int = 0
    bytes_received: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class CloudCounts:
    """What a simulated cloud has served since its counts were reset."""

    kinds: Mapping[str, Usage] = field(default_factory=dict)
    """By kind: read, info, list, write, delete, bucket."""
    statuses: Mapping[str, int] = field(default_factory=dict)
    """Answers by status; resets have none."""
    faults: Mapping[str, int] = field(default_factory=dict)
    """Faults met, by kind."""
    refused: int = 0
    """Requests beyond the rate."""
    in_flight: int = 0
    most_in_flight: int = 0
    connections: int = 0
    """Open now."""
    elapsed_seconds: float = 0.0

    @classmethod
    def from_dict(cls, reported: Mapping[str, Any]) -> Self:
        """What the server reports."""
        kinds = {kind: Usage(*cell) for kind, cell in reported["kinds"].items()}
        return cls(**{**reported, "kinds": kinds})

    def since(self, mark: CloudCounts) -> CloudCounts:
        """What was served after `mark`, counts of the same cloud; in-flight figures and open connections are of now."""
        return replace(
            self, kinds=_less(self.kinds, mark.kinds), statuses=Counter(self.statuses) - Counter(mark.statuses),
            faults=Counter(self.faults) - Counter(mark.faults), refused=self.refused - mark.refused,
            elapsed_seconds=self.elapsed_seconds - mark.elapsed_seconds,
        )  # fmt: skip

    @property
    def total(self) -> Usage:
        """Of all kinds together."""
        return Usage(*map(sum, zip(*self.kinds.values(), strict=True)))

    @property
    def requests(self) -> int:
        return self.total.requests

    @property
    def bytes_sent(self) -> int:
        return self.total.bytes_sent

    @property
    def bytes_received(self) -> int:
        return self.total.bytes_received

    def price(self, price_per_thousand_reads: float = 0.0, price_per_gigabyte: float = 0.0) -> float:
        """What the requests and the bytes sent (per 10^9) would have cost, in the currency of the prices."""
        return self.requests / 1000 * price_per_thousand_reads + self.bytes_sent / 1e9 * price_per_gigabyte

    def _rows(self) -> list[list[str]]:
        return [
            [kind, format_count(usage.requests), format_bytes(usage.bytes_sent), format_bytes(usage.bytes_received)]
            for kind, usage in [*sorted(self.kinds.items()), ("all", self.total)]
        ]

    def _notes(self) -> str:
        said = [f"{format_count(self.most_in_flight)} in flight at most"]
        said += [f"{format_count(self.refused)} refused beyond the rate"] * bool(self.refused)
        said += [f"{format_count(count)} met {fault}" for fault, count in sorted(self.faults.items())]
        return ", ".join(said)

    def __repr__(self) -> str:
        return f"{text_table(_COLUMNS, self._rows())}\n{self._notes()}"

    def _repr_html_(self) -> str:
        return html_table(_COLUMNS, self._rows(), caption=self._notes())


def _less(kinds: Mapping[str, Usage], mark: Mapping[str, Usage]) -> dict[str, Usage]:
    """By kind, what was added; kinds with nothing are left out."""
    added = {kind: Usage(*map(operator.sub, usage, mark.get(kind, Usage()))) for kind, usage in kinds.items()}
    return {kind: usage for kind, usage in added.items() if any(usage)}


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
    return f"{kind!r} is no fault{did_you_mean(kind, KINDS, otherwise='choose from {}')}"


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
