"""ModulePath: which part of a module runs now.

In a forward pass by the calls of its parts; in a backward pass by the part that ran when the autograd node was made,
known from the node's sequence number, so that no hook has to change the graph.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

# Private: the node that runs, and the number the next node will have.
_private: Any = torch._C
_LARGEST_SEQUENCE = 1 << 62  # nodes that accumulate gradients have no number of their own


class ModulePath:
    """Which part of the module runs, in forward by its calls, in backward by the forward that made the node."""

    def __init__(self, name: Callable[[str], int]) -> None:
        self._name = name
        self._parts: dict[nn.Module, int] = {}
        self._stack: list[int] = []
        self._numbers = [0]  # autograd's sequence number at each change of part,
        self._running = [0]  # and the part that ran from there on
        self._last = 0

    def name_parts(self, root: nn.Module) -> None:
        names = {part: path or type(root).__name__ for path, part in root.named_modules()}
        self._parts = {part: self._name(name) for part, name in names.items()}

    def enter(self, part: nn.Module, _args: Any) -> None:
        self._stack.append(self._parts.get(part, self._stack[-1] if self._stack else 0))
        self._changed()

    def leave(self, _part: nn.Module, _args: Any, _out: Any) -> None:
        if self._stack:
            self._stack.pop()
        self._changed()

    def _changed(self) -> None:
        self._numbers.append(_private._autograd._get_sequence_nr())
        self._running.append(self._stack[-1] if self._stack else 0)

    def current(self, in_backward: int) -> int:
        if self._stack:
            return self._stack[-1]
        if not in_backward:
            return 0
        node = _private._current_autograd_node()
        number = node._sequence_nr() if node is not None else _LARGEST_SEQUENCE
        if number < _LARGEST_SEQUENCE:
            self._last = self._running[bisect_right(self._numbers, number) - 1]
        return self._last
