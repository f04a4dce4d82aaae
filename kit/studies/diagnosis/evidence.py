"""Evidence: everything a trial tells about where its time and memory went, as one flat record that rules read.

Seconds, bytes, fractions and counts of one trial, after its warm-up steps; None where the trial does not tell. Times
are means over all ranks; memory is of the fullest rank, or of all ranks together, as the field says. A finished profile
adds its trace and functions. Nothing is judged here.
"""

from __future__ import annotations

import math
import statistics
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import combinations, pairwise
from typing import Any

from kit.chunks.cost import LayoutCost
from kit.config import Config
from kit.errors import KitError
from kit.events import Event, number
from kit.machine.machine import hardware
from kit.machine.processes import machine
from kit.records.trace import BESIDE_TRAINING, belongs_to_last_step, finite, merged
from kit.speed.peaks import Peaks
from kit.studies.diagnosis.sampler import COMPUTING, GARBAGE, MAKING, OWN_ORDER
from kit.studies.diagnosis.unit_costs import LOOP, PAGE, VALUE, Decoded, decoded, unit_costs
from kit.studies.profiling.profile import Profile
from kit.studies.profiling.trace import TraceInfo
from kit.studies.series import measured_bytes, samples_per_second
from kit.trial.payload import BatchRule
from kit.trial.trial import Trial

