"""BuildControl: a button that builds a store and, while it builds, stops; beside it how far it is, and where to look.

`build` returns at once; a thread does the work, and `wait` waits for it. Stopping ends a build between two shards, and
building again resumes where it was. What went wrong is kept in `error` and said in the progress line, not raised.
"""

from __future__ import annotations

import html
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import ipywidgets

from kit.config import Config
from kit.errors import KitError
from kit.units import format_bytes, format_seconds
from kit.widgets.background import Latest
from kit.widgets.trial_view import progress_html

if TYPE_CHECKING:
    from kit.data.dataset import Dataset
    from kit.plan.chunks import ChunkPlan

_UPDATES_PER_SECOND = 5


class _StopBuildError(Exception):
    """Raised out of the progress report: the way to end a build between two shards."""


class BuildControl:
    """Button and progress of one store after another.

    Args:
        on_click: What a click does while nothing is built; it calls `build`.
        on_end: Called when a build has ended, however it did.
    """

    def __init__(self, on_click: Callable[[], object], on_end: Callable[[], object]) -> None:
        self.dataset: Dataset | None = None
        """What the last build gave."""
        self.error: Exception | None = None
        """Why the last build failed; None for one that was stopped."""
        self._on_click, self._on_end = on_click, on_end
        self._building, self._stop = Latest("kit-build"), threading.Event()
        self.progress = ipywidgets.HTML(layout={"margin": "0", "width": "100%"})
        self.link = ipywidgets.HTML(layout={"margin": "0", "flex": "0 0 auto"})
        self.button = ipywidgets.Button(
            tooltip="write the store; stopped, it resumes where it was",
            layout={"width": "90px", "flex": "0 0 auto"},
        )
        self._label(busy=False)
        self.button.on_click(lambda _: self._clicked())
        self.ui = ipywidgets.HBox(
            [self.button, self.progress, self.link], layout={"align_items": "center", "grid_gap": "12px"}
        )

    @property
    def busy(self) -> bool:
        return self._building.busy

    def build(self, config: Config, plan: ChunkPlan | None = None, source: Any = None) -> None:
        """Start building in a thread; returns at once."""
        self._stop.clear()
        self.dataset = self.error = None
        self.say("starting …", None)
        self._label(busy=True)
        self._building.submit(lambda: self._build(config, plan, source))

    def stop(self) -> None:
        """End the build after the shards now being written."""
        if self.busy:
            self._stop.set()
            self.say("stopping after the shards being written …", None)

    def wait(self, timeout: float | None = None) -> bool:
        """Return when nothing is built; False after `timeout` seconds."""
        return self._building.wait(timeout)

    def say(self, words: str, fraction: float | None) -> None:
        self.progress.value = progress_html(words, fraction, "part built")

    def show_link(self, url: str) -> None:
        """Where Dask shows what its workers do; empty when there are none."""
        if url.startswith("http"):
            address = html.escape(url, quote=True)
            link = f"<a href='{address}' target='_blank' style='text-decoration:underline'>Dask dashboard</a>"
            self.link.value = link
        else:
            self.link.value = ""

    def _clicked(self) -> None:
        if self.busy:
            self.stop()
        else:
            self._on_click()

    def _build(self, config: Config, plan: ChunkPlan | None, source: Any) -> None:
        from kit.data.build import build

        began = time.monotonic()
        try:
            self.dataset = build(config, plan, source=source, progress=_Report(self, self._stop))
            self.say(f"built in {format_seconds(round(time.monotonic() - began, 1))}", 1.0)
        except _StopBuildError:
            self.say("stopped; Build resumes where it was", 0.0)
        except Exception as error:  # a source is the user's own code
            self.error = error
            words = str(error) if isinstance(error, KitError) else f"{type(error).__name__}: {error}"
            self.say(f"not built: {words}", 0.0)
        finally:
            self.show_link("")
            self._label(busy=False)
            self._on_end()

    def _label(self, busy: bool) -> None:
        self.button.description, self.button.icon, self.button.button_style = (
            ("Stop", "stop", "warning") if busy else ("Build", "database", "primary")
        )


class _Report:
    """A progress report in words with the time left; raising from it ends the build."""

    def __init__(self, control: BuildControl, stop: threading.Event) -> None:
        self._control, self._stop = control, stop
        self.begin("Building", "shards")

    def begin(self, verb: str, noun: str) -> None:
        """Count anew."""
        self._verb, self._noun = verb.lower(), noun
        self._first: tuple[float, int] | None = None
        self._next = 0.0

    def link(self, url: str) -> None:
        """Where the workers can be watched."""
        self._control.show_link(url)

    def __call__(self, done: int, total: int, number_of_bytes: int) -> None:
        if self._stop.is_set():
            raise _StopBuildError
        now = time.monotonic()
        self._first = self._first or (now, done)
        if now < self._next and done < total:
            return
        self._next = now + 1 / _UPDATES_PER_SECOND
        start, before = self._first
        left = (now - start) * (total - done) / (done - before) if done > before else 0.0
        note = f" · {format_seconds(round(left))} left" if left >= 1 else ""
        words = f"{self._verb}: {done} of {total} {self._noun}, {format_bytes(number_of_bytes)}{note}"
        self._control.say(words, done / max(total, 1))
