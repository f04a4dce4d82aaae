"""QueryCheck: what a table needs when it is read in 1, 2, 4, ... query chunks, measured beside predicted, and advice.

Predicted is what the model of `kit.plan.query_chunks` says; of the database what the other numbers lead to expect, so
its ratio is never of a value with itself, and a single number has none. Fitting holds a few batches of a column at a
time, whatever the number of query chunks: what it needs is measured and not predicted.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from kit.plan.query_chunks import QueryModel
from kit.tables import html_list, html_table, text_table
from kit.units import format_bytes, format_count, format_seconds, parse_bytes

Phase = Literal["load", "fit"]
_COLUMNS = (
    "query chunks", "client predicted", "measured", "ratio", "database predicted", "measured", "ratio", "took",
    "rows at once",
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class QuerySetting:
    """One number of query chunks and what came of it."""

    count: int
    predicted_client_bytes: int | None
    """None for fitting."""
    measured_client_bytes: int | None = None
    predicted_database_bytes: int | None = None
    measured_database_bytes: int | None = None
    seconds: float | None = None
    """Of reading the whole table once."""
    largest_rows: int = 0
    """Rows of the largest query chunk."""
    note: str = ""
    """Why it did not run."""

    @property
    def client_ratio(self) -> float | None:
        """measured / predicted."""
        return _ratio(self.measured_client_bytes, self.predicted_client_bytes)

    @property
    def database_ratio(self) -> float | None:
        """measured / predicted."""
        return _ratio(self.measured_database_bytes, self.predicted_database_bytes)


@dataclass(frozen=True, slots=True, kw_only=True)
class QueryAdvice:
    """The number of query chunks to take, and why; `count` is None when no number fits."""

    count: int | None
    reason: str

    def __str__(self) -> str:
        return self.reason


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class QueryCheck:
    """Numbers of query chunks beside each other, fewest first."""

    name: str
    phase: Phase
    settings: tuple[QuerySetting, ...]
    model: QueryModel

    def advise(self, client_bytes: int | str | None = None, database_bytes: int | str | None = None) -> QueryAdvice:
        """The fewest query chunks that stay within what is allowed, here and in the database.

        A measured number is taken before a predicted one; beyond those measured the model decides, scaled by the
        highest ratio that was seen.

        Args:
            client_bytes: Allowed in the reader's process, on top of its libraries; None for any.
            database_bytes: Allowed in the database; None for any.
        """
        client, database = _allowed(client_bytes), _allowed(database_bytes)
        limits = " and ".join(
            f"{format_bytes(allowed)} {where}"
            for allowed, where in ((client, "here"), (database, "in the database"))
            if allowed is not None
        )
        for setting in self.settings:
            if setting.seconds is not None and _fits(setting, client, database):
                return QueryAdvice(count=setting.count, reason=_measured_reason(setting, limits))
        return self._beyond(client, database, limits)

    def _beyond(self, client: int | None, database: int | None, limits: str) -> QueryAdvice:
        if self.phase == "fit":
            return QueryAdvice(count=None, reason=f"no number that was measured stays within {limits}; measure more")
        scale = max([1.0, *(setting.client_ratio or 0.0 for setting in self.settings)])
        count = self.model.smallest(None if client is None else int(client / scale), database)
        most = max((setting.count for setting in self.settings if setting.seconds is not None), default=0)
        if count is None or count <= most:
            least = format_bytes(scale * self.model.client_bytes(max(1, self.model.rows)))
            reason = f"no number of query chunks is known to stay within {limits}: the fewest rows need {least} here"
            return QueryAdvice(count=None, reason=f"{reason}; allow more")
        needed = format_bytes(scale * self.model.client_bytes(count))
        reason = f"{count} query chunks, predicted and not measured: about {needed} here, within {limits}"
        return QueryAdvice(count=count, reason=reason)

    @property
    def rows(self) -> list[list[str]]:
        return [_row(setting) for setting in self.settings]

    @property
    def sentences(self) -> tuple[str, ...]:
        model = self.model
        size = f"{format_count(model.rows)} rows of {model.row_bytes:.0f} bytes"
        what = "reading it whole, as an epoch does" if self.phase == "load" else "fitting its features"
        shared = "the database works inside the client's process, whose memory has both" * model.shares_process
        notes = [f"{setting.count} query chunks: {setting.note}" for setting in self.settings if setting.note]
        return tuple(filter(None, (f"{self.name}: {size}; {what}", shared, self.about_database, *notes)))

    @property
    def about_database(self) -> str:
        """What more query chunks do to the database's memory, in a sentence; empty after a single number."""
        known = {s.count: s.measured_database_bytes for s in self.settings if s.measured_database_bytes}
        memory = self.model.database
        if memory is None:
            return "memory of the database cannot be seen from here"
        if len(known) == 1:
            return ""
        if not memory.rows_bytes:
            return (
                f"the database needs about {format_bytes(memory.fixed_bytes)} for any number of query chunks, since it "
                "sends rows as it finds them, or keeps to its limit and sorts on disk: more of them save memory here"
            )
        most, least = known[min(known)], known[max(known)]
        falls = f"from {format_bytes(most)} at {min(known)} to {format_bytes(least)} at {max(known)} query chunks"
        return f"the database's memory falls {falls}: it keeps the rows of one to sort, group or join them"

    def __repr__(self) -> str:
        return "\n".join([text_table(_COLUMNS, self.rows), *(f"- {text}" for text in self.sentences)])

    __str__ = __repr__

    def _repr_html_(self) -> str:
        caption = f"{self.name}: memory and time by query chunks"
        return html_table(_COLUMNS, self.rows, caption=caption, dense=True) + html_list(self.sentences)


def _allowed(value: int | str | None) -> int | None:
    return None if value is None else parse_bytes(value)


def _fits(setting: QuerySetting, client: int | None, database: int | None) -> bool:
    pairs = ((setting.measured_client_bytes, client), (setting.measured_database_bytes, database))
    return all(used is None or allowed is None or used <= allowed for used, allowed in pairs)


def _measured_reason(setting: QuerySetting, limits: str) -> str:
    measured = f"{format_bytes(setting.measured_client_bytes or 0)} here"
    if setting.measured_database_bytes is not None:
        measured += f" and {format_bytes(setting.measured_database_bytes)} in the database"
    within = f", within {limits}" if limits else ""
    return (
        f"{setting.count} query chunk{'s' * (setting.count > 1)}: measured {measured}{within}; fewer reads are faster"
    )


def _row(setting: QuerySetting) -> list[str]:
    took = "–" if setting.seconds is None else format_seconds(setting.seconds)
    return [
        str(setting.count), _bytes(setting.predicted_client_bytes), _bytes(setting.measured_client_bytes),
        _times(setting.client_ratio), _bytes(setting.predicted_database_bytes), _bytes(setting.measured_database_bytes),
        _times(setting.database_ratio), took, format_count(setting.largest_rows) if setting.largest_rows else "–",
    ]  # fmt: skip


def _ratio(measured: int | None, predicted: int | None) -> float | None:
    return measured / predicted if measured is not None and predicted else None


def _bytes(value: int | None) -> str:
    return "–" if value is None else format_bytes(value)


def _times(value: float | None) -> str:
    return "–" if value is None else f"{value:.2f}"
