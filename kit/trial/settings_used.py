"""settings_used: the settings that a trial really ran with, as sentences, where a config leaves or overrules a choice.

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
from kit.data.stores.counters import CHUNKS, absent_chunks
from kit.errors import ConfigError
from kit.events import Event
from kit.trial.payload import BatchRule

if TYPE_CHECKING:
    from kit.trial.trial import Trial

_FEWEST = 3
"""Batches of equal losses from which on chance is ruled out."""


def settings_used(trial: Trial) -> list[str]:
    """Sentences, in the order in which a config names the choices."""
    found: dict[str, Any] = trial.event("levers_used") or {}
    precision, blocks = trial.event("fit_started", "precision"), found.get("checkpointed_blocks")
    optimizers = Counter(found.get("optimizers", ())).items()
    names = [name if count == 1 else f"{count} × {name}" for name, count in optimizers]
    sequences, kernels = found.get("sequence_chunks"), found.get("attention")
    given = trial.environment.get("trainer") or {}
    flags = ", ".join(f"{name} {_text(value)}" for name, value in given.get("flags", {}).items())
    sentences = [
        str(trial.event("calibrated", "headline") or ""),
        *(f"{name}: {', '.join(given[name])}" if given.get(name) else "" for name in ("loggers", "callbacks")),
        f"trainer: {flags}" if flags else "",
        _loader_used(trial),
        _same_samples(trial),
        str(trial.environment.get("split", "")),
        absent_chunks({name: sum(count.get(name, 0) for count in trial.counters) for name in CHUNKS}),
        f"precision: {precision}" if precision else "",
        f"optimizer: {', '.join(names)}" if names else "",
        f"gradient checkpointing: {blocks} block{'s' * (blocks > 1)}" if blocks else "",
        f"sequence chunks: {sequences} in the first batch" if sequences else "",
    ]
    if kernels:
        calls = ", ".join(f"{name} × {count}" for name, count in sorted(kernels.items()))
        missing = ", ".join(f"{name} {reason}" for name, reason in found["attention_missing"].items())
        here = ", ".join(found["attention_here"]) + (f" ({missing})" if missing else "")
        sentences.append(f"attention: {calls} in the first batch; available here: {here}")
    return [sentence for sentence in sentences if sentence]


def _same_samples(trial: Trial) -> str:
    """Where every rank has had the same losses: samples of their own give losses of their own."""
    losses: dict[int, list[float]] = {}
    for event in trial.steps:
        if event.get("loss") is not None:
            losses.setdefault(event["rank"], []).append(event["loss"])
    fewest = min(map(len, losses.values()), default=0)
    first, *others = (values[:fewest] for values in losses.values()) if losses else ([],)
    if not others or fewest < _FEWEST or any(values != first for values in others) or len({*first}) == 1:
        return ""
    return (
        f"all {len(losses)} ranks had the same losses in {fewest} batches: their loaders give the same samples; a data "
        "set that iterates has to share its samples out by rank"
    )


def _loader_used(trial: Trial) -> str:
    """Where the loader differed from the config; before the first batch, what is known of its batch size."""
    event = used_event(trial.events)
    if event is None:
        rule = BatchRule.of_environment(trial.environment)
        return "" if rule is None or rule.is_worth_a_warning else rule.note  # else it is among the warnings
    pairs = [(path.rpartition(".")[2], value, event["asked"][path]) for path, value in event["used"].items()]
    changes = [f"{name} {_text(value)}, not {_text(before)}" for name, value, before in pairs]
    return f"loader: {'; '.join(changes)} as the config said" if changes else ""


def _text(value: Any) -> str:
    return ("off", "on")[value] if isinstance(value, bool) else str(value)


def used_event(events: Iterable[Event]) -> Event | None:
    """The last event in which rank 0 told of its loader; None before its first batch, or where a file is damaged."""
    for event in reversed([event for event in events if event["kind"] == "loader_used"]):
        asked, used = event.get("asked"), event.get("used")
        if isinstance(asked, Mapping) and isinstance(used, Mapping) and asked.keys() == used.keys():
            return event
    return None


def with_values(config: Config, values: Mapping[str, Any]) -> Config:
    """The config with each of these values that a config can hold: a loader of the caller's own knows no bounds."""
    with contextlib.suppress(ConfigError):
        return config.replace(values) if values else config
    for path, value in values.items():
        with contextlib.suppress(ConfigError):
            config = config.replace({path: value})
    return config
