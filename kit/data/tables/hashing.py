"""Hashes of values that are the same in every process, on every machine, in every version: what a sketch is made of.

A text is hashed by BLAKE2b to 64 bits, once for each different text of a column; numbers are mixed by splitmix64
(Steele, Lea, Flood 2014), which changes half of the bits when one changes.
"""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from kit.data.tables.columns import compute

if TYPE_CHECKING:
    import pyarrow

Hashes = NDArray[np.uint64]
Rows = NDArray[np.int64]
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_BETWEEN_WORDS = r"[^\p{L}\p{N}]+"


def mixed(hashes: Hashes, turn: int = 0) -> Hashes:
    """Other hashes of the same, independent of those of another turn."""
    with np.errstate(over="ignore"):
        found = hashes + _GOLDEN * np.uint64(turn + 1)
        found = (found ^ (found >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        found = (found ^ (found >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return found ^ (found >> np.uint64(31))


def hashes_of(words: pyarrow.Array) -> Hashes:
    """A hash of each text, (row,), of a column without nulls."""
    encoded = words.dictionary_encode()
    table = np.fromiter((_hash(word) for word in encoded.dictionary.to_pylist()), np.uint64)
    found: Hashes = table[encoded.indices.to_numpy(zero_copy_only=False)]
    return found


def word_hashes(texts: pyarrow.Array) -> tuple[Rows, Hashes]:
    """A hash of each word, and of each two in a row, of texts without nulls: the row it is of, and the hash.

    Words are runs of letters and digits, whatever their case.
    """
    functions = compute()
    lists = functions.split_pattern_regex(functions.utf8_lower(texts), pattern=_BETWEEN_WORDS)
    words, rows = functions.list_flatten(lists), functions.list_parent_indices(lists)
    wanted = functions.not_equal(words, "")
    of_rows = functions.filter(rows, wanted).to_numpy(zero_copy_only=False).astype(np.int64)
    hashes = hashes_of(functions.filter(words, wanted))
    with np.errstate(over="ignore"):
        pairs = mixed(hashes[:-1], 1) * np.uint64(3) + hashes[1:]
    together = of_rows[:-1] == of_rows[1:]
    return np.concatenate([of_rows, of_rows[1:][together]]), np.concatenate([hashes, pairs[together]])


def _hash(word: str) -> int:
    return int.from_bytes(hashlib.blake2b(word.encode(), digest_size=8).digest(), "little")
