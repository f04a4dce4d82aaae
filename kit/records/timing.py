"""Timing: the steps of a trial by part and rank, as rows, totals, CSV, JSON and a YAML summary.

Works for any LightningModule and any data: the trial itself writes what each step was spent on. Seconds; shares are
fractions of the time of the steps after warm-up, and add to one (those written are rounded so that they still do). On a
GPU seconds are of the device's own clock. Validation, checkpoints and logging after the last step count too.
"""

from __future__ import annotations

import io
import json
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kit.config import Config
from kit.errors import TrialError
from kit.events import Event
from kit.json_text import written
from kit.records.trace import BESIDE_TRAINING, PHASE_LABELS, PHASES, belongs_to_last_step, finite
from kit.registry import Drawable
from kit.tables import csv_text, html_table, text_table
from kit.trial.trial import Trial
from kit.units import format_seconds

_LEAST_TOLD = 0.01
"""Share of the time from which on validation, checkpoints and logging are told as part of a step."""

FIELDS = ("rank", "step", "batch", "epoch", "warmup", *(f"{phase}_seconds" for phase in PHASES), "step_seconds")
_TRANSFERS = ("on_before_batch_transfer", "on_after_batch_transfer", "transfer_batch_to_device")
"""Hooks whose time is that of the transfer, whatever they do."""
_DIGITS = 4
_ROUNDING = 1e-9


