"""What calls do, by hand and beside torch's own counter, and calls at another batch size."""

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from kit.errors import PlanError
from kit.memory.record.recorder import BlockRecorder
from kit.memory.replay.calls import OperatorCall, TensorSpec, calls_at
from kit.memory.replay.replay import Recording
from kit.memory.replay.scaling import BatchScaling
from kit.speed.operators import step_of
from kit.speed.work import work_of


class Mixed(torch.nn.Module):
    """A convolution, a transposed one, attention, products and an LSTM."""

    def __init__(self):
        super().__init__()
        self.down = torch.nn.Conv2d(4, 8, 3, stride=2, padding=1)
        self.up = torch.nn.ConvTranspose2d(8, 4, 2, stride=2)
        self.attention = torch.nn.Linear(16, 48)
        self.head = torch.nn.Linear(16, 3)

    def forward(self, images):
        values = self.up(self.down(images)).flatten(2)
        query, key, value = self.attention(values).chunk(3, -1)
        mixed = torch.nn.functional.scaled_dot_product_attention(query, key, value, is_causal=False)
        return self.head(mixed).square().mean()


def recorded(batch=4, steps=2):
    torch.manual_seed(0)
    module, recorder = Mixed(), BlockRecorder()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    with recorder:
        recorder.track(module)
        for _ in range(steps):
            recorder.begin_batch()
            loss = module(torch.ones(batch, 4, 4, 4))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    return recorder.recording(batch, 1, {"accumulate_grad_batches": 1, "parameters": 100})


@pytest.fixture(scope="module")
def recording():
    return recorded()


def test_flops_are_those_of_torchs_own_counter(recording):
    module = Mixed()
    with FlopCounterMode(display=False) as counter:
        module(torch.ones(4, 4, 4, 4)).backward()
    assert step_of(recording).flops == counter.get_total_flops()


def test_the_operators_of_one_step_are_named_by_part_and_phase(recording):
    step = step_of(recording)
    parts = {step.names[number] for number in step.module.tolist()}
    assert {"down", "up", "attention", "head"} <= parts
    assert len(step.call) < len(recording.operator_name)
    assert step.counts.sum() == len(step.call)


def test_of_many_micro_batches_the_later_ones_are_alike(recording):
    facts = recording.facts | {"accumulate_grad_batches": 5}
    story = Recording(
        **{
            **vars(recording),
            "facts": facts,
            "batch_starts": (*recording.batch_starts[:1], 2, 3, recording.batch_starts[1]),
        }
    )
    step = step_of(story)
    assert set(step.repeats.tolist()) == {1, 4}
    assert step.samples == 5 * story.batch_size


def test_calls_are_kept_on_disk_and_come_back_equal(recording, tmp_path):
    recording.save(tmp_path / "a.npz")
    again = Recording.load(tmp_path / "a.npz")
    assert step_of(again).calls == step_of(recording).calls
    assert [OperatorCall.of(call.to_json()) for call in step_of(again).calls] == list(step_of(again).calls)


def test_a_recording_of_before_has_no_calls_and_says_so(recording):
    old = Recording(**{**vars(recording), "calls": (), "operator_call": recording.operator_call[:0]})
    with pytest.raises(PlanError, match="record anew"):
        step_of(old)


def test_two_recordings_give_the_calls_at_a_third_batch():
    scaled = BatchScaling(recorded(2), recorded(3)).at(7)
    mine, theirs = step_of(scaled), step_of(recorded(7))
    assert mine.flops == theirs.flops
    assert [mine.calls[place] for place in mine.call] == [theirs.calls[place] for place in theirs.call]


def test_calls_that_differ_in_more_than_numbers_are_refused():
    with pytest.raises(PlanError, match="one recording"):
        calls_at([(["aten::add", ["a"], [], []], ["aten::add", [2], [], []])], 1.0)


def test_a_view_moves_nothing_and_an_expanded_tensor_holds_what_it_holds():
    spec = TensorSpec((8, 1024), "float32", (0, 1))
    assert spec.bytes == 4096
    assert work_of(OperatorCall("aten::view", (spec,), (), (spec,))).bytes == 0
    table, found = TensorSpec((100_000, 8), "float32"), TensorSpec((4, 8), "float32")
    assert work_of(OperatorCall("aten::embedding", (table, TensorSpec((4,), "int64")), (), (found,))).bytes < 1000


def test_a_shard_is_copied_to_its_place_in_what_is_gathered_and_nothing_else():
    shards, whole = (TensorSpec((1000,), "float32"), TensorSpec((24,), "float32")), TensorSpec((8192,), "float32")
    place = TensorSpec((1024,), "float32")
    gather = OperatorCall("fsdp::all_gather_copy_in", (shards, whole), (), (place, whole))
    assert (work_of(gather).read_bytes, work_of(gather).written_bytes) == (4096, 4096)
    out = OperatorCall("fsdp::split_with_sizes_copy", (whole,), (("out", (whole,)),), ())
    assert work_of(out).bytes == 2 * 32768
