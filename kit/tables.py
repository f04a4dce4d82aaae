"""Small tables as plain text, CSV and inline-styled HTML: how plans, hardware and results show themselves.

Cells arrive as finished text (see `kit.units`); this file only aligns and escapes. `kit.table` shows rows of the
user's, whose numbers it formats by the unit at the end of their name. The HTML carries no script and no
style sheet, and takes its colours from JupyterLab's theme with a fallback elsewhere. One row may be marked: in the text
with an arrow, in the HTML also for readers who hear the page.
"""

from __future__ import annotations

import copy
import csv
import io
import math
import sys
import threading
import time
import uuid
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from itertools import groupby
from typing import Any, ClassVar, Self, TypeVar, overload

from kit.errors import ConfigError
from kit.units import format_bytes, format_count, format_seconds

Row = TypeVar("Row")
RULE = "1px solid var(--jp-border-color2, #ccc)"
_SHORT = 12
"""Letters of a cell that never wraps: as long as numbers with their units are."""
_SHORT_CAPTION = 60
_MARK = "background: var(--jp-rendermime-table-row-hover-background, rgba(86, 180, 233, 0.25)); font-weight: bold"
MISSING = "–"
_SILENT_SECONDS, _SHOWN_SECONDS = 3.0, 1.0
"""Nothing is said of waiting that ends sooner; then the line is written anew this often."""
FRAME = "color: var(--jp-ui-font-color1, #222); font-variant-numeric: tabular-nums"


def text_table(columns: Sequence[str], rows: Sequence[Sequence[str]], marked: int | None = None) -> str:
    """Aligned columns, the first to the left and the others to the right; `marked` is the row an arrow points at."""
    widths = [max(len(cell) for cell in column) for column in zip(columns, *rows, strict=True)]
    lines = []
    for index, row in enumerate((columns, *rows)):
        first, *others = (
            cell.ljust(w) if not c else cell.rjust(w) for c, (cell, w) in enumerate(zip(row, widths, strict=True))
        )
        arrow = "" if marked is None else "→ " if index == marked + 1 else "  "
        lines.append((arrow + "  ".join([first, *others])).rstrip())
    return "\n".join(lines)


def csv_text(columns: Iterable[str], rows: Iterable[Iterable[object]]) -> str:
    """The rows for other programs, below the names of their columns."""
    stream = io.StringIO()
    writer = csv.writer(stream, lineterminator="\n")
    writer.writerow(columns)
    writer.writerows(rows)
    return stream.getvalue()


def html_table(
    columns: Sequence[str],
    rows: Sequence[Sequence[str]],
    *,
    caption: str = "",
    marked: int | None = None,
    mark: str = "chosen",
    dense: bool = False,
    highlighted: Collection[tuple[int, int]] = (),
    groups: Sequence[str] = (),
) -> str:
    """The same table as HTML; `caption` stands above it, `mark` is what the marked row is called.

    A dense one has smaller letters and gaps, for many columns on a narrow page. Single cells are `highlighted` by
    (row, column). `groups` has the heading above each column, empty for none: equal neighbours share one.
    """
    above = html_groups(groups) if groups else ""
    head = "".join(
        f'<th scope="col" style="{_cell(c, dense, wraps=dense)}; vertical-align: bottom; border-bottom: {RULE}">'
        f"{escape(name)}</th>"
        for c, name in enumerate(columns)
    )
    body = "".join(
        _row(row, mark if index == marked else "", dense, {column for place, column in highlighted if place == index})
        for index, row in enumerate(rows)
    )
    title = (
        f'<caption style="text-align: left; font-weight: bold; padding: 2px 0{_one_line(caption)}">'
        f"{escape(caption)}</caption>"
        if caption
        else ""
    )
    style = f"{FRAME}; border-collapse: collapse; margin: 4px 0{'; font-size: 0.82em' if dense else ''}"
    return f'<table style="{style}">{title}<thead>{above}<tr>{head}</tr></thead><tbody>{body}</tbody></table>'


def _one_line(caption: str) -> str:
    """A short one is not broken to the width of a narrow table."""
    return "; white-space: nowrap" if len(caption) <= _SHORT_CAPTION else ""


def cell(value: float | None, form: Callable[[float], str] = format_bytes) -> str:
    """A number as text; a dash where it is not known."""
    return MISSING if value is None else form(value)


