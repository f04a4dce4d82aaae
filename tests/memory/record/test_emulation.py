"""The CUDA emulation as a whole: fused kernels, optimizers, switching, and no effect where the devices agree."""

import pytest
import torch
from emulation_parts import alive, emulated, fakes, kept_bytes, peak_bytes, record
from torch import nn
from torch.nn import functional
from torch.optim.optimizer import _default_to_fused_or_foreach

from kit.memory.record.cuda import cuda_emulation
from kit.memory.record.recorder import BlockRecorder
from kit.memory.replay.replay import PHASES

HALF, WHOLE = torch.bfloat16, torch.float16


class Mean(nn.Module):
    """A body and the mean of what it gives."""

    def __init__(self, *parts):
        super().__init__()
        self.body = nn.Sequential(*parts)

    def forward(self, values):
        return self.body(values).mean()


def perceptron():
    return Mean(nn.Linear(64, 256), nn.ReLU(), nn.LayerNorm(256), nn.Linear(256, 64))


def convolutions():
    return Mean(nn.Conv2d(3, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(16, 8, 3))


# -- one kernel for several


def test_dropout_keeps_one_byte_an_element():
    def kept():
        values = torch.randn(8, 1024, requires_grad=True)
        return kept_bytes(lambda: functional.dropout(values, 0.5, True), values)[0]

    with emulated():
        assert kept() == 8 * 1024
    with fakes():
        assert kept() == 4 * 8 * 1024


def test_dropout_that_drops_nothing_or_all_keeps_no_mask():
    with emulated():
        values = torch.randn(8, 16, requires_grad=True)
        assert kept_bytes(lambda: functional.dropout(values, 0.5, False), values)[0] == 0
        assert kept_bytes(lambda: functional.dropout(values, 0.0, True), values)[0] == 0
        assert functional.dropout(values, 1.0, True).shape == values.shape


@pytest.mark.parametrize(("dtype", "copies"), [(WHOLE, 0), (HALF, 1)])
def test_softmax_reads_float16_directly_and_bfloat16_through_a_copy(dtype, copies):
    with emulated(), BlockRecorder() as recorder:
        values = torch.randn(64, 128, dtype=dtype)
        recorder.begin_batch()
        functional.log_softmax(values, -1, dtype=torch.float32)
        recording = recorder.recording(64, 1)
    assert peak_bytes(recording) - values.nbytes == (1 + copies) * 4 * 64 * 128


def test_rms_norm_keeps_one_number_a_row():
    with emulated():
        values, weight = torch.randn(32, 64, requires_grad=True), torch.ones(64, requires_grad=True)
        kept, result = kept_bytes(lambda: functional.rms_norm(values, (64,), weight), values, weight)
        result.sum().backward()
    assert kept == 4 * 32
    assert weight.grad.shape == weight.shape


@pytest.mark.parametrize(("kind", "per_unit"), [(nn.LSTM, 6), (nn.GRU, 5), (nn.RNN, 1)])
@pytest.mark.parametrize(("precision", "size"), [(None, 4), (HALF, 2)])
def test_recurrent_layers_keep_one_reserve_and_say_that_it_is_an_estimate(kind, per_unit, precision, size):
    steps, batch, inputs, hidden, layers, directions = 16, 4, 32, 64, 2, 2
    with emulated(precision=precision) as emulation:
        layer = kind(inputs, hidden, layers, bidirectional=True)
        values = torch.randn(steps, batch, inputs)
        weights = list(layer.parameters())
        kept, (output, _) = kept_bytes(lambda: layer(values), values, *weights)
        output.sum().backward()
    reserve = per_unit * steps * batch * hidden * layers * directions * size
    outputs = steps * batch * hidden * directions * size
    states = (2 if kind is nn.LSTM else 1) * layers * directions * batch * hidden * size
    cast = (sum(weight.numel() for weight in weights) + values.numel()) * size if precision else 0
    assert kept == reserve + outputs + states + cast
    assert output.shape == (steps, batch, directions * hidden)
    assert all(weight.grad.dtype == torch.float32 and weight.grad.shape == weight.shape for weight in weights)
    assert any("estimate" in note for note in emulation.notes)


def test_packed_sequences_keep_what_their_steps_need():
    with emulated():
        layer = nn.LSTM(8, 16)
        packed = nn.utils.rnn.PackedSequence(torch.randn(10, 8), torch.tensor([4, 3, 2, 1]))
        start = (torch.zeros(1, 4, 16), torch.zeros(1, 4, 16))
        kept, (output, (last, cell)) = kept_bytes(
            lambda: layer(packed, start), packed.data, *start, *layer.parameters()
        )
    assert kept == 6 * 10 * 16 * 4 + 10 * 16 * 4
    assert (output.data.shape, last.shape, cell.shape) == ((10, 16), (1, 4, 16), (1, 4, 16))


# -- optimizers


def extra_in_the_optimizer(make, build=perceptron):
    """Most bytes alive beside what is kept, in the second optimizer step."""
    with emulated():
        module = build()
        optimizer = make(module.parameters())
        recording = record(module, lambda: [torch.randn(8, 64)], optimizer, steps=3)
    series = alive(recording)
    phases = torch.tensor(recording.operator_phase)[torch.tensor(recording.event_time).long()]
    last = torch.tensor(recording.event_time) > recording.batch_starts[-1]
    inside = series[(phases == PHASES.index("optimizer")) & last]
    return (int(inside.max() - inside[-1]) if len(inside) else 0), sum(p.nbytes for p in module.parameters())


def test_adamw_goes_over_all_parameters_at_once_by_default_as_on_a_gpu():
    extra, parameters = extra_in_the_optimizer(torch.optim.AdamW)
    assert extra == pytest.approx(parameters, rel=0.01)


def test_a_loop_holds_two_temporaries_of_one_parameter():
    extra, _ = extra_in_the_optimizer(lambda values: torch.optim.AdamW(values, foreach=False))
    assert extra == pytest.approx(2 * 4 * 64 * 256, rel=0.01)


def test_fused_adamw_and_sgd_need_nothing_more():
    for make in (
        lambda values: torch.optim.AdamW(values, fused=True),
        lambda values: torch.optim.SGD(values, lr=0.1),
        lambda values: torch.optim.SGD(values, lr=0.1, momentum=0.9),
    ):
        extra, parameters = extra_in_the_optimizer(make)
        assert extra <= 0.01 * parameters


def test_a_loss_scaler_steps_though_a_fake_gradient_overflows():
    with emulated(precision=WHOLE):
        module = perceptron()
        scaler = torch.amp.GradScaler("cpu")
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9)
        scaler.scale(module(torch.randn(4, 64))).backward()
        scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
    assert len(optimizer.state) == len(list(module.parameters()))


