"""What a report says in words, and the frame of its parts: no file is read and nothing is drawn here."""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape

from kit.report.comparison import Comparison
from kit.report.row import Row

_MEMORY = "device_allocated_bytes_ratio"


def section(title: str, body: str) -> str:
    """A part with its heading; `body` is HTML."""
    return f"<section><h2>{escape(title)}</h2>{body}</section>"


def figure_html(svg: str, caption: str) -> str:
    """A chart, which says itself what it shows, and one line below it."""
    return f"<figure>{svg}<figcaption>{escape(caption)}</figcaption></figure>"


def count(number: int, noun: str) -> str:
    """`1 trial`, `2 trials`."""
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"


def headline(comparison: Comparison, rows: Sequence[Row]) -> str:
    """How much the report is about."""
    return f"{count(len(rows), 'trial')} of {count(len(comparison.groups), 'config')}"


def speed_sentence(comparison: Comparison) -> str:
    """Which config was fastest, and how much faster than the first; empty when none was measured."""
    speeds = {group.name: group.figure("samples_per_second").mean for group in comparison.groups}
    known = {name: speed for name, speed in speeds.items() if not math.isnan(speed)}
    if not known:
        return ""
    best, first = max(known, key=known.__getitem__), comparison.groups[0].name
    if len(comparison.groups) == 1:
        return f"{best} processed {known[best]:,.4g} samples/s."
    if best == first:
        return f"{best}, the first, was the fastest: {known[best]:,.4g} samples/s."
    against = f", {known[best] / known[first]:.2f} × the first ({first})" if known.get(first) else ""
    return f"{best} was the fastest: {known[best]:,.4g} samples/s{against}."


def memory_sentence(rows: Sequence[Row]) -> str:
    """How far predictions of memory were off; empty when none can be told."""
    ratios = [row[_MEMORY] for row in rows if row[_MEMORY] is not None]
    if not ratios:
        return "No prediction of memory stands beside a measurement."
    low, high = f"{min(ratios):.2f}", f"{max(ratios):.2f}"
    found = low if low == high else f"{low} to {high}"
    return f"Peak device memory was {found} of what was predicted, in {count(len(ratios), 'trial')}."


def failure_sentence(comparison: Comparison) -> str:
    """How many did not end well; empty when all did."""
    troubles = len(comparison.troubles)
    return f"{count(troubles, 'trial')} did not end well; the notes at the end say why." if troubles else ""
