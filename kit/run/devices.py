"""The devices of a trial, chosen and claimed in one step, so that two kernels never choose the same GPU.

What kit chooses (`auto`, a number) is never shared: when all that are left are claimed, the trial is refused. What the
user names (a list, -1 for all) is taken even so, with a warning: two small models on one GPU may be just what is
wanted. Ranks on the CPU claim nothing.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kit.claims import choosing
from kit.config import Config
from kit.errors import HardwareError, KitWarning
from kit.machine import Machine, Resolved, hardware, resolve_devices, with_claims
from kit.nvml import Gpu
from kit.processes import cpu_name


@dataclass(frozen=True, slots=True, kw_only=True)
class Taken:
    """Devices that are this trial's until it ends."""

    resolved: Resolved
    used_bytes: tuple[int, ...]
    """What others hold on each of them."""
    claims: tuple[Path, ...]
    """To be handed over to the supervisor, or released."""
    hardware: Mapping[str, Any] = field(default_factory=dict)
    """What the row of the trial tells of the machine."""


def take_devices(config: Config) -> Taken:
    """Choose and claim.

    Raises:
        HardwareError: as `resolve_devices` does, and when kit would have to choose a claimed GPU.
    """
    machine = hardware()
    resolved = resolve_devices(config, machine)
    if not resolved.devices:
        return Taken(resolved=resolved, used_bytes=(), claims=(), hardware=_facts(machine, ()))
    with choosing() as desk:
        machine = with_claims(machine, desk.claims)
        resolved = resolve_devices(config, machine)
        gpus = [next(gpu for gpu in machine.gpus if gpu.uuid == uuid) for uuid in resolved.devices]
        shared = [gpu for gpu in gpus if gpu.claimed]
        if shared and _is_chosen_by_kit(config):
            raise HardwareError(_why_refused(config, machine, shared))
        claimed = desk.take(resolved.devices, config.name)
    if shared:
        warnings.warn(f"{_named(machine, shared)}; the trials share it", KitWarning, stacklevel=4)
    used_bytes = tuple(gpu.total_bytes - gpu.free_bytes for gpu in gpus)
    return Taken(resolved=resolved, used_bytes=used_bytes, claims=tuple(claimed), hardware=_facts(machine, gpus))


def _facts(machine: Machine, gpus: Sequence[Gpu]) -> dict[str, Any]:
    """The machine and the first of these GPUs, with the memory of the smallest."""
    return {
        "device": gpus[0].name if gpus else "CPU",
        "cpu": cpu_name(),
        "cores": machine.cores,
        "memory_bytes": machine.memory_bytes,
        "device_memory_bytes": min((gpu.total_bytes for gpu in gpus), default=None),
    }


def _is_chosen_by_kit(config: Config) -> bool:
    devices = config.hardware.devices
    return not isinstance(devices, tuple) and devices != -1


def _why_refused(config: Config, machine: Machine, shared: Sequence[Gpu]) -> str:
    free = sum(not gpu.claimed for gpu in machine.gpus)
    return (
        f"hardware.devices is {config.hardware.devices}, but {free} of {len(machine.gpus)} GPUs are unclaimed: "
        f"{_named(machine, shared)}; wait for that trial or stop it, or share on purpose with devices: "
        f"[{machine.gpus.index(shared[0])}]"
    )


def _named(machine: Machine, gpus: Sequence[Gpu]) -> str:
    return "; ".join(f"GPU {machine.gpus.index(gpu)} is claimed by {gpu.claimed}" for gpu in gpus)
