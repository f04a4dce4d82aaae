"""Dials: how slow, narrow, strict and faulty a simulated cloud is; presets are named settings of them.

Time to the first byte is lognormal around a median, and a small fraction of requests is slower still by a factor:
`median × exp(spread × N(0, 1)) × (slow_factor, for slow_fraction of them)`. Bandwidths count body bytes; 0 means no
limit. Requests beyond the rate are refused at once, as a bucket does, and not queued. The figures of the presets are
round numbers of the order that public measurements report; they teach and compare, and promise nothing about a bucket.

Bandwidth is a clock (`Pace`) that every piece moves on by `bytes / bandwidth`; a piece has passed when the time has
come to where the clock stands. The clock may lag behind the time by `_LENIENCY_SECONDS`, so that timers which fire late
lose nothing, and by no more, so that a pause is not made up for. All connections share one such clock (`SharedLink`).
"""

from __future__ import annotations

import math
import random
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any, Self

from kit.cloud.counts import check_fractions
from kit.config import Config
from kit.errors import ConfigError, Problem, did_you_mean
from kit.units import format_bytes, format_count, format_seconds, parse_bytes

_REFUSALS = (429, 503)
_UNLIMITED = 10**12
"""Bytes per second that never decide, where a config has no word for no limit."""
_LATE_SECONDS = 0.0015
"""By so much an answer comes later than its latency: the server's loop waits whole milliseconds, rounded up twice."""
_SIZES = ("bandwidth_bytes_per_second", "total_bandwidth_bytes_per_second", "drip_bytes_per_second")


