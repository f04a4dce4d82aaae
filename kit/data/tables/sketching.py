"""A sketch: which values an entity's events hold and how often, in a fixed number of numbers, whatever their order.

Each value falls into one of `width` buckets, in `DEPTH` independent ways, and each row of buckets is counted and
divided by its sum (a count sketch without signs: Cormode, Muthukrishnan 2005; normalised as in EMDE: Dabrowski et al.
2021). Two values share a bucket with probability 1 / width, and all buckets with probability 1 / width^DEPTH. A quality
of 1 is 128 buckets wide; less is narrower, and more values share a bucket.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from kit.data.tables.hashing import Hashes, Rows, mixed
from kit.errors import ConfigError, Problem

DEPTH = 4
"""Independent ways in which values are shared out."""
_WIDTH = 128
_STEP = 8
"""What matrix units take at a time."""
_LARGEST_QUALITY = 512.0


def sketch_width(quality: float) -> int:
    """Buckets of a row at that quality: 128 times it, in multiples of 8.

    Raises:
        ConfigError: when it is not above 0, or above 512.
    """
    if not 0 < quality <= _LARGEST_QUALITY:
        raise ConfigError([Problem("sketch_quality", f"is {quality}, but must be above 0, and at most 512")])
    return max(_STEP, round(_WIDTH * quality / _STEP) * _STEP)


def sketch_of(entities: Rows, hashes: Hashes, count: int, width: int) -> NDArray[np.float32]:
    """Sketches of `count` entities, (entity, depth, bucket); each row of buckets sums to 1, or is 0 without values.

    Args:
        entities: Whose value it is, (value,), from 0 to count - 1.
        hashes: Hashes of the values, (value,).
        count: Entities.
        width: Buckets of a row.
    """
    found = np.empty((count, DEPTH, width), np.float32)
    for way in range(DEPTH):
        buckets = (mixed(hashes, way) % np.uint64(width)).astype(np.int64)
        counts = np.bincount(entities * width + buckets, minlength=count * width).reshape(count, width)
        found[:, way] = counts / np.maximum(counts.sum(axis=1, keepdims=True), 1)
    return found
