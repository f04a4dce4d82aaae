"""BlockRecorder: every block that operators make and free while a module trains, with who made it, when and what for.

It looks at storages, not at tensors: views are free, an in-place operator makes nothing, and a block ends when Python
and autograd have both let go of it. It works on fake tensors, where nothing is allocated, and unchanged on real ones.
What a kernel takes for itself inside an operator is not visible, so `workspace` says how much that is.

Use: enter it, make the module, `track` it, then call `begin_batch()` before each micro-batch. Forward, backward and
optimizer phases are recognised by themselves, because torch's own entry points are replaced while the recorder is
entered: plain loops, Lightning and manual optimization all pass them. A block belongs to the part of the module that
runs: in a forward pass by the calls of its parts, in a backward pass by the part that ran when the autograd node was
made, known from the node's sequence number.

What was freed before the first batch is dropped, since set-up happens on the host. Invariant: each block is allocated
once and freed at most once, and events are in the order in which they happened.

Private parts of torch used here, all tested on its upgrade: `_get_dispatch_mode`, `UntypedStorage._cdata`, sequence
numbers of autograd and `ShardingPropagator._propagate_tensor_meta_non_cached`.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import sys
import weakref
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, UntypedStorage, nn
from torch._prims_common import is_non_overlapping_and_dense_or_false
from torch._subclasses.fake_tensor import FakeTensor
from torch.autograd import Function
from torch.nn.parameter import is_lazy
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes, is_traceable_wrapper_subclass
from typing_extensions import override

from kit.confinement.stand_ins import overridden
from kit.memory.record.fake_mode import FakeMode, plainly
from kit.memory.record.truth import SPARSE_LAYOUTS, sparse_parts
from kit.memory.record.workspace import OF_NODES
from kit.memory.replay.replay import CATEGORIES, EVALUATIONS, NO_CALL, PHASES, Recording
from kit.memory.replay.snapshot import owner_here

Workspace = Callable[[str, tuple[Any, ...], Any], int]
"""(operator, its arguments, its result) → bytes its kernel takes for itself while it runs."""
Observer = Callable[[tuple[Any, ...], Any], None]
"""(arguments, result) of one operator, after it ran."""

_ELSEWHERE, _ON_HOST = -1, -2
"""In place of a block: a storage that is not on the device, and one of those that the step itself moved to the host."""
_LOW_PRECISION = (torch.bfloat16, torch.float16)
_DEVICE_OF = torch.ops.prim.device.default
_WAIT = torch.ops._c10d_functional.wait_tensor.default
_HOST = torch.device("cpu")
_WRITTEN = {
    "aten::scatter.src": torch.ops.aten.scatter_.src, "aten::scatter.value": torch.ops.aten.scatter_.value,
    "aten::scatter_add": torch.ops.aten.scatter_add_.default,
    "aten::index_put": torch.ops.aten.index_put_.default, "aten::put": torch.ops.aten.put_.default,
    "aten::sub.Tensor": torch.ops.aten.sub_.Tensor, "aten::mul.Tensor": torch.ops.aten.mul_.Tensor,
    "aten::add.Tensor": torch.ops.aten.add_.Tensor,
}  # fmt: skip
"""What autograd runs instead of an operator where it may write to what it has made (`BlockRecorder._writes`)."""
_PARTS = ("crow_indices", "col_indices", "ccol_indices", "row_indices", "values", "_indices", "_values")
_LOGITS = "BinaryCrossEntropyWithLogitsBackward0"
_RECENT = 8
"""Blocks, of which what such an operator writes to is one."""
_private: Any = torch._C
_FAKE = _private._TorchDispatchModeKey.FAKE
_DETACH, _is_excluded = torch.ops.aten.detach.default, _private._dispatch_tls_is_dispatch_key_excluded
_VIEWED = _private.DispatchKey.ADInplaceOrView
"""What an operator has behind it where a mode sees it. autograd copies a tensor that a hook unpacks, as checkpointing's
do, without an operator; a mode is told of `detach`, with this before it."""


_SUMMED = 2
"""Gradients that autograd adds up at a time."""


def _holders(tensor: Tensor) -> tuple[int, int]:
    """How many hold a tensor, and how many its storage, as counted here."""
    whole: Any = tensor
    return whole._use_count(), _private._storage_Use_Count(tensor.untyped_storage()._cdata)


@functools.cache
def _only_autograd() -> tuple[int, int]:
    """What `_holders` counts of a gradient that autograd alone holds, where a mode sees that it is added to."""
    found: list[tuple[int, int]] = []

    class Asking(TorchDispatchMode):  # type: ignore[no-untyped-call]
        @override
        def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
            if func is torch.ops.aten.add.Tensor:
                found.append(_holders(args[0]))
            return func(*args, **(kwargs or {}))

    with _disable_current_modes(), torch.enable_grad():
        used_twice = torch.ones(1, device=_HOST, requires_grad=True)
        whole: Any = torch.tanh(used_twice) * torch.exp(used_twice)
        with cast(Any, Asking)():
            whole.backward()
    return found[0]


def plain_tensors(tensor: Tensor) -> Iterator[Tensor]:
    """The tensors that hold the bytes of `tensor`: itself, or those inside a subclass such as DTensor."""
    whole: Any = tensor
    if is_lazy(whole):
        return  # it holds nothing before it gets its shape
    if tensor.layout in SPARSE_LAYOUTS:
        yield from sparse_parts(tensor)
        return
    if not is_traceable_wrapper_subclass(whole):
        yield tensor
        return
    for name in whole.__tensor_flatten__()[0]:
        inner = getattr(whole, name)
        if isinstance(inner, Tensor):
            yield from plain_tensors(inner)


def tensors_in(value: Any) -> Iterator[Tensor]:
    """The tensors of nested mappings, sequences and objects' results, as operators and optimizers have them."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from tensors_in(item)
    elif isinstance(value, list | tuple | set):
        for item in value:
            yield from tensors_in(item)


