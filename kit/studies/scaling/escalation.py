"""Escalation: the order in which a config is changed that does not fit or is too slow, and the cost of each change.

A step is a set of changes. Steps are ordered by the dearest change in them, and the first that fits is taken:

    as configured     nothing
    zero_grad         gradients freed after the step, not after the next forward pass: no time, and in all that follow
    accumulation      a batch in k parts, one after another: the same global batch. Little time, until parts are small
    checkpointing     activations are computed again: a third more time, since a forward pass is a third of a step
                      (Chen et al. 2016)
    8-bit optimizer   other numbers: AdamW with states in 8 bits replaces the optimizer of the module
    deeper            accumulation down to single samples, which leave a device little to do at a time
    fsdp              the model over all devices: traffic, and devices that wait for each other

Each comes with every combination of those above it. More than one device means ddp until sharding is needed. A batch
is that of each device, so the global batch grows with the devices and does not change by anything else. The time of
smaller batches is an assumption, `PART_TIME` for each halving.

Nothing is predicted here (see `kit.studies.scaling.recommend`). A `Recommendation` has the steps that were tried, the
chosen one, and what to set, with reasons. Its `config` is a changed copy; where nothing fits, `config` raises the
refusal.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from itertools import product
from typing import Any

from kit.config import Config
from kit.errors import PlanError, did_you_mean
from kit.memory.replay.cards import THIS_MACHINE, DeviceTarget
from kit.memory.replay.estimate import MemoryEstimate
from kit.studies.scaling.bill import RunPrices, prices_of
from kit.studies.scaling.model import MOST_DEVICES
from kit.studies.scaling.predict import BigRun, BigRunRow
from kit.tables import html_list, html_table, text_table
from kit.units import format_bytes, format_seconds

CHECKPOINTING_TIME = 4 / 3
PART_TIME = 1.05
"""Of each halving of the batch: an assumption, not measured."""
MOST_PARTS = 8
"""Of a batch, before dearer changes are tried."""
_HOUR = 3600.0


@dataclass(frozen=True, slots=True, kw_only=True)
class RunTarget:
    """Where a run is to go, and what it may cost."""

    device: str | int | DeviceTarget = THIS_MACHINE
    """A GPU model, its memory in bytes or as "24 GiB", or "this machine"."""
    devices: int = 1
    """How many there are. Without a limit all are used."""
    hours: float | None = None
    """All epochs are to be done by then."""
    money: float | None = None
    """What they may cost, at `prices`."""
    prices: float | str | Mapping[str, Any] | RunPrices | None = None
    """As `kit.studies.predict_run` takes them."""
    cores: int | None = None
    """Of a node; by default those of this machine."""
    headroom_fraction: float = 0.02
    """Of a device's memory, to be left free: what fits to the last MiB on paper may not fit a real run."""

    def __post_init__(self) -> None:
        if not 1 <= self.devices <= MOST_DEVICES:
            raise PlanError(f"a target of {self.devices} devices; give a number from 1 to {MOST_DEVICES}")
        if not 0 <= self.headroom_fraction < 1:
            raise PlanError(f"headroom_fraction is {self.headroom_fraction}; give a number from 0 to below 1")
        for name in ("hours", "money"):
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise PlanError(f"{name} is {value}: nothing runs in that; give a number above 0")
        if self.money is not None and self.bill.per_device_hour is None:
            raise PlanError("money is limited, but a device-hour has no price; give prices= too")

    @property
    def bill(self) -> RunPrices:
        return prices_of(self.prices)

    @property
    def limited(self) -> bool:
        """Whether time or money is limited."""
        return self.hours is not None or self.money is not None

    def over(self, seconds: float, devices: int) -> float:
        """How many times too long or too dear a run is; at most 1 where it is within the limits."""
        shares = [0.0 if self.hours is None else seconds / _HOUR / self.hours]
        money = self.bill.money(devices * seconds / _HOUR)
        shares.append(money / self.money if self.money is not None and money is not None else 0.0)
        return max(shares)

    @property
    def limits(self) -> str:
        """In words."""
        time = "" if self.hours is None else f"{self.hours:g} h"
        money = "" if self.money is None else self.bill.text(self.money)
        return " and ".join(filter(None, (time, money)))


