"""What travels to a prediction: the module without its weights, and the data, if large, without its numbers.

A prediction needs shapes only, so a tensor of the module becomes its shape, strides and type, and tensors that share
memory go on sharing it. Data is sent whole while it is small, because its numbers may decide the shape of a batch;
beyond `WHOLE_BYTES` each large array arrives as zeros that no memory stands behind, and a note says so.

Nothing here imports torch or numpy: an object that needs them is only met where they are loaded.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import cloudpickle

from kit.errors import ConfigError, Problem
from kit.run.payload import Part, why_not_sent
from kit.units import format_bytes

WHOLE_BYTES = 256 << 20
_LARGE_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class Parcel:
    """Module and data, ready to be sent to a prediction."""

    module: bytes
    data: bytes
    notes: tuple[str, ...] = ()
    """What was left out, in sentences."""

    @property
    def digest(self) -> str:
        """Equal for equal parts: the weights do not count."""
        return hashlib.sha256(self.module + b"\0" + self.data).hexdigest()


def hollow(module: Part, data: Part) -> Parcel:
    """Pack both, the module without weights.

    Raises:
        ConfigError: naming the object that cannot be sent, and where it was found.
    """
    hollowed = _dump("module", module, _Hollow)
    thin = _dump("data", data, _Thin)
    if thin.left_out_bytes <= WHOLE_BYTES:
        whole = _dump("data", data, _Whole) if thin.left_out_bytes else thin
        return Parcel(hollowed.value, whole.value)
    note = (
        f"data holds {format_bytes(thin.left_out_bytes)} of arrays, which were taken as zeros: batches whose shape "
        "depends on these numbers are not foreseen"
    )
    return Parcel(hollowed.value, thin.value, (note,))


class _Whole(cloudpickle.Pickler):  # type: ignore[misc]
    """Leaves nothing out."""

    def __init__(self) -> None:
        self.stream = io.BytesIO()
        self.left_out_bytes = 0
        super().__init__(self.stream, protocol=5)

    @property
    def value(self) -> bytes:
        return self.stream.getvalue()


class _Hollow(_Whole):
    """Leaves out what all plain tensors hold."""

    def __init__(self) -> None:
        super().__init__()
        self._storages: dict[int, HollowStorage] = {}

    def reducer_override(self, value: Any) -> Any:
        torch = sys.modules.get("torch")
        if torch is None or not _is_plain_tensor(torch, value):
            return super().reducer_override(value)
        storage = value.untyped_storage()
        key = storage.data_ptr() or id(storage)
        held = self._storages.setdefault(key, HollowStorage(storage.nbytes()))
        kind = "parameter" if isinstance(value, torch.nn.Parameter) else "tensor"
        shape = (tuple(value.shape), value.stride(), value.storage_offset())
        return hollow_tensor, (held, value.dtype, shape, value.requires_grad, kind)


class _Thin(_Whole):
    """Leaves out what large tensors and arrays hold."""

    def reducer_override(self, value: Any) -> Any:
        torch, numpy = sys.modules.get("torch"), sys.modules.get("numpy")
        if torch is not None and _is_plain_tensor(torch, value) and value.nbytes > _LARGE_BYTES:
            self.left_out_bytes += value.nbytes
            return blank_tensor, (tuple(value.shape), value.dtype)
        if numpy is not None and _is_large_array(numpy, value):
            self.left_out_bytes += value.nbytes
            return blank_array, (value.shape, value.dtype)
        return super().reducer_override(value)


def _is_plain_tensor(torch: Any, value: Any) -> bool:
    """A tensor that is its storage, shape and strides, and no more."""
    if not isinstance(value, torch.Tensor) or type(value) not in (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer):
        return False
    return value.layout is torch.strided and value.device.type != "meta" and not value.is_quantized


def _is_large_array(numpy: Any, value: Any) -> bool:
    return isinstance(value, numpy.ndarray) and value.nbytes > _LARGE_BYTES and not value.dtype.hasobject


def _dump(name: str, part: Part, kind: type[Any]) -> Any:
    pickler = kind()
    try:
        pickler.dump(part)
    except Exception as error:
        raise ConfigError([Problem(name, why_not_sent(part, error))]) from error
    return pickler


# -- where it arrives


@contextlib.contextmanager
def without_memory() -> Iterator[None]:
    """Inside, hollow tensors have no memory at all, and can be read to load the code that belongs to them."""
    HollowStorage.device = "meta"
    try:
        yield
    finally:
        HollowStorage.device = "cpu"


class HollowStorage:
    """Memory of so many bytes, shared by the tensors that point into it; made when first asked for."""

    device = "cpu"

    def __init__(self, size_bytes: int) -> None:
        self.size_bytes = size_bytes
        self._made: Any = None

    def __reduce__(self) -> tuple[type[HollowStorage], tuple[int]]:
        return HollowStorage, (self.size_bytes,)

    def tensor(self) -> Any:
        """(bytes,) of type uint8."""
        import torch

        if self._made is None:
            self._made = torch.empty(self.size_bytes, dtype=torch.uint8, device=self.device)
        return self._made


def hollow_tensor(
    storage: HollowStorage,
    dtype: Any,
    shape: tuple[tuple[int, ...], tuple[int, ...], int],
    requires_grad: bool,
    kind: str,
) -> Any:
    """A tensor as it was, but for the numbers; under fake tensors it is fake."""
    import torch

    size, stride, offset = shape
    values = storage.tensor().view(dtype).as_strided(size, stride, offset).detach()
    if kind == "parameter":
        return torch.nn.Parameter(values, requires_grad)
    return values.requires_grad_(requires_grad)


def blank_tensor(shape: tuple[int, ...], dtype: Any) -> Any:
    """Zeros; the system gives them no memory before they are written to."""
    import torch

    return torch.zeros(shape, dtype=dtype)


def blank_array(shape: tuple[int, ...], dtype: Any) -> Any:
    """Zeros; the system gives them no memory before they are written to."""
    import numpy as np

    return np.zeros(shape, dtype)
