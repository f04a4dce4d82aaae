"""A big run as it is foretold: rows by number of devices, what was measured beside them, and how that is shown.

Plain answers: nothing is measured or predicted here (see `kit.report.predict_run`). Seconds, bytes and watt-hours are
in base units; times stand with their range, counts that were measured with ratio = measured / predicted.
"""

from __future__ import annotations

import csv
import io
from dataclasses import dataclass, field
from pathlib import Path

from kit.errors import PlanError
from kit.plan.bill import Power, RunPrices
from kit.plan.memory.estimate import MemoryEstimate
from kit.plan.scaling import Bound, Cap, Point, Scaling
from kit.tables import html_list, html_table, text_table
from kit.units import format_bytes, format_count, format_seconds

_HOUR = 3600.0
_COLUMNS = (
    "devices", "strategy", "an epoch", "all epochs", "range", "device-hours", "money", "energy", "CO2", "efficiency",
    "memory", "held up by",
)  # fmt: skip
_CHECK_COLUMNS = ("devices", "predicted a batch", "range", "measured", "ratio")


@dataclass(frozen=True, slots=True, kw_only=True)
class BigRunRow:
    """The prediction for one number of devices."""

    devices: int
    strategy: str
    seconds_per_epoch: float
    total_seconds: float
    low_seconds: float
    """Of all epochs."""
    high_seconds: float
    samples_per_second: float
    efficiency: float
    """Samples per second over those of the first row, over the ratio of devices."""
    money: float | None
    watt_hours: tuple[float, float, float]
    """(taken, low, high)."""
    grams: float
    """Of CO2-equivalent."""
    bound: Bound
    """What holds it up; memory where it does not fit."""
    seconds_by_limit: tuple[tuple[Bound, float], ...]
    """Of a batch on every device."""
    memory: MemoryEstimate | None
    """Of each device; None where it was not asked for or not found."""

    @property
    def device_hours(self) -> float:
        return self.devices * self.total_seconds / _HOUR

    @property
    def fits(self) -> bool | None:
        """Whether the device has the memory; None where that is not known."""
        return None if self.memory is None or self.memory.verdict == "unknown" else self.memory.fits


@dataclass(frozen=True, slots=True, kw_only=True)
class Checked:
    """A count that was measured, and what trials on fewer devices foretold."""

    point: Point
    measured_seconds: float
    """Of a batch on every device."""

    @property
    def ratio(self) -> float:
        """measured / predicted."""
        return self.measured_seconds / self.point.seconds_per_batch


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class BigRun:
    """Rows by number of devices; print it, show it, or draw it with `kit.scaling_figure`."""

    name: str
    rows: tuple[BigRunRow, ...]
    checks: tuple[Checked, ...]
    caps: tuple[Cap, ...]
    """What holds the run up, and from how many devices on."""
    epochs: int
    samples_per_epoch: int
    batch_size: float
    prices: RunPrices
    power: Power
    reasons: tuple[str, ...]
    scaling: Scaling = field(compare=False)

    def row(self, devices: int) -> BigRunRow:
        """The row of that many devices.

        Raises:
            PlanError: when it was not asked for.
        """
        found = next((row for row in self.rows if row.devices == devices), None)
        if found is None:
            raise PlanError(f"{devices} devices were not asked for; there are {[row.devices for row in self.rows]}")
        return found

    @property
    def sentence(self) -> str:
        first, *later = self.caps
        text = f"{first.bound} holds it up from {first.devices} device" + "s" * (first.devices > 1)
        return text + "".join(f", {cap.bound} from {cap.devices}" for cap in later)

    def to_csv(self, path: str | Path | None = None) -> str:
        """One line per number of devices, in base units; written to `path` when given."""
        names = (
            "devices", "strategy", "seconds_per_epoch", "total_seconds", "low_seconds", "high_seconds",
            "samples_per_second", "efficiency", "device_hours", "money", "grams", "bound",
        )  # fmt: skip
        stream = io.StringIO()
        writer = csv.writer(stream, lineterminator="\n")
        writer.writerow([*names, "watt_hours", "fits"])
        writer.writerows([*(getattr(row, name) for name in names), row.watt_hours[0], row.fits] for row in self.rows)
        if path is not None:
            Path(path).write_text(stream.getvalue(), encoding="utf-8")
        return stream.getvalue()

    @property
    def _headline(self) -> str:
        size = f"{format_count(self.samples_per_epoch)} samples × {self.epochs} epoch" + "s" * (self.epochs > 1)
        return f"{self.name}: {size}, {self.batch_size:g} a batch on each device; {self.sentence}"

    @property
    def _cells(self) -> list[list[str]]:
        return [self._row_cells(row) for row in self.rows]

    def _row_cells(self, row: BigRunRow) -> list[str]:
        return [
            str(row.devices), row.strategy, format_seconds(row.seconds_per_epoch), format_seconds(row.total_seconds),
            f"{format_seconds(row.low_seconds)} to {format_seconds(row.high_seconds)}", f"{row.device_hours:.3g}",
            self.prices.text(row.money), _energy(row.watt_hours[0]), _mass(row.grams), f"{row.efficiency:.2f}",
            _memory(row), row.bound,
        ]  # fmt: skip

    @property
    def _check_cells(self) -> list[list[str]]:
        return [
            [
                str(one.point.devices), format_seconds(one.point.seconds_per_batch),
                f"{format_seconds(one.point.low_seconds)} to {format_seconds(one.point.high_seconds)}",
                format_seconds(one.measured_seconds), f"{one.ratio:.2f}",
            ]
            for one in self.checks
        ]  # fmt: skip

    def __repr__(self) -> str:
        parts = [self._headline, text_table(_COLUMNS, self._cells)]
        parts += ["measured, beside what fewer devices foretold", text_table(_CHECK_COLUMNS, self._check_cells)]
        return "\n".join([*(parts if self.checks else parts[:2]), *(f"- {text}" for text in self.reasons)])

    __str__ = __repr__

    def _repr_html_(self) -> str:
        table = html_table(_COLUMNS, self._cells, caption=self._headline, dense=True)
        caption = "measured, beside what fewer devices foretold"
        checks = html_table(_CHECK_COLUMNS, self._check_cells, caption=caption, dense=True) if self.checks else ""
        return f'<div style="overflow-x: auto">{table}{checks}</div>{html_list(self.reasons)}'


# -- words


def _energy(watt_hours: float) -> str:
    return f"{watt_hours:.3g} Wh" if watt_hours < 1000 else f"{watt_hours / 1000:,.3g} kWh"


def _mass(grams: float) -> str:
    return f"{grams:.3g} g" if grams < 1000 else f"{grams / 1000:,.3g} kg"


def _memory(row: BigRunRow) -> str:
    if row.memory is None:
        return "–"
    return f"{row.memory.verdict}, {format_bytes(row.memory.device_reserved_bytes)}"
