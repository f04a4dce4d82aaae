"""recommend: the smallest change of a config that fits a target and is fast enough, with what is predicted and why.

With `objective="speed"` it is the fastest setting that fits instead: see `kit.studies.scaling.fastest`. Of the smallest
change, this:

The steps of `kit.studies.scaling.escalation` are tried in order, on all devices of the target or, where time or money
is limited, on ever more of them until a run keeps within the limit. The first step that fits, and leaves the headroom
asked for, is chosen. Each is dry-run with the whole batch and with single samples; only where these fit, the memory of
what lies between is asked of `kit.memory.model`. A step that takes too long is passed over with that reason. A module
that optimizes manually decides itself when it steps, so accumulation is never offered to it. Times come from a trial on
the same kind of device through `kit.studies.predict_run`; without one they are factors of the config's own. Where data
limits the run, loader processes (`kit.data.build.schedulers`) and another chunk layout (`kit.plan_chunks`) are advised
too; where it does not, another layout is only mentioned.

Nothing is trained and nothing is changed: `config` is a changed copy. Where nothing fits, it is refused, with the bytes
that the smallest step is short of.
"""

from __future__ import annotations

import contextlib
import time
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal, overload

from kit.arguments import check_count, refuse_recipe
from kit.config import Config
from kit.data.build.schedulers import advise_schedule
from kit.errors import ConfigError, KitError, PlanError
from kit.machine.machine import waiting_per_core
from kit.memory.batch_model import MemoryModel, memory_model
from kit.memory.prediction import estimate_here
from kit.memory.query import MOST_RANKS, MemoryQuery, make_query, ranks_of
from kit.memory.recordings import TIMEOUT_SECONDS, RecordingRequest, UnansweredError, record_all, recordings_of
from kit.memory.replay.cards import THIS_MACHINE, DeviceTarget
from kit.memory.replay.estimate import MemoryEstimate
from kit.speed.prediction import SpeedEstimate
from kit.studies.diagnosis.evidence import store_layout
from kit.studies.scaling.escalation import (
    Change,
    EscalationStep,
    Recommendation,
    RunTarget,
    TriedStep,
    escalation_steps,
    parts_of,
    target_from,
)
from kit.studies.scaling.fastest import Fastest, SpeedPlan
from kit.studies.scaling.model import counts_up_to
from kit.studies.scaling.predict import BigRun, BigRunRow, predict_run
from kit.trial.payload import Part, batch_rule, optimizes_manually
from kit.units import format_bytes, format_seconds


