"""Layouts: samples per second that the plan predicts beside what the engine reads, for one field cut in several ways.

    python benchmarks/layouts.py [--record]

Random patches of 64 × 64 × 4 float32 from a simulated cloud. Each store is probed first (`kit.data.probe`), and the
plan is given what the probe found and nothing else; then the same config is read twice (`kit.data.measure_reading`),
and the faster pass counts, since what else runs on the machine only ever slows one; what was imported is frozen
(`gc.freeze`) as in the processes of kit's trials. ratio = measured / predicted. Two figures judge the plan: the median
of |ratio - 1|, and how close the layout that it ranks first comes to the fastest one.
"""

from __future__ import annotations

import gc
import statistics
from typing import Any

from publish import publish, read_options
from streaming_store import Layout, config_of, write

import kit
from kit.cloud.simulated import SimulatedCloud
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


def row(cloud: SimulatedCloud, layout: Layout) -> dict[str, Any]:
    url = cloud.url(layout.path)
    config = kit.data.probe(url).apply(config_of(layout, url))
    read = max(measure_reading(*[config] * PASSES, seconds=SECONDS), key=lambda one: one.samples_per_second)
    return {
        "layout": layout.name,
        "latency ms": 1000 * config.chunking.latency_seconds,
        "requests/sample": read.predicted_requests_per_sample,
        "measured": read.requests_per_sample,
        "samples/s": read.predicted_samples_per_second,
        "measured samples/s": read.samples_per_second,
        "ratio": read.ratio,
        "bound by": read.bound,
    }


def judgement(rows: list[dict[str, Any]]) -> dict[str, float]:
    first = max(rows, key=lambda one: one["samples/s"])
    fastest = max(one["measured samples/s"] for one in rows)
    return {
        "median |ratio - 1|": statistics.median(abs(one["ratio"] - 1) for one in rows),
        "worst ratio": max((one["ratio"] for one in rows), key=lambda ratio: abs(ratio - 1)),
        "first-ranked layout / fastest": first["measured samples/s"] / fastest,
    }


def main() -> None:
    read_options(__doc__)
    gc.freeze()
    with kit.cloud.simulate(SITUATION) as cloud:
        rows = []
        for layout in LAYOUTS:
            write(cloud, [layout])
            rows.append(row(cloud, layout))
            print(f"{layout.name}: ratio {rows[-1]['ratio']:.2f}", flush=True)
    publish("samples per second, predicted and measured", rows, cloud=SITUATION)
    publish("how good the prediction is", [judgement(rows)])


if __name__ == "__main__":
    main()
