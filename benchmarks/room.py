"""Several kernels at once on one machine, each with a share of its own: does each get its part?

    python benchmarks/room.py [--people 8] [--seconds 20] [--record]

Every person is a Jupyter kernel of its own with `KIT_SEAT`, and in it a trial that computes as fast as it may. From the
moment that all have begun, the steps of each are counted. The table says how many samples a second they got, and the
factor between the fastest and the slowest. The same is done without shares, to see what they bring.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time
from pathlib import Path

from jupyter_client.manager import KernelManager
from publish import publish

import kit
from kit.machine.machine import SEAT

START = """
import kit
config = kit.Config().replace({{
    "name": "room", "trial.folder": {folder!r}, "trial.max_steps": 1000000, "trial.predict_memory": False,
    "hardware.accelerator": "cpu", "loader.batch_size": 8, "model.target": "kit.models:GPT",
    "model.arguments": {{"vocabulary": 512, "width": 64, "heads": 4, "layers": 2, "context": 64}},
    "data.arguments": {{"vocabulary": 512, "context": 64, "sequences": 1000000}},
}})
trial = kit.fit(config, data={data!r})
print(kit.hardware().cores, trial.run_directory)
"""
DATA = f"{Path(__file__).parents[1] / 'datasets' / 'tokens' / 'source.py'}:Tokens"
LIMIT_SECONDS = 300.0


def say(client: object, code: str) -> str:
    """Run code in a kernel; what it printed."""
    heard: list[str] = []

    def hear(message: dict) -> None:
        if message["msg_type"] == "stream" and message["content"]["name"] == "stdout":
            heard.append(message["content"]["text"])

    reply = client.execute_interactive(code, timeout=LIMIT_SECONDS, output_hook=hear)  # type: ignore[attr-defined]
    if reply["content"]["status"] != "ok":
        raise RuntimeError("\n".join(reply["content"]["traceback"]))
    return "".join(heard)


def steps_of(run: Path) -> list[tuple[float, int]]:
    """(wall-clock seconds at its end, samples) of every step of a run."""
    text = "".join(file.read_text() for file in run.glob("events.*.jsonl"))
    events = [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]
    return [(event["time"], event["samples"]) for event in events if event["kind"] == "step"]


def together(people: int, seconds: float, folder: Path, shares: bool) -> tuple[list[float], int]:
    """Samples a second of each kernel while all run, and the cores that each was told of."""
    managers: list[KernelManager] = []
    clients = []
    try:
        for number in range(1, people + 1):
            managers.append(KernelManager(kernel_name="python3"))
            environment = {**os.environ, **({SEAT: f"{number}/{people}"} if shares else {})}
            managers[-1].start_kernel(env=environment)
            clients.append(managers[-1].client())
            clients[-1].start_channels()
            clients[-1].wait_for_ready(timeout=LIMIT_SECONDS)
        told = [say(client, START.format(folder=str(folder), data=DATA)).split() for client in clients]
        runs = [Path(run) for _, run in told]
        # Warm processes take seconds to import torch: all must have begun before anybody is timed.
        while not all(map(steps_of, runs)):
            time.sleep(0.5)
        begin = time.time()
        time.sleep(seconds)
        end = time.time()
        [say(client, "trial.stop()") for client in clients]
    finally:
        for client, manager in zip(clients, managers, strict=False):
            client.stop_channels()
            manager.shutdown_kernel(now=True)
    speeds = [sum(count for at, count in steps_of(run) if begin < at <= end) / seconds for run in runs]
    return speeds, max(int(cores) for cores, _ in told)


def main() -> None:
    asked = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    asked.add_argument("--people", type=int, default=8)
    asked.add_argument("--seconds", type=float, default=20.0)
    asked.add_argument("--record", action="store_true")
    given = asked.parse_args()
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for name, shares in (("a share each", True), ("no shares", False)):
            speeds, cores = together(given.people, given.seconds, Path(folder), shares)
            rows.append({
                "kernels": f"{given.people}, {name}", "cores told": cores, "slowest samples/s": min(speeds),
                "median": statistics.median(speeds), "fastest": max(speeds), "together": sum(speeds),
                "fastest / slowest": max(speeds) / min(speeds),
            })  # fmt: skip
    publish(f"kernels at once on {kit.hardware().cores} cores", rows, record=given.record)


if __name__ == "__main__":
    main()
