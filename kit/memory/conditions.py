"""Conditions: on which guesses of a dry run the memory depends.

A fake tensor has no value to branch on, so `kit.memory.record.fakes` guesses, and `facts["guesses"]` of a recording
says where. `settle` has it recorded again with one guess at a time turned, as long as that is cheap, and leaves in the
facts

    conditions       guesses that the memory depends on, or that were not tried; a verdict holds only if they do
    bounds           selections that were taken whole: fewer elements need less
    least_fraction   of the peak, with one element selected instead of all, the smallest that was seen
    otherwise        the guess that is turned in the recording, if any

Of a condition's two answers the one that needs more is kept, so that it is no condition any more; an answer at which
the training raises an error of its own ends the training, and is none either. What an optimizer asks stays a condition
where it matters, as its answers change from step to step. Where the step breaks with all guesses as they are, the first
turned one with which it does not is a condition. Known limit: guesses are turned one at a time, so two that only matter
together pass.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import numpy as np

from kit.memory.record.fakes import UPPER_BOUND
from kit.memory.replay.replay import CATEGORIES, GUESSED_CONDITION, Recording, replay
from kit.units import format_bytes

MOST_TRIED = 8
MOST_OPERATORS = 100_000
"""How many operators all second answers may record together: 30 seconds or so, and the same guesses on any machine."""


def settle(first: Recording, record_otherwise: Callable[[str], Recording]) -> Recording:
    """The recording that needs most of those with one guess answered the other way, its facts as described above.

    Args:
        first: What was recorded with all guesses as they are.
        record_otherwise: Records once more with this guess answered the other way.
    """
    if first.facts["unknown"]:
        return _answered_otherwise(first, record_otherwise)
    highest, peak, turned = first, _peak(first), ""
    conditions, bounds, least = dict.fromkeys(first.facts["guesses"]), [], 1.0
    for guess in _tried(first):
        other = record_otherwise(guess)
        if other.facts["unknown"]:
            if other.facts["refused"]:
                del conditions[guess]
            continue
        needed = _peak(other)
        if guess.endswith(UPPER_BOUND) and needed < peak:
            bounds.append(guess)
            least = min(least, needed / peak)
        if needed == _peak(first) or guess.endswith(UPPER_BOUND) or guess.startswith(GUESSED_CONDITION):
            del conditions[guess]
        if needed > peak:
            highest, peak, turned = other, needed, guess
    for guess in [guess for guess in conditions if guess.endswith(UPPER_BOUND)]:
        del conditions[guess]
        bounds.append(guess)
    new = [guess for guess in highest.facts["guesses"] if guess not in first.facts["guesses"]]
    held = [guess.replace(_IS_FALSE, _IS_TRUE) if guess == turned else guess for guess in conditions]
    facts = {
        "conditions": [*held, *new, *_growth(highest)], "bounds": bounds, "least_fraction": least,
        "otherwise": turned,
    }  # fmt: skip
    return dataclasses.replace(highest, facts=highest.facts | facts)


def _answered_otherwise(first: Recording, record_otherwise: Callable[[str], Recording]) -> Recording:
    """The first recording that a turned guess makes whole, where the step broke with all as they are: an adapter that a
    random number switches off leaves nothing to train. It holds only if the guess, so turned, does."""
    for guess in first.facts["guesses"][:MOST_TRIED]:
        if guess.endswith(_IS_FALSE):
            other = record_otherwise(guess)
            if not other.facts["unknown"]:
                held = [] if first.facts["refused"] else [guess.replace(_IS_FALSE, _IS_TRUE)]
                more = [condition for condition in other.facts["conditions"] if condition != guess]
                facts = {"conditions": [*held, *more, *_growth(other)], "least_fraction": 1.0, "otherwise": guess}
                return dataclasses.replace(other, facts=other.facts | facts)
    return dataclasses.replace(first, facts=first.facts | {"least_fraction": 1.0, "otherwise": ""})


_IS_FALSE, _IS_TRUE = " is False", " is True"


def settled_like(recording: Recording, settled: Recording) -> Recording:
    """A recording at another batch size with the same guess turned, and what was found about the guesses."""
    found = {name: settled.facts[name] for name in ("conditions", "bounds", "least_fraction", "otherwise")}
    return dataclasses.replace(recording, facts=recording.facts | found)


def _tried(first: Recording) -> list[str]:
    return list(first.facts["guesses"][: min(MOST_TRIED, MOST_OPERATORS // len(first.operator_name))])


def _peak(recording: Recording) -> int:
    return replay(recording).peak_allocated_bytes


def _growth(recording: Recording) -> list[str]:
    """What an optimizer that keeps more with every step, such as LBFGS its history, leaves open."""
    if not recording.batch_starts or recording.facts["unknown"]:
        return []
    is_state = recording.block_category[recording.event_block] == CATEGORIES.index("optimizer_state")
    sizes = recording.block_bytes[recording.event_block] * is_state
    moves = np.where(recording.event_allocates, sizes, -sizes)
    grown_bytes = int(moves[recording.event_time >= recording.batch_starts[-1]].sum())
    if grown_bytes <= _LEAST_GROWTH_BYTES:
        return []
    return [f"the optimizer keeps no more than after step 2, in which it kept {format_bytes(grown_bytes)} more"]


_LEAST_GROWTH_BYTES = 1 << 16
