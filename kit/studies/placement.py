"""placements: the same rows from memory, from files and from a page cache too small for them, in one table.

Each placement is a trial of two epochs, of which the second is timed: the first leaves the page cache as it is found in
the long run. Predicted are seconds of an epoch (the working-set model, from measured rates of reading and the time of a
step on a few rows in memory), the device's peak (a dry run: the same for all, as only batches go there), the host's
(that of the few rows, and the array where it is held), and what the page cache will keep. Ratio = measured / predicted.

A page cache too small is played: the least recently read pages of the file are dropped beyond so many bytes, so that
rows come from the disk again. What the disk's own controller keeps is not dropped: a disk that answers faster than it
reads is measured as it answers. Page cache is what the system keeps of the file; host memory is the process's own,
without the pages of files. The device as a place for all rows is never run: kit moves batches only. How large it is
decides the case alone. Arrays of different sizes come into one table by adding their placements.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from kit.chunks.resources import Case, DiskRates, WorkingSet
from kit.config import Config
from kit.errors import ConfigError, KitError, Problem
from kit.machine.machine import hardware, resolve_devices, share
from kit.memory.prediction import predict_memory
from kit.memory.residuals import compared, ratio
from kit.studies.repeats import RunSource
from kit.studies.series import samples_per_second
from kit.tables import html_list, html_table, text_table
from kit.trial.trial import Trial
from kit.units import format_bytes, format_seconds, parse_bytes

if TYPE_CHECKING:
    from kit.data.rows.loader import RowData
    from kit.data.rows.rows import Rows

_EPOCHS = 2
_PROBE_STEPS, _PROBE_WARMUP, _PROBE_BATCHES = 24, 8, 4
_TRIPLE = ("predicted", "measured", "ratio")
_COLUMNS = ("case: where the rows are", *_TRIPLE, *_TRIPLE, *_TRIPLE)
_GROUPS = ("", *["an epoch"] * 3, *["device peak"] * 3, *["host peak"] * 3)
_CACHE_COLUMNS = ("page cache", "predicted", "measured", "ratio", "read from disk")


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """One place for the rows."""

    name: str
    case: Case | str
    data_bytes: int
    """Of all rows."""
    step_seconds: float
    """Of computing on one batch, as measured on a few rows in memory."""
    predicted_seconds: float | None = None
    """Of an epoch after the first."""
    measured_seconds: float | None = None
    predicted_device_bytes: int | None = None
    """Peak that the allocator hands out."""
    measured_device_bytes: int | None = None
    predicted_host_bytes: int | None = None
    """Peak of the process's own memory, without the pages of files."""
    measured_host_bytes: int | None = None
    predicted_cache_bytes: int | None = None
    """What the page cache keeps of the file at the end."""
    measured_cache_bytes: int | None = None
    disk_bytes: int | None = None
    """Read from disks in both epochs, by all ranks."""
    run_directory: str = ""

    @property
    def seconds_ratio(self) -> float | None:
        return ratio(self.predicted_seconds, self.measured_seconds)

    @property
    def device_ratio(self) -> float | None:
        return ratio(self.predicted_device_bytes, self.measured_device_bytes)

    @property
    def host_ratio(self) -> float | None:
        return ratio(self.predicted_host_bytes, self.measured_host_bytes)

    @property
    def cache_ratio(self) -> float | None:
        return ratio(self.predicted_cache_bytes, self.measured_cache_bytes)

    def cells(self) -> list[str]:
        return [
            f"{self.case}: {self.name}", _seconds(self.predicted_seconds), _seconds(self.measured_seconds),
            _ratio(self.seconds_ratio), _bytes(self.predicted_device_bytes), _bytes(self.measured_device_bytes),
            _ratio(self.device_ratio), _bytes(self.predicted_host_bytes), _bytes(self.measured_host_bytes),
            _ratio(self.host_ratio),
        ]  # fmt: skip

    def cache_cells(self) -> list[str]:
        return [
            self.name, _bytes(self.predicted_cache_bytes), _bytes(self.measured_cache_bytes), _ratio(self.cache_ratio),
            _bytes(self.disk_bytes),
        ]  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Placements:
    """Placements by name; print it, show it, or draw it with `kit.placements_figure`. Two of them add to one table."""

    rows: tuple[Placement, ...]
    sentences: tuple[str, ...] = ()

    def __add__(self, other: Placements) -> Placements:
        return Placements(rows=self.rows + other.rows, sentences=(*dict.fromkeys(self.sentences + other.sentences),))

    def row(self, name: str) -> Placement:
        """The placement of that name.

        Raises:
            ConfigError: when there is none.
        """
        found = next((row for row in self.rows if row.name == name), None)
        if found is None:
            raise ConfigError([Problem("name", f"{name!r} is none of {', '.join(row.name for row in self.rows)}")])
        return found

    @property
    def headline(self) -> str:
        arrays = {(row.data_bytes, row.step_seconds): None for row in self.rows}
        parts = (f"{format_bytes(size)} of rows, {format_seconds(step)} of computing a step" for size, step in arrays)
        return "; ".join(parts)

    def __repr__(self) -> str:
        titles = [f"{group} {title}".strip() for group, title in zip(_GROUPS, _COLUMNS, strict=True)]
        tables = [text_table(titles, [row.cells() for row in self.rows])]
        tables += [text_table(_CACHE_COLUMNS, self._cached)] if self._cached else []
        return "\n".join([self.headline, *tables, *(f"- {text}" for text in self.sentences)])

    __str__ = __repr__

    def _repr_html_(self) -> str:
        cells = [row.cells() for row in self.rows]
        tables = html_table(_COLUMNS, cells, caption=escape(self.headline), dense=True, groups=_GROUPS)
        tables += html_table(_CACHE_COLUMNS, self._cached, dense=True) if self._cached else ""
        return f'<div style="overflow-x: auto">{tables}</div>{html_list(self.sentences)}'

    @property
    def _cached(self) -> list[list[str]]:
        """Rows of files."""
        return [row.cache_cells() for row in self.rows if row.predicted_cache_bytes is not None]


