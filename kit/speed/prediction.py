"""predict_speed: how long a training step takes on a device, which need not be here, from the dry run of its memory.

The operators of the recorded step are priced (`kit.speed.pricing`): for this machine by what they cost here, measured
once and remembered (`kit.speed.measure`), for a card by its data sheet (`kit.speed.card_costs`). Devices exchange
gradients by strategy and link. One dry run of a single device serves any strategy and number of them, as the operators
that sharing adds are known (`kit.speed.operators`); a step that asks how many there are is recorded for each. Kit's own
loaders are priced by their store; of others nothing is known before a trial.

Not modelled, and said so in `reasons`: compiled code and CUDA graphs (the eager step is priced), kernels of one's own
(by bytes alone), experts chosen by data, loops that depend on data. Each widens the range. A selection is priced as
whole; where a second dry run told which operators are smaller without it, their time alone is left out of the low end.
"""

from __future__ import annotations

import contextlib
import dataclasses
import re
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from kit.arguments import check_count, config_first
from kit.chunks.cost import LayoutCost
from kit.config import Config
from kit.errors import KitError
from kit.json_text import write_json
from kit.machine.processes import BUSY_CORES, slowed
from kit.memory.prediction import estimate_here
from kit.memory.query import MOST_RANKS, MemoryQuery, as_ddp, make_query
from kit.memory.recordings import RecordingRequest, UnansweredError, cached_recording, recordings_of
from kit.memory.replay.cards import CARDS, THIS_MACHINE, DeviceTarget, emulated, target_of
from kit.memory.replay.estimate import MemoryEstimate, asked_words, short_epoch
from kit.memory.replay.replay import DIFFERING, GUESSED_CONDITION, NOTHING_TRAINED, ON_AVERAGE, UPPER_BOUND, Recording
from kit.registry import Drawable, load
from kit.speed.card_costs import CardCosts, card_of
from kit.speed.cost_table import CostTable
from kit.speed.links import DEVICES_OF_NODE, Link, Traffic, find_link, link_within
from kit.speed.measure import table_here, table_known
from kit.speed.operators import StepOperators, shared_step, step_of, why_not_shared
from kit.speed.pricing import LATEST, Bound, Costs, StepTime, price
from kit.tables import html_list, text_table
from kit.trial.directory import RunPaths
from kit.trial.payload import batch_rule, warn_of_unused
from kit.units import format_bytes, format_count, format_seconds

_FULL_BYTES, _HALF_BYTES = 4, 2
_UNMODELLED_DOUBT = 1.5


