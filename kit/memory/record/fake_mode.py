"""FakeMode: torch's `FakeTensorMode` that answers an operator it has seen before with one look into a dictionary.

A deep model calls the same operators on tensors of the same shapes once a layer. Torch keeps such answers too, but
finding one takes it four times as long as all else that a dry run does. Here the key is short, and what torch made the
first time says how to make the next tensor.

Invariants: torch decides what may be kept (`_make_cache_entry`): nothing that depends on values, changes a shape in
place or has a constant; beyond it, `_unsafe_view` is kept as the view that it is. A constant beside a tensor without
values is a tensor like another to what writes to none of them. A constant that came of numbers alone is made again as a
copy of its numbers. Whatever has an argument that is not plain, or a result of another kind, goes to torch. An answer
holds within one dry run, since another one plays another device.

Private parts of torch used here, all tested on its upgrade: `FakeTensorMode._make_cache_entry` and
`_output_from_cache_entry`, `FakeTensorConverter` with its memos, `Tensor._make_subclass`, `_DisableTorchDispatch`,
`find_torch_dispatch_rule`, `_disable_current_modes`, and the attributes that a `FakeTensor` has.
"""

from __future__ import annotations

import contextlib
import importlib.machinery
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, cast

import torch
from torch import Tensor
from torch._library import simple_registry
from torch._subclasses import fake_impls, fake_tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorConverter, FakeTensorMode
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import _disable_current_modes, _get_current_dispatch_mode_stack
from torch.utils._pytree import tree_leaves
from torch.utils.weak import WeakIdKeyDictionary
from typing_extensions import override

from kit.confinement.stand_ins import overridden, replaced
from kit.memory.record.sparse import OF_SPARSE, faked, is_sparse
from kit.memory.record.temporaries import BLOCKS, FOLD, NORMS, SHRUNK_LOSSES, joined_blocks, normed, shrunk

_private: Any = torch._C
_torch: Any = fake_tensor
_default_dtype, _is_inference = torch.get_default_dtype, torch.is_inference_mode_enabled
_default_device: Callable[[], Any] = _private._get_default_device
_meta = torch.device("meta")
_HOST = torch.device("cpu")
_DEVICE_OF = torch.ops.prim.device.default
_ITEM = torch.ops.aten._local_scalar_dense.default
_WHERE = torch.ops.aten.where.self
_DETACH = torch.ops.aten.detach.default
_UNBIND = torch.ops.aten.unbind.int
_COPY = torch.ops.aten.copy_.default
_OF_SHAPES = frozenset({torch.ops.aten.zeros_like.default, torch.ops.aten.ones_like.default})
"""Operators that look at no numbers of their tensor."""
_UNSAFE_VIEW = torch.ops.aten._unsafe_view.default
_PLAIN = frozenset(
    {int, float, bool, complex, str, type(None), torch.dtype, torch.device, torch.layout, torch.memory_format}
)
Answer = Callable[[Sequence[Any]], Any]
"""The arguments of an operator → its result."""


def _lists_of(args: Sequence[Any]) -> list[list[Tensor]]:
    return [value for value in args if type(value) is list and value and isinstance(value[0], Tensor)]


def _changes_nothing(func: Any, lists: list[list[Tensor]]) -> bool:
    """Whether an operator on lists writes to the first of them as it is: there is no shape and no type to find."""
    if func._schema.returns or not lists or not all(type(tensor) is FakeTensor for item in lists for tensor in item):
        return False
    first, *others = ([(tensor.shape, tensor.dtype) for tensor in values] for values in lists)
    return all(dtype.is_floating_point for _, dtype in first) and all(other == first for other in others)


def _several(out: Any) -> Sequence[Any]:
    return out if isinstance(out, tuple | list) else ()


def _takes_constants(func: Any) -> bool:
    """Whether an operator does with a constant as with any tensor, where another of its tensors has no values."""
    return not func._schema.is_mutable and func not in fake_impls.op_implementations_dict


