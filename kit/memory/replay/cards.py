"""The device a prediction is for: a GPU model from a table, a number of bytes, or this machine.

A card's bytes are what CUDA offers a process (`torch.cuda.mem_get_info()[1]`), which is less than the size it is sold
with; where machines differ, the lowest figure counts. This machine is read through NVML and cgroups: what is free now.
Without a GPU it is the CPU, whose memory all ranks share and whose allocator neither caches nor rounds.

Beside the allocator a process holds CUDA's context and the kernels loaded so far. That varies: it is a range of bytes,
(low, high).
"""

from __future__ import annotations

import difflib
import re
from dataclasses import dataclass
from typing import Literal

from kit.errors import PlanError
from kit.machine.machine import BF16_CAPABILITY, Gpu, Machine, hardware
from kit.units import format_bytes, parse_bytes

THIS_MACHINE = "this machine"

DeviceKind = Literal["cuda", "cpu"]

_MIB = 1 << 20
_GIB = 1 << 30
# Context and kernels loaded lazily (CUDA 11.7 and later): about 300 MB before any real work (pytorch#107667); other
# processes show as 418 MiB on an A100 and 496 MiB on an RTX 4090 in out-of-memory messages of 2025 and 2026. The high
# end leaves room for the kernels of cuBLAS and cuDNN that a training step loads.
_CONTEXT_BYTES = (300 * _MIB, 700 * _MIB)
_CONTEXT_BYTES_HOPPER = (400 * _MIB, 900 * _MIB)
# Python with torch and lightning: 344 MB measured; ranks forked from one process share most of it.
_HOST_PROCESS_BYTES = (64 * _MIB, 512 * _MIB)
_SIZE_TOLERANCE = 0.1


@dataclass(frozen=True, slots=True, kw_only=True)
class Card:
    """One GPU model."""

    name: str
    """Model and size, such as `A100-80GB`."""
    memory_bytes: int
    """What CUDA offers a process on an idle card."""
    capability: tuple[int, int]
    """CUDA compute capability, (major, minor)."""
    tensor_flops_per_second: float = 0.0
    """16-bit products on tensor cores, as the maker states them, without sparsity; 0 where it has none."""
    tf32_flops_per_second: float = 0.0
    float32_flops_per_second: float = 0.0
    bytes_per_second: float = 0.0
    """Of its memory."""

    def peak_flops_per_second(self, dtype: str) -> float:
        """The stated peak of products in a number format; one that it has no units for runs as float32."""
        if dtype == "float16" and self.tensor_flops_per_second:
            return self.tensor_flops_per_second
        if dtype == "bfloat16" and self.capability >= BF16_CAPABILITY:
            return self.tensor_flops_per_second
        return (self.tf32_flops_per_second if dtype == "tf32" else 0.0) or self.float32_flops_per_second

    @property
    def stacked_memory(self) -> bool:
        """Whether its memory is HBM, as on the largest chip of each architecture, and not GDDR."""
        return self.capability[1] == 0 and self.capability[0] < 12

    @property
    def context_bytes(self) -> tuple[int, int]:
        """(low, high) of CUDA's context and loaded kernels, outside the allocator, for one process."""
        return _CONTEXT_BYTES_HOPPER if self.capability >= (9, 0) else _CONTEXT_BYTES

    @property
    def cublas_workspace_bytes(self) -> int:
        """What cuBLAS takes from the allocator per thread that multiplies matrices: torch's default.

        `:4096:2:16:8` in KiB is 8,519,680 bytes (seen so in pytorch#95668); Hopper and Blackwell take 32 MiB
        (aten/src/ATen/cuda/CublasHandlePool.cpp).
        """
        return 32 * _MIB if self.capability >= (9, 0) else (4096 * 2 + 16 * 8) << 10


def _card(
    name: str,
    gibibytes: float,
    capability: tuple[int, int],
    tensor: float,
    tf32: float,
    float32: float,
    gigabytes: float,
) -> Card:
    return Card(
        name=name, memory_bytes=int(gibibytes * _GIB), capability=capability, tensor_flops_per_second=tensor * 1e12,
        tf32_flops_per_second=tf32 * 1e12, float32_flops_per_second=float32 * 1e12, bytes_per_second=gigabytes * 1e9,
    )  # fmt: skip


