"""What only a GPU can tell of kit, one check each: predicted beside measured, in the order of what it is worth.

A check is a generator of lines, `line(what, predicted, measured, unit)`, and gives each as soon as it is known. Where
nothing predicts a figure, predicted is None. `run_checks.py` runs each in a process of its own; those that mean
something on a CPU run there too, with small models.
"""

import contextlib
import itertools
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

import memory_grid
import psutil
import torch
from torch.utils.data import Dataset

import kit
from kit.errors import KitError, TrialError
from kit.machine.gpus import read_gpus, read_joules
from kit.studies.series import measured_bytes, samples_per_second
from kit.testing import TinyModule
from kit.train.optimizers import ShardedAdamW8bit

HERE = Path(__file__).parent
MIB, GIB = 1 << 20, 1 << 30
SIZES = {
    "cuda": {"width": 768, "heads": 12, "layers": 6, "context": 512, "vocabulary": 16384},
    "cpu": memory_grid.TINY,
}
DEVICE_BYTES = {"cuda": 4 * GIB, "cpu": 96 * MIB}
"""What a device is cut down to where a batch has to run out of memory."""
PATIENCE_SECONDS = 15.0


@dataclass(frozen=True)
class Place:
    """Where a check runs: `out` is kept, `runs` is not."""

    device: str
    out: Path
    runs: Path

    def config(self, changes=()):
        """Ten steps of whatever is trained."""
        base = {
            "hardware.accelerator": "gpu" if self.device == "cuda" else "cpu",
            "hardware.devices": 1,
            "trial.folder": str(self.runs),
            "trial.max_steps": 10,
            "trial.warmup_steps": 4,
            "trial.predict_memory": False,
            "trial.stall_seconds": 60.0,
        }
        return kit.Config().replace(base | dict(changes))

    def gpt(self, changes=()):
        """The same of a GPT on random tokens."""
        size = SIZES[self.device]
        base = {
            "hardware.precision": "bf16-mixed",
            "model.target": "kit.models:GPT",
            "model.arguments": size,
            "data.arguments": {"context": size["context"], "vocabulary": size["vocabulary"]},
            "loader.batch_size": 8,
        }
        return self.config(base | dict(changes))


@dataclass(frozen=True)
class Check:
    run: Callable[[Place], Iterator[dict]]
    seconds: float
    """After which it is ended."""
    on_cpu: bool


CHECKS = {}
"""By name, in the order of what they are worth."""
TOKENS = "kit.models:Tokens"


def check(seconds, on_cpu=False):
    def register(run):
        CHECKS[run.__name__.replace("_", " ")] = Check(run, seconds, on_cpu)
        return run

    return register


def line(what, predicted, measured, unit=""):
    return {"what": what, "predicted": predicted, "measured": measured, "unit": unit}


def free_bytes():
    return read_gpus().gpus[0].free_bytes


def compared(name, config):
    """One config predicted and run: its trial, its bytes and its speed."""
    predicted = kit.predict_memory(config, None, TOKENS)
    trial = kit.fit(config, None, TOKENS).wait()
    yield line(f"{name}: allocated", predicted.device_allocated_bytes, measured_bytes(trial), "bytes")
    reserved = trial.event("memory_measured", "device_reserved_bytes")
    if reserved is not None:
        yield line(f"{name}: reserved", predicted.device_reserved_bytes, reserved, "bytes")
    yield line(f"{name}: speed", None, samples_per_second(trial), "samples/s")
    return trial


# -- the checks


@check(seconds=90, on_cpu=True)
def start_up(place):
    """Ranks forked by the warm process; neither it nor this one may hold a device."""
    for name, start in (("first trial", "warm"), ("forked", "warm"), ("fresh interpreter", "cold")):
        submitted = time.time()
        config = place.config({"trial.start": start, "trial.max_steps": 3, "trial.warmup_steps": 0})
        trial = kit.fit(config, "kit.testing:TinyModule", "kit.testing:TinyData").wait()
        began, reason = trial.event("trial_started", "start"), trial.event("trial_started", "reason")
        yield line(f"{name}: start", start, f"{began} ({reason})" if reason and began != start else began)
        wanted = {"cuda": "gpu", "cpu": "cpu"}[place.device]
        yield line(f"{name}: device", wanted, trial.event("fit_started", "accelerator"))
        yield line(f"{name}: first step after", None, trial.steps[0]["time"] - submitted, "seconds")
    for name, pid in (("this process", os.getpid()), ("the warm process", _supervisor_id())):
        yield line(f"devices held by {name}", "none", ", ".join(sorted(_devices_of(pid))) or "none")


