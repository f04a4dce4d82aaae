"""One configuration at any batch size, the largest that fits, and many variations in one table."""

import csv
import io
import re
import resource

import pytest
import torch

from kit.errors import ConfigError, KitWarning
from kit.memory import batch_model, recordings
from kit.memory.batch_model import largest_batch, memory_model
from kit.memory.prediction import predict_memory
from kit.memory.variations import what_if
from kit.testing import TinyData, TinyModule

CARD = "A100-80GB"
MIB = 1 << 20
PATIENCE_SECONDS = 600.0  # on a busy machine

pytestmark = pytest.mark.usefixtures("no_predictions_left")


@pytest.fixture(autouse=True)
def nothing_known():
    recordings.cache.clear()


class Deep(TinyModule):
    """Four layers whose activations outgrow the weights."""

    def __init__(self, width=256):
        super().__init__()
        self.layer = torch.nn.Sequential(
            *[torch.nn.Sequential(torch.nn.Linear(width, width), torch.nn.GELU()) for _ in range(4)]
        )

    def training_step(self, batch, batch_idx):
        return self.layer(batch[0]).square().mean()

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters())


def data():
    return TinyData(width=256, samples=64, batch_size=8)


class Pairs(Deep):
    """Compares all samples with each other: grows faster than the batch."""

    def training_step(self, batch, batch_idx):
        found = self.layer(batch[0])
        return (found @ found.T).square().mean()


@pytest.fixture
def no_process(monkeypatch):
    """From here on, whoever starts a process fails."""
    return lambda: monkeypatch.setattr(recordings, "PredictionJob", None)


# -- the model


def test_any_batch_follows_from_two_recordings_exactly(config, no_process):
    model = memory_model(config(), Deep, data, device=CARD)
    assert re.search(f"Deep on {CARD}.*recorded at", repr(model))
    recorded = {size: predict_memory(config(), Deep, sized(size), device=CARD) for size in (1, 16, 77)}
    no_process()
    assert model.reason == ""
    for size, found in recorded.items():
        foretold = model.estimate(size)
        assert (foretold.device_allocated_bytes, foretold.device_reserved_bytes, foretold.batch_size) == (
            found.device_allocated_bytes,
            found.device_reserved_bytes,
            size,
        )


def sized(size):
    return TinyData(width=256, samples=256, batch_size=size)


def test_another_card_of_the_same_generation_needs_no_process(config, no_process):
    model = memory_model(config(), Deep, data, device=CARD)
    no_process()
    assert model.knows(device="A100-40GB")
    assert not model.knows(device="H100-80GB")
    assert model.estimate(4, device="300 MiB").verdict == "does not fit"


def test_accumulation_and_ranks_of_ddp_are_free_once_two_were_recorded(config, no_process):
    asked = config().replace({"hardware.strategy": "ddp", "hardware.devices": 2})
    model = memory_model(asked, Deep, data, device=CARD)
    assert not model.knows(accumulate=2)
    two = model.estimate(8, accumulate=2)
    no_process()
    many = model.estimate(8, accumulate=32, world_size=512)
    assert many.device_allocated_bytes == two.device_allocated_bytes
    assert (many.accumulate_grad_batches, many.world_size) == (32, 512)


def test_the_batch_size_is_that_of_the_data_when_none_is_given(config):
    assert memory_model(config(), Deep, data, device=CARD).estimate().batch_size == 8


@pytest.mark.slow
def test_what_grows_faster_than_the_batch_is_recorded_anew_once_and_then_foretold(config, no_process):
    model = memory_model(config(), Pairs, data, device=CARD, timeout_seconds=PATIENCE_SECONDS)
    assert "grows faster" in model.reason or "whole bytes" in model.reason
    assert not model.knows()
    exact = {
        size: predict_memory(config(), Pairs, sized(size), device=CARD, timeout_seconds=PATIENCE_SECONDS)
        for size in (32, 40, 100)
    }
    assert model.estimate(32).device_allocated_bytes == exact[32].device_allocated_bytes
    assert not model.knows()
    model.estimate(40)
    no_process()
    assert (model.knows(), model.reason) == (True, "")
    for size, found in exact.items():
        assert model.estimate(size).device_allocated_bytes == found.device_allocated_bytes
    assert any("proportion" in note for note in model.estimate(100).notes)


class OneByOne(Deep):
    """Does more the more samples there are: no two sizes run the same operators."""

    def training_step(self, batch, batch_idx):
        return sum(self.layer(sample).square().mean() for sample in batch[0])


