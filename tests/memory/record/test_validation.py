"""Validation in a dry run: as the trial validates, and only then."""

import numpy as np
import pytest
import torch
from dry_parts import Perceptron, Samples, loader, measure, peak, predict, series, vectors
from lightning.pytorch import Callback, LightningDataModule, LightningModule
from lightning.pytorch.callbacks import EMAWeightAveraging, GradientAccumulationScheduler, StochasticWeightAveraging
from torch import nn
from torch.utils.data import DataLoader, IterableDataset
from torchmetrics.classification import MulticlassAccuracy, MulticlassConfusionMatrix

from kit.config import Config
from kit.data.rows.loader import RowData
from kit.memory.query import make_query
from kit.memory.recordings import RecordingRequest, recordings_of
from kit.memory.replay.cards import target_of
from kit.memory.replay.estimate import estimate
from kit.memory.replay.replay import PHASES
from kit.train.choices import held_flags
from kit.trial.payload import TrainerParts

EVERY = Config().replace({"trial.validate_every_steps": 2})
ROWS = 1024


class Validated(Perceptron):
    """Widens what it is validated on, which a training step does not."""

    def validation_step(self, batch, batch_idx):
        wide = self.layers[0](batch[0]).repeat(1, 16)
        self.log("val_loss", wide.sin().amax())

    def val_dataloader(self):
        return DataLoader(Samples(vectors, 4 * ROWS), batch_size=ROWS)


class Keeping(Validated):
    """Keeps what it predicts until the validation ends."""

    def __init__(self):
        super().__init__()
        self.kept = []

    def validation_step(self, batch, batch_idx):
        self.kept.append(self.layers[0](batch[0]).repeat(1, 4))

    def on_validation_epoch_end(self):
        torch.cat(self.kept).mean()
        self.kept.clear()


class Leaving(Validated):
    """Never gives back what its validation made, which the next one finds there."""

    def on_validation_epoch_end(self):
        self.left = torch.zeros(4096, 1024)


class Counting(Validated):
    def __init__(self):
        super().__init__()
        self.metrics = nn.ModuleList([MulticlassAccuracy(8), MulticlassConfusionMatrix(8)])

    def validation_step(self, batch, batch_idx):
        scores = self.layers(batch[0]).repeat(1, 64).reshape(-1, 8)
        for metric in self.metrics:
            metric.update(scores, scores.argmax(1))

    def on_validation_epoch_end(self):
        for metric in self.metrics:
            metric.compute()
            metric.reset()


class Attending(Validated):
    """Torch takes its fast path in validation, and does not say what that holds."""

    def __init__(self):
        super().__init__()
        layer = nn.TransformerEncoderLayer(64, 4, 512, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2)

    def validation_step(self, batch, batch_idx):
        self.encoder(batch[0].view(-1, 4, 64))


def data():
    return loader(vectors, 16)


def phases(recording):
    return {PHASES[phase] for phase in recording.operator_phase}


def phase_at_peak(recording):
    return PHASES[recording.block_phase[recording.event_block[int(series(recording).argmax())]]]


CASES = {
    "own loader": (Validated, EVERY, "32-true"),
    "mixed": (Validated, EVERY, "bf16-mixed"),
    "accumulated": (Validated, EVERY.replace({"levers.accumulate_grad_batches": 3}), "32-true"),
    "without sanity batches": (Validated, EVERY.replace({"trial.sanity_batches": 0}), "32-true"),
    "keeps its batches": (Keeping, EVERY, "32-true"),
    "leaves something behind": (Leaving, EVERY, "32-true"),
    "metrics": (Counting, EVERY, "32-true"),
}


@pytest.mark.parametrize("case", CASES)
def test_a_validation_is_as_large_as_a_real_one_and_named_at_the_peak(case):
    make, config, precision = CASES[case]
    recording = predict(make, data, config, precision)
    accumulated = config.levers.accumulate_grad_batches
    assert recording.facts["unknown"] == ""
    assert len(recording.batch_starts) == 2 * accumulated
    assert phase_at_peak(recording) == "validation"
    assert peak(recording) == pytest.approx(measure(make, data, config, precision, 2 * accumulated), rel=0.02)
    assert any("batches of its own" in note and str(ROWS) in note for note in recording.facts["notes"])
    assert any("keeps" in note for note in recording.facts["notes"]) == (make is Keeping)


