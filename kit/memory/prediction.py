"""predict_memory: what a configuration needs of a device, answered before it runs and without that device.

Nothing is allocated, no GPU is touched, the kernel imports no torch, and the process of the dry run and its directory
are gone when the answer is there. Equal queries are answered at once.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from kit.arguments import config_first
from kit.machine.machine import hardware
from kit.memory.query import MemoryQuery, as_ddp, make_query
from kit.memory.recordings import RecordingRequest, recordings_of
from kit.memory.replay.cards import THIS_MACHINE, DeviceTarget
from kit.memory.replay.estimate import MemoryEstimate, estimate
from kit.memory.replay.replay import Recording
from kit.memory.residual_table import residuals_here
from kit.trial.payload import batch_rule, warn_of_unused


@config_first
def predict_memory(
    config: Any = None,
    module: Any = None,
    data: Any = None,
    *,
    device: str | int | DeviceTarget = THIS_MACHINE,
    world_size: int | None = None,
    timeout_seconds: float | None = None,
) -> MemoryEstimate:
    """Predict the peak memory of one rank: what it is made of, which module holds it, and whether it fits.

    A process of its own runs the Trainer that `kit.fit` would run for two optimizer steps, with a validation, a test
    and a prediction where the config has them, on tensors with shapes but without values, and replays the allocations
    through a model of CUDA's caching allocator. The median error was 0.00002 % on 42 models whose peaks were measured
    on a CPU; it has not been compared with a GPU.

    Args:
        config: What would run; the default config when left out.
        module: What would be trained, as `kit.fit` takes it. An instance is sent without its weights.
        data: What it would be trained on, as `kit.fit` takes it.
        device: A GPU model such as "H100-80GB", its memory in bytes or as "24 GiB", or "this machine".
        world_size: Ranks, from 1 to 1,024, instead of the config's. No such devices need exist. Several without a
            strategy are taken as ddp.
        timeout_seconds: The most that the dry run may take. By default a minute, and as many times as long as
            processes wait for each core. Near its end the training step is given up, and the activations are unknown.

    Returns:
        The estimate: allocated and reserved bytes, the parts of the peak, the verdict and its reasons.

    Raises:
        ConfigError: for what cannot run as configured.
        HardwareError: for 16-mixed on a CPU. What a card only emulates is answered, and said.
        PlanError: for an unknown device.
        StoreError: for a store that cannot be read.
        TrialError: when the module cannot be made, or its steps stop with an error of its own, with the user's
            traceback.
        UnansweredError: when the dry run does not end in time, nor lets itself be broken off.

    Example:
        >>> estimate = kit.predict_memory(config, MyModule, MyData, device="T4-16GB")
        >>> estimate.verdict
        'fits'
    """
    config, shared = as_ddp(config, world_size)
    query, target = make_query(module, data, config, device, world_size)
    rule = batch_rule(query.data, query.config)
    rule.warn()
    warn_of_unused(query.module, query.data, query.config)
    (recording,) = recordings_of(RecordingRequest(query), timeout_seconds)
    found = estimate_here(query, recording, target)
    note = "" if "mean_samples" in recording.facts else rule.made(found.batch_size).note
    return replace(found, reasons=(*found.reasons, *shared, *[note] * bool(note)))


def estimate_here(query: MemoryQuery, recording: Recording, target: DeviceTarget) -> MemoryEstimate:
    """The estimate of a recording; for this machine, corrected by what was measured on it before."""
    measured = None
    if target.name == THIS_MACHINE:
        measured = residuals_here(query.config.trial.folder, device_name(target))
    return estimate(recording, target, residuals=measured)


def device_name(target: DeviceTarget) -> str:
    """What a fit on this machine calls the target's device."""
    if target.device_kind == "cpu":
        return "CPU"
    machine = hardware()
    return next((gpu.name for gpu in machine.gpus if gpu.uuid in machine.auto.devices), "")
