"""Evidence of a healthy trial, to be changed where a test wants something wrong."""

from kit.config import Config
from kit.speed.peaks import Peaks
from kit.studies.diagnosis.evidence import CountedWork, Evidence
from kit.studies.repeats import RunSource

PEAKS = Peaks(
    device="a device", flops_per_second={"float32": 1e11, "bfloat16": 4e11},
    nominal_flops_per_second={"float32": None, "bfloat16": None}, bytes_per_second=1e10,
)  # fmt: skip


def work(**changes):
    """Half a second of float32 at the peak, in a batch of 10 samples."""
    found = {
        "samples": 10, "flops": {"float32": 5e10}, "bytes": 1e9, "calls": 400, "own_syncs": 0, "batch_norms_again": 0,
        "lines": (),
    }  # fmt: skip
    return CountedWork(**(found | changes))


def shares(**changes):
    """Of a step; what is left is backward."""
    found = {"wait": 0.02, "transfer": 0.01, "forward": 0.25, "optimizer": 0.1, "other": 0.02, **changes}
    return {**found, "backward": 1 - sum(found.values())}


def host(**changes):
    """What was watched of a rank that does nothing beside its step."""
    found = {
        "samples": 100, "lines": [], "reads": {}, "hooks": {}, "garbage_fraction": 0.0, "collections": 0,
        "threads": [], "grown": {}, "pixels": 64 * 64, "workers": [], "own_fraction": 0.003,
        "loader": {"workers": 2, "persistent": True, "start_method": "fork", "objects_bytes": 0},
        "embeddings": {"name": "users", "elements": 900, "parameters": 1000},
    }  # fmt: skip
    return {**found, **changes}


def line(place="train.py, line 7, in draw", **changes):
    return {"part": "forward", "hook": "", "place": place, "package": "", "fraction": 0.2, **changes}


def evidence(changes=None, **values):
    """A healthy trial on one CPU rank, 1 s a batch of 10 samples; `changes` are of its config."""
    config = Config().replace({"hardware.precision": "bf16-mixed", **(changes or {})})
    found = {
        "config": config, "accelerator": "cpu", "world_size": 1, "own_loader": False, "given_loader": False,
        "cores": 4, "batches": 30, "samples_per_second": 10.0, "step_seconds": 1.0, "shares": shares(),
        "rank_seconds": {0: 0.4}, "start_up_seconds": 0.1, "total_seconds": 30.0, "read_seconds": None,
        "requests_per_sample": None, "bytes_per_request": None, "layout": None, "thread_cores": 0.98,
        "process_cores": 1.0, "workers": 2, "device_allocated_bytes": None, "device_reserved_bytes": None,
        "device_limit_bytes": None, "host_bytes": 1e9, "host_limit_bytes": 1e11, "work": work(), "peaks": PEAKS,
        "hosts": {0: host()}, "measured_gains": {"full precision": (0.9, 1.1), "batch too small": (0.9, 1.1)},
        "growth_bytes": 0.0, "errors": {},
    }  # fmt: skip
    return Evidence(**(found | values))


def source(found):
    return RunSource(None, None, found.config)
