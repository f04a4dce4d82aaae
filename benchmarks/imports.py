"""What `import kit` costs a notebook, beside what `import lightning` costs it: fresh interpreters in turn."""

from __future__ import annotations

import statistics
import subprocess
import sys
import time

from publish import publish, read_options

REPETITIONS = 7


def seconds(code: str) -> float:
    start = time.perf_counter()
    subprocess.run([sys.executable, "-c", code], check=True)
    return time.perf_counter() - start


def main() -> None:
    read_options(__doc__)
    codes = {"python alone": "", "import kit": "import kit", "kit.Config()": "import kit; kit.Config()"}
    codes["import lightning"] = "import lightning"
    times: dict[str, list[float]] = {name: [] for name in codes}
    for _ in range(REPETITIONS):
        for name, code in codes.items():
            times[name].append(seconds(code))
    start = statistics.median(times["python alone"])
    net = {name: statistics.median(values) - start for name, values in times.items() if name != "python alone"}
    peer = net["import lightning"]
    rows = [{"what": name, "seconds": value, "of import lightning": value / peer} for name, value in net.items()]
    publish("import time, without the interpreter's own start", rows, repetitions=REPETITIONS)


if __name__ == "__main__":
    main()
