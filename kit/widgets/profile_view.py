"""ProfileView: one button that profiles the config of a panel, and what the profilers said, under it.

A click starts the passes and turns the button into Stop; everything runs beside the kernel. When they have ended the
chart, the tables and a button stand there that opens the trace in place. What it does is `kit.profile(config)`.
"""

from __future__ import annotations

import html
import threading
from collections.abc import Callable

import ipywidgets

from kit.errors import KitError
from kit.report import figure as look
from kit.report.profile import Profile
from kit.report.profile_chart import profile_figure


class ProfileView:
    """The widgets of a profile; `start` makes one."""

    def __init__(self, start: Callable[[], Profile]) -> None:
        self._start = start
        self.profile: Profile | None = None
        """The last one started here."""
        self._shown: Profile | None = None
        self._mutex = threading.RLock()
        self.button = ipywidgets.Button(layout={"width": "110px", "flex": "0 0 auto"})
        self.open_button = ipywidgets.Button(
            description="Open trace", icon="search", tooltip="show the timeline here; it needs no network",
            layout={"width": "120px", "display": "none"},
        )  # fmt: skip
        self.words = ipywidgets.HTML()
        self.chart = ipywidgets.HTML(layout={"width": "100%", "display": "none"})
        self.tables = ipywidgets.HTML(layout={"width": "100%", "display": "none"})
        self.trace = ipywidgets.HTML(layout={"width": "100%", "display": "none"})
        self.button.on_click(lambda _: self._clicked())
        self.open_button.on_click(lambda _: self.open_trace())
        self._label(busy=False)
        line = ipywidgets.HBox([self.button, self.open_button, self.words], layout={"align_items": "center"})
        self.ui = ipywidgets.VBox([line, self.chart, self.trace, self.tables])

    @property
    def busy(self) -> bool:
        return self.profile is not None and not self.profile.ended

    def run(self) -> Profile:
        """Start the passes and return at once; the profile that runs, when there is one.

        Raises:
            KitError: as `kit.profile` does; the reason stands beside the button too.
        """
        with self._mutex:
            if self.profile is not None and not self.profile.ended:
                return self.profile
            self._label(busy=True)
            self._say("checking …")
            try:
                self.profile = self._start()
            except Exception as error:
                self._label(busy=False)
                self._say(str(error))
                raise
            self.profile.on_change(self._on_profile)
            return self.profile

    def open_trace(self) -> None:
        """Show the timeline of the first rank under the button, or put it away."""
        if self.profile is None or self.trace.layout.display == "":
            self._show(self.trace, "")
            return
        try:
            self._show(self.trace, self.profile.viewer()._repr_html_())
        except KitError as error:
            self._say(str(error))

    def _clicked(self) -> None:
        if self.profile is not None and not self.profile.ended:
            self._say("stopping …")
            self.profile.stop()
            return
        threading.Thread(target=self._try, name="kit-profile", daemon=True).start()

    def _try(self) -> None:
        try:
            self.run()
        except KitError:
            return  # it stands beside the button

    def _on_profile(self, profile: Profile) -> None:
        if profile.ended:
            self.settle()
        else:
            self._say(f"{profile!r} …")

    def settle(self) -> None:
        """Show what an ended profile found, once."""
        with self._mutex:
            profile = self.profile
            if profile is None or not profile.ended or profile is self._shown:
                return
            self._shown = profile
            self._label(busy=False)
            self._say(str(profile.error or profile.state))
            if profile.tables:
                self._draw(profile)

    def _draw(self, profile: Profile) -> None:
        self._show(self.chart, look.svg(profile_figure(profile), " ".join(profile.sentences)))
        self._show(self.tables, profile._repr_html_())
        self._show(self.trace, "")
        self.open_button.layout.display = "" if profile.trace is not None else "none"

    def _show(self, place: ipywidgets.HTML, text: str) -> None:
        place.value = text
        place.layout.display = "" if text else "none"

    def _say(self, text: str) -> None:
        self.words.value = f"<span style='margin-left:8px'>{html.escape(text)}</span>"

    def _label(self, busy: bool) -> None:
        self.button.description, self.button.icon = ("Stop", "stop") if busy else ("Profile", "bar-chart")
        self.button.tooltip = (
            "end the pass that runs; what the ones before it found is kept"
            if busy
            else "run this config three times, under the simple, the advanced and the pytorch profiler"
        )
