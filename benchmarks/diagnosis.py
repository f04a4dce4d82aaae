"""The diagnosis on sixty-three pipelines with planted faults: named, missed, false alarms, and gains that are kept.

    python benchmarks/diagnosis.py [--folder FOLDER] [--seconds 170] [--only TEXT] [--kinds development] [--gains]
        [--record]

The pipelines are those of `benchmarks/pipelines`: forty-eight with one planted fault each, fifteen with none. Of each,
one after another: a trial is run and diagnosed; where the planted fault has a cure that is about time, the pipeline and
its cure run in turn until the gain is known to a tenth, or for thirty seconds; and TraceML watches the same pipeline in
a plain Lightning Trainer (`pip install -e ".[benchmarks]"`, left out where it is not installed). What is done is
appended to results.jsonl in `--folder`, with the state of the code, and a second start of the same state goes on from
there, so that the whole fits into short quiet times of a machine; the kinds that no rule was tuned on come first. What
there was no time for is listed, and rows of other states are left out.

*named* is whether the planted fault is among the findings; *false alarms* are findings that are neither planted nor, by
the pipeline's own account, also true, nor seen to be true when their change was tried (*also true*, with the gain).
*predicted* is the range that the finding gave, *measured* the gain of the cure with its 95 % interval, *kept* whether
the middle of the range is within 20 % of it, *decided* whether that is so, or not so, of all of the interval, and
*inside* whether it lies in the range. With `--gains` those that were recorded last stand beside new ranges, which takes
two minutes. *TraceML* is its main verdict; whether that points at the part of a step in which the fault lies is
counted, since it names no causes. The ten pipelines that were kept aside have a table of their own: nothing was tuned
on them. So have the nine as examples of other packages have them: before the rules knew them, none of their seven
faults was named. The ten that are unseen were written after the rules, and so were the six from elsewhere, which were
run once, and the four of a second group.
"""

from __future__ import annotations

import argparse
import functools
import hashlib
import json
import math
import os
import re
import subprocess
import sys
import tempfile
import time
import traceback
from dataclasses import replace
from pathlib import Path
from typing import Any

from pipelines import SHORT, Parts, Pipeline, all_pipelines
from publish import RESULTS as RECORDED
from publish import publish

import kit
from kit.config import Config
from kit.studies.diagnosis.rules import RULES
from kit.studies.repeats import Side, Tried
from kit.studies.series import samples_per_second
from kit.trial.trial import Trial

POINTS = {
    "INPUT": ("images decoded at full size", "one row of a large chunk", "workers started every epoch",
              "workers copy the parent", "workers start slowly", "Python in the data", "slow sampler",
              "loader made anew every epoch"),
    "STRAGGLER": ("stragglers", "uneven batches"),
    "RESIDUAL": ("validation too often", "checkpoints too often", "slow hook", "garbage collection",
                 "interpreter held by a thread", "small collectives", "drawing or logging in the step",
                 "sync in the step", "Python in the step", "loader made anew every epoch"),
    "OPTIMIZER": ("optimizer larger than the work", "optimizer not fused"),
    "MEMORY": ("memory that grows", "dataset copied into workers"),
}  # fmt: skip
"""Words in TraceML's verdict, or in its summary, that point at the part of a step in which the fault lies."""
FOLDER = Path(tempfile.gettempdir(), "kit-diagnosis")
ROOT = Path(__file__).parents[1]
TITLE = "diagnosis of planted faults"
MOST_PAIRS, PAIR_SECONDS = 24, 30.0
KEPT, KNOWN = 0.2, 0.1
ENDINGS = {
    "elsewhere again": ", from elsewhere, second group", "kept aside": ", kept aside", "elsewhere": ", from elsewhere",
    "unseen": ", unseen", "example": ", examples of others", "development": "",
}  # fmt: skip
"""By kind of pipeline, in the order in which they are run."""
MEASURED = ("full precision", "batch too small", "page faults")
"""Findings whose threshold is a gain: one that helps by less is a false alarm."""


def fit(parts: Parts) -> Trial:
    config = Config().replace({**SHORT, "trial.folder": str(FOLDER / "runs"), **parts.config})
    logger = parts.logger() if parts.logger is not None else None
    trial = kit.fit(
        config, parts.module, parts.data, callbacks=parts.callbacks(), trainer=dict(parts.flags), logger=logger
    )
    return trial.wait()


