"""predict_run: the big run from the small one: time, device-hours, money, energy and CO2 for one to many devices.

From trials on few devices: what a step was spent on, what the loader asked of the store, and the size of the gradients,
through the model of `kit.studies.scaling.model`. A device's batch stays what it is, so the global batch grows with the
devices. Beside each time stands its range, beside each count what holds it up, and whether the run fits the device.
Counts that were measured stand beside what trials on fewer devices foretell of them, with ratio = measured / predicted.
Validation, checkpoints, start-up and waiting in a queue are not counted. Nothing is run but, where memory is asked for
and not known, the dry runs of `kit.predict_memory`.

A big run as it is foretold: rows by number of devices, what was measured beside them, and how that is shown.

Plain answers: nothing is measured or predicted here (see `kit.studies.scaling.predict`). Seconds, bytes and watt-hours
are in base units; times stand with their range, counts that were measured with ratio = measured / predicted.
"""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from kit.config import Config
from kit.errors import ConfigError, KitError, PlanError, Problem
from kit.machine.machine import hardware
from kit.memory.prediction import predict_memory
from kit.memory.replay.cards import THIS_MACHINE
from kit.memory.replay.estimate import MemoryEstimate
from kit.studies.scaling.bill import Power, RunPrices, carbon_reasons, power_of, prices_of
from kit.studies.scaling.measured import MeasuredScaling, measure
from kit.studies.scaling.model import (
    MOST_DEVICES,
    Bound,
    Cap,
    Cluster,
    Link,
    Point,
    Scaling,
    Step,
    find_link,
    link_within,
)
from kit.tables import html_list, html_table, text_table
from kit.trial.directory import contents_to_run
from kit.units import format_bytes, format_count, format_seconds

DEVICES = (1, 2, 4, 8, 16, 32, 64)
_NODE = 8
"""Devices of a node, where it is not said: as most machines with GPUs have."""
_CORES_PER_GPU = 12
"""Where it is not said: as a2-highgpu of Google Cloud has for each A100."""
_HOUR = 3600.0


def predict_run(
    runs: Any,
    *,
    devices: Sequence[int] = DEVICES,
    epochs: int | None = None,
    samples_per_epoch: int | None = None,
    prices: float | str | Mapping[str, Any] | RunPrices | None = None,
    power: Mapping[str, Any] | None = None,
    strategy: str | None = None,
    devices_per_node: int | None = None,
    cores_per_node: float | None = None,
    within: str | Link | None = None,
    between: str | Link | None = None,
    memory: bool = True,
    module: Any = None,
    data: Any = None,
    device: str | int | None = None,
) -> BigRun:
    """What a run like these trials would take on other numbers of devices of the same kind.

    Args:
        runs: A trial, run directory or row of `kit.results`; several, on different numbers of devices, correct the
            model by what more devices really cost.
        devices: The numbers to predict for. epochs: By default the config's `training.max_epochs`. samples_per_epoch:
        By default what the config or the loader says. prices: A number per device-hour, the name of an example in
        `kit.studies.scaling.bill.PRICES`, or a mapping such as
            `{"per_device_hour": 3.9, "currency": "USD", "per_gigabyte": 0.12}`; without it money is left out.
        power: Replaces assumptions, such as `{"device_watts": 500, "pue": 1.1, "grid": "France"}`.
        strategy: ddp, fsdp or fsdp:R:S for more than one device; by default that of the trials, or ddp.
        devices_per_node: 8 GPUs by default; on the CPU all ranks are on one machine.
        cores_per_node: By default those of this machine where the trial ran on it, else 12 a GPU.
        within: What joins the devices of a node, by the name of a link; by default what is usual for the GPU.
        between: What joins nodes; 100 Gbit/s by default, 10 between CPUs.
        memory: Predict whether each count fits.
        module: What `kit.fit` was given, for memory; not needed where the config names it.
        data: The same.
        device: What memory is predicted for, as `kit.predict_memory` takes it; by default that of the trials.

    Raises:
        ConfigError: for trials that differ in more than devices, impossible counts, and an epoch of unknown length.
        TrialError: for a trial without a step after its warm-up.
        PlanError: for a link that is not known.
    """
    counts = _counts(devices)
    found = measure(runs)
    epochs = found.config.training.max_epochs if epochs is None else epochs
    samples = found.samples_per_epoch if samples_per_epoch is None else samples_per_epoch
    for name, value in {"epochs": epochs, "samples_per_epoch": samples}.items():
        if value is None or value < 1:
            raise ConfigError([Problem(name, f"{value}; give a number from 1: the loader does not tell its length")])
    assert samples is not None
    found = found if strategy is None else replace(found, traffic=replace(found.traffic, strategy=strategy))
    cluster, said = _cluster(found, devices_per_node, cores_per_node, within, between)
    scaling = _scaling(found, found.steps, cluster)
    sizes = _Sizes(epochs=epochs, samples=samples, batch=found.batch_size)
    kind = "CPU" if cluster.on_cpu else found.device
    drawn = power_of(kind, measured_watts=found.watts, given=power)
    bill = _Bill(prices_of(prices), drawn, found, cluster)
    remembered, notes = _memories(found, counts, device, module, data) if memory else ({}, [])
    first = scaling.at(counts[0])
    rows = [_row(scaling.at(count), first, sizes, bill, found, remembered.get(count)) for count in counts]
    base = scaling.at(found.steps[0].devices)
    carbon = carbon_reasons(found.trials, epochs * sizes.batches(base.devices) * base.seconds_per_batch)
    return BigRun(
        name=found.config.name, rows=tuple(rows), checks=tuple(_checks(found, cluster)),
        caps=scaling.caps(max(counts)), epochs=epochs, samples_per_epoch=samples, batch_size=found.batch_size,
        prices=bill.prices, power=drawn, scaling=scaling,
        reasons=(*_how(scaling), *found.reasons, *said, *_priced(bill.prices), *drawn.reasons, *carbon, *notes),
    )  # fmt: skip


