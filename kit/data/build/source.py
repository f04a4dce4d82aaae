"""What a dataset is built from: variables on common dimensions, any block of which can be computed or fetched alone.

A source promises that `read` depends on its arguments only: the same region gives the same values whatever was read
before and however the array is cut. That makes a build resumable and its shards independent. Values are packed, in the
dtype that is stored; CF attributes (`scale_factor`, `add_offset`, `_FillValue`, `units`, ...) say how they decode.

Booleans are stored as CF and xarray do: as int8, with an attribute that says so, and xarray reads booleans again.

A store keeps attributes as JSON values, without those that other libraries add for themselves. NaN, infinities and
bytes become text. A `_FillValue` of NaN is dropped (NaN is missing anyway), and `missing_value` takes the place of an
absent `_FillValue`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from math import prod
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from kit.config import Config
from kit.data.variables import breaks, is_time_unit
from kit.errors import ConfigError, Problem

Region = tuple[slice, ...]


@dataclass(frozen=True, slots=True)
class VariableSpec:
    """How one variable is stored."""

    dtype: np.dtype[Any]
    attributes: Mapping[str, Any] = field(default_factory=dict)
    """CF attributes; `_FillValue` is the packed missing value, absent when nothing is missing."""

    @property
    def missing(self) -> float | int | None:
        value = self.attributes.get("_FillValue")
        return None if value is None else value.item() if isinstance(value, np.generic) else value

    @property
    def scale_factor(self) -> float:
        return float(self.attributes.get("scale_factor", 1.0))

    @property
    def add_offset(self) -> float:
        return float(self.attributes.get("add_offset", 0.0))


class Source(Protocol):
    """Anything with these six members can be built; no base class is needed.

    Five more are used where they are: `chunks`, how the source itself is cut, by variable, so that few of its chunks
    are read twice; `coordinate_attributes`, the attributes of each coordinate; `left_out`, variables that are not
    among them, each with the reason; `notes`, sentences that a build begins with; and `repeated`, the dimensions that
    a variable lacks and is stored again along.
    """

    dims: tuple[str, ...]
    """Names of the dimensions all variables share, such as `("time", "lat", "lon")`."""
    shape: tuple[int, ...]
    """Their sizes, in elements."""
    variables: Mapping[str, VariableSpec]
    coordinates: Mapping[str, NDArray[Any]]
    """Values along some or all dimensions, one-dimensional; `datetime64` is stored as CF time."""
    attributes: Mapping[str, Any]
    """Of the whole dataset; JSON values."""

    def read(self, name: str, region: Region) -> NDArray[Any]:
        """Packed values of one variable, shape of `region` (one slice with start and stop per dimension)."""
        ...


def chunk_of(source: Source, name: str) -> tuple[int, ...] | None:
    """How the source itself is cut for this variable; None when any region costs no more than itself."""
    chunk = getattr(source, "chunks", {}).get(name)
    return None if chunk is None else tuple(map(min, map(int, chunk), source.shape))


def remarks(config: Config, source: Source) -> Iterator[str]:
    """What may surprise of the data as they will be stored: no fault, and nothing is lost."""
    others = [name for name in source.variables if name not in config.data.variables]
    if config.data.variables and others:
        alone = f"data.arguments: {{variables: {[*config.data.variables]}}} leaves them out"
        yield (
            f"stores {', '.join(others[:3])}{', ...' * (len(others) > 3)} too, which data.variables does not name, as "
            f"another config may; {alone if config.data.source else 'a source without them leaves them out'}"
        )
    for name, lacking in getattr(source, "repeated", {}).items():
        times = prod(source.shape[source.dims.index(dim)] for dim in lacking)
        yield f"stores {name} {times} times over, along {', '.join(lacking)}, which it does not have itself"
    attributes = getattr(source, "coordinate_attributes", {})
    for dim, values in source.coordinates.items():
        gaps = int(breaks(values).sum()) if is_of_time(values, attributes.get(dim, {})) else 0
        if gaps:
            yield (
                f"{dim} leaves out steps or turns back {gaps} time{'s' * (gaps > 1)}: no patch reaches over that with "
                f"data.gap_dimension: {dim}"
            )


def is_of_time(values: NDArray[Any], attributes: Mapping[str, Any]) -> bool:
    """Whether a coordinate counts time."""
    return values.dtype.kind == "M" or is_time_unit(str(attributes.get("units", "")))


def coordinate_notes(
    coordinates: Mapping[str, NDArray[Any]], attributes: Mapping[str, Mapping[str, Any]], left_out: Iterable[str]
) -> Iterator[str]:
    """What of the coordinates is lost or a mistake, in sentences."""
    for dim in left_out:
        yield f"{dim} is left out, as it holds no numbers: elements along it are known by their place alone"
    for dim, values in coordinates.items():
        steps = np.diff(values.astype(np.float64))
        usual = np.median(steps) if len(steps) and is_of_time(values, attributes.get(dim, {})) else 0.0
        if usual and (steps * usual <= 0).any():
            place = np.flatnonzero(steps * usual <= 0)[0] + 1
            yield f"{dim} turns back or stands still at {place} ({values[place - 1]}, then {values[place]})"


def spec_of(dtype: np.dtype[Any], attributes: Mapping[Any, Any]) -> VariableSpec:
    """How a variable of that type, in this machine's byte order, is stored."""
    if dtype.kind == "b":
        return VariableSpec(np.dtype(np.int8), coordinate_attributes({**attributes, "dtype": "bool"}))
    return VariableSpec(dtype, packing_attributes(attributes, dtype))


