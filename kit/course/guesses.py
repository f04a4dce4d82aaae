"""Guesses: what a learner expects before a cell runs, beside what kit predicts and what the run measures.

`guess` asks and is answered in the same line; `compare` sets it beside the others once they are known; `score` shows
all of them, draws them, and writes them as one file to hand in. Everything lies in `guesses.json` in the project
folder, replaced in one move; nothing is sent anywhere.

What always holds: the first guess that was compared is the one that counts, and a later one of another value is noted
beside it. A question that nobody answered is shown with prediction and measurement all the same, so that a notebook
runs unattended. What is measured is the truth; where nothing was measured, the prediction is. A score has the questions
in the order of the course, whichever notebook was run first.
"""

from __future__ import annotations

import contextlib
import math
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from kit.arguments import checks_arguments
from kit.config import project_folder
from kit.errors import ConfigError, JsonError, Problem
from kit.json_text import read_json, write_json
from kit.machine.machine import seat
from kit.registry import Drawable, load
from kit.tables import html_list, html_table, text_table
from kit.units import format_bytes, format_count, format_seconds, parse_bytes

FILE = "guesses.json"
"""In the project folder."""
BOUNDS = {3: 1.1, 2: 1.5, 1: 3.0}
"""Points for a guess that is within this factor of the truth."""
MOST_POINTS = 3
COLUMNS = ("question", "your guess", "predicted", "measured", "ratio", "guess / truth", "points")
_NONE_YET = "–"
_TOO_LARGE = 1e30
"""No guess is as large; a file of guesses would not be read with a number of 309 digits in it."""
_LEAST_BYTES = 1024
"""A size below it lacks its unit."""
Value = float | str


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Guess:
    """One question with its answers; `compare` adds those of kit and of the run."""

    question: str
    guess: Value | None = None
    unit: str = ""
    choices: tuple[str, ...] = ()
    predicted: Value | None = None
    measured: Value | None = None
    first: Value | None = None
    """The guess that was compared first, which counts."""

    def compare(self, predicted: Value | None = None, measured: Value | None = None) -> Guess:
        """Set the guess beside the answers, and keep all three.

        Args:
            predicted: What kit predicted, in the guess's unit; None where it predicts nothing.
            measured: What was measured; None where nothing was.

        Returns:
            The three beside each other, with points: 3 within 10 % of the truth, 2 within a factor of 1.5, 1 within 3.
            Where neither is known nothing is kept.

        Raises:
            ConfigError: for an answer that is no number or none of the choices, and a file of guesses that cannot be
                read or written.
        """
        if predicted is None and measured is None:
            return self
        with _kept() as all_of_them:
            before = all_of_them.get(self.question)
            # Run All without a guess of one's own must not take a place that a guess has.
            guess = before.guess if before is not None and self.guess is None else self.guess
            first = before.first if before is not None and before.first is not None else guess
            compared = replace(
                self, guess=guess, first=first, predicted=_checked(self, "predicted", predicted),
                measured=_checked(self, "measured", measured),
            )  # fmt: skip
            all_of_them[self.question] = compared
        return compared

    @property
    def truth(self) -> Value | None:
        """What was measured, else what was predicted; None before either is known."""
        return self.predicted if self.measured is None else self.measured

    @property
    def ratio(self) -> float | None:
        """The guess that counts over the truth; None for words, and before both are known."""
        return ratio(self.first, self.truth)

    @property
    def points(self) -> int | None:
        """Of the guess that counts, 0 to 3; None before there is one and a truth."""
        if self.first is None or self.truth is None:
            return None
        if isinstance(self.truth, str):
            return MOST_POINTS * (self.first == self.truth)
        off = self.ratio
        if off is None or off <= 0:
            return 0
        return max((points for points, bound in BOUNDS.items() if 1 / bound <= off <= bound), default=0)

    def cells(self) -> list[str]:
        """The row of a table."""
        counts = self.first if self.first is not None else self.guess
        shown = [_shown(value, self.unit) for value in (counts, self.predicted, self.measured)]
        ratios = [_shown_ratio(ratio(self.measured, self.predicted)), _shown_ratio(self.ratio)]
        return [self.question, *shown, *ratios, _NONE_YET if self.points is None else f"{self.points}"]

    @property
    def notes(self) -> tuple[str, ...]:
        """What to do, or what a later guess was."""
        if self.truth is None:
            how = f"one of {', '.join(map(repr, self.choices))}" if self.choices else _how(self.unit)
            asked = self.question if self.question.endswith("?") else f"{self.question}:"
            if self.guess is None:
                return (f"{asked} write {how} in place of None, and run this cell again",)
            counts = self.first is not None and self.first != self.guess
            first = f"; your first guess, {_shown(self.first, self.unit)}, counts" if counts else ""
            return (f"{asked} you say {_shown(self.guess, self.unit)}{first}",)
        if self.first is None:
            return ("you made no guess",)
        if self.guess is not None and self.guess != self.first:
            return (f"a later guess was {_shown(self.guess, self.unit)}; the first one counts",)
        return ()

    def __repr__(self) -> str:
        table = [text_table(COLUMNS, [self.cells()])] if self.truth is not None else []
        return "\n".join([*table, *(f"- {note}" for note in self.notes)])

    def _repr_html_(self) -> str:
        table = html_table(COLUMNS, [self.cells()]) if self.truth is not None else ""
        return table + (html_list(self.notes) if self.notes else "")


