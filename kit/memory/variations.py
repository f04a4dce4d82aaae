"""what_if: many variations of one configuration, each with its own dry run, in one table sorted by peak.

What a lever saves is the difference to the configuration as given, never a rule of thumb. Equal variations are recorded
once, two processes work at a time, and a variation that cannot run is a row with its reason.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kit.arguments import config_first
from kit.config import Config
from kit.errors import ConfigError, KitError, Problem
from kit.json_text import written
from kit.memory.prediction import estimate_here
from kit.memory.query import make_query
from kit.memory.recordings import RecordingRequest, record_all
from kit.memory.replay.cards import THIS_MACHINE, DeviceTarget
from kit.memory.replay.estimate import MemoryEstimate
from kit.tables import ResultRows, csv_text, html_list, html_table, text_table
from kit.trial.payload import batch_rule, refuse_unused, warn_of_unused
from kit.units import format_bytes

Variations = Mapping[str, Sequence[Any]] | Sequence[Mapping[str, Any]]
_STRATEGY, _DEVICES = "hardware.strategy", "hardware.devices"
_COLUMNS = ("variation", "verdict", "allocated", "reserved", "saves", "of all")
_CSV_ESTIMATE = ("verdict", "device_allocated_bytes", "device_reserved_bytes")
_CSV_SAVES = ("saves_bytes", "saves_fraction")
MOST_VARIATIONS = 1000


@dataclass(frozen=True, slots=True, kw_only=True)
class Variation:
    """One row: what was changed, and what came of it."""

    changes: Mapping[str, Any]
    """Dotted path to value; empty for the configuration as it was given."""
    estimate: MemoryEstimate | None
    reason: str
    """Why there is no estimate, or only a lower bound, or why the batch is not the config's; else empty."""
    saves_bytes: int | None
    """Allocated bytes less than the configuration as given needs; negative when it needs more. None where either is
    not known."""
    saves_fraction: float | None

    def __str__(self) -> str:
        words = {True: "on", False: "off"}
        changes = [
            f"{path.rpartition('.')[2].replace('_', ' ')} {words[value] if isinstance(value, bool) else value}"
            for path, value in self.changes.items()
        ]
        return ", ".join(changes) or "as given"


class WhatIf(ResultRows[Variation]):
    """Variations by rising peak, those without an answer last."""

    def __init__(self, rows: Iterable[Variation]) -> None:
        super().__init__(
            sorted(rows, key=lambda row: row.estimate.device_allocated_bytes if row.estimate else math.inf)
        )

    @property
    def given(self) -> Variation:
        """The configuration as it was given."""
        return next(row for row in self if not row.changes)

    def to_csv(self, path: str | Path | None = None) -> str:
        """The rows as CSV, a column for each path that varies; written to `path` when given."""
        paths = list(dict.fromkeys(name for row in self for name in row.changes))
        cells = []
        for row in self:
            found = row.estimate
            values = [getattr(found, name) if found else "" for name in (*_CSV_ESTIMATE, "complete")]
            saves = [row.saves_bytes, row.saves_fraction]
            changes = [row.changes.get(name, "") for name in paths]
            cells.append([*changes, *values[:-1], *saves, values[-1], row.reason])
        return written(csv_text([*paths, *_CSV_ESTIMATE, *_CSV_SAVES, "complete", "reason"], cells), path)

    def __repr__(self) -> str:
        table = text_table(_COLUMNS, [_cells(row) for row in self], self._marked)
        return "\n".join([table, *(f"- {item}" for item in self._reasons)])

    def _repr_html_(self) -> str:
        table = html_table(
            _COLUMNS, [_cells(row) for row in self], caption=f"{len(self)} variations by rising peak",
            marked=self._marked, mark="the configuration",
        )  # fmt: skip
        return table + html_list(self._reasons)

    @property
    def _marked(self) -> int | None:
        return next((place for place, row in enumerate(self) if not row.changes), None)

    @property
    def _reasons(self) -> list[str]:
        return [f"{row}: {row.reason}" for row in self if row.reason]


