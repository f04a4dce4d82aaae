"""Predictions through real processes: what goes in, what comes out, and what is answered without any."""

import os
import re
import subprocess
import sys
import textwrap
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest
import torch
from recordings import training_recording
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader, TensorDataset
from waiting import PATIENCE_SECONDS

from kit import tables
from kit.errors import ConfigError, HardwareError, KitWarning, StoreError, TargetError, TrialError
from kit.machine.processes import memory_limited
from kit.memory import recordings
from kit.memory.alongside import fit
from kit.memory.batch_model import memory_model
from kit.memory.predict_job import Patience, RealSteps
from kit.memory.prediction import predict_memory
from kit.memory.record.dry_run import DryRun, NotRunError, record
from kit.memory.recordings import PredictionJob
from kit.memory.replay.cards import target_of
from kit.memory.replay.estimate import estimate
from kit.memory.replay.replay import replay
from kit.testing import TinyData, TinyModule

MODULE, DATA = "kit.testing:TinyModule", "kit.testing:TinyData"
SECONDS = PATIENCE_SECONDS
WEIGHTS = 512 * 512 * 4

pytestmark = pytest.mark.usefixtures("no_predictions_left")


@pytest.fixture(autouse=True)
def nothing_known():
    recordings.cache.clear()


class Wide(TinyModule):
    """512 × 512 weights; gradients and momentum are two more copies."""

    def __init__(self, layers=1):
        super().__init__()
        self.layer = torch.nn.Sequential(*[torch.nn.Linear(512, 512, bias=False) for _ in range(layers)])

    def training_step(self, batch, batch_idx):
        return self.layer(batch[0]).square().mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=1e-6, momentum=0.9)


def data():
    return TinyData(width=512, samples=256)


def loader():
    return DataLoader(TensorDataset(torch.randn(64, 512), torch.randn(64, 1)), batch_size=4)


# -- what goes in


@pytest.mark.parametrize(
    ("module", "rows"),
    [
        (Wide, data),
        (lambda: Wide(), lambda: data()),
        (Wide(), data()),
        (Wide, loader()),
        (Wide, loader().dataset),
        (f"{__file__}:Wide", f"{__file__}:data"),
    ],
    ids=["classes", "factories", "instances", "loader", "dataset", "paths"],
)
def test_module_and_data_come_in_many_forms_as_for_a_fit(config, module, rows):
    asked = config().replace({"loader.batch_size": 4})
    found = predict_memory(asked, module, rows)
    assert found.complete, found
    assert found.batch_size == 4
    assert found.breakdown["parameters"] == WEIGHTS
    assert 3 * WEIGHTS < found.device_allocated_bytes < 3.2 * WEIGHTS


@pytest.mark.parametrize("changes", [{}, {"levers.accumulate_grad_batches": 2}, {"training.gradient_clip_norm": 1.0}])
def test_a_prediction_equals_the_measurement_of_a_fit(config, changes):
    asked = config().replace(changes)
    event = fit(asked, Wide, data).wait(SECONDS).event("memory_measured")
    found = predict_memory(asked, Wide, data)
    assert event["device_allocated_bytes"] / found.device_allocated_bytes == pytest.approx(1, abs=0.01)


def test_a_config_alone_is_enough_and_no_store_is_read(own):
    asked = own()
    found = predict_memory(asked)
    assert found.complete, found
    assert found.batch_size == 2
    assert found.parameters > 0


@pytest.mark.slow
def test_the_kernel_needs_no_torch(own):
    code = textwrap.dedent(f"""
        import sys
        from kit.config import Config
        from kit.memory.prediction import predict_memory
        config = Config.from_yaml({own().to_yaml(comments=False)!r})
        found = [predict_memory(config), predict_memory(config, "kit.models:UNet", device="H100-80GB")]
        print([name for name in ("torch", "lightning") if name in sys.modules], [item.complete for item in found])
    """)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300)
    assert done.stdout.strip() == "[] [True, True]", done.stderr


