"""Run directories of any state, written as the ranks and the supervisor of a trial write them."""

import json
import os

from kit.config import Config
from kit.events import EventWriter
from kit.machine.processes import identify, machine
from kit.trial.directory import Control, RunPaths

PHASES = ("wait", "transfer", "forward", "backward", "optimizer", "other")


def make_run(
    folder, changes=None, steps=6, end=None, counters=None, device=False, predicted=None, step_seconds=0.6
):  # fmt: skip
    config = Config().replace(
        {"trial.max_steps": 6, "trial.warmup_steps": 2, "trial.folder": str(folder), **(changes or {})}
    )
    paths = RunPaths.create(config)
    paths.config.write_text(config.to_yaml())
    environment = {"world_size": 1, "accelerator": "cpu", "precision": "32-true", "machine": machine()}
    environment["predicted"] = predicted or {}
    paths.environment.write_text(json.dumps({**environment, "supervisor": identify(os.getpid())}))
    Control.create(paths.control)
    rank, supervisor = EventWriter(paths.events(0), 0), EventWriter(paths.supervisor_events, -1)
    supervisor.write("trial_started", processes=[identify(os.getpid())])
    rank.write("fit_started", strategy="auto", accelerator="cpu", precision="32-true", world_size=1, max_steps=6)
    seconds = {f"{phase}_seconds": step_seconds / len(PHASES) for phase in PHASES} | {"step_seconds": step_seconds}
    memory = {"device_allocated_bytes": 1 << 31, "device_reserved_bytes": 1 << 32} if device else {}
    for step in range(1, steps + 1):
        rank.write("step", step=step, samples=12, host_rss_bytes=step << 20, **seconds, **memory)
    if counters is not None:
        rank.write("fit_ended", steps=steps, counters=counters, peak_host_rss_bytes=1 << 30)
    if end is not None:
        supervisor.write("trial_ended", **{"cause": None, "message": "", **end})
    rank.close()
    supervisor.close()
    return paths


COMPLETE = {"state": "COMPLETE", "message": "6 steps"}