class Stairs(Deep):
    """Works in parts of eight samples, each of them whole."""

    def training_step(self, batch, batch_idx):
        parts = -(-len(batch[0]) // 8)
        return self.layer(torch.zeros(8 * parts, 256)).square().mean() + batch[0].sum()


@pytest.mark.slow
@pytest.mark.parametrize(("made", "why"), [(OneByOne, "number of operators"), (Stairs, "parabola|whole bytes|faster")])
def test_what_follows_no_curve_is_recorded_anew_at_every_size(config, made, why):
    model = memory_model(config(), made, data, device=CARD, timeout_seconds=PATIENCE_SECONDS)
    for size in (9, 12, 20):
        exact = predict_memory(config(), made, sized(size), device=CARD, timeout_seconds=PATIENCE_SECONDS)
        assert model.estimate(size).device_allocated_bytes == exact.device_allocated_bytes
    assert re.search(why, model.reason)
    assert not model.knows()


def test_a_step_that_does_not_run_dry_is_answered_at_once_at_any_batch_size(config, no_process):
    class Broken(Deep):
        def training_step(self, batch, batch_idx):
            raise ValueError("a scripted fault")

    model = memory_model(config(), Broken, data, device=CARD)
    no_process()
    assert "a scripted fault" in model.reason
    assert [model.estimate(size).complete for size in (1, 1000)] == [False, False]


# -- the largest batch


def test_the_largest_batch_fits_and_the_next_does_not(config):
    found = largest_batch(config(), Deep, data, device="760 MiB")
    assert found.batch_size > 100
    assert found.estimate.fits
    assert found.estimate.batch_size == found.batch_size
    assert found.next_estimate.batch_size == found.batch_size + 1
    assert not found.next_estimate.fits
    assert f"a recording at {found.batch_size} confirms it" in found.reasons
    first = str(found).splitlines()[0]
    assert f"batch of {found.batch_size} fits" in first
    assert first.endswith("760 MiB")
    assert "confirms it" in found._repr_html_()


def test_no_batch_fits_a_device_that_is_too_small(config):
    found = largest_batch(config(), Deep, data, device="300 MiB")
    assert (found.batch_size, found.next_estimate) == (0, None)
    assert found.estimate.batch_size == 1
    assert re.match("not even .*1 fits", str(found))


def test_no_batch_is_said_to_fit_when_activations_are_unknown(config):
    class Broken(Deep):
        def training_step(self, batch, batch_idx):
            raise ValueError("a scripted fault")

    found = largest_batch(config(), Broken, data, device=CARD)
    assert found.batch_size == 0
    assert str(found).startswith("activations are unknown")


@pytest.mark.slow
def test_the_largest_batch_is_found_by_recordings_where_replays_cannot_tell(config):
    found = largest_batch(config(), Pairs, data, device="760 MiB")
    assert found.estimate.fits
    assert not found.next_estimate.fits
    assert found.next_estimate.batch_size == found.batch_size + 1


@pytest.mark.slow
def test_the_largest_batch_is_found_by_few_recordings_where_every_size_needs_one(config, monkeypatch):
    recorded = []
    record = batch_model.recordings_of
    monkeypatch.setattr(
        batch_model, "recordings_of", lambda asked, *_: (recorded.extend(asked.batch_sizes), record(asked))[1]
    )
    found = largest_batch(config(), Stairs, data, device="8 GiB", timeout_seconds=PATIENCE_SECONDS)
    assert found.batch_size > 100
    assert found.estimate.fits
    assert not found.next_estimate.fits
    assert found.next_estimate.batch_size <= 1.02 * found.batch_size
    assert len({*recorded}) < 20, recorded


def test_no_batch_above_the_most_that_is_asked_for_is_looked_at(config):
    model = memory_model(config(), Deep, data, device=CARD)
    found = batch_model.search(model, most=100)
    assert (found.batch_size, found.next_estimate) == (100, None)
    assert "ended at 100" in found.reasons[-1]


# -- what if


def samples():
    """A data set, whose loader kit makes, in batches of the config's size."""
    return TinyData(width=256, samples=64).train_dataloader().dataset


@pytest.fixture
def table(config):
    return what_if(
        config().replace({"hardware.precision": "32-true"}),
        Deep,
        samples,
        variations={
            "hardware.precision": ["32-true", "bf16-mixed"],
            "levers.gradient_checkpointing": [False, True],
            "hardware.strategy": ["none", "ddp"],
            "loader.batch_size": [2048],
        },
        device=CARD,
        world_size=4,
    )


@pytest.mark.slow
def test_variations_are_sorted_by_peak_and_measured_against_the_configuration_as_given(table):
    assert len(table) == 9
    peaks = [row.estimate.device_allocated_bytes for row in table]
    assert peaks == sorted(peaks)
    given = table.given
    assert (given.saves_bytes, given.estimate.batch_size) == (0, 16)
    for row in table:
        assert row.saves_bytes == given.estimate.device_allocated_bytes - row.estimate.device_allocated_bytes
        assert row.saves_fraction == row.saves_bytes / given.estimate.device_allocated_bytes
        assert row.estimate.world_size == (4 if row.changes.get("hardware.strategy") == "ddp" else 1)
        assert row.estimate.batch_size == row.changes.get("loader.batch_size", 16)
    checkpointed = {"levers.gradient_checkpointing": True, "loader.batch_size": 2048}
    plain = next(row for row in table if row.changes == {"loader.batch_size": 2048})
    assert next(row for row in table if row.changes == checkpointed).saves_bytes > plain.saves_bytes


def test_a_table_shows_itself_and_can_be_kept(table, tmp_path):
    assert "→ as given" in repr(table)
    assert "batch size 2048" in table._repr_html_()
    file = tmp_path / "new" / "what_if.csv"
    text = table.to_csv(file)
    assert file.read_text() == text
    rows = list(csv.DictReader(io.StringIO(text)))
    assert len(rows) == 9
    assert int(rows[0]["device_allocated_bytes"]) == table[0].estimate.device_allocated_bytes
    assert [row["hardware.strategy"] for row in rows].count("ddp") == 4


def test_a_table_that_cannot_be_written_leaves_the_one_before(table, tmp_path):
    file = tmp_path / "new" / "what_if.csv"
    text = table.to_csv(file)
    most = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (len(text) // 2, most[1]))  # of a file: what a disk has room for
    try:
        with pytest.raises(OSError, match="large"):
            table.to_csv(file)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, most)
    assert file.read_text() == text
    assert list(file.parent.iterdir()) == [file]


def test_equal_variations_are_recorded_once(config, monkeypatch):
    asked = []
    started = recordings.PredictionJob
    monkeypatch.setattr(recordings, "PredictionJob", lambda *given: asked.append(given) or started(*given))
    table = what_if(
        config(), Deep, data, variations=[{"trial.max_steps": 9}, {"hardware.precision": "bf16-mixed"}], device=CARD
    )
    assert len(table) == 3  # auto is bf16-mixed there
    assert len(asked) == 1


def test_a_variation_that_cannot_run_is_a_row_with_its_reason(config):
    class Unmade(Deep):
        def __init__(self, width=256):
            super().__init__(width)
            if width == 3:
                raise ValueError("no such width")

    table = what_if(
        config().replace({"hardware.accelerator": "auto"}),
        Unmade,
        data,
        variations=[
            {"hardware.strategy": "fsdp:2:4", "hardware.devices": 4},
            {"model.arguments": {"hidth": 3}},
            {"model.arguments": {"width": 3}},
        ],
        device=CARD,
    )
    assert [row.estimate is None for row in table] == [False, True, True, True]
    for row, reason in zip(table[1:], ("2 replicas × 4 devices each = 8", "no 'hidth'", "no such width"), strict=True):
        assert reason in row.reason
        assert f"- {row}: {row.reason}" in repr(table)


@pytest.mark.parametrize(
    ("variations", "message"),
    [
        ({"levers.checkpointing": [True]}, "no such field"),
        ({"loader.batch_size": list(range(1, 1200))}, "1199 combinations.* 1000"),
    ],
)
def test_what_cannot_be_varied_is_refused(config, variations, message):
    with pytest.raises(ConfigError, match=message):
        what_if(config(), Deep, data, variations=variations, device=CARD)


@pytest.mark.parametrize("path", ["model.arguments", "model.arguments.width"])
def test_arguments_of_a_module_that_is_made_already_are_no_silent_variation(config, path):
    given = config().replace({"model.arguments": {"width": 256}})
    with pytest.warns(KitWarning, match=r"model\.arguments \(width\)"):
        table = what_if(given, Deep(64), data, variations=[{path: {"width": 8} if path[-1] == "s" else 8}], device=CARD)
    assert [row.estimate is None for row in table] == [False, True]
    assert "Deep is made without" in table[1].reason


@pytest.mark.parametrize("size", [0, -1, "64", 2.5, True])
def test_a_batch_that_is_none_is_refused_and_not_taken_for_the_data_s_own(config, size):
    model = memory_model(config(), Deep, data, device=CARD)
    with pytest.raises(ConfigError, match="batch_size: "):
        model.estimate(size)
    with pytest.raises(ConfigError, match="world_size: "):
        model.estimate(4, world_size=0)