@pytest.mark.slow
def test_classes_of_a_script_are_predicted(config):
    """A script stands for a notebook: its classes live in __main__."""
    code = textwrap.dedent(f"""
        import torch
        from kit.config import Config
        from kit.memory.prediction import predict_memory
        from kit.testing import TinyData, TinyModule
        class Base(TinyModule):
            pass
        class Mine(Base):
            def __init__(self):
                super().__init__()
                self.layer = torch.nn.Linear(8, 1000)
            def training_step(self, batch, batch_idx):
                return self.layer(batch[0]).sum() * SCALE
        SCALE = 2.0
        config = Config.from_yaml({config().to_yaml(comments=False)!r})
        print(predict_memory(config, Mine, TinyData).parameters, predict_memory(config, Mine(), TinyData()).complete)
    """)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300)
    assert done.stdout.strip() == "9000 True", done.stderr


CONSTANT = torch.ones(512, 512)  # made when this file is imported, which a dry run has to do


def test_tensors_of_the_users_file_are_no_part_of_the_module(config):
    assert CONSTANT.nbytes == WEIGHTS
    by_reference, by_path = predict_memory(config(), Wide, data), predict_memory(config(), f"{__file__}:Wide", data)
    assert by_reference.device_allocated_bytes == by_path.device_allocated_bytes < 3.2 * WEIGHTS


# -- what comes out


@pytest.mark.parametrize(("strategy", "ranks"), [("ddp", 2), ("fsdp", 1024), ("fsdp:2:4", 8)])
def test_ranks_need_not_exist(config, strategy, ranks):
    asked = config().replace({"hardware.strategy": strategy, "hardware.devices": 8})
    found = predict_memory(asked, lambda: Wide(4), data, device="A100-80GB", world_size=ranks)
    assert (found.world_size, found.strategy, found.complete) == (ranks, strategy, True), found
    held = found.breakdown["parameters"] / (4 * WEIGHTS)
    assert held == pytest.approx(
        {"ddp": 1, "fsdp": 1 / 512, "fsdp:2:4": 1 / 4}[strategy]
    )  # no shard is less than a row


def test_several_devices_without_a_strategy_hold_a_copy_each_as_for_speed(config):
    found = predict_memory(config(), Wide, data, device="A100-80GB", world_size=8)
    assert (found.world_size, found.strategy) == (8, "ddp")
    assert any("ddp" in reason for reason in found.reasons)
    with pytest.raises(ConfigError, match="world_size="):
        predict_memory(config(), Wide, data, device="A100-80GB", devices=8)


def test_an_estimate_says_the_micro_batches_that_were_asked_for(config):
    found = predict_memory(config().replace({"levers.accumulate_grad_batches": 64}), Wide, data)
    assert found.accumulate_grad_batches == 64


def test_micro_batches_beyond_the_second_of_a_step_need_nothing_more(config):
    asked = config()
    target = target_of("A100-80GB")
    peaks = []
    for count in (2, 3, 5):
        run = DryRun(asked.replace({"levers.accumulate_grad_batches": count}), "bf16-mixed", 1, "cuda", (8, 0))
        peaks.append(estimate(record(Wide, lambda: {"datamodule": data()}, run), target).device_allocated_bytes)
    assert len(set(peaks)) == 1


def test_an_equal_question_is_answered_without_a_process(config, monkeypatch):
    first = predict_memory(config(), Wide, data, device="A100-80GB")
    monkeypatch.setattr(recordings, "PredictionJob", None)
    assert predict_memory(config(max_steps=99), Wide, data, device="A100-80GB") == first
    smaller = predict_memory(config(), Wide, data, device="A100-40GB")
    assert smaller.device_allocated_bytes == first.device_allocated_bytes


class Rowwise(Wide):
    def training_step(self, batch, batch_idx):
        return self.layer(batch).square().mean()


def test_a_batch_that_is_larger_than_most_is_told(config):
    rows = [torch.ones(length, 512) for length in (2, 3, 5, 8)]
    found = predict_memory(config(), Rowwise, lambda: DataLoader(rows, batch_size=2, collate_fn=pad_sequence))
    assert "longest of 4" in repr(found)


