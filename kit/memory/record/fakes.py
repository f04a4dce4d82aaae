"""What code asks of a tensor that has a shape but no numbers, answered so that training goes on.

`fake_values`: a fake tensor has no value to branch on, to print or to index by. Inside, a number reads 1.0, a count 1,
a condition False, a check for finite numbers True, and a selection by mask selects everything (an upper bound), or as
much as was written to zeros, where that is known. A condition that guards a `raise` or stands in an `assert` reads as
what lets the code go on.
What is computed from constants alone is computed: a tensor of at most `KNOWN_NUMEL` numbers that Python numbers made
(`torch.linspace`, `torch.ones_like`), and every result as small of such tensors, keep their values until something
unknown is written to them, in place or by an initialiser.
Initialising weights moves no memory, copies and conversions of modules work, and moves between devices do nothing,
since there is only one. `FakeValues.guesses` says each such answer with file and line, except those to torch and
Lightning themselves (a step counter, a signal flag), whose branches were read; conditions of torch's optimizers are
guesses, by which LBFGS keeps its history, and a number that one reads is another each time, as a count of steps or a
loss is. A loop that waits for a condition sees it turn after a thousand rounds, or sooner (`waits`).
Code of users and packages that compares `device.type` of a tensor with "cpu" where it stands is told of a GPU that is
played (`compares_with_cpu`); whatever else is done with a device is done with that of fake tensors, the CPU.
`otherwise` names a guess that is answered the other way, by which a prediction (`kit.memory`) finds whether it matters.

`saving_shapes`: `torch.save` keeps the shapes and writes a line that says which they are; `torch.load` makes tensors of
these shapes from it. Files that were saved otherwise are loaded as ever.

`lstm_layer`: torch's fake kernel of the CPU's LSTM says nothing of what oneDNN keeps for the backward pass and holds
meanwhile. oneDNN 3 (`rnn_utils::set_workspace_sizes`) keeps gates and hidden states per step, and states, cells and
space for their gradients per step and once more, each as a buffer of its own in whole pages. Rows are rounded up to 64
bytes, and by 64 more where they would be a multiple of 256 values. Compared with torch 2.13 in
`tests/memory/record/test_cpu_lstm.py`: what is kept is equal to the byte in float32 and bfloat16; what is held
meanwhile, of which a part is only known as measured, within a twentieth or 40 KiB, on CPUs without tiles (AMX).

Private parts of torch used here, all tested on its upgrade: `fake_impls.op_implementations_dict` and `constructors`,
`FakeTensor.constant` with what `FakeTensorMode` does about it, `nn.Module._apply`, and `_callback_from_stance` and
`compile_wrapper` of `torch._dynamo.eval_frame`, through which all compiled code runs. (`torch.compiler.set_stance`
would do the same, but imports the compiler, and says nothing of what ran.)
"""

from __future__ import annotations

import ast
import contextlib
import dis
import functools
import io
import itertools
import linecache
import math
import os
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import lightning
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch._subclasses import fake_impls, fake_tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, unset_fake_temporarily
from torch.autograd import Function

from kit.confinement.stand_ins import overridden, replaced
from kit.memory.record.batches import Batches, TensorShape, Writer
from kit.memory.record.fake_mode import forget_look
from kit.memory.record.sparse import sparse_kernels
from kit.memory.record.value_sizes import (
    adaptive_softmax,
    composite_kernels,
    lazy_parameters,
    nonzeros,
    same_number,
    shape_kernels,
)
from kit.memory.replay.replay import GUESSED_CONDITION, MASKED, UPPER_BOUND

KNOWN_NUMEL = 4096
"""Numbers that a tensor made from constants may have for its values to be kept."""
_DRAWN_NUMEL = 1 << 22
"""Numbers that a tensor may have for numpy to read others than zeros."""
_PATIENCE = 1000
"""Times the same line may ask for the same condition before the answer turns, so that a waiting loop ends."""
_PATIENCE_OTHERWISE = 500
"""The same for a condition that is answered the other way."""
_LONGEST_LOOP = 256
"""Steps of a sequence that are recorded one after another, in each of dozens of layers."""
_ROUNDS, _OPERATORS = 50, 5_000
"""Rounds and operators of one call of a module, of which both must have passed for the answer to turn sooner."""

