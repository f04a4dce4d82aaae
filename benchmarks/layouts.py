"""Layouts: samples per second that the plan predicts beside what the engine reads, for one field cut in several ways.

    python benchmarks/layouts.py [--requests [STORE ...]] [--others] [--record]

Random patches of 64 × 64 × 4 float32 from a simulated cloud. Each store is probed first (`kit.data.probe`), and the
plan is given what the probe found and nothing else; then the same config is read twice (`kit.data.measure_reading`),
and the faster pass counts, since what else runs on the machine only ever slows one; what was imported is frozen
(`gc.freeze`) as in the processes of kit's trials. ratio = measured / predicted of the store that is there; `ratio to
planned` = measured / what a plan says before there is one, given the compression. The medians of |ratio - 1| judge the
predictions, and how close the layout that is ranked first comes to the fastest one.

`--requests` reads five other stores for short epochs and one longer, in every order, and sets the requests and bytes of
a sample that are predicted beside those counted: four layouts that no other benchmark reads, and a store that kit built
in three dimensions with two variables.

`--others` plans, builds and reads six arrays of other packages, in every order: climate, ocean and weather fields, two
scans of brains. Such small ones fit the memory, which a plan does not count on, so a plan is set beside the store that
it gave, priced as of an array that memory does not hold, and what the store is expected to be asked beside what it was:

    pip install --no-deps --target .peers iris-sample-data nilearn nibabel
"""

from __future__ import annotations

import argparse
import gc
import statistics
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from publish import publish
from streaming_store import BATCH_SIZE, Layout, config_of, write

import kit
from kit.chunks.cost import LayoutCost
from kit.cloud.simulated import SimulatedCloud
from kit.config import Config
from kit.data.build.layout import predict_reading, price_store, stored_fraction
from kit.data.open_dataset import open_dataset
from kit.data.patches.reading import measure_reading

SITUATION = "same region"
LAYOUTS = (
    Layout(chunk=64),
    Layout(chunk=96),
    Layout(chunk=128),
    Layout(chunk=256),
    Layout(chunk=384),
    Layout(chunk=128, compressed=False),
    Layout(chunk=64, shard=1024),
    Layout(chunk=128, compressed=False, together=False),
)
PASSES, SECONDS = 2, 2.0
ZSTD = 2.0
"""Decoded over stored bytes, about."""
UNSEEN = (
    Layout(chunk=96, shard=768),
    Layout(chunk=512),
    Layout(chunk=192, shard=1536, compressed=False),
    Layout(chunk=80, shard=1600, together=False),
)
CASES = (*((order, 4 * BATCH_SIZE) for order in ("random", "grid", "block")), ("block", 64 * BATCH_SIZE))
"""Orders, and samples of an epoch."""
PEERS = Path(__file__).parents[1] / ".peers"
FIELDS, SCANS = "iris_sample_data/sample_data", "nilearn/datasets/data/mni_icbm152"
OTHERS = {
    "air temperature": (
        f"{FIELDS}/A1B_north_america.nc", "air_temperature", {"time": 2, "latitude": 16, "longitude": 16}
    ),
    "sea surface": (f"{FIELDS}/ostia_monthly.nc", "surface_temperature", {"time": 3, "latitude": 9, "longitude": 36}),
    "model levels": (
        f"{FIELDS}/hybrid_height.nc", "air_potential_temperature",
        {"model_level_number": 15, "grid_latitude": 16, "grid_longitude": 16},
    ),
    "ocean": (f"{FIELDS}/orca2_votemper.nc", "votemper", {"dim0": 24, "dim1": 24}),
    "brain": (f"{SCANS}_t1_tal_nlin_sym_09a_converted.nii.gz", "values", {"x": 48, "y": 48, "z": 48}),
    "brain in time": ("nibabel/tests/data/example4d.nii.gz", "values", {"x": 32, "y": 32, "z": 8, "t": 1}),
}  # fmt: skip
"""File, its field, and a patch."""