def diagnosed(pipeline: Pipeline) -> dict[str, Any]:
    trial = fit(pipeline.parts)
    found = kit.studies.diagnose(trial, peaks=False)
    findings = {
        one.name: {"predicted": one.predicted, "sentence": one.sentence, "change": dict(one.change)}
        for one in found.findings
    }
    host, queued = found.evidence.host, found.evidence.queued_fraction
    own = {"own_fraction": host.get("own_fraction"), "queued_fraction": queued, "settled": found.settled}
    return {"findings": findings, "step_seconds": found.evidence.step_seconds, **own}


def gained(pipeline: Pipeline) -> dict[str, Any]:
    """The advised change, or the author's cure, beside the pipeline, in turn until the gain is known to a tenth."""
    finding = read()[(pipeline.name, "kit")]["findings"].get(pipeline.planted, {})
    cure = pipeline.cure
    if finding.get("change"):
        cure = replace(pipeline.parts, config={**pipeline.parts.config, **finding["change"]})
    sides: dict[str, list[float]] = {"before": [], "after": []}
    began = time.perf_counter()
    for pair in range(MOST_PAIRS):
        order = ("before", "after") if pair % 2 == 0 else ("after", "before")
        for name in order:
            sides[name].append(samples_per_second(fit(pipeline.parts if name == "before" else cure)))
        tried = Tried(predicted=None, **{
            name: Side(name=name, config=Config(), samples_per_second=tuple(speeds), run_directories=())
            for name, speeds in sides.items()
        })  # fmt: skip
        if pair and (tried.visible <= KNOWN or time.perf_counter() - began > PAIR_SECONDS):
            break
    return {"gain": tried.gain, "noise": tried.noise, "pairs": pair + 1}


def beside(pipeline: Pipeline, found: dict[str, Any]) -> dict[str, Any]:
    """The findings that were not planted and that a setting mends."""
    known = (pipeline.planted, *pipeline.also)
    return {name: one for name, one in found["findings"].items() if name not in known and one["change"]}


def confirmed(pipeline: Pipeline) -> dict[str, Any]:
    """Whether what was named beside the planted fault is true: its change is tried."""
    parts, answers = pipeline.parts, {}
    config = Config().replace({**SHORT, "trial.folder": str(FOLDER / "runs"), **parts.config})
    for name, one in beside(pipeline, read()[(pipeline.name, "kit")]).items():
        tried = kit.studies.try_change(config, parts.module, parts.data, change=one["change"], seconds=40)
        answers[name] = {"verdict": tried.verdict, "gain": tried.gain, "noise": tried.noise}
    return {"answers": answers}


def traced(pipeline: Pipeline) -> dict[str, Any]:
    """What TraceML says of the same pipeline."""
    logs = FOLDER / "traceml" / f"{abs(hash(pipeline.name))}-{time.time_ns()}"
    ranks = int(pipeline.parts.config.get("hardware.devices", 1))
    command = [
        str(Path(sys.executable).with_name("traceml")), "run", "--mode", "summary", "--logs-dir", str(logs),
        "--run-name", "run", "--interval", "0.5", "--finalize-timeout-sec", "20", "--no-save-training-output",
        "--nproc-per-node", str(ranks), str(Path(__file__).with_name("pipelines") / "plain.py"), "--args",
        pipeline.name, str(FOLDER),
    ]  # fmt: skip
    path = {"PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), str(Path(__file__).parents[1])])}
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=150, check=False,
        env={**os.environ, "OMP_NUM_THREADS": "1", **path},
    )  # fmt: skip
    found = next(iter(logs.rglob("final_summary.json")), None)
    if found is None:
        return {"verdict": f"no summary: {(done.stderr or done.stdout).strip().splitlines()[-1:]}"}
    return verdicts(json.loads(found.read_text()))


def verdicts(summary: dict[str, Any]) -> dict[str, Any]:
    """The main verdict, and those of its sections."""
    primary = summary.get("primary_diagnosis") or {}
    sections = {
        name: (part.get("diagnosis") or {}).get("status")
        for name, part in summary.items() if isinstance(part, dict) and isinstance(part.get("diagnosis"), dict)
    }  # fmt: skip
    return {"verdict": primary.get("status") or primary.get("kind"), "sections": sections, "primary": primary}


