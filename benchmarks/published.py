"""GPU memory and training speed that others measured and published, beside what kit predicts on this machine.

    python benchmarks/published.py [--measure memory|speed] [--source NAME] [--row TEXT] [--answers FILE] [--record]

`published.jsonl` has a line for each figure: where it stands (repository, commit, path), what was measured, and the
configuration. Models (`published_models.py`) have random weights, and nothing is downloaded. A row is a figure in bytes
(allocated, reserved, or NVML's for the whole process), a bracket (a batch that ran and the next larger one, which did
not), or a speed of all devices together. What is compiled in the source is predicted uncompiled. What the source leaves
open, and how it was settled, is the row's `note`; why a prediction is far off is its `why`. Rows that are `held_out`
are reported apart: nothing in kit may be fitted to them.

`--answers` keeps what was predicted, one JSON line each; rows that stand there are not predicted again, so that a long
run can be stopped and resumed. Some sources need packages beside kit's:

    pip install --no-deps --target .peers transformers==5.13.1 peft==0.20.0 diffusers==0.38.0 timm==1.0.31
    pip install --no-deps --target .peers accelerate 'huggingface_hub<2' tokenizers==0.22.1 safetensors regex pillow
    pip install --no-deps --target .peers scikit-learn scipy joblib threadpoolctl
    pip install --no-deps --target .peers torchvision==0.28.0  # of any build: none of its operators runs
"""

from __future__ import annotations

import argparse
import functools
import importlib.metadata
import json
import re
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from publish import page, publish
from published_models import FAMILIES, Configuration, Loop

import kit
from kit.memory.query import make_query
from kit.memory.recordings import RecordingRequest, recordings_of, with_query_facts
from kit.memory.replay.cards import DeviceTarget, target_of
from kit.memory.replay.replay import Recording
from kit.models import RandomData
from kit.speed.prediction import speed_of

ROWS = Path(__file__).with_name("published.jsonl")
SHORT = Path(__file__).parents[1] / "datasets" / "published" / "memory.txt"
"""What `--record` found of memory, in short, for notebook 03."""
SOURCES = "Measured by others. Each row with its source: python benchmarks/published.py --measure memory"
DEVICES = re.compile(r", (ddp|fsdp) × \d+,")
"""What the case of a row says of its devices."""
PEERS = Path(__file__).parents[1] / ".peers"
NEEDED = {
    "llama": ("transformers", "peft"),
    "flux": ("diffusers", "transformers", "peft"),
    "bert": ("transformers", "bitsandbytes"),
    "vit": ("torchvision",),
    "timm": ("timm", "torchvision"),
    "decoder": ("transformers",),
    "gpt": (),
}
"""Packages of each family of models, beside kit's."""
PACKAGES = ("torch", "transformers", "peft", "diffusers", "timm", "torchvision")
UNITS = {"bytes": 1, "MB": 10**6, "MiB": 2**20, "GB": 10**9, "GiB": 2**30}
TIMEOUT_SECONDS = 300.0
RECORDINGS: Path | None = None
NETWORKS = {"A100-40GB": "network-1600G", "A100-80GB": "network-1600G", "H100-80GB": "network-3200G"}
"""Between nodes, as the sources of figures on several of them say."""
EAGER_CONTEXT_BYTES = (1000 << 20, 1488 << 20)
"""Outside the allocator before CUDA 11.7, which was the first to load kernels when they are needed: more than 1,000 MB
(pytorch#107667); 1,343 MiB on a V100 (hf-bert), and 1,488 on an RTX 3090, 1,644 less a tensor (pytorch#49877)."""
EXPLAIN_BEYOND = 0.1
SPEED_EXPLAIN_BEYOND = 0.25
Row = dict[str, Any]


# -- the predictions


def question(row: Row) -> tuple[kit.Config, Callable[[], Loop], Callable[[], Any]]:
    """Config, module and data of a row."""
    configuration = row["configuration"]
    model, fields = FAMILIES[configuration["family"]]
    devices = configuration.get("devices", 1)
    strategy = configuration.get("strategy") or ("ddp" if devices > 1 else "none")
    hardware = {"devices": devices, "precision": configuration["precision"], "strategy": strategy}
    config = kit.Config.make(
        {
            "hardware": hardware,
            "training": {"gradient_clip_norm": configuration.get("clip_norm")},
            "levers": {
                "accumulate_grad_batches": configuration.get("accumulate", 1),
                "gradient_checkpointing": configuration.get("checkpointing") in ("layers", "every second layer"),
            },
        }
    )
    return config, functools.partial(model, configuration), functools.partial(data_of, fields, configuration)


