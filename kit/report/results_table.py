"""The table of results that people see: fewer columns than the rows hold, formatted, and none that is empty.

What is predicted stands as three columns under one heading: predicted, measured, ratio; in HTML in a table of its own
below, so that each fits a narrow page. Rows that went wrong say why below. Of very many rows the first are shown, and
how many are not; Markdown, which goes into a file, has them all.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from html import escape
from typing import Any, NamedTuple

from kit.tables import FRAME, html_groups, text_table
from kit.units import format_bytes, format_count

Row = Mapping[str, Any]
MOST_ROWS = 100
_MISSING = "–"
_COMPARED = ("predicted", "measured", "ratio")
_RULE = "1px solid var(--jp-border-color2, #ccc)"


class Column(NamedTuple):
    """One column: the heading above it (empty for none), its own title, and its cell of a row."""

    group: str
    title: str
    text: Callable[[Row], str]


def as_text(rows: Sequence[Row]) -> str:
    """The rows as aligned text."""
    shown = rows[:MOST_ROWS]
    columns, cells = _table(shown)
    return "\n".join([text_table(_flat(columns), cells), *_troubles(shown), *_left_out(rows)])


def as_markdown(rows: Sequence[Row]) -> str:
    """The rows as a Markdown table."""
    columns, cells = _table(rows)
    rule = ["---"] + ["---:"] * (len(columns) - 1)
    lines = [_flat(columns), rule, *([_markdown_cell(cell) for cell in row] for row in cells)]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def as_html(rows: Sequence[Row], caption: str = "") -> str:
    """The rows as two HTML tables, each with two lines of headings: the trials, and what was predicted of them."""
    shown = rows[:MOST_ROWS]
    columns, cells = _table(shown)
    caption = caption or ("1 trial" if len(rows) == 1 else f"{len(rows)} trials, newest first")
    compared = [place for place, column in enumerate(columns) if column.title in _COMPARED]
    facts = [place for place in range(len(columns)) if place not in compared]
    tables = _table_html(caption, columns, cells, facts)
    if compared:
        tables += _table_html("predicted and measured", columns, cells, [0, *compared], "0.92em")
    notes = "".join(f"<li>{escape(note)}</li>" for note in (*_troubles(shown), *_left_out(rows)))
    return (
        f'<div style="{FRAME}; overflow-x: auto; font-size: 0.88em">{tables}'
        + (f'<ul style="margin: 4px 0; padding-left: 1.5em">{notes}</ul>' if notes else "")
        + "</div>"
    )


def _table_html(
    caption: str,
    columns: Sequence[Column],
    cells: Sequence[Sequence[str]],
    places: Sequence[int],
    size: str = "inherit",
) -> str:
    """A table of the columns at these places."""
    chosen = [columns[place] for place in places]
    first = html_groups([column.group for column in chosen])
    second = "".join(_heading_html(place, column.title) for place, column in enumerate(chosen))
    rows = ([row[place] for place in places] for row in cells)
    body = "".join(f"<tr>{''.join(_cell_html(*cell) for cell in enumerate(row))}</tr>" for row in rows)
    return (
        f'<table style="border-collapse: collapse; margin: 4px 0; font-size: {size}">'
        f'<caption style="text-align: left; font-weight: bold; padding: 2px 0">{caption}</caption>'
        f"<thead>{first}<tr>{second}</tr></thead><tbody>{body}</tbody></table>"
    )


def _table(rows: Sequence[Row]) -> tuple[list[Column], list[list[str]]]:
    columns = {column: [column.text(row) for row in rows] for column in _COLUMNS}
    kept = {
        column: cells
        for column, cells in columns.items()
        if column.title == "trial" or any(cell != _MISSING for cell in cells)
    }
    return list(kept), [list(cells) for cells in zip(*kept.values(), strict=True)]


def _flat(columns: Sequence[Column]) -> list[str]:
    """One line of headings: a group is named at its first column."""
    before, names = "", []
    for column in columns:
        names.append(f"{column.group} {column.title}" if column.group not in ("", before) else column.title)
        before = column.group
    return names


def _troubles(rows: Sequence[Row]) -> list[str]:
    wrong = (row for row in rows if row["message"] and row["state"] not in ("COMPLETE", "STOPPED"))
    return [f"{row['run']}: {row['message']}" for row in wrong]


def _left_out(rows: Sequence[Row]) -> list[str]:
    more = len(rows) - MOST_ROWS
    return [f"{more:,} more: choose with where(...) or a slice, or write all with to_csv(path)"] if more > 0 else []


# -- HTML


def _heading_html(place: int, title: str) -> str:
    return f'<th scope="col" style="{_style(place)}; border-bottom: {_RULE}">{escape(title)}</th>'


def _cell_html(place: int, cell: str) -> str:
    return f'<td style="{_style(place)}">{escape(cell)}</td>'


def _style(place: int) -> str:
    """Names of trials may wrap at their hyphens where the page is narrow; numbers may not."""
    return f"text-align: {'right; white-space: nowrap' if place else 'left'}; padding: 2px 3px"


def _markdown_cell(text: str) -> str:
    return text.replace("\\", "\\\\").replace("|", "\\|").replace("<", "&lt;").replace("\n", " ")


# -- columns


def _text(name: str) -> Callable[[Row], str]:
    return lambda row: _MISSING if row[name] is None else str(row[name])


def _number(name: str, form: str) -> Callable[[Row], str]:
    return lambda row: _MISSING if row[name] is None else format(row[name], form)


def _rate(name: str) -> Callable[[Row], str]:
    return lambda row: _MISSING if row[name] is None else format_count(row[name])


def _bytes(name: str) -> Callable[[Row], str]:
    return lambda row: _MISSING if row[name] is None else format_bytes(row[name])


def _trial(row: Row) -> str:
    """The name of the run directory, less the fingerprint, which time makes superfluous."""
    return str(row["run"]).removesuffix(f"-{str(row['fingerprint'])[:6]}")


def _state(row: Row) -> str:
    return f"{row['state'].lower()} ({row['cause']})" if row["cause"] else row["state"].lower()


def _devices(row: Row) -> str:
    if row["world_size"] is None:
        return _MISSING
    strategy = "" if row["strategy"] == "none" else f"{row['strategy']}, "
    return f"{strategy}{row['world_size']} × {(row['accelerator'] or 'device').upper()}"


def _foreseen(quantity: str, cell: Callable[[Row], str]) -> Callable[[Row], str]:
    """A prediction; none of reserved bytes on the CPU, whose allocator reserves nothing that could be measured."""
    if quantity != "device_reserved_bytes":
        return cell
    measured = f"{quantity}_measured"
    return lambda row: _MISSING if row["accelerator"] == "cpu" and row[measured] is None else cell(row)


def _triple(
    quantity: str, cell: Callable[[str], Callable[[Row], str]], heading: str | None = None
) -> tuple[Column, ...]:
    heading = heading or quantity.replace("_per_", "/")
    return (
        Column(heading, "predicted", _foreseen(quantity, cell(f"{quantity}_predicted"))),
        Column(heading, "measured", cell(f"{quantity}_measured")),
        Column(heading, "ratio", _number(f"{quantity}_ratio", ".2f")),
    )


_COLUMNS = (
    Column("", "trial", _trial),
    Column("", "state", _state),
    Column("", "devices", _devices),
    Column("", "precision", _text("precision")),
    Column("", "batch", _text("batch_size")),
    Column("", "samples/s", _rate("samples_per_second")),
    Column("", "data wait", _number("data_wait_fraction", ".0%")),
    Column("peak", "host RSS", _bytes("host_rss_peak_bytes")),
    Column("peak", "device", _bytes("device_allocated_peak_bytes")),
    *_triple("device_allocated_bytes", _bytes, "device allocated"),
    *_triple("device_reserved_bytes", _bytes, "device reserved"),
    *_triple("requests_per_sample", _rate),
    *_triple("bytes_per_sample", _bytes),
)