@dataclass(frozen=True, slots=True, kw_only=True)
class RankTiming:
    """The steps of one rank after warm-up, or of all ranks together."""

    steps: int
    """Batches: with accumulation several make an optimizer step."""
    seconds: Mapping[str, float]
    """By part, in total."""
    mean_step_seconds: float
    """Without validation, checkpoints and logging; NaN without a step."""
    deviation_seconds: float
    """Standard deviation of that; 0 for a single step."""

    @property
    def total_seconds(self) -> float:
        return math.fsum(self.seconds.values())

    @property
    def whole_step_seconds(self) -> float:
        """Mean with the step's share of validation, checkpoints and logging; NaN without a step."""
        return self.total_seconds / self.steps if self.steps else math.nan

    @property
    def shares(self) -> dict[str, float]:
        """By part; they add to one. NaN without a step."""
        total = self.total_seconds
        shares = {part: value / total if total else math.nan for part, value in self.seconds.items()}
        largest = max(shares, key=shares.__getitem__)
        while 0 < abs(left := 1 - math.fsum(shares.values())) < _ROUNDING:  # what division has rounded away
            shares[largest] += left
        return shares


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Timing(Drawable):
    """The answer of `kit.studies.timing`: print it, index `rows`, or `save` it."""

    name: str
    clock: str
    """host, or device where the parts are those of a GPU."""
    warmup_steps: int
    rows: tuple[dict[str, Any], ...]
    """One per batch and rank, as `FIELDS`."""
    ranks: Mapping[int, RankTiming]
    together: RankTiming
    """All ranks."""
    transfer_hook: str = ""
    """The hook that most of the transfer is, as Module.on_after_batch_transfer; empty where copying is, or unknown."""

    @property
    def shares(self) -> dict[str, float]:
        """Of all ranks together."""
        return self.together.shares

    @property
    def step_seconds(self) -> float:
        """Mean of the slowest rank, without validation, checkpoints and logging."""
        return max((rank.mean_step_seconds for rank in self.ranks.values()), default=math.nan)

    @property
    def whole_step_seconds(self) -> float:
        """The same with the step's share of validation, checkpoints and logging: what the shares are of."""
        return max((rank.whole_step_seconds for rank in self.ranks.values()), default=math.nan)

    @property
    def _beside(self) -> str:
        """What comes beside training and takes time worth telling, in words."""
        return " and ".join(PHASE_LABELS[part] for part in BESIDE_TRAINING if self.shares[part] >= _LEAST_TOLD)

    @property
    def sentence(self) -> str:
        if not self.together.steps:
            return "All steps were warm-up: give the trial more to tell where their time goes"
        part, bare = max(PHASES, key=self.shares.__getitem__), format_seconds(self.step_seconds)
        whole = f"{format_seconds(self.whole_step_seconds)} ({bare} without {self._beside})"
        hook = f", most of it in your {self.transfer_hook}" if part == "transfer" and self.transfer_hook else ""
        share = f"{PHASE_LABELS[part]} takes {self.shares[part]:.0%}{hook}"
        return f"A step takes {whole if self._beside else bare}; {share}"

    # -- files

    def summary(self) -> dict[str, Any]:
        """Plain values: totals and shares of each rank and of all."""
        each = {f"rank {rank}": _plain(timing) for rank, timing in self.ranks.items()}
        head = {"trial": self.name, "clock": self.clock, "warmup_steps": self.warmup_steps}
        return {**head, "all ranks": _plain(self.together), **(each if len(each) > 1 else {})}

    def to_csv(self, path: str | Path | None = None) -> str:
        """One line per batch and rank; written to `path` when given."""
        return written(csv_text(FIELDS, ([row[name] for name in FIELDS] for row in self.rows)), path)

    def to_json(self, path: str | Path | None = None) -> str:
        """Summary and rows; written to `path` when given."""
        whole = {"summary": self.summary(), "batches": list(self.rows)}
        return written(json.dumps(whole, indent=2, allow_nan=False) + "\n", path)

    def to_yaml(self, path: str | Path | None = None) -> str:
        """The summary; written to `path` when given."""
        from ruamel.yaml import YAML

        stream = io.StringIO()
        yaml = YAML()
        yaml.width = 10_000
        yaml.dump(self.summary(), stream)
        return written(stream.getvalue(), path)

    def save(self, folder: str | Path) -> Path:
        """Write `timing_results.csv`, `timing_results.json` and `timing_summary.yaml` into a folder; it is returned."""
        place = Path(folder)
        place.mkdir(parents=True, exist_ok=True)
        self.to_csv(place / "timing_results.csv")
        self.to_json(place / "timing_results.json")
        self.to_yaml(place / "timing_summary.yaml")
        return place

    # -- displays

    @property
    def _table(self) -> tuple[list[str], list[list[str]]]:
        shown = [phase for phase in PHASES if self.together.seconds[phase] > 0]
        several = {f"rank {rank}": timing for rank, timing in self.ranks.items()} if len(self.ranks) > 1 else {}
        rows = {"all ranks" if several else "a step": self.together, **several}
        bare = [f"without {self._beside}"] if self._beside else []
        columns = ["", "a step", *bare, "±", *(PHASE_LABELS[phase] for phase in shown)]
        cells = []
        for label, timing in rows.items():
            spread, shares = format_seconds(timing.deviation_seconds), rounded_shares(timing.shares, 3)
            parts = [f"{shares.get(phase, 0):.1%}" for phase in shown]
            means = [timing.whole_step_seconds, timing.mean_step_seconds] if bare else [timing.mean_step_seconds]
            cells.append([label, *map(format_seconds, means), spread, *parts])
        return columns, cells

    def __repr__(self) -> str:
        return f"{self.sentence}.\n{text_table(*self._table)}"

    def _repr_html_(self) -> str:
        columns, rows = self._table
        return html_table(columns, rows, caption=f"{self.sentence}.", dense=len(columns) > 6)


def timing(trial: Trial | str | Path) -> Timing:
    """Where the time of a trial went, by part, step and rank.

    Args:
        trial: A trial, running or ended, or its run directory.

    Returns:
        The timing. The parts of a step add up to the step; `to_csv()`, `to_json()` and `to_yaml()` write them.

    Raises:
        TrialError: when no step was finished yet, or the directory is no run.

    Example:
        >>> timing = kit.studies.timing(trial)
        >>> timing.step_seconds > 0
        True
    """
    opened = trial if isinstance(trial, Trial) else Trial.open(trial)
    opened.poll()
    if not opened.steps:
        raise TrialError(f"{opened.name}: no step was finished, so there is nothing to tell; wait() for it")
    return timing_of([*opened.events, *opened.steps], opened.config, opened.name)


