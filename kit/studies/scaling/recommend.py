"""recommend: the smallest change of a config that fits a target and is fast enough, with what is predicted and why.

The steps of `kit.studies.scaling.escalation` are tried in order, on all devices of the target or, where time or money
is limited, on ever more of them until a run keeps within the limit. The first step that fits is chosen. Each is dry-run
once (`kit.memory.model`); the memory of smaller batches follows from that. A module that optimizes manually decides
itself when it steps, so accumulation is never offered to it. Times come from a trial on the same kind of device through
`kit.studies.predict_run`; without one they are factors of the config's own. Where data limits the run, loader processes
(`kit.data.build.schedulers`) and another chunk layout (`kit.plan_chunks`) are advised too; where it does not, another
layout is only mentioned.

Nothing is trained and nothing is changed: `config` is a changed copy. Where nothing fits, it is refused, with the bytes
that the smallest step is short of.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Sequence
from typing import Any

from kit.config import Config
from kit.data.build.schedulers import advise_schedule
from kit.errors import ConfigError, KitError, PlanError
from kit.memory.batch_model import MemoryModel, memory_model
from kit.memory.prediction import TIMEOUT_SECONDS
from kit.memory.query import make_query
from kit.memory.recordings import NEXT, RecordingRequest, record_all
from kit.memory.replay.cards import THIS_MACHINE
from kit.memory.replay.estimate import MemoryEstimate
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
from kit.studies.scaling.model import counts_up_to
from kit.studies.scaling.predict import BigRun, BigRunRow, predict_run
from kit.trial.payload import optimizes_manually
from kit.units import format_bytes, format_seconds


def recommend(
    config: Config, target: Any = None, module: Any = None, data: Any = None, *, trial: Any = None
) -> Recommendation:
    """Find the smallest change of a config that fits a target: devices, hours or money.

    Args:
        config: Where to start.
        target: A device such as "H100-80GB" or "24 GiB", or a mapping such as `{"device": "A100-40GB", "devices": 8,
            "hours": 12, "money": 500, "prices": "AWS H100"}`.
        module: What is trained, as `kit.fit` takes it.
        data: What it is trained on, as `kit.fit` takes it.
        trial: Trials of this config, as `kit.studies.predict_run` takes them. A limit of time or money needs one.

    Returns:
        The recommendation: `config`, its prediction, and every step that was tried on the way.

    Raises:
        ConfigError, PlanError: for what is no config or target, and for a limit without a trial.
        KitError: what `kit.predict_memory` raises about the config as it is.

    Example:
        >>> kit.studies.recommend(config, "H100-80GB", MyModule, MyData).config == config
        True
    """
    if isinstance(module, Config):
        message = "recommend(module, data, config, target) is the order of kit 0.1; give recommend(config, target, ...)"
        warnings.warn(message, DeprecationWarning, stacklevel=2)
        config, target, module, data = module, data, config, target
    if not isinstance(config, Config):
        raise ConfigError(f"recommend takes a Config and a target, got {type(config).__name__}")
    goal = target_from(target)
    if goal.limited and trial is None:
        raise PlanError(f"a limit of {goal.limits} needs a trial to predict times from; pass trial=kit.fit(...)")
    return _Escalation(module, data, config, goal, trial).answer()


_WHY = {
    "none": "one device: the model fits, and nothing is exchanged",
    "ddp": "each device holds the model and takes its own batches: the simplest way to use several",
    "fsdp": "parameters, gradients and optimizer states are sharded over the devices, since the whole does not fit one",
}
_Key = tuple[tuple[str, Any], ...]


class _Escalation:
    """One recommendation while it is made."""

    def __init__(self, module: Any, data: Any, config: Config, target: RunTarget, trial: Any) -> None:
        self.module, self.data, self.config, self.target, self.trial = module, data, config, target, trial
        self.tried: list[TriedStep] = []
        self.reasons: list[str] = []
        self._models: dict[_Key, MemoryModel | KitError] = {}
        self._recorded: set[_Key] = set()
        self._runs: dict[str, BigRun] = {}
        self._other_kind = False
        """Whether the trial ran on another kind of device, so that its times say nothing of the target."""
        self._manual = optimizes_manually(module, config)
        if self._manual:
            self.reasons.append(
                "accumulation was left out: the module optimizes manually, and decides itself when it steps"
            )

    def answer(self) -> Recommendation:
        counts = counts_up_to(self.target.devices) if self.target.limited else [self.target.devices]
        chosen = next((found for count in counts if (found := self._first_fitting(count)) is not None), None)
        changes = () if chosen is None else tuple(self._changes(chosen))
        run = None if chosen is None else self._runs.get(chosen.step.strategy)
        return Recommendation(
            given=self.config, target=self.target, tried=tuple(self.tried), chosen=chosen, changes=changes,
            reasons=tuple(self.reasons), refusal="" if chosen is not None else self._refusal(), big_run=run,
        )  # fmt: skip

    def _first_fitting(self, devices: int) -> TriedStep | None:
        """The first step that fits on that many devices, if it keeps within the limits."""
        steps = list(escalation_steps(self.config, devices))
        for place, step in enumerate(steps):
            found = self._try(step)
            if found is None:
                continue
            self.tried.append(found)
            if found.estimate is not None and found.estimate.fits:
                return found if not self.target.limited or self._over(found) <= 1 else None
            self._record([other for other in steps[place + 1 :] if other.strategy == step.strategy])
        return None

    def _record(self, steps: Sequence[EscalationStep]) -> None:
        """Record the next steps, several at once, whole and in parts; an error is kept until the step is tried."""
        parts = (1,) if self._manual else (1, 2)
        keys: list[_Key] = []
        requests: list[RecordingRequest] = []
        for step in steps:
            key = tuple(step.changes().items())
            if key in self._models or key in self._recorded:
                continue
            self._recorded.add(key)
            with contextlib.suppress(KitError):
                for count in parts:
                    accumulate = {"levers.accumulate_grad_batches": self._accumulated(count)}
                    config = self.config.replace({**step.changes(), **accumulate})
                    query, _ = make_query(self.module, self.data, config, self.target.device, step.devices)
                    requests.append(RecordingRequest(query, (None, NEXT)))
                keys.append(key)
        for key, answer in zip(keys, record_all(requests, TIMEOUT_SECONDS)[:: len(parts)], strict=True):
            if isinstance(answer, KitError):
                self._models[key] = answer

    def _accumulated(self, parts: int) -> int:
        return self.config.levers.accumulate_grad_batches * parts

    def _over(self, found: TriedStep) -> float:
        return self.target.over(found.seconds or 0.0, found.step.devices)

    def _try(self, step: EscalationStep) -> TriedStep | None:
        """The step with the fewest parts that fit, else with the most; None where an earlier step showed the same."""
        first, model = not self.tried, self._model(step)
        tried_parts = max((one.parts for one in self.tried if one.step.changes() == step.changes()), default=0)

        def tried(parts: int, estimate: MemoryEstimate | None, note: str = "") -> TriedStep:
            words = [step.strategy] if step.devices > 1 else []
            again = step.checkpointing and not self.config.levers.gradient_checkpointing
            words += ["checkpointing"] if again else []
            words += ["8-bit optimizer"] if step.eight_bit else []
            words += [f"accumulation in {parts}"] if parts > 1 else []
            return TriedStep(
                name=" + ".join(words) or "as configured", step=step, parts=parts, estimate=estimate, note=note,
                time_factor=step.time_factor(self.config, parts), run=self._row(step),
            )  # fmt: skip

        if isinstance(model, KitError):
            if first:
                raise model
            return None if tried_parts else tried(1, None, str(model))
        most = 1 if self._manual else step.most_parts
        parts = [count for count in parts_of(model.batch_size, most) if count > tried_parts]
        for count in parts:
            estimate = model.estimate(model.batch_size // count, accumulate=self._accumulated(count))
            if estimate.fits or count == parts[-1]:
                return tried(count, estimate)
            if first and count == 1:
                self.tried.append(tried(1, estimate))
        return None

    def _model(self, step: EscalationStep) -> MemoryModel | KitError:
        key = tuple(step.changes().items())
        if key not in self._models:
            try:
                config = self.config.replace(step.changes())
                self._models[key] = memory_model(
                    config, self.module, self.data, device=self.target.device, world_size=step.devices
                )
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
            model = next(model for model in self._models.values() if isinstance(model, MemoryModel))
            on_cpu = run.scaling.cluster.on_cpu
            if on_cpu != (model.target.device_kind == "cpu"):
                reason = f"the trial ran on {'a CPU' if on_cpu else 'a GPU'}, which tells no time of {model.target}"
                if self.target.limited:
                    raise PlanError(f"{reason}; give a trial on that kind of device, or no limit")
                if not self._other_kind:
                    self.reasons.append(f"{reason}: times are factors only")
                self._other_kind = True
        return None if self._other_kind else self._runs[step.strategy].row(step.devices)

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
            reason += "" if own else "; your data makes its own batches, so make its loader with this size"
            found.append(Change(name="accumulation", values=values, reason=reason))
        self.reasons += [] if estimate is None else [estimate.reasons[0]]
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
        fitting = [one for one in self.tried if one.estimate is not None and one.estimate.fits]
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
        return (
            f"nothing fits {least.estimate.device} with {have}: {least.name}, which needs least, needs {needs}, "
            f"{format_bytes(least.short_bytes)} too much"
        )


_LEVERS = (
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
        layout = store_layout(config)
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