@config_first
def predict_speed(
    config: Any = None,
    module: Any = None,
    data: Any = None,
    *,
    device: str | DeviceTarget = THIS_MACHINE,
    devices: int | None = None,
    link: str | Link | None = None,
    between: str | Link | None = None,
    measure_seconds: float = 10.0,
    timeout_seconds: float | None = None,
) -> SpeedEstimate:
    """Predict the seconds of a training step, samples per second, and what binds them, before anything is trained.

    For this machine, operators are measured in a process of its own: about a minute the first time, and some seconds
    for what a new module brings. That is a step with the cores to itself and at their fastest; a trial shares them with
    the notebook's kernel and browser, and its row tells how much all others used (`other_cores`). Neighbours on a
    shared host and lowered clocks slow a CPU too: the range reaches to its slow moments, and the row tells how many
    times as long a step takes at the pace of the trial (`slowdown`). For a card of the table its data sheet is taken,
    and nothing is measured.

    Args:
        config: What would run; the default config when left out.
        module: What would be trained, as `kit.fit` takes it.
        data: What it would be trained on, as `kit.fit` takes it.
        device: A GPU model such as "A100-40GB", or "this machine".
        devices: How many of them, instead of the config's. Several without a strategy are taken as ddp.
        link: What joins them, by name (`NVLink-3`, `PCIe-4`, ...); by default what is usual for the card, and what
            was measured between the ranks of this machine.
        between: What joins nodes of eight, by name (`network-3200G`); by default 100 Gbit/s.
        measure_seconds: To spend on calls of this step that were never measured here; 0 spends nothing.
        timeout_seconds: Limit of the dry run, as for `kit.predict_memory`.

    Returns:
        The estimate: seconds with a range, samples per second of all devices, MFU, what binds, and `.figure()`.

    Raises:
        ConfigError: for what cannot run as configured.
        HardwareError: for 16-mixed on a CPU. What a card only emulates is answered, and said.
        PlanError: for an unknown device or link, and where the step could not be recorded.
        TrialError: when the module cannot be made, with the user's traceback.

    Example:
        >>> speed = kit.predict_speed(config, MyModule, MyData, device="A100-40GB", devices=8)
        >>> speed.low_seconds <= speed.step_seconds <= speed.high_seconds
        True
    """
    if devices is not None:
        check_count("devices", devices, MOST_RANKS)
    config, shared = as_ddp(config, devices)
    if devices is not None:
        config = config.replace({"hardware.devices": devices})
    reasons = [*shared]
    query, target = make_query(module, data, config, device, devices)
    batch_rule(query.data, query.config).warn()
    warn_of_unused(query.module, query.data, query.config)
    recording, strategy, why = _recorded(query, target, timeout_seconds)
    reasons += why
    costs: Costs
    if target.name == THIS_MACHINE:
        if target.device_kind == "cpu" and not query.config.hardware.keep_freed_memory:
            reasons.append("hardware.keep_freed_memory is off: page faults of memory given back are not counted")
        step = shared_step(recording, strategy, query.world_size) if strategy else step_of(recording)
        costs = table_here(query.config, step, ranks=query.world_size, seconds=measure_seconds).table
    else:
        costs = CardCosts(card_of(target))
    loading = loader_seconds(query)
    if loading is not None and target.name != THIS_MACHINE and _lies_in_folder(query.config.data.url):
        reasons.append("batches are read from a folder, as the store lies here; from a bucket they take longer")
    found = speed_of(
        recording, target, devices=query.world_size, costs=costs, link=link, between=between, loader_seconds=loading,
        strategy=strategy,
    )  # fmt: skip
    lacks_bytes = 0
    if not strategy.startswith("fsdp"):  # of shards the step of one device does not tell
        lacks_bytes = estimate_here(query, recording, target).lacks_bytes

    def again(count: int, shared_by: str) -> SpeedEstimate | None:
        """On another number of cards: of one device there is a step, of several what is added to it is known."""
        if target.name == THIS_MACHINE or (query.world_size > 1 and not strategy):
            return None
        if count > 1 and why_not_shared(recording, shared_by):
            return None
        asking = query.config.replace({"hardware.devices": count, "hardware.strategy": shared_by})
        return replace(
            speed_of(
                recording, target, devices=count, costs=costs, link=link, between=between,
                loader_seconds=loader_seconds(query.with_config(asking, target, count)),
                strategy=shared_by if count > 1 else "",
            ),
            config=asking,
        )  # fmt: skip

    return replace(
        found, config=query.config, reasons=(*reasons, *found.reasons), lacks_bytes=lacks_bytes, on_devices=again
    )


def _recorded(
    query: MemoryQuery, target: DeviceTarget, timeout_seconds: float | None
) -> tuple[Recording, str, list[str]]:
    """A recording, the strategy to add to it where it is of one device, and what is to be said of both."""
    strategy = query.config.hardware.strategy
    if strategy == "none":
        return recordings_of(RecordingRequest(query), timeout_seconds)[0], "", []
    if (known := cached_recording(query)) is not None:
        return known, "", []
    one = query.config.replace({"hardware.strategy": "none", "hardware.devices": 1})
    try:
        (alone,) = recordings_of(RecordingRequest(query.with_config(one, target, 1)), timeout_seconds)
    except UnansweredError:
        raise
    except KitError:  # which the strategy may not raise, or will again
        why = "it does not run on one device"
    else:
        why = why_not_shared(alone, strategy)
        if not why:
            return alone, strategy, [f"told from the step of one device, with what {strategy} adds to it"]
    (own,) = recordings_of(RecordingRequest(query), timeout_seconds)
    return own, "", [f"dry-run under {strategy} itself, not told from the step of one device: {why}"]