def row(cloud: SimulatedCloud, layout: Layout) -> dict[str, Any]:
    url = cloud.url(layout.path)
    config = kit.data.probe(url).apply(config_of(layout, url))
    read = max(measure_reading(*[config] * PASSES, seconds=SECONDS), key=lambda one: one.samples_per_second)
    planned = planned_as(config, 1 / ZSTD if layout.compressed else 1.0)
    return {
        "layout": layout.name,
        "latency ms": 1000 * config.chunking.latency_seconds,
        "planned requests/sample": planned.requests_made_per_batch / BATCH_SIZE,
        "requests/sample": read.predicted_requests_per_sample,
        "measured": read.requests_per_sample,
        "planned samples/s": planned.samples_per_second,
        "samples/s": read.predicted_samples_per_second,
        "measured samples/s": read.samples_per_second,
        "ratio": read.ratio,
        "ratio to planned": read.samples_per_second / planned.samples_per_second,
        "bound by": read.bound,
    }


def planned_as(config: Config, stored: float | None) -> LayoutCost:
    """What a plan says of this store before there is one, given what compression leaves of a byte."""
    array = open_dataset(config).select(config.data.variables)[0]
    cuts = {"chunking.chunk": dict(zip(array.dims, array.chunk, strict=True)), "chunking.shard": "none"}
    if array.shard:
        cuts["chunking.shard"] = dict(zip(array.dims, array.shard, strict=True))
    return kit.plan_chunks(config.replace({**cuts, "chunking.compression_ratio": 1 / (stored or 1.0)})).chosen


def judgement(rows: list[dict[str, Any]]) -> dict[str, float]:
    first = max(rows, key=lambda one: one["samples/s"])
    fastest = max(one["measured samples/s"] for one in rows)
    return {
        "median |ratio - 1|": statistics.median(abs(one["ratio"] - 1) for one in rows),
        "median |ratio to planned - 1|": statistics.median(abs(one["ratio to planned"] - 1) for one in rows),
        "worst ratio": max((one["ratio"] for one in rows), key=lambda ratio: abs(ratio - 1)),
        "first-ranked layout / fastest": first["measured samples/s"] / fastest,
    }


def built(cloud: SimulatedCloud) -> Config:
    """A store that kit built, of hours and places, in the layout that it plans."""
    import xarray

    situation, generator = cloud.dials, np.random.default_rng(0)
    cloud.turn("no limits")
    shape = (96, 480, 720)
    fields = {name: (("time", "lat", "lon"), generator.normal(size=shape).astype("f4")) for name in ("u", "v")}
    loader = {"batch_size": BATCH_SIZE, "requests_in_flight": 64}
    data = {"url": cloud.url("benchmark/hours"), "patch": {"time": 2, "lat": 48, "lon": 48}}
    config = Config.make({"data": data, "loader": loader, "chunking": {"latency_seconds": 0.03}})
    kit.build(config, source=xarray.Dataset(fields), progress=False)
    cloud.turn(**situation.to_dict())
    return config


def request_rows(cloud: SimulatedCloud, stores: Sequence[int]) -> Iterator[dict[str, Any]]:
    """Requests and bytes of a sample, predicted and counted."""
    for layout in ((*UNSEEN, None)[number] for number in stores):
        if layout is not None:
            write(cloud, [layout])
        config = built(cloud) if layout is None else config_of(layout, cloud.url(layout.path))
        config = kit.data.probe(config.data.url).apply(config)
        for order, samples in CASES:
            one = config.replace({"data.order": order, "data.samples_per_epoch": samples})
            (read,) = measure_reading(one, seconds=SECONDS)
            predicted = predict_reading(one.replace({"trial.max_steps": 1 << 20}), open_dataset(one))
            yield {
                "store": "built by kit" if layout is None else layout.name, "order": order,
                "batches": samples // BATCH_SIZE if order != "grid" else "all",
                "a trial's": predicted["requests_per_sample"], "predicted": read.predicted_requests_per_sample,
                "counted": read.requests_per_sample,
                "ratio": read.requests_per_sample / read.predicted_requests_per_sample,
                "samples/s": read.predicted_samples_per_second, "measured samples/s": read.samples_per_second,
            }  # fmt: skip


