"""The job that measures what calls cost on this machine's device, in a process of its own.

On a CPU the calls of a step are played in its order, as its code and its numbers are in no cache when a call's turn
comes; each at a few of its places, again and again, so that no moment in which the machine stood still decides. What
Python takes to make a call that does nothing is not a call's. A step that holds too much memory is played in parts.

The costs of the host come from tiny modules of kit's own, each trained for some steps by the same Trainer as in a
trial: what a phase of a step takes beyond its calls is modules and hooks in Python, autograd's graph, the optimizer's
loop. Least squares give seconds for each call of a phase and for each batch; what no phase has is the Trainer's:

    phase - calls = per_call × calls + per_batch

How fast a CPU is changes within seconds on a shared host, so it is asked every few calls, and costs are those of its
fastest. Several ranks time the same calls at once, since they share caches, memory and power; rank 0 tells its figures.
What joins them is timed by sums over all ranks of several sizes, which take turns so that none finds its numbers in a
cache, and fitted:

    all-reduce of S bytes = 2 (n - 1) × latency + 2 (n - 1) / n × S / bytes per second

On a CPU they also work and meet, work and meet: what that takes beyond their own seconds of a core, and beyond the
latency, is how late the last of them is (`Link.lateness`).

What else runs on the machine makes all this too slow: the job tells how many cores others used meanwhile.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import operator
import statistics
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import torch
import torch.distributed as dist
from lightning.pytorch import Callback, LightningModule
from torch import Tensor
from torch.utils.checkpoint import checkpoint
from typing_extensions import override

from kit.json_text import write_json
from kit.machine.machine import hardware
from kit.machine.processes import MOST_SLOWNESS, slowed
from kit.memory.record.dry_run import DryRun, record
from kit.memory.record.fakes import is_emulated
from kit.memory.replay.calls import OperatorCall, TensorSpec
from kit.memory.replay.replay import PHASES
from kit.speed.call_timer import CACHE_BYTES, OtherLoad, ReadyCall, bytes_of
from kit.speed.operators import step_of
from kit.speed.work import work_of
from kit.train.rendezvous import open_store
from kit.train.trainer import make_trainer
from kit.trial.context import Context
from kit.trial.meters import CpuPace
from kit.trial.recorder import StepClock, StepRecorder

if TYPE_CHECKING:
    from kit.events import EventWriter

RESULT = "calls.json"
_STEPS, _SKIPPED = 14, 4
_MODULE_SECONDS = 4.0
_SAMPLES = 4096
_LEAST_MOVED = 1 << 20
_PLACES = 8
"""Of a call in a step, at which it is played."""
_LEAST_ROUNDS, _MOST_ROUNDS, _ENOUGH = 4, 24, 8
"""Enough are so many at the CPU's fastest."""
_PART_BYTES, _LONG_SECONDS = 1 << 30, 1.0
_SLOW, _PACE_EVERY, _PACE_WORK = 1.1, 64, 2e8
"""The pace is asked after so many calls, or so many operations and four times the bytes."""
_ONE = TensorSpec((1,), "float32")
_NOTHING = OperatorCall("aten::detach", (_ONE,), (), (_ONE,))
"""What it takes is Python's, which a step hardly spends on its calls."""
_NOTHING_EVERY, _LEAST_SECONDS = 16, 2e-7
_TOO_SLOW = 2.5
"""From here on what calls take at the fastest is a guess: predictions from a table of 3.8 were 27 % off, not 7."""
_REPEATED, _CHECKPOINTED_STEPS = (2, 40), 100
_LINK_BYTES, _LINK_REPEATS = (1 << 12, 1 << 16, 1 << 20, 1 << 22, 25 << 20, 25 << 20), 16
"""The last two together are more than caches keep."""
_MEETINGS, _ROUND_SECONDS = 40, 0.03
_HOST_PHASES = ("forward", "backward", "optimizer")
_PARTS = ("transfer", *_HOST_PHASES, "other")


