"""Which attention kernel a GPU takes, and what it keeps."""

import contextlib
import math

import pytest
import torch
from emulation_parts import emulated, fakes, kept_bytes
from torch import nn
from torch.nn import functional
from torch.nn.attention import SDPBackend, flex_attention, sdpa_kernel
from torch.utils.checkpoint import checkpoint

from kit.memory.record.cuda import cuda_emulation
from kit.memory.record.fake_mode import FakeMode
from kit.memory.record.fakes import fake_values
from kit.memory.record.recorder import BlockRecorder
from kit.memory.record.truth import AllocatorTrace
from kit.memory.record.workspace import Workspaces

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32


def heads(dtype=BF16, batch=2, count=4, length=128, head=64):
    return torch.randn(batch, count, length, head, dtype=dtype, requires_grad=True)


def kernel_of(query, key=None, value=None, capability=(8, 0), attention="auto", **options):
    """The kernel one call takes; tensors are made by functions, so that they are fake."""
    with emulated(capability, attention) as emulation:
        made = query()
        functional.scaled_dot_product_attention(
            made,
            (key or query)(),
            (value or key or query)(),
            **{k: v() if callable(v) else v for k, v in options.items()},
        )
    (kernel,) = emulation.attention
    return kernel


@pytest.mark.parametrize(
    ("capability", "dtype", "kernel"),
    [
        ((8, 0), BF16, "flash"),
        ((8, 0), FP16, "flash"),
        ((8, 0), FP32, "efficient"),
        ((8, 9), BF16, "flash"),
        ((9, 0), BF16, "cudnn"),
        ((9, 0), FP32, "efficient"),
        ((10, 0), FP16, "cudnn"),
        ((12, 0), BF16, "flash"),
        ((7, 5), FP16, "efficient"),
        ((7, 5), BF16, "math"),
        ((7, 5), FP32, "efficient"),
        ((7, 0), FP16, "efficient"),
        ((8, 0), torch.float64, "math"),
    ],
)
def test_type_and_card_decide(capability, dtype, kernel):
    assert kernel_of(lambda: heads(dtype), capability=capability) == kernel


@pytest.mark.parametrize(
    ("head", "dtype", "capability", "kernel"),
    [
        (256, BF16, (8, 0), "flash"),
        (264, BF16, (8, 0), "efficient"),
        (20, BF16, (8, 0), "flash"),
        (20, FP32, (8, 0), "efficient"),
        (18, FP32, (8, 0), "math"),
        (18, FP32, (7, 5), "efficient"),
        (264, FP16, (7, 5), "efficient"),
        (20, FP16, (7, 5), "math"),
        (208, BF16, (8, 9), "efficient"),
        (256, BF16, (8, 9), "flash"),
        (128, BF16, (9, 0), "cudnn"),
        (160, BF16, (9, 0), "flash"),
        (20, BF16, (9, 0), "flash"),
    ],
)
def test_head_size_decides(head, dtype, capability, kernel):
    assert kernel_of(lambda: heads(dtype, head=head), capability=capability) == kernel


def test_a_mask_rules_flash_out_and_cudnn_takes_it():
    mask = {"attn_mask": lambda: torch.ones(128, 128, dtype=torch.bool)}
    assert kernel_of(heads, **mask) == "efficient"
    assert kernel_of(heads, capability=(9, 0), **mask) == "cudnn"


def test_dropout_of_a_sixteenth_is_cudnns_and_others_are_not():
    assert kernel_of(heads, capability=(9, 0), dropout_p=0.125) == "cudnn"
    assert kernel_of(heads, capability=(9, 0), dropout_p=0.1) == "flash"


def test_large_heads_with_dropout_cannot_be_trained_by_flash_on_small_cards():
    assert kernel_of(lambda: heads(head=256), capability=(8, 6), dropout_p=0.1) == "efficient"
    assert kernel_of(lambda: heads(head=256).detach(), capability=(8, 6), dropout_p=0.1) == "flash"