def data_of(fields: Callable[[Configuration], Any], configuration: Configuration) -> Any:
    return RandomData(fields(configuration), configuration["batch_size"])


def answer(row: Row) -> dict[str, Any]:
    """What kit says of a row: bytes, or whether a bracket holds."""
    start = time.perf_counter()
    try:
        found = {"fits": bracketed, "speed": timed}.get(row["measure"], predicted)(row)
    except Exception as error:  # that kit has no answer is an answer too
        found = {"error": f"{type(error).__name__}: {error}".strip().splitlines()[0][:300]}
    return {"case": row["case"], **found, "seconds": round(time.perf_counter() - start, 1)}


def predicted(row: Row) -> dict[str, Any]:
    estimate = kit.predict_memory(*question(row), device=row["device"], timeout_seconds=TIMEOUT_SECONDS)
    if not estimate.complete:
        return {"error": unknown(estimate)}
    return {
        "allocated": estimate.device_allocated_bytes,
        "reserved": estimate.device_reserved_bytes,
        "trainable": estimate.trainable_parameters,
    }


def unknown(estimate: Any) -> str:
    """Why its activations are not known."""
    return next(reason for reason in estimate.reasons if reason.startswith("activations unknown"))[:300]


def card_of(row: Row) -> DeviceTarget:
    """The card with what CUDA held of it in the source's version: torch had CUDA 11.7 first in 1.13."""
    card = target_of(row["device"])
    return card if torch_of(row) >= (1, 13) else replace(card, outside_bytes=EAGER_CONTEXT_BYTES)


def bracketed(row: Row) -> dict[str, Any]:
    model = kit.memory.model(*question(row), device=card_of(row), timeout_seconds=TIMEOUT_SECONDS)
    ran, failed = model.estimate(row["figure"][0]), model.estimate(row["figure"][1])
    if not ran.complete:
        return {"error": unknown(ran)}
    return {
        "verdicts": [ran.verdict, failed.verdict],
        "reserved": [ran.device_reserved_bytes, failed.device_reserved_bytes],
        "capacity": ran.capacity_bytes,
    }


def timed(row: Row) -> dict[str, Any]:
    """As `kit.predict_speed` says; the dry run is kept in `RECORDINGS`, where that is set."""
    devices = row["configuration"].get("devices", 1)
    config, module, data = question(row)
    query, target = make_query(module, data, config, row["device"], devices)
    path = RECORDINGS / f"{query.key}.npz" if RECORDINGS else None
    if path and path.exists():
        recording = with_query_facts(query, Recording.load(path))
    else:
        (recording,) = recordings_of(RecordingRequest(query), TIMEOUT_SECONDS)
        if path:
            recording.save(path)
    tf32 = bool(row["configuration"].get("tf32"))  # recordings kept from before do not say it
    recording = replace(recording, facts={**recording.facts, "tf32": tf32})
    speed = speed_of(recording, target, devices=devices, between=NETWORKS.get(row["device"]))
    return {
        "samples_per_second": speed.samples_per_second,
        "range": [speed.low_samples_per_second, speed.high_samples_per_second],
        "bound": speed.bound,
    }


def answers_of(rows: Iterable[Row], path: Path | None) -> Iterator[tuple[Row, dict[str, Any]]]:
    """Each row with its answer, from `path` where it stands there already."""
    known = {item["case"]: item for item in read_lines(path)} if path and path.exists() else {}
    for row in rows:
        if row["case"] not in known:
            known[row["case"]] = answer(row)
            if path:
                with path.open("a") as file:
                    file.write(json.dumps(known[row["case"]]) + "\n")
        print(json.dumps(known[row["case"]]), file=sys.stderr, flush=True)
        yield row, known[row["case"]]


def read_lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


# -- the tables


def figure_bytes(row: Row) -> int:
    return round(row["figure"] * UNITS[row["unit"]])