def speed_of(
    recording: Recording, target: DeviceTarget, *, devices: int = 1, costs: Costs | None = None,
    link: str | Link | None = None, between: str | Link | None = None, loader_seconds: float | None = None,
    strategy: str = "",
) -> SpeedEstimate:  # fmt: skip
    """The estimate of a recording, in milliseconds and without a process.

    Args:
        recording: Of the configuration, at the batch size wanted.
        target: The device.
        devices: How many.
        costs: What calls cost there; by default those of the card's data sheet.
        link: What joins the devices; by default what is usual.
        between: What joins nodes of eight; by default 100 Gbit/s.
        loader_seconds: That the loader needs for a batch; None where that is not known.
        strategy: Under which several devices share the step of one that was recorded; by default as it was recorded.

    Raises:
        PlanError: where the step was not recorded, and for a device of which no speed is known.
    """
    step = shared_step(recording, strategy, devices) if strategy else step_of(recording)
    priced: Costs = CardCosts(card_of(target)) if costs is None else costs
    if isinstance(priced, CardCosts):
        priced = replace(priced, tf32=bool(recording.facts.get("tf32")))
    usual = link_within("cpu" if target.device_kind == "cpu" else target.name)
    table = priced if isinstance(priced, CostTable) else None
    timed = table.link if table else None
    within = find_link(link) if link is not None else timed or usual
    nodes = find_link(between or "network-100G") if target.device_kind == "cuda" else None
    time = price(
        step, priced, traffic=_traffic(step) if devices > 1 else None, devices=devices, within=within, between=nodes,
        loader_seconds=None if loader_seconds is None else loader_seconds * step.accumulate,
    )  # fmt: skip
    reasons, factor = _edges(recording, step)
    if share := _selected_seconds(step, time) / (time.seconds or 1.0):
        time = replace(time, low_seconds=time.low_seconds * (1 - share))
        reasons.append(
            f"{share:.1%} of the step depends on how much is selected: all in it, but at the range's low end"
        )
    told, share = _smaller_batches(recording)
    reasons += told
    if devices > 1 and recording.facts.get("undivided"):
        reasons.append(recording.facts["undivided"])
    if why_single_device := recording.facts.get("refused_strategies", {}).get("ddp", ""):
        reasons.append(f"warning: several devices cannot train it: {why_single_device}")
    if devices > 1 and recording.facts.get("sparse_parameters"):
        reasons.append("gradients of sparse embeddings are exchanged as they are, and their few rows are not counted")
    least = min(time.low_seconds, time.host_seconds)  # which has as much to do for a small batch
    time = replace(time, low_seconds=max(time.low_seconds * share, least if share < 1 else 0.0))
    if factor > 1:
        time = replace(time, low_seconds=time.low_seconds / factor, high_seconds=time.high_seconds * factor)
    return SpeedEstimate(
        device=target.name if devices == 1 else f"{devices} × {target.name}", devices=devices,
        batch_size=step.batch_size, accumulate=step.accumulate, time=time, mfu=_mfu(step, time, priced),
        costs=priced.name, on_gpu=target.device_kind == "cuda", link=within,
        epoch_samples=recording.facts.get("epoch_samples"), mean_batch_size=recording.facts.get("mean_samples"),
        why_single_device=why_single_device,
        busy_cores=table.busy_cores if table else 0.0, pace_seconds=table.pace_seconds if table else 0.0,
        slowness=table.slowness if table else 1.0,
        computing_fraction=_computing_fraction(time, table) if table else 1.0,
        reasons=(
            *emulated(str(recording.facts.get("precision", "")), target),
            *_sources(time, priced, devices, within, nodes), *reasons,
        ),
    )  # fmt: skip


