"""FakeMode: torch's `FakeTensorMode` that answers an operator it has seen before with one look into a dictionary.

A deep model calls the same operators on tensors of the same shapes once a layer. Torch keeps such answers too, but
finding one takes it four times as long as all else that a dry run does. Here the key is short, and what torch made the
first time says how to make the next tensor.

Invariants: torch decides what may be kept (`_make_cache_entry`): nothing that depends on values, changes a shape in
place or has a constant; beyond it, `_unsafe_view` is kept as the view that it is. A constant beside a tensor without
values is a tensor like another to what writes to none of them. Whatever has an argument that is not plain, or a result
of another kind, goes to torch. An answer holds within one dry run, since another one plays another device.

Private parts of torch used here, all tested on its upgrade: `FakeTensorMode._make_cache_entry` and
`_output_from_cache_entry`, `Tensor._make_subclass`, `_DisableTorchDispatch`, and the attributes that a `FakeTensor`
has.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._subclasses import fake_impls, fake_tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from typing_extensions import override

_private: Any = torch._C
_torch: Any = fake_tensor
_meta = torch.device("meta")
_ITEM = torch.ops.aten._local_scalar_dense.default
_UNSAFE_VIEW = torch.ops.aten._unsafe_view.default
_PLAIN = frozenset(
    {int, float, bool, complex, str, type(None), torch.dtype, torch.device, torch.layout, torch.memory_format}
)
Answer = Callable[[Sequence[Any]], Any]
"""The arguments of an operator → its result."""


def _changes_nothing(func: Any, args: Sequence[Any]) -> bool:
    """Whether an operator on lists writes to the first of them as it is: there is no shape and no type to find."""
    lists = [value for value in args if type(value) is list and value and isinstance(value[0], Tensor)]
    if func._schema.returns or not lists or not all(_is_plain(tensor) for values in lists for tensor in values):
        return False
    first, *others = ([(tensor.shape, tensor.dtype) for tensor in values] for values in lists)
    return all(dtype.is_floating_point for _, dtype in first) and all(other == first for other in others)


def _several(out: Any) -> Sequence[Any]:
    return out if isinstance(out, tuple | list) else ()


def _takes_constants(func: Any) -> bool:
    """Whether an operator does with a constant as with any tensor, where another of its tensors has no values."""
    return not func._schema.is_mutable and func not in fake_impls.op_implementations_dict


def _is_plain(tensor: Tensor) -> bool:
    return type(tensor) is FakeTensor and tensor.constant is None


class FakeMode(FakeTensorMode):  # type: ignore[no-untyped-call]
    """Fake tensors of one dry run."""

    def __init__(self) -> None:
        super().__init__(allow_non_fake_inputs=True)
        self.cache_enabled = False  # torch's own
        self.answered: Answer | None = None
        """What gave the last result: the same for equal operators on equal arguments; None where torch did."""
        self._answers: dict[tuple[Any, ...] | None, Answer | None] = {}
        self._constants = self._unknowns = 0
        """Tensors with and without values that `_describe` saw."""

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
        if func.__name__.startswith("_foreach_") and _changes_nothing(func, args):
            return None
        known = self._key(func, args, kwargs)
        answer = self._answers.get(known)
        if answer is not None:
            self.answered = answer
            return answer(args)
        out = super().__torch_dispatch__(func, types, args, kwargs or {})
        self.answered = None  # what torch asked meanwhile
        if known is not None and known not in self._answers:
            self._answers[known] = self._answer(func, args, kwargs or {}, out)
        return out

    def quick(self, func: Any, args: Any, kwargs: Any) -> Any:
        """The result where it is kept, else NotImplemented: for the mode above, to spare it the way through torch."""
        answer = self._answers.get(self._key(func, args, kwargs))
        if answer is None:
            return NotImplemented
        self.answered = answer
        with _private._DisableTorchDispatch():
            return answer(args)

    def _key(self, func: Any, args: Any, kwargs: Any) -> tuple[Any, ...] | None:
        """What an operator can tell of its arguments, and of what torch is set to; None where one is not plain."""
        key = [
            func, torch.get_default_dtype(), _private._get_default_device(), torch.is_inference_mode_enabled(),
        ]  # fmt: skip
        self._constants = self._unknowns = 0
        if not self._describe(key, args) or (kwargs and not self._describe_options(key, kwargs)):
            return None
        if self._constants and not (self._unknowns and _takes_constants(func)):
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
                if value.fake_mode is not self or value.layout is not torch.strided:
                    return False
                if value.constant is None:
                    self._unknowns += 1
                else:
                    self._constants += 1
                key += (
                    value.dtype, value.shape, value.stride(), value.storage_offset(), value.untyped_storage().nbytes(),
                    value.requires_grad, value.fake_device, _private._dispatch_keys(value).raw_repr(),
                )  # fmt: skip
            elif kind in _PLAIN:
                key += (kind, value)  # 1 and 1.0 are equal, and make other types
            elif kind is list or kind is tuple:
                key += (kind, len(value))
                if not self._describe(key, value):
                    return False
            else:
                return False
        return True

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
        entry = _torch._DispatchCacheValidEntry(output_infos=(info,), is_output_tuple=False)
        like_it = whole._output_from_cache_entry(_torch._CacheKeyState(None), entry, None, func, args)
        attributes, device = dict(vars(like_it)), like_it.fake_device
        subclass: Any = Tensor._make_subclass

        def make(args: Sequence[Any]) -> Tensor:
            if view is None:
                empty = torch.empty_strided(shape, stride, dtype=dtype, device=_meta)
            else:
                empty = torch.empty(0, dtype=dtype, device=_meta)
                empty.set_(args[view].untyped_storage(), offset, shape, stride)
            made: Tensor = subclass(FakeTensor, empty, False, dispatch_device=True, device_for_backend_keys=device)
            protect(made)
            vars(made).update(attributes)
            return made

        unsafe = whole._allow_unsafe_data_ptr_access
        protect = (
            _private._set_warn_deprecated_on_mutable_data_ptr if unsafe else _private._set_throw_on_mutable_data_ptr
        )
        return make