def predicted_bytes(row: Row, found: Mapping[str, Any]) -> int:
    """As the row's source measured: its own context, where it states one, is added to what the allocator takes."""
    key = "allocated" if row["measure"] == "allocated" else "reserved"
    return int(found[key]) + row.get("context_bytes", 0)


def ratio_of(row: Row, found: Mapping[str, Any]) -> float:
    return predicted_bytes(row, found) / figure_bytes(row)


def inside(found: Mapping[str, Any]) -> bool:
    ran, failed = found["verdicts"]
    return bool(ran == "fits" and failed != "fits")


def published_samples_per_second(row: Row) -> float:
    """Of all devices together."""
    configuration, figure = row["configuration"], row["figure"]
    if row["unit"] == "tokens/s":
        return float(figure / configuration["length"])
    if row["unit"] == "ms/iteration":  # a micro-batch on each device
        return float(configuration["batch_size"] * configuration.get("devices", 1) / figure * 1000)
    return float(figure)


def speed_ratio(row: Row, found: Mapping[str, Any]) -> float:
    return float(found["samples_per_second"] / published_samples_per_second(row))


def speed_table(pairs: Iterable[tuple[Row, dict[str, Any]]]) -> Iterator[Row]:
    for row, found in pairs:
        published = published_samples_per_second(row)
        ratio = speed_ratio(row, found) if "error" not in found else None
        inside = ratio is not None and found["range"][0] <= published <= found["range"][1]
        known = ratio is not None and abs(ratio - 1) <= SPEED_EXPLAIN_BEYOND
        yield {
            "source": f"{row['repository']}@{row['commit'][:7]}",
            "case": row["case"],
            "device": row["device"],
            "predicted samples/s": significant(found["samples_per_second"]) if ratio else "–",
            "published samples/s": significant(published),
            "ratio": round(ratio, 2) if ratio else "–",
            "in its range": "yes" if inside else "no",
            "bound": found.get("bound", "–"),
            "held out": "yes" if row["held_out"] else "",
            "why": "" if known else row.get("why") or found.get("error", "not known"),
        }


def scaling_table(pairs: Iterable[tuple[Row, dict[str, Any]]]) -> Iterator[Row]:
    """Where a source has one training on several numbers of devices: what each device keeps of its speed on the fewest.

    The batch of each device is the published one, which some sources change with the number.
    """
    same: dict[tuple[str, str, str], list[tuple[int, Row, dict[str, Any]]]] = {}
    for row, found in pairs:
        if "error" not in found:
            training = DEVICES.sub(",", row["case"])
            devices = int(row["configuration"].get("devices", 1))
            same.setdefault((row["source"], row["device"], training), []).append((devices, row, found))
    for rows in same.values():
        (fewest, first, foretold), *others = sorted(rows, key=lambda item: item[0])
        for devices, row, found in others:
            kept = found["samples_per_second"] / foretold["samples_per_second"] * fewest / devices
            published = published_samples_per_second(row) / published_samples_per_second(first) * fewest / devices
            yield {
                "source": f"{row['repository']}@{row['commit'][:7]}",
                "case": row["case"],
                "device": row["device"],
                "devices": f"{fewest} → {devices}",
                "predicted efficiency": round(kept, 3),
                "published efficiency": round(published, 3),
                "ratio": round(kept / published, 3),
                "held out": "yes" if row["held_out"] else "",
            }


def scaling_summary(rows: list[Row]) -> Iterator[Row]:
    kinds: dict[str, Callable[[Row], bool]] = {
        "from one device": lambda row: row["devices"].startswith("1 "),
        "from several": lambda row: not row["devices"].startswith("1 "),
        "held out": lambda row: row["held out"] == "yes",
        "all": lambda _: True,
    }
    for name, belongs in kinds.items():
        if errors := [100 * abs(row["ratio"] - 1) for row in rows if belongs(row)]:
            yield {
                "rows": name,
                "pairs": len(errors),
                "median |error| %": round(statistics.median(errors), 1),
                "worst %": round(max(errors), 1),
                "within 5 %": sum(error <= 5 for error in errors),
                "within 15 %": sum(error <= 15 for error in errors),
            }