# GiB of the eighteen cards that kit had first: the lowest "total capacity" found in torch's out-of-memory
# messages in public issues and logs (2023 to September 2026); those of the other fifteen are the usual ones, and were
# not looked up so. Capabilities are those of NVIDIA's table (developer.nvidia.com/cuda-gpus). Speeds are those of the
# maker's data sheets and architecture papers (Pascal, Volta, Turing, GA100, GA102, Ada, H100, Blackwell), without
# sparsity, of the SXM form where there is one: dense 16-bit tensor cores with 32-bit accumulation, TF32, float32
# outside tensor cores, in 10^12 FLOP/s; memory in 10^9 bytes/s. AWS states those of the A10G. A 0: the card has none.
CARDS: tuple[Card, ...] = (
    # name, GiB, capability, 16 bit, TF32, float32, memory
    _card("RTX-3070-8GB", 7.79, (8, 6), 40.6, 20.3, 20.3, 448),
    _card("RTX-3080-10GB", 9.77, (8, 6), 59.5, 29.8, 29.8, 760),
    _card("RTX-2080-Ti-11GB", 10.75, (7, 5), 53.8, 0, 13.4, 616),
    _card("GTX-1080-Ti-11GB", 10.91, (6, 1), 0, 0, 11.3, 484),
    _card("RTX-3060-12GB", 11.63, (8, 6), 25.6, 12.8, 12.7, 360),
    _card("T4-16GB", 14.56, (7, 5), 65, 0, 8.1, 320),
    _card("RTX-4080-16GB", 15.56, (8, 9), 97.5, 48.7, 48.7, 717),
    _card("RTX-A4000-16GB", 15.73, (8, 6), 76.7, 38.3, 19.2, 448),
    _card("V100-16GB", 15.77, (7, 0), 125, 0, 15.7, 900),
    _card("P100-16GB", 15.89, (6, 0), 0, 0, 9.3, 732),
    _card("L4-24GB", 22.03, (8, 9), 121, 60, 30.3, 300),
    _card("A10G-24GB", 22.04, (8, 6), 70, 35, 31.5, 600),
    _card("A10-24GB", 22.06, (8, 6), 125, 62.5, 31.2, 600),
    _card("A30-24GB", 23.5, (8, 0), 165, 82, 10.3, 933),
    _card("RTX-4090-24GB", 23.52, (8, 9), 165.2, 82.6, 82.6, 1008),
    _card("RTX-3090-24GB", 23.55, (8, 6), 71, 35.6, 35.6, 936),
    _card("TITAN-RTX-24GB", 23.64, (7, 5), 130.5, 0, 16.3, 672),
    _card("RTX-A5000-24GB", 23.68, (8, 6), 111.1, 55.6, 27.8, 768),
    _card("RTX-5090-32GB", 31.36, (12, 0), 209.5, 104.8, 104.8, 1792),
    _card("V100-32GB", 31.73, (7, 0), 125, 0, 15.7, 900),
    _card("A100-40GB", 39.25, (8, 0), 312, 156, 19.5, 1555),
    _card("A40-48GB", 44.34, (8, 6), 149.7, 74.8, 37.4, 696),
    _card("L40S-48GB", 44.39, (8, 9), 362, 183, 91.6, 864),
    _card("L40-48GB", 44.39, (8, 9), 181, 90.5, 90.5, 864),
    _card("RTX-A6000-48GB", 47.4, (8, 6), 154.8, 77.4, 38.7, 768),
    _card("RTX-6000-Ada-48GB", 47.5, (8, 9), 364.2, 182.1, 91.1, 960),
    _card("H100-80GB", 79.1, (9, 0), 989, 494, 66.9, 3350),
    _card("A100-80GB", 79.14, (8, 0), 312, 156, 19.5, 2039),
    _card("H100-NVL-94GB", 93.1, (9, 0), 835, 417, 60, 3938),
    _card("GH200-96GB", 94.5, (9, 0), 989, 494, 66.9, 4000),
    _card("RTX-PRO-6000-96GB", 94.97, (12, 0), 503.8, 251.9, 126, 1792),
    _card("H200-141GB", 139.72, (9, 0), 989, 494, 66.9, 4800),
    _card("B200-180GB", 178.35, (10, 0), 2250, 1125, 75, 8000),
)
"""GPU models by rising memory."""