class _ToHost(Function):
    """A copy of a tensor that leaves the device, whose gradient comes back to it."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, recorder: BlockRecorder) -> Tensor:
        ctx.recorder = recorder
        with recorder.paused():
            copy = tensor.clone()
        recorder._watch(copy.untyped_storage(), _ON_HOST)
        return copy

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return ctx.recorder.arrive(gradients[0]), None


class _StorageRef(weakref.ref[UntypedStorage]):
    """A storage that is alive; `block` is the block it holds now, which a resize exchanges."""

    __slots__ = ("block", "key")
    key: int
    block: int


@dataclass(frozen=True, slots=True)
class _Operator:
    """What is the same each time an operator runs."""

    name: int
    label: str
    full_name: str
    observer: Observer | None
    communicates: bool
    casts: bool
    skipped: bool


class BlockRecorder(TorchDispatchMode):
    """Records blocks and operators of what runs inside it.

    `observers` are called after the operators they name, and `check` before each until the end; it may raise.
    """

    def __init__(
        self, workspace: Workspace | None = None, observers: Mapping[Any, Observer] | None = None,
        check: Callable[[], None] | None = None,
    ) -> None:  # fmt: skip
        super().__init__()  # type: ignore[no-untyped-call]
        self.workspace = workspace
        self._check = check
        self.failed: tuple[Exception, Any] | None = None
        """The last error that an operator raised, and the operator."""
        self.optimizer_steps: Counter[int] = Counter()
        """Steps taken so far, by id of the optimizer."""
        self.stopped = False
        """Whether the recording has ended."""
        self.placed = False
        """Whether what is trained has gone to the device; it has when the first batch begins."""
        self._observers = dict(observers or {})
        self._ledger = Ledger()
        self._operators: dict[str, _Operator] = {}
        self._known: dict[Any, tuple[int, int]] = {}
        """Number of the call and bytes of workspace, by what in the fake mode answered it."""
        self._alive: dict[int, _StorageRef] = {}
        self._label = UNNAMED
        self._paused = self._depth = self._backwards = 0
        self._alone = _only_autograd()
        self._node_began = 0
        """Blocks that were there when the node of autograd began that runs."""
        self._has_left = False
        self._resumed_phase: int | None = None
        self._recomputed, self._lacking = 0, -1  # checkpointed calls that ran again, and for which node the last did
        self._fake: Any = None
        self._undo = contextlib.ExitStack()
        self._passes_on: dict[Any, bool] = {}
        self._parameters: list[tuple[Tensor, int]] = []
        self.modules = ModulePath(self._ledger.name)
        self._on_free = self._freed
        self._plainly = plainly()

    # -- what the caller says

    @property
    def phase(self) -> str:
        """One of PHASES."""
        return PHASES[self._ledger.phase]

    @phase.setter
    def phase(self, name: str) -> None:
        self._ledger.phase = PHASE[name]

    def on_stream(self, number: int) -> None:
        """What is made from here on is made on this stream: 0 computes."""
        self._ledger.stream = number

    @contextlib.contextmanager
    def labelled(self, category: str) -> Iterator[None]:
        """What is made or resized inside has this category; of nested labels the inner one counts."""
        before, self._label = self._label, CATEGORY[category]
        try:
            yield
        finally:
            self._label = before

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Operators inside are not recorded; what they make is noticed when a recorded operator returns it."""
        self._paused += 1
        try:
            yield
        finally:
            self._paused -= 1

    def note(self, tensor: Tensor, category: str, module: str = "") -> None:
        """`tensor` is there and of this category, made by a recorded operator or not."""
        name = self._ledger.name(module) if module else None
        for plain in plain_tensors(tensor):
            self._note(plain, CATEGORY[category], self._ledger.operator, name)

    def ignore(self, tensor: Tensor) -> None:
        """`tensor` is not on the device: it and its views do not count."""
        for plain in plain_tensors(tensor):
            storage = plain.untyped_storage()
            if storage._cdata not in self._alive:
                self._watch(storage, _ELSEWHERE)

    def leave(self, tensor: Tensor) -> Tensor:
        """A copy of `tensor` on the host, where what is computed from such copies alone stays; its gradient comes
        back. Before the module goes to the device all is on the host, and goes there then."""
        if not self.holds(tensor):
            return tensor
        self._has_left = True
        copy: Tensor = _ToHost.apply(tensor, self)  # type: ignore[no-untyped-call]
        return copy

    def arrive(self, tensor: Tensor) -> Tensor:
        """A copy on the device of what is on the host; `tensor` itself when it is on the device."""
        if self.knows(tensor):
            return tensor
        label = contextlib.nullcontext() if self.has_left(tensor) else self.labelled("inputs")
        before, self._has_left = self._has_left, False
        try:
            with label:
                copy = tensor.clone()
        finally:
            self._has_left = before
        copy.constant = getattr(tensor, "constant", None)  # type: ignore[attr-defined]
        return copy

    def has_left(self, tensor: Tensor) -> bool:
        """Was `tensor` moved to the host, or computed there? A real one that nobody knows comes from numpy."""
        refs = [self._alive.get(plain.untyped_storage()._cdata) for plain in plain_tensors(tensor)]
        return all(ref.block == _ON_HOST if ref is not None else type(tensor) is Tensor for ref in refs)

    def knows(self, tensor: Tensor) -> bool:
        """Is `tensor` on the device, in a block of this recording?"""
        return all(block is not None for block in map(self._block_of, plain_tensors(tensor)))

    def holds(self, tensor: Tensor) -> bool:
        """Is `tensor` on the device, now that what is trained has gone there?"""
        return (self.placed or self._ledger.begun) and self.knows(tensor)

    def _block_of(self, tensor: Tensor) -> int | None:
        """The block that holds a plain tensor; None for one that is not on the device."""
        ref = self._alive.get(tensor.untyped_storage()._cdata)
        return None if ref is None or ref.block < 0 else ref.block

    def track(self, module: nn.Module) -> None:
        """Note the parameters and buffers of `module`, and name its parts in what is recorded from here on."""
        self.modules.name_parts(module)
        self._parameters = []
        for path, part in module.named_modules():
            name = path or type(module).__name__
            for parameter in part._parameters.values():
                if parameter is not None:
                    self.note(parameter, "parameters", name)
                    self._parameters.append((parameter, self._ledger.name(name)))
            for buffer in part._buffers.values():
                if buffer is not None:
                    self.note(buffer, "buffers", name)

    def progress(self) -> tuple[int, int]:
        """Operators so far, and the number of the call of a module that runs now; outside any, of the batch."""
        return self._ledger.operators, self.modules.call or -len(self._ledger.batch_starts)

    @property
    def held_bytes(self) -> int:
        """What is on the device now."""
        return sum(self._ledger.bytes[ref.block] for ref in self._alive.values() if ref.block >= 0)

    def begin_batch(self, phase: str = "forward") -> None:
        """A micro-batch begins, or a batch of one of EVALUATIONS; the first ends set-up, and what is alive is kept."""
        if not self._ledger.begun:
            refs = sorted((ref for ref in self._alive.values() if ref.block >= 0), key=lambda ref: ref.block)
            self._ledger.end_setup([ref.block for ref in refs])
            for block, ref in enumerate(refs):
                ref.block = block
        # What outlives its micro-batch and is nothing else is state that somebody keeps, such as averaged weights.
        for block in self._unnamed():
            self._ledger.category[block] = CATEGORY["buffers"]
        self._ledger.begin_batch(phase)

    def stop(self) -> None:
        """The recording ends here, whatever runs or is freed later."""
        self.stopped = self._ledger.stopped = True
        self._paused += 1

    def mark_gradients(self) -> None:
        """Name the gradients of the tracked module's parameters."""
        for parameter, name in self._parameters:
            for plain in plain_tensors(parameter.grad) if parameter.grad is not None else ():
                self._note(plain, CATEGORY["gradients"], self._ledger.operator, name)

    def mark_optimizer_state(self, optimizer: torch.optim.Optimizer) -> None:
        """Name the tensors that `optimizer` keeps."""
        own = (CATEGORY["parameters"], CATEGORY["gradients"])
        for tensor in tensors_in(optimizer.state):
            blocks = map(self._block_of, plain_tensors(tensor))
            # An optimizer may keep parameters and gradients at hand: these stay what they are.
            if not any(block is not None and self._ledger.category[block] in own for block in blocks):
                self.note(tensor, "optimizer_state")

    def begin_optimizer(self) -> None:
        """An optimizer's own work begins, up to the end of its `step`."""
        if self._resumed_phase is None:
            self._resumed_phase, self._ledger.phase = self._ledger.phase, PHASE["optimizer"]

    # -- entering and leaving

    def __enter__(self) -> BlockRecorder:
        if self._depth == 0:
            self._fake = _private._get_dispatch_mode(_FAKE)
            self._undo = entry_points(self)
        self._depth += 1
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *raised: Any) -> None:
        self._depth -= 1
        if self._depth == 0:
            self._undo.close()
        super().__exit__(*raised)  # type: ignore[no-untyped-call]

    @contextlib.contextmanager
    def backward(self) -> Iterator[None]:
        """A backward pass: what forward made and is still alive are activations."""
        if self._backwards == 0:
            for block in self._unnamed():
                if self._ledger.made_in(block) in _FORWARD:
                    self._ledger.category[block] = CATEGORY["activations"]
        before, self._ledger.phase = self._ledger.phase, PHASE["backward"]
        self._backwards += 1
        try:
            yield
        finally:
            self._backwards -= 1
            self._ledger.phase = before
            if self._backwards == 0:
                self.mark_gradients()

    def before_step(self, _optimizer: Any, args: tuple[Any, ...], options: dict[str, Any]) -> None:
        # With a closure, forward and backward run inside `step`; Lightning says when the rest begins.
        if not [value for value in (*args[1:], options.get("closure")) if value is not None]:
            self.begin_optimizer()

    def after_step(self, optimizer: Any, _args: Any, _options: Any) -> None:
        self.optimizer_steps[id(optimizer)] += 1
        self.mark_optimizer_state(optimizer)
        if self._resumed_phase is not None:
            self._ledger.phase, self._resumed_phase = self._resumed_phase, None

    # -- operators

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """False: torch would wrap every call in a switch for its compiler, which never runs here."""
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        if func is _DEVICE_OF and type(args[0]) is FakeTensor and not args[0].fake_mode.in_kernel_invocation:
            return args[0].fake_device  # asked more often than anything runs
        if self._check is not None and not self.stopped:
            self._check()
        if types:
            passes_on = self._passes_on.get(types)
            if passes_on is None:
                passes_on = self._passes_on[types] = any(hasattr(kind, "__tensor_flatten__") for kind in types)
            if passes_on:
                return NotImplemented  # tensors made of others, such as DTensor, first run on the tensors inside them
        if self._backwards and func._name in _WRITTEN and self._writes(func._name, args):
            func = _WRITTEN[func._name]
        if self._fake is not None and kwargs and getattr(kwargs.get("device"), "type", None) == "cuda":
            kwargs = {**kwargs, "device": _HOST}  # a dry run has fake tensors of one device only
        if func is _WAIT and self._fake is not None:
            return args[0]  # there is nobody to wait for
        fake = _private._get_dispatch_mode(_FAKE)
        out = fake.quick(func, args, kwargs) if type(fake) is FakeMode else NotImplemented
        try:
            if out is NotImplemented:
                out = func(*args, **kwargs) if kwargs else func(*args)
        except Exception as error:
            self.failed = (error, func)
            raise
        if self._paused or fake is not self._fake:
            return out
        operator = self._operators.get(func._name) or self._operator(func)
        if not operator.skipped and not (func is _DETACH and not _is_excluded(_VIEWED)):
            with self._plainly:
                self._record(operator, args, kwargs, out)
        return out

    def _writes(self, name: str, args: tuple[Any, ...]) -> bool:
        """Whether autograd writes to the first argument where no mode looks on: it made that for nothing else.
        (`FunctionsManual.cpp`, where it asks `areAnyTensorSubclassLike`.)"""
        if name == "aten::add.Tensor":
            return self._sums_gradients(args)
        node, first = _private._current_autograd_node(), args[0]
        scatters = name.startswith(("aten::scatter", "aten::index_put", "aten::put"))
        if node is None or not (scatters or (node.name() == _LOGITS and not torch.is_grad_enabled())):
            return False
        block = self._block_of(first) if type(first) in (FakeTensor, Tensor) and first.layout is torch.strided else None
        if block is None or block < len(self._ledger.bytes) - _RECENT:
            return False
        if self._ledger.made_in(block) != PHASE["backward"]:
            return False
        makers = ("zeros", "new_zeros", "zeros_like") if scatters else ("add.Scalar", "sigmoid")
        return self._ledger.maker(block) in makers and owner_here() == "gradients"

    def _sums_gradients(self, args: tuple[Any, ...]) -> bool:
        """Whether two gradients of one tensor are added up, of which nobody else holds the first, made by another node.
        (`input_buffer.cpp`, `can_accumulate_inplace`.)"""
        node = _private._current_autograd_node()
        if node is None or len(args) != _SUMMED or torch.is_grad_enabled():
            return False
        first, second = args
        if type(first) not in (FakeTensor, Tensor) or type(second) is not type(first) or first.shape != second.shape:
            return False
        if first.layout is not torch.strided or second.layout is not torch.strided or _holders(first) != self._alone:
            return False
        block = self._block_of(first)
        if block is None or self._ledger.made_in(block) != PHASE["backward"]:
            return False
        if node._sequence_nr() == self.modules.node and block >= self._node_began:
            return False  # a formula's own sum
        return is_non_overlapping_and_dense_or_false(first) and owner_here() == "gradients"

    def _operator(self, func: Any) -> _Operator:
        overload = func._overloadname
        label = func._schema.name.partition("::")[2] + ("" if overload == "default" else f".{overload}")
        operator = self._operators[func._name] = _Operator(
            self._ledger.name(label), label, f"{func.namespace}::{label}", self._observers.get(func),
            communicates=func.namespace in ("c10d", "_c10d_functional"),
            casts=func is torch.ops.aten._to_copy.default,
            # A fake tensor is asked for its device, a sparse one for what holds its bytes; nothing runs.
            skipped=func.namespace == "prim" or label in _PARTS,
        )  # fmt: skip
        return operator

    def _record(self, operator: _Operator, args: tuple[Any, ...], kwargs: Any, out: Any) -> None:
        answer = self._fake.answered if type(self._fake) is FakeMode and self._ledger.begun else None
        if operator.label == OF_NODES and self._backwards:
            answer = None
        if self._has_left and self._stays_on_host(args, kwargs, out):
            if operator.observer is not None:
                operator.observer(args, out)
            return
        known = self._known.get(answer) if answer is not None else None
        if known is not None:
            call, size = known
        else:
            call = self._ledger.calls.number(operator.full_name, args, kwargs, out) if self._ledger.begun else NO_CALL
            size = self.workspace(operator.label, args, out) if self.workspace is not None else 0
            if answer is not None:  # equal calls take equal workspaces
                self._known[answer] = call, size
        self._ran(operator.name, call)
        category = self._label
        if category == UNNAMED and operator.communicates:
            category = CATEGORY["communication"]
        if isinstance(out, Tensor):
            if operator.casts and category == UNNAMED and self._casts_parameter(args[0], out):
                category = CATEGORY["autocast_cache"]
            self._made(out, category, operator.name)
        elif out is not None:
            for tensor in tensors_in(out):
                self._made(tensor, category, operator.name)
        if size:
            self._ledger.end(self._ledger.begin(size, CATEGORY["workspace"], operator.name))
        if operator.observer is not None:
            operator.observer(args, out)

    def _stays_on_host(self, args: tuple[Any, ...], kwargs: Any, out: Any) -> bool:
        """Whether all operands have left the device; then so have the results."""
        operands = [*tensors_in(args), *tensors_in(kwargs or {})]
        if not operands or not all(type(one) in (FakeTensor, Tensor) and self.has_left(one) for one in operands):
            return False
        for tensor in tensors_in(out):
            for plain in plain_tensors(tensor):
                storage = plain.untyped_storage()
                if storage._cdata not in self._alive:
                    self._watch(storage, _ON_HOST)
        return True

    def _ran(self, name: int, call: int) -> None:
        node = self.modules.node
        self._ledger.ran(name, self.modules.current(self._backwards), call)
        if self.modules.node != node:
            self._node_began = len(self._ledger.bytes)
        if self._backwards and torch.is_grad_enabled():
            node = _private._current_autograd_node()  # the first that lacks an activation has its whole block run again
            if node is not None:
                number = node._sequence_nr()  # the node itself would keep its graph alive
                self._recomputed += number != self._lacking
                self._lacking = number
                self._ledger.recomputes[self._ledger.operators - 1] = self._recomputed

    def kernel_ran(self, name: str, args: tuple[Any, ...], results: tuple[Any, ...]) -> None:
        """An operator of aten ran, whose memory is recorded already."""
        if not self._paused:
            with self._plainly:
                begun = self._ledger.begun
                call = self._ledger.calls.number(f"aten::{name}", args, {}, results) if begun else NO_CALL
                self._ran(self._ledger.name(name), call)

    def _casts_parameter(self, source: Any, out: Tensor) -> bool:
        if self._ledger.phase not in _FORWARD or out.dtype not in _LOW_PRECISION or not isinstance(source, Tensor):
            return False
        block = self._block_of(source)
        return block is not None and self._ledger.category[block] in _WEIGHTS

    def _made(self, tensor: Tensor, category: int, operator: int) -> None:
        try:
            storage = tensor.untyped_storage()
        except NotImplementedError:  # a subclass without a storage of its own
            for plain in plain_tensors(tensor):
                if plain is not tensor:
                    self._made(plain, category, operator)
            return
        ref = self._alive.get(storage._cdata)
        if ref is None:
            device = tensor.fake_device if type(tensor) is FakeTensor else tensor.device
            on_device = device.type != "meta" and not tensor._is_zerotensor()  # zeros of derivatives have no memory
            self._watch(storage, self._ledger.begin(storage.nbytes(), category, operator) if on_device else _ELSEWHERE)
        elif ref.block >= 0 and self._ledger.bytes[ref.block] != storage.nbytes():
            self._resized(ref, storage.nbytes())

    # -- blocks

    def _note(self, tensor: Tensor, category: int, operator: int, module: int | None) -> None:
        storage = tensor.untyped_storage()
        ref = self._alive.get(storage._cdata)
        if ref is None:
            ref = self._watch(storage, self._ledger.begin(storage.nbytes(), category, operator))
        elif ref.block == _ON_HOST:
            return
        elif ref.block < 0:
            ref.block = self._ledger.begin(storage.nbytes(), category, operator)
        self._ledger.category[ref.block] = category
        if module is not None:
            self._ledger.belongs_to(ref.block, module)

    def _watch(self, storage: UntypedStorage, block: int) -> _StorageRef:
        ref = _StorageRef(storage, self._on_free)
        ref.key, ref.block = storage._cdata, block
        self._alive[ref.key] = ref
        return ref

    def _freed(self, ref: weakref.ref[Any]) -> None:
        assert isinstance(ref, _StorageRef)
        if self._alive.get(ref.key) is ref:
            del self._alive[ref.key]
        if ref.block >= 0:
            self._ledger.end(ref.block)

    def _resized(self, ref: _StorageRef, size: int) -> None:
        """A storage resized is its old block freed and another one made."""
        old = ref.block
        self._ledger.end(old)
        category = self._ledger.category[old] if self._label == UNNAMED else self._label
        ref.block = self._ledger.begin(size, category, self._ledger.name("resize_"))

    def storage_resized(self, storage: UntypedStorage) -> None:
        ref = self._alive.get(storage._cdata)
        if ref is not None and ref.block >= 0 and not self._paused:
            size = storage.nbytes()
            if size != self._ledger.bytes[ref.block]:
                self._resized(ref, size)

    def _unnamed(self) -> list[int]:
        blocks = [ref.block for ref in self._alive.values() if ref.block >= 0]
        return [block for block in blocks if self._ledger.category[block] == UNNAMED]

    # -- the result

    def recording(self, batch_size: int, rounding_bytes: int, facts: Mapping[str, Any] | None = None) -> Recording:
        """What was recorded so far; ValueError when no batch was begun."""
        return self._ledger.recording(batch_size, rounding_bytes, {"notes": [], **(facts or {})})


