"""The device's own clock: where the seconds of a step go on a GPU, without making the host wait for it.

At every turn from one part to another an event is put into the stream the device works through. When the device comes
by, it notes the time; what lies between two events is what the part before them cost *the device*, idle time included.
So a wait for data that the device never felt, because it was still busy, costs nothing here, and one that left it idle
costs what it left idle. Parts of a step add to the time from its first event to the first of the next: nothing is lost
between steps and nothing counted twice. Events are read long after, when all of them have come by.

Resolution 0.5 µs (CUDA's own). An event takes about 3 µs of the host.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol


class Mark(Protocol):
    """An event in the device's stream: `torch.cuda.Event(enable_timing=True)`."""

    def record(self) -> Any: ...
    def synchronize(self) -> Any: ...
    def elapsed_time(self, end: Any, /) -> float:
        """Milliseconds from this event to `end`."""


class DeviceStep:
    """One step's marks; `seconds` waits for the last of them."""

    def __init__(self, turns: Sequence[tuple[str, Mark]], end: Mark) -> None:
        self._turns, self._end = turns, end

    def seconds(self) -> dict[str, float]:
        """Seconds of the device by part, those that took none left out."""
        self._end.synchronize()
        found: dict[str, float] = {}
        ends = [mark for _, mark in self._turns[1:]] + [self._end]
        for (part, begin), end in zip(self._turns, ends, strict=True):
            found[part] = found.get(part, 0.0) + begin.elapsed_time(end) / 1000
        return found


class DeviceClock:
    """Puts marks into the current stream."""

    def __init__(self, make_mark: Callable[[], Mark], part: str) -> None:
        self._make = make_mark
        self._turns = [(part, self._put())]

    def _put(self) -> Mark:
        mark = self._make()
        mark.record()
        return mark

    def turn(self, part: str) -> None:
        """From here on it is `part`; nothing when it already was."""
        if part != self._turns[-1][0]:
            self._turns.append((part, self._put()))

    def take(self) -> DeviceStep:
        """What came since the last call; the part under way goes on in the next step."""
        end = self._put()
        step = DeviceStep(self._turns, end)
        self._turns = [(self._turns[-1][0], end)]
        return step