@dataclass(frozen=True, slots=True, kw_only=True)
class Dials:
    """One setting of every dial; 0 stands for no limit."""

    latency_seconds: float = 0.0
    """Median time to the first byte."""
    latency_spread: float = 0.0
    """Standard deviation of the logarithm of the latency: 0.3 puts two thirds within a factor of 1.35."""
    slow_fraction: float = 0.0
    """Of all requests, those that are slower by `slow_factor`."""
    slow_factor: float = 5.0
    bandwidth_bytes_per_second: float = 0.0
    """Of one connection."""
    total_bandwidth_bytes_per_second: float = 0.0
    """Of all connections together."""
    requests_per_second: float = 0.0
    """Requests beyond this rate are refused; a tenth of a second's worth may come at once."""
    refusal: int = 429
    """Status of a refused request: 429 or 503."""
    faults: Mapping[str, float] = field(default_factory=dict)
    """Fraction of the requests of objects that meets each fault, such as `{"503": 0.01, "reset": 0.002}`."""
    drip_bytes_per_second: float = 1000.0
    """Of a body that drips."""
    seed: int = 13
    """Of latencies and faults. Whether the n-th request of a key fails depends on nothing else."""

    def __post_init__(self) -> None:
        problems = [Problem("faults", text) for text in check_fractions(self.faults)]
        for name, value in ((item.name, getattr(self, item.name)) for item in fields(self) if item.name != "faults"):
            if isinstance(value, bool) or not isinstance(value, int | float):
                problems.append(Problem(name, f"{value!r} is not a number"))
            elif not (math.isfinite(value) and value >= 0):
                problems.append(Problem(name, f"is {value}, but must be 0 (no limit) or more"))
            elif name == "slow_fraction" and value > 1:
                problems.append(Problem(name, f"is {value}, but must be at most 1"))
            elif name == "refusal" and value not in _REFUSALS:
                message = f"is {value}, but a request beyond the rate is refused with 429 or 503"
                problems.append(Problem(name, message))
            elif name == "drip_bytes_per_second" and value < 1:
                problems.append(Problem(name, f"is {value}, but must be at least 1"))
        if problems:
            raise ConfigError(problems, "simulated cloud")

    @property
    def latency_mean_seconds(self) -> float:
        """Mean time to the first byte."""
        slow = 1 + self.slow_fraction * (self.slow_factor - 1)
        return self.latency_seconds * math.exp(self.latency_spread**2 / 2) * slow

    @property
    def latency_deviation_seconds(self) -> float:
        """Standard deviation of the time to the first byte."""
        slow = 1 + self.slow_fraction * (self.slow_factor**2 - 1)
        square = self.latency_seconds**2 * math.exp(2 * self.latency_spread**2) * slow
        return math.sqrt(max(0.0, square - self.latency_mean_seconds**2))

    def change(self, **changes: Any) -> Self:
        """A copy with some dials turned; sizes may be texts such as `"80 MB"`.

        Raises:
            ConfigError: for an unknown dial or a value it cannot take.
        """
        known = [item.name for item in fields(self)]
        for name, value in changes.items():
            if name not in known:
                hint = did_you_mean(name, known, otherwise="the dials are {}")
                raise ConfigError([Problem(name, f"no such dial{hint}")], "simulated cloud")
            if name == "faults" and isinstance(value, Mapping):
                changes[name] = {str(kind): share for kind, share in value.items()}
            if name in _SIZES and isinstance(value, str):
                try:
                    changes[name] = parse_bytes(value, name)
                except ConfigError as error:
                    raise ConfigError(error.problems, "simulated cloud") from None
        return replace(self, **changes)

    def to_dict(self) -> dict[str, Any]:
        return asdict(self) | {"faults": dict(self.faults)}

    def apply(self, config: Config) -> Config:
        """The config with this network in what its plan goes by."""
        return config.replace({
            "chunking.latency_seconds": self.latency_mean_seconds + _LATE_SECONDS * (self.latency_seconds > 0),
            "chunking.latency_deviation_seconds": self.latency_deviation_seconds,
            "chunking.latency_slow_fraction": self.slow_fraction,
            "chunking.latency_slow_factor": max(1.0, self.slow_factor),
            "chunking.bandwidth_bytes_per_second": int(self.bandwidth_bytes_per_second) or _UNLIMITED,
            "chunking.total_bandwidth_bytes_per_second": int(self.total_bandwidth_bytes_per_second) or _UNLIMITED,
            "chunking.requests_per_second": int(self.requests_per_second),
        })  # fmt: skip

    def __str__(self) -> str:
        said = [f"{format_seconds(self.latency_seconds)} to the first byte" if self.latency_seconds else "no latency"]
        if self.slow_fraction:
            said.append(f"{self.slow_fraction:.3g} of requests {self.slow_factor:g} times slower")
        if self.bandwidth_bytes_per_second:
            said.append(f"{format_bytes(self.bandwidth_bytes_per_second)}/s a connection")
        if self.total_bandwidth_bytes_per_second:
            said.append(f"{format_bytes(self.total_bandwidth_bytes_per_second)}/s in total")
        if self.requests_per_second:
            said.append(f"{self.refusal} beyond {format_count(self.requests_per_second)} requests/s")
        said += [f"{share:.3g} of requests: {kind}" for kind, share in self.faults.items()]
        return ", ".join(said)


PRESETS = {
    "same region": Dials(
        latency_seconds=0.03, latency_spread=0.3, slow_fraction=0.01, bandwidth_bytes_per_second=80e6,
        total_bandwidth_bytes_per_second=400e6, requests_per_second=5000,
    ),
    "across the ocean": Dials(
        latency_seconds=0.15, latency_spread=0.2, slow_fraction=0.01, slow_factor=3, bandwidth_bytes_per_second=20e6,
        total_bandwidth_bytes_per_second=100e6, requests_per_second=5000,
    ),
    "home WiFi": Dials(
        latency_seconds=0.06, latency_spread=0.5, slow_fraction=0.03, slow_factor=8, bandwidth_bytes_per_second=4e6,
        total_bandwidth_bytes_per_second=6e6, requests_per_second=5000,
    ),
    "no limits": Dials(),
}  # fmt: skip
PRESETS["throttled bucket"] = PRESETS["same region"].change(requests_per_second=50)
"""Dials by the name of a situation; `no limits` is as fast as this machine serves."""