CATEGORY = {name: index for index, name in enumerate(CATEGORIES)}
PHASE = {name: index for index, name in enumerate(PHASES)}
_FORWARD = [PHASE[name] for name in ("forward", *EVALUATIONS)]
_WEIGHTS = (CATEGORY["parameters"], CATEGORY["gathered_parameters"])
UNNAMED = -1
"""Category of a block that nobody has named yet."""


class Ledger:
    """What a Recorder writes to."""

    def __init__(self) -> None:
        self.phase = PHASE["setup"]
        self.stream = 0
        self.bytes: list[int] = []
        self.category: list[int] = []
        self.batch_starts: list[int] = []
        self.begun = self.stopped = False
        self._names = {"": 0}
        self._columns: list[tuple[int, int, int, int, int]] = []  # operator, module, phase, stream, line of each block
        self._events: list[tuple[int, bool, int]] = []  # block, allocates, time
        self.calls = CallLog()
        self._log = [(self.name("setup"), 0, self.phase, NO_CALL)]  # operator, module, phase, call of each operator
        self.recomputes: dict[int, int] = {}
        """Operators that a backward pass ran with gradients enabled, for activations that were not kept."""

    def name(self, text: str) -> int:
        """The number of a name."""
        return self._names.setdefault(text, len(self._names))

    def ran(self, operator: int, module: int, call: int) -> None:
        """An operator ran; what follows happened during or after it."""
        self._log.append((operator, module, self.phase, call))

    @property
    def operators(self) -> int:
        """How many ran since set-up."""
        return len(self._log)

    @property
    def operator(self) -> int:
        """The operator that ran last."""
        return self._log[-1][0]

    def begin(self, size: int, category: int, operator: int) -> int:
        """A block is allocated; its number."""
        block = len(self.bytes)
        self.bytes.append(size)
        self.category.append(category)
        line = self.name(owner_here()) if self.begun else 0
        self._columns.append((operator, self._log[-1][1], self.phase, self.stream, line))
        if size and self.begun and not self.stopped:
            self._events.append((block, True, len(self._log) - 1))
        return block

    def end(self, block: int) -> None:
        """A block is freed."""
        if self.bytes[block] and self.begun and not self.stopped:
            self._events.append((block, False, len(self._log) - 1))

    def belongs_to(self, block: int, module: int) -> None:
        """A block is of `module`, whichever made it."""
        operator, _, phase, stream, line = self._columns[block]
        self._columns[block] = (operator, module, phase, stream, line)

    def made_in(self, block: int) -> int:
        """The phase in which a block was made."""
        return self._columns[block][2]

    def maker(self, block: int) -> str:
        """The operator that made a block, by its name in aten."""
        number = self._columns[block][0]
        return next(name for name, place in self._names.items() if place == number)

    def begin_batch(self, phase: str) -> None:
        """A micro-batch begins with the next operator, or a batch of one of EVALUATIONS, which starts no step."""
        self.begun, self.phase = True, PHASE[phase]
        if phase not in EVALUATIONS:
            self.batch_starts.append(len(self._log))

    def end_setup(self, alive: Sequence[int]) -> None:
        """Forget all blocks and operators but `alive`, which are numbered anew, in their order."""
        setup = PHASE["setup"]
        self._columns = [(*self._columns[block][:2], setup, *self._columns[block][3:]) for block in alive]
        self.bytes = [self.bytes[block] for block in alive]
        self.category = [self.category[block] for block in alive]
        self._events = [(block, True, 0) for block, size in enumerate(self.bytes) if size]
        del self._log[1:]
        self.recomputes.clear()

    def recording(self, batch_size: int, rounding_bytes: int, facts: Mapping[str, Any]) -> Recording:
        """What was written so far; blocks that nobody has named are temporaries."""
        if not self.batch_starts:
            raise ValueError("nothing was recorded: begin_batch() was never called")
        category = np.array(self.category, dtype=np.int64)
        operator, module, phase, stream, line = _columns_of(self._columns, 5)
        block, allocates, when = _columns_of(self._events, 3)
        name, part, ran_in, call = _columns_of(self._log, 4)
        recomputes = np.zeros(len(self._log), dtype=np.int32)
        recomputes[[*self.recomputes]] = [*self.recomputes.values()]
        return Recording(
            block_bytes=np.array(self.bytes, dtype=np.int64),
            block_category=np.where(category == UNNAMED, CATEGORY["temporaries"], category).astype(np.uint8),
            block_operator=operator.copy(), block_module=module.copy(), block_phase=phase.astype(np.uint8),
            block_stream=stream.astype(np.uint8), event_block=block.copy(),
            event_allocates=allocates.astype(np.bool_), event_time=when.copy(), operator_name=name.copy(),
            operator_module=part.copy(), operator_phase=ran_in.astype(np.uint8), names=tuple(self._names),
            batch_starts=tuple(self.batch_starts), batch_size=batch_size, rounding_bytes=rounding_bytes,
            facts=dict(facts), block_line=line.copy(), operator_call=call.copy(), calls=tuple(self.calls.calls),
            operator_recomputes=recomputes,
        )  # fmt: skip