aten = torch.ops.aten
_HOST, _META, _CARD = torch.device("cpu"), torch.device("meta"), torch.device("cuda", 0)
_KIT = str(Path(__file__).parents[2]) + os.sep
_MEMORY = str(Path(__file__).parent) + os.sep
_TORCH = str(Path(torch.__file__).parent) + os.sep
_LIGHTNING = str(Path(lightning.__file__).parent) + os.sep
# Parts of torch that read values for themselves; any other part of torch does so for its caller.
_ASKING = tuple(_TORCH + part + os.sep for part in ("amp", "autograd", "distributed", "nn", "optim", "utils"))
_OPTIMIZERS = _TORCH + "optim" + os.sep
_CARRYING = tuple(f"{_TORCH}utils{os.sep}{part}" for part in ("_python_dispatch.py", "_stats.py", "_pytree.py"))

_COMPILER = "torch._dynamo.eval_frame"
_NOT_COMPILED = "torch.compile was left out: memory without it is an upper bound"


class FakeValues:
    """What was asked of tensors without values: `guesses` holds one sentence per place, in order."""

    def __init__(self, otherwise: str = "") -> None:
        self.guesses: dict[str, None] = {}
        self.notes: dict[str, None] = {}
        """What else was assumed, in sentences."""
        self.otherwise = otherwise
        self.arrive: Callable[[Tensor], Tensor] = _unchanged
        """What becomes of a tensor that is moved to the device."""
        self.leave: Callable[[Tensor], Tensor] = _unchanged
        """What becomes of a tensor that is moved to the host."""
        self.is_on_card: Callable[[Tensor], bool] = lambda _: False
        """Whether a tensor is on a GPU that is played."""
        self.tells_of_card, self.told_of_card = True, False
        """Whether comparisons are answered as on the GPU, and one was."""
        self.sizes_differ = False
        """Whether samples or batches do: those of a dry run are all as large as the largest."""
        self.waits: dict[str, None] = {}
        """Conditions that were asked for until the answer turned: how often they are is not known."""
        self.silent = False
        """Whether something was selected whole for torch or Lightning, which is no guess."""
        self.progress: Callable[[], tuple[int, int]] = lambda: (0, 0)
        """Operators so far, and the number of the call of a module that runs."""
        self._asked: Counter[str] = Counter()
        self._waited: dict[tuple[str, int], tuple[int, int]] = {}
        """Place and call of a module: times asked in it, and operators before."""
        self._whole_compiled = False
        self._in_compiled = 0

    def value(self, _mode: FakeTensorMode, _func: Any, tensor: FakeTensor) -> float | int | bool:
        """Of a tensor with one element: its constant where it has one, else a benign number."""
        if tensor.constant is not None:
            with unset_fake_temporarily():
                return tensor.constant.item()
        number = same_number(tensor)
        if tensor.dtype is torch.bool:
            return self._condition(None if number is None else bool(number))
        if number is not None:
            return number if tensor.is_floating_point() else int(number)
        place = _place()
        if tensor.is_floating_point() or tensor.is_complex():
            if not place and (optimizer := _place(of_optimizers=True).partition(":")[0]):
                self._asked[optimizer] += 1
                return float(self._asked[optimizer])
            return 0.25 if self._guess(f"the number at {place} is 1.0", place) else 1.0
        other = self._guess(f"the count at {place} is 1", place)
        return 2 if other else 1 if place else 0  # Lightning exits when a flag of its own is 1

    def _condition(self, truth: bool | None) -> bool:
        if truth is not None:
            return truth
        if (goes_on := _goes_on()) is not None:
            return goes_on
        place = _place(of_optimizers=True)
        what = GUESSED_CONDITION if place == _place() else "the optimizer's condition at"
        self._asked[place] += 1
        operators, call = self.progress()
        rounds, began = self._waited.get((place, call), (0, operators))
        self._waited[place, call] = (rounds + 1, began)
        other = self._guess(f"{what} {place} is False", place)
        is_long = rounds >= _ROUNDS and operators - began >= _OPERATORS
        turns = is_long or self._asked[place] > (_PATIENCE_OTHERWISE if other else _PATIENCE)
        if turns and place:
            self.waits.setdefault(
                f"what waits at {place} goes on no longer than {min(rounds, self._asked[place])} rounds"
            )
        return turns != other

    def equal(self, _mode: FakeTensorMode, _func: Any, first: FakeTensor, second: FakeTensor) -> bool:
        """Of two tensors: whether they are the same one."""
        return first is second or self._condition(None)

    def close(self, mode: FakeTensorMode, func: Any, first: FakeTensor, second: FakeTensor, *_: Any, **__: Any) -> bool:
        """The same, within a tolerance."""
        return self.equal(mode, func, first, second)

    def made(self, mode: FakeTensorMode, func: Any, *args: Any, **options: Any) -> Tensor:
        """By a factory from numbers: with its values, if it is small."""
        like = {"zeros": 0, "ones": 1}.get(func._opname.removeprefix("new_").removesuffix("_like"))
        fake: Tensor = fake_impls.constructors(mode, func, *args, **options)
        if fake.numel() > KNOWN_NUMEL or fake.device.type == "meta" or fake.layout is not torch.strided:
            return fake
        with unset_fake_temporarily():
            if any(isinstance(value, Tensor) for value in args):
                value = like if like is not None else args[-1]
                values = torch.empty_strided(fake.shape, fake.stride(), dtype=fake.dtype).fill_(value)
            else:
                values = func(*args, **options)
        known: Tensor = mode.fake_tensor_converter.from_real_tensor(mode, values, make_constant=True)
        return known

    def nonzero(self, _mode: FakeTensorMode, _func: Any, tensor: FakeTensor) -> Tensor:
        """Every element that may be other than 0, (elements, dimensions)."""
        count = self._chosen(tensor, tensor.numel())
        return tensor.new_empty_strided((count, tensor.dim()), (1, count), dtype=torch.int64)

    def masked_select(self, _mode: FakeTensorMode, _func: Any, tensor: FakeTensor, mask: FakeTensor) -> Tensor:
        """Every element that may be masked, (elements,)."""
        count = math.prod(np.broadcast_shapes(tensor.shape, mask.shape))
        return tensor.new_empty((self._chosen(mask, count) if count == mask.numel() else self._selected(count),))

    def unique(self, _mode: FakeTensorMode, _func: Any, tensor: FakeTensor, *_options: Any, **_more: Any) -> Any:
        """Every element is another, (elements,), with where it is and how often."""
        count = self._selected(tensor.numel())
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
        """`tensor` as numpy sees it: its constant where it has one; else different numbers between 0 and 1, of which a
        clustering makes as many groups as of any, and of integers and of many numbers zeros that take no memory."""
        if tensor.constant is not None:
            with unset_fake_temporarily():
                return tensor.constant.numpy().copy()
        place = _place()
        with unset_fake_temporarily():
            zero = torch.zeros((), dtype=tensor.dtype).numpy()
        if tensor.is_floating_point() and tensor.numel() <= _DRAWN_NUMEL:
            self._guess(f"the values read at {place} are random", place)
            return np.random.default_rng(0).random(tuple(tensor.shape)).astype(zero.dtype)
        self._guess(f"the values read at {place} are zeros", place)
        return np.broadcast_to(zero, tuple(tensor.shape))

    def moved(self, tensor: FakeTensor, *args: Any, **options: Any) -> Tensor:
        """`Tensor.to`, where all devices are one."""
        named = [value for value in (*args, options.get("device")) if _is_device(value)]
        if not named:
            return Tensor.to(tensor, *args, **options)
        # Of a variable it is not known what it would be with the card; most often, it is the card.
        arrived = self.leave(tensor) if _says_cpu(sys._getframe(2)) else self.arrive(tensor)
        if len(args) == 1 and not options and isinstance(arrived, FakeTensor) and arrived.fake_device == _HOST:
            return arrived  # it has come; Lightning asks for each parameter several times
        args = tuple(_HOST if _is_device(value) else value for value in args)
        options = {name: _HOST if name == "device" else value for name, value in options.items()}
        return Tensor.to(arrived, *args, **options)

    def device(self, tensor: FakeTensor) -> torch.device:
        """Where `tensor` is: of what is on the GPU that, where only a comparison with the CPU learns of it."""
        if tensor.fake_mode.in_kernel_invocation:
            return _META
        frame = sys._getframe(1)
        if self.tells_of_card and compares_with_cpu(frame.f_code, frame.f_lasti) and self.is_on_card(tensor):
            self.told_of_card = True
            return _CARD
        return tensor.fake_device

    def _chosen(self, mask: Tensor, count: int) -> int:
        """How many of so many elements a mask selects."""
        most, is_exact = nonzeros(mask) or (count, False)
        return most if is_exact else self._selected(most)

    def _selected(self, count: int) -> int:
        """How many of so many elements are selected: all, or otherwise one."""
        place = _place()
        self.silent |= not place
        other = self._guess(f"all elements are selected at {place}{UPPER_BOUND}", place)
        return min(1, count) if other else count

    def assume(self, what: str) -> None:
        """Note what was assumed of values, also where a layer of torch's reads them."""
        if place := _place(asking=()):
            self.notes.setdefault(f"assumed {what} at {place}")

    def of_one_length(self) -> bool:
        """Whether the packed sequences of a batch, which all are as long as the longest here, are taken to be so."""
        if not self.sizes_differ:
            return True
        place = _place(asking=())
        return not self._guess(f"the sequences of a batch are of one length at {place}{UPPER_BOUND}", place)

    def compiled(self, model: Any = None, **_options: Any) -> Any:
        """`torch.compile` that leaves the model as it is, and knows while it runs.

        Of a function it is noted when it is called: many packages decorate theirs as they are imported.
        """
        if model is None:
            return self.compiled
        if isinstance(model, nn.Module):
            self.notes.setdefault(_NOT_COMPILED)
            self._whole_compiled = True
            return model

        @functools.wraps(model)
        def run(*args: Any, **options: Any) -> Any:
            self.notes.setdefault(_NOT_COMPILED)
            self._in_compiled += 1
            try:
                return model(*args, **options)
            finally:
                self._in_compiled -= 1

        return run

    @contextlib.contextmanager
    def compiling_left_out(self) -> Iterator[None]:
        """Inside, nothing is compiled: neither what is asked for now nor what was before, as a decorated function."""
        with contextlib.ExitStack() as undo:
            undo.enter_context(replaced(torch, "compile", self.compiled))
            if compiler := sys.modules.get(_COMPILER):  # else nothing was compiled before
                undo.enter_context(replaced(compiler, "_callback_from_stance", self._runs_eagerly))
            yield

    def _runs_eagerly(self, callback: Any) -> None:
        """What torch asks for a compiler when compiled code is called; it is none."""
        if callable(callback):  # none for what torch itself keeps from being compiled
            self.notes.setdefault(_NOT_COMPILED)

    def is_compiled(self) -> bool:
        """Whether what runs now would be compiled."""
        return self._whole_compiled or self._in_compiled > 0 or _runs_compiled()

    def _guess(self, sentence: str, place: str) -> bool:
        """Keep a guess; whether it is the one that is answered otherwise."""
        if place:
            self.guesses.setdefault(sentence)
        return bool(place) and sentence == self.otherwise


