"""Estimates: every verdict, at the byte where it turns, with reasons, and a breakdown that adds up."""

import json
import math
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st
from properties import examples
from recordings import ACTIONS, RecordingBuilder, told, training_recording

from kit.errors import PlanError
from kit.memory.replay.cards import DeviceTarget, target_of
from kit.memory.replay.estimate import MemoryEstimate, Residuals, communicators, estimate, short_epoch
from kit.memory.replay.replay import replay

MIB, GIB = 1 << 20, 1 << 30


def device(capacity, outside=(0, 0), kind="cuda", cublas=0):
    return DeviceTarget(
        name="test card", capacity_bytes=capacity, device_kind=kind, capability=(8, 0) if kind == "cuda" else None,
        outside_bytes=outside, cublas_workspace_bytes=cublas,
    )  # fmt: skip


def fragmented():
    """16 MiB twice, freed, then 30 MiB: 62 MiB reserved at once, but 32 MiB do when all is given back between."""
    story = RecordingBuilder()
    story.batch()
    story.operator("mm", "forward", "model")
    story.free(story.allocate(16 * MIB), story.allocate(16 * MIB))
    story.operator("bmm", "backward", "model")
    story.allocate(30 * MIB, "gradients")
    return story.build()


# -- verdicts


def test_what_the_high_end_leaves_room_for_fits_to_the_byte():
    limit = (62 + 7) * MIB
    assert estimate(fragmented(), device(limit, (3 * MIB, 7 * MIB))).verdict == "fits"
    assert estimate(fragmented(), device(limit, (3 * MIB, 7 * MIB))).fits
    tight = estimate(fragmented(), device(limit - 1, (3 * MIB, 7 * MIB)))
    assert (tight.verdict, tight.fits) == ("tight", False)
    assert "held outside" in tight.reasons[0]


def test_what_runs_only_after_segments_were_given_back_is_tight():
    answer = estimate(fragmented(), device(64 * MIB, (3 * MIB, 7 * MIB)))
    assert answer.verdict == "tight"
    assert "the driver once" in answer.reasons[0]
    assert estimate(fragmented(), device(35 * MIB, (3 * MIB, 7 * MIB))).verdict == "tight"


def test_what_fails_even_then_does_not_fit():
    answer = estimate(fragmented(), device(32 * MIB, (3 * MIB, 7 * MIB)))
    assert answer.verdict == "does not fit"
    # 16 MiB and 16 MiB are one too many for 29 MiB.
    assert re.search("16 MiB asked .*16 MiB allocated .*16 MiB reserved, .*29 MiB", answer.reasons[0])


def test_a_device_smaller_than_the_parameters_or_than_its_context_does_not_fit():
    recording = training_recording()
    for capacity, outside in ((4 * MIB, (0, 0)), (200 * MIB, (300 * MIB, 400 * MIB))):
        answer = estimate(recording, device(capacity, outside))
        assert answer.verdict == "does not fit"
        assert answer.device_allocated_bytes == replay(recording).peak_allocated_bytes


def scattered():
    """Pairs of growing blocks, each followed by a small one that keeps a segment of a pair from going back."""
    story = RecordingBuilder()
    story.operator("mm", "forward")
    for size in (40, 44, 48):
        story.free(*[story.allocate(size * MIB) for _ in range(2)])
        story.allocate(2 * MIB)
    return story.build()


def test_expandable_segments_are_named_where_they_would_do():
    answer = estimate(scattered(), device(130 * MIB))
    assert answer.device_reserved_expandable_bytes < 130 * MIB < answer.device_reserved_bytes
    assert "expandable_segments:True" in answer.reasons[0]


def test_what_fits_only_as_fragmented_as_it_is_played_is_tight():
    recording = scattered()
    answer = estimate(recording, device(GIB))
    lost = answer.device_reserved_bytes - answer.device_reserved_expandable_bytes
    assert answer.fits
    exactly = estimate(recording, device(answer.device_reserved_bytes))
    assert (exactly.verdict, "fragmentation" in exactly.reasons[0]) == ("tight", True)
    assert estimate(recording, device(answer.device_reserved_bytes + lost)).fits
    assert estimate(fragmented(), device(62 * MIB)).fits  # as unused segments can be given back


@examples(60)
@given(ACTIONS, st.integers(0, 400 * MIB), st.integers(0, 20 * MIB), st.integers(0, 20 * MIB))
def test_fits_never_runs_out_and_more_memory_is_never_worse(actions, capacity, low, more):
    recording, order = told(actions), ["does not fit", "tight", "fits"]
    target = device(capacity, (low, low + more))
    answer = estimate(recording, target)
    if answer.fits:
        assert replay(recording, capacity_bytes=capacity - low - more).out_of_memory is None
    if answer.verdict == "does not fit":
        assert replay(recording, capacity_bytes=max(0, capacity - low)).out_of_memory is not None
    need = answer.device_reserved_bytes + low + more
    lost = max(0, answer.device_reserved_bytes - answer.device_reserved_expandable_bytes)
    assert estimate(recording, device(max(capacity, need) + lost, (low, low + more))).verdict == "fits"
    assert order.index(answer.verdict) < 2 or need <= capacity