@overload
def recommend(
    config: Any = None, target: Any = None, module: Any = None, data: Any = None, *, device: Any = None,
    devices: int | None = None, objective: Literal["change"] = "change", keep: Sequence[str] | str = (),
    confirm: bool = True, trial: Any = None, timeout_seconds: float | None = None,
) -> Recommendation: ...  # fmt: skip
@overload
def recommend(
    config: Any = None, target: Any = None, module: Any = None, data: Any = None, *, device: Any = None,
    devices: int | None = None, objective: Literal["speed"], keep: Sequence[str] | str = (), confirm: bool = True,
    trial: Any = None, timeout_seconds: float | None = None,
) -> SpeedPlan: ...  # fmt: skip
def recommend(
    config: Any = None, target: Any = None, module: Any = None, data: Any = None, *, device: Any = None,
    devices: int | None = None, objective: Literal["change", "speed"] = "change", keep: Sequence[str] | str = (),
    confirm: bool = True, trial: Any = None, timeout_seconds: float | None = None,
) -> Recommendation | SpeedPlan:  # fmt: skip
    """Find the smallest change of a config that fits a target, or the fastest setting that does.

    Module and data may follow the config at once, as everywhere, where `device` is named.

    Args:
        config: Where to start; the default config when left out.
        target: A device such as "H100-80GB" or "24 GiB", or a mapping such as `{"device": "A100-40GB", "devices": 8,
            "hours": 12, "money": 500, "prices": "AWS H100", "headroom_fraction": 0.05}`.
        module: What is trained, as `kit.fit` takes it.
        data: What it is trained on, as `kit.fit` takes it.
        device: The target's device, in place of `target`.
        devices: How many there are, at most; by default as many as the config asks for.
        objective: "change" for the smallest change that fits; "speed" for the fastest setting that fits, over devices,
            strategy, precision, optimizer, batch and accumulation, and blocks to checkpoint, with the global batch as
            it was.
        keep: A field that "speed" must not change, such as "hardware.precision", or several.
        confirm: Whether "speed" runs a trial of its answer where the device is here.
        trial: For "change": trials of this config, or what `kit.predict_speed` says of the device, as
            `kit.studies.predict_run` takes them. A limit of time or money needs one.
        timeout_seconds: After so long nothing further is dry-run, and what is left says so; by default 120 seconds
            for "speed", and 30 for "change", as many times as long as processes wait for each core.

    Returns:
        `config`, its prediction, its reasons, and all that was looked at on the way; `figure()` of "speed" draws memory
        against time.

    Raises:
        ConfigError, PlanError: for what is no config or target or field, and for a limit without a trial.
        KitError: what `kit.predict_memory` raises about the config as it is.

    Example:
        >>> kit.recommend(config, "H100-80GB", MyModule, MyData).config == config
        True
        >>> plan = kit.recommend(config, MyModule, MyData, device="24 GiB", objective="speed")
        >>> plan.fits
        True
    """
    if isinstance(module, Config):
        message = "recommend(module, data, config, target) is the order of kit 0.1; give recommend(config, target, ...)"
        warnings.warn(message, DeprecationWarning, stacklevel=2)
        config, target, module, data = module, data, config, target
    if config is not None and not isinstance(config, Config):
        refuse_recipe("recommend", config, "call recommend(config, target, module, data)")
        if data is not None:
            raise ConfigError(f"recommend takes a Config and a target, got {type(config).__name__}")
        config, target, module, data = None, config, target, module
    config = Config() if config is None else config
    if device is not None:
        if target is not None:
            if data is not None:
                raise ConfigError("recommend takes a target or device=, not both")
            target, module, data = None, target, module
        target = {"device": device}
    goal = target_from(target)
    if devices is not None:
        check_count("devices", devices, MOST_RANKS)
        goal = replace(goal, devices=devices)
    elif not (isinstance(target, RunTarget) or (isinstance(target, Mapping) and "devices" in target)):
        goal = replace(goal, devices=_devices_of(config))
    if objective == "speed":
        if goal.limited:
            raise PlanError(f"a limit of {goal.limits} belongs to objective='change', which counts hours and money")
        seconds = SPEED_SECONDS if timeout_seconds is None else timeout_seconds
        return Fastest(config, module, data, goal, (keep,) if isinstance(keep, str) else keep, seconds).answer(confirm)
    if objective != "change":
        raise PlanError(f"objective is {objective!r}; give 'change' or 'speed'")
    if goal.limited and trial is None:
        way_out = "pass trial=kit.fit(...), or before any trial trial=kit.predict_speed(...) on that device"
        raise PlanError(f"a limit of {goal.limits} needs a trial to predict times from; {way_out}")
    seconds = CHANGE_SECONDS * waiting_per_core() if timeout_seconds is None else timeout_seconds
    return _Escalation(module, data, config, goal, trial, seconds).answer()


CHANGE_SECONDS, SPEED_SECONDS = 30.0, 120.0


def _devices_of(config: Config) -> int:
    """How many devices a config asks for; 1 where it takes all there are."""
    with contextlib.suppress(ConfigError):
        return ranks_of(config)
    return 1


_WHY = {
    "none": "one device: the model fits, and nothing is exchanged",
    "ddp": "each device holds the model and takes its own batches: the simplest way to use several",
    "fsdp": "parameters, gradients and optimizer states are sharded over the devices, since the whole does not fit one",
}
_Key = tuple[tuple[str, Any], ...]