def time_calls(context: Context) -> None:
    """Time the calls that were sent, the host where that was asked for, and what joins the ranks; write an event."""
    task = context.environment["timing"]
    gpu = context.environment["accelerator"] == "gpu"
    device = torch.device("cuda", context.rank) if gpu else torch.device("cpu")
    payload = context.load_payload()
    sent = [OperatorCall.of(value) for value in payload["calls"]]
    wanted = [sent[place] for place in payload["wanted"]]
    order = wanted if gpu else [sent[place] for place in payload["order"]]  # what comes between is nothing to a GPU
    link: dict[str, float] = {}
    host: dict[str, float] = {}
    with _met(context, device) as total, OtherLoad(total) as others:
        of_first = partial(_of_first, context.rank) if context.world_size > 1 else operator.call
        timed = TimedCalls(CpuPace(device, fastest_seconds=float(task["pace_seconds"])), of_first)
        timed.time(order, device, float(task["seconds"]), each=task["each"])
        if task["host"]:
            host = _host_costs(context, device, timed)
        if context.world_size > 1:
            link = _link(context.world_size, device)
    if context.rank:
        return
    found, kept = timed.at_fastest(), set(wanted)
    calls = [[call.to_json(), seconds] for call, seconds in found.items() if task["host"] or call in kept]
    result = {
        "calls": calls, "host": host, "link": link, "others": max(others.cores, timed.lost_cores()),
        "slowness": timed.slowness, "pace_seconds": timed.pace.fastest_seconds,
    }  # fmt: skip
    write_json(context.paths.directory / RESULT, result)
    context.writer.write("calls_timed", count=len(calls), others=result["others"])


def _of_first(rank: int, find: Callable[[], float]) -> float:
    found = torch.tensor([0.0 if rank else find()], dtype=torch.float64)
    dist.broadcast(found, 0)
    return float(found)


@contextlib.contextmanager
def _met(context: Context, device: torch.device) -> Iterator[Callable[[float], float]]:
    """The ranks have met; gives the sum of a number over all of them."""
    if context.world_size == 1:
        yield float
        return
    context.store = open_store()
    if device.type == "cuda":
        torch.cuda.set_device(device)
    backend = "gloo" if device.type == "cpu" else "cpu:gloo,cuda:nccl"
    dist.init_process_group(backend, rank=context.rank, world_size=context.world_size)

    def total(value: float) -> float:
        found = torch.tensor([value], dtype=torch.float64)
        dist.all_reduce(found)
        return float(found)

    try:
        total(0.0)  # all are there
        yield total
    finally:
        dist.destroy_process_group()


