"""Octets: bytes as arrays, which can be cut and copied without Python's lock."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Octets = NDArray[np.uint8]


def octets(data: bytes | memoryview) -> Octets:
    """Bytes as an array, without a copy."""
    return np.frombuffer(data, np.uint8)