class CallLog:
    """The distinct calls of a step, numbered as they are first seen, as `kit.memory.replay.calls` reads them.

    A call is what an operator was given and gave, with tensors as shapes; two calls with equal shapes and equal numbers
    are one. What no JSON value can hold (a generator, a device) is left out as None: it costs no time.
    """

    def __init__(self) -> None:
        self.calls: list[Any] = []
        """JSON values."""
        self._numbers: dict[Any, int] = {}

    def number(self, name: str, args: tuple[Any, ...], named: dict[str, Any] | None, out: Any) -> int:
        """The number of this call."""
        results = out if isinstance(out, tuple) else (out,)
        key = (
            name, tuple(map(_key, args)), tuple((word, _key(value)) for word, value in (named or {}).items()),
            tuple(map(_key, results)),
        )  # fmt: skip
        number = self._numbers.get(key)
        if number is None:
            number = self._numbers[key] = len(self.calls)
            self.calls.append(_json(key))
        return number


class _Spec(tuple[Any, ...]):
    """(shape, dtype, strides or None) of a tensor."""

    __slots__ = ()


_DTYPES: dict[torch.dtype, str] = {}


def _key(value: Any) -> Any:
    """Something hashable that is equal for equal costs."""
    if isinstance(value, Tensor):
        try:
            strides = (
                None if value.layout is not torch.strided or value.is_contiguous() else tuple(map(int, value.stride()))
            )
            shape = tuple(map(int, value.shape))
        except Exception:  # a subclass without either, or a size that no number is known of
            return None
        dtype = _DTYPES.get(value.dtype) or _DTYPES.setdefault(value.dtype, str(value.dtype).removeprefix("torch."))
        return _Spec((shape, dtype, strides))
    if isinstance(value, list | tuple):
        return tuple(map(_key, value))
    if value is None or isinstance(value, bool | int | float | str):
        return value
    return str(value) if isinstance(value, torch.dtype | torch.memory_format) else None