def _link(ranks: int, device: torch.device) -> dict[str, float]:
    """Bytes per second and latency of what joins the ranks, by least squares of the relative error; and lateness."""
    tensors = [torch.ones(size // 4, device=device) for size in _LINK_BYTES]
    took = np.zeros((_LINK_REPEATS, len(tensors)))
    for row in took:
        for place, tensor in enumerate(tensors):
            dist.all_reduce(torch.zeros(1, device=device))  # they begin together
            began = time.perf_counter()
            dist.all_reduce(tensor)
            if device.type == "cuda":
                torch.cuda.synchronize(device)
            row[place] = time.perf_counter() - began
    hops, seconds = ranks - 1, np.median(took[1:], axis=0)
    table = np.array([[2.0 * hops, 2.0 * hops / ranks * size] for size in _LINK_BYTES])
    latency, per_byte = _not_negative(table / seconds[:, None], np.ones(len(seconds)))
    rate = 1 / per_byte if per_byte else 1e15
    late = _lateness(ranks, 2.0 * hops * latency) if device.type == "cpu" else 0.0
    return {"latency_seconds": latency, "bytes_per_second": rate, "lateness": late}


def _lateness(ranks: int, meeting_seconds: float) -> float:
    """How much later all ranks are than each alone, for the root of the seconds that they work; on a CPU."""
    small, large = torch.ones(320, 320), torch.ones(2 << 20)

    def work(times: int) -> None:
        for _ in range(times):
            small.mm(small)
            large.mul_(1.0)
            large[: 1 << 18] + 1.0  # fresh memory

    work(2)
    began = time.perf_counter()
    work(4)
    once = torch.tensor([(time.perf_counter() - began) / 4])
    dist.all_reduce(once)  # all of them do as much
    times = max(1, round(_ROUND_SECONDS * ranks / float(once)))
    took = np.zeros((_MEETINGS, 2))
    for row in took:
        began, busy = time.perf_counter(), time.thread_time()
        work(times)
        row[1] = time.thread_time() - busy
        dist.all_reduce(torch.zeros(1))
        row[0] = time.perf_counter() - began
    whole, own = (float(np.median(column)) for column in took[1:].T)
    alone = own * max(1.0, ranks * torch.get_num_threads() / hardware().cores)
    return max(0.0, whole - alone - meeting_seconds) / math.sqrt(alone)


@dataclasses.dataclass(slots=True)
class TimedCalls:
    """What calls took, and how fast the CPU was meanwhile.

    Several ranks time the same calls at the same moments, and the first of them asks for the pace while others wait.
    """

    pace: CpuPace
    of_first: Callable[[Callable[[], float]], float] = operator.call
    """What the first rank finds, told to all of them."""
    samples: dict[OperatorCall, list[tuple[float, float]]] = dataclasses.field(default_factory=dict)
    """(seconds, pace meanwhile) of each time that a call was made."""
    each_pace_seconds: list[float] = dataclasses.field(default_factory=list)
    """In each moment."""

    def time(self, order: Sequence[OperatorCall], device: torch.device, seconds: float, *, each: bool = False) -> None:
        """Each call that can be made again, or those of the first parts until the time is up.

        Args:
            order: The calls as a step makes them.
            device: Where.
            seconds: To spend; each part is played a few times at least.
            each: Whether to begin with all parts, however long that takes.
        """
        ends, parts = time.perf_counter() + seconds, _parts(order, device)
        for place, part in enumerate(parts):
            over = self.of_first(lambda: float(time.perf_counter() > ends))
            if over and not each:
                return
            share = (ends - time.perf_counter()) / (len(parts) - place)
            self._play(part, device, time.perf_counter() + share)

    def _play(self, order: Sequence[OperatorCall], device: torch.device, ends: float) -> None:
        """These again and again, until the time is up or enough rounds were at the CPU's fastest."""
        read = sum(spec.bytes for call in dict.fromkeys(order) for spec in call.inputs)
        ready: dict[OperatorCall, ReadyCall] = {}
        for call in dict.fromkeys(order):
            one = ReadyCall.of(call, device, -(-CACHE_BYTES // max(read, 1)))
            first_seconds = self.of_first(partial(getattr, one, "first_seconds", 0.0))
            if first_seconds > _LONG_SECONDS:  # a large product in a format that this processor only emulates
                pace = self.of_first(self.pace.seconds)
                self.samples.setdefault(call, []).append((first_seconds, self._pace_of(pace, pace)))
            elif one is not None:
                ready[call] = one
        if device.type == "cpu":
            ready[_NOTHING] = ReadyCall(_NOTHING, device)
        segments = [  # as many on each rank, whatever is ready there
            [(ready[call], self.samples.setdefault(call, [])) for call in segment if call in ready]
            for segment in _segments(order, device)
        ]

        fast = 0.0
        with torch.no_grad():
            self._round(segments)  # some results have no memory yet
            for played in range(1, _MOST_ROUNDS if segments else 1):
                if played >= _LEAST_ROUNDS and (
                    fast >= _ENOUGH or self.of_first(lambda: float(time.perf_counter() > ends))
                ):
                    return
                paces = self._round(segments, counts=True)
                fast += sum(self.pace.slowness(pace) <= _SLOW for pace in paces) / len(paces)

    def _round(
        self, segments: Sequence[Sequence[tuple[ReadyCall, list[tuple[float, float]]]]], *, counts: bool = False
    ) -> list[float]:
        """Each call once in its place; the paces meanwhile."""
        before, paces = self.of_first(self.pace.seconds), []
        for segment in segments:
            took = [call.seconds() for call, _ in segment]
            after = self.of_first(self.pace.seconds)
            self.pace.fastest_seconds = min(self.pace.fastest_seconds, before, after)
            during, before = self._pace_of(before, after), after
            paces.append(during)
            if counts:
                for (_, samples), seconds in zip(segment, took, strict=True):
                    samples.append((seconds, during))
        if counts:
            self.each_pace_seconds += paces
        return paces

    def _pace_of(self, *seconds: float) -> float:
        """Of moments, but of those in which this process stood still: a product waits for a core, the next call not."""
        most = MOST_SLOWNESS * self.pace.fastest_seconds if self.pace.is_known else math.inf
        return statistics.fmean([one for one in seconds if one <= most] or [most])

    @property
    def slowness(self) -> float:
        """How many times as long the CPU took for its product, in the slowest of these moments but a tenth."""
        found = sorted(self.each_pace_seconds)
        return self.pace.slowness(found[9 * len(found) // 10]) if found else 1.0

    def lost_cores(self) -> float:
        """Cores that the machine had less while these calls were timed, where that was so many that what they take at
        its fastest is a guess; else 0."""
        every = [sample for found in self.samples.values() for sample in found]
        whole = sum(seconds for seconds, _ in every)
        if not whole:
            return 0.0
        mean = sum(seconds * self.pace.slowness(pace) for seconds, pace in every) / whole
        return torch.get_num_threads() * (1 - 1 / slowed(mean)) if mean > _TOO_SLOW else 0.0

    def at_fastest(self) -> dict[OperatorCall, float]:
        """What they take at the CPU's fastest, which changes little of what memory takes, without making them.

            seconds ÷ slowed(slowness, computing),   computing = 1 - bytes ÷ bandwidth ÷ seconds

        The bandwidth is that of the fastest copies and sums of much memory among them.
        """
        made = {call: found for call, found in self.samples.items() if found}
        works = {call: work_of(call) for call in made}
        bandwidth = max((
            works[call].bytes / statistics.median(seconds for seconds, _ in found) for call, found in made.items()
            if works[call].kind in ("elementwise", "copy") and works[call].bytes > _LEAST_MOVED
        ), default=math.inf)  # fmt: skip

        def seconds_of(call: OperatorCall) -> float:
            moving = works[call].bytes / bandwidth
            return statistics.median(
                seconds / slowed(self.pace.slowness(pace), max(0.0, 1 - moving / seconds))
                for seconds, pace in made[call]
            )

        making = seconds_of(_NOTHING) if _NOTHING in made else 0.0
        return {call: max(_LEAST_SECONDS, seconds_of(call) - making) for call in made if call != _NOTHING}


def _parts(order: Sequence[OperatorCall], device: torch.device) -> list[list[OperatorCall]]:
    """The order cut into parts whose calls hold no more than so much memory, each call at a few of its places.

    Of a GPU each call is a part of its own.
    """
    alone = device.type == "cuda"
    most, size = 1 if alone else _PLACES, 0
    counts, met = Counter(order), Counter[OperatorCall]()
    found: list[list[OperatorCall]] = []
    part_of: dict[OperatorCall, list[OperatorCall]] = {}
    for call in order:
        place, count = met[call], counts[call]
        met[call] += 1
        if place == 0:
            size += bytes_of(call)
            if not found or alone or size > _PART_BYTES:
                found.append([])
                size = bytes_of(call)
            part_of[call] = found[-1]
        if place == 0 or place * most // count > (place - 1) * most // count:
            part_of[call].append(call)
    return found


def _segments(order: Sequence[OperatorCall], device: torch.device) -> list[list[OperatorCall]]:
    """Cut where the pace is asked, which is the same on all ranks; with a call that does nothing among them."""
    found: list[list[OperatorCall]] = []
    spent, works = 0.0, {call: work_of(call) for call in dict.fromkeys(order)}
    for place, call in enumerate(order):
        work = works[call]
        if not found or spent > _PACE_WORK or len(found[-1]) >= _PACE_EVERY:
            found.append([])
            spent = 0.0
        found[-1].append(call)
        spent += work.flops + 4 * work.bytes
        if device.type == "cpu" and place % _NOTHING_EVERY == 0:
            found[-1].append(_NOTHING)
    return found


def _host_costs(context: Context, device: torch.device, timed: TimedCalls) -> dict[str, float]:
    """Seconds of the host by name; the calls of typical modules are timed too, as a table starts with them."""
    config = context.config.replace({"trial.max_steps": _STEPS, "levers.accumulate_grad_batches": 1})
    kind: Any = "cpu" if device.type == "cpu" else "cuda"
    capability = torch.cuda.get_device_capability(device) if kind == "cuda" else None
    counts: dict[str, list[float]] = {phase: [] for phase in _HOST_PHASES}
    gaps: dict[str, list[float]] = {phase: [] for phase in _HOST_PHASES}
    took: dict[str, list[float]] = {part: [] for part in _PARTS}
    tiny = _tiny_modules()
    for module, data, precision in (*_typical_modules(device), *tiny):
        given = cast(Callable[[], dict[str, Any]], partial(dict, datamodule=data()))
        step = step_of(record(module, given, DryRun(config, precision, 1, kind, capability)))
        timed.time(step.order, device, _MODULE_SECONDS)
        if (module, data, precision) not in tiny:
            continue
        parts = _part_seconds(context, config, module(), {"datamodule": data()}, precision, timed.pace)
        measured = timed.at_fastest()
        seconds = np.array([measured.get(call, 0.0) for call in step.calls])[step.call] * step.repeats
        for part, spent in parts.items():
            took[part].append(spent)
        for phase in _HOST_PHASES:
            mine = step.phase == PHASES.index(phase)
            counts[phase].append(float(step.repeats[mine].sum()))
            # On a GPU the host only puts calls into a queue.
            gaps[phase].append(parts[phase] - (float(seconds[mine].sum()) if device.type == "cpu" else 0.0))
    found = {}
    batch = sum(statistics.median(took[part]) for part in _PARTS if part not in _HOST_PHASES)
    for phase in _HOST_PHASES:
        weight = 1 / np.array(took[phase])
        table = np.stack([counts[phase], np.ones(len(weight))], axis=1)
        found[phase], beside = _not_negative(table * weight[:, None], np.array(gaps[phase]) * weight)
        batch += beside
    of_call, of_operator = _checkpoint_seconds(device)
    return {**found, "batch": batch, "checkpoint call": of_call, "checkpoint operator": of_operator}


def _checkpoint_seconds(device: torch.device) -> tuple[float, float]:
    """What a checkpointed call, and each operator that it repeats, takes of the host beside those operators."""
    extra = [_checkpointed_seconds(device, operators) for operators in _REPEATED]
    of_operator = max(0.0, extra[1] - extra[0]) / (_REPEATED[1] - _REPEATED[0])
    return max(0.0, extra[0] - _REPEATED[0] * of_operator), of_operator


def _checkpointed_seconds(device: torch.device, operators: int) -> float:
    """What checkpointing a row of small operators adds to forward and backward, beside repeating them."""
    little = torch.ones(8, device=device, requires_grad=True)

    def row(value: Tensor) -> Tensor:
        for _ in range(operators):
            value = torch.sin(value)
        return value

    def twice() -> Tensor:
        with torch.no_grad():
            row(little)
        return row(little)

    def seconds_of(forward: Callable[[], Tensor]) -> float:
        found = []
        for _ in range(_CHECKPOINTED_STEPS):
            began = time.perf_counter()
            forward().sum().backward()  # type: ignore[no-untyped-call]
            found.append(time.perf_counter() - began)
        return statistics.median(found)

    return seconds_of(lambda: cast(Tensor, checkpoint(row, little, use_reentrant=False))) - seconds_of(twice)


def _not_negative(table: Any, wanted: Any) -> list[float]:
    """Least squares without negative parts: those are left out, the worst first."""
    used = list(range(table.shape[1]))
    while used:
        scale = np.abs(table[:, used]).max(axis=0)
        found = np.linalg.lstsq(table[:, used] / scale, wanted, rcond=None)[0] / scale
        if (found >= 0).all():
            return [float(found[used.index(place)]) if place in used else 0.0 for place in range(table.shape[1])]
        del used[int((found * scale).argmin())]
    return [0.0] * int(table.shape[1])


class _Kept:
    """Takes the place of a writer of events, and keeps the host's seconds of steps by part."""

    def __init__(self) -> None:
        self.steps: list[dict[str, float]] = []

    def write(self, kind: str, **fields: Any) -> None:
        if kind == "step":
            spent = fields.get("host_seconds") or {part: fields.get(f"{part}_seconds") for part in _PARTS}
            self.steps.append({part: float(spent.get(part) or 0.0) for part in _PARTS})

    def __getattr__(self, _: str) -> Any:
        return lambda *_args, **_named: None


class _Paces(Callback):
    """Asks for the pace after each step, in the time that the next one waits for data."""

    def __init__(self, pace: CpuPace, clock: StepClock) -> None:
        self.seconds: list[float] = []
        self._ask = clock.timed("wait", pace.seconds)

    @override
    def on_train_batch_end(self, *_: Any) -> None:
        self.seconds.append(self._ask())


def _part_seconds(
    context: Context, config: Any, module: LightningModule, data: dict[str, Any], precision: str, pace: CpuPace
) -> dict[str, float]:
    """Of the host in a step, by part: medians of some steps, each as it would be at the CPU's fastest."""
    kept, clock = _Kept(), StepClock()
    paces = _Paces(pace, clock)
    inner = dataclasses.replace(context, writer=cast("EventWriter", kept), config=config, clock=clock)
    trainer = make_trainer(
        config, accelerator=context.environment["accelerator"], world_size=1, precision=precision, module=module,
        callbacks=[StepRecorder(inner, clock), paces], profiler=clock, max_steps=_STEPS,
        default_root_dir=context.paths.directory,
    )  # fmt: skip
    trainer.fit(module, **data)
    steady = [
        {part: step[part] / slowed(pace.slowness((before + after) / 2)) for part in _PARTS}
        for step, before, after in zip(kept.steps[1:], paces.seconds, paces.seconds[1:], strict=False)
    ][_SKIPPED - 1 :]  # fmt: skip
    return {part: statistics.median(step[part] for step in steady) for part in _PARTS}


_Made = tuple[Any, Any, str]
"""What makes a module, its data, a precision."""


def _typical_modules(device: torch.device) -> list[_Made]:
    """Small modules of several kinds."""
    from kit.models import GPT, Encoder, Field, RandomData, Recurrent, ResNet, Tokens

    # On a GPU such small steps would all be spent by the host.
    more = 1 if device.type == "cpu" else 8
    images, series = (Field(shape=(3, 64, 64)), Field(below=10)), (Field(shape=(24, 16)), Field(shape=(24, 16)))
    words = (Field(shape=(64,), below=1000), Field(below=10))
    kinds: list[tuple[Any, Any]] = [
        (partial(GPT, vocabulary=1024, width=64, heads=2, layers=4, context=64),
         partial(Tokens, 1024, 64, 2 * more, _SAMPLES)),
        (partial(GPT, vocabulary=2048, width=320, heads=5, layers=2, context=128),
         partial(Tokens, 2048, 128, 4 * more, _SAMPLES)),
        (partial(Encoder, vocabulary=1000, width=96, heads=4, layers=2, context=64),
         partial(RandomData, words, 16 * more, _SAMPLES)),
        (partial(ResNet, width=16, blocks=(1, 1, 1, 1), classes=10), partial(RandomData, images, 8 * more, _SAMPLES)),
        (partial(Recurrent, features=16, width=64, layers=1), partial(RandomData, series, 16 * more, _SAMPLES)),
    ]  # fmt: skip
    # Where bfloat16 is only emulated steps take many times as long, and an LSTM cannot be trained in it.
    emulated = device.type == "cpu" and is_emulated(torch.bfloat16)
    precisions = ("32-true",) if emulated else ("32-true", "bf16-mixed")
    return [(make, data, precision) for make, data in kinds for precision in precisions]


def _tiny_modules() -> list[_Made]:
    """Next to nothing to compute: what their steps take is the host's."""
    from kit.models import GPT, Field, RandomData, ResNet, Tokens

    images = (Field(shape=(3, 8, 8)), Field(below=10))
    found: list[_Made] = [
        (partial(GPT, vocabulary=32, width=8, heads=1, layers=layers, context=4), partial(Tokens, 32, 4, 1, _SAMPLES),
         "32-true")
        for layers in (1, 3, 9)
    ]  # fmt: skip
    for blocks in ((1, 1), (2, 2), (4, 4)):
        made = partial(ResNet, width=4, blocks=blocks, classes=10)
        found.append((made, partial(RandomData, images, 2, _SAMPLES), "32-true"))
    return found
