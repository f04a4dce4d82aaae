"""memory_report: why a device ran out of memory, as one HTML page that opens offline.

What was held is read from the snapshot that the rank left (`kit.memory.replay.snapshot`), and stands beside what a dry
run of the same module and data holds at that moment, line by line of the user's code. The smallest change that fits is
what `kit.recommend` says of a device that is smaller by what was not predicted. The snapshot is shown whatever
became of module and data since.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from html import escape
from pathlib import Path
from typing import Any

from kit.charts import style as look
from kit.config import Config
from kit.errors import TrialError
from kit.machine.machine import hardware
from kit.memory.prediction import predict_memory
from kit.memory.query import find_target_device
from kit.memory.recordings import TIMEOUT_SECONDS
from kit.memory.replay.cards import THIS_MACHINE, DeviceTarget
from kit.memory.replay.estimate import MemoryEstimate, clock_of
from kit.memory.replay.replay import replay as play
from kit.memory.replay.replay import with_cublas_workspaces
from kit.memory.replay.snapshot import NO_LINE, DeviceMemory, load_snapshot, moment_of, predicted_holdings
from kit.report.page import counted, figure_html, html_page, write_page
from kit.studies.scaling.escalation import Recommendation, RunTarget
from kit.studies.scaling.recommend import recommend
from kit.tables import MISSING, html_list, html_table
from kit.trial.directory import contents_to_run
from kit.trial.payload import unpack
from kit.trial.trial import Trial
from kit.units import format_bytes

MOST_OWNERS = 14
_NOTABLE = 0.02
"""Of what is held: what differs by less from its prediction is not named."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Held:
    """What was held when memory ran out, and what was predicted to be held then."""

    trial: Trial
    memory: DeviceMemory
    estimate: MemoryEstimate | None
    predicted: Mapping[str, int]
    """Owner to bytes; empty without a prediction."""
    clock: float
    """Where on the clock of the prediction that moment is, 0 to 1."""
    cells: Mapping[str, tuple[str, str]]
    advice: str
    """HTML."""

    @property
    def excess_bytes(self) -> int:
        """How much more was held than predicted, if any."""
        return max(0, self.memory.allocated_bytes - sum(self.predicted.values())) if self.predicted else 0

    def words(self, owner: str) -> str:
        """An owner as people read it: from the package on, a file of one's own by its name, a cell by its number."""
        match = re.fullmatch(r"(.+), line (\d+), in (.+)", owner)
        if match is None:
            return NO_LINE.get(owner, owner)
        file, line, function = match.groups()
        place = self.cells[file][0] if file in self.cells else re.split(r"-packages[/\\]", file)[-1]
        return f"{Path(place).name if place == file else place}, line {line}, in {function}"


def memory_report(trial: Trial, snapshot: Path, file: Path, timeout_seconds: float | None = None) -> Path:
    """The page that `Trial.memory_report` writes.

    Raises:
        TrialError: when the snapshot cannot be read.
        ConfigError: when the page cannot be written.
    """
    held = _held(trial, load_snapshot(snapshot), timeout_seconds)
    sections = {
        "What happened": html_list(_happened(held)),
        "Held and predicted": _held_chart(held) + _held_table(held),
        "The smallest change that fits": held.advice,
        "The whole story": html_list([
            f"{snapshot.name} in the run directory has every request of the last steps with its stack; "
            "pytorch.org/memory_viz opens it too"
        ]),
    }  # fmt: skip
    page = html_page(f"Out of memory: {escape(trial.config.name)}", f"Trial {escape(trial.name)}.", sections)
    return write_page(file, page)