def read_repeated(read: Callable[[Region], NDArray[Any]], region: Region, stored_axes: tuple[int, ...]) -> NDArray[Any]:
    """A block of an array that has only some dimensions of the region, and is repeated along the others."""
    block = read(tuple(region[axis] for axis in stored_axes))
    sides = [part.stop - part.start for part in region]
    missing = tuple(axis for axis in range(len(region)) if axis not in stored_axes)
    return np.broadcast_to(np.expand_dims(block, missing), sides)


def check_source(source: Any) -> None:
    """Raises: ConfigError: naming the first thing that keeps `source` from being one."""
    lacking = [n for n in ("dims", "shape", "variables", "coordinates", "attributes", "read") if not hasattr(source, n)]
    if lacking:
        raise source_error(
            "source", f"{type(source).__name__} has no {', '.join(lacking)}; see kit.data.build.source.Source"
        )
    dims, shape = tuple(source.dims), tuple(source.shape)
    if len(dims) != len(shape) or len(set(dims)) != len(dims) or not dims:
        raise source_error("source", f"dims {dims} and shape {shape} must be as long as each other, and dims distinct")
    if prod(shape) == 0 or any(size < 0 for size in shape):
        raise source_error("source", f"shape {shape} holds no elements; every size must be at least 1")
    if not source.variables:
        raise source_error("source", f"{type(source).__name__} has no variables")
    for name, spec in source.variables.items():
        if not name or name in dims or "/" in name or name.startswith((".", "__")) or not name.isprintable():
            raise source_error("source", f"variable name {name!r} is empty, a dimension's, or no plain name")
        if np.dtype(spec.dtype).kind not in "iuf":
            raise source_error("source", f"variable {name} has dtype {spec.dtype}; kit stores integers and floats")
    for dim, values in source.coordinates.items():
        if dim not in dims or np.shape(values) != (shape[dims.index(dim)],):
            sizes = dict(zip(dims, shape, strict=True))
            raise source_error("source", f"coordinate {dim} has shape {np.shape(values)}; the dimensions are {sizes}")


def source_error(field_name: str, message: str) -> ConfigError:
    """What is wrong with a field of `data`."""
    return ConfigError([Problem(f"data.{field_name}", message)])


_OF_OTHERS = ("_ARRAY_DIMENSIONS", "_Netcdf4Dimid", "_Netcdf4Coordinates", "_NCProperties", "DIMENSION_LIST", "CLASS",
              "NAME", "REFERENCE_LIST")  # fmt: skip


def json_attributes(attributes: Mapping[Any, Any]) -> dict[str, Any]:
    """Attributes of a dataset, as JSON values."""
    return {str(key): _plain(value) for key, value in attributes.items() if key not in _OF_OTHERS}


def coordinate_attributes(attributes: Mapping[Any, Any]) -> dict[str, Any]:
    """Attributes of a coordinate, which has no missing values."""
    return json_attributes({key: value for key, value in attributes.items() if key != "_FillValue"})


def packing_attributes(attributes: Mapping[Any, Any], dtype: np.dtype[Any]) -> dict[str, Any]:
    """Attributes of a variable stored as `dtype`, with its missing value as a number under `_FillValue`."""
    found = coordinate_attributes(attributes)
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
