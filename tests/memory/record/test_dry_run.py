import gc
import os
import subprocess
import sys
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch
from dry_parts import (
    Averaged,
    Convolutional,
    Frozen,
    Manual,
    Perceptron,
    Recurrent,
    Scheduled,
    Tied,
    at_peak,
    images,
    loader,
    measure,
    one_thread,
    peak,
    predict,
    tokens,
    vectors,
)
from lightning.pytorch import LightningModule
from properties import crossed
from torch import nn

from kit import models
from kit.config import Config
from kit.errors import ConfigError
from kit.memory.predict_job import make_to_record
from kit.memory.query import strip_weights
from kit.memory.record.dry_run import DryRun, record
from kit.memory.record.fakes import ONEDNN_HALF
from kit.memory.replay.replay import CATEGORIES, PHASES
from kit.models import GPT, Field, RandomData, Tokens
from kit.trial.payload import Part

FLOAT = 4


def gpt():
    return GPT(vocabulary=512, width=64, heads=4, layers=3, context=64)


def text():
    return {"datamodule": Tokens(vocabulary=512, context=64, batch_size=8, sequences=64)}


def config(**settings):
    return Config().replace({name.replace("__", "."): value for name, value in settings.items()})


def perceptron_of_a_cell():
    """A class that closes over what is around it, as in a notebook."""
    width = 128

    class Local(Perceptron):
        def __init__(self):
            super().__init__()
            self.more = nn.Linear(256, width)

        def loss(self, batch):
            return super().loss(batch) + self.more(batch[0]).square().mean()

    return Local()


CASES = {
    "gpt": (gpt, text, config(), "32-true"),
    "gpt bf16-mixed": (gpt, text, config(), "bf16-mixed"),
    "gpt bf16-true": (gpt, text, config(), "bf16-true"),
    "gpt checkpointed": (gpt, text, config(levers__gradient_checkpointing=True), "32-true"),
    "gpt checkpointed bf16-mixed": (gpt, text, config(levers__gradient_checkpointing=True), "bf16-mixed"),
    "gpt accumulated": (gpt, text, config(levers__accumulate_grad_batches=3), "32-true"),
    "gpt clipped": (gpt, text, config(training__gradient_clip_norm=1.0), "bf16-mixed"),
    "gpt sgd": (gpt, text, config(levers__optimizer="sgd"), "32-true"),
    "perceptron": (Perceptron, lambda: loader(vectors, 256), config(), "32-true"),
    "of a cell": (perceptron_of_a_cell, lambda: loader(vectors, 256), config(), "32-true"),
    "scheduled": (Scheduled, lambda: loader(vectors, 256), config(), "32-true"),
    "averaged": (Averaged, lambda: loader(vectors), config(), "32-true"),
    "frozen": (Frozen, lambda: loader(vectors, 256), config(), "32-true"),
    "tied": (Tied, lambda: loader(vectors), config(), "32-true"),
    "manual": (Manual, lambda: loader(vectors, 256), config(), "32-true"),
}


@pytest.mark.parametrize("case", CASES)
def test_the_peak_is_that_of_a_real_fit_within_one_percent(case):
    make, data, settings, precision = CASES[case]
    recording = predict(make, data, settings, precision)
    batches = 2 * settings.levers.accumulate_grad_batches
    assert recording.facts["unknown"] == ""
    assert len(recording.batch_starts) == batches
    assert peak(recording) == pytest.approx(measure(make, data, settings, precision, batches), rel=0.01)


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
@pytest.mark.parametrize(("make", "sample", "within"), [(Convolutional, images, 0.05), (Recurrent, tokens, 0.01)])
def test_convolutions_and_recurrent_layers_are_within_what_is_known_of_their_kernels(make, sample, within, precision):
    if make is Recurrent and precision == "bf16-mixed" and not ONEDNN_HALF[torch.bfloat16]():
        pytest.skip("this CPU has no LSTM in bfloat16")
    recording = predict(make, lambda: loader(sample), config(), precision)
    assert peak(recording) == pytest.approx(measure(make, lambda: loader(sample), config(), precision), rel=within)


def text_of(context, **arguments):
    def make():
        return GPT(vocabulary=256, width=32, heads=2, layers=2, context=context, **arguments)

    return make, lambda: {"datamodule": Tokens(vocabulary=256, context=context, batch_size=4, sequences=16)}


def series_of(positions):
    field = Field(shape=(positions, 16))
    data = RandomData((field, field), batch_size=4, samples=16)
    return lambda: models.Recurrent(features=16, width=64, layers=1), lambda: {"datamodule": data}


