"""The events of a trial by hand, as its ranks would have sent them."""

from kit.config import Config
from kit.records.trace import PHASES

START = 1_000_000.0
CONFIG = Config().replace({"trial.max_steps": 20, "trial.warmup_steps": 2, "data.url": "gs://bucket/store.zarr"})


def begin(rank=0, asked=START, set_up=2.0):
    return [
        {"kind": "rank_started", "time": asked - set_up, "rank": rank},
        {"kind": "fit_started", "time": asked, "rank": rank, "world_size": 1, "max_steps": 20},
    ]


def steps(count=10, rank=0, wait=0.03, train=0.01, start_up=1.0, ahead=0.05, epoch_steps=100, counted=True, **more):
    """Steps in a row; the first batch comes after `start_up`."""
    ready = START + start_up
    for number in range(1, count + 1):
        phases = {f"{phase}_seconds": 0.0 for phase in PHASES} | {"wait_seconds": wait, "forward_seconds": train}
        counts = {"requests": 4 * number, "bytes_read": 1000 * number} if counted else {}
        read = {"read_started": ready - ahead, "read_ended": ready} if counted else {}
        yield {
            "kind": "step", "rank": rank, "step": number, "time": ready + train, "samples": 8,
            "epoch": (number - 1) // epoch_steps, "train_started": ready, "train_ended": ready + train,
            "step_seconds": wait + train, **phases, **counts, **read, **more,
        }  # fmt: skip
        ready += train + wait
