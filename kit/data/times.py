"""Times: CF time coordinates, `<unit> since <date>`, as datetime64; no more of CF than a coordinate needs.

Calendars that agree with numpy's proleptic Gregorian one are decoded (`standard` ones from 1582-10-15 on, as before
they mean the Julian calendar); others stay the numbers they are. Times are rounded to microseconds.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

_MICROSECONDS = {
    "microsecond": 1, "millisecond": 10**3, "second": 10**6, "minute": 60 * 10**6, "hour": 3600 * 10**6,
    "day": 86400 * 10**6,
}  # fmt: skip
_SHORT = {
    "us": "microsecond", "ms": "millisecond", "msec": "millisecond", "s": "second", "sec": "second", "min": "minute",
    "h": "hour", "hr": "hour", "d": "day",
}  # fmt: skip
_SINCE = re.compile(
    r"\s*(\w+?)s?\s+since\s+(\d{1,4})-(\d{1,2})-(\d{1,2})(?:[T ]+(\d{1,2})(?::(\d{1,2}))?(?::(\d{1,2}(?:\.\d*)?))?)?"
    r"\s*(?:Z|UTC|GMT|[+-]0?0:?00)?\s*", re.IGNORECASE,
)  # fmt: skip
_GREGORIAN_STARTS = np.datetime64("1582-10-15", "us")


def decode_times(numbers: NDArray[Any], attributes: Mapping[str, Any]) -> NDArray[Any]:
    """The numbers as datetime64 where the attributes say that they are times; else as they are."""
    calendar = str(attributes.get("calendar", "standard")).lower()
    match, unit = _parse(str(attributes.get("units", "")))
    if match is None or unit is None or numbers.dtype.kind not in "iuf" or calendar not in _CALENDARS:
        return numbers
    try:
        start = np.datetime64(f"{int(match[2]):04d}-{int(match[3]):02d}-{int(match[4]):02d}", "us")
    except ValueError:
        return numbers
    clock = [float(part or 0) for part in match.groups()[4:]]
    start += np.timedelta64(round((clock[0] * 3600 + clock[1] * 60 + clock[2]) * 10**6), "us")
    times = start + _steps(numbers, unit)
    julian = calendar != "proleptic_gregorian" and (start < _GREGORIAN_STARTS or (times < _GREGORIAN_STARTS).any())
    return numbers if julian else times


def is_time_unit(units: str) -> bool:
    """Whether numbers of these units are times, in whichever calendar."""
    return _parse(units)[1] is not None


_CALENDARS = ("standard", "gregorian", "proleptic_gregorian")


def _parse(units: str) -> tuple[re.Match[str] | None, int | None]:
    """The parts of `<unit> since <date>`, and the unit in microseconds."""
    match = _SINCE.fullmatch(units)
    return match, _unit(match[1].lower()) if match else None


def _unit(word: str) -> int | None:
    return _MICROSECONDS.get(_SHORT.get(word, word))


def _steps(numbers: NDArray[Any], unit: int) -> NDArray[np.timedelta64]:
    """Numbers of a unit as microseconds; NaN is no time."""
    if numbers.dtype.kind != "f":
        return (numbers.astype(np.int64) * unit).astype("timedelta64[us]")
    known = np.isfinite(numbers)
    steps = np.where(known, np.round(numbers.astype(np.float64) * unit), 0).astype(np.int64).astype("timedelta64[us]")
    return np.where(known, steps, np.timedelta64("NaT"))