def _counts(devices: Sequence[int]) -> list[int]:
    counts = sorted(set(devices))
    if not counts or counts[0] < 1 or counts[-1] > MOST_DEVICES:
        raise ConfigError([Problem("devices", f"{list(devices)}; give numbers from 1 to {MOST_DEVICES}")])
    return counts


def _cluster(
    found: MeasuredScaling, node: int | None, cores: float | None, within: str | Link | None, between: str | Link | None
) -> tuple[Cluster, list[str]]:
    """The machines, and what was assumed of them."""
    on_cpu = not found.evidence.on_gpu
    node = node or (MOST_DEVICES if on_cpu else _NODE)
    if cores is None:
        cores = found.evidence.cores or (hardware().cores if on_cpu else _CORES_PER_GPU * node)
    if node < 1 or not cores > 0:
        raise ConfigError([Problem("devices_per_node", f"{node} devices on {cores} cores; give numbers from 1")])
    inner = find_link(within) if within is not None else link_within("CPU" if on_cpu else found.device)
    outer = find_link(between if between is not None else "network-10G" if on_cpu else "network-100G")
    cluster = Cluster(
        on_cpu=on_cpu, devices_per_node=node, cores_per_node=cores, within=inner, between=outer,
        threads_per_rank=found.config.hardware.threads_per_rank,
    )  # fmt: skip
    if on_cpu and node == MOST_DEVICES:
        return cluster, [f"all ranks share the {cores:g} cores of one machine, joined by {inner.name}"]
    return cluster, [f"{node} devices and {cores:g} cores a node, joined by {inner.name}; nodes by {outer.name}"]


def _scaling(found: MeasuredScaling, steps: Sequence[Step], cluster: Cluster) -> Scaling:
    return Scaling(
        steps=tuple(steps), traffic=found.traffic, cluster=cluster, loading=found.loading,
        steps_per_exchange=found.config.levers.accumulate_grad_batches,
    )  # fmt: skip


def _checks(found: MeasuredScaling, cluster: Cluster) -> list[Checked]:
    """Each measured count but the first, from those below it."""
    return [
        Checked(
            point=_scaling(found, found.steps[:place], cluster).at(step.devices), measured_seconds=step.seconds
        )
        for place, step in enumerate(found.steps)
        if place
    ]  # fmt: skip


# -- rows


@dataclass(frozen=True, slots=True, kw_only=True)
class _Sizes:
    epochs: int
    samples: int
    batch: float

    def batches(self, devices: int) -> int:
        """Of an epoch, on each device."""
        return math.ceil(self.samples / (devices * self.batch))


@dataclass(frozen=True, slots=True)
class _Bill:
    prices: RunPrices
    power: Power
    found: MeasuredScaling
    cluster: Cluster

    def watt_hours(self, devices: int, seconds: float) -> tuple[float, float, float]:
        """(taken, low, high); on the CPU a device is as many cores as its rank uses."""
        each = self.cluster.cores_used(devices) if self.cluster.on_cpu else 1.0
        return self.power.watt_hours(devices * each * seconds)

    def money(self, device_seconds: float, batches: float) -> float | None:
        """`batches` of all devices."""
        loading = self.found.loading
        return self.prices.money(device_seconds / _HOUR, batches * loading.requests, batches * loading.stored_bytes)