def _runs_compiled() -> bool:
    """Whether what calls was compiled before the recording."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_name == "compile_wrapper" and frame.f_globals["__name__"] == _COMPILER:
            return True
        frame = frame.f_back
    return False


def _place(of_optimizers: bool = False, asking: tuple[str, ...] = _ASKING) -> str:
    """File and line that asks, in the user's or a third party's code; empty when torch, Lightning or kit asks.

    With `of_optimizers` a line of torch's own optimizers.
    """
    frame: FrameType | None = sys._getframe(2)
    while frame is not None:
        file = frame.f_code.co_filename
        if of_optimizers and file.startswith(_OPTIMIZERS):
            return f"{Path(file).name}:{frame.f_lineno}"
        if file.startswith((*asking, _LIGHTNING, _KIT)) and not file.startswith((*_CARRYING, _MEMORY)):
            return ""
        if not file.startswith((_TORCH, _MEMORY)):
            return f"{Path(file).name}:{frame.f_lineno}"
        frame = frame.f_back
    return ""


@functools.lru_cache(maxsize=1 << 16)
def compares_with_cpu(code: CodeType, place: int) -> bool:
    """Whether what reads an attribute there, in code of a user or a package, is `.device.type == "cpu"` or `!=`."""
    if code.co_filename.startswith((_TORCH, _LIGHTNING, _KIT)):
        return False
    rest = itertools.dropwhile(lambda step: step.offset < place, dis.get_instructions(code))
    read, kind, name, compared = itertools.islice(itertools.chain(rest, itertools.repeat(None)), 4)
    if read is None or kind is None or name is None or compared is None:
        return False
    attributes = (read.opname, read.argval, kind.opname, kind.argval, name.argval)
    return attributes == ("LOAD_ATTR", "device", "LOAD_ATTR", "type", "cpu") and compared.opname == "COMPARE_OP"


def _goes_on() -> bool | None:
    """The truth with which the code that asks for a condition goes on, where it raises with the other; else None."""
    frame: FrameType | None = sys._getframe(2)
    while frame is not None:
        file = frame.f_code.co_filename
        if file == _TORCH + "__init__.py" or not file.startswith((_MEMORY, _TORCH + "_")):
            # Of what came just before: of a jump, Python may say only where its statement begins.
            spans = list(frame.f_code.co_positions())
            line, _, column, _ = spans[max(0, frame.f_lasti // 2 - 1)]
            wanted = _wanted(file, line or frame.f_lineno, column or 0)
            if wanted is not None or not file.startswith(_TORCH):
                return wanted
        frame = frame.f_back
    return None


@functools.lru_cache(maxsize=4096)
def _wanted(file: str, line: int, column: int) -> bool | None:
    """What the condition there must be for its `if` or `assert` not to raise."""
    test: ast.expr | None = None
    wanted = True
    for node in _statements(file):
        if isinstance(node, ast.If | ast.Assert) and _holds(node.test, line, column):
            test, raises = node.test, [isinstance(body[-1], ast.Raise) for body in _bodies(node)]
            if raises[0] == raises[1]:
                return None
            wanted = raises[1]
    while isinstance(test, ast.UnaryOp | ast.BoolOp):
        if isinstance(test, ast.BoolOp):
            test = next((part for part in test.values if _holds(part, line, column)), test.values[-1])
        elif isinstance(test.op, ast.Not):
            test, wanted = test.operand, not wanted
        else:
            break
    return None if test is None else wanted


def _bodies(node: ast.If | ast.Assert) -> tuple[list[ast.stmt], list[ast.stmt]]:
    """What runs when the test is true, and when it is not."""
    if isinstance(node, ast.If):
        return node.body, node.orelse or [ast.Pass()]
    return [ast.Pass()], [ast.Raise()]


def _holds(node: ast.expr, line: int, column: int) -> bool:
    end = (node.end_lineno or node.lineno, node.end_col_offset or 0)
    return (node.lineno, node.col_offset) <= (line, column) < end


@functools.lru_cache(maxsize=64)
def _statements(file: str) -> tuple[ast.AST, ...]:
    """Of a file or a notebook's cell; none when there is no source."""
    try:
        return tuple(ast.walk(ast.parse("".join(linecache.getlines(file)))))
    except SyntaxError:
        return ()