@pytest.mark.parametrize(
    ("strategy", "model"), crossed(["whole", 64, 100], ["series", "gpt", "gpt windowed", "gpt checkpointed"])
)
def test_sequences_in_chunks_are_within_one_percent_of_the_allocator(model, strategy):
    make, data = series_of(512) if model == "series" else text_of(512, window=32 if "window" in model else None)
    chunk = 0 if strategy == "whole" else strategy
    settings = config(levers__sequence_chunk=chunk, levers__gradient_checkpointing=model == "gpt checkpointed")
    recording = predict(make, data, settings)
    assert recording.facts["unknown"] == ""
    assert peak(recording) == pytest.approx(measure(make, data, settings), rel=0.01)


@pytest.mark.slow
def test_a_run_can_follow_another_with_other_levers_and_is_the_same_again():
    first = predict(gpt, text, config())
    predict(gpt, text, config(levers__optimizer="adamw-fused"), "16-mixed", device_kind="cuda", capability=(7, 5))
    predict(gpt, text, config(hardware__strategy="fsdp", hardware__devices=4), "bf16-mixed", world_size=4)
    again = predict(gpt, text, config())
    for name in ("block_bytes", "block_category", "event_block", "event_allocates", "event_time"):
        np.testing.assert_array_equal(getattr(first, name), getattr(again, name))
    assert not torch.distributed.is_initialized()
    assert gc.isenabled()


def test_another_batch_size_is_recorded_as_such():
    one, two = (predict(gpt, text, config(), batch_size=size) for size in (3, 6))
    assert (one.batch_size, two.batch_size) == (3, 6)
    inputs = [found.block_bytes[found.block_category == CATEGORIES.index("inputs")][0] for found in (one, two)]
    assert inputs == [3 * 65 * 8, 6 * 65 * 8]


def test_facts_go_with_the_numbers():
    facts = predict(Frozen, lambda: loader(vectors), config(), "bf16-mixed").facts
    total = sum(parameter.numel() for parameter in Frozen().parameters())
    assert facts["parameters"] == total
    assert facts["trainable_parameters"] == total - (256 * 256 + 256)
    assert facts["module"] == "Frozen"
    assert facts["optimizers"] == ["AdamW"]
    assert (facts["world_size"], facts["strategy"], facts["precision"]) == (1, "none", "bf16-mixed")
    assert (facts["device_kind"], facts["accumulate_grad_batches"], facts["unknown"]) == ("cpu", 1, "")
    assert facts["notes"] == []
    assert facts["seconds"] > 0


def test_what_is_left_out_is_said_as_in_a_fit():
    notes = predict(Manual, lambda: loader(vectors), config(levers__accumulate_grad_batches=2)).facts["notes"]
    assert any("optimizes manually" in note for note in notes)


def test_a_manual_module_is_run_until_its_optimizers_have_stepped_twice():
    class Seldom(Manual):
        def training_step(self, batch, batch_idx):
            loss = self.loss(batch)
            self.manual_backward(loss)
            if batch_idx % 3 == 2:
                for optimizer in self.optimizers():
                    optimizer.step()
                    optimizer.zero_grad()

    assert len(predict(Seldom, lambda: loader(vectors), config()).batch_starts) == 6


def test_the_module_at_the_peak_and_the_phases_have_their_names():
    recording = predict(gpt, text, config())
    named = {recording.names[index] for index in recording.operator_module}
    assert {"blocks.0.perceptron.0", "head", "norm"} <= named
    assert {PHASES[phase] for phase in recording.operator_phase} >= {"setup", "forward", "backward", "optimizer"}


@pytest.mark.parametrize("device_kind", ["cpu", "cuda"])
def test_gradients_and_state_are_exact_at_the_second_step(device_kind):
    recording = predict(Perceptron, lambda: loader(vectors, 1), config(), device_kind=device_kind)
    found, count = at_peak(recording), sum(parameter.numel() for parameter in Perceptron().parameters())
    assert found["parameters"] == found["gradients"] == pytest.approx(count * FLOAT, rel=0.01)
    assert found["optimizer_state"] == pytest.approx(2 * count * FLOAT, rel=0.01)
    assert recording.rounding_bytes == {"cpu": 1, "cuda": 512}[device_kind]


def test_half_precision_leaves_nothing_of_the_full_one_on_the_device():
    full, half = (predict(Perceptron, lambda: loader(vectors, 1), config(), p) for p in ("32-true", "bf16-true"))
    for category in ("parameters", "gradients", "optimizer_state"):
        assert at_peak(half)[category] == pytest.approx(at_peak(full)[category] / 2, rel=0.01)