def target_from(value: Any) -> RunTarget:
    """A target from a device alone, a mapping of the fields, or one made already.

    Raises:
        PlanError: for unknown fields and impossible values.
    """
    if isinstance(value, RunTarget):
        return value
    if isinstance(value, Mapping):
        known = [item.name for item in fields(RunTarget)]
        for name in value:
            if name not in known:
                raise PlanError(f"a target has no {name!r}{did_you_mean(name, known, 'there are {}')}")
        return RunTarget(**value)
    if isinstance(value, str | DeviceTarget) or (isinstance(value, int) and not isinstance(value, bool)):
        return RunTarget(device=value)
    raise PlanError(f"{value!r} is no target; give a device such as 'H100-80GB', or a mapping with device and devices")


@dataclass(frozen=True, slots=True, kw_only=True)
class EscalationStep:
    """A set of changes, without the number of parts of a batch."""

    strategy: str
    devices: int
    zero_grad: bool
    checkpointing: bool
    eight_bit: bool
    most_parts: int
    """Of a batch, that this step allows."""

    def changes(self) -> dict[str, Any]:
        """What it sets in a config, without the batch."""
        found: dict[str, Any] = {"hardware.strategy": self.strategy, "hardware.devices": self.devices}
        found |= {"levers.zero_grad_after_step": True} if self.zero_grad else {}
        found |= {"levers.gradient_checkpointing": True} if self.checkpointing else {}
        return found | ({"levers.optimizer": "adamw-8bit"} if self.eight_bit else {})

    def time_factor(self, given: Config, parts: int) -> float:
        """Of a step on as many devices, against the config as given; traffic is counted elsewhere."""
        again = self.checkpointing and not given.levers.gradient_checkpointing
        return float((CHECKPOINTING_TIME if again else 1.0) * PART_TIME ** math.log2(parts))


def escalation_steps(config: Config, devices: int, manual: bool = False) -> Iterator[EscalationStep]:
    """All steps on that many devices, in the order in which they are tried; a `manual` module frees its gradients."""
    named, shards = config.hardware.strategy, config.hardware.shards
    if devices == 1:
        strategies = ["none"]
    elif shards and shards[0] * shards[1] == devices:
        strategies = [named]
    else:  # a config that shards already goes on sharding
        strategies = ["fsdp"] if named.startswith("fsdp") else ["ddp", "fsdp"]
    # An optimizer with less state is not replaced.
    eight_bit = [False] if config.levers.optimizer in ("adamw-8bit", "sgd") else [False, True]
    checkpointing = [True] if config.levers.gradient_checkpointing else [False, True]
    frees = not manual
    if frees and not config.levers.zero_grad_after_step:
        yield EscalationStep(
            strategy=strategies[0], devices=devices, zero_grad=False, checkpointing=checkpointing[0], eight_bit=False,
            most_parts=1,
        )  # fmt: skip
    for strategy, parts, eight, again in product(strategies, (MOST_PARTS, 1 << 30), eight_bit, checkpointing):
        yield EscalationStep(
            strategy=strategy, devices=devices, zero_grad=frees, checkpointing=again, eight_bit=eight, most_parts=parts
        )  # fmt: skip


def parts_of(batch_size: int, most: int) -> list[int]:
    """Numbers of equal parts that a batch can be cut into, from 1 on."""
    return [parts for parts in range(1, min(batch_size, most) + 1) if batch_size % parts == 0]


_SHORT = "short of"
_COLUMNS = ("step", "devices", "verdict", "needs", _SHORT, "time")


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """Fields to set, and why."""

    name: str
    values: Mapping[str, Any]
    reason: str

    def __str__(self) -> str:
        sets = ", ".join(f"{path} = {value}" for path, value in self.values.items())
        return f"{self.name} ({sets}): {self.reason}"


