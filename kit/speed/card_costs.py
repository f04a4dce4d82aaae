"""CardCosts: what calls cost on a card that is not here: its data sheet times the fraction that kernels reach.

    seconds = max(FLOPs / (reached × peak), bytes / (reached × bandwidth)) + the least that a kernel takes

and, for a convolution on tensor cores whose images are not channels last, the copies that turn them and turn them back.
A group of filters fills a tile of `_GROUP_TILE` channels as far as it has some; filters of a single channel (depthwise)
have kernels of their own, which memory bounds.

What kernels reach is fitted to published speeds of eager torch on one GPU (V100, A100, RTX 3090, 4090 and A6000: 32
rows of `benchmarks/published.py --measure speed`, none of them held out), where the table says so. Products of small
matrices reach less, because tiles of 128 rows and columns are not full.

Known error: `benchmarks/README.md` has it beside published speeds that nothing was fitted to. Compiled code is priced
as eager code, and what a loader or a hot card held up in the published runs is not known here. So the doubt is large,
and a first trial replaces it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from kit.errors import PlanError
from kit.machine.machine import BF16_CAPABILITY
from kit.memory.replay.calls import OperatorCall
from kit.memory.replay.cards import CARDS, Card, DeviceTarget
from kit.speed.pricing import Cost, slowest
from kit.speed.work import Kind, Work


@dataclass(frozen=True, slots=True)
class Achieved:
    """What kernels of one kind reach of a data sheet."""

    of_peak: float
    of_bandwidth: float
    doubt: float
    source: str


_FITTED = "fitted to 32 published speeds (benchmarks/published.py)"
_FITTED_GROUPS = "fitted to speeds of ResNeXt and RegNet that timm published for an RTX 3090 (torch 1.12)"
ACHIEVED: Mapping[str, Achieved] = {
    "matmul": Achieved(0.88, 0.8, 1.3, _FITTED),
    "convolution": Achieved(1.0, 0.36, 1.6, _FITTED),
    "grouped convolution": Achieved(0.35, 0.21, 1.8, _FITTED_GROUPS),
    "depthwise convolution": Achieved(0.1, 0.21, 1.8, _FITTED),
    "attention": Achieved(0.8, 0.7, 1.5, _FITTED),
    "recurrent": Achieved(0.15, 0.5, 2.0, "cuDNN's recurrent kernels wait for each step of a sequence; assumed"),
    "normalization": Achieved(0.5, 0.52, 1.4, _FITTED),
    "elementwise": Achieved(0.5, 0.61, 1.25, _FITTED),
    "reduction": Achieved(0.5, 0.65, 1.4, "assumed"),
    "indexing": Achieved(0.5, 0.35, 1.8, "scattered reads, and sorts of torch's embedding gradients; assumed"),
    "copy": Achieved(0.5, 0.75, 1.3, "a copy reaches 0.8 to 0.9 of the stated bandwidth (BabelStream)"),
}  # fmt: skip
"""By kind of operator."""
HOPPER = 0.72
"""Of those fractions of the peak, on cards from Hopper on, which reach their power limit sooner; fitted likewise.
cuBLAS reaches 600 to 720 of 989 TFLOP/s on H100."""
GRAPHICS_MEMORY = 1.2
"""Times those fractions of the bandwidth, on cards with GDDR memory: it is narrower for as many cores, which keep it
busier. Fitted to the 19 of those speeds that are of such cards."""
EMULATED, _EMULATED_DOUBT = 0.5, 2.0
"""Of the speed of float32, of products in bf16 on cards that have no units for it: less than half on a T4 (XLA's
issue 12429), and a ModernBERT there took 4.3 times as long as in float16 (earino, Applied Deep Learning), which this
makes of it. Older cards are taken alike."""
KERNEL_SECONDS = 2.5e-6
"""The least that a kernel keeps a GPU busy, launch gap included."""
_TILE, _INNER = 128, 32
_GROUP_TILE = 64
"""Channels of a tile of a grouped convolution, which belong to one group."""
_HOST_SECONDS = {"forward": 9e-6, "backward": 6e-6, "optimizer": 8e-6}
"""Of one call: Python, dispatcher and autograd of torch 2 on a server's core; torch's own overhead benchmarks show 4 to
10 µs for a call with autograd."""
_OTHER_HOST_SECONDS = 6e-6
LOOP_SECONDS = 4e-4
"""Of Lightning's loop and its hooks for each batch; 0.2 to 0.6 ms on a server's core."""
_CHECKPOINT_SECONDS, _CHECKPOINT_OPERATOR_SECONDS = 1.3e-4, 1.5e-5
"""Of the host for a checkpointed call and for each operator that it repeats, beside those: what they save goes through
hooks in Python. Half of what was measured on a core where other calls take twice as long as above, too."""


@dataclass(frozen=True)
class CardCosts:
    """Costs on a card, from its data sheet."""

    card: Card
    achieved: Mapping[str, Achieved] = field(default_factory=lambda: ACHIEVED)
    step_seconds: float = LOOP_SECONDS
    doubt: float = 1.1
    asynchronous: bool = True
    tf32: bool = False
    """Whether products of float32 may use TF32, as `torch.set_float32_matmul_precision("high")` allows."""

    @property
    def name(self) -> str:
        return f"the data sheet of {self.card.name}"

    def host_seconds(self, phase: str) -> float:
        """Of the host for each call in a phase."""
        return _HOST_SECONDS.get(phase, _OTHER_HOST_SECONDS)

    def checkpoint_seconds(self, operators: int) -> float:
        """Of the host for a checkpointed call that repeats so many operators, beside those."""
        return _CHECKPOINT_SECONDS + operators * _CHECKPOINT_OPERATOR_SECONDS

    def cost(self, call: OperatorCall, work: Work) -> Cost:
        """Of one call; a number that the host reads takes no kernel, and counters of optimizers lie on the host."""
        if work.kind in ("view", "communication") or call.name == "_local_scalar_dense":
            return Cost(0.0, 1.0, "datasheet", "memory bandwidth")
        width = _group_width(call, work.kind)
        grouped = f"{'depthwise' if width == 1 else 'grouped'} convolution"
        reached = self.achieved[grouped if width else work.kind]
        of_peak = reached.of_peak * (HOPPER if self.card.capability >= (9, 0) else 1.0)
        doubt = reached.doubt
        if work.flops and self._emulates(self._format_of(call, work.kind)):
            of_peak, doubt = of_peak * EMULATED, max(doubt, _EMULATED_DOUBT)
        compute = self.peak_seconds(call, work) * _padding(call, work.kind) / of_peak
        memory = self._seconds_of_bytes(work.bytes, reached)
        start = KERNEL_SECONDS * _kernels_in_turn(call, work.kind)
        seconds = max(compute, memory) + self._layout_seconds(call, work.kind) + start
        return Cost(seconds, doubt, "datasheet", slowest(compute, memory, start))

    def _emulates(self, number_format: str) -> bool:
        return number_format == "bfloat16" and self.card.capability < BF16_CAPABILITY

    def peak_seconds(self, call: OperatorCall, work: Work) -> float:
        """Of its products at the stated peak of the units that they use."""
        return work.flops / self.card.peak_flops_per_second(self._format_of(call, work.kind))

    def _layout_seconds(self, call: OperatorCall, kind: Kind) -> float:
        """What cuDNN takes to turn images into the layout of tensor cores, channels last, and back.

        Its kernels know no other; those for filters of one channel take images as they are.
        """
        plain = self.card.capability < (7, 0) or self._format_of(call, kind) in ("float32", "float64")
        if kind != "convolution" or plain or _group_width(call, kind) == 1:
            return 0.0
        wide = [spec for spec in call.inputs if len(spec.shape) >= 4]
        if len(wide) < 2 or any(spec.strides is not None and spec.strides[1] == 1 for spec in wide):
            return 0.0
        weight = wide[-1].shape
        images = [spec for spec in (*call.inputs, *call.outputs) if len(spec.shape) >= 4 and spec.shape != weight]
        moved = 2 * sum(spec.bytes for spec in images)  # each is read and written once more
        return self._seconds_of_bytes(moved, self.achieved["copy"])

    def _seconds_of_bytes(self, nbytes: int, reached: Achieved) -> float:
        kept_busy = 1.0 if self.card.stacked_memory else GRAPHICS_MEMORY
        return nbytes / (kept_busy * reached.of_bandwidth * self.card.bytes_per_second)

    def _format_of(self, call: OperatorCall, kind: Kind) -> str:
        """The number format whose units a product uses: torch lets convolutions use TF32, and others where told to."""
        dtype = call.inputs[0].dtype if call.inputs else "float32"
        may = kind in ("convolution", "recurrent") or (self.tf32 and kind in ("matmul", "attention"))
        return "tf32" if may and dtype == "float32" and self.card.capability >= (8, 0) else dtype


def _kernels_in_turn(call: OperatorCall, kind: Kind) -> int:
    """Kernels of a call that wait for each other: a product and what follows it, for each step and layer of cuDNN's
    recurrent kernels."""
    return max(1, 2 * int(call.arguments[-1])) if kind == "recurrent" and call.name.startswith("_cudnn_rnn") else 1


def _group_width(call: OperatorCall, kind: Kind) -> int:
    """Channels that a filter of a grouped convolution sees; 0 for full filters and for whatever is no convolution."""
    place = 9 if call.name == "convolution_backward" else 8
    weight = [spec.shape for spec in call.inputs if len(spec.shape) >= 3][-1:]
    if kind != "convolution" or len(call.arguments) <= place or not weight:
        return 0
    groups, transposed = int(call.arguments[place]), bool(call.arguments[place - 2])
    seen = weight[0][0] // groups if transposed else weight[0][1]
    return seen if groups > 1 else 0


def _padding(call: OperatorCall, kind: Kind) -> float:
    """How much more a product computes than it is asked for, because its tiles are not full."""
    if (width := _group_width(call, kind)) > 1:
        return _unfilled(width, _GROUP_TILE)
    if kind != "matmul" or len(call.inputs) < 2 or not call.outputs or min(len(x.shape) for x in call.inputs[-2:]) < 2:
        return 1.0
    rows, columns = call.inputs[-2].shape[-2], call.outputs[0].shape[-1]
    inner = call.inputs[-2].shape[-1]
    return _unfilled(rows, _TILE) * _unfilled(columns, _TILE) * _unfilled(inner, _INNER)


def _unfilled(size: int, tile: int) -> float:
    """Kernels with smaller tiles exist, and reach less: half the waste counts."""
    return 0.5 + 0.5 * -(-size // tile) * tile / max(size, 1)


def card_of(target: DeviceTarget) -> Card:
    """The card of the table that a target is.

    Raises:
        PlanError: for a size of memory, which says nothing about speed.
    """
    found = next((card for card in CARDS if card.name == target.name), None)
    if found is None:
        raise PlanError(
            f"how fast {target.name} is is not known: its memory says nothing about it; name a card, such as "
            "device='A100-40GB'"
        )
    return found