def test_a_loss_scaler_steps():
    recording = predict(gpt, text, config(), "16-mixed", device_kind="cuda")
    assert at_peak(recording)["optimizer_state"] > 0
    assert recording.facts["unknown"] == ""


class Blind(Perceptron):
    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        if not torch.isfinite(loss):
            raise ValueError("the loss is not finite")
        return loss * 2 if loss > 1 else loss


def test_a_branch_taken_blindly_is_noted_and_a_finite_check_holds():
    recording = predict(Blind, lambda: loader(vectors), config())
    assert recording.facts["unknown"] == ""
    (note,) = recording.facts["notes"]
    assert f"condition at {Path(__file__).name}:" in note
    assert recording.facts["conditions"] == [note]


class Compiled(Perceptron):
    def __init__(self):
        super().__init__()
        self.layers = torch.compile(self.layers)


def test_a_compiled_module_runs_as_it_is_written():
    compiled = predict(Compiled, lambda: loader(vectors), config())
    (note,) = compiled.facts["notes"]
    assert note.startswith("torch.compile")
    assert "upper bound" in note
    assert peak(compiled) == peak(predict(Perceptron, lambda: loader(vectors), config()))


GRAPHS = []


def kept(graph, _):
    """A compiler that says what it was given."""
    GRAPHS.append(graph)
    return graph


@torch.compile(backend=kept)
def twice(values):
    return values * 2


class Decorated(Perceptron):
    """A package that compiles a function as it is imported, and calls it or not."""

    def __init__(self, calls):
        super().__init__()
        self.calls, self.halved = calls, torch.compile(dynamic=False)(lambda values: values / 2)

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        return self.halved(loss) if self.calls else loss / 2


@pytest.mark.parametrize("calls", [True, False])
def test_a_compiled_function_is_noted_where_it_is_called(calls):
    notes = predict(lambda: Decorated(calls), lambda: loader(vectors), config()).facts["notes"]
    assert [note.partition(" ")[0] for note in notes] == ["torch.compile"] * calls


class CompiledBefore(Perceptron):
    def __init__(self, way):
        super().__init__()
        self.way = way
        if way == "child":
            self.layers = torch.compile(self.layers, backend=kept)
        elif way == "method":
            self.layers.compile(backend=kept)
        elif way == "whole":
            self.compile(backend=kept)

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        return twice(loss) if self.way == "function" else loss * 2


@pytest.mark.parametrize("way", ["child", "method", "whole", "function"])
def test_what_was_compiled_before_is_not_compiled_in_a_dry_run(way):
    before, plain = CompiledBefore(way), CompiledBefore("")
    compiled = predict(lambda: before, lambda: loader(vectors), config())
    assert GRAPHS == []
    assert compiled.facts["unknown"] == ""
    (note,) = compiled.facts["notes"]
    assert note.startswith("torch.compile")
    assert peak(compiled) == peak(predict(lambda: plain, lambda: loader(vectors), config()))


def in_place(module):
    module.compile(backend=kept)
    return module


@pytest.mark.parametrize("given", [lambda module: torch.compile(module, backend=kept), in_place], ids=["whole", "call"])
def test_a_compiled_instance_is_sent_and_predicted_as_it_is_written(given):
    part = Part.of(given(Perceptron()))
    sent = {"module": strip_weights(part, Part.of(None)).module}
    compiled = predict(lambda: make_to_record(sent, config()), lambda: loader(vectors), config())
    assert GRAPHS == []
    (note,) = compiled.facts["notes"]
    assert note.startswith("torch.compile")
    assert peak(compiled) == peak(predict(Perceptron, lambda: loader(vectors), config()))


def test_what_is_compiled_is_compiled_again_after_a_dry_run():
    predict(Perceptron, lambda: loader(vectors), config())
    try:
        assert twice(torch.ones(3)).tolist() == [2, 2, 2]
        assert len(GRAPHS) == 1
    finally:
        GRAPHS.clear()
        torch.compiler.reset()


def test_a_condition_of_bytes_is_taken_as_a_kernel_takes_it():
    class Chosen(Perceptron):
        def loss(self, batch):
            values = self.layers[0](batch[0].repeat(64, 1))
            chosen = torch.where(torch.ones(values.shape, dtype=torch.uint8), values, -values)
            return self.layers[2:](chosen).square().mean()

    assert peak(predict(Chosen, lambda: loader(vectors), config())) == measure(
        Chosen, lambda: loader(vectors), config()
    )