def placements(
    module: Any,
    sources: str | PathLike[str] | Sequence[str | PathLike[str]],
    config: Config,
    *,
    device_bytes: int | str = 0,
    page_cache_bytes: int | str = 0,
    row_block: int = 1,
) -> Placements:
    """Run two epochs from every place, and set beside each what was foreseen. Waits for all of it.

    Args:
        module: What `kit.fit` takes as module; it takes batches of `kit.RowData`.
        sources: A `.npy` or `.pt` file or a Zarr array of the same rows, or several. The first is read into memory too.
        config: What to run; its number of steps is that of two epochs.
        device_bytes: How large a device the rows are held against; 0 takes that of the config or the machine.
        page_cache_bytes: Play a machine whose page cache keeps so much of each file; 0 leaves that out.
        row_block: As of `kit.RowData`.

    Raises:
        ConfigError: for what `kit.fit` refuses, and arrays of different shapes.
        StoreError: for an array that cannot be read.
        TrialError: when a trial fails.
    """
    from kit.data.rows.loader import RowData
    from kit.data.rows.rows import open_rows

    given = [sources] if isinstance(sources, str | PathLike) else [*sources]
    opened = [open_rows(source) for source in given]
    _refuse_different(opened)
    first, limit_bytes = opened[0], parse_bytes(page_cache_bytes)
    study = _Study(module, first, config, parse_bytes(device_bytes))
    rows = [study.on_the_device()]
    data = RowData(str(given[0]), in_memory=True, row_block=row_block)
    rows.append(study.run(f"{_name(first)} in memory", data, in_memory=True))
    for source, array in zip(given, opened, strict=True):
        name = f"{_name(array)} on disk"
        rows.append(study.run(name, RowData(str(source), row_block=row_block)))
        if limit_bytes and array.file is not None:
            data = RowData(str(source), page_cache_bytes=limit_bytes, row_block=row_block)
            rows.append(study.run(f"{name}, page cache {format_bytes(limit_bytes)}", data, limit_bytes=limit_bytes))
    return Placements(rows=tuple(rows), sentences=tuple(study.sentences))


