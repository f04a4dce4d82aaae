"""Builds a store again and again in forked children, killed just before or after their k-th write, then resumed.

Run as `python build_victims.py CONFIG FOLDER STRIDE`, which takes each STRIDE-th of these moments; prints a line of
JSON per kill until a builder is no longer hit:
{"k", "killed", "published", "opens", "journalled", "rewritten"}. It never opens a store itself, so that it may fork.
"""

import itertools
import json
import os
import signal
import sys
from pathlib import Path

import kit.data.build.build as builder
from kit.config import Config
from kit.data.open_dataset import open_dataset
from kit.errors import UnfinishedStoreError

MOVE = Path.replace


def in_child(work):
    """The wait status of `work()` in a forked child."""
    child = os.fork()
    if child == 0:
        try:
            os._exit(work() or 0)
        except BaseException as error:
            sys.stderr.write(f"{type(error).__name__}: {error}\n")
            os._exit(99)
    return os.waitpid(child, 0)[1]


def build_watched(config, log, kill_at=0.0):
    """Build, noting every object written; SIGKILL before the k-th is moved into place, or after it (k + 0.5)."""
    numbers = itertools.count(1)

    def move(draft, target):
        count = next(numbers)  # in one step: two threads move objects
        if count == kill_at:
            os.kill(os.getpid(), signal.SIGKILL)
        moved = MOVE(draft, target)
        with log.open("a") as file:
            file.write(f"{target}\n")
        if count + 0.5 == kill_at:
            os.kill(os.getpid(), signal.SIGKILL)
        return moved

    Path.replace = move
    builder.JOURNAL_SECONDS = 0.0
    builder.build(config, progress=False, threads=2)


def is_open(config):
    try:
        open_dataset(config)
    except UnfinishedStoreError:
        return 1
    except OSError:
        return 2
    return 0


def journalled(store):
    lines = [line for file in store.glob(".kit/journal-*.jsonl") for line in file.read_text().splitlines()]
    return {json.loads(line)["key"] for line in lines}


def main():
    config, folder, stride = Config.load(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3])
    for k in (half / 2 for half in range(2, 2000, stride)):
        store, log = folder / f"{k}.zarr", folder / f"{k}.log"
        own = config.replace({"data.url": str(store)})
        first = in_child(lambda own=own, log=log, k=k: build_watched(own, log, k))
        killed = os.WIFSIGNALED(first)
        before = journalled(store)
        published = (store / ".kit" / "manifest.json").exists()
        opens = os.waitstatus_to_exitcode(in_child(lambda own=own: is_open(own)))
        log.unlink(missing_ok=True)
        second = in_child(lambda own=own, log=log: build_watched(own, log))
        assert second == 0, second
        written = (
            {str(Path(line).relative_to(store)) for line in log.read_text().splitlines()} if log.exists() else set()
        )
        result = {
            "k": k, "killed": killed, "published": published, "opens": opens, "journalled": len(before),
            "rewritten": len(before & written),
        }  # fmt: skip
        sys.stdout.write(json.dumps(result) + "\n")
        if not killed:
            break


main()
