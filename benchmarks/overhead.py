"""What being inside a trial costs a step: samples per second of the same Lightning fit inside kit and without it.

    python benchmarks/overhead.py [--record]

A small convolutional network whose step takes at least 20 ms on one thread; the first steps are dropped. Each fit runs
in a fresh fork of a process that has imported Lightning: a process that has fitted before is faster, with or without
kit. The plain fit stands twice, so that the second row shows what chance alone does to a ratio; ratios are medians over
rounds, each within its round. Beside the pace stands the CPU time of a step, of all threads of the process: that of
others on the machine is not in it. The C allocator keeps freed memory in all of them, as kit has it by default: whether
it does depends else on the layout of the heap, and changes a step by a factor of two with or without kit. A GPT of many
small operators on all cores shows, besides, whether the threads of a trial wait for each other as they do elsewhere.

What timing itself takes is too little to be seen in that. A second table has it alone: the actions and hooks of one
step, written down in a real fit, are played again and again to the callbacks of a trial, with its clock, and their
events are written to a real file. Fractions are of the step of the first table.
"""

from __future__ import annotations

import functools
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from publish import publish, read_options
from torch.utils.data import DataLoader, TensorDataset

from kit.config import Config
from kit.events import EventWriter
from kit.machine.machine import hardware
from kit.memory.alongside import fit
from kit.models import GPT, Tokens
from kit.trial.context import Context
from kit.trial.directory import Control, RunPaths
from kit.trial.recorder import CommunicationTimer, StepClock, StepRecorder

REPETITIONS = 10
STEPS, DROPPED = 40, 10
PLAYED, ROUNDS = 2000, 15
ANSWER = "samples/s"
BATCH_SIZE = 8


class Convolutions(LightningModule):
    """Down, across and up again, as a UNet does."""

    def __init__(self) -> None:
        super().__init__()
        self.net = torch.nn.Sequential(
            torch.nn.Conv2d(3, 16, 3, stride=2, padding=1),
            torch.nn.ReLU(),
            torch.nn.Conv2d(16, 32, 3, stride=2, padding=1),
            torch.nn.ReLU(),
            torch.nn.ConvTranspose2d(32, 16, 2, stride=2),
            torch.nn.ReLU(),
            torch.nn.ConvTranspose2d(16, 3, 2, stride=2),
        )

    def training_step(self, batch: Sequence[torch.Tensor], _: int) -> torch.Tensor:
        return torch.nn.functional.mse_loss(self.net(batch[0]), batch[0])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters())


def loader() -> DataLoader[tuple[torch.Tensor, ...]]:
    generator = torch.Generator().manual_seed(0)
    return DataLoader(TensorDataset(torch.randn(128, 3, 208, 208, generator=generator)), batch_size=BATCH_SIZE)


class Clock(Callback):
    def __init__(self) -> None:
        self.times: list[float] = []
        self.cpu: list[float] = []

    def on_train_batch_end(self, *_: Any) -> None:
        self.times.append(time.perf_counter())
        self.cpu.append(time.process_time())


class Pace(NamedTuple):
    samples_per_second: float
    cpu_seconds: float
    """Of a step."""


CASES: dict[str, tuple[Callable[[], LightningModule], Callable[[], Any], int]] = {
    "one thread": (Convolutions, loader, 1),
    "all cores": (functools.partial(GPT, vocabulary=1024, width=64, heads=2, layers=6, context=64),
                  functools.partial(Tokens, 1024, 64, BATCH_SIZE, STEPS * BATCH_SIZE),
                  hardware().cores),
}  # fmt: skip
"""Module, data and threads."""


def serve() -> None:
    """Fits without kit, one for each line on stdin, which names the case; each in a fresh fork of this interpreter."""
    for line in sys.stdin:
        if (child := os.fork()) == 0:
            fit_alone(line.strip())
            os._exit(0)
        os.waitpid(child, 0)


def fit_alone(case: str) -> None:
    """One fit without kit; prints its pace."""
    module, data, threads = CASES[case]
    torch.set_num_threads(threads)
    clock = Clock()
    trainer = Trainer(
        accelerator="cpu",
        devices=1,
        max_steps=STEPS,
        max_epochs=-1,
        callbacks=[clock],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(module(), data())
    wall, cpu = (taken[-1] - taken[DROPPED - 1] for taken in (clock.times, clock.cpu))
    print(ANSWER, (STEPS - DROPPED) * BATCH_SIZE / wall, cpu / (STEPS - DROPPED), flush=True)


def without_kit(server: subprocess.Popen[str], case: str) -> Pace:
    assert server.stdin is not None
    assert server.stdout is not None
    print(case, file=server.stdin, flush=True)
    answer = next(line for line in server.stdout if line.startswith(ANSWER))
    return Pace(*map(float, answer.split()[1:]))


def inside_kit(folder: str, case: str) -> Pace:
    module, data, threads = CASES[case]
    devices = {"accelerator": "cpu", "devices": 1, "threads_per_rank": threads}
    limits = {"max_steps": STEPS, "warmup_steps": DROPPED, "folder": folder}
    trial = fit(Config.make({"hardware": devices, "trial": limits}), module, data).wait()
    steps, used = trial.steps[DROPPED:], trial.event("cpu_used")
    assert used is not None
    speed = sum(step["samples"] for step in steps) / sum(step["step_seconds"] for step in steps)
    return Pace(speed, used["process_seconds"] / len(steps))


def main() -> None:
    read_options(__doc__)
    os.environ.update(MALLOC_MMAP_THRESHOLD_=str(1 << 30), MALLOC_TRIM_THRESHOLD_=str(1 << 34))
    command = [sys.executable, __file__, "serve"]
    with (
        tempfile.TemporaryDirectory() as folder,
        subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
        ) as server,
    ):
        of_case: dict[str, list[dict[str, Pace]]] = {}
        for case in CASES:
            ways: dict[str, Callable[[], Pace]] = {
                "Lightning alone": functools.partial(without_kit, server, case),
                "Lightning alone, again": functools.partial(without_kit, server, case),
                "inside kit": functools.partial(inside_kit, folder, case),
            }
            of_case[case] = [one_round(ways) for _ in range(REPETITIONS + 1)][1:]  # the first starts both interpreters
    rounds = of_case["one thread"]
    publish("samples per second of one fit", [row(way, rounds) for way in ways], repetitions=REPETITIONS)
    found = [row(way, of_case["all cores"]) for way in ways]
    publish("samples per second of one fit, all cores", found, repetitions=REPETITIONS, cores=hardware().cores)
    step_seconds = statistics.median(paces["Lightning alone"].cpu_seconds for paces in rounds)
    publish("what timing takes of a step", instrumentation(step_seconds), repetitions=ROUNDS, steps=PLAYED)