@checks_arguments
def guess(question: str, value: Value | None = None, *, unit: str = "", choices: Sequence[str] = ()) -> Guess:
    """Ask for a guess, before the cell that knows.

    Args:
        question: What is asked; it names the guess in the learner's file, so each notebook's begins with its number.
        value: The learner's answer; None until there is one. A size may be a text, such as `"600 MiB"`.
        unit: `bytes` and `seconds` are shown with their units, any other word stands behind the number.
        choices: The answers among which one is chosen, where it is not a number.

    Returns:
        The guess; `guess.compare(predicted, measured)` sets it beside the answers.

    Raises:
        ConfigError: for an answer that is no number from 0 on, no size, or none of the choices, and for a question
            that is no text.

    Example:
        >>> asked = kit.course.guess("how many requests?", 100, unit="requests")
        >>> asked.compare(predicted=118, measured=120).points
        2
    """
    for name, text in {"question": question, "unit": unit}.items():
        if not isinstance(text, str) or (name == "question" and not text.strip()):
            raise ConfigError([Problem(name, f"{text!r} is no text that a learner reads; write one")])
    if isinstance(choices, str):
        raise ConfigError([Problem("choices", f"{choices!r} is one text; give a list of answers")])
    asked = Guess(question=question, unit=unit, choices=tuple(choices))
    with contextlib.suppress(OSError, ConfigError):  # which `compare` tells
        before = _read(project_folder() / FILE).get(question)
        asked = replace(asked, first=None if before is None else before.first)
    return replace(asked, guess=_checked(asked, "value", value))


def ratio(value: Value | None, truth: Value | None) -> float | None:
    """One number over another; 1 for two zeros, endless over a zero, None where one is a word or unknown."""
    if value is None or truth is None or isinstance(value, str) or isinstance(truth, str):
        return None
    if truth == 0:
        return 1.0 if value == 0 else math.inf
    return value / truth


def _shown_ratio(value: float | None) -> str:
    return _NONE_YET if value is None or math.isinf(value) else f"{value:.2f}"


def _checked(asked: Guess, name: str, value: Value | None) -> Value | None:
    """The value as it is kept: a number of the unit, or one of the choices."""
    if value is None:
        return None
    if asked.choices:
        if value in asked.choices:
            return value
        message = f"is {value!r}, but the choices are {', '.join(map(repr, asked.choices))}"
        raise ConfigError([Problem(name, f"{message}: {asked.question}")])
    number = math.nan
    with contextlib.suppress(TypeError, ValueError, OverflowError):
        number = parse_bytes(value) if asked.unit == "bytes" and isinstance(value, str) else float(value)
    if name == "value" and asked.unit == "bytes" and 0 < number < _LEAST_BYTES:
        message = f"is {number:g} bytes; give its unit, as in '{number:g} MiB': {asked.question}"
        raise ConfigError([Problem(name, message)])
    if 0 <= number < _TOO_LARGE:
        return int(number) if number == int(number) else number
    message = f"is {str(value)[:40]!r}, but must be {_how(asked.unit)}, from 0 on: {asked.question}"
    raise ConfigError([Problem(name, message)])


def _how(unit: str) -> str:
    """How an answer of this unit is written."""
    number = "a number" if unit.startswith("of ") else f"a number of {unit}"
    return {"bytes": "a size such as '600 MiB'", "": "a number"}.get(unit, number)