def speed_beside(memory: MemoryEstimate, config: Config, loader_seconds: float | None = None) -> SpeedEstimate | None:
    """The speed of what memory was estimated for, from the same recording: at once, with nothing measured.

    `loader_seconds` is as `speed_of` takes it.

    None where the recording does not tell it: activations are unknown, only the size of a device is given, or this
    machine's operators were never measured.
    """
    recording = memory.recording
    if recording is None:
        return None
    devices = int(recording.facts.get("world_size") or 1)
    try:
        if memory.device != THIS_MACHINE:
            target = target_of(memory.device)
            found = speed_of(recording, target, devices=devices, loader_seconds=loader_seconds)
            return replace(found, config=config)
        table = table_known(config, devices)
        target = dataclasses.replace(
            target_of(CARDS[0].name), name=THIS_MACHINE, device_kind="cpu" if memory.device_kind == "cpu" else "cuda"
        )
        if table is None:
            return None
        found = speed_of(recording, target, devices=devices, costs=table, loader_seconds=loader_seconds)
        return replace(found, config=config)
    except (KitError, ValueError):
        return None


def leave_speed(memory: MemoryEstimate, config: Config, paths: RunPaths) -> None:
    """Write what the operators say about the speed of a trial into its folder, where they were measured here before."""
    found = speed_beside(memory, config)
    if found is not None:
        speeds = found.samples_per_second, found.low_samples_per_second, found.high_samples_per_second
        with contextlib.suppress(OSError):
            told = dict(zip(SPEED_FIELDS, speeds, strict=True))
            pace = {"pace_seconds": found.pace_seconds, "computing_fraction": found.computing_fraction}
            write_json(paths.predicted_speed, {**told, **pace, "busy_cores": found.busy_cores})


SPEED_FIELDS = ("samples_per_second", "low", "high")
"""Of `predicted_speed.json` in a run directory."""


def _selected_seconds(step: StepOperators, time: StepTime) -> float:
    """Of the device, in operators whose sizes depend on how much is selected, where the dry run told them."""
    return float(time.operator_seconds[np.isin(step.place, step.facts.get("selected") or ())].sum())


def _traffic(step: StepOperators) -> Traffic:
    facts = step.facts
    element = _HALF_BYTES if str(facts.get("precision")) == "bf16-true" else _FULL_BYTES
    strategy = str(facts.get("strategy") or "none")
    return Traffic(
        parameter_bytes=float(facts.get("parameters", 0)) * element,
        gradient_bytes=float(facts.get("trainable_parameters", 0) - facts.get("sparse_parameters", 0)) * element,
        strategy="ddp" if strategy == "none" else strategy,
    )  # fmt: skip


def _computing_fraction(time: StepTime, table: CostTable) -> float:
    """Of a step's seconds, those that are not spent on moving memory."""
    moving = np.array([table.moving_seconds(work) for work in time.step.call_work])[time.step.call] * time.step.repeats
    return 1.0 - float(np.minimum(moving, time.operator_seconds).sum()) / (time.seconds or 1.0)


def _mfu(step: StepOperators, time: StepTime, costs: Costs) -> float | None:
    """Seconds of its products at the stated peak of the units that each uses, over those of the step; None without a
    peak. What checkpointing computes again is no work of the model."""
    if not isinstance(costs, CardCosts) or not time.seconds:
        return None
    each = [costs.peak_seconds(call, work) for call, work in zip(step.calls, step.call_work, strict=True)]
    seconds = np.array(each)[step.call] * step.repeats
    return float((seconds[step.recomputes == 0] if len(step.recomputes) else seconds).sum() / time.seconds)