def test_a_fit_that_does_not_validate_is_recorded_as_if_it_could_not():
    with_loader, without = (predict(make, data, Config()) for make in (Validated, Perceptron))
    assert "validation" not in phases(with_loader)
    for name in ("block_bytes", "block_category", "block_phase", "event_block", "event_allocates", "event_time"):
        np.testing.assert_array_equal(getattr(with_loader, name), getattr(without, name))


def test_a_fast_path_that_hides_its_memory_is_bounded_from_above_and_noted():
    recording = predict(Attending, data, EVERY)
    real = measure(Attending, data, EVERY)
    assert real <= peak(recording) <= 3 * real
    assert torch.backends.mha.get_fastpath_enabled()
    assert any("fast path" in note for note in recording.facts["notes"])


class Endless(IterableDataset):
    def __iter__(self):
        while True:
            yield vectors()


class Several(LightningDataModule):
    """Two loaders to validate on, the second without an end, made of what `setup` keeps."""

    def setup(self, stage):
        self.samples = Samples(vectors, 4 * ROWS)

    def train_dataloader(self):
        return DataLoader(self.samples, batch_size=16)

    def val_dataloader(self):
        return [DataLoader(self.samples, batch_size=32), DataLoader(Endless(), batch_size=ROWS)]


class Choosing(Perceptron):
    def validation_step(self, batch, batch_idx, dataloader_idx):
        self.layers[0](batch[0]).repeat(1, 16).sin()


@pytest.mark.parametrize("device_kind", ["cpu", "cuda"])
def test_every_loader_of_a_data_module_is_validated_on_at_its_own_size(device_kind):
    recording = predict(Choosing, lambda: {"datamodule": Several()}, EVERY, device_kind=device_kind)
    assert recording.facts["unknown"] == ""
    assert phase_at_peak(recording) == "validation"
    assert peak(recording) > ROWS * 256 * 16 * 4 * 2
    assert any(f"32 and {ROWS}" in note for note in recording.facts["notes"])


