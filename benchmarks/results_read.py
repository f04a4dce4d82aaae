"""What reading the results of thousands of trials takes: rows kept, rows computed, and what others would do.

One real trial is run and its directory copied, so that every row is what a trial writes. Beside `kit.results()` stand a
loop that parses the same row files and trusts them blindly, and pandas reading the same rows from one JSON-lines file,
which nobody has written yet when trials have just ended. All have the files in the system's cache. Computed rows are
timed on a part of the directories.
"""

from __future__ import annotations

import json
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import pandas as pd
from publish import publish, read_options

import kit
from kit.testing import TinyData, TinyModule

TRIALS, COMPUTED, REPETITIONS = 5_000, 100, 5


def seconds(call: Callable[[], object]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def copies(folder: Path) -> list[Path]:
    """Directories of one real trial, each with its row."""
    asked = kit.Config().replace({"trial.folder": str(folder / "first"), "hardware.accelerator": "cpu"})
    trial = kit.fit(asked.replace({"trial.predict_memory": False}), TinyModule, TinyData).wait()
    trial.paths.payload.unlink()
    return [Path(shutil.copytree(trial.run_directory, folder / "runs" / f"run-{n:05d}")) for n in range(TRIALS)]


def blindly(runs: Path) -> list[dict[str, object]]:
    return [json.loads(path.read_bytes())["row"] for path in runs.glob("*/row.json")]


def anew(made: list[Path], runs: Path) -> float:
    """Seconds a row, of directories whose row is not there."""
    part = runs.with_name("part")
    for path in made[:COMPUTED]:
        shutil.copytree(path, part / path.name)
        (part / path.name / "row.json").unlink()
    return seconds(lambda: kit.results(part)) / COMPUTED


def main() -> None:
    read_options(__doc__)
    with tempfile.TemporaryDirectory(prefix="kit-results-") as place:
        folder, runs = Path(place), Path(place) / "runs"
        made = copies(folder)
        lines = folder / "rows.jsonl"
        lines.write_text("".join(json.dumps(row) + "\n" for row in kit.results(runs)))
        ways = {
            "kit.results(), rows kept": lambda: kit.results(runs),
            "glob and json, unchecked": lambda: blindly(runs),
            "pandas, one file of JSON lines": lambda: pd.read_json(lines, lines=True),
        }
        times: dict[str, list[float]] = {name: [] for name in ways}
        for _ in range(REPETITIONS):
            for name, way in ways.items():
                times[name].append(seconds(way))
        taken = {name: statistics.median(values) for name, values in times.items()}
        taken["kit.results(), rows computed"] = TRIALS * anew(made, runs)
        kit_seconds = taken["kit.results(), rows kept"]
        rows = [
            {"what": name, "seconds": value, "rows/s": TRIALS / value, "of kit, rows kept": value / kit_seconds}
            for name, value in taken.items()
        ]
        size = (made[0] / "row.json").stat().st_size
        publish(f"reading the results of {TRIALS:,} trials", rows, repetitions=REPETITIONS, row_file_bytes=size,
                computed_rows_timed=COMPUTED)  # fmt: skip


if __name__ == "__main__":
    main()
