"""Sixty training pipelines with one planted fault each, or none: what a diagnosis is measured on.

Each is written as its author would write it without kit: own datasets, loaders, hooks and callbacks, and models of
torch, Lightning's demos and transformers. `Pipeline.planted` is the name that a finding should have, and `cure` what
its author would do about it: other parts in place of these. Ten are kept aside: no rule was tuned on them. All were
planted before the rules were written; where a plant turned out to be none (losses whose graphs are freed, a rank that
is slow by a millisecond), it was mended after. A rank computes with one thread, so that a busy machine changes little.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

SHORT = {"trial.max_steps": 30, "trial.warmup_steps": 5, "trial.predict_memory": False, "hardware.threads_per_rank": 1}


@dataclass(frozen=True, kw_only=True)
class Parts:
    """What a training is made of; the functions make it anew for each run."""

    module: Callable[[], Any]
    data: Callable[[], Any] | str
    callbacks: Callable[[], list[Any]] = list
    config: Mapping[str, Any] = field(default_factory=dict)
    """Changes of the default config, and of `SHORT`."""
    flags: Mapping[str, Any] = field(default_factory=dict)
    """More of the Trainer's arguments."""
    logger: Callable[[], Any] | None = None


@dataclass(frozen=True, kw_only=True)
class Pipeline:
    """A training, what is wrong with it, and the same mended."""

    name: str
    parts: Parts
    planted: str = ""
    """The finding; empty for a healthy one."""
    cure: Parts | None = None
    also: tuple[str, ...] = ()
    """What is true of it beside the planted fault, so that naming it is no false alarm."""
    speeds_up: bool = True
    """Whether the cure is about time; else it is about memory."""
    kind: Literal["development", "kept aside", "example", "unseen", "elsewhere", "elsewhere again"] = "development"
    """Those kept aside were tuned on by no rule; examples of other packages came later, the others last, in turn."""


def all_pipelines(folder: str) -> dict[str, Pipeline]:
    """By name; files that they read are written into `folder` when they are first made."""
    from pipelines import elsewhere, examples, files, hosts, models, ranks, unseen, workers

    found = [
        pipeline
        for part in (models, hosts, files, workers, ranks, examples, unseen, elsewhere)
        for pipeline in part.pipelines(folder)
    ]  # fmt: skip
    return {pipeline.name: pipeline for pipeline in found}
