"""Rules about what the host does beside the arithmetic: hooks, drawing, garbage, threads, uneven ranks.

They read what `kit.studies.diagnosis.host` watched. Where a share was sampled, its effect is a range by the number of
samples. The thresholds are kit's: a tenth of the time is worth advice, a twentieth where the cure costs nothing.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from kit.records.trace import BESIDE_TRAINING, PHASE_LABELS
from kit.studies.diagnosis.evidence import LEAST_STEPS, Evidence, Slowing, most_seen
from kit.studies.diagnosis.rule import MANY_STEPS, SLIVER, WAITS, Change, Range, Rule, agreed, without, without_part
from kit.studies.diagnosis.sampler import DRAWERS, GARBAGE, LOGGERS, SELF_LOG
from kit.studies.diagnosis.unit_costs import PAGE_BYTES
from kit.units import format_bytes, format_count, format_seconds

_TWENTIETH = 0.05
_FEW_SAMPLES = 16
"""A batch of at most that many samples may be too small for a device."""
_TENSORS = ("torch", "lightning", "pytorch_lightning", "kit")
"""Packages whose time is arithmetic of the step, or of the trainer."""
_HOOKS_OF_PARTS = (
    "training_step", "optimizer_step", "configure_gradient_clipping", "optimizer_zero_grad", "transfer_batch_to_device",
    "lr_scheduler_step", "validation_step", "forward", "on_save_checkpoint", "state_dict", "train_dataloader",
)  # fmt: skip
"""What belongs to a part of the step that has rules of its own."""
_FULL_COLLECTIONS = 3
_SMALL_BYTES = 1 << 16


def _sampled(found: Evidence, fraction: float, samples: int | None = None) -> Range:
    """Without a share that was sampled, by the binomial's standard error."""
    count = samples or int(found.host.get("samples", 1)) or 1
    error = math.sqrt(max(0.0, fraction * (1 - fraction)) / count)
    return without(fraction - error, fraction + error)


def _lines(found: Evidence) -> list[Mapping[str, Any]]:
    return list(found.host.get("lines", ()))


def _share(found: Evidence, part: str) -> float | None:
    return found.shares.get(part)


def _every(found: Evidence) -> int:
    """How many times as rarely brings a validation to a twentieth of the time."""
    share = found.shares.get("validation", 0.0)
    return max(2, math.ceil(share / max(1e-6, 1 - share) / _TWENTIETH))


def _validation_change(found: Evidence) -> Change:
    every = found.config.trial.validate_every_steps
    return {"trial.validate_every_steps": every * _every(found)} if every else {}


# -- hooks and drawing


def _drawn(found: Evidence, rank: int | None = None) -> list[Mapping[str, Any]]:
    """Lines that draw or log. To log a few values is no more than any step does, and a GPU works on meanwhile."""
    lines = _lines(found) if rank is None else found.hosts[rank].get("lines", ())
    drawn = [line for line in lines if line["package"] in DRAWERS and line["part"] not in ("wait", "worker")]
    own = math.fsum(line["fraction"] for line in drawn if line["package"] == SELF_LOG)
    return drawn if own >= 2 * SLIVER and not found.on_gpu else [one for one in drawn if one["package"] != SELF_LOG]


def _drawing(found: Evidence) -> float | None:
    if not found.host:
        return None
    beside = (line["fraction"] for line in _drawn(found) if line["part"] != "logging")  # that is a share of its own
    return math.fsum(beside) + found.shares.get("logging", 0.0)


def drawing_hook(found: Evidence) -> str | None:
    """The hook that a short trial leaves out to train without drawing and logging; None where no trial can.

    Empty where it is all done by loggers, which such a trial has none of.
    """
    drawn = _drawn(found)
    if not drawn or (_drawing(found) or 0.0) < _TWENTIETH:
        return None
    hooks, most = {str(line["hook"]) for line in drawn}, _hooks(found, min(found.hosts))
    if len(hooks) == 1 and most.get(hook := hooks.pop()) == 0.0:
        return hook
    return "" if all(line["package"] in LOGGERS for line in drawn) else None


def left_out_fraction(found: Evidence) -> float:
    """Of the time, what a short trial leaves out: loggers, validation, checkpoints."""
    logged = (line["fraction"] for line in _drawn(found) if line["package"] in LOGGERS and line["part"] != "logging")
    beside = math.fsum(found.shares.get(part, 0.0) for part in BESIDE_TRAINING)
    return min(1.0, beside + math.fsum(logged))


