"""What kernels take for themselves: closed forms on CUDA, the allocator's own events on the CPU."""

import itertools

import pytest
import torch
from emulation_parts import fakes

from kit.memory.record import workspace
from kit.memory.record.fake_mode import FakeMode
from kit.memory.record.fakes import fake_values, is_emulated
from kit.memory.record.truth import AllocatorTrace
from kit.memory.record.workspace import Workspaces, unsure_workspace_bytes, workspace_bytes

aten = torch.ops.aten
A100 = (8, 0)
A_FEW_BYTES = 256


@pytest.fixture(autouse=True)
def _one_thread():
    torch.set_num_threads(1)


def tensor(*shape, dtype=torch.bfloat16):
    return torch.empty(*shape, dtype=dtype, device="meta")


def test_flash_backward_sums_the_gradient_of_the_query_in_float32():
    query = tensor(8, 12, 1024, 64)
    args = (query, query, query, query)
    assert workspace_bytes("_scaled_dot_product_flash_attention_backward", args, None, A100) == (
        4 * 8 * 12 * 1024 * (64 + 1)
    )


def test_lengths_and_heads_are_rounded_up_and_grouped_heads_spread_out():
    query, key = tensor(1, 8, 100, 40), tensor(1, 2, 100, 40)
    size = workspace_bytes("_scaled_dot_product_flash_attention_backward", (query, query, key, key), None, A100)
    assert size == 4 * 8 * 128 * (64 + 1) + 2 * 2 * 8 * 100 * 40


def test_efficient_backward_sums_it_too():
    query = tensor(2, 4, 64, 32, dtype=torch.float32)
    args = (query, query, query, query)
    size = workspace_bytes("_scaled_dot_product_efficient_attention_backward", args, None, A100)
    assert size == 4 * 2 * 4 * 64 * 33


@pytest.mark.parametrize(("count", "rows", "segments"), [(8192, 50304, 8192), (8192, 100, 100)])
def test_the_gradient_of_an_embedding_sorts_many_indices(count, rows, segments):
    gradient, indices = tensor(count, 768), tensor(count, dtype=torch.int64)
    parts = count // 10 + segments
    expected = 4 * parts * 768 + 8 * (3 * count + 2 * segments + parts)
    assert workspace_bytes("embedding_dense_backward", (gradient, indices, rows), None, A100) == expected


def test_few_indices_are_not_sorted():
    args = (tensor(3072, 8), tensor(3072, dtype=torch.int64), 100)
    assert workspace_bytes("embedding_dense_backward", args, None, A100) == 0


def test_only_accumulating_puts_sort_their_indices():
    args = [tensor(100, 8), [tensor(50, dtype=torch.int64)], tensor(50, 8), True]
    assert workspace_bytes("index_put", args, None, A100) == 4 * 8 * 50
    assert workspace_bytes("index_put", [*args[:3], False], None, A100) == 0
    assert workspace_bytes("index_put", args[:3], None, A100) == 0


def test_other_operators_take_nothing():
    assert workspace_bytes("add.Tensor", (), None, A100) == workspace_bytes("mul", (), None, None) == 0


def test_what_only_cudnn_knows_is_bounded_by_its_operands_and_left_out_of_the_peak():
    values, weight, out = tensor(2, 3, 8, 8), tensor(4, 3, 3, 3), tensor(2, 4, 8, 8)
    args = (values, weight, None)
    assert workspace_bytes("convolution", args, out, A100) == 0
    assert unsure_workspace_bytes("convolution", args, out, A100) == 2 * (2 * 3 * 64 + 4 * 27 + 2 * 4 * 64)
    assert unsure_workspace_bytes("convolution", args, out, None) == 0
    asked = Workspaces(A100)
    assert asked("convolution", args, out) == asked("add", args, out) == 0
    asked("convolution_backward", (out, values, weight), (values, None, None))
    assert asked.unsure_bytes == 2 * (2 * 2 * 3 * 64 + 4 * 27 + 2 * 4 * 64)


