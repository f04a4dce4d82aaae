"""EpochPasses: what every loader of kit's keeps of its passes: which epoch, how far, and how to go on there.

`state_dict` says how far the current pass has come; a loader that takes it goes on with exactly the batches not yet
handed over, and with another number of ranks or batch size where the plan allows it.

Lightning leaves such a loader as it is, since it is no torch DataLoader: every rank reads its own part of the plan
already, and no sampler is put in its place.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Generic, Protocol, Self, TypeVar

Batch = TypeVar("Batch")


class Plan(Protocol):
    """The batches of every epoch; equal on every rank."""

    @property
    def seed(self) -> int: ...

    @property
    def batches_per_epoch(self) -> int: ...

    def identity(self) -> dict[str, Any]:
        """What decides the batches and their order, in plain values."""

    def step_after(self, other: Mapping[str, Any], step: int) -> int:
        """The step that follows the first `step` global batches of the plan of that identity."""


class EpochPasses(Generic[Batch]):
    """The batches of one rank; each pass over it is the next epoch.

    Args:
        plan: Which batches there are.
        rank: This process's rank in the plan.
    """

    def __init__(self, plan: Plan, rank: int) -> None:
        self.rank = rank
        self.epoch = 0
        """The epoch that the next pass reads."""
        self._plan = plan
        self._first_step = 0
        """Where the next pass begins: past what was handed over before a resume."""
        self._handed = (0, 0)
        """The epoch of the pass under way, or else of the next one, and its batches handed over."""

    def _batches(self, epoch: int, first_step: int) -> Iterator[Batch]:
        """The batches of an epoch, from that step on."""
        raise NotImplementedError

    def close(self) -> None:
        """End the processes and threads of a pass; the next one starts them again."""
        raise NotImplementedError

    def __len__(self) -> int:
        """Batches in an epoch."""
        return self._plan.batches_per_epoch

    def __iter__(self) -> Iterator[Batch]:
        # The body runs at the first `next`: making an iterator, as Lightning does to check for one, starts no epoch.
        epoch, self.epoch = self.epoch, self.epoch + 1
        first, self._first_step = self._first_step, 0
        self._handed = (epoch, first)
        for batch in self._batches(epoch, first):
            if self._handed[0] == epoch:
                self._handed = (epoch, self._handed[1] + 1)
            yield batch
        if self._handed[0] == epoch:
            self._handed = (epoch + 1, 0)

    def set_epoch(self, epoch: int) -> None:
        """Make the next pass that of `epoch`, or the rest of it after a `load_state_dict` in its middle."""
        if epoch != self.epoch:
            self._first_step = 0
        self.epoch = epoch
        self._handed = (epoch, self._first_step)

    def state_dict(self) -> dict[str, Any]:
        """How far the pass under way has come, in plain numbers, the same on every rank."""
        epoch, step = self._handed
        return {"epoch": epoch, "step": step, "plan": self._plan.identity()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Make the next pass go on where that state was taken.

        Raises:
            ConfigError: when the samples or their order are not those of the state, or what they are read from has
                changed since, each reason named; another number of ranks or batch size is accepted where the order
                allows it and it meets the state's end of a batch.
        """
        step = self._plan.step_after(state["plan"], state["step"])
        self.epoch, self._first_step = state["epoch"], step
        self._handed = (self.epoch, step)

    @property
    def sampler(self) -> Self:
        """Where Lightning looks for `set_epoch` before each epoch, also after a resume."""
        return self
