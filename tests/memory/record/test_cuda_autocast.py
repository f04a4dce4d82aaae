"""CUDA's autocast lists: equal to torch's own, and at work on fake CPU tensors."""

import gc
import re
from pathlib import Path

import pytest
import torch
from emulation_parts import emulated, fakes, kept_bytes
from torch import nn
from torch.nn import functional

from kit.memory.record import cuda
from kit.memory.record.cuda import FLOAT32, FLOAT32_NORM, FLOAT32_RESULT, LOWER_PRECISION, PROMOTE, REFUSED, registered

HALF = torch.bfloat16


def listed_in_torch(macro):
    """Operators of one macro of `ATen/autocast_mode.h`."""
    header = (Path(torch.__file__).parent / "include/ATen/autocast_mode.h").read_text()
    (body,) = re.findall(rf"#define AT_FORALL_{macro}\(_\)\s*\\\n((?:.*\\\n)*.*)", header)
    names = re.findall(r"_\((\w+)(?:,\s*(\w+))?\)", body)
    return {f"{name}.{overload}" if overload else name for name, overload in names}


@pytest.mark.parametrize(
    ("macro", "ours", "only_in_the_source_file"),
    [
        ("LOWER_PRECISION_FP", LOWER_PRECISION, {"cudnn_convolution", "cudnn_convolution_transpose"}),
        ("FP32", FLOAT32, set()),
        ("FP32_SET_OPT_DTYPE", FLOAT32_RESULT, set()),
        ("PROMOTE", PROMOTE, set()),
    ],
)
def test_each_list_is_that_of_torchs_header(macro, ours, only_in_the_source_file):
    assert set(ours) - only_in_the_source_file == listed_in_torch(macro)
    assert len(ours) == len(set(ours))


def test_together_they_are_what_torch_registers_for_cuda():
    ours = [*LOWER_PRECISION, *FLOAT32, *FLOAT32_RESULT, *FLOAT32_NORM, *PROMOTE, *REFUSED]
    of_builds_for_cuda = {"_cudnn_rnn"}  # emulated, with its casts, where `lstm` and its like are
    assert sorted(ours) == sorted(registered("AutocastCUDA") - of_builds_for_cuda)


def test_casts_left_to_the_cpus_kernels_are_casts_of_both():
    both = registered("AutocastCPU") & set(LOWER_PRECISION)
    assert both >= cuda._SAME_ON_CPU


def results():
    """Type of the result of operators whose lists differ between the devices, from half-precision values."""
    half, wide = torch.ones(4, 4, dtype=HALF), torch.ones(4, 4)
    return {
        "layer_norm": functional.layer_norm(half, (4,)),
        "group_norm": functional.group_norm(half, 2),
        "softmax": functional.softmax(half, -1),
        "log_softmax": functional.log_softmax(half, -1),
        "sum": half.sum(),
        "sum over axes": half.sum((0, 1)),
        "cumsum": half.cumsum(0),
        "prod": half.prod(),
        "pow": half.pow(2),
        "exp": half.exp(),
        "norm": half.norm(),
        "norm of an axis": half.norm(2, dim=1),
        "vector_norm": torch.linalg.vector_norm(half),
        "gelu": functional.gelu(half),
        "cat": torch.cat([half, half]),
        "avg_pool3d": functional.avg_pool3d(half[None, None, None], (1, 2, 2)),
        "einsum": torch.einsum("ij,jk->ik", wide, wide),
        "mv": wide.mv(wide[0]),
        "matmul": wide @ wide,
        "addcmul": torch.addcmul(half, half, half),
        "addcmul of mixed types": torch.addcmul(half, wide, half),
        "cross_entropy": functional.cross_entropy(half, torch.zeros(4, dtype=torch.long)),
        "mse": functional.mse_loss(half, half),
    }


def test_types_of_results_are_cudas():
    with emulated(precision=HALF):
        types = {name: value.dtype for name, value in results().items()}
    in_half = ("gelu", "cat", "avg_pool3d", "einsum", "mv", "matmul", "addcmul")
    assert types == {name: HALF if name in in_half else torch.float32 for name in types}


def test_afterwards_the_cpus_own_lists_are_back():
    with fakes(), torch.autocast("cpu", HALF):
        before = {name: value.dtype for name, value in results().items()}
    kernels = registered("AutocastCPU")
    with emulated(precision=HALF):
        results()
    with fakes(), torch.autocast("cpu", HALF):
        assert {name: value.dtype for name, value in results().items()} == before
    assert registered("AutocastCPU") == kernels
    assert before["layer_norm"] == HALF


def test_a_linear_layer_keeps_half_copies_of_its_input_and_its_weight():
    with emulated(precision=HALF):
        values, layer = torch.randn(32, 16, requires_grad=True), nn.Linear(16, 8)
        kept, result = kept_bytes(lambda: layer(values), values, layer.weight)
    assert kept == 2 * 32 * 16 + 2 * 16 * 8
    assert result.dtype == HALF


def test_a_layer_norm_keeps_its_input_in_float32_on_cuda_only():
    def kept():
        values, weight = torch.randn(32, 16, dtype=HALF, requires_grad=True), torch.ones(16, requires_grad=True)
        return kept_bytes(lambda: functional.layer_norm(values, (16,), weight), weight)[0]

    with emulated(precision=HALF):
        assert kept() == 4 * 32 * 16 + 2 * 4 * 32
    with fakes(), torch.autocast("cpu", HALF):
        assert kept() < 4 * 32 * 16


def test_a_weight_is_cast_once_in_a_region_and_forgotten_after_it():
    with emulated(precision=HALF):
        weight, values = torch.randn(16, 16, requires_grad=True), torch.randn(16, requires_grad=True) * 1
        kept, _ = kept_bytes(lambda: [weight.mv(values) for _ in range(3)], weight)
        assert kept == 2 * 16 * 16 + 3 * 2 * 16
        assert len(_casts_of(weight)) == 1
        with torch.autocast("cpu", enabled=False):
            assert weight.mv(values).dtype == torch.float32
    with emulated(precision=HALF):
        assert _casts_of(weight) == []


def _casts_of(weight):
    """What is kept of casts of `weight` now."""
    holders = [item for item in gc.get_objects() if type(item) is cuda._Casts]
    return [kept for holder in holders for kept in holder._kept.values() if kept[0]() is weight]


def test_binary_cross_entropy_is_refused_as_on_a_gpu():
    with emulated(precision=HALF), pytest.raises(RuntimeError, match="binary_cross_entropy_with_logits"):
        functional.binary_cross_entropy(torch.rand(4), torch.ones(4))


def test_without_autocast_nothing_is_cast():
    with emulated():
        types = {name: value.dtype for name, value in results().items() if name not in ("addcmul of mixed types",)}
    assert types["layer_norm"] == types["sum"] == HALF
    assert types["matmul"] == torch.float32
