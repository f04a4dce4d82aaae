"""Prices by hand: the two clocks of host and device, exchange, loader, ranges; tables and cards."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from kit.errors import PlanError
from kit.memory.replay.calls import OperatorCall, TensorSpec
from kit.memory.replay.cards import CARDS, find_card, target_of
from kit.memory.replay.replay import PHASES
from kit.speed.call_timer import _copied
from kit.speed.card_costs import CardCosts, card_of
from kit.speed.cost_table import CostTable
from kit.speed.links import STATED_REACHED, Link, Traffic, all_reduce_seconds, find_link, waited_for
from kit.speed.operators import StepOperators
from kit.speed.pricing import Cost, price
from kit.speed.work import work_of


def product(rows, inner=64, columns=64, dtype="float32"):
    specs = TensorSpec((rows, inner), dtype), TensorSpec((inner, columns), dtype)
    return OperatorCall("aten::mm", specs, (), (TensorSpec((rows, columns), dtype),))


def step(*calls, phase="forward", accumulate=1):
    count = len(calls)
    zeros = np.zeros(count, dtype=np.int32)
    return StepOperators(
        calls=calls, call=np.arange(count, dtype=np.int32), phase=np.full(count, PHASES.index(phase), dtype=np.uint8),
        module=zeros, line=zeros, repeats=np.ones(count, dtype=np.int32), names=("",), batch_size=4,
        accumulate=accumulate, facts={"precision": "32-true"},
    )  # fmt: skip


class Known:
    """Costs that are given: seconds of the device by call, and of the host for each."""

    name, step_seconds, doubt = "known", 0.0, 1.0

    def __init__(self, seconds, host=0.0, asynchronous=True):
        self.seconds, self.host, self.asynchronous = seconds, host, asynchronous

    def cost(self, call, work):
        return Cost(self.seconds.get(call, 0.0), 1.1, "measured", "compute")

    def host_seconds(self, phase):
        return self.host

    def checkpoint_seconds(self, operators):
        return 2.0 + 0.5 * operators


CALLS = product(8), product(16), product(32)


@pytest.mark.parametrize(
    ("seconds", "host", "asynchronous", "expected"),
    [
        ((1.0, 2.0, 3.0), 0.1, True, 6.1),  # the device is behind from the first call on
        ((0.1, 0.1, 0.1), 1.0, True, 3.1),  # the host is
        ((5.0, 0.1, 0.1), 1.0, True, 6.2),  # the first call hides two others
        ((1.0, 2.0, 3.0), 0.1, False, 6.3),
    ],
)
def test_host_and_device_are_two_clocks_on_a_gpu_and_one_on_a_cpu(seconds, host, asynchronous, expected):
    costs = Known(dict(zip(CALLS, seconds, strict=True)), host, asynchronous)
    found = price(step(*CALLS), costs)
    assert found.seconds == pytest.approx(expected)
    assert found.low_seconds < found.seconds < found.high_seconds
    assert found.busy_seconds == pytest.approx(sum(seconds))


def test_what_the_backward_pass_does_not_hide_is_waited_for():
    link = Link(name="slow", bytes_per_second=1e9, latency_seconds=0.0)
    traffic = Traffic(parameter_bytes=1e9, gradient_bytes=1e9, strategy="ddp")
    costs = Known(dict.fromkeys(CALLS, 0.01))
    alone = price(step(*CALLS, phase="backward"), costs)
    several = price(step(*CALLS, phase="backward"), costs, traffic=traffic, devices=4, within=link)
    assert several.exchange_seconds == pytest.approx(several.seconds - alone.seconds)
    assert several.bound == "communication"
    assert several.high_seconds - several.seconds > alone.high_seconds - alone.seconds


@pytest.mark.parametrize(("devices", "hops", "accumulate"), [(2, 1, 1), (4, 2, 3)])
def test_ranks_of_a_cpu_wait_for_the_last_of_them_and_are_told_to_go_on(devices, hops, accumulate):
    def exchange(latency, lateness):
        link = Link(name="a link", bytes_per_second=1e9, latency_seconds=latency, measured=True, lateness=lateness)
        costs = Known(dict.fromkeys(CALLS, 3.0), asynchronous=False)
        made = step(*CALLS, accumulate=accumulate)
        return price(made, costs, traffic=traffic, devices=devices, within=link)

    traffic = Traffic(parameter_bytes=0, gradient_bytes=0, strategy="ddp")
    early, late, slow = exchange(0.0, 0.0), exchange(0.0, 0.5), exchange(0.01, 0.0)
    assert late.exchange_seconds - early.exchange_seconds == pytest.approx(0.5 * 9.0**0.5)
    assert late.low_seconds == early.low_seconds, "ranks may also be in time"
    assert late.high_seconds - early.high_seconds > late.seconds - early.seconds
    ring = 2 * (devices - 1) * 0.01
    assert slow.exchange_seconds - early.exchange_seconds == pytest.approx(ring + accumulate * hops * 0.01)


@pytest.mark.parametrize(
    ("device", "host", "exchange", "bound"),
    [
        (0.9, 1.0, 0.0, "host"),  # busy for most of a step, which ends when the host has made its last call
        (1.1, 1.0, 0.0, "compute"),  # behind the host from the first call on
        (0.1, 0.01, 2.0, "communication"),
        (1.0, 0.6, 0.0, "compute"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("asynchronous", [True, False])
def test_a_step_is_bound_by_what_takes_its_time(device, host, exchange, bound, asynchronous):
    link = Link(name="a link", bytes_per_second=1 / STATED_REACHED["usual"], latency_seconds=0.0)
    traffic = Traffic(parameter_bytes=exchange, gradient_bytes=exchange, strategy="ddp")
    costs = Known(dict.fromkeys(CALLS, device), host, asynchronous)
    found = price(step(*CALLS), costs, traffic=traffic, devices=2, within=link)
    assert found.bound == bound


def test_a_call_that_takes_longest_to_be_started_is_bound_by_the_host():
    small, large, copy = product(8), product(4096, 4096, 4096), clone(1 << 26)
    add = OperatorCall("aten::add.Tensor", (TensorSpec((8,), "float32"),) * 2, (), (TensorSpec((8,), "float32"),))
    table = CostTable("here", {add: 2e-6, product(1024): 1e-5, clone(1 << 24): 2e-3})
    for costs in (CardCosts(find_card("A100-40GB")), table):
        bounds = [costs.cost(call, work_of(call)).bound for call in (small, large, copy)]
        assert bounds == ["host", "compute", "memory bandwidth"]


def test_numbers_that_the_host_reads_keep_no_card_busy():
    read = OperatorCall("aten::_local_scalar_dense", (TensorSpec((), "float32"),), (), (2.0,))
    assert CardCosts(find_card("A100-40GB")).cost(read, work_of(read)).seconds == 0


def clone(elements):
    spec = TensorSpec((elements,), "float32")
    return OperatorCall("aten::clone", (spec,), (), (spec,))


def test_an_exchange_that_is_hidden_takes_memory_from_what_hides_it():
    costs, link = CardCosts(find_card("A100-40GB")), find_link("NVLink-3")
    traffic = Traffic(parameter_bytes=2e8, gradient_bytes=2e8, strategy="ddp")
    found = price(step(*[clone(1 << 28)] * 20, phase="backward"), costs, traffic=traffic, devices=8, within=link)
    ring = traffic.seconds(8, link, None, 8)
    waited = waited_for(ring, found.busy_seconds, traffic.pieces)
    moved = traffic.memory_bytes(8) / (0.75 * costs.card.bytes_per_second)
    assert found.exchange_seconds == pytest.approx(waited + moved * (1 - waited / ring), rel=0.01)
    assert found.low_seconds <= found.seconds <= found.high_seconds


@pytest.mark.parametrize(
    ("recomputes", "expected"), [([1, 1, 0], 3.0), ([2, 0, 2], 3.0), ([1, 0, 2], 5.0), ([0] * 3, 0.0), ([], 0.0)]
)
def test_what_is_run_again_costs_the_host_for_each_checkpointed_call_and_operator(recomputes, expected):
    costs = Known(dict.fromkeys(CALLS, 1.0), asynchronous=False)
    plain = step(*CALLS, phase="backward")
    found = price(
        replace(plain, recomputes=np.array(recomputes, np.int32), repeats=np.full(3, 4, dtype=np.int32)), costs
    )
    assert found.seconds == pytest.approx(4 * (3.0 + expected))


def test_a_loader_that_is_slower_decides():
    found = price(step(*CALLS), Known(dict.fromkeys(CALLS, 0.01)), loader_seconds=5.0)
    assert (found.seconds, found.bound) == (5.0, "loader")


def test_a_call_that_was_measured_takes_what_it_took_and_others_are_scaled():
    table = CostTable("here", {product(64): 1e-3, product(1024): 16e-3, product(64, dtype="bfloat16"): 1e-4})
    known = table.cost(product(64), work_of(product(64)))
    assert (known.seconds, known.source) == (1e-3, "measured")
    between = table.cost(product(256), work_of(product(256)))
    assert 2e-3 < between.seconds < 8e-3
    assert between.doubt > known.doubt
    other = OperatorCall("aten::erfinv", (TensorSpec((1 << 20,), "float32"),), (), (TensorSpec((1 << 20,), "float32"),))
    assert table.cost(other, work_of(other)).source == "roofline"


def test_a_table_comes_back_from_json():
    table = CostTable("here", {product(64): 1e-3}, 1e-5, 2e-5, 1e-3, optimizer_call_seconds=1e-6)
    assert CostTable.of(table.to_json()) == table


def test_python_costs_each_phase_what_it_costs_that_phase():
    table = CostTable("here", {}, 1e-5, 2e-5, optimizer_call_seconds=1e-6).slowed(2.0)
    assert [table.host_seconds(phase) for phase in ("forward", "backward", "optimizer")] == [4e-5, 2e-5, 2e-6]
    add = OperatorCall("aten::add", (TensorSpec((8,), "float32"),), (), (TensorSpec((8,), "float32"),))
    found = [price(step(add, phase=phase), table).host_seconds for phase in ("forward", "backward", "optimizer")]
    assert found == pytest.approx([4e-5, 2e-5, 2e-6])


@pytest.mark.parametrize("strides", [(6, 1), (1, 4), (0, 1), (12, 2)])
def test_further_sets_of_arguments_lie_as_the_first(strides):
    first = torch.rand(64).as_strided((4, 6), strides, 3)
    (second,), named = _copied(([first], {"alpha": 2.0}))
    assert (second.stride(), second.storage_offset(), named) == (strides, 3, {"alpha": 2.0})
    assert torch.equal(first, second)
    assert second.data_ptr() != first.data_ptr()


def test_ranks_that_take_turns_at_the_cores_also_take_turns_at_adding_up_gradients():
    link = Link(name="measured", bytes_per_second=1e9, latency_seconds=1e-4, measured=True, lateness=0.1)
    table = CostTable("here", {product(64): 1e-3}, link=link)
    alone, slowed = (all_reduce_seconds(1e8, 4, found.link) for found in (table, table.slowed(2.0)))
    assert slowed == pytest.approx(2 * alone)
    late = table.slowed(2.0).link.lateness * 2.0**0.5  # of two seconds, which one has become
    assert late == pytest.approx(2.0 * link.lateness)
    assert CostTable("here", {}).slowed(2.0).link is None


def test_a_checkpointed_call_costs_the_host_by_what_it_repeats():
    table = CostTable("here", {}, checkpoint_call_seconds=2.0, checkpoint_operator_seconds=0.5)
    assert CostTable.of(table.to_json()).checkpoint_seconds(6) == 5.0
    assert table.slowed(2.0).checkpoint_seconds(6) == 10.0
    by_sheet = CardCosts(card_of(target_of("A100-40GB")))
    assert 0 < by_sheet.checkpoint_seconds(0) < by_sheet.checkpoint_seconds(10)


def test_tensor_cores_are_used_by_formats_that_the_card_has():
    work = work_of(product(4096, 4096, 4096))
    seconds = {
        (name, dtype): CardCosts(find_card(name)).cost(product(4096, 4096, 4096, dtype), work).seconds
        for name in ("V100-16GB", "A100-40GB", "H100-80GB") for dtype in ("float32", "bfloat16", "float16")
    }  # fmt: skip
    assert seconds["A100-40GB", "bfloat16"] < seconds["A100-40GB", "float32"] / 4
    assert seconds["V100-16GB", "bfloat16"] > 4 * seconds["V100-16GB", "float16"]
    assert seconds["H100-80GB", "bfloat16"] < seconds["A100-40GB", "bfloat16"]


def test_products_that_a_card_only_emulates_take_longer_than_whole_ones():
    call = product(4096, 4096, 4096)
    emulated, whole = (
        CardCosts(find_card("T4")).cost(product(4096, 4096, 4096, dtype), work_of(call))
        for dtype in ("bfloat16", "float32")
    )
    assert emulated.seconds > 1.9 * whole.seconds
    assert emulated.doubt > whole.doubt


def convolution(dtype, last=False, groups=1, channels=64, batch=8):
    images, weight = (batch, channels, 32, 32), (channels, channels // groups, 3, 3)
    strides = (channels * 32 * 32, 1, channels * 32, channels) if last else None
    seen, weights = TensorSpec(images, dtype, strides), TensorSpec(weight, dtype)
    arguments = (seen, weights, None, (1, 1), (1, 1), (1, 1), False, (0, 0), groups)
    return OperatorCall("aten::convolution", arguments, (), (seen,))


@pytest.mark.parametrize(
    ("card", "dtype", "groups", "turned"),
    [
        ("A100-40GB", "float16", 1, True), ("A100-40GB", "float32", 1, True), ("V100-16GB", "float16", 1, True),
        ("V100-16GB", "float32", 1, False), ("A100-40GB", "float16", 64, False), ("A100-40GB", "float16", 2, True),
    ],
)  # fmt: skip
def test_tensor_cores_take_images_channels_last_and_what_is_not_is_turned(card, dtype, groups, turned):
    costs = CardCosts(find_card(card))
    first, last = (convolution(dtype, last, groups) for last in (False, True))
    more = costs.cost(first, work_of(first)).seconds - costs.cost(last, work_of(last)).seconds
    moved = 4 * first.inputs[0].bytes  # input and output, each read and written
    assert more == pytest.approx(moved / (0.75 * costs.card.bytes_per_second) if turned else 0.0)


def test_groups_narrower_than_a_tile_leave_the_rest_of_it_empty():
    costs = CardCosts(find_card("RTX-3090-24GB"))
    calls = {width: convolution("float16", True, 512 // width, 512, 64) for width in (1, 16, 32, 64, 128)}
    flops = {width: work_of(call).flops for width, call in calls.items()}
    seconds = {width: costs.cost(call, work_of(call)).seconds for width, call in calls.items()}
    assert flops[64] == 4 * flops[16]
    assert seconds[128] == pytest.approx(2 * seconds[64], rel=0.01)
    assert seconds[32] > 0.7 * seconds[64], "half the products, in tiles that are half empty"
    assert seconds[16] > 0.6 * seconds[64]
    assert seconds[1] < seconds[16], "filters of one channel have kernels of their own"


def test_a_transposed_convolution_to_fewer_channels_is_no_grouped_one():
    deep, wide = TensorSpec((8, 256, 16, 16), "float16"), TensorSpec((8, 128, 32, 32), "float16")
    weight, rest = TensorSpec((256, 128, 2, 2), "float16"), (None, (2, 2), (0, 0), (1, 1))
    down = OperatorCall("aten::convolution", (wide, weight, *rest, False, (0, 0), 1), (), (deep,))
    up = OperatorCall("aten::convolution", (deep, weight, *rest, True, (0, 0), 1), (), (wide,))
    costs = CardCosts(find_card("A100-40GB"))
    assert work_of(up).flops == work_of(down).flops
    assert costs.cost(up, work_of(up)) == costs.cost(down, work_of(down))


def test_cards_with_graphics_memory_keep_it_busier():
    table = {card.name for card in CARDS if card.stacked_memory}
    assert {"P100-16GB", "V100-32GB", "A100-40GB", "A30-24GB", "H100-80GB", "GH200-96GB", "B200-180GB"} <= table
    assert not {"RTX-3090-24GB", "T4-16GB", "A10G-24GB", "L40S-48GB", "RTX-5090-32GB", "RTX-PRO-6000-96GB"} & table
    copy = OperatorCall("aten::clone", (TensorSpec((1 << 24,), "float32"),), (), (TensorSpec((1 << 24,), "float32"),))
    reached = {
        name: 2 * copy.outputs[0].bytes / CardCosts(find_card(name)).cost(copy, work_of(copy)).seconds / bandwidth
        for name, bandwidth in (("A100-80GB", 2039e9), ("RTX-3090-24GB", 936e9))
    }
    assert reached["A100-80GB"] == pytest.approx(0.75, rel=0.04)
    assert reached["RTX-3090-24GB"] == pytest.approx(0.9, rel=0.04)


def test_thirty_cards_have_the_figures_of_their_data_sheets():
    assert len(CARDS) >= 30
    for card in CARDS:
        assert 1e11 < card.bytes_per_second < 1e13
        assert card.float32_flops_per_second > 1e12
        assert (card.tf32_flops_per_second > 0) == (card.capability >= (8, 0))
        assert card.peak_flops_per_second("float16") >= card.peak_flops_per_second("float32")


def test_a_size_of_memory_says_nothing_about_speed():
    with pytest.raises(PlanError, match="name a card"):
        card_of(target_of("24 GiB"))