@dataclass(frozen=True, slots=True, kw_only=True)
class TriedStep:
    """One step, and what was predicted of it."""

    name: str
    step: EscalationStep
    parts: int
    """Micro-batches that a batch as configured is cut into."""
    estimate: MemoryEstimate | None
    """None where it could not be predicted."""
    time_factor: float
    """Of a step, against the config as given; traffic not counted."""
    run: BigRunRow | None
    """Time and money with it, where there is a trial."""
    note: str = ""
    """Why it was skipped, where memory is not the reason."""
    headroom_fraction: float = 0.0
    """Of the device's memory, to be left free."""

    @property
    def fits(self) -> bool:
        """Whether it is known to fit, and to leave the headroom."""
        return self.estimate is not None and self.estimate.may_fit and not self.short_bytes

    @property
    def short_bytes(self) -> int:
        """What the device lacks, headroom included; 0 where it fits or nothing is known."""
        found = self.estimate
        if found is None:
            return 0
        return max(0, found.total_bytes[1] - int(found.capacity_bytes * (1 - self.headroom_fraction)))

    @property
    def seconds(self) -> float | None:
        """Of all epochs."""
        return None if self.run is None else self.run.total_seconds * self.time_factor

    @property
    def cells(self) -> list[str]:
        found, devices = self.estimate, str(self.step.devices)
        if found is None:
            return [self.name, devices, self.note, "–", "–", "–"]
        short = format_bytes(self.short_bytes) if self.short_bytes else "–"
        time = f"× {self.time_factor:.2f}" if self.seconds is None else format_seconds(self.seconds)
        verdict = "no headroom" if found.may_fit and not self.fits else found.verdict
        low, high = map(format_bytes, found.total_bytes)
        needs = f"{low} to {high}" if found.verdict == "tight" and low != high else high
        return [self.name, devices, verdict, needs, short, time]


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Recommended:
    """A setting that was chosen among others; print it, show it, or take its `config`."""

    given: Config
    target: RunTarget
    chosen: Any
    """None where nothing fits."""
    changes: tuple[Change, ...]
    """What to set, each with its reason."""
    reasons: tuple[str, ...]
    refusal: str = ""
    """Why there is none, and by how much."""

    @property
    def fits(self) -> bool:
        return self.chosen is not None

    @property
    def config(self) -> Config:
        """The changed config.

        Raises:
            PlanError: when nothing fits, saying by how much.
        """
        if self.chosen is None:
            raise PlanError(self.refusal)
        return self.given.replace(self._settings)

    @property
    def _settings(self) -> dict[str, Any]:
        return {path: value for change in self.changes for path, value in change.values.items()}

    @property
    def _headline(self) -> str:
        raise NotImplementedError

    def _table(self) -> tuple[Sequence[str], list[list[str]], int | None]:
        """Columns, rows, and the place of the chosen one."""
        raise NotImplementedError

    @property
    def _sentences(self) -> list[str]:
        return [*(str(change) for change in self.changes), *self.reasons]

    def __repr__(self) -> str:
        return "\n".join([self._headline, text_table(*self._table()), *(f"- {text}" for text in self._sentences)])

    def _repr_html_(self) -> str:
        columns, rows, marked = self._table()
        return html_table(columns, rows, caption=self._headline, marked=marked) + html_list(self._sentences)


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Recommendation(Recommended):
    """What to change and why; print it, show it, or take its `config`."""

    tried: tuple[TriedStep, ...]
    """In order; the last is the chosen one where there is one."""
    chosen: TriedStep | None
    big_run: BigRun | None = field(default=None, compare=False)
    condition: str = ""
    """What its batches depend on, where a loader that kit does not make decides their size; empty for others."""

    @property
    def _headline(self) -> str:
        if self.chosen is None:
            return self.refusal
        time = "" if self.chosen.seconds is None else f", {format_seconds(self.chosen.seconds)} predicted"
        what = ", ".join(change.name for change in self.changes) or "nothing to change"
        count, device = self.chosen.step.devices, self.target.device
        shown = format_bytes(device) if isinstance(device, int) else str(device)
        found = self.chosen.estimate
        condition = f", {found.verdict_in_words.removeprefix('fits ')}" if found and found.conditions else ""
        condition += f", {self.condition}" if self.condition else ""
        return f"{what}: fits {f'{count} × ' if count > 1 else ''}{shown}{condition}{time}"

    def _table(self) -> tuple[Sequence[str], list[list[str]], int | None]:
        marked = None if self.chosen is None else self.tried.index(self.chosen)
        free = self.target.headroom_fraction
        columns = [f"{name}, {free:.0%} left free" if name == _SHORT and free else name for name in _COLUMNS]
        return columns, [one.cells for one in self.tried], marked
