"""How right the predicted time of a step is on this CPU: thirty models, predicted from micro-benchmarks, then measured.

    python benchmarks/speed.py both [--seconds 150] [--answers FILE]
    python benchmarks/speed.py report [--answers FILE] [--record]

Each setting is recorded and its calls are timed in a process of their own, in which no step of the model runs; then it
is run in real trials (`predict` or `measure` do one half). They append one JSON line for each setting to the answers,
leave out what stands there, and end after so many seconds, so that they run in short pieces on quiet cores. Each waits
until other programs leave the cores alone, and a trial after which they do not is run again. A measured step is the
median of those after warm-up, without the wait for data, over two trials. kit predicts the CPU at its fastest, and
neighbours on a shared host change its pace within seconds, by 2 times here, so the pace is asked before each step, and
the step divided by how much slower it is at that pace, as predicted. `as it was` are the same steps, not divided.
`after one trial` corrects a prediction by a trial of another setting of the model, as rows of trials do.
`reprice` writes the predictions anew from recordings and measured calls, after more of these.

Beside kit's prediction stand `table`, which has no call of the model itself timed but those of kit's own small modules
and of models before it, and `lookup`, in which a call takes the time of the nearest call of the same operator in
*other* models, as in a prototype. torch's RuntimeEstimator needs a GPU for its peaks, and cannot be asked. Models that
are `held out` are reported apart. The packages that models need are named in `speed_models.py`.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import itertools
import json
import math
import statistics
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

import psutil
import speed_models
from publish import publish
from speed_models import MODELS, at_fastest, steps_at_paces

import kit
from kit.memory.query import make_query
from kit.memory.recordings import RecordingRequest, recordings_of
from kit.memory.replay.cards import THIS_MACHINE, target_of
from kit.memory.replay.replay import Recording
from kit.records.ratios import correction
from kit.speed import measure
from kit.speed.measure import table_here, table_known
from kit.speed.operators import step_of
from kit.speed.prediction import speed_of

STEPS, WARM_UP, ROUNDS, PRECISIONS = 16, 4, 2, ("32-true", "bf16-mixed")
MOST_ROUNDS, QUIET_FRACTION, QUIET_SECONDS = 4, 0.08, 60.0
CALL_SECONDS = 6.0
Row = dict[str, Any]
measure.BUSY_CORES = math.inf  # what others used is in the answers


def settings() -> Iterator[tuple[str, int, str]]:
    """(model, batch size, precision): both batch sizes in 32-true, the larger one in bf16-mixed too; models in turn.

    Emulated, bf16 takes most of the time by far, so it comes last.
    """
    for size, precision in ((0, PRECISIONS[0]), (1, PRECISIONS[0]), (1, PRECISIONS[1])):
        yield from ((name, model.batch_sizes[size], precision) for name, model in MODELS.items())


def config_of(precision: str, folder: Path) -> kit.Config:
    hardware = {"accelerator": "cpu", "precision": precision}
    trial = {"max_steps": STEPS, "warmup_steps": WARM_UP, "folder": str(folder), "predict_memory": False}
    return kit.Config.make({"hardware": hardware, "trial": {**trial, "count_work": False, "measure_memory": False}})


def given(name: str, batch: int) -> tuple[Any, Any]:
    return functools.partial(speed_models.Step, name), functools.partial(speed_models.loader, name, batch)


def predicted(name: str, batch: int, precision: str, folder: Path) -> Row:
    """What kit says, without a step of the model."""
    config = config_of(precision, folder)
    others_used(QUIET_SECONDS)
    began = time.monotonic()
    query, target = make_query(*given(name, batch), config, THIS_MACHINE)
    (recording,) = recordings_of(RecordingRequest(query), 120.0)
    step = step_of(recording)
    generic = table_here(config, step, seconds=0.0)
    before = speed_of(recording, target, costs=generic.table)
    taken = table_here(config, step, seconds=CALL_SECONDS)
    found = speed_of(recording, target, costs=taken.table)
    recording.save(folder / f"{name}-{batch}-{precision}.npz")
    return {
        "seconds": found.step_seconds, "low": found.low_seconds, "high": found.high_seconds,
        "table": before.step_seconds, "busy": taken.table.busy_cores, "took": time.monotonic() - began,
        "sources": dict(found.time.sources), "bound": found.bound, "computing": found.computing_fraction,
        "pace": found.pace_seconds, "slowness": found.slowness,
    }  # fmt: skip


def repriced(answers: Path) -> None:
    """Write the predictions anew, from the recordings and the table of calls that are there: no process is started."""
    folder, rows = answers.with_suffix(""), read(answers)
    table = table_known(config_of(PRECISIONS[0], folder))
    assert table is not None
    for row in rows:
        name, batch, precision = row["setting"]
        path = folder / f"{name}-{batch}-{precision}.npz"
        if row["what"] == "predict" and path.is_file():
            recording = Recording.load(path)
            target = dataclasses.replace(target_of("T4-16GB"), name=THIS_MACHINE, device_kind="cpu")
            found = speed_of(recording, target, costs=table)
            row |= {"seconds": found.step_seconds, "low": found.low_seconds, "high": found.high_seconds}
    answers.write_text("".join(json.dumps(row) + "\n" for row in rows))


def measured(name: str, batch: int, precision: str, folder: Path) -> Row:
    trials: list[tuple[bool, list[tuple[float, float]]]] = []
    while len(trials) < MOST_ROUNDS and sum(quiet for quiet, _ in trials) < ROUNDS:
        others_used(QUIET_SECONDS)
        trial = kit.fit(config_of(precision, folder), *given(name, batch)).wait()
        trials.append((others_used() < QUIET_FRACTION, steps_at_paces(trial, WARM_UP)))
    kept = [steps for quiet, steps in trials if quiet] or [steps for _, steps in trials]
    return {"trials": kept, "quiet": sum(quiet for quiet, _ in trials)}


def others_used(patience_seconds: float = 0.0) -> float:
    """The fraction of all cores that is in use while this program does nothing, once it is small or so long waited."""
    ends = time.monotonic() + patience_seconds
    while (used := psutil.cpu_percent(0.4) / 100) >= QUIET_FRACTION and time.monotonic() < ends:
        pass
    return used


def step_seconds(measured: Row, predicted: Row | None = None) -> float:
    """The median step as it was, or as it would be at the pace of the prediction."""

    def at_pace(seconds: float, pace: float) -> float:
        return seconds if predicted is None else at_fastest(seconds, pace, predicted["pace"], predicted["computing"])

    return statistics.median(at_pace(*step) for steps in measured["trials"] for step in steps)


def collect(what: str, seconds: float, answers: Path) -> None:
    """Answer the settings that were not, until the time is up."""
    folder = answers.with_suffix("")
    folder.mkdir(parents=True, exist_ok=True)
    known = {(row["what"], *row["setting"]) for row in read(answers)}
    ends = time.monotonic() + seconds
    wanted = ("predict", "measure") if what == "both" else (what,)
    for setting, what in itertools.product(settings(), wanted):
        if (what, *setting) in known or time.monotonic() > ends:
            continue
        try:
            row = (predicted if what == "predict" else measured)(*setting, folder)
        except Exception as error:  # of one of thirty models, from anywhere
            row = {"error": f"{type(error).__name__}: {error}"[:300]}
        with answers.open("a") as file:
            file.write(json.dumps({"what": what, "setting": setting, **row}) + "\n")
        print(what, *setting, {key: value for key, value in row.items() if key != "sources"}, flush=True)


def read(answers: Path) -> list[Row]:
    return [json.loads(line) for line in answers.read_text().splitlines()] if answers.is_file() else []


# -- the report


def pairs_of(answers: Path, *, as_it_was: bool = False) -> dict[tuple[str, int, str], tuple[float, float, Row]]:
    """(predicted, measured, the prediction's row) by setting."""
    rows = read(answers)
    found: dict[str, dict[tuple[str, int, str], Row]] = {"predict": {}, "measure": {}}
    for row in rows:
        if "error" not in row:
            found[row["what"]][tuple(row["setting"])] = row
    both = found["predict"].keys() & found["measure"].keys()
    pairs = {}
    for setting in settings():
        if setting in both:
            row = found["predict"][setting]
            took = step_seconds(found["measure"][setting], None if as_it_was else row)
            pairs[setting] = float(row["seconds"]), took, row
    return pairs


def looked_up(answers: Path) -> dict[tuple[str, int, str], float]:
    """The prototype's peer: no model's own calls, only the nearest of other models."""
    folder = answers.with_suffix("")
    table = table_here(config_of(PRECISIONS[0], folder), seconds=0.0).table
    steps = {}
    for setting in settings():
        path = folder / f"{setting[0]}-{setting[1]}-{setting[2]}.npz"
        if path.is_file():
            steps[setting] = Recording.load(path)
    owners: dict[Any, set[str]] = {}
    for setting, recording in steps.items():
        for call in step_of(recording).calls:
            owners.setdefault(call, set()).add(setting[0])
    query_target = dataclasses.replace(target_of("T4-16GB"), name=THIS_MACHINE, device_kind="cpu")
    found = {}
    for setting, recording in steps.items():
        others = {call: spent for call, spent in table.measured.items() if owners.get(call, set()) != {setting[0]}}
        less = dataclasses.replace(table, measured=others)
        found[setting] = speed_of(recording, query_target, costs=less).step_seconds
    return found


def summary(pairs: Mapping[tuple[str, int, str], tuple[float, float, Row]]) -> Row:
    errors = sorted(abs(predicted / measured - 1) for predicted, measured, _ in pairs.values())
    right = compared = 0
    for (one, mine), (other, theirs) in itertools.combinations(pairs.items(), 2):
        if one[0] == other[0] and abs(math.log(mine[1] / theirs[1])) > math.log(1.1):
            compared += 1
            right += (mine[0] > theirs[0]) == (mine[1] > theirs[1])
    corrected = []
    for name in {setting[0] for setting in pairs}:
        own = [(predicted, measured) for setting, (predicted, measured, _) in pairs.items() if setting[0] == name]
        for place, (first, took) in enumerate(own):
            factor = correction([took / first])
            corrected += [abs(p * factor / m - 1) for at, (p, m) in enumerate(own) if at != place]
    inside = [row["low"] <= measured <= row["high"] for _, measured, row in pairs.values()]
    return {
        "settings": len(errors), "models": len({setting[0] for setting in pairs}),
        "median_error": statistics.median(errors), "within_25": sum(error <= 0.25 for error in errors) / len(errors),
        "worst": errors[-1], "ranked_right": right / compared if compared else None, "compared": compared,
        "after_one_trial": statistics.median(corrected) if corrected else None,
        "inside_range": sum(inside) / len(inside),
    }  # fmt: skip


def report(answers: Path, record: bool) -> None:
    pairs = pairs_of(answers)
    peers = looked_up(answers)
    print(f"{'model':24} {'batch':>5} {'precision':11} {'predicted':>10} {'measured':>10} {'ratio':>6}  table lookup")
    for setting, (predicted, took, row) in pairs.items():
        name, batch, precision = setting
        mark = " *" if MODELS[name].held_out else ""
        lookup = f"{took / peers[setting]:6.2f}" if setting in peers else ""
        print(
            f"{name + mark:24} {batch:5} {precision:11} {1e3 * predicted:8.1f}ms {1e3 * took:8.1f}ms "
            f"{took / predicted:6.2f} {took / row['table']:6.2f} {lookup}"
        )
    held = {setting: pair for setting, pair in pairs.items() if MODELS[setting[0]].held_out}
    others = {setting: pair for setting, pair in pairs.items() if not MODELS[setting[0]].held_out}
    table = {setting: (row["table"], took, row) for setting, (_, took, row) in pairs.items()}
    lookup = {setting: (peers[setting], took, row) for setting, (_, took, row) in pairs.items() if setting in peers}
    raw = pairs_of(answers, as_it_was=True)
    found = {
        "all": pairs, "held out": held, "others": others, "all, steps as they were": raw,
        "peer: generic table": table, "peer: lookup": lookup,
    }  # fmt: skip
    for name, chosen in found.items():
        if chosen:
            print(
                name,
                {key: round(value, 3) if isinstance(value, float) else value for key, value in summary(chosen).items()},
            )
    failed = [(row["what"], *row["setting"], row["error"]) for row in read(answers) if "error" in row]
    print(*failed, sep="\n")
    if record:
        rows = [{"of": name, **summary(chosen)} for name, chosen in found.items() if chosen]
        publish("speed", rows, record=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("what", choices=("predict", "measure", "both", "reprice", "report"))
    parser.add_argument("--seconds", type=float, default=150.0)
    parser.add_argument("--answers", type=Path, default=Path("speed_answers.jsonl"))
    parser.add_argument("--record", action="store_true")
    arguments = parser.parse_args()
    if arguments.what == "report":
        report(arguments.answers.resolve(), arguments.record)
    elif arguments.what == "reprice":
        repriced(arguments.answers.resolve())
    else:
        collect(arguments.what, arguments.seconds, arguments.answers.resolve())
