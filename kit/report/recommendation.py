"""A recommendation as it is given: the rungs that were tried, the one that was chosen, and what to set, with reasons.

Plain answers: nothing is predicted here (see `kit.report.recommend`). `config` is a changed copy; where nothing fits it
is refused, by how much.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from kit.config import Config
from kit.errors import PlanError
from kit.plan.ladder import Rung, RunTarget
from kit.plan.memory.estimate import MemoryEstimate
from kit.report.big_run import BigRun, BigRunRow
from kit.tables import html_list, html_table, text_table
from kit.units import format_bytes, format_seconds

_COLUMNS = ("rung", "devices", "verdict", "needs", "short of", "time")


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """Fields to set, and why."""

    name: str
    values: Mapping[str, Any]
    reason: str

    def __str__(self) -> str:
        sets = ", ".join(f"{path} = {value}" for path, value in self.values.items())
        return f"{self.name} ({sets}): {self.reason}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Tried:
    """One rung, and what was predicted of it."""

    name: str
    rung: Rung
    parts: int
    """Micro-batches that a batch as configured is cut into."""
    estimate: MemoryEstimate | None
    """None where it could not be had."""
    time_factor: float
    """Of a step, against the config as given; traffic not counted."""
    run: BigRunRow | None
    """Time and money with it, where a trial told."""
    note: str = ""
    """Why it was passed over, where memory is not the reason."""

    @property
    def short_bytes(self) -> int:
        """What the device lacks; 0 where it fits or nothing is known."""
        found = self.estimate
        return 0 if found is None else max(0, found.total_bytes[1] - found.capacity_bytes)

    @property
    def seconds(self) -> float | None:
        """Of all epochs."""
        return None if self.run is None else self.run.total_seconds * self.time_factor


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Recommendation:
    """What to change and why; print it, show it, or take its `config`."""

    given: Config
    target: RunTarget
    tried: tuple[Tried, ...]
    """In order; the last is the chosen one where there is one."""
    chosen: Tried | None
    changes: tuple[Change, ...]
    """What to set, each with its reason."""
    reasons: tuple[str, ...]
    refusal: str = ""
    """Why there is none, and by how much."""
    big_run: BigRun | None = field(default=None, compare=False)

    @property
    def fits(self) -> bool:
        return self.chosen is not None

    @property
    def config(self) -> Config:
        """The changed config.

        Raises:
            PlanError: when nothing fits, saying by how much.
        """
        if self.chosen is None:
            raise PlanError(self.refusal)
        return self.given.replace({path: value for change in self.changes for path, value in change.values.items()})

    @property
    def _headline(self) -> str:
        if self.chosen is None:
            return self.refusal
        time = "" if self.chosen.seconds is None else f", {format_seconds(self.chosen.seconds)} predicted"
        what = ", ".join(change.name for change in self.changes) or "nothing to change"
        return f"{what}: fits {self._where}{time}"

    @property
    def _where(self) -> str:
        count, device = self.target.devices, self.target.device
        text = format_bytes(device) if isinstance(device, int) else str(device)
        return f"{count} × {text}" if count > 1 else text

    @property
    def _rows(self) -> list[list[str]]:
        return [_cells(one) for one in self.tried]

    @property
    def _marked(self) -> int | None:
        return self.tried.index(self.chosen) if self.chosen is not None else None

    @property
    def _sentences(self) -> list[str]:
        return [*(str(change) for change in self.changes), *self.reasons]

    def __repr__(self) -> str:
        table = text_table(_COLUMNS, self._rows, self._marked)
        return "\n".join([self._headline, table, *(f"- {text}" for text in self._sentences)])

    __str__ = __repr__

    def _repr_html_(self) -> str:
        table = html_table(_COLUMNS, self._rows, caption=self._headline, marked=self._marked)
        return table + html_list(self._sentences)


def _cells(one: Tried) -> list[str]:
    time = f"× {one.time_factor:.2f}" if one.seconds is None else format_seconds(one.seconds)
    found = one.estimate
    if found is None:
        return [one.name, str(one.rung.devices), one.note, "–", "–", "–"]
    short = format_bytes(one.short_bytes) if one.short_bytes else "–"
    return [one.name, str(one.rung.devices), found.verdict, format_bytes(found.total_bytes[1]), short, time]