def _sources(time: StepTime, costs: Costs, devices: int, within: Link, nodes: Link | None) -> list[str]:
    by_source = {name: seconds for name, seconds in time.sources.items() if seconds}
    whole = sum(by_source.values())
    shares = ", ".join(
        f"{_SOURCES[name]} {seconds / whole:.0%}" if len(by_source) > 1 else _SOURCES[name]
        for name, seconds in sorted(by_source.items(), key=lambda item: -item[1])
    )
    found = [f"costs are those of {costs.name}: {shares}"]
    if isinstance(costs, CostTable) and costs.busy_cores > BUSY_CORES:
        found.append(
            f"other programs or machines used {costs.busy_cores:.1f} cores while operators were measured: the costs "
            "may be too high, and serve this kernel alone; what trains beside them takes longer than on quiet cores"
        )
    if isinstance(costs, CostTable) and costs.slowness > _UNEVEN:
        found.append(
            f"the cores of this machine take {costs.slowness:.1f} times as long at times (other programs, neighbours "
            "on a shared host, a lowered clock): the step is at their fastest, and the range's end in such moments"
        )
    shards = _traffic(time.step).shards(devices)
    if devices > 1:
        late = within.late_seconds(time.work_seconds)
        last = f", {format_seconds(late)} of it for the last of them (the range: none to {LATEST:g} times that)"
        between = f", between nodes by {nodes.name}" if nodes is not None and devices > DEVICES_OF_NODE else ""
        found.append(
            f"{devices} devices wait {format_seconds(time.exchange_seconds)} a step for "
            f"{'parameters and ' if shards > 1 else ''}gradients, by {within.name}{between}{last if late else ''}"
        )
    if shards > 1:
        spent = format_seconds(time.by_phase.get("optimizer", 0.0))
        found.append(
            f"each device optimizes 1/{shards} of the parameters, in {spent} a step, which may save time over one"
        )
    if time.loader_seconds is not None and (waited := time.waits["loader"]) > 0:
        own = format_seconds(time.seconds - waited)
        found.append(
            f"the loader decides: a step's batches take it {format_seconds(time.loader_seconds)}, and all else "
            f"{own}; the step waits for the difference"
        )
    if time.loader_seconds is None:
        found.append("how fast the loader is, is not known before a trial: batches are taken as ready")
    return found


_SOURCES = {
    "measured": "the same call measured", "near": "scaled from calls nearly the same",
    "scaled": "scaled from calls far from it", "roofline": "by FLOPs and bytes alone",
    "datasheet": "by its peaks, and the share of them that kernels reach",
}  # fmt: skip


def _edges(recording: Recording, step: StepOperators) -> tuple[list[str], float]:
    """What is not modelled, and the factor by which the range is wider for it."""
    facts, found = recording.facts, []
    if any("torch.compile" in str(note) for note in facts.get("notes", ())):
        found.append("compiled code, with CUDA graphs or without, is priced as the eager step: an upper bound")
    custom = {call.operator.partition("::")[0] for call in step.calls} - _KNOWN
    if custom:
        found.append(f"kernels of {', '.join(sorted(custom))} are priced by the bytes they move alone")
    sizes_told = facts.get("selected") is not None
    routed = sorted({call.name for call in step.calls} & (_GROUPED if sizes_told else _GROUPED | _SELECTING))
    if routed:
        found.append(
            f"data decides how much each expert or selection gets ({', '.join(routed)}); it is priced as whole"
        )
    if any(call.name.startswith("_scaled_dot_product_flex") for call in step.calls):
        found.append("flex attention is priced as whole, whatever its mask leaves out")
    guessed = [guess for guess in facts.get("guesses", ()) if guess.startswith(GUESSED_CONDITION)]
    bounds = () if sizes_told else facts.get("bounds", ())
    if unknown := list(dict.fromkeys([*guessed, *facts.get("conditions", ()), *bounds])):
        more = f", and {len(unknown) - 1} more" if len(unknown) > 1 else ""
        first = unknown[0].removesuffix(UPPER_BOUND)  # of memory: another kernel may hold less and take longer
        found.append(f"the step depends on numbers that a dry run does not have; it is priced as if {first}{more}")
    return found, _UNMODELLED_DOUBT if found else 1.0