def significant(value: float) -> float:
    """In three figures."""
    return float(f"{value:.3g}")


def speed_summary(name: str, pairs: list[tuple[Row, dict[str, Any]]]) -> Row:
    ratios = [speed_ratio(row, found) for row, found in pairs if "error" not in found]
    errors = [100 * abs(ratio - 1) for ratio in ratios]
    return {
        "rows": name,
        "predicted": f"{len(ratios)} of {len(pairs)}",
        "median |error| %": round(statistics.median(errors)) if errors else "–",
        "median ratio": round(statistics.median(ratios), 2) if ratios else "–",
        "lowest and highest ratio": f"{min(ratios):.2f} and {max(ratios):.2f}" if ratios else "–",
        "within 10 %": sum(error <= 10 for error in errors),
        "within 25 %": sum(error <= 25 for error in errors),
    }


def bytes_table(pairs: Iterable[tuple[Row, dict[str, Any]]]) -> Iterator[Row]:
    for row, found in pairs:
        known = "error" not in found
        ratio = ratio_of(row, found) if known else None
        off = ratio is None or abs(ratio - 1) > EXPLAIN_BEYOND
        yield {
            "source": f"{row['repository']}@{row['commit'][:7]}",
            "case": row["case"],
            "measured": f"{row['measure']}, {row['device']}, torch {row['torch']}",
            "predicted GiB": round(predicted_bytes(row, found) / 2**30, 2) if known else "–",
            "published GiB": round(figure_bytes(row) / 2**30, 2),
            "ratio": round(ratio, 3) if ratio else "–",
            "held out": "yes" if row["held_out"] else "",
            "why": (row.get("why") or found.get("error", "not known")) if off else "",
        }


def bracket_table(pairs: Iterable[tuple[Row, dict[str, Any]]]) -> Iterator[Row]:
    for row, found in pairs:
        known = "error" not in found
        reserved = [round(size / 2**30, 2) for size in found["reserved"]] if known else ["–", "–"]
        yield {
            "source": f"{row['repository']}@{row['commit'][:7]}",
            "case": row["case"],
            "ran": row["figure"][0],
            "predicted GiB": reserved[0],
            "verdict": found["verdicts"][0] if known else "–",
            "did not run": row["figure"][1],
            "predicted GiB of that": reserved[1],
            "verdict of that": found["verdicts"][1] if known else "–",
            "inside": "yes" if known and inside(found) else "no",
            "held out": "yes" if row["held_out"] else "",
            "why": "" if known and inside(found) else row.get("why") or found.get("error", "not known"),
        }


def summary(name: str, pairs: list[tuple[Row, dict[str, Any]]]) -> Row:
    ratios = [ratio_of(row, found) for row, found in pairs if "error" not in found]
    errors = [100 * abs(ratio - 1) for ratio in ratios]
    return {
        "rows": name,
        "predicted": f"{len(ratios)} of {len(pairs)}",
        "median |error| %": round(statistics.median(errors), 1) if errors else "–",
        "worst %": round(max((100 * (ratio - 1) for ratio in ratios), key=abs), 1) if errors else "–",
        "within 3 %": sum(error <= 3 for error in errors),
        "within 10 %": sum(error <= 10 for error in errors),
        "too low by more than 3 %": sum(ratio < 0.97 for ratio in ratios),
    }


