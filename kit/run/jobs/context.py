"""What a rank knows about its trial."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from kit.config import Config
from kit.events import EventWriter
from kit.run.control import Control
from kit.run.paths import RunPaths

if TYPE_CHECKING:
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    from kit.run.timing import StepClock


@dataclass(slots=True)
class Context:
    """One rank of one trial."""

    paths: RunPaths
    config: Config
    environment: dict[str, Any]
    """What submission wrote: world size, accelerator, precision, threads, versions."""
    rank: int
    writer: EventWriter
    control: Control
    cells: dict[str, tuple[str, str]] = field(default_factory=dict)
    """Notebook cells by file name: (name, source)."""
    clock: StepClock | None = None
    store: TCPStore | None = None
    """In which the ranks find each other; rank 0 serves it as long as it is held here."""

    @property
    def world_size(self) -> int:
        return int(self.environment["world_size"])