def _is_ordinary(tensor: Tensor) -> bool:
    """Whether a real tensor is its numbers, shape and strides, and no more."""
    return (
        type(tensor) is Tensor and tensor.layout is torch.strided and tensor.device.type == "cpu"
        and not tensor._is_view() and tensor.storage_offset() == 0 and not tensor.requires_grad
        and not (tensor.is_nested or tensor.is_quantized or tensor.is_conj() or tensor.is_neg())
        and not tensor.is_inference() and _private._functorch.peek_interpreter_stack() is None
    )  # fmt: skip


def _is_number(value: Any) -> bool:
    """Whether it is what Python writes to a place, as a loop does thousands of times: `matrix[row, column] = 1`."""
    return type(value) is FakeTensor and value.constant is not None and value.dim() == 0


def _weak_storage(tensor: Any) -> StorageWeakRef:
    return StorageWeakRef(tensor._typed_storage())  # type: ignore[no-untyped-call]


class ConstantConverter(FakeTensorConverter):
    """Torch's converter of real tensors; a constant with a storage of its own, as most have, it makes directly."""

    def __init__(self) -> None:
        super().__init__()
        self._attributes: dict[str, Any] = {}
        """Those that all constants have in common."""
        self._known_aliases: dict[StorageWeakRef, tuple[list[Any], int]] = {}
        """Constants that share a storage, and of how many of them torch's memos know."""
        self._sparse = WeakIdKeyDictionary()
        """Fake matrices by real ones, which torch would take to have no values."""

    @override
    def from_real_tensor(
        self, fake_mode: FakeTensorMode, t: Tensor, make_constant: bool = False, *rest: Any, **options: Any
    ) -> FakeTensor:
        if is_sparse(t) and type(t) is Tensor:
            if t not in self._sparse:
                self._sparse[t] = faked(fake_mode, t)
            return cast("FakeTensor", self._sparse[t])
        if not make_constant or rest or options or not _is_ordinary(t):
            self._remember(t)
            is_known = make_constant or (t.numel() <= _torch.CONSTANT_NUMEL_LIMIT and _is_ordinary(t))
            return super().from_real_tensor(fake_mode, t, is_known, *rest, **options)
        shared = self.constant_storage_mapping.get(_weak_storage(t))
        for alias in shared or ():
            fake = alias()
            if fake is not None and fake.constant is t:
                return fake
        if shared is not None or t.untyped_storage() in self.meta_converter.describer.lookup_storage:
            self._remember(t)
            return super().from_real_tensor(fake_mode, t, make_constant)
        with _private._DisableTorchDispatch():
            empty = torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device=_meta)
            made = self.made(fake_mode, empty, t)
        self.add_constant_storage_mapping(made)
        return made

    def made(self, fake_mode: FakeTensorMode, empty: Tensor, constant: Tensor) -> FakeTensor:
        """The constant whose shape and storage is that of an empty one."""
        if not self._attributes:
            self._attributes = {**vars(FakeTensor(fake_mode, empty, _HOST, constant=constant))}
        subclass: Any = Tensor._make_subclass
        made: FakeTensor = subclass(FakeTensor, empty, False, dispatch_device=True, device_for_backend_keys=_HOST)
        if fake_mode._allow_unsafe_data_ptr_access:
            _private._set_warn_deprecated_on_mutable_data_ptr(made)
        else:
            _private._set_throw_on_mutable_data_ptr(made)
        vars(made).update(self._attributes, constant=constant)
        return made

    def _remember(self, tensor: Tensor) -> None:
        """Tell torch's memos of the constants that share the storage of a tensor."""
        if type(tensor) is not Tensor or tensor.layout is not torch.strided or tensor.device.type != "cpu":
            return
        if tensor.is_nested or _private._functorch.is_functorch_wrapped_tensor(tensor):
            return  # without a storage of their own
        describer: Any = self.meta_converter.describer
        storage = _weak_storage(tensor)
        aliases = self.constant_storage_mapping.get(storage, [])
        known, count = self._known_aliases.get(storage, (aliases, 0))
        self._known_aliases[storage] = aliases, len(aliases)
        for alias in aliases[count:] if known is aliases else aliases:
            fake = alias()
            if fake is not None and fake.constant is not None:
                self.set_tensor_memo(fake.constant, fake)
                number = describer.get_storage_id(fake.constant.untyped_storage())
                self.meta_converter.storage_memo.setdefault(number, fake.untyped_storage())


