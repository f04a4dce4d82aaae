"""The variables of a dataset: shape, chunks, packing and missing values of each, times, and which of them are its data.

CF time coordinates, `<unit> since <date>`, are decoded as datetime64; no more of CF than a coordinate needs. That holds
for calendars that agree with numpy's proleptic Gregorian one (`standard` ones from 1582-10-15 on, as before they mean
the Julian calendar); others stay the numbers they are. Times are rounded to microseconds.

Files that follow CF, or nearly, hold far more than their data: bounds of cells, grid mappings, coordinates, areas,
flags of quality, masks. Bounds may well be the largest of all, as in NEMO's files. Another variable names most of them
in an attribute; the rest are told by what they say of themselves, then by their name.
"""

from __future__ import annotations

import base64
import binascii
import re
import struct
from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import prod
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from kit.data.places import Matched
from kit.data.stores.manifest import Manifest
from kit.errors import StoreError
from kit.units import format_bytes

if TYPE_CHECKING:
    import zarr

NUMBERS = "biuf"
"""Kinds of numpy type that can be a channel."""


def in_machine_order(dtype: Any) -> np.dtype[Any]:
    """The type in this machine's byte order; text of any length has none."""
    known: np.dtype[Any] = np.dtype(dtype)
    return known if known.kind == "T" else known.newbyteorder("=")


@dataclass(frozen=True, slots=True, kw_only=True)
class ArrayInfo:
    """One array; decoded value = packed value × scale_factor + add_offset."""

    name: str
    shape: tuple[int, ...]
    dims: tuple[str, ...]
    dtype: np.dtype[Any]
    chunk: tuple[int, ...]
    """What one request reads and one decoding yields."""
    shard: tuple[int, ...] | None
    """What one object holds; None when each chunk is an object."""
    scale_factor: float = 1.0
    add_offset: float = 0.0
    missing: float | int | None = None
    """The packed value that stands for a missing one; NaN in a float array is missing besides."""
    also_missing: tuple[float | int, ...] = ()
    """Further ones: a store may name several."""
    mean: float | None = None
    """Of the decoded valid values; None when unknown."""
    deviation: float | None = None
    units: str = ""
    long_name: str = ""
    repeated: tuple[int, ...] = ()
    """Dimensions that the stored array lacks: it has the same values all along them."""
    matched: tuple[Matched | None, ...] = ()
    """Along each dimension the stored elements that those of `shape` take, in a store of another resolution; `chunk`
    and `shard` count stored ones. None where they are the same, empty where they are along all dimensions."""
    together: tuple[int, ...] = ()
    """Elements along each dimension, at most, that take the same one of an array matched to this one; empty for 1."""

    @property
    def stored_axes(self) -> tuple[int, ...]:
        """The other ones, in their order."""
        return tuple(axis for axis in range(len(self.shape)) if axis not in self.repeated)

    @property
    def stored_shape(self) -> tuple[int, ...]:
        """Elements of the stored array along its own dimensions, `stored_axes`."""
        matched = self.matched or (None,) * len(self.shape)
        sizes = [size if one is None else one.size for size, one in zip(self.shape, matched, strict=True)]
        return tuple(sizes[axis] for axis in self.stored_axes)

    @property
    def nbytes(self) -> int:
        """Uncompressed size."""
        return prod(self.stored_shape) * self.dtype.itemsize

    @property
    def chunk_bytes(self) -> int:
        """Uncompressed size of a chunk."""
        return prod(self.chunk[axis] for axis in self.stored_axes) * self.dtype.itemsize

    @property
    def is_channel(self) -> bool:
        """Whether its elements are real numbers that measure something other than a time."""
        return self.dtype.kind in NUMBERS and not is_time_unit(self.units)

    def decode(self, packed: NDArray[Any]) -> NDArray[Any]:
        """Decoded values as float64, NaN where missing; `packed` as it is where nothing is packed."""
        missing = () if self.missing is None else (self.missing, *self.also_missing)
        if not missing and (self.scale_factor, self.add_offset) == (1.0, 0.0):
            return packed
        numbers = packed.astype(self.dtype, copy=False)
        values = numbers.astype(np.float64) * self.scale_factor + self.add_offset
        return np.where(np.isin(numbers, missing), np.nan, values)

    def repeat_along(self, other: ArrayInfo) -> ArrayInfo | None:
        """This array with all dimensions of another, in their order; None where they do not go together."""
        axes = {name: axis for axis, name in enumerate(self.dims)}
        shared = [name for name in other.dims if name in axes]
        sizes = dict(zip(other.dims, other.shape, strict=True))
        if (*shared,) != self.dims or any(sizes[name] != self.shape[axes[name]] for name in shared):
            return None

        def widen(sides: tuple[int, ...]) -> tuple[int, ...]:
            return tuple(sides[axes[name]] if name in axes else sizes[name] for name in other.dims)

        return replace(
            self, shape=other.shape, dims=other.dims, chunk=widen(self.chunk), shard=self.shard and widen(self.shard),
            matched=self.matched and tuple(self.matched[axes[n]] if n in axes else None for n in other.dims),
            repeated=tuple(axis for axis, name in enumerate(other.dims) if name not in axes),
        )  # fmt: skip

    def __str__(self) -> str:
        dims = ", ".join(f"{name} {size}" for name, size in zip(self.dims, self.shape, strict=True))
        chunk, shard = (" × ".join(map(str, sides)) for sides in (self.chunk, self.shard or ()))
        cut = f"chunk {chunk}" + (f" in shards of {shard}" if self.shard else "")
        meant = " ".join(filter(None, (self.long_name, f"[{self.units}]" if self.units else "")))
        meaning = f", {meant}" if meant else ""
        for name, one in zip(self.dims, self.matched, strict=False):
            meaning += "" if one is None else f", {one.size} along {name} matched"
        return f"{self.name} ({dims}) {self.dtype}, {format_bytes(self.nbytes)}, {cut}{meaning}"


