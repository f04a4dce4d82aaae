"""MemoryView: one estimate, shown: the verdict and the peak in words, the breakdown, the GPU models, the timeline.

Everything is swapped in place. While a newer answer is on its way the pictures stay and turn grey, after a fifth of a
second, so that a quick answer never flickers; an error stands above them. The boxes of the GPU models have one size
whatever they say, so that their row never moves.

MemoryAnswers asks memory models in threads, so that a slider never waits, and answers the newest request only: first
the estimate, then, when no newer request has come for a moment, one GPU model after the other. A model answers any
batch size and accumulation at once; any other change of the config, and another device, takes a new model, which means
dry runs. Models are kept, so that going back costs nothing. Errors are shown, not raised.
"""

from __future__ import annotations

import html
import threading
import time
from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import ipywidgets

from kit.charts.memory import VERDICTS, BreakdownChart, breakdown_info, peak_words
from kit.charts.timeline import TimelineChart, timeline_info
from kit.config import Config
from kit.errors import ConfigError, HardwareError, Problem
from kit.memory.batch_model import MOST_SAMPLES
from kit.memory.replay.estimate import MemoryEstimate
from kit.units import format_bytes, format_seconds
from kit.widgets.live import LatestOnlyWorker
from kit.widgets.parts import QUIET, WAITING, WAITING_STYLE, AnswerView, error_words, line

if TYPE_CHECKING:
    from kit.memory.batch_model import MemoryModel

_HEADLINE_HEIGHT = "4.7em"


class MemoryView(AnswerView):
    """The pictures and the words above them; `on_...` show the parts of an answer, from a thread.

    Args:
        show_problems: Puts what is wrong with a field beside its control.
        on_end: Called when a request is answered in full.
        on_change: Called whenever more is known, or nothing is any more.
    """

    def __init__(
        self,
        show_problems: Callable[[Sequence[Problem]], object] = lambda _: None,
        on_end: Callable[[], object] = lambda: None,
        on_change: Callable[[], object] = lambda: None,
    ) -> None:
        super().__init__()
        self.estimate: MemoryEstimate | None = None
        self._first: MemoryEstimate | None = None
        self.failure: Exception | None = None
        """Why there is no estimate of the newest request."""
        self.cards_shown: tuple[CardAnswer, ...] = ()
        self._show_problems, self._problems_shown = show_problems, False
        self._on_end, self._on_change = on_end, on_change
        self._drawing = threading.RLock()
        self._bar, self._timeline, self._recording = BreakdownChart(), TimelineChart(), False
        self.headline, self.bar, self.cards, self.timeline = (line() for _ in range(4))
        style = line(WAITING_STYLE, display="none")
        self.ui = ipywidgets.VBox([self.headline, self.status, self.error, self.bar, self.cards, self.timeline, style])
        self.headline.value = _headline_html(None)
        self.bar.value, self.timeline.value = _picture(self._bar.svg()), _picture(self._timeline.svg())

    # -- the parts of an answer

    def on_recording(self, request: MemoryRequest) -> None:
        """Dry runs begin: the estimate takes seconds."""
        self._recording = True
        self.say(f"recording two steps for {request.device} …")

    def on_estimate(self, request: MemoryRequest, estimate: MemoryEstimate, seconds: float) -> None:  # noqa: ARG002
        """Words and breakdown, and how long the estimate took."""
        with self._drawing:
            self.estimate, self.failure = estimate, None
            self._first = self._first or estimate
            self._bar.show([breakdown_info(estimate, above_timeline=True)])
            self.bar.value = _picture(self._bar.svg())
            self.headline.value = _headline_html(estimate, self._first)
            self.show_error("")
            self.say(f"{'recorded and ' if self._recording else ''}answered in {format_seconds(seconds)}")
            self._recording = False
            self._answered(self.headline, self.bar)
        if self._problems_shown:
            self._tell_problems(())
        self._on_change()

    def on_rest(self, request: MemoryRequest, estimate: MemoryEstimate) -> None:  # noqa: ARG002
        """The timeline, which takes longer to draw."""
        with self._drawing:
            self._timeline.show(timeline_info(estimate))
            self.timeline.value = _picture(self._timeline.svg())
            self._answered(self.timeline)

    def on_cards(self, request: MemoryRequest, cards: tuple[CardAnswer, ...]) -> None:
        """The row of GPU models, as far as it is known."""
        self.cards_shown = cards
        self.cards.value = cards_html(cards, request.device)
        self._answered(self.cards)
        self._on_change()

    def on_end(self, request: MemoryRequest) -> None:  # noqa: ARG002
        """Everything is answered."""
        self._on_end()

    def on_error(self, request: MemoryRequest, error: Exception) -> None:  # noqa: ARG002
        """There is no estimate; the pictures stay grey, as they are not the answer."""
        self.failure, self._recording = error, False
        self.say("not predicted")
        if isinstance(error, ConfigError) and error.problems:
            self._tell_problems(error.problems)
            self.show_error(" ".join(map(str, error.problems)))
        else:
            self.show_error(*error_words(error).partition("\n")[::2])
        self._on_change()

    def _tell_problems(self, problems: Sequence[Problem]) -> None:
        self._problems_shown = bool(problems)
        self._show_problems(problems)

    # -- the state of the pictures

    @property
    def waiting(self) -> bool:
        """Whether any picture is grey."""
        return any(WAITING in part._dom_classes for part in (self.bar, self.timeline))

    @property
    def estimate_waiting(self) -> bool:
        """Whether the estimate is not of the newest request; pictures take longer."""
        return WAITING in self.headline._dom_classes

    @property
    def cards_waiting(self) -> bool:
        """Whether the GPU models are grey: they are answered after the pictures."""
        return WAITING in self.cards._dom_classes

    def wait_for_answer(self) -> None:
        """Turn everything grey: it is not the answer any more."""
        for part in (self.headline, self.bar, self.timeline, self.cards):
            part.add_class(WAITING)
        self._on_change()

    @staticmethod
    def _answered(*parts: ipywidgets.HTML) -> None:
        for part in parts:
            part.remove_class(WAITING)