def _key(step: EscalationStep) -> _Key:
    return tuple(step.changes().items())


class _Escalation:
    """One recommendation while it is made."""

    def __init__(
        self, module: Any, data: Any, config: Config, target: RunTarget, trial: Any, timeout_seconds: float
    ) -> None:
        self.module, self.data, self.config, self.target, self.trial = module, data, config, target, trial
        self.tried: list[TriedStep] = []
        self.reasons: list[str] = []
        self._condition = ""
        self._batch_size = config.loader.batch_size
        self._estimates: dict[tuple[_Key, int], MemoryEstimate | KitError] = {}
        """By changes and parts of a batch."""
        self._models: dict[_Key, MemoryModel | KitError] = {}
        self._timeout_seconds = timeout_seconds
        self._deadline = time.monotonic() + timeout_seconds
        self._runs: dict[str, BigRun] = {}
        self._other_kind = False
        """Whether the trial ran on another kind of device, so that its times say nothing of the target."""
        self._manual = optimizes_manually(module, config)
        self._overtime = False
        """Whether a dry run was given more time than there was."""

    def answer(self) -> Recommendation:
        counts = counts_up_to(self.target.devices) if self.target.limited else [self.target.devices]
        as_given = self._estimate(next(iter(escalation_steps(self.config, counts[0], self._manual))), 1)
        if isinstance(as_given, MemoryEstimate) and as_given.recording is not None:
            self._manual |= bool(as_given.recording.facts.get("manual"))  # as a function that made it did not tell
        if self._manual:
            self.reasons.append(
                "accumulation was left out: the module optimizes manually, and decides itself when it steps"
            )
        chosen = next((found for count in counts if (found := self._first_fitting(count)) is not None), None)
        changes = () if chosen is None else tuple(self._changes(chosen))
        run = None if chosen is None else self._runs.get(chosen.step.strategy)
        return Recommendation(
            given=self.config, target=self.target, tried=tuple(self.tried), chosen=chosen, changes=changes,
            reasons=tuple(self.reasons), refusal="" if chosen is not None else self._refusal(), big_run=run,
            condition=self._condition,
        )  # fmt: skip

    def _first_fitting(self, devices: int) -> TriedStep | None:
        """The first step that fits on that many devices, if it keeps within the limits."""
        steps = list(escalation_steps(self.config, devices, self._manual))
        hopeless = set[str]()
        for place, step in enumerate(steps):
            if step.strategy in hopeless:
                continue
            found = self._try(step)
            if found is not None:
                self.tried.append(found)
                if found.fits:
                    return found if not self.target.limited or self._over(found) <= 1 else None
            if place == 0 and steps[-1].strategy != step.strategy and not self._ever_fits(step.strategy, steps):
                hopeless.add(step.strategy)
                continue
            self._record([other for other in steps[place:] if other.strategy == step.strategy])
        return None

    def _ever_fits(self, strategy: str, steps: Sequence[EscalationStep]) -> bool:
        """Whether single samples with all levers may fit: where they do not, no step of that strategy is looked at."""
        step = [other for other in steps if other.strategy == strategy][-1]
        single = self._estimate(step, self._most_parts)
        if isinstance(single, KitError):
            return True
        found = self._tried(step, self._most_parts, single)
        if not found.fits:
            self.tried.append(found)
            self.reasons.append(f"more of {strategy} was not looked at, since {found.name} needs least of it")
        return found.fits

    def _record(self, steps: Sequence[EscalationStep]) -> None:
        """Record the next steps, several at once, whole and in single samples; an error is kept until one is tried."""
        keys: list[tuple[_Key, int]] = []
        requests: list[RecordingRequest] = []
        for step in steps:
            for parts in dict.fromkeys((1, self._most_parts if step.most_parts > 1 else 1)):
                key = (_key(step), parts)
                if key in self._estimates or key in keys:
                    continue
                try:
                    query, _ = self._query(step, parts)
                except KitError as error:
                    self._estimates[key] = error
                    continue
                keys.append(key)
                requests.append(RecordingRequest(query, (self._size(parts),)))
        if requests and (left_seconds := self._left_seconds) > 0:
            for key, answer in zip(keys, record_all(requests, left_seconds), strict=True):
                if isinstance(answer, KitError):
                    self._estimates[key] = answer

    @property
    def _left_seconds(self) -> float:
        return self._deadline - time.monotonic()

    @property
    def _too_late(self) -> str:
        return f"not predicted: the {format_seconds(self._timeout_seconds)} were over"

    @property
    def _most_parts(self) -> int:
        """Parts that a batch can be cut into at all, whatever the step allows."""
        return 1 if self._manual else self._batch_size

    def _size(self, parts: int) -> int | None:
        return None if parts == 1 else self._batch_size // parts

    def _query(self, step: EscalationStep, parts: int) -> tuple[MemoryQuery, DeviceTarget]:
        accumulate = {"levers.accumulate_grad_batches": self._accumulated(parts)}
        config = self.config.replace({**step.changes(), **accumulate})
        return make_query(self.module, self.data, config, self.target.device, step.devices)

    def _estimate(self, step: EscalationStep, parts: int, at_least_seconds: float = 0.0) -> MemoryEstimate | KitError:
        """Of a batch in so many parts, from a recording of that size alone."""
        key = (_key(step), parts)
        if key not in self._estimates:
            try:
                query, target = self._query(step, parts)
                request = RecordingRequest(query, (self._size(parts),))
                left_seconds = TIMEOUT_SECONDS if not self.tried else max(at_least_seconds, self._left_seconds)
                if left_seconds <= 0:
                    raise UnansweredError(self._too_late)
                self._estimates[key] = estimate_here(query, recordings_of(request, left_seconds)[0], target)
            except KitError as error:
                self._estimates[key] = error
        return self._estimates[key]

    def _accumulated(self, parts: int) -> int:
        return self.config.levers.accumulate_grad_batches * parts

    def _over(self, found: TriedStep) -> float:
        return self.target.over(found.seconds or 0.0, found.step.devices)

    def _try(self, step: EscalationStep) -> TriedStep | None:
        """The step with the fewest parts that fit, else with the most; None where another one shows as much.

        Of several parts, single samples need least: where they do not fit, nothing between is looked at.
        """
        first = not self.tried
        whole = self._estimate(step, 1)
        if isinstance(whole, KitError):
            if first:
                raise whole
            return None if self._tried_parts(step) else self._tried(step, 1, None, str(whole))
        if first:
            self._batch_size = whole.batch_size
        least = self._tried(step, 1, whole)
        parts = parts_of(self._batch_size, min(step.most_parts, self._most_parts))
        if least.fits or len(parts) == 1:
            return None if self._tried_parts(step) else least
        if first:
            self.tried.append(least)
        single = self._estimate(step, self._most_parts)
        if isinstance(single, KitError):
            return None if self._tried_parts(step) > 1 else self._tried(step, self._most_parts, None, str(single))
        least = self._tried(step, self._most_parts, single)
        if not least.fits:
            return None if max(parts) < least.parts or self._tried_parts(step) == least.parts else least
        return self._fewest(step, parts, least)

    def _fewest(self, step: EscalationStep, parts: Sequence[int], single: TriedStep) -> TriedStep | None:
        """The step with the fewest of these parts that fit, else with the most; None where that was seen.

        `single` samples fit: where nothing else is known in time, they are the answer of a step that allows them.
        """
        model = self._model(step)
        for count in parts:
            if count > max(1, self._tried_parts(step)):
                if isinstance(model, KitError) or self._left_seconds <= 0:
                    note = str(model) if isinstance(model, KitError) else self._too_late
                    if (found := self._between(step, parts, single)) is not None:
                        return found
                    if single.parts in parts:
                        self.reasons.append(f"a batch in fewer parts may fit too, {note}; raise timeout_seconds")
                    return single if single.parts in parts else self._tried(step, parts[-1], None, note)
                estimate = model.estimate(self._batch_size // count, accumulate=self._accumulated(count))
                found = self._tried(step, count, estimate)
                if found.fits or count == parts[-1]:
                    return found
        return None

    def _between(self, step: EscalationStep, parts: Sequence[int], single: TriedStep) -> TriedStep | None:
        """Where time is over: of the batch in as many parts as fit if memory grows evenly with samples, one dry run
        beyond that time; None where these do not fit either, or no more than `single` samples would."""
        whole = self._estimates.get((_key(step), 1))
        if self._overtime or not isinstance(whole, MemoryEstimate) or single.estimate is None:
            return None
        self._overtime = True
        one, all_of_them = single.estimate.total_bytes[1], whole.total_bytes[1]
        room = int(whole.capacity_bytes * (1 - self.target.headroom_fraction))
        most = 1 + (self._batch_size - 1) * (room - one) / max(1, all_of_them - one)
        count = next((count for count in parts if self._batch_size // count <= most), single.parts)
        if count == single.parts:
            return None
        estimate = self._estimate(step, count, CHANGE_SECONDS * waiting_per_core())
        found = None if isinstance(estimate, KitError) else self._tried(step, count, estimate)
        return found if found is not None and found.fits else None

    def _tried_parts(self, step: EscalationStep) -> int:
        """The most parts in which a step was tried with the same changes; 0 where it was not."""
        return max((one.parts for one in self.tried if _key(one.step) == _key(step)), default=0)

    def _tried(self, step: EscalationStep, parts: int, estimate: MemoryEstimate | None, note: str = "") -> TriedStep:
        places = step.strategy if step.devices > 1 else "one device"
        is_given = (step.strategy, step.devices) == (self.config.hardware.strategy, _devices_of(self.config))
        words = [] if is_given else [places]
        again = step.checkpointing and not self.config.levers.gradient_checkpointing
        words += ["zero_grad after the step"] if step.zero_grad and not self.config.levers.zero_grad_after_step else []
        words += ["checkpointing"] if again else []
        words += ["8-bit optimizer"] if step.eight_bit else []
        words += [f"accumulation in {parts}"] if parts > 1 else []
        return TriedStep(
            name=" + ".join(words) or "as configured", step=step, parts=parts, estimate=estimate, note=note,
            time_factor=step.time_factor(self.config, parts), run=self._row(step),
            headroom_fraction=self.target.headroom_fraction,
        )  # fmt: skip

    def _model(self, step: EscalationStep) -> MemoryModel | KitError:
        key = _key(step)
        if key not in self._models:
            try:
                if self._left_seconds <= 0:
                    raise UnansweredError(self._too_late)
                config = self.config.replace(step.changes())
                self._models[key] = memory_model(
                    config, self.module, self.data, device=self.target.device, world_size=step.devices,
                    timeout_seconds=self._left_seconds,
                )  # fmt: skip
            except KitError as error:
                self._models[key] = error
        return self._models[key]

    def _row(self, step: EscalationStep) -> BigRunRow | None:
        """Time and money of the step; None without a trial on the same kind of device."""
        if self.trial is None:
            return None
        if step.strategy not in self._runs:
            counts = [1] if step.strategy == "none" else counts_up_to(self.target.devices)
            strategy = None if step.strategy == "none" else step.strategy
            run = self._runs[step.strategy] = predict_run(
                self.trial, devices=counts, strategy=strategy, prices=self.target.prices,
                cores_per_node=self.target.cores, memory=False,
            )  # fmt: skip
            _, target = self._query(step, 1)
            on_cpu = run.scaling.cluster.on_cpu
            asked = self._predicted_for
            if on_cpu != (target.device_kind == "cpu") or asked not in ("", target.name):
                told = f"speed was predicted for {asked}" if asked else f"trial ran on {'a CPU' if on_cpu else 'a GPU'}"
                reason = f"the {told}, which tells no time of {target}"
                if self.target.limited:
                    raise PlanError(f"{reason}; give a trial on that kind of device, or no limit")
                if not self._other_kind:
                    self.reasons.append(f"{reason}: times are factors only")
                self._other_kind = True
        return None if self._other_kind else self._runs[step.strategy].row(step.devices)

    @property
    def _predicted_for(self) -> str:
        """The device of speeds that were predicted; empty where a trial ran."""
        speeds = [self.trial] if isinstance(self.trial, SpeedEstimate) else self.trial
        first = next(iter(speeds), None) if isinstance(speeds, list | tuple) else None
        return first.one_device if isinstance(first, SpeedEstimate) else ""

    def _changes(self, chosen: TriedStep) -> list[Change]:
        """The changes of the step, then advice about data; the assumptions go to `reasons`."""
        given, step, estimate, own = self.config, chosen.step, chosen.estimate, self.data is None
        new = {path: value for path, value in step.changes().items() if given.get(path) != value}
        if step.devices == 1 and given.hardware.strategy == "none":
            new.pop("hardware.devices", None)
        found: list[Change] = []
        hardware = {path: value for path, value in new.items() if path.startswith("hardware")}
        if hardware:
            name, reason = "one device", _WHY[step.strategy.partition(":")[0]]
            if step.devices > 1:
                name = f"{step.strategy} on {step.devices} devices"
                if chosen.run is not None:
                    one = self._runs[step.strategy].rows[0].samples_per_second
                    reason += f"; {chosen.run.samples_per_second / one:.2f} × one device's samples/s predicted"
            found.append(Change(name=name, values=hardware, reason=reason))
        for path, name, reason in _LEVERS:
            if path in new:
                found.append(Change(name=name, values={path: new[path]}, reason=reason))
        if chosen.parts > 1 and estimate is not None:
            accumulate = estimate.accumulate_grad_batches
            values = {"loader.batch_size": estimate.batch_size, "levers.accumulate_grad_batches": accumulate}
            reason = f"{chosen.parts} parts of {estimate.batch_size}, the same global batch"
            rule = batch_rule(Part.of(self.data), self.config)
            if not rule.by_config:
                self._condition = f"if {rule.whose} makes batches of {estimate.batch_size}"
                reason += f"; {rule.whose} makes its own batches, so make its loader with this size"
            found.append(Change(name="accumulation", values=values, reason=reason))
        if estimate is not None:
            self.reasons += [f"predicted in {estimate.precision}", estimate.reasons[0]]
            self.reasons += [f"it fits only if {condition}" for condition in estimate.conditions]
        if step.devices < self.target.devices and not self.target.limited:
            self.reasons.append(
                f"it uses {step.devices} of the {self.target.devices} devices, as hardware.strategy says: ddp uses all"
            )
        if step.devices > 1:
            text = f"the global batch is that of {step.devices} devices: the learning rate may have to follow"
            self.reasons.append(text)
        if chosen.time_factor != 1:
            self.reasons.append(
                "times of checkpointing and smaller batches are rules: kit.studies.verify_levers measures them"
            )
        if self.trial is None:
            self.reasons.append("times are factors: a trial tells seconds (trial=)")
        if self.target.cores is None and self.target.device != THIS_MACHINE:
            return found
        changed = given.replace({path: value for change in found for path, value in change.values.items()})
        advice, notes = _data_changes(changed, chosen.run, step.devices, self.target.cores, own)
        self.reasons += notes
        return [*found, *advice]

    def _refusal(self) -> str:
        fitting = [one for one in self.tried if one.fits]
        if fitting:
            best = min(fitting, key=self._over)
            seconds = format_seconds(best.seconds or 0.0)
            return (
                f"nothing keeps within {self.target.limits}: the nearest is {best.name} on {best.step.devices} "
                f"devices, with {seconds}, {self._over(best):.3g} times the limit"
            )
        known = [one for one in self.tried if one.estimate is not None]
        if not known:
            return f"nothing could be predicted: {self.tried[0].note}"
        least = min(known, key=lambda one: (one.short_bytes, one.time_factor))
        assert least.estimate is not None
        if least.estimate.verdict == "unknown":
            return f"nothing is known to fit: {least.estimate.reasons[0]}"
        needs, have = format_bytes(least.estimate.total_bytes[1]), format_bytes(least.estimate.capacity_bytes)
        headroom = f"a headroom of {least.headroom_fraction:.3g} of it" if least.headroom_fraction else ""
        room = " and ".join(filter(None, (have if have not in least.estimate.device else "", headroom)))
        device = least.estimate.device + (f" with {room}" if room else "")
        least_of_all = f"{least.name}, which needs least, needs {needs}, {format_bytes(least.short_bytes)} too much"
        if self._left_seconds > 0 or len(known) == len(self.tried):
            return f"nothing fits {device}: {least_of_all}"
        late = f"steps may fit that were {self._too_late}; raise timeout_seconds"
        return f"undecided whether anything fits {device}: of what was looked at, {least_of_all}; {late}"


_LEVERS = (
    ("levers.zero_grad_after_step", "zero_grad after the step",
     "the last step's gradients are not kept through the forward pass: no time, the same numbers"),
    ("levers.gradient_checkpointing", "checkpointing",
     "activations of repeated blocks are computed again: a third more time"),
    ("levers.optimizer", "8-bit optimizer",
     "AdamW with states in a quarter of the bytes replaces the optimizer: other numbers"),
)  # fmt: skip
_DATA = ("loading", "store requests/s", "store bandwidth", "loader CPU")
_WORTH = 1.5
"""How many times faster another layout must be to be worth building."""


def _data_changes(
    config: Config, run: BigRunRow | None, ranks: int, cores: int | None, own: bool
) -> tuple[list[Change], list[str]]:
    """What to change of loading, and notes.

    Args:
        config: With the other changes made.
        run: The prediction for it, where there is one.
        ranks: Of a node.
        cores: Of a node; None for those of this machine.
        own: Whether kit makes the loader.
    """
    limiting = run is not None and run.bound in _DATA
    changes, notes = list[Change](), list[str]()
    schedule = advise_schedule(config, cores=cores, ranks=ranks, heavy_transform=limiting and not own)
    values = {"loader.num_workers": schedule.loader_workers, "loader.decode_threads": schedule.decode_threads}
    values = {path: value for path, value in values.items() if config.get(path) != value}
    crowded = [text for text in schedule.warnings if "take turns" in text and own]
    if values and (limiting or crowded):
        reason = crowded[0] if crowded else f"data limits the run; {schedule.reasons[0]}"
        changes.append(Change(name="workers", values=values, reason=reason))
        notes += [] if own else ["loader settings reach a loader that kit makes; kit.studies.calibrate measures yours"]
    if not own:
        return changes, notes
    try:
        layout = store_layout(config, with_network=True)
    except KitError:  # there is no store yet
        return changes, notes
    seconds, planned = layout.seconds_per_batch, layout.planned_seconds_per_batch
    if seconds >= _WORTH * planned:
        text = (
            f"a batch takes {format_seconds(seconds)} to read as the store is cut, {format_seconds(planned)} in chunks "
            f"of {' × '.join(map(str, layout.planned_chunk))}"
        )
        if limiting:
            chunk = {"chunking.chunk": dict(zip(layout.dims, layout.planned_chunk, strict=True))}
            changes.append(Change(name="chunk layout", values=chunk, reason=f"{text}; build it anew with kit.build"))
        else:
            notes.append(f"{text}: worth building anew if data should limit the run")
    return changes, notes
