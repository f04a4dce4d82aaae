import contextlib

import numpy as np
import pytest
import torch
from dry_parts import at_peak, peak, series
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.optim import optimizer as optimizers
from torch.utils.checkpoint import checkpoint

from kit.memory.record.recorder import BlockRecorder, tensors_in
from kit.memory.replay.replay import CATEGORIES, PHASES

LAYERS = 64 * 256 + 256 + 256 * 64 + 64
FLOAT = 4


def train(recorder, steps=2, fake=True, batch=32, **options):
    """A perceptron, trained by a plain loop inside `recorder`."""
    with FakeTensorMode() if fake else contextlib.nullcontext(), recorder:
        module = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64))
        optimizer = torch.optim.AdamW(module.parameters(), **options)
        recorder.track(module)
        for _ in range(steps):
            recorder.begin_batch()
            with recorder.labelled("inputs"):
                x = torch.ones(batch, 64)
            loss = module(x).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            del loss, x
    return recorder.recording(batch, 1)


def of(recording, category):
    return recording.block_category == CATEGORIES.index(category)


def names(recording, column, rows):
    return {recording.names[index] for index in column[rows]}


def test_fake_and_real_tensors_give_the_same_recording():
    fake, real = train(BlockRecorder()), train(BlockRecorder(), fake=False)
    for name in ("block_bytes", "block_category", "block_phase", "event_block", "event_allocates", "event_time"):
        np.testing.assert_array_equal(getattr(fake, name), getattr(real, name))
    for name in ("block_module", "operator_name", "operator_module"):
        one, other = ([each.names[index] for index in getattr(each, name)] for each in (fake, real))
        assert one == other


def test_what_a_module_and_its_optimizer_hold_is_known_in_closed_form():
    recording = train(BlockRecorder())
    assert recording.block_bytes[of(recording, "parameters")].sum() == LAYERS * FLOAT
    assert recording.block_bytes[of(recording, "gradients")].sum() == 2 * LAYERS * FLOAT  # those of two steps
    steps = 4 * FLOAT  # AdamW counts them in a tensor for each parameter
    assert recording.block_bytes[of(recording, "optimizer_state")].sum() == 2 * LAYERS * FLOAT + steps
    assert recording.block_bytes[of(recording, "inputs")].sum() == 2 * 32 * 64 * FLOAT


def test_activations_are_what_the_backward_pass_needs_and_no_more():
    recording = train(BlockRecorder())
    kept = recording.block_bytes[of(recording, "activations")].tolist()
    # Per step: the input of GELU and its output, the output that is squared, and the loss.
    assert sorted(kept) == sorted(2 * [32 * 256 * FLOAT, 32 * 256 * FLOAT, 32 * 64 * FLOAT, FLOAT])


def test_each_block_is_allocated_once_and_freed_at_most_once_afterwards():
    recording = train(BlockRecorder())
    alive, seen = set(), set()
    for block, allocates in zip(recording.event_block.tolist(), recording.event_allocates, strict=True):
        if allocates:
            assert block not in seen
            alive.add(block)
        else:
            alive.remove(block)
        seen.add(block)
    assert (np.diff(recording.event_time) >= 0).all()
    assert series(recording)[-1] == sum(recording.block_bytes[list(alive)])


def test_breakdown_at_the_peak_adds_up():
    recording = train(BlockRecorder())
    assert sum(at_peak(recording).values()) == peak(recording)


def test_a_backward_operator_belongs_to_the_part_whose_forward_made_its_node():
    recording = train(BlockRecorder())
    name = recording.names.index("gelu_backward")
    rows = np.flatnonzero(recording.operator_name == name)
    assert names(recording, recording.operator_module, rows) == {"1"}
    assert {PHASES[phase] for phase in recording.operator_phase[rows]} == {"backward"}


def test_a_gradient_belongs_to_the_part_that_holds_its_parameter():
    recording = train(BlockRecorder())
    assert names(recording, recording.block_module, of(recording, "gradients")) == {"0", "2"}


def test_phases_are_found_without_being_told():
    recording = train(BlockRecorder())
    ran = {PHASES[phase]: set() for phase in recording.operator_phase}
    for name, phase in zip(recording.operator_name, recording.operator_phase, strict=True):
        ran[PHASES[phase]].add(recording.names[name])
    assert "addmm" in ran["forward"]
    assert "gelu_backward" in ran["backward"]
    assert "addcdiv_" in ran["optimizer"]


