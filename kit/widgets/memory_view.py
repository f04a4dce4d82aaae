"""MemoryView: one estimate, shown: the verdict and the peak in words, the breakdown, the cards, the timeline.

Everything is swapped in place. While a newer answer is on its way the pictures stay and turn grey, after a fifth of a
second, so that a quick answer never flickers; what was wrong stands above them. Nothing here runs or predicts anything.
"""

from __future__ import annotations

import html
import threading
from collections.abc import Callable, Sequence

import ipywidgets

from kit.errors import ConfigError, KitError, Problem
from kit.plan.memory.estimate import MemoryEstimate
from kit.report.memory_breakdown import BreakdownChart, breakdown_info
from kit.report.memory_look import VERDICTS, peak_words
from kit.report.memory_timeline import TimelineChart, timeline_info
from kit.units import format_bytes, format_seconds
from kit.widgets.memory_answers import Request
from kit.widgets.memory_cards import CardAnswer, cards_html
from kit.widgets.trial_view import error_html

_WAITING = "kit-waiting"
_STYLE = (
    f"<style>.{_WAITING} {{ opacity: .35; filter: grayscale(1); transition: opacity .15s linear .2s, "
    "filter .15s linear .2s }</style>"
)
_QUIET = "var(--jp-ui-font-color2, #666)"
_HEADLINE_HEIGHT = "4.7em"


class MemoryView:
    """The pictures and the words above them. It hears the parts of an answer (`on_...`) and shows them.

    Args:
        show_problems: Puts what is wrong with a field beside its control.
        on_end: Called when everything asked is answered.
    """

    def __init__(
        self,
        show_problems: Callable[[Sequence[Problem]], object] = lambda _: None,
        on_end: Callable[[], object] = lambda: None,
    ) -> None:
        self.estimate: MemoryEstimate | None = None
        self._first: MemoryEstimate | None = None
        self.failure: Exception | None = None
        """Why there is no estimate of what was asked last."""
        self.cards_shown: tuple[CardAnswer, ...] = ()
        self._show_problems, self._problems_shown, self._on_end = show_problems, False, on_end
        self._drawing = threading.RLock()
        self._bar, self._timeline, self._recording = BreakdownChart(), TimelineChart(), False
        self.status = _line()
        self.headline = _line()
        self.bar, self.cards, self.timeline = _line(), _line(), _line()
        self.error = ipywidgets.HTML(layout={"margin": "0", "display": "none"})
        style = ipywidgets.HTML(_STYLE, layout={"display": "none"})
        self.ui = ipywidgets.VBox([self.headline, self.status, self.error, self.bar, self.cards, self.timeline, style])
        self.headline.value = _headline_html(None)
        self.bar.value, self.timeline.value = _picture(self._bar.svg()), _picture(self._timeline.svg())

    # -- what it hears

    def on_recording(self, request: Request) -> None:
        """Dry runs begin."""
        self._recording = True
        self.say(f"recording two steps for {request.device} …")

    def on_estimate(self, request: Request, estimate: MemoryEstimate, seconds: float) -> None:  # noqa: ARG002
        """Words and breakdown."""
        with self._drawing:
            self.estimate, self.failure = estimate, None
            self._first = self._first or estimate
            self._bar.show([breakdown_info(estimate, above_timeline=True)])
            self.bar.value = _picture(self._bar.svg())
            self.headline.value = _headline_html(estimate, self._first)
            self.show_error("")
            if self._problems_shown:
                self._tell_problems(())
            self.say(f"{'recorded and ' if self._recording else ''}answered in {format_seconds(seconds)}")
            self._recording = False
            self._answered(self.headline, self.bar)

    def on_rest(self, request: Request, estimate: MemoryEstimate) -> None:  # noqa: ARG002
        """The timeline."""
        with self._drawing:
            self._timeline.show(timeline_info(estimate))
            self.timeline.value = _picture(self._timeline.svg())
            self._answered(self.timeline)

    def on_cards(self, request: Request, cards: tuple[CardAnswer, ...]) -> None:
        """The row of cards, as far as it is known."""
        self.cards_shown = cards
        self.cards.value = cards_html(cards, request.device)
        self._answered(self.cards)

    def on_end(self, request: Request) -> None:  # noqa: ARG002
        """Everything is answered."""
        self._on_end()

    def on_error(self, request: Request, error: Exception) -> None:  # noqa: ARG002
        """What went wrong; the pictures stay grey, as they are not the answer."""
        self.failure, self._recording = error, False
        self.say("not predicted")
        if isinstance(error, ConfigError) and error.problems:
            self._tell_problems(error.problems)
            self.show_error(" ".join(str(problem) for problem in error.problems))
        else:
            message = str(error) if isinstance(error, KitError) else f"{type(error).__name__}: {error}"
            self.show_error(*message.partition("\n")[::2])

    def _tell_problems(self, problems: Sequence[Problem]) -> None:
        self._problems_shown = bool(problems)
        self._show_problems(problems)

    # -- what it shows

    @property
    def waiting(self) -> bool:
        """Whether any picture is grey."""
        return any(_WAITING in part._dom_classes for part in (self.bar, self.timeline))

    @property
    def cards_waiting(self) -> bool:
        """Whether the cards are grey: they are answered after the pictures."""
        return _WAITING in self.cards._dom_classes

    def wait_for_answer(self) -> None:
        """Turn everything grey: it is not the answer any more."""
        for part in (self.headline, self.bar, self.timeline, self.cards):
            if _WAITING not in part._dom_classes:
                part.add_class(_WAITING)

    @staticmethod
    def _answered(*parts: ipywidgets.HTML) -> None:
        for part in parts:
            if _WAITING in part._dom_classes:
                part.remove_class(_WAITING)

    def say(self, words: str) -> None:
        """One line on what goes on."""
        style = f"line-height:1.4;color:{_QUIET}"
        self.status.value = f"<div role='status' aria-live='polite' style='{style}'>{html.escape(words)}</div>"

    def show_error(self, message: str, details: str = "") -> None:
        """Say what went wrong; an empty message clears the box."""
        self.error.value = error_html(message, details, []) if message else ""
        self.error.layout.display = None if message else "none"