def _drawing_effect(found: Evidence) -> Range:
    """As steps without it were measured, within what the share that was seen allows."""
    seen = _sampled(found, _drawing(found) or 0.0)
    return agreed(found.measured_gains.get("drawing or logging in the step"), seen)


def _drawing_sentence(found: Evidence, value: float) -> str:
    drawn = _drawn(found)
    at = f" at {drawn[0]['place']}, in {drawn[0]['package']}" if drawn and drawn[0]["place"] else ""
    return f"Drawing and logging take {value:.0%} of the time{at}: a step need not wait for a picture or a log."


def _no_tensors(found: Evidence) -> list[Mapping[str, Any]]:
    """Lines of the forward part that call no operation of torch, themselves or through a library."""
    known = found.work.places if found.work is not None else None
    return [
        line for line in _lines(found)
        if line["part"] == "forward" and line["place"] and line["package"] not in (*_TENSORS, *DRAWERS, GARBAGE)
        and line["place"] not in (known or ())
    ]  # fmt: skip


def _python(found: Evidence) -> float | None:
    if not found.host or found.work is None or found.work.places is None:
        return None
    return math.fsum(line["fraction"] for line in _no_tensors(found))


def _python_sentence(found: Evidence, value: float) -> str:
    most = _no_tensors(found)[0]
    by = f", in {most['package']}" if most["package"] else ""
    return (
        f"Code of the step that calls no operation of torch takes {value:.0%} of the time, most of it at "
        f"{most['place']}{by}."
    )


def _hooks(found: Evidence, rank: int) -> dict[str, float]:
    """The share of each hook without what it draws and logs; 0 where that is most of it."""
    hooks, drawing = dict[str, float](), _drawn(found, rank)
    checkpoints = _checkpoint_hooks(found, rank)
    for name, share in found.hosts[rank].get("hooks", {}).items():
        if name.rpartition(".")[2] not in _HOOKS_OF_PARTS and name not in checkpoints:
            drawn = math.fsum(line["fraction"] for line in drawing if line["hook"] == name)
            hooks[name] = share - drawn if drawn < _MOST_OF_HOOK * share else 0.0
    return hooks


def hook_words(name: str) -> str:
    """`Class.hook` of an action of Lightning; the key of a callback's state also has its settings, in braces."""
    owner, _, hook = name.partition("]")[2].rpartition(".")
    return f"{owner.partition('{')[0]}.{hook}"


def _checkpoint_hooks(found: Evidence, rank: int) -> dict[str, float]:
    """The share of each hook of a callback that writes checkpoints, without the writing that Lightning does for it."""
    host = found.hosts[rank]
    owners = {f"[Callback]{key}" for key in host.get("checkpointers", ())}
    return {name: share for name, share in host.get("hooks", {}).items() if name.rpartition(".")[0] in owners}


def _checkpoints(found: Evidence) -> float | None:
    """With all that the callbacks which write them do, of the rank where that is most."""
    hooks = (math.fsum(_checkpoint_hooks(found, rank).values()) for rank in found.hosts)
    share, own = found.shares.get("checkpoint"), max(hooks, default=0.0)
    return own or None if share is None else min(1.0, share + own)


def _checkpoints_sentence(found: Evidence, value: float) -> str:
    every = [(share, name, rank) for rank in found.hosts for name, share in _checkpoint_hooks(found, rank).items()]
    share, name, rank = max(every, default=(0.0, "", 0))
    said = f"Writing checkpoints takes {value:.0%} of the time, {format_seconds(value * found.step_seconds)} a step"
    if share < _TWENTIETH:
        return f"{said}."
    own = (line for line in found.hosts[rank].get("lines", ()) if line["hook"] == name and line["place"])
    place = next((f", at {line['place']}" for line in own), "")
    return (
        f"{said}: {max(0.0, value - share):.0%} is Lightning's own writing, {share:.0%} what {hook_words(name)} does "
        f"besides{place}."
    )


def _checkpoints_effect(found: Evidence) -> Range:
    share, reach = _checkpoints(found) or 0.0, min(0.5, 2 * found.errors.get("checkpoint", 0.0))
    return without(share * (1 - reach), share * (1 + reach))


