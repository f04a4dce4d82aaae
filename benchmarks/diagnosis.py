"""The diagnosis on planted faults: found, missed, and false alarms.

    python benchmarks/diagnosis.py [--record]

The pipeline of `datasets/slow`: with all five mistakes, the first that is named mended before the next diagnosis, until
nothing is named; with each of them alone; and with none. Mistakes of reading stand beside a smaller model, which they
hold up; beside the recipe's they cost less than a rule calls worth advice. A row is a pipeline:
what was planted, what was named, what of the planted was missed, and what was named without being planted. Complaints
that a mistake causes (waiting for data, many tiny operations) are no false alarms beside it. Full precision is planted
only where the processor computes faster in 16 bits, and tiny chunks stand with no prefetch, which would hide them on a
local disk.
"""

from __future__ import annotations

import tempfile
import time
from pathlib import Path
from typing import Any

from publish import publish

import kit
from kit.config import Config
from kit.targets import load_target

DATA, MODULE = "datasets/slow/parts.py:ValueByValue", "datasets/slow/parts.py:Counting"
CAUSED = {"waiting for data", "training shorter than preprocessing", "many tiny operations"}
"""By some mistake; in a pipeline without one they are false."""
READING = {"chunks that do not fit", "no prefetch"}
TOGETHER = {"chunks that do not fit": READING}


def pipeline(slow: Config, cures: dict[str, Any], planted: set[str]) -> tuple[Config, str, str]:
    """The recipe with every mistake mended that is not planted; its store is built."""
    module, data, config = MODULE, DATA, slow
    for name, cure in cures.items():
        if name in planted:
            continue
        module, data = cure.get("new_module", module), cure.get("new_data", data)
        config = config.replace(cure.get("change", {}))
    if planted and planted <= READING:
        config = config.replace({"model.arguments": {**config.model.arguments, "width": 4, "depth": 1}})
    store = Path(slow.data.url).with_name(Path(config.data.url).name)
    config = config.replace({"data.url": str(store)})
    if not store.exists():
        kit.build(config)
    return config, module, data


def measure(slow: Config, cures: dict[str, Any], planted: set[str]) -> dict[str, Any]:
    began = time.perf_counter()
    named: set[str] = set()
    left = set(planted)
    while True:
        found = kit.studies.diagnose(*pipeline(slow, cures, left)).names
        named |= set(found)
        mendable = [name for name in found if name in left]
        if len(planted) <= len(READING) or not mendable:
            break
        left.remove(mendable[0])
    missed, false = planted - named, named - planted - (CAUSED if planted else set())
    return {
        "planted": " + ".join(sorted(planted)) or "nothing",
        "faults": len(planted),
        "found": len(planted - missed),
        "missed": " + ".join(sorted(missed)) or "none",
        "false alarms": " + ".join(sorted(false)) or "none",
        "seconds": time.perf_counter() - began,
    }


def main() -> None:
    cures = dict(load_target("datasets/slow/parts.py:CURES"))
    with tempfile.TemporaryDirectory() as folder:
        slow = Config.load("datasets/slow/recipe.yaml").replace(
            {"data.url": f"{folder}/slow.zarr", "trial.folder": f"{folder}/runs", "trial.predict_memory": False}
        )
        peaks = kit.studies.device_peaks(slow)
        mistakes = set(cures)
        if peaks.peak("bfloat16") < 1.3 * peaks.peak("float32"):
            mistakes.remove("full precision")
        cases = [mistakes, *(TOGETHER.get(name, {name}) for name in cures if name in mistakes), set()]
        rows = [measure(slow, cures, planted) for planted in cases]
    publish("diagnosis of planted faults", rows)


if __name__ == "__main__":
    main()
