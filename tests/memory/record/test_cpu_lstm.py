import pytest
import torch
from properties import crossed

from kit.memory.record.fakes import ONEDNN_HALF, lstm_layer, workspace_bytes
from kit.memory.record.truth import AllocatorTrace
from kit.memory.record.workspace import workspace_bytes as scratch_bytes

pytestmark = pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="torch is built without oneDNN")

BFLOAT16 = ONEDNN_HALF[torch.bfloat16]()
DTYPES = [torch.float32, torch.bfloat16] if BFLOAT16 else [torch.float32]
SHAPES = [(1, 32, 16, 512), (64, 2, 16, 256), (7, 3, 5, 10), (10, 4, 8, 100), (16, 8, 1024, 64), (33, 5, 77, 300)]


def layer(steps, batch, features, width, dtype):
    """The arguments torch gives to one layer of an LSTM in training."""
    module = torch.nn.LSTM(features, width).to(dtype)
    weights = [weight.detach() for weight in module.parameters()]
    values = torch.zeros(steps, batch, features, dtype=dtype)
    state = torch.zeros(batch, width, dtype=dtype)
    return (values, *weights, state, state.clone(), False, [], 2, width, 1, True, False, False, True)


@pytest.mark.parametrize(("dtype", "shape"), crossed(DTYPES, SHAPES))
def test_the_workspace_is_what_onednn_keeps_to_the_byte(shape, dtype):
    kept = torch.ops.aten.mkldnn_rnn_layer(*layer(*shape, dtype))[3]
    assert workspace_bytes(*shape, dtype.itemsize) == kept.nbytes


def test_the_fake_layer_returns_what_the_real_one_does():
    arguments = layer(6, 2, 3, 8, torch.float32)
    real, fake = torch.ops.aten.mkldnn_rnn_layer(*arguments), lstm_layer(None, None, *arguments)
    assert [(one.shape, one.dtype) for one in fake] == [(one.shape, one.dtype) for one in real]


def test_without_a_backward_pass_nothing_is_kept():
    arguments = layer(6, 2, 3, 8, torch.float32)
    assert lstm_layer(None, None, *arguments[:-1], False)[3].nbytes == 0


@pytest.mark.skipif(BFLOAT16, reason="this CPU has an LSTM in bfloat16")
def test_where_there_is_none_in_half_precision_both_refuse_to_train():
    arguments = layer(6, 2, 3, 8, torch.bfloat16)
    with pytest.raises(RuntimeError, match="LSTM"):
        torch.ops.aten.mkldnn_rnn_layer(*arguments)
    with pytest.raises(RuntimeError, match="32-true"):
        lstm_layer(None, None, *arguments)


def held_meanwhile(operator, arguments):
    """Bytes that the allocator held during the call, beyond what is left of it; and what it returned."""
    trace = AllocatorTrace()
    trace.start(torch.zeros(1))
    out = operator(*arguments)
    held = trace.stop().allocated_bytes
    return int(held.max() - held[-1]), out


def ones(like, turned):
    """Contiguous, or as a gradient comes out of a layer that has the batch first."""
    return torch.ones_like(like.transpose(0, 1).contiguous()).transpose(0, 1) if turned else torch.ones_like(like)


@pytest.mark.parametrize(
    ("turned", "dtype", "shape"),
    crossed(
        [False, True],
        DTYPES,
        [(16, 32, 16, 512), (32, 8, 256, 256), (10, 4, 8, 100), (16, 8, 1024, 64), (256, 4, 16, 64)],
    ),
)
def test_what_both_passes_hold_meanwhile_is_foreseen(shape, dtype, turned):
    arguments = layer(*shape, dtype)
    held, (output, state, cell, kept) = held_meanwhile(torch.ops.aten.mkldnn_rnn_layer, arguments)
    foreseen = scratch_bytes("mkldnn_rnn_layer", arguments, None, None)
    assert foreseen == pytest.approx(held, rel=0.05, abs=40 << 10)
    values, *weights, before, cell_before = arguments[:7]
    gradients = [ones(output, turned), torch.ones_like(state), torch.ones_like(cell)]
    arguments = (values, *weights, before, cell_before, output, state, cell, *gradients)
    arguments += (False, 2, shape[3], 1, True, True, False, [], False, kept)
    held, _ = held_meanwhile(torch.ops.aten.mkldnn_rnn_layer_backward, arguments)
    foreseen = scratch_bytes("mkldnn_rnn_layer_backward", arguments, None, None)
    assert foreseen == pytest.approx(held, rel=0.05, abs=40 << 10)