_SUFFIX = "_seconds"
_NO_PART = ("step_seconds", "cpu_seconds")
_STANDS_OUT = 0.1
_PARTS = 4
"""Of a trial, whose means tell how much it drifts."""
_LEAST_POINTS, _STEADY = 6, 0.35
BUSY_FRACTION = 0.1
"""Of the time without a core, from which on figures are those of a busy machine."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreLayout:
    """How the store is cut, beside how it would be cut for this reading."""

    seconds_per_batch: float
    """Predicted for the store as it is, by `kit.chunks.cost`."""
    planned_seconds_per_batch: float
    """Predicted for the same store in the chunks that `kit.plan_chunks` chooses."""
    chunk: tuple[int, ...]
    planned_chunk: tuple[int, ...]
    dims: tuple[str, ...]
    python_fraction: float = 1.0
    """Of the CPU time of reading, what is Python and not decoding, by the costs of the config's `chunking`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CountedWork:
    """The work of one step, of all ranks together (see `kit.trial.meters`)."""

    samples: int
    flops: Mapping[str, float]
    """By number format."""
    bytes: float
    calls: int
    """Operations of one rank."""
    own_syncs: int
    """Of one rank, in the user's own code."""
    batch_norms_again: int
    """Batch statistics taken a second time while gradients were computed."""
    rows: int = 0
    """Of all tables of embeddings that were looked up, and `rows_used` of them at most."""
    rows_used: int = 0
    collectives: int = 0
    """Of one rank, with those of its strategy."""
    collective_bytes: int = 0
    collective_places: tuple[tuple[str, int], ...] = ()
    """The lines of the user's code, or "Lightning", that made most of them."""
    lines: tuple[Mapping[str, Any], ...]
    """`place`, `calls` and `syncs` of the user's lines that called most, of one rank."""
    places: tuple[str, ...] | None = None
    """All lines of the user's code that called an operation, themselves or through a library; None where not told."""

    def most(self, name: str) -> Mapping[str, Any] | None:
        """The line with most `calls` or `syncs`, if any has some."""
        line = max(self.lines, key=lambda line: line[name], default=None)
        return line if line is not None and line[name] else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Slowing:
    """A part of the step that takes longer and longer, of the rank that slows down most."""

    rank: int
    part: str
    step_seconds: tuple[float, float]
    """The median step of the first third of the trial, and of the last."""
    part_seconds: float
    """The median of the part in the first third."""
    each_seconds: float
    """What every step adds."""
    steps: float
    """Between the middles of the two thirds."""
    before: float
    """Steps before the first of them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Evidence:
    """What is known of one trial."""

    config: Config
    accelerator: str
    world_size: int
    own_loader: bool
    """Whether kit's streaming engine read the data, so that its settings apply."""
    given_loader: bool
    """Whether the caller's own data made the loader, so that the config's `loader` section may not reach it."""
    whose_batches: str = ""
    """Who says how many samples a batch has, as "your DataLoader"; empty where `loader.batch_size` does."""
    cores: int | None
    """Of the machine, when the trial ran on this one."""
    compute_threads: int = 1
    """Of a rank, that share the work of an operator: as torch said at the end of the trial, where it was asked."""
    asked_threads: int = 0
    """What the rank was given of them by `hardware.threads_per_rank`; 0 where that is not known."""
    batches: int
    """Measured ones, of all ranks."""
    samples_per_second: float | None
    step_seconds: float
    """Of one batch on one rank."""
    shares: Mapping[str, float]
    """Fraction of the time of all ranks, by part; they add to one."""
    rank_seconds: Mapping[int, float]
    """Seconds a batch that each rank spent on its own: neither in backward, communication nor validation."""
    start_up_seconds: float | None
    """From the request for the first batch to its arrival, of the slowest rank."""
    total_seconds: float | None
    """From the request for the first batch to the end of the last step."""
    read_seconds: float | None
    """Time a batch during which batches were being read, several at once counted once."""
    requests_per_sample: float | None
    bytes_per_request: float | None
    layout: StoreLayout | None
    thread_cores: float | None
    """Cores that the training thread of a rank used or queued for: 1 is one core at 100 %; the busiest rank."""
    queued_fraction: float | None = None
    """Of the time, what the training thread of a rank was ready and had no core; the worst rank."""
    process_cores: float | None
    """Cores used by all ranks and their loader processes."""
    workers: int | None
    """Loader processes of a rank, as they were."""
    device_allocated_bytes: float | None
    device_reserved_bytes: float | None
    device_limit_bytes: float | None
    host_bytes: float | None
    """Peak resident memory of all ranks together, with what loader processes held alone."""
    host_limit_bytes: float | None
    work: CountedWork | None
    peaks: Peaks | None
    warnings: tuple[str, ...] = ()
    trace: TraceInfo | None = None
    """Of the first rank, where a profile was given."""
    functions: tuple[Mapping[str, Any], ...] | None = None
    """Rows of `Profile.functions`, where a profile was given with the advanced pass."""
    errors: Mapping[str, float] = field(default_factory=dict)
    """The relative standard error of the mean seconds of each part of a step."""
    rank_parts: Mapping[int, Mapping[str, float]] = field(default_factory=dict)
    """Seconds a batch of each rank by part, of the parts in `rank_seconds`."""
    uneven: float | None = None
    """Numbers in the largest batch of a step over those in the mean one, over all ranks, averaged over steps."""
    uneven_rank: int | None = None
    """Whose batch is the largest in nearly all steps."""
    hosts: Mapping[int, Mapping[str, Any]] = field(default_factory=dict)
    """What `kit.studies.diagnosis.host` wrote, by rank."""
    epoch_start_fraction: float | None = None
    """Of the time, what the first steps of epochs took beyond the median step; None where no epoch began meanwhile."""
    slowing: Slowing | None = None
    """None where steps do not take longer and longer, or do so by larger batches or a slower machine."""
    growth_bytes: float | None = None
    """What a step allocates and does not free, of the rank that grows most; 0 where it does not grow steadily."""
    growth_in_workers: bool = False
    """Whether that is so of the rank's loader processes."""
    measured_gains: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    """Gains of short trials with a change, by the rule that asked for them: from and to."""
    alone_seconds: float | None = None
    """`train_seconds` where nothing is read beside, measured by a short trial on one batch; None where it was not."""
    unit_costs: Mapping[str, float] = field(default_factory=dict)
    """Seconds of one small act on this machine (`kit.studies.diagnosis.unit_costs`), of those that the trial made."""
    decoded: Mapping[str, Decoded] = field(default_factory=dict)
    """What a picture of the trial takes on this machine, whole and reduced, by the package that decodes it."""
    notes: tuple[str, ...] = field(default=())
    """What could not be learned, and why."""

    @property
    def host(self) -> Mapping[str, Any]:
        """Of the first rank; empty where nothing was watched."""
        return self.hosts.get(min(self.hosts), {}) if self.hosts else {}

    def line_fraction(self, places: Collection[str]) -> float:
        """Of the time of the first rank, what was seen at these lines of the user's code."""
        return math.fsum(line["fraction"] for line in self.host.get("lines", ()) if line["place"] in places)

    def more_than_others(self, rank: int) -> str:
        """Of the function in which this rank was seen more than all others, the line seen most; empty where none is."""
        seen: dict[int, dict[str, float]] = {}
        for one, host in self.hosts.items():
            shares = seen.setdefault(one, {})
            for line in host.get("lines", ()):
                if line["place"]:
                    shares[function_of(line["place"])] = shares.get(function_of(line["place"]), 0.0) + line["fraction"]
        mine, others = seen.pop(rank, {}), [*seen.values()]
        more = {
            name: share - max((other.get(name, 0.0) for other in others), default=0.0) for name, share in mine.items()
        }
        most = max(more, key=more.__getitem__, default="")
        if not most or more[most] < _STANDS_OUT:
            return ""
        lines = (line for line in self.hosts[rank]["lines"] if function_of(line["place"]) == most)
        return str(max(lines, key=lambda line: float(line["fraction"]))["place"])

    @property
    def user_loader(self) -> bool:
        """Whether the caller's data makes its loader without kit's engine, so that only calibrating reaches it."""
        return self.given_loader and not self.own_loader

    @property
    def wait_fraction(self) -> float | None:
        """Of the time, waiting for data; of a busy machine what would be left on a quiet one.

        There loader processes and training each take as long as now less what they queued for a core, and the training
        waits for what processes take longer.
        """
        share, queued = self.shares.get("wait"), self.queued_fraction or 0.0
        workers = [worker for worker in self.host.get("workers", ()) if "queued_fraction" in worker]
        if share is None or queued < BUSY_FRACTION or not workers or share >= 1:
            return share
        busy = statistics.fmean(1 - worker["idle_fraction"] for worker in workers)
        slowed = statistics.fmean(worker["queued_fraction"] for worker in workers)
        ready = max(0.1, 1 - slowed / busy) if busy > 0 else 1.0
        train = (1 - share) * max(0.1, 1 - queued / (1 - share))
        left = max(0.0, ready - train)
        return min(share, left / (left + train))

    @property
    def wait_seconds(self) -> float:
        """A batch, on one rank."""
        return self.shares.get("wait", math.nan) * self.step_seconds

    @property
    def reading_wait_seconds(self) -> float:
        """Of the wait, what is reading: the rest the training thread does itself with what was read."""
        if self.read_seconds is not None:
            return min(self.wait_seconds, self.read_seconds)
        return self.wait_seconds * (1 - (self.busy_wait_fraction or 0.0))

    @property
    def train_seconds(self) -> float:
        """A batch on one rank, from having the batch to requesting the next, without validation."""
        beside = math.fsum(self.shares.get(phase, 0.0) for phase in BESIDE_TRAINING)
        return self.step_seconds * (1 - self.shares.get("wait", math.nan) - beside)

    @property
    def cpu_seconds(self) -> float | None:
        """Of a batch on one rank, with its loader processes."""
        return None if self.process_cores is None else self.process_cores * self.step_seconds / max(1, self.world_size)

    @property
    def beside_seconds(self) -> float:
        """CPU time of a batch on one rank that was not the training thread's; infinite where it is not known."""
        if self.cpu_seconds is None or self.thread_cores is None:
            return math.inf
        return max(0.0, self.cpu_seconds - (self.thread_cores - (self.queued_fraction or 0.0)) * self.step_seconds)

    @property
    def reads_on_its_cores(self) -> bool:
        """Whether batches are made beside a step that waits for cores."""
        return (self.own_loader or bool(self.workers)) and (self.queued_fraction or 0.0) >= BUSY_FRACTION

    @property
    def batch_samples(self) -> float:
        """On one rank."""
        return (self.samples_per_second or 0.0) * self.step_seconds / max(1, self.world_size)

    @property
    def on_gpu(self) -> bool:
        return self.accelerator == "gpu"

    @property
    def busy_wait_fraction(self) -> float | None:
        """Of the wait for data, the part in which the training thread itself computed, or queued for a core to do so (a
        bound from its CPU time)."""
        if self.thread_cores is None or not self.wait_seconds > 0:
            return None
        idle = max(0.0, 1 - self.thread_cores)  # what it queued is in it already
        return max(0.0, 1 - idle / self.shares["wait"])