def test_a_closure_runs_in_its_own_phases():
    recorder = BlockRecorder()
    with FakeTensorMode(), recorder:
        module = nn.Linear(8, 8)
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9)
        recorder.track(module)
        recorder.begin_batch()

        def closure():
            loss = module(torch.ones(4, 8)).sum()
            loss.backward()
            recorder.begin_optimizer()
            return loss

        optimizer.step(closure)
    recording = recorder.recording(4, 1)
    forward = recording.operator_phase[recording.operator_name == recording.names.index("addmm")]
    assert {PHASES[phase] for phase in forward} == {"forward"}
    assert recorder.optimizer_steps[id(optimizer)] == 1
    assert of(recording, "optimizer_state").sum() == 2


def test_set_up_counts_what_is_left_of_it():
    recorder = BlockRecorder()
    with FakeTensorMode(), recorder:
        gone = torch.ones(1 << 20)
        del gone
        kept = torch.ones(1000)
        recorder.begin_batch()
    recording = recorder.recording(1, 1)
    assert recording.block_bytes.tolist() == [4000]
    assert at_peak(recording) == {"buffers": 4000}
    assert kept.shape == (1000,)


def test_labels_nest_and_reach_resized_storages():
    recorder = BlockRecorder()
    with FakeTensorMode(), recorder:
        recorder.begin_batch()
        with recorder.labelled("communication"):
            outer = torch.empty(100)
            with recorder.labelled("gathered_parameters"):
                inner = torch.empty(100)
                outer.untyped_storage().resize_(0)
                outer.untyped_storage().resize_(800)
    recording = recorder.recording(1, 1)
    assert [CATEGORIES[category] for category in recording.block_category] == [
        "communication",
        "gathered_parameters",
        "gathered_parameters",
        "gathered_parameters",
    ]
    assert recording.block_bytes.tolist() == [400, 400, 0, 800]
    assert peak(recording) == 1200
    assert inner.shape == (100,)


def test_views_and_operators_in_place_allocate_nothing():
    recorder = BlockRecorder()
    with FakeTensorMode(), recorder:
        recorder.begin_batch()
        tensor = torch.empty(10, 10)
        views = [tensor.T, tensor[0], tensor.view(100), tensor.add_(1)]
    assert recorder.recording(1, 1).block_bytes.tolist() == [400]
    assert len(views) == 4


def test_the_host_does_not_count():
    recorder = BlockRecorder()
    with FakeTensorMode(), recorder:
        recorder.begin_batch()
        with recorder.paused():
            batch = torch.empty(100)
        recorder.ignore(batch)
        view = batch[:50]
        assert not recorder.knows(view)
        copy = view.clone()
        assert recorder.knows(copy)
        recorder.note(copy, "inputs")
        meta = torch.empty(1 << 30, device="meta")
    recording = recorder.recording(1, 1)
    assert recording.block_bytes.tolist() == [200]
    assert at_peak(recording) == {"inputs": 200}
    assert meta.device.type == "meta"


def test_a_gpu_that_is_asked_for_by_name_is_the_device_there_is():
    with FakeTensorMode(), BlockRecorder():
        assert torch.zeros(2, device="cuda").device.type == "cpu"


def test_a_workspace_is_there_while_its_kernel_runs():
    recorder = BlockRecorder(workspace=lambda operator, args, out: 1000 if operator == "mm" else 0)
    with FakeTensorMode(), recorder:
        recorder.begin_batch()
        out = torch.empty(4, 4) @ torch.empty(4, 4)
    recording = recorder.recording(1, 1)
    assert at_peak(recording) == {"temporaries": 3 * 64, "workspace": 1000}
    assert series(recording)[-1] <= 3 * 64
    assert out.shape == (4, 4)


def test_state_that_outlives_its_batch_is_kept_by_somebody():
    recorder = BlockRecorder()
    with FakeTensorMode(), recorder:
        recorder.begin_batch()
        average = torch.zeros(100)
        recorder.begin_batch()
        gone = torch.zeros(50)
        del gone
    recording = recorder.recording(1, 1)
    assert [CATEGORIES[category] for category in recording.block_category] == ["buffers", "temporaries"]
    assert average.shape == (100,)