def test_fits_is_for_the_device_that_was_named(config):
    assert predict_memory(config(), Wide, data, device="2 GiB").verdict == "fits"
    found = predict_memory(config(), Wide, data, device="310 MiB")
    assert found.verdict == "does not fit"
    assert not found.fits


# -- what is refused


@pytest.mark.parametrize(
    ("module", "rows", "changes", "error", "message"),
    [
        ("kit.testing:TinyModul", DATA, {}, TargetError, "did you mean"),
        (TinyModule, DATA, {"model.arguments": {"hidth": 1}}, ConfigError, r"model\.arguments: class TinyModule"),
        (lambda: 3, DATA, {}, ConfigError, "module: factory <lambda> .*int.*no LightningModule"),
        (MODULE, lambda: 3, {}, ConfigError, "data: factory <lambda> .*int.*LightningDataModule"),
        (MODULE, DATA, {"hardware.precision": "16-mixed"}, HardwareError, "needs a GPU"),
        (MODULE, None, {"data.url": "nowhere/at/all.zarr"}, StoreError, "nowhere"),
    ],
)
def test_what_cannot_run_is_refused_with_the_error_that_says_so(config, module, rows, changes, error, message):
    with pytest.raises(error, match=message):
        predict_memory(config().replace(changes), module, rows)


def test_what_a_card_computes_is_judged_by_the_card_and_not_by_the_accelerator_here(config):
    asked = config().replace({"hardware.accelerator": "cpu", "hardware.precision": "16-mixed"})
    assert predict_memory(asked, MODULE, DATA, device="H100-80GB").precision == "16-mixed"


class Unmade(TinyModule):
    def __init__(self):
        super().__init__()
        raise ValueError("no such size")


def test_a_module_that_cannot_be_made_fails_as_its_fit_does(config):
    with pytest.raises(TrialError) as fitted:
        fit(config(), Unmade, DATA).wait(SECONDS)
    with pytest.raises(TrialError) as predicted:
        predict_memory(config(), Unmade, DATA)
    assert str(predicted.value) == str(fitted.value)
    assert "no such size" in predicted.value.details


class Chosen(Wide):
    """Refuses to be made of fewer than two chosen weights, as an adapter may that has a mask."""

    def __init__(self):
        super().__init__()
        if len(torch.nonzero(torch.rand(8) > 0.5)) < 2:
            raise ValueError("too few weights are chosen")


def test_a_module_that_could_not_be_made_with_a_guess_turned_is_answered(config):
    found = predict_memory(config(), Chosen, data)
    assert found.complete
    assert found.device_allocated_bytes == predict_memory(config(), Wide, data).device_allocated_bytes


def test_weights_that_are_held_by_an_instance_are_not_sent(config, monkeypatch):
    sent = []
    monkeypatch.setattr(
        recordings, "PredictionJob", lambda *given: sent.append(given[0].payload) or PredictionJob(*given)
    )
    predict_memory(config(), Wide(8), data)
    assert len(sent[0].module) < WEIGHTS / 8


# -- run for real where a dry run cannot tell


def without_fake(name, kernel):
    """An operator of its own that does not say what it would return."""
    if not hasattr(torch.ops.kit_real, name):
        library = torch.library.Library("kit_real", "FRAGMENT")
        library.define(f"{name}(Tensor x) -> Tensor")
        library.impl(name, kernel, "CPU")
        vars(torch)[f"_kit_real_{name}"] = library  # for as long as the process lives
    return getattr(torch.ops.kit_real, name)


def many():
    return TinyData(width=512, samples=256, batch_size=16)


class Doubled(Wide):
    def training_step(self, batch, batch_idx):
        return self.layer(self.double(batch[0])).square().mean()

    def double(self, values):
        return values * 2


class Unsaid(Doubled):
    def double(self, values):
        return without_fake("doubled", lambda x: x * 2)(values)


