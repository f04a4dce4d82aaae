"""fake_values: what code asks of a tensor that has a shape but no numbers, answered so that training goes on.

A fake tensor has no value to branch on, to print or to index by. Inside `fake_values` a number reads 1.0, a count 1, a
condition False, a check for finite numbers says finite, a selection by mask selects everything (an upper bound), and
`Answers.notes` says at which line of whose file each was asked. Weights stay as they are (initialising them moves no
memory), copies and conversions of modules work, and moves between devices do nothing, since there is only one.

Values are never guessed silently, except to torch and Lightning themselves, whose own branches were read: a step
counter, a signal flag. A loop that waits for a condition sees it turn after a thousand rounds.

Private parts of torch used here, all tested on its upgrade: `fake_impls.op_implementations_dict`, `FakeTensor`, and
`nn.Module._apply`.
"""

from __future__ import annotations

import contextlib
import math
import os
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import lightning
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch._subclasses import fake_impls
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, unset_fake_temporarily

from kit.memory.cpu_lstm import lstm_layer
from kit.memory.patches import overridden, replaced

_PATIENCE = 1000
"""Times the same line may ask for the same condition before the answer turns, so that a waiting loop ends."""

aten = torch.ops.aten
_HOST = torch.device("cpu")
_KIT = str(Path(__file__).parents[1]) + os.sep
_MEMORY = str(Path(__file__).parent) + os.sep
_TORCH = str(Path(torch.__file__).parent) + os.sep
_LIGHTNING = str(Path(lightning.__file__).parent) + os.sep
# Parts of torch that ask on their own; through the rest of it a user's question passes.
_ASKING = tuple(_TORCH + part + os.sep for part in ("amp", "autograd", "distributed", "nn", "optim", "utils"))
_CARRYING = tuple(f"{_TORCH}utils{os.sep}{part}" for part in ("_python_dispatch.py", "_stats.py", "_pytree.py"))


class Answers:
    """What was asked of tensors without values: `notes` holds one sentence per place, in order."""

    def __init__(self) -> None:
        self.notes: dict[str, None] = {}
        self.arrive: Callable[[Tensor], Tensor] = _unchanged
        """What becomes of a tensor that is moved to the device."""
        self._asked: Counter[str] = Counter()

    def value(self, _mode: FakeTensorMode, _func: Any, tensor: FakeTensor) -> float | int | bool:
        """Of a tensor with one element: its constant where it has one, else a benign number."""
        if tensor.constant is not None:
            with unset_fake_temporarily():
                return tensor.constant.item()
        place = _place()
        if tensor.dtype is torch.bool:
            return self._condition(getattr(tensor, "kit_truth", None), place)
        if tensor.is_floating_point() or tensor.is_complex():
            self._note(f"read 1.0 for the value of a tensor at {place}", place)
            return 1.0
        self._note(f"read 1 for a count at {place}", place)
        return 1 if place else 0  # Lightning exits when a flag of its own is 1

    def _condition(self, truth: bool | None, place: str) -> bool:
        if truth is not None:
            return truth
        self._asked[place] += 1
        answer = self._asked[place] > _PATIENCE
        self._note(f"took the {answer} branch at {place}", place)
        return answer

    def equal(self, _mode: FakeTensorMode, _func: Any, first: FakeTensor, second: FakeTensor) -> bool:
        """Of two tensors: whether they are the same one."""
        return first is second or self._condition(None, _place())

    def nonzero(self, _mode: FakeTensorMode, _func: Any, tensor: FakeTensor) -> Tensor:
        """Every element, (elements, dimensions)."""
        self._selects_all()
        return tensor.new_empty_strided((tensor.numel(), tensor.dim()), (1, tensor.numel()), dtype=torch.int64)

    def masked_select(self, _mode: FakeTensorMode, _func: Any, tensor: FakeTensor, mask: FakeTensor) -> Tensor:
        """Every element, (elements,)."""
        self._selects_all()
        return tensor.new_empty((math.prod(np.broadcast_shapes(tensor.shape, mask.shape)),))

    def unique(self, _mode: FakeTensorMode, _func: Any, tensor: FakeTensor, *_options: Any, **_more: Any) -> Any:
        """Every element is another, (elements,), with where it is and how often."""
        self._selects_all()
        count = tensor.numel()
        return (
            tensor.new_empty((count,)),
            tensor.new_empty(tensor.shape, dtype=torch.int64),
            tensor.new_empty((count,), dtype=torch.int64),
        )

    def array(self, tensor: FakeTensor, *_args: Any, **_options: Any) -> NDArray[Any]:
        """`tensor` as numpy sees it: zeros that take no memory."""
        place = _place()
        self._note(f"read zeros for the values of a tensor at {place}", place)
        with unset_fake_temporarily():
            zero = torch.zeros((), dtype=tensor.dtype).numpy()
        return np.broadcast_to(zero, tuple(tensor.shape))

    def moved(self, tensor: FakeTensor, *args: Any, **options: Any) -> Tensor:
        """`Tensor.to`, where all devices are one."""
        named = [value for value in (*args, options.get("device")) if _is_device(value)]
        if not named:
            return _to(tensor, *args, **options)
        args = tuple(_HOST if _is_device(value) else value for value in args)
        return _to(self.arrive(tensor), *args, **{**options, **({"device": _HOST} if "device" in options else {})})

    def moved_to_gpu(self, tensor: FakeTensor, *_args: Any, **_options: Any) -> Tensor:
        """`Tensor.cuda`."""
        return self.arrive(tensor)

    def _selects_all(self) -> None:
        place = _place()
        self._note(f"assumed that all elements are selected at {place}, an upper bound", place)

    def compiled(self, model: Any = None, **_options: Any) -> Any:
        """`torch.compile` that leaves the model as it is."""
        self.notes.setdefault("torch.compile was left out: memory without it is an upper bound")
        return model if model is not None else lambda later: later

    def _note(self, sentence: str, place: str) -> None:
        if place:
            self.notes.setdefault(sentence)