def headline(estimate: MemoryEstimate, first: MemoryEstimate | None = None) -> tuple[str, str, str]:
    """(verdict, size, peak) in words; the size beside that of the `first` model, where it is another."""
    least = "" if estimate.complete else "at least "
    verdict = estimate.verdict_in_words
    verdict = f"{verdict} on {estimate.device}: {least}{format_bytes(estimate.device_reserved_bytes)} reserved"
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
    reason = next((text for text in estimate.reasons if text.startswith("activations unknown")), "")
    unknown = "" if estimate.complete else f"<div role='alert'>{html.escape(reason)}</div>"
    top = f"<div style='font-size:1.15em'>{mark} <b>{verdict}</b></div>"
    return f"<div style='{style}'>{top}<div>{size}</div><div>{peak}</div>{unknown}</div>"


def _picture(svg: str) -> str:
    """A picture without the line of text that it would stand on."""
    return f"<div style='line-height:0'>{svg}</div>"


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
        parts: list[str] = ["fits if guessed right" if self.estimate.verdict == "fits if" else self.estimate.verdict]
        if self.estimate.verdict == "does not fit":
            lacks_bytes = self.estimate.lacks_bytes
            parts.append(f"{format_bytes(lacks_bytes)} too much" if lacks_bytes else "too fragmented")
        if self.largest_batch is not None:
            least = " or more" if self.largest_batch >= MOST_SAMPLES else ""
            found = f"largest batch {min(self.largest_batch, MOST_SAMPLES)}{least}"
            parts.append(found if self.largest_batch else "not even one sample")
        return ", ".join(parts)


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
    quiet = f"color:{QUIET};font-size:.82em"
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
"""The GPU models are asked when no newer request has come for so long."""


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


