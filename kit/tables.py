"""Small tables as plain text and as inline-styled HTML: how plans, hardware and results show themselves.

Cells arrive as finished text (see `kit.units`); this file only aligns and escapes. The HTML carries no script and no
style sheet, and takes its colours from JupyterLab's theme with a fallback elsewhere. One row may be marked: in the text
with an arrow, in the HTML also for readers who hear the page.
"""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

_RULE = "1px solid var(--jp-border-color2, #ccc)"
_MARK = "background: var(--jp-rendermime-table-row-hover-background, rgba(86, 180, 233, 0.25)); font-weight: bold"
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


def html_table(
    columns: Sequence[str],
    rows: Sequence[Sequence[str]],
    *,
    caption: str = "",
    marked: int | None = None,
    mark: str = "chosen",
    dense: bool = False,
) -> str:
    """The same table as HTML; `caption` stands above it, `mark` is what the marked row is called.

    A dense one has smaller letters and gaps, for many columns on a narrow page.
    """
    head = "".join(
        f'<th scope="col" style="{_cell(c, dense)}; border-bottom: {_RULE}">{escape(name)}</th>'
        for c, name in enumerate(columns)
    )
    body = "".join(_row(row, mark if index == marked else "", dense) for index, row in enumerate(rows))
    title = (
        f'<caption style="text-align: left; font-weight: bold; padding: 2px 0">{escape(caption)}</caption>'
        if caption
        else ""
    )
    style = f"{FRAME}; border-collapse: collapse; margin: 4px 0{'; font-size: 0.82em' if dense else ''}"
    return f'<table style="{style}">{title}<thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>'


def html_list(items: Sequence[str]) -> str:
    """Sentences as a list, as reasons are shown."""
    body = "".join(f"<li>{escape(item)}</li>" for item in items)
    return f'<ul style="{FRAME}; margin: 4px 0; padding-left: 1.5em">{body}</ul>'


def _row(cells: Sequence[str], mark: str, dense: bool) -> str:
    note = f' <span style="font-weight: normal">({escape(mark)})</span>' if mark else ""
    first, *others = cells
    head = f'<th scope="row" style="{_cell(0, dense)}; font-weight: inherit">{escape(first)}{note}</th>'
    rest = "".join(f'<td style="{_cell(1, dense)}">{escape(cell)}</td>' for cell in others)
    return f'<tr style="{_MARK if mark else ""}">{head}{rest}</tr>'


def _cell(column: int, dense: bool) -> str:
    padding = "2px 4px" if dense else "2px 10px"
    return f"text-align: {'right; white-space: nowrap' if column else 'left'}; padding: {padding}"