_LOOK = "kit_look"
plainly: Any = _private.DisableTorchFunctionSubclass
"""Inside, a tensor's attributes are read at once: torch does not look for a `__torch_function__` first."""


def forget_look(value: Any) -> None:
    """A value that is a fake tensor may look otherwise from here on."""
    if type(value) is FakeTensor:
        vars(value).pop(_LOOK, None)


@contextlib.contextmanager
def rules_found_once() -> Iterator[None]:
    """Inside, torch looks up only once whether a mode has a rule for an operator, not each time one runs."""
    find = simple_registry.find_torch_dispatch_rule
    found: dict[tuple[str, type], Any] = {}

    def find_once(operator: Any, kind: type) -> Any:
        if operator is _DEVICE_OF:
            return None  # asked for twice as often as anything runs
        key = operator._name, kind
        if key not in found:
            found[key] = find(operator, kind)
        return found[key]

    with replaced(simple_registry, "find_torch_dispatch_rule", find_once):
        yield


@contextlib.contextmanager
def imports_with_numbers() -> Iterator[None]:
    """Inside, what a file computes while it is imported has its numbers, also where a module or a step imports it: such
    tensors are constants of the file, which outlive the dry run, and are no part of what is trained."""
    loader: Any = importlib.machinery.SourceFileLoader
    run = loader.exec_module

    def exec_module(self: Any, module: Any) -> None:
        with _disable_current_modes():
            run(self, module)

    with _disable_current_modes():
        pass  # it imports a file itself, the first time
    with overridden(loader, "exec_module", exec_module):
        yield


