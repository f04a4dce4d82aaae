"""FINITE: every number is finite, and so is whatever is asked about that.

A module that stops at a loss which is not finite must not stop in a dry run, where no loss is a number. A condition
that follows from "no NaN, no infinity" alone is known without numbers; it is written on the fake tensor as `kit_truth`,
passed on by not, and, or, all and any, and read by `kit.memory.fakes`. Conditions that depend on anything else are not
known.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor

from kit.memory.recorder import Observer

aten = torch.ops.aten


def _know(out: Any, truth: bool | None) -> None:
    if truth is not None and isinstance(out, FakeTensor):
        out.kit_truth = truth  # type: ignore[attr-defined]


def _always(truth: bool) -> Observer:
    return lambda _args, out: _know(out, truth)


def _same(truth: bool) -> Observer:
    """A number equals itself, since it is not NaN."""
    return lambda args, out: _know(out, truth if args[0] is args[1] else None)


def _infinite(truth: bool) -> Observer:
    return lambda args, out: _know(out, truth if isinstance(args[1], float) and math.isinf(args[1]) else None)


def _both(args: tuple[Any, ...], out: Any) -> None:
    first, second = (getattr(arg, "kit_truth", None) for arg in args[:2])
    _know(out, None if first is None or second is None else first and second)


def _either(args: tuple[Any, ...], out: Any) -> None:
    first, second = (getattr(arg, "kit_truth", None) for arg in args[:2])
    _know(out, None if first is None or second is None else first or second)


def _not(args: tuple[Any, ...], out: Any) -> None:
    truth = getattr(args[0], "kit_truth", None)
    _know(out, None if truth is None else not truth)


def _pass_on(args: tuple[Any, ...], out: Any) -> None:
    _know(out, getattr(args[0], "kit_truth", None))


FINITE: dict[Any, Observer] = {
    aten.eq.Tensor: _same(True),
    aten.ne.Tensor: _same(False),
    aten.eq.Scalar: _infinite(False),
    aten.ne.Scalar: _infinite(True),
    aten.isnan.default: _always(False),
    aten.isinf.default: _always(False),
    aten.mul.Tensor: _both,
    aten.bitwise_and.Tensor: _both,
    aten.logical_and.default: _both,
    aten.bitwise_or.Tensor: _either,
    aten.logical_or.default: _either,
    aten.bitwise_not.default: _not,
    aten.logical_not.default: _not,
    aten.all.default: _pass_on,
    aten.any.default: _pass_on,
    aten.clone.default: _pass_on,
    aten.detach.default: _pass_on,
}
"""Operators that decide whether all numbers are finite, for a Recorder to observe: they are."""
