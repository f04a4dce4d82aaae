"""Streams batches for ever and says what the process has grown by; run as a process of its own, without torch.

`python memory_reader.py URL MEMORY_BYTES BATCHES...`: prints the growth in bytes after each number of batches.
"""

import itertools
import statistics
import sys

import numpy as np

from kit.chunks.requests import Coalescing
from kit.data.open_dataset import open_dataset
from kit.data.stream.engine import Engine
from kit.machine.processes import rss_bytes


def main(url, memory_bytes, marks):
    dataset = open_dataset(url)
    shape = dataset.arrays["wind"].shape
    draw, patch = np.random.default_rng(0), (1, 64, 64)
    batches = (
        np.stack([draw.integers(0, size - side + 1, 8) for size, side in zip(shape, patch, strict=True)], axis=1)
        for _ in itertools.count()
    )
    engine = Engine(
        dataset, ["wind"], memory_bytes=memory_bytes, cache_bytes=memory_bytes // 8, coalescing=Coalescing()
    )
    before, held = rss_bytes(), []
    for number, _ in enumerate(engine.stream(batches, patch), 1):
        held.append(rss_bytes() - before)
        if number in marks:
            print(int(statistics.mean(held[-50:])), max(held), flush=True)
        if number == max(marks):
            break


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), [int(mark) for mark in sys.argv[3:]])