class OfRows(LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(256, 8)

    def training_step(self, batch, batch_idx):
        return self.layer(batch[0]).square().mean()

    def validation_step(self, batch, batch_idx):
        self.layer(batch[0]).repeat(1, 512).sin()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


@pytest.mark.parametrize("fraction", [0.0, 0.25])
def test_kits_own_data_is_validated_on_where_a_part_is_kept_for_it(fraction):
    config = EVERY.replace({"data.validation_fraction": fraction})

    def rows():
        module = RowData(torch.zeros(512, 256), batch_size=32)
        module.use_config(config)
        return {"datamodule": module}

    small, large = (predict(OfRows, rows, config, batch_size=size) for size in (32, 64))
    assert ("validation" in phases(small)) == (fraction > 0)
    if fraction:
        assert peak(large) > 1.9 * peak(small) > 1.9 * 32 * 8 * 512 * 4
        assert not any("of its own" in note for note in large.facts["notes"])


def predicted(module, config=None, device="A100-80GB", **parts):
    parts["callbacks"] = tuple(parts.get("callbacks", ()))
    trainer = TrainerParts.of(None, parts["callbacks"], parts.get("flags", {}))
    config = config or Config().replace({"hardware.precision": "32-true"})
    query, target = make_query(module, data()["train_dataloaders"], config, device, trainer=trainer)
    (recording,) = recordings_of(RecordingRequest(query), 60)
    return estimate(recording, target)


@torch.library.custom_op("kit_tests::shapeless", mutates_args=())
def shapeless(x: torch.Tensor) -> torch.Tensor:
    return x * 2


class Opaque(Validated):
    def validation_step(self, batch, batch_idx):
        shapeless(batch[0])


class Staged(Perceptron):
    """Is tested on batches larger than those of its steps, which torch does not know the shape of."""

    def test_step(self, batch, batch_idx):
        shapeless(batch[0])

    def test_dataloader(self):
        return DataLoader(Samples(vectors, 4 * ROWS), batch_size=ROWS)


@pytest.mark.parametrize(
    ("module", "setting", "what"),
    [(Opaque, "trial.validate_every_steps", "validation"), (Staged, "trial.test_batches", "test")],
)
def test_a_stage_that_cannot_be_recorded_is_said_and_nothing_fits_without_it(module, setting, what):
    found = predicted(module, Config().replace({"hardware.precision": "32-true", setting: 2}))
    assert found.verdict == "unknown"
    assert any(f"{what} is no part" in reason and "shapeless" in reason for reason in found.reasons)
    assert found.breakdown["activations"] > 0
    assert found.peak.phase != what


class Reading(Callback):
    """Ends a training whose weights are no numbers."""

    def on_train_start(self, trainer, pl_module):
        if float(pl_module.layers[0].weight.sum()) == 1.0:
            raise ValueError("no weights")


class Holding(Callback):
    def on_train_start(self, trainer, pl_module):
        self.held = torch.zeros(1 << 24, dtype=torch.uint8)


@pytest.mark.parametrize("make", [EMAWeightAveraging, lambda: StochasticWeightAveraging(0.1), Holding])
def test_what_a_callback_holds_is_predicted(make):
    weights = sum(parameter.nbytes for parameter in Perceptron().parameters())
    more = (1 << 24) if make is Holding else weights
    plain, found = predicted(Perceptron), predicted(Perceptron, callbacks=[make()])
    assert found.device_allocated_bytes - plain.device_allocated_bytes >= more


def test_a_callback_that_cannot_be_recorded_is_named_and_the_rest_is_as_without_it():
    plain, found = predicted(Perceptron), predicted(Perceptron, callbacks=[Reading()])
    assert found.device_allocated_bytes == plain.device_allocated_bytes
    assert found.verdict == plain.verdict == "fits"
    assert any("Reading" in reason and "no part" in reason and "no weights" in reason for reason in found.reasons)


def test_arguments_of_the_trainer_that_change_memory_are_obeyed():
    limited = predicted(Validated, flags={"limit_val_batches": 3})
    assert limited.peak.phase == "validation"
    assert predicted(Validated, flags={"val_check_interval": 4}).breakdown == limited.breakdown
    clipped = {"gradient_clip_val": 1.0, "gradient_clip_algorithm": "value"}
    others = {"limit_train_batches": 1, "max_time": "1:0:0", "limit_val_batches": 0}
    assert held_flags(clipped | others) == {**clipped, "limit_val_batches": 0}
    found = predicted(Validated, flags=clipped | others)
    assert found.complete
    assert found.peak.phase != "validation"


def test_micro_batches_of_a_callback_are_accumulated():
    found = predicted(Perceptron, callbacks=[GradientAccumulationScheduler({0: 3})])
    assert len(found.recording.batch_starts) == 6


def test_what_decides_how_a_trial_validates_makes_another_question():
    def key(changes=None, module=Validated, **parts):
        trainer = TrainerParts.of(None, parts.get("callbacks", ()), parts.get("flags", {}))
        loaded, card = data()["train_dataloaders"], target_of("A100-80GB")
        return make_query(module, loaded, Config().replace(changes or {}), card, trainer=trainer)[0].key

    plain, every = key(), {"trial.validate_every_steps": 5}
    assert key({"trial.validation_batches": 3, "trial.sanity_batches": 0}) == plain
    assert key({"trial.validate_every_steps": 9}) == key(every)
    others = [
        key(every), key(every | {"trial.validation_batches": 3}), key(every | {"trial.sanity_batches": 0}),
        key({"trial.test_batches": 2}), key({"trial.predict_batches": 2}),
        key(flags={"val_check_interval": 4}), key(flags={"detect_anomaly": True}), key(callbacks=[Holding()]),
    ]  # fmt: skip
    assert len({plain, *others}) == 9
    assert key(flags={"max_time": "1:0:0"}) == plain
