"""Predicted beside measured memory for a grid of models and settings, on this machine's GPU.

    python tests/gpu/memory_grid.py --output grid.jsonl [--quick] [--only gpt] [--cap] [--device cpu]

Each case is predicted by `kit.predict_memory(..., device="this machine")`, then trained for a few steps in a fresh
process, which reports `torch.cuda.max_memory_allocated` and `max_memory_reserved`, what the process holds beside them,
and its allocations one by one. These are played through kit's model of the allocator: its error alone, without that of
the prediction. They are also played with the predicted bytes as all there is: does the training run out?  With `--cap`
it really trains under that limit as well (`set_per_process_memory_fraction`).

One JSON line a case is appended to the output; cases that it holds already are not run again, so an interrupted grid
goes on where it was. Then the summary of all lines is printed. `--device cpu` runs small models against the events of
the CPU's allocator; it needs no GPU. Nothing else should use the device meanwhile.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
from dataclasses import dataclass, field
from functools import partial
from importlib.util import find_spec
from pathlib import Path

import kit
from kit.machine.gpus import read_gpus
from kit.machine.machine import hardware
from kit.tables import text_table
from kit.units import format_bytes

ANSWER = "measured "
STEPS = {"cuda": 8, "cpu": 3}
"""Optimizer steps; on a GPU enough for 16-mixed to find its scale."""
PRECISIONS = {"cuda": ("32-true", "bf16-mixed", "16-mixed"), "cpu": ("32-true", "bf16-mixed")}
OPTIMIZERS = ("module", "adamw-fused", "adamw-8bit", "sgd")
CHECKPOINTED = ("GPT", "encoder", "UNet")
HISTORY_ENTRIES = 2_000_000


@dataclass(frozen=True)
class Model:
    """A class of kit.models, its arguments, and what its batches are made of: (shape, bound of whole numbers)."""

    target: str
    arguments: dict
    batch_size: int
    sample: tuple | dict

    def module(self):
        import kit.models

        return getattr(kit.models, self.target)(**self.arguments)

    def data(self):
        from kit.models import RandomData

        if isinstance(self.sample, dict):
            return RandomData({name: _field(*one) for name, one in self.sample.items()}, self.batch_size)
        fields = tuple(_field(*one) for one in self.sample)
        return RandomData(fields if len(fields) > 1 else fields[0], self.batch_size)


def _field(shape, below=None, mask=False):
    import torch

    from kit.models import Field

    return Field(shape=shape, below=below, dtype=torch.bool if mask else None)


def _tokens(length, below):
    return (((length + 1,), below),)


def _labelled(length, below):
    return (((length,), below), ((), 10))


def _patches(side):
    shape = (3, 2, side, side)
    return {"values": (shape,), "valid": (shape, 2, True)}


def _images(side):
    return (((3, side, side),), ((), 1000))


def _series(steps):
    return (((steps, 16),), ((steps, 16),))


TINY = {"vocabulary": 1024, "width": 128, "heads": 4, "layers": 4, "context": 128}
MODELS = {
    "cuda": {
        "GPT": Model("GPT", {}, 4, _tokens(1024, 50304)),
        "encoder": Model("Encoder", {}, 16, _labelled(256, 30522)),
        "ResNet": Model("ResNet", {}, 64, _images(224)),
        "UNet": Model("UNet", {"width": 32, "depth": 4}, 8, _patches(256)),
        "recommender": Model("Recommender", {}, 4096, (((20,), 100_000), ((), 2))),
        "recurrent": Model("Recurrent", {"width": 1024}, 64, _series(256)),
    },
    "cpu": {
        "GPT": Model("GPT", TINY, 8, _tokens(128, 1024)),
        "encoder": Model("Encoder", TINY, 8, _labelled(128, 1024)),
        "ResNet": Model("ResNet", {"width": 32, "blocks": (1, 1, 1, 1)}, 8, _images(96)),
        "UNet": Model("UNet", {}, 4, _patches(64)),
        "recommender": Model("Recommender", {"values": 10_000}, 256, (((20,), 10_000), ((), 2))),
        "recurrent": Model("Recurrent", {"width": 128}, 16, _series(64)),
    },
}


@dataclass(frozen=True)
class Case:
    device: str
    model: str
    settings: dict = field(default_factory=dict)
    """Dotted paths of config fields."""

    @property
    def name(self):
        shown = [f"{path.rpartition('.')[2]}={value}" for path, value in self.settings.items()]
        return " ".join([self.model, *shown])

    @property
    def parts(self):
        return MODELS[self.device][self.model]

    @property
    def config(self):
        base = {
            "hardware.accelerator": "cpu" if self.device == "cpu" else "gpu",
            "hardware.devices": 1,
            "loader.batch_size": self.parts.batch_size,
            "trial.max_steps": STEPS[self.device],
            "trial.warmup_steps": 0,
        }
        return kit.Config().replace(base | self.settings)


def cases(device, quick=False, optimizers=OPTIMIZERS, precisions=None):
    """The grid, one Case each; `quick` leaves out what differs least."""
    settings = [_quick(device), _full(device, optimizers)][not quick]
    allowed = precisions or PRECISIONS[device]
    made = [Case(device, model, {name: value for name, value in one.items() if value}) for model, one in settings]
    return [case for case in made if case.settings["hardware.precision"] in allowed and _optimizer(case) in optimizers]


def _optimizer(case):
    return case.settings.get("levers.optimizer", "module")


def _setting(precision, checkpointing=False, optimizer=None, **more):
    chosen = {"hardware.precision": precision, "levers.gradient_checkpointing": checkpointing}
    return chosen | {"levers.optimizer": optimizer} | {f"levers.{name}": value for name, value in more.items()}


def _quick(device):
    low = "bf16-mixed"
    for model in MODELS[device]:
        yield model, _setting("32-true")
        yield model, _setting(low)
        if model in CHECKPOINTED:
            yield model, _setting(low, True)
    for optimizer in OPTIMIZERS[1:]:
        yield "GPT", _setting(low, optimizer=optimizer)


def _full(device, optimizers):
    for model in MODELS[device]:
        for precision in PRECISIONS[device]:
            for checkpointing in (False, True) if model in CHECKPOINTED else (False,):
                for optimizer in optimizers:
                    yield model, _setting(precision, checkpointing, None if optimizer == "module" else optimizer)
    for attention in ("math", "efficient"):
        yield "GPT", _setting("bf16-mixed", attention=attention)
    for model in ("GPT", "ResNet"):
        yield model, _setting("bf16-mixed", accumulate_grad_batches=2) | {"training.gradient_clip_norm": 1.0}


# -- one case


def predict(case):
    found = kit.predict_memory(case.config, case.parts.module, case.parts.data, device="this machine")
    return {
        "allocated_bytes": found.device_allocated_bytes,
        "reserved_bytes": found.device_reserved_expandable_bytes if _expandable() else found.device_reserved_bytes,
        "outside_bytes": list(found.outside_bytes),
        "verdict": found.verdict,
        "breakdown": dict(found.breakdown),
        "seconds": found.record_seconds,
    }


def _expandable():
    """Whether torch is told to use expandable segments here."""
    settings = os.environ.get("PYTORCH_ALLOC_CONF", os.environ.get("PYTORCH_CUDA_ALLOC_CONF", ""))
    return "expandable_segments:true" in settings.lower().replace(" ", "")


def run_case(case, cap=False):
    """The line of one case."""
    row = {"case": case.name, "device": case.device, "model": case.model, "settings": case.settings}
    try:
        row["predicted"] = predict(case)
    except kit.KitError as error:
        return row | {"error": f"prediction: {error}"}
    limit = row["predicted"]["reserved_bytes"]
    row |= measured_in_child(case, limit)
    if cap and case.device == "cuda" and "measured" in row:
        row["ran_out_under_cap"] = bool(measured_in_child(case, limit, "--under-cap").get("ran_out"))
    return row


def measured_in_child(case, limit, *flags):
    """Train it in a fresh process; `limit` is the predicted bytes."""
    asked = json.dumps({"device": case.device, "model": case.model, "settings": case.settings, "limit": limit})
    command = [sys.executable, __file__, "--measure", asked, *flags]
    done = subprocess.run(command, capture_output=True, text=True)
    lines = [line for line in done.stdout.splitlines() if line.startswith(ANSWER)]
    if lines:
        return json.loads(lines[-1].removeprefix(ANSWER))
    return {"error": f"measurement ended with {done.returncode}: {done.stderr.strip()[-2000:]}"}


def measure(asked, under_cap):
    case = Case(asked["device"], asked["model"], asked["settings"])
    work = measure_cpu if case.device == "cpu" else partial(measure_cuda, under_cap=under_cap)
    print(f"\n{ANSWER}{json.dumps(work(case, asked['limit']))}", flush=True)


def _trainer(case, module, callbacks=()):
    from kit.train import make_trainer

    accelerator, precision = case.config.hardware.accelerator, case.config.hardware.precision
    return make_trainer(
        case.config,
        accelerator=accelerator,
        world_size=1,
        precision=precision,
        module=module,
        callbacks=list(callbacks),
    )


def measure_cpu(case, limit):
    import torch

    from kit.memory.record.truth import AllocatorTrace

    torch.manual_seed(0)
    module, data = case.parts.module(), case.parts.data()
    trainer = _trainer(case, module)
    trace = AllocatorTrace()
    trace.start(module)
    trainer.fit(module, datamodule=data)
    peak = trace.stop().peak_bytes
    return {"measured": {"allocated_bytes": peak, "reserved_bytes": peak}, "ran_out_replayed": peak > limit}


def measure_cuda(case, limit, under_cap=False):
    import torch
    from trace_replay import replay_trace

    free = {gpu.uuid: gpu.free_bytes for gpu in read_gpus().gpus}
    torch.manual_seed(0)
    torch.cuda.init()
    facts = {"gpu": torch.cuda.get_device_name(0), "torch": torch.__version__, "cuda": torch.version.cuda}
    if under_cap:
        torch.cuda.set_per_process_memory_fraction(min(1.0, limit / torch.cuda.get_device_properties(0).total_memory))
    torch.cuda.memory._record_memory_history(context=None, max_entries=HISTORY_ENTRIES)
    module, outside = case.parts.module(), []
    try:
        _trainer(case, module, [_outside_watch(free, outside)]).fit(module, datamodule=case.parts.data())
    except torch.OutOfMemoryError:
        return facts | {"ran_out": True}
    snapshot = torch.cuda.memory._snapshot()
    measured = {
        "allocated_bytes": torch.cuda.max_memory_allocated(),
        "reserved_bytes": torch.cuda.max_memory_reserved(),
        "outside_bytes": outside[-1] if outside else None,
    }
    played, capped = replay_trace(snapshot), replay_trace(snapshot, capacity_bytes=limit)
    replayed = {
        "requests": played.requests,
        "allocated_bytes": played.allocated_bytes,
        "reserved_bytes": played.reserved_bytes,
        "traced_reserved_bytes": played.traced_reserved_bytes,
    }
    ran_out = capped.out_of_memory is not None
    return facts | {"ran_out": False, "measured": measured, "replayed": replayed, "ran_out_replayed": ran_out}


def _outside_watch(free_before, found):
    """A callback that notes what the process holds beside its allocator, when training ends."""
    import torch
    from lightning.pytorch import Callback

    class Watch(Callback):
        def on_train_end(self, trainer, pl_module):
            torch.cuda.synchronize()
            uuid = f"GPU-{torch.cuda.get_device_properties(0).uuid}"
            now = {gpu.uuid: gpu.free_bytes for gpu in read_gpus().gpus}
            if uuid in now and uuid in free_before:
                found.append(free_before[uuid] - now[uuid] - torch.cuda.memory_reserved())

    return Watch()


# -- what the lines say together


def read_rows(path):
    """The lines of a grid, the last of each case; a line torn by an interruption is left out."""
    rows = {}
    for line in path.read_text().splitlines() if path.exists() else ():
        try:
            row = json.loads(line)
        except json.JSONDecodeError:
            continue
        rows[row["device"], row["case"]] = row
    return rows


def relative_errors(rows, what, part="predicted"):
    """predicted / measured - 1 of each row that has both."""
    pairs = [(row[part][what], row["measured"][what]) for row in rows if part in row and "measured" in row]
    return [predicted / measured - 1 for predicted, measured in pairs]


def summary(rows):
    """What is printed under the table, as numbers."""
    judged = [row for row in rows if "measured" in row]
    capped = [row for row in judged if "ran_out_under_cap" in row]
    outside = [row for row in judged if row["measured"].get("outside_bytes") is not None]
    return {
        "cases": len(rows),
        "measured": len(judged),
        "failed": sum("error" in row for row in rows),
        "allocated": _spread(relative_errors(rows, "allocated_bytes")),
        "reserved": _spread(relative_errors(rows, "reserved_bytes")),
        "allocator alone, allocated": _spread(relative_errors(rows, "allocated_bytes", "replayed")),
        "allocator alone, reserved": _spread(relative_errors(rows, "reserved_bytes", "replayed")),
        "would have run out under the estimate": _share(judged, lambda row: row["ran_out_replayed"]),
        "did run out under the estimate": _share(capped, lambda row: row["ran_out_under_cap"]),
        "outside the range foreseen for the context": _share(outside, _context_missed),
        "said fits and ran out": sum(
            bool(row.get("ran_out")) and row["predicted"]["verdict"] == "fits" for row in rows
        ),
    }


def _spread(errors):
    if not errors:
        return None
    return {"median": statistics.median(map(abs, errors)), "worst": max(errors, key=abs), "count": len(errors)}


def _share(rows, test):
    return sum(map(test, rows)) / len(rows) if rows else None


def _context_missed(row):
    low, high = row["predicted"]["outside_bytes"]
    return not low <= row["measured"]["outside_bytes"] <= high


def show(rows):
    columns = (
        "case",
        "allocated: predicted",
        "measured",
        "error",
        "reserved: predicted",
        "measured",
        "error",
        "verdict",
    )
    print(text_table(columns, [_line(row) for row in rows]))
    for name, value in summary(rows).items():
        print(f"{name}: {_text(value)}")


def _line(row):
    if "measured" not in row:
        return [row["case"], *["–"] * 6, row.get("error", "ran out of memory").splitlines()[0][:100]]
    cells = [row["case"]]
    for what in ("allocated_bytes", "reserved_bytes"):
        predicted, measured = row["predicted"][what], row["measured"][what]
        cells += [format_bytes(predicted), format_bytes(measured), f"{predicted / measured - 1:+.2%}"]
    return [*cells, row["predicted"]["verdict"]]


def _text(value):
    if isinstance(value, dict):
        return f"median error {value['median']:.2%}, worst {value['worst']:+.2%} ({value['count']} cases)"
    return f"{value:.1%}" if isinstance(value, float) else "not measured" if value is None else str(value)


# -- the command


def main(arguments=None):
    options = parser().parse_args(arguments)
    if options.measure:
        measure(json.loads(options.measure), options.under_cap)
        return 0
    if options.output is None:
        parser().error("--output says where the lines go, such as --output grid.jsonl")
    output = Path(options.output)
    for row in run_cases(options):
        print(row["case"], row.get("error", "done").splitlines()[0], flush=True)
    rows = [row for row in read_rows(output).values() if row["device"] == options.device]
    show(rows)
    return int(any("error" in row for row in rows))


def run_cases(options):
    """Run what the output does not hold yet; each line when it is there."""
    output = Path(options.output)
    for case in todo(options, read_rows(output)):
        row = run_case(case, options.cap)
        with output.open("a") as file:
            file.write(json.dumps(row) + "\n")
        yield row


def todo(options, rows):
    """Cases that are asked for, can run here, and are not in `rows` already.

    Raises:
        SystemExit: without a GPU, when one is needed.
    """
    precisions = None
    if options.device == "cuda":
        gpus = hardware().gpus
        if not gpus:
            raise SystemExit(
                "this machine has no NVIDIA GPU to compare with; run it where there is one, or with --device cpu, "
                "which compares small models with the CPU's allocator"
            )
        able = all((gpu.capability or (8, 0)) >= (8, 0) for gpu in gpus)
        precisions = None if able else tuple(name for name in PRECISIONS["cuda"] if name != "bf16-mixed")
    optimizers = tuple(name for name in OPTIMIZERS if name != "adamw-8bit" or find_spec("bitsandbytes"))
    asked = cases(options.device, options.quick, optimizers, precisions)
    done = {case for (device, case), row in rows.items() if device == options.device and "error" not in row}
    return [case for case in asked if case.name not in done and options.only in case.name]


def parser():
    parser = argparse.ArgumentParser(description="Predicted beside measured memory, on this machine's GPU.")
    parser.add_argument("--output", help="JSON lines, one a case; what is there is kept and not run again")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--quick", action="store_true", help="about 18 cases instead of about 110")
    parser.add_argument("--only", default="", help="only cases with this text in their name")
    parser.add_argument("--cap", action="store_true", help="train once more with the predicted bytes as the limit")
    parser.add_argument("--measure", help=argparse.SUPPRESS)
    parser.add_argument("--under-cap", action="store_true", help=argparse.SUPPRESS)
    return parser


if __name__ == "__main__":
    sys.exit(main())
