"""Layouts: samples per second that the plan predicts beside what the engine reads, for one field cut in several ways.

    python benchmarks/layouts.py [--requests [STORE ...]] [--record]

Random patches of 64 × 64 × 4 float32 from a simulated cloud. Each store is probed first (`kit.data.probe`), and the
plan is given what the probe found and nothing else; then the same config is read twice (`kit.data.measure_reading`),
and the faster pass counts, since what else runs on the machine only ever slows one; what was imported is frozen
(`gc.freeze`) as in the processes of kit's trials. ratio = measured / predicted of the store that is there; `ratio to
planned` = measured / what a plan says before there is one, given the compression. The medians of |ratio - 1| judge the
predictions, and how close the layout that is ranked first comes to the fastest one.

`--requests` reads five other stores for short epochs and one longer, in every order, and sets the requests and bytes of
a sample that are predicted beside those counted: four layouts that no other benchmark reads, and a store that kit built
in three dimensions with two variables.
"""

from __future__ import annotations

import argparse
import gc
import statistics
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from publish import publish
from streaming_store import BATCH_SIZE, Layout, config_of, write

import kit
from kit.chunks.cost import LayoutCost
from kit.cloud.simulated import SimulatedCloud
from kit.config import Config
from kit.data.build.layout import predict_reading
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


def row(cloud: SimulatedCloud, layout: Layout) -> dict[str, Any]:
    url = cloud.url(layout.path)
    config = kit.data.probe(url).apply(config_of(layout, url))
    read = max(measure_reading(*[config] * PASSES, seconds=SECONDS), key=lambda one: one.samples_per_second)
    planned = planned_as(config, layout)
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


def planned_as(config: Config, layout: Layout) -> LayoutCost:
    """What a plan says of the layout before there is a store of it."""
    array = open_dataset(config).select(config.data.variables)[0]
    cuts = {"chunking.chunk": dict(zip(array.dims, array.chunk, strict=True)), "chunking.shard": "none"}
    if array.shard:
        cuts["chunking.shard"] = dict(zip(array.dims, array.shard, strict=True))
    plan = kit.plan_chunks(config.replace({**cuts, "chunking.compression_ratio": ZSTD if layout.compressed else 1.0}))
    return plan.chosen


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


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument(
        "--requests", type=int, nargs="*", help="requests of a sample, of other stores, by their numbers"
    )
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
        for layout in LAYOUTS:
            write(cloud, [layout])
            rows.append(row(cloud, layout))
            print(f"{layout.name}: ratio {rows[-1]['ratio']:.2f}", flush=True)
    publish("samples per second, predicted and measured", rows, record=given.record, cloud=SITUATION)
    publish("how good the prediction is", [judgement(rows)], record=given.record)


if __name__ == "__main__":
    main()