_MOST_OF_HOOK = 0.8
"""A hook that draws so much does nothing else worth telling, and tells what drawing takes where it is left out."""


def slowest_hook(found: Evidence) -> tuple[str, float]:
    """The hook that takes most beside drawing and logging, and that share, on the rank where it takes most."""
    return _slowest(found)[1:]


def _slowest(found: Evidence) -> tuple[int, str, float]:
    hooks = [(rank, name, share) for rank in found.hosts for name, share in _hooks(found, rank).items()]
    return max(hooks, key=lambda hook: hook[2], default=(0, "", 0.0))


def _hook_sentence(found: Evidence, value: float) -> str:
    rank, name, _share = _slowest(found)
    drawn = _drawn(found, rank)
    own = (line for line in found.hosts[rank].get("lines", ()) if line["hook"] == name)
    place = next((line["place"] for line in own if line["place"] and line not in drawn), "")
    others = [host.get("hooks", {}).get(name, 0.0) for other, host in found.hosts.items() if other != rank]
    alone = f", on rank {rank} alone, for which the others wait" if others and max(others) < value / 2 else ""
    at = f", at {place}" if place else ""
    seconds = format_seconds(value * found.step_seconds)
    return f"{hook_words(name)} takes {value:.0%} of the time, {seconds} a step{at}{alone}."


def _hook_effect(found: Evidence) -> Range:
    """As steps without the hook were measured, within what its share allows."""
    share = slowest_hook(found)[1]
    return agreed(found.measured_gains.get("slow hook"), without(0.95 * share, share))


def _garbage(found: Evidence) -> float | None:
    host = found.host
    is_much = host.get("collections", 0) >= _FULL_COLLECTIONS
    return host.get("garbage_fraction") if is_much or not host else host.get("young_garbage_fraction", 0.0)


def _garbage_sentence(found: Evidence, value: float) -> str:
    place = next((line["place"] for line in _lines(found) if line["package"] == GARBAGE and line["place"]), "")
    at = f", most often at {place}" if place else ""
    return f"Python collects garbage {value:.0%} of the time ({found.host.get('collections', 0)} full collections){at}."


# -- threads


def _thread(found: Evidence) -> Mapping[str, Any] | None:
    """The busiest; not what writes logs, where these are a finding, which mends both."""
    logged = LOGGERS if (_drawing(found) or 0.0) >= _TWENTIETH else ()
    threads = (thread for thread in found.host.get("threads", ()) if thread.get("package", "") not in logged)
    busiest = max(threads, key=lambda thread: thread["cores"], default=None)
    return busiest if busiest is not None and busiest["cores"] >= 2 * SLIVER else None


def _held(found: Evidence) -> float | None:
    """Of the time in which it did not queue for a core, what the training thread neither computed nor waited for.

    On a quiet machine that is of all the time; on a busy one queueing hides what a thread holds up.
    """
    if not found.host or found.thread_cores is None:
        return None
    if _thread(found) is None or found.on_gpu:
        return 0.0
    waits = math.fsum(found.shares.get(part, 0.0) for part in ("wait", "communication", "checkpoint"))
    return max(0.0, 1 - found.thread_cores - waits) / max(_LEAST_READY, 1 - (found.queued_fraction or 0.0))


_LEAST_READY = 0.1


def _held_sentence(found: Evidence, value: float) -> str:
    thread = _thread(found) or {"name": "a thread", "place": "", "cores": 0.0}
    at = f", at {thread['place']}" if thread["place"] else ""
    return (
        f"The training stands still {value:.0%} of the time while the thread {thread['name']!r} computes{at} "
        f"({thread['cores']:.0%} of a core): one of the two at a time has Python's interpreter."
    )


# -- the step


def _small_batch(found: Evidence) -> float | None:
    gain = found.measured_gains.get("batch too small")
    return None if gain is None else gain[0]


def may_be_small(found: Evidence) -> bool:
    """Whether a larger batch is worth a short trial: few samples, a step that trains most of its time, room for more.

    A wait, a validation or a checkpoint is no shorter for a device that has more to do at once.
    """
    work = found.work
    if work is None or not work.calls or not found.train_seconds >= found.step_seconds / 2 > 0:
        return False
    limit, held = found.device_limit_bytes, found.device_allocated_bytes
    room = not limit or not held or held < limit / 4
    return room and work.samples <= _FEW_SAMPLES * found.world_size