def most_seen(lines: Iterable[Mapping[str, Any]], whole: float = 1.0) -> tuple[float, str, str]:
    """Of the function seen most its share of `whole`, where it is, by its line seen most, and the package called there.

    What a library does without a line of the user's counts as the library.
    """
    shares, places = defaultdict[str, float](float), defaultdict[str, float](float)
    told = dict[str, Mapping[str, Any]]()
    for line in sorted(lines, key=lambda line: -line["fraction"]):
        if line["place"] or line["package"] not in COMPUTING:
            at = function_of(line["place"]) or line["package"]
            shares[at] += line["fraction"] / whole
            places[line["place"]] += line["fraction"] / whole
            told.setdefault(at, line)
    most = max(shares, key=shares.__getitem__, default="")
    if not most:
        return 0.0, "", ""
    place, package = told[most]["place"], told[most]["package"]
    line_at, _, name = place.rpartition(", in ")
    if line_at and places[place] < _MOST_OF_FUNCTION * shares[most]:
        where = f"in {name}, most of that at {line_at}"
    else:
        where = f"at {place}" if place else ""
    called = f"in {package}" if package not in ("", GARBAGE, OWN_ORDER) else ""  # which is no library
    return min(1.0, shares[most]), ", ".join(filter(None, (where, called))), package


_MOST_OF_FUNCTION, MUCH_SEEN = 0.8, 0.3
"""Of the time of who is watched, what is worth telling: `MUCH_SEEN`."""