# -- incomplete recordings


def test_without_activations_the_verdict_is_unknown_unless_the_known_parts_alone_are_too_much():
    story = RecordingBuilder(unknown="my_kernel has no fake implementation")
    story.operator("empty", "setup", "model")
    story.allocate(40 * MIB, "parameters")
    recording = story.build()
    answer = estimate(recording, device(GIB))
    assert (answer.verdict, answer.fits, answer.complete) == ("unknown", False, False)
    assert any("my_kernel" in reason for reason in answer.reasons)
    assert "at least" in str(answer)
    assert estimate(recording, device(45 * MIB, (MIB, 10 * MIB))).verdict == "unknown"
    assert estimate(recording, device(30 * MIB)).verdict == "does not fit"


def test_an_empty_recording_needs_only_what_is_outside():
    answer = estimate(RecordingBuilder().build(), device(GIB, (MIB, 2 * MIB)))
    assert (answer.verdict, answer.device_allocated_bytes, answer.breakdown) == ("fits", 0, {})
    assert answer.total_bytes == (MIB, 2 * MIB)
    assert str(answer)


# -- what is in it


@examples(60)
@given(ACTIONS, st.sampled_from([0, 8_519_680]))
def test_the_breakdown_adds_up_to_the_allocated_peak(actions, cublas):
    answer = estimate(told(actions), device(GIB, cublas=cublas))
    assert sum(answer.breakdown.values()) == answer.device_allocated_bytes <= answer.device_reserved_bytes
    timeline = answer.timeline
    assert max(timeline.allocated_bytes, default=0) == answer.device_allocated_bytes
    assert sum(block.bytes for block in answer.largest) <= answer.device_allocated_bytes


def test_cublas_workspaces_of_the_card_are_part_of_the_answer():
    with_them, without = (estimate(training_recording(), device(GIB, cublas=size)) for size in (8_519_680, 0))
    # A large block may hold up to 1 MiB more than was asked for.
    assert 0 <= with_them.breakdown["workspace"] - 2 * 8_519_680 <= 2 * MIB
    assert "workspace" not in without.breakdown


def test_the_facts_of_the_recording_are_its_own():
    facts = {
        "world_size": 8, "strategy": "fsdp:2:4", "precision": "bf16-mixed", "accumulate_grad_batches": 2,
        "parameters": 7, "trainable_parameters": 5, "notes": ["a"], "seconds": 1.5,
    }  # fmt: skip
    answer = estimate(told([], batch_size=9, **facts), target_of("A100-80GB"))
    assert (answer.batch_size, answer.world_size, answer.strategy) == (9, 8, "fsdp:2:4")
    assert (answer.precision, answer.accumulate_grad_batches) == ("bf16-mixed", 2)
    assert (answer.parameters, answer.trainable_parameters) == (7, 5)
    assert (answer.notes, answer.record_seconds, answer.device) == (("a",), 1.5, "A100-80GB")


@pytest.mark.parametrize(
    ("card", "precision", "instead"),
    [
        ("V100-32GB", "bf16-mixed", "16-mixed"),
        ("T4", "bf16-true", "16-mixed"),
        ("P100", "bf16-mixed", "32-true"),
        ("T4", "16-mixed", ""),
        ("A10", "bf16-mixed", ""),
        ("24 GiB", "bf16-mixed", ""),
    ],
)
def test_a_number_format_without_units_is_said_with_what_to_use(card, precision, instead):
    answer = estimate(told([], precision=precision), target_of(card))
    said = [reason for reason in answer.reasons if "emulated" in reason]
    assert [instead in reason for reason in said] == [True] * bool(instead)
    assert answer.reasons[0] not in said


def test_an_estimate_survives_json_without_its_recording():
    answer = estimate(training_recording(notes=["x"]), target_of("24 GiB"))
    again = MemoryEstimate.from_dict(json.loads(json.dumps(answer.to_dict())))
    assert again == answer
    assert (again.recording, answer.recording is None) == (None, False)
    assert again.to_dict() == answer.to_dict()
    with pytest.raises(PlanError, match="verdict 'maybe'"):
        MemoryEstimate.from_dict({**answer.to_dict(), "verdict": "maybe"})


