"""What a dry run of many ranks says, beside real ranks that train through gloo, and beside closed forms."""

import functools
import math

import memory_ranks as ranks
import numpy as np
import pytest
import torch
from properties import crossed

from kit.memory.record.dry_run import DryRun, record
from kit.memory.replay.replay import CATEGORIES, Recording

KIB_64 = 2**16
ALL_LEVERS = {
    "levers": {"accumulate_grad_batches": 2, "gradient_checkpointing": True, "zero_grad_after_step": True},
    "training": {"gradient_clip_norm": 1.0},
}
ACCUMULATED = {**ALL_LEVERS, "levers": {"accumulate_grad_batches": 2}}


def case(module, strategy, settings=None, **more):
    return {"module": module, "strategy": strategy, "settings": settings or {}, **more}


TWO_RANKS = {
    "ddp": case("Decoder", "ddp", measured=True),
    "ddp, bf16, accumulated, clipped": case("Decoder", "ddp", ACCUMULATED, precision="bf16-mixed"),
    "ddp, freed after the step": case("Decoder", "ddp", {"levers": {"zero_grad_after_step": True}}, measured=True),
    "ddp, running statistics": case("Statistics", "ddp", measured=True),
    "fsdp": case("Decoder", "fsdp", measured=True),
    "fsdp, bf16, all levers": case("Decoder", "fsdp", ALL_LEVERS, precision="bf16-mixed"),
    "fsdp, 8 bits": case("Decoder", "fsdp", {"levers": {"optimizer": "adamw-8bit"}}, measured=True),
    "ddp, sequence chunks": case("Decoder", "ddp", {"levers": {"sequence_chunk": 24}}, measured=True),
    "fsdp, sequence chunks": case("Decoder", "fsdp", {"levers": {"sequence_chunk": 24}}, measured=True),
    "fsdp, manual": case("Manual", "fsdp", optimizers=2),
    "fsdp, shards itself from meta": case("SelfSharded", "fsdp"),
}
FOUR_RANKS = {
    "fsdp of 4": case("Decoder", "fsdp", measured=True),
    "fsdp, 2 replicas": case("Decoder", "fsdp:2:2", ACCUMULATED, precision="bf16-mixed"),
    "fsdp, tensor parallel": case("Split", "fsdp:2:2"),
}
CASES = [(name, 2) for name in TWO_RANKS] + [(name, 4) for name in FOUR_RANKS]


@pytest.fixture(scope="module")
def real(tmp_path_factory):
    """(case, world size) to what real ranks recorded and, where asked, the bytes the profiler measured."""

    @functools.cache
    def fits(world_size):
        folder, cases = tmp_path_factory.mktemp("ranks"), {2: TWO_RANKS, 4: FOUR_RANKS}[world_size]
        measured = ranks.run_ranks(cases, world_size, folder)
        return {name: (Recording.load(folder / f"{name}.npz"), measured[name]) for name in cases}

    return lambda name, world_size: fits(world_size)[name]


def dry(one, world_size, **more):
    torch.manual_seed(0)
    loader = ranks.loader_of(one)
    run = DryRun(ranks.make_config(one, world_size), one.get("precision", "32-true"), world_size, **more)
    recording = record(getattr(ranks, one["module"]), lambda: {"train_dataloaders": loader}, run)
    assert recording.facts["unknown"] == ""
    return recording


def peak(recording):
    """The most bytes alive at a time, and of which categories."""
    signs = np.where(recording.event_allocates, 1, -1)
    series = np.cumsum(signs * recording.block_bytes[recording.event_block])
    top = int(series.argmax())
    alive = np.zeros(recording.blocks, dtype=np.int64)
    np.add.at(alive, recording.event_block[: top + 1], signs[: top + 1])
    held = alive * recording.block_bytes
    return int(series[top]), {name: int(held[recording.block_category == i].sum()) for i, name in enumerate(CATEGORIES)}