def _smaller_batches(recording: Recording) -> tuple[list[str], float]:
    """That the batch priced is larger than most, or trains nothing, and how large one is on average."""
    notes = [str(note) for note in recording.facts.get("notes", ())]
    told = [note for note in notes if note.startswith((*DIFFERING, NOTHING_TRAINED))]
    told += [short] if (short := short_epoch(recording)) else []
    shares = [float(found[1]) for note in told if (found := re.search(_AVERAGE, note))]
    share = min(shares, default=1.0)
    if share < 1:
        told.append(f"the step is priced at that size; the mean step takes about {share:.2f} of it, within the range")
    return told, share


_AVERAGE = ON_AVERAGE.replace("{:.2f}", "([0-9.]+)")
_GROUPED = {"_grouped_mm", "_scaled_grouped_mm"}
"""Operators whose numbers decide how large their parts are."""
_SELECTING = {"nonzero", "masked_select", "_unique2"}
"""Operators whose numbers decide how large their results are."""
_KNOWN = {"aten", "prim", "prims", "c10d", "_c10d_functional", "fsdp", "profiler", "inductor"}


def loader_seconds(query: MemoryQuery) -> float | None:
    """Seconds in which kit's own loader gives a batch, by the costs of its store where it lies; None for other data."""
    from kit.data.build.layout import price_store
    from kit.data.open_dataset import open_dataset

    if query.data.kind != "default" or not query.config.data.url:
        return None
    try:
        costs: list[LayoutCost] = list(price_store(query.config, open_dataset(query.config)))
    except (KitError, OSError, ValueError):
        return None
    return sum(cost.seconds_per_batch for cost in costs) or None


def _lies_in_folder(url: str) -> bool:
    from kit.data.stores.url import local_folder

    return local_folder(url) is not None