def array_info(name: str, array: zarr.Array[Any], found: Manifest | None) -> ArrayInfo:
    """What a reader needs of one array; the manifest knows its statistics."""
    attributes = dict(array.attrs)
    statistics = found.arrays.get(name) if found else None
    dtype = np.dtype(array.dtype)
    # NetCDF's classic files keep unsigned numbers in signed ones and say so.
    unsigned = str(_single(attributes.get("_Unsigned", ""))).lower()
    if swapped := {("true", "i"): "u", ("false", "u"): "i"}.get((unsigned, dtype.kind)):
        dtype = np.dtype(f"{dtype.byteorder}{swapped}{dtype.itemsize}")
    named: Any = getattr(array.metadata, "dimension_names", None) or attributes.get("_ARRAY_DIMENSIONS") or ()
    names = [*named] if len(named) == array.ndim else [None] * array.ndim
    missing = _missing(array, attributes, dtype)
    return ArrayInfo(
        name=name, shape=array.shape, dims=tuple(name or f"dim_{index}" for index, name in enumerate(names)),
        dtype=dtype, chunk=array.chunks, shard=array.shards,
        scale_factor=float(_single(attributes.get("scale_factor", 1.0))),
        add_offset=float(_single(attributes.get("add_offset", 0.0))),
        missing=missing[0] if missing else None, also_missing=missing[1:],
        mean=statistics.mean if statistics else None, deviation=statistics.deviation if statistics else None,
        units=str(attributes.get("units", "")), long_name=str(attributes.get("long_name", "")),
    )  # fmt: skip


