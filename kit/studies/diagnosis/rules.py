"""The rules of diagnosis, each as data: what it measures, the threshold and its source, and what to change.

A rule measures one number of the evidence; None means that the trial does not tell, and `needs` says what it would
take. A finding is a value at or above the threshold. Sources are published guides by title; *kit* marks thresholds of
our own, each with its reason. `RULES` has all of them, in the order of the table of a diagnosis: about data, about the
step itself, about devices and ranks, about how data is read and made (`kit.studies.diagnosis.loader_rules`), and about
what the host does beside (`kit.studies.diagnosis.host_rules`).
"""

from __future__ import annotations

import math

from kit.studies.calibration.rules import ENOUGH, cpu_cap
from kit.studies.diagnosis.evidence import MUCH_SEEN, Evidence, most_seen
from kit.studies.diagnosis.host_rules import HOST_RULES
from kit.studies.diagnosis.loader_rules import LOADER_RULES
from kit.studies.diagnosis.rule import (
    BASEMODEL,
    HANDOVER_SECONDS,
    SLIVER,
    TRAINING_AT_SCALE,
    WAITS,
    Change,
    Range,
    Rule,
    ahead_in_processes,
    ahead_in_threads,
    middle,
    shorter,
    without,
)  # fmt: skip
from kit.studies.diagnosis.sampler import MAKING
from kit.studies.diagnosis.unit_costs import LOOP, VALUE
from kit.studies.profiling.profile import MANY_CALLS_FRACTION, many_short_calls
from kit.units import format_bytes, format_count, format_seconds


def _without_wait(found: Evidence) -> Range | None:
    """By threads that read ahead, where kit's engine reads; else from one more process to as many as cores leave."""
    if found.own_loader and found.config.loader.num_workers == 0:
        return ahead_in_threads(found)
    if "calibration.enabled" in _worker_change(found):
        return _with_workers(found)
    return ahead_in_processes(found, (found.workers or 0) + 1, _workers(found))