def _supervisor_id():
    """Of the warm one."""
    commands = {child.pid: child.cmdline() for child in psutil.Process().children()}
    return next(pid for pid, words in commands.items() if {"kit.trial.supervisor", "warm"} <= set(words))


def _devices_of(pid):
    """The devices of NVIDIA that a process has open or mapped."""
    names = [line.split()[-1] for line in Path(f"/proc/{pid}/maps").read_text().splitlines()]
    for descriptor in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(OSError):
            names.append(str(descriptor.readlink()))
    return {name for name in names if name.startswith("/dev/nvidia")}


@check(seconds=170, on_cpu=True)
def memory(place):
    """The quick grid of models, precisions and levers; what earlier runs measured stands first."""
    path = place.out / f"memory_grid.{place.device}.jsonl"
    options = memory_grid.parser().parse_args(["--quick", "--device", place.device, "--output", str(path)])
    measured = [row for row in memory_grid.read_rows(path).values() if "error" not in row]
    for row in itertools.chain(measured, memory_grid.run_cases(options)):
        yield from _of_grid(row)


def _of_grid(row):
    name, predicted, measured = row["case"], row.get("predicted", {}), row.get("measured")
    if measured is None:
        yield line(name, predicted.get("verdict"), row.get("error", "out of memory")[-300:])
        return
    for what in ("allocated", "reserved")[: 1 + (row["device"] == "cuda")]:
        yield line(f"{name}: {what}", predicted[f"{what}_bytes"], measured[f"{what}_bytes"], "bytes")
    if played := row.get("replayed"):
        reserved = played["reserved_bytes"], measured["reserved_bytes"]
        yield line(f"{name}: kit's allocator plays the real trace", *reserved, "bytes")
    if measured.get("outside_bytes") is not None:
        middle = sum(predicted["outside_bytes"]) // 2
        yield line(f"{name}: outside the allocator", middle, measured["outside_bytes"], "bytes")


class Greedy(TinyModule):
    """Takes more than any card has, in pieces, at its third step."""

    def training_step(self, batch, batch_idx):
        if self.global_step == 2:
            self.kept = [torch.empty(GIB, dtype=torch.uint8, device=self.device) for _ in range(100_000)]
        return super().training_step(batch, batch_idx)


@check(seconds=120, on_cpu=True)
def out_of_memory(place):
    """A card that is really full, what is free after it, and the batch that two searches end at."""
    if place.device == "cuda":
        yield from _full_card(place)
    limited = place.gpt({"hardware.device_memory_bytes": DEVICE_BYTES[place.device]})
    predicted = kit.memory.largest_batch(limited, None, TOKENS).batch_size
    found = kit.studies.find_batch_size(limited, None, TOKENS, resolution=0.1).wait()
    yield line("largest batch", predicted, found.batch_size)
    for attempt in found.attempts:
        name = f"batch {attempt.batch_size}: {attempt.outcome}"
        yield line(name, attempt.predicted_bytes, attempt.measured_bytes, "bytes")
    # Elsewhere, since it would begin at the batch that the search has just found to be safe.
    too_much = {"loader.batch_size": 2 * found.batch_size, "trial.folder": str(place.runs / "again")}
    back = kit.studies.back_off(limited.replace(too_much), None, TOKENS).wait()
    tried = " → ".join(f"{attempt.batch_size} {attempt.outcome}" for attempt in back.attempts)
    yield line("back-off ends at a batch that fits", "yes", "yes" if back.batch_size else "no")
    yield line("back-off", None, tried)


def _full_card(place):
    before = free_bytes()
    config = place.config()
    trial = kit.fit(config, Greedy, "kit.testing:TinyData")
    try:
        trial.wait()
    except TrialError:
        yield line("cause of a real out of memory", "device_oom", trial.cause)
    deadline = time.monotonic() + PATIENCE_SECONDS
    while (now := free_bytes()) < before - 64 * MIB and time.monotonic() < deadline:
        time.sleep(0.2)
    yield line("free after it", before, now, "bytes")
    state = kit.fit(config, "kit.testing:TinyModule", "kit.testing:TinyData").wait().state
    yield line("the next trial", "COMPLETE", state)


