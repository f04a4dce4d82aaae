"""Cards and targets: names people write, sizes, and this machine as NVML or the cgroup tells it."""

import re

import pytest

from kit.errors import PlanError
from kit.machine.machine import Gpu, Machine
from kit.memory.replay.cards import CARDS, DeviceTarget, find_card, target_of

GIB = 1 << 30


def gpu(name, total, free=None, index=0, **more):
    free = total if free is None else free
    return Gpu(index=index, uuid=f"GPU-{index}", name=name, total_bytes=total, free_bytes=free, **more)


def machine(*gpus):
    return Machine(
        gpus=gpus, cores=4, cores_installed=4, memory_bytes=24 * GIB, memory_available_bytes=20 * GIB,
        memory_installed_bytes=24 * GIB, gpu_source="NVML" if gpus else "no NVIDIA driver",
    )  # fmt: skip


# -- cards


def test_every_card_is_found_by_its_name_and_holds_less_than_the_box_says():
    for card in CARDS:
        assert find_card(card.name) is card
        size = int(card.name.rpartition("-")[2].removesuffix("GB"))
        assert 0.85 * size * 1e9 < card.memory_bytes < size * GIB
        assert card.context_bytes[0] < card.context_bytes[1] < GIB
    assert list(CARDS) == sorted(CARDS, key=lambda card: card.memory_bytes)
    assert len({card.name for card in CARDS}) == len(CARDS)


@pytest.mark.parametrize(
    ("written", "name"),
    [
        ("H100", "H100-80GB"),
        ("h100 80gb", "H100-80GB"),
        ("A100-80", "A100-80GB"),
        ("NVIDIA A100 40GB", "A100-40GB"),
        ("Tesla T4", "T4-16GB"),
        ("rtx4090", "RTX-4090-24GB"),
        ("GeForce RTX 3090", "RTX-3090-24GB"),
        ("L4", "L4-24GB"),
    ],
)
def test_cards_are_found_as_people_write_them(written, name):
    assert find_card(written).name == name


def test_an_ambiguous_card_is_answered_with_its_sizes():
    with pytest.raises(PlanError, match="A100-40GB and A100-80GB; say which"):
        find_card("A100")


def test_an_unknown_card_is_answered_with_the_closest():
    with pytest.raises(PlanError, match="did you mean 'H100-80GB'"):
        find_card("H1000-80GB")
    with pytest.raises(PlanError, match="known are .*T4-16GB"):
        find_card("abacus")
    with pytest.raises(PlanError, match="names no device"):
        find_card("")


@pytest.mark.parametrize(
    ("written", "meant"),
    [
        *[(name, ["this machine"]) for name in ("cpu", "CPU", "cuda", "cuda:0", "gpu", "mps", "this maschine")],
        ("", ["A100-40GB", "this machine"]),
        ("H100 SXM", ["H100-80GB"]),
        ("A100 PCIe", ["A100-40GB", "A100-80GB"]),
        ("A6000", ["RTX-A6000-48GB"]),
        ("4090", ["RTX-4090-24GB"]),
        ("NVIDIA A100-SXM4-40GB", ["A100-40GB"]),
        ("L40S PCIe", ["L40S-48GB"]),
        ("RTX 6000 Ada Generation", ["RTX-6000-Ada-48GB"]),
    ],
)
def test_a_device_named_in_other_words_is_answered_with_what_is_meant(written, meant):
    with pytest.raises(PlanError) as refused:
        target_of(written)
    assert re.findall(r"'([^']*)'", str(refused.value).removeprefix(repr(written)))[: len(meant)] == meant


def test_cublas_takes_what_torch_chooses_for_the_capability():
    assert find_card("A100-80GB").cublas_workspace_bytes == 8_519_680
    assert find_card("T4").cublas_workspace_bytes == 8_519_680
    assert find_card("H100").cublas_workspace_bytes == find_card("B200").cublas_workspace_bytes == 32 << 20


# -- targets


def test_a_card_becomes_a_target():
    target = target_of("H100-80GB")
    assert (target.name, target.device_kind, target.capability) == ("H100-80GB", "cuda", (9, 0))
    assert (target.capacity_bytes, target.rounding_bytes) == (find_card("H100").memory_bytes, 512)
    assert target_of(target) is target


@pytest.mark.parametrize("size", ["24 GiB", "24gib", 24 * GIB, str(24 * GIB), " 24 GiB "])
def test_a_size_becomes_a_target(size):
    target = target_of(size)
    assert (target.capacity_bytes, target.device_kind, target.capability) == (24 * GIB, "cuda", (8, 0))
    assert str(target) == "a device of 24 GiB"
    assert "only a size" in target.reasons[0]


@pytest.mark.parametrize("size", [0, -1, "0 GiB", "-3 GiB"])
def test_a_size_that_is_none_is_refused(size):
    with pytest.raises(PlanError):
        target_of(size)


def test_this_machine_is_its_least_occupied_gpu_with_what_is_free_of_it():
    busy, idle = gpu("Tesla T4", 15 * GIB, 2 * GIB), gpu("Tesla T4", 15 * GIB, 14 * GIB, 1, capability=(7, 5))
    target = target_of("this machine", machine(busy, idle))
    assert (target.capacity_bytes, target.capability, target.device_kind) == (14 * GIB, (7, 5), "cuda")
    assert any("Tesla T4: 14 GiB of 15 GiB" in reason for reason in target.reasons)


def test_a_gpu_offers_no_more_than_cuda_gives_on_such_a_card():
    name = "NVIDIA A100-SXM4-80GB"
    target = target_of("this machine", machine(gpu(name, 80 * GIB, capability=(8, 0))))
    assert target.capacity_bytes == find_card("A100-80GB").memory_bytes


def test_a_gpu_that_is_in_no_table_and_an_instance_count_as_they_are():
    unheard = target_of("this machine", machine(gpu("NVIDIA X1", 10 * GIB, 9 * GIB)))
    assert (unheard.capacity_bytes, unheard.capability) == (9 * GIB, (8, 0))
    part = gpu("NVIDIA A100-SXM4-80GB MIG", 10 * GIB, parent="GPU-9", capability=(8, 0))
    assert target_of("this machine", machine(part)).capacity_bytes == 10 * GIB


def test_without_a_gpu_this_machine_is_its_cpu_whose_ranks_share_one_memory():
    alone, shared = target_of("this machine", machine()), target_of("This Machine", machine(), world_size=4)
    assert (alone.device_kind, alone.capability, alone.rounding_bytes) == ("cpu", None, 1)
    assert (alone.capacity_bytes, shared.capacity_bytes) == (20 * GIB, 5 * GIB)
    assert alone.cublas_workspace_bytes == 0
    assert "4 ranks share them, 5 GiB each" in shared.reasons


def test_this_machine_can_be_asked_for_real():
    target = target_of("this machine")
    assert isinstance(target, DeviceTarget)
    assert target.capacity_bytes > 0


@pytest.mark.parametrize(
    ("device", "hint"),
    [("4090", "RTX-4090-24GB"), (24, "'24 GiB'"), (None, "None is no device"), (24.0, "24.0 is"), (["T4"], "loop")],
)
def test_a_number_without_its_unit_and_what_is_no_device_are_answered(device, hint):
    with pytest.raises(PlanError, match=hint):
        target_of(device)
