"""MemoryModel: one configuration recorded twice, so that any batch size is answered at once.

Every block of a step grows in proportion to the batch or not at all, so two recordings foretell the third exactly, and
a slider costs a replay: no process, some tens of milliseconds. They are made at the batch size of the data and at one
more, because kernels are chosen by size: far from there a few blocks may be others. Micro-batches beyond the second of
a step are all alike, and so are the ranks of ddp: these numbers are free too, once two of them were recorded. Where two
recordings do not tell the same story, or another kind of device is asked for, it is recorded anew.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, overload

from kit.config import Config
from kit.plan.memory.cards import THIS_MACHINE, Target
from kit.plan.memory.estimate import MemoryEstimate
from kit.plan.memory.recording import Recording
from kit.plan.memory.scaling import BatchScaling, ScalingError
from kit.run.memory.prediction import TIMEOUT_SECONDS, estimate_here
from kit.run.memory.question import Question, ask, find_target_device
from kit.run.memory.recordings import NEXT, Wanted, as_asked, known, recordings

_SMALLEST_SIZES = (2, 3)
"""Where the data's batch is 1, which broadcasts where others do not."""
Scaling = BatchScaling | Recording | str
"""How a recording follows the batch: in proportion, not at all (activations unknown), or why it is not known."""


@overload
def memory_model(
    config: Config,
    /,
    *,
    device: str | int | Target = THIS_MACHINE,
    world_size: int | None = None,
    timeout_seconds: float = TIMEOUT_SECONDS,
) -> MemoryModel: ...
@overload
def memory_model(
    module: Any,
    data: Any,
    config: Config,
    *,
    device: str | int | Target = THIS_MACHINE,
    world_size: int | None = None,
    timeout_seconds: float = TIMEOUT_SECONDS,
) -> MemoryModel: ...
def memory_model(
    module: Any,
    data: Any = None,
    config: Config | None = None,
    *,
    device: str | int | Target = THIS_MACHINE,
    world_size: int | None = None,
    timeout_seconds: float = TIMEOUT_SECONDS,
) -> MemoryModel:
    """Record a configuration at two batch sizes; takes and raises what `predict_memory` does."""
    if config is None and isinstance(module, Config):
        module, config = None, module
    question, target = ask(module, data, config, device, world_size)
    return MemoryModel(question, target, timeout_seconds)


class MemoryModel:
    """Estimates of one configuration at any batch size.

    Args:
        question: The configuration.
        target: The device.
        timeout_seconds: For each process.
        near: Record at this batch size and one more, instead of that of the data.

    Raises:
        KitError: what `predict_memory` raises.
    """

    def __init__(
        self,
        question: Question,
        target: Target,
        timeout_seconds: float = TIMEOUT_SECONDS,
        *,
        near: int | None = None,
    ) -> None:
        self.question, self.target, self.timeout_seconds = question, target, timeout_seconds
        self._near = near
        self._scalings: dict[str, Scaling] = {}
        self._scaling(question)

    @property
    def config(self) -> Config:
        return self.question.config

    @property
    def reason(self) -> str:
        """Why other batch sizes have to be recorded; empty when they follow from what was."""
        found = self._scaling(self.question)
        if isinstance(found, Recording):
            return str(found.facts["unknown"])
        return found if isinstance(found, str) else ""

    @property
    def batch_size(self) -> int:
        """Samples per micro-batch as the data makes them."""
        if self.question.data.kind == "default":
            return self.config.loader.batch_size
        (recording,) = recordings(Wanted(self.question), self.timeout_seconds)
        return recording.batch_size

    def estimate(
        self,
        batch_size: int | None = None,
        *,
        device: str | int | Target | None = None,
        accumulate: int | None = None,
        world_size: int | None = None,
    ) -> MemoryEstimate:
        """The estimate at another batch size, on another device, with other accumulation or more ranks.

        Raises:
            KitError: what `predict_memory` raises.
        """
        question, target = self._varied(device, accumulate, world_size)
        return estimate_here(question, self._recording(question, batch_size or self.batch_size), target)

    def knows(
        self,
        *,
        device: str | int | Target | None = None,
        accumulate: int | None = None,
        world_size: int | None = None,
    ) -> bool:
        """Whether `estimate` would answer without a process, at any batch size."""
        question, _ = self._varied(device, accumulate, world_size)
        return not isinstance(self._scalings.get(question.key), str | None)

    def _varied(
        self, device: str | int | Target | None, accumulate: int | None, world_size: int | None
    ) -> tuple[Question, Target]:
        if device is None and accumulate is None and world_size is None:
            return self.question, self.target
        config, ranks = self.config, world_size or self.question.world_size
        if accumulate is not None:
            config = config.replace({"levers.accumulate_grad_batches": accumulate})
        target = self.target if device is None else find_target_device(device, config, ranks)
        return self.question.with_config(config, target, ranks), target

    def recorded(self, batch_size: int) -> Recording:
        """A recording really made at this batch size.

        Raises:
            KitError: what `predict_memory` raises.
        """
        (recording,) = recordings(Wanted(self.question, (batch_size,)), self.timeout_seconds)
        return recording

    def scaling(self) -> BatchScaling | None:
        """How blocks grow with the batch; None where `reason` says why that is not known."""
        found = self._scaling(self.question)
        return found if isinstance(found, BatchScaling) else None

    def _recording(self, question: Question, batch_size: int) -> Recording:
        scaling = self._scaling(question)
        if isinstance(scaling, BatchScaling):
            return as_asked(question, scaling.at(batch_size))
        if isinstance(scaling, Recording):
            return as_asked(question, replace(scaling, batch_size=batch_size))
        exact = known(question, batch_size)
        return exact or recordings(Wanted(question, (batch_size,)), self.timeout_seconds)[0]

    def _scaling(self, question: Question) -> Scaling:
        key = question.key
        if key not in self._scalings:
            self._scalings[key] = _scaling_of(*self._pair(question))
        return self._scalings[key]

    @property
    def _sizes(self) -> tuple[int | None, int]:
        return (None, NEXT) if self._near is None else (self._near, self._near + 1)

    def _pair(self, question: Question) -> tuple[Recording, Recording]:
        first, second = recordings(Wanted(question, self._sizes), self.timeout_seconds)
        if first.batch_size == 1 and not first.facts.get("unknown"):
            first, second = recordings(Wanted(question, _SMALLEST_SIZES), self.timeout_seconds)
        return first, second


def _scaling_of(first: Recording, second: Recording) -> Scaling:
    if first.facts.get("unknown"):
        return first
    try:
        return BatchScaling(first, second)
    except ScalingError as error:
        return str(error)