def _held(trial: Trial, memory: DeviceMemory, timeout_seconds: float | None) -> _Held:
    """Read against a prediction of what was sent; where there is none, the advice says why."""
    try:
        payload = unpack(contents_to_run(trial.paths).payload)
        module, data = payload["module"].value, payload["data"].value
        config, target, ranks = _asked_of(trial)
        seconds = max(TIMEOUT_SECONDS, timeout_seconds or 0.0)
        estimate = predict_memory(config, module, data, device=target, world_size=ranks, timeout_seconds=seconds)
        recording = estimate.recording
        assert recording is not None
        if not estimate.complete:  # a lower bound would look like a surprise
            raise TrialError(next(text for text in estimate.reasons if "activations unknown" in text))
        played = with_cublas_workspaces(recording, target.cublas_workspace_bytes)
        moment = moment_of(played, memory)
        asked_bytes = clock_of(played)
        found = _Held(
            trial=trial, memory=memory, estimate=estimate, cells=payload["cells"], advice="",
            predicted=predicted_holdings(played, moment, play(played).held_bytes),
            clock=float(asked_bytes[moment] / max(1, asked_bytes[-1])),
        )  # fmt: skip
        target = replace(target, capacity_bytes=max(1, target.capacity_bytes - found.excess_bytes))  # not predicted
        goal = RunTarget(device=target, devices=estimate.world_size)
        change = recommend(config, goal, module, data, timeout_seconds=timeout_seconds)
        return replace(found, advice=_advice(found, estimate, change))
    except Exception as error:  # the snapshot is shown, whatever became of module and data since
        reason = f"nothing is predicted: {type(error).__name__}: {error}"
        advice = html_list([reason, *(trial.event("failed", "advice") or ())])
        return _Held(trial=trial, memory=memory, estimate=None, predicted={}, clock=0.0, cells={}, advice=advice)


def _asked_of(trial: Trial) -> tuple[Config, DeviceTarget, int]:
    """The config, the device that ran out, and the number of ranks; a GPU that is not here counts by its bytes."""
    config, known = trial.config, trial.environment.get("hardware") or {}
    ranks = int(trial.environment.get("world_size") or 1)
    device: str | int = THIS_MACHINE
    if trial.environment.get("accelerator") == "cpu":
        config = config.replace({"hardware.accelerator": "cpu"})
    elif not hardware().gpus:
        device = int(config.hardware.device_memory_bytes or known.get("device_memory_bytes") or 0)
    return config, find_target_device(device, config, ranks), ranks


def _advice(held: _Held, estimate: MemoryEstimate, found: Recommendation) -> str:
    """The smallest change that fits as a line that runs, and what was looked at on the way."""
    less = held.excess_bytes
    note = f"{format_bytes(less)} that were not predicted are taken off the device" if less else ""
    if less > _NOTABLE * held.memory.allocated_bytes and estimate.fits:
        note += "; without them the config fits as it is, so look there before you change it"
    values = {path: value for change in found.changes for path, value in change.values.items()}
    if not found.fits or not values:
        said = found.refusal or f"by its prediction the config fits {found.target.device} as it is"
        return html_list([said, *filter(None, [note]), *(held.trial.event("failed", "advice") or ())])
    line = f"kit.fit(trial.config.replace({values}), module, data)"
    reasons = [str(change) for change in found.changes]
    table = f'<div class="wide wrapping">{found._repr_html_()}</div>'
    tried = f"<details><summary>what was tried on the way</summary>{table}</details>"
    return f"<pre>{escape(line)}</pre>{html_list([*reasons, *filter(None, [note])])}{tried}"