def larger_batch(found: Evidence) -> Change:
    return {} if found.whose_batches else {"loader.batch_size": 4 * found.config.loader.batch_size}


def larger_batch_of_own(found: Evidence) -> int | None:
    """Of data of the caller's own, which the config does not reach."""
    return 4 * _batch(found) if found.whose_batches else None


def _batch(found: Evidence) -> int:
    """Samples in a batch of one rank."""
    return found.work.samples // found.world_size if found.work is not None else 0


def _small_batch_setting(found: Evidence) -> str:
    larger = larger_batch_of_own(found)
    if larger is None:
        where = f"loader.batch_size: {4 * found.config.loader.batch_size}"
    elif found.whose_batches.endswith(("Loader", "loader")):
        where = f"batch_size={larger} of {found.whose_batches}"
    else:
        where = f"batch_size={larger} of the DataLoader made by {found.whose_batches.removeprefix('the data of ')}"
    return f"{where}, and the learning rate with it"


def _idle_optimizer(found: Evidence) -> float | None:
    """The share of the optimizer where most of what it updates had no gradient."""
    tables, work = found.host.get("embeddings", {}), found.work
    if work is None or not tables or "optimizer" not in found.shares:
        return None
    unused = _unused(found)
    large = tables.get("elements", 0) >= 0.5 * max(1, tables.get("parameters", 0))
    return found.shares["optimizer"] if large and unused >= 0.9 else 0.0


def _unused(found: Evidence) -> float:
    work = found.work
    return 1 - work.rows_used / work.rows if work is not None and work.rows else 0.0


def _idle_optimizer_effect(found: Evidence) -> Range:
    """Without the optimizer's share of idle rows, and at most without the pass that fills their gradients with zeros.

    AdamW passes over seven tables (parameter, gradient and two moments read, three of them written), a dense gradient
    is written and read once: two sevenths of the optimizer's time.
    """
    tables = found.host["embeddings"]
    gone = found.shares["optimizer"] * _unused(found) * tables["elements"] / tables["parameters"]
    return without(gone, gone + min(gone * 2 / 7, 0.95 * found.shares.get("backward", 0.0)))


def _idle_optimizer_sentence(found: Evidence, value: float) -> str:
    tables = found.host["embeddings"]
    return (
        f"The optimizer takes {value:.0%} of the time: it updates all of {tables['name']!r}, "
        f"{tables['elements'] / tables['parameters']:.0%} of the parameters, of which a batch uses "
        f"{1 - _unused(found):.1%}."
    )


def _not_fused(found: Evidence) -> list[Mapping[str, Any]]:
    return [one for one in found.host.get("optimizers", ()) if one["can_fuse"]]


def _unfused_optimizer(found: Evidence) -> float | None:
    """The share of the optimizer, by the parameters of those that could be fused."""
    optimizers = found.host.get("optimizers")
    if optimizers is None or "optimizer" not in found.shares:
        return None
    total = math.fsum(one["parameters"] for one in optimizers)
    plain = math.fsum(one["parameters"] for one in _not_fused(found))
    return found.shares["optimizer"] * plain / total if plain >= _LEAST_FUSED else 0.0


def _unfused_optimizer_sentence(found: Evidence, value: float) -> str:
    ones = _not_fused(found)
    count = format_count(math.fsum(one["parameters"] for one in ones))
    return (
        f"The optimizer takes {value:.0%} of the time: {ones[0]['name']} passes over its {count} parameters again and "
        "again, a few numbers computed in each pass; fused, it computes all of a step in one."
    )


def _unfused_optimizer_change(found: Evidence) -> Change:
    """By AdamW, which is Adam where no decay is in the gradients; a scaled step that clips refuses a fused one."""
    config = found.config
    scales = config.hardware.precision == "16-mixed" or (found.on_gpu and config.hardware.precision == "auto")
    clips = config.training.gradient_clip_norm is not None and scales
    others = len(_not_fused(found)) < len(found.host["optimizers"])
    own = any(one["decays_gradients"] for one in _not_fused(found))
    return {} if clips or others or own else {"levers.optimizer": "adamw-fused"}


