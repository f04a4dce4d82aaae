"""A slider over many sizes: every whole number while they are small, then eight to each doubling, or marks of your own.

It drives a number field and follows it: the field is exact, the slider is quick. A number that the slider's marks leave
out is added to them when it is needed.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import ipywidgets

PER_DOUBLING = 8


def marks(largest: int) -> list[int]:
    """1, 2, ... 8, 9, ... 16, 18, ... 32, 36, ... up to `largest`, which is always among them.

    Raises:
        ValueError: when `largest` is below 1.
    """
    if largest < 1:
        raise ValueError(f"the largest mark is {largest}, but must be at least 1")
    found, step = [1], 1
    while found[-1] < largest:
        if found[-1] >= 2 * PER_DOUBLING * step:
            step *= 2
        found.append(min(found[-1] + step, largest))
    return found


class StepsSlider:
    """A slider (`widget`) tied to a number field both ways, over these marks."""

    def __init__(self, field: Any, over: Sequence[float]) -> None:
        value = field.value
        self._field, self._marks, self._following = field, tuple(over), False
        self.widget = ipywidgets.SelectionSlider(
            options=self._options(value), value=value, readout=False, tooltip=field.tooltip,
            layout={"flex": "1 1 120px", "min_width": "100px", "margin": "1px 0"},
        )  # fmt: skip
        field.observe(lambda change: self._follow(change["new"]), "value")
        self.widget.observe(lambda change: self._lead(change["new"]), "value")

    def _options(self, value: float) -> list[float]:
        return sorted({*self._marks, value})

    def _follow(self, value: float) -> None:
        self._following = True  # new options move the slider for a moment
        try:
            if value not in self.widget.options:
                self.widget.options = self._options(value)
            self.widget.value = value
        finally:
            self._following = False

    def _lead(self, value: float | None) -> None:
        if value is not None and not self._following:
            self._field.value = value
