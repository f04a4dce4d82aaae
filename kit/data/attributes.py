"""Attributes as a store keeps them: JSON values, with what other libraries add for themselves left out.

Numbers that JSON has no word for become text, bytes become text; nothing else is changed. A `_FillValue` that is NaN
says nothing (NaN is missing anyway) and goes, and `missing_value` stands in where there is no `_FillValue`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

_OF_OTHERS = ("_ARRAY_DIMENSIONS", "_Netcdf4Dimid", "_Netcdf4Coordinates", "_NCProperties", "DIMENSION_LIST", "CLASS",
              "NAME", "REFERENCE_LIST")  # fmt: skip


def json_attributes(attributes: Mapping[Any, Any]) -> dict[str, Any]:
    """Attributes of a dataset, as JSON values."""
    return {str(key): _plain(value) for key, value in attributes.items() if key not in _OF_OTHERS}


def coordinate_attributes(attributes: Mapping[Any, Any]) -> dict[str, Any]:
    """Attributes of a coordinate, which has no missing values."""
    return json_attributes({key: value for key, value in attributes.items() if key not in ("_FillValue",)})


def packing_attributes(attributes: Mapping[Any, Any], dtype: np.dtype[Any]) -> dict[str, Any]:
    """Attributes of a variable stored as `dtype`, with its missing value as a number under `_FillValue`."""
    found = json_attributes({key: value for key, value in attributes.items() if key not in ("_FillValue",)})
    missing = attributes.get("_FillValue", attributes.get("missing_value"))
    number = None if missing is None or isinstance(missing, str) else np.ravel(missing)[0].item()
    if number is not None and not (isinstance(number, float) and not math.isfinite(number)):
        found["_FillValue"] = int(number) if dtype.kind in "iu" else float(number)
    return found


def _plain(value: Any) -> Any:
    if isinstance(value, np.generic | np.ndarray):
        value = value.tolist()
    if isinstance(value, bytes):
        return value.decode("utf-8", "replace")
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value if value is None or isinstance(value, bool | int | float | str) else str(value)