def html_groups(groups: Sequence[str]) -> str:
    """A line of headings above those of columns, one for each run of equal names; nothing is written for an empty."""
    return f"<tr>{''.join(_group(name, len(list(part))) for name, part in groupby(groups))}</tr>"


def html_list(items: Sequence[str]) -> str:
    """Sentences as a list, as reasons are shown."""
    body = "".join(f"<li>{escape(item)}</li>" for item in items)
    return f'<ul style="{FRAME}; margin: 4px 0; padding-left: 1.5em">{body}</ul>'


def html_warnings(items: Sequence[str]) -> str:
    """Sentences that must not be overlooked, each with a bar at its side; nothing for none."""
    style = f"{FRAME}; border-left: 4px solid var(--jp-warn-color1, #c77700); padding: 2px 0 2px 10px; margin: 4px 0"
    return "".join(f'<div style="{style}"><b>warning</b>: {escape(item)}</div>' for item in items)


def _row(cells: Sequence[str], mark: str, dense: bool, highlighted: Collection[int] = ()) -> str:
    note = f' <span style="font-weight: normal">({escape(mark)})</span>' if mark else ""
    first, *others = cells
    head = f'<th scope="row" style="{_cell(0, dense)}; font-weight: inherit">{escape(first)}{note}</th>'
    rest = "".join(
        f'<td style="{_cell(1, dense, wraps=len(cell) > _SHORT)}{f"; {_MARK}" if place in highlighted else ""}">'
        f"{escape(cell)}</td>"
        for place, cell in enumerate(others, start=1)
    )
    return f'<tr style="{_MARK if mark else ""}">{head}{rest}</tr>'


def _group(name: str, span: int) -> str:
    rule = f"; border-bottom: {RULE}" if name else ""
    style = f"text-align: center; padding: 0 3px; white-space: nowrap{rule}"
    return f'<th scope="colgroup" colspan="{span}" style="{style}">{escape(name)}</th>'


def _cell(column: int, dense: bool, wraps: bool = False) -> str:
    """Headings of dense tables and long cells wrap where the page is narrow; numbers never do."""
    padding = "2px 3px" if dense else "2px 10px"
    wrap = "normal" if wraps else "nowrap"
    return f"text-align: {f'right; white-space: {wrap}' if column else 'left'}; padding: {padding}"


class ResultRows(Sequence[Row]):
    """Results below one another: index or iterate them; a slice is of the same kind."""

    def __init__(self, rows: Iterable[Row]) -> None:
        self._held = tuple(rows)

    @overload
    def __getitem__(self, index: int) -> Row: ...
    @overload
    def __getitem__(self, index: slice) -> Self: ...
    def __getitem__(self, index: int | slice) -> Row | Self:
        if not isinstance(index, slice):
            return self._held[index]
        part = copy.copy(self)
        part._held = self._held[index]
        return part

    def __len__(self) -> int:
        return len(self._held)


# -- rows that the user gives


@dataclass(frozen=True, slots=True, repr=False)
class Table:
    """Named rows of named cells; what a row lacks is left empty."""

    rows: Mapping[str, Mapping[str, object]]
    caption: str = ""

    @property
    def columns(self) -> tuple[str, ...]:
        """Names of all cells, in the order they first come."""
        return tuple(dict.fromkeys(name for row in self.rows.values() for name in row))

    def _cells(self) -> list[list[str]]:
        return [[label, *(_shown(name, row.get(name)) for name in self.columns)] for label, row in self.rows.items()]

    def _headings(self) -> list[str]:
        return ["", *map(_heading, self.columns)]

    def __repr__(self) -> str:
        return "\n".join([self.caption] * bool(self.caption) + [text_table(self._headings(), self._cells())])

    def _repr_html_(self) -> str:
        table = html_table(self._headings(), self._cells(), caption=self.caption, dense=len(self.columns) > _MANY)
        return f'<div style="overflow-x: auto">{table}</div>'