def most_of(recording, category):
    mine = recording.block_category[recording.event_block] == CATEGORIES.index(category)
    signs = np.where(recording.event_allocates, 1, -1) * mine
    return int(np.cumsum(signs * recording.block_bytes[recording.event_block]).max())


# Which of them are held beside which others depends on when gloo's thread lets go of one.
OF_COLLECTIVES = ("gathered_parameters", "communication", "workspace")


def with_collectives_as_one(held):
    """Bytes by category, those of collectives in one sum."""
    others = {name: size for name, size in held.items() if name not in OF_COLLECTIVES}
    return {**others, "collectives": sum(held[name] for name in OF_COLLECTIVES)}


@pytest.mark.slow
@pytest.mark.parametrize(("name", "world_size"), CASES)
def test_a_dry_run_holds_what_real_ranks_hold_within_64_kib_in_every_category(real, name, world_size):
    expected, held = peak(real(name, world_size)[0])
    found, dry_held = peak(dry({**TWO_RANKS, **FOUR_RANKS}[name], world_size))
    # A model of a few MiB would pass within 1 MiB by chance; what really differs are a few numbers of bookkeeping.
    assert abs(found - expected) < KIB_64
    held, dry_held = with_collectives_as_one(held), with_collectives_as_one(dry_held)
    assert {name for name in held if abs(dry_held[name] - held[name]) >= KIB_64} == set()


@pytest.mark.slow
@pytest.mark.parametrize("name", ["ddp", "ddp, running statistics"])
def test_under_data_parallelism_gloo_holds_at_most_one_late_copy_of_the_gradients_more_than_predicted(real, name):
    predicted, _ = peak(dry(TWO_RANKS[name], 2))
    module = getattr(ranks, TWO_RANKS[name]["module"])()
    gradients = 4 * sum(parameter.numel() for parameter in module.parameters())
    # On a quiet machine it is exact; on a busy one gloo's thread lets go of what it has reduced a step later.
    assert 0.99 * predicted <= real(name, 2)[1] <= 1.01 * predicted + gradients


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "world_size"),
    [("fsdp", 2), ("fsdp, 8 bits", 2), ("fsdp, sequence chunks", 2), ("fsdp of 4", 4), ("ddp, sequence chunks", 2)],
)
def test_when_sharded_or_in_chunks_gloo_holds_at_most_what_a_step_gathers_and_reduces_more(real, name, world_size):
    predicted, _ = peak(dry({**TWO_RANKS, **FOUR_RANKS}[name], world_size))
    weights = 4 * sum(parameter.numel() for parameter in ranks.Decoder().parameters())
    # Two late copies of a block were the most on a quiet machine, three on one with a load of four to a core.
    assert 0.99 * predicted <= real(name, world_size)[1] <= 1.01 * predicted + 2 * weights


# -- closed forms, at sizes that no test machine has


def whole(module):
    return [parameter.shape for parameter in getattr(ranks, module)().parameters()]


def padded(shape, shard_size):
    return 4 * math.ceil(shape[0] / shard_size) * math.prod(shape[1:])


SHARDED = [("fsdp", 1024), ("fsdp:32:32", 32), ("fsdp:512:2", 2)]


@pytest.mark.parametrize(("sharded", "device_kind"), crossed(SHARDED, ["cpu", "cuda"]))
def test_parameters_and_optimizer_state_of_1024_ranks_are_the_sum_of_padded_shards(sharded, device_kind):
    strategy, shard_size = sharded
    recording = dry(case("Decoder", strategy), 1024, device_kind=device_kind)
    shapes = whole("Decoder")
    assert most_of(recording, "parameters") == sum(padded(shape, shard_size) for shape in shapes)
    # Moments are of the shard itself; rank 0 pads nothing unless there are more ranks than rows.
    moments = 2 * sum(padded(shape, shard_size) for shape in shapes)
    counters = 4 * len(shapes)
    assert most_of(recording, "optimizer_state") == moments + counters