def test_a_file_imported_during_a_dry_run_has_its_numbers_afterwards(tmp_path, monkeypatch):
    (tmp_path / "of_three_numbers.py").write_text("import torch\nTABLE = torch.tensor([1.0, 2.0, 3.0]) * 2\n")
    monkeypatch.syspath_prepend(tmp_path)

    class Importing(Perceptron):
        def loss(self, batch):
            from of_three_numbers import TABLE

            return super().loss(batch) * TABLE.sum()

    try:
        assert not predict(Importing, lambda: loader(vectors), config()).facts["unknown"]
        assert sys.modules["of_three_numbers"].TABLE.tolist() == [2, 4, 6]
    finally:
        sys.modules.pop("of_three_numbers", None)


@pytest.mark.parametrize("name", ["gpt", "gpt bf16-mixed", "gpt checkpointed", "averaged", "manual"])
def test_a_step_that_is_run_for_real_shows_the_blocks_of_a_dry_run(name):
    module, data, settings, precision = CASES[name]
    with one_thread():
        dry, real = (predict(module, data, settings, precision, for_real=real, batch_size=2) for real in (False, True))
    assert real.batch_size == dry.batch_size == 2
    assert at_peak(real) == at_peak(dry)


@pytest.mark.parametrize("precision", ["bf16-mixed", "16-mixed"])
def test_a_step_run_for_real_needs_what_a_dry_run_says_of_a_gpu(precision):
    asked = {"device_kind": "cuda", "capability": (8, 0), "batch_size": 2}
    with one_thread():
        dry, real = (peak(predict(gpt, text, config(), precision, for_real=real, **asked)) for real in (False, True))
    assert real == pytest.approx(dry, rel=0.01)


@torch.library.custom_op("kit_tests::odd", mutates_args=())
def odd(x: torch.Tensor) -> torch.Tensor:
    return x * 2


class Odd(Perceptron):
    def loss(self, batch):
        return odd(super().loss(batch))


@pytest.mark.parametrize("device_kind", ["cpu", "cuda"])
def test_an_operator_without_a_shape_is_named_and_the_known_parts_stay(device_kind):
    recording = predict(Odd, lambda: loader(vectors), config(), device_kind=device_kind)
    assert "kit_tests.odd.default" in recording.facts["unknown"]
    assert "shape" in recording.facts["unknown"]
    assert f"at {Path(__file__).name}:" in recording.facts["unknown"]
    found = at_peak(recording)
    assert "activations" not in found
    known = at_peak(predict(Perceptron, lambda: loader(vectors), config(), device_kind=device_kind))
    for category in ("parameters", "gradients", "optimizer_state"):
        assert found[category] == known[category]


def test_a_module_that_stops_with_an_error_is_answered_with_it():
    class Stops(Perceptron):
        def training_step(self, batch, batch_idx):
            raise RuntimeError("nothing")

    recording = predict(Stops, lambda: loader(vectors), config())
    assert recording.facts["unknown"].startswith(f"RuntimeError: nothing at {Path(__file__).name}:")


def test_what_a_fit_refuses_is_refused():
    with pytest.raises(ConfigError, match="64 tokens.* 128"):
        long = {"datamodule": Tokens(vocabulary=512, context=128, batch_size=2)}
        predict(gpt, lambda: long, config())
    with pytest.raises(ZeroDivisionError):
        predict(lambda: 1 / 0, text, config())


def test_a_prediction_says_nothing_of_its_own(capsys):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        record(Perceptron, lambda: loader(vectors), DryRun(Config(), "32-true"))
    assert capsys.readouterr() == ("", "")


class Vast(LightningModule):
    """Two thousand million parameters."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(16384, 16384, bias=False) for _ in range(8))

    def training_step(self, batch, batch_idx):
        (values,) = batch
        for layer in self.layers:
            values = layer(values)
        return values.mean()

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters())


VAST = """
import psutil, torch
from dry_parts import loader, peak, predict, Perceptron, vectors
from kit.config import Config
from kit.machine.processes import peak_rss_bytes
from test_dry_run import Vast
predict(Perceptron, lambda: loader(vectors), Config())  # what any first run loads
before = psutil.Process().memory_info().rss
recording = predict(Vast, lambda: loader(lambda: (torch.zeros(16384),)), Config())
print(recording.facts["parameters"], peak(recording), peak_rss_bytes() - before)
"""


@pytest.mark.slow
def test_nothing_of_the_module_is_materialised():
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", VAST],
        cwd=Path(__file__).parent,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])},
        capture_output=True,
        text=True,
        check=True,
    )
    parameters, predicted_bytes, grown_bytes = map(int, done.stdout.split())
    assert parameters == 8 * 16384**2
    assert predicted_bytes > 4 * parameters * FLOAT
    assert grown_bytes < 300 << 20
