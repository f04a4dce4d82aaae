"""Writes a .npy file in forked children that are killed at some point of every block, then again until it is whole.

Run as `python write_victims.py FOLDER`; prints a line of JSON per kill: {"kill", "block", "signal", "place", "made",
"equal", "left"}. Killed with -9 while a block is made, after its bytes are written, and after it is listed; and by the
kernel in the middle of its bytes.
"""

import json
import os
import resource
import signal
import sys
from pathlib import Path

import google_crc32c
import numpy as np

from kit.data.rows.write import write_rows

ROWS, COLUMNS, ROW_BLOCK = 41, 1000, 7
BLOCKS = -(-ROWS // ROW_BLOCK)
KILLS = ("made", "half", "written", "listed")
CHECKSUM = google_crc32c.value


def rows(start, stop):
    return np.arange(start * COLUMNS, stop * COLUMNS, dtype="float32").reshape(-1, COLUMNS)


def die():
    os.kill(os.getpid(), signal.SIGKILL)


def write(path, log, kill="", block=0):
    """Write the file, noting each block that is made, and die at the block where that is asked for."""
    if kill == "half":
        signal.signal(signal.SIGXFSZ, signal.SIG_DFL)
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        limit = 128 + int((block + 0.5) * ROW_BLOCK * COLUMNS * 4)
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
    summed = iter(range(BLOCKS))

    def make(start, stop):
        with log.open("a") as file:
            file.write(f"{start} {stop}\n")
        if kill == "made" and start == block * ROW_BLOCK:
            die()
        return rows(start, stop)

    def checksum(data):
        if kill == "written" and next(summed) == block:
            die()
        return CHECKSUM(data)

    def progress(done, total, number_of_bytes):
        if kill == "listed" and done == block + 1:
            die()

    google_crc32c.value = checksum
    write_rows(path, make, (ROWS, COLUMNS), row_block=ROW_BLOCK, progress=progress)


def in_child(*arguments):
    """The signal that ended `write(*arguments)` in a forked child; 0 for none."""
    child = os.fork()
    if child == 0:
        try:
            write(*arguments)
            os._exit(0)
        except BaseException as error:
            sys.stderr.write(f"{type(error).__name__}: {error}\n")
            os._exit(99)
    status = os.waitpid(child, 0)[1]
    return os.WTERMSIG(status) if os.WIFSIGNALED(status) else -os.WEXITSTATUS(status)


def main():
    folder, whole = Path(sys.argv[1]), Path(sys.argv[1]) / "whole.npy"
    np.save(whole, rows(0, ROWS))
    for kill in KILLS:
        for block in range(BLOCKS):
            own = folder / f"{kill}{block}"
            own.mkdir()
            path, log = own / "x.npy", folder / f"{kill}{block}.log"
            ended = in_child(path, log, kill, block)
            place = path.exists()
            log.unlink(missing_ok=True)
            assert in_child(path, log) == 0
            asked = [tuple(map(int, line.split())) for line in log.read_text().splitlines()]
            result = {
                "kill": kill, "block": block, "signal": ended, "place": place,
                "made": [start // ROW_BLOCK for start, stop in asked if stop - start > 1],
                "equal": path.read_bytes() == whole.read_bytes(), "left": sorted(item.name for item in own.iterdir()),
            }  # fmt: skip
            sys.stdout.write(json.dumps(result) + "\n")


main()
