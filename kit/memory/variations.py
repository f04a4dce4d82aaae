"""what_if: many variations of one configuration, each dry-run itself, in one table sorted by peak.

What a lever saves is the difference to the configuration as it was given, never a rule of thumb. Equal variations are
recorded once, two processes work at a time, and one that cannot run is a row with its reason.
"""

from __future__ import annotations

import csv
import io
import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, overload

from kit.config import Config
from kit.errors import ConfigError, KitError, Problem
from kit.memory.prediction import TIMEOUT_SECONDS, estimate_here
from kit.memory.query import MemoryQuery, make_query
from kit.memory.recordings import RecordingRequest, all_recordings
from kit.memory.replay.cards import THIS_MACHINE, DeviceTarget
from kit.memory.replay.estimate import MemoryEstimate
from kit.memory.replay.replay import Recording
from kit.tables import html_list, html_table, text_table
from kit.trial.payload import batch_rule
from kit.units import format_bytes

Variations = Mapping[str, Sequence[Any]] | Sequence[Mapping[str, Any]]
_STRATEGY, _DEVICES = "hardware.strategy", "hardware.devices"
_COLUMNS = ("variation", "verdict", "allocated", "reserved", "saves", "of all")
_AS_GIVEN = "as given"
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
        return ", ".join(f"{_leaf(path)} {_word(value)}" for path, value in self.changes.items()) or _AS_GIVEN


class WhatIf(Sequence[Variation]):
    """Variations by rising peak, those without an answer last."""

    def __init__(self, rows: Iterable[Variation]) -> None:
        self._rows = tuple(sorted(rows, key=_peak))

    @overload
    def __getitem__(self, index: int) -> Variation: ...
    @overload
    def __getitem__(self, index: slice) -> WhatIf: ...
    def __getitem__(self, index: int | slice) -> Variation | WhatIf:
        return WhatIf(self._rows[index]) if isinstance(index, slice) else self._rows[index]

    def __len__(self) -> int:
        return len(self._rows)

    @property
    def given(self) -> Variation:
        """The configuration as it was given."""
        return next(row for row in self if not row.changes)

    def to_csv(self, path: str | Path | None = None) -> str:
        """The rows as CSV, a column for each path that varies; written to `path` when given."""
        paths = list(dict.fromkeys(name for row in self for name in row.changes))
        stream = io.StringIO()
        writer = csv.writer(stream, lineterminator="\n")
        writer.writerow([*paths, *_CSV_COLUMNS])
        writer.writerows([*(row.changes.get(name, "") for name in paths), *_csv_cells(row)] for row in self)
        if path is not None:
            Path(path).write_text(stream.getvalue(), encoding="utf-8")
        return stream.getvalue()

    def __repr__(self) -> str:
        return "\n".join([text_table(_COLUMNS, self._cells, self._marked), *(f"- {item}" for item in self._reasons)])

    def _repr_html_(self) -> str:
        caption = f"{len(self)} variations by rising peak"
        return html_table(
            _COLUMNS, self._cells, caption=caption, marked=self._marked, mark="the configuration"
        ) + html_list(self._reasons)

    @property
    def _marked(self) -> int | None:
        return next((place for place, row in enumerate(self) if not row.changes), None)

    @property
    def _cells(self) -> list[list[str]]:
        return [_cells(row) for row in self]

    @property
    def _reasons(self) -> list[str]:
        return [f"{row}: {row.reason}" for row in self if row.reason]


@overload
def what_if(
    config: Config,
    /,
    *,
    variations: Variations,
    device: str | int | DeviceTarget = THIS_MACHINE,
    world_size: int | None = None,
    timeout_seconds: float = TIMEOUT_SECONDS,
) -> WhatIf: ...
@overload
def what_if(
    module: Any,
    data: Any,
    config: Config,
    *,
    variations: Variations,
    device: str | int | DeviceTarget = THIS_MACHINE,
    world_size: int | None = None,
    timeout_seconds: float = TIMEOUT_SECONDS,
) -> WhatIf: ...
def what_if(
    module: Any,
    data: Any = None,
    config: Config | None = None,
    *,
    variations: Variations,
    device: str | int | DeviceTarget = THIS_MACHINE,
    world_size: int | None = None,
    timeout_seconds: float = TIMEOUT_SECONDS,
) -> WhatIf:
    """Predict the configuration as given and every variation of it.

    Args:
        module: What `kit.fit` takes as module.
        data: What `kit.fit` takes as data.
        config: The configuration that is varied.
        variations: `{"hardware.precision": ["32-true", "bf16-mixed"], ...}` for every combination, or a list of
            `{path: value}` for exactly these. As in a fit, `loader.batch_size` is that of a loader which kit makes;
            for one of your own, `kit.memory_model` answers any batch size.
        device: What `predict_memory` takes.
        world_size: Ranks of every variation whose strategy is not `none`.
        timeout_seconds: For each dry run.

    Raises:
        ConfigError, HardwareError, PlanError: for a configuration that is refused as given, and unknown paths.
    """
    if config is None and isinstance(module, Config):
        module, config = None, module
    given, target = make_query(module, data, config, device, _ranks(config, world_size))
    batch_rule(given.data, given.config).warn()
    rows = [_Row(changes, given, target, world_size) for changes in _combinations(variations, given.config)]
    wanted = [row.wanted for row in rows if row.wanted is not None]
    answers = iter(all_recordings(wanted, timeout_seconds))
    for row in rows:
        if row.wanted is not None:
            row.take(next(answers))
    return _compared(rows)


