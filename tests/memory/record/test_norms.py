"""Norms of the CPU hold what is said, and their results are as they really are: layouts, number formats, strides."""

import itertools

import pytest
import torch
from torch.nn import functional

from kit.memory.record.fake_mode import FakeMode
from kit.memory.record.fakes import fake_values
from kit.memory.record.truth import AllocatorTrace
from kit.memory.record.workspace import workspace_bytes

aten = torch.ops.aten
A_FEW_BYTES = 1100  # counted for each channel
CHANNELS = 64


@pytest.fixture(autouse=True)
def _one_thread():
    torch.set_num_threads(1)


def images(layout, dtype):
    made = torch.empty(8, CHANNELS, 16, 16, dtype=dtype)
    if layout == "one number":
        return torch.ones((), dtype=dtype).expand(made.shape)
    if layout == "channels last":
        return made.to(memory_format=torch.channels_last)
    return torch.empty(8, 16, CHANNELS, 16, dtype=dtype).permute(0, 2, 3, 1) if layout == "turned" else made


def held(run):
    run()
    trace = AllocatorTrace()
    trace.start([])
    results = run()
    return trace.stop().peak_bytes - sum(one.nbytes for one in results if one is not None), results


LAYOUTS = ("plain", "channels last", "turned")
FORMATS = [(torch.float32, torch.float32), (torch.bfloat16, torch.float32), (torch.bfloat16, torch.bfloat16)]


@pytest.mark.parametrize("formats", FORMATS, ids=["float32", "mixed", "bfloat16"])
@pytest.mark.parametrize(("layout", "gradient"), [*itertools.product(LAYOUTS, (*LAYOUTS, "one number"))])
def test_a_batch_norm_holds_what_is_said(layout, gradient, formats):
    """Truth: the allocator's events."""
    values, ones = images(layout, formats[0]), torch.ones(CHANNELS, dtype=formats[1])
    args = (values, ones, ones, ones.clone(), ones.clone(), True, 0.1, 1e-5)
    bytes_held, results = held(lambda: aten.native_batch_norm(*args))
    assert workspace_bytes("native_batch_norm", args, results, None) == pytest.approx(bytes_held, abs=A_FEW_BYTES)
    args = (images(gradient, formats[0]), values, *args[1:2], *args[3:5], *results[1:], True, 1e-5, [True] * 3)
    bytes_held, results = held(lambda: aten.native_batch_norm_backward(*args))
    said = workspace_bytes("native_batch_norm_backward", args, results, None)
    assert said == pytest.approx(bytes_held, abs=A_FEW_BYTES)


def normed(norm, values, weight):
    if norm == "batch":
        return functional.batch_norm(values, None, None, weight, weight, True)
    if norm == "groups":
        return functional.group_norm(values, 4, weight, weight)
    return functional.layer_norm(values.transpose(1, -1), (CHANNELS,), weight, weight)


def looks(norm, layout, formats):
    """Number format, shape and strides of the result, of what autograd keeps for it and of both gradients."""
    kept = []
    values = (images(layout, formats[0]).sigmoid()).requires_grad_()
    weight = torch.ones(CHANNELS, dtype=formats[1], requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(lambda one: kept.append(one) or one, lambda one: one):
        result = normed(norm, values, weight)
    inner = torch.autograd.grad(result, values, torch.ones_like(result), retain_graph=True)[0]
    return [(one.dtype, tuple(one.shape), one.stride()) for one in (result, *kept, inner)]


@pytest.mark.parametrize("formats", FORMATS, ids=["float32", "mixed", "bfloat16"])
@pytest.mark.parametrize(("norm", "layout"), [*itertools.product(("batch", "groups", "rows"), LAYOUTS)])
def test_results_of_a_norm_look_as_its_kernel_makes_them(norm, layout, formats):
    real = looks(norm, layout, formats)
    with fake_values(), FakeMode():
        assert looks(norm, layout, formats) == real


def test_a_norm_of_turned_sequences_writes_them_in_order():
    """As in a batch norm between two transpositions, after which a linear layer copies what does not lie in order."""
    with fake_values(), FakeMode():
        turned = torch.empty(8, 16, CHANNELS).transpose(1, 2)
        assert functional.batch_norm(turned, None, None, training=True).is_contiguous()
    with fake_values(), FakeMode(is_cuda=True):
        turned = torch.empty(8, 16, CHANNELS).transpose(1, 2)
        assert not functional.batch_norm(turned, None, None, training=True).is_contiguous()


def test_statistics_of_rows_are_wide_on_a_gpu():
    with fake_values(), FakeMode(is_cuda=True):
        rows, weight = torch.empty(8, CHANNELS, dtype=torch.bfloat16), torch.ones(CHANNELS, dtype=torch.bfloat16)
        results = aten.native_layer_norm(rows, [CHANNELS], weight, weight, 1e-5)
    assert [one.dtype for one in results] == [torch.bfloat16, torch.float32, torch.float32]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_norm_of_rows_copies_what_does_not_lie_in_order(dtype):
    rows, weight = torch.empty(8, CHANNELS, 256, dtype=dtype).transpose(1, 2), torch.ones(CHANNELS, dtype=dtype)
    args = (rows, [CHANNELS], weight, weight, 1e-5)
    bytes_held, results = held(lambda: aten.native_layer_norm(*args))
    assert workspace_bytes("native_layer_norm", args, results, None) == pytest.approx(bytes_held, abs=A_FEW_BYTES)
    args = (torch.empty_like(rows), rows, [CHANNELS], *results[1:], weight, weight, [True] * 3)
    bytes_held, results = held(lambda: aten.native_layer_norm_backward(*args))
    said = workspace_bytes("native_layer_norm_backward", args, results, None)
    assert said == pytest.approx(bytes_held, abs=A_FEW_BYTES)