STAGES = {"kit": diagnosed, "gain": gained, "beside": confirmed, "traceml": traced}


def needed(pipeline: Pipeline, stage: str) -> bool:
    if stage == "traceml":
        return Path(sys.executable).with_name("traceml").exists()
    if stage == "beside":
        found = read().get((pipeline.name, "kit"))
        return found is not None and bool(beside(pipeline, found))
    return stage == "kit" or (pipeline.cure is not None and pipeline.speeds_up and (pipeline.name, "kit") in read())


@functools.cache
def state() -> str:
    """Of the code that decides what a row says: kit, the pipelines, and this file."""
    files = [*(ROOT / "kit").rglob("*.py"), *(ROOT / "benchmarks/pipelines").glob("*.py"), Path(__file__)]
    return hashlib.sha256(b"".join(file.read_bytes() for file in sorted(files))).hexdigest()[:10]


def results() -> Path:
    return FOLDER / "results.jsonl"


def append(rows: list[dict[str, Any]]) -> None:
    with results().open("a") as file:
        file.writelines(json.dumps({"state": state(), **row}) + "\n" for row in rows)


def read() -> dict[tuple[str, str], dict[str, Any]]:
    lines = results().read_text().splitlines() if results().exists() else []
    found = {(row["name"], row["stage"]): row for row in map(json.loads, lines) if row.get("state") == state()}
    return {key: row for key, row in found.items() if "error" not in row}


def rows(pipelines: list[Pipeline]) -> list[dict[str, Any]]:
    found, table = read(), []
    thresholds = {rule.name: rule.threshold for rule in RULES}
    for pipeline in pipelines:
        said, gain = found.get((pipeline.name, "kit")), found.get((pipeline.name, "gain"))
        theirs = found.get((pipeline.name, "traceml"))
        if said is None:
            continue
        names = list(said["findings"])
        tried = found.get((pipeline.name, "beside"), {}).get("answers", {})
        true = [
            name for name, answer in tried.items()
            if answer["verdict"] == "helps" and answer["gain"] >= (thresholds[name] if name in MEASURED else 1)
        ]  # fmt: skip
        false = [name for name in names if name not in (pipeline.planted, *pipeline.also, *true)]
        predicted = said["findings"].get(pipeline.planted, {}).get("predicted")
        row = {
            "pipeline": pipeline.name, "planted": pipeline.planted or "nothing",
            "named": "–" if not pipeline.planted else "yes" if pipeline.planted in names else "no",
            "also true": ", ".join(f"{name} ({tried[name]['gain']:.2f} ×)" for name in true) or "–",
            "false alarms": ", ".join(false) or "none",
            "predicted": f"{predicted[0]:.2f} to {predicted[1]:.2f}" if predicted else "–",
            "measured": "–", "kept": "–", "decided": "–", "inside": "–", "TraceML": their_words(theirs),
        }  # fmt: skip
        if gain is not None and "gain" in gain:
            row["measured"] = f"{gain['gain']:.2f} ({gain['noise'][0]:.2f} to {gain['noise'][1]:.2f})"
            if predicted:
                middle = math.sqrt(predicted[0] * predicted[1])
                ratio, ends = middle / gain["gain"], [abs(middle / end - 1) <= KEPT for end in gain["noise"]]
                around = gain["noise"][0] <= middle <= gain["noise"][1]
                row["kept"] = f"{'yes' if abs(ratio - 1) <= KEPT else 'no'}, {ratio:.2f}"
                row["decided"] = "yes" if all(ends) or not (any(ends) or around) else "no"
                row["inside"] = "yes" if predicted[0] <= gain["gain"] <= predicted[1] else "no"
        table.append(row)
    return table


def their_words(row: dict[str, Any] | None) -> str:
    """TraceML's verdict, with the phase that it calls largest."""
    if row is None:
        return "–"
    summary = str((row.get("primary") or {}).get("summary", ""))
    largest = re.search(r"(\w+) is the largest phase", summary)
    return f"{row['verdict']}{f', {largest[1]}' if largest else ''}"


def points(verdict: str, planted: str) -> bool:
    return any(word in verdict.upper() and planted in faults for word, faults in POINTS.items())