def others_field(file: str, name: str) -> Any:
    """An xarray dataset of this field of a file, and nothing else."""
    import xarray

    if file.endswith(".nc"):
        field = xarray.open_dataset(PEERS / file)[name].load()
        return field.drop_vars([one for one in field.coords if one not in field.dims]).to_dataset()
    sys.path.append(str(PEERS))
    import nibabel

    values = np.asarray(nibabel.load(PEERS / file).dataobj, "f4")
    return xarray.Dataset({name: (tuple("xyzt")[: values.ndim], values)})


def others_rows(cloud: SimulatedCloud) -> Iterator[dict[str, Any]]:
    for number, (name, (file, field, patch)) in enumerate(OTHERS.items()):
        source = others_field(file, field)
        for order in ("random", "grid", "block"):
            data = {"url": cloud.url(f"others/{number}/{order}"), "patch": patch, "order": order}
            loader = {"batch_size": 8, "requests_in_flight": 32, "batches_ahead": 2}
            config = Config.make({"data": data | {"samples_per_epoch": 512}, "loader": loader})
            plan = kit.plan_chunks(config, source=source, measure=True)
            situation = cloud.dials
            cloud.turn("no limits")
            kit.build(config, plan=plan, source=source, progress=False)
            cloud.turn(**situation.to_dict())
            config = kit.data.probe(config.data.url).apply(config)
            dataset = open_dataset(config)
            [cost] = price_store(config, dataset, is_planned=True)
            planned, stored = (
                one.requests_made_per_batch / 8 for one in (planned_as(config, stored_fraction(dataset)), cost)
            )
            (read,) = measure_reading(config, seconds=SECONDS)
            yield {
                "array": name, "order": order, "chunk": "×".join(map(str, plan.chunk)), "planned requests": planned,
                "of its store": stored, "store / plan": stored / planned,
                "expected": read.predicted_requests_per_sample, "counted": read.requests_per_sample,
                "counted / expected": read.requests_per_sample / read.predicted_requests_per_sample,
                "samples/s": read.predicted_samples_per_second, "measured samples/s": read.samples_per_second,
                "ratio": read.ratio, "bound by": read.bound,
            }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument(
        "--requests", type=int, nargs="*", help="requests of a sample, of other stores, by their numbers"
    )
    parser.add_argument("--others", action="store_true", help="arrays of other packages: plans beside their stores")
    parser.add_argument("--record", action="store_true", help="append the rows to benchmarks/results.jsonl")
    given = parser.parse_args()
    gc.freeze()
    with kit.cloud.simulate(SITUATION) as cloud:
        rows = []
        if given.requests is not None:
            for one in request_rows(cloud, given.requests or range(len(UNSEEN) + 1)):
                rows.append(one)
                print(f"{one['store']}, {one['order']}: ratio {one['ratio']:.2f}", flush=True)
            errors = sorted(abs(one["ratio"] - 1) for one in rows)
            within = f"{sum(error <= 0.15 for error in errors)} of {len(errors)}"
            facts = {"median |ratio - 1|": statistics.median(errors), "within 15 %": within}
            publish("requests of a sample, predicted and counted", rows, record=given.record, cloud=SITUATION, **facts)
            return
        if given.others:
            for one in others_rows(cloud):
                rows.append(one)
                print(f"{one['array']}, {one['order']}: {one['store / plan']:.2f}, {one['ratio']:.2f}", flush=True)
            timed = [one for one in rows if one["order"] != "grid"]  # of which an epoch has a few batches here
            facts = {
                f"median |{name} - 1|": statistics.median(abs(one[name] - 1) for one in some)
                for name, some in (("store / plan", rows), ("ratio", timed))
            }
            publish("plans of other people's arrays", rows, record=given.record, cloud=SITUATION, **facts)
            return
        for layout in LAYOUTS:
            write(cloud, [layout])
            rows.append(row(cloud, layout))
            print(f"{layout.name}: ratio {rows[-1]['ratio']:.2f}", flush=True)
    publish("samples per second, predicted and measured", rows, record=given.record, cloud=SITUATION)
    publish("how good the prediction is", [judgement(rows)], record=given.record)


if __name__ == "__main__":
    main()
