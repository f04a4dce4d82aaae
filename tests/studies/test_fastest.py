"""recommend(objective="speed"): the fastest setting that fits, over blocks, batch, optimizer and devices together."""

import dataclasses
import functools
import itertools
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from lightning.pytorch import LightningModule
from torch import nn
from torch.utils.checkpoint import checkpoint

import kit
from kit.config import Config
from kit.errors import ConfigError, PlanError
from kit.memory.record.dry_run import DryRun, record
from kit.memory.replay.cards import target_of
from kit.memory.replay.checkpointing import CHUNKS, loss_chunks
from kit.memory.replay.replay import replay
from kit.models import GPT, Field, RandomData, Tokens
from kit.studies.scaling import fastest
from kit.studies.scaling import recommend as recommending
from kit.studies.scaling.fastest import shortened

BATCH = 8
SMALL = functools.partial(GPT, vocabulary=256, width=64, heads=4, layers=10, context=256)
recommend = functools.partial(recommending.recommend, timeout_seconds=600)
"""A busy machine takes longer than a user is made to wait."""
KEEP = ("hardware.precision", "levers.optimizer", "levers.accumulate_grad_batches")


def data():
    return Tokens(vocabulary=256, context=256, batch_size=BATCH)


@pytest.fixture(scope="module")
def given():
    return Config.make({"loader": {"batch_size": BATCH}, "hardware": {"precision": "bf16-mixed"}})


def a100_of(capacity_bytes):
    return dataclasses.replace(target_of("A100-40GB"), capacity_bytes=int(capacity_bytes), outside_bytes=(0, 0))


def planned(config, capacity_bytes, **options):
    target = {"device": a100_of(capacity_bytes), "headroom_fraction": 0, **options.pop("target", {})}
    return recommend(config, target, SMALL, data, objective="speed", confirm=False, **options)


@pytest.fixture(scope="module")
def ends(given):
    """Bytes that it needs without checkpointing, and with all blocks checkpointed."""
    found = []
    for checkpointing in (False, True):
        config = given.replace({"levers.gradient_checkpointing": checkpointing})
        found.append(kit.predict_memory(config, SMALL, data, device=a100_of(1 << 35)).total_bytes[1])
    return found


@pytest.mark.slow
def test_only_as_many_blocks_are_checkpointed_as_the_budget_asks_for(given, ends):
    none, everything = ends
    before = 0.0
    for share in (1.0, 0.6, 0.3):
        plan = planned(given, everything + share * (none - everything), keep=KEEP)
        assert plan.chosen is not None
        assert plan.chosen.needs_bytes <= plan.budget_bytes
        assert plan.chosen.step_seconds >= before
        before = plan.chosen.step_seconds
        if share < 1:
            assert plan.chosen.needs_bytes >= 0.95 * plan.budget_bytes
            assert plan.chosen.checkpointed > 0
            assert plan.config.levers.checkpoint_blocks
            assert "next faster setting" in str(plan)
            needs = kit.predict_memory(plan.config, SMALL, data, device=a100_of(1 << 35)).total_bytes[1]
            assert needs == plan.chosen.needs_bytes
        else:
            assert plan.chosen.checkpointed == 0


@pytest.mark.slow
@pytest.mark.parametrize("decode_bytes_per_second", [1e3, 1e12])
def test_a_loader_that_decides_is_told_beside_the_fastest_setting(tmp_path, decode_bytes_per_second):
    config = Config().replace({
        "data.url": str(tmp_path / "one.zarr"), "data.patch": {"dim_0": 2, "dim_1": 16, "dim_2": 16},
        "data.samples_per_epoch": 640, "model.arguments": {"variables": 1, "width": 4, "depth": 1},
        "chunking.decode_bytes_per_second": decode_bytes_per_second, "chunking.request_cpu_seconds": 1e-9,
    })  # fmt: skip
    kit.build(config, source=np.random.default_rng(0).random((64, 32, 32), "f4"), progress=False)
    plan = kit.recommend(config, device="A100-40GB", objective="speed", keep=["loader.batch_size", "hardware"])
    speed = kit.predict_speed(plan.config, device="A100-40GB")
    assert (plan.loader_samples_per_second is not None) == (speed.bound == "loader") == (decode_bytes_per_second < 1e6)
    assert ("loader" in repr(plan)) == (speed.bound == "loader")
    if speed.bound == "loader":
        assert plan.loader_samples_per_second == pytest.approx(speed.samples_per_second)


@pytest.mark.slow
def test_a_plan_keeps_the_global_batch_and_beats_what_it_leaves_out(given, ends):
    plan = planned(given, 0.85 * ends[1])
    config = plan.config
    assert config.loader.batch_size * config.levers.accumulate_grad_batches == BATCH
    # Only the chosen one is dry-run as it stands; the others' times are worked out, a few percent off here.
    assert all(plan.chosen.step_seconds <= 1.1 * point.step_seconds for point in plan.points if point.fits)
    assert plan.chosen.changes in [point.changes for point in plan.points]
    assert Config.from_yaml(config.to_yaml()) == config
    assert "dry-run as it stands" in str(plan)
    assert "<table" in plan._repr_html_()


