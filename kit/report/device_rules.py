"""Rules about devices and the ranks on them: memory near its limit, fragments, stragglers, communication, BatchNorm.

They are asked of the evidence as `kit.report.rule` says.
"""

from __future__ import annotations

from kit.report.evidence import Evidence
from kit.report.rule import Change, Rule, shorter
from kit.units import format_bytes


def _near(used: float | None, limit: float | None) -> float | None:
    return used / limit if used and limit else None


def _device_full(found: Evidence) -> float | None:
    return _near(found.device_reserved_bytes or found.device_allocated_bytes, found.device_limit_bytes)


def _host_full(found: Evidence) -> float | None:
    return _near(found.host_bytes, found.host_limit_bytes)


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
    return f"levers.gradient_checkpointing, or {smaller}; kit.find_batch_size finds the largest that fits"


def _device_change(found: Evidence) -> Change:
    config = found.config
    if not config.levers.gradient_checkpointing:
        return {"levers.gradient_checkpointing": True}
    half = 0 if found.given_loader else config.loader.batch_size // 2  # a loader of one's own keeps its size
    accumulate = 2 * config.levers.accumulate_grad_batches
    return {"loader.batch_size": half, "levers.accumulate_grad_batches": accumulate} if half else {}


def _batch_norm(found: Evidence) -> float | None:
    left_out = any("BatchNorm would count every batch twice" in text for text in found.warnings)
    again = found.work.batch_norms_again if found.work else None
    return 1.0 if left_out else again


def _straggler(found: Evidence) -> float | None:
    if found.world_size < 2 or len(found.rank_seconds) < 2:
        return None
    slowest = max(found.rank_seconds, key=lambda rank: found.rank_seconds[rank])
    others = [seconds for rank, seconds in found.rank_seconds.items() if rank != slowest]
    most, usual = found.rank_seconds[slowest], sorted(others)[len(others) // 2]
    if not usual > 0 or most - usual < _LEAST_LAG * found.step_seconds:
        return 1.0
    return most / usual


_LEAST_LAG = 0.05


def _straggler_sentence(found: Evidence, value: float) -> str:
    slowest = max(found.rank_seconds, key=lambda rank: found.rank_seconds[rank])
    return f"Rank {slowest} takes {value:.2g} times as long as the others over its own work, and they wait for it."


def _straggler_effect(found: Evidence) -> float | None:
    slowest = max(found.rank_seconds.values())
    usual = sorted(found.rank_seconds.values())[(len(found.rank_seconds) - 1) // 2]
    return shorter(found, slowest - usual, 1e9)


def _communication(found: Evidence) -> float | None:
    return found.shares.get("communication") if found.world_size > 1 else None


DEVICE_RULES: tuple[Rule, ...] = (
    Rule(
        name="device memory near its limit", looks_at="peak memory of the fullest device, over what it has",
        unit="fraction", threshold=0.9, source="kit: a slightly longer sequence or another allocation order takes the "
        "last tenth", needs="a GPU, or hardware.device_memory_bytes", measure=_device_full,
        sentence=lambda _, value: f"The fullest device used {value:.0%} of its memory: a little more and a step fails.",
        setting=_device_setting, change=_device_change,
    ),
    Rule(
        name="host memory near its limit", looks_at="peak resident memory of all ranks, over what the machine has",
        unit="fraction", threshold=0.9, source="kit: beyond it the system ends processes", needs="a trial of this "
        "machine", measure=_host_full,
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
    ),
    Rule(
        name="communication", looks_at="share of the time in communication between ranks", unit="fraction",
        threshold=0.3, source="kit: a third of every device's time", needs="several ranks", measure=_communication,
        sentence=lambda _, value: f"The ranks spend {value:.0%} of the time exchanging gradients and parameters.",
        setting=lambda _: "levers.accumulate_grad_batches: exchange gradients once for several batches",
        change=lambda found: {"levers.accumulate_grad_batches": 2 * found.config.levers.accumulate_grad_batches},
        effect=lambda found: shorter(found, found.shares["communication"] * found.step_seconds, 2.0),
    ),
    Rule(
        name="BatchNorm under checkpointing", looks_at="batch statistics that are, or would be, taken twice a step",
        unit="count", threshold=1.0, source="kit, measured: running statistics are updated again when activations are "
        "recomputed", needs="counted work", measure=_batch_norm,
        sentence=lambda _, __: "Gradient checkpointing computes blocks with BatchNorm twice, which would count every "
        "batch twice in its statistics.",
        setting=lambda _: "your model: GroupNorm or LayerNorm in the checkpointed blocks, or "
        "levers.gradient_checkpointing off",
        change=lambda found: {"levers.gradient_checkpointing": False}
        if found.config.levers.gradient_checkpointing else {},
    ),
)  # fmt: skip