def bracket_summary(name: str, pairs: list[tuple[Row, dict[str, Any]]]) -> Row:
    known = [found for _, found in pairs if "error" not in found]
    return {
        "rows": name,
        "predicted": f"{len(known)} of {len(pairs)}",
        "inside": sum(map(inside, known)),
        "said to fit, did not": sum(found["verdicts"][1] == "fits" for found in known),
        "said not to fit, did": sum(found["verdicts"][0] == "does not fit" for found in known),
        "said to be tight, did": sum(found["verdicts"][0] == "tight" for found in known),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    rows = read_lines(ROWS)
    parser.add_argument("--source", choices=sorted({row["source"] for row in rows}), help="only these rows")
    parser.add_argument("--measure", choices=("memory", "speed"), help="only these rows")
    parser.add_argument("--row", default="", help="only rows whose case contains this")
    parser.add_argument("--answers", type=Path, help="where predictions are kept and taken from")
    parser.add_argument("--recordings", type=Path, help="where dry runs of speeds are kept, to be priced anew")
    parser.add_argument("--record", action="store_true", help="append the tables to benchmarks/results.jsonl")
    asked = parser.parse_args()
    sys.path.insert(0, str(PEERS))  # of the versions that the sources had, before what else is installed
    global RECORDINGS
    RECORDINGS = asked.recordings
    chosen = [
        row for row in rows
        if asked.source in (None, row["source"]) and asked.row in row["case"]
        and asked.measure in (None, "speed" if row["measure"] == "speed" else "memory")
    ]  # fmt: skip
    report(list(answers_of(with_packages(chosen), asked.answers)), asked.record)


def with_packages(rows: Iterable[Row]) -> Iterator[Row]:
    """The rows whose packages are installed; of the others it is said once what they lack."""
    missing = {family: [package for package in needed if not version_of(package)] for family, needed in NEEDED.items()}
    for family in [family for family, packages in missing.items() if packages]:
        print(f"{family} is left out: {', '.join(missing[family])} is not installed; {__file__} says how at its top")
    return (row for row in rows if not missing[row["configuration"]["family"]])


def report(pairs: list[tuple[Row, dict[str, Any]]], record: bool) -> None:
    facts = {package: version for package in PACKAGES if (version := version_of(package))}
    kinds = {
        "published bytes": (
            bytes_table, summary, [pair for pair in pairs if pair[0]["measure"] not in ("fits", "speed")]
        ),
        "published batches that ran and did not": (
            bracket_table, bracket_summary, [pair for pair in pairs if pair[0]["measure"] == "fits"]
        ),
        "published speeds": (speed_table, speed_summary, [pair for pair in pairs if pair[0]["measure"] == "speed"]),
    }  # fmt: skip
    for name, (table, _, found) in kinds.items():
        if found:
            publish(name, list(table(found)), record=record, **facts)
    shown: dict[str, list[Row]] = {}
    for name, (_, summarize, found) in kinds.items():
        if found:
            short = f"{name.removesuffix(' that ran and did not')}, in short"
            rows = [summarize(title, group) for title, group in groups(found)]
            publish(short, rows, record=record, **facts)
            if summarize is not speed_summary:
                shown[short] = rows
    if scaled := list(scaling_table(kinds["published speeds"][2])):
        publish("published scaling", scaled, record=record, **facts)
        publish("published scaling, in short", list(scaling_summary(scaled)), record=record, **facts)
    if record and shown:
        SHORT.write_text(page(shown, SOURCES))


def groups(pairs: list[tuple[Row, dict[str, Any]]]) -> Iterator[tuple[str, list[tuple[Row, dict[str, Any]]]]]:
    for source in dict.fromkeys(row["source"] for row, _ in pairs):
        yield source, [pair for pair in pairs if pair[0]["source"] == source]
    measured_speed = pairs[0][0]["measure"] == "speed"
    kinds: dict[str, Callable[[Row], bool]] = {
        "torch 2.6 and later": lambda row: torch_of(row) >= (2, 6),
        "older torch": lambda row: torch_of(row) < (2, 6),
        "held out": lambda row: row["held_out"],
        "not held out": lambda row: not row["held_out"],
    }
    kinds_of_speed: dict[str, Callable[[Row], bool]] = {
        "held out, not compiled": lambda row: row["held_out"] and not row["configuration"].get("compiled"),
        "one device, not compiled": lambda row: (
            row["configuration"].get("devices", 1) == 1 and not row["configuration"].get("compiled")
        ),
        "several devices, not compiled": lambda row: (
            row["configuration"].get("devices", 1) > 1 and not row["configuration"].get("compiled")
        ),
        "compiled": lambda row: bool(row["configuration"].get("compiled")),
    }
    for name, belongs in (kinds | kinds_of_speed if measured_speed else kinds).items():
        if group := [pair for pair in pairs if belongs(pair[0])]:
            yield name, group


def torch_of(row: Row) -> tuple[int, ...]:
    """The version of torch that a row was measured with: (major, minor)."""
    return tuple(map(int, row["torch"].split(".")[:2]))


def version_of(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ""


if __name__ == "__main__":
    main()
