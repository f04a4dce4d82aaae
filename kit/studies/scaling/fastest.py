"""The fastest setting that fits a budget of memory, over the levers together: recommend(objective="speed").

A setting is a strategy on a number of devices, a precision, an optimizer, when gradients are freed, a batch in parts,
and which blocks are checkpointed. The global batch stays what it was: batch × devices × accumulation. Each setting but
the last two is dry-run at two batch sizes; any batch and any subset of checkpointed blocks follows on paper
(`kit.memory.replay.checkpointing`), so that hundreds of points cost seconds.

For each split of the batch, blocks and modules inside them are checkpointed in the order of the seconds that they cost
for a byte that they save, only as many as are needed, and what is left of the budget is given back to those that cost
most. Smaller parts are looked at until one fits without checkpointing. What saves memory alone (gradients freed early;
8-bit states and sequence chunks, which change the numbers) is dry-run only where memory costs time. Fields in `keep`
stay as they are. What chunks of a loss over many classes would save is told as advice.

The chosen point is dry-run as it stands, and where it needs more than was thought, the budget is cut by the difference
and the search goes on. Seconds are those of `kit.predict_speed`. What it does not know (see there) is not known here.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from typing import Any

import numpy as np

from kit.config import Config
from kit.errors import KitError, PlanError
from kit.memory.alongside import fit
from kit.memory.prediction import estimate_here
from kit.memory.query import MemoryQuery, make_query
from kit.memory.recordings import NEXT, TIMEOUT_SECONDS, RecordingRequest, UnansweredError, record_all
from kit.memory.replay.calls import OperatorCall
from kit.memory.replay.cards import CARDS, THIS_MACHINE, DeviceTarget
from kit.memory.replay.checkpointing import Checkpoints, Rung, climb, loss_chunks
from kit.memory.replay.estimate import MemoryEstimate
from kit.memory.replay.replay import Recording
from kit.memory.replay.scaling import BatchScaling, ScalingError
from kit.records.row import row_of_trial
from kit.registry import Drawable
from kit.sections import Levers
from kit.speed.card_costs import CardCosts, card_of
from kit.speed.measure import table_here
from kit.speed.operators import step_of
from kit.speed.prediction import SpeedEstimate, loader_seconds, speed_of
from kit.speed.pricing import Costs
from kit.studies.scaling.escalation import Change, Recommended, RunTarget
from kit.studies.scaling.model import counts_up_to
from kit.trial.payload import batch_rule, optimizes_manually
from kit.trial.trial import Trial
from kit.units import format_bytes, format_count, format_seconds

MEASURE_SECONDS = 10.0
"""Spent on operators that were never measured here, for each setting that is dry-run."""
CONFIRMATIONS = 3
"""Dry runs of chosen points, at most."""
_DROPS = 32
"""Blocks of which less is tried, at most."""
_ALIKE, _SPARED = 1.002, 0.95
"""Times that are no different, and the share of the budget beyond which little is left."""
_READABLE, _WORTH_A_LIST = 24, 1.05
"""Names of modules that somebody reads, and how much faster a longer list must be."""
_COLUMNS = ("setting", "needs", "of budget", "step", "samples/s")


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeedPoint:
    """One setting, what it needs and how fast it is."""

    name: str
    changes: Mapping[str, Any]
    """Fields off the config as given."""
    needs_bytes: int
    """At the peak, with the high end of what is held outside the allocator."""
    step_seconds: float
    """Of one optimizer step: of the whole global batch."""
    samples_per_second: float
    fits: bool
    checkpointed: int = 0
    """Blocks that are."""
    is_tight: bool = False
    """Whether it is within the budget, and yet may run out: by fragmentation, or by more than was measured before."""


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class SpeedPlan(Recommended, Drawable):
    """The fastest setting that fits, beside all that were looked at; print it, draw it, or take its `config`."""

    budget_bytes: int
    points: tuple[SpeedPoint, ...]
    """All that were looked at, by rising step time."""
    chosen: SpeedPoint | None
    """As dry-run; None where nothing fits."""
    trial: Trial | None = field(default=None, compare=False)
    """Of the chosen setting, where its device is here."""
    loader_samples_per_second: float | None = None
    """That the loader gives where that is less than the step takes; None where the step decides, or it is not known."""
    in_time: bool = True
    """Whether all that was to be looked at could be dry-run in the time allowed."""

    @property
    def front(self) -> tuple[SpeedPoint, ...]:
        """Points that no other one beats in both memory and time, by rising memory."""
        found: list[SpeedPoint] = []
        for point in sorted(self.points, key=lambda one: (one.needs_bytes, one.step_seconds)):
            if not found or point.step_seconds < found[-1].step_seconds:
                found.append(point)
        return tuple(found)

    @property
    def _headline(self) -> str:
        if self.chosen is None:
            return self.refusal
        needs, budget = format_bytes(self.chosen.needs_bytes), format_bytes(self.budget_bytes)
        held = self.loader_samples_per_second
        return (
            f"{self.chosen.name}: {format_seconds(self.chosen.step_seconds)} a step, "
            f"{format_count(self.chosen.samples_per_second)} samples/s predicted, {needs} of {budget}"
            + (f"; its loader gives {format_count(held)} samples/s" if held is not None else "")
            + ("" if self.in_time else f"; {_CUT_SHORT}")
        )

    @property
    def _shown(self) -> list[SpeedPoint]:
        chosen = [] if self.chosen is None else [self.chosen]
        others = [point for point in self.front if not chosen or point.changes != chosen[0].changes]
        return sorted([*chosen, *others], key=lambda point: point.step_seconds)

    @property
    def _settings(self) -> dict[str, Any]:
        return {} if self.chosen is None else dict(self.chosen.changes)

    def _table(self) -> tuple[Sequence[str], list[list[str]], int | None]:
        rows = [
            [point.name, format_bytes(point.needs_bytes),
             f"{point.needs_bytes / self.budget_bytes:.0%}{', tight' if point.is_tight else ''}",
             format_seconds(point.step_seconds), format_count(point.samples_per_second)]
            for point in self._shown
        ]  # fmt: skip
        return _COLUMNS, rows, None if self.chosen is None else self._shown.index(self.chosen)


@dataclass(frozen=True, slots=True)
class _Family:
    """What is dry-run: a setting without the batch and the checkpointed blocks."""

    changes: Mapping[str, Any]
    devices: int

    def with_more(self, more: Mapping[str, Any]) -> _Family:
        return _Family({**self.changes, **more}, self.devices)


class Fastest:
    """One search while it runs."""

    def __init__(
        self, config: Config, module: Any, data: Any, target: RunTarget, keep: Sequence[str], timeout_seconds: float
    ) -> None:
        self.config, self.module, self.data, self.target, self.keep = config, module, data, target, tuple(keep)
        for path in self.keep:
            config.get(path)
        self._deadline = time.monotonic() + timeout_seconds
        self._query, self._device = make_query(module, data, config, target.device)
        self._manual = optimizes_manually(module, config)
        self._models: dict[tuple[tuple[tuple[str, Any], ...], int], _Recorded | KitError] = {}
        self.reasons: list[str] = []
        self._too_late = False
        """Whether something was left out for want of time."""
        self._costs: Costs | None = None
        checkpoints = config.levers.gradient_checkpointing and self._may(_CHECKPOINTING[0])
        self._base: dict[str, Any] = dict(zip(_CHECKPOINTING, (False, ()), strict=True)) if checkpoints else {}
        """What is undone before anything is looked at."""
        first = self._recorded([_Family({}, self._query.world_size)])[0]
        if isinstance(first, KitError):
            raise first
        self._given = first
        self._manual |= bool(first.first.facts.get("manual"))  # as a function that made the module did not tell
        batch = config.loader.batch_size if self._query.data.kind == "default" else first.batch_size
        self._global_batch = batch * self._query.world_size * config.levers.accumulate_grad_batches
        capacity = self._device.capacity_bytes
        self.budget_bytes = int(capacity * (1 - target.headroom_fraction))
        self._cut_bytes = 0
        """By how much a chosen point with checkpointed blocks needed more than was thought."""
        self._whole_blocks = False
        """Whether modules inside blocks are left alone: one may not bear to run twice where its whole block does."""

    # -- what is looked at

    def answer(self, confirm: bool) -> SpeedPlan:
        """The fastest point that fits, dry-run as it stands; a trial of it where `confirm` and its device is here."""
        points = self._points(self._speeds())
        best = self._best(points)
        if (
            best is None
            or best.checkpointed
            or best.changes.get("levers.accumulate_grad_batches", 0) > self._accumulated
        ):
            savers = self._savers(best)
            points += self._points(savers) if savers else []
        chosen: SpeedPoint | None = None
        dry_run: list[SpeedPoint] = []
        """As they stand: of these, what was thought before counts no more."""
        for _ in range(CONFIRMATIONS):
            best = self._best([point for point in points if all(point.changes != one.changes for one in dry_run)])
            if best is None:
                break
            confirmed = self._confirmed(best)
            dry_run.append(confirmed)
            if confirmed.fits:
                chosen = confirmed
                break
            # The chosen one may need no more than the budget: what it was thought to need is what was wrong.
            self._cut_bytes += max(0, confirmed.needs_bytes - self.budget_bytes)
            points = self._points(self._families_of(points))
        points = [next((one for one in dry_run if one.changes == point.changes), point) for point in points]
        if chosen is not None:
            self._note_next(chosen, points)
        trial = self._trial(chosen) if chosen is not None and confirm and self._is_here else None
        held = None if chosen is None else self._held_by_loader(chosen)
        changes = tuple(self._changes(chosen)) if chosen is not None else ()
        return SpeedPlan(
            given=self.config, target=self.target, budget_bytes=self.budget_bytes,
            points=tuple(sorted(points, key=lambda point: point.step_seconds)), chosen=chosen,
            changes=changes, reasons=tuple(self.reasons), trial=trial, loader_samples_per_second=held,
            in_time=not self._too_late,
            refusal="" if chosen is not None else self._refusal(points),
        )  # fmt: skip

    def _held_by_loader(self, chosen: SpeedPoint) -> float | None:
        """Samples per second that kit's own loader gives, where those are fewer than the steps take."""
        query = self._query.with_config(self.config.replace(chosen.changes), self._device)
        seconds = loader_seconds(query)
        if seconds is None:
            return None
        rate = query.world_size * query.config.loader.batch_size / seconds
        if rate >= chosen.samples_per_second:
            return None
        self._note(
            "its loader decides how fast it is, which none of these levers changes: kit.plan_chunks and the "
            "settings of loader do"
        )
        return rate

    @property
    def _accumulated(self) -> int:
        return self.config.levers.accumulate_grad_batches

    @property
    def _is_here(self) -> bool:
        return self._device.name == THIS_MACHINE

    def _may(self, path: str) -> bool:
        return path not in self.keep

    def _speeds(self) -> list[_Family]:
        """Settings that are taken for their speed: devices and strategies, precision, attention, fused optimizer."""
        config, found = self.config, []
        options: list[list[dict[str, Any]]] = [[{}], [{}], [{}]]
        device_bf16 = self._device.device_kind == "cpu" or (self._device.capability or (0, 0)) >= (8, 0)
        if self._may("hardware.precision") and self._query.precision == "32-true" and device_bf16:
            options[0].append({"hardware.precision": "bf16-mixed"})
        if self._may("levers.attention") and config.levers.attention == "math":
            options[1].append({"levers.attention": "auto"})
        # Another class would be another optimizer; the fused kernel of the same one gives the same numbers.
        adamw = self._given.first.facts.get("optimizers") == ["AdamW"]
        if self._may("levers.optimizer") and adamw and config.levers.optimizer in ("module", "adamw"):
            options[2].append({"levers.optimizer": "adamw-fused"})
        for places in self._places():
            for chosen in product(*options):
                changes = {path: value for one in (places.changes, *chosen) for path, value in one.items()}
                found.append(_Family(changes, places.devices))
        return found

    def _places(self) -> Iterator[_Family]:
        """Devices and how they share the work."""
        yield _Family({}, self._query.world_size)
        if not (self._may("hardware.devices") and self._may("hardware.strategy")):
            return
        for devices in counts_up_to(self.target.devices):
            if devices == 1 or self._global_batch % devices:
                continue
            shards = [f"fsdp:{devices // size}:{size}" for size in range(2, devices) if devices % size == 0]
            for strategy in ("ddp", "fsdp", *shards):
                changes = {"hardware.strategy": strategy, "hardware.devices": devices}
                if any(self.config.get(path) != value for path, value in changes.items()):
                    yield _Family(changes, devices)

    def _savers(self, best: SpeedPoint | None) -> list[_Family]:
        """The fastest setting so far, with what saves memory and no time."""
        moved = ("loader.batch_size", "levers.accumulate_grad_batches", *_CHECKPOINTING)
        changes = {} if best is None else {path: value for path, value in best.changes.items() if path not in moved}
        base = _Family(changes, int(changes.get("hardware.devices", self._query.world_size)))
        options: list[list[dict[str, Any]]] = [[{}], [{}]]
        if _FREED in {f"levers.{name}" for name in Levers.model_fields} and self._may(_FREED) and not self._manual:
            options[0].append({_FREED: True})
        if self._may("levers.optimizer") and self.config.levers.optimizer not in ("adamw-8bit", "sgd"):
            options[1].append({"levers.optimizer": "adamw-8bit"})
        if self._may(_CHUNK) and not self.config.levers.sequence_chunk and self._cuts_sequences:
            options.append([{}, *({_CHUNK: -(-self._positions // parts)} for parts in _SEQUENCE_PARTS)])
        combined = [{path: value for one in chosen for path, value in one.items()} for chosen in product(*options)]
        return [base.with_more(more) for more in combined if more]

    @property
    def _cuts_sequences(self) -> bool:
        """Whether the module is known to train a sequence in chunks; what a function makes is not known."""
        made = getattr(self.module, "func", self.module)
        return not self._manual and callable(getattr(made, "chunk_step", None)) and self._positions > 1

    @property
    def _positions(self) -> int:
        """Length of the sequences: the second dimension of the first tensor that has the batch as its first."""
        recording = self._given.first
        for number in recording.operator_call[recording.batch_starts[0] :].tolist():
            call = OperatorCall.of(recording.calls[number]) if number >= 0 else None
            for spec in (*call.inputs, *call.outputs) if call is not None else ():
                if len(spec.shape) > 1 and spec.shape[0] == recording.batch_size:
                    return spec.shape[1]
        return 0

    def _families_of(self, points: Sequence[SpeedPoint]) -> list[_Family]:
        moved = ("loader.batch_size", "levers.accumulate_grad_batches", *_CHECKPOINTING)
        found = {}
        for point in points:
            changes = {path: value for path, value in point.changes.items() if path not in moved}
            devices = int(changes.get("hardware.devices", self._query.world_size))
            found[tuple(changes.items())] = _Family(changes, devices)
        return list(found.values())

    # -- how they are judged

    def _points(self, families: Sequence[_Family]) -> list[SpeedPoint]:
        self._recorded(families)
        return [point for family in families for point in self._of(family)]

    def _of(self, family: _Family) -> Iterator[SpeedPoint]:
        """The best point of each split of the batch, until one fits with all that its forward pass made."""
        each = self._global_batch // family.devices
        for accumulate in self._splits(each):
            recorded = self._recorded([family], accumulate)[0]
            parts = " with accumulation" if accumulate > self._accumulated else ""
            what = f"{_name(family.changes) or 'as configured'}{parts}"
            if isinstance(recorded, KitError):
                self._note(f"{what} was left out: {recorded}")
                return
            try:
                found = self._split(family, recorded, each // accumulate, accumulate)
            except KitError as error:
                unscaled = "what it holds at other batches does not follow from two dry runs: "
                why = f"{unscaled if isinstance(error, ScalingError) else ''}{error}"
                self._note(f"{what} was left out: {why}")
                return
            yield from found
            if found and found[0].fits and not found[0].checkpointed:
                return

    def _splits(self, each: int) -> list[int]:
        """Micro-batches of a step, as they may be."""
        same = self._accumulated
        if self._manual or not self._may("levers.accumulate_grad_batches") or each % same:
            return [same] if each % same == 0 else []
        return [parts for parts in range(1, each + 1) if each % parts == 0]

    def _split(self, family: _Family, recorded: _Recorded, batch: int, accumulate: int) -> list[SpeedPoint]:
        """Without checkpointing, and where that does not fit with as little of it as does, and with all."""
        recording = recorded.at(batch, accumulate)
        plain = self._point(family, recorded, recording, batch, accumulate, ())
        blocks = recorded.blocks
        if plain.fits or not blocks or not self._may(_CHECKPOINTING[0]):
            return [plain]
        checkpoints = Checkpoints(recording)
        known: dict[frozenset[str], SpeedPoint] = {}

        def point(names: Iterable[str]) -> SpeedPoint:
            chosen = frozenset(names)
            if chosen not in known:
                again = checkpoints.checkpointed(chosen)
                known[chosen] = self._point(family, recorded, again, batch, accumulate, chosen)
            return known[chosen]

        everything = point(blocks.values())
        if not everything.fits:
            return [plain, everything]
        ladders = self._ladders(checkpoints, recorded, family)
        steps = climb(ladders)

        def after(count: int) -> dict[int, Rung]:
            return dict(steps[:count])  # the last rung of each ladder

        low, high, least, beyond = 0, len(steps), everything, plain
        while high - low > 1:
            middle = (low + high) // 2
            tried = point(Rung.of(after(middle).values()).names)
            if tried.fits:
                high, least = middle, tried
            else:
                low, beyond = middle, tried
        least = self._filled(after(high), ladders, point, least)
        found = [plain]
        found.extend(one for one in (beyond, least, everything) if one not in found)
        return found

    def _filled(
        self, chosen: dict[int, Rung], ladders: Sequence[Sequence[Rung]],
        point: Callable[[Iterable[str]], SpeedPoint], least: SpeedPoint,
    ) -> SpeedPoint:  # fmt: skip
        """The point with less of one block or another, as far as the budget goes: what gains most seconds first."""
        refused: set[tuple[str, ...]] = set()
        for _ in range(_DROPS):
            free_bytes = self.budget_bytes - least.needs_bytes
            less = []
            for place, rung in chosen.items():
                for other in (Rung.of(()), *ladders[place]):
                    if other.seconds < rung.seconds and other.saved_bytes < rung.saved_bytes:
                        # A peak may lie where a block holds nothing, so what seems too much is tried too, but last.
                        too_much = rung.saved_bytes - other.saved_bytes > free_bytes
                        less.append((too_much, other.seconds - rung.seconds, place, other))
            for _, _, place, other in sorted(less, key=lambda one: one[:3]):
                names = Rung.of({**chosen, place: other}.values()).names
                if names not in refused:
                    tried = point(names)
                    if tried.fits:
                        chosen, least = {**chosen, place: other}, tried
                    else:
                        refused.add(names)
                    break
            else:
                break
        return least

    def _ladders(self, checkpoints: Checkpoints, recorded: _Recorded, family: _Family) -> list[list[Rung]]:
        """What may be checkpointed of each block, with what it saves and what it costs."""
        step = step_of(checkpoints.recording)
        priced = self._speed(checkpoints.recording, family.devices)
        seconds, repeats = (np.zeros(len(checkpoints.recording.operator_name)) for _ in range(2))
        costs, time = self._costs, priced.time
        assert costs is not None  # since the first dry run
        # Beside a GPU the slower of device and host decides, on a CPU both do.
        host_decides = time.host_seconds > time.busy_seconds
        of_host, of_device = not costs.asynchronous or host_decides, not (costs.asynchronous and host_decides)
        repeats[step.place] = step.repeats
        seconds[step.place] = of_device * time.operator_seconds
        seconds += of_host * costs.host_seconds("backward") * repeats
        call_seconds = costs.checkpoint_seconds if of_host else lambda _: 0.0
        found = {block: checkpoints.ladder(block, seconds, repeats, call_seconds) for block in recorded.blocks.values()}
        if self._whole_blocks:
            return [[rung for rung in ladder if rung.names == (block,)] for block, ladder in found.items()]
        return list(found.values())

    def _speed(self, recording: Recording, devices: int) -> SpeedEstimate:
        return speed_of(recording, self._device, devices=devices, costs=self._costs)

    def _priced(self, first: Recording) -> Costs:
        """What operators cost on the device: measured here, else by a data sheet."""
        if self._device.device_kind == "cpu" or self._is_here:
            return table_here(self.config, step_of(first), seconds=MEASURE_SECONDS).table
        try:
            return CardCosts(card_of(self._device))
        except PlanError:
            near = min(CARDS, key=lambda card: abs(card.memory_bytes - self._device.capacity_bytes))
            self._note(f"a size of memory has no speed: that of {near.name} is taken; name a card to change it")
            return CardCosts(near)

    def _point(
        self, family: _Family, recorded: _Recorded, recording: Recording, batch: int, accumulate: int,
        checkpointed: Collection[str],
    ) -> SpeedPoint:  # fmt: skip
        estimate = estimate_here(recorded.query, recording, recorded.target)
        changes = {**self._base, **family.changes}
        if batch != self.config.loader.batch_size or self._query.data.kind != "default":
            changes["loader.batch_size"] = batch
        if accumulate != self._accumulated:
            changes["levers.accumulate_grad_batches"] = accumulate
        if checkpointed:
            changes[_CHECKPOINTING[0]] = True
            labels = {name: label for label, name in recorded.blocks.items()}
            chosen = [labels.get(name, name) for name in sorted(checkpointed, key=_natural)]
            if len(chosen) < len(labels) or not all(label.isdecimal() for label in chosen):
                changes[_CHECKPOINTING[1]] = shortened(chosen)
        changes = {path: value for path, value in changes.items() if self.config.get(path) != value}
        return self._judged(changes, estimate, self._speed(recording, family.devices), len(checkpointed))

    def _judged(
        self, changes: Mapping[str, Any], estimate: MemoryEstimate, speed: SpeedEstimate, checkpointed: int,
        confirmed: bool = False,
    ) -> SpeedPoint:  # fmt: skip
        needs = estimate.total_bytes[1] + (self._cut_bytes if checkpointed and not confirmed else 0)
        return SpeedPoint(
            name=_name(changes) or "as configured", changes=changes, needs_bytes=needs,
            step_seconds=speed.step_seconds, samples_per_second=self._global_batch / speed.step_seconds,
            fits=estimate.may_fit and needs <= self.budget_bytes,
            checkpointed=checkpointed, is_tight=estimate.verdict == "tight" and needs <= self.budget_bytes,
        )  # fmt: skip

    def _recorded(self, families: Sequence[_Family], accumulate: int | None = None) -> list[_Recorded | KitError]:
        """Each at two batch sizes, once; accumulated or not is another recording, how much is not."""
        repeated = min(2, accumulate or self._accumulated)
        keys, requests = [], []
        for family in families:
            key = (tuple(family.changes.items()), repeated)
            if key in self._models:
                continue
            try:
                changes = {**self._base, **family.changes, "levers.accumulate_grad_batches": repeated}
                query, target = make_query(self.module, self.data, self.config.replace(changes), self.target.device)
                keys.append((key, query, target))
                requests.append(RecordingRequest(query, (None, NEXT)))
            except KitError as error:
                self._models[key] = error
        left_seconds = self._deadline - time.monotonic()
        if requests and left_seconds <= 0:
            self._too_late = True
            for key, _, _ in keys:
                self._models[key] = PlanError("there was no time left to dry-run it")
        elif requests:
            for (key, query, target), found in zip(keys, record_all(requests, left_seconds), strict=True):
                self._models[key] = found if isinstance(found, KitError) else self._of_two(query, target, *found)
                self._too_late |= isinstance(found, UnansweredError)
                if not isinstance(found, KitError) and (self._costs is None or self._device.device_kind == "cpu"):
                    self._costs = self._priced(found[0])
        return [self._models[tuple(family.changes.items()), repeated] for family in families]

    def _of_two(
        self, query: MemoryQuery, target: DeviceTarget, first: Recording, second: Recording
    ) -> _Recorded | KitError:
        if unknown := first.facts.get("unknown"):
            return PlanError(f"activations are not known: {unknown}")
        scaling = _scaling(first, second)
        if isinstance(scaling, KitError) and first.batch_size == 1:
            # A batch of one has dimensions of one, of which torch runs fewer operators than of any other.
            left_seconds = max(1.0, self._deadline - time.monotonic())
            (third,) = record_all([RecordingRequest(query, (second.batch_size + 1,))], left_seconds)
            scaling = third if isinstance(third, KitError) else _scaling(second, third[0])
        return _Recorded(query, target, first, scaling)

    # -- the answer

    def _confirmed(self, point: SpeedPoint) -> SpeedPoint:
        """The point as a dry run of its very config has it."""
        config = self.config.replace(dict(point.changes))
        query, target = make_query(self.module, self.data, config, self.target.device)
        size = None if query.data.kind == "default" else int(point.changes.get("loader.batch_size", 0)) or None
        left_seconds = max(TIMEOUT_SECONDS, self._deadline - time.monotonic())  # an answer is worth its dry run
        (found,) = record_all([RecordingRequest(query, (size,))], left_seconds)
        if isinstance(found, KitError):
            self._note(f"{point.name} could not be dry-run again: {found}")
            self._whole_blocks = True
            return replace(point, fits=False)
        estimate = estimate_here(query, found[0], target)
        speed = self._speed(found[0], query.world_size)
        confirmed = self._judged(point.changes, estimate, speed, point.checkpointed, confirmed=True)
        ratio = confirmed.needs_bytes / point.needs_bytes
        self._note(
            f"{confirmed.name}, dry-run as it stands: {format_bytes(confirmed.needs_bytes)}, {ratio:.3f} of what was "
            f"thought; {confirmed.needs_bytes / self.budget_bytes:.1%} of the budget"
        )
        if chunks := loss_chunks(found[0]):
            spent = speed.time.operator_seconds[chunks.again[speed.time.step.place]].sum()
            self._note(chunks.advice(float(spent)))
        return confirmed

    def _trial(self, chosen: SpeedPoint) -> Trial:
        config = self.config.replace(dict(chosen.changes))
        trial = fit(config, self.module, self.data)
        trial.wait()
        if trial.state != "COMPLETE":
            self._note(f"its trial ended {trial.state}: {trial.message}")
            return trial
        row = row_of_trial(trial)
        peak, pace = trial.event("memory_measured", "device_allocated_bytes"), row.get("samples_per_second")
        if pace:
            text = f"its trial: {pace:.3g} samples/s, measured / predicted {pace / chosen.samples_per_second:.2f}"
            text += f"; {format_bytes(peak)} at the peak" if peak else ""
            self._note(text)
        return trial

    def _changes(self, chosen: SpeedPoint) -> Iterator[Change]:
        for paths, name, reason in _WHY:
            values = {path: chosen.changes[path] for path in paths if path in chosen.changes}
            if values:
                reason = _WHY_OPTIMIZER[values["levers.optimizer"]] if name == "optimizer" else reason
                yield Change(name=name, values=values, reason=reason)
        rule, size = batch_rule(self._query.data, self._query.config), chosen.changes.get("loader.batch_size")
        if size is not None and not rule.by_config and rule.size != size:
            self._note(f"{rule.whose} makes its own batches: make its loader with {size}")

    def _note(self, text: str) -> None:
        if text not in self.reasons:
            self.reasons.append(text)

    def _note_next(self, chosen: SpeedPoint, points: Sequence[SpeedPoint]) -> None:
        """Say what the next faster setting lacks, so that memory that is left over is not wondered at."""
        faster = [point for point in points if not point.fits and point.step_seconds < chosen.step_seconds]
        if faster:
            near = min(faster, key=lambda point: point.needs_bytes)
            lacks_bytes = near.needs_bytes - self.budget_bytes
            if lacks_bytes > 0:
                why = f"needs {format_bytes(lacks_bytes)} more than there is"
            else:
                why = "may run out where memory is fragmented" if near.is_tight else "could not be confirmed"
            self._note(f"the next faster setting that was looked at, {near.name}, {why}")

    def _refusal(self, points: Sequence[SpeedPoint]) -> str:
        if not points:
            return f"nothing could be predicted: {self.reasons[0] if self.reasons else 'there was no time'}"
        least = min(points, key=lambda point: point.needs_bytes)
        if least.needs_bytes <= self.budget_bytes:
            return f"nothing that was dry-run as it stands fits {format_bytes(self.budget_bytes)}; {self.reasons[-1]}"
        least_of_all = (
            f"{format_bytes(self.budget_bytes)}: {least.name}, which needs least, needs "
            f"{format_bytes(least.needs_bytes)}, {format_bytes(least.needs_bytes - self.budget_bytes)} too much"
        )
        if self._too_late:
            return f"undecided whether anything fits {least_of_all}; {_CUT_SHORT}"
        return f"nothing fits {least_of_all}"

    def _best(self, points: Sequence[SpeedPoint]) -> SpeedPoint | None:
        """The fastest that fits; of equal ones one with memory to spare, then that which changes least."""
        fitting = [point for point in points if point.fits]
        readable = [point for point in fitting if len(point.changes.get(_CHECKPOINTING[1], ())) <= _READABLE]
        fastest, simple = (min((one.step_seconds for one in some), default=math.inf) for some in (fitting, readable))
        if simple <= _WORTH_A_LIST * fastest:
            fitting, fastest = readable, simple

        def preference(point: SpeedPoint) -> tuple[bool, int, float]:
            return point.needs_bytes > _SPARED * self.budget_bytes, len(point.changes), point.step_seconds

        return min((one for one in fitting if one.step_seconds <= _ALIKE * fastest), key=preference, default=None)


@dataclass(frozen=True, slots=True)
class _Recorded:
    """A family at its own batch size, and what follows for others, or why nothing does."""

    query: MemoryQuery
    target: DeviceTarget
    first: Recording
    scaling: BatchScaling | KitError

    @property
    def batch_size(self) -> int:
        return self.first.batch_size

    @property
    def blocks(self) -> dict[str, str]:
        """Label to name of the blocks that may be checkpointed."""
        return dict(self.first.facts.get("blocks", {}))

    def at(self, batch: int, accumulate: int) -> Recording:
        if batch == self.batch_size:
            recording = self.first
        elif isinstance(self.scaling, KitError):
            raise self.scaling
        else:
            recording = self.scaling.at(batch)
        return replace(recording, facts={**recording.facts, "accumulate_grad_batches": accumulate})


def _scaling(first: Recording, second: Recording) -> BatchScaling | KitError:
    try:
        return BatchScaling(first, second)
    except KitError as error:
        return error


def _natural(name: str) -> list[tuple[int, str]]:
    """Order in which the tenth comes after the ninth."""
    return [(int(part), "") if part.isdecimal() else (-1, part) for part in name.split(".")]


def shortened(labels: Sequence[str]) -> tuple[str, ...]:
    """Labels of blocks as `levers.checkpoint_blocks` has them: numbers in a row as "0-5"."""
    found: list[list[int]] = []
    for number in sorted(int(label) for label in labels if label.isdecimal()):
        if found and number == found[-1][1] + 1:
            found[-1][1] = number
        else:
            found.append([number, number])
    numbers = [str(first) if first == last else f"{first}-{last}" for first, last in found]
    return (*numbers, *(label for label in labels if not label.isdecimal()))


def _name(changes: Mapping[str, Any]) -> str:
    words = []
    for path, value in changes.items():
        if path == "hardware.strategy":
            words.append(f"{value} on {changes.get('hardware.devices', '')} devices")
        elif path == _CHECKPOINTING[0]:
            blocks = changes.get(_CHECKPOINTING[1])
            few = blocks and (", ".join(blocks) if len(blocks) < 4 else f"{blocks[0]} and {len(blocks) - 1} others")
            words.append(f"blocks {few} checkpointed" if few else "all blocks checkpointed")
        elif path in _WORDS:
            words.append(_WORDS[path].format(value))
    return " + ".join(words)


_FREED = "levers.zero_grad_after_step"
_CHUNK, _SEQUENCE_PARTS = "levers.sequence_chunk", (2, 4)
_CHECKPOINTING = ("levers.gradient_checkpointing", "levers.checkpoint_blocks")
_WORDS = {
    "hardware.precision": "{}", "levers.attention": "attention {}", "levers.optimizer": "{}",
    _FREED: "gradients freed after the step", _CHUNK: "sequences in chunks of {}",
    "levers.accumulate_grad_batches": "accumulation in {}",
}  # fmt: skip
_WHY_OPTIMIZER = {
    "adamw-fused": "one kernel and no temporaries: the same numbers",
    "adamw-8bit": "states in a quarter of the bytes: other numbers",
}
_CUT_SHORT = "not all could be looked at in time, so raise timeout_seconds"
_WHY = (
    (("hardware.strategy", "hardware.devices"), "devices", "the same global batch, shared out"),
    (("hardware.precision",), "precision", "faster products and half the activations: other numbers"),
    (("levers.attention",), "attention", "scores are not stored"),
    (("levers.optimizer",), "optimizer", ""),
    ((_FREED,), "gradients", "freed before the next forward pass"),
    ((_CHUNK,), "sequence chunks", "activations and logits of one chunk at a time: gradients end at its borders"),
    (("loader.batch_size", "levers.accumulate_grad_batches"), "batch", "the same global batch in other parts"),
    (_CHECKPOINTING, "checkpointing", "only as many blocks as do not fit, those first that cost least for a byte"),
)  # fmt: skip
