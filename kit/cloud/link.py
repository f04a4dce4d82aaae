"""Link: when a byte may pass, and whether a request may, by the dials of a moment.

The total bandwidth is one clock that every piece moves on by `bytes / bandwidth`; a piece passes when the clock has
come to it. The clock may lag behind the time by `_LENIENCY_SECONDS`, so that timers which fire late lose nothing, and
no more, so that a pause is not made up for.
"""

from __future__ import annotations

import math
import random

from kit.cloud.dials import Dials

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


class Link:
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
        wished = int(pace.bandwidth * _PIECE_SECONDS)
        slow = pace.bandwidth < _LEAST_PIECE_BYTES / _BURST_SECONDS
        least = max(1, int(pace.bandwidth * _BURST_SECONDS)) if slow else _LEAST_PIECE_BYTES
        return min(_MOST_PIECE_BYTES, max(least, wished))

    def passes(self, count: int, pace: Pace, now: float) -> float:
        """When `count` bytes have passed both the connection and what all share."""
        return max(pace.pass_(count, now), self._total.pass_(count, now))