@config_first
def what_if(
    config: Any = None,
    module: Any = None,
    data: Any = None,
    *,
    variations: Variations,
    device: str | int | DeviceTarget = THIS_MACHINE,
    world_size: int | None = None,
    timeout_seconds: float | None = None,
) -> WhatIf:
    """Predict the memory of a config as it is and of every variation of it.

    Args:
        config: What is varied; the default config when left out.
        module: What would be trained, as `kit.fit` takes it.
        data: What it would be trained on, as `kit.fit` takes it.
        variations: `{"hardware.precision": ["32-true", "bf16-mixed"], ...}` for every combination, or a list of
            `{path: value}` for exactly these. `loader.batch_size` varies data that kit makes; for a loader of your own
            use `kit.memory.model`, which predicts any batch size.
        device: A GPU model, its memory, or "this machine", as for `kit.predict_memory`.
        world_size: Ranks of every variation whose strategy is not `none`.
        timeout_seconds: Limit of each dry run, as for `kit.predict_memory`.

    Returns:
        The variations by rising peak; `to_csv()` writes them.

    Raises:
        ConfigError, HardwareError, PlanError: for a config that is refused as it is, and for unknown paths.

    Example:
        >>> rows = kit.memory.what_if(config, MyModule, MyData, variations={"levers.optimizer": ["sgd", "adamw"]})
        >>> len(rows)
        3
    """
    given, target = make_query(module, data, config, device, _ranks(config, world_size))
    batch_rule(given.data, given.config).warn()
    warn_of_unused(given.module, given.data, given.config)
    combinations = [*_combinations(variations, given.config)]
    asked: list[RecordingRequest | KitError] = []
    for changes in combinations:
        try:
            refuse_unused(given.module, given.data, changes)
            varied = _changed(given.config, changes, world_size)
            query = given.with_config(varied, target, _ranks(varied, world_size))
            asked.append(RecordingRequest(query))
        except KitError as error:
            asked.append(error)
    answers = iter(record_all([item for item in asked if isinstance(item, RecordingRequest)], timeout_seconds))
    rows: list[Variation] = []
    for changes, item in zip(combinations, asked, strict=True):
        answer = next(answers) if isinstance(item, RecordingRequest) else item
        estimate, reason = None, str(answer)
        if isinstance(item, RecordingRequest) and not isinstance(answer, KitError):
            estimate = estimate_here(item.query, answer[0], target)
            reason = batch_rule(item.query.data, item.query.config).made(estimate.batch_size).note
        rows.append(_variation(changes, estimate, reason, rows[0].estimate if rows else estimate))
    return WhatIf(rows)


def _variation(
    changes: Mapping[str, Any], found: MemoryEstimate | None, reason: str, given: MemoryEstimate | None
) -> Variation:
    if found is not None and not found.complete:
        reason = "; ".join(filter(None, [found.reasons[-1], reason]))
    saves = fraction = None
    if given is not None and given.complete and found is not None and found.complete:
        saves = given.device_allocated_bytes - found.device_allocated_bytes
        fraction = saves / given.device_allocated_bytes
    return Variation(changes=changes, estimate=found, reason=reason, saves_bytes=saves, saves_fraction=fraction)


def _combinations(variations: Variations, config: Config) -> Iterator[Mapping[str, Any]]:
    """What to change, the empty change first; combinations that change nothing are that one."""
    if isinstance(variations, Mapping):
        values = [value if isinstance(value, list | tuple) else [value] for value in variations.values()]
        found = [dict(zip(variations, combination, strict=True)) for combination in itertools.product(*values)]
    else:
        asked: Any = variations  # by a user, who may give anything
        listed = [*asked] if isinstance(asked, Iterable) else [asked]
        if wrong := [one for one in listed if not isinstance(one, Mapping)]:
            message = "give {path: [values]} for every combination, or a list of {path: value}"
            raise ConfigError([Problem("variations", f"{type(wrong[0]).__name__} names no changes; {message}")])
        found = [dict(one) for one in listed]
    if len(found) > MOST_VARIATIONS:
        message = f"{len(found)} combinations; ask for at most {MOST_VARIATIONS} at a time"
        raise ConfigError([Problem("variations", message)])
    seen: list[dict[str, Any]] = []
    for changes in [{}, *found]:
        real = {path: value for path, value in changes.items() if config.get(path) != value}
        if real not in seen:
            seen.append(real)
            yield real


def _changed(config: Config, changes: Mapping[str, Any], world_size: int | None) -> Config:
    """The config with these changes; a change of strategy takes the number of devices with it."""
    strategy = changes.get(_STRATEGY)
    if strategy is not None and _DEVICES not in changes:
        if strategy == "none":
            return config.replace({_DEVICES: "auto", **changes})
        if world_size is not None:
            return config.replace({_DEVICES: world_size, **changes})
    return config.replace(changes)


def _ranks(config: Config | None, world_size: int | None) -> int | None:
    return world_size if config is not None and config.hardware.strategy != "none" else None


def _cells(row: Variation) -> list[str]:
    found = row.estimate
    if found is None:
        return [str(row), "–", "–", "–", "–", "–"]
    least = "" if found.complete else "≥ "
    sizes = [f"{least}{format_bytes(size)}" for size in (found.device_allocated_bytes, found.device_reserved_bytes)]
    if not row.changes or row.saves_bytes is None or row.saves_fraction is None:
        return [str(row), found.verdict, *sizes, "–", "–"]
    return [str(row), found.verdict, *sizes, format_bytes(row.saves_bytes), f"{row.saves_fraction:.1%}"]