def table(rows: Mapping[str, Mapping[str, object]], caption: str = "") -> Table:
    """Show numbers of several runs side by side.

    Args:
        rows: Label -> name -> value. The end of a name is its unit and decides how a number is shown: `_bytes`,
            `_bytes_per_second`, `_seconds`, `_fraction`, `ratio`. Names that begin with `bytes_per_` are bytes too.
            Other numbers get three significant digits.
        caption: A line above the table.

    Returns:
        A table for a notebook or a terminal.

    Raises:
        ConfigError: for what is no mapping of mappings.

    Example:
        >>> print(kit.table({"near": {"requests": 210, "read_bytes": 5 << 20, "took_seconds": 0.3}}))
              requests   read    took
        near       210  5 MiB  300 ms
    """
    asked: Any = rows  # by a user, who may give anything
    if not isinstance(asked, Mapping) or not all(isinstance(row, Mapping) for row in asked.values()):
        raise ConfigError(f"a table takes {{label: {{name: value}}}}, got {type(asked).__name__}")
    return Table(rows, caption)


_MANY = 5
_UNITS: dict[str, Callable[[float], str]] = {
    "_bytes_per_second": lambda value: f"{format_bytes(value)}/s",
    "_bytes": format_bytes,
    "_seconds": format_seconds,
    "_fraction": lambda value: f"{value:.0%}",
}


def _unit(name: str) -> str:
    return next((unit for unit in _UNITS if name.endswith(unit)), "")


def _heading(name: str) -> str:
    return name.removesuffix(_unit(name)).replace("_per_second", "/s").replace("_", " ")


def _shown(name: str, value: object) -> str:
    if value is None or (isinstance(value, float) and math.isnan(value)):
        return MISSING
    if name.endswith("ratio") and isinstance(value, float):
        return f"{value:.2f}"
    if isinstance(value, bool) or not isinstance(value, int | float):
        return str(value)
    if name.startswith("bytes_per_"):
        return format_bytes(value)
    if _unit(name):
        return _UNITS[_unit(name)](value)
    return format_count(value) if isinstance(value, int) else f"{value:.3g}"


def find_display() -> Callable[[str, bool], None] | None:
    """Shows a text in place of the one before, in the output of a cell or in a terminal; None where nobody looks."""
    shell: Any = sys.modules["IPython"].get_ipython() if "IPython" in sys.modules else None
    if getattr(shell, "kernel", None) is not None:
        from IPython.display import display

        display_id, shown = uuid.uuid4().hex, False

        def show_in_cell(text: str, last: bool) -> None:  # noqa: ARG001 - a cell needs no new line at the end
            nonlocal shown
            bundle = {"text/plain": text}
            display(bundle, raw=True, display_id=display_id, update=shown)  # type: ignore[no-untyped-call]
            shown = True

        return show_in_cell
    if not sys.stderr or not sys.stderr.isatty():
        return None

    def show_in_terminal(text: str, last: bool) -> None:
        sys.stderr.write(f"\r\x1b[K{text}" + ("\n" if last else ""))
        sys.stderr.flush()

    return show_in_terminal


class WaitingLine:
    """Says in a cell or a terminal, once something takes long, what is done, and for how long it has taken.

    Of lines open at once the first is shown, and the others are told as its part: a study says how far it is, and where
    its trial is. Panels ask from threads of their own, and say it themselves.
    """

    _open: ClassVar[list[WaitingLine]] = []
    """Those of the main thread."""

    def __init__(self, limit: str = "") -> None:
        """`limit` says how long it may take, where that is known."""
        self._limit, self._began = limit, time.monotonic()
        self._shown, self._what = self._began, ""
        self._display: Callable[[str, bool], None] | None = None

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            self._open.append(self)
        return self

    def __exit__(self, *_: object) -> None:
        if self in self._open:
            self._open.remove(self)
        if self._display is not None:
            self._display(self._text(), True)

    def show(self, what: str, part: str = "") -> None:
        """What is done by now, and the part at which it is; written once a second, and not in the first three."""
        self._what = what
        if self not in self._open:
            return
        if (first := self._open[0]) is not self:
            first.show(first._what, part or what)
            return
        now = time.monotonic()
        if now - self._shown < (_SILENT_SECONDS if self._display is None else _SHOWN_SECONDS):
            return
        self._shown, self._display = now, self._display or find_display()
        if self._display is not None:
            said = ", ".join(filter(None, (f"{self._text()} so far", self._limit)))
            self._display("; ".join(filter(None, (said, part))), False)

    def _text(self) -> str:
        return f"{self._what}: {format_seconds(float(round(time.monotonic() - self._began)))}"
