"""MemoryView: one estimate, shown: the verdict and the peak in words, the breakdown, the cards, the timeline.

Everything is swapped in place. While a newer answer is on its way the pictures stay and turn grey, after a fifth of a
second, so that a quick answer never flickers; what was wrong stands above them. Nothing here runs or predicts anything.

The row of cards: one box per GPU model, with the verdict in a sign, a colour and words, and the largest batch.

Boxes have one size whatever they say, so that the row never moves while answers come in.

MemoryAnswers: asks memory models in threads, so that a slider never waits; only the newest request is answered.

A request is answered in parts: the estimate first, then, when no newer request has come for a moment, one GPU model
after the other. As soon as there is a newer request the rest of the older one is left out. A model answers any batch
size and accumulation at once; any other change of the config, and a device with other kernels, takes a new model, which
means dry runs. Models are kept: going back costs nothing. What goes wrong is told, not raised.
"""

from __future__ import annotations

import html
import threading
import time
from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import ipywidgets

from kit.charts.memory import VERDICTS, BreakdownChart, breakdown_info, peak_words
from kit.charts.timeline import TimelineChart, timeline_info
from kit.config import Config
from kit.errors import ConfigError, KitError, Problem
from kit.memory.batch_model import MOST_SAMPLES
from kit.memory.replay.estimate import MemoryEstimate
from kit.units import format_bytes, format_seconds
from kit.widgets.live import Latest
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

    def on_recording(self, request: MemoryRequest) -> None:
        """Dry runs begin."""
        self._recording = True
        self.say(f"recording two steps for {request.device} …")

    def on_estimate(self, request: MemoryRequest, estimate: MemoryEstimate, seconds: float) -> None:  # noqa: ARG002
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

    def on_rest(self, request: MemoryRequest, estimate: MemoryEstimate) -> None:  # noqa: ARG002
        """The timeline."""
        with self._drawing:
            self._timeline.show(timeline_info(estimate))
            self.timeline.value = _picture(self._timeline.svg())
            self._answered(self.timeline)

    def on_cards(self, request: MemoryRequest, cards: tuple[CardAnswer, ...]) -> None:
        """The row of cards, as far as it is known."""
        self.cards_shown = cards
        self.cards.value = cards_html(cards, request.device)
        self._answered(self.cards)

    def on_end(self, request: MemoryRequest) -> None:  # noqa: ARG002
        """Everything is answered."""
        self._on_end()

    def on_error(self, request: MemoryRequest, error: Exception) -> None:  # noqa: ARG002
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


_BOX = (
    "box-sizing:border-box;flex:1 1 114px;min-width:114px;height:6.1em;overflow:hidden;padding:1px 0 1px 8px;"
    "line-height:1.3"
)
_CHOSEN = ";background:var(--jp-rendermime-table-row-hover-background, rgba(86, 180, 233, 0.25))"
_WAITING_COLOR = "var(--jp-border-color2, #ccc)"


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
    sign, colour = (
        VERDICTS[answer.estimate.verdict] if answer.estimate else ("!" if answer.error else "", _WAITING_COLOR)
    )
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


_MODELS_KEPT = 64
_STILL_SECONDS = 0.12
"""How long nothing newer must have been asked before the GPU models are."""


class AnsweringModel(Protocol):
    """What answers for one config on one device: `kit.memory.batch_model.MemoryModel` does."""

    @property
    def reason(self) -> str:
        """Why other batch sizes have to be recorded; empty when they follow from what was."""

    def estimate(self, batch_size: int | None = None, *, accumulate: int | None = None) -> MemoryEstimate:
        """The estimate for so many samples and micro-batches."""

    def knows(self, *, accumulate: int | None = None) -> bool:
        """Whether `estimate` answers without a dry run."""


@dataclass(frozen=True, slots=True, eq=False)
class MemoryRequest:
    """What is to be known: one config on one device, and on each of these GPU models."""

    config: Config
    device: Device
    cards: tuple[Device, ...] = ()

    @property
    def batch_size(self) -> int:
        return self.config.loader.batch_size

    @property
    def accumulate(self) -> int:
        return self.config.levers.accumulate_grad_batches

    @property
    def recorded(self) -> str:
        """What of the config a model is made from: all that it does not answer without recording anew."""
        return self.config.replace({"loader.batch_size": 1, "levers.accumulate_grad_batches": 1}).fingerprint


class AnswerListener(Protocol):
    """Who hears the parts of an answer, from a thread; nobody hears of a request after a newer one."""

    def on_recording(self, request: MemoryRequest) -> object:
        """Dry runs begin: the estimate takes seconds."""

    def on_estimate(self, request: MemoryRequest, estimate: MemoryEstimate, seconds: float) -> object:
        """The first part, and how long it took."""

    def on_rest(self, request: MemoryRequest, estimate: MemoryEstimate) -> object:
        """The same, when no newer request has come meanwhile: time for what takes longer to show."""

    def on_cards(self, request: MemoryRequest, cards: tuple[CardAnswer, ...]) -> object:
        """What is known of the GPU models so far."""

    def on_error(self, request: MemoryRequest, error: Exception) -> object:
        """There is no estimate."""

    def on_end(self, request: MemoryRequest) -> object:
        """Everything is answered."""