COMMON_CARDS = ("T4-16GB", "RTX-4090-24GB", "A100-40GB", "H100-80GB", "H200-141GB")
"""Shown and compared where none is named."""


_OF_APPLE = frozenset({"apple", "mac", "macbook", "m1", "m2", "m3", "m4", "m5"})
_HERE = frozenset({"cpu", "cuda", "gpu", "mps", "here", "auto", "local"})
"""What torch and Lightning call a device of this machine, whichever it is."""


def find_card(name: str) -> Card:
    """The card of that name; case, spaces and dashes do not count, nor does the size where a model has one size.

    Raises:
        PlanError: for an unknown or ambiguous name, with the closest ones.
    """
    wanted = _plain(name)
    named = [card for card in CARDS if wanted in (_plain(card.name), _plain(card.name.removesuffix("GB")))]
    found = named or [card for card in CARDS if wanted == _plain(_model(card))]
    if len(found) == 1:
        return found[0]
    if found:
        sizes = " and ".join(card.name for card in found)
        raise PlanError(f"{name!r} comes as {sizes}; say which")
    known = [card.name for card in CARDS]
    words = set(re.findall(r"[a-z0-9]+", name.lower()))
    parts = [set(_model(card).lower().split("-")) for card in CARDS]
    alike = [card.name for card, own in zip(CARDS, parts, strict=True) if own <= words or (words and words <= own)]
    close = difflib.get_close_matches(name.upper(), [*known, THIS_MACHINE.upper()], n=1, cutoff=0.5)
    if words & _HERE or close == [THIS_MACHINE.upper()]:
        raise PlanError(f"{name!r} names no model; for what is here, did you mean {THIS_MACHINE!r}?")
    if not words:
        raise PlanError(f"{name!r} names no device; give a GPU model such as 'A100-40GB', or {THIS_MACHINE!r}")
    if words & _OF_APPLE:
        raise PlanError(
            f"{name!r} is Apple's: kit predicts NVIDIA's GPUs, this machine's CPU, and a size such as '24 GiB'"
        )
    # All sizes of the model that is named in other words ("A100 PCIe"), unless spelling tells which.
    near = close if close and (close[0] in alike or not alike) else alike
    hint = f"did you mean {' or '.join(map(repr, near))}?" if near else f"known are {', '.join(known)}."
    raise PlanError(f"{name!r} is no GPU model in the table; {hint} A size such as '24 GiB' is taken too")


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceTarget:
    """The device a prediction is for."""

    name: str
    capacity_bytes: int
    """What one rank may use, allocator and all else together."""
    device_kind: DeviceKind
    capability: tuple[int, int] | None
    """CUDA compute capability; None on the CPU."""
    outside_bytes: tuple[int, int]
    """(low, high) held by the process itself, outside the allocator."""
    cublas_workspace_bytes: int
    reasons: tuple[str, ...] = ()

    def __str__(self) -> str:
        size = format_bytes(self.capacity_bytes)
        return self.name if size in self.name else f"{self.name} ({size})"

    @property
    def rounding_bytes(self) -> int:
        """What its allocator rounds blocks up to."""
        return 512 if self.device_kind == "cuda" else 1


def emulated(precision: str, target: DeviceTarget) -> list[str]:
    """That a GPU has no units for bf16, where it is asked for, and what to use instead."""
    capability = target.capability
    if not precision.startswith("bf16") or capability is None or capability >= BF16_CAPABILITY:
        return []
    has, begins = (".".join(map(str, one)) for one in (capability, BF16_CAPABILITY))
    instead = "16-mixed, which it has units for" if capability >= _TENSOR_CORES else "32-true, or 16-mixed for memory"
    return [
        f"warning: {target.name} has no units for {precision} (capability {has}, and they begin at {begins}): products "
        f"are emulated, about half as fast as in float32; set hardware.precision to {instead}, or leave it on auto"
    ]


_TENSOR_CORES = (7, 0)
_LEAST_BYTES = 1 << 20
"""A number below it is no size that was meant in bytes."""