def _unfused_optimizer_setting(found: Evidence) -> str:
    own = f"fused=True of your {_not_fused(found)[0]['name']}"
    return f"levers.optimizer: adamw-fused, which is {own}" if _unfused_optimizer_change(found) else own


def _unfused_optimizer_effect(found: Evidence) -> Range:
    """As many times as fast as was measured on a CPU; on a GPU by the passes of the form for lists, three at best."""
    low, high = _FUSED_ON_GPU if found.on_gpu else _FUSED
    share = _unfused_optimizer(found) or 0.0
    return without(share * (1 - 1 / low), share * (1 - 1 / high))


_FUSED, _FUSED_ON_GPU, _LEAST_FUSED = (2.2, 7.5), (1.2, 3.0), 100_000
"""Of Adam and AdamW with 0.1 to 30 million parameters in 8 to 100 tensors, by one thread and two."""


def _small_collectives(found: Evidence) -> float | None:
    work = found.work
    if found.world_size < 2 or work is None:
        return None
    own = sum(count for place, count in work.collective_places if not place.startswith("Lightning"))
    small = work.collective_bytes / max(1, work.collectives) <= _SMALL_BYTES or own >= work.collectives / 2
    return own if small else 0.0


def _collectives_effect(found: Evidence) -> Range | None:
    share = found.line_fraction({place for place, _ in found.work.collective_places}) if found.work else 0.0
    return without(0.75 * share, share) if share else None


def _collectives_explain(found: Evidence) -> tuple[str, ...]:
    """Also the hook or the logging that makes most of them."""
    places = {place for place, _ in found.work.collective_places} if found.work else set[str]()
    hooks, drawn = {line["hook"] for line in _lines(found) if line["place"] in places}, _drawn(found)
    by_hook = ("slow hook",) if slowest_hook(found)[0] in hooks else ()
    by_log = ("drawing or logging in the step",) if drawn and drawn[0]["place"] in places else ()
    return ("communication", "many tiny operations", "batch too small", *by_hook, *by_log)


# -- memory


def _faulting_fraction(found: Evidence) -> float | None:
    """The share of the system in the training thread's time, where it answers page faults; a GPU's step hides it."""
    host = found.host
    if not host or "page_faults_per_second" not in host or _forked_meanwhile(found):
        return None
    most = host["page_faults_per_second"] * _MOST_FAULT_SECONDS  # what is more went into reading, writing and waiting
    return 0.0 if found.on_gpu else min(host["system_fraction"], most)


def may_fault(found: Evidence) -> bool:
    """Whether keeping freed memory is worth a short trial."""
    return (_faulting_fraction(found) or 0.0) >= _LEAST_FAULTING and not found.config.hardware.keep_freed_memory


def _page_faults(found: Evidence) -> float | None:
    gain = found.measured_gains.get("page faults")
    return gain[0] if gain is not None else None if may_fault(found) or _faulting_fraction(found) is None else 1.0


def _forked_meanwhile(found: Evidence) -> bool:
    """Whether loader processes were forked in the time that was watched: a write to a page shared with one faults."""
    loader = found.host.get("loader", {})
    forks = loader.get("workers") and loader.get("start_method") == "fork"
    again = not loader.get("persistent") or found.host.get("loaders_remade")
    return bool(forks and again and found.epoch_start_fraction is not None)


_LEAST_FAULTING = 0.15
_MOST_FAULT_SECONDS = 5e-6
"""In virtual machines 1 to 3 µs each were seen, with the zeros that a page is filled with."""


def _page_faults_sentence(found: Evidence, _: float) -> str:
    faults = found.host["page_faults_per_second"] * found.step_seconds
    return (
        f"The system takes {_faulting_fraction(found) or 0:.0%} of the time to give the training thread memory that it "
        f"gave back before: {format_count(faults)} page faults a step, for {format_bytes(faults * PAGE_BYTES)}."
    )


def _grows(found: Evidence) -> float | None:
    if found.growth_bytes is None or not found.host_limit_bytes:
        return None
    return found.growth_bytes * MANY_STEPS / found.host_limit_bytes


def _grown(found: Evidence) -> str:
    """The container that grew most, in words; empty where none did."""
    grown = found.host.get("grown", {})
    name = max(grown, key=lambda one: grown[one][1] - grown[one][0], default="")
    return f"; {name} grew from {grown[name][0]} to {grown[name][1]} entries meanwhile" if name else ""


