"""The row of cards: one box per GPU model, with the verdict in a sign, a colour and words, and the largest batch.

Boxes have one size whatever they say, so that the row never moves while answers come in.
"""

from __future__ import annotations

import html
from collections.abc import Sequence
from dataclasses import dataclass

from kit.plan.memory.estimate import MemoryEstimate
from kit.report.memory_look import VERDICTS
from kit.run.memory.largest_batch import MOST_SAMPLES
from kit.units import format_bytes

_QUIET = "var(--jp-ui-font-color2, #666)"
_BOX = (
    "box-sizing:border-box;flex:1 1 114px;min-width:114px;height:6.1em;overflow:hidden;padding:1px 0 1px 8px;"
    "line-height:1.3"
)
_CHOSEN = ";background:var(--jp-rendermime-table-row-hover-background, rgba(86, 180, 233, 0.25))"
_WAITING = "var(--jp-border-color2, #ccc)"


Device = str | int
"""A GPU model, a size as text or in bytes, or "this machine"."""


@dataclass(frozen=True, slots=True)
class CardAnswer:
    """What is known of one device; nothing yet where there is neither an estimate nor an error."""

    device: Device
    estimate: MemoryEstimate | None = None
    largest_batch: int | None = None
    """The largest batch size that fits; 0 when not even one sample does, None while it is not known."""
    error: str = ""

    @property
    def name(self) -> str:
        return format_bytes(self.device) if isinstance(self.device, int) else self.device

    @property
    def words(self) -> str:
        """`does not fit, 3.1 GiB too much`, or `fits, largest batch 52`."""
        if self.error:
            return self.error
        if self.estimate is None:
            return "…"
        return ", ".join(part for part in (self.estimate.verdict, self._excess, self._batch_words) if part)

    @property
    def _excess(self) -> str:
        if self.estimate is None or self.estimate.verdict != "does not fit":
            return ""
        excess_bytes = self.estimate.total_bytes[0] - self.estimate.capacity_bytes
        return f"{format_bytes(excess_bytes)} too much" if excess_bytes > 0 else "too fragmented"

    @property
    def _batch_words(self) -> str:
        if self.largest_batch is None:
            return ""
        if self.largest_batch >= MOST_SAMPLES:
            return f"largest batch {MOST_SAMPLES} or more"
        return f"largest batch {self.largest_batch}" if self.largest_batch else "not even one sample"


def sentence(answers: Sequence[CardAnswer]) -> str:
    """The row as text: `T4-16GB: does not fit, 3.1 GiB too much · A100-40GB: tight`."""
    return " · ".join(f"{answer.name}: {answer.words}" for answer in answers)


def cards_html(answers: Sequence[CardAnswer], chosen: Device | None = None) -> str:
    """The row as a list of boxes; the one that the rest of the panel is about is marked."""
    boxes = "".join(_card_html(answer, answer.device == chosen) for answer in answers)
    style = "display:flex;flex-wrap:wrap;gap:6px;list-style:none;margin:6px 0;padding:0"
    return f"<ul aria-label='GPU models' style='{style}'>{boxes}</ul>"


def _card_html(answer: CardAnswer, chosen: bool) -> str:
    sign, colour = VERDICTS[answer.estimate.verdict] if answer.estimate else ("!" if answer.error else "", _WAITING)
    box = f"{_BOX};border-left:4px solid {colour}{_CHOSEN if chosen else ''}"
    quiet = f"color:{_QUIET};font-size:.82em"
    needed = format_bytes(answer.estimate.capacity_bytes) if answer.estimate else ""
    verdict, *details = answer.words.split(", ") if answer.estimate else (answer.words,)
    current = " aria-current='true'" if chosen else ""
    return (
        f"<li{current} style='{box}' title='{html.escape(answer.words, quote=True)}'>"
        f"<div style='white-space:nowrap;font-size:.9em'><b>{html.escape(answer.name)}</b></div>"
        f"<div style='{quiet}'>{needed or '&nbsp;'}</div>"
        f"<div><span aria-hidden='true'>{sign}</span> {html.escape(verdict)}</div>"
        f"<div style='{quiet}'>{'<br>'.join(map(html.escape, details))}</div></li>"
    )