# -- values of constants


def _forget(tensor: Tensor) -> None:
    """Nothing is known of its values any more, nor of those of its views."""
    if isinstance(tensor, FakeTensor) and tensor.constant is not None:
        tensor.fake_mode.fake_tensor_converter.invalidate_constant_aliases(tensor.constant)
        tensor.constant = None


def _forgets_written(_mode: FakeTensorMode, func: Any, _known: Any, args: Sequence[Any], options: Any) -> None:
    """What an operator that nobody computes writes to; torch's own passes over lists, which optimizers write to."""
    for place, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            written = args[place] if place < len(args) else options.get(argument.name)
            for tensor in written if isinstance(written, list | tuple) else [written]:
                _forget(tensor)


def _invalidating(invalidate: Callable[..., None]) -> Callable[..., None]:
    def invalidate_strided(converter: Any, tensor: Tensor) -> None:
        if tensor.layout is torch.strided:  # torch asks a sparse tensor for the storage that it has not
            invalidate(converter, tensor)

    return invalidate_strided


def _initialised(tensor: Tensor, *_args: Any, **_options: Any) -> Tensor:
    _forget(tensor)
    return tensor


def _ragged(_mode: FakeTensorMode, **_options: Any) -> Any:
    """A size that differs from row to row of a nested tensor: equal to itself alone."""
    return torch._C._get_nested_int(next(_ragged_sizes), 1)


