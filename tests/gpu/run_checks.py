"""Every check of a GPU, in the order of what it is worth, within a time: `make gpu`.

    python tests/gpu/run_checks.py [--out FOLDER] [--minutes 8] [--again] [--only NAME] [--device cpu]

Each check runs in a process of its own, which is ended after its time, so that one crash does not end the rest. What it
finds is in `FOLDER/DEVICE.json` as soon as it is known, and at the end in a table: predicted | measured | ratio. Run it
again, and it goes on: first with what has not begun, then with what failed or ran out of time. `--again` runs all anew.
With `--device cpu` those run that mean something there. README.md beside this file says what has to be installed.
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT)]

from checks import CHECKS, Place, run  # noqa: E402

from kit.json_text import write_json  # noqa: E402
from kit.machine.gpus import read_gpus  # noqa: E402
from kit.machine.processes import die_with_parent  # noqa: E402
from kit.tables import text_table  # noqa: E402
from kit.units import format_bytes, format_seconds  # noqa: E402

LINE = "line "
DONE, ELSEWHERE = "done", "needs CUDA"
LEAST_SECONDS = 10.0
"""Left, for another check to begin."""
CPU_FACTOR = 4
"""How much longer than on a GPU a check may take there."""
LAST_BYTES = 4000
PACKAGES = ("torch", "lightning", "numpy", "zarr", "bitsandbytes", "torchao")
SHOWN = {"bytes": format_bytes, "seconds": format_seconds, "bytes/s": lambda rate: f"{format_bytes(rate)}/s"}


# -- one check, in its own process


def be_check(name, device, out):
    """Print a line for each that the check gives."""
    die_with_parent(os.getppid())
    with tempfile.TemporaryDirectory(prefix="kit-gpu-check-", ignore_cleanup_errors=True) as folder:
        Path(folder, "pyproject.toml").touch()  # relative paths of configs begin here
        os.chdir(folder)
        for line in run(name, Place(device, out, Path(folder, "runs"))):
            print(LINE + json.dumps(line), flush=True)


def watch(command, limit_seconds, on_line):
    """Run a command, and end all its processes after `limit_seconds`; what became of it, and its last words."""
    with tempfile.TemporaryFile() as errors:
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), *_python_path()])}
        child = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=errors, text=True, start_new_session=True, env=environment
        )
        out_of_time = threading.Event()

        def end():
            out_of_time.set()
            os.killpg(child.pid, signal.SIGKILL)

        timer = threading.Timer(limit_seconds, end)
        timer.start()
        with child.stdout:
            try:
                for text in child.stdout:
                    if text.startswith(LINE):
                        on_line(json.loads(text.removeprefix(LINE)))
                code = child.wait()
            finally:
                timer.cancel()
                if child.poll() is None:
                    os.killpg(child.pid, signal.SIGKILL)
        errors.seek(max(0, errors.seek(0, os.SEEK_END) - LAST_BYTES))
        last_words = errors.read().decode(errors="replace")
    if out_of_time.is_set():
        return "out of time", f"ended after {limit_seconds:.0f} s"
    return (DONE, "") if code == 0 else ("failed", f"exit code {code}: {last_words}")


def _python_path():
    return [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]


# -- all of them


def todo(results, options):
    """Names of the checks to run: those that never began, then those that did not end well."""
    asked = [name for name in CHECKS if options.only in name]
    if options.again:
        return asked
    states = {name: results["checks"].get(name, {}).get("state") for name in asked}
    new = [name for name in asked if states[name] is None]
    return new + [name for name in asked if states[name] not in (None, DONE, ELSEWHERE)]


def run_all(options):
    """The results, kept in their file after every line."""
    path = options.out / f"{options.device}.json"
    results = json.loads(path.read_text()) if path.exists() else {"device": options.device, "checks": {}}
    results["machine"] = about()
    deadline = time.monotonic() + 60 * options.minutes
    for name in todo(results, options):
        left = deadline - time.monotonic()
        if left < LEAST_SECONDS:
            print(f"{options.minutes:g} minutes are over; run it again, and it goes on with {name!r}")
            break
        found = results["checks"][name] = {"state": "running", "seconds": 0.0, "error": "", "lines": []}
        if options.device == "cpu" and not CHECKS[name].on_cpu:
            found["state"] = ELSEWHERE
            continue

        def on_line(line, found=found):
            found["lines"].append(line)
            write_json(path, results, indent=1)

        began = time.monotonic()
        command = [sys.executable, __file__, "--check", name, "--device", options.device, "--out", str(options.out)]
        limit = CHECKS[name].seconds * (CPU_FACTOR if options.device == "cpu" else 1)
        found["state"], found["error"] = watch(command, min(left, limit), on_line)
        found["seconds"] = time.monotonic() - began
        write_json(path, results, indent=1)
        print(f"{name}: {found['state']} after {found['seconds']:.0f} s", flush=True)
    write_json(path, results, indent=1)
    return results


def about():
    """What the figures were measured with."""
    found = {"python": sys.version.split()[0], "gpus": [gpu.name for gpu in read_gpus().gpus]}
    for name in PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = None
    return found


def show(results):
    rows = []
    for name, found in results["checks"].items():
        rows += [[name, line["what"], *_cells(line)] for line in found["lines"]]
        if found["state"] != DONE:
            error = found["error"].strip().splitlines() or [""]
            rows.append([name, found["state"], "–", error[-1][-100:], "–"])
    print(text_table(("check", "what", "predicted", "measured", "ratio"), rows))


def _cells(line):
    predicted, measured = line["predicted"], line["measured"]
    texts = [_text(value, line["unit"]) for value in (predicted, measured)]
    if isinstance(predicted, str) and measured is not None:
        return [*texts, "same" if predicted == measured else "differs"]
    comparable = isinstance(predicted, int | float) and isinstance(measured, int | float) and predicted
    return [*texts, f"{measured / predicted:.3f}" if comparable else "–"]


def _text(value, unit):
    if value is None or isinstance(value, str):
        return "–" if value is None else value[:100]
    return SHOWN[unit](value) if unit in SHOWN else f"{value:,.4g} {unit}".strip()


def main(arguments=None):
    parser = argparse.ArgumentParser(description="Every check of a GPU, in the order of what it is worth.")
    parser.add_argument("--out", type=Path, default=ROOT / "artifacts/gpu", help="folder of the results")
    parser.add_argument("--minutes", type=float, default=8.0, help="after which no check begins, and the last is ended")
    parser.add_argument("--again", action="store_true", help="run also what is done")
    parser.add_argument("--only", default="", help="only checks with this text in their name")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--check", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    options.out = options.out.resolve()
    if options.check:
        be_check(options.check, options.device, options.out)
        return 0
    if options.device == "cuda" and not read_gpus().gpus:
        raise SystemExit("this machine has no NVIDIA GPU; run it where there is one, or with --device cpu")
    options.out.mkdir(parents=True, exist_ok=True)
    results = run_all(options)
    show(results)
    return int(any(found["state"] not in (DONE, ELSEWHERE) for found in results["checks"].values()))


if __name__ == "__main__":
    sys.exit(main())
