"""Which entities an epoch has, in which order, and which batch of which rank each belongs to. Pure numpy, no table.

Only the number of entities of each query chunk is kept. The order of an epoch goes through the query chunks one after
another, in an order drawn from (seed, epoch), and through the entities of each in an order drawn from (seed, epoch,
query chunk). A step's global batch is a run of consecutive places in it, cut into one run per rank. So every entity
comes exactly once per epoch over all ranks, every rank takes the same number of steps and none an empty batch, and
1 rank × 2B sees the same global batches as 2 ranks × B. A remainder smaller than the world size joins the last batch.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kit.errors import ConfigError, Problem

Numbers = NDArray[np.int64]
_PATHS = {"seed": "training.seed", "shuffle": "loader.shuffle", "drop_last": "loader.drop_last"}
_CHANGES = {
    "table": "is another table",
    "state": "has changed",
    "schema": "has other columns",
    "query": "is asked for other rows or columns",
}
"""What is read, and what it means when it differs."""


@dataclass(frozen=True, kw_only=True)
class EventPlan:
    """The entities of every epoch and their batches; equal on every rank."""

    entities: tuple[int, ...]
    """Of each query chunk."""
    table: Mapping[str, str]
    """What is read: `name`, and whatever tells its rows from others (see `_CHANGES`)."""
    batch_size: int
    """Entities per batch on each rank."""
    world_size: int
    seed: int
    shuffle: bool
    drop_last: bool

    def __post_init__(self) -> None:
        if not self.batches_per_epoch:
            name = self.table.get("name", "the table")
            least = self.global_batch_size if self.drop_last else self.world_size
            message = f"{name} has {self.total} entities, and a step needs at least {least}"
            way_out = (
                "use a smaller batch, fewer ranks, or keep the last batch" if self.drop_last else "use fewer ranks"
            )
            raise ConfigError([Problem("loader.batch_size", f"{message}; {way_out}")])

    @property
    def total(self) -> int:
        return sum(self.entities)

    @property
    def global_batch_size(self) -> int:
        return self.batch_size * self.world_size

    @cached_property
    def batches_per_epoch(self) -> int:
        """Steps of an epoch, the same on every rank."""
        full, rest = divmod(self.total, self.global_batch_size)
        return full + (rest >= self.world_size and not self.drop_last)

    def run(self, step: int, rank: int) -> range:
        """The places of the epoch that `rank` takes at `step`."""
        first = step * self.global_batch_size
        last = step == self.batches_per_epoch - 1 and not self.drop_last
        end = self.total if last else first + self.global_batch_size
        cuts = [first + (end - first) * part // self.world_size for part in (rank, rank + 1)]
        return range(*cuts)

    def chunk_order(self, epoch: int) -> Numbers:
        """The query chunks in the order they are read."""
        count = len(self.entities)
        return _draw(self.seed, epoch, 0).permutation(count) if self.shuffle else np.arange(count)

    def entity_order(self, epoch: int, chunk: int) -> Numbers:
        """The entities of a query chunk, by their number among its values in order, in the order they are served."""
        count = self.entities[chunk]
        return _draw(self.seed, epoch, chunk + 1).permutation(count) if self.shuffle else np.arange(count)

    def shares(self, epoch: int, first_step: int, rank: int) -> Iterator[tuple[int, Numbers]]:
        """(query chunk, entities in it) that `rank` is served from `first_step` on; none that it needs nothing of."""
        begin = 0
        for chunk in self.chunk_order(epoch).tolist():
            end = begin + self.entities[chunk]
            places = [*self._places(first_step, rank, begin, end)]
            if places:
                yield chunk, self.entity_order(epoch, chunk)[np.concatenate(places) - begin]
            begin = end

    def _places(self, first_step: int, rank: int, begin: int, end: int) -> Iterator[Numbers]:
        """The parts of this rank's runs that lie in [begin, end)."""
        last = self.batches_per_epoch - 1
        for step in range(max(first_step, min(last, begin // self.global_batch_size)), last + 1):
            run = self.run(step, rank)
            if run.start >= end:
                return
            inside = range(max(run.start, begin), min(run.stop, end))
            if inside:
                yield np.arange(inside.start, inside.stop)

    # -- going on

    def identity(self) -> dict[str, Any]:
        """What decides the entities and their order, in plain values, for `step_after`."""
        return {
            "entities": [*self.entities], "table": dict(self.table), "batch_size": self.batch_size,
            "world_size": self.world_size, "seed": self.seed, "shuffle": self.shuffle, "drop_last": self.drop_last,
        }  # fmt: skip

    def step_after(self, other: Mapping[str, Any], step: int) -> int:
        """The step that follows the first `step` global batches of another plan, of which `other` is the identity.

        Raises:
            ConfigError: when the other plan has other entities or another order, each reason named, or its batches end
                inside one of ours.
        """
        problems = [*self._differences(other)]
        if problems:
            raise ConfigError(problems)
        theirs = replace(self, batch_size=int(other["batch_size"]), world_size=int(other["world_size"]))
        if theirs == self:
            return step
        seen = self.total if step >= theirs.batches_per_epoch else step * theirs.global_batch_size
        if seen % self.global_batch_size and seen < self.total:
            raise ConfigError([Problem("loader.batch_size", self._inside(other, seen))])
        return min(seen // self.global_batch_size, self.batches_per_epoch)

    def _differences(self, other: Mapping[str, Any]) -> Iterator[Problem]:
        theirs, name = other["table"], self.table.get("name", "the table")
        reasons = [words for key, words in _CHANGES.items() if theirs.get(key) != self.table.get(key)]
        if reasons:
            seen = "so which of its entities were seen already cannot be told"
            way_out = "begin the next epoch with set_epoch, or the run anew"
            yield Problem("data", f"{name} {' and '.join(reasons)} since the state was taken, {seen}; {way_out}")
        elif len(other["entities"]) != len(self.entities):
            asked = f"{len(self.entities)} are asked for"
            message = f"the state was taken with {len(other['entities'])} query chunks, {asked}: another order"
            yield Problem("queries.load_query_chunks", f"{message}; use {len(other['entities'])} until the epoch ends")
        elif other["entities"] != [*self.entities]:
            yield Problem("data", f"the entities of {name} are divided in another way than when the state was taken")
        for key, path in _PATHS.items():
            mine = getattr(self, key)
            if other[key] != mine:
                yield Problem(path, f"was {other[key]} when the state was taken and is {mine}; use {other[key]}")

    def _inside(self, other: Mapping[str, Any], seen: int) -> str:
        theirs = f"{other['batch_size']} × {other['world_size']}"
        mine = f"{self.batch_size} × {self.world_size}"
        return (
            f"after {seen} entities the state lies inside a global batch of {mine}; take one that divides {seen}, such "
            f"as {theirs}"
        )


def _draw(*words: int) -> np.random.Generator:
    return np.random.Generator(np.random.Philox(np.random.SeedSequence(words)))
