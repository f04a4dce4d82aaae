"""device_peaks: the most FLOP/s and bytes/s that the devices of a trial reach, measured once and remembered.

They are measured in a separate process on the device that the config names, with the threads of all its ranks; for a
GPU the maker's figures stand beside them. They are kept below the folder of the runs, by device and threads. On a busy
machine the measured peak is too low: peaks that were measured while the process queued for a core for more than
`MOST_QUEUED` of the time are given, and not kept.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from kit.config import Config
from kit.json_text import read_json, write_json
from kit.machine.claims import release
from kit.machine.machine import Resolved, hardware
from kit.trial import scratch
from kit.trial.directory import RunPaths, runs_folder
from kit.trial.payload import Part, pack
from kit.trial.submit import environment_of, take_devices, write_run
from kit.trial.trial import ENDED, Trial
from kit.units import format_bytes, format_count

_DTYPES = {"cpu": ("float32", "bfloat16"), "gpu": ("float32", "bfloat16", "float16")}
_PREFIX = "kit-peaks-"
_TIMEOUT_SECONDS = 120.0
_TICK_SECONDS = 0.01
MOST_QUEUED = 0.1


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
        """The peak in this number format: stated if known, else measured."""
        measured = self.flops_per_second.get(dtype, self.flops_per_second["float32"])
        return self.nominal_flops_per_second.get(dtype) or measured

    @property
    def sentence(self) -> str:
        flops = ", ".join(f"{format_count(rate)}FLOP/s in {name}" for name, rate in self.flops_per_second.items())
        return f"{self.device} reached {flops}, and {format_bytes(self.bytes_per_second)}/s of memory traffic"


def device_peaks(config: Config, *, again: bool = False) -> Peaks:
    """The peak FLOP/s and bandwidth of the devices that a config trains on, measured in about two seconds.

    Args:
        config: Names the devices.
        again: Measure them even if they are known.

    Returns:
        The peaks, measured by matrix products and copies of several sizes.

    Raises:
        HardwareError: for devices that are not there.
        TrialError: when the measuring process fails.

    Example:
        >>> peaks = kit.studies.device_peaks(config)
    """
    devices = config.hardware.devices
    one = devices[:1] if isinstance(devices, tuple) else "auto" if devices == "auto" else 1
    taken = take_devices(config.replace({"hardware.strategy": "none", "hardware.devices": one}))
    try:
        resolved = _whole(taken.resolved, config)
        key = hashlib.sha256(json.dumps([_device(resolved), resolved.threads_per_rank]).encode()).hexdigest()[:16]
        path = runs_folder(config.trial.folder) / ".peaks" / f"{key}.json"
        known = None if again else _read(path)
        if known is not None:
            release(taken.claims)
            return known
        found, queued = _measure(config, resolved, [str(file) for file in taken.claims])
    except BaseException:
        release(taken.claims)
        raise
    if queued <= MOST_QUEUED:
        write_json(path, asdict(found))
    return found


def _whole(resolved: Resolved, config: Config) -> Resolved:
    """All ranks on a CPU share it: together they are measured as one rank with all their threads."""
    if resolved.accelerator != "cpu":
        return resolved
    devices, threads = config.hardware.devices, config.hardware.threads_per_rank
    ranks = devices if isinstance(devices, int) and devices > 0 else 1
    cores = hardware().cores
    return replace(resolved, threads_per_rank=min(cores, threads * ranks) if threads else cores)


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


def _measure(config: Config, resolved: Resolved, claims: list[str]) -> tuple[Peaks, float]:
    """Run the job in a directory of its own and read what it says; and for how much of the time it queued."""
    quick = config.replace({"trial.timeout_seconds": _TIMEOUT_SECONDS, "trial.start": "warm"})
    paths = RunPaths(scratch.make(_PREFIX))
    try:
        paths.marker.touch()
        task = {"job": "peaks", "peaks": {"dtypes": _DTYPES[resolved.accelerator]}, "removed": "when lost"}
        environment = {**environment_of(resolved), **task, "claims": claims}
        write_run(paths, json.dumps(quick.values()), pack(Part("default"), Part("default")), environment)
        trial = Trial(paths, quick)
        trial.submit()
        try:
            while trial.poll() not in ENDED:
                time.sleep(_TICK_SECONDS)
        except BaseException:
            trial.kill()
            raise
        found = trial.event("peaks_measured")
        if found is None:
            raise trial.failure()
    finally:
        scratch.remove_folder(paths.directory)
    names = ("flops_per_second", "bytes_per_second", "nominal_flops_per_second")
    peaks = Peaks(device=_device(resolved), **{name: found[name] for name in names})
    return peaks, float(found.get("queued_fraction", 0.0))
