"""Rules about data: waiting for it, reading it ahead, its chunks, its Python, its start-up, its way to the GPU.

They are asked of the evidence as `kit.report.rule` says.
"""

from __future__ import annotations

from kit.report.evidence import Evidence
from kit.report.rule import BASEMODEL, SLIVER, TRAINING_AT_SCALE, Change, Rule, shorter
from kit.units import format_bytes, format_count, format_seconds


def _without_wait(found: Evidence) -> float | None:
    """The wait hidden behind the training: the longer of the two remains."""
    train, wait = found.train_seconds, found.wait_seconds
    return (train + wait) / max(train, wait) if max(train, wait) > 0 else None


def _with_workers(found: Evidence) -> float | None:
    """Preparing a batch in several processes: as fast as they, the training, and all cores together allow."""
    workers, cores = _workers(found), found.cores or 1
    train, wait = found.train_seconds, found.wait_seconds
    ranks = max(1, found.world_size)
    busy = train * (0 if found.on_gpu else 1) + wait
    after = max(train, wait / workers, busy * ranks / cores)
    return (train + wait) / after if after > 0 else None


def _workers(found: Evidence) -> int:
    """Loader processes worth trying: as many as the cores leave to each rank."""
    each = (found.cores or 2) // max(1, found.world_size)
    return max(1, each - (0 if found.on_gpu else 1), min(2, each))


def _makes_own(found: Evidence) -> bool:
    """Whether the caller's data makes its loader without kit's engine, so that only calibrating reaches it."""
    return found.given_loader and not found.own_loader


def _worker_change(found: Evidence) -> Change:
    if _makes_own(found):
        return {"calibration.enabled": True}
    workers = _workers(found)
    return {} if workers <= found.config.loader.num_workers else {"loader.num_workers": workers}


def _wait(found: Evidence) -> float | None:
    return found.shares.get("wait")


def _wait_setting(found: Evidence) -> str:
    if found.own_loader and found.config.loader.num_workers == 0:
        return "loader.batches_ahead and loader.requests_in_flight: read more at once; kit.calibrate finds the best"
    return f"{_workers_words(found)}: prepare more batches at once"


def _workers_words(found: Evidence) -> str:
    if _makes_own(found):
        return "num_workers and prefetch_factor of your own DataLoader, which calibration.enabled finds and sets"
    return "loader.num_workers and loader.prefetch_factor, whose best values kit.calibrate finds"


def _wait_change(found: Evidence) -> Change:
    loader = found.config.loader
    if found.own_loader and loader.num_workers == 0:
        return {
            "loader.batches_ahead": min(256, max(4, 2 * loader.batches_ahead)),
            "loader.requests_in_flight": min(1024, max(64, 2 * loader.requests_in_flight)),
        }
    return _worker_change(found)


def _no_prefetch(found: Evidence) -> float | None:
    wait = found.shares.get("wait")
    if wait is None or found.workers is None:
        return None
    ahead = found.config.loader.batches_ahead if found.own_loader else 0
    return wait if found.workers == 0 and ahead == 0 else 0.0


def _prefetch_change(found: Evidence) -> Change:
    return {"loader.batches_ahead": 4} if found.own_loader else _worker_change(found)


def _prefetch_setting(found: Evidence) -> str:
    if found.own_loader:
        return "loader.batches_ahead: read the next batches while the model trains"
    return f"{_workers_words(found)}: let other processes prepare the next batches"


def _chunks(found: Evidence) -> float | None:
    layout, wait = found.layout, found.shares.get("wait")
    if layout is None or wait is None or not layout.planned_seconds_per_batch > 0:
        return None
    return layout.seconds_per_batch / layout.planned_seconds_per_batch if wait >= SLIVER else 1.0


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
    change = {"chunking.chunk": chunk, "chunking.shard": "auto", "data.url": _beside(config.data.url, named)}
    return change if config.data.source else {**change, "data.source": config.data.url}


def _beside(url: str, name: str) -> str:
    stem = url.rstrip("/").removesuffix(".zarr")
    return f"{stem}-{name}.zarr"


def _chunks_effect(found: Evidence) -> float | None:
    value = _chunks(found)
    return None if value is None else shorter(found, found.wait_seconds, value)


def _preparing(found: Evidence) -> float | None:
    wait = found.shares.get("wait")
    if wait is None or not found.train_seconds > 0:
        return None
    seconds = max(found.read_seconds or 0.0, found.wait_seconds)
    return seconds / found.train_seconds if wait >= SLIVER else 0.0


def _one_core(found: Evidence) -> float | None:
    wait = found.shares.get("wait")
    if wait is None or found.thread_cores is None or found.busy_wait_fraction is None:
        return None
    return found.busy_wait_fraction if wait >= 2 * SLIVER else 0.0


def _all_cores(found: Evidence) -> float | None:
    wait = found.shares.get("wait")
    if not found.on_gpu or wait is None or found.process_cores is None or not found.cores:
        return None
    return found.process_cores / found.cores if wait >= SLIVER else 0.0


