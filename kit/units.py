"""Bytes, seconds and counts: parsed from what people write, formatted as people read.

Inside kit a quantity is a plain number in its base unit and its name carries the unit (`_bytes`, `_seconds`);
only here does it become text. Bytes are binary and labelled so: 1 GiB = 2^30 bytes.
"""

from __future__ import annotations

import math
import numbers
import re
from typing import Any

from kit.errors import ConfigError, Problem

_BINARY = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")
_FACTORS: dict[str, int] = {
    **{unit: 1024**power for power, unit in enumerate(_BINARY)},
    **{unit: 1000**power for power, unit in enumerate(("B", "KB", "MB", "GB", "TB", "PB"))},
}
_BYTES = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*")


def parse_bytes(text: str | float, name: str = "") -> int:
    """Bytes from `"64 MiB"` (binary), `"5 GB"` (decimal), `"512"` or a whole number, also of numpy, as `4e9`.

    Raises:
        ConfigError: when the text is no size, naming the units accepted, under the `name` of the argument.
    """
    given: Any = text  # by a user, who may give anything
    is_number = isinstance(given, numbers.Real) and not isinstance(given, bool)
    if is_number and 0 <= given < math.inf and given == int(given):
        return int(given)
    if not isinstance(text, str):
        message = f"{text!r} is not a size; write a number of bytes or a text such as '64 MiB'"
        raise ConfigError([Problem(name, message)])
    match = _BYTES.fullmatch(text)
    factors = {unit.lower(): factor for unit, factor in _FACTORS.items()}
    factor = factors.get((match[2] or "B").lower()) if match else None
    if match is None or factor is None:
        message = f"{text!r} is not a size; write bytes or one of {', '.join(_FACTORS)}, such as '64 MiB'"
        raise ConfigError([Problem(name, message)])
    size = float(match[1]) * int(factor)
    if not math.isfinite(size):
        raise ConfigError([Problem(name, f"{text[:20]!r}… is no size that a number holds; write such as '64 MiB'")])
    return round(size)


def format_bytes(number_of_bytes: float, *, up: bool = False) -> str:
    """`1536` -> `"1.5 KiB"`; three significant digits, never rounded up across a unit.

    Args:
        number_of_bytes: What is written.
        up: Round up, so that a size which is said to be enough is enough when it is typed in.
    """
    if not math.isfinite(number_of_bytes):
        return str(number_of_bytes)
    sign, size = ("-" if number_of_bytes < 0 else ""), abs(number_of_bytes)
    power = 0
    while power < len(_BINARY) - 1 and size >= 1024:
        size, power = size / 1024, power + 1
    if power == 0:
        return f"{sign}{size:.0f} B"
    digits = 2 if size < 10 else 1 if size < 100 else 0
    if up:
        size = math.ceil(size * 10**digits) / 10**digits
    number = f"{size:.{digits}f}"
    number = number.rstrip("0").rstrip(".") if "." in number else number
    return f"{sign}{number} {_BINARY[power]}"


def format_seconds(seconds: float) -> str:
    """`0.00123` -> `"1.23 ms"`, `75` -> `"1 min 15 s"`, `4000` -> `"1 h 7 min"`."""
    if not math.isfinite(seconds):
        return str(seconds)
    if seconds < 0:
        return "-" + format_seconds(-seconds)
    if seconds < 59.5:
        for factor, unit in ((1, "s"), (1e-3, "ms"), (1e-6, "µs")):
            if seconds >= factor or unit == "µs":
                return f"{seconds / factor:.3g} {unit}"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest} s" if rest else f"{minutes} min"
    hours, minutes = divmod(round(seconds / 60), 60)
    return f"{hours} h {minutes} min" if minutes else f"{hours} h"


def format_count(count: float) -> str:
    """`1234567` -> `"1.23 M"`, `1718.2` -> `"1720"`; whole numbers below ten thousand stay whole."""
    if not math.isfinite(count):
        return str(count)
    if abs(count) < 10_000:
        return f"{count:.0f}" if float(count).is_integer() else f"{float(f'{count:.3g}'):g}"
    for factor, unit in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(count) >= factor:
            return f"{count / factor:.3g} {unit}"
    raise AssertionError(count)


def format_amount(amount: float, unit: str) -> str:
    """`0.5, "Wh"` -> `"0.5 Wh"`, `12345, "g"` -> `"12.3 kg"`."""
    return f"{amount:.3g} {unit}" if amount < 1000 else f"{amount / 1000:,.3g} k{unit}"


def format_price(amount: float) -> str:
    """`0.0000768` -> `"0.0000768"`, `1234.5` -> `"1,230"`: three digits, written out."""
    if not math.isfinite(amount):
        return str(amount)
    digits = max(0, 2 - math.floor(math.log10(abs(amount)))) if amount else 0
    text = f"{float(f'{amount:.3g}'):,.{digits}f}"
    return text.rstrip("0").rstrip(".") if "." in text else text


def plural(count: float, noun: str, several: str = "") -> str:
    """`1 request`, `3.94 requests`; `several` is of a noun whose plural has more than an s."""
    text = format_count(count)
    return f"{text} {noun}" if text == "1" else f"{text} {several or noun + 's'}"
