"""A small source with everything a source may have: packed integers, floats, missing values, times; and faults."""

import numpy as np

from kit.data.build.source import VariableSpec


class Tiny:
    def __init__(self, time=5, lat=7, lon=9, seed=1, fault=""):
        self.dims, self.shape = ("time", "lat", "lon"), (time, lat, lon)
        packed = {"scale_factor": 0.01, "add_offset": 10.0, "_FillValue": -32768, "units": "degree_Celsius"}
        self.variables = {
            "sst": VariableSpec(np.dtype("int16"), packed | {"long_name": "temperature"}),
            "wind": VariableSpec(np.dtype("float32"), {"units": "m s-1"}),
        }
        self.coordinates = {
            "time": np.datetime64("2000-01-01") + np.arange(time),
            "lat": np.linspace(-80, 80, lat),
            "lon": np.arange(lon) * 10.0,
        }
        self.attributes = {"title": "tiny", "Conventions": "CF-1.11"}
        self.fault = fault
        random = np.random.default_rng(seed)
        self.values = {
            "sst": random.integers(-1000, 1000, self.shape).astype(np.int16),
            "wind": random.normal(size=self.shape).astype(np.float32),
        }
        self.values["sst"][:, 0] = -32768
        self.values["sst"][:2] = -32768
        self.values["wind"][0, 0, 0] = np.nan

    def read(self, name, region):
        block = self.values[name][region]
        if self.fault and name == "wind" and region[0].start >= 2:
            if self.fault == "raise":
                raise RuntimeError("the instrument fell overboard")
            return block[:, :-1] if self.fault == "shape" else block.astype(np.float64)
        return block

    def decoded(self, name):
        """What a reader should see, float64, NaN where missing."""
        values = self.values[name].astype(np.float64)
        if name == "sst":
            values = np.where(self.values[name] == -32768, np.nan, values * 0.01 + 10.0)
        return values