@pytest.mark.parametrize("shape", [(64, 64), (3, 200, 200)])
def test_eigenvectors_on_the_cpu_take_what_lapack_asks_for(shape):
    matrices = torch.eye(shape[-1]).expand(shape).contiguous()
    most, result = held(lambda: torch.linalg.eigh(matrices))
    said = workspace_bytes("_linalg_eigh", (matrices, "L", True), result, None)
    assert bytes_of(result) + said == pytest.approx(most, rel=0.02)


@pytest.mark.skipif(not torch.ops.mkldnn._is_mkldnn_bf16_supported(), reason="oneDNN multiplies no bfloat16 here")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_products_in_half_precision_on_the_cpu_copy_what_is_not_in_order(dtype):
    """Truth: the allocator's events; what oneDNN packs is the same as of operands that lie in order."""
    samples, weight = torch.randn(16, 128, 64, dtype=dtype).transpose(0, 1), torch.randn(192, 64, dtype=dtype)
    expanded = weight.t().expand(len(samples), *weight.t().shape)
    most, product = held(lambda: torch.bmm(samples, expanded))
    said = workspace_bytes("bmm", (samples, expanded), product, None)
    in_order = workspace_bytes("bmm", (samples.contiguous(), expanded.contiguous()), product, None)
    assert said == in_order + (samples.numel() + expanded.numel()) * 2 * (dtype is torch.bfloat16)
    assert product.nbytes + said == most
    rows = torch.randn(64, 256, dtype=dtype)[:, :64]
    said = workspace_bytes("addmm", (product, rows, weight.t()), None, None)
    in_order = workspace_bytes("addmm", (product, rows.contiguous(), weight.t()), None, None)
    assert said == in_order + rows.numel() * 2 * (dtype is torch.bfloat16)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize(
    ("rows", "inner", "columns"),
    [(512, 784, 512), (128, 784, 64), (64, 128, 784), (1000, 37, 90), (16, 2048, 300), (8, 8, 8), (1, 512, 512)],
)
def test_what_a_product_packs_is_what_the_allocator_saw(dtype, rows, inner, columns):
    made = {
        is_turned: (
            lambda x, y, t=is_turned: torch.randn(y, x, dtype=dtype).t() if t else torch.randn(x, y, dtype=dtype)
        )
        for is_turned in (False, True)
    }
    for first_turned, second_turned in itertools.product((False, True), repeat=2):
        first, second = made[first_turned](rows, inner), made[second_turned](inner, columns)
        most, result = held(lambda a=first, b=second: a @ b)
        assert result.nbytes + workspace_bytes("mm", (first, second), result, None) == most
        bias = torch.zeros(columns, dtype=dtype)
        most, result = held(lambda a=first, b=second, c=bias: torch.addmm(c, a, b))
        assert result.nbytes + workspace_bytes("addmm", (bias, first, second), result, None) == most


def test_the_scratch_of_a_long_product_is_near_that_of_the_whole():
    # Where bfloat16 is emulated a product takes no scratch, and a minute of all cores at the length of the others.
    rows = 196 if is_emulated(torch.bfloat16) else 6272
    first, second = torch.zeros(rows, 3072, dtype=torch.bfloat16), torch.zeros(3072, 1024, dtype=torch.bfloat16)
    most, result = held(lambda: first @ second)
    said = workspace_bytes("mm", (first, second), result, None)
    assert result.nbytes + said == pytest.approx(most, rel=0.01)


