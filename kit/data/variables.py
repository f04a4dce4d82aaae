"""Which variables of a dataset are its data, and what the others are to it.

Files that follow CF, or nearly, hold far more than their data: bounds of cells, grid mappings, coordinates, areas,
flags of quality, masks. Bounds may well be the largest of all, as in NEMO's files. Another variable names most of them
in an attribute; the rest are told by what they say of themselves, then by their name.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

_NAMED_BY = {
    "bounds": "bounds", "climatology": "bounds", "grid_mapping": "grid mapping", "coordinates": "coordinate",
    "cell_measures": "size of cells", "ancillary_variables": "quality",
}  # fmt: skip
"""Attribute of another variable: what it makes of those that it names."""
_BY_NAME = {
    "bounds": re.compile(r"(?:.*_)?(?:bnds|bounds|vertices|corners)(?:_.*)?", re.IGNORECASE),
    "mask": re.compile(r"(?:.*_)?[tuvwf]?mask(?:_.*)?|(?:.*_)?mask(?:util)?", re.IGNORECASE),
}
_MASK = re.compile(r"\w*(?:_mask|status_flag|quality_flag)\b")
"""A `standard_name`."""


def asides(attributes: Mapping[str, Mapping[str, Any]]) -> dict[str, str]:
    """Variables that are not data, each with what it is: `bounds of lon`, `mask`.

    Args:
        attributes: Those of every variable and coordinate, and under `""` those of the group.
    """
    found = {name: kind for name in attributes if (kind := _by_itself(name, attributes[name]))}
    for holder, given in attributes.items():
        for attribute, kind in _NAMED_BY.items():
            words = str(given.get(attribute, "")).replace(":", " ").split()
            of_holder = f"{kind} of {holder}" if holder and kind != "coordinate" else kind
            found |= {word: of_holder for word in words if word in attributes and word != holder}
    return found


def _by_itself(name: str, attributes: Mapping[str, Any]) -> str | None:
    if "grid_mapping_name" in attributes:
        return "grid mapping"
    if _MASK.match(str(attributes.get("standard_name", ""))):
        return "mask"
    if str(attributes.get("dtype", "")).startswith("timedelta64"):  # as xarray keeps lengths of time
        return "lengths of time"
    return next((kind for kind, pattern in _BY_NAME.items() if pattern.fullmatch(name)), None)