class _Row:
    """A variation on its way."""

    def __init__(
        self, changes: Mapping[str, Any], given: MemoryQuery, target: DeviceTarget, world_size: int | None
    ) -> None:
        self.changes, self.target = changes, target
        self.estimate: MemoryEstimate | None = None
        self.reason = ""
        self.wanted: RecordingRequest | None = None
        try:
            config = _changed(given.config, changes, world_size)
            question = given.with_config(config, target, _ranks(config, world_size))
            self.wanted = RecordingRequest(question)
        except KitError as error:
            self.reason = str(error)

    def take(self, answer: list[Recording] | KitError) -> None:
        assert self.wanted is not None
        if isinstance(answer, KitError):
            self.reason = str(answer)
        else:
            question = self.wanted.question
            self.estimate = estimate_here(question, answer[0], self.target)
            self.reason = batch_rule(question.data, question.config).made(self.estimate.batch_size).note


def _combinations(variations: Variations, config: Config) -> Iterator[Mapping[str, Any]]:
    """What to change, the empty change first; combinations that change nothing are that one."""
    if isinstance(variations, Mapping):
        values = [value if isinstance(value, list | tuple) else [value] for value in variations.values()]
        found = [dict(zip(variations, combination, strict=True)) for combination in itertools.product(*values)]
    else:
        found = [dict(changes) for changes in variations]
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


def _compared(rows: Sequence[_Row]) -> WhatIf:
    given = rows[0].estimate
    return WhatIf(_variation(row, given) for row in rows)


def _variation(row: _Row, given: MemoryEstimate | None) -> Variation:
    found = row.estimate
    known = given is not None and given.complete and found is not None and found.complete
    saves = given.device_allocated_bytes - found.device_allocated_bytes if known and given and found else None
    reason = row.reason if found is None or found.complete else "; ".join(filter(None, [found.reasons[-1], row.reason]))
    return Variation(
        changes=row.changes, estimate=found, reason=reason, saves_bytes=saves,
        saves_fraction=saves / given.device_allocated_bytes if given and saves is not None else None,
    )  # fmt: skip


def _peak(row: Variation) -> tuple[bool, int]:
    return row.estimate is None, row.estimate.device_allocated_bytes if row.estimate else 0


# -- words


_CSV_COLUMNS = (
    "verdict", "device_allocated_bytes", "device_reserved_bytes", "saves_bytes", "saves_fraction", "complete", "reason",
)  # fmt: skip


def _csv_cells(row: Variation) -> list[Any]:
    found = row.estimate
    numbers = [found.verdict, found.device_allocated_bytes, found.device_reserved_bytes] if found else ["", "", ""]
    return [*numbers, row.saves_bytes, row.saves_fraction, found.complete if found else "", row.reason]


def _cells(row: Variation) -> list[str]:
    found = row.estimate
    if found is None:
        return [str(row), "–", "–", "–", "–", "–"]
    least = "" if found.complete else "≥ "
    sizes = [f"{least}{format_bytes(size)}" for size in (found.device_allocated_bytes, found.device_reserved_bytes)]
    if not row.changes or row.saves_bytes is None or row.saves_fraction is None:
        return [str(row), found.verdict, *sizes, "–", "–"]
    return [str(row), found.verdict, *sizes, format_bytes(row.saves_bytes), f"{row.saves_fraction:.1%}"]


def _word(value: Any) -> str:
    return {True: "on", False: "off"}[value] if isinstance(value, bool) else str(value)


def _leaf(path: str) -> str:
    return path.rpartition(".")[2].replace("_", " ")
