"""predict_memory: what a configuration needs of a device, answered before it runs and without that device.

A child process dry-runs the actual Trainer for two optimizer steps on fake tensors; this process plays the recording
through the device's allocator. Nothing is allocated, no GPU is touched, the kernel imports no torch, and the process
and its directory are gone when the answer is there. Equal questions are answered at once.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, overload

from kit.config import Config
from kit.machine.machine import hardware
from kit.memory.query import MemoryQuery, make_query
from kit.memory.recordings import RecordingRequest, recordings
from kit.memory.replay.cards import THIS_MACHINE, DeviceTarget
from kit.memory.replay.estimate import MemoryEstimate, estimate
from kit.memory.replay.replay import Recording
from kit.memory.residuals import residuals_here
from kit.trial.payload import batch_rule

TIMEOUT_SECONDS = 60.0


@overload
def predict_memory(
    config: Config,
    /,
    *,
    device: str | int | DeviceTarget = THIS_MACHINE,
    world_size: int | None = None,
    timeout_seconds: float = TIMEOUT_SECONDS,
) -> MemoryEstimate: ...
@overload
def predict_memory(
    module: Any,
    data: Any,
    config: Config,
    *,
    device: str | int | DeviceTarget = THIS_MACHINE,
    world_size: int | None = None,
    timeout_seconds: float = TIMEOUT_SECONDS,
) -> MemoryEstimate: ...
def predict_memory(
    module: Any,
    data: Any = None,
    config: Config | None = None,
    *,
    device: str | int | DeviceTarget = THIS_MACHINE,
    world_size: int | None = None,
    timeout_seconds: float = TIMEOUT_SECONDS,
) -> MemoryEstimate:
    """Peak memory of one rank: what it is made of, who holds it, and whether it fits.

    Args:
        module: What `kit.fit` takes as module. An instance is sent without its weights.
        data: What `kit.fit` takes as data.
        config: What would run. `predict_memory(config)` alone takes module and data from it.
        device: A GPU model such as "H100-80GB", its memory in bytes or as "24 GiB", or "this machine".
        world_size: Ranks, from 1 to 1,024, instead of those that the config asks for; no such devices need exist.
        timeout_seconds: After this long the training step is given up, and activations are unknown.

    Raises:
        ConfigError: for what cannot run as configured.
        HardwareError: for a precision that the device does not compute.
        PlanError: for an unknown device.
        StoreError: for a store that cannot be read.
        TrialError: when the module cannot be made, with the user's traceback.
    """
    if config is None and isinstance(module, Config):
        module, config = None, module
    question, target = make_query(module, data, config, device, world_size)
    rule = batch_rule(question.data, question.config)
    rule.warn()
    (recording,) = recordings(RecordingRequest(question), timeout_seconds)
    found = estimate_here(question, recording, target)
    note = rule.made(found.batch_size).note
    return replace(found, reasons=(*found.reasons, note)) if note else found


def estimate_here(question: MemoryQuery, recording: Recording, target: DeviceTarget) -> MemoryEstimate:
    """The estimate of a recording; for this machine, corrected by what was measured on it before."""
    measured = None
    if target.name == THIS_MACHINE:
        measured = residuals_here(question.config.trial.folder, device_name(target))
    return estimate(recording, target, residuals=measured)


def device_name(target: DeviceTarget) -> str:
    """What a fit on this machine calls the target's device."""
    if target.device_kind == "cpu":
        return "CPU"
    machine = hardware()
    return next((gpu.name for gpu in machine.gpus if gpu.uuid in machine.auto.devices), "")