def target_of(device: str | int | DeviceTarget, machine: Machine | None = None, world_size: int = 1) -> DeviceTarget:
    """The target named by a card, a size ("24 GiB" or bytes) or "this machine" (looked at when `machine` is None).

    `world_size` matters on the CPU only, where ranks share one memory.

    Raises:
        PlanError: for what is no card and no size, and for a number that lacks its unit.
    """
    if isinstance(device, DeviceTarget):
        return device
    if isinstance(device, str) and device.strip().lower() == THIS_MACHINE:
        return _here(hardware() if machine is None else machine, world_size)
    if type(device).__name__ in ("list", "tuple", "set"):
        each = "ask for each in a loop, or kit.studies.compare_cards; a dry run that serves several is made once"
        raise PlanError(f"{device!r} is no device but a {type(device).__name__}; {each}")
    if isinstance(device, bool) or not isinstance(device, str | int):
        raise PlanError(f"{device!r} is no device; give one, such as 'A100-40GB', '24 GiB' or {THIS_MACHINE!r}")
    digits = str(device).strip()
    if digits.isdecimal() and 0 < int(digits) < _LEAST_BYTES:
        cards = [card.name for card in CARDS if digits in card.name.split("-")]
        hint = f"did you mean {cards[0]!r}?" if cards else f"give the unit, as in '{digits} GiB'"
        raise PlanError(f"{digits} is a size of {digits} bytes; {hint}")
    if isinstance(device, int) or re.match(r"\s*-?\d+(\.\d+)?\s*([a-z]*b)?\s*$", device, re.IGNORECASE):
        try:
            size_bytes = parse_bytes(device)
        except ValueError as error:
            raise PlanError(str(error)) from None
        if size_bytes <= 0:
            raise PlanError(f"a device of {device!r} has no memory; give a positive size, such as '24 GiB'")
        reason = "only a size is given: kernels and number formats are taken as those of capability 8.0"
        return _of_cuda(f"a device of {format_bytes(size_bytes)}", size_bytes, (8, 0), reason)
    card = find_card(device)
    return _of_cuda(card.name, card.memory_bytes, card.capability)


def _of_cuda(name: str, capacity_bytes: int, capability: tuple[int, int], *reasons: str) -> DeviceTarget:
    card = Card(name=name, memory_bytes=capacity_bytes, capability=capability)
    return DeviceTarget(
        name=name, capacity_bytes=capacity_bytes, device_kind="cuda", capability=capability,
        outside_bytes=card.context_bytes, cublas_workspace_bytes=card.cublas_workspace_bytes, reasons=reasons,
    )  # fmt: skip


def _here(machine: Machine, world_size: int) -> DeviceTarget:
    if not machine.gpus:
        free = machine.memory_available_bytes
        reasons = [f"the CPU: {format_bytes(free)} of {format_bytes(machine.memory_bytes)} are available now"]
        if world_size > 1:
            reasons.append(f"{world_size} ranks share them, {format_bytes(free // world_size)} each")
        return DeviceTarget(
            name=THIS_MACHINE, capacity_bytes=free // world_size, device_kind="cpu", capability=None,
            outside_bytes=_HOST_PROCESS_BYTES, cublas_workspace_bytes=0, reasons=tuple(reasons),
        )  # fmt: skip
    gpu = next(gpu for gpu in machine.gpus if gpu.uuid in machine.auto.devices)
    card = card_of_gpu(gpu)
    capability = gpu.capability or (card.capability if card else (8, 0))
    capacity = min(gpu.free_bytes, card.memory_bytes) if card else gpu.free_bytes
    reason = f"{gpu.name}: {format_bytes(capacity)} of {format_bytes(gpu.total_bytes)} can be used now"
    return _of_cuda(THIS_MACHINE, capacity, capability, reason)


def card_of_gpu(gpu: Gpu) -> Card | None:
    """The table's entry for a GPU as the driver names it, such as `NVIDIA A100-SXM4-80GB`."""
    if gpu.is_mig:
        return None
    words = set(re.split(r"[^a-z0-9]+", gpu.name.lower()))
    alike = [card for card in CARDS if set(_model(card).lower().split("-")) <= words]
    near = [card for card in alike if abs(card.memory_bytes / gpu.total_bytes - 1) < _SIZE_TOLERANCE]
    return near[0] if near else None


def _model(card: Card) -> str:
    return card.name.rpartition("-")[0]


def _plain(name: str) -> str:
    letters = re.sub(r"[^a-z0-9]", "", name.lower())
    return re.sub(r"^(nvidia)?(tesla|geforce)?", "", letters)
