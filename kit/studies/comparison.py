"""compare: runs beside each other, grouped by config: what differs, how fast, how much memory, mean ± spread.

The spread is the sample standard deviation of the repeats of a config; a single run has none.
"""

from __future__ import annotations

import json
import math
import statistics
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import zip_longest
from pathlib import Path
from typing import Any

from kit.arguments import checks_arguments
from kit.config import Config
from kit.errors import ConfigError, Problem, TrialError
from kit.records.ratios import MOST_EFFICIENCY, beyond_its_devices
from kit.records.results import Asked, Results, class_name
from kit.records.row import UNREADABLE, Row, config_of, flat, row_of
from kit.registry import Drawable
from kit.studies.repeats import Tried
from kit.tables import MISSING, cell, html_list, html_table, text_table
from kit.trial.directory import RunPaths, runs_folder
from kit.trial.trial import ENDED, Trial
from kit.units import format_bytes

_FEW = 4
_ENDED_WELL = ("COMPLETE", "STOPPED")
NO_DIFFERENCE = (
    "name", "trial.folder", "trial.predict_memory", "trial.measure_memory", "trial.start", "trial.codecarbon",
)  # fmt: skip
DEVICES = ("hardware.devices", "hardware.strategy", "hardware.threads_per_rank", "loader.shuffle")
"""Lightning shuffles the loader of several ranks, also one that did not."""


