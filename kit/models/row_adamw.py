"""RowAdamW: AdamW whose largest parameter is a table of which a step touches only a few rows; equal to AdamW's.

AdamW moves every row at every step, also those without a gradient: averages fade, what they still hold moves the row,
and decay shrinks it. For a table of as many rows as there are documents that is nearly all the time and traffic of a
step. Here a row catches up when it is next touched: with averages m and v, over steps s = t + 1 ... now since its last,

    row = row (d_now / d_t) - m sum_s (d_now / d_s) lr_s b1^(s-t) / (1 - b1^s) / (sqrt(v b2^(s-t) / (1 - b2^s)) + eps)

where d_s is the product of (1 - lr weight_decay) up to s. The sum ends where b1^(s-t) falls below 1e-8: less than a
32-bit number can tell. A step costs the rows it touches and not the table; nothing is left out, nothing approximated
beyond rounding.

The table itself is right after `settle`, which every `state_dict` does first; so a checkpoint is one of plain AdamW,
and either goes on from the other's. Between ranks only touched rows travel, as mean gradients, like those of DDP.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import AdamW
from typing_extensions import override

SPAN = 1 << 16
"""Steps that are remembered; then every row catches up."""
_FADED, _SHRUNK = 1e-8, -30.0
_ROWS_AT_ONCE = 1024


class RowAdamW(AdamW):
    """AdamW (Loshchilov and Hutter 2019) of `params`, and of a `table` that gets gradients by the row.

    Args:
        params: Parameters with gradients of their own; stepped by torch's fused kernel.
        table: (rows, width), float32. Autograd must not know it: `requires_grad` is switched off.
        lr: Learning rate.
        weight_decay: Fraction of a parameter, times the learning rate, that each step takes away.
        batch_rows: Most rows of a batch on each rank; 0 takes as many as the first batch has. Between ranks only.
    """

    def __init__(
        self,
        params: Iterable[nn.Parameter],
        table: nn.Parameter,
        lr: float,
        weight_decay: float = 1e-2,
        batch_rows: int = 0,
    ) -> None:
        table.requires_grad_(False)
        super().__init__([*params, table], lr=lr, weight_decay=weight_decay, fused=True)
        self.table, self.batch_rows = table, batch_rows
        self._touched: list[tuple[Tensor, Tensor]] = []
        self._before = 0
        self._steps = 0
        self._history: _History | None = None
        self._last = torch.empty(0)
        self.register_step_post_hook(lambda *_: self._step_rows())

    # -- what a training step does

    def touch(self, rows: Tensor) -> Tensor:
        """Rows of the table as they are after the last step, (samples, width); gradients of it are stepped.

        Args:
            rows: (samples,) int64; one may be there twice.
        """
        with torch.no_grad():
            self._catch_up(rows)
            leaf = self.table[rows].requires_grad_()
        self._touched.append((rows, leaf))
        return leaf

    @torch.no_grad()
    def settle(self) -> None:
        """Bring every row up to the last step, so that the table and its averages are AdamW's."""
        if self._history is None:
            return
        count = len(self.table)
        for start in range(0, count, _ROWS_AT_ONCE):
            self._catch_up(torch.arange(start, min(start + _ROWS_AT_ONCE, count), device=self.table.device))
        self._before, self._steps, self._history = self._before + self._steps, 0, None
        self.state[self.table]["step"] = torch.tensor(float(self._before))

    @override
    def state_dict(self) -> dict[str, Any]:
        """As AdamW has it, with every row settled."""
        self.settle()
        return super().state_dict()

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take the state of a RowAdamW or of an AdamW over the same parameters."""
        super().load_state_dict(state_dict)
        self._touched, self._steps, self._history = [], 0, None
        self._before = int(self.state[self.table]["step"]) if self.table in self.state else 0

    # -- catching up

    def _averages(self) -> tuple[Tensor, Tensor, _History]:
        state = self.state[self.table]
        if not state:
            state["step"] = torch.tensor(0.0)
            state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(self.table), torch.zeros_like(self.table)
        if self._history is None:
            self._last = torch.zeros(len(self.table), dtype=torch.int64, device=self.table.device)
            b1, b2 = self.param_groups[0]["betas"]
            self._history = _History(b1, b2, self.table)
        return state["exp_avg"], state["exp_avg_sq"], self._history

    def _catch_up(self, rows: Tensor) -> None:
        first, second, history = self._averages()
        last = self._last[rows]
        m, v = first[rows], second[rows]
        moved = m * history.reach(last, v.sqrt(), self.param_groups[0]["eps"])
        gap = (self._steps - last).unsqueeze(1).to(m.dtype)
        self.table[rows] = self.table[rows] * history.shrunk(last).unsqueeze(1) - moved
        first[rows] = m * history.b1**gap
        second[rows] = v * history.b2**gap
        self._last[rows] = self._steps

    # -- stepping

    @torch.no_grad()
    def _step_rows(self) -> None:
        waiting = [(rows, leaf.grad) for rows, leaf in self._touched if leaf.grad is not None]
        self._touched.clear()
        first, second, history = self._averages()
        group = self.param_groups[0]
        rate, decay, step = float(group["lr"]), group["weight_decay"], self._before + self._steps + 1
        if waiting:
            rows, gradient = self._together(waiting)
            m = first[rows].lerp_(gradient, 1 - history.b1)
            v = second[rows].mul_(history.b2).addcmul_(gradient, gradient, value=1 - history.b2)
            spread = v.sqrt().div_(math.sqrt(1 - history.b2**step)).add_(group["eps"])
            self.table[rows] = (self.table[rows] * (1 - rate * decay)).addcdiv_(
                m, spread, value=-rate / (1 - history.b1**step)
            )
            first[rows], second[rows] = m, v
            self._last[rows] = self._steps + 1
        history.add(self._steps, step, rate, decay)
        self._steps += 1
        if self._steps == SPAN or history.log_shrunk < _SHRUNK:
            self.settle()

    def _together(self, waiting: list[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
        """Touched rows of all ranks and micro-batches, and the whole gradient of each, wherever it stands."""
        rows, gradient = (torch.cat(parts) if len(parts) > 1 else parts[0] for parts in zip(*waiting, strict=True))
        if dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
            rows, gradient = self._of_all_ranks(rows, gradient)
            self._catch_up(rows)
        self._last[rows] = torch.arange(len(rows), device=rows.device)
        place = self._last[rows]  # one of the places that a row stands at, the same for all of them
        return rows, torch.zeros_like(gradient).index_add_(0, place, gradient)[place]

    def _of_all_ranks(self, rows: Tensor, gradient: Tensor) -> tuple[Tensor, Tensor]:
        """Every rank's, divided by their number; a short batch repeats a row, with no gradient."""
        ranks = dist.get_world_size()
        self.batch_rows = max(self.batch_rows, len(rows))
        absent = self.batch_rows - len(rows)
        rows = torch.cat([rows, rows[:1].expand(absent)])
        gradient = torch.cat([gradient / ranks, gradient.new_zeros(absent, gradient.shape[1])])
        all_rows = rows.new_empty(ranks * len(rows))
        all_gradients = gradient.new_empty(ranks * len(rows), gradient.shape[1])
        dist.all_gather_into_tensor(all_rows, rows)
        dist.all_gather_into_tensor(all_gradients, gradient)
        return all_rows, all_gradients


