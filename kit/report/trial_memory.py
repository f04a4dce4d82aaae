"""What a run directory holds about memory: the estimate made for the trial, and what the allocator did at its start.

Of several ranks the one that needed most is taken, as it decides whether a device suffices. Only JSON and plain arrays
are read.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from kit.errors import TrialError
from kit.json_text import read_json
from kit.plan.memory.estimate import MemoryEstimate
from kit.plan.memory.measured import Measured
from kit.run.trial import Trial

Found = TypeVar("Found")


def predicted_of(trial: Trial) -> MemoryEstimate:
    """The estimate that was made for the trial.

    Raises:
        TrialError: when there is none, or not yet: it is made beside the trial and may take longer than that.
    """
    file = trial.paths.prediction
    if file.is_file():
        return read_whole(file, lambda path: MemoryEstimate.from_dict(read_json(path.read_bytes(), str(path))))
    if not trial.config.trial.predict_memory:
        raise TrialError(f"{trial.name} has no prediction of its memory, because trial.predict_memory is off")
    raise TrialError(
        f"{trial.name} has no prediction of its memory (yet): it is made beside the trial, at the lowest priority; "
        "try again, or call kit.predict_memory before kit.fit"
    )


def measured_of(trial: Trial) -> Measured | None:
    """What the allocator did in the first two optimizer steps; None where that was not measured, as on a GPU."""
    ranks = range(int(trial.environment["world_size"]))
    files = [path for path in map(trial.paths.measured_memory, ranks) if path.is_file()]
    return max((read_whole(file, Measured.load) for file in files), key=lambda found: found.peak_bytes, default=None)


def read_whole(file: Path, load: Callable[[Path], Found]) -> Found:
    """What `load` makes of a file.

    Raises:
        TrialError: naming the file, when it is damaged.
    """
    try:
        return load(file)
    except Exception as error:  # whatever bytes may lead to
        raise TrialError(f"{file} is damaged: {type(error).__name__}: {error}; run the trial anew") from error
