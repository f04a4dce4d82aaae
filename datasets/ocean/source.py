"""A believable ocean made of arithmetic: surface temperature and currents of any size, any block computed on its own.

Continents, climate and coasts are drawn once on a quarter-degree map and interpolated; seasons depend on time and
latitude; eddies are waves in longitude whose phase moves westward, faster near the equator, summed as one matrix
product per time step. The factors of that product are whole numbers, so its sums are exact in any order: a block has
the same bytes however the array is cut. Only the block asked for, and the map, are ever in memory.

Everything here is synthetic: no measurement and no model output is in it.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kit.data.build.source import Region, VariableSpec

Array = NDArray[Any]

MISSING = -32768
DAYS_PER_STEP = 5
_MAP_ROWS, _MAP_COLUMNS = 720, 1440
_LAND_FRACTION = 0.30
_WAVES = 64
"""Zonal wavenumbers of the eddies."""
_BAND_DEGREES = 7.5
"""Latitude bands have waves of their own; neighbours blend."""
_UNIT = 2.0**-20
"""Step of the whole numbers in the matrix product; 64 waves of 2^20 × 2^20 stay far below 2^53."""
_FREEZING = -1.8


class Ocean:
    """A source of `sst`, `u` and `v` with dimensions (time, lat, lon), five days apart.

    Args:
        time: number of time steps, from 1 January 2000.
        lat: number of latitudes, south to north, cell centres.
        lon: number of longitudes, from 0 degrees east, cell centres.
        seed: which planet.

    Raises:
        ValueError: for a size below 1 or a negative seed.
    """

    def __init__(self, time: int = 48, lat: int = 180, lon: int = 360, seed: int = 8) -> None:
        for name, size in {"time": time, "lat": lat, "lon": lon}.items():
            if size < 1:
                raise ValueError(f"{name} is {size}; it must be at least 1")
        self.dims = ("time", "lat", "lon")
        self.shape = (time, lat, lon)
        self.variables: Mapping[str, VariableSpec] = _variables()
        self._lat = -90 + (np.arange(lat) + 0.5) * (180 / lat)
        self._lon = (np.arange(lon) + 0.5) * (360 / lon)
        days = np.arange(time) * np.timedelta64(DAYS_PER_STEP, "D")
        self.coordinates: Mapping[str, NDArray[Any]] = {
            "time": np.datetime64("2000-01-01", "s") + days, "lat": self._lat, "lon": self._lon,
        }  # fmt: skip
        self.attributes: Mapping[str, Any] = {
            "title": "Synthetic ocean surface", "source": "computed; no observation or model output", "seed": seed,
            "license": "CC0-1.0", "Conventions": "CF-1.11",
        }  # fmt: skip
        self._maps = _planet(seed)
        self._eddies = _Eddies(seed)
        self._background = lru_cache(maxsize=8)(self._make_background)

    def read(self, name: str, region: Region) -> NDArray[np.int16]:
        """Packed values of one block, shape `(time, lat, lon)` of the region."""
        times, rows, columns = (range(*part.indices(size)) for part, size in zip(region, self.shape, strict=True))
        spec = self.variables[name]
        mean, amplitude, land = self._background(name, rows, columns)
        waves = self._eddies.along_longitude(np.radians(self._lon[columns.start : columns.stop]), name)
        lat = self._lat[rows.start : rows.stop]
        tables = self._eddies.along_latitude(lat, name)
        packed = np.empty((len(times), len(rows), len(columns)), np.int16)
        for index, step in enumerate(times):
            days = float(step * DAYS_PER_STEP)
            field: Array = self._eddies.coefficients(days, *tables) @ waves
            field *= amplitude
            field += mean
            if name == "sst":
                field += _season(days, lat)[:, None]
                np.maximum(field, _FREEZING, out=field)
            packed[index] = _pack(field, land, spec)
        return packed

    def _make_background(self, name: str, rows: range, columns: range) -> tuple[Array, Array, NDArray[np.bool_]]:
        """What does not change with time: the mean, the strength of eddies, and where land is, each (lat, lon)."""
        lat, lon = self._lat[rows.start : rows.stop], self._lon[columns.start : columns.stop]
        strength, height, damping = (_interpolate(self._maps[key], lat, lon) for key in ("eddies", "height", "damping"))
        mean = _interpolate(self._maps[name], lat, lon)
        if name == "sst":
            front = _interpolate(self._maps["front"], lat, lon)
            return mean, strength * (0.3 + 2.2 * front) * _UNIT**2, height > 0
        return mean * damping, strength * damping * (0.35 * _UNIT**2), height > 0


def _variables() -> dict[str, VariableSpec]:
    def spec(scale: float, offset: float, units: str, standard_name: str, long_name: str) -> VariableSpec:
        attributes = {
            "scale_factor": scale, "add_offset": offset, "_FillValue": MISSING, "units": units,
            "standard_name": standard_name, "long_name": long_name,
        }  # fmt: skip
        return VariableSpec(np.dtype("int16"), attributes)

    return {
        "sst": spec(0.002, 20.0, "degree_Celsius", "sea_surface_temperature", "sea surface temperature"),
        "u": spec(0.0002, 0.0, "m s-1", "surface_eastward_sea_water_velocity", "eastward surface current"),
        "v": spec(0.0002, 0.0, "m s-1", "surface_northward_sea_water_velocity", "northward surface current"),
    }


def _pack(field: Array, land: NDArray[np.bool_], spec: VariableSpec) -> NDArray[np.int16]:
    field -= spec.add_offset
    field *= 1 / spec.scale_factor
    np.rint(field, out=field)
    np.clip(field, -32767, 32767, out=field)
    packed = field.astype(np.int16)
    packed[land] = MISSING
    return packed


def _season(days: float, lat: Array) -> Array:
    """Degrees added by the season: warmest in mid-February in the south, mid-August in the north."""
    strength = 5.5 * np.exp(-(((np.abs(lat) - 42) / 20) ** 2)) * np.sign(lat)
    return strength * float(np.cos(2 * np.pi * (days - 225) / 365.25))


class _Eddies:
    """Waves cos(m·lon + n·lat + w·days + phase), a set for each latitude band; m, n and w are drawn from the seed.

    Derivatives come from the same waves: the eastward current is minus the slope of the stream function along latitude,
    the northward one its slope along longitude, both in units of the typical wavenumber.
    """

    def __init__(self, seed: int) -> None:
        random = np.random.default_rng([seed, 2])
        bands = round(180 / _BAND_DEGREES) + 2
        self.m = np.sort(random.choice(np.arange(6, 100), _WAVES, replace=False)).astype(np.float64)
        self.n = random.normal(0, 38, (bands, _WAVES))
        self.phase = random.uniform(0, 2 * np.pi, (bands, _WAVES))
        centres = -90 + _BAND_DEGREES * np.arange(bands)
        degrees_per_day = 0.04 + 0.30 * np.exp(-((centres / 14) ** 2))
        self.speed = np.radians(degrees_per_day)[:, None] * self.m * random.uniform(0.7, 1.3, (bands, _WAVES))
        self.weight = np.sqrt(2 / _WAVES) * np.exp(-(((self.m - 42) / 34) ** 2)) * 1.4

    def along_longitude(self, lon: Array, name: str) -> Array:
        """Whole numbers `(2 × wave, lon)`: cosines then sines, or their slopes for `v`."""
        angle = self.m[:, None] * lon
        slope = self.m[:, None] / 42
        table = [-slope * np.sin(angle), -slope * np.cos(angle)] if name == "v" else [np.cos(angle), -np.sin(angle)]
        whole: Array = np.rint(np.concatenate(table) / _UNIT)
        return whole

    def along_latitude(self, lat: Array, name: str) -> tuple[NDArray[np.intp], Array, Array]:
        """The two bands each latitude blends `(2, lat)`, and the cosine and sine parts `(2, lat, wave)` of each."""
        place = (lat + 90) / _BAND_DEGREES
        lower = np.floor(place).astype(np.intp)
        bands = np.stack([lower, lower + 1])
        blend = np.stack([np.cos((place - lower) * np.pi / 2), np.sin((place - lower) * np.pi / 2)])[..., None]
        angle = self.n[bands] * np.radians(lat)[:, None] + self.phase[bands]
        cosine, sine = blend * self.weight * np.cos(angle), blend * self.weight * np.sin(angle)
        if name == "u":
            slope = self.n[bands] / 42
            cosine, sine = slope * sine, -slope * cosine
        return bands, cosine, sine

    def coefficients(self, days: float, bands: NDArray[np.intp], cosine: Array, sine: Array) -> Array:
        """Whole numbers `(lat, 2 × wave)`: how much of each wave at each latitude on this day."""
        turn = self.speed * days
        ahead, aside = np.cos(turn)[bands], np.sin(turn)[bands]
        parts = [(cosine * ahead - sine * aside).sum(axis=0), (sine * ahead + cosine * aside).sum(axis=0)]
        return np.rint(np.concatenate(parts, axis=1) / _UNIT)


# -- the map


@lru_cache(maxsize=2)
def _planet(seed: int) -> dict[str, NDArray[np.float32]]:
    """Quarter-degree maps `(lat, lon)`: height, damping, eddies, and the means of sst, u and v."""
    lat = -90 + (np.arange(_MAP_ROWS) + 0.5) * (180 / _MAP_ROWS)
    random = np.random.default_rng([seed, 1])
    height = _height(random, lat)
    land = height > 0
    sea = _blur(1.0 - land, 1.0)
    damping = np.clip(2 * sea - 1, 0, 1)
    west, east = _boundary(land, lat, 1), _boundary(land, lat, -1)
    away = np.abs(lat)[:, None]
    jets = _belt(lat, -48, 7, 0.28) + _belt(lat, 42, 7, 0.13) + _belt(lat, 0, 4, -0.35)
    jets += _belt(lat, -14, 6, -0.12) + _belt(lat, 14, 6, -0.12) + _belt(lat, 5.5, 1.6, 0.20)
    poleward = np.sign(lat)[:, None] * _belt(np.abs(lat), 31, 9, 1.0)
    extension = _belt(np.abs(lat), 39, 6, 1.0) * _blur(west, 9.0)
    energy = (0.35 + 0.12 * _noise(random, 1.5, 3)).clip(0.1) + 2.6 * extension
    energy = energy + 0.9 * _belt(lat, -48, 7, 1.0) + 0.5 * _belt(np.abs(lat), 4, 5, 1.0)
    climate = -2.6 + 31.0 * np.exp(-((away / 43.0) ** 2.6)) - 0.8 * _belt(lat, 0, 3.0, 1.0)
    climate = climate + 11.0 * _belt(np.abs(lat), 38, 9, 1.0) * _blur(west, 2.5)
    climate = climate - 10.0 * _belt(np.abs(lat), 20, 11, 1.0) * _blur(east, 2.0) + 0.9 * _noise(random, 2.6, 2)
    maps = {
        "height": height,
        "damping": damping,
        "eddies": energy * _belt(np.abs(lat), 30, 45, 1.0) * np.clip(1.2 * damping, 0.25, 1),
        "sst": climate,
        "front": np.abs(np.gradient(_blur(climate, 2.0), lat, axis=0)),
        "u": jets * np.ones_like(height) + 0.5 * extension * _belt(np.abs(lat), 40, 4, 1.0),
        "v": 1.1 * poleward * west - 0.15 * poleward * east,
    }
    return {name: np.ascontiguousarray(values, dtype=np.float32) for name, values in maps.items()}


def _belt(lat: Array, centre: float, width: float, strength: float) -> Array:
    return (strength * np.exp(-(((lat - centre) / width) ** 2)))[:, None]


def _height(random: np.random.Generator, lat: Array) -> Array:
    """Fractal height whose positive part covers three tenths of the sphere: continents, islands and polar caps."""
    height = _noise(random, 1.9, 2) + 0.14 * _noise(random, 1.2, 8)
    height += 4.0 / (1 + np.exp((lat + 77) / 2.0))[:, None] - 2.2 * _belt(lat, -58, 8, 1.0)
    height += 1.2 / (1 + np.exp(-(lat - 84) / 2.0))[:, None]
    area = np.broadcast_to(np.cos(np.radians(lat))[:, None], height.shape).ravel()
    order = np.argsort(height, axis=None)[::-1]
    covered = np.cumsum(area[order]) / area.sum()
    shore = float(height.ravel()[order[np.searchsorted(covered, _LAND_FRACTION)]])
    return height - shore


def _noise(random: np.random.Generator, slope: float, largest: int) -> Array:
    """Noise of unit deviation, periodic in longitude, amplitude falling as wavenumber^-slope from `largest` on."""
    spectrum = np.fft.rfft2(random.standard_normal((_MAP_COLUMNS, _MAP_COLUMNS)))
    k = np.hypot(np.fft.fftfreq(_MAP_COLUMNS, 1 / _MAP_COLUMNS)[:, None], np.arange(_MAP_COLUMNS // 2 + 1))
    spectrum *= np.where(k < largest, 0, np.maximum(k, 1) ** -slope)
    field = np.fft.irfft2(spectrum, s=(_MAP_COLUMNS, _MAP_COLUMNS))[:_MAP_ROWS]
    return np.asarray((field - field.mean()) / field.std())


def _boundary(land: NDArray[np.bool_], lat: Array, direction: int) -> Array:
    """Near 1 at sea just east (1) or west (-1) of land, falling off over 250 km."""
    sea = np.concatenate([land, land], axis=1)[:, ::direction]
    place = np.arange(sea.shape[1])
    last = np.maximum.accumulate(np.where(sea, place, -(10**6)), axis=1)
    cells = (place - last)[:, _MAP_COLUMNS:][:, ::direction]
    kilometres = cells * (40_000 / _MAP_COLUMNS) * np.cos(np.radians(lat))[:, None]
    return _blur(np.exp(-kilometres / 250) * ~land, 0.8)


def _blur(values: Array, degrees: float) -> Array:
    """A Gaussian of this width, periodic in longitude and mirrored at the poles."""
    mirrored = np.concatenate([values, values[::-1]])
    sigma = degrees / 360
    rows = np.exp(-2 * (np.pi * sigma * np.fft.fftfreq(len(mirrored), 1 / len(mirrored))) ** 2)
    columns = np.exp(-2 * (np.pi * sigma * np.arange(_MAP_COLUMNS // 2 + 1)) ** 2)
    blurred = np.fft.irfft2(np.fft.rfft2(mirrored) * rows[:, None] * columns, s=mirrored.shape)
    return np.asarray(blurred[:_MAP_ROWS])


def _interpolate(values: NDArray[np.float32], lat: Array, lon: Array) -> Array:
    """Bilinear values of a map at cell centres, `(lat, lon)`."""
    y = np.clip((lat + 90) * (_MAP_ROWS / 180) - 0.5, 0, _MAP_ROWS - 1)
    x = lon * (_MAP_COLUMNS / 360) - 0.5
    south, west = np.floor(y).astype(np.intp), np.floor(x).astype(np.intp)
    north, east = np.minimum(south + 1, _MAP_ROWS - 1), (west + 1) % _MAP_COLUMNS
    up, right = (y - south)[:, None], x - west
    low, high = values[south].astype(np.float64), values[north]
    rows = low + (high - low) * up
    left = rows[:, west % _MAP_COLUMNS]
    return np.asarray(left + (rows[:, east] - left) * right)