def preset(name: str) -> Dials:
    """The dials of a preset.

    Raises:
        ConfigError: for a name that is none.
    """
    if name not in PRESETS:
        hint = did_you_mean(name, PRESETS, "choose one of {}")
        raise ConfigError([Problem("preset", f"{name!r} is no preset{hint}")], "simulated cloud")
    return PRESETS[name]


_LENIENCY_SECONDS = 0.02
_BURST_SECONDS = 0.1
_PIECE_SECONDS = 0.005
_LEAST_PIECE_BYTES = 16 << 10
_MOST_PIECE_BYTES = 256 << 10


class Pace:
    """One clock of one bandwidth in bytes/s; 0 lets everything pass at once."""

    __slots__ = ("_free", "bandwidth")

    def __init__(self, bandwidth: float, now: float) -> None:
        self.bandwidth = bandwidth
        self._free = now

    def pass_(self, count: int, now: float) -> float:
        """When the last of `count` bytes that are ready now has passed."""
        if not self.bandwidth:
            return now
        self._free = max(self._free, now - _LENIENCY_SECONDS) + count / self.bandwidth
        return self._free


class SharedLink:
    """What all connections share."""

    def __init__(self, dials: Dials, now: float) -> None:
        self._random = random.Random(dials.seed)
        self._total = Pace(dials.total_bandwidth_bytes_per_second, now)
        self._tokens = 0.0
        self._filled = now
        self.turn(dials, now)

    def turn(self, dials: Dials, now: float) -> None:
        """Take new dials; what is being sent finishes by the new total."""
        self.dials = dials
        self._total.bandwidth = dials.total_bandwidth_bytes_per_second
        self._most_tokens = max(1.0, dials.requests_per_second * _BURST_SECONDS)
        self._tokens, self._filled = self._most_tokens, now

    def latency_seconds(self) -> float:
        """Time to the first byte of the next answer."""
        dials, draw = self.dials, self._random
        seconds = dials.latency_seconds
        if seconds and dials.latency_spread:
            seconds *= math.exp(draw.gauss(0, dials.latency_spread))
        if dials.slow_fraction and draw.random() < dials.slow_fraction:
            seconds *= dials.slow_factor
        return seconds

    def admits(self, now: float) -> bool:
        """Whether the rate allows one more request."""
        rate = self.dials.requests_per_second
        if not rate:
            return True
        self._tokens = min(self._most_tokens, self._tokens + (now - self._filled) * rate)
        self._filled = now
        if self._tokens < 1:
            return False
        self._tokens -= 1
        return True

    def own_pace(self, now: float, drips: bool = False) -> Pace:
        """The clock of one answer on its connection."""
        bandwidth = self.dials.drip_bytes_per_second if drips else self.dials.bandwidth_bytes_per_second
        return Pace(bandwidth, now)

    def piece_bytes(self, pace: Pace) -> int:
        """Bytes to hand on at a time: some milliseconds' worth."""
        if not pace.bandwidth:
            return _MOST_PIECE_BYTES
        least = max(1, min(_LEAST_PIECE_BYTES, int(pace.bandwidth * _BURST_SECONDS)))
        return min(_MOST_PIECE_BYTES, max(least, int(pace.bandwidth * _PIECE_SECONDS)))

    def seconds_of_one_piece(self, count: int) -> float:
        """What a body that is handed on at once takes on a connection; 0 for a longer one, and without a limit."""
        bandwidth = self.dials.bandwidth_bytes_per_second
        return count / bandwidth if bandwidth and count <= self.piece_bytes(Pace(bandwidth, 0.0)) else 0.0

    def passes(self, count: int, pace: Pace, now: float) -> float:
        """When `count` bytes have passed both the connection and what all share."""
        return max(pace.pass_(count, now), self._total.pass_(count, now))
