"""Unions of spans of time, as arrays of shape (spans, 2): beginnings and ends.

A union is in order and its spans do not touch. All of these take and give unions but `merge`, which makes one.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike, NDArray

Union = NDArray[np.float64]
NOTHING: Union = np.empty((0, 2))


def merge(spans: ArrayLike) -> Union:
    """The union of spans in any order."""
    found = np.asarray(spans, dtype=np.float64).reshape(-1, 2)
    if not len(found):
        return NOTHING
    found = found[np.argsort(found[:, 0], kind="stable")]
    reached = np.maximum.accumulate(found[:, 1])
    first = np.flatnonzero(np.concatenate(([True], found[1:, 0] > reached[:-1])))
    last = np.concatenate((first[1:], [len(found)])) - 1
    return np.stack((found[first, 0], reached[last]), axis=1)


def clip(spans: ArrayLike, low: float, high: float) -> Union:
    """What of the spans lies between two moments, as a union."""
    found = np.clip(np.asarray(spans, dtype=np.float64).reshape(-1, 2), low, high)
    return merge(found[found[:, 1] > found[:, 0]])


def length(union: Union) -> float:
    """The sum of its spans."""
    return float(np.sum(union[:, 1] - union[:, 0]))


def both(one: Union, other: Union) -> Union:
    """Where two unions overlap."""
    first = np.searchsorted(other[:, 1], one[:, 0], "right")
    counts = np.maximum(0, np.searchsorted(other[:, 0], one[:, 1], "left") - first)
    mine = np.repeat(np.arange(len(one)), counts)
    theirs = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts - first, counts)
    begin = np.maximum(one[mine, 0], other[theirs, 0])
    return np.stack((begin, np.minimum(one[mine, 1], other[theirs, 1])), axis=1)


def without(union: Union, holes: Union) -> Union:
    """A union with parts cut out of it."""
    edges = np.concatenate(([-np.inf], holes.ravel(), [np.inf])).reshape(-1, 2)
    found = both(union, edges)
    return found[found[:, 1] > found[:, 0]]


def gaps(union: Union, low: float, high: float) -> Union:
    """What lies between the spans of a union, from one moment to another."""
    return without(np.array([[low, high]]), union)
