"""what_ran: sentences about what a trial really did, beside what its config asked for.

They come from the trial's own events: how its loader stood, what was calibrated, chunks that the store did not hold,
the precision its Trainer computed in, the optimizer that stepped, the blocks that were checkpointed, the kernels that
attention ran in and those that are here. Nothing is guessed: an event that is not there gives no sentence.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from kit.config import Config
from kit.data.stores.transfer import CHUNKS, absent_chunks
from kit.errors import ConfigError
from kit.events import Event
from kit.trial.payload import BatchRule

if TYPE_CHECKING:
    from kit.trial.trial import Trial


def what_ran(trial: Trial) -> list[str]:
    """Sentences, in the order in which a config names the choices."""
    found: dict[str, Any] = trial.event("levers_used") or {}
    sentences = [
        _loader(trial),
        _loader_used(trial),
        _absent_chunks(trial),
        _precision(trial),
        _optimizers(found),
        _blocks(found),
        _chunks(found),
        _attention(found),
    ]
    return [sentence for sentence in sentences if sentence]


def _loader(trial: Trial) -> str:
    return str(trial.event("calibrated", "headline") or "")


def _loader_used(trial: Trial) -> str:
    """Where the loader stood elsewhere than the config said; before the first batch, what is known of its size."""
    event = used_event(trial.events)
    if event is None:
        rule = BatchRule.of_environment(trial.environment)
        return "" if rule is None or rule.is_worth_a_warning else rule.note  # else it is among the warnings
    told = [f"{_leaf(path)} {_word(value)}, not {_word(event['asked'][path])}" for path, value in event["used"].items()]
    return f"loader: {'; '.join(told)} as the config said" if told else ""


def _leaf(path: str) -> str:
    return path.rpartition(".")[2]


def _word(value: Any) -> str:
    return {True: "on", False: "off"}[value] if isinstance(value, bool) else str(value)


def used_event(events: Iterable[Event]) -> Event | None:
    """The last that rank 0 said of its loader; None before its first batch."""
    found = [event for event in events if event["kind"] == "loader_used" and _is_whole(event)]
    return found[-1] if found else None


def _is_whole(event: Event) -> bool:
    """Whether both sides are there, as a damaged file may have lost one."""
    asked, used = event.get("asked"), event.get("used")
    return isinstance(asked, Mapping) and isinstance(used, Mapping) and asked.keys() == used.keys()


def with_values(config: Config, values: Mapping[str, Any]) -> Config:
    """The config with each of these values that a config can hold: a loader of the caller's own knows no bounds."""
    with contextlib.suppress(ConfigError):
        return config.replace(values) if values else config
    for path, value in values.items():
        with contextlib.suppress(ConfigError):
            config = config.replace({path: value})
    return config


def _absent_chunks(trial: Trial) -> str:
    """Of all ranks and their loader processes."""
    counts = [event.get("counters") or {} for event in trial.events if event["kind"] == "fit_ended"]
    return absent_chunks({name: sum(count.get(name, 0) for count in counts) for name in CHUNKS})


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