def function_of(place: str) -> str:
    """A place without its line: file and function."""
    file, _, rest = place.partition(", line ")
    return file + rest.partition(",")[2]


class NoStepError(ValueError):
    """A trial of warm-up steps alone."""


def evidence_of(trial: Trial, peaks: Peaks | None = None, profile: Profile | None = None) -> Evidence:
    """What `trial` tells, and a profile of the same.

    Raises:
        NoStepError: when no step was measured after the warm-up.
    """
    config, warm = trial.config, trial.config.trial.warmup_steps
    steps = [event for event in trial.steps if int(event["step"]) > warm]
    if not steps:
        raise NoStepError(f"no step was measured: all {len(trial.steps)} were warm-up (trial.warmup_steps is {warm})")
    started = trial.event("fit_started") or {}
    here = trial.environment.get("machine") == machine()
    own = any(event.get("counters") for event in trial.events if event["kind"] == "fit_ended")
    layout, notes = None, list[str]()
    try:
        layout = store_layout(config) if own else None
    except KitError as error:
        notes.append(f"the layout of the store was not judged: {error}")
    given = trial.environment.get("given", {}).get("data", "default") not in ("default", "dataset")
    if given and started.get("left_out_validation"):
        notes.append("the trial left out the validation (trial.validate_every_steps): its time is in no figure")
    profiled: dict[str, Any] = {}
    if profile is not None:
        functions = tuple(profile.functions) if "advanced" in profile.passes else None
        profiled = {"trace": profile.trace, "functions": functions}
    accelerator = str(started.get("accelerator", "cpu"))
    watched = (event for event in trial.events if event["kind"] == "host_watched")
    hosts: dict[int, Mapping[str, Any]] = {int(event["rank"]): event for event in watched}
    if accelerator == "cpu":  # elsewhere the parts are those of the device
        by_rank = {rank: [step for step in steps if int(step["rank"]) == rank] for rank in hosts}
        hosts = {rank: timed_lines(host, shares_of(by_rank[rank])) for rank, host in hosts.items()}
    work, given_threads = _work(trial), int(trial.environment.get("threads_per_rank") or 0)
    if calls := max((event["calls"] for event in trial.events if "counted_seconds" in event), default=0):
        notes.append(
            f"a step makes {calls:,} operations of torch and more, which takes long to count: FLOPs are not known"
        )
    return Evidence(
        config=config, accelerator=accelerator, world_size=int(started.get("world_size", 1)),
        own_loader=own, given_loader=given, whose_batches="" if own else _whose_batches(trial, given),
        cores=hardware().cores if here else None, batches=len(steps),
        compute_threads=_threads_that_ran(hosts) or given_threads or 1, asked_threads=given_threads,
        samples_per_second=samples_per_second(trial), warnings=tuple(trial.warnings), peaks=peaks, layout=layout,
        hosts=hosts, unit_costs=unit_costs(_acts(hosts, work), _row_bytes(hosts)) if here else {},
        decoded=_decoded(hosts) if here else {}, **_uneven(steps),
        epoch_start_fraction=_epoch_starts(steps), slowing=_slowing(steps), **_growths(trial, steps),
        notes=tuple(notes), work=work, read_seconds=_read_seconds(steps),
        **_times(steps, _computing(trial), _after_last(trial, steps)), **_start_up(trial),
        **_reading(trial), **_cpu(trial), **_memory(trial, here), **profiled,
    )  # fmt: skip


def _threads_that_ran(hosts: Mapping[int, Mapping[str, Any]]) -> int:
    """The most of any rank; 0 where none was asked."""
    return max((int(host.get("compute_threads", 0)) for host in hosts.values()), default=0)


def _whose_batches(trial: Trial, given: bool) -> str:
    rule = BatchRule.of_environment(trial.environment)
    return rule.whose if rule is not None else "your own loader" if given else ""


_MOST_SCALED = 3.0
"""A part that was seen so much less than it took was hardly seen."""


def timed_lines(host: Mapping[str, Any], shares: Mapping[str, float]) -> Mapping[str, Any]:
    """What was watched, with the lines of each part as long together as the clock says that the part took.

    A thread is asked now and then and answers when it next runs Python, so a part that is one long call, as backward
    is, gets some of the time of those before it.
    """
    seen = host.get("parts", {})
    scales = {
        part: min(_MOST_SCALED, max(1 / _MOST_SCALED, shares[part] / seen[part]))
        for part in seen if seen[part] > 0 and shares.get(part, 0.0) > 0
    }  # fmt: skip
    lines = [{**line, "fraction": line["fraction"] * scales.get(line["part"], 1.0)} for line in host.get("lines", ())]
    return {**host, "lines": sorted(lines, key=lambda line: -line["fraction"])}


