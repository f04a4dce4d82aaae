"""device_peaks: the FLOP/s and bytes/s that the devices of a trial reach at most, measured once and remembered.

Measured in a process of its own on the device the config names, with the threads that its ranks have together; on a
GPU what its maker states stands beside it. Kept below the folder of the runs, by device, threads and number format. A
busy machine measures too low a peak; `again=True` measures anew.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from kit.config import Config
from kit.json_text import read_json
from kit.machine.claims import release
from kit.machine.machine import Resolved, hardware
from kit.trial import scratch
from kit.trial.directory import RunPaths, runs_folder
from kit.trial.payload import Part, pack
from kit.trial.submit import environment_of, take_devices, write_run
from kit.trial.trial import ENDED, Trial
from kit.units import format_bytes, format_count

_FOLDER = ".peaks"
_DTYPES = {"cpu": ("float32", "bfloat16"), "gpu": ("float32", "bfloat16", "float16")}
_PREFIX = "kit-peaks-"
_TIMEOUT_SECONDS = 120.0
_TICK_SECONDS = 0.01


@dataclass(frozen=True, slots=True, kw_only=True)
class Peaks:
    """Of one device of a trial; of the CPU, of all its ranks together."""

    device: str
    flops_per_second: Mapping[str, float]
    """By number format, measured."""
    nominal_flops_per_second: Mapping[str, float | None]
    """By number format, as the maker states it; None where that is not known."""
    bytes_per_second: float
    """Read and written, measured by a copy."""

    def peak(self, dtype: str) -> float:
        """What the device could do in this number format: stated if known, else measured."""
        measured = self.flops_per_second.get(dtype, self.flops_per_second["float32"])
        return self.nominal_flops_per_second.get(dtype) or measured

    @property
    def sentence(self) -> str:
        flops = ", ".join(f"{format_count(rate)}FLOP/s in {name}" for name, rate in self.flops_per_second.items())
        return f"{self.device} reached {flops}, and {format_bytes(self.bytes_per_second)}/s of memory traffic"


def device_peaks(config: Config, *, again: bool = False) -> Peaks:
    """The peaks of the devices that `config` trains on; measured in about two seconds where they are not known.

    Raises:
        HardwareError: for devices that are not there.
        TrialError: when the measuring process fails.
    """
    taken = take_devices(config.replace({"hardware.strategy": "none", "hardware.devices": _one(config)}))
    try:
        resolved = _whole(taken.resolved, config)
        path = _path(config, resolved)
        known = None if again else _read(path)
        if known is not None:
            release(taken.claims)
            return known
        found = _measure(config, resolved, [str(file) for file in taken.claims])
    except BaseException:
        release(taken.claims)
        raise
    _keep(path, found)
    return found


def _one(config: Config) -> Any:
    """One of the devices; a list names its first."""
    devices = config.hardware.devices
    return devices[:1] if isinstance(devices, tuple) else "auto" if devices == "auto" else 1


def _whole(resolved: Resolved, config: Config) -> Resolved:
    """All ranks on a CPU share it: together they are measured as one rank with all their threads."""
    if resolved.accelerator != "cpu":
        return resolved
    devices, threads = config.hardware.devices, config.hardware.threads_per_rank
    ranks = devices if isinstance(devices, int) and devices > 0 else 1
    cores = hardware().cores
    return replace(resolved, threads_per_rank=min(cores, threads * ranks) if threads else cores)


def _path(config: Config, resolved: Resolved) -> Path:
    key = hashlib.sha256(json.dumps([_device(resolved), resolved.threads_per_rank]).encode()).hexdigest()[:16]
    return runs_folder(config.trial.folder) / _FOLDER / f"{key}.json"


def _device(resolved: Resolved) -> str:
    if resolved.accelerator == "cpu":
        threads = resolved.threads_per_rank
        return f"this CPU with {threads} thread{'s' * (threads > 1)}"
    return next(gpu.name for gpu in hardware().gpus if gpu.uuid == resolved.devices[0])


def _read(path: Path) -> Peaks | None:
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
        found = read_json(path.read_text())
        if found["flops_per_second"]["float32"] > 0 and found["bytes_per_second"] > 0:
            return Peaks(**found)
    return None


def _keep(path: Path, peaks: Peaks) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_suffix(".tmp")
    draft.write_text(json.dumps(asdict(peaks)), encoding="utf-8")
    draft.replace(path)


def _measure(config: Config, resolved: Resolved, claims: list[str]) -> Peaks:
    """Run the job in a directory of its own and read what it says."""
    quick = config.replace({"trial.timeout_seconds": _TIMEOUT_SECONDS, "trial.start": "warm"})
    paths = RunPaths(scratch.make(_PREFIX))
    try:
        paths.marker.touch()
        task = {
            "job": "peaks",
            "peaks": {"dtypes": _DTYPES[resolved.accelerator]},
            "removed": "when lost",
        }
        environment = {**environment_of(resolved), **task, "claims": claims}
        write_run(paths, json.dumps(quick.values()), pack(Part("default"), Part("default")), environment)
        trial = Trial(paths, quick)
        trial.submit()
        _wait(trial)
        found = trial.event("peaks_measured")
        if found is None:
            raise trial.failure()
    finally:
        scratch.remove_folder(paths.directory)
    names = ("flops_per_second", "bytes_per_second", "nominal_flops_per_second")
    return Peaks(device=_device(resolved), **{name: found[name] for name in names})


def _wait(trial: Trial) -> None:
    """Until it has ended; an interrupt ends it."""
    try:
        while trial.poll() not in ENDED:
            time.sleep(_TICK_SECONDS)
    except BaseException:
        trial.kill()
        raise