def _json(key: Any) -> Any:
    if isinstance(key, _Spec):
        shape, dtype, strides = key
        return {"t": [list(shape), dtype, None if strides is None else list(strides)]}
    return [*map(_json, key)] if isinstance(key, tuple) else key


def _columns_of(rows: Sequence[tuple[int, ...]], width: int) -> NDArray[np.int32]:
    """(width, rows)"""
    return np.fromiter(itertools.chain.from_iterable(rows), np.int32, width * len(rows)).reshape(-1, width).T


def entry_points(recorder: BlockRecorder) -> contextlib.ExitStack:
    """Tell the recorder when a storage is resized, a backward pass or an optimizer step runs, or a module is called.

    Closing what is returned puts every entry point back.
    """
    storage_class: Any = UntypedStorage
    resize, backward, gradients = storage_class.resize_, torch.autograd.backward, torch.autograd.grad

    def resize_and_tell(storage: UntypedStorage, size: int) -> Any:
        # FSDP2 frees and fills its gathered parameters by resizing storages, which no operator does.
        answer = resize(storage, size)
        recorder.storage_resized(storage)
        return answer

    def tell_backward(*args: Any, **options: Any) -> Any:
        with recorder.backward():
            return backward(*args, **options)

    def tell_gradients(*args: Any, **options: Any) -> Any:
        # With a graph of its own, such as a gradient penalty has, it is a part of the forward pass.
        with contextlib.nullcontext() if options.get("create_graph") else recorder.backward():
            return gradients(*args, **options)

    undo = contextlib.ExitStack()
    undo.enter_context(overridden(UntypedStorage, "resize_", resize_and_tell))
    undo.enter_context(overridden(torch.autograd, "backward", tell_backward))
    undo.enter_context(overridden(torch.autograd, "grad", tell_gradients))
    if "torch.distributed.tensor" in sys.modules:
        from torch.distributed.tensor._sharding_prop import ShardingPropagator

        name = "_propagate_tensor_meta_non_cached"
        propagate = vars(ShardingPropagator)[name]

        def propagate_unseen(*args: Any, **options: Any) -> Any:
            # DTensor finds shapes by running operators on whole fake tensors, which are on no device.
            with recorder.paused():
                return propagate(*args, **options)

        undo.enter_context(overridden(ShardingPropagator, name, propagate_unseen))
    parts = recorder.modules
    for handle in (
        register_optimizer_step_pre_hook(recorder.before_step),
        register_optimizer_step_post_hook(recorder.after_step),
        nn.modules.module.register_module_forward_pre_hook(parts.enter),
        nn.modules.module.register_module_forward_hook(parts.leave, always_call=True),
    ):
        undo.callback(handle.remove)
    return undo