def shares_of(steps: Sequence[Event]) -> dict[str, float]:
    """The fraction of the time of these steps in each part."""
    names = {name for step in steps for name in step if name.endswith(_SUFFIX) and name not in _NO_PART}
    seconds = {name.removesuffix(_SUFFIX): sum(finite(step.get(name)) for step in steps) for name in sorted(names)}
    total = sum(seconds.values()) or math.nan
    return {part: value / total for part, value in seconds.items()}


def _acts(hosts: Mapping[int, Mapping[str, Any]], work: CountedWork | None) -> list[str]:
    """The small acts of a trial whose cost is worth knowing."""
    watched = [one for host in hosts.values() for one in (host, *host.get("workers", ()))]
    values = [VALUE, LOOP] if work is not None and work.own_syncs else []
    reads = [one.get("reads", {}) for one in watched]
    packages = {read.get("through", package) for found in reads for package, read in found.items()}
    packages |= {line["package"] for one in watched for line in one.get("lines", ()) if line["part"] in MAKING}
    return [PAGE, *values, *sorted(packages)]


def _row_bytes(hosts: Mapping[int, Mapping[str, Any]]) -> int:
    """What the trial asks a chunked file for at a time, at most; where that is not known, what a sample has."""
    watched = (one for host in hosts.values() for one in (host, *host.get("workers", ())))
    reads = (read for one in watched for read in one.get("reads", {}).values())
    wanted = max((int(read.get("wanted_bytes", 0)) for read in reads), default=0)
    return wanted or max((int(host.get("sample_bytes", 0)) for host in hosts.values()), default=0)


def _decoded(hosts: Mapping[int, Mapping[str, Any]]) -> dict[str, Decoded]:
    """See `Evidence.decoded`."""
    found = dict[str, Decoded]()
    for host in hosts.values():
        reads = [item for one in (host, *host.get("workers", ())) for item in one.get("reads", {}).items()]
        for package, read in reads:
            if package not in found and "file" in read and read["pixels"] > host.get("pixels", 0) > 0:
                timed = decoded(package, read["file"], read["pixels"], host["pixels"])
                found |= {package: timed} if timed is not None else {}
    return found


def _computing(trial: Trial) -> dict[int, float]:
    """Of the time that each rank was ready to compute, the part in which it had a core."""
    used = [event for event in trial.events if event["kind"] == "cpu_used"]
    ready = {int(event["rank"]): event["thread_seconds"] + event["queued_seconds"] for event in used}
    return {int(event["rank"]): event["thread_seconds"] / (ready[int(event["rank"])] or 1.0) for event in used}


def _after_last(trial: Trial, steps: Sequence[Event]) -> list[Event]:
    """What comes after the last step of each rank and counts among the steps measured, as events of no step."""
    first = {int(step["rank"]): step for step in reversed(steps)}
    found = []
    for ended in (event for event in trial.events if event["kind"] == "fit_ended" and event["rank"] in first):
        own = first[int(ended["rank"])]
        seconds = {
            f"{part}{_SUFFIX}": finite(ended.get(f"{part}{_SUFFIX}")) for part in BESIDE_TRAINING
            if belongs_to_last_step(part, finite(own.get(f"{part}{_SUFFIX}")))
        }  # fmt: skip
        found.append({"rank": ended["rank"], **seconds, "step_seconds": math.fsum(seconds.values())})
    return found


def _times(steps: Sequence[Event], computing: Mapping[int, float], after: Sequence[Event]) -> dict[str, Any]:
    shares = shares_of([*steps, *after])
    alone = [part for part in shares if part.split("_")[0] not in _SHARED]
    ranks: defaultdict[int, list[Event]] = defaultdict(list)
    for step in steps:
        ranks[int(step["rank"])].append(step)
    parts_of = {
        rank: {
            part: statistics.fmean(finite(step.get(part + _SUFFIX)) for step in own)
            * computing.get(rank, 1.0)  # a rank that had no core is not slow
            for part in alone
        }
        for rank, own in sorted(ranks.items())
    }
    errors = {name: _relative_error(_spent(steps, name)) for name in shares}
    return {
        "errors": errors,
        "rank_parts": parts_of,
        "step_seconds": sum(finite(step["step_seconds"]) for step in (*steps, *after)) / len(steps),
        "shares": shares,
        "rank_seconds": {rank: math.fsum(own.values()) for rank, own in parts_of.items()},
    }


def _spent(steps: Sequence[Event], part: str) -> list[float]:
    """Seconds of a part, of each step; of what comes every so many steps, of those in which it came."""
    found = [finite(step.get(part + _SUFFIX)) for step in steps]
    longest = max(found)
    return [one for one in found if one >= longest / 10] if part in BESIDE_TRAINING else found


