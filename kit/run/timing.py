"""Where the seconds of a step go: waiting for data, transfer, forward, backward, optimizer, communication, validation.

Lightning tells a profiler when each of its actions begins and ends. This one keeps a stack and charges every moment to
the innermost action that has a name here, so the parts never overlap and sum to the wall time, with accumulation and
nesting included (Lightning's own `optimizer_step` contains forward and backward; here it does not). What others know to
begin and end (`kit.run.communication`, a validation) is entered and left, and takes whatever happens meanwhile.

Nothing is synchronised. On a GPU the host runs ahead, and its seconds say what it was busy with, not what the step
cost: there `kit.run.device_clock` marks the same turns on the device, and `take` is what the host saw.
"""

from __future__ import annotations

import sys
import time

from lightning.pytorch.profilers import Profiler

from kit.run.device_clock import DeviceClock

PARTS = ("wait", "transfer", "forward", "backward", "optimizer", "communication", "validation")
_REST, _INHERITED = "other", "inherited"
_MARKS = {
    "train_dataloader_next": "wait",
    "batch_to_device": "transfer",
    "batch_transfer": "transfer",
    "transfer_batch_to_device": "transfer",
    "training_step": "forward",
    "backward": "backward",
    "optimizer_step": "optimizer",
    "zero_grad": "optimizer",
    "gradient_clipping": "optimizer",
    "lr_scheduler_step": "optimizer",
}


_SPANS = {"save_checkpoint": "save"}
"""Actions that are told whole, with their beginning and end."""


def part_of(action: str) -> str:
    """The part an action of Lightning belongs to; callbacks belong to whatever calls them."""
    hook = action.rpartition(".")[2]
    found = (part for mark, part in _MARKS.items() if hook.endswith(mark))
    return _INHERITED if action.startswith("[Callback]") else next(found, _INHERITED)


class StepClock(Profiler):
    """Exclusive seconds by part since `take` was last called."""

    def __init__(self) -> None:
        super().__init__()
        self.failed: tuple[BaseException, str] | None = None
        """The last exception seen to leave an action, and the innermost action that it left."""
        self._parts: dict[str, str] = {}
        self._stack: list[tuple[str, str]] = []
        self._began: dict[str, float] = {}
        self._spans: list[tuple[str, float, float]] = []
        self._entered: list[str] = []
        self.device: DeviceClock | None = None
        """Where set, it is told of every turn from one part to another."""
        self._seconds = dict.fromkeys((*PARTS, _REST), 0.0)
        self._since = self._taken = time.perf_counter()

    @property
    def part(self) -> str:
        """What this moment is charged to."""
        if not self._stack:
            return _REST
        return self._entered[-1] if self._entered else self._stack[-1][1]

    def enter(self, part: str) -> None:
        """Charge everything to `part`, until it is left; inside of another, to that one."""
        self._charge()
        self._entered.append(self._entered[-1] if self._entered else part)
        self._turn()

    def leave(self) -> None:
        """End what was entered last; nothing when nothing was."""
        self._charge()
        if self._entered:
            self._entered.pop()
        self._turn()

    def turn_to(self, part: str) -> None:
        """Charge the rest of the innermost action to `part`."""
        self._charge()
        if self._stack:
            self._stack[-1] = (self._stack[-1][0], part)
        self._turn()

    def _turn(self) -> None:
        if self.device is not None:
            self.device.turn(self.part)

    def start(self, action_name: str) -> None:
        self._charge()
        part = self._parts.get(action_name) or self._parts.setdefault(action_name, part_of(action_name))
        if part is _INHERITED:
            part = self._stack[-1][1] if self._stack else _REST
        self._stack.append((action_name, part))
        self._turn()
        if action_name in _SPANS:
            self._began[action_name] = time.time()

    def stop(self, action_name: str) -> None:
        self._charge()
        stack = self._stack
        if stack and stack[-1][0] == action_name:
            stack.pop()
        elif any(action == action_name for action, _ in stack):  # something inside was started and never stopped
            while stack.pop()[0] != action_name:
                continue
        self._turn()
        if action_name in self._began:
            self._spans.append((_SPANS[action_name], self._began.pop(action_name), time.time()))
        error = sys.exc_info()[1]
        if error is not None:
            self._note(error, action_name)

    def _note(self, error: BaseException, action: str) -> None:
        known = self.failed is not None and self.failed[0] is error
        if not known and not isinstance(error, StopIteration):
            self.failed = (error, action)

    def _charge(self) -> None:
        now = time.perf_counter()
        if self._stack:
            self._seconds[self._entered[-1] if self._entered else self._stack[-1][1]] += now - self._since
        self._since = now

    def take(self) -> dict[str, float]:
        """`{part}_seconds`, `other_seconds` and their sum, `step_seconds`: the wall time since the last call."""
        self._charge()
        wall = self._since - self._taken
        parts = {part: self._seconds[part] for part in PARTS}
        self._taken = self._since
        self._seconds = dict.fromkeys(self._seconds, 0.0)
        other = max(0.0, wall - sum(parts.values()))
        fields = {f"{part}_seconds": seconds for part, seconds in parts.items()}
        return {**fields, "other_seconds": other, "step_seconds": wall}

    def note_span(self, name: str, began: float, ended: float) -> None:
        """Tell of something whole, in seconds since the epoch."""
        self._spans.append((name, began, ended))

    def take_spans(self) -> list[tuple[str, float, float]]:
        """(name, beginning, end) of what was told whole since the last call, in seconds since the epoch."""
        spans, self._spans = self._spans, []
        return spans