def _happened(held: _Held) -> list[str]:
    """The request that failed, the difference to the prediction, and the line to look at first."""
    memory, estimate = held.memory, held.estimate
    batch = f", in micro-batch {int(memory.batch[-1]) + 1}" if len(memory.batch) and memory.batch[-1] >= 0 else ""
    of = f" of {format_bytes(estimate.capacity_bytes)}" if estimate else ""
    reserved = (
        f" ({format_bytes(memory.reserved_bytes)} reserved)" if memory.reserved_bytes > memory.allocated_bytes else ""
    )
    found = [
        f"{format_bytes(memory.asked_bytes)} were asked for by {held.words(memory.asked_by)}{batch}, when "
        f"{format_bytes(memory.allocated_bytes)}{of} were held{reserved}"
    ]
    if estimate is None:
        return found
    total = sum(held.predicted.values())
    times = f"{memory.allocated_bytes / max(1, total):.2f}"
    peak = f"the predicted peak is {format_bytes(estimate.device_allocated_bytes)}, at {estimate.peak}"
    found.append(f"predicted at that moment: {format_bytes(total)}; {times} × that was held; {peak}")
    more = {one.owner: one.bytes - held.predicted.get(one.owner, 0) for one in memory.holdings}
    most = max(more, key=more.__getitem__, default="")
    if most and more[most] > _NOTABLE * memory.allocated_bytes:
        found.append(f"not predicted: {format_bytes(more[most])} more are held by {held.words(most)}; look there first")
    elif memory.holdings:
        first = memory.holdings[0]
        found.append(f"as predicted: {held.words(first.owner)} holds most, {format_bytes(first.bytes)}")
    return found


def _held_chart(held: _Held) -> str:
    from kit.charts.timeline import draw_timeline, timeline_info

    if held.estimate is None:
        return ""
    clock, series = _on_clock(held.memory, held.estimate, held.clock)
    info = replace(timeline_info(held.estimate), measured_clock=clock, measured_bytes=series, ran_out=len(clock) > 0)
    caption = "Areas: predicted over two steps, by category. Line: held, up to the cross, where memory ran out."
    return figure_html(look.svg(draw_timeline(info), info.sentence), caption)


def _on_clock(memory: DeviceMemory, estimate: MemoryEstimate, end: float) -> tuple[Any, Any]:
    """(points,) of the prediction's clock up to `end`, and the bytes held there; a later step lies on the last one."""
    import numpy as np

    from kit.charts.timeline import thin

    line = estimate.timeline
    last = len(line.batch_starts) - 1
    current = int(memory.batch[-1]) if len(memory.batch) else -1
    first = 0 if current <= last and (memory.batch == 0).any() else current
    places = np.flatnonzero(memory.batch >= max(0, first))
    begin = line.clock_bytes[line.batch_starts[min(first, last)]] if first > 0 and last > 0 else 0
    start, so_far = begin / max(1, *line.clock_bytes), np.cumsum(memory.requested[places])
    clock = start + (end - start) * so_far / max(1, int(so_far.max(initial=0)))
    series = memory.series[places].astype(np.float64)
    kept = thin(clock, series)
    return np.append(clock[kept], clock[-1:]), np.append(series[kept], series[-1:])


def _held_table(held: _Held) -> str:
    """Owner by owner, the largest first, the rest in one line."""
    owned = {one.owner: one for one in held.memory.holdings}
    names = dict.fromkeys([*owned, *held.predicted])
    size = {name: owned[name].bytes if name in owned else 0 for name in names}
    order = sorted(names, key=lambda name: -max(size[name], held.predicted.get(name, 0)))
    shown = [([name], held.words(name)) for name in order[:MOST_OWNERS]]
    shown += (
        [(order[MOST_OWNERS:], f"{counted(len(order) - MOST_OWNERS, 'other line')}")] if order[MOST_OWNERS:] else []
    )
    cells = []
    for group, words in [*shown, (order, "together")]:
        predicted = sum(held.predicted.get(name, 0) for name in group)
        blocks, measured = sum(owned[name].blocks for name in group if name in owned), sum(size[name] for name in group)
        ratio = f"{measured / predicted:.2f}" if predicted and measured else MISSING
        known = format_bytes(predicted) if predicted else MISSING
        cells.append([words, str(blocks), known, format_bytes(measured), ratio])
    columns = ("held by", "blocks", "predicted", "held", "ratio")
    return f'<div class="wide">{html_table(columns, cells, caption="When memory ran out", dense=True)}</div>'
