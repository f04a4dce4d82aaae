"""What code asks of a tensor that has a shape but no numbers, answered so that training goes on.

`fake_values`: a fake tensor has no value to branch on, to print or to index by. Inside, a number reads 1.0, a count 1,
a condition False, a check for finite numbers True, and a selection by mask selects everything (an upper bound).
Initialising weights moves no memory, copies and conversions of modules work, and moves between devices do nothing,
since there is only one. `FakeValues.notes` names file and line of every such read, except those of torch and
Lightning themselves (a step counter, a signal flag), whose branches were read. A loop that waits for a condition sees
it turn after a thousand rounds.

`saving_shapes`: `torch.save` keeps the shapes and writes a line that says which they are; `torch.load` makes tensors of
these shapes from it. Files that were saved otherwise are loaded as ever.

`lstm_layer`: torch's fake kernel of the CPU's LSTM says nothing of what oneDNN keeps for the backward pass and holds
meanwhile. oneDNN 3 (`rnn_utils::set_workspace_sizes`) keeps gates and hidden states per step, and states, cells and
space for their gradients per step and once more, each as a buffer of its own in whole pages. Rows are rounded up to 64
bytes, and by 64 more where they would be a multiple of 256 values. Compared with torch 2.13 in
`tests/memory/record/test_cpu_lstm.py`: what is kept is equal to the byte in float32 and bfloat16; what is held
meanwhile, of which a part is only known as measured, within a twentieth or 40 KiB, on CPUs without tiles (AMX).

Private parts of torch used here, all tested on its upgrade: `fake_impls.op_implementations_dict`, `FakeTensor`, and
`nn.Module._apply`.
"""

from __future__ import annotations

import contextlib
import io
import math
import os
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
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

from kit.confinement.stand_ins import overridden, replaced
from kit.memory.record.batches import Batches, TensorShape, Writer

_PATIENCE = 1000
"""Times the same line may ask for the same condition before the answer turns, so that a waiting loop ends."""

aten = torch.ops.aten
_HOST = torch.device("cpu")
_KIT = str(Path(__file__).parents[2]) + os.sep
_MEMORY = str(Path(__file__).parent) + os.sep
_TORCH = str(Path(torch.__file__).parent) + os.sep
_LIGHTNING = str(Path(lightning.__file__).parent) + os.sep
# Parts of torch that read values for themselves; any other part of torch does so for its caller.
_ASKING = tuple(_TORCH + part + os.sep for part in ("amp", "autograd", "distributed", "nn", "optim", "utils"))
_CARRYING = tuple(f"{_TORCH}utils{os.sep}{part}" for part in ("_python_dispatch.py", "_stats.py", "_pytree.py"))


class FakeValues:
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

    def bincount(
        self, _mode: FakeTensorMode, _func: Any, tensor: FakeTensor, weights: Tensor | None = None, minlength: int = 0
    ) -> Tensor:
        """As many bins as were asked for at least, else one for each element: metrics count classes so."""
        dtype = torch.int64 if weights is None else torch.float64
        return tensor.new_empty((minlength or tensor.numel(),), dtype=dtype)

    def array(self, tensor: FakeTensor) -> NDArray[Any]:
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
            return Tensor.to(tensor, *args, **options)
        args = tuple(_HOST if _is_device(value) else value for value in args)
        options = {name: _HOST if name == "device" else value for name, value in options.items()}
        return Tensor.to(self.arrive(tensor), *args, **options)

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
    while frame is not None:
        file = frame.f_code.co_filename
        if file.startswith((*_ASKING, _LIGHTNING, _KIT)) and not file.startswith((*_CARRYING, _MEMORY)):
            return ""
        if not file.startswith((_TORCH, _MEMORY)):
            return f"{Path(file).name}:{frame.f_lineno}"
        frame = frame.f_back
    return ""


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


def _unchanged(tensor: Tensor, *_args: Any, **_options: Any) -> Tensor:
    return tensor


@contextlib.contextmanager
def fake_values() -> Iterator[FakeValues]:
    """Inside, fake tensors answer as described above; afterwards torch is as it was, for the whole process."""
    answers = FakeValues()
    table: dict[Any, Any] = fake_impls.op_implementations_dict
    ours = {
        aten._local_scalar_dense.default: answers.value,
        aten.equal.default: answers.equal,
        aten.nonzero.default: answers.nonzero,
        aten.masked_select.default: answers.masked_select,
        aten._unique2.default: answers.unique,
        aten.bincount.default: answers.bincount,
        aten.mkldnn_rnn_layer.default: lstm_layer,
    }
    with contextlib.ExitStack() as undo:
        for operator, implementation in ours.items():
            if operator in table:
                undo.callback(table.__setitem__, operator, table[operator])
            else:
                undo.callback(table.pop, operator)
            table[operator] = implementation
        for name in dir(nn.init):
            if name.endswith("_") and not name.startswith("_") and callable(getattr(nn.init, name)):
                undo.enter_context(replaced(nn.init, name, _unchanged))
        undo.enter_context(replaced(torch, "compile", answers.compiled))
        undo.enter_context(overridden(nn.Module, "_apply", _applying(nn.Module._apply)))
        for name, method in (
            ("__deepcopy__", _copied),
            ("numpy", lambda tensor, *_, **__: answers.array(tensor)),
            ("to", lambda tensor, *args, **options: answers.moved(tensor, *args, **options)),
            ("cuda", lambda tensor, *_, **__: answers.arrive(tensor)),
            ("__format__", _printed),
            ("pin_memory", _unchanged),
        ):
            undo.enter_context(overridden(FakeTensor, name, method))
        yield answers


