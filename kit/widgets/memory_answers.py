"""Answers: asks memory models in threads, so that a slider never waits; only the newest request is answered.

A request is answered in parts: the estimate first, then, when no newer request has come for a moment, one GPU model
after the other. As soon as there is a newer request the rest of the older one is left out. A model answers any batch
size and accumulation at once; any other change of the config, and a device with other kernels, takes a new model, which
means dry runs. Models are kept: going back costs nothing. What goes wrong is told, not raised.
"""

from __future__ import annotations

import threading
import time
from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from kit.config import Config
from kit.plan.memory.estimate import MemoryEstimate
from kit.run.memory.largest_batch import MOST_SAMPLES
from kit.widgets.background import Latest
from kit.widgets.memory_cards import CardAnswer, Device

_MODELS_KEPT = 64
_STILL_SECONDS = 0.12
"""How long nothing newer must have been asked before the GPU models are."""


class Model(Protocol):
    """What answers for one config on one device: `kit.run.memory.model.MemoryModel` does."""

    @property
    def reason(self) -> str:
        """Why other batch sizes have to be recorded; empty when they follow from what was."""

    def estimate(self, batch_size: int | None = None, *, accumulate: int | None = None) -> MemoryEstimate:
        """The estimate for so many samples and micro-batches."""

    def knows(self, *, accumulate: int | None = None) -> bool:
        """Whether `estimate` answers without a dry run."""


@dataclass(frozen=True, slots=True, eq=False)
class Request:
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


class Listener(Protocol):
    """Who hears the parts of an answer, from a thread; nobody hears of a request after a newer one."""

    def on_recording(self, request: Request) -> object:
        """Dry runs begin: the estimate takes seconds."""

    def on_estimate(self, request: Request, estimate: MemoryEstimate, seconds: float) -> object:
        """The first part, and how long it took."""

    def on_rest(self, request: Request, estimate: MemoryEstimate) -> object:
        """The same, when no newer request has come meanwhile: time for what takes longer to show."""

    def on_cards(self, request: Request, cards: tuple[CardAnswer, ...]) -> object:
        """What is known of the GPU models so far."""

    def on_error(self, request: Request, error: Exception) -> object:
        """There is no estimate."""

    def on_end(self, request: Request) -> object:
        """Everything is answered."""


class Answers:
    """`ask` returns at once; the listener hears the rest."""

    def __init__(self, make_model: Callable[[Config, Device], Model], listener: Listener) -> None:
        self._make_model, self._listener = make_model, listener
        self._models: OrderedDict[tuple[str, Device], Model] = OrderedDict()
        self._largest: dict[tuple[str, Device, int], int | None] = {}
        self._first, self._rest = Latest("kit-memory"), Latest("kit-memory-cards")
        self._mutex = threading.Lock()
        self._newest: Request | None = None

    def ask(self, request: Request) -> None:
        """Answer this request, and no older one any more."""
        self._newest = request
        self._first.submit(lambda: self._answer(request))

    def knows(self, request: Request, device: Device) -> bool:
        """Whether no dry run is needed for an estimate on this device."""
        model = self._models.get((request.recorded, device))
        return model is not None and model.knows(accumulate=request.accumulate)

    def wait(self, timeout: float | None = None) -> bool:
        """Return when the newest request is answered in full; False after `timeout` seconds."""
        return self._first.wait(timeout) and self._rest.wait(timeout)

    # -- one request

    def _answer(self, request: Request) -> None:
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

    def _judge(self, request: Request) -> None:
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

    def _card(self, request: Request, device: Device) -> CardAnswer:
        try:
            return CardAnswer(device, self._estimate(request, device), self._largest_batch(request, device))
        except Exception as error:  # one model that cannot be asked leaves the others
            return CardAnswer(device, error=f"{type(error).__name__}: {error}".splitlines()[0])

    def _wanted(self, request: Request) -> bool:
        return request is self._newest

    def _tell(self, request: Request, news: Callable[[], object]) -> None:
        if self._wanted(request):
            news()

    def _tell_cards(self, request: Request, answers: dict[Device, CardAnswer]) -> None:
        self._tell(request, lambda: self._listener.on_cards(request, tuple(answers.values())))

    # -- models

    def _estimate(self, request: Request, device: Device) -> MemoryEstimate:
        return self._model(request, device).estimate(request.batch_size, accumulate=request.accumulate)

    def _largest_batch(self, request: Request, device: Device) -> int | None:
        key = (request.recorded, device, request.accumulate)
        if key not in self._largest:
            self._largest[key] = largest_replayed(self._model(request, device), request.accumulate)
        return self._largest[key]

    def _model(self, request: Request, device: Device) -> Model:
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


def largest_replayed(model: Model, accumulate: int) -> int | None:
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