def test_a_gradient_penalty_is_a_part_of_the_forward_pass():
    recorder = BlockRecorder()
    with FakeTensorMode(), recorder:
        module = nn.Linear(8, 1, bias=False)
        recorder.track(module)
        recorder.begin_batch()
        x = torch.ones(4, 8, requires_grad=True)
        (slope,) = torch.autograd.grad(module(x).square().sum(), x, create_graph=True)
        slope.square().sum().backward()
    recording = recorder.recording(4, 1)
    first = recording.names.index("mm")
    phases = [PHASES[phase] for phase in recording.operator_phase[recording.operator_name == first]]
    assert phases[:2] == ["forward", "forward"]
    assert phases[-1] == "backward"


def test_nothing_is_recorded_after_the_end():
    recorder = BlockRecorder()
    with FakeTensorMode(), recorder:
        recorder.begin_batch()
        tensor = torch.empty(100)
        recorder.stop()
        later = torch.empty(100)
        recorder.note(later, "inputs")
        del tensor
    assert recorder.recording(1, 1).event_allocates.tolist() == [True]


def test_a_recording_without_a_batch_is_refused():
    with pytest.raises(ValueError, match="begin_batch"):
        BlockRecorder().recording(1, 1)


def test_leaving_puts_every_entry_point_back():
    before = torch.autograd.backward, torch.autograd.grad, torch.UntypedStorage.resize_
    hooks = nn.modules.module._global_forward_hooks, optimizers._global_optimizer_pre_hooks
    with BlockRecorder():
        assert torch.autograd.backward is not before[0]
    assert (torch.autograd.backward, torch.autograd.grad, torch.UntypedStorage.resize_) == before
    assert "resize_" not in vars(torch.UntypedStorage)
    assert not any(hooks)


def test_an_operator_that_fails_is_remembered():
    recorder = BlockRecorder()
    with FakeTensorMode(), recorder, pytest.raises(RuntimeError) as caught:
        torch.empty(2, 3) @ torch.empty(2, 3)
    assert recorder.failed == (caught.value, torch.ops.aten.mm.default)


def test_tensors_are_found_in_nested_results():
    first, second = torch.zeros(1), torch.zeros(2)
    assert [len(tensor) for tensor in tensors_in({"a": [first, (second, None)], "b": 3})] == [1, 2]


@pytest.mark.parametrize("reentrant", [False, True])
def test_what_a_backward_pass_runs_again_is_told_apart(reentrant):
    recorder = BlockRecorder()
    with FakeTensorMode(), recorder:
        parts = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8)) for _ in range(3))
        recorder.track(parts)
        for _ in range(2):
            recorder.begin_batch()
            x = torch.ones(4, 8, requires_grad=True)
            for number, part in enumerate(parts):
                x = part(x) if number == 1 else checkpoint(part, x, use_reentrant=reentrant)
            (slope,) = torch.autograd.grad(parts[1](x).sum(), x, create_graph=True)
            (x.square().mean() + slope.square().sum()).backward()
    recording = recorder.recording(4, 1)
    again = recording.operator_recomputes > 0
    assert (recording.operator_phase[again] == PHASES.index("backward")).all()
    assert names(recording, recording.operator_name, again) >= {"addmm", "tanh"}
    assert set(recording.operator_recomputes.tolist()) == {0, 1, 2, 3, 4}  # two parts in each of two batches
    tanh = recording.operator_name == recording.names.index("tanh")
    assert (tanh & again).sum() == 2 * 2


def test_a_graph_that_ran_again_is_not_held_by_the_recorder():
    recorder = BlockRecorder()
    with FakeTensorMode(), recorder:
        part = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8))
        recorder.track(part)
        recorder.begin_batch()
        loss = checkpoint(part, torch.ones(4, 8), use_reentrant=False).square().mean()
        loss.backward(retain_graph=True)
        del loss
        part.zero_grad()
    recording = recorder.recording(4, 1)
    freed = recording.event_block[~recording.event_allocates]
    assert np.isin(np.flatnonzero(of(recording, "activations")), freed).all()