_LARGEST_SEQUENCE = 1 << 62  # nodes that accumulate gradients have no number of their own


class ModulePath:
    """Which part of the module runs, in forward by its calls, in backward by the forward that made the node."""

    def __init__(self, name: Callable[[str], int]) -> None:
        self._name = name
        self._parts: dict[nn.Module, int] = {}
        self._stack: list[int] = []
        self._calls: list[int] = []
        self._count = 0
        self._numbers = [0]  # autograd's sequence number at each change of part,
        self._running = [0]  # and the part that ran from there on
        self._last = 0
        self.node = 0
        """The number of the node of autograd that ran last."""

    def name_parts(self, root: nn.Module) -> None:
        names = {part: path or type(root).__name__ for path, part in root.named_modules()}
        self._parts = {part: self._name(name) for part, name in names.items()}

    def enter(self, part: nn.Module, _args: Any) -> None:
        self._count += 1
        self._calls.append(self._count)
        self._stack.append(self._parts.get(part, self._stack[-1] if self._stack else 0))
        self._changed()

    def leave(self, _part: nn.Module, _args: Any, _out: Any) -> None:
        if self._stack:
            self._stack.pop()
            self._calls.pop()
        self._changed()

    @property
    def call(self) -> int:
        """The number of the call that runs; 0 outside any."""
        return self._calls[-1] if self._calls else 0

    def _changed(self) -> None:
        self._numbers.append(_private._autograd._get_sequence_nr())
        self._running.append(self._stack[-1] if self._stack else 0)

    def current(self, in_backward: int) -> int:
        if self._stack:
            return self._stack[-1]
        if not in_backward:
            return 0
        node = _private._current_autograd_node()
        number = self.node = node._sequence_nr() if node is not None else _LARGEST_SEQUENCE
        if number < _LARGEST_SEQUENCE:
            self._last = self._running[bisect_right(self._numbers, number) - 1]
        return self._last