@pytest.mark.parametrize("device", ["this machine", "T4-16GB"])
def test_an_operator_that_says_no_shape_is_run_for_real_and_scaled(config, device, tmp_path):
    class Writing(Unsaid):
        def double(self, values):
            (tmp_path / "written").write_text("by the step")
            return super().double(values)

    dry, real = (predict_memory(config(), made, many, device=device) for made in (Doubled, Writing))
    assert (real.complete, real.verdict, dry.source) == (True, "fits", "")
    assert real.device_allocated_bytes == dry.device_allocated_bytes
    assert real.batch_size == dry.batch_size
    assert real.source in str(real).splitlines()[0]
    assert re.search("run for real.*batch 2 and 3", real.source)
    assert not (tmp_path / "written").exists()


class NoSuchClass(Unsaid):
    """Its labels are no classes, which a dry run has no numbers to see."""

    def training_step(self, batch, batch_idx):
        chances = self.layer(self.double(batch[0]))
        labels = torch.full((len(chances),), chances.shape[1])
        return torch.nn.functional.cross_entropy(chances, labels + self.double(batch[0])[:, 0].long() * 0)


def test_a_label_that_is_no_class_is_the_users_error_though_a_dry_run_stops_elsewhere(config):
    with pytest.raises(TrialError, match="Target") as caught:
        predict_memory(config(), NoSuchClass, many)
    assert "training_step" in str(caught.value)


class WrongShape(Wide):
    def training_step(self, batch, batch_idx):
        return self.layer(batch[0][:, :-1]).mean()


class MissingKey(Wide):
    def training_step(self, batch, batch_idx):
        return self.layer(batch["image"]).mean()


class NoRate(Wide):
    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), rate=0.1)


class Guarded(Wide):
    def training_step(self, batch, batch_idx):
        loss = self.layer(batch[0]).mean()
        raise ValueError("no gradient" if loss.requires_grad else "no loss")


@pytest.mark.parametrize("device", ["this machine", "T4-16GB"])
@pytest.mark.parametrize("made", [WrongShape, MissingKey, NoRate, Guarded])
def test_an_error_of_the_step_is_the_answer_as_a_fit_gives_it(config, made, device):
    with pytest.raises(TrialError) as fitted:
        fit(config(), made, many()).wait()
    with pytest.raises(TrialError) as predicted:
        predict_memory(config(), made, many, device=device)
    assert str(predicted.value) in str(fitted.value)
    assert "test_prediction.py, line" in str(predicted.value)
    assert predicted.value.details.startswith("Traceback")


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
@pytest.mark.parametrize("made", [WrongShape, MissingKey])
def test_so_is_one_of_several_devices(config, made, strategy):
    several = config().replace({"hardware.strategy": strategy, "hardware.devices": 2})
    with pytest.raises(TrialError, match=r"test_prediction.py, line") as predicted:
        predict_memory(several, made, many)
    assert predicted.value.details.startswith("Traceback")


class OfFullPrecision(Wide):
    def training_step(self, batch, batch_idx):
        values = self.layer(batch[0])
        if values.dtype is torch.bfloat16:
            raise RuntimeError("unsupported dtype BFloat16")
        return values.mean()


def test_a_number_format_that_nobody_asked_for_is_named_with_the_error_that_it_raises(config):
    auto = config().replace({"hardware.precision": "auto"})
    with pytest.raises(TrialError, match=r"BFloat16.*auto.*bf16-mixed.*32-true"):
        predict_memory(auto, OfFullPrecision, many, device="H100-80GB")
    with pytest.raises(TrialError, match="BFloat16") as asked:
        predict_memory(auto.replace({"hardware.precision": "bf16-mixed"}), OfFullPrecision, many, device="H100-80GB")
    assert "32-true" not in str(asked.value)


def test_a_warning_names_the_line_that_called(config):
    with pytest.warns(KitWarning, match="are not used") as warned:
        predict_memory(config().replace({"model.arguments": {"layers": 2}}), Wide(), many)
    assert [item.filename for item in warned if item.category is KitWarning] == [__file__]