def _start_up(found: Evidence) -> float | None:
    if found.start_up_seconds is None or not found.total_seconds:
        return None
    return found.start_up_seconds / found.total_seconds if found.start_up_seconds >= _LEAST_START_UP_SECONDS else 0.0


_LEAST_START_UP_SECONDS = 1.0


def _transfer(found: Evidence) -> float | None:
    return found.shares.get("transfer") if found.on_gpu and not found.config.loader.pin_memory else None


DATA_RULES: tuple[Rule, ...] = (
    Rule(
        name="waiting for data", looks_at="share of the time spent waiting for a batch", unit="fraction", threshold=0.4,
        source=f"{TRAINING_AT_SCALE}: above 40 % a pipeline is I/O-bound", needs="timed steps", measure=_wait,
        sentence=lambda _, value: f"Training waits for data {value:.0%} of the time: reading sets the pace, not the "
        "model.",
        setting=_wait_setting, change=_wait_change, effect=_without_wait,
    ),
    Rule(
        name="no prefetch", looks_at="share of the time spent waiting, with nothing read ahead", unit="fraction",
        threshold=SLIVER, source=f"{BASEMODEL}: a GPU idle between batches asks for a higher prefetch; a tenth is "
        "kit's", needs="cpu_used and timed steps", measure=_no_prefetch,
        sentence=lambda _, value: "Each batch is read only once the one before is trained on, so the model waits "
        f"{value:.0%} of the time.",
        setting=_prefetch_setting, change=_prefetch_change, effect=_without_wait,
    ),
    Rule(
        name="chunks that do not fit", looks_at="time to read a batch, over that with the chunks kit plans",
        unit="ratio", threshold=3.0, source=f"{TRAINING_AT_SCALE}: too small chunks are many requests, too large ones "
        "wasted bytes; the factor is kit's, beyond the error of its cost model", needs="data that kit reads",
        measure=_chunks, sentence=_chunks_sentence,
        setting=lambda _: "chunking.chunk: build the store again, with the chunks that kit.plan_chunks chooses",
        change=_chunks_change, effect=_chunks_effect,
    ),
    Rule(
        name="Python in the data", looks_at="part of the wait in which the training thread itself computes",
        unit="fraction", threshold=0.5, source="one core at 100 % (kit): a thread that waits for a disk or a network "
        "uses no CPU", needs="cpu_used, and a wait of a fifth of the time", measure=_one_core,
        sentence=lambda found, _: "One core is at 100 % making batches in Python while everything else waits for it: "
        f"{format_seconds(found.wait_seconds)} a batch.",
        setting=lambda found: f"{_workers_words(found)}: make batches in several processes, or do the "
        "transform for a whole batch at once",
        change=_worker_change, effect=_with_workers,
    ),
    Rule(
        name="all cores busy", looks_at="cores used, over those there are, while the GPU waits for data",
        unit="fraction", threshold=0.9, source="kit: more loader processes cannot help beyond that",
        needs="a GPU and cpu_used", measure=_all_cores,
        sentence=lambda found, _: f"All {found.cores} cores are busy making batches and the GPU still waits: more "
        "loader processes cannot help.",
        setting=lambda _: "the transform or the compression: do less work a sample, on the GPU, or once while building "
        "the store", effect=_without_wait,
    ),
    Rule(
        name="training shorter than preprocessing", looks_at="time to prepare a batch, over the time to train on it",
        unit="ratio", threshold=1.0, source=f"{TRAINING_AT_SCALE}: then the device is under-used",
        needs="timed steps, and a wait of a tenth of the time", measure=_preparing,
        sentence=lambda found, value: f"Preparing a batch takes {value:.2g} times as long as training on it, so the "
        f"{'GPU' if found.on_gpu else 'model'} is under-used however far ahead is read.",
        setting=_wait_setting, change=_wait_change, effect=_without_wait,
    ),
    Rule(
        name="loader start-up", looks_at="share of the trial until its first batch", unit="fraction", threshold=0.3,
        source="kit: with a third of the trial gone before it, its length says little about a long run; a second at "
        "least", needs="the time of the first batch", measure=_start_up,
        sentence=lambda found, value: f"The first batch took {format_seconds(found.start_up_seconds or 0.0)}, "
        f"{value:.0%} of this short trial: a long run pays that once.",
        setting=lambda _: "trial.max_steps: judge by a longer trial",
        change=lambda found: {"trial.max_steps": 4 * found.config.trial.max_steps},
    ),
    Rule(
        name="slow transfer", looks_at="share of the time spent copying batches to the GPU, from unpinned memory",
        unit="fraction", threshold=SLIVER, source=f"{BASEMODEL}: slow copies ask for pin_memory; a tenth is kit's",
        needs="a GPU, and loader.pin_memory off", measure=_transfer,
        sentence=lambda _, value: f"Copying batches to the GPU takes {value:.0%} of the time.",
        setting=lambda found: "pin_memory of your own DataLoader" if found.given_loader else "loader.pin_memory",
        change=lambda found: {} if found.given_loader else {"loader.pin_memory": True},
        effect=lambda found: shorter(found, found.shares["transfer"] * found.step_seconds, 1e9),
    ),
)  # fmt: skip
