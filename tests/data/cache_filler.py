"""Fills a shared cache for ever, checking what it reads; run as a process of its own, to be killed at any moment.

`python cache_filler.py FOLDER SIZE_BYTES SEED [ROUNDS]`; ends with status 1 on a wrong byte.
"""

import random
import sys
from pathlib import Path

import numpy as np

from kit.data.stores.disk_cache import WHOLE, SharedFolder


def body(number):
    """Entry `number`: its size and bytes follow from it."""
    return np.random.default_rng(number).integers(0, 256, 500 + 371 * (number % 13), dtype=np.uint8)


def name(number):
    return f"{number * 7919 % 251:02x}{number:08d}"


def main(folder, size_bytes, seed, rounds):
    cache, draw = SharedFolder(folder, size_bytes, "lru"), random.Random(seed)
    sys.stdout.write("ready\n")
    sys.stdout.flush()
    for _ in range(rounds):
        number = draw.randrange(60)
        found = cache.get(name(number))
        if found is None:
            cache.put(name(number), [(WHOLE, body(number))])
        elif not np.array_equal(found, body(number)):
            sys.exit(1)


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4]) if len(sys.argv) > 4 else 10**9)