class FakeMode(FakeTensorMode):  # type: ignore[no-untyped-call]
    """Fake tensors of one dry run; `is_cuda` where they stand for those on a GPU."""

    def __init__(self, is_cuda: bool = False) -> None:
        self.is_cuda = is_cuda
        super().__init__(allow_non_fake_inputs=True)
        self.cache_enabled = False  # torch's own
        self.fake_tensor_converter = ConstantConverter()
        self.answered: Answer | None = None
        """What gave the last result: the same for equal operators on equal arguments; None where torch did."""
        self._answers: dict[tuple[Any, ...] | None, Answer | None] = {}
        self._constants = self._unknowns = 0
        """Tensors with and without values that `_describe` saw."""
        self._sharing: dict[str, bool] = {}
        """Whether the result or an argument of an operator may share a storage, by its name."""
        self._shares = False
        self._attributes: dict[torch.device, tuple[dict[str, Any], torch.device]] = {}
        """Those that all fake tensors of a device have in common, and the device."""
        self._looks: dict[tuple[Any, ...], int] = {}
        """What fake tensors look like, numbered."""
        self._plainly = plainly()

    @classmethod
    @override
    def _should_skip_dynamo(cls) -> bool:
        """False: torch would wrap every call in a switch for its compiler, which never runs here."""
        return False

    @override
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.answered = None
        if func is _ITEM and type(args[0]) is FakeTensor and args[0].constant is not None:
            return args[0].constant.item()  # step counters of optimizers, one for each parameter
        if func.__name__.startswith("_foreach_") and _changes_nothing(func, lists := _lists_of(args)):
            fakes: list[Any] = [tensor for item in lists for tensor in item]
            constants = sum(tensor.constant is not None for tensor in fakes)
            if constants < len(fakes):
                if constants:  # as torch does: of what is written, nothing is known any more
                    self.invalidate_written_to_constants(func, fakes, args, kwargs or {})
                elif (key := self._key(func, args, kwargs)) is not None:
                    self.answered = self._answers.setdefault(key, lambda _: None)
                return None
        if func in self.lift_fns and _is_ordinary(args[0]) and self.may_turn_const(args[0]):
            with _private._DisableTorchDispatch():
                numbers = args[0].clone()
            return self.fake_tensor_converter.from_real_tensor(self, numbers, make_constant=True)
        if (func is _DETACH or func is _UNBIND) and type(args[0]) is FakeTensor and self._is_plain_constant(args[0]):
            with _private._DisableTorchDispatch():
                views = func(args[0].constant, *args[1:])
            if func is _DETACH:  # biases and weights of norms, when they become parameters
                return self._alias(args[0], views)
            return [self._alias(args[0], view) for view in views]  # of which a loop over the numbers has thousands
        known = self._key(func, args, kwargs)
        answer = self._answers.get(known)
        if answer is not None:
            self.answered = answer
            return answer(args)
        of_constants = self._constants > 0
        of_lists = known is not None and func.__name__.startswith("_foreach_")
        if of_lists and self._found_of_alike(known, func, args, kwargs):
            answer = self.answered = self._answers[known]
            assert answer is not None
            with _private._DisableTorchDispatch():
                return answer(args)
        if func is _WHERE and args[0].dtype is torch.uint8:  # kernels still take it, torch's rule for shapes does not
            args = (args[0].bool(), *args[1:])
        if (func is FOLD or func in SHRUNK_LOSSES) and (part := shrunk(self, func, args, kwargs or {})) is not None:
            return part
        if func is BLOCKS:
            return joined_blocks(args[0])
        out: Any = NotImplemented
        if known is None and func in OF_SPARSE and any(map(is_sparse, args)):
            convert = self.fake_tensor_converter.from_real_tensor
            args = [convert(self, one) if is_sparse(one) and type(one) is Tensor else one for one in args]
            out = OF_SPARSE[func](self, func, *args, **(kwargs or {}))
        if out is NotImplemented:
            out = super().__torch_dispatch__(func, types, args, kwargs or {})
        if func in NORMS:
            out = normed(self, func, args, out, self.is_cuda)
        self.answered = None  # what torch asked meanwhile
        schema = getattr(func, "_schema", None)
        if schema is None or schema.is_mutable:  # it may have changed a shape
            for value in tree_leaves((args, kwargs)):
                forget_look(value)
        if known is not None and known not in self._answers:
            of_numbers = (not of_constants or func in _OF_SHAPES) and not self._sharing[func._name]
            if of_numbers and isinstance(out, FakeTensor) and out.constant is not None:
                self._answers[known] = self._constant(out)
            else:
                self._answers[known] = self._answer(func, args, kwargs or {}, out)
        return out

    def _found_of_alike(self, known: Any, func: Any, args: Sequence[Any], options: Any) -> bool:
        """Keep how to give what an operator makes of each item of long lists, run on items of which none look alike."""
        lists = [value for value in args if type(value) is list]
        if not lists or len(lists) != len(_lists_of(args)) or len({len(values) for values in lists}) > 1:
            return False
        looks = [tuple((vars(one)[_LOOK], one.requires_grad) for one in items) for items in zip(*lists, strict=True)]
        first: dict[Any, int] = {}
        for index, look in enumerate(looks):
            first.setdefault(look, index)
        if len(first) == len(looks):
            return False
        few = [[value[index] for index in first.values()] if type(value) is list else value for value in args]
        out = super().__torch_dispatch__(func, (), few, options or {})
        if not isinstance(out, list) or not all(type(one) is FakeTensor for one in out):
            return False
        whole: Any = self
        try:
            entry = whole._make_cache_entry(_torch._CacheKeyState(None), None, func, few, options or {}, tuple(out))
        except _torch._BypassDispatchCache:
            return False
        if any(info.inplace_idx is not None or info.view_idx is not None for info in entry.output_infos):
            return False
        makers = dict(zip(first, (self._maker(func, info, few) for info in entry.output_infos), strict=True))
        ordered = [makers[look] for look in looks]
        if None in ordered:
            return False
        self._answers[known] = lambda args: [make(args) for make in ordered if make is not None]
        return True

    def _constant(self, out: FakeTensor) -> Answer | None:
        """How to give a constant again that came of numbers alone; None where a copy would be of other strides."""
        assert out.constant is not None
        with _private._DisableTorchDispatch():
            numbers = out.constant.clone()
        if out.requires_grad or numbers.stride() != out.stride():
            return None
        convert = self.fake_tensor_converter.from_real_tensor
        return lambda _: convert(self, numbers.clone(), make_constant=True)

    def _is_plain_constant(self, tensor: FakeTensor) -> bool:
        constant = tensor.constant
        return (
            constant is not None and tensor.fake_mode is self and type(constant) is Tensor
            and constant.stride() == tensor.stride() and not (constant.is_conj() or constant.is_neg())
            and not torch.is_inference_mode_enabled() and _private._functorch.peek_interpreter_stack() is None
        )  # fmt: skip

    def _alias(self, tensor: FakeTensor, view: Tensor) -> FakeTensor:
        """A constant on the same storage, whose numbers are those of a view of the other's numbers."""
        convert: Any = self.fake_tensor_converter
        with _private._DisableTorchDispatch():
            constant: Any = tensor.constant
            empty = torch.empty(0, dtype=tensor.dtype, device=_meta)
            offset = tensor.storage_offset() + view.storage_offset() - constant.storage_offset()
            empty.set_(tensor.untyped_storage(), offset, view.shape, view.stride())
            made: FakeTensor = convert.made(self, empty, view)
        convert.add_constant_storage_mapping(made)
        return made

    def quick(self, func: Any, args: Any, kwargs: Any) -> Any:
        """The result where it is kept, else NotImplemented: for the mode above, to spare it the way through torch."""
        if func is _ITEM and type(args[0]) is FakeTensor and args[0].constant is not None:
            self.answered = None
            with _private._DisableTorchDispatch():
                return args[0].constant.item()
        if func is _COPY and type(args[0]) is FakeTensor and args[0].constant is None and _is_number(args[1]):
            self.answered = None
            return args[0]
        with self._plainly:
            answer = self._answers.get(self._key(func, args, kwargs))
            if answer is None:
                return NotImplemented
            self.answered = answer
            with _private._DisableTorchDispatch():
                return answer(args)

    def _key(self, func: Any, args: Any, kwargs: Any) -> tuple[Any, ...] | None:
        """What an operator can tell of its arguments, and of what torch is set to; None where one is not plain."""
        name = func._name  # its own hash takes longer, and `id` is an event that an audit hook is told of
        shares = self._sharing.get(name)
        if shares is None:
            schema = getattr(func, "_schema", None)  # an operator of higher order has none
            shares = self._sharing[name] = schema is None or any(value.alias_info for value in schema.arguments)
        self._shares = shares
        key = [name, _default_dtype(), _default_device(), _is_inference()]
        self._constants = self._unknowns = 0
        if not self._describe(key, args) or (kwargs and not self._describe_options(key, kwargs)):
            return None
        if self._constants and not (self._unknowns and _takes_constants(func)) and func not in _OF_SHAPES:
            return None
        return tuple(key)

    def _describe_options(self, key: list[Any], options: Mapping[str, Any]) -> bool:
        key.extend(options)
        return self._describe(key, options.values())

    def _describe(self, key: list[Any], values: Any) -> bool:
        """Add to `key` what an operator can tell of its arguments; False where one is not plain."""
        for value in values:
            kind = type(value)
            if kind is FakeTensor:
                known = value.__dict__
                if known["fake_mode"] is not self:
                    return False
                look = known.get(_LOOK)
                if look is None:
                    if value.layout is not torch.strided:
                        return False
                    look = self._look_at(value)
                if known["constant"] is None:
                    self._unknowns += 1
                else:
                    self._constants += 1
                key += (look, value.requires_grad)
                if self._shares:  # what makes a tensor of its own looks at no bytes beyond the shape
                    key.append(value.untyped_storage().nbytes())
            elif kind in _PLAIN:
                key += (kind, value)  # 1 and 1.0 are equal, and make other types
            elif kind is list or kind is tuple:
                key += (kind, len(value))
                if not self._describe(key, value):
                    return False
            else:
                return False
        return True

    def _look_at(self, tensor: FakeTensor) -> int:
        """The number of all that an operator can tell of a tensor by itself, kept on it (`forget_look`)."""
        look = (
            tensor.dtype, tensor.shape, tensor.stride(), tensor.storage_offset(), tensor.fake_device,
            _private._dispatch_keys(tensor).raw_repr(),
        )  # fmt: skip
        number = self._looks.setdefault(look, len(self._looks))
        vars(tensor)[_LOOK] = number
        return number

    def _answer(self, func: Any, args: Sequence[Any], options: Mapping[str, Any], out: Any) -> Answer | None:
        """How to give `out` again; None where torch would not."""
        if not isinstance(out, FakeTensor | tuple | list | None):
            return None
        if func is _UNSAFE_VIEW and isinstance(out, FakeTensor):
            like = _torch.extract_tensor_metadata(out)
            info = _torch._DispatchCacheEntryOutputInfo(inplace_idx=None, metadata=like, view_idx=0)
            return self._maker(func, info, args) if out.constant is None else None
        made = [value.untyped_storage()._cdata for value in _several(out) if isinstance(value, FakeTensor)]
        if len(set(made)) < len(made) and not func.is_view:
            return None  # two results that are one, as the biases of an LSTM have one gradient
        state = _torch._CacheKeyState(None)
        # The one result of `split` is a list, whatever gave it.
        kind = list if isinstance(out, list) or len(func._schema.returns) == 1 else tuple
        whole: Any = self
        try:
            # A list is refused by torch for its rarity alone; optimizers have lists of thousands.
            entry = whole._make_cache_entry(
                state, None, func, args, options, tuple(out) if isinstance(out, list) else out
            )
        except _torch._BypassDispatchCache:
            return None
        makers = [self._maker(func, info, args) for info in entry.output_infos]
        if None in makers:
            return None
        if not entry.is_output_tuple:
            return makers[0]
        return lambda args: kind([make(args) for make in makers if make is not None])

    def _maker(self, func: Any, info: Any, args: Sequence[Any]) -> Answer | None:
        """Makes one tensor as torch's entry says; None for one of a kind that only torch makes."""
        if info.inplace_idx is not None:
            index: int = info.inplace_idx
            return lambda args: args[index]
        like = info.metadata
        if like is None:
            value = info.constant_value
            return lambda _: value
        if like.layout != torch.strided or like.is_conj or like.is_neg or like.requires_grad:
            return None
        view = info.view_idx
        shape, stride, offset, dtype = tuple(like.shape), tuple(like.stride), like.storage_offset, like.dtype
        whole: Any = self
        if like.device not in self._attributes:
            entry = _torch._DispatchCacheValidEntry(output_infos=(info,), is_output_tuple=False)
            like_it = whole._output_from_cache_entry(_torch._CacheKeyState(None), entry, None, func, args)
            self._attributes[like.device] = (dict(vars(like_it)), like_it.fake_device)
        attributes, device = self._attributes[like.device]
        attributes = dict(attributes)
        subclass: Any = Tensor._make_subclass

        def make(args: Sequence[Any]) -> Any:
            if view is None:
                empty = torch.empty_strided(shape, stride, dtype=dtype, device=_meta)
            else:
                empty = torch.empty(0, dtype=dtype, device=_meta)
                empty.set_(args[view].untyped_storage(), offset, shape, stride)
            made: Any = subclass(FakeTensor, empty, False, dispatch_device=True, device_for_backend_keys=device)
            if view is None:
                protect(made)
            made.__dict__ = attributes.copy()
            if _LOOK not in attributes:
                attributes[_LOOK] = self._look_at(made)
            return made

        unsafe = whole._allow_unsafe_data_ptr_access
        protect = (
            _private._set_warn_deprecated_on_mutable_data_ptr if unsafe else _private._set_throw_on_mutable_data_ptr
        )
        return make


def kernel_ran(name: str, args: tuple[Any, ...], results: tuple[Any, ...]) -> None:
    """Tell the recorder of an operator that nothing runs: where a kernel is emulated by what it allocates, nothing else
    would say that it takes time."""
    for mode in _get_current_dispatch_mode_stack():
        if (told := getattr(mode, "kernel_ran", None)) is not None:
            told(name, args, results)