_ragged_sizes = itertools.count(1 << 20)  # apart from those that torch numbers itself
_DATA: Any = torch._C.TensorBase.data


def _set_data(tensor: FakeTensor, data: Tensor) -> None:
    _DATA.__set__(tensor, data)
    tensor.constant = None
    forget_look(tensor)


def _listed(tensor: FakeTensor) -> Any:
    if tensor.constant is None:
        return _TOLIST(tensor)
    with unset_fake_temporarily():
        return tensor.constant.tolist()


_TOLIST: Any = FakeTensor.tolist
_FACTORIES = tuple(
    getattr(getattr(aten, name), overload)
    for name, overloads in {
        "arange": ("default", "start", "start_step"), "linspace": ("default",), "logspace": ("default",),
        "eye": ("default", "m"), "tril_indices": ("default",), "triu_indices": ("default",),
        **dict.fromkeys(("zeros", "ones", "full", "scalar_tensor"), ("default",)),
        **dict.fromkeys(("zeros_like", "ones_like", "full_like"), ("default",)),
        **dict.fromkeys(("new_zeros", "new_ones", "new_full"), ("default",)),
    }.items()
    for overload in overloads
)  # fmt: skip


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


def _applying(apply: Callable[..., nn.Module], answers: FakeValues) -> Callable[..., nn.Module]:
    """`nn.Module._apply` for fake parameters, which torch would refuse to swap: conversions stay, moves do nothing.

    What the `_apply` of a user's part does beside it is done, such as moving a weight back to the host.
    """

    def apply_to_fakes(module: nn.Module, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> nn.Module:
        def converted(tensor: Tensor) -> Tensor:
            with replaced(answers, "leave", _unchanged):
                return fn(tensor)

        own = [parameter for parameter in module._parameters.values() if parameter is not None]
        if not all(isinstance(parameter, FakeTensor) for parameter in own):
            return apply(module, converted, recurse)
        for child in module.children() if recurse else ():
            child._apply(fn)  # type: ignore[no-untyped-call]
        for name, parameter in module._parameters.items():
            if parameter is not None:
                module._parameters[name] = _converted(parameter, converted)
        for name, buffer in module._buffers.items():
            module._buffers[name] = None if buffer is None else converted(buffer)
        return module

    return apply_to_fakes


def _says_cpu(frame: FrameType) -> bool:
    """Whether the call that runs names the CPU: by its name, or by a variable that the file sets to nothing else."""
    file = frame.f_code.co_filename
    _, last_line, _, last_column = _span(frame)
    call = _calls(file).get((last_line, last_column))
    given = [*call.args, *(one.value for one in call.keywords if one.arg == "device")] if call is not None else []
    return any(_is_cpu(value, file) for value in given)


def _is_cpu(value: ast.expr, file: str) -> bool:
    return _is_cpu_itself(value) or _name_of(value) in _names_of_cpu(file)


def _name_of(node: ast.AST) -> str:
    """Of a variable, or with a dot of an attribute, whose owner is not asked; none of what each tensor has."""
    if isinstance(node, ast.Attribute):
        return f".{node.attr}" if node.attr != "device" else ""
    return node.id if isinstance(node, ast.Name) else ""


def _span(frame: FrameType) -> tuple[int | None, int | None, int | None, int | None]:
    """Where in the file is what runs: first and last line, first and last column."""
    return next(itertools.islice(frame.f_code.co_positions(), frame.f_lasti // 2, None))


@functools.lru_cache(maxsize=64)
def _calls(file: str) -> dict[tuple[int | None, int | None], ast.Call]:
    """Calls by where they end, as no other does; Python says of some only where the name of the method begins."""
    return {(node.end_lineno, node.end_col_offset): node for node in _statements(file) if isinstance(node, ast.Call)}


@functools.lru_cache(maxsize=64)
def _names_of_cpu(file: str) -> frozenset[str]:
    """Variables and attributes that are set to the CPU, wherever the file sets one of that name."""
    nodes = _statements(file)
    named: Counter[str] = Counter()
    for node in nodes:
        if isinstance(node, ast.Assign | ast.AnnAssign) and node.value is not None and _is_cpu_itself(node.value):
            named.update(map(_name_of, node.targets if isinstance(node, ast.Assign) else [node.target]))
    named.pop("", None)
    stores = Counter(_name_of(node) for node in nodes if isinstance(getattr(node, "ctx", None), ast.Store))
    others = {node.arg for node in nodes if isinstance(node, ast.arg)}
    others |= {node.asname or node.name for node in nodes if isinstance(node, ast.alias)}
    return frozenset(name for name, count in named.items() if count == stores[name] and name not in others)


def _is_cpu_itself(value: ast.expr) -> bool:
    """Whether it is "cpu" or torch.device("cpu")."""
    if isinstance(value, ast.Call) and ast.unparse(value.func) in ("torch.device", "device") and value.args:
        value = value.args[0]
    return isinstance(value, ast.Constant) and value.value == "cpu"


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
def not_traced(answers: FakeValues) -> Iterator[None]:
    """Inside, transformers, if it is imported, takes a step on fake tensors for one that runs.

    It asks whether a tensor is fake in order to write another step into a graph: Mamba's scan in one piece, which holds
    more, for one step of a sequence after another. Of long sequences these take longer than a dry run has, so the scan
    stays, with what these hold (`_Scan`), and a note says so. Of masks it asks so as not to read values that a dry run
    does not know either, unless it made the mask itself: of ones alone, it goes without.
    """
    utils = sys.modules.get("transformers.utils.import_utils")
    if not hasattr(utils, "is_fake_tensor"):
        yield
        return

    def is_taken_for_fake(value: Any) -> bool:
        if not isinstance(value, FakeTensor) or value.constant is not None:
            return False
        if not value.is_floating_point():
            if "mask" not in Path(sys._getframe(2).f_code.co_filename).name:
                return True  # who asks reads no mask: whether there is padding where no mask is given, for a warning
            hides_nothing = same_number(value) == 1
            kind = (
                "nothing, as in each sample looked at: with padding attention may hold more"
                if hides_nothing
                else "something: of ones alone, transformers goes without it and may hold less"
            )
            answers.notes.setdefault(MASKED + kind)
            return not hides_nothing
        is_long = min(value.shape[1:], default=0) > _LONGEST_LOOP  # steps or channels, in either order
        if is_long:
            answers.notes.setdefault(
                "long scans are one operator here: they hold as much step after step, and take longer"
            )
        return is_long

    def scan(_combine: Any, pair: tuple[Tensor, Tensor], **_options: Any) -> tuple[None, Tensor]:
        function: Any = _Scan
        return None, function.apply(*pair)

    with contextlib.ExitStack() as undo:
        undo.enter_context(replaced(utils, "is_fake_tensor", is_taken_for_fake))
        for name in ("mamba", "falcon_mamba"):
            models = sys.modules.get(f"transformers.models.{name}.modeling_{name}")
            if hasattr(models, "associative_scan"):
                undo.enter_context(replaced(models, "associative_scan", scan))
        yield


class _Scan(Function):
    """Allocates as `state = factor * state + term` does step after step: each state is kept, for the backward pass too.
    That adds the gradients of one step to those of all, while the gradients of what all steps gave are there, and in
    half precision the copies of states that these were made of."""

    @staticmethod
    def forward(ctx: Any, factors: Tensor, terms: Tensor) -> Tensor:
        batch, width, steps, size = factors.shape
        states = terms.new_empty((batch, steps, width, size)).permute(0, 2, 1, 3)  # each step as it is made
        ctx.save_for_backward(factors, states)
        cast = torch.get_autocast_dtype("cpu") if torch.is_autocast_enabled("cpu") else torch.get_default_dtype()
        copied = states.numel() if cast.itemsize < states.element_size() else 0
        ctx.held_bytes = cast.itemsize * (copied + batch * width * steps)
        return states

    @staticmethod
    def backward(ctx: Any, *_gradients: Tensor) -> tuple[Tensor, Tensor]:
        factors, _states = ctx.saved_tensors
        made = torch.empty_like(factors), torch.empty_like(factors)
        _held_too = factors.new_empty((ctx.held_bytes,), dtype=torch.uint8)
        return made


@contextlib.contextmanager
def fake_values(otherwise: str = "") -> Iterator[FakeValues]:
    """Inside, fake tensors answer as described above; afterwards torch is as it was, for the whole process."""
    answers = FakeValues(otherwise)
    table: dict[Any, Any] = fake_impls.op_implementations_dict
    ours = {
        aten._local_scalar_dense.default: answers.value,
        aten.equal.default: answers.equal,
        aten.nonzero.default: answers.nonzero,
        aten.masked_select.default: answers.masked_select,
        aten._unique2.default: answers.unique,
        aten.bincount.default: answers.bincount,
        aten.allclose.default: answers.close,
        **dict.fromkeys(_FACTORIES, answers.made),
        **shape_kernels(answers.assume),
        **sparse_kernels(answers.assume),
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
                undo.enter_context(replaced(nn.init, name, _initialised))
        undo.enter_context(composite_kernels(answers.assume, answers.of_one_length))
        undo.enter_context(adaptive_softmax(answers.assume))
        undo.enter_context(lazy_parameters())
        undo.enter_context(replaced(fake_tensor, "CONSTANT_NUMEL_LIMIT", KNOWN_NUMEL))
        undo.enter_context(replaced(FakeTensorMode, "invalidate_written_to_constants", _forgets_written))
        converter, name = fake_tensor.FakeTensorConverter, "invalidate_constant_aliases"
        undo.enter_context(replaced(converter, name, _invalidating(converter.invalidate_constant_aliases)))
        undo.enter_context(replaced(FakeTensorMode, "create_symbolic_nested_int", _ragged))
        undo.enter_context(answers.compiling_left_out())
        undo.enter_context(overridden(nn.Module, "_apply", _applying(nn.Module._apply, answers)))
        for name, method in (
            ("__deepcopy__", _copied),
            ("numpy", lambda tensor, *_, **__: answers.array(tensor)),
            ("to", lambda tensor, *args, **options: answers.moved(tensor, *args, **options)),
            ("cuda", lambda tensor, *_, **__: answers.arrive(tensor)),
            ("cpu", lambda tensor, *_, **__: answers.leave(tensor)),
            ("__format__", _printed),
            ("tolist", _listed),
            ("device", property(answers.device)),
            ("data", property(_DATA.__get__, _set_data)),
            ("pin_memory", _unchanged),
        ):
            undo.enter_context(overridden(FakeTensor, name, method))
        yield answers


# -- the CPU's LSTM

_PAGE_BYTES = 4096
_ROW_BYTES = 64
_CROWDED = 256
_FLOAT_BYTES = 4
_HALF_LANES = 32
_SCRATCH_BYTES = 12856  # measured, whatever the shape
ONEDNN_HALF: dict[torch.dtype, Callable[[], bool]] = {
    torch.bfloat16: torch.ops.mkldnn._is_mkldnn_bf16_supported,
    torch.float16: torch.ops.mkldnn._is_mkldnn_fp16_supported,
}
"""Whether oneDNN takes a number format on this processor: bfloat16 with AVX-512, though not all that have it multiply
bfloat16 (`_multiplies_half`)."""


def is_emulated(dtype: torch.dtype) -> bool:
    """Whether torch computes in a number format that oneDNN does not take on this processor."""
    return not ONEDNN_HALF.get(dtype, lambda: True)()


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
    """The fake kernel of `aten::mkldnn_rnn_layer`: output, last state, last cell and the workspace with its bytes.

    Raises:
        RuntimeError: in training, in half precision on a processor that has none, as the real one does.
    """
    state, cell, width, train = args[4], args[5], args[9], args[14]
    if train and is_emulated(values.dtype):
        raise RuntimeError(
            f"this CPU has no LSTM in {str(values.dtype).removeprefix('torch.')}, for which oneDNN needs AVX-512; "
            "train it here with precision 32-true, or ask about a GPU"
        )
    steps, batch = _sizes(values)
    kept = workspace_bytes(steps, batch, values.shape[-1], width, values.element_size()) if train else 0
    output = values.new_empty((*values.shape[:2], width))
    return output, torch.empty_like(state), torch.empty_like(cell), values.new_empty((kept,), dtype=torch.uint8)


def forward_scratch_bytes(args: Sequence[Any], _: Any) -> int:
    """Of `aten::mkldnn_rnn_layer` while it runs: weights in its own layout, and in float32 the gates of all steps."""
    values, width = args[0], int(args[10])
    steps, batch = _sizes(values)
    inputs, size = int(values.shape[-1]) + width, int(values.element_size())
    if size < _FLOAT_BYTES and _multiplies_half(values.dtype):
        return 4 * width * size * (inputs + 1) + 6 * _FLOAT_BYTES * batch * width
    if size < _FLOAT_BYTES:
        states = 3 * -(-batch * _row_bytes(width, size) // _PAGE_BYTES) * _PAGE_BYTES
        weights = 4 * width * size + _row_bytes(4 * width, size) * inputs
        return weights + _row_bytes(4 * width, _FLOAT_BYTES) * batch * steps + states
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
        if not _multiplies_half(values.dtype):
            widened += _row_bytes(4 * width, size) * batch * steps
        return gradients + weights + widened + 4 * _FLOAT_BYTES * batch * width
    weights = 4 * width * sum(row for number, row in rows if row != number * size)
    return gradients + weights + gates * batch * steps + 2 * size * batch * width + _SCRATCH_BYTES


def _multiplies_half(dtype: torch.dtype) -> bool:
    """Whether this processor multiplies in half precision; others keep the gates of all steps beside it."""
    return dtype is not torch.bfloat16 or torch.cpu._is_avx512_bf16_supported()


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