def test_unequal_causal_lengths_are_not_for_flash():
    longer = {"key": lambda: heads(length=256)}
    assert kernel_of(heads, **longer) == "flash"
    assert kernel_of(heads, **longer, is_causal=True) == "efficient"


def test_three_dimensions_broadcast_heads_and_strided_rows_are_for_math():
    assert kernel_of(lambda: torch.randn(8, 16, 64, dtype=BF16)) == "math"
    assert kernel_of(heads, key=lambda: heads(count=1)) == "math"
    assert kernel_of(lambda: heads(length=64).transpose(-1, -2)) == "math"


def test_grouped_heads_stay_with_flash_when_asked_for():
    assert kernel_of(heads, key=lambda: heads(count=2), enable_gqa=True) == "flash"


def test_the_lever_and_torchs_switches_are_obeyed():
    for name in ("math", "efficient", "flash", "cudnn"):
        assert kernel_of(heads, attention=name) == name
    assert kernel_of(heads, attention="cudnn", dropout_p=0.1) == "flash"
    with sdpa_kernel(SDPBackend.EFFICIENT_ATTENTION):
        assert kernel_of(heads) == "efficient"
        with pytest.raises(RuntimeError, match=r"no attention kernel .*efficient: .*float64"):
            kernel_of(lambda: heads(torch.float64))


def test_the_reason_is_told():
    with emulated() as emulation:
        query = heads(FP32)
        functional.scaled_dot_product_attention(query, query, query)
        functional.scaled_dot_product_attention(query, query, query)
    (note,) = emulation.notes
    assert note.startswith("attention: efficient × 2 (not flash")
    assert "float32" in note


@pytest.mark.parametrize(("capability", "attention"), [((8, 0), "flash"), ((8, 0), "efficient"), ((9, 0), "cudnn")])
def test_fused_kernels_keep_their_output_and_one_number_a_row(capability, attention):
    with emulated(capability, attention):
        query, key, value = heads(), heads(), heads()
        kept, _ = kept_bytes(
            lambda: functional.scaled_dot_product_attention(query, key, value, is_causal=True), query, key, value
        )
    output, rows = 2 * 2 * 4 * 128 * 64, 4 * 2 * 4 * 128
    seeds = 2 * 8
    assert output + rows <= kept <= output + rows + seeds + 8


def test_math_keeps_all_weights_and_scaled_copies_in_float32():
    with emulated(attention="math"):
        query, key, value = heads(), heads(), heads()
        kept, _ = kept_bytes(lambda: functional.scaled_dot_product_attention(query, key, value), query, key, value)
    operands, weights = 4 * 2 * 4 * 128 * 64, 4 * 2 * 4 * 128 * 128
    assert kept == 3 * operands + weights


def test_a_head_that_is_no_multiple_of_8_is_padded_for_flash():
    with emulated():
        query = heads(head=20)
        kept, result = kept_bytes(lambda: functional.scaled_dot_product_attention(query, query, query))
    padded = 2 * 2 * 4 * 128 * 24
    assert 4 * padded + 4 * 2 * 4 * 128 <= kept <= 4 * padded + 4 * 2 * 4 * 128 + 24
    assert result.shape == query.shape


def test_a_mask_becomes_a_bias_with_padded_rows_for_efficient():
    with emulated():
        query = heads(length=100)
        mask = torch.ones(100, 100, dtype=torch.bool)
        kept, _ = kept_bytes(
            lambda: functional.scaled_dot_product_attention(query, query, query, attn_mask=mask), query
        )
    output, rows, bias = query.nbytes, 4 * 2 * 4 * 128, 2 * 100 * 104
    assert kept == pytest.approx(output + rows + bias, abs=64)


