"""Sparse matrices: what fake ones are made of, and what operators on them hold beside their results on the CPU.

Their bytes are those of indices and values (`sparse_parts`). Torch takes a fake one to have no values at all, so
`sparse_kernels` makes those that come of other tensors and `OF_SPARSE` those that come of operators. How many values a
matrix has is known where it is made of indices, of another sparse one or of constants; one made of a dense matrix whose
numbers nobody knows has a value for each of them, an upper bound.

`sparse_bytes` is what was measured through the allocator's events with torch 2.13 and MKL, which takes indices of 32
bits and dense operands that lie row by row. Operators that it does not know are told: they may hold more.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, in_kernel_invocation_manager, unset_fake_temporarily

from kit.memory.record.truth import COMPRESSED_LAYOUTS, SPARSE_LAYOUTS, sparse_parts

aten = torch.ops.aten
Assume = Callable[[str], None]
"""Takes what was assumed of values that are not known."""
_torch: Any = torch

_LAYOUTS = {
    aten._to_sparse_csr.default: torch.sparse_csr, aten._to_sparse_csc.default: torch.sparse_csc,
    aten._to_sparse_bsr.default: torch.sparse_bsr, aten._to_sparse_bsc.default: torch.sparse_bsc,
}  # fmt: skip
_BY_ROWS = (torch.sparse_csr, torch.sparse_bsr)
_BLOCKED = (torch.sparse_bsr, torch.sparse_bsc)
_MATRIX_AXES = 2
_INT64, _INT32 = 8, 4
_DATA: Any = torch._C.TensorBase.data


def sparse_kernels(assume: Assume) -> dict[Any, Callable[..., Any]]:
    """Kernels that make sparse matrices: their indices and values are as large and as shared as the CPU's."""

    def of_parts(
        mode: Any, _func: Any, lines: Tensor, places: Tensor, values: Tensor, *size: Any,
        layout: torch.layout | None = None, **_: Any,
    ) -> Tensor:  # fmt: skip
        by_rows = layout in _BY_ROWS
        block = values.shape[1:3] if layout in _BLOCKED else (1, 1)
        if size:
            shape = tuple(size[0])
        else:
            assume("that a sparse matrix has as many columns as rows")
            shape = ((lines.numel() - 1) * block[0 if by_rows else 1],) * _MATRIX_AXES
        return compressed_tensor(mode, (lines, places, values), shape, layout or torch.sparse_csr)

    def compressed(mode: Any, func: Any, matrix: Tensor, *rest: Any, **_: Any) -> Any:
        layout = _LAYOUTS[func]
        block, *dense = rest if layout in _BLOCKED else ((1, 1), *rest)
        if matrix.dim() != _MATRIX_AXES or matrix.layout is layout or any(dense):
            return NotImplemented
        if matrix.layout is torch.strided:
            count, dtype = _values_in(matrix, block, assume), torch.int64
            values = matrix.new_empty((count, *block) if layout in _BLOCKED else (count,))
        elif layout in _BLOCKED or matrix.layout in _BLOCKED:
            return NotImplemented
        else:
            parts = sparse_parts(matrix)
            count, dtype, values = parts[-1].shape[0], parts[0].dtype, torch.empty_like(parts[-1])
        if matrix.layout is torch.sparse_coo and layout is torch.sparse_csr and matrix.is_coalesced():
            places, values = parts[0][1], parts[1]
        else:  # a row of the places along both axes, which all stay
            places = values.new_empty((_MATRIX_AXES, count), dtype=dtype)[1]
        axis = 0 if layout in _BY_ROWS else 1
        lines = values.new_empty((matrix.shape[axis] // block[axis] + 1,), dtype=dtype)
        return compressed_tensor(mode, (lines, places, values), tuple(matrix.shape), layout)

    def coordinates(mode: Any, _func: Any, matrix: Tensor, axes: int = _MATRIX_AXES, **options: Any) -> Any:
        is_plain = options.get("layout") in (None, torch.sparse_coo) and not options.get("dense_dim")
        if not matrix.dim() == axes == _MATRIX_AXES or not is_plain:
            return NotImplemented
        if matrix.layout is torch.strided:
            values = matrix.new_empty((_values_in(matrix, (1, 1), assume),))
        elif matrix.layout in COMPRESSED_LAYOUTS and matrix.layout not in _BLOCKED:
            values = sparse_parts(matrix)[-1]
        else:
            return NotImplemented
        places = values.new_empty((_MATRIX_AXES, values.shape[0]), dtype=torch.int64)
        return coordinate_tensor(mode, (places, values), tuple(matrix.shape), is_coalesced=True)

    return {
        aten.sparse_compressed_tensor.comp_plain_value_size: of_parts,
        aten.sparse_compressed_tensor.comp_plain_value: of_parts,
        aten._sparse_compressed_tensor_unsafe.default: of_parts,
        aten._validate_sparse_compressed_tensor_args.default: lambda *_, **__: None,
        **dict.fromkeys(_LAYOUTS, compressed),
        **dict.fromkeys((aten._to_sparse.default, aten._to_sparse.sparse_dim), coordinates),
    }


def _product(place: int) -> Callable[..., Any]:
    """Of a sparse matrix and another, of which the first is the argument at `place`."""

    def product(mode: Any, _func: Any, *args: Any, **_: Any) -> Tensor:
        first, second = args[place : place + 2]
        shape = (first.shape[0], *second.shape[1:])
        if first.layout is torch.strided or second.layout is torch.strided:
            dense = second if second.layout is torch.strided else first
            return cast("Tensor", dense.new_empty(shape))
        # Each value meets those of one row, and most products fall on places of their own.
        values, others = sparse_parts(first)[-1], sparse_parts(second)[-1]
        met = values.shape[0] * others.shape[0] // max(1, second.shape[0])
        found = values.new_empty((min(met, math.prod(shape)),))
        if first.layout is torch.sparse_coo:
            places = found.new_empty((_MATRIX_AXES, found.shape[0]), dtype=torch.int64)
            return coordinate_tensor(mode, (places, found), shape, is_coalesced=True)
        dtype = sparse_parts(first)[0].dtype
        lines = (found.new_empty((size,), dtype=dtype) for size in (shape[0] + 1, found.shape[0]))
        return compressed_tensor(mode, (*lines, found), shape, torch.sparse_csr)

    return product


def _of_one_pattern(mode: Any, func: Any, *args: Any, **options: Any) -> Any:
    """A matrix with the indices of the first sparse one, none of which is shared; in place, that one."""
    matrix = next(one for one in args if is_sparse(one))
    if func._schema.is_mutable:
        return args[0] if matrix is args[0] else NotImplemented
    if options.get("layout") not in (None, matrix.layout):
        return NotImplemented
    is_taken = func is aten.clone.default and matrix.layout is torch.sparse_coo and _is_accumulated()
    parts = [part if is_taken else torch.empty_like(part) for part in sparse_parts(matrix)]
    dtype = options.get("dtype") or functools.reduce(
        torch.promote_types, (one.dtype for one in args if isinstance(one, Tensor) and one.dim())
    )
    parts[-1] = parts[-1] if is_taken else torch.empty_like(parts[-1], dtype=dtype)
    if matrix.layout is torch.sparse_coo:
        shape = tuple(matrix.shape)
        is_in_order = func is _COALESCE or (matrix.is_coalesced() and not is_taken)  # autograd forgets it
        return coordinate_tensor(mode, parts, shape, is_coalesced=is_in_order)
    return compressed_tensor(mode, parts, tuple(matrix.shape), matrix.layout)


def _is_accumulated() -> bool:
    """Whether a gradient in coordinates is being kept: autograd takes it as it is, but copies one that Python sees.
    (`accumulate_grad.h`.)"""
    private: Any = torch._C
    node = private._current_autograd_node()
    return node is not None and bool(node.name().endswith("AccumulateGrad"))


def _sum(mode: Any, func: Any, first: Tensor, second: Any, *_: Any, **__: Any) -> Any:
    """As many values as both have, but of compressed matrices with equally many, which are taken to be of one pattern:
    a gradient and what it is added to."""
    if not (is_sparse(first) and is_sparse(second) and first.layout is second.layout):
        return NotImplemented
    if first.layout is not torch.sparse_coo and first._nnz() == second._nnz():
        return _of_one_pattern(mode, func, first, second)
    mine, others = sparse_parts(first), sparse_parts(second)
    made = [torch.cat([one, other], -1) for one, other in zip(mine[-2:-1], others[-2:-1], strict=True)]
    values = torch.cat([mine[-1], others[-1]])
    if first.layout is torch.sparse_coo:
        if not func._schema.is_mutable:
            return coordinate_tensor(mode, (*made, values), tuple(first.shape), is_coalesced=False)
        return _put_into(mode, first, second, made[0], values)
    if func._schema.is_mutable:
        return NotImplemented
    return compressed_tensor(mode, (torch.empty_like(mine[0]), *made, values), tuple(first.shape), first.layout)


def _put_into(mode: Any, first: Tensor, second: Tensor, places: Tensor, values: Tensor) -> Tensor:
    """A sum in place has room for the values of both, also where they fall together, as those of a weight and its
    gradient. (`add_out_sparse_cpu` in `native/sparse/SparseTensorMath.cpp`.)"""
    if first._nnz() == second._nnz():
        places, values = places[:, : first._nnz()], values[: first._nnz()]
    are_in_order = first.is_coalesced() and second.is_coalesced()
    made = coordinate_tensor(mode, (places, values), tuple(first.shape), is_coalesced=are_in_order)
    _DATA.__set__(first, made)
    return first


def _transposed(mode: Any, _func: Any, matrix: Tensor, *_: Any) -> Any:
    """Coordinates are copied, whereas rows of compressed ones become columns of the same."""
    if matrix.layout is not torch.sparse_coo or matrix.dim() != _MATRIX_AXES:
        return NotImplemented
    parts = [torch.empty_like(part) for part in sparse_parts(matrix)]
    return coordinate_tensor(mode, parts, tuple(matrix.shape[::-1]), is_coalesced=False)


def _masked(mode: Any, func: Any, _: Tensor, mask: Tensor) -> Tensor:
    """Values of a dense matrix where a sparse one has some."""
    like: Tensor = _of_one_pattern(mode, func, mask)
    return like


_COALESCE = aten._coalesce.default
_PATTERNED = (
    aten.clone.default, aten._to_copy.default, aten.mul.Tensor, aten.mul.Scalar, aten.mul_.Tensor, aten.mul_.Scalar,
    aten.div.Tensor, aten.div_.Tensor, aten.neg.default, aten.relu.default, aten.abs.default, aten.sqrt.default,
    aten.threshold_backward.default, aten.sparse_sampled_addmm.default, _COALESCE,
)  # fmt: skip
OF_SPARSE: dict[Any, Callable[..., Any]] = {
    **dict.fromkeys((aten.mm.default, aten.mv.default), _product(0)),
    **dict.fromkeys((aten.addmm.default, aten._sparse_addmm.default), _product(1)),
    **dict.fromkeys(_PATTERNED, _of_one_pattern),
    **dict.fromkeys((aten.add.Tensor, aten.add_.Tensor, aten.sub.Tensor, aten.sub_.Tensor), _sum),
    aten.transpose.int: _transposed,
    aten.t.default: _transposed,
    aten.sparse_mask.default: _masked,
}
"""Kernels of operators that have a sparse argument."""


def is_sparse(value: Any) -> bool:
    """Whether it is a sparse tensor, of any layout."""
    return isinstance(value, Tensor) and value.layout in SPARSE_LAYOUTS


def faked(mode: Any, matrix: Tensor) -> FakeTensor:
    """A real sparse matrix as a fake one with as many values."""
    parts = [mode.fake_tensor_converter.from_real_tensor(mode, _alone(part)) for part in sparse_parts(matrix.detach())]
    if matrix.layout is torch.sparse_coo:
        return coordinate_tensor(mode, parts, tuple(matrix.shape), is_coalesced=matrix.is_coalesced())
    return compressed_tensor(mode, parts, tuple(matrix.shape), matrix.layout)


def _values_in(matrix: Tensor, block: Sequence[int], assume: Assume) -> int:
    """Of how many values, or blocks of them, a sparse matrix is made: those that are not 0, else all."""
    tall, wide = block
    if isinstance(matrix, FakeTensor) and matrix.constant is None:
        assume("that no number of a matrix that is made sparse is 0, an upper bound,")
        return matrix.numel() // (tall * wide)
    with unset_fake_temporarily():
        numbers = cast("Tensor", matrix.constant if isinstance(matrix, FakeTensor) else matrix)
        blocks = numbers.reshape(numbers.shape[0] // tall, tall, numbers.shape[1] // wide, wide)
        return int((blocks != 0).any(3).any(1).sum())


def compressed_tensor(mode: Any, parts: Sequence[Tensor], shape: Sequence[int], layout: torch.layout) -> FakeTensor:
    """A fake tensor of these parts, as `sparse_parts` gives them."""
    with in_kernel_invocation_manager(mode), _torch.sparse.check_sparse_tensor_invariants(False):
        options = {"dtype": parts[-1].dtype, "layout": layout, "device": torch.device("meta")}
        made = aten._sparse_compressed_tensor_unsafe.default(*parts, shape, **options)
    return FakeTensor(mode, made, torch.device("cpu"))


def coordinate_tensor(mode: Any, parts: Sequence[Tensor], shape: Sequence[int], *, is_coalesced: bool) -> FakeTensor:
    """A fake tensor in coordinate format, of its places and values."""
    with in_kernel_invocation_manager(mode), _torch.sparse.check_sparse_tensor_invariants(False):
        options = {"dtype": parts[-1].dtype, "device": torch.device("meta"), "is_coalesced": is_coalesced}
        made = aten._sparse_coo_tensor_unsafe.default(*parts, shape, **options)
    return FakeTensor(mode, made, torch.device("cpu"))


def _alone(part: Tensor) -> Tensor:
    """The same bytes, but no view of the sparse tensor, of which torch would ask for strides."""
    alone = torch.empty(0, dtype=part.dtype)
    return alone.set_(part.untyped_storage(), part.storage_offset(), part.shape, part.stride())


# -- what is held meanwhile


def sparse_bytes(operator: str, args: Sequence[Any], out: Any) -> int | None:
    """What an operator on sparse matrices holds; None where it was not measured."""
    if operator in _SPARSE_AS_IS:
        return 0
    rule = _OF_SPARSE.get(operator)
    return None if rule is None else rule(args, out)


def _of_mkl(matrix: Tensor) -> int:
    """Indices in 32 bits."""
    lines, places, _ = sparse_parts(matrix)
    return 0 if lines.element_size() == _INT32 else _INT32 * (lines.numel() + places.numel())


def _turned(matrix: Tensor) -> tuple[int, int]:
    """Rows of a matrix as columns, or columns as rows: what stays, and the most that is held before it does."""
    lines, places, values = sparse_parts(matrix)
    size, count = lines.element_size(), places.numel()
    others = size * (sum(matrix.shape) + 2 - lines.numel())
    stays = others + 2 * size * count + int(values.nbytes)
    return stays, size * lines.numel() + 6 * size * count + int(values.nbytes) + 3 * others - size


def _sparse_product(first: Tensor, second: Tensor, out: Tensor, zeros_bytes: int) -> int | None:
    """Zeros that the product is added to, indices for MKL, and copies: of a dense operand that does not lie as the
    result, of columns as rows where the sparse one is first, of rows as columns where it is second."""
    sparse, dense = (first, second) if first.layout in SPARSE_LAYOUTS else (second, first)
    if dense.layout is not torch.strided:
        return None
    if sparse.layout is torch.sparse_coo:
        return zeros_bytes if sparse is first else None
    if sparse.layout not in (torch.sparse_csr, torch.sparse_csc):
        return zeros_bytes + _of_mkl(sparse) if sparse is first and sparse.layout is torch.sparse_bsr else None
    is_first = sparse is first
    lies = dense.is_contiguous() if is_first else dense.t().is_contiguous()
    copied = 0 if lies else dense.numel() * dense.element_size()
    stays = most = 0
    lines, places, _ = sparse_parts(sparse)
    indices = _of_mkl(sparse)
    if (sparse.layout is torch.sparse_csr) is not is_first:
        stays, most = _turned(sparse)
        indices = 0 if indices == 0 else _INT32 * (sum(sparse.shape) + 2 - lines.numel() + places.numel())
    if is_first:  # turned before there is a result
        return max(most - int(out.nbytes), stays + zeros_bytes + copied + indices)
    return zeros_bytes + max(most, stays + copied + indices)


def _sparse_mm(args: Sequence[Any], out: Tensor) -> int | None:
    return _sparse_product(args[0], args[1], out, int(out.nbytes))


def _sparse_mv(args: Sequence[Any], _: Any) -> int | None:
    matrix, vector = args[:2]
    copied = 0 if vector.is_contiguous() else int(vector.numel() * vector.element_size())
    if matrix.layout is torch.sparse_csr:
        return _of_mkl(matrix) + copied
    if matrix.layout is not torch.sparse_csc:
        return None
    stays, most = _turned(matrix)
    lines, places, _ = sparse_parts(matrix)
    indices = _INT32 * (sum(matrix.shape) + 2 - lines.numel() + places.numel()) if _of_mkl(matrix) else 0
    return max(most, stays + copied + indices)


def _sparse_addmm(args: Sequence[Any], out: Tensor) -> int | None:
    return _sparse_product(args[1], args[2], out, 0)


def _sampled(args: Sequence[Any], _: Any) -> int:
    """Copies of the first operand that does not lie row by row, and the second, column by column."""
    first, second = args[1:3]
    turned = [one for one in (first, second.t()) if not one.is_contiguous()]
    return sum(one.numel() * one.element_size() for one in turned)


def _added(args: Sequence[Any], _: Any) -> int | None:
    """Indices of both for MKL."""
    if not is_sparse(args[1]) or args[0].layout is not args[1].layout:
        return None
    if args[0].layout is torch.sparse_coo:
        return 0
    return _of_mkl(args[0]) + _of_mkl(args[1]) if args[0].layout is torch.sparse_csr else None


def _made_sparse(args: Sequence[Any], out: Tensor) -> int | None:
    """Of a dense matrix a mask, and places in one number; turned around, also the mask and the matrix. Coordinates are
    put in order first."""
    matrix = args[0]
    lines, places, values = sparse_parts(out)
    by_rows, count, size = out.layout is torch.sparse_csr, places.numel(), int(values.nbytes)
    if out.layout in (torch.sparse_bsr, torch.sparse_bsc):
        block = math.prod(values.shape[1:3])
        most = matrix.numel() * (2 + matrix.element_size() + _INT64) + _INT64 * matrix.numel() // block
        made = int(lines.nbytes) + 2 * int(places.nbytes) + size
        return max(0, most - made) if matrix.layout is torch.strided and out.layout is torch.sparse_bsr else None
    if matrix.layout is torch.strided:
        turned = 0 if by_rows else matrix.numel() * matrix.element_size()
        return int(matrix.numel()) + _INT64 * count + turned
    if matrix.layout is torch.sparse_coo:
        in_order = 0 if by_rows and matrix.is_coalesced() else 4 * _INT64 * count
        turned = 0 if by_rows else 2 * _INT64 * count + size - int(lines.nbytes)
        return max(0, in_order + turned)
    stays, most = _turned(matrix)
    return most - stays


def _made_coordinates(args: Sequence[Any], out: Tensor) -> int | None:
    """Of a dense matrix its coordinates before they are in order."""
    matrix = args[0]
    if matrix.layout is torch.strided:
        return int(sparse_parts(out)[0].nbytes + sparse_parts(out)[1].nbytes)
    return 0 if matrix.layout in (torch.sparse_csr, torch.sparse_csc) else None


def _made_dense(args: Sequence[Any], _: Any) -> int | None:
    """Coordinates, and five integers for each value while they become places."""
    matrix = args[0]
    if matrix.layout not in (torch.sparse_csr, torch.sparse_csc):
        return 0 if matrix.layout is torch.sparse_coo else None
    lines, places, _ = sparse_parts(matrix)
    return int(lines.nbytes) + 8 * _INT64 * places.numel()


def _put_in_order(args: Sequence[Any], _: Any) -> int:
    """Four integers for each value. (`native/sparse/SparseTensor.cpp`.)"""
    return 4 * _INT64 * int(sparse_parts(args[0])[1].shape[0])


def _masked_bytes(args: Sequence[Any], _: Any) -> int | None:
    """The values before they are multiplied with those of the mask."""
    return int(sparse_parts(args[1])[1].nbytes) if args[1].layout is torch.sparse_coo else None


def _scaled(args: Sequence[Any], _: Any) -> int | None:
    """Nothing by a number."""
    return None if any(isinstance(one, Tensor) and one.dim() for one in args[1:]) else 0


def _transposed_coordinates(args: Sequence[Any], _: Any) -> int:
    return _INT64 * int(sparse_parts(args[0])[1].shape[0]) if args[0].layout is torch.sparse_coo else 0


GROWS_ON_A_GPU = "add_.Tensor"
"""Coordinates that a GPU adds in place are put one behind the other at each step, until there are more than numbers."""
_SPARSE_AS_IS = (
    "crow_indices", "col_indices", "ccol_indices", "row_indices", "values", "_indices", "_values", "_nnz",
    "sparse_compressed_tensor.comp_plain_value_size", "sparse_compressed_tensor.comp_plain_value",
    "_sparse_compressed_tensor_unsafe", "_validate_sparse_compressed_tensor_args", "_sparse_coo_tensor_unsafe",
    "_sparse_coo_tensor_with_dims_and_tensors", "_validate_sparse_coo_tensor_args", "is_coalesced", "_coalesced_",
    "detach", "alias", "clone", "_to_copy", "empty_like", "zeros_like", "relu", "neg", "mul.Scalar", "mul_.Scalar",
    "_dimI", "_dimV", "sparse_dim", "dense_dim", "is_same_size", "lift_fresh", "_copy_from", "copy_",
)  # fmt: skip
_OF_SPARSE: dict[str, Callable[[Sequence[Any], Any], int | None]] = {
    "mm": _sparse_mm,
    "mv": _sparse_mv,
    **dict.fromkeys(("addmm", "_sparse_addmm"), _sparse_addmm),
    "sparse_sampled_addmm": _sampled,
    "add_.Tensor": _added,
    **dict.fromkeys(("_to_sparse_csr", "_to_sparse_csc", "_to_sparse_bsr", "_to_sparse_bsc"), _made_sparse),
    "_to_sparse": _made_coordinates,
    "_to_dense": _made_dense,
    "_coalesce": _put_in_order,
    "sparse_mask": _masked_bytes,
    **dict.fromkeys(("mul.Tensor", "mul_.Tensor", "div.Tensor", "div_.Tensor"), _scaled),
    **dict.fromkeys(("transpose.int", "t"), _transposed_coordinates),
}