def test_what_stops_for_want_of_a_gpu_stays_an_answer_for_one(config):
    class ForGpus(Wide):
        def training_step(self, batch, batch_idx):
            raise RuntimeError("this kernel needs a CUDA device")

    found = predict_memory(config(), ForGpus, many, device="T4-16GB")
    assert (found.complete, found.breakdown["parameters"]) == (False, WEIGHTS)


def test_what_does_not_grow_with_the_batch_is_run_at_the_batch_itself(config):
    class Chosen(Wide):
        def training_step(self, batch, batch_idx):
            positive = without_fake("positive", lambda x: x[: 1 + len(x) // 3])(batch[0])
            return sum(self.layer(row).square().mean() for row in positive)

    found = predict_memory(config(), Chosen, many)
    assert found.complete
    assert found.source.endswith(f"batch {found.batch_size}")


def test_a_step_that_ends_its_process_when_run_for_real_leaves_what_is_known(config):
    class Deadly(Wide):
        def training_step(self, batch, batch_idx):
            return self.layer(without_fake("deadly", lambda x: os.abort())(batch[0])).mean()

    found = predict_memory(config(), Deadly, data)
    assert (found.complete, found.source, found.breakdown["parameters"]) == (False, "", WEIGHTS)
    assert any("run for real" in reason for reason in found.reasons)


def test_what_is_larger_than_the_memory_here_is_not_run_for_real(config):
    class Huge(Wide):
        def __init__(self):
            super().__init__()
            self.layer = torch.nn.Linear(512, 1 << 30, bias=False)

        def training_step(self, batch, batch_idx):
            return self.layer(without_fake("doubled", lambda x: x * 2)(batch[0])).mean()

    found = predict_memory(config(), Huge, data)
    assert (found.complete, found.source) == (False, "")
    assert any("are needed" in reason for reason in found.reasons)


class Looping(Wide):
    """As many rounds as the data say, 8; a dry run takes one or two."""

    def training_step(self, batch, batch_idx):
        values = batch[0]
        for _ in range(int((values.abs() > 0).sum(1).max() // 64)):
            values = self.layer(values)
        return values.square().mean()


@pytest.mark.slow
@pytest.mark.parametrize("device", ["this machine", "T4-16GB"])
def test_a_loop_that_numbers_decide_is_also_run_for_real_and_the_larger_counts(config, device):
    event = fit(config(), Looping, many).wait(SECONDS).event("memory_measured")
    found = predict_memory(config(), Looping, many, device=device)
    assert (found.verdict, found.conditions, found.complete) == ("fits", (), True)
    ratio = replay(found.recording).peak_allocated_bytes / event["device_allocated_bytes"]
    assert 0.99 < ratio < (1.01 if device == "this machine" else 2)  # a T4 keeps weights in two number formats
    assert re.search("run for real.*batch 2 and 16", found.source)
    assert any("count at test_prediction.py" in reason for reason in found.reasons)
    assert memory_model(config(), Looping, many, device=device).reason == ""


def test_the_dry_run_counts_where_it_needs_more_than_the_numbers(config):
    class Once(Looping):
        def training_step(self, batch, batch_idx):
            values = batch[0]
            for _ in range(1 + int((values > 9).sum())):
                values = self.layer(values)
            return values.square().mean()

    found = predict_memory(config(), Once, many)
    assert (found.verdict, found.conditions) == ("fits", ())
    assert re.search("no less.*run for real", found.source)


def test_the_weights_of_an_instance_are_not_known_so_its_conditions_stay(config):
    found = predict_memory(config(), Looping(), many)
    assert found.verdict == "fits if"
    assert "run for real" in found.source
    assert found.device_allocated_bytes > predict_memory(config(), Wide, many).device_allocated_bytes


class HugeLooping(Looping):
    def __init__(self):
        super().__init__()
        self.more = torch.nn.Linear(512, 1 << 30, bias=False)


class DeadlyLooping(Looping):
    def training_step(self, batch, batch_idx):
        if batch[0].sum().item() not in (1.0, 0.25):  # as dry runs answer
            os.abort()
        return super().training_step(batch, batch_idx)


@pytest.mark.parametrize(("made", "why"), [(HugeLooping, "are needed"), (DeadlyLooping, "Aborted|SIGABRT")])
def test_a_loop_that_cannot_be_run_for_real_leaves_its_conditions(config, made, why):
    found = predict_memory(config(), made, many)
    assert (found.complete, found.source) == (True, "")
    assert any("count at test_prediction.py" in condition for condition in found.conditions)
    assert any(re.search(f"for real.*({why})", reason) for reason in found.reasons)


class EndlessLooping(Wide):
    def training_step(self, batch, batch_idx):
        values = self.layer(batch[0])
        while values.square().sum() >= 0:
            values = self.layer(values)
        return values.square().mean()


def test_steps_for_real_that_do_not_end_are_told_with_what_they_had_held(config):
    found = predict_memory(config(), EndlessLooping, many, timeout_seconds=24.0)
    assert (found.verdict, found.source) == ("fits if", "")
    [told] = [reason for reason in found.reasons if "for real" in reason]
    assert re.search(r"still running.*test_prediction.py.*batch 2 had held \d\S* [KM]iB", told)


@pytest.mark.parametrize("late", [True, False])
def test_steps_for_real_that_time_broke_off_are_asked_again(monkeypatch, late):
    steps = object.__new__(RealSteps)
    steps._patience = steps._dry_patience = Patience(100, {})

    def ran(_):
        steps._patience.message = "still running" * late
        raise NotRunError("not run")

    monkeypatch.setattr(RealSteps, "_is_alone", True)
    monkeypatch.setattr(steps, "_ran", ran)
    [found] = steps.beside([training_recording(conditions=["a count"])])
    assert found.facts["late"] is late  # `kit.memory.recordings` keeps none that is
    assert found.facts["conditions"] == ["a count"]


def test_memory_is_limited_and_the_limit_goes():
    with memory_limited(64 << 20), pytest.raises(RuntimeError, match="allocate"):
        torch.empty(2 << 30, dtype=torch.uint8)  # more than a heap keeps
    assert torch.empty(2 << 30, dtype=torch.uint8).nbytes == 2 << 30


def test_whoever_waits_for_dry_runs_is_told_how_many_are_done_and_how_long_they_may_take(monkeypatch, capsys):
    class Slow:
        answer = ()

        def __init__(self, request, timeout_seconds):
            self.looks = 0

        def look(self):
            self.looks += 1
            return self.looks > 3

        def close(self):
            pass

    def ask():
        queries = [SimpleNamespace(key=name, facts={}) for name in ("one", "two", "three")]
        recordings.record_all([recordings.RecordingRequest(query) for query in queries], 60.0)
        return capsys.readouterr().err

    monkeypatch.setattr(recordings, "_Running", Slow)
    monkeypatch.setattr(tables, "_SHOWN_SECONDS", 0.0)
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    assert ask() == "", "quick ones are not talked about"
    monkeypatch.setattr(tables, "_SILENT_SECONDS", 0.0)
    said = ask()
    assert re.search("0 of 3 dry runs done: .* so far, each may take 1 min", said)
    assert re.search(r"3 of 3 dry runs done: \d+ \S+\n$", said)
    with ThreadPoolExecutor() as others:
        assert others.submit(ask).result() == "", "a panel says it itself"


@pytest.mark.parametrize("accumulate", [1, 2, 4])
def test_the_peak_is_told_of_the_step_in_which_it_lies(config, accumulate):
    """Of four micro-batches a step, two are recorded."""
    changes = {"levers.accumulate_grad_batches": accumulate, "levers.optimizer": "adamw"}
    found = predict_memory(config().replace(changes), TinyModule, TinyData)
    assert found.breakdown["optimizer_state"] > 0
    assert found.peak.step == 1 or found.peak.phase == "optimizer"  # there is no state before
    assert found.peak.micro_batch // min(accumulate, 2) == found.peak.step