def _shown(value: Value | None, unit: str) -> str:
    if value is None:
        return _NONE_YET
    if isinstance(value, str):
        return value
    if unit == "bytes":
        return format_bytes(value)
    if unit == "seconds":
        return format_seconds(value)
    word = unit.removesuffix("s") if value == 1 and "/" not in unit else unit
    return f"{format_count(value)} {word}".strip()


# -- all of them


@dataclass(frozen=True, slots=True, repr=False)
class Score(Drawable):
    """Every guess of a learner; `figure()` draws how far off each was, `hand_in` writes one file."""

    guesses: tuple[Guess, ...]
    learner: str = ""
    file: Path = field(default=Path(FILE))

    @property
    def points(self) -> int:
        """Of all guesses."""
        return sum(guess.points or 0 for guess in self.guesses)

    @property
    def most_points(self) -> int:
        """That the guesses made so far could have got."""
        return MOST_POINTS * sum(guess.points is not None for guess in self.guesses)

    def hand_in(self, path: str | Path = "guesses.html") -> Path:
        """Write table and chart as one HTML file that opens offline.

        Args:
            path: The file to write. Its folder is made; a file that kit did not write is left alone.

        Returns:
            The path of the file.

        Raises:
            ConfigError: for a file that must not or cannot be written.
        """
        asked: Any = path  # by a user, who may give anything
        if not isinstance(asked, str | os.PathLike):
            raise ConfigError([Problem("path", f"{type(asked).__name__} is no path; write such as 'guesses.html'")])
        page: Path = load("score.page")(self, Path(path).expanduser())
        return page

    def rows(self) -> list[list[str]]:
        """Cells of the table, one row for each guess."""
        return [guess.cells() for guess in self.guesses]

    @property
    def headline(self) -> str:
        who = f"{self.learner}: " if self.learner else ""
        if not self.guesses:
            return f"{who}no guess was compared yet"
        made = self.most_points // MOST_POINTS
        return f"{who}{self.points} of {self.most_points} points, {made} of {len(self.guesses)} questions guessed"

    def __repr__(self) -> str:
        return "\n".join([self.headline, *([text_table(COLUMNS, self.rows())] if self.guesses else [])])

    def _repr_html_(self) -> str:
        if not self.guesses:
            return html_list([self.headline])
        return html_table(COLUMNS, self.rows(), caption=self.headline)


def score() -> Score:
    """Your guesses so far, beside what was predicted and measured.

    Returns:
        A score: its table, its `figure()`, and `hand_in("me.html")`, one file for a teacher.

    Raises:
        ConfigError: when the file of guesses is damaged.

    Example:
        >>> kit.course.score().hand_in("guesses.html").name
        'guesses.html'
    """
    file = project_folder() / FILE
    mine = seat()
    in_order = sorted(_read(file).values(), key=_notebook)
    return Score(tuple(in_order), "" if mine is None else mine.name, file)


def _notebook(asked: Guess) -> float:
    """The number that a question begins with; questions of one's own, which have none, come last."""
    number = re.match(r"\d+", asked.question)
    return math.inf if number is None else int(number[0])


@contextlib.contextmanager
def _kept() -> Iterator[dict[str, Guess]]:
    """The guesses of this project by question; what is changed inside is kept, one writer at a time."""
    import fcntl  # not on Windows, where no trial runs either

    file = project_folder() / FILE
    try:
        folder = os.open(file.parent, os.O_RDONLY | os.O_CLOEXEC)
        try:
            fcntl.flock(folder, fcntl.LOCK_EX)
            guesses = _read(file)
            yield guesses
            write_json(file, {"guesses": [asdict(one) for one in guesses.values()]}, indent=1)
        finally:
            os.close(folder)
    except OSError as error:
        raise ConfigError([Problem("guesses", f"cannot keep {file}: {error.strerror or error}")]) from error


def _read(file: Path) -> dict[str, Guess]:
    try:
        values: Mapping[str, Any] = read_json(file.read_bytes(), str(file))
        found = [Guess(**{**one, "choices": tuple(one["choices"])}) for one in values["guesses"]]
    except FileNotFoundError:
        return {}
    except (JsonError, KeyError, TypeError) as error:
        message = f"{file} cannot be read ({error}); move it away to begin anew"
        raise ConfigError([Problem("guesses", message)]) from None
    return {one.question: one for one in found}