def _relative_error(values: Sequence[float]) -> float:
    """The standard error of a mean over it; 1 where there is too little to tell.

    Steps that follow one another are alike, so it is that of single steps or of four parts of the trial, the larger.
    """
    mean, each = statistics.fmean(values), len(values) // _PARTS
    if len(values) < 2 or not mean > 0:
        return 1.0
    error = statistics.stdev(values) / math.sqrt(len(values))
    if each >= 2:
        parts = [statistics.fmean(values[first : first + each]) for first in range(0, each * _PARTS, each)]
        error = max(error, statistics.stdev(parts) / math.sqrt(_PARTS))
    return error / mean


def _uneven(steps: Sequence[Event]) -> dict[str, Any]:
    """`Evidence.uneven`, and whose batch is the largest nearly always."""
    batches: defaultdict[Any, dict[int, float]] = defaultdict(dict)
    for step in steps:
        if "elements" in step:
            batches[step.get("batch", step["step"])][int(step["rank"])] = finite(step["elements"])
    together = [sizes for sizes in batches.values() if len(sizes) > 1 and max(sizes.values()) > 0]
    if not together:
        return {}
    times = [max(sizes.values()) * len(sizes) / math.fsum(sizes.values()) for sizes in together]
    rank, count = Counter(max(sizes, key=sizes.__getitem__) for sizes in together).most_common(1)[0]
    return {"uneven": statistics.fmean(times), "uneven_rank": rank if count >= _NEARLY * len(together) else None}


_NEARLY = 0.9


def _epoch_starts(steps: Sequence[Event]) -> float | None:
    """See `Evidence.epoch_start_fraction`; of the first rank."""
    rank = min(int(step["rank"]) for step in steps)
    own = [step for step in steps if int(step["rank"]) == rank]
    first = [after for before, after in pairwise(own) if after.get("epoch", 0) != before.get("epoch", 0)]
    if not first:
        return None
    usual = statistics.median(finite(step["step_seconds"]) for step in own)
    beyond = math.fsum(max(0.0, finite(step["step_seconds"]) - usual) for step in first)
    return beyond / (math.fsum(finite(step["step_seconds"]) for step in own) or math.nan)


def _growths(trial: Trial, steps: Sequence[Event]) -> dict[str, Any]:
    """Of ranks themselves, and of their loader processes beside files, which the copy of a page leaves as it is."""
    own, ranks = _growth(trial), defaultdict[int, list[tuple[float, float]]](list)
    for step in steps:
        if "workers_anonymous_bytes" in step:
            ranks[int(step["rank"])].append((number(step["step"]), finite(step["workers_anonymous_bytes"])))
    series = [held for held in ranks.values() if len(held) >= _LEAST_POINTS]
    grown = [each for held in series if (each := growth(held)) * (held[-1][0] - held[0][0]) >= _LEAST_GROWN_BYTES]
    of_workers = max(grown, default=0.0)
    is_more = of_workers > (own or 0.0)
    return {"growth_bytes": of_workers if is_more else own, "growth_in_workers": is_more}


_LEAST_GROWN_BYTES = 32 << 20
"""Of a trial: where nothing is kept, heaps in pieces grew by 10 MiB in 40 steps, and by 25 MiB in 400."""


def _growth(trial: Trial) -> float | None:
    """See `Evidence.growth_bytes`: of the medians of three thirds both differences must be much of the whole."""
    found = list[float]()
    for event in trial.events:
        held = event.get("held", ()) if event["kind"] == "host_watched" else ()
        if len(held) >= _LEAST_POINTS:
            found.append(growth(held))
    return max(found, default=None)


def growth(held: Sequence[tuple[float, float]], least: float = _STEADY) -> float:
    """What a step adds, of (step, bytes or seconds) in order; 0 where either half adds less than `least` of it all."""
    first, second, last = thirds([size for _, size in held])
    begin, _, end = thirds([step for step, _ in held])
    steady = min(second - first, last - second) >= least * (last - first) > 0
    return (last - first) / (end - begin) if steady else 0.0


def thirds(values: Sequence[float]) -> tuple[float, float, float]:
    """The medians of the first third, of the middle and of the last."""
    third = len(values) // 3
    first, second, last = (statistics.median(part) for part in (values[:third], values[third:-third], values[-third:]))
    return first, second, last


def _slowing(steps: Sequence[Event]) -> Slowing | None:
    """See `Evidence.slowing`."""
    ranks = defaultdict[int, list[Event]](list)
    for step in steps:
        ranks[int(step["rank"])].append(step)
    found = [one for rank, own in ranks.items() if (one := slowing(rank, own)) is not None]
    return max(found, key=lambda one: (one.part not in _SHARED[:2], one.each_seconds), default=None)