def _place() -> str:
    """File and line that asks, in the user's or a third party's code; empty when torch, Lightning or kit asks."""
    frame: FrameType | None = sys._getframe(2)
    while frame is not None and _passes_on(frame.f_code.co_filename):
        frame = frame.f_back
    if frame is None or frame.f_code.co_filename.startswith((*_ASKING, _LIGHTNING, _KIT)):
        return ""
    return f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}"


def _passes_on(file: str) -> bool:
    if file.startswith(_TORCH):
        return file.startswith(_CARRYING) or not file.startswith(_ASKING)
    return file.startswith(_MEMORY)


# -- modules of fake tensors


def _copied(tensor: FakeTensor, memo: dict[int, Any]) -> Tensor:
    with torch.no_grad():
        copy: Tensor = tensor.detach().clone()
    if isinstance(tensor, nn.Parameter):
        copy = nn.Parameter(copy, requires_grad=tensor.requires_grad)
    copy.requires_grad_(tensor.requires_grad)
    if tensor.grad is not None:
        copy.grad = tensor.grad.detach().clone()
    memo[id(tensor)] = copy
    return copy


def _applying(apply: Callable[..., nn.Module]) -> Callable[..., nn.Module]:
    """`nn.Module._apply` for fake parameters, which torch would refuse to swap: conversions stay, moves do nothing."""

    def apply_to_fakes(module: nn.Module, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> nn.Module:
        own = [parameter for parameter in module._parameters.values() if parameter is not None]
        if not all(isinstance(parameter, FakeTensor) for parameter in own):
            return apply(module, fn, recurse)
        for child in module.children() if recurse else ():
            child._apply(fn)  # type: ignore[no-untyped-call]
        for name, parameter in module._parameters.items():
            if parameter is not None:
                module._parameters[name] = _converted(parameter, fn)
        for name, buffer in module._buffers.items():
            module._buffers[name] = None if buffer is None else fn(buffer)
        return module

    return apply_to_fakes


def _converted(parameter: nn.Parameter, fn: Callable[[Tensor], Tensor]) -> nn.Parameter:
    """The same parameter, so that ties and optimizers hold, unless it leaves the meta device."""
    with torch.no_grad():
        new = fn(parameter)
        gradient = None if parameter.grad is None else fn(parameter.grad)
    if new.device != parameter.device:
        return nn.Parameter(new, requires_grad=parameter.requires_grad)
    if new is not parameter:
        parameter.grad = None
        parameter.data = new
    if gradient is not None:
        parameter.grad = gradient
    return parameter


def _printed(tensor: FakeTensor, spec: str) -> str:
    """A tensor in a text: what is printed decides nothing, so nothing is noted."""
    if tensor.dim():
        return format(str(tensor), spec)
    return format(1.0 if tensor.is_floating_point() else 1, spec)


def _is_device(value: Any) -> bool:
    return isinstance(value, str | torch.device) or type(value) is int


def _to(tensor: Tensor, *args: Any, **options: Any) -> Tensor:
    return Tensor.to(tensor, *args, **options)


def _unchanged(tensor: Tensor, *_args: Any, **_options: Any) -> Tensor:
    return tensor


def _method(function: Callable[..., Any]) -> Callable[..., Any]:
    """`function` as a method of a class it is given to."""
    return lambda tensor, *args, **options: function(tensor, *args, **options)


def _initializers() -> list[str]:
    names = (name for name in dir(nn.init) if name.endswith("_") and not name.startswith("_"))
    return [name for name in names if callable(getattr(nn.init, name))]


@contextlib.contextmanager
def fake_values() -> Iterator[Answers]:
    """Inside, fake tensors answer as described above; torch is for the whole process as it was afterwards."""
    answers = Answers()
    with contextlib.ExitStack() as undo:
        undo.enter_context(_operators_answered(answers))
        for name in _initializers():
            undo.enter_context(replaced(nn.init, name, _unchanged))
        undo.enter_context(overridden(nn.Module, "_apply", _applying(nn.Module._apply)))
        undo.enter_context(overridden(FakeTensor, "__deepcopy__", _copied))
        undo.enter_context(overridden(FakeTensor, "numpy", _method(answers.array)))
        undo.enter_context(overridden(FakeTensor, "to", _method(answers.moved)))
        undo.enter_context(overridden(FakeTensor, "cuda", _method(answers.moved_to_gpu)))
        undo.enter_context(overridden(FakeTensor, "__format__", _printed))
        undo.enter_context(overridden(FakeTensor, "pin_memory", _unchanged))
        undo.enter_context(replaced(torch, "compile", answers.compiled))
        yield answers


@contextlib.contextmanager
def _operators_answered(answers: Answers) -> Iterator[None]:
    table: dict[Any, Any] = fake_impls.op_implementations_dict
    ours = {
        aten._local_scalar_dense.default: answers.value,
        aten.equal.default: answers.equal,
        aten.nonzero.default: answers.nonzero,
        aten.masked_select.default: answers.masked_select,
        aten._unique2.default: answers.unique,
        aten.mkldnn_rnn_layer.default: lstm_layer,
    }
    before = {operator: table.get(operator) for operator in ours}
    table.update(ours)
    try:
        yield
    finally:
        for operator, implementation in before.items():
            if implementation is None:
                del table[operator]
            else:
                table[operator] = implementation
