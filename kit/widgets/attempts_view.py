"""AttemptsView: a batch search, a back-off or a profile while it runs: its table, and one button that stops it.

A view only: what it shows is `_repr_html_` of the series, and the button does what `stop()` does. When the series has
ended the button is gone and the still below is its text.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import ipywidgets

from kit.widgets.live import LiveDisplay, live_box

if TYPE_CHECKING:
    from kit.run.series import Series


class AttemptsView:
    """The widgets of one series."""

    def __init__(self, series: Series) -> None:
        self.series = series
        self._display: LiveDisplay | None = None
        self.button = ipywidgets.Button(
            description="Stop", icon="stop", button_style="warning", layout={"width": "90px"},
            tooltip="end the trial that runs and ask for no other; what was found is kept",
        )  # fmt: skip
        self.button.on_click(lambda _: self._stop())
        self.table = ipywidgets.HTML(layout={"width": "100%"})
        self.ui = live_box([self.button, self.table])
        self._forget = series.on_change(lambda _: self.show())
        self.show()

    def _stop(self) -> None:
        self.button.disabled = True
        self.series.stop()

    def show(self) -> None:
        """Draw what is known now."""
        self.table.value = self.series._repr_html_()
        if self.series.ended:
            self.button.layout.display = "none"
            if self._display is not None:
                self._display.refresh()

    def display(self) -> None:
        self._display = LiveDisplay(self.ui, "Run this cell again for its button.", self._still)

    def _still(self) -> tuple[str, bytes | None]:
        return repr(self.series), None


def display(series: Any) -> None:
    """Show a series in a notebook."""
    AttemptsView(series).display()