def test_it_shows_itself_as_text_and_as_html():
    answer = estimate(training_recording(), target_of("A100-80GB"))
    assert str(answer).startswith("fits: ")
    for shown in (str(answer), answer._repr_html_()):
        for word in ("activations", "optimizer_state", "A100-80GB", "allocated at the peak", "100.0%", "MiB"):
            assert word in shown


# -- outside the allocator


def test_groups_of_gpus_add_their_communicators_and_residuals_replace_the_rule():
    alone, two, four = (
        estimate(told([], world_size=world, strategy=strategy), device(GIB, (100, 200))).outside_bytes
        for world, strategy in ((1, "none"), (2, "ddp"), (4, "fsdp:2:2"))
    )
    assert alone == (100, 200)
    assert two[0] - 100 == (four[0] - 100) / 2 > 0
    learned = Residuals(count=5, outside_bytes=(10 * MIB, 20 * MIB))
    answer = estimate(told([], world_size=4, strategy="fsdp:2:2"), device(GIB, (100, 200)), residuals=learned)
    assert answer.outside_bytes == (10 * MIB, 20 * MIB)
    assert any("as measured in 5 runs" in reason for reason in answer.reasons)


@pytest.mark.parametrize(
    ("strategy", "world", "groups"),
    [
        ("none", 1, 0),
        ("ddp", 1, 0),
        ("ddp", 8, 1),
        ("fsdp", 8, 1),
        ("fsdp:1:8", 8, 1),
        ("fsdp:8:1", 8, 1),
        ("fsdp:2:4", 8, 2),
    ],
)
def test_communicators_are_counted_by_strategy(strategy, world, groups):
    assert communicators(told([], strategy=strategy, world_size=world)) == groups


def test_what_cudnn_may_take_costs_time_and_never_the_run():
    recording = told([], unsure_workspace_bytes=50 * MIB)
    for capacity, slower in ((GIB, False), (90 * MIB, True)):
        answer = estimate(recording, device(capacity, (10 * MIB, 60 * MIB)))
        assert (answer.verdict, answer.outside_bytes) == ("fits", (10 * MIB, 60 * MIB))
        assert any("slower" in reason for reason in answer.reasons) is slower
    full = estimate(recording, device(60 * MIB, (10 * MIB, 60 * MIB)))
    assert full.fits
    assert any("0 B are left" in reason for reason in full.reasons)


@pytest.mark.parametrize(("samples", "accumulate", "is_told"), [(64, 100, True), (64, 3, False), (None, 100, False)])
def test_an_epoch_that_ends_before_a_step_is_full_is_told(samples, accumulate, is_told):
    recording = told([], accumulate_grad_batches=accumulate, epoch_samples=samples)
    batches = str(math.ceil((samples or 0) / recording.batch_size))
    said = short_epoch(recording)
    assert bool(said) == is_told
    assert not said or {batches, str(accumulate)} <= {*said.split()}


def test_what_may_be_low_is_told_beside_the_bytes():
    found = estimate(told([], may_be_low=["kernels took more"]), device(GIB))
    assert "may be low: kernels took more" in found.reasons


def test_an_error_seen_in_measurements_widens_the_high_end():
    def above(ratio):
        return Residuals(count=3, highest=[("Other", "none", ratio, "run")])

    recording = training_recording()
    allocated = replay(recording).peak_allocated_bytes
    answer = estimate(recording, device(GIB, (100, 200)), residuals=above(1.1))
    assert answer.outside_bytes == (100, 200 + round(0.1 * allocated))
    assert any("10.0% above its prediction" in reason for reason in answer.reasons)
    hardly = estimate(recording, device(GIB, (100, 200)), residuals=above(1.0001))
    assert any("less than 0.1% above its prediction" in reason for reason in hardly.reasons)
    below = estimate(recording, device(GIB, (100, 200)), residuals=above(0.9))
    assert below.outside_bytes == (100, 200)


# -- the CPU


def test_on_the_cpu_reserved_bytes_are_allocated_bytes():
    answer = estimate(training_recording(rounding_bytes=1), device(GIB, (MIB, 2 * MIB), "cpu"))
    assert answer.device_allocated_bytes == answer.device_reserved_bytes == answer.device_reserved_expandable_bytes
    assert answer.verdict == "fits"
    short = estimate(training_recording(rounding_bytes=1), device(answer.device_allocated_bytes, (MIB, 2 * MIB), "cpu"))
    assert short.verdict == "does not fit"
    assert "expandable" not in short.reasons[0]


@pytest.mark.parametrize(("rounding", "kind"), [(512, "cpu"), (1, "cuda")])
def test_a_recording_made_for_another_kind_of_device_is_refused(rounding, kind):
    with pytest.raises(PlanError, match="record it anew"):
        estimate(training_recording(rounding_bytes=rounding), device(GIB, kind=kind))
