"""What each estimator says a training step will hold at its peak, beside what the allocator then held, in one run.

    python benchmarks/memory.py [--record]

The truth is three optimizer steps of a real Lightning fit on the CPU, AdamW, in a fresh process: the most that its
allocator held at any time (`kit.memory.record.truth`), kernels' own buffers included. `kit` and torch's MemTracker run
the step on fake tensors; the others add up sums and formulas. These predict GPUs, so what they add for a CUDA context
or for fragmentation is taken off again, and they are told all that they have an argument for. MemTracker is given the
loop that Lightning runs. A dash is a model that an estimator has no answer for.

Estimators that are no part of torch are installed beside the environment, not into it:

    pip install --no-deps --target .peers accelerate torch-kitsune torch-preflight vram-check alloc
    pip install --target .peers huggingface_hub safetensors libcst

Those that are not there are left out, with the reason. Then come seconds: the first answer for GPT-2 small, from a
fresh interpreter and from a warm one, and what a changed batch size costs after that.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.metadata
import json
import statistics
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from publish import publish, read_options

import kit

PEERS = Path(__file__).parents[1] / ".peers"
STEPS = 3
REPETITIONS = 5
SLIDER = range(1, 33)
ANSWER = "answer "


@dataclass(frozen=True, kw_only=True)
class Model:
    """What is trained, and all that an estimator may want to be told about it."""

    target: str
    arguments: Mapping[str, Any] = field(default_factory=dict)
    batch_size: int = 8
    sample: Sequence[tuple[tuple[int, ...], int | None]] | Mapping[str, tuple[tuple[int, ...], int | None]] = ()
    """Shape of each tensor of a sample, and the bound of its whole numbers; None where they are normal numbers."""
    input_shape: tuple[int, ...] = ()
    """What `forward` takes, without the batch."""
    tokens: int | None = None
    image_side: int | None = None

    def module(self) -> Any:
        import kit.models

        return getattr(kit.models, self.target)(**self.arguments)

    def data(self) -> Any:
        import torch

        from kit.models import Field, RandomData

        def tensor(shape: tuple[int, ...], below: int | None) -> Field:
            # a number that is either 0 or 1 is a mask
            return Field(shape=shape, below=below, dtype=torch.bool if below == 2 and len(shape) > 1 else None)

        if isinstance(self.sample, Mapping):
            return RandomData({name: tensor(*one) for name, one in self.sample.items()}, self.batch_size)
        fields = tuple(tensor(*one) for one in self.sample)
        return RandomData(fields if len(fields) > 1 else fields[0], self.batch_size)


SMALL_GPT = {"vocabulary": 8192, "width": 384, "heads": 6, "layers": 6, "context": 256}
SMALL_ENCODER = {"vocabulary": 8192, "width": 384, "heads": 6, "layers": 6, "context": 256}
PATCH = (3, 2, 128, 128)
MODELS = {
    "GPT-2 small": Model(
        target="GPT", batch_size=1, sample=[((1025,), 50304)], input_shape=(1024,), tokens=1024
    ),
    "GPT, 14 M": Model(
        target="GPT", arguments=SMALL_GPT, sample=[((257,), 8192)], input_shape=(256,), tokens=256
    ),
    "encoder, 14 M": Model(
        target="Encoder", arguments=SMALL_ENCODER, sample=[((256,), 8192), ((), 10)], input_shape=(256,), tokens=256
    ),
    "ResNet-50": Model(
        target="ResNet", sample=[((3, 224, 224), None), ((), 1000)], input_shape=(3, 224, 224), image_side=224
    ),
    "UNet": Model(
        target="UNet", arguments={"width": 32}, sample={"values": (PATCH, None), "valid": (PATCH, 2)},
        input_shape=(3, 1, 128, 128),
    ),
    "LSTM": Model(
        target="Recurrent", batch_size=32, sample=[((128, 16), None), ((128, 16), None)], input_shape=(128, 16)
    ),
    "embeddings": Model(
        target="Recommender", batch_size=512, sample=[((20,), 100_000), ((), 2)], input_shape=(20,), tokens=20
    ),
}  # fmt: skip
PRECISIONS = ("32-true", "bf16-mixed")
Case = tuple[str, str]
"""(model, precision)"""
CASES = [(model, precision) for model in MODELS for precision in PRECISIONS]


def config_of(precision: str) -> kit.Config:
    hardware = {"accelerator": "cpu", "devices": 1, "precision": precision}
    return kit.Config.make({"hardware": hardware, "trial": {"max_steps": STEPS, "warmup_steps": 0}})


# -- the truth


def truth(model: Model, precision: str) -> int:
    import torch

    from kit.memory.record.truth import AllocatorTrace
    from kit.train import make_trainer

    torch.manual_seed(0)
    module, data = model.module(), model.data()
    trainer = make_trainer(config_of(precision), accelerator="cpu", world_size=1, precision=precision, module=module)
    trace = AllocatorTrace()
    trace.start(module)
    trainer.fit(module, datamodule=data)
    return trace.stop().peak_bytes


# -- the estimators: bytes, or None for a model they have no answer for


def by_kit(model: Model, precision: str) -> int:
    estimate = kit.predict_memory(config_of(precision), model.module, model.data, device="this machine")
    return int(estimate.device_allocated_bytes)


def by_mem_tracker(model: Model, precision: str) -> int:
    import torch
    from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
    from torch.distributed._tools.mem_tracker import MemTracker

    adam: Any = importlib.import_module("torch.optim.adam")
    adam._get_value = lambda _: 1.0  # the number of the step, which no fake tensor knows
    untyped: Any = FakeTensor
    untyped.__deepcopy__ = lambda tensor, _: torch.nn.Parameter(tensor.detach().clone(), tensor.requires_grad)
    real = next(iter(model.data().train_dataloader()))
    with FakeTensorMode() as fake:
        module, tracker = model.module(), MemTracker()
        optimizer = torch.optim.AdamW(module.parameters())
        batch = torch.utils._pytree.tree_map(fake.from_tensor, real)
        module.log = lambda *_, **__: None  # there is no trainer
        tracker.track_external(module, optimizer, batch)
        with tracker:
            for step in range(2):
                if step:
                    tracker.reset_mod_stats()
                with _autocast(precision):
                    loss = module.training_step(batch, step)
                optimizer.zero_grad()
                loss.backward()
                del loss
                optimizer.step()
    return int(tracker.get_tracker_snapshot("peak")[torch.device("cpu")]["Total"])


def _autocast(precision: str) -> contextlib.AbstractContextManager[Any]:
    import torch

    return torch.autocast("cpu", torch.bfloat16) if precision == "bf16-mixed" else contextlib.nullcontext()


def by_accelerate(model: Model, precision: str) -> int:
    import torch
    from accelerate.commands.estimate import estimate_training_usage
    from accelerate.utils import calculate_maximum_sizes

    with torch.device("meta"):
        size, _ = calculate_maximum_sizes(model.module())
    return int(max(estimate_training_usage(size, "float32" if precision == "32-true" else "bfloat16").values()))


def by_kitsune(model: Model, precision: str) -> int:
    from kitsune.predict import predict_memory

    dtype = "float32" if precision == "32-true" else "bfloat16"
    found = predict_memory(
        model.module(), model.input_shape, batch_size=model.batch_size, dtype=dtype, optimizer="adamw"
    )
    return int(found.total_bytes - found.overhead_bytes)


def by_preflight(model: Model, precision: str) -> int | None:
    from torch_preflight.vram import PrecisionMode, RunConfig, estimate_config
    from torch_preflight.vram.providers.meta import profile

    mode = PrecisionMode.FP32 if precision == "32-true" else PrecisionMode.AMP
    config = RunConfig(batch_size=model.batch_size, seq_len=model.tokens, image_size=model.image_side, precision=mode)
    found = profile(f"kit.models:{model.target}", config, dict(model.arguments))
    if found.activation_bytes_per_sample is None:
        return None
    parts = estimate_config(found, config).breakdown
    return int(parts.total - parts.cuda_context - parts.fragmentation)


def by_vram_check(model: Model, precision: str) -> int:
    from vram_check import analyze

    dtype = "fp32" if precision == "32-true" else "bf16"
    found = analyze(
        model.module(), batch_size=model.batch_size, dtype=dtype, optimizer="adamw", seq_len=model.tokens or 128
    )
    return int(found["estimate"].total_bytes)


def by_alloc(model: Model, precision: str) -> int:
    from alloc.ghost import ghost

    known = {"seq_length": model.tokens, "hidden_dim": model.arguments.get("width", 768)} if model.tokens else {}
    dtype = "float32" if precision == "32-true" else "bfloat16"
    found = ghost(model.module(), dtype=dtype, batch_size=model.batch_size, optimizer_type="AdamW", **known)
    return round((found.total_gb - found.buffer_gb) * 2**30)


Estimator = Callable[[Model, str], int | None]
ESTIMATORS: dict[str, tuple[str, Estimator]] = {
    "kit": ("kit", by_kit),
    "MemTracker": ("torch", by_mem_tracker),
    "torch-preflight": ("torch-preflight", by_preflight),
    "torch-kitsune": ("torch-kitsune", by_kitsune),
    "accelerate": ("accelerate", by_accelerate),
    "vram-check": ("vram-check", by_vram_check),
    "alloc": ("alloc", by_alloc),
}
"""Name: (the package it is in, how it is asked)"""


# -- child processes


def child(*arguments: str) -> Any:
    """What this file prints when called with `arguments`, in a fresh interpreter."""
    done = subprocess.run([sys.executable, __file__, *arguments], capture_output=True, text=True)
    lines = [line for line in done.stdout.splitlines() if line.startswith(ANSWER)]
    if not lines:
        raise SystemExit(f"{' '.join(arguments)} gave no answer:\n{done.stderr}")
    return json.loads(lines[-1].removeprefix(ANSWER))


def serve(question: str, *arguments: str) -> None:
    sys.path.append(str(PEERS))
    warnings.simplefilter("ignore")
    answer = {"truth": _serve_truth, "estimates": _serve_estimates, "seconds": _serve_seconds}[question](*arguments)
    print(f"\n{ANSWER}{json.dumps(answer)}", flush=True)


def _serve_truth(model: str, precision: str) -> int:
    return truth(MODELS[model], precision)


def _serve_estimates(name: str) -> list[int | str | None]:
    return [_ask(ESTIMATORS[name][1], MODELS[model], precision) for model, precision in CASES]


def _ask(estimator: Estimator, model: Model, precision: str) -> int | str | None:
    """Its answer; a text says why there is none."""
    try:
        return estimator(model, precision)
    except Exception as error:  # whatever a peer raises is its answer
        return f"{type(error).__name__}: {error}"


# -- how fast


def gpt_with(learning_rate: float) -> tuple[kit.Config, Any, Any]:
    """GPT-2 small, batch 8, as H100 would train it; another learning rate is another question."""
    config = kit.Config.make({"hardware": {"devices": 1, "precision": "bf16-mixed"}})
    return config, partial(_gpt, learning_rate), _tokens


def _gpt(learning_rate: float) -> Any:
    from kit.models import GPT

    return GPT(learning_rate=learning_rate)


def _tokens() -> Any:
    from kit.models import Tokens

    return Tokens()


def _serve_seconds() -> dict[str, list[float]]:
    """Seconds of the first answer of this interpreter, of those after it, and of each move of the slider."""
    card = "H100-80GB"
    firsts = [
        _seconds(lambda rate=rate: kit.predict_memory(*gpt_with(rate), device=card))
        for rate in (1e-4 * (1 + place) for place in range(REPETITIONS + 1))
    ]
    model = kit.memory.model(*gpt_with(1.0), device=card)
    model.estimate()
    moves = [_seconds(lambda size=size: model.estimate(batch_size=size)) for size in SLIDER]
    return {"cold": firsts[:1], "warm": firsts[1:], "slider": moves}


def _seconds(work: Callable[[], Any]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


# -- tables


def main() -> None:
    read_options(__doc__)
    estimates = dict(ask_all())
    measured = [child("truth", *case) for case in CASES]
    publish("measured peak / predicted peak", list(ratios(measured, estimates)), steps=STEPS, **versions(estimates))
    publish("error of the predicted peak, in percent", [error(name, measured, estimates[name]) for name in estimates])
    taken = child("seconds")
    rows = [
        {"what": "GPT-2 small, first answer, cold", "median s": taken["cold"][0], "worst s": taken["cold"][0]},
        *(
            {"what": what, "median s": statistics.median(taken[key]), "worst s": max(taken[key])}
            for key, what in (("warm", "GPT-2 small, first answer, warm"), ("slider", "another batch size"))
        ),
    ]
    publish("seconds to a prediction", rows, repetitions=REPETITIONS)


def ask_all() -> Iterator[tuple[str, list[Any]]]:
    sys.path.append(str(PEERS))
    for name, (package, _) in ESTIMATORS.items():
        try:
            importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            print(f"{name} is left out: {package} is not installed; {__file__} says how in its first lines")
            continue
        answers = child("estimates", name)
        for case, answer in zip(CASES, answers, strict=True):
            if isinstance(answer, str):
                print(f"{name} has no answer for {', '.join(case)}: {answer}")
        yield name, [answer if isinstance(answer, int) else None for answer in answers]


def ratios(measured: Sequence[int], estimates: Mapping[str, Sequence[int | None]]) -> Iterator[dict[str, Any]]:
    for place, (case, peak) in enumerate(zip(CASES, measured, strict=True)):
        row: dict[str, Any] = {"model": case[0], "precision": case[1], "measured MiB": round(peak / 2**20, 1)}
        for name, answers in estimates.items():
            answer = answers[place]
            row[name] = "–" if answer is None else round(peak / answer, 4)
        yield row


def error(name: str, measured: Sequence[int], answers: Sequence[int | None]) -> dict[str, Any]:
    pairs = [(answer, peak) for answer, peak in zip(answers, measured, strict=True) if answer is not None]
    errors = [100 * (answer / peak - 1) for answer, peak in pairs]
    return {
        "estimator": name,
        "answers": f"{len(errors)} of {len(measured)}",
        "median |error|": statistics.median(map(abs, errors)),
        "worst": max(errors, key=abs),
        "too low by more than 1 %": sum(value < -1 for value in errors),
    }


def versions(estimates: Mapping[str, Any]) -> dict[str, str]:
    packages = {ESTIMATORS[name][0] for name in estimates} - {"kit"}
    return {package: importlib.metadata.version(package) for package in sorted(packages)}


if __name__ == "__main__":
    asked = sys.argv[1:2]
    serve(*sys.argv[1:]) if asked and not asked[0].startswith("-") else main()
