"""A kernel that takes the devices of a config on a machine of made-up GPUs, says which, and holds them.

`python claiming_kernel.py FOLDER GPUS DEVICES`: it waits for a line on stdin, takes, answers with one line of JSON, and
ends with its stdin.
"""

import json
import sys
import warnings
from pathlib import Path

import kit.machine.claims
import kit.trial.submit
from kit.config import Config
from kit.errors import HardwareError
from kit.machine.gpus import Gpu, GpuTable
from kit.machine.machine import hardware

GIB = 1 << 30


def gpus(count, **more):
    """So many alike, the last one with the most free memory."""
    return tuple(
        Gpu(
            index=place, uuid=f"GPU-{place}", name="NVIDIA A100-SXM4-80GB", total_bytes=80 * GIB,
            free_bytes=(60 + place) * GIB, capability=(8, 0), **more,
        )
        for place in range(count)
    )  # fmt: skip


def machine_of(table):
    """What `hardware` finds there, with the claims as they are."""
    return lambda: hardware(lambda: GpuTable(gpus=table, source="NVML"), environment={})


def config_of(devices):
    strategy = "none" if devices in ("auto", 1, [0], [1]) else "ddp"
    return Config.make({"name": "mine", "hardware": {"devices": devices, "strategy": strategy}})


def main(folder, count, devices):
    kit.machine.claims.FOLDER = Path(folder)
    kit.trial.submit.hardware = machine_of(gpus(int(count)))
    config = config_of(json.loads(devices))
    print("ready", flush=True)
    sys.stdin.readline()
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        try:
            taken = kit.trial.submit.take_devices(config)
            answer = {"devices": taken.resolved.devices, "reasons": taken.resolved.reasons}
        except HardwareError as error:
            answer = {"error": str(error)}
    print(json.dumps({**answer, "warnings": [str(warning.message) for warning in said]}), flush=True)
    sys.stdin.read()


if __name__ == "__main__":
    main(*sys.argv[1:])
