"""Checkpoints: what they make of a recording is what a dry run with the lever shows, for any subset of blocks."""

import numpy as np
import pytest
import torch

from kit.config import Config
from kit.memory.record.dry_run import DryRun, record
from kit.memory.replay.checkpointing import Checkpoints
from kit.memory.replay.replay import PHASES, replay
from kit.models import GPT, Tokens

LAYERS = 6


@pytest.fixture(scope="module", autouse=True)
def _one_thread():
    torch.set_num_threads(1)


def dry(kind, precision, **levers):
    config = Config.make({"levers": levers, "trial": {"max_steps": 4, "warmup_steps": 0}})
    return record(
        lambda: GPT(vocabulary=256, width=64, heads=4, layers=LAYERS, context=128),
        lambda: {"datamodule": Tokens(vocabulary=256, context=128, batch_size=4)},
        DryRun(config, precision, 1, kind, (8, 0) if kind == "cuda" else None),
    )


@pytest.fixture(scope="module", params=[("cuda", "bf16-mixed", 1), ("cpu", "32-true", 1), ("cpu", "32-true", 2)])
def case(request):
    kind, precision, parts = request.param
    return kind, precision, {"accumulate_grad_batches": parts}


def peak(recording):
    return replay(recording).peak_allocated_bytes


def test_any_subset_needs_what_a_dry_run_of_it_needs(case):
    kind, precision, more = case
    plain = dry(kind, precision, **more)
    checkpoints = Checkpoints(plain)
    assert plain.facts["blocks"] == {str(number): f"blocks.{number}" for number in range(LAYERS)}
    for blocks in (["0-5"], ["0-2"], ["1", "4"]):
        real = dry(kind, precision, gradient_checkpointing=True, checkpoint_blocks=blocks, **more)
        ranges = [list(map(int, block.split("-"))) for block in blocks]
        numbers = [number for ends in ranges for number in range(ends[0], ends[-1] + 1)]
        thought = checkpoints.checkpointed([f"blocks.{number}" for number in numbers])
        assert 0.98 * peak(real) <= peak(thought) <= 1.1 * peak(real)
        assert peak(thought) < peak(plain)


def test_a_checkpointed_recording_is_whole(case):
    kind, precision, more = case
    plain = dry(kind, precision, **more)
    checkpoints = Checkpoints(plain)
    found = checkpoints.checkpointed(["blocks.1", "blocks.3"])
    again = sum(len(call.repeated) for name in ("blocks.1", "blocks.3") for call in checkpoints.calls[name])
    assert len(found.operator_name) == len(found.operator_module) == len(found.operator_phase)
    assert len(found.operator_name) == len(plain.operator_name) + again
    backward = np.count_nonzero(found.operator_phase == PHASES.index("backward"))
    assert backward == np.count_nonzero(plain.operator_phase == PHASES.index("backward")) + again
    assert (np.diff(found.event_time) >= 0).all()
    alive = set()
    for block, allocates in zip(found.event_block.tolist(), found.event_allocates.tolist(), strict=True):
        assert (block in alive) != allocates
        alive ^= {block}
    assert len(alive) == len(plain.event_block[plain.event_allocates]) - len(plain.event_block[~plain.event_allocates])


def test_what_checkpoints_say_of_a_block_adds_up():
    plain = dry("cpu", "32-true")
    checkpoints = Checkpoints(plain)
    assert checkpoints.checkpointed([]) is plain
    saved = [checkpoints.saved_bytes(f"blocks.{number}") for number in range(LAYERS)]
    assert len(set(saved)) == 1
    # At the end of the last forward pass, the first five blocks have dropped what they kept; the last begins again.
    less = peak(plain) - peak(checkpoints.checkpointed([f"blocks.{number}" for number in range(LAYERS - 1)]))
    assert less == pytest.approx((LAYERS - 1) * saved[0], rel=0.1)