def _grows_sentence(found: Evidence, _: float) -> str:
    left = (found.host_limit_bytes or 0) - (found.host_bytes or 0)
    steps = format_count(max(0.0, left) / max(1.0, found.growth_bytes or 1.0))
    whose = " in loader processes" if found.growth_in_workers else ""
    return (
        f"Every step adds {format_bytes(found.growth_bytes or 0)} of memory{whose} that is not given back"
        f"{'' if whose else _grown(found)}: the machine is full after {steps} steps."
    )


# -- steps that take longer and longer


def _slows(found: Evidence) -> float | None:
    if not found.shares or found.batches < LEAST_STEPS * found.world_size:
        return None
    first, last = found.slowing.step_seconds if found.slowing is not None else (1.0, 1.0)
    return last / first if first > 0 else 1.0


def _slowing(found: Evidence) -> Slowing:
    """Where the rule has found it.

    Raises:
        ValueError: where it has not.
    """
    if found.slowing is None:
        raise ValueError("no part of these steps takes longer and longer")
    return found.slowing


def _slows_sentence(found: Evidence, _: float) -> str:
    slow = _slowing(found)
    (first, last), label = slow.step_seconds, PHASE_LABELS.get(slow.part, slow.part)
    host = found.hosts.get(slow.rank, {})
    later = (line for line in host.get("lines", ()) if line["part"] == slow.part and _is_late(line, host))
    share, where, _package = most_seen(later)
    at = f", {where}" if share >= _TWENTIETH else ""
    return (
        f"Steps take longer and longer: {format_seconds(first)} at first, {format_seconds(last)} {slow.steps:.0f} "
        f"steps later, by what grows in {label}{at}{_grown(found)}. After 1,000 steps more that is "
        f"{format_seconds(last + 1000 * slow.each_seconds)} a step."
    )


def _is_late(line: Mapping[str, Any], host: Mapping[str, Any]) -> bool:
    """Whether a line takes more and more: what always takes as long is seen as much in the first half of the steps."""
    seen = max(1.0, line["fraction"] * host.get("samples", 1))
    return bool(line.get("middle", 0.0) >= 0.5 + 2 / math.sqrt(12 * seen))


def _slows_effect(found: Evidence) -> Range:
    """As fast as in the first third, at least; at most without all that has been added since the first step."""
    slow = _slowing(found)
    now, since = found.shares.get(slow.part, 0.0) * found.step_seconds, slow.each_seconds * slow.before
    low, high = (now - slow.part_seconds, now - max(0.0, slow.part_seconds - since))
    return without(low / found.step_seconds, high / found.step_seconds)


def _slows_explains(found: Evidence) -> tuple[str, ...]:
    """What else is said of the part that grows."""
    small = ("batch too small", "many tiny operations")
    of_part = {
        "wait": (*WAITS, "Python in the data", "no prefetch"), "forward": ("Python in the step", *small),
        "other": ("slow hook", *small), "optimizer": ("slow hook", *small),
    }  # fmt: skip
    return of_part.get(_slowing(found).part, ())


def _uneven_sentence(found: Evidence, value: float) -> str:
    whose = "" if found.uneven_rank is None else f", nearly always that of rank {found.uneven_rank},"
    return (
        f"The ranks get batches of different sizes: the largest of a step{whose} is {value:.2g} times the mean, and "
        "the others wait for it."
    )


def _uneven_effect(found: Evidence) -> Range | None:
    """The largest batch sets the pace; were all as large as the mean, that share of its passes would be saved."""
    passes = found.shares.get("forward", 0.0) + found.shares.get("backward", 0.0)
    slowest = found.rank_parts.get(max(found.rank_seconds, key=found.rank_seconds.__getitem__), {})
    saved = 1 - 1 / (found.uneven or 1.0)
    own = slowest.get("forward", 0.0) / found.step_seconds
    return without(saved * min(passes, 2 * own), saved * passes)


