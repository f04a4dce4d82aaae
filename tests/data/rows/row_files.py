"""The same numbers in every place that rows are read from."""

import numpy as np
import torch
import zarr

PLACES = ("array", "tensor", ".npy", ".pt", "old .pt", "zarr array", "zarr group")


def numbers(rows=53, columns=7, dtype="float32"):
    made = np.random.default_rng(0).integers(0, 100, (rows, columns))
    return made.astype(dtype)


def put(place, folder, values):
    """`values` at a place of that kind: what `open_rows` takes."""
    folder.mkdir(exist_ok=True)
    if place == "array":
        return values
    if place == "tensor":
        return torch.from_numpy(values)
    if place == ".npy":
        np.save(folder / "x.npy", values)
        return folder / "x.npy"
    if place in (".pt", "old .pt"):
        file = folder / f"{place.removesuffix('.pt').strip() or 'new'}.pt"
        torch.save(torch.from_numpy(values), file, _use_new_zipfile_serialization=place == ".pt")
        return file
    chunk = (8, *values.shape[1:])
    if place == "zarr array":
        zarr.create_array(folder / "x.zarr", data=values, chunks=chunk)
        return folder / "x.zarr"
    zarr.open_group(folder / "g.zarr", mode="w").create_array("counts", data=values, chunks=chunk)
    return folder / "g.zarr"