class _Study:
    """What all placements of one array share."""

    def __init__(self, module: Any, rows: Rows, config: Config, device_bytes: int) -> None:
        from kit.data.rows.loader import RowData

        self.module, self.config = module, config.replace({"trial.predict_memory": False, "trial.count_work": False})
        self.sentences: list[str] = []
        resolved = resolve_devices(config, hardware())
        self._ranks = resolved.world_size
        self._global_batch = config.loader.batch_size * self._ranks
        # As many rows as there are, for a module that counts them; but few different ones, which are in memory soon.
        different = min(len(rows), _PROBE_BATCHES * self._global_batch)
        few = RowData(rows, np.arange(len(rows), dtype=np.int64) % different)
        self._step_seconds, self._host_bytes = self._probed(few)
        self._device_bytes = self._predicted_device(few)
        self._device_size = device_bytes or self._known_device(resolved.accelerator)
        self._room_bytes = max(0, self._device_size - (self._device_bytes or 0))
        self._rows = rows

    def on_the_device(self) -> Placement:
        """What it would take to keep all rows there; never run."""
        needed = None if self._device_bytes is None else self._device_bytes + self._rows.nbytes
        fits = "would fit" if self._rows.nbytes <= self._room_bytes else "would not fit"
        return Placement(
            name=f"{_name(self._rows)} on the device", case=fits if self._device_size else "how large is not known",
            data_bytes=self._rows.nbytes, step_seconds=self._step_seconds, predicted_device_bytes=needed,
        )  # fmt: skip

    def run(self, name: str, data: RowData, *, in_memory: bool = False, limit_bytes: int = 0) -> Placement:
        """A trial of two epochs, and what was foreseen of it."""
        from kit.data.rows.page_cache import cached_bytes

        model, rates = self._model(data, in_memory, limit_bytes)
        trial = self._trial(data, self._steps * _EPOCHS, self._steps)
        found = compared(trial.paths)
        file = None if in_memory else data.rows.file
        if not in_memory:
            self.sentences.append(f"{name}: {model.sentence(rates)}")
        speed = samples_per_second(trial)
        held = self._rows.nbytes if in_memory else 0
        return Placement(
            name=name, case=model.case, data_bytes=self._rows.nbytes, step_seconds=self._step_seconds,
            predicted_seconds=model.epoch_seconds(rates),
            measured_seconds=len(self._rows) / speed if speed else None,
            predicted_device_bytes=self._device_bytes,
            measured_device_bytes=None if found is None else found.measured_allocated_bytes,
            predicted_host_bytes=None if self._host_bytes is None else self._host_bytes + held,
            measured_host_bytes=_own_memory(trial),
            predicted_cache_bytes=None if file is None else round(min(model.free_memory_bytes, model.data_bytes)),
            measured_cache_bytes=None if file is None else cached_bytes(file),
            disk_bytes=_counted(trial, "disk_bytes"), run_directory=str(trial.run_directory),
        )  # fmt: skip

    @property
    def _steps(self) -> int:
        """Of an epoch."""
        return max(1, math.ceil(len(self._rows) / self._global_batch))

    def _model(self, data: RowData, in_memory: bool, limit_bytes: int) -> tuple[WorkingSet, DiskRates]:
        from kit.data.rows.loader import read_rates

        data.use_config(self.config)
        rows = data.rows
        rates = read_rates(rows, data.order(), self.config.loader)
        cached = in_memory or rows.file is None
        model = WorkingSet(
            rows=len(rows), row_bytes=rows.row_bytes, batch_size=self._global_batch, step_seconds=self._step_seconds,
            free_memory_bytes=rows.nbytes if cached else limit_bytes or share().memory_available_bytes,
            device_bytes=0 if limit_bytes else self._room_bytes,
        )  # fmt: skip
        return model, rates

    def _probed(self, few: RowData) -> tuple[float, int | None]:
        """(seconds of a step, the process's own memory) with few rows in memory."""
        trial = self._trial(few, _PROBE_STEPS, _PROBE_WARMUP)
        speed = samples_per_second(trial)
        if not speed:
            raise ConfigError([Problem("config", "no step was timed; allow more of trial.timeout_seconds")])
        return self._global_batch / speed, _own_memory(trial)

    def _predicted_device(self, few: RowData) -> int | None:
        try:
            estimate = predict_memory(self.module, few, self.config)
        except KitError as error:
            self.sentences.append(f"the device's peak is not predicted: {error}")
            return None
        return estimate.device_allocated_bytes if estimate.complete else None

    def _known_device(self, accelerator: str) -> int:
        """What a device has in all, by the config or the machine; 0 for a CPU of which the config says nothing."""
        allowed = self.config.hardware.device_memory_bytes
        if not allowed and accelerator == "gpu":
            allowed = min(gpu.total_bytes for gpu in hardware().gpus)
        return allowed or 0

    def _trial(self, data: RowData, steps: int, warmup: int) -> Trial:
        changes: Mapping[str, Any] = {"trial.max_steps": steps, "trial.warmup_steps": warmup}
        trial = RunSource(self.module, data, self.config).start(self.config.replace(changes))
        return trial.wait()


def _refuse_different(opened: Sequence[Rows]) -> None:
    if not opened:
        raise ConfigError([Problem("sources", "there is no array; give at least one")])
    for other in opened[1:]:
        if other.shape != opened[0].shape:
            message = (
                f"{other.place} has {other.shape}, {opened[0].place} {opened[0].shape}; give the same rows, or add the "
                "placements of one to those of the other"
            )
            raise ConfigError([Problem("sources", message)])


def _name(rows: Rows) -> str:
    return Path(rows.place).name if rows.file is not None else f"{Path(rows.place).parent.name} (Zarr)"


def _own_memory(trial: Trial) -> int | None:
    """The most that a rank held of its own; None where the system does not tell files apart."""
    held = [
        int(event["host_rss_bytes"]) - int(event["host_file_bytes"])
        for event in trial.steps
        if event.get("host_file_bytes") is not None
    ]
    return max(held, default=None)


def _counted(trial: Trial, name: str) -> int | None:
    counts = [event.get("counters") or {} for event in trial.events if event["kind"] == "fit_ended"]
    return sum(int(count[name]) for count in counts) if all(name in count for count in counts) and counts else None


def _seconds(value: float | None) -> str:
    return "–" if value is None else format_seconds(value)


def _bytes(value: float | None) -> str:
    return "–" if value is None else format_bytes(value)


def _ratio(value: float | None) -> str:
    return "–" if value is None else f"{value:.2f}"
