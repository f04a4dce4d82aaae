"""recommend: the smallest change of a config that fits a target and is fast enough, with what is predicted and why.

The rungs of `kit.studies.scaling.ladder` are tried in order; each is dry-run once (`kit.memory_model`), and every other
batch follows from that at once. All devices of the target are used, or, where time or money is limited, the fewest that
keep within it. Time comes from a trial on the same kind of device through `kit.predict_run`; without one, times are
factors of the config's own. A module that optimizes manually is offered no accumulation. Nothing is trained, nothing
changed: `config` is a changed copy, and where nothing fits, it is refused, with what the smallest rung is short of.

Climbing the ladder: which rung is the first that fits a target, and what changes with it.

Rungs are tried in the order of `kit.studies.scaling.ladder`, on all devices or, within limits, on ever more of them.
Each is dry-run once; what its other batches need follows from that. A module that optimizes manually steps when it
likes, so that a batch in parts is left to it and never offered.

Data advice: loader processes and chunk layout of a recommendation, where data is what holds the run up.

Sizes of loading come from `kit.data.build.schedulers`, the layout from `kit.plan_chunks` beside the store as it is.
What would help only if data were the limit is said and not changed: nothing is rebuilt on a guess.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from typing import Any, overload

from kit.config import Config
from kit.data.build.schedulers import advise_schedule
from kit.errors import ConfigError, KitError, PlanError
from kit.memory.batch_model import MemoryModel, memory_model
from kit.memory.prediction import TIMEOUT_SECONDS
from kit.memory.query import MemoryQuery, make_query
from kit.memory.recordings import NEXT, RecordingRequest, all_recordings
from kit.memory.replay.cards import THIS_MACHINE
from kit.memory.replay.estimate import MemoryEstimate
from kit.studies.scaling.ladder import Change, Recommendation, Rung, RunTarget, TriedRung, parts_of, rungs, target_from
from kit.studies.scaling.model import counts_up_to
from kit.studies.scaling.predict import BigRun, BigRunRow, predict_run
from kit.trial.payload import optimizes_manually
from kit.units import format_bytes, format_seconds


@overload
def recommend(config: Config, target: Any, /, *, trial: Any = None) -> Recommendation: ...
@overload
def recommend(module: Any, data: Any, config: Config, target: Any, *, trial: Any = None) -> Recommendation: ...
def recommend(
    module: Any, data: Any = None, config: Config | None = None, target: Any = None, *, trial: Any = None
) -> Recommendation:
    """What to change of `config` so that it fits `target`.

    Args:
        module: What `kit.fit` takes as module.
        data: What `kit.fit` takes as data.
        config: Where to start. `recommend(config, target)` alone takes module and data from it.
        target: A device such as "H100-80GB" or "24 GiB", or a mapping: `{"device": "A100-40GB", "devices": 8, "hours":
            12, "money": 500, "prices": "AWS H100"}`; see `kit.studies.scaling.ladder.RunTarget`.
        trial: Trials of this config, as `kit.predict_run` takes them, for times; needed where time or money is limited.

    Raises:
        ConfigError, PlanError: for what is no config or target, and a limit without a trial.
        KitError: what `kit.predict_memory` raises about the config as it is.
    """
    if isinstance(module, Config) and config is None:
        module, data, config, target = None, None, module, data if data is not None else target
    if not isinstance(config, Config):
        raise ConfigError(f"recommend takes a Config and a target, got {type(config).__name__}")
    wanted = target_from(target)
    if wanted.limited and trial is None:
        raise PlanError(f"a limit of {wanted.limits} needs a trial to foretell times from; pass trial=kit.fit(...)")
    return LadderSearch(module, data, config, wanted, trial).answer()


_WHY = {
    "hardware.strategy": {
        "none": "one device: the model fits, and nothing is exchanged",
        "ddp": "each device holds the model and takes its own batches: the simplest way to more of them",
        "fsdp": "parameters, gradients and optimizer states are shared out over the devices, since whole they do not "
        "fit one",
    },
}


class LadderSearch:
    """One recommendation on its way."""

    def __init__(self, module: Any, data: Any, config: Config, target: RunTarget, trial: Any) -> None:
        self.module, self.data, self.config, self.target, self.trial = module, data, config, target, trial
        self.tried: list[TriedRung] = []
        self.reasons: list[str] = []
        self._models: dict[tuple[Any, ...], MemoryModel | KitError] = {}
        self._recorded: set[tuple[Any, ...]] = set()
        self._runs: dict[str, BigRun] = {}
        self._kind = ""
        self._manual = optimizes_manually(module, config)
        if self._manual:
            self.reasons.append(
                "accumulation was left out: the module optimizes manually, and decides itself when it steps"
            )

    def answer(self) -> Recommendation:
        counts = counts_up_to(self.target.devices) if self.target.limited else [self.target.devices]
        chosen = next((found for count in counts if (found := self._climb(count)) is not None), None)
        changes = () if chosen is None else tuple(self._changes(chosen))
        run = None if chosen is None else self._runs.get(chosen.rung.strategy)
        return Recommendation(
            given=self.config, target=self.target, tried=tuple(self.tried), chosen=chosen, changes=changes,
            reasons=tuple(self.reasons), refusal="" if chosen is not None else self._refusal(), big_run=run,
        )  # fmt: skip

    def _climb(self, devices: int) -> TriedRung | None:
        """The first rung that fits on that many devices, if it keeps within the limits."""
        ladder = list(rungs(self.config, devices))
        for place, rung in enumerate(ladder):
            found = self._try(rung, first=not self.tried)
            if found is None:
                continue
            self.tried.append(found)
            if found.estimate is not None and found.estimate.fits:
                return found if self._within(found) else None
            self._record([other for other in ladder[place + 1 :] if other.strategy == rung.strategy])
        return None

    def _record(self, others: Sequence[Rung]) -> None:
        """Have what comes next recorded, several at once, whole and in parts; what fails says so in its turn."""
        looks = (1,) if self._manual else (1, 2)
        keys: list[tuple[Any, ...]] = []
        wanted: list[RecordingRequest] = []
        for rung in others:
            key = self._key(rung)
            if key in self._models or key in self._recorded:
                continue
            self._recorded.add(key)
            with contextlib.suppress(KitError):
                wanted += [RecordingRequest(self._ask(rung, parts), (None, NEXT)) for parts in looks]
                keys.append(key)
        for key, answer in zip(keys, all_recordings(wanted, TIMEOUT_SECONDS)[:: len(looks)], strict=True):
            if isinstance(answer, KitError):
                self._models[key] = answer

    def _ask(self, rung: Rung, parts: int) -> MemoryQuery:
        accumulated = self.config.levers.accumulate_grad_batches * parts
        config = self.config.replace({**rung.changes(), "levers.accumulate_grad_batches": accumulated})
        question, _ = make_query(self.module, self.data, config, self.target.device, rung.devices)
        return question

    def _within(self, found: TriedRung) -> bool:
        return not self.target.limited or self._over(found) <= 1

    def _over(self, found: TriedRung) -> float:
        return self.target.over(found.seconds or 0.0, found.rung.devices)

    def _try(self, rung: Rung, *, first: bool) -> TriedRung | None:
        """The rung with the fewest parts that fit, else with the most; None where a rung before it said as much."""
        model = self._model(rung)
        if isinstance(model, KitError):
            if first:
                raise model
            return None if self._most_parts(rung) else self._tried(rung, 1, None, str(model))
        most = 1 if self._manual else rung.most_parts
        parts = [count for count in parts_of(model.batch_size, most) if count > self._most_parts(rung)]
        if not parts:
            return None
        estimates = ((count, self._estimate(model, count)) for count in parts)
        if first and len(parts) > 1 and not (alone := self._estimate(model, 1)).fits:
            self.tried.append(self._tried(rung, 1, alone, ""))
        for count, estimate in estimates:  # noqa: B007 - both are those of the last look
            if estimate.fits:
                break
        return self._tried(rung, count, estimate, "")

    def _estimate(self, model: MemoryModel, parts: int) -> MemoryEstimate:
        accumulated = self.config.levers.accumulate_grad_batches * parts
        return model.estimate(model.batch_size // parts, accumulate=accumulated)

    def _most_parts(self, rung: Rung) -> int:
        """That were tried with these changes."""
        return max((one.parts for one in self.tried if one.rung.changes() == rung.changes()), default=0)

    def _tried(self, rung: Rung, parts: int, estimate: MemoryEstimate | None, note: str) -> TriedRung:
        return TriedRung(
            name=_name(rung, parts, self.config), rung=rung, parts=parts, estimate=estimate, note=note,
            time_factor=rung.time_factor(self.config, parts), run=self._row(rung),
        )  # fmt: skip

    @staticmethod
    def _key(rung: Rung) -> tuple[Any, ...]:
        return tuple(rung.changes().items())

    def _model(self, rung: Rung) -> MemoryModel | KitError:
        key = self._key(rung)
        if key not in self._models:
            try:
                config = self.config.replace(rung.changes())
                self._models[key] = memory_model(
                    self.module, self.data, config, device=self.target.device, world_size=rung.devices
                )
            except KitError as error:
                self._models[key] = error
        return self._models[key]

    # -- time

    def _row(self, rung: Rung) -> BigRunRow | None:
        if self.trial is None:
            return None
        if rung.strategy not in self._runs:
            counts = [1] if rung.strategy == "none" else counts_up_to(self.target.devices)
            strategy = None if rung.strategy == "none" else rung.strategy
            run = predict_run(
                self.trial, devices=counts, strategy=strategy, prices=self.target.prices,
                cores_per_node=self.target.cores, memory=False,
            )  # fmt: skip
            self._runs[rung.strategy] = run
            self._check_kind(run)
        return None if self._kind else self._runs[rung.strategy].row(rung.devices)

    def _check_kind(self, run: BigRun) -> None:
        """A CPU tells nothing of a GPU, nor the other way round."""
        model = next(model for model in self._models.values() if isinstance(model, MemoryModel))
        measured = "cpu" if run.scaling.cluster.on_cpu else "cuda"
        if measured == model.target.device_kind:
            return
        said = f"the trial ran on {'a CPU' if measured == 'cpu' else 'a GPU'}, which tells no time of {model.target}"
        if self.target.limited:
            raise PlanError(f"{said}; give a trial on that kind of device, or no limit")
        if not self._kind:
            self.reasons.append(f"{said}: times are factors only")
        self._kind = measured

    # -- words

    def _changes(self, chosen: TriedRung) -> list[Change]:
        given, rung = self.config, chosen.rung
        wanted = {path: value for path, value in rung.changes().items() if given.get(path) != value}
        found: list[Change] = []
        if rung.devices == 1 and given.hardware.strategy == "none":
            wanted = {path: value for path, value in wanted.items() if path != "hardware.devices"}
        where = {path: value for path, value in wanted.items() if path.startswith("hardware")}
        if where:
            why = _WHY["hardware.strategy"][rung.strategy.partition(":")[0]]
            devices = f"{rung.devices} device{'s' * (rung.devices > 1)}"
            name = f"{rung.strategy} on {devices}" if rung.devices > 1 else "one device"
            found.append(Change(name=name, values=where, reason=f"{why}{_gain(self._runs, chosen)}"))
        found += _lever_changes(chosen, wanted)
        found += self._batch_change(chosen)
        changed = given.replace({path: value for change in found for path, value in change.values.items()})
        self.reasons += self._assumed(chosen)
        if self.target.cores is None and self.target.device != THIS_MACHINE:
            return found
        advice, notes = data_changes(changed, chosen.run, ranks=rung.devices, cores=self.target.cores, own=self._own)
        self.reasons += notes
        return [*found, *advice]

    def _batch_change(self, chosen: TriedRung) -> list[Change]:
        if chosen.parts == 1 or chosen.estimate is None:
            return []
        values = {
            "loader.batch_size": chosen.estimate.batch_size,
            "levers.accumulate_grad_batches": chosen.estimate.accumulate_grad_batches,
        }
        own = "" if self._own else "; your data makes its own batches, so make its loader with this size"
        reason = f"{chosen.parts} parts of {chosen.estimate.batch_size}, the same global batch{own}"
        return [Change(name="accumulation", values=values, reason=reason)]

    @property
    def _own(self) -> bool:
        """Whether kit makes the loader."""
        return self.data is None

    def _assumed(self, chosen: TriedRung) -> list[str]:
        found = [] if chosen.estimate is None else [chosen.estimate.reasons[0]]
        if chosen.rung.devices > 1:
            found.append(
                f"the global batch is that of {chosen.rung.devices} devices: the learning rate may have to follow"
            )
        if chosen.time_factor != 1:
            found.append("time of checkpointing and of smaller batches is by rule: kit.verify_levers measures it")
        return found if self.trial is not None else [*found, "times are factors: a trial tells seconds (trial=)"]

    def _refusal(self) -> str:
        fitting = [one for one in self.tried if one.estimate is not None and one.estimate.fits]
        if fitting:
            best = min(fitting, key=self._over)
            seconds = format_seconds(best.seconds or 0.0)
            return (
                f"nothing keeps within {self.target.limits}: the nearest is {best.name} on {best.rung.devices} "
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


def _lever_changes(chosen: TriedRung, wanted: Mapping[str, Any]) -> list[Change]:
    found = []
    if "levers.gradient_checkpointing" in wanted:
        found.append(Change(
            name="checkpointing", values={"levers.gradient_checkpointing": True},
            reason="activations of repeated blocks are computed again: a third more time",
        ))  # fmt: skip
    if "levers.optimizer" in wanted:
        found.append(Change(
            name="8-bit optimizer", values={"levers.optimizer": chosen.rung.changes()["levers.optimizer"]},
            reason="AdamW's states in a quarter of the bytes, in the place of the optimizer there is: other numbers",
        ))  # fmt: skip
    return found


def _gain(runs: Mapping[str, BigRun], chosen: TriedRung) -> str:
    run = runs.get(chosen.rung.strategy)
    if run is None or chosen.run is None or chosen.rung.devices == 1:
        return ""
    one = run.rows[0]
    return f"; {chosen.run.samples_per_second / one.samples_per_second:.2f} × one device's samples/s predicted"


def _name(rung: Rung, parts: int, given: Config) -> str:
    words = [rung.strategy] if rung.devices > 1 else []
    words += ["checkpointing"] if rung.checkpointing and not given.levers.gradient_checkpointing else []
    words += ["8-bit optimizer"] if rung.eight_bit else []
    words += [f"accumulation in {parts}"] if parts > 1 else []
    return " + ".join(words) or "as configured"


_DATA = ("loading", "store requests/s", "store bandwidth", "loader CPU")
_WORTH = 1.5
"""So many times faster another layout has to be to be built for."""


def data_changes(
    config: Config, run: BigRunRow | None, *, ranks: int, cores: int | None, own: bool
) -> tuple[list[Change], list[str]]:
    """What to change of loading, and what to know of it.

    Args:
        config: With the other changes made.
        run: The prediction for it, where there is one.
        ranks: Of a node.
        cores: Of a node; None for those of this machine.
        own: Whether kit makes the loader.
    """
    held = run is not None and run.bound in _DATA
    workers, said = _workers(config, held, ranks, cores, own)
    layout, more = _layout(config, held) if own else ([], [])
    return [*workers, *layout], [*said, *more]


def _workers(config: Config, held: bool, ranks: int, cores: int | None, own: bool) -> tuple[list[Change], list[str]]:
    schedule = advise_schedule(config, cores=cores, ranks=ranks, heavy_transform=held and not own)
    values = {"loader.num_workers": schedule.loader_workers, "loader.decode_threads": schedule.decode_threads}
    values = {path: value for path, value in values.items() if config.get(path) != value}
    crowded = [text for text in schedule.warnings if "take turns" in text and own]
    if not values or not (held or crowded):
        return [], []
    reason = crowded[0] if crowded else f"data holds the run up; {schedule.reasons[0]}"
    notes = [] if own else ["loader settings reach a loader that kit makes; kit.calibrate measures yours"]
    return [Change(name="workers", values=values, reason=reason)], notes


def _layout(config: Config, held: bool) -> tuple[list[Change], list[str]]:
    """Another layout where the store is slow to read; nothing where there is no store yet."""
    from kit.data.build.layout import plan_chunks, price_store
    from kit.data.dataset import open_dataset

    try:
        now = price_store(config, open_dataset(config))
        free = config.replace({"chunking.chunk": "auto", "chunking.shard": "auto", "data.source": None})
        plan = plan_chunks(free)
    except KitError:
        return [], []
    seconds = sum(cost.seconds_per_batch for cost in now)
    if seconds < _WORTH * plan.seconds_per_batch:
        return [], []
    chunk = dict(zip(plan.dims, plan.chunk, strict=True))
    planned, cut = format_seconds(plan.seconds_per_batch), " × ".join(map(str, plan.chunk))
    said = f"a batch takes {format_seconds(seconds)} to read as the store is cut, {planned} in chunks of {cut}"
    if not held:
        return [], [f"{said}: worth building anew if data should hold the run up"]
    reason = f"{said}; build it anew with kit.build"
    return [Change(name="chunk layout", values={"chunking.chunk": chunk}, reason=reason)], []