def test_what_would_take_gigabytes_is_asked_about_with_less(monkeypatch):
    asked = []
    monkeypatch.setattr(workspace, "_held_beside", lambda _, *operands: asked.extend(operands) or 0)
    with fakes():
        rows, columns = torch.empty(60_000, 17, dtype=torch.bfloat16), torch.empty(17, 60_000, dtype=torch.bfloat16)
        workspace_bytes("mm", (rows, columns), torch.empty(60_000, 60_000, dtype=torch.bfloat16), None)
        volume = torch.empty(2, 16, 256, 256, 256).to(memory_format=torch.channels_last_3d)
        how = ([1, 1, 1], [1, 1, 1], [1, 1, 1], False, [0, 0, 0], 1)
        weight = torch.empty(16, 16, 3, 3, 3)
        assert workspace_bytes("convolution", (volume, weight, None, *how), volume, None) == 2 * weight.nbytes
    if not is_emulated(torch.bfloat16):
        first, second = asked
        assert len(first) * second.shape[1] <= 1 << 26
    else:
        assert not asked


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(
    ("shape", "weight", "groups"),
    [((16, 320, 2, 2), (320, 1, 7, 7), 320), ((16, 64, 8, 8), (256, 64, 1, 1), 1), ((8, 3, 32, 32), (40, 3, 4, 4), 1),
     ((8, 512, 7, 7), (512, 512, 3, 3), 1), ((64, 96, 28, 28), (192, 96, 3, 3), 1)],
)  # fmt: skip
def test_convolutions_of_values_that_lie_channels_last_lay_their_weights_out_anew(dtype, shape, weight, groups):
    """The last is so long that smaller batches are asked about."""
    values = torch.randn(shape, dtype=dtype).to(memory_format=torch.channels_last)
    kernel, bias = torch.randn(weight, dtype=dtype), torch.randn(weight[0], dtype=dtype)
    how = ([1, 1], [weight[-1] // 2] * 2, [1, 1], False, [0, 0], groups)
    most, result = held(lambda: aten.convolution(values, kernel, bias, *how))
    said = workspace_bytes("convolution", (values, kernel, bias, *how), result, None)
    assert result.nbytes + said == pytest.approx(most, rel=0.001)
    args = (torch.randn_like(result), values, kernel, [weight[0]], *how, [True, True, True])
    most, results = held(lambda: aten.convolution_backward(*args))
    said = workspace_bytes("convolution_backward", args, results, None)
    assert bytes_of(results) + said == pytest.approx(most, rel=0.001)


CONVOLUTIONS = [
    {"inputs": 32, "outputs": 32, "kernel": 3, "side": 32},
    {"inputs": 64, "outputs": 64, "kernel": 3, "side": 8, "batch": 16},
    {"inputs": 128, "outputs": 64, "kernel": 3, "side": 16},
    {"inputs": 256, "outputs": 256, "kernel": 3, "side": 4},
    {"inputs": 64, "outputs": 128, "kernel": 3, "side": 32, "stride": 2},
    {"inputs": 2, "outputs": 8, "kernel": 3, "side": 32},
    {"inputs": 1, "outputs": 32, "kernel": 3, "side": 64},
    {"inputs": 32, "outputs": 32, "kernel": 3, "side": 32, "groups": 32},
    {"inputs": 64, "outputs": 128, "kernel": 1, "side": 16},
    {"inputs": 4, "outputs": 3, "kernel": 1, "side": 64, "batch": 16},
    {"inputs": 3, "outputs": 16, "kernel": 1, "side": 64, "batch": 16},
    {"inputs": 1, "outputs": 4, "kernel": 1, "side": 64, "batch": 16},
    {"inputs": 3, "outputs": 4, "kernel": 3, "side": 64, "batch": 16},
    {"inputs": 64, "outputs": 32, "kernel": 2, "side": 16, "stride": 2, "transposed": True},
    {"inputs": 320, "outputs": 320, "kernel": 7, "side": 2, "groups": 320},
    {"inputs": 96, "outputs": 96, "kernel": 5, "side": 14, "groups": 96},
    {"inputs": 17, "outputs": 33, "kernel": 5, "side": 20, "batch": 32},
]


def test_what_cusolver_asks_for_is_told_by_what_lapack_takes():
    values = torch.eye(64).expand(3, 64, 64)
    out = aten._linalg_eigh(values, "L", True)
    on_a_gpu, here = Workspaces(A100), Workspaces(None)
    for workspaces in (on_a_gpu, here):
        workspaces("_linalg_eigh", (values, "L", True), out)
        workspaces("linalg_matrix_power", (values, 4), values)
    assert on_a_gpu.of_solvers == {"_linalg_eigh": workspace_bytes("_linalg_eigh", (values, "L", True), out, None)}
    assert not here.of_solvers


def held(run):
    """Most bytes that `run` held at once, its results included."""
    run()
    trace = AllocatorTrace()
    trace.start([])
    result = run()
    return trace.stop().peak_bytes, result


def bytes_of(results):
    return sum(item.nbytes for item in results if item is not None)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("case", CONVOLUTIONS, ids=lambda case: "-".join(map(str, case.values())))
def test_convolutions_on_the_cpu_take_what_is_said(case, dtype):
    """Truth: the allocator's events."""
    case = {"batch": 4, "stride": 1, "groups": 1, "transposed": False, **case}
    values = torch.randn(case["batch"], case["inputs"], case["side"], case["side"], dtype=dtype)
    channels = (case["outputs"], case["inputs"] // case["groups"])
    shape = reversed(channels) if case["transposed"] else channels
    weight = torch.randn(*shape, case["kernel"], case["kernel"], dtype=dtype)
    padding = 0 if case["transposed"] else case["kernel"] // 2
    how = ([case["stride"]] * 2, [padding] * 2, [1, 1], case["transposed"], [0, 0], case["groups"])
    forward = (values, weight, None, *how)
    peak, out = held(lambda: aten.convolution(*forward))
    said = workspace_bytes("convolution", forward, out, None)
    assert out.nbytes + said == pytest.approx(peak, abs=A_FEW_BYTES)
    backward = (torch.randn_like(out), values, weight, None, *how, [True, True, False])
    peak, results = held(lambda: aten.convolution_backward(*backward))
    said = workspace_bytes("convolution_backward", backward, results, None)
    assert bytes_of(results) + said == pytest.approx(peak, abs=A_FEW_BYTES)


@pytest.mark.parametrize(
    ("transposed", "inputs", "outputs", "kernel", "stride", "batch", "sides"),
    [
        (True, 8, 3, 3, 2, 8, (16, 16, 16)),
        (True, 8, 1, 3, 2, 4, (16, 16, 16)),
        (True, 16, 8, 3, 1, 2, (10, 10, 10)),
        (True, 64, 32, 2, 2, 8, (8, 8, 8)),
        (True, 64, 32, 2, 2, 1, (8, 8, 8)),
        (True, 8, 3, 3, 2, 8, (32, 32)),
        (False, 64, 64, 3, 1, 1, (16, 16)),
        (False, 16, 16, 3, 1, 1, (8, 8, 8)),
    ],
)
def test_volumes_few_channels_and_one_sample_take_what_is_said(
    transposed, inputs, outputs, kernel, stride, batch, sides
):
    """Truth: the allocator's events."""
    axes = len(sides)
    shape = (inputs, outputs) if transposed else (outputs, inputs)
    values, weight = torch.randn(batch, inputs, *sides), torch.randn(*shape, *[kernel] * axes)
    args = (values, weight, None, [stride] * axes, [0] * axes, [1] * axes, transposed, [0] * axes, 1)
    peak, out = held(lambda: aten.convolution(*args))
    assert out.nbytes + workspace_bytes("convolution", args, out, None) == pytest.approx(peak, abs=A_FEW_BYTES)


with_avx2_alone = pytest.mark.skipif(
    torch.backends.cpu.get_cpu_capability() != "AVX2", reason="measured with oneDNN's kernels for AVX2 alone"
)


def as_it_lies(tensor, how):
    """A copy of what lies channels last, or the first half of the channels of twice as many; else itself."""
    if how == "last" and tensor.dim() == 3:
        return tensor.transpose(1, 2).contiguous().transpose(1, 2)
    if how == "last":
        layout = torch.channels_last if tensor.dim() == 4 else torch.channels_last_3d
        return tensor.contiguous(memory_format=layout)
    return torch.cat([tensor, tensor], 1)[:, : tensor.shape[1]] if how == "part" else tensor


EMULATED = {
    "series": ((8, 20, 40), (24, 20, 3), {}),
    "series of one position": ((8, 20, 40), (24, 20, 1), {}),
    "series of groups": ((8, 20, 40), (24, 10, 1), {"groups": 2}),
    "plain": ((4, 20, 12, 12), (24, 20, 3, 3), {}),
    "patches": ((4, 20, 12, 12), (24, 20, 2, 2), {"stride": 2}),
    "one position": ((4, 20, 12, 12), (24, 20, 1, 1), {}),
    "groups": ((4, 20, 12, 12), (24, 10, 3, 3), {"groups": 2}),
    "groups of one position": ((4, 20, 12, 12), (24, 10, 1, 1), {"groups": 2}),
    "dilated": ((4, 20, 12, 12), (24, 20, 3, 3), {"dilation": 2}),
    "few channels": ((4, 3, 30, 30), (24, 3, 3, 3), {}),
    "transposed": ((4, 20, 12, 12), (20, 24, 2, 2), {"stride": 2, "transposed": True}),
    "transposed groups": ((4, 20, 12, 12), (20, 12, 2, 2), {"stride": 2, "transposed": True, "groups": 2}),
    "volume": ((4, 20, 8, 8, 8), (24, 20, 3, 3, 3), {}),
    "volume of one position": ((4, 20, 8, 8, 8), (24, 20, 1, 1, 1), {}),
    "volume of groups": ((4, 20, 8, 8, 8), (24, 10, 3, 3, 3), {"groups": 2}),
    "transposed volume": ((4, 20, 8, 8, 8), (20, 24, 2, 2, 2), {"stride": 2, "transposed": True}),
    "dilated volume": ((4, 20, 8, 8, 8), (24, 20, 3, 3, 3), {"dilation": 2}),
}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", EMULATED)
def test_a_convolution_without_instructions_copies_what_lies_otherwise(name, dtype):
    """Truth: the allocator's events."""
    if not is_emulated(dtype):
        pytest.skip("this processor has instructions for it")
    shape, weight_shape, options = EMULATED[name]
    options = {"stride": 1, "dilation": 1, "transposed": False, "groups": 1, **options}
    axes, transposed, groups = len(shape) - 2, options["transposed"], options["groups"]
    how = ([options["stride"]] * axes, [0] * axes, [options["dilation"]] * axes, transposed, [0] * axes, groups)
    channels = weight_shape[1] * groups if transposed else weight_shape[0]
    weights_lie = ("in order",) if axes == 1 else ("in order", "last")
    for values_lie, weight_lies in itertools.product(("in order", "last", "part"), weights_lie):
        values = as_it_lies(torch.zeros(shape, dtype=dtype), values_lie)
        weight = as_it_lies(torch.zeros(weight_shape, dtype=dtype), weight_lies)
        for bias in (None, torch.zeros(channels, dtype=dtype)):
            args = (values, weight, bias, *how)
            most, out = held(lambda: aten.convolution(*args))  # noqa: B023
            said = workspace_bytes("convolution", args, out, None)
            assert out.nbytes + said == pytest.approx(most, abs=A_FEW_BYTES)
        for gradient_lies in ("in order", "last", "part"):
            gradient = as_it_lies(torch.zeros(out.shape, dtype=dtype), gradient_lies)
            for wanted in ([True, True, True], [False, True, True], [True, True, False], [True, False, False]):
                args = (gradient, values, weight, [channels], *how, wanted)
                most, results = held(lambda: aten.convolution_backward(*args))  # noqa: B023
                said = workspace_bytes("convolution_backward", args, results, None)
                assert bytes_of(results) + said == pytest.approx(most, abs=A_FEW_BYTES)


@with_avx2_alone
@pytest.mark.parametrize(
    ("shape", "weight"),
    [((4, 512, 14, 14), (512, 512, 3, 3)), ((4, 256, 56, 56), (256, 256, 3, 3)), ((4, 512, 7, 7), (1024, 512, 7, 7))],
)
def test_heavy_weights_are_counted_where_values_lie_channels_last(shape, weight):
    """Truth: the allocator's events; parts of VGG, too long to be asked about."""
    values, kernel = as_it_lies(torch.zeros(shape), "last"), torch.zeros(weight)
    how = ([1, 1], [weight[-1] // 2 if weight[-1] < shape[-1] else 0] * 2, [1, 1], False, [0, 0], 1)
    most, out = held(lambda: aten.convolution(values, kernel, None, *how))
    said = workspace_bytes("convolution", (values, kernel, None, *how), out, None)
    assert out.nbytes + said >= 0.95 * most
    args = (torch.zeros_like(out), values, kernel, None, *how, [True, True, False])
    most, results = held(lambda: aten.convolution_backward(*args))
    said = workspace_bytes("convolution_backward", args, results, None)
    assert bytes_of(results) + said >= 0.95 * most


@with_avx2_alone
@pytest.mark.parametrize("channels", [(728, 728), (1000, 1016), (736, 728), (512, 512)])
@pytest.mark.parametrize("wanted", [[True, True, False], [False, True, False]])
def test_a_kernel_of_one_position_is_never_said_to_hold_less(channels, wanted):
    """Truth: the allocator's events; as in Xception. Of an odd number of vectors several threads make the gradient
    beside itself."""
    torch.set_num_threads(2)
    values, kernel = torch.zeros(4, channels[1], 14, 14), torch.zeros(*channels, 1, 1)
    gradient = torch.zeros(4, channels[0], 14, 14)
    args = (gradient, values, kernel, None, [1, 1], [0, 0], [1, 1], False, [0, 0], 1, wanted)
    most, results = held(lambda: aten.convolution_backward(*args))
    said = workspace_bytes("convolution_backward", args, results, None)
    assert 0.95 * most <= bytes_of(results) + said <= 1.1 * most


LARGE = [
    ((16, 64, 32, 32), (64, 64, 3, 3)),
    ((4, 128, 32, 32), (64, 128, 3, 3)),
    ((4, 256, 8, 8), (256, 256, 3, 3)),
    ((32, 64, 56, 56), (64, 64, 3, 3)),
    ((64, 512, 7, 7), (512, 512, 3, 3)),
    ((48, 128, 28, 28), (512, 128, 1, 1)),
    ((4, 512, 7, 7), (2048, 512, 7, 7)),
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("shape", "weight"), LARGE)
def test_large_convolutions_are_known_without_a_run_of_the_kernel(shape, weight, dtype):
    """Truth: the allocator's events; the last is a matrix product of images as large as its kernel."""
    values, kernel = torch.zeros(shape, dtype=dtype), torch.zeros(weight, dtype=dtype)
    how = ([1, 1], [weight[-1] // 2 if weight[-1] < shape[-1] else 0] * 2, [1, 1], False, [0, 0], 1)
    peak, out = held(lambda: aten.convolution(values, kernel, None, *how))
    said = workspace_bytes("convolution", (values, kernel, None, *how), out, None)
    assert out.nbytes + said == pytest.approx(peak, rel=0.03)
    args = (torch.zeros_like(out), values, kernel, None, *how, [True, True, False])
    peak, results = held(lambda: aten.convolution_backward(*args))
    said = workspace_bytes("convolution_backward", args, results, None)
    assert bytes_of(results) + said == pytest.approx(peak, rel=0.05)


@pytest.mark.parametrize(
    ("shape", "weight", "stride", "groups"),
    [((8, 16, 96, 96), (768, 16, 16, 16), 16, 1), ((8, 3, 224, 224), (768, 3, 16, 16), 16, 1),
     ((8, 96, 56, 56), (192, 96, 2, 2), 2, 1), ((8, 128, 56, 56), (128, 128, 3, 3), 2, 1),
     ((8, 256, 56, 56), (512, 256, 1, 1), 2, 1), ((2, 32, 24, 24, 24), (64, 32, 2, 2, 2), 2, 1),
     ((8, 72, 112, 112), (72, 24, 3, 3), 2, 3), ((32, 240, 28, 28), (60, 80, 1, 1), 1, 3)],
)  # fmt: skip
def test_what_a_convolution_with_strides_or_groups_holds_is_told(shape, weight, stride, groups):
    """Truth: the allocator's events; patches, and parts of ConvNeXt, ResNet, RegNet and ShuffleNet."""
    values, kernel, axes = torch.zeros(shape), torch.zeros(weight), len(shape) - 2
    side = 0 if weight[-1] == stride else weight[-1] // 2
    how = ([stride] * axes, [side] * axes, [1] * axes, False, [0] * axes, groups)
    peak, out = held(lambda: aten.convolution(values, kernel, None, *how))
    said = workspace_bytes("convolution", (values, kernel, None, *how), out, None)
    assert out.nbytes + said == pytest.approx(peak, rel=0.05)
    for wanted in ([True, True, False], [False, True, False]):
        args = (torch.zeros_like(out), values, kernel, None, *how, wanted)
        peak, results = held(lambda: aten.convolution_backward(*args))  # noqa: B023
        said = workspace_bytes("convolution_backward", args, results, None)
        assert bytes_of(results) + said == pytest.approx(peak, rel=0.05)


def test_a_convolution_is_known_where_a_profiler_of_the_user_runs():
    values, weight = torch.zeros(8, 32, 16, 16), torch.zeros(32, 32, 3, 3)
    args = (values, weight, None, [1, 1], [1, 1], [1, 1], False, [0, 0], 1)
    result = torch.zeros_like(values)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True):
        said = workspace_bytes("convolution", args, result, None)
    assert values.nbytes <= said <= values.nbytes + weight.nbytes


def test_a_masked_softmax_on_the_cpu_takes_what_is_said():
    scores = torch.randn(8, 64, 64)
    peak, out = held(lambda: aten._safe_softmax(scores, -1))
    assert workspace_bytes("_safe_softmax", (scores, -1), out, None) == pytest.approx(peak - out.nbytes, rel=0.02)


ALGEBRA = {
    "_linalg_svd": lambda values: aten._linalg_svd(values),
    "linalg_inv_ex": lambda values: aten.linalg_inv_ex(values),
    "linalg_lu": lambda values: aten.linalg_lu(values),
    "linalg_eig": lambda values: aten.linalg_eig(values),
    "linalg_eigvals": lambda values: aten.linalg_eigvals(values),
    "linalg_pinv.atol_rtol_tensor": lambda values: aten.linalg_pinv.atol_rtol_tensor(values),
    "linalg_lstsq": lambda values: aten.linalg_lstsq(values, values[..., :4]),
}


@pytest.mark.parametrize("name", ALGEBRA)
@pytest.mark.parametrize("shape", [(64, 64, 64), (256, 256)])
def test_linear_algebra_on_the_cpu_takes_what_is_said(name, shape):
    """Truth: the allocator's events; within 8 % of the matrices."""
    values = torch.randn(shape) + shape[-1] * torch.eye(shape[-1])
    peak, out = held(lambda: ALGEBRA[name](values))
    results = [out] if isinstance(out, torch.Tensor) else out
    made = sum({one.untyped_storage().data_ptr(): one.untyped_storage().nbytes() for one in results}.values())
    said = workspace_bytes(name, (values,), out, None)
    assert said == pytest.approx(peak - made, abs=0.08 * values.nbytes)


@pytest.mark.parametrize("shape", [(16, 64, 64), (256, 256), (512, 64), (64, 512)])
@pytest.mark.parametrize("mode", ["reduced", "complete", "r"])
def test_a_factorisation_takes_no_more_than_is_said(shape, mode):
    """MKL asks for less with one thread."""
    values = torch.randn(shape)
    peak, out = held(lambda: aten.linalg_qr(values, mode))
    said = workspace_bytes("linalg_qr", (values, mode), out, None)
    assert peak - sum(one.nbytes for one in out) <= said + 1024


ROWS = torch.randn(2, 256, 256)
HALVES = ROWS.bfloat16()
OF_OPTIMIZERS = {
    "mm.out": (aten.mm.out, (HALVES[0], HALVES[1].t()), {"out": HALVES[0].clone()}),
    "baddbmm.out": (aten.baddbmm.out, (HALVES, HALVES, HALVES), {"out": HALVES.clone()}),
    "addmm_": (aten.addmm_.default, (HALVES[0].clone(), HALVES[0], HALVES[1]), {}),
    "_foreach_add_.List": (aten._foreach_add_.List, ([*ROWS.clone()], [*HALVES]), {}),
    "_foreach_addcdiv_.Scalar": (aten._foreach_addcdiv_.Scalar, ([*ROWS.clone()], [*HALVES], [*HALVES]), {}),
    "addcmul_": (aten.addcmul_.default, (ROWS[0].clone(), HALVES[0], HALVES[1]), {}),
    "dist": (aten.dist.default, (ROWS[0], ROWS[1], float("inf")), {}),
    "cholesky_solve": (aten.cholesky_solve.default, (ROWS, ROWS.tril()), {}),
    **{f"linalg_matrix_power {power}": (aten.linalg_matrix_power.default, (ROWS[0], power), {}) for power in (2, 4, 7)},
}


@pytest.mark.parametrize("name", OF_OPTIMIZERS)
def test_what_optimizers_call_on_the_cpu_takes_what_is_said(name):
    """Products that write to a tensor, lists and sums of several number formats, powers of matrices."""
    operator, args, options = OF_OPTIMIZERS[name]
    peak, out = held(lambda: operator(*args, **options))
    is_made = isinstance(out, torch.Tensor) and not operator._schema.name.endswith("_") and not options
    said = workspace_bytes(name.partition(" ")[0], args, out, None)
    assert said == pytest.approx(peak - (out.nbytes if is_made else 0), rel=0.01, abs=1024)


@pytest.mark.parametrize("largest", [0.01, 100.0])
def test_a_matrix_exponential_takes_no_more_than_is_said(largest):
    values = largest * torch.randn(64, 64, 64)
    peak, out = held(lambda: torch.linalg.matrix_exp(values))
    assert peak - out.nbytes <= workspace_bytes("linalg_matrix_exp", (values,), out, None) + 4096


def test_products_copy_what_lies_neither_by_rows_nor_by_columns():
    values = torch.randn(256, 512)
    spread = torch.ones(()).expand(512, 256)
    for first, second, copied in (
        (values, spread, 1),
        (values[:, ::2], values[:, :256].t(), 0.5),
        (values, values.t(), 0),
    ):
        peak, out = held(lambda first=first, second=second: first @ second)
        assert peak - out.nbytes == copied * values.nbytes
        for capability in (None, A100):
            assert workspace_bytes("mm", (first, second), out, capability) == copied * values.nbytes
    assert workspace_bytes("mm", (torch.eye(512).to_sparse(), spread), spread, None) == spread.numel() * 4


def test_least_squares_have_the_shape_of_real_ones():
    values, target = torch.randn(3, 8, 4), torch.randn(3, 8, 2)
    real = torch.linalg.lstsq(values, target).solution
    with fake_values(), FakeMode():
        made = torch.linalg.lstsq(torch.randn(3, 8, 4), torch.randn(3, 8, 2)).solution
        assert (made.shape, made.untyped_storage().nbytes()) == (real.shape, real.untyped_storage().nbytes())


def test_channels_last_needs_no_copies_of_values():
    with fakes():
        values = torch.randn(2, 16, 64, 64).to(memory_format=torch.channels_last)
        weight = torch.randn(16, 16, 3, 3)
        how = ([1, 1], [1, 1], [1, 1], False, [0, 0], 1)
        args = (values, weight, None, *how)
        said = workspace_bytes("convolution", args, aten.convolution(*args), None)
    assert said < min(4 * weight.nbytes, values.nbytes)