def headline(estimate: MemoryEstimate, first: MemoryEstimate | None = None) -> tuple[str, str, str]:
    """(verdict, size, peak) in words; the size beside that of the `first` model, where it is another."""
    least = "" if estimate.complete else "at least "
    verdict = f"{estimate.verdict} on {estimate.device}: {least}{format_bytes(estimate.device_reserved_bytes)} reserved"
    size = f"{estimate.parameters:,} parameters"
    if first is not None and first.parameters not in (0, estimate.parameters):
        size += f", {estimate.parameters / first.parameters:.3g} times the {first.parameters:,} at first"
    return f"{verdict} of {format_bytes(estimate.capacity_bytes)}", size, f"peak: {peak_words(estimate)}"


def _headline_html(estimate: MemoryEstimate | None, first: MemoryEstimate | None = None) -> str:
    style = f"line-height:1.5;min-height:{_HEADLINE_HEIGHT}"
    if estimate is None:
        return f"<div style='{style}'></div>"
    sign, colour = VERDICTS[estimate.verdict]
    verdict, size, peak = map(html.escape, headline(estimate, first))
    mark = f"<span aria-hidden='true' style='color:{colour};font-weight:700'>{sign}</span>"
    unknown = "" if estimate.complete else f"<div role='alert'>{html.escape(_unknown_words(estimate))}</div>"
    top = f"<div style='font-size:1.15em'>{mark} <b>{verdict}</b></div>"
    return f"<div style='{style}'>{top}<div>{size}</div><div>{peak}</div>{unknown}</div>"


def _unknown_words(estimate: MemoryEstimate) -> str:
    """Why there are no activations: the reason that the estimate gives, naming the operator."""
    return next((reason for reason in estimate.reasons if reason.startswith("activations unknown")), "")


def _picture(svg: str) -> str:
    """A picture without the line of text that it would stand on."""
    return f"<div style='line-height:0'>{svg}</div>"


def _line() -> ipywidgets.HTML:
    return ipywidgets.HTML(layout={"margin": "0", "width": "100%"})