_PAGE_BYTES = 4096
_ROW_BYTES = 64
_CROWDED = 256
_FLOAT_BYTES = 4
_HALF_LANES = 32
_SCRATCH_BYTES = 12856  # measured, whatever the shape


def workspace_bytes(steps: int, batch: int, features: int, width: int, element_size: int = _FLOAT_BYTES) -> int:
    """Of one layer and direction over `steps` inputs of (batch, features), with `width` numbers of state.

    Formula, in bytes, with rows of r(n) values, T steps and B samples, for element size e and states of
    n = max(features, width): e B T (r(4 width) + r(width)) + 2 B (T + 1) (e r(n) + 8 r(n) + (e + 4) width),
    each product rounded up to pages.
    """
    widest = max(features, width)
    each_step = (_row_bytes(4 * width, element_size), _row_bytes(width, element_size))
    one_more = (_row_bytes(widest, element_size), _row_bytes(widest, _FLOAT_BYTES), _row_bytes(widest, _FLOAT_BYTES))
    cells = (element_size * width, _FLOAT_BYTES * width)
    buffers = [batch * steps * size for size in each_step]
    buffers += [2 * batch * (steps + 1) * size for size in (*one_more, *cells)]
    return sum(-(-size // _PAGE_BYTES) * _PAGE_BYTES for size in buffers)


def _row_bytes(values: int, size: int) -> int:
    """Of a row of so many values of `size` bytes, as oneDNN spaces them."""
    unit = _ROW_BYTES // size
    values = -(-values // unit) * unit
    return size * (values + unit if values % _CROWDED == 0 else values)


def lstm_layer(_mode: Any, _func: Any, values: Tensor, *args: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The fake kernel of `aten::mkldnn_rnn_layer`: output, last state, last cell and the workspace with its bytes."""
    state, cell, width, train = args[4], args[5], args[9], args[14]
    steps, batch = _sizes(values)
    kept = workspace_bytes(steps, batch, values.shape[-1], width, values.element_size()) if train else 0
    output = values.new_empty((*values.shape[:2], width))
    return output, torch.empty_like(state), torch.empty_like(cell), values.new_empty((kept,), dtype=torch.uint8)


def forward_scratch_bytes(args: Sequence[Any], _: Any) -> int:
    """Of `aten::mkldnn_rnn_layer` while it runs: weights in its own layout, and in float32 the gates of all steps."""
    values, width = args[0], int(args[10])
    steps, batch = _sizes(values)
    inputs, size = int(values.shape[-1]) + width, int(values.element_size())
    if size < _FLOAT_BYTES:
        return 4 * width * size * (inputs + 1) + 6 * _FLOAT_BYTES * batch * width
    gates = _row_bytes(4 * width, _FLOAT_BYTES)
    return 4 * width * size + gates * (inputs + batch * steps) + 2 * size * batch * width + _SCRATCH_BYTES


def backward_scratch_bytes(args: Sequence[Any], _: Any) -> int:
    """Of its backward pass: the same, gradients of the weights in its own layout, and in half precision all that comes
    in as float32. A gradient that comes in turned round, as it does from a layer with `batch_first`, is copied."""
    values, came, width = args[0], args[10], int(args[15])
    steps, batch = _sizes(values)
    features, size = int(values.shape[-1]), int(values.element_size())
    gates = _row_bytes(4 * width, _FLOAT_BYTES)
    copied = 0 if came is None or came.is_contiguous() else int(came.nbytes)
    gradients = gates * (features + width) + 4 * width * size + copied
    rows = [(number, _row_bytes(number, size)) for number in (features, width)]
    if size < _FLOAT_BYTES:
        weights = 4 * width * sum(size * -(-number // _HALF_LANES) * _HALF_LANES for number, _ in rows)
        widened = _FLOAT_BYTES * batch * width * (steps + 2)
        return gradients + weights + widened + 4 * _FLOAT_BYTES * batch * width
    weights = 4 * width * sum(row for number, row in rows if row != number * size)
    return gradients + weights + gates * batch * steps + 2 * size * batch * width + _SCRATCH_BYTES


def _sizes(values: Tensor) -> tuple[int, int]:
    """(steps, batch): torch has turned the values round before, whatever `batch_first` it hands on."""
    return int(values.shape[0]), int(values.shape[1])


_MARK = b"kit kept this from being written: "
_LONGEST = len(_MARK) + 20


@contextlib.contextmanager
def saving_shapes() -> Iterator[None]:
    """Inside, `torch.save` writes a line, and `torch.load` knows what it stood for."""
    saved: list[Batches] = []
    load_file = torch.load

    def save(value: Any, target: Any, *_rest: Any, **_options: Any) -> None:
        file = io.BytesIO()
        writer = Writer(file)
        writer.dump(value)
        shapes = tuple(TensorShape(tuple(tensor.shape), tensor.dtype) for tensor in writer.tensors)
        saved.append(Batches(file.getvalue(), shapes, 1))
        text = _MARK + str(len(saved) - 1).encode()
        if isinstance(target, str | bytes | os.PathLike):
            Path(os.fsdecode(target)).write_bytes(text)
        else:
            target.write(text)

    def load(source: Any, *rest: Any, **options: Any) -> Any:
        text = b""
        with contextlib.suppress(OSError, AttributeError):
            if isinstance(source, str | bytes | os.PathLike):
                with Path(os.fsdecode(source)).open("rb") as file:
                    text = file.read(_LONGEST)
            else:
                place = source.tell()
                text = source.read(_LONGEST)
                source.seek(place)
        if not text.startswith(_MARK):
            return load_file(source, *rest, **options)
        return saved[int(text.removeprefix(_MARK))].make()[0]

    with replaced(torch, "save", save), replaced(torch, "load", load):
        yield