class Blank(Dataset):
    """Rows of a MiB, as a dataset."""

    def __len__(self):
        return 10_000

    def __getitem__(self, index):
        return torch.zeros(MIB // 4)


class Taking(TinyModule):
    """Takes such rows, and computes for a while."""

    def __init__(self):
        super().__init__(width=MIB // 4)

    def training_step(self, batch, batch_idx):
        return self.layer(batch).square().mean()


@check(seconds=90)
def transfer(place):
    """Copies from pageable and from pinned memory, a copy beside a matrix product, and both in a trial."""
    rates = {}
    for name, pinned in (("pageable", False), ("pinned", True)):
        rates[name] = _copy_rate(pinned)
        yield line(f"{name} memory to the device", None, rates[name], "bytes/s")
    copy, product, both = _overlap()
    yield line("a pinned copy beside a product", max(copy, product), both, "seconds")
    for name, pinned in (("pageable", False), ("pinned", True)):
        loader = {"loader.pin_memory": pinned, "loader.num_workers": 2, "loader.batch_size": 64}
        config = place.config({**loader, "hardware.precision": "32-true", "trial.max_steps": 20})
        trial = kit.fit(config, Taking, Blank).wait()
        steps = trial.steps[5:]
        seconds = sum(step["transfer_seconds"] for step in steps) / len(steps)
        yield line(f"64 MiB from {name} memory in a step", 64 * MIB / rates[name], seconds, "seconds")
        waited = sum(step["wait_seconds"] for step in steps) / sum(step["step_seconds"] for step in steps)
        yield line(f"{name}: fraction of a step spent waiting", None, waited)


def _timed(work, repeats=5):
    best = float("inf")
    for _ in range(repeats + 1):
        torch.cuda.synchronize()
        began = time.perf_counter()
        work()
        torch.cuda.synchronize()
        best = min(best, time.perf_counter() - began)
    return best


def _copy_rate(pinned):
    source = torch.ones(256 * MIB, dtype=torch.uint8)
    source = source.pin_memory() if pinned else source
    target = torch.empty_like(source, device="cuda")
    return source.numel() / _timed(lambda: target.copy_(source, non_blocking=pinned))


def _overlap():
    """Seconds of a pinned copy, of a matrix product that takes about as long or longer, and of both."""
    source = torch.ones(256 * MIB, dtype=torch.uint8).pin_memory()
    target, stream = torch.empty_like(source, device="cuda"), torch.cuda.Stream()
    factor = torch.ones(8192, 8192, device="cuda", dtype=torch.bfloat16)

    def copy():
        with torch.cuda.stream(stream):
            target.copy_(source, non_blocking=True)

    def product():
        for _ in range(8):
            factor @ factor

    def both():
        copy()
        product()

    return _timed(copy), _timed(product), _timed(both)


@check(seconds=60)
def clocks(place):
    """The device's events beside the host's clock: the whole of the steps must agree, the parts need not."""
    trial = kit.fit(place.gpt({"trial.max_steps": 30}), None, TOKENS).wait()
    steps = trial.steps[5:]
    names = [name for name in steps[0]["host_seconds"] if any(step[f"{name}_seconds"] for step in steps)]
    for name in ("step", *(name for name in names if name != "step")):
        host = sum(step["host_seconds"][name] for step in steps) / len(steps)
        device = sum(step[f"{name}_seconds"] for step in steps) / len(steps)
        yield line(f"{name}: the host's clock | the device's", host, device, "seconds")


@check(seconds=80)
def half_precision(place):
    """16-mixed beside 32-true: bytes, speed, and losses that stay together."""
    losses = {}
    for precision in ("32-true", "bf16-mixed", "16-mixed"):
        trial = yield from compared(precision, place.gpt({"hardware.precision": precision}))
        yield line(f"{precision}: computed in", precision, trial.event("fit_started", "precision"))
        losses[precision] = trial.steps[-1]["loss"]
    for precision in ("bf16-mixed", "16-mixed"):
        yield line(f"last loss, 32-true | {precision}", losses["32-true"], losses[precision])


@check(seconds=100, on_cpu=True)
def attention(place):
    """Each kernel that is asked for, the one that ran, and what it held."""
    kernels = ("auto", "flash", "cudnn", "efficient", "math") if place.device == "cuda" else ("auto", "flash", "math")
    for kernel in kernels:
        config = place.gpt({"levers.attention": kernel})
        if kernel == "auto":
            notes = kit.predict_memory(config, None, TOKENS).notes
            for note in (note for note in notes if note.startswith("attention")):
                yield line("auto: foreseen", note, None)
        trial = yield from compared(kernel, config)
        ran = trial.event("levers_used", "attention") or {}
        yield line(f"{kernel}: kernel that ran", None if kernel == "auto" else kernel, ", ".join(sorted(ran)))
        for warning in trial.warnings:
            yield line(f"{kernel}: warning", None, warning[:300])


@check(seconds=90, on_cpu=True)
def optimizers(place):
    """Fused and 8-bit AdamW beside the module's own, and torchao's numbers in kit's step."""
    levers = ["fused optimizer", "8-bit optimizer"]
    found = kit.studies.verify_levers(place.gpt(), None, TOKENS, levers=levers, cumulative=False, repeats=2)
    for step in found.steps:
        yield line(f"{step.name}: allocated", step.predicted_bytes, step.measured_bytes, "bytes")
        yield line(f"{step.name}: speed", None, step.samples_per_second, "samples/s")
        if step.note:
            yield line(f"{step.name}: note", None, step.note[:300])
    if find_spec("torchao"):
        yield from _eight_bits(place.device)
    else:
        yield line("8 bits for shards", "torchao", "not installed")


def _eight_bits(device):
    """Two steps of `ShardedAdamW8bit` beside AdamW's on the same gradients."""
    torch.manual_seed(0)
    start, gradients = torch.randn(1 << 22), torch.randn(2, 1 << 22)
    ends = []
    for make in (torch.optim.AdamW, ShardedAdamW8bit):
        weight = torch.nn.Parameter(start.to(device, copy=True))
        optimizer = make([weight], lr=1e-2)
        for gradient in gradients:
            weight.grad = gradient.to(device)
            optimizer.step()
        ends.append((weight.detach().cpu() - start).norm().item())
    yield line("8 bits for shards: length of two steps, AdamW | 8 bits", *ends)


@check(seconds=30)
def nvml(place):
    """What NVML says of the card, beside what CUDA says of it."""
    gpu, told = read_gpus().gpus[0], torch.cuda.get_device_properties(0)
    yield line("name, NVML | CUDA", gpu.name, told.name)
    yield line("UUID, NVML | CUDA", gpu.uuid, f"GPU-{told.uuid}")
    yield line("capability, NVML | CUDA", str(gpu.capability), str((told.major, told.minor)))
    yield line("memory, NVML | CUDA", gpu.total_bytes, told.total_memory, "bytes")
    torch.ones(1, device="cuda")
    yield line("free, NVML | CUDA", free_bytes(), torch.cuda.mem_get_info()[0], "bytes")
    yield line("compute processes", 1, read_gpus().gpus[0].processes)
    before, began = read_joules(gpu.uuid), time.monotonic()
    factor = torch.ones(8192, 8192, device="cuda", dtype=torch.bfloat16)
    while time.monotonic() < began + 2:
        factor @ factor
        torch.cuda.synchronize()
    after, seconds = read_joules(gpu.uuid), time.monotonic() - began
    watts = None if before is None or after is None else (after - before) / seconds
    yield line("watts of a matrix product", None, watts)


@check(seconds=90, on_cpu=True)
def trace(place):
    """What torch's profiler sees of a trial, and where the device waited."""
    found = kit.studies.profile(place.gpt(), None, TOKENS, passes=("pytorch",)).wait()
    seen = found.trace
    yield line("device of the trace", {"cuda": "gpu", "cpu": "cpu"}[place.device], seen.device)
    yield line("steps in the trace", None, seen.steps)
    yield line("busy", None, seen.busy_seconds / seen.window_seconds)
    for cause, seconds in seen.gap_seconds.items():
        yield line(f"without work: {cause}", None, seconds, "seconds")
    for operation in (one for one in seen.operations[:5] if one.device_seconds):
        yield line(f"the device in {operation.name}", None, operation.device_seconds, "seconds")
    if seen.path.stat().st_size < 15 * MIB:
        shutil.copy(seen.path, place.out)


@check(seconds=150)
def tests(place):
    """The tests of this folder that need a GPU, but for those that take minutes."""
    if not find_spec("pytest"):
        yield line("tests", "pytest", "not installed")
        return
    for path in sorted(HERE.glob("test_*_cuda.py")):
        command = [sys.executable, "-m", "pytest", "-q", "-m", "gpu and not slow", "-p", "no:cacheprovider", str(path)]
        done = subprocess.run(command, capture_output=True, text=True, cwd=HERE.parents[1])
        *_, last = done.stdout.strip().splitlines() or [""]
        yield line(path.stem, "passed", "passed" if done.returncode == 0 else f"{last} {done.stdout[-600:]}")


def run(name, place):
    """The lines of one check; a refusal of kit's is one too, and then raised."""
    try:
        yield from CHECKS[name].run(place)
    except KitError as error:
        yield line("ended with", None, str(error)[:1000])
        raise
