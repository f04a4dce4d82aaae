"""NumberField: a number to type, kept between bounds; what was changed about it is said beside it.

ipywidgets' own bounded fields change a number in the page, where nobody hears of it, and read 1e3 as 1. Here the page
hands over what was typed, and `correction` says what became of it.
"""

from __future__ import annotations

import html
from typing import Any

import ipywidgets
import traitlets

_QUIET = "var(--jp-ui-font-color2, #666)"


class NumberField(ipywidgets.FloatText):  # type: ignore[misc]
    """A field whose `value` always lies from `least` to `most`, and is an int where it is `whole`."""

    value = traitlets.Any(0).tag(sync=True)
    correction = traitlets.Unicode("")
    """What was typed and what is used in its place; empty when that is the same."""

    def __init__(self, value: float, *, least: float, most: float, whole: bool = True, **shown: Any) -> None:
        self._least, self._most, self._whole, self._last = least, most, whole, value
        super().__init__(value=value, **shown)

    @traitlets.validate("value")
    def _keep(self, proposal: Any) -> float:
        kept, correction = self._corrected(proposal["value"])
        self._last, self.correction = kept, correction
        return kept

    def _corrected(self, typed: Any) -> tuple[float, str]:
        """What is used for what was typed, and why where it differs."""
        if not isinstance(typed, int | float) or typed != typed:  # nan
            return self._last, f"that is no number between {self._least} and {self._most}; {self._last} stays"
        if typed < self._least:
            return self._least, f"{typed} is below {self._least}, the least; {self._least} is used"
        if typed > self._most:
            return self._most, f"{typed} is above {self._most}, the most; {self._most} is used"
        if self._whole and typed != int(typed):
            return int(typed), f"{typed} is no whole number; {int(typed)} is used"
        return (int(typed), "") if self._whole else (typed, "")


def correction_note(field: NumberField, margin: str) -> Any:
    """A line that says how what was typed into `field` was corrected, and is hidden otherwise."""
    note = ipywidgets.HTML(layout={"margin": "0", "display": "none"})

    def show(_: Any = None) -> None:
        style = f"margin:{margin};font-size:.85em;line-height:1.3;color:{_QUIET}"
        note.value = f"<div role='status' style='{style}'>{html.escape(field.correction)}</div>"
        note.layout.display = None if field.correction else "none"

    field.observe(show, "correction")
    return note