def facts(table: list[dict[str, Any]]) -> dict[str, str]:
    theirs = [row for row in table if row["planted"] != "nothing" and row["TraceML"] != "–"]
    seen = [row for row in table if row["planted"] == "nothing" and row["TraceML"] != "–"]
    calm = ("NORMAL", "BALANCED", "NO CLEAR", "COMPUTE-BOUND")
    pointed = [row for row in theirs if points(row["TraceML"], row["planted"])]
    planted = [row for row in table if row["planted"] != "nothing"]
    tried = [row for row in table if row["kept"] != "–"]
    known = [row for row in tried if row["decided"] == "yes"]
    return {
        "named": f"{sum(row['named'] == 'yes' for row in planted)} of {len(planted)}",
        "pipelines with a false alarm": f"{sum(row['false alarms'] != 'none' for row in table)} of {len(table)}",
        "predicted within 20 % of measured": f"{sum(map(right, tried))} of {len(tried)}",
        "of which the measurement decides": f"{sum(right(row) for row in known)} of {len(known)}",
        "measured inside the range": f"{sum(row['inside'] == 'yes' for row in tried)} of {len(tried)}",
        "TraceML points at the part": f"{len(pointed)} of {len(theirs)}",
        "TraceML warns of a healthy one": f"{sum(not row['TraceML'].startswith(calm) for row in seen)} of {len(seen)}",
    }


def right(row: dict[str, Any]) -> bool:
    return bool(row["kept"].startswith("yes"))


def recorded_gains() -> dict[str, dict[str, Any]]:
    """The last gain of each pipeline in benchmarks/results.jsonl."""
    gains: dict[str, dict[str, Any]] = {}
    for line in map(json.loads, RECORDED.read_text().splitlines()):
        for row in line["rows"] if line["benchmark"].startswith(TITLE) else ():
            numbers = [float(text) for text in re.findall(r"[\d.]+", row.get("measured") or "")]
            if len(numbers) == 3:
                gains[row["pipeline"]] = {"gain": numbers[0], "noise": numbers[1:]}
    return gains


def main() -> None:
    global FOLDER
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=math.inf, help="begin nothing after so long")
    parser.add_argument("--folder", type=Path, default=FOLDER, help="of results, runs and the files that are read")
    parser.add_argument("--only", default="", help="pipelines whose name has this text")
    parser.add_argument("--stages", default=",".join(STAGES))
    parser.add_argument(
        "--kinds", nargs="+", choices=ENDINGS, default=list(ENDINGS), metavar="KIND", help="of pipelines"
    )
    parser.add_argument("--again", action="store_true", help="also what is known")
    parser.add_argument("--gains", action="store_true", help="take the gains that were recorded last, and measure none")
    parser.add_argument("--record", action="store_true", help="append the rows to benchmarks/results.jsonl")
    given = parser.parse_args()
    FOLDER = given.folder
    FOLDER.mkdir(exist_ok=True, parents=True)
    began, known, left = time.perf_counter(), {} if given.again else read(), list[str]()
    print(f"state {state()} of the code, results in {results()}")
    pipelines = sorted(all_pipelines(str(FOLDER)).values(), key=lambda one: [*ENDINGS].index(one.kind))
    if given.gains:
        gains = recorded_gains()
        pipelines = [one for one in pipelines if one.name in gains]
        given.stages = "kit"
        append([{"name": name, "stage": "gain", **gain} for name, gain in gains.items()])
    for one in pipelines:  # its stages one after another, as a machine of others is faster in one hour than in the next
        for stage in filter(None, given.stages.split(",")):
            wanted = given.only in one.name and one.kind in given.kinds
            if (one.name, stage) in known or not wanted or not needed(one, stage):
                continue
            if time.perf_counter() - began > given.seconds:
                left.append(f"{one.name}: {stage}")
                continue
            try:
                row = STAGES[stage](one)
            except Exception as error:  # one that fails must not keep the others from being measured
                row = {"error": f"{type(error).__name__}: {error}", "trace": traceback.format_exc()[-1500:]}
            append([{"name": one.name, "stage": stage, **row}])
    for kind in ENDINGS:
        table = rows([one for one in pipelines if one.kind == kind])
        if table:
            title = TITLE + ", predicted anew" * given.gains + ENDINGS[kind]
            publish(title, table, record=given.record, state=state(), **facts(table))
    print(f"left out, as {given.seconds:.0f} s were over: {', '.join(left) or 'nothing'}")


if __name__ == "__main__":
    main()