@dataclass(frozen=True, slots=True)
class Figure:
    """Mean and spread of one quantity over the runs that have it."""

    values: tuple[float, ...]
    geometric: bool = False
    """Whether the mean is of logarithms, as that of speeds, whose ratios are compared."""

    @property
    def mean(self) -> float:
        """NaN without a value."""
        if self.geometric and self.values and min(self.values) > 0:
            return statistics.geometric_mean(self.values)
        return statistics.fmean(self.values) if self.values else math.nan

    @property
    def spread(self) -> float:
        """Sample standard deviation; NaN for fewer than two values."""
        return statistics.stdev(self.values) if len(self.values) > 1 else math.nan

    def text(self, form: Callable[[float], str]) -> str:
        if not self.values:
            return MISSING
        return form(self.mean) + ("" if math.isnan(self.spread) else f" ± {form(self.spread)}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Quantity:
    """Something that runs are compared by."""

    column: str
    """Of `kit.results`."""
    title: str
    form: Callable[[float], str]


SPEED = "samples_per_second"
QUANTITIES = (
    Quantity(column=SPEED, title="samples/s", form=lambda value: f"{value:,.4g}"),
    Quantity(column="data_wait_fraction", title="data wait", form=lambda value: f"{value:.0%}"),
    Quantity(column="device_allocated_bytes_measured", title="device memory", form=format_bytes),
    Quantity(column="host_rss_peak_bytes", title="host RSS", form=format_bytes),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class RunGroup:
    """Runs of one config."""

    name: str
    config: Config
    rows: tuple[Row, ...]
    """Of `kit.results`, one a run."""

    def trained(self, what: str) -> str:
        """The class of its `module` or `data`; empty where no run got so far."""
        return next((class_name(str(row[what])) for row in self.rows if row.get(what)), "")

    @property
    def world_size(self) -> int:
        return max((int(row["world_size"] or 1) for row in self.rows), default=1)

    def figure(self, column: str) -> Figure:
        found = (row[column] for row in self.rows)
        values = tuple(float(value) for value in found if value is not None)
        return Figure(values, geometric=column == SPEED)


@dataclass(frozen=True, slots=True, repr=False)
class Comparison(Drawable):
    """Groups, the first of which the others are held against."""

    groups: tuple[RunGroup, ...]
    unreadable: tuple[Row, ...] = ()
    """Runs that are in no group."""
    left_out: tuple[str, ...] = ()
    """What of a folder is not compared: runs that studies made for themselves."""

    @property
    def differences(self) -> dict[str, tuple[Any, ...]]:
        """The value of each group for every field of the config that is not the same in all of them, and before them
        `module` and `data` where their classes are not; where the modules are known, what the config names is none."""
        first = self.groups[0].config
        parts = {what: tuple(group.trained(what) for group in self.groups) for what in ("module", "data")}
        paths = {path for group in self.groups for path in first.diff(group.config) if path not in NO_DIFFERENCE}
        if all(parts["module"]):
            paths.discard("model.target")
        differing = {what: names for what, names in parts.items() if len({*filter(None, names)}) > 1}
        ordered = (info.path for info in Config.fields() if info.path in paths)
        return {**differing, **{path: tuple(group.config.get(path) for group in self.groups) for path in ordered}}

    @property
    def quantities(self) -> tuple[Quantity, ...]:
        """Those that some run has."""
        return tuple(q for q in QUANTITIES if any(group.figure(q.column).values for group in self.groups))

    def scaling_efficiency(self, group: RunGroup) -> float | None:
        """Against the group that differs in its devices only and has the fewest; None where there is none."""
        allowed = {*NO_DIFFERENCE, *DEVICES}
        alike = [other for other in self.groups if set(other.config.diff(group.config)) <= allowed]
        base = min(alike, key=lambda other: other.world_size)
        mine, theirs = (found.figure(SPEED).mean for found in (group, base))
        if base.world_size == group.world_size or not theirs > 0:
            return None
        return mine / theirs / (group.world_size / base.world_size)

    @property
    def columns(self) -> tuple[str, ...]:
        scaling = ("scaling efficiency",) if self._scales else ()
        titles = (quantity.title for quantity in self.quantities)
        return ("", "runs", *self.differences, *titles, "against first", *scaling)

    @property
    def _scales(self) -> bool:
        return any(self.scaling_efficiency(group) is not None for group in self.groups)

    @property
    def rows(self) -> list[list[str]]:
        first, scales, rows = self.groups[0].figure(SPEED).mean, self._scales, []
        for place, group in enumerate(self.groups):
            settings = [setting_text(values[place]) for values in self.differences.values()]
            figures = [group.figure(quantity.column).text(quantity.form) for quantity in self.quantities]
            speed = group.figure(SPEED).mean / first
            against = MISSING if math.isnan(speed) else f"{speed:.2f} ×"
            scaling = [cell(self.scaling_efficiency(group), "{:.2f}".format)] if scales else []
            rows.append([group.name, str(len(group.rows)), *settings, *figures, against, *scaling])
        return rows

    @property
    def changed(self) -> set[tuple[int, int]]:
        """Cells (row, column) whose setting is not that of the first group."""
        return {
            (row, column)
            for column, values in enumerate(self.differences.values(), start=2)
            for row, value in enumerate(values)
            if value != values[0]
        }

    @property
    def remarks(self) -> list[str]:
        """How to read the table."""
        seeds = {group.config.training.seed for group in self.groups}
        runs = {len(group.rows) for group in self.groups}
        lines = [f"seed {seeds.pop()} in all of them" if len(seeds) == 1 else "seeds differ between the groups"]
        if runs == {1}:
            lines.append("single runs: their noise is not known; kit.studies.try_change repeats them")
        else:
            lines.append("mean ± standard deviation over the runs of a config; of speeds the geometric mean")
        if not self.differences and len(self.groups) > 1:
            lines.append("their configs are the same: module or data differ")
        speeds = ((group.name, self.scaling_efficiency(group) or 0.0) for group in self.groups)
        return [*lines, *(f"{name}: {beyond_its_devices(one)}" for name, one in speeds if one > MOST_EFFICIENCY)]

    @property
    def troubles(self) -> list[str]:
        """Every run that did not end well, and why."""
        rows = [*(row for group in self.groups for row in group.rows), *self.unreadable]
        failed = [row for row in rows if row["state"] in (UNREADABLE, *ENDED) and row["state"] not in _ENDED_WELL]
        return [": ".join(filter(None, (f"{row['run']}: {row['state'].lower()}", row["message"]))) for row in failed]

    @property
    def unfinished(self) -> list[str]:
        """Every run that has not ended yet, and how far it is."""
        rows = [row for group in self.groups for row in group.rows if row["state"] not in ENDED]
        return [f"{row['run']}: {row['state'].lower()}, {row['steps'] or 0} steps so far" for row in rows]

    @property
    def sentences(self) -> list[str]:
        return [*self.remarks, *self.unfinished, *self.troubles, *self.left_out]

    def __repr__(self) -> str:
        changed = self.changed
        cells = [
            [f"*{cell}" if (row, column) in changed else cell for column, cell in enumerate(line)]
            for row, line in enumerate(self.rows)
        ]
        return "\n".join([text_table(self.columns, cells), *(f"- {text}" for text in self.sentences)])

    def _repr_html_(self) -> str:
        """A column a config while they are few, as names of settings are long; else a row."""
        caption = f"{len(self.groups)} configs, settings that differ from the first marked"
        columns, rows, changed = list(self.columns), self.rows, self.changed
        if len(self.groups) <= _FEW:
            columns, *rows = map(list, zip(columns, *rows, strict=True))
            changed = {(column - 1, row + 1) for row, column in changed}
        table = html_table(columns, rows, caption=caption, dense=True, highlighted=changed)
        return f'<div style="overflow-x: auto">{table}</div>{html_list(self.sentences)}'


@checks_arguments
def compare(*runs: Trial | Tried | Results | Row | str | Path | Iterable[Any], names: Sequence[str] = ()) -> Comparison:
    """Compare runs: the settings that differ, and speed and memory as mean and spread.

    Runs with the same config, module and data are repeats of each other: they form one group. Groups are compared with
    the first. Fields that only say where and how a run is kept are no difference. Scaling efficiency is the throughput
    over that of the group with the fewest devices, divided by the ratio of devices, among groups that differ in their
    devices only (weak scaling; 1 is perfect).

    Args:
        runs: Trials, run directories, folders of runs, `kit.results()`, rows of it, or what `kit.studies.try_change`
            returned.
        names: Names of the groups, in their order.

    Returns:
        The comparison, a row for each group.

    Raises:
        ConfigError: for no runs, and more names than groups.
        TrialError: for what is no run, or when no run can be read.

    Example:
        >>> len(kit.studies.compare(trial).groups)
        1
    """
    left_out: list[str] = []
    pairs = [pair for item in runs for pair in _labelled(item, left_out)]
    unreadable = tuple(row for _, row in pairs if row["state"] == UNREADABLE)
    groups = _grouped([(label, row) for label, row in pairs if row["state"] != UNREADABLE])
    if not groups and unreadable:
        why = "; ".join(f"{row['run']}: {row['message']}" for row in unreadable[:_FEW])
        raise TrialError(f"none of these runs can be read ({len(unreadable)}); {why}")
    if not groups:
        empty = " and ".join(str(item) for item in runs if isinstance(item, str | Path))
        where = f": {empty} holds none yet; kit.fit(config) makes one, or" if empty else ";"
        message = f"no runs to compare{where} give trials, run directories or a folder of runs"
        raise ConfigError([Problem("runs", message)])
    if len(names) > len(groups):
        raise ConfigError([Problem("names", f"{len(names)} names for {len(groups)} configs")])
    found: list[RunGroup] = []
    taken: Counter[str] = Counter()
    for (label, *_), rows, given in zip_longest(groups, groups.values(), names):
        config = _config(rows[0])
        name = given or label or config.name
        taken[name] += 1
        unique = name if taken[name] == 1 else f"{name} ({taken[name]})"
        found.append(RunGroup(name=unique, config=config, rows=tuple(rows)))
    return Comparison(tuple(found), unreadable, tuple(left_out))


def _labelled(item: Any, left_out: list[str]) -> Iterable[tuple[str, Row]]:
    """(label, row) of each run; runs of one label and one config are repeats. Of a folder they are the trials, as in
    `kit.results`, and what else there is goes to `left_out` in words."""
    if isinstance(item, Tried):
        sides = [(side.name, folder) for side in (item.before, item.after) for folder in side.run_directories]
        return [(name, row_of(RunPaths.open(folder))) for name, folder in sides]
    if isinstance(item, Trial):
        return [("", row_of(item.paths))]
    if isinstance(item, Results):
        return [("", row) for row in item]
    if isinstance(item, Mapping):
        return [("", dict(item))]
    if isinstance(item, Iterable) and not isinstance(item, str | Path):
        return [pair for inner in item for pair in _labelled(inner, left_out)]
    if not isinstance(item, str | Path):
        message = f"{type(item).__name__} is no run; give trials, run directories or a folder of runs"
        raise ConfigError([Problem("runs", message)])
    folder = runs_folder(item)
    if not (folder / RunPaths(folder).marker.name).exists() and folder.is_dir():
        asked = Asked(item)
        if not (shown := asked.read()) and shown.note:  # none but those of studies
            shown = replace(asked, kind="all").read()
        left_out += [shown.note] * bool(shown.note)
        return [("", row) for row in reversed(shown)]
    return [("", row_of(RunPaths.open(folder)))]


def _grouped(pairs: Sequence[tuple[str, Row]]) -> dict[tuple[str, ...], list[Row]]:
    """By label, config, module and data, in the order in which they first come.

    A run that failed before its module was made does not say which module and data it had. It joins the first group
    whose runs were started with the same config and parts; without such a group it stands alone.
    """
    started = [(label, str(row["fingerprint"])) for label, row in pairs]
    doubtful = {key for key, (_, row) in zip(started, pairs, strict=True) if row["module"] is None}
    alike: dict[tuple[str, ...], tuple[str, ...]] = {}
    keyed: list[tuple[tuple[str, ...], tuple[str, ...], Row]] = []
    for key, (label, row) in zip(started, pairs, strict=True):
        given = (*key, _given(row)) if key in doubtful else key
        group = (label, _key(row), str(row["module"]), str(row["data"]))
        keyed.append((given, group, row))
        if row["module"]:
            alike.setdefault(given, group)
    groups: dict[tuple[str, ...], list[Row]] = {}
    for start, place, row in keyed:
        groups.setdefault(place if row["module"] else alike.get(start, (*start, place[1])), []).append(row)
    return groups


def _given(row: Row) -> str:
    """Module and data as the caller gave them; empty where that is not known."""
    try:
        environment = RunPaths(Path(str(row["run_directory"]))).read_environment()
        return json.dumps(environment.get("given"), sort_keys=True)
    except TrialError:
        return ""


def _key(row: Row) -> str:
    """Every setting that makes a difference."""
    values = row["config"] or flat(_config(row).values())
    return json.dumps({path: value for path, value in values.items() if path not in NO_DIFFERENCE}, sort_keys=True)


def _config(row: Row) -> Config:
    return config_of(row) if row["config"] else Config.load(RunPaths.open(row["run_directory"]).config)


def setting_text(value: Any) -> str:
    """The value of a field in a table."""
    if value is None or value == "" or value == {}:
        return MISSING
    if isinstance(value, dict):
        return ", ".join(f"{name}: {item}" for name, item in value.items())
    return ", ".join(map(str, value)) if isinstance(value, tuple) else str(value)