def test_the_math_path_allocates_what_a_real_one_does():
    """Truth: the allocator's events of the same call on real tensors, forward and backward, with a mask and dropout."""

    def step(query, key, value, mask):
        with sdpa_kernel(SDPBackend.MATH):
            functional.scaled_dot_product_attention(query, key, value, attn_mask=mask).sum().backward()

    def made():
        return [heads(FP32) for _ in range(3)] + [torch.zeros(128, 128)]

    real = made()
    trace = AllocatorTrace()
    trace.start(*real)
    step(*real)
    measured = trace.stop()
    with emulated(attention="math"), BlockRecorder(Workspaces((8, 0))) as recorder:
        fake = made()
        for tensor in fake:
            recorder.note(tensor, "inputs")
        recorder.begin_batch()
        step(*fake)
    recording = recorder.recording(2, 1)
    signs = torch.tensor(recording.event_allocates).int() * 2 - 1
    series = (signs * torch.tensor(recording.block_bytes)[torch.tensor(recording.event_block).long()]).cumsum(0)
    assert int(series.max()) == pytest.approx(measured.peak_bytes, rel=0.01)


def test_the_same_kernel_runs_when_a_block_is_computed_again():
    with emulated(precision=BF16) as emulation:
        values, project = torch.randn(2, 128, 64, requires_grad=True), nn.Linear(64, 192)

        def block(values):
            query, key, value = project(values).view(2, 128, 3, 4, 16).permute(2, 0, 3, 1, 4)
            return functional.scaled_dot_product_attention(query, key, value, is_causal=True)

        checkpoint(block, values, use_reentrant=False).sum().backward()
    assert emulation.attention == {"flash": 2}
    assert project.weight.grad.dtype == FP32


def test_layers_of_torch_take_fused_kernels():
    with emulated(precision=BF16) as emulation:
        layer = nn.TransformerEncoderLayer(64, 4, 128, batch_first=True)
        layer(torch.randn(2, 32, 64)).sum().backward()
    assert emulation.attention == {"flash": 1}


def test_outside_the_block_attention_is_the_cpus_again():
    with emulated():
        pass
    with fakes():
        query = heads(FP32)
        kept, _ = kept_bytes(lambda: functional.scaled_dot_product_attention(query, query, query), query)
    assert kept == query.nbytes + 4 * 2 * 4 * 128
    real = torch.randn(1, 2, 8, 16)
    expected = (real @ real.transpose(-1, -2) / math.sqrt(16)).softmax(-1) @ real
    assert torch.allclose(functional.scaled_dot_product_attention(real, real, real), expected, atol=1e-5)


# -- flex attention


@contextlib.contextmanager
def flexible(capability):
    """Fake tensors of a GPU, with `torch.compile` left out as a dry run leaves it out."""
    with fake_values() as answers, cuda_emulation(capability, is_compiled=answers.is_compiled), FakeMode():
        yield


def causal(_batch, _head, row, column):
    return row >= column


def flex(compiled=True):
    query, key, value = (torch.empty(2, heads, 64, 32, requires_grad=True) for heads in (4, 2, 2))
    attend = torch.compile(flex_attention.flex_attention) if compiled else flex_attention.flex_attention
    blocks = flex_attention.create_block_mask(causal, None, None, 64, 64, device="cpu")
    kept, out = kept_bytes(lambda: attend(query, key, value, block_mask=blocks, enable_gqa=True), query, key, value)
    out.sum().backward()
    return kept, out, [tensor.grad.shape == tensor.shape for tensor in (query, key, value)]


@pytest.mark.parametrize("capability", [(7, 5), (9, 0)])
def test_compiled_flex_attention_keeps_its_result_and_a_number_for_each_row(capability):
    with flexible(capability):
        kept, out, shaped = flex()
    assert kept == out.nbytes + 4 * 2 * 4 * 64
    assert shaped == [True] * 3


@pytest.mark.parametrize(
    ("capability", "compiled", "words"), [((9, 0), False, "wrap it in torch.compile"), ((7, 0), True, "capability 7.5")]
)
def test_flex_attention_without_a_fused_kernel_stops_with_the_way_out(capability, compiled, words):
    with flexible(capability), pytest.raises(RuntimeError, match=words):
        flex(compiled)
