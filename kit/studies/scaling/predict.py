"""predict_run: the big run from a small one, or from none: time, device-hours, money, energy and CO2.

Trials on few devices give the times of a step, the requests of the loader and the size of the gradients; before any,
`kit.predict_speed` gives them, and of a card prices every count by itself from the same dry run. Else the model of
`kit.studies.scaling.model` does the rest, for one to many devices. The batch of a device stays the same, so the global
batch grows with the devices. Each time has its range, and each count names the limit that decides and whether the run
fits the device. Counts that were measured stand beside their prediction from fewer devices, with
ratio = measured / predicted.

Validation, checkpoints and logging count as often and as long as trials measured them, and not at all before any.
Start-up and queues are not counted. Nothing is run except, where memory is asked for and not known, the dry runs of
`kit.predict_memory`. Seconds, bytes and watt-hours are in base units.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from numbers import Integral, Real
from pathlib import Path
from typing import Any

from kit.arguments import check_count, checks_arguments
from kit.errors import ConfigError, KitError, PlanError, Problem
from kit.json_text import written
from kit.machine.machine import hardware
from kit.memory.prediction import predict_memory
from kit.memory.replay.cards import THIS_MACHINE
from kit.memory.replay.estimate import MemoryEstimate
from kit.records.ratios import MOST_EFFICIENCY, beyond_its_devices
from kit.registry import Drawable
from kit.speed.links import DEVICES_OF_NODE, Link, find_link, link_within
from kit.studies.scaling.bill import Power, RunPrices, carbon_reasons, power_of, prices_of
from kit.studies.scaling.measured import MeasuredScaling, measure, strategy_for
from kit.studies.scaling.model import MOST_DEVICES, Bound, Cap, Cluster, Point, Scaling, Step
from kit.tables import csv_text, html_list, html_table, text_table
from kit.trial.directory import contents_to_run
from kit.units import format_amount, format_bytes, format_count, format_seconds

DEVICES = (1, 2, 4, 8, 16, 32, 64)
_CORES_PER_GPU = 12
"""By default, as in a2-highgpu of Google Cloud for each A100."""
_HOUR = 3600.0


@checks_arguments
def predict_run(
    runs: Any,
    *,
    devices: Sequence[int] | int = DEVICES,
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
    """Predict time, cost and memory of a long run on several numbers of devices, from short trials.

    Args:
        runs: A trial, a run directory or a row of `kit.results()`; or, before any trial, what `kit.predict_speed`
            answers. Several, on different numbers of devices, correct the formulas by what more devices really cost.
        devices: The numbers of devices, or one.
        epochs: Epochs of the run. None takes the config's `training.max_steps` or `training.max_epochs`.
        samples_per_epoch: Samples of an epoch. None takes what the config or the loader says.
        prices: A price for a device-hour, the name of an example in `kit.studies.scaling.bill.PRICES`, or a mapping
            such as `{"per_device_hour": 3.9, "currency": "USD", "per_gigabyte": 0.12}`. None leaves money out.
        power: Replaces assumptions, such as `{"device_watts": 500, "pue": 1.1, "grid": "France"}`.
        strategy: ddp, fsdp or fsdp:R:S for more than one device. None takes that of the trials, or ddp.
        devices_per_node: None is 8 GPUs; on the CPU all ranks are on one machine.
        cores_per_node: None takes those of the trial's machine where that is this one, else 12 for each GPU.
        within: Name of the link between the devices of a node. None takes what is usual for the GPU.
        between: Name of the link between nodes. None is 100 Gbit/s, and 10 Gbit/s between CPUs.
        memory: Predict whether each number of devices fits.
        module: What `kit.fit` took as module, for memory. Not needed where the config names it.
        data: What `kit.fit` took as data, for memory.
        device: What memory is predicted for, as `kit.predict_memory` takes it. None takes that of the trials.

    Returns:
        A row for each number of devices: seconds of an epoch with a range, device-hours, money, energy, CO2, whether
        it fits, and what limits it.

    Raises:
        ConfigError: for trials that differ in more than devices, impossible numbers, and an epoch of unknown length.
        TrialError: for a trial without a step after its warm-up.
        PlanError: for an unknown link.

    Example:
        >>> run = kit.studies.predict_run(trial, devices=[1, 2], memory=False)
        >>> [row.devices for row in run.rows]
        [1, 2]
    """
    asked: Any = devices  # by a user, who may give anything
    several = isinstance(asked, Collection) and not isinstance(asked, str) and len(asked) > 0
    given = [*asked] if several else [asked]
    for count in given:
        check_count("devices", count, MOST_DEVICES)
    counts = sorted({*given})
    elsewhere = any(one is not None for one in (devices_per_node, cores_per_node, within, between, strategy))
    found = measure(runs, () if elsewhere else counts)
    if found.why_single_device:
        if counts[0] > 1:
            raise ConfigError([Problem("devices", f"{counts[0]} cannot train it: {found.why_single_device}")])
        counts = counts[:1]
    training = found.config.training
    steps = training.max_steps if epochs is None else 0
    epochs = training.max_epochs if epochs is None else epochs
    samples = found.samples_per_epoch if samples_per_epoch is None else samples_per_epoch
    lengths: dict[str, Any] = {"epochs": epochs, "samples_per_epoch": samples}  # by a user, who may give anything
    for name, value in lengths.items():
        if isinstance(value, bool) or not isinstance(value, Integral) or value < 1:
            why = ": the loader does not tell its length" if value is None else ""
            raise ConfigError([Problem(name, f"{value!r}; give a whole number from 1{why}")])
    assert samples is not None
    found = found if strategy is None else replace(found, traffic=replace(found.traffic, strategy=strategy))
    cluster, assumed = _cluster(found, devices_per_node, cores_per_node, within, between)
    known = bool(found.trials) or found.priced
    scaling = replace(_scaling(found, found.steps, cluster), as_measured=known and not elsewhere)
    watts = power_of("CPU" if cluster.on_cpu else found.device, measured_watts=found.watts, given=power)
    charged = prices_of(prices)
    estimates, notes = _memories(found, counts, device, module, data) if memory else ({}, [])
    rows = _rows(found, scaling, counts, (epochs, steps), samples, charged, watts, estimates)
    base = scaling.at(found.steps[0].devices)
    base_batches = _batches(found, base.devices, (epochs, steps), samples)
    beside = math.fsum(found.beside.values())
    carbon = carbon_reasons(found.trials, base_batches * (base.seconds_per_batch + beside))
    checks = [
        Checked(
            point=_scaling(found, found.steps[:place], cluster).at(step.devices), measured_seconds=step.seconds
        )
        for place, step in enumerate(found.steps)
        if place and found.trials
    ]  # fmt: skip
    return BigRun(
        name=found.config.name, rows=tuple(rows), checks=tuple(checks), caps=scaling.caps(max(counts)), epochs=epochs,
        steps=steps, samples_per_epoch=samples, batch_size=found.batch_size, prices=charged, power=watts,
        scaling=scaling, beside_seconds=beside,
        reasons=(
            *_how(scaling, found.priced), *found.reasons, *assumed, *_priced(charged), *watts.reasons, *carbon, *notes,
        ),
    )  # fmt: skip


def _rows(
    found: MeasuredScaling, scaling: Scaling, counts: Sequence[int], length: tuple[int, int], samples: int,
    prices: RunPrices, power: Power, estimates: Mapping[int, MemoryEstimate],
) -> list[BigRunRow]:  # fmt: skip
    beside = math.fsum(found.beside.values())
    seconds = {count: scaling.at(count).seconds_per_batch + beside for count in counts}
    first = found.batch_size / seconds[counts[0]]
    rows: list[BigRunRow] = []
    for count in counts:
        point, estimate = scaling.at(count), estimates.get(count)
        batches = math.ceil(samples / (count * found.batch_size))  # of an epoch, on each device
        whole, speed = _batches(found, count, length, samples), count * found.batch_size / seconds[count]
        total = whole * seconds[count]
        # A device on the CPU is as many cores as its rank uses.
        energy = power.watt_hours(count * (scaling.cluster.cores_used(count) if scaling.cluster.on_cpu else 1) * total)
        requests, stored = (count * whole * each for each in (found.loading.requests, found.loading.stored_bytes))
        rows.append(BigRunRow(
            devices=count, strategy=strategy_for(found.traffic.strategy, count),
            seconds_per_epoch=batches * seconds[count], total_seconds=total,
            low_seconds=whole * (point.low_seconds + beside), high_seconds=whole * (point.high_seconds + beside),
            samples_per_second=speed,
            efficiency=speed / count / first, money=prices.money(count * total / _HOUR, requests, stored),
            watt_hours=energy, grams=power.grams(energy[0]), seconds_by_limit=point.seconds_by_limit, memory=estimate,
            bound="memory" if estimate is not None and estimate.verdict == "does not fit" else point.bound,
        ))  # fmt: skip
    return rows


def _batches(found: MeasuredScaling, count: int, length: tuple[int, int], samples: int) -> int:
    """Batches of the whole run on each of `count` devices; `length` is (epochs, steps), with steps in their place."""
    epochs, steps = length
    if steps:
        return steps * found.config.levers.accumulate_grad_batches
    return epochs * math.ceil(samples / (count * found.batch_size))


def _cluster(
    found: MeasuredScaling, node: int | None, cores: float | None, within: str | Link | None, between: str | Link | None
) -> tuple[Cluster, list[str]]:
    """The machines, and the assumptions about them."""
    on_cpu = not found.on_gpu
    node = node or (MOST_DEVICES if on_cpu else DEVICES_OF_NODE)
    if cores is None:
        cores = found.cores or (hardware().cores if on_cpu else _CORES_PER_GPU * node)
    if any(isinstance(one, bool) or not isinstance(one, Real) for one in (node, cores)) or node < 1 or not cores > 0:
        raise ConfigError([Problem("devices_per_node", f"{node!r} devices on {cores!r} cores; give numbers from 1")])
    usual = found.link or link_within("CPU" if on_cpu else found.device)
    inner = usual if within is None else find_link(within)
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


def _memories(
    found: MeasuredScaling, counts: Sequence[int], device: str | int | None, module: Any, data: Any
) -> tuple[dict[int, MemoryEstimate], list[str]]:
    """Peak memory by count, and why some are missing."""
    given = found.trials[0].environment.get("given", {}) if found.trials else dict.fromkeys(("module", "data"), "own")
    missing = [name for name, part in (("module", module), ("data", data)) if part is None]
    unknown = [name for name in missing if given.get(name, "default") != "default"]
    if unknown:
        parts, whose = " and ".join(f"{name}=" for name in unknown), "trial" if found.trials else "speed"
        return {}, [f"memory was not predicted: the {whose} was of its own {' and '.join(unknown)}; pass {parts}"]
    if module is None or data is None:  # import paths of the trial's config would be run
        try:
            contents_to_run(found.trials[0].paths)
        except KitError as error:
            return {}, [f"memory was not predicted: {error}"]
    answers: dict[int, MemoryEstimate] = {}
    elsewhere = found.on_gpu and not found.cores
    target = device if device is not None else found.device.removeprefix("NVIDIA ") if elsewhere else THIS_MACHINE
    for count in counts:
        strategy = strategy_for(found.traffic.strategy, count)
        config = found.config.replace({"hardware.devices": count, "hardware.strategy": strategy})
        try:
            answers[count] = predict_memory(config, module, data, device=target, world_size=count)
        except KitError as error:
            return answers, [f"memory of {count} devices was not predicted: {error}"]
    return answers, []


def _how(scaling: Scaling, priced: bool) -> list[str]:
    base = scaling.base
    beyond = [
        f"{step.devices} devices: {beyond_its_devices(speed)}"
        for step in scaling.steps[1:]
        if (speed := base.seconds / step.seconds) > MOST_EFFICIENCY and not priced
    ]
    parts = (
        f"from {base.devices} device{'s' * (base.devices > 1)}: {format_seconds(base.seconds)} a batch, "
        f"{format_seconds(base.train_seconds)} of them training, {format_seconds(base.wait_seconds)} waiting for data"
    )
    exchanged = f"{format_bytes(scaling.traffic.gradient_bytes)} of gradients are exchanged every step"
    if priced:
        return [parts, exchanged, "each number of devices is priced by itself, as kit.predict_speed does"]
    if not scaling.fitted:
        return [parts, exchanged, "one count was measured: how devices slow each other is by formula"]
    counts = ", ".join(str(step.devices) for step in scaling.steps)
    fit = (
        f"fitted to {counts} devices: each doubling in a node slows compute by {scaling.contention:.1%}, "
        f"{scaling.exchange_words}; {scaling.unexplained_fraction:.1%} are left unexplained"
    )
    return [*beyond, parts, exchanged, fit]


def _priced(prices: RunPrices) -> list[str]:
    if prices.per_device_hour is None:
        return ["no price of a device-hour was given, so money is left out or counts the store only"]
    source = f" ({prices.source}: check it)" if prices.source else ""
    return [f"{prices.text(prices.per_device_hour)} a device-hour{source}"]


_COLUMNS = (
    "devices", "strategy", "an epoch", "all epochs", "range", "device-hours", "money", "energy", "CO2", "efficiency",
    "memory", "limited by",
)  # fmt: skip
_CHECK_TITLE = "measured, beside the prediction from fewer devices"
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
    """The limit that decides; memory where it does not fit."""
    seconds_by_limit: tuple[tuple[Bound, float], ...]
    """Of a batch on every device."""
    memory: MemoryEstimate | None
    """Of each device; None where it was not predicted."""

    @property
    def device_hours(self) -> float:
        return self.devices * self.total_seconds / _HOUR

    @property
    def fits(self) -> bool | None:
        """Whether the device has the memory; None where that is not known."""
        return None if self.memory is None or self.memory.verdict in ("unknown", "fits if") else self.memory.fits


@dataclass(frozen=True, slots=True, kw_only=True)
class Checked:
    """A count that was measured, and its prediction from trials on fewer devices."""

    point: Point
    measured_seconds: float
    """Of a batch on every device."""

    @property
    def ratio(self) -> float:
        """measured / predicted."""
        return self.measured_seconds / self.point.seconds_per_batch


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class BigRun(Drawable):
    """Rows by number of devices; print it, show it, or draw it with `figure()`."""

    name: str
    rows: tuple[BigRunRow, ...]
    checks: tuple[Checked, ...]
    caps: tuple[Cap, ...]
    """The limits that decide, each with the number of devices from which it does."""
    epochs: int
    steps: int
    """Optimizer steps, in place of the epochs; 0 where these count."""
    samples_per_epoch: int
    batch_size: float
    prices: RunPrices
    power: Power
    reasons: tuple[str, ...]
    scaling: Scaling = field(compare=False)
    beside_seconds: float = 0.0
    """Of validation, checkpoints and logging, that each batch comes with on every device."""

    def row(self, devices: int) -> BigRunRow:
        """The row of that many devices.

        Raises:
            PlanError: when it was not predicted.
        """
        found = next((row for row in self.rows if row.devices == devices), None)
        if found is None:
            raise PlanError(f"{devices} devices were not predicted; there are {[row.devices for row in self.rows]}")
        return found

    @property
    def sentence(self) -> str:
        first, *later = self.caps
        text = f"{first.bound} limits it from {first.devices} device" + "s" * (first.devices > 1)
        return text + "".join(f", {cap.bound} from {cap.devices}" for cap in later)

    def to_csv(self, path: str | Path | None = None) -> str:
        """One line per number of devices, in base units; written to `path` when given."""
        names = (
            "devices", "strategy", "seconds_per_epoch", "total_seconds", "low_seconds", "high_seconds",
            "samples_per_second", "efficiency", "device_hours", "money", "grams", "bound",
        )  # fmt: skip
        cells = ([*(getattr(row, name) for name in names), row.watt_hours[0], row.fits] for row in self.rows)
        return written(csv_text([*names, "watt_hours", "fits"], cells), path)

    @property
    def length(self) -> str:
        """What is run, and how long that is, in words."""
        epochs = f"{format_count(self.samples_per_epoch)} samples × {self.epochs} epoch" + "s" * (self.epochs > 1)
        size = f"{self.steps:,} steps" if self.steps else epochs
        return f"{self.name}: {size}, {format_count(self.batch_size)} a batch on each device"

    @property
    def _cells(self) -> list[list[str]]:
        return [
            [
                str(row.devices), row.strategy, format_seconds(row.seconds_per_epoch),
                format_seconds(row.total_seconds),
                f"{format_seconds(row.low_seconds)} to {format_seconds(row.high_seconds)}", f"{row.device_hours:.3g}",
                self.prices.text(row.money), format_amount(row.watt_hours[0], "Wh"), format_amount(row.grams, "g"),
                f"{row.efficiency:.2f}", "–" if row.memory is None
                else f"{row.memory.verdict}, {format_bytes(row.memory.device_reserved_bytes)}", row.bound,
            ]
            for row in self.rows
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
        parts = [f"{self.length}; {self.sentence}", text_table(_COLUMNS, self._cells)]
        parts += [_CHECK_TITLE, text_table(_CHECK_COLUMNS, self._check_cells)] if self.checks else []
        return "\n".join([*parts, *(f"- {text}" for text in self.reasons)])

    def _repr_html_(self) -> str:
        table = html_table(_COLUMNS, self._cells, caption=f"{self.length}; {self.sentence}", dense=True)
        cells = self._check_cells
        checks = html_table(_CHECK_COLUMNS, cells, caption=_CHECK_TITLE, dense=True) if cells else ""
        return f'<div style="overflow-x: auto">{table}{checks}</div>{html_list(self.reasons)}'
