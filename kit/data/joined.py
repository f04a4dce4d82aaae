"""Join: several stores as one dataset, without a copy: each chunk is a chunk of one of them.

Along a dimension that they have, such as time, stores follow one another: years of one record. Along one that they do
not have, each is an element of it: members of an ensemble. Without a dimension they lie side by side: variables of one
grid, static fields beside them, and with `match` stores of other resolutions, whose elements are found for those of the
first by the values of coordinates: days beside hours, a degree beside a quarter. A sample is a box of the first store,
and has what matches it of the others.

The invariant: what is joined is cut, packed and compressed alike, and a store that another follows ends with a chunk
(with a shard, where there are shards), so the bytes of a chunk are those that lie in its store. What lies side by side
is cut as it likes. Elements go by their place, so the coordinates of dimensions that stores share must be equal, as
with xarray's `join="exact"`, unless those of the first store are to hold for all (`"override"`). What cannot be joined
so is refused with the reason; xarray joins it by reading, and `kit.data.PatchData(config, xarray_object)` takes that.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from datetime import timedelta
from functools import partial
from itertools import pairwise
from math import gcd, log, sqrt
from os import PathLike
from typing import Any, Literal, Self

import numpy as np
from numpy.typing import NDArray
from zarr.abc.store import ByteRequest, Store
from zarr.core.buffer import Buffer, BufferPrototype, default_buffer_prototype
from zarr.storage import MemoryStore, WrapperStore

from kit.config import Config
from kit.data.dataset import Dataset, StoreDataset, XarrayDataset, XarrayStore
from kit.data.files import split_group
from kit.data.open_dataset import open_dataset, open_url
from kit.data.places import Match, Matched, difference, match_values, usual_step
from kit.data.stores.url import read_object, redact
from kit.data.variables import CALENDARS, GREGORIAN_STARTS, NUMBERS, ArrayInfo, is_time_unit
from kit.errors import ConfigError, Problem

_ALIKE = ("dims", "dtype", "chunk", "shard", "scale_factor", "add_offset", "missing", "also_missing")
_DOCUMENTS = ("zarr.json", ".zarray")
_AT_ONCE = 16
"""Stores that are opened."""
Unmatched = Literal["refuse", "leave-out", "missing"]
Align = Literal["exact", "override"]


@dataclass(frozen=True, kw_only=True, repr=False)
class JoinedDataset(StoreDataset):
    """A `Dataset` over several; it pickles with them."""

    parts: tuple[Dataset, ...] = field(repr=False)
    dimension: str
    notes: tuple[str, ...] = ()
    """What of the first store has no match in another, and which coordinates are not alike."""
    sources: Mapping[str, ChunkPlaces] = field(default_factory=dict, compare=False, repr=False)

    def locate(self, key: str) -> tuple[Dataset, str]:
        found = find_object(self.sources, key)
        return super().locate(key) if found is None else self.parts[found[0]].locate(found[1])

    def coordinate(self, name: str, *, ends: bool = False) -> NDArray[Any]:
        if name == self.dimension and name in self.parts[0].coordinates:
            values = np.concatenate([part.coordinate(name, ends=ends) for part in self.parts])
            return values[[0, -1]] if ends else values
        owner = next((part for part in self.parts if name in part.coordinates), None)
        return super().coordinate(name, ends=ends) if owner is None else owner.coordinate(name, ends=ends)

    def _headline(self) -> str:
        how = f"along {self.dimension}" if self.dimension else "side by side"
        return "; ".join([f"{super()._headline()}; {len(self.parts)} stores {how}", *self.notes])


def join(
    stores: Sequence[Dataset | str | PathLike[str]],
    dimension: str = "",
    credentials: str = "default",
    *,
    match: Mapping[str, Match] | None = None,
    unmatched: Unmatched = "refuse",
    align: Align = "exact",
) -> JoinedDataset:
    """Several stores as one dataset; nothing is read but metadata and coordinates, and nothing is copied.

    Args:
        stores: Paths, URLs or datasets that are open.
        dimension: Along which they follow one another, such as `time`. One that they do not have makes each store an
            element of it, such as `member`. Empty puts variables of different stores side by side.
        credentials: As `data.credentials`, for all URLs.
        match: How the elements of stores of another resolution are found along each dimension that differs, as
            `data.match`. A variable whose name an earlier store has is named with its store's number, as `sst_2`.
        unmatched: What an element of the first store without a match is, as `data.unmatched`.
        align: Whether coordinates must be equal, and go on along `dimension` from store to store ("exact"), or those
            of the first store hold for all, and stores follow as they come ("override"), as `data.align`.

    Returns:
        The dataset, for `kit.data.PatchData(config, dataset)`. `data.more`, `data.join` and `data.match` of a config do
        the same.

    Raises:
        ConfigError: when they are not cut, packed and named alike, with what differs; when coordinates differ, with
            store, dimension and the first place; when one begins before the one that it follows has ended; when they
            cannot be compared, or elements have no match.
        StoreError: when one cannot be opened.

    Example:
        >>> members = kit.data.join([store, store], "member")
        >>> members.arrays["sst"].dims
        ('member', 'time', 'lat', 'lon')
        >>> both = kit.data.join([store, store], match={"time": "last"})
        >>> both.select(["sst", "sst_2"])[1].matched[0].index[:3].tolist()
        [0, 1, 2]
    """
    if isinstance(stores, str):  # else its letters
        raise _error(f"{redact(stores)} is one store; give at least two, as a list")
    parts = _open_all(partial(open_dataset, credentials=credentials), stores)
    if len(parts) < 2:
        raise _error(f"{len(parts)} store is nothing to join; give at least two")
    arrays: dict[str, ArrayInfo] = {}
    sources: dict[str, ChunkPlaces] = {}
    notes: tuple[str, ...] = ()
    if match and dimension:
        raise _error(f"{dimension!r} makes stores follow one another, which data.match does not; set one of them")
    sizes = _sizes(parts[0])
    for name in match or ():
        if name not in sizes or not any(name in _sizes(part) for part in parts[1:]):
            raise _error(f"the first store and another must have {name!r}; they have {', '.join(sizes)}", "match")
    beside = not dimension
    _refuse_unlike(parts, {dimension, *(match or {})}, align, sized=bool(match or dimension), beside=beside)
    if match:
        arrays, sources, notes = _matched(parts, match, unmatched)
    elif not dimension:
        for part in parts:
            for name, info in part.arrays.items():
                if name in arrays:
                    raise _error(
                        f"two stores have a variable {name!r}; give a dimension that they follow each other in, or "
                        "build one store of both, from an xarray.Dataset that names them apart"
                    )
                arrays[name] = info
    else:
        follow = dimension in sizes
        if follow and align == "exact":
            _refuse_disorder(parts, dimension)
        for name, info in parts[0].arrays.items():
            if all(name in part.arrays for part in parts) and (dimension in info.dims or not follow):
                arrays[name] = _along(dimension, name, parts)
            elif dimension not in info.dims:
                arrays[name] = info  # a static field, of the first store
        static = [name for name in arrays if dimension not in arrays[name].dims]
        notes = (*_unlike_coordinates(parts, dimension, align), *_fields_of_first(parts, static))
    if not arrays:
        raise _error("the stores have no variable in common")
    sources = sources or {name: _places(parts, dimension, name, info) for name, info in arrays.items()}
    return JoinedDataset(
        url=" + ".join(part.url for part in parts[:2]) + (f" + {len(parts) - 2} more" if len(parts) > 2 else ""),
        credentials=credentials, arrays=arrays, coordinates=parts[0].coordinates, attributes=parts[0].attributes,
        asides={name: why for part in parts for name, why in part.asides.items()},
        strict=any(part.strict or part.manifest is not None for part in parts),
        opener=partial(_open, parts, arrays, sources), parts=parts, dimension=dimension, notes=notes,
        sources=sources,
    )  # fmt: skip


def join_config(config: Config) -> JoinedDataset:
    """The dataset of a config that names several stores."""
    data = config.data
    parts = _open_all(partial(open_url, config), (data.url, *data.more))
    return join(parts, data.join, data.credentials, match=data.match, unmatched=data.unmatched, align=data.align)


def _open_all(
    open_one: Callable[[Any], Dataset], stores: Sequence[Dataset | str | PathLike[str]]
) -> tuple[Dataset, ...]:
    """All of them; those far away at once."""
    opened = _each(open_one, [one for one in stores if not isinstance(one, Dataset)])
    return tuple(one if isinstance(one, Dataset) else next(opened) for one in stores)


def _each(call: Callable[[Any], Any], stores: Sequence[Any]) -> Iterator[Any]:
    """What it gives for each; of those far away at once, as each waits for answers. Libraries of files want one thread.

    Args:
        stores: Places, or whatever has a `url`.
    """

    def is_far(one: Any) -> bool:
        url = getattr(one, "url", one)
        return isinstance(url, str) and "://" in url and split_group(url) is None

    with ThreadPoolExecutor(_AT_ONCE, "kit-open-stores") as threads:
        found = [threads.submit(call, one) if is_far(one) else one for one in stores]
        near = [one if isinstance(one, Future) else call(one) for one in found]
        return iter([one.result() if isinstance(one, Future) else one for one in near])


def _matched(
    parts: Sequence[Dataset], match: Mapping[str, Match], unmatched: Unmatched
) -> tuple[dict[str, ArrayInfo], dict[str, ChunkPlaces], tuple[str, ...]]:
    """The variables of all stores on the grid of the first, where each lies, and what has no match."""
    first, sizes = parts[0], _sizes(parts[0])
    arrays, sources = dict(first.arrays), {name: ChunkPlaces(name, (0,)) for name in first.arrays}
    together, notes = dict.fromkeys(sizes, 1), list[str]()
    for number, part in enumerate(parts[1:], 2):
        found: dict[str, Matched] = {}
        for name in [name for name in _sizes(part) if name in sizes]:
            if name not in match:
                continue
            one = found[name] = _match(first, part, name, match[name], unmatched == "leave-out")
            together[name] = max(together[name], one.longest_run)
            if one.known is not None:
                notes.append(_unmatched_note(first, part, name, match[name], one))
                if unmatched == "refuse":
                    raise _error(
                        f"{notes[-1]}; leave-out leaves out patches that hold one, missing masks it", "unmatched"
                    )
        if any(info.matched for info in part.arrays.values()):
            raise _error("stores that are matched already cannot be matched to another; join all at once", "match")
        for name, info in part.arrays.items():
            own = f"{name}_{number}" if name in arrays else name
            shape = tuple(sizes.get(dim, size) for dim, size in zip(info.dims, info.shape, strict=True))
            sources[own] = ChunkPlaces(name, (number - 1,))
            arrays[own] = replace(info, name=own, shape=shape, matched=tuple(map(found.get, info.dims)))
    for name, info in first.arrays.items():
        before = info.together or (1,) * len(info.dims)
        most = (max(together[dim], one) for dim, one in zip(info.dims, before, strict=True))
        arrays[name] = replace(info, together=tuple(most))
    return arrays, sources, tuple(f"{note}: {unmatched.replace('-out', ' out')}" for note in notes)


def _sizes(part: Dataset) -> dict[str, int]:
    return {dim: size for info in part.arrays.values() for dim, size in zip(info.dims, info.shape, strict=True)}


def _match(first: Dataset, part: Dataset, name: str, how: Match, leave_out: bool) -> Matched:
    """The elements of a store that match those of the first along one dimension."""
    (mine, kind), (theirs, other_kind) = (_numbers(one, name) for one in (first, part))
    if kind != other_kind:
        raise _error(
            f"{name} is {kind} in {redact(first.url)} and {other_kind} in {redact(part.url)}, which cannot be "
            "compared; write one anew, such as with xarray's convert_calendar",
            "match",
        )
    return match_values(mine, theirs, how, leave_out=leave_out)


def _unmatched_note(first: Dataset, part: Dataset, name: str, how: Match, one: Matched) -> str:
    """What has no match, the first of it, and the bound."""
    assert one.known is not None
    lost, (numbers, kind) = np.flatnonzero(~one.known), _numbers(part, name)
    step = usual_step(numbers)
    shown = timedelta(microseconds=int(step)) if kind.startswith("times") else step
    bounds = {"equal": "equal to it", "last": f"at or less than {shown} before", "nearest": f"within half of {shown}"}
    return (
        f"{len(lost):,} of {len(one.known):,} elements along {name} of {redact(first.url)}, first "
        f"{first.coordinate(name)[lost[0]]}, have none in {redact(part.url)} {bounds[how]}"
    )


def _refuse_unlike(parts: Sequence[Dataset], but: set[str], align: Align, *, sized: bool, beside: bool) -> None:
    """Refuse stores that differ along a dimension that they share; what manifests tell to be stored alike is not read.

    Args:
        but: Dimensions along which they may differ.
        sized: Whether they must be of one size.
        beside: Whether they lie side by side, so that matching is a way out.

    Raises:
        ConfigError: with the store, the dimension, and the first place that differs.
    """
    first, sizes = parts[0], _sizes(parts[0])
    override = "data.align: override takes those of the first store for all, element by element"
    for name in [name for name in sizes if name not in but]:
        others = [part for part in parts[1:] if name in _sizes(part)]
        for part in others:
            if sized and sizes[name] != _sizes(part)[name]:
                counts = f"{sizes[name]} elements in {redact(first.url)} and {_sizes(part)[name]} in {redact(part.url)}"
                way_out = "match it too, such as with nearest" if beside else "select or build the same of each"
                raise _error(f"{name} has {counts}; {way_out}", "match" if beside else "join")
        others = [
            part for part in others
            if sizes[name] == _sizes(part)[name] and _is_index(part, name) and not _same_bytes(first, part, name)
        ]  # fmt: skip
        if align == "override" or not others or not _is_index(first, name):
            continue
        mine, *each = _each(partial(_index, name), [first, *others])
        for part, theirs in zip(others, each, strict=True):
            if found := difference(mine, theirs):
                way_out = f"match {name} by its values, or {override}" if beside else override
                raise _error(
                    f"{name} of {redact(part.url)} differs from {redact(first.url)}: {found}; {way_out}", "align"
                )


def _is_index(part: Dataset, name: str) -> bool:
    """Whether a dimension has a coordinate along it."""
    return name in part.coordinates and part.coordinates[name].dims == (name,)


def _same_bytes(first: Dataset, part: Dataset, name: str) -> bool:
    """Whether manifests tell that a coordinate is stored alike."""
    mine, theirs = (_checksums(one, name) for one in (first, part))
    return bool(mine) and mine == theirs and first.coordinates[name].units == part.coordinates[name].units


def _checksums(part: Dataset, name: str) -> list[Any] | None:
    return None if part.manifest is None else [one.crc32c for one in part.manifest.objects if one.array == name]


def _index(name: str, part: Dataset) -> tuple[NDArray[Any], str]:
    """The values along a dimension, and what they are where they are times that numpy does not have."""
    values, units = part.coordinate(name), part.coordinates[name].units
    if values.dtype.kind == "O":
        return values, str(getattr(values[0], "calendar", ""))
    if values.dtype.kind not in "iuf" or not is_time_unit(units):
        return values, ""
    holder = next((one for one in getattr(part, "parts", ()) if name in one.coordinates), part)
    array = None if isinstance(holder, XarrayDataset) else holder.open_array(name)
    return values, units if array is None else f"{units} of the calendar {array.attrs.get('calendar', 'standard')}"


def _numbers(part: Dataset, name: str) -> tuple[NDArray[Any], str]:
    """As `comparable`, of a coordinate to match by.

    Raises:
        ConfigError: where there is none, and where it neither rises nor falls throughout.
    """
    if name not in part.coordinates:
        raise _error(f"{redact(part.url)} has no coordinate {name!r} to match by; add one where it is written", "match")
    numbers, kind = comparable(part, name)
    steps = np.diff(numbers)
    if not ((steps > 0).all() or (steps < 0).all()):
        raise _error(
            f"{name} of {redact(part.url)} neither rises nor falls throughout; sort it, each value once", "match"
        )
    return numbers, kind


def comparable(part: Dataset, name: str, *, ends: bool = False) -> tuple[NDArray[Any], str]:
    """A coordinate in numbers, also of several stores, and what they are: those of one kind can be compared.

    Times are microseconds where their calendar is known; cftime knows those that numpy does not. `ends` is as of
    `Dataset.coordinate`, of each store.
    """
    if isinstance(part, JoinedDataset):
        holders = [one for one in part.parts if name in one.coordinates]
        pairs = [comparable(one, name, ends=ends) for one in (holders if name == part.dimension else holders[:1])]
        return np.concatenate([numbers for numbers, _ in pairs]), " and ".join(sorted({kind for _, kind in pairs}))
    values, units = part.coordinate(name, ends=ends), part.coordinates[name].units
    if values.dtype.kind == "M":
        return values.astype("datetime64[us]").astype(np.int64), "times"
    if values.dtype.kind != "O" and not is_time_unit(units):
        return (values.astype(np.float64) if values.dtype.kind in "fiu" else values), "numbers"
    if values.dtype.kind != "O":
        calendar = str(part.open_array(name).attrs.get("calendar", "standard")).lower()
        try:
            from cftime import num2date
        except ImportError:
            return values, f"{units} of the calendar {calendar}"
        values = np.asarray(num2date(values, units, calendar))
    from cftime import date2num

    calendar = str(values[0].calendar)
    numbers = date2num(values, "microseconds since 1970-01-01", calendar).astype(np.int64)
    known = calendar in CALENDARS and numbers.min() >= GREGORIAN_STARTS.astype(np.int64)
    return numbers, "times" if known else f"times of the calendar {calendar}"


def _refuse_disorder(parts: Sequence[Dataset], dimension: str) -> None:
    """Refuse a store that does not go on where the one before it ends: years in another order, or one of them twice.

    A coordinate rises or falls as its first two values do. Names, and times that nobody here can compare, go by
    their place.

    Raises:
        ConfigError: with both stores and the two values.
    """
    parts = [part for part in parts if _is_index(part, dimension) and part.coordinates[dimension].shape != (0,)]
    found = list(_each(partial(comparable, name=dimension, ends=True), parts))
    if len({kind for _, kind in found}) != 1 or any(numbers.dtype.kind not in NUMBERS for numbers, _ in found):
        return
    values = np.concatenate([numbers for numbers, _ in found])
    rises = next((value > values[0] for value in values if value != values[0]), True)
    for (before, (ended, _)), (after, (begun, _)) in pairwise(zip(parts, found, strict=True)):
        if begun[0] == ended[-1] or (begun[0] > ended[-1]) != rises:
            last, first = (one.coordinate(dimension, ends=True) for one in (before, after))
            raise _error(
                f"{dimension} of {redact(after.url)} begins at {first[0]}, and that of {redact(before.url)}, which it "
                f"follows, ends at {last[-1]}; give stores in order, each element once, or data.align: override takes "
                "them as they come",
                "align",
            )


def _unlike_coordinates(parts: Sequence[Dataset], dimension: str, align: Align) -> Iterator[str]:
    """The coordinates that are others in another store, as far as units, sizes and manifests tell; nothing is read."""
    first = parts[0]
    compared = {name for name in first.coordinates if align == "exact" and _is_index(first, name)}
    for name in [name for name in first.coordinates if name not in {dimension, *compared}]:
        for part in [part for part in parts[1:] if name in part.coordinates]:
            mine, theirs = (one.coordinates[name] for one in (first, part))
            sums = [_checksums(one, name) for one in (first, part)]
            unlike = (mine.units, mine.shape) != (theirs.units, theirs.shape)
            if unlike or (None not in sums and sums[0] != sums[1]):
                yield f"{name} is another in {redact(part.url)}, whose elements go by their place"
                break


def _fields_of_first(parts: Sequence[Dataset], names: Sequence[str]) -> Iterator[str]:
    """Fields that several stores have and that are taken of the first: nothing is read to compare them."""
    first = parts[0]
    for name in names:
        others = [part for part in parts[1:] if name in part.arrays]
        unlike = next((part for part in others if _shape(part, name) != _shape(first, name)), None)
        if unlike is not None:
            yield f"{name} is another in {redact(unlike.url)}; that of {redact(first.url)} is taken for all"
        elif others:
            yield f"{name} of {redact(first.url)} is taken for all; it is not compared with that of the others"


def _shape(part: Dataset, name: str) -> tuple[tuple[int, ...], str]:
    info = part.arrays[name]
    return info.shape, str(info.dtype)


def _moments(parts: Sequence[Dataset], name: str) -> dict[str, float | None]:
    """Mean and deviation of a variable over stores that kit built, whose manifests tell those of each."""
    found = [None if part.manifest is None else part.manifest.arrays.get(name) for part in parts]
    known = [(one.valid, one.mean, one.deviation) for one in found if one is not None]
    moments = [(n, mean, deviation) for n, mean, deviation in known if mean is not None and deviation is not None]
    valid = sum(n for n, _, _ in moments)
    if len(known) < len(parts) or not valid or valid < sum(n for n, _, _ in known):
        return {"mean": None, "deviation": None}
    mean = sum(n * one for n, one, _ in moments) / valid
    return {"mean": mean, "deviation": sqrt(sum(n * (d * d + (one - mean) ** 2) for n, one, d in moments) / valid)}


def _along(dimension: str, name: str, parts: Sequence[Dataset]) -> ArrayInfo:
    infos = [part.arrays[name] for part in parts]
    first = infos[0]
    for other in infos[1:]:
        for attribute in _ALIKE:
            if getattr(first, attribute) != getattr(other, attribute):
                mine, theirs = getattr(first, attribute), getattr(other, attribute)
                way_out = "rebuild one alike"
                if attribute in ("chunk", "shard") and dimension in first.dims and other.dims == first.dims:
                    way_out = f"build each anew with {_layout_for_all(infos, first.dims.index(dimension))}"
                raise _error(f"{name} has {attribute} {mine} in one store and {theirs} in another; {way_out}")
    moments: Any = _moments(parts, name)
    if dimension not in first.dims:
        if any(other.shape != first.shape for other in infos):
            raise _error(f"{name} has {first.shape} in one store and another shape elsewhere; name a dimension it has")
        return replace(
            first, shape=(len(infos), *first.shape), dims=(dimension, *first.dims), chunk=(1, *first.chunk),
            shard=None if first.shard is None else (1, *first.shard), **moments,
        )  # fmt: skip
    axis = first.dims.index(dimension)
    side = (first.shard or first.chunk)[axis]
    for other in infos:
        if [*other.shape[:axis], *other.shape[axis + 1 :]] != [*first.shape[:axis], *first.shape[axis + 1 :]]:
            raise _error(f"{name} has {first.shape} in one store and {other.shape} in another")
        if other is not infos[-1] and other.shape[axis] % side:
            raise _error(
                f"{name} has {other.shape[axis]} elements along {dimension!r} in a store that another follows, which "
                f"do not end with a {'shard' if first.shard else 'chunk'} of {side}; give an xarray object that joins "
                f"them, or build each anew with {_layout_for_all(infos, axis)}"
            )
    shape = (*first.shape[:axis], sum(one.shape[axis] for one in infos), *first.shape[axis + 1 :])
    return replace(first, shape=shape, **moments)


def _layout_for_all(infos: Sequence[ArrayInfo], axis: int) -> str:
    """The settings nearest to the first store's layout with which every store that another follows ends with a chunk,
    and with a shard."""
    first = infos[0]
    whole = gcd(*(one.shape[axis] for one in infos[:-1]))
    sides = [side for side in range(1, whole + 1) if whole % side == 0]
    chunk = min(sides, key=lambda side: abs(log(side / first.chunk[axis])))
    settings = {"chunk": (first.chunk, chunk)}
    if first.shard is not None:
        most = max(chunk, first.shard[axis])
        settings["shard"] = (first.shard, max(side for side in sides if side % chunk == 0 and side <= most))
    return " and ".join(
        f"chunking.{name}: {dict(zip(first.dims, (*given[:axis], side, *given[axis + 1 :]), strict=True))}"
        for name, (given, side) in settings.items()
    )


def _error(message: str, setting: str = "join") -> ConfigError:
    return ConfigError([Problem(f"data.{setting}", message)])


@dataclass(frozen=True)
class ChunkPlaces:
    """Where the chunks of one array lie."""

    name: str
    """Of the array there."""
    parts: tuple[int, ...]
    """The stores that hold it, in order."""
    axis: int | None = None
    """The dimension that is joined; None where one store holds it whole."""
    starts: tuple[int, ...] = ()
    """Along an axis that the stores have: the first object of each."""

    def find(self, place: Sequence[int]) -> tuple[int, list[int]]:
        """The store, and the coordinates of an object in it."""
        if self.axis is None:
            return self.parts[0], [*place]
        if not self.starts:
            return self.parts[place[0]], [*place[1:]]
        part = int(np.searchsorted(self.starts, place[self.axis], "right")) - 1
        inside = [*place]
        inside[self.axis] -= self.starts[part]
        return self.parts[part], inside


def _places(parts: Sequence[Dataset], dimension: str, name: str, info: ArrayInfo) -> ChunkPlaces:
    """Where the chunks of an array lie that no store was matched for."""
    holders = tuple(number for number, part in enumerate(parts) if name in part.arrays)
    own = parts[holders[0]].arrays[name]
    if len(holders) == 1 or not dimension or info == own:
        return ChunkPlaces(name, holders[:1])
    if dimension not in own.dims:
        return ChunkPlaces(name, holders, 0)
    axis = own.dims.index(dimension)
    side = (own.shard or own.chunk)[axis]
    counts = [-(-part.arrays[name].shape[axis] // side) for part in parts]
    return ChunkPlaces(name, holders, axis, tuple(np.cumsum([0, *counts[:-1]]).tolist()))


def find_object(sources: Mapping[str, ChunkPlaces], key: str) -> tuple[int, str] | None:
    """The number of the store that holds an object, and its key there; None for metadata, which lies in none."""
    name = next((name for name in sources if key.startswith(f"{name}/")), None)
    rest = key[len(name) + 1 :] if name else ""
    if name is None or rest in (*_DOCUMENTS, ".zattrs"):
        return None
    prefix, mark = ("c/", "/") if rest.startswith("c/") else ("c.", ".") if rest.startswith("c.") else ("", "")
    inside = rest.removeprefix(prefix)
    mark = mark or ("/" if "/" in inside else ".")
    part, place = sources[name].find([int(one) for one in inside.split(mark)])
    return part, f"{sources[name].name}/{prefix}{mark.join(map(str, place))}"


def _open(parts: tuple[Dataset, ...], arrays: Mapping[str, ArrayInfo], sources: Mapping[str, ChunkPlaces]) -> Store:
    """A store whose chunks are those of the parts."""
    stores = [part.open_store() for part in parts]
    memory = MemoryStore()
    documents: dict[str, dict[str, Any]] = {"zarr.json": {"zarr_format": 3, "node_type": "group"}}
    for name, info in arrays.items():
        source = sources[name]
        found = [_document(stores[number], source.name, parts[number].url) for number in source.parts]
        base, document = found[0]
        if source.axis is not None:
            added = len(info.shape) - len(parts[source.parts[0]].arrays[name].shape)
            document = _adapted(document, info.shape, added)
            for number, (_, other) in zip(source.parts[1:], found[1:], strict=True):
                if _encoding(_adapted(other, info.shape, added)) != _encoding(document):
                    raise _error(
                        f"{redact(parts[number].url)}: {name} is encoded in another way than in the first store"
                    )
        documents[f"{name}/{base}"] = document
    for key, values in documents.items():
        memory._store_dict[key] = default_buffer_prototype().buffer.from_bytes(json.dumps(values).encode())
    return JoinedStore(memory, [*zip(stores, (part.url for part in parts), strict=True)], sources)


def _document(store: Store, name: str, url: str) -> tuple[str, dict[str, Any]]:
    for base in _DOCUMENTS:
        data = read_object(store, f"{name}/{base}", url)
        if data is not None:
            return base, json.loads(data)
    raise _error(f"{redact(url)}: {name} has no metadata that can be joined")


def _encoding(document: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in document.items() if key not in ("attributes", "consolidated_metadata")}


def _adapted(document: Mapping[str, Any], shape: tuple[int, ...], added: int) -> dict[str, Any]:
    """An array's metadata with another shape, and with dimensions of one element in front of each chunk."""
    ones = [1] * added
    changed = dict(document) | {"shape": [*shape]}
    if "chunks" in document:  # version 2
        return changed | {"chunks": [*ones, *document["chunks"]]}
    grid = dict(document["chunk_grid"])
    grid["configuration"] = {"chunk_shape": [*ones, *grid["configuration"]["chunk_shape"]]}
    codecs = []
    for codec in document["codecs"]:
        if added and codec["name"] == "transpose":
            raise _error("chunks that are stored transposed have no further dimension; join along one that they have")
        settings = dict(codec.get("configuration") or {})
        if "chunk_shape" in settings:
            settings["chunk_shape"] = [*ones, *settings["chunk_shape"]]
        codecs.append({"name": codec["name"], "configuration": settings})
    names = document.get("dimension_names")
    changed["dimension_names"] = None if names is None else [*([None] * added), *names]
    return changed | {"chunk_grid": grid, "codecs": codecs}