class MemoryAnswers:
    """`request` returns at once; the view shows the answer, and nothing of a request that a newer one has replaced."""

    def __init__(self, make_model: Callable[[Config, Device], MemoryModel], view: MemoryView) -> None:
        self._make_model, self._view = make_model, view
        self._models: OrderedDict[tuple[str, Device], MemoryModel] = OrderedDict()
        self._largest: dict[tuple[str, Device, int], int | None] = {}
        self._first, self._rest = LatestOnlyWorker("kit-memory"), LatestOnlyWorker("kit-memory-cards")
        self._mutex = threading.Lock()
        self._newest: MemoryRequest | None = None

    def request(self, request: MemoryRequest) -> None:
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

    def _answer(self, request: MemoryRequest) -> None:
        view, started = self._view, time.monotonic()
        if not self.knows(request, request.device):
            self._tell(view.on_recording, request)
        try:
            estimate = self._estimate(request, request.device)
        except Exception as error:  # a module is the user's own code
            self._tell(view.on_error, request, error)
            if isinstance(error, HardwareError):  # a CPU computes no 16-mixed; the GPU models are asked all the same
                self._rest.submit(lambda: self._answer_cards(request))
            return
        self._tell(view.on_estimate, request, estimate, time.monotonic() - started)
        self._tell(view.on_rest, request, estimate)
        if request is self._newest:
            self._rest.submit(lambda: self._answer_cards(request))

    def _answer_cards(self, request: MemoryRequest) -> None:
        """The GPU models: those that need no dry run together, then the others one by one."""
        time.sleep(_STILL_SECONDS)
        answers = {device: CardAnswer(device) for device in request.cards}
        ready = [device for device in request.cards if self.knows(request, device)]
        for device in (*ready, *(device for device in request.cards if device not in ready)):
            if request is not self._newest:
                return
            if device not in ready:
                self._tell(self._view.on_cards, request, tuple(answers.values()))
            try:
                estimate = self._estimate(request, device)
                answers[device] = CardAnswer(device, estimate, self._largest_batch(request, device))
            except Exception as error:  # one model that cannot be asked leaves the others
                answers[device] = CardAnswer(device, error=f"{type(error).__name__}: {error}".splitlines()[0])
        self._tell(self._view.on_cards, request, tuple(answers.values()))
        self._tell(self._view.on_end, request)

    def _tell(self, show: Callable[..., object], request: MemoryRequest, *parts: object) -> None:
        if request is self._newest:
            show(request, *parts)

    def _estimate(self, request: MemoryRequest, device: Device) -> MemoryEstimate:
        return self._model(request, device).estimate(request.batch_size, accumulate=request.accumulate)

    def _largest_batch(self, request: MemoryRequest, device: Device) -> int | None:
        key = (request.recorded, device, request.accumulate)
        if key not in self._largest:
            self._largest[key] = largest_replayed(self._model(request, device), request.accumulate)
        return self._largest[key]

    def _model(self, request: MemoryRequest, device: Device) -> MemoryModel:
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


def largest_replayed(model: MemoryModel, accumulate: int) -> int | None:
    """The largest batch size that fits, by replays alone and up to `MOST_SAMPLES`.

    None where each size would have to be recorded, or an estimate is incomplete. `kit.memory.largest_batch` confirms
    its answer by a recording; a row of GPU models does not wait for that.
    """
    if model.reason or not model.estimate(1, accumulate=accumulate).complete:
        return None

    def fails(size: int) -> bool:
        return not model.estimate(size, accumulate=accumulate).may_fit

    end = 1
    while end <= MOST_SAMPLES and not fails(end):
        end *= 2
    if end > MOST_SAMPLES:
        return MOST_SAMPLES
    return end // 2 + bisect_left(range(end // 2 + 1, end), True, key=fails)