class MemoryAnswers:
    """`ask` returns at once; the listener hears the rest."""

    def __init__(self, make_model: Callable[[Config, Device], AnsweringModel], listener: AnswerListener) -> None:
        self._make_model, self._listener = make_model, listener
        self._models: OrderedDict[tuple[str, Device], AnsweringModel] = OrderedDict()
        self._largest: dict[tuple[str, Device, int], int | None] = {}
        self._first, self._rest = Latest("kit-memory"), Latest("kit-memory-cards")
        self._mutex = threading.Lock()
        self._newest: MemoryRequest | None = None

    def ask(self, request: MemoryRequest) -> None:
        """Answer this request, and no older one any more."""
        self._newest = request
        self._first.submit(lambda: self._answer(request))

    def knows(self, request: MemoryRequest, device: Device) -> bool:
        """Whether no dry run is needed for an estimate on this device."""
        model = self._models.get((request.recorded, device))
        return model is not None and model.knows(accumulate=request.accumulate)

    def wait(self, timeout: float | None = None) -> bool:
        """Return when the newest request is answered in full; False after `timeout` seconds."""
        return self._first.wait(timeout) and self._rest.wait(timeout)

    # -- one request

    def _answer(self, request: MemoryRequest) -> None:
        if not self.knows(request, request.device):
            self._tell(request, lambda: self._listener.on_recording(request))
        started = time.monotonic()
        try:
            estimate = self._estimate(request, request.device)
        except Exception as error:  # a module is the user's own code
            failure = error
            self._tell(request, lambda: self._listener.on_error(request, failure))
            return
        seconds = time.monotonic() - started
        self._tell(request, lambda: self._listener.on_estimate(request, estimate, seconds))
        self._tell(request, lambda: self._listener.on_rest(request, estimate))
        if self._wanted(request):
            self._rest.submit(lambda: self._judge(request))

    def _judge(self, request: MemoryRequest) -> None:
        """Ask the GPU models: those that answer at once together, then the others one by one."""
        time.sleep(_STILL_SECONDS)
        answers = {device: CardAnswer(device) for device in request.cards}
        ready = [device for device in request.cards if self.knows(request, device)]
        for device in (*ready, *(device for device in request.cards if device not in ready)):
            if not self._wanted(request):
                return
            if device not in ready:
                self._tell_cards(request, answers)
            answers[device] = self._card(request, device)
        self._tell_cards(request, answers)
        self._tell(request, lambda: self._listener.on_end(request))

    def _card(self, request: MemoryRequest, device: Device) -> CardAnswer:
        try:
            return CardAnswer(device, self._estimate(request, device), self._largest_batch(request, device))
        except Exception as error:  # one model that cannot be asked leaves the others
            return CardAnswer(device, error=f"{type(error).__name__}: {error}".splitlines()[0])

    def _wanted(self, request: MemoryRequest) -> bool:
        return request is self._newest

    def _tell(self, request: MemoryRequest, news: Callable[[], object]) -> None:
        if self._wanted(request):
            news()

    def _tell_cards(self, request: MemoryRequest, answers: dict[Device, CardAnswer]) -> None:
        self._tell(request, lambda: self._listener.on_cards(request, tuple(answers.values())))

    # -- models

    def _estimate(self, request: MemoryRequest, device: Device) -> MemoryEstimate:
        return self._model(request, device).estimate(request.batch_size, accumulate=request.accumulate)

    def _largest_batch(self, request: MemoryRequest, device: Device) -> int | None:
        key = (request.recorded, device, request.accumulate)
        if key not in self._largest:
            self._largest[key] = largest_replayed(self._model(request, device), request.accumulate)
        return self._largest[key]

    def _model(self, request: MemoryRequest, device: Device) -> AnsweringModel:
        key = (request.recorded, device)
        with self._mutex:
            known = self._models.get(key)
        model = known or self._make_model(request.config, device)
        with self._mutex:
            self._models[key] = model
            self._models.move_to_end(key)
            while len(self._models) > _MODELS_KEPT:
                self._models.popitem(last=False)
        return model


def largest_replayed(model: AnsweringModel, accumulate: int) -> int | None:
    """The largest batch size that fits, by replays alone; None where each would have to be recorded, or none can fit.

    No more than `MOST_SAMPLES` are tried.

    `kit.largest_batch` confirms its answer by a recording; a row of cards does not wait for that.
    """
    if model.reason or not model.estimate(1, accumulate=accumulate).complete:
        return None
    fails = 1
    while fails <= MOST_SAMPLES and model.estimate(fails, accumulate=accumulate).fits:
        fails *= 2
    if fails > MOST_SAMPLES:
        return MOST_SAMPLES
    between = range(fails // 2 + 1, fails)
    return fails // 2 + bisect_left(
        between, True, key=lambda size: not model.estimate(size, accumulate=accumulate).fits
    )
