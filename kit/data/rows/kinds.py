"""Kinds: which numbers rows may hold, and as which they are delivered.

Floats are delivered as float32 unless told otherwise, whole numbers and bool as they are stored. Unsigned types that
torch hardly computes with are widened, so that no value is lost (uint16 to int32, uint32 to int64). Complex numbers,
text, Python objects and uint64 are refused, and so is a type asked for that could not hold what is stored.
"""

from __future__ import annotations

import difflib

import numpy as np
import torch

from kit.errors import ConfigError, Problem, RowsError

_WIDENED = {"uint16": "int32", "uint32": "int64"}
_PLAIN = ("bool", "uint8", "int8", "int16", "int32", "int64", "float16", "float32", "float64")
DELIVERED = (*_PLAIN, "bfloat16")
"""Names of the types that rows can be asked for in."""


def plain_dtype(stored: np.dtype[np.generic], place: str) -> np.dtype[np.generic]:
    """The type of this machine, known to torch too, that holds every value of a stored one.

    Raises:
        RowsError: for what is no number, and for uint64.
    """
    name = _WIDENED.get(stored.name, stored.name)
    if name not in _PLAIN:
        why = "that torch does not compute with; store it as int64" if name == "uint64" else "which is no real number"
        raise RowsError(f"{place} holds {stored}, {why}; rows are bool, whole numbers or floats")
    return np.dtype(name)


def delivered_dtype(stored: torch.dtype, asked: str | None, place: str) -> torch.dtype:
    """What rows are delivered as.

    Raises:
        RowsError: for numbers stored as what is no real number.
        ConfigError: for a type that is unknown, or cannot hold what is stored.
    """
    if stored.is_complex or not (stored.is_floating_point or name_of(stored) in _PLAIN):
        raise RowsError(f"{place} holds {name_of(stored)}, which is no real number; rows are bool, integers or floats")
    if asked is None:
        return torch.float32 if stored.is_floating_point else stored
    if asked not in DELIVERED:
        close = difflib.get_close_matches(str(asked), DELIVERED, n=1)
        hint = f"did you mean {close[0]!r}?" if close else f"use one of {', '.join(DELIVERED)}"
        raise ConfigError([Problem("dtype", f"{asked!r} is no type that rows are delivered in; {hint}")])
    wanted: torch.dtype = getattr(torch, asked)
    if not wanted.is_floating_point and torch.promote_types(stored, wanted) != wanted:
        message = f"{asked} cannot hold the {name_of(stored)} of {place}; use {name_of(stored)}, or a float"
        raise ConfigError([Problem("dtype", message)])
    return wanted


def name_of(dtype: torch.dtype) -> str:
    """`float32` for `torch.float32`."""
    return str(dtype).removeprefix("torch.")