def _row(
    point: Point, first: Point, sizes: _Sizes, bill: _Bill, found: MeasuredScaling, memory: MemoryEstimate | None
) -> BigRunRow:
    devices = point.devices
    batches = sizes.batches(devices)
    whole = batches * sizes.epochs
    total = whole * point.seconds_per_batch
    energy = bill.watt_hours(devices, total)
    speed = point.samples_per_second(sizes.batch)
    base = first.samples_per_second(sizes.batch) / first.devices
    short = memory is not None and memory.verdict == "does not fit"
    return BigRunRow(
        devices=devices, strategy=strategy_for(found.traffic.strategy, devices),
        seconds_per_epoch=batches * point.seconds_per_batch, total_seconds=total,
        low_seconds=whole * point.low_seconds, high_seconds=whole * point.high_seconds, samples_per_second=speed,
        efficiency=speed / devices / base, money=bill.money(devices * total, devices * whole), watt_hours=energy,
        grams=bill.power.grams(energy[0]), bound="memory" if short else point.bound,
        seconds_by_limit=point.seconds_by_limit, memory=memory,
    )  # fmt: skip


def strategy_for(strategy: str, devices: int) -> str:
    """The same idea on another number of devices: none for one; shards stay as large where they divide the number."""
    if devices == 1:
        return "none"
    name, *sizes = strategy.split(":")
    if name == "fsdp" and sizes:
        size = int(sizes[1])
        return f"fsdp:{devices // size}:{size}" if devices % size == 0 else "fsdp"
    return "ddp" if name == "none" else name


def config_for(config: Config, strategy: str, devices: int) -> Config:
    """The config on that many devices."""
    return config.replace({"hardware.devices": devices, "hardware.strategy": strategy_for(strategy, devices)})


def _memories(
    found: MeasuredScaling, counts: Sequence[int], device: str | int | None, module: Any, data: Any
) -> tuple[dict[int, MemoryEstimate], list[str]]:
    """Peak memory by count, and what could not be told."""
    given = found.trials[0].environment.get("given", {})
    unknown = [name for name, part in (("module", module), ("data", data)) if part is None and not _named(given, name)]
    if unknown:
        parts = " and ".join(f"{name}=" for name in unknown)
        return {}, [f"memory was not predicted: the trial was given its own {' and '.join(unknown)}; pass {parts}"]
    if module is None or data is None:  # import paths of the trial's config would be run
        try:
            contents_to_run(found.trials[0].paths)
        except KitError as error:
            return {}, [f"memory was not predicted: {error}"]
    answers: dict[int, MemoryEstimate] = {}
    for count in counts:
        config = config_for(found.config, found.traffic.strategy, count)
        target = device if device is not None else _same_device(found)
        try:
            answers[count] = predict_memory(module, data, config, device=target, world_size=count)
        except KitError as error:
            return answers, [f"memory of {count} devices was not predicted: {error}"]
    return answers, []


def _named(given: Mapping[str, str], name: str) -> bool:
    return given.get(name, "default") == "default"


def _same_device(found: MeasuredScaling) -> str:
    return found.device.removeprefix("NVIDIA ") if found.evidence.on_gpu and not found.evidence.cores else THIS_MACHINE


# -- words


def _how(scaling: Scaling) -> list[str]:
    base = scaling.base
    parts = (
        f"from {base.devices} device{'s' * (base.devices > 1)}: {format_seconds(base.seconds)} a batch, "
        f"{format_seconds(base.train_seconds)} of them training, {format_seconds(base.wait_seconds)} waiting for data"
    )
    exchanged = f"{format_bytes(scaling.traffic.gradient_bytes)} of gradients are exchanged every step"
    if not scaling.fitted:
        return [parts, exchanged, "one count was measured: what several devices cost each other is by formula"]
    counts = ", ".join(str(step.devices) for step in scaling.steps)
    fit = (
        f"fitted to {counts} devices: each doubling in a node slows compute by {scaling.contention:.1%}, exchange "
        f"takes {scaling.exchange_factor:.2f} of the formulas; {scaling.unexplained_fraction:.1%} are left unexplained"
    )
    return [parts, exchanged, fit]


def _priced(prices: RunPrices) -> list[str]:
    if prices.per_device_hour is None:
        return ["no price of a device-hour was given, so money is left out or counts the store only"]
    source = f" ({prices.source}: check it)" if prices.source else ""
    return [f"{prices.text(prices.per_device_hour)} a device-hour{source}"]


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