@pytest.mark.slow
@pytest.mark.parametrize("device_kind", ["cpu", "cuda"])
def test_sharded_8_bit_state_is_two_bytes_an_element_and_its_scales_and_tables(device_kind):
    recording = dry(case("Decoder", "fsdp", {"levers": {"optimizer": "adamw-8bit"}}), 4, device_kind=device_kind)
    sizes = [math.ceil(shape[0] / 4) * math.prod(shape[1:]) for shape in whole("Decoder")]
    small = [size for size in sizes if size < 4096 or size % 256]
    large = [size for size in sizes if size not in small]
    state = sum(8 * size for size in small) + sum(2 * (size + 4 * size // 256 + 4 * 256) for size in large)
    assert most_of(recording, "optimizer_state") == state + 4 * len(sizes)


def test_data_parallelism_of_1024_ranks_adds_one_bucket_of_gradients_to_one_device():
    alone = dry(case("Decoder", "none"), 1)
    many = dry(case("Decoder", "ddp"), 1024)
    weights = sum(math.prod(shape) for shape in whole("Decoder")) * 4
    assert most_of(many, "communication") == weights
    assert peak(many)[0] - peak(alone)[0] == pytest.approx(weights, abs=4096)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("module", "strategy", "precision"),
    [
        ("Decoder", "ddp", "16-mixed"),
        ("Decoder", "fsdp", "16-mixed"),
        ("Decoder", "fsdp:8:8", "bf16-mixed"),
        ("Decoder", "fsdp", "bf16-true"),
        ("Manual", "ddp", "bf16-true"),
        ("Manual", "fsdp:8:8", "16-mixed"),
        ("Manual", "fsdp", "bf16-mixed"),
        ("Fields", "ddp", "bf16-mixed"),
        ("Fields", "fsdp", "32-true"),
    ],
)
def test_every_strategy_is_recorded_for_a_gpu(module, strategy, precision):
    settings = {"Manual": {}, "Decoder": ALL_LEVERS, "Fields": ACCUMULATED}[module]
    recording = dry(case(module, strategy, settings, precision=precision), 64, device_kind="cuda", capability=(9, 0))
    element_bytes = 2 if precision == "bf16-true" else 4
    shards = {"ddp": 1, "fsdp": 64, "fsdp:8:8": 8}[strategy]
    held = sum(padded(shape, shards) for shape in whole(module)) * element_bytes // 4
    assert most_of(recording, "parameters") == held
    assert (most_of(recording, "gathered_parameters") > 0) == (strategy != "ddp")
    streams = set(recording.block_stream.tolist())
    assert streams == {0, 1} if strategy == "ddp" else len(streams) >= 3
    assert any("NCCL" in note for note in recording.facts["notes"])


def test_a_module_that_shards_itself_on_the_meta_device_is_recorded_at_1024_ranks():
    recording = dry(case("SelfSharded", "fsdp"), 1024, device_kind="cuda")
    assert most_of(recording, "parameters") == sum(padded(shape, 1024) for shape in 4 * [(512, 512), (512,)])


@pytest.mark.slow
def test_more_ranks_record_the_same_operators_and_hold_less():
    few, more = (dry(case("Decoder", "fsdp"), world_size) for world_size in (2, 64))
    assert few.operator_name.shape == more.operator_name.shape
    assert peak(more)[0] < peak(few)[0]


def test_with_more_ranks_than_rows_the_padding_is_gathered_too():
    """FSDP2 pads every parameter to a row per rank at least, so 1,024 ranks may gather more than the model has."""
    block = [parameter.shape for parameter in ranks.Decoder().blocks[0].parameters()]
    gathered = sum(1024 * padded(shape, 1024) for shape in block)
    assert gathered > 2 * sum(4 * math.prod(shape) for shape in block)
    assert most_of(dry(case("Decoder", "fsdp"), 1024), "gathered_parameters") >= gathered
