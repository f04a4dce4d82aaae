"""The error tree: every error says what, value, bound, where and the way out, and refines a built-in.

Callers who do not know kit can catch the built-in (`ValueError`, `OSError`, ...); callers who do can catch
`KitError`. Errors about a config carry one `Problem` per field, so that a form can show each beside its control.
"""

from __future__ import annotations

import contextlib
import difflib
import sys
import warnings
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

_PASSED_ON = (str(Path(__file__).parent), contextlib.__file__)
"""Files of functions that call others for whoever called kit."""


class KitError(Exception):
    """The base of every error that kit raises on purpose: `except kit.KitError` catches them all.

    Example:
        >>> try:
        ...     kit.Config().replace({"loader.batch_size": 0})
        ... except kit.KitError as error:
        ...     print(type(error).__name__)
        ConfigError
    """


@dataclass(frozen=True, slots=True)
class Problem:
    """One thing wrong with one field."""

    path: str
    """Dotted path of the field, such as `loader.batch_size`; empty when it concerns the whole text."""
    message: str
    """What is wrong and the way out, without the path."""

    def __str__(self) -> str:
        return f"{self.path}: {self.message}" if self.path else self.message


class ConfigError(KitError, ValueError):
    """A config that cannot be used; `problems` names every field at fault."""

    def __init__(self, problems: Sequence[Problem] | str, where: str = "") -> None:
        if isinstance(problems, str):
            problems = [Problem("", problems)]
        self.problems: tuple[Problem, ...] = tuple(problems)
        self.where = where
        lines = [str(problem) for problem in self.problems]
        head = f"{where}: " if where else ""
        super().__init__(head + (lines[0] if len(lines) == 1 else "\n  " + "\n  ".join(lines)))

    def __reduce__(self) -> tuple[type[ConfigError], tuple[tuple[Problem, ...], str]]:
        return type(self), (self.problems, self.where)


class ArgumentError(ConfigError, TypeError):
    """An argument that a function does not take."""


class TargetError(ConfigError, ImportError):
    """A model, data module or source that cannot be found under the name given."""


class PlanError(KitError, ValueError):
    """A plan that cannot hold: a patch larger than its array, a chunk of no elements."""


class HardwareError(KitError, RuntimeError):
    """Devices asked for that this machine does not have or cannot join."""


class StoreError(KitError, OSError):
    """A store that cannot be reached, opened or understood."""


class UnreachableStoreError(StoreError):
    """A store to which there is no connection, or that does not answer in time."""


class UnfinishedStoreError(StoreError):
    """A store whose build has not finished: opening it would read zeros for data."""


class MissingChunkError(StoreError, LookupError):
    """An object that the store's metadata promises is not there."""


class CorruptChunkError(StoreError, ValueError):
    """Bytes that fail their checksum or do not decode to the promised shape."""


class StoreLockedError(StoreError):
    """A store that another process is writing."""


class MissingRowsError(StoreError, FileNotFoundError):
    """An array whose rows are asked for that is not there."""


class RowsError(StoreError, ValueError):
    """An array whose rows cannot be read: no array, cut short, empty, or of a type that is no number."""


class BuildError(KitError, RuntimeError):
    """A dataset that could not be built; nothing half-made is published."""


class QueryError(KitError, RuntimeError):
    """A query that a database refused, or that ended before its last row: what came of it is not to be used."""


class SchemaChangedError(QueryError):
    """A table whose columns are no longer those it was opened with."""


class UnreachableDatabaseError(KitError, ConnectionError):
    """A database that does not answer, or does not let this user in."""


class PartitionError(KitError, ValueError):
    """A table that cannot be cut into query chunks as asked."""


class TrialError(KitError, RuntimeError):
    """A trial that failed; the message leads with the root cause, `details` hold the user's traceback and the log."""

    def __init__(self, message: str, details: str = "") -> None:
        self.details = details
        super().__init__(message)
        if details:
            self.add_note(details)

    def __reduce__(self) -> tuple[type[TrialError], tuple[str, str]]:
        return type(self), (str(self), self.details)

    def _render_traceback_(self) -> list[str]:
        """What a notebook shows: the cause in one line, then details; kit's own frames explain nothing."""
        return [f"{type(self).__name__}: {self}", *self.details.splitlines()]


class ForeignRunError(KitError, PermissionError):
    """A run directory that this user did not write here, and whose code is not run without being asked for."""


class TrialStopped(TrialError):  # noqa: N818 - an end that was asked for
    """A trial ended by an interrupt while it was being waited for; what it measured until then is kept."""


class JsonError(KitError, ValueError):
    """A JSON text that is damaged, nested too deeply, or holds a number that no float can."""


class EventLogError(KitError, ValueError):
    """An event file damaged in the middle (a torn last line is not damage)."""


class KitWarning(UserWarning):
    """Something asked for that could not be done, while the run goes on without it; the message names the way out."""


def warn_caller(message: str) -> None:
    """Warn at the line that called kit, through however many functions of kit that was."""
    frame, level = sys._getframe(1), 2
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_PASSED_ON):
        frame, level = frame.f_back, level + 1
    warnings.warn(message, KitWarning, stacklevel=level)


def did_you_mean(name: object, known: Iterable[object], otherwise: str = "it has {}", cutoff: float = 0.6) -> str:
    """The end of an error about a name: `; did you mean 'mean'?`, or all known names as `otherwise` says them."""
    names = [*map(str, known)]
    close = difflib.get_close_matches(str(name), names, n=1, cutoff=cutoff)
    hint = f"did you mean {close[0]!r}?" if close else otherwise.format(", ".join(names))
    return f"; {hint}" if hint else ""


def first_few(names: Sequence[str], most: int) -> str:
    """`a, b, c and 4 more`, for a message about names that may be many."""
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more


def first_line(error: BaseException) -> str:
    """What an error says, without the statement, file, module or traceback that it quotes below or between."""
    lines = [line.strip() for line in str(error).strip().splitlines()] or [type(error).__name__]
    first, last = lines[0], lines[-1]
    if first.endswith("(") and last.startswith(")"):  # a call that torch shows with its module
        return f"{first}…{last}"
    if first.endswith(":") and len(lines) > 1:
        return f"{first} {lines[1]}"
    return first