def _with_workers(found: Evidence) -> Range | None:
    """Preparing a batch in several processes; those that wait need no core, and calibrating finds how many help."""
    if "calibration.enabled" not in _worker_change(found):
        return ahead_in_processes(found, _workers(found), _workers(found))
    busy = 1.0 if found.busy_wait_fraction is None else found.busy_wait_fraction
    most = cpu_cap(max(1, (found.cores or 2) // max(1, found.world_size)), busy)
    effect = ahead_in_processes(found, most, most)
    return None if effect is None else (ENOUGH * effect[0], effect[1])


def _workers(found: Evidence) -> int:
    """Loader processes worth trying: as many as the cores leave to each rank."""
    each = (found.cores or 2) // max(1, found.world_size)
    return max(1, each - (0 if found.on_gpu else 1), min(2, each))


def _worker_change(found: Evidence) -> Change:
    if found.user_loader:  # calibrating keeps the processes of an iterable data set, as others may repeat its samples
        return {} if found.host.get("loader", {}).get("iterable") else {"calibration.enabled": True}
    workers = _workers(found)
    return {} if workers <= found.config.loader.num_workers else {"loader.num_workers": workers}


def _wait_setting(found: Evidence) -> str:
    if found.own_loader and found.config.loader.num_workers == 0:
        return "loader.batches_ahead and loader.requests_in_flight: read more at once; kit.studies.calibrate finds them"
    return f"{_workers_words(found)}: prepare more batches at once"


def _workers_words(found: Evidence) -> str:
    if not found.user_loader:
        return "loader.num_workers and loader.prefetch_factor, whose best values kit.studies.calibrate finds"
    if found.host.get("loader", {}).get("iterable"):
        return (
            "num_workers of your own DataLoader, where your iterable data set gives each worker samples of its own "
            "(torch.utils.data.get_worker_info)"
        )
    return "num_workers and prefetch_factor of your own DataLoader, which calibration.enabled finds and sets"


def _wait_change(found: Evidence) -> Change:
    loader = found.config.loader
    if found.own_loader and loader.num_workers == 0:
        return {
            "loader.batches_ahead": min(256, max(4, 2 * loader.batches_ahead)),
            "loader.requests_in_flight": min(1024, max(64, 2 * loader.requests_in_flight)),
        }
    return _worker_change(found)


def _data_line(found: Evidence) -> str:
    """The function at which who makes batches is most, where that is much of their time, and its line seen most."""
    workers, wait = found.host.get("workers", ()), found.shares.get("wait", 0.0)
    lines = (line for one in workers or (found.host,) for line in one.get("lines", ()) if line["part"] in MAKING)
    share, where, package = most_seen(lines, len(workers) or wait or math.inf)
    whose = "a loader process is" if workers else "to make a batch it is"
    return f"; {whose} {share:.0%} of the time {where}{_small_chunks(found, package)}" if share >= MUCH_SEEN else ""


def _small_chunks(found: Evidence, package: str) -> str:
    """Of a reader that takes many chunks for one read, how many."""
    reads = (one.get("reads", {}).get(package, {}) for one in (found.host, *found.host.get("workers", ())))
    read = next((read for read in reads if read.get("chunks", 0) >= _MANY_CHUNKS), None)
    if read is None:
        return ""
    return f", which reads {read['chunks']} chunks of {'×'.join(map(str, read['chunk']))} at a time: larger ones help"


_MANY_CHUNKS = 16


def _no_prefetch(found: Evidence) -> float | None:
    if found.wait_fraction is None or found.workers is None:
        return None
    ahead = found.config.loader.batches_ahead if found.own_loader else 0
    if found.wait_seconds < HANDOVER_SECONDS or found.workers or ahead:
        return 0.0
    effect = _without_wait(found)
    return found.wait_fraction if (middle(effect) or 0.0) >= _LEAST_HIDDEN else 0.0


_LEAST_HIDDEN = 1.05
"""A gain that is probably less is none to read ahead for."""


def _chunks(found: Evidence) -> float | None:
    layout, wait = found.layout, found.wait_fraction
    if layout is None or wait is None or not layout.planned_seconds_per_batch > 0:
        return None
    return layout.seconds_per_batch / layout.planned_seconds_per_batch if wait >= SLIVER else 1.0


def _chunks_effect(found: Evidence) -> Range | None:
    """Of the wait only the reading is shorter, and of that what is hidden stays so."""
    waited = found.reading_wait_seconds
    reading = found.wait_seconds if found.read_seconds is None else found.read_seconds
    left = max(0.0, reading / (_chunks(found) or 1.0) - max(0.0, reading - waited))
    return shorter(found, waited, waited / left if left else math.inf)


def _chunks_sentence(found: Evidence, value: float) -> str:
    layout = found.layout
    chunk = "×".join(map(str, layout.chunk)) if layout else ""
    text = f"Chunks of {chunk} do not fit what a batch reads: better ones should be read {value:.2g} times as fast"
    if found.requests_per_sample is not None and found.bytes_per_request is not None:
        requests, size = format_count(found.requests_per_sample), format_bytes(found.bytes_per_request)
        text += f" (now {requests} requests of {size} a sample)"
    return text + "."


def _chunks_change(found: Evidence) -> Change:
    layout, config = found.layout, found.config
    if layout is None:
        return {}
    chunk = dict(zip(layout.dims, layout.planned_chunk, strict=True))
    named = "x".join(map(str, layout.planned_chunk))
    url = f"{config.data.url.rstrip('/').removesuffix('.zarr')}-{named}.zarr"
    change = {"chunking.chunk": chunk, "chunking.shard": "auto", "data.url": url}
    return change if config.data.source else {**change, "data.source": config.data.url}


def _preparing(found: Evidence) -> float | None:
    if found.wait_fraction is None or not found.train_seconds > 0:
        return None
    seconds = max(found.read_seconds or 0.0, found.wait_seconds)
    return seconds / found.train_seconds if found.wait_fraction >= SLIVER else 0.0


def _one_core(found: Evidence) -> float | None:
    if found.wait_fraction is None or found.busy_wait_fraction is None:
        return None
    return found.busy_wait_fraction if found.wait_fraction >= 2 * SLIVER else 0.0


def _all_cores(found: Evidence) -> float | None:
    if not found.on_gpu or found.wait_fraction is None or found.process_cores is None or not found.cores:
        return None
    return found.process_cores / found.cores if found.wait_fraction >= SLIVER else 0.0


def _start_up(found: Evidence) -> float | None:
    if found.start_up_seconds is None or not found.total_seconds:
        return None
    return found.start_up_seconds / found.total_seconds if found.start_up_seconds >= _LEAST_START_UP_SECONDS else 0.0


_LEAST_START_UP_SECONDS = 2.0


def _unpinned(found: Evidence) -> float | None:
    """By the trace where there is one: a batch of a class of its own is not pinned, whatever the loader is told."""
    if found.trace is not None and found.trace.device == "gpu":
        return found.trace.unpinned_copy_seconds / found.trace.window_seconds
    return None if not found.on_gpu or found.config.loader.pin_memory else found.shares.get("transfer")


def _pin_setting(found: Evidence) -> str:
    if found.config.loader.pin_memory:
        return "your batch's class: a method pin_memory(), for which the loader asks; without it nothing is pinned"
    return "pin_memory of your own DataLoader" if found.given_loader else "loader.pin_memory"


def _bare_copies(found: Evidence) -> float | None:
    if found.trace is None or found.trace.device != "gpu":
        return None
    return found.trace.bare_copy_seconds / found.trace.window_seconds


def _syncs(found: Evidence) -> float | None:
    """On a GPU every sync counts; on the CPU nothing waits, and only calls that were timed to take long are told."""
    if found.work is None:
        return None
    return found.work.own_syncs if found.on_gpu or _calls_of_syncs(found)[1] >= _LEAST_OF_CALLS else 0


_LEAST_OF_CALLS, _LOOPED = 0.05, 256
"""`_LOOPED`: values that one line asks for in a step, from which on it loops over elements."""


def _calls_of_syncs(found: Evidence) -> tuple[float, float]:
    """Of a step on the CPU, what asking for so many values takes, at least and at most.

    Where a line loops over elements, that is also to make them, as timed or as seen at the line. Elsewhere a line may
    compute what it asks for, which is no cost of asking.
    """
    syncs = found.work.own_syncs if found.work is not None else 0
    value, loop = (syncs * found.unit_costs.get(kind, 0.0) / found.step_seconds for kind in (VALUE, LOOP))
    line = found.work.most("syncs") if found.work is not None else None
    if line is None or line["syncs"] < _LOOPED or line["calls"] < 2 * line["syncs"]:
        return value, value
    return value, max(loop, found.line_fraction({line["place"]}))


def _syncs_sentence(found: Evidence, _: float) -> str:
    work = found.work
    line = work.most("syncs") if work else None
    count = format_count(work.own_syncs) if work else "0"
    place = f", most of them in {line['place']}" if line else ""
    what = "makes the GPU run dry"
    if not found.on_gpu:
        what = f"takes {_calls_of_syncs(found)[1]:.0%} of a step in calls here, and would make a GPU run dry"
    return f"The step asks for the value of a tensor {count} times{place}: that {what}."


def _syncs_effect(found: Evidence) -> Range | None:
    """Without the calls: from what asking for a value costs to what a loop over elements costs, or was seen to.

    Samples alone tell too little: between two calls of a loop nothing else gets the interpreter, so it is asked late.
    """
    work = found.work
    if work is None or found.on_gpu or not found.host:
        return None
    calls = _calls_of_syncs(found)
    high = min(calls[1], found.shares.get("forward", 0.0))
    return without(min(calls[0], high), high) if high else None


def _precision(found: Evidence) -> float | None:
    if found.config.hardware.precision not in ("auto", "32-true"):
        return 1.0
    return found.measured_gains.get("full precision", (None, None))[0]


def mixed(found: Evidence) -> str:
    """On a GPU, auto is bf16-mixed or 16-mixed by what it is capable of."""
    return "auto" if found.on_gpu else "bf16-mixed"


def _calls(found: Evidence) -> float | None:
    if found.work is None or not found.work.calls or not found.train_seconds > 0:
        return None
    per_call = found.train_seconds / found.work.calls
    moving = 0.0 if found.on_gpu else found.work.bytes / found.world_size / _CORE_BYTES_PER_SECOND
    return found.work.calls if per_call <= _TINY_CALL_SECONDS and moving < found.train_seconds / 2 else 0.0


_TINY_CALL_SECONDS = 20e-6
_CORE_BYTES_PER_SECOND = 1e10
"""What one core reads and writes at about. A recurrent layer of 64 sequences is many operations, each of 120 KB."""


def _calls_sentence(found: Evidence, value: float) -> str:
    line = found.work.most("calls") if found.work else None
    place = f"; {line['place']} makes {format_count(line['calls'])} of them" if line else ""
    seconds = format_seconds(found.train_seconds / value)
    return f"A step is {format_count(value)} operations of {seconds} each, more calling than computing{place}."


def _calling_line(found: Evidence) -> str:
    """The line of the user's code that makes most of the calls, as a loop does; empty where none makes half of them."""
    line = found.work.most("calls") if found.work else None
    return line["place"] if found.work and line and line["calls"] >= found.work.calls / 2 else ""


def _calls_setting(found: Evidence) -> str:
    if _calling_line(found):
        return "that line: one operation on the whole tensor in place of many on its pieces"
    batch = f"batch of {found.whose_batches}" if found.whose_batches else "loader.batch_size"
    return f"your model: fewer, larger operations; a larger {batch} spreads the calls over more samples"


def _calls_change(found: Evidence) -> Change:
    if found.whose_batches or _calling_line(found):
        return {}
    return {"loader.batch_size": 2 * found.config.loader.batch_size}


def _calls_effect(found: Evidence) -> Range | None:
    """Without half to all of what was seen at the line; on a GPU that hides behind its work."""
    seen = 0.0 if found.on_gpu else found.line_fraction({_calling_line(found)} - {""})
    return without(0.5 * seen, seen) if seen else None


def _functions(found: Evidence) -> float | None:
    if found.functions is None:
        return None
    return next((row["own_fraction"] for row in many_short_calls(found.functions)), 0.0)


def _functions_sentence(found: Evidence, value: float) -> str:
    worst = many_short_calls(found.functions or ())[0]
    calls, each = format_count(worst["calls"]), format_seconds(worst["call_seconds"])
    return f"{worst['function']} was called {calls} times, {each} each, {value:.0%} of the time."


def _causes(found: Evidence) -> dict[str, float]:
    """Seconds of the gaps that are long enough to have a cause."""
    gaps = found.trace.gap_seconds if found.trace else {}
    return {cause: seconds for cause, seconds in gaps.items() if cause != "launching"}


def _gaps(found: Evidence) -> float | None:
    return sum(_causes(found).values()) / found.trace.window_seconds if found.trace else None


def _gaps_sentence(found: Evidence, value: float) -> str:
    causes = _causes(found)
    cause = max(causes, key=lambda name: causes[name])
    return f"The device stands idle {value:.0%} of the time, mostly because of {cause}."


def _device_full(found: Evidence) -> float | None:
    used, limit = found.device_reserved_bytes or found.device_allocated_bytes, found.device_limit_bytes
    return used / limit if used and limit else None


def _fragmentation(found: Evidence) -> float | None:
    allocated, reserved = found.device_allocated_bytes, found.device_reserved_bytes
    if not allocated or not reserved:
        return None
    return reserved / allocated if reserved - allocated >= _LEAST_FRAGMENTS_BYTES else 1.0


_LEAST_FRAGMENTS_BYTES = 1 << 30


def _device_setting(found: Evidence) -> str:
    batch = "batch of your own loader" if found.given_loader else "loader.batch_size"
    smaller = f"a smaller {batch} with levers.accumulate_grad_batches"
    if found.config.levers.gradient_checkpointing:
        return f"{smaller}, or hardware.strategy fsdp"
    return f"levers.gradient_checkpointing, or {smaller}; kit.studies.find_batch_size finds the largest that fits"


def _device_change(found: Evidence) -> Change:
    config = found.config
    if not config.levers.gradient_checkpointing:
        return {"levers.gradient_checkpointing": True}
    half = 0 if found.given_loader else config.loader.batch_size // 2  # the caller's loader keeps its size
    accumulate = 2 * config.levers.accumulate_grad_batches
    return {"loader.batch_size": half, "levers.accumulate_grad_batches": accumulate} if half else {}


def _straggler(found: Evidence) -> float | None:
    if found.world_size < 2 or len(found.rank_seconds) < 2:
        return None
    *others, most = sorted(found.rank_seconds.values())
    usual = others[len(others) // 2]
    return 1.0 if not usual > 0 or most - usual < _LEAST_LAG * found.step_seconds else most / usual


_LEAST_LAG = 0.05


def _straggler_sentence(found: Evidence, value: float) -> str:
    slowest = max(found.rank_seconds, key=lambda rank: found.rank_seconds[rank])
    mine = found.rank_parts.get(slowest, {})
    others = [parts for rank, parts in found.rank_parts.items() if rank != slowest]
    usual = {part: sum(one.get(part, 0.0) for one in others) / max(1, len(others)) for part in mine}
    part = max(mine, key=lambda name: mine[name] - usual[name], default="")
    at = (
        f", mostly in {part} ({format_seconds(mine[part])} a step beside {format_seconds(usual[part])})" if part else ""
    )
    place = found.more_than_others(slowest)
    lost = max(found.rank_seconds.values()) - min(found.rank_seconds.values())
    return (
        f"Rank {slowest} takes {value:.2g} times as long as the others over its own work{at}"
        f"{f', at {place}' if place else ''}; they lose {format_seconds(lost)} a step waiting for it."
    )


def _straggler_effect(found: Evidence) -> Range | None:
    *others, slowest = sorted(found.rank_seconds.values())
    lost = (slowest - others[len(others) // 2]) / found.step_seconds
    return without(0.9 * lost, lost)


RULES: tuple[Rule, ...] = (
    # -- data
    Rule(
        name="waiting for data", part="wait", explains=("training shorter than preprocessing",),
        looks_at="share of the time spent waiting for a batch", unit="fraction", threshold=0.4,
        source=f"{TRAINING_AT_SCALE}: above 40 % a pipeline is I/O-bound", needs="timed steps",
        measure=lambda found: found.wait_fraction,
        sentence=lambda found, value: f"Training waits for data {value:.0%} of the time: reading sets the pace, not "
        f"the model{_data_line(found)}.",
        setting=_wait_setting, change=_wait_change, effect=_without_wait,
    ),
    Rule(
        name="Python in the data", part="wait", explains=WAITS,
        looks_at="part of the wait in which the training thread itself computes",
        unit="fraction", threshold=0.5, source="one core at 100 % (kit): a thread that waits for a disk or a network "
        "uses no CPU", needs="cpu_used, and a wait of a fifth of the time", measure=_one_core,
        sentence=lambda found, _: "One core is at 100 % making batches in Python while everything else waits for it: "
        f"{format_seconds(found.wait_seconds)} a batch{_data_line(found)}.",
        setting=lambda found: f"{_workers_words(found)}: make batches in several processes, which is what is "
        "predicted; or do the transform for a whole batch at once, which leaves less Python to run",
        change=_worker_change, effect=_with_workers,
    ),
    Rule(
        name="no prefetch", part="wait", explains=WAITS,
        looks_at="share of the time spent waiting, with nothing read ahead", unit="fraction",
        threshold=SLIVER, source=f"{BASEMODEL}: a GPU idle between batches asks for a higher prefetch; a tenth is "
        "kit's", needs="cpu_used and timed steps", measure=_no_prefetch,
        sentence=lambda found, value: "Each batch is read only once the one before is trained on, so the model waits "
        f"{value:.0%} of the time{_data_line(found)}.",
        setting=lambda found: "loader.batches_ahead: read the next batches while the model trains"
        if found.own_loader else f"{_workers_words(found)}: let other processes prepare the next batches",
        change=lambda found: {"loader.batches_ahead": 4} if found.own_loader else _worker_change(found),
        effect=_without_wait,
    ),
    Rule(
        name="chunks that do not fit", part="wait", explains=WAITS,
        looks_at="time to read a batch, over that with the chunks kit plans",
        unit="ratio", threshold=3.0, source=f"{TRAINING_AT_SCALE}: too small chunks are many requests, too large ones "
        "wasted bytes; the factor is kit's, beyond the error of its cost model", needs="data that kit reads",
        measure=_chunks, sentence=_chunks_sentence,
        setting=lambda _: "chunking.chunk: build the store again, with the chunks that kit.plan_chunks chooses",
        change=_chunks_change, effect=_chunks_effect,
    ),
    Rule(
        name="all cores busy", part="wait", explains=WAITS,
        looks_at="cores used, over those there are, while the GPU waits for data",
        unit="fraction", threshold=0.9, source="kit: more loader processes cannot help beyond that",
        needs="a GPU and cpu_used", measure=_all_cores,
        sentence=lambda found, _: f"All {found.cores} cores are busy making batches and the GPU still waits: more "
        "loader processes cannot help.",
        setting=lambda _: "the transform or the compression: do less work a sample, on the GPU, or once while building "
        "the store", effect=lambda found: without(0.0, found.shares["wait"]),
    ),
    Rule(
        name="training shorter than preprocessing", part="wait",
        looks_at="time to prepare a batch, over the time to train on it",
        unit="ratio", threshold=1.0, source=f"{TRAINING_AT_SCALE}: then the device is under-used",
        needs="timed steps, and a wait of a tenth of the time", measure=_preparing,
        sentence=lambda found, value: f"Preparing a batch takes {value:.2g} times as long as training on it, so the "
        f"{'GPU' if found.on_gpu else 'model'} is under-used however far ahead is read.",
        setting=_wait_setting, change=_wait_change, effect=_without_wait,
    ),
    Rule(
        name="loader start-up", looks_at="share of the trial until its first batch", unit="fraction", threshold=0.3,
        source="kit: with a third of the trial gone before it, its length says little about a long run; two seconds "
        "at least", needs="the time of the first batch", measure=_start_up,
        sentence=lambda found, value: f"The first batch took {format_seconds(found.start_up_seconds or 0.0)}, "
        f"{value:.0%} of this short trial: a long run pays that once.",
        setting=lambda _: "trial.max_steps: judge by a longer trial",
        change=lambda found: {"trial.max_steps": 4 * found.config.trial.max_steps},
    ),
    Rule(
        name="slow transfer", looks_at="share of the time spent copying batches to the GPU, from unpinned memory",
        unit="fraction", threshold=SLIVER, source=f"{BASEMODEL}: slow copies ask for pin_memory; a tenth is kit's",
        needs="a GPU, and loader.pin_memory off or a PyTorch trace", measure=_unpinned,
        sentence=lambda _, value: f"Copying batches to the GPU from memory that is not pinned takes {value:.0%} of the "
        "time, and the host waits for it.",
        setting=_pin_setting,
        change=lambda found: {} if found.given_loader else {"loader.pin_memory": True},
        effect=lambda found: without(0.5 * (_unpinned(found) or 0.0), _unpinned(found)), part="transfer",
        explains=("copies that do not overlap",),
    ),
    Rule(
        name="copies that do not overlap", looks_at="share of the trace in which the GPU copies from the host and "
        "computes nothing", unit="fraction", threshold=SLIVER, source="torch's tutorial on pin_memory and "
        "non_blocking: a copy hides behind kernels of another stream; a tenth is kit's",
        needs="a PyTorch trace of a GPU", measure=_bare_copies,
        sentence=lambda _, value: f"The GPU computes nothing while batches are copied to it, {value:.0%} of the time.",
        setting=lambda _: "your batches: copy the next one in a CUDA stream of its own while this one is trained on "
        "(non_blocking=True, from pinned memory), or send fewer bytes (integers, 16 bits) and convert them there",
        effect=lambda found: without(0.5 * (_bare_copies(found) or 0.0), _bare_copies(found)), part="transfer",
    ),
    # -- the step itself
    Rule(
        name="sync in the step", explains=("many tiny operations",), part="forward",
        looks_at="values asked of tensors in the user's code, in one step (on the CPU, where nothing waits for it, if "
        f"their calls take {_LEAST_OF_CALLS:.0%} of it)", unit="count", threshold=1.0,
        source=f"{TRAINING_AT_SCALE}: gaps come from syncs of CPU and GPU; the share on a CPU is kit's",
        needs="counted work (trial.count_work, and three warm-up steps)",
        measure=_syncs, sentence=_syncs_sentence,
        setting=lambda _: "your training_step: keep values on the device (no .item(), bool() or Python loop over "
        "elements) and log the tensor itself", effect=_syncs_effect,
    ),
    Rule(
        name="full precision", looks_at="gain of the same steps in 16 bits, measured, at its lower end", unit="ratio",
        threshold=1.15, source=f"{BASEMODEL}: mixed precision by default; the factor is kit's, beyond the noise of a "
        "short trial", needs="two short trials of the module (short_trials)", measure=_precision,
        sentence=lambda _, __: "The step computes in float32; the same steps in 16 bits were faster.",
        setting=lambda found: f"hardware.precision: {mixed(found)}",
        change=lambda found: {"hardware.precision": mixed(found)},
        effect=lambda found: found.measured_gains.get("full precision"),
    ),
    Rule(
        name="many tiny operations", looks_at=f"operations of a step that take {_TINY_CALL_SECONDS * 1e6:.0f} µs or "
        "less on average", unit="count", threshold=1000, source=f"{TRAINING_AT_SCALE}: high call counts of little "
        "time can be batched; the numbers are kit's", needs="counted work", measure=_calls,
        sentence=_calls_sentence,
        setting=_calls_setting, change=_calls_change, effect=_calls_effect,
    ),
    Rule(
        name="many tiny calls", looks_at="share of the time in one function of a thousand calls and more, 20 µs or "
        "less each", unit="fraction", threshold=MANY_CALLS_FRACTION, source=f"{TRAINING_AT_SCALE}: functions of "
        "many calls and little time may be batched; the numbers are kit's", needs="an advanced profile",
        measure=_functions, sentence=_functions_sentence,
        setting=lambda _: "that function: call it for many values at once",
        effect=lambda found: without(0.5 * (_functions(found) or 0.0), _functions(found) or 0.0),
    ),
    Rule(
        name="idle gaps", looks_at="share of the trace in which the device had nothing to do", unit="fraction",
        threshold=0.2, source=f"{TRAINING_AT_SCALE}: idle gaps ask for a look at the loader; a fifth is kit's",
        needs="a PyTorch trace", measure=_gaps, sentence=_gaps_sentence,
        setting=lambda _: "what the gaps are attributed to: kit's loader settings for loading, pin_memory for "
        "transfer, the step itself for syncs and Python",
        effect=lambda found: without(0.5 * (_gaps(found) or 0.0), _gaps(found) or 0.0),
    ),
    # -- devices and ranks
    Rule(
        name="device memory near its limit",
        looks_at="peak memory of the fullest device, over what it has",
        unit="fraction", threshold=0.9, source="kit: a slightly longer sequence or another allocation order takes the "
        "last tenth", needs="a GPU, or hardware.device_memory_bytes", measure=_device_full,
        sentence=lambda _, value: f"The fullest device used {value:.0%} of its memory: a little more and a step fails.",
        setting=_device_setting, change=_device_change,
    ),
    Rule(
        name="host memory near its limit",
        looks_at="peak resident memory of all ranks, over what the machine has",
        unit="fraction", threshold=0.9, source="kit: beyond it the system ends processes", needs="a trial of this "
        "machine",
        measure=lambda found: found.host_bytes / found.host_limit_bytes
        if found.host_bytes and found.host_limit_bytes else None,
        sentence=lambda _, value: f"The ranks used {value:.0%} of the machine's memory: beyond it the system ends one "
        "of them.",
        setting=lambda found: "loader.memory_bytes, or loader.num_workers"
        if found.own_loader else "loader.num_workers and loader.prefetch_factor, of your own DataLoader",
        change=lambda found: {"loader.memory_bytes": max(1 << 20, found.config.loader.memory_bytes // 2)}
        if found.own_loader else {},
    ),
    Rule(
        name="fragmentation", looks_at="memory the allocator reserved, over what was needed at the peak", unit="ratio",
        threshold=1.3, source="kit: from a gibibyte on; torch's notes on the caching allocator", needs="a GPU",
        measure=_fragmentation,
        sentence=lambda found, value: f"The allocator holds {value:.2g} times the memory the model needs "
        f"({format_bytes((found.device_reserved_bytes or 0) - (found.device_allocated_bytes or 0))} in pieces too "
        "small to use).",
        setting=lambda _: "PYTORCH_ALLOC_CONF=expandable_segments:True in the environment, and batches of one shape",
    ),
    Rule(
        name="stragglers", looks_at="own work of the slowest rank, over that of the others", unit="ratio",
        threshold=1.2, source="kit: every step lasts as long as its slowest rank; a twentieth of the step at least",
        needs="several ranks", measure=_straggler, sentence=_straggler_sentence,
        setting=lambda _: "what differs between the ranks: their share of the data, other work on their device, or "
        "their cores (hardware.threads_per_rank)", effect=_straggler_effect,
        explains=("communication", "Python in the step"),
    ),
    Rule(
        name="communication", looks_at="share of the time in communication between ranks", unit="fraction",
        threshold=0.3, source="kit: a third of every device's time", needs="several ranks",
        measure=lambda found: found.shares.get("communication") if found.world_size > 1 else None,
        sentence=lambda _, value: f"The ranks spend {value:.0%} of the time exchanging gradients and parameters.",
        setting=lambda _: "levers.accumulate_grad_batches: exchange gradients once for several batches",
        change=lambda found: {"levers.accumulate_grad_batches": 2 * found.config.levers.accumulate_grad_batches},
        effect=lambda found: without(0.4 * found.shares["communication"], 0.5 * found.shares["communication"]),
        part="communication",
    ),
    Rule(
        name="BatchNorm under checkpointing",
        looks_at="batch statistics that are, or would be, taken twice a step",
        unit="count", threshold=1.0, source="kit, measured: running statistics are updated again when activations are "
        "recomputed", needs="counted work",
        measure=lambda found: 1.0 if any("BatchNorm would count every batch twice" in x for x in found.warnings)
        else found.work.batch_norms_again if found.work else None,
        sentence=lambda _, __: "Gradient checkpointing computes blocks with BatchNorm twice, which would count every "
        "batch twice in its statistics.",
        setting=lambda _: "your model: GroupNorm or LayerNorm in the checkpointed blocks, or "
        "levers.gradient_checkpointing off",
        change=lambda found: {"levers.gradient_checkpointing": False}
        if found.config.levers.gradient_checkpointing else {},
    ),
    *LOADER_RULES,
    *HOST_RULES,
)  # fmt: skip