def slowing(rank: int, steps: Sequence[Event]) -> Slowing | None:
    """What slows one rank down, if one part of its steps grows steadily, and the rest much less.

    A machine that becomes slower slows all parts; samples that become larger are no fault.
    """
    steps = steps[:: max(1, len(steps) // _MOST_COMPARED)]
    if len(steps) < LEAST_STEPS or _rises([finite(step.get("elements") or step.get("samples")) for step in steps]):
        return None
    names = {name for step in steps for name in step if name.endswith(_SUFFIX) and name not in _NO_PART}
    beside = [f"{part}{_SUFFIX}" for part in BESIDE_TRAINING]
    parts = {name: [finite(step.get(name)) for step in steps] for name in sorted(names - {*beside})}
    whole = [math.fsum(seconds) for seconds in zip(*parts.values(), strict=True)]
    places = [number(step.get("batch", step["step"])) for step in steps]
    each = {name: growth([*zip(places, seconds, strict=True)], _IN_EACH_HALF) for name, seconds in parts.items()}
    most = max(each, key=each.__getitem__)
    rest = [one - part for one, part in zip(whole, parts[most], strict=True)]
    (before, _, after), (begin, _, end), (least, _, last) = thirds(rest), thirds(places), thirds(parts[most])
    all_slow = before > 0 and least > 0 and after / before - 1 > (last / least - 1) / 2
    first, _, now = thirds(whole)
    if all_slow or not _rises(parts[most]) or each[most] * (end - begin) < _MOST_OF_GROWTH * (now - first):
        return None
    return Slowing(
        rank=rank, part=most.removesuffix(_SUFFIX), step_seconds=(first, now), part_seconds=least,
        each_seconds=each[most], steps=end - begin, before=begin,
    )  # fmt: skip


def _rises(values: Sequence[float]) -> bool:
    """Whether far more pairs rise than fall: all of steady growth, half of a single change in between."""
    rises = [(after > before) - (after < before) for before, after in combinations(values, 2)]
    return sum(rises) >= _RISING * len(rises)


LEAST_STEPS, _MOST_COMPARED, _RISING, _MOST_OF_GROWTH, _IN_EACH_HALF = 12, 150, 0.6, 0.8, 0.1
"""Of 400 runs of 70 pipelines these took those whose work grew by a tenth and more, and none of the others."""


_SHARED = ("backward", "communication", *BESIDE_TRAINING, "other")
"""Parts in which a rank may wait for the others."""


def _start_up(trial: Trial) -> dict[str, Any]:
    started = {event["rank"]: event["time"] for event in trial.events if event["kind"] == "fit_started"}
    first: dict[int, float] = {}
    last = -math.inf
    for event in trial.steps:
        if "train_started" in event:
            first.setdefault(event["rank"], event["train_started"])
            last = max(last, event["train_ended"])
    waits = [first[rank] - started[rank] for rank in first.keys() & started.keys()]
    if not waits:
        return {"start_up_seconds": None, "total_seconds": None}
    return {"start_up_seconds": max(waits), "total_seconds": last - min(started.values())}


def _read_seconds(steps: Sequence[Event]) -> float | None:
    if not all("read_started" in step for step in steps):
        return None
    ranks: defaultdict[int, list[tuple[float, float]]] = defaultdict(list)
    for step in steps:
        ranks[int(step["rank"])].append((step["read_started"], step["read_ended"]))
    busy = [sum(end - begin for begin, end in merged(tuple(spans), 0.0)) for spans in ranks.values()]
    return sum(busy) / len(steps)


def _reading(trial: Trial) -> dict[str, Any]:
    """From what the loaders counted in the fit, as rows do; of one that has not ended between two steps."""
    ended = [event.get("counters") or {} for event in trial.events if event["kind"] == "fit_ended"]
    requests, size, samples = (
        math.fsum(number(one.get(name, 0.0)) for one in ended) for name in ("requests", "bytes_read", "samples_read")
    )
    if requests and samples:
        return {"requests_per_sample": requests / samples, "bytes_per_request": size / requests}
    requests = size = samples = 0.0
    ranks = {event["rank"] for event in trial.steps}
    by_rank = [[e for e in trial.steps if e["rank"] == rank and "requests" in e] for rank in ranks]
    for counted in by_rank:
        for before, after in pairwise(counted[:: max(1, len(counted) - 1)]):
            requests += number(after["requests"]) - number(before["requests"])
            size += number(after["bytes_read"]) - number(before["bytes_read"])
        samples += sum(int(event["samples"]) for event in counted[1:])
    if not requests:  # a small store is read whole before the first step ends
        requests = sum(number(counted[-1]["requests"]) for counted in by_rank if counted)
        size = sum(number(counted[-1]["bytes_read"]) for counted in by_rank if counted)
        samples = sum(int(event["samples"]) for counted in by_rank for event in counted)
    return {
        "requests_per_sample": requests / samples if samples and requests else None,
        "bytes_per_request": size / requests if requests else None,
    }


def store_layout(config: Config, with_network: bool = False) -> StoreLayout:
    """How the store is cut, beside the chunks that `kit.plan_chunks` would choose, both priced as a plan is.

    Args:
        with_network: As `price_store` takes it.

    Raises:
        KitError: when the store does not open, or its costs cannot be predicted.
    """
    from kit.data.build.layout import plan_chunks, price_store, without_filters
    from kit.data.open_dataset import open_dataset

    config = without_filters(config)
    dataset = open_dataset(config)
    plan = plan_chunks(config.replace({"chunking.chunk": "auto", "chunking.shard": "auto", "data.source": None}))
    stored, planned = (
        price_store(config, dataset, cut, with_network=with_network, is_planned=True) for cut in (None, plan)
    )
    seconds, least = (sum(cost.seconds_per_batch for cost in costs) for costs in (stored, planned))
    return StoreLayout(
        seconds_per_batch=seconds, planned_seconds_per_batch=least, chunk=stored[0].chunk, planned_chunk=plan.chunk,
        dims=plan.dims, python_fraction=_python_fraction(config, stored),
    )  # fmt: skip


def _python_fraction(config: Config, costs: Sequence[LayoutCost]) -> float:
    chunking = config.chunking
    python = math.fsum(cost.requests_per_batch for cost in costs) * chunking.request_cpu_seconds
    decoding = math.fsum(cost.bytes_per_batch for cost in costs) / chunking.decode_bytes_per_second
    return python / (python + decoding) if python + decoding > 0 else 1.0


def _cpu(trial: Trial) -> dict[str, Any]:
    found = [event for event in trial.events if event["kind"] == "cpu_used" and event["wall_seconds"] > 0]
    if not found:
        return {"thread_cores": None, "process_cores": None, "workers": None, "queued_fraction": None}

    def cores(event: Event, *names: str) -> float:
        return float(sum(event[f"{name}_seconds"] for name in names) / event["wall_seconds"])

    return {
        "thread_cores": max(cores(event, "thread", "queued") for event in found),
        "queued_fraction": max(cores(event, "queued") for event in found),
        "process_cores": sum(cores(event, "process", "workers") for event in found),
        "workers": max(int(event["workers"]) for event in found),
    }


def _memory(trial: Trial, here: bool) -> dict[str, Any]:
    devices = set(trial.environment.get("devices", ()))
    gpus = [gpu.total_bytes for gpu in hardware().gpus if gpu.uuid in devices] if here else []
    given = trial.config.hardware.device_memory_bytes
    host, workers = dict[int, float](), dict[int, float]()
    for event in trial.steps:
        workers[event["rank"]] = max(workers.get(event["rank"], 0.0), finite(event.get("workers_bytes")))
        host[event["rank"]] = max(host.get(event["rank"], 0.0), finite(event.get("host_rss_bytes")))

    def most(name: str) -> float | None:
        return max((finite(step.get(name)) for step in trial.steps), default=0.0) or None

    return {
        "device_allocated_bytes": most("device_allocated_bytes") or measured_bytes(trial),
        "device_reserved_bytes": most("device_reserved_bytes"),
        "device_limit_bytes": given or min(gpus, default=None),
        "host_bytes": sum(host.values()) + sum(workers.values()) or None,
        "host_limit_bytes": hardware().memory_bytes if here else None,
    }


def _work(trial: Trial) -> CountedWork | None:
    found = [event for event in trial.events if event["kind"] == "work_counted"]
    if not found:
        return None
    flops: defaultdict[str, float] = defaultdict(float)
    for event in found:
        for name, count in event["flops"].items():
            flops[name] += count
    first = min(found, key=lambda event: int(event["rank"]))
    return CountedWork(
        samples=sum(int(event["samples"]) for event in found), flops=dict(flops),
        bytes=sum(event["bytes"] for event in found), calls=first["calls"], own_syncs=first["own_syncs"],
        batch_norms_again=max(event["batch_norms_again"] for event in found), lines=tuple(first["lines"]),
        collective_places=tuple((str(place), int(count)) for place, count in first.get("collective_places", ())),
        places=tuple(first["places"]) if "places" in first else None,
        **{name: int(first.get(name, 0)) for name in _COUNTS},
    )  # fmt: skip


_COUNTS = ("rows", "rows_used", "collectives", "collective_bytes")