def _missing(array: zarr.Array[Any], attributes: Mapping[str, Any], dtype: np.dtype[Any]) -> tuple[float | int, ...]:
    """The packed values that are missing: attributes, and in Zarr version 2 the fill value.

    NaN is none of them, and neither is a number that the type cannot hold.
    """
    if dtype.kind not in "iuf":
        return ()
    values = [attributes.get("_FillValue"), attributes.get("missing_value")]
    if array.metadata.zarr_format == 2 and values[0] is None:
        values[0] = array.fill_value
    found: dict[float | int, None] = {}
    for value in (_single(value) for value in values if value is not None):
        number = decode_float(value) if isinstance(value, str) else value
        if dtype.kind == "f" and not np.isnan(number):
            found[float(number)] = None
        elif dtype.kind != "f" and np.isfinite(number) and number == int(number):
            found[int(np.array(int(number)).astype(dtype))] = None
    return tuple(found)


def _single(value: Any) -> Any:
    """An attribute that should be one value; some writers make it a list of one."""
    return value[0] if isinstance(value, list | tuple) and len(value) == 1 else value


def encode_float(value: float) -> str:
    """A float `_FillValue` as xarray writes it to JSON: base64 of eight little-endian bytes."""
    return base64.standard_b64encode(struct.pack("<d", value)).decode()


def decode_float(text: str) -> float:
    """The inverse of `encode_float`; words such as `NaN` are read too."""
    try:
        return float(text)
    except ValueError:
        pass
    try:
        return float(struct.unpack("<d", base64.standard_b64decode(text))[0])
    except (binascii.Error, struct.error):
        raise StoreError(f"_FillValue {text!r} is neither a number nor an encoded one") from None


# -- times

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
CALENDARS = ("standard", "gregorian", "proleptic_gregorian")
GREGORIAN_STARTS = np.datetime64("1582-10-15", "us")


def decode_times(numbers: NDArray[Any], attributes: Mapping[str, Any]) -> NDArray[Any]:
    """The numbers as datetime64 where the attributes say that they are times; else as they are."""
    calendar = str(attributes.get("calendar", "standard")).lower()
    match, unit = _parse_units(str(attributes.get("units", "")))
    if match is None or unit is None or numbers.dtype.kind not in "iuf" or calendar not in CALENDARS:
        return numbers
    try:
        start = np.datetime64(f"{int(match[2]):04d}-{int(match[3]):02d}-{int(match[4]):02d}", "us")
    except ValueError:
        return numbers
    clock = [float(part or 0) for part in match.groups()[4:]]
    start += np.timedelta64(round((clock[0] * 3600 + clock[1] * 60 + clock[2]) * 10**6), "us")
    if numbers.dtype.kind == "f":  # NaN is no time
        known = np.isfinite(numbers)
        steps = np.where(known, np.round(numbers.astype(np.float64) * unit), 0).astype(np.int64)
        times = start + np.where(known, steps.astype("timedelta64[us]"), np.timedelta64("NaT"))
    else:
        times = start + (numbers.astype(np.int64) * unit).astype("timedelta64[us]")
    julian = calendar != "proleptic_gregorian" and (start < GREGORIAN_STARTS or (times < GREGORIAN_STARTS).any())
    return numbers if julian else times


_LONGER = 1.5
"""A step of a coordinate over the usual one, from which on it is a gap."""


def breaks(numbers: NDArray[Any]) -> NDArray[np.bool_]:
    """The elements of a coordinate before which it leaves something out, stands still or turns back."""
    steps = np.diff(numbers.astype(np.float64))
    usual = np.median(steps) if len(steps) else 0.0
    found = np.zeros(len(numbers), np.bool_)
    # Months are of 28 to 31 days; a missing one makes at least 59. Another year may also begin before the last ends.
    found[1:] = (np.abs(steps) > _LONGER * abs(usual)) | ((steps * usual <= 0) & (usual != 0))
    return found


def is_time_unit(units: str) -> bool:
    """Whether numbers of these units are times, in whichever calendar."""
    return _parse_units(units)[1] is not None


def _parse_units(units: str) -> tuple[re.Match[str] | None, int | None]:
    """The parts of `<unit> since <date>`, and the unit in microseconds."""
    match = _SINCE.fullmatch(units)
    word = match[1].lower() if match else ""
    return match, _MICROSECONDS.get(_SHORT.get(word, word))


# -- what is data

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
