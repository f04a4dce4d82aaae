"""Ranks of a test: forked from one server that has imported torch and lightning, each with its environment and log.

Importing both takes five seconds of a core, which two or four ranks of every test would pay again. A rank that fails
fails the test with the end of what it wrote, and none is left behind.
"""

import multiprocessing
import os
import socket
import time
from pathlib import Path

from waiting import PATIENCE_SECONDS

_IMPORTED = ("torch", "lightning.pytorch", "torch.distributed.fsdp", "kit.train", "kit.models")
_PRELOADED = ["collection_off", *_IMPORTED, "collection_on"]
_SERVER = multiprocessing.get_context("forkserver")
_SERVER.set_forkserver_preload(_PRELOADED)


def run_ranks(world_size, folder, be_rank, *arguments):
    """Call `be_rank(folder, *arguments)` in each of `world_size` ranks at once, and wait for all of them."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    ranks = [
        _SERVER.Process(target=_be, args=(_variables(rank, world_size, port), folder, be_rank, arguments))
        for rank in range(world_size)
    ]
    deadline = time.monotonic() + 2 * PATIENCE_SECONDS
    try:
        for rank in ranks:
            rank.start()
        for rank in ranks:
            rank.join(max(0.1, deadline - time.monotonic()))
    finally:
        codes = [rank.exitcode for rank in ranks]
        for rank in ranks:
            rank.kill()
            rank.join()
            rank.close()
    if codes != [0] * world_size:
        logs = "\n".join(log.read_text()[-3000:] for log in sorted(folder.glob("log.*.txt")))
        raise AssertionError(f"ranks ended with {codes}\n{logs}")


def _variables(rank, world_size, port):
    return os.environ | {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(world_size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "OMP_NUM_THREADS": "1",
        # A notebook inside a SLURM allocation sees these; they must not matter.
        "SLURM_NTASKS": "7",
        "SLURM_JOB_NAME": "notebook",
        "SLURM_PROCID": "0",
        "SLURM_LOCALID": "0",
    }


def _be(variables, folder, be_rank, arguments):
    os.environ.clear()
    os.environ.update(variables)
    log = os.open(Path(folder) / f"log.{variables['RANK']}.txt", os.O_WRONLY | os.O_CREAT)
    os.dup2(log, 1)
    os.dup2(log, 2)
    import torch

    torch.set_num_threads(1)
    be_rank(folder, *arguments)
