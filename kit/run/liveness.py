"""Whether a run that was found as a directory still has someone behind it.

Processes are named by id and start time and mean something on the boot of the machine they ran on only. Of a run on
another machine (a shared folder) nothing is known but when it last wrote; it is given up after a silence that its own
supervisor would not have let pass.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

from kit.processes import alive, machine
from kit.run.paths import RunPaths


def why_lifeless(
    paths: RunPaths, environment: Mapping[str, Any], started: Sequence[dict[str, Any]], patience_seconds: float
) -> str:
    """Why nothing more will be written, or an empty text.

    Args:
        paths: The run.
        environment: What submission wrote: the machine and the supervisor.
        started: Processes named in `trial_started`, if it was written.
        patience_seconds: The longest silence of a run on another machine.
    """
    there, here = environment.get("machine", {}), machine()
    if there == here:
        known = environment.get("supervisor")
        processes = [*([known] if known else []), *started]
        return "" if any(alive(process) for process in processes) else "its supervisor went away"
    if there.get("host") == here["host"]:
        return "the machine was restarted"
    newest = max((path.stat().st_mtime for path in paths.event_files()), default=0.0)
    silent = time.time() - newest > patience_seconds
    return f"it ran on {there.get('host', 'another machine')} and has been silent since" if silent else ""
