"""placements: the same rows read from memory, from files and with a page cache too small for them, in one table.

Each placement is a trial of two epochs. What tells them apart is counted: bytes that came from the disk in both, and
the memory that the rows hold in the process and in the page cache. A file begins with nothing of it in the page cache,
so it is read once, and with a page cache too small for it twice, by whole pages, of which a row may touch two. The
second epoch is timed, since after the first the page cache holds what it holds in a long run.

The predictions: seconds of an epoch (the working-set model, from measured read rates and the time of a step on a few
rows in memory), device peak (a dry run, the same for all placements, since only batches go to the device), host peak
(that of the few rows, plus the array where it is in memory), what the page cache keeps, and what comes from the disk.
Ratio = measured / predicted.

A small page cache is simulated by dropping the least recently read pages of the file beyond the given size, so that
rows come from the disk again; what it no longer held is counted page by page, and a cache in the disk's own controller
is not dropped. Host memory is the process's own, without the pages of files. Keeping all rows on the device is never
run, since kit moves batches only: its table row says whether they would fit. Arrays of different sizes come into one
table by adding their placements.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from kit.arguments import config_first
from kit.chunks.resources import Case, WorkingSet, hit_fraction
from kit.config import Config
from kit.errors import ConfigError, KitError, Problem
from kit.machine.machine import hardware, resolve_devices, share
from kit.machine.processes import BUSY_CORES
from kit.memory.prediction import predict_memory
from kit.memory.residual_table import compared, ratio
from kit.records.row import row_of
from kit.registry import Drawable
from kit.studies.repeats import RunSource
from kit.studies.series import samples_per_second
from kit.tables import WaitingLine, cell, html_list, html_table, text_table
from kit.trial.trial import Trial
from kit.units import format_bytes, format_seconds, parse_bytes

if TYPE_CHECKING:
    from kit.data.rows.loader import RowData
    from kit.data.rows.rows import Rows

_EPOCHS = 2
_PROBE_STEPS, _PROBE_WARMUP, _PROBE_BATCHES = 24, 8, 4
_STEP_ALONE = "the step alone, from which all epochs are predicted"
_TRIPLE = ("predicted", "measured", "ratio")
_COLUMNS = ("case: where the rows are", *_TRIPLE, *_TRIPLE, *_TRIPLE)
_GROUPS = ("", *["an epoch"] * 3, *["device peak"] * 3, *["host peak"] * 3)
_COUNTED_COLUMNS = ("where the rows are", *_TRIPLE, *_TRIPLE, "rows hold")
_COUNTED_GROUPS = ("", *["read from the disk"] * 3, *["page cache keeps"] * 3, "")


def _two(value: float | None) -> str:
    return cell(value, "{:.2f}".format)


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
    predicted_disk_bytes: int | None = None
    """Read from disks in both epochs, by all ranks, whole pages."""
    measured_disk_bytes: int | None = None
    held_bytes: int | None = None
    """Of the host peak, what training on a few rows does not take."""
    moved_bytes: int | None = None
    """Of rows, in the batches of both epochs, by all ranks."""
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

    @property
    def disk_ratio(self) -> float | None:
        return ratio(self.predicted_disk_bytes, self.measured_disk_bytes)

    def cells(self) -> list[str]:
        return [
            f"{self.case}: {self.name}", cell(self.predicted_seconds, format_seconds),
            cell(self.measured_seconds, format_seconds),
            _two(self.seconds_ratio), cell(self.predicted_device_bytes), cell(self.measured_device_bytes),
            _two(self.device_ratio), cell(self.predicted_host_bytes), cell(self.measured_host_bytes),
            _two(self.host_ratio),
        ]  # fmt: skip

    def counted_cells(self) -> list[str]:
        return [
            self.name, cell(self.predicted_disk_bytes), cell(self.measured_disk_bytes), _two(self.disk_ratio),
            cell(self.predicted_cache_bytes), cell(self.measured_cache_bytes), _two(self.cache_ratio),
            cell(self.held_bytes),
        ]  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Placements(Drawable):
    """Placements by name; print it, show it, or draw it with `figure()`. Two of them add to one table."""

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
        tables = []
        for groups, columns, rows in self._tables():
            titles = [f"{group} {title}".strip() for group, title in zip(groups, columns, strict=True)]
            tables.append(text_table(titles, rows))
        return "\n".join([self.headline, *tables, *(f"- {text}" for text in self.sentences)])

    def _repr_html_(self) -> str:
        captions = (escape(self.headline), "")
        tables = "".join(
            html_table(columns, rows, caption=caption, dense=True, groups=groups)
            for caption, (groups, columns, rows) in zip(captions, self._tables(), strict=False)
        )
        return f'<div style="overflow-x: auto">{tables}</div>{html_list(self.sentences)}'

    def _tables(self) -> Iterator[tuple[Sequence[str], Sequence[str], list[list[str]]]]:
        """Groups, columns and rows: peaks and seconds of all places, then what was counted in those that ran."""
        yield _GROUPS, _COLUMNS, [row.cells() for row in self.rows]
        if ran := [row.counted_cells() for row in self.rows if row.measured_disk_bytes is not None]:
            yield _COUNTED_GROUPS, _COUNTED_COLUMNS, ran


@config_first
def placements(
    config: Any = None,
    module: Any = None,
    data: str | PathLike[str] | Sequence[str | PathLike[str]] = (),
    *,
    device_bytes: int | str = 0,
    page_cache_bytes: int | str = 0,
    row_block: int = 1,
) -> Placements:
    """Train two epochs on an array from memory, from disk and with a small page cache, and compare with the prediction.

    Args:
        config: What to run; the default config when left out. Its number of steps becomes that of two epochs.
        module: What is trained, as `kit.fit` takes it, on batches of `kit.data.RowData`: (values, rows).
        data: A `.npy` or `.pt` file or a Zarr array, or several of the same rows. The first is also read into
            memory.
        device_bytes: Memory of a device that the rows are compared with. 0 takes that of the config or the machine.
        page_cache_bytes: Stand in for a machine whose page cache keeps so much of each file. 0 leaves that out.
        row_block: As for `kit.data.RowData`.

    Returns:
        A row for each place: seconds of an epoch, predicted and measured, the device's peak, and host memory.

    Raises:
        ConfigError: for what `kit.fit` refuses, and arrays of different shapes.
        StoreError: for an array that cannot be read.
        TrialError: when a trial fails.

    Example:
        >>> rows = kit.data.write_rows("counts.npy", numpy.ones((64, 16)), progress=False)
        >>> found = kit.studies.placements(topics, data="counts.npy")
        >>> len(found.rows)
        3
    """
    from kit.data.rows.loader import RowData
    from kit.data.rows.rows import open_rows

    given: list[Any] = [*data] if isinstance(data, list | tuple) else [data]
    opened = [open_rows(source) for source in given]
    if not opened:
        raise ConfigError([Problem("data", "there is no array; give at least one")])
    for other in opened[1:]:
        if other.shape != opened[0].shape:
            message = (
                f"{other.place} has {other.shape}, {opened[0].place} {opened[0].shape}; give the same rows, or add the "
                "placements of one to those of the other"
            )
            raise ConfigError([Problem("data", message)])
    first, limit_bytes = opened[0], parse_bytes(page_cache_bytes, "page_cache_bytes")
    kept = RowData(str(given[0]), in_memory=True, row_block=row_block)
    places: list[tuple[str, RowData, dict[str, Any]]] = [(f"{_name(first)} in memory", kept, {"in_memory": True})]
    for source, array in zip(given, opened, strict=True):
        name = f"{_name(array)} on disk"
        places.append((name, RowData(str(source), row_block=row_block), {}))
        if limit_bytes and array.file is not None:
            less = RowData(str(source), page_cache_bytes=limit_bytes, row_block=row_block)
            places.append((f"{name}, page cache {format_bytes(limit_bytes)}", less, {"limit_bytes": limit_bytes}))
    with WaitingLine() as line:
        line.show("the step alone")
        study = _Study(module, first, config, parse_bytes(device_bytes, "device_bytes"))
        rows = [study.on_the_device()]
        for place in places:
            line.show(f"{len(rows) - 1} of {len(places)} placements measured")
            rows.append(study.run(place[0], place[1], **place[2]))
        line.show(f"{len(places)} placements measured")
    return Placements(rows=tuple(rows), sentences=(*study.sentences, *_disturbed(study.other_cores)))


class _Study:
    """What all placements of one array share."""

    def __init__(self, module: Any, rows: Rows, config: Config, device_bytes: int) -> None:
        from kit.data.rows.loader import RowData

        self.module, self.config = module, config.replace({"trial.predict_memory": False, "trial.count_work": False})
        self._rows, self.sentences = rows, list[str]()
        self.other_cores: dict[str, float] = {}
        """That other programs used while each was timed, where they slowed it."""
        resolved = resolve_devices(config, hardware())
        self._global_batch = config.loader.batch_size * resolved.world_size
        self._steps = max(1, math.ceil(len(rows) / self._global_batch))
        """Of an epoch."""
        # As many rows as the data has, for a module that counts them, but few different ones: they fit in any cache.
        different = min(len(rows), _PROBE_BATCHES * self._global_batch)
        few = RowData(rows, np.arange(len(rows), dtype=np.int64) % different)
        probe = self._trial(few, _PROBE_STEPS, _PROBE_WARMUP)
        self._look_at_others(_STEP_ALONE, probe)
        speed = samples_per_second(probe)
        if not speed:
            raise ConfigError([Problem("config", "no step was timed; allow more of trial.timeout_seconds")])
        self._step_seconds, self._host_bytes = self._global_batch / speed, _own_memory(probe)
        self._device_bytes: int | None = None
        try:
            estimate = predict_memory(self.config, module, few)
            self._device_bytes = estimate.device_allocated_bytes if estimate.complete else None
        except KitError as error:
            self.sentences.append(f"the device's peak is not predicted: {error}")
        # A CPU has no device memory unless the config gives it some.
        self._device_size = device_bytes or config.hardware.device_memory_bytes or 0
        if not self._device_size and resolved.accelerator == "gpu":
            self._device_size = min(gpu.total_bytes for gpu in hardware().gpus)
        self._free_bytes = max(0, self._device_size - (self._device_bytes or 0))
        """Of the device, beside the training."""

    def on_the_device(self) -> Placement:
        """The memory that keeping all rows there would take; never run."""
        needed = None if self._device_bytes is None else self._device_bytes + self._rows.nbytes
        fits = "would fit" if self._rows.nbytes <= self._free_bytes else "would not fit"
        return Placement(
            name=f"{_name(self._rows)} on the device", case=fits if self._device_size else "its size is not known",
            data_bytes=self._rows.nbytes, step_seconds=self._step_seconds, predicted_device_bytes=needed,
        )  # fmt: skip

    def run(self, name: str, data: RowData, *, in_memory: bool = False, limit_bytes: int = 0) -> Placement:
        """A trial of two epochs, beside its prediction."""
        from kit.data.rows.loader import read_rates
        from kit.data.rows.page_cache import cached_bytes, drop_cached

        data.use_config(self.config)
        rows = data.rows
        rates = read_rates(rows, data.order(), self.config.loader)
        cached = in_memory or rows.file is None
        model = WorkingSet(
            rows=len(rows), row_bytes=rows.row_bytes, batch_size=self._global_batch, step_seconds=self._step_seconds,
            free_memory_bytes=rows.nbytes if cached else limit_bytes or share().memory_available_bytes,
            device_bytes=0 if limit_bytes else self._free_bytes,
        )  # fmt: skip
        file = None if in_memory else rows.file
        if file is not None:
            rows.close()
            drop_cached(file)
        from_disk = 0 if in_memory else self._disk_bytes(data, limit_bytes)
        trial = self._trial(data, self._steps * _EPOCHS, self._steps)
        found = compared(trial.paths)
        self._look_at_others(name, trial)
        if not in_memory:
            self.sentences.append(f"{name}: {model.sentence(rates)}")
        speed = samples_per_second(trial)
        array_bytes = self._rows.nbytes if in_memory else 0
        counts = trial.counters
        counted = bool(counts) and all("disk_bytes" in count for count in counts)
        own, moved = _own_memory(trial), sum(int(count["bytes_read"]) for count in counts) if counted else None
        if moved is not None:
            where = f"{_name(self._rows)}, wherever it is: {format_bytes(moved)} moved to the device in both epochs"
            self.sentences += [] if where in self.sentences else [where]
        return Placement(
            name=name, case=model.case, data_bytes=self._rows.nbytes, step_seconds=self._step_seconds,
            predicted_seconds=model.epoch_seconds(rates),
            measured_seconds=len(self._rows) / speed if speed else None,
            predicted_device_bytes=self._device_bytes,
            measured_device_bytes=None if found is None else found.measured_allocated_bytes,
            predicted_host_bytes=None if self._host_bytes is None else self._host_bytes + array_bytes,
            measured_host_bytes=own,
            predicted_cache_bytes=None if file is None else round(min(model.free_memory_bytes, model.data_bytes)),
            measured_cache_bytes=None if file is None else cached_bytes(file),
            predicted_disk_bytes=from_disk,
            measured_disk_bytes=sum(int(count["disk_bytes"]) for count in counts) if counted else None,
            held_bytes=None if own is None or self._host_bytes is None else max(0, own - self._host_bytes),
            moved_bytes=moved,
            run_directory=str(trial.run_directory),
        )  # fmt: skip

    def _disk_bytes(self, data: RowData, limit_bytes: int) -> int | None:
        """What two epochs will read of a file: what the page cache lacks, or all pages and then those it has lost."""
        from kit.data.rows.page_cache import PAGE_BYTES, cached_bytes

        rows = data.rows
        if rows.file is None:
            return None
        if not limit_bytes:
            kept = cached_bytes(rows.file)
            return None if kept is None else rows.file.stat().st_size - kept
        blocks = math.ceil(len(rows) / data.row_block)
        touched = blocks * (data.row_block * rows.row_bytes + PAGE_BYTES)  # a block begins anywhere in a page
        window = min(1.0, limit_bytes / touched)
        # Of an epoch, as much as the cache remembers. A page is also read for the rows that share it, at other times.
        sharing = max(1.0, touched / rows.nbytes)
        missed: float = touched * (1 - window) ** (sharing - 1)
        return round(missed + missed * (1 - hit_fraction(window)))

    def _look_at_others(self, what: str, trial: Trial) -> None:
        cores = row_of(trial.paths).get("other_cores") or 0.0
        if cores > BUSY_CORES:
            self.other_cores[what] = cores

    def _trial(self, data: RowData, steps: int, warmup: int) -> Trial:
        changes: Mapping[str, Any] = {"trial.max_steps": steps, "trial.warmup_steps": warmup}
        trial = RunSource(self.module, data, self.config).start(self.config.replace(changes))
        return trial.wait()


def _name(rows: Rows) -> str:
    return Path(rows.place).name if rows.file is not None else f"{Path(rows.place).parent.name} (Zarr)"


def _disturbed(other_cores: Mapping[str, float]) -> list[str]:
    """What other programs took of the machine while something was timed, in one sentence; none where they rested."""
    if not other_cores:
        return []
    least, most = (f"{end(other_cores.values()):.1f}" for end in (min, max))
    cores = least if least == most else f"{least} to {most}"
    return [f"other programs kept {cores} cores busy, so too many seconds were timed of: {'; '.join(other_cores)}"]


def _own_memory(trial: Trial) -> int | None:
    """The most that a rank held of its own; None where the system does not tell files apart."""
    held = [
        int(event["host_rss_bytes"]) - int(event["host_file_bytes"])
        for event in trial.steps
        if event.get("host_file_bytes") is not None
    ]
    return max(held, default=None)