HOST_RULES: tuple[Rule, ...] = (
    Rule(
        name="validation too often", looks_at="share of the time in validation", unit="fraction", threshold=0.2,
        source="kit: a twentieth tells as much", needs="timed steps", part="validation",
        measure=lambda found: _share(found, "validation"),
        sentence=lambda _, value: f"Validation takes {value:.0%} of the time.",
        setting=lambda found: f"trial.validate_every_steps, or val_check_interval: {_every(found)} times as rarely",
        change=_validation_change, effect=lambda found: without_part(found, "validation", 1 / _every(found)),
    ),
    Rule(
        name="checkpoints too often", looks_at="share of the time in writing checkpoints", unit="fraction",
        threshold=SLIVER, source="kit", needs="timed steps", part="checkpoint",
        measure=_checkpoints, sentence=_checkpoints_sentence,
        setting=lambda _: "every_n_train_steps of your ModelCheckpoint, save_weights_only, or a faster disk",
        effect=_checkpoints_effect,
    ),
    Rule(
        name="drawing or logging in the step", looks_at="share of the time in drawing and logging", unit="fraction",
        threshold=_TWENTIETH, source="kit", needs="watched steps", measure=_drawing, sentence=_drawing_sentence,
        setting=lambda _: "that line: every hundredth step, fewer values, or after the training",
        effect=_drawing_effect, part="forward",
        explains=("sync in the step", "batch too small"),
    ),
    Rule(
        name="Python in the step", looks_at="share of the time at lines of training_step that call no operation of "
        "torch", unit="fraction", threshold=SLIVER, source="kit", needs="watched steps and counted work",
        measure=_python, sentence=_python_sentence, part="forward",
        setting=lambda _: "that line: every so many steps, after the epoch, or by operations of torch on the batch",
        effect=lambda found: _sampled(found, _python(found) or 0.0), explains=("batch too small",),
    ),
    Rule(
        name="slow hook", looks_at="share of the time in one hook of a callback or the module", unit="fraction",
        threshold=SLIVER, source="kit", needs="watched steps", part="other",
        measure=lambda found: slowest_hook(found)[1] if found.host else None, sentence=_hook_sentence,
        setting=lambda _: "that hook: less of it, or every so many steps",
        effect=_hook_effect,
        explains=("many tiny operations", "sync in the step", "batch too small"),
    ),
    Rule(
        name="garbage collection", looks_at="share of the time in Python's garbage collection, of full ones from three "
        "on", unit="fraction", threshold=_TWENTIETH, source="kit: one or two are an accident of a short trial",
        needs="watched steps", part="other", measure=_garbage,
        sentence=_garbage_sentence,
        setting=lambda _: "no gc.collect() in a step; gc.freeze() after everything is loaded, and gc.set_threshold not "
        "below Python's own",
        effect=lambda found: without(0.95 * (_garbage(found) or 0.0), _garbage(found)),
        explains=("slow hook", "Python in the step", "batch too small"),
    ),
    Rule(
        name="interpreter held by a thread", looks_at="share of the time in which the training thread stands still "
        "while another computes in Python", unit="fraction", threshold=SLIVER, source="kit", needs="watched steps",
        measure=_held, sentence=_held_sentence,  # no effect: changing hands slows what computes, too, nobody knows how
        setting=lambda _: "that thread: a process of its own, or pauses (time.sleep) in its loop",
        explains=("many tiny operations", "slow hook", "Python in the step", "batch too small"),
    ),
    Rule(
        name="batch too small", looks_at="gain of four times the batch, measured, at its lower end", unit="ratio",
        threshold=1.5, source=f"kit: asked for batches of {_FEW_SAMPLES} and fewer", needs="two short trials of the "
        "module (short_trials)", measure=_small_batch,
        sentence=lambda found, _: f"A batch of {_batch(found)} is too small for the device: with four times the "
        "batch more samples a second were trained on.",
        setting=_small_batch_setting, change=larger_batch, batch_size=larger_batch_of_own,
        effect=lambda found: found.measured_gains.get("batch too small"), explains=("many tiny operations",),
    ),
    Rule(
        name="optimizer larger than the work", looks_at="share of the time in the optimizer, where a batch uses few "
        "rows of a large table", unit="fraction", threshold=0.3, source="kit", needs="watched steps and counted work",
        measure=_idle_optimizer, sentence=_idle_optimizer_sentence, part="optimizer",
        setting=lambda _: "sparse=True of that embedding, with SparseAdam or SGD for it",
        effect=_idle_optimizer_effect, explains=("optimizer not fused", "batch too small"),
    ),
    Rule(
        name="optimizer not fused", looks_at="share of the time in an Adam or AdamW of torch's that is not fused",
        unit="fraction", threshold=0.2, source="kit: fused they were 2.2 to 7.5 times as fast on two cores, with 0.1 "
        "to 30 million parameters; of a fifth of a step that is 1.12 × and more", needs="watched steps",
        measure=_unfused_optimizer, sentence=_unfused_optimizer_sentence, part="optimizer",
        setting=_unfused_optimizer_setting, change=_unfused_optimizer_change, effect=_unfused_optimizer_effect,
        explains=("batch too small",),
    ),
    Rule(
        name="memory that grows", looks_at=f"memory that {MANY_STEPS:,} steps would add, over the machine's",
        unit="fraction", threshold=SLIVER, source="kit: growth in both halves of the trial", needs="a trial of this "
        "machine, and six steps or more", measure=_grows, sentence=_grows_sentence,
        setting=lambda found: "what your dataset keeps from sample to sample: a list or a cache that nothing empties"
        if found.growth_in_workers
        else "what keeps tensors from step to step: loss.detach() or loss.item() in a list of losses",
    ),
    Rule(
        name="steps that grow", looks_at="the median step of the last third of the trial over that of the first, where "
        "one part grows throughout and the batches and the rest of the step do not", unit="ratio", threshold=1.1,
        source="kit: what every step adds is soon most of a long run", needs=f"{LEAST_STEPS} timed steps",
        measure=_slows, sentence=_slows_sentence, effect=_slows_effect, explains=_slows_explains,
        setting=lambda _: "what is kept from step to step: keep a sum and a count, or the last so many; what needs all "
        "of it once an epoch",
    ),
    Rule(
        name="page faults", looks_at="gain of the same steps with freed memory kept, measured, at its lower end",
        unit="ratio", threshold=1.15, source="kit: glibc gives large arrays back to the system when they are freed, "
        "and each 4 KiB of the next one is a page fault; asked where these take 15 % of the time of the training "
        "thread and more, on the CPU", needs="watched steps on Linux in which no loader process is forked, and two "
        "short trials of the module (short_trials)",
        measure=_page_faults, sentence=_page_faults_sentence,
        setting=lambda _: "hardware.keep_freed_memory; outside of kit, MALLOC_TRIM_THRESHOLD_ and "
        "MALLOC_MMAP_THRESHOLD_ of the environment, both 1000000000",
        change=lambda _: {"hardware.keep_freed_memory": True},
        effect=lambda found: found.measured_gains.get("page faults"),
    ),
    Rule(
        name="anomaly detection", looks_at="whether autograd looks for anomalies", unit="count", threshold=1.0,
        source="torch: to be used for debugging only, as it slows a program down", needs="watched steps",
        measure=lambda found: None if not found.host else float(found.host.get("anomaly_detection", False)),
        sentence=lambda *_: "Autograd looks for anomalies: each operation notes where it was called, and each gradient "
        "is searched for NaN.",
        setting=lambda _: "detect_anomaly of the Trainer, or torch.autograd.set_detect_anomaly: off once the NaN is "
        "found",
    ),
    Rule(
        name="uneven batches", looks_at="numbers in a step's largest batch over those in the mean one", unit="ratio",
        threshold=1.2, source="kit: a step lasts as long as its largest batch", needs="several ranks",
        measure=lambda found: found.uneven if found.world_size > 1 else None, part="backward",
        sentence=_uneven_sentence,
        setting=lambda found: "your sampler: batches of like length to all ranks in the same step"
        if found.uneven_rank is None else "how samples are shared out: shuffled, or by length in turn",
        effect=_uneven_effect, explains=("stragglers", "communication"),
    ),
    Rule(
        name="small collectives", looks_at="collectives of a step that your own code makes", unit="count",
        threshold=16.0, source="kit: each costs its latency, whatever its size", needs="several ranks and counted work",
        measure=_small_collectives, part="forward",
        sentence=lambda found, value: f"A step makes {value:.0f} collectives of its own, most of them at "
        f"{found.work.collective_places[0][0] if found.work else ''}: each waits for all ranks.",
        setting=lambda _: "one collective for all values: stack them, or log with sync_dist at the end of the epoch",
        effect=_collectives_effect, explains=_collectives_explain,
    ),
)  # fmt: skip