# -- switching


def test_several_configurations_are_recorded_one_after_the_other_in_one_process():
    def attended(capability, attention):
        with emulated(capability, attention) as emulation:
            query = torch.randn(1, 2, 16, 64, dtype=HALF)
            functional.scaled_dot_product_attention(query, query, query)
        return dict(emulation.attention)

    cases = [((8, 0), "auto"), ((9, 0), "auto"), ((8, 0), "math"), ((8, 0), "auto"), ((7, 5), "auto")]
    assert [attended(*case) for case in cases] == [{"flash": 1}, {"cudnn": 1}, {"math": 1}, {"flash": 1}, {"math": 1}]


def test_blocks_do_not_nest_and_a_failure_inside_leaves_nothing_behind():
    with pytest.raises(ZeroDivisionError), cuda_emulation((8, 0)):
        with pytest.raises(RuntimeError, match="emulated already"), cuda_emulation((9, 0)):
            pass
        raise ZeroDivisionError
    assert set(functional.dropout(torch.ones(1000), 0.5, True).tolist()) == {0.0, 2.0}
    with fakes():
        assert _default_to_fused_or_foreach([torch.ones(1)], False) == (False, False)


@pytest.mark.parametrize(("build", "shape"), [(perceptron, (8, 64)), (convolutions, (4, 3, 16, 16))])
def test_in_32_bits_a_step_is_the_same_with_and_without(build, shape):
    """Of perceptrons and convolutions CUDA and the CPU keep the same: the emulation must not change one byte."""
    recordings = []
    for context in (emulated, fakes):
        with context():
            module = build()
            optimizer = torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9, foreach=True)
            recordings.append(record(module, lambda: [torch.randn(*shape)], optimizer))
    one, other = recordings
    assert peak_bytes(one) == peak_bytes(other) > 0
    assert one.block_bytes.tolist() == other.block_bytes.tolist()
