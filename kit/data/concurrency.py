"""Concurrency: how many requests to keep open, which is as many as help.

Requests in flight hide latency until something else is full: the bandwidth, the store's limit of requests, or the CPU.
From there on they share it, so each takes longer, those of a batch end late and together, and what decodes them first
waits and then cannot keep up; a store that limits requests refuses the rest, and each refused one is sent again.

So the limit starts low and doubles while requests take about as long as they did when few were open; it falls where
they take much longer, as TCP Vegas does with packets (Brakmo and Peterson, 1995), and where the store refuses, by the
part that it refused; from then on it rises slowly. Times are averages over a round: as many answers as may be open, to
requests sent under the same limit. Where nothing but latency binds, the limit is soon the most that is allowed; where
something is full, about twice what fills it are open, so nothing is left idle.
"""

from __future__ import annotations

FEWEST = 32
"""Open in any case. So few do not crowd a network that is worth streaming from."""
_GROWTH, _GROWTH_ONCE_REFUSED = 2.0, 1.05
_LEAST_CROWDING, _CROWDING, _MOST_CROWDING = 1.5, 2.0, 2.5
"""Seconds of a request, in those of one when few were open: below the first more are opened, above the last fewer, so
that it will be the one between."""
_REFUSED = 0.01
"""Of a round: fewer refusals have other reasons."""
_LEAST_SECONDS = 1e-6
CROWDED, REFUSED = "with more, each takes longer", "the store refuses more"


class ConcurrencyLimit:
    """Requests that may be open, between `FEWEST` and `most`; call from one thread."""

    def __init__(self, most: int) -> None:
        self._most = most
        self.now = min(FEWEST, most)
        """Requests that may be open."""
        self.round = 0
        """To be noted with a request when it is sent."""
        self._answers, self._refusals, self._seconds = 0, 0, 0.0
        self._held_back = False
        self._growth = _GROWTH
        self._reason = ""
        self._alone_seconds = float("inf")
        """The shortest average of a round."""

    @property
    def reason(self) -> str:
        """Why no more may be open; empty where that is all that were asked for, or nothing speaks against more."""
        return self._reason if self.now < self._most else ""

    def held_back(self) -> None:
        """There are requests that this limit alone keeps from being sent."""
        self._held_back = True

    def answered(self, sent_in: int, seconds: float) -> None:
        """A request that was sent in this round has been answered after so long."""
        if sent_in == self.round:  # else it was sent when there were more or fewer
            self._answers += 1
            self._seconds += seconds
            self._end_full_round()

    def refused(self, sent_in: int) -> None:
        """The store had too many requests to answer this one."""
        if sent_in == self.round:
            self._refusals += 1
            self._end_full_round()

    def _end_full_round(self) -> None:
        total = self._answers + self._refusals
        if total < self.now:
            return
        refused = self._refusals / total
        if refused > _REFUSED:
            self._growth = _GROWTH_ONCE_REFUSED
            self._aim(1 - refused, REFUSED)
        else:
            self._weigh(max(_LEAST_SECONDS, self._seconds / self._answers))
        self._answers, self._refusals, self._seconds = 0, 0, 0.0
        self._held_back = False
        self.round += 1

    def _weigh(self, seconds: float) -> None:
        """More, fewer or as many as in this round, by what its requests took on average."""
        if self.now <= FEWEST and seconds > _MOST_CROWDING * self._alone_seconds:  # not by our crowd: it is slower now
            self._alone_seconds = seconds
        self._alone_seconds = min(self._alone_seconds, seconds)
        crowding = seconds / self._alone_seconds
        if crowding > _MOST_CROWDING:
            self._aim(_CROWDING / crowding, CROWDED)
        elif self._held_back and crowding >= _LEAST_CROWDING:
            self._aim(1.0, CROWDED)
        elif self._held_back:
            self._aim(min(self._growth, _CROWDING / crowding), "" if self._growth == _GROWTH else REFUSED)

    def _aim(self, times: float, reason: str) -> None:
        self.now, self._reason = min(self._most, max(FEWEST, round(self.now * times))), reason