def timing_of(events: Sequence[Event], config: Config, name: str = "") -> Timing:
    """The same, of events already read."""
    steps = [event for event in events if event["kind"] == "step"]
    steps.sort(key=lambda event: (int(event["rank"]), int(event.get("batch") or event["step"])))
    rows = []
    for event in steps:
        seconds = {f"{phase}_seconds": finite(event.get(f"{phase}_seconds")) for phase in PHASES}
        rows.append({
            "rank": event["rank"], "step": event["step"], "batch": event.get("batch", event["step"]),
            "epoch": event.get("epoch", 0), "warmup": event["step"] <= config.trial.warmup_steps, **seconds,
            "step_seconds": math.fsum(seconds.values()),
        })  # fmt: skip
    ended = [event for event in events if event["kind"] == "fit_ended"]
    after = {event["rank"]: event for event in ended}
    measured = [row for row in rows if not row["warmup"]]
    ranks: dict[int, RankTiming] = {}
    for rank in sorted({row["rank"] for row in rows}):
        mine = [row for row in measured if row["rank"] == rank]
        by_phase = {phase: math.fsum(row[f"{phase}_seconds"] for row in mine) for phase in PHASES}
        for phase in BESIDE_TRAINING if mine else ():
            if belongs_to_last_step(phase, mine[0][f"{phase}_seconds"]):
                by_phase[phase] += finite(after.get(rank, {}).get(f"{phase}_seconds"))
        ranks[rank] = _rank_timing(mine, by_phase)
    total = {phase: math.fsum(rank.seconds[phase] for rank in ranks.values()) for phase in PHASES}
    return Timing(
        name=name or config.name,
        clock="device" if any("host_seconds" in event for event in steps) else "host",
        warmup_steps=config.trial.warmup_steps,
        rows=tuple(rows),
        ranks=ranks,
        together=_rank_timing(measured, total),
        transfer_hook=_transfer_hook(events, ranks),
    )


def _transfer_hook(events: Sequence[Event], ranks: Mapping[int, RankTiming]) -> str:
    """See `Timing.transfer_hook`: of the first rank whose hooks were timed, by the clock of the host."""
    watched = next((one for one in events if one["kind"] == "host_watched" and one["rank"] in ranks), None)
    if watched is None or any("host_seconds" in event for event in events):
        return ""
    hooks = watched.get("hooks", {})
    transfers = {name: share for name, share in hooks.items() if name.rpartition(".")[2] in _TRANSFERS}
    most = max(transfers, key=transfers.__getitem__, default="")
    share = ranks[watched["rank"]].shares["transfer"]
    return most.partition("]")[2] if most and transfers[most] >= share / 2 > 0 else ""


def _rank_timing(rows: Sequence[Mapping[str, Any]], seconds: Mapping[str, float]) -> RankTiming:
    beside = [math.fsum(row[f"{phase}_seconds"] for phase in BESIDE_TRAINING) for row in rows]
    steps = [float(row["step_seconds"] - aside) for row, aside in zip(rows, beside, strict=True)]
    return RankTiming(
        steps=len(steps),
        seconds=seconds,
        mean_step_seconds=statistics.fmean(steps) if steps else math.nan,
        deviation_seconds=statistics.stdev(steps) if len(steps) > 1 else 0.0,
    )


def rounded_shares(shares: Mapping[str, float], digits: int = _DIGITS) -> dict[str, float]:
    """Shares of so many digits that still add to one: what rounding leaves goes where it is least wrong."""
    unit = 10**digits
    if any(math.isnan(share) for share in shares.values()):
        return {}
    low = {part: math.floor(share * unit) for part, share in shares.items()}
    left = unit - sum(low.values())
    order = sorted(shares, key=lambda part: low[part] - shares[part] * unit)
    for part in order[:left]:
        low[part] += 1
    return {part: value / unit for part, value in low.items()}


def _plain(timing: RankTiming) -> dict[str, Any]:
    mean = timing.mean_step_seconds
    return {
        "steps": timing.steps,
        "mean_step_seconds": round(mean, 9) if math.isfinite(mean) else None,
        "whole_step_seconds": round(timing.whole_step_seconds, 9) if math.isfinite(mean) else None,
        "deviation_seconds": round(timing.deviation_seconds, 9),
        "total_seconds": round(timing.total_seconds, 9),
        "seconds": {part: round(value, 9) for part, value in timing.seconds.items()},
        "shares": rounded_shares(timing.shares),
    }