@dataclass(frozen=True, kw_only=True, repr=False)
class SpeedEstimate(Drawable):
    """The time of a step on one or several devices. Print it, show it, or read its fields."""

    device: str
    devices: int
    batch_size: int
    """Samples per micro-batch on each device."""
    accumulate: int
    time: StepTime
    mfu: float | None
    """Model FLOPs utilisation: the fraction of the stated peak that a step reaches without what checkpointing computes
    again; None where no peak is stated."""
    costs: str
    """Where the costs are from."""
    reasons: tuple[str, ...]
    on_gpu: bool
    link: Link
    """What joins devices of a node."""
    config: Config | None = None
    """What would run; None where only a recording was priced."""
    epoch_samples: int | None = None
    """Samples of an epoch on all devices, by the loader or by the config for kit's own; None where neither says."""
    mean_batch_size: float | None = None
    """Of a micro-batch, where a loader puts fewer samples in it the longer they are; else None."""
    why_single_device: str = ""
    """Why several devices cannot train it; empty where they can."""
    busy_cores: float = 0.0
    """That others used while the operators of this machine were measured."""
    pace_seconds: float = 0.0
    """Of the product that tells a CPU's pace, at the fastest, of which the seconds are; 0 where it was not asked."""
    slowness: float = 1.0
    """How many times as long that product takes in slow moments: the range's upper end is of those."""
    computing_fraction: float = 1.0
    """Of the step's seconds, what changes with the pace."""
    correction: float = 1.0
    """measured / predicted seconds of a trial of the same model, by which the step is corrected."""
    on_devices: Callable[[int, str], SpeedEstimate | None] | None = field(default=None, compare=False, repr=False)
    """The same on so many devices under a strategy, from the same dry run; None where it does not tell that."""
    lacks_bytes: int = 0
    """That the device has too little memory for it by what `kit.predict_memory` says; 0 where it fits, or not known."""

    def __getstate__(self) -> dict[str, Any]:
        """All but what holds the module: a pickled estimate answers for its own devices."""
        return {**vars(self), "on_devices": None}

    @property
    def one_device(self) -> str:
        """The name of one of them."""
        return self.device.rpartition("× ")[2]

    @property
    def step_seconds(self) -> float:
        """Of one optimizer step."""
        return self.time.seconds * self.correction

    @property
    def low_seconds(self) -> float:
        return self._range[0]

    @property
    def high_seconds(self) -> float:
        return self._range[1]

    @property
    def _range(self) -> tuple[float, float]:
        slower = slowed(self.slowness, self.computing_fraction)
        if self.correction == 1.0:
            return self.time.low_seconds, self.time.high_seconds * slower
        return self.step_seconds / _CORRECTED_DOUBT, self.step_seconds * _CORRECTED_DOUBT * slower

    @property
    def samples(self) -> float:
        """Of an optimizer step, of all devices."""
        return (self.mean_batch_size or self.batch_size) * self.accumulate * self.devices

    @property
    def samples_per_second(self) -> float:
        """Of all devices."""
        return self.samples / self.step_seconds

    @property
    def low_samples_per_second(self) -> float:
        return self.samples / self.high_seconds

    @property
    def high_samples_per_second(self) -> float:
        return self.samples / self.low_seconds

    @property
    def traffic(self) -> Traffic:
        """What devices exchange in a step."""
        return _traffic(self.time.step)

    @property
    def bound(self) -> Bound:
        """What a step spends most on."""
        return self.time.bound

    @property
    def sentence(self) -> str:
        low, high = format_seconds(self.low_seconds), format_seconds(self.high_seconds)
        mfu = "" if self.mfu is None else f", {self.mfu:.0%} of the stated peak"
        misfit = f"; {self.misfit}" if self.misfit else ""
        return (
            f"a step takes {format_seconds(self.step_seconds)} ({low} to {high}) on {self.device}: "
            f"{format_count(self.samples_per_second)} samples/s{mfu}, bound by {self.bound}{misfit}"
        )

    @property
    def misfit(self) -> str:
        """That it does not fit, where that is known; empty for others."""
        lacks = format_bytes(self.lacks_bytes)
        return f"it does not fit, {lacks} too much: this is of a card that had them" if self.lacks_bytes else ""

    def contains(self, samples_per_second: float) -> bool:
        """Whether a measured speed lies within the range."""
        return self.low_samples_per_second <= samples_per_second <= self.high_samples_per_second

    def corrected(self, samples_per_second: float) -> SpeedEstimate:
        """The estimate after a trial of the same model, which was predicted at `self` and measured at this speed."""
        factor = self.samples_per_second / samples_per_second
        return self.corrected_by(factor)

    def corrected_by(self, factor: float) -> SpeedEstimate:
        """The estimate with its seconds times measured / predicted seconds of a trial of the same model."""
        reason = f"a trial of this model took {factor:.2f} of what was predicted, and corrects this prediction"
        return replace(self, correction=self.correction * factor, reasons=(reason, *self.reasons))

    @property
    def _rows(self) -> list[list[str]]:
        whole = self.time.seconds or 1.0
        parts = {**self.time.by_kind, **{f"waits for {name}": spent for name, spent in self.time.waits.items()}}
        ranked = sorted(parts.items(), key=lambda item: -item[1])
        return [
            [name, format_seconds(spent * self.correction), f"{spent / whole:.0%}"]
            for name, spent in ranked
            if spent > 0.001 * whole
        ]

    def __repr__(self) -> str:
        table = text_table(_COLUMNS, self._rows)
        return "\n".join([self.sentence, table, *(f"- {reason}" for reason in self._sentences)])

    def _repr_html_(self) -> str:
        shown: str = load("breakdown.SpeedEstimate")(self)
        return shown + html_list(self._sentences)

    @property
    def _sentences(self) -> list[str]:
        facts = self.time.step.facts
        precision, strategy = str(facts.get("precision", "32-true")), str(facts.get("strategy", "none"))
        strategy = "ddp" if strategy == "none" else strategy  # as the exchange is priced
        return [asked_words(self.batch_size, precision, self.accumulate, strategy, self.devices), *self.reasons]


_COLUMNS = ("kind of operator", "a step", "share")
_CORRECTED_DOUBT, _UNEVEN = 1.1, 1.15