class JoinedStore(WrapperStore[MemoryStore]):
    """The metadata of what is joined in memory, and the chunks of its stores; `held` are those, with their URLs."""

    def __init__(
        self, store: MemoryStore, held: Sequence[tuple[Store, str]], sources: Mapping[str, ChunkPlaces]
    ) -> None:
        super().__init__(store)
        self.held, self._sources = held, sources

    def _with_store(self, store: MemoryStore) -> Self:
        return type(self)(store, self.held, self._sources)

    def behind(self, key: str) -> tuple[Store, str, str] | None:
        """The store that an object lies in, its URL, and the key there; None for metadata, which lies in memory."""
        found = find_object(self._sources, key)
        return None if found is None else (*self.held[found[0]], found[1])

    async def get(self, key: str, prototype: BufferPrototype, byte_range: ByteRequest | None = None) -> Buffer | None:
        found = self.behind(key)
        if found is None:
            return await self._store.get(key, prototype, byte_range)
        store, _, there = found
        if isinstance(store, XarrayStore):  # it computes, which would hold up the loop
            return prototype.buffer.from_array_like(await asyncio.to_thread(store.cutter.cut, there))
        return await store.get(there, prototype, byte_range)

    async def exists(self, key: str) -> bool:
        found = self.behind(key)
        return await self._store.exists(key) if found is None else await found[0].exists(found[2])

    async def getsize(self, key: str) -> int:
        found = self.behind(key)
        return await self._store.getsize(key) if found is None else await found[0].getsize(found[2])

    def close(self) -> None:
        for store, _ in self.held:
            store.close()
        super().close()