class Tape(StepClock):
    """A clock that writes down what it hears."""

    def __init__(self) -> None:
        super().__init__()
        self.heard: list[tuple[bool, str]] = []

    def start(self, action_name: str) -> None:
        self.heard.append((True, action_name))
        super().start(action_name)

    def stop(self, action_name: str) -> None:
        self.heard.append((False, action_name))
        super().stop(action_name)


class Steps(Callback):
    """Where in the tape each step ends, and what its hooks were given."""

    def __init__(self, tape: Tape) -> None:
        self.tape = tape
        self.ends: list[int] = []
        self.given: tuple[Any, Any] = (None, None)

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, place: int) -> None:  # noqa: ARG002
        self.ends.append(len(self.tape.heard))
        self.given = outputs, batch


def instrumentation(step_seconds: float) -> list[dict[str, Any]]:
    """CPU seconds a step of the clock alone, and of the clock with all that a trial writes down."""
    torch.set_num_threads(1)
    tape = Tape()
    steps = Steps(tape)
    with tempfile.TemporaryDirectory() as folder:
        recorder, timer = parts_of_a_trial(RunPaths(Path(folder)), tape)
        trainer = Trainer(
            accelerator="cpu", devices=1, max_steps=8, max_epochs=-1, callbacks=[timer, recorder, steps], profiler=tape,
            logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
        )  # fmt: skip
        trainer.fit(Convolutions(), loader())
        trainer.training = True  # hooks ask for what a step logged
        actions = tape.heard[steps.ends[-3] : steps.ends[-2]]
        clock = [played(actions, StepClock()) for _ in range(ROUNDS)]
        whole = []
        for number in range(ROUNDS):
            (run := Path(folder, str(number))).mkdir()
            mine = StepClock()
            callbacks = parts_of_a_trial(RunPaths(run), mine)
            whole.append(played(actions, mine, functools.partial(hooks, trainer, callbacks, steps.given)))
    found = {"clock": statistics.median(clock), "clock, callbacks and events": statistics.median(whole)}
    return [
        {"what": what, "µs a step": 1e6 * seconds, "fraction of a step": seconds / step_seconds}
        for what, seconds in found.items()
    ]


def parts_of_a_trial(paths: RunPaths, clock: StepClock) -> tuple[StepRecorder, CommunicationTimer]:
    Control.create(paths.control)
    writer = EventWriter(paths.events(0), 0)
    context = Context(paths, Config(), {"world_size": 1}, 0, writer, Control(paths.control))
    return StepRecorder(context, clock), CommunicationTimer(clock)


def played(actions: Sequence[tuple[bool, str]], clock: StepClock, hooks: Callable[[], None] | None = None) -> float:
    """CPU seconds of one step."""
    began = time.process_time()
    for _ in range(PLAYED):
        for starts, action in actions:
            (clock.start if starts else clock.stop)(action)
        if hooks is not None:
            hooks()
    return (time.process_time() - began) / PLAYED


def hooks(trainer: Trainer, callbacks: tuple[StepRecorder, CommunicationTimer], given: tuple[Any, Any]) -> None:
    """What a trial does at every step, as if each were a new one."""
    recorder, timer = callbacks
    module, (outputs, batch) = trainer.lightning_module, given
    recorder._steps_done = trainer.global_step - 1
    recorder.on_train_batch_start(trainer, module, batch, 0)
    timer.on_before_backward(trainer, module, outputs["loss"])
    recorder.on_train_batch_end(trainer, module, outputs, batch, 0)


def row(way: str, rounds: Sequence[Mapping[str, Pace]]) -> dict[str, Any]:
    """Medians over rounds; ratios are within a round."""
    mine, beside = [paces[way] for paces in rounds], [paces["Lightning alone"] for paces in rounds]
    speeds = [a.samples_per_second / b.samples_per_second for a, b in zip(mine, beside, strict=True)]
    costs = [a.cpu_seconds / b.cpu_seconds for a, b in zip(mine, beside, strict=True)]
    low, middle, high = statistics.quantiles(costs)
    return {
        "way": way, "samples/s": statistics.median(pace.samples_per_second for pace in mine),
        "ratio": statistics.median(speeds),
        "CPU ms a step": 1000 * statistics.median(pace.cpu_seconds for pace in mine), "CPU ratio": middle,
        "middle half of CPU ratios": f"{low:.3f} to {high:.3f}",
    }  # fmt: skip


def one_round(ways: Mapping[str, Callable[[], Pace]]) -> dict[str, Pace]:
    """The pace of each way, taken in random order: whoever comes second finds another machine."""
    order = random.sample(list(ways), len(ways))
    return {way: ways[way]() for way in order}


if __name__ == "__main__":
    serve() if sys.argv[1:] == ["serve"] else main()