@pytest.mark.slow
def test_a_budget_between_two_blocks_is_filled_with_modules_inside_one(given, ends):
    none, everything = ends
    # Half a block less than five of ten equal ones leave.
    plan = planned(given, none - 4.5 / 10 * (none - everything), keep=(*KEEP, "levers.zero_grad_after_step"))
    names = plan.config.levers.checkpoint_blocks
    assert any(name.startswith("blocks.") for name in names)
    assert 0.96 * plan.budget_bytes <= plan.chosen.needs_bytes <= plan.budget_bytes


@pytest.mark.slow
def test_where_a_module_cannot_run_twice_on_its_own_whole_blocks_are_taken(given, ends, monkeypatch):
    none, everything = ends
    tried = []
    real = fastest.record_all

    def record_all(requests, *more):
        levers = requests[0].query.config.levers
        tried.append(levers.checkpoint_blocks)
        if any("." in name for name in levers.checkpoint_blocks):
            return [PlanError("CheckpointError: another number of tensors was saved")]
        return real(requests, *more)

    monkeypatch.setattr(fastest, "record_all", record_all)
    plan = planned(given, (none + everything) / 2, keep=KEEP)
    assert any("." in name for names in tried for name in names)
    assert plan.fits
    assert all(name.replace("-", "").isdecimal() for name in plan.config.levers.checkpoint_blocks)
    assert "CheckpointError" in str(plan)


@pytest.mark.slow
def test_sequence_chunks_are_looked_at_for_a_module_that_has_them(given, ends):
    plan = planned(given, 0.85 * ends[1], keep=KEEP)
    cut = [point for point in plan.points if "levers.sequence_chunk" in point.changes]
    lengths = {point.changes["levers.sequence_chunk"] for point in cut}
    assert lengths == {129, 65}, "halves and quarters of the 257 tokens that a sample has"
    uncut = [{path: to for path, to in point.changes.items() if path != "levers.sequence_chunk"} for point in cut]
    pairs = [
        (point, other) for point, rest in zip(cut, uncut, strict=True) for other in plan.points if other.changes == rest
    ]

    assert any(point.needs_bytes < other.needs_bytes for point, other in pairs)
    plan = planned(given, 0.85 * ends[1], keep=[*KEEP, "levers.sequence_chunk"])
    assert not any("levers.sequence_chunk" in point.changes for point in plan.points)


class Words(LightningModule):
    """A language model whose loss is taken whole, or in chunks of the positions."""

    def __init__(self, chunks):
        super().__init__()
        self.embedding, self.body, self.head = nn.Embedding(4096, 32), nn.Linear(32, 32), nn.Linear(32, 4096)
        self.chunks = chunks

    def training_step(self, batch, batch_idx):
        hidden, wanted = self.body(self.embedding(batch[0])).flatten(0, 1), batch[1].flatten()
        if self.chunks == 1:
            return nn.functional.cross_entropy(self.head(hidden), wanted)
        pairs = zip(hidden.chunk(self.chunks), wanted.chunk(self.chunks), strict=True)
        return sum(checkpoint(self.loss, *pair, use_reentrant=False) for pair in pairs) / len(wanted)

    def loss(self, hidden, wanted):
        return nn.functional.cross_entropy(self.head(hidden), wanted, reduction="sum")

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters())


def test_what_chunks_of_a_loss_would_save_is_what_they_save(given):
    def recorded(chunks):
        words = Field(shape=(256,), below=4096)
        config = given.replace({"trial.max_steps": 4, "trial.warmup_steps": 0})
        data = {"datamodule": RandomData((words, words), 4)}
        return record(lambda: Words(chunks), lambda: data, DryRun(config, "bf16-mixed", 1, "cuda", (8, 0)))

    found = loss_chunks(recorded(1))
    assert (found.positions, found.classes) == (4 * 256, 4096)
    assert found.peak_bytes == replay(recorded(1)).peak_allocated_bytes
    real = replay(recorded(CHUNKS)).peak_allocated_bytes
    assert found.chunked_peak_bytes == pytest.approx(real, rel=0.1)
    assert "advice, not applied" in found.advice(0.1)
    assert found.saved_bytes > 10 << 20


@pytest.mark.slow
def test_what_is_kept_is_not_changed(given, ends):
    with pytest.raises(ConfigError, match="levers"):
        planned(given, ends[0], keep=["levers.no_such_field"])
    one = planned(given, 2 * ends[0], keep="levers.gradient_checkpointing")
    assert not any("levers.gradient_checkpointing" in dict(point.changes) for point in one.points)
    plan = planned(given, ends[1], keep=(*KEEP, "levers.gradient_checkpointing", "levers.sequence_chunk"))
    assert not plan.fits
    assert "too much" in plan.refusal
    with pytest.raises(PlanError, match="nothing fits"):
        plan.config  # noqa: B018