class _History:
    """What the steps since all rows were settled would have done to a row without a gradient."""

    def __init__(self, b1: float, b2: float, table: Tensor) -> None:
        self.b1, self.b2, self.log_shrunk = b1, b2, 0.0
        reach = max(1, math.ceil(math.log(_FADED) / math.log(b1))) if b1 > 0 else 1
        self._ahead = torch.arange(reach, device=table.device)
        gap = self._ahead.to(table.dtype) + 1
        self._fade, self._root_fade = b1**gap, b2 ** (gap / 2)
        self._pace, self._spread = table.new_zeros(SPAN + reach), table.new_zeros(SPAN + reach)
        self._log_shrunk = torch.zeros(SPAN + 1, dtype=torch.float64, device=table.device)

    def add(self, place: int, step: int, rate: float, decay: float) -> None:
        """Step number `step`, the `place`-th since the rows were settled."""
        self.log_shrunk += math.log1p(-rate * decay)
        self._pace[place] = rate / (1 - self.b1**step) * math.exp(-self.log_shrunk)
        self._spread[place] = 1 / math.sqrt(1 - self.b2**step)
        self._log_shrunk[place + 1] = self.log_shrunk

    def shrunk(self, last: Tensor) -> Tensor:
        """What decay has left of rows since their last step, (samples,)."""
        return (self.log_shrunk - self._log_shrunk[last]).exp_().to(self._pace.dtype)

    def reach(self, last: Tensor, root: Tensor, eps: float) -> Tensor:
        """How far rows have moved since, per unit of their first average, (samples, width).

        Args:
            last: Their last steps, (samples,).
            root: Square roots of their second averages, (samples, width).
        """
        places = last.unsqueeze(1) + self._ahead
        pace = self._pace[places] * self._fade  # zero beyond the last step
        spread = self._spread[places] * self._root_fade
        inverse = (root.unsqueeze(1) * spread.unsqueeze(2)).add_(eps).reciprocal_()
        return torch.bmm(pace.unsqueeze(1), inverse).squeeze(1) * math.exp(self.log_shrunk)
