"""what_ran: sentences about what a trial really did, beside what its config asked for.

They come from the trial's own events: the loader setting that was calibrated, the precision its Trainer computed in,
the optimizer that stepped, the blocks that were checkpointed, the kernels that attention ran in and those that are
here. Nothing is guessed: an event that is not there gives no sentence.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kit.run.trial import Trial


def what_ran(trial: Trial) -> list[str]:
    """Sentences, in the order in which a config names the choices."""
    found: dict[str, Any] = trial.event("levers_used") or {}
    sentences = [
        _loader(trial),
        _precision(trial),
        _optimizers(found),
        _blocks(found),
        _chunks(found),
        _attention(found),
    ]
    return [sentence for sentence in sentences if sentence]


def _loader(trial: Trial) -> str:
    return str(trial.event("calibrated", "headline") or "")


def _precision(trial: Trial) -> str:
    used = trial.event("fit_started", "precision")
    return f"precision: {used}" if used else ""


def _optimizers(found: dict[str, Any]) -> str:
    names = Counter(found.get("optimizers", ()))
    counted = [name if count == 1 else f"{count} × {name}" for name, count in names.items()]
    return f"optimizer: {', '.join(counted)}" if counted else ""


def _blocks(found: dict[str, Any]) -> str:
    count = found.get("checkpointed_blocks")
    return f"gradient checkpointing: {count} block{'s' * (count > 1)}" if count else ""


def _chunks(found: dict[str, Any]) -> str:
    count = found.get("sequence_chunks")
    return f"sequence chunks: {count} in the first batch" if count else ""


def _attention(found: dict[str, Any]) -> str:
    ran = found.get("attention")
    if not ran:
        return ""
    calls = ", ".join(f"{name} × {count}" for name, count in sorted(ran.items()))
    missing = [f"{name} {reason}" for name, reason in found["attention_missing"].items()]
    others = f" ({', '.join(missing)})" if missing else ""
    return f"attention: {calls} in the first batch; here are {', '.join(found['attention_here'])}{others}"