@pytest.mark.slow
def test_more_devices_share_the_global_batch(given, ends):
    plan = planned(given, 2 * ends[0], target={"devices": 2}, keep=KEEP)
    names = {point.name for point in plan.points}
    assert any(name.startswith("ddp on 2") for name in names)
    assert any(name.startswith("fsdp on 2") for name in names)
    for point in plan.points:
        config = given.replace(dict(point.changes))
        devices = 2 if config.hardware.strategy != "none" else 1
        assert config.loader.batch_size * config.levers.accumulate_grad_batches * devices == BATCH


@pytest.mark.slow
def test_module_and_data_may_follow_the_config_and_a_plan_draws_itself(given, ends):
    device = a100_of(ends[0])
    plan = recommend(given, SMALL, data, device=device, objective="speed", keep=KEEP, confirm=False)
    other = recommend(given, device, SMALL, data, objective="speed", keep=KEEP, confirm=False)
    assert plan.config == other.config
    assert recommend(given, SMALL, data, device=device).config == recommend(given, device, SMALL, data).config
    assert "chosen" in [text.get_text() for text in plan.figure().axes[0].get_legend().get_texts()]
    with pytest.raises(ConfigError, match="not both"):
        recommend(given, "T4", SMALL, data, device="T4")
    with pytest.raises(PlanError, match="objective"):
        recommend(given, SMALL, data, device=device, objective="thrift")


def test_numbers_of_blocks_in_a_row_are_one_word():
    assert shortened(["3", "0", "1", "7", "2", "layers.4"]) == ("0-3", "7", "layers.4")
    assert shortened([]) == ()


@pytest.mark.parametrize(
    ("points", "expected"),
    [
        ([(1.0, 99, {"a": 1}), (1.001, 90, {"a": 1, "b": 2})], 1),  # as fast, and memory is left
        ([(1.0, 90, {"a": 1, "b": 2}), (1.001, 80, {"a": 1})], 1),
        ([(1.0, 99, {"a": 1}), (1.01, 50, {"a": 1})], 0),
        ([(1.0, 99, {"levers.checkpoint_blocks": ("x",) * 50}), (1.03, 60, {"a": 1})], 1),  # a list nobody reads
        ([(1.0, 99, {"levers.checkpoint_blocks": ("x",) * 50}), (1.2, 60, {"a": 1})], 0),
        ([], None),
    ],
)
def test_of_settings_as_fast_one_with_memory_to_spare_is_taken(points, expected):
    found = [
        fastest.SpeedPoint(
            name="", changes=changes, needs_bytes=needs, step_seconds=seconds, samples_per_second=1.0, fits=True
        )
        for seconds, needs, changes in points
    ]  # fmt: skip
    best = fastest.Fastest._best(SimpleNamespace(budget_bytes=100), found)
    assert best is (None if expected is None else found[expected])


def test_a_search_that_ran_out_of_time_says_so(given, monkeypatch):
    clock = itertools.count(0, 300)
    monkeypatch.setattr(fastest, "time", SimpleNamespace(monotonic=lambda: next(clock)))
    plan = planned(given, 1 << 40, timeout_seconds=400)
    assert not plan.in_time
    assert "timeout_seconds" in str(plan)


class OneIsAnother(LightningModule):
    """A step that runs an operator more with several samples."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(16, 16)

    def training_step(self, batch, batch_idx):
        made = self.layer(batch)
        return (made * 2).mean() if len(batch) > 1 else made.mean()

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters())


def test_one_sample_a_batch_is_planned_with_what_it_runs():
    config = Config.make({"loader": {"batch_size": 1}, "levers": {"accumulate_grad_batches": 4}})
    keep = ("hardware.precision", "levers.optimizer")
    loader = functools.partial(RandomData, Field(shape=(16,)), 1)
    plan = recommend(config, "A100-40GB", OneIsAnother, loader, objective="speed", confirm=False, keep=keep)
    sizes = {point.changes.get("loader.batch_size", 1) for point in plan.points}
    assert plan.chosen is not None
    assert sizes & {2, 4}
    assert not any("operators" in reason for reason in plan.reasons)


def test_a_point_within_the_budget_that_may_run_out_is_told_apart():
    point = functools.partial(fastest.SpeedPoint, changes={}, needs_bytes=90, samples_per_second=1.0)
    chosen = point(name="slow", step_seconds=2.0, fits=True)
    for is_tight, word in ((True, "fragmented"), (False, "confirmed")):
        faster = point(name="fast", step_seconds=1.0, fits=False, is_tight=is_tight)
        notes = []
        search = SimpleNamespace(budget_bytes=100, _note=notes.append)
        fastest.Fastest._note_next(search, chosen, [faster, chosen])
        assert word in notes[0]
