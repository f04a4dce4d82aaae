"""Topics: a corpus of known topics, the topic model of tinytopics, and how much of the truth it found.

`Corpus` makes documents of which the topics are known, any row block first, of any size. Term counts are Poisson with
mean `length` × share × term, so a document has Poisson(`length`) terms in all and their kinds are multinomial: what
tinytopics draws, without a draw for each document. Shares are Dirichlet(`mixing`) and terms of a topic
Dirichlet(`spread`). Documents are drawn in groups of GROUP, each from a generator of its own: equal seeds give equal
documents however they are cut into row blocks, and memory holds one group and the topics.

`PoissonNMF` finds the topics of a count matrix by gradient descent, with the model, loss and schedule of tinytopics.
Document d draws its terms from a mixture of topics: X[d] ~ Poisson with rates shares[d] @ terms, both rows of
probabilities, kept as the logits of a softmax. The loss is the sum over the samples of a batch of

    rate - X log(max(rate, 1e-10)),

AdamW lowers it, and cosine annealing with warm restarts changes the learning rate after every batch. Initial weights
are drawn as tinytopics draws them: the same torch seed gives the same ones. A batch is what `kit.data.RowData` yields,
and only batches are ever on the device. Three things differ from tinytopics and give the same numbers, but for
rounding. Rates of a row add to one, so their sum is the number of samples, and their gradient vanishes behind the
softmax: neither is computed. Rows of the document table that a batch does not touch wait (`RowAdamW`). The arithmetic
is in 32 bits, whatever the precision of the Trainer. On several devices each rank's loss is its samples' times the
number of
ranks: averaged gradients are then those of the global batch, and so is the mean of the ranks' losses. Rank 0 alone
writes the topics. Documents that are kept for validation have no trained shares: theirs are found by `find_shares`
with the terms as they are, and `val_loss` is the mean of their losses.

`RowAdamW` is AdamW whose largest parameter is a table of which a step touches only a few rows, and equal to AdamW.
AdamW moves every row at every step, also those without a gradient: averages fade, their remainder moves the row, and
decay shrinks it. For a table of as many rows as there are documents that is nearly all the time and traffic of a step.
Here a row catches up when it is next touched: with averages m and v, over steps s = t + 1 ... now since its last,

    row = row (d_now / d_t) - m sum_s (d_now / d_s) lr_s b1^(s-t) / (1 - b1^s) / (sqrt(v b2^(s-t) / (1 - b2^s)) + eps)

where d_s is the product of (1 - lr weight_decay) up to s. The sum ends where b1^(s-t) falls below 1e-8: less than a
32-bit number can tell. A step costs the rows it touches and not the table; nothing is left out, nothing approximated
beyond rounding. The table itself is right after `settle`, which every `state_dict` does first; so a checkpoint is one
of plain AdamW, and either goes on from the other's. Between ranks only touched rows travel, as mean gradients, like
those of DDP.

`compare_topics` pairs each true topic with one that was found, so that the cosines of their terms add to the most
(`assign`, exact). A pair is described by the cosine of its terms, from 0 to 1, and by the correlation (Pearson) of its
shares over the documents, from -1 to 1; NaN where one of them is the same in all.
"""

from __future__ import annotations

import math
import os
import statistics
import zipfile
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from numbers import Integral, Real
from pathlib import Path
from typing import Any, ClassVar, Literal, cast

import numpy as np
import torch
import torch.distributed as dist
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.strategies import DDPStrategy, SingleDeviceStrategy
from lightning.pytorch.utilities.types import OptimizerLRScheduler
from numpy.typing import ArrayLike, NDArray
from torch import Tensor, nn
from torch.autograd import Function
from torch.optim import AdamW
from torch.optim.lr_scheduler import CosineAnnealingWarmRestarts
from typing_extensions import override

from kit.config import resolve_path
from kit.data.rows.loader import RowData
from kit.errors import ConfigError, PlanError, Problem, StoreError
from kit.tables import FRAME, html_table, text_table
from kit.targets import load_module_of_file

LEAST_RATE = 1e-10
_PRECISIONS = ("32-true", "bf16-mixed")
Batch = tuple[Tensor, Tensor]
"""Counts (samples, terms), and which documents they are of, (samples,), int64."""


FOLD_IN_ROUNDS = 50
"""After which the shares of a document no longer change its loss in the third digit."""


def find_shares(counts: Tensor, terms: Tensor, rounds: int = FOLD_IN_ROUNDS) -> Tensor:
    """The shares of documents by expectation maximization, which lowers their loss in each round.

    Args:
        counts: (documents, terms).
        terms: Probabilities, (topics, terms).
        rounds: Of the maximization, from even shares on.

    Returns:
        Probabilities, (documents, topics).
    """
    shares = counts.new_full((len(counts), len(terms)), 1 / len(terms))
    for _ in range(rounds):
        shares = shares * ((counts / (shares @ terms).clamp(min=LEAST_RATE)) @ terms.T)
        shares = shares / shares.sum(1, keepdim=True).clamp(min=LEAST_RATE)
    return shares


class PoissonNMF(LightningModule):
    """A topic model. Names in brackets are those of tinytopics.

    Args:
        documents: Rows of the count matrix [n].
        terms: Its columns [m].
        topics: Topics to be found [k].
        learning_rate: Of AdamW at first and after each restart [max_lr].
        least_learning_rate: What it falls to before a restart [base_lr].
        restart_epochs: Epochs until the first restart [T_0].
        restart_growth: By how much each time between restarts is longer than the one before [T_mult].
        weight_decay: Of AdamW.
        updates: `rows` steps the documents of a batch and lets all others wait; `all` steps every document each time,
            with torch's own AdamW: slower, with equal losses, and for any strategy, precision and optimizer.
        save_path: An .npz file that rank 0 writes the topics to when training ends; empty for none.

    Raises:
        ConfigError: for numbers below 1, and for a file that is no .npz.
    """

    dial_order: ClassVar = {
        "topics": "the first to turn: the shares of every document and the terms of every topic grow with it"
    }

    def __init__(
        self,
        documents: int,
        terms: int,
        topics: int = 10,
        learning_rate: float = 0.05,
        least_learning_rate: float = 0.01,
        restart_epochs: int = 20,
        restart_growth: int = 1,
        weight_decay: float = 1e-5,
        updates: Literal["rows", "all"] = "rows",
        save_path: str = "",
    ) -> None:
        super().__init__()
        counts = {"documents": documents, "terms": terms, "topics": topics, "restart_epochs": restart_epochs}
        _check_arguments({**counts, "restart_growth": restart_growth}, updates, save_path)
        self.save_hyperparameters()
        self.learning_rate, self.least_learning_rate = learning_rate, least_learning_rate
        self.weight_decay = weight_decay
        self.restart_epochs, self.restart_growth = restart_epochs, restart_growth
        self.updates, self.save_path = updates, save_path
        self.shares = nn.Embedding(documents, topics)
        nn.init.uniform_(self.table, 0.0, 0.1)
        self.terms = nn.Parameter(torch.empty(topics, terms))
        nn.init.uniform_(self.terms, 0.0, 0.1)
        self._optimizer: AdamW | None = None
        if updates == "rows":
            self.table.requires_grad_(False)
            self.register_state_dict_pre_hook(lambda *_: self._settle())  # type: ignore[no-untyped-call]

    # -- the model

    @property
    def table(self) -> nn.Parameter:
        """Logits of the shares, (documents, topics)."""
        return cast(nn.Parameter, self.shares.weight)

    @override
    def forward(self, documents: Tensor) -> Tensor:
        """(samples,) int64 to the rate of each term in those documents, (samples, terms)."""
        rates: Tensor = self.shares(documents).softmax(1) @ self.terms.softmax(1)
        return rates

    def loss(self, batch: Batch) -> Tensor:
        """The sum over the samples of a batch; without the logarithms of factorials, which no model changes.

        Raises:
            ConfigError: when a sample has another number of terms.
        """
        counts, documents = batch
        if counts.ndim != 2 or counts.shape[1] != self.terms.shape[1]:
            wanted = f"model.arguments.terms: {counts.shape[1]}" if counts.ndim == 2 else "(samples, terms)"
            message = f"PoissonNMF was made for {self.terms.shape[1]} terms, a batch is {tuple(counts.shape)}; "
            raise ConfigError(f"{message}give {wanted}")
        with torch.autocast(counts.device.type, enabled=False):
            parts = self._logits(documents).float(), self.terms.float(), counts.float()
            value: Tensor = _Divergence.apply(*parts)  # type: ignore[no-untyped-call]
        return value

    def _logits(self, documents: Tensor) -> Tensor:
        """Of the shares of some documents, (samples, topics)."""
        if isinstance(self._optimizer, RowAdamW) and torch.is_grad_enabled():
            return self._optimizer.touch(documents)
        found: Tensor = self.shares(documents)
        return found

    def _settle(self) -> None:
        if isinstance(self._optimizer, RowAdamW):
            self._optimizer.settle()

    @torch.no_grad()
    def topics(self) -> Topics:
        """What has been found so far, as numpy arrays. With sharded parameters every rank must ask."""
        self._settle()
        parts = (_whole(tensor).float().softmax(1).cpu().numpy() for tensor in (self.table, self.terms))
        return Topics(*parts)

    # -- training

    @override
    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        return self.loss(batch) * self.trainer.world_size

    @override
    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        counts = batch[0].float()
        with torch.autocast(counts.device.type, enabled=False):
            terms = self.terms.float().softmax(1)
            rates = (find_shares(counts, terms) @ terms).clamp(min=LEAST_RATE)
            loss = (rates - counts * rates.log()).sum(1).mean()
        self.log("val_loss", loss, batch_size=len(counts), sync_dist=True)

    @override
    def configure_optimizers(self) -> OptimizerLRScheduler:
        rate, decay = self.learning_rate, self.weight_decay
        if self.updates == "rows":
            self._optimizer = RowAdamW([self.terms], self.table, rate, decay, self._batch_rows())
        else:
            self._optimizer = AdamW(self.parameters(), lr=rate, weight_decay=decay)
        restarts = CosineAnnealingWarmRestarts(
            self._optimizer, self.restart_epochs, self.restart_growth, self.least_learning_rate
        )
        return {"optimizer": self._optimizer, "lr_scheduler": {"scheduler": restarts, "interval": "step"}}

    def _batch_rows(self) -> int:
        """Most rows of a batch, as far as the loader tells."""
        loader = self.trainer.train_dataloader if self._trainer is not None else None
        size = getattr(getattr(loader, "order", loader), "batch_size", None)
        return size if isinstance(size, int) else 0

    @override
    def lr_scheduler_step(self, scheduler: Any, metric: Any) -> None:
        """After every batch, at the part of the epoch that it stands at."""
        batches = self.trainer.num_training_batches
        scheduler.step(self.trainer.current_epoch + self.trainer.fit_loop.batch_idx / batches)

    @override
    def on_fit_start(self) -> None:
        self._check_trainer()
        self._check_data()

    def _check_trainer(self) -> None:
        """Rows that wait need this module's own optimizer, and whole parameters."""
        if self.updates == "all":
            return
        trainer, wrong = self.trainer, []
        if not isinstance(trainer.strategy, SingleDeviceStrategy | DDPStrategy):
            wrong.append(f"the strategy {type(trainer.strategy).__name__} shards them")
        if not isinstance(self._optimizer, RowAdamW):
            wrong.append("another optimizer takes the place of this one (levers.optimizer)")
        if trainer.gradient_clip_val:
            wrong.append("clipping needs all gradients (training.gradient_clip_norm)")
        if trainer.precision not in _PRECISIONS:
            wrong.append(f"{trainer.precision} is none of {', '.join(_PRECISIONS)} (hardware.precision)")
        if wrong:
            message = f"'rows' steps documents by the row, but {' and '.join(wrong)}; change that, or use 'all'"
            raise ConfigError([Problem("model.arguments.updates", message)])

    def _check_data(self) -> None:
        """What data tells of its shape; indices beyond a table are no error on a GPU but a crash."""
        found = getattr(getattr(self.trainer, "datamodule", None), "shape", None)
        if not isinstance(found, tuple) or len(found) != 2:
            return
        made = {"documents": self.shares.num_embeddings, "terms": self.terms.shape[1]}
        problems = [
            Problem(f"model.arguments.{name}", f"{made[name]}, but the data has {count}; set it to {count}")
            for name, count in zip(made, found, strict=True)
            if made[name] != count
        ]
        if problems:
            raise ConfigError(problems)

    @override
    def on_train_end(self) -> None:
        if not self.save_path:
            return
        found = self.topics()
        if self.trainer.is_global_zero:
            found.save(resolve_path(self.save_path))


def fit_model(
    counts: Any,
    topics: int,
    num_epochs: int = 200,
    batch_size: int = 16,
    *,
    device: str | None = None,
    **arguments: Any,
) -> tuple[PoissonNMF, list[float]]:
    """Fit a topic model in this process, as `tinytopics.fit_model(X, k, num_epochs, batch_size)` does.

    Shapes are those of the data, and only batches of it are on the device.

    Args:
        counts: (documents, terms): an array, a tensor, or a path, as `kit.data.RowData` takes it.
        topics: Topics to be found [k].
        num_epochs: Times that all documents are seen.
        batch_size: Documents of a batch.
        device: `cpu` or `cuda`; None takes a GPU where there is one.
        arguments: Of PoissonNMF, such as `learning_rate` [max_lr].

    Returns:
        The model, on the CPU, and the mean loss of each epoch's batches.

    Raises:
        ConfigError: for arguments and data that do not fit.
    """
    data = RowData(counts, batch_size=batch_size)
    data.setup()
    model = PoissonNMF(*data.shape, topics, **arguments)
    losses = _EpochLosses()
    accelerator = {"cuda": "gpu", None: "auto"}.get(device, device)
    trainer = Trainer(
        accelerator=accelerator, devices=1, max_epochs=num_epochs, logger=False, enable_checkpointing=False,
        enable_model_summary=False, callbacks=[losses],
    )  # fmt: skip
    trainer.fit(model, datamodule=data)
    return model.cpu(), losses.of_epochs


class _EpochLosses(Callback):
    """The mean loss of each epoch's batches."""

    def __init__(self) -> None:
        self.of_epochs: list[float] = []
        self._batches: list[Tensor] = []

    @override
    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self._batches.append(outputs["loss"].detach())

    @override
    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        self.of_epochs.append(float(torch.stack(self._batches).mean()))
        self._batches = []


class _Divergence(Function):
    """The loss of logits (samples, topics) and (topics, terms) against counts (samples, terms)."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, terms: Tensor, counts: Tensor) -> Tensor:
        shares, terms = logits.softmax(1), terms.softmax(1)
        rates = shares @ terms
        excess = nn.functional.threshold(rates, LEAST_RATE, torch.inf)
        torch.div(counts, excess, out=excess)  # none where the logarithm has no slope
        ctx.save_for_backward(shares, terms, excess)
        return len(counts) - rates.clamp_(min=LEAST_RATE).log_().mul_(counts).sum()

    @staticmethod
    def backward(ctx: Any, scale: Tensor) -> tuple[Tensor, Tensor, None]:
        shares, terms, excess = ctx.saved_tensors
        pulled = shares * (excess @ terms.T) * scale
        of_logits = shares * pulled.sum(1, keepdim=True) - pulled
        of_terms = torch.mm((shares * scale).T, excess)
        of_terms = torch.sub(pulled.sum(0).unsqueeze(1), of_terms, out=of_terms).mul_(terms)
        return of_logits, of_terms, None


def _whole(tensor: Any) -> Tensor:
    """Of a sharded tensor, all of it."""
    whole: Tensor = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
    return whole


def _check_arguments(counts: dict[str, int], updates: str, save_path: str) -> None:
    problems = [
        Problem(f"model.arguments.{name}", f"{count!r} is no number of them; use 1 or more")
        for name, count in counts.items()
        if type(count) is not int or count < 1
    ]
    if updates not in ("rows", "all"):
        problems.append(Problem("model.arguments.updates", f"{updates!r} is neither 'rows' nor 'all'"))
    if save_path and Path(save_path).suffix != ".npz":
        problems.append(Problem("model.arguments.save_path", f"{save_path} is no .npz file; end its name in .npz"))
    if problems:
        raise ConfigError(problems)


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


GROUP = 128


class Corpus:
    """`rows` is what `kit.data.write_rows` takes, with `shape`.

    Args:
        documents: Rows.
        terms: Columns.
        topics: Topics the documents are mixtures of.
        length: Mean number of terms in a document.
        seed: Equal seeds give equal corpora.
        mixing: Below 1 a document is mostly of one topic, above it of all of them.
        spread: Below 1 a topic is mostly of a few terms, above it of all of them.

    Raises:
        ConfigError: for numbers below 1, and for a length, mixing or spread that is not above 0.
    """

    def __init__(
        self,
        documents: int = 2000,
        terms: int = 1000,
        topics: int = 8,
        length: float = 200.0,
        seed: int = 13,
        mixing: float = 0.3,
        spread: float = 0.1,
    ) -> None:
        counts = {"documents": documents, "terms": terms, "topics": topics}
        sizes = {"length": length, "mixing": mixing, "spread": spread}
        problems = [
            Problem(name, f"{value!r}: use a whole number from 1 on")
            for name, value in counts.items()
            if not isinstance(value, Integral) or value < 1
        ]
        problems += [
            Problem(name, f"{value!r}: use a number above 0")
            for name, value in sizes.items()
            if not isinstance(value, Real) or not value > 0
        ]
        if problems:
            raise ConfigError(problems)
        self.topics, self.length, self.seed, self.mixing, self.spread = topics, length, seed, mixing, spread
        self.shape = (documents, terms)
        """(documents, terms)."""

    @cached_property
    def topic_terms(self) -> NDArray[np.float64]:
        """How likely each term is in each topic, (topics, terms)."""
        random = np.random.default_rng([self.seed, 0])
        return random.dirichlet(np.full(self.shape[1], self.spread), size=self.topics)

    def rows(self, start: int, stop: int) -> NDArray[np.float32]:
        """Counts of documents `start` up to, not including, `stop`, (documents, terms)."""
        made = np.empty((stop - start, self.shape[1]), np.float32)
        for first, last in self._groups(start, stop):
            random, shares = self._group(first // GROUP)
            counts = random.poisson(self.length * (shares @ self.topic_terms))
            begin = first // GROUP * GROUP
            made[first - start : last - start] = counts[first - begin : last - begin]
        return made

    def shares(self, start: int = 0, stop: int | None = None) -> NDArray[np.float64]:
        """How much of each of those documents is of each topic, (documents, topics)."""
        stop = self.shape[0] if stop is None else stop
        parts = [
            self._group(first // GROUP)[1][first % GROUP : first % GROUP + last - first]
            for first, last in self._groups(start, stop)
        ]
        return np.concatenate([np.empty((0, self.topics)), *parts])

    @property
    def truth(self) -> Topics:
        """What a topic model should find."""
        return Topics(self.shares(), self.topic_terms)

    def _groups(self, start: int, stop: int) -> list[tuple[int, int]]:
        """The parts of groups that lie between two documents.

        Raises:
            IndexError: for documents that there are not.
        """
        if not 0 <= start <= stop <= self.shape[0]:
            raise IndexError(f"documents {start} to {stop}: there are {self.shape[0]}, numbered from 0")
        edges = [start, *range((start // GROUP + 1) * GROUP, stop, GROUP), stop]
        return [(first, last) for first, last in pairwise(edges) if last > first]

    def _group(self, number: int) -> tuple[np.random.Generator, NDArray[np.float64]]:
        """Shares of a whole group, and the generator that goes on with its counts."""
        random = np.random.default_rng([self.seed, 1, number])
        return random, random.dirichlet(np.full(self.topics, self.mixing), size=GROUP)


# -- what was found, beside the truth


@dataclass(frozen=True, eq=False)
class Topics:
    """Shares and terms.

    Raises:
        ConfigError: when their shapes do not fit each other.
    """

    shares: NDArray[Any]
    """How much of each document is of each topic, (documents, topics)."""
    terms: NDArray[Any]
    """How likely each term is in each topic, (topics, terms)."""

    def __post_init__(self) -> None:
        if self.shares.ndim != 2 or self.terms.ndim != 2 or self.shares.shape[1] != self.terms.shape[0]:
            shapes = f"shares {self.shares.shape} and terms {self.terms.shape}"
            raise ConfigError(f"{shapes} are not (documents, topics) and (topics, terms)")

    @property
    def count(self) -> int:
        """Number of topics."""
        return len(self.terms)

    def __repr__(self) -> str:
        documents, terms = len(self.shares), self.terms.shape[1]
        return f"{self.count} topics of {documents:,} documents and {terms:,} terms"

    def figure(self, kind: Literal["structure", "terms"] = "structure", *given: Any, **options: Any) -> Any:
        """The shares of every document, or the most likely terms of each topic; see `charts.py` beside this file."""
        charts = load_module_of_file(Path(__file__).with_name("charts.py"))
        return getattr(charts, f"{kind}_figure")(self, *given, **options)

    def save(self, path: str | Path) -> Path:
        """Write an .npz file, in place of one that is there; returns where it is.

        Raises:
            StoreError: when it cannot be written.
        """
        place = resolve_path(path)
        part = place.with_name(f".{place.name}.{os.getpid()}.part")
        try:
            place.parent.mkdir(parents=True, exist_ok=True)
            with part.open("wb") as file:
                np.savez(file, shares=self.shares, terms=self.terms)
            part.replace(place)
        except OSError as error:
            part.unlink(missing_ok=True)
            raise StoreError(f"{place} cannot be written: {error.strerror or error}; give another place") from error
        return place


def open_topics(path: str | Path) -> Topics:
    """Topics that `Topics.save`, or `PoissonNMF` with a `save_path`, wrote.

    Raises:
        StoreError: when there is no such file, or it holds something else.
    """
    place = resolve_path(path)
    try:
        with np.load(place, allow_pickle=False) as kept:
            return Topics(kept["shares"], kept["terms"])
    except FileNotFoundError:
        raise StoreError(f"{place} is not there; a fit writes it at its end, with model.arguments.save_path") from None
    except (OSError, ValueError, KeyError, TypeError, AttributeError, zipfile.BadZipFile) as error:
        raise StoreError(f"{place} holds no topics ({error}); PoissonNMF writes it") from error


_COLUMNS = ("true topic", "found as", "share of all", "cosine of terms", "correlation of shares")


@dataclass(frozen=True, kw_only=True, repr=False)
class TopicRecovery:
    """Each true topic beside the one that was found for it."""

    order: tuple[int, ...]
    """The topic found, for each true one."""
    sizes: tuple[float, ...]
    """How much of all documents is of each true topic."""
    cosines: tuple[float, ...]
    correlations: tuple[float, ...]
    aligned: Topics
    """What was found, in the order of the true topics."""

    @property
    def median_cosine(self) -> float:
        return statistics.median(self.cosines)

    @property
    def median_correlation(self) -> float:
        known = [value for value in self.correlations if math.isfinite(value)]
        return statistics.median(known) if known else math.nan

    @property
    def sentence(self) -> str:
        """In one line."""
        worst = min(self.cosines)
        return (
            f"{len(self.order)} topics: median cosine of terms {self.median_cosine:.3f}, least {worst:.3f}; "
            f"median correlation of shares {self.median_correlation:.3f}"
        )

    @property
    def _rows(self) -> list[list[str]]:
        values = zip(self.order, self.sizes, self.cosines, self.correlations, strict=True)
        return [
            [str(place), str(found), f"{size:.1%}", f"{cosine:.3f}", f"{correlation:.3f}"]
            for place, (found, size, cosine, correlation) in enumerate(values)
        ]

    def __repr__(self) -> str:
        return f"{self.sentence}\n{text_table(_COLUMNS, self._rows)}"

    def _repr_html_(self) -> str:
        return f'<div style="{FRAME}">{self.sentence}</div>{html_table(_COLUMNS, self._rows)}'


def compare_topics(found: Topics, truth: Topics) -> TopicRecovery:
    """What was found beside the truth.

    Args:
        found: With at least as many topics.
        truth: Of the same documents and terms.

    Raises:
        ConfigError: when they are not of the same documents and terms, or there are fewer topics than true ones.
    """
    given: list[Any] = [found, truth]  # by a user, who may give anything
    if wrong := [one for one in given if not isinstance(one, Topics)]:
        message = f"{type(wrong[0]).__name__} holds no topics; give kit.open_topics(path) and corpus.truth"
        raise ConfigError(message)
    sizes = [(len(one.shares), one.terms.shape[1]) for one in (found, truth)]
    if sizes[0] != sizes[1]:
        raise ConfigError(
            f"found are topics of {sizes[0]} documents and terms, true ones of {sizes[1]}; compare equals"
        )
    if found.count < truth.count:
        raise ConfigError(f"{found.count} topics cannot be paired with {truth.count} true ones; find at least as many")
    cosines = _unit(truth.terms) @ _unit(found.terms).T
    order = assign(-cosines)
    aligned = Topics(found.shares[:, list(order)], found.terms[list(order)])
    return TopicRecovery(
        order=order,
        sizes=tuple(truth.shares.mean(0).tolist()),
        cosines=tuple(cosines[place, column].item() for place, column in enumerate(order)),
        correlations=tuple(_correlations(truth.shares, aligned.shares).tolist()),
        aligned=aligned,
    )


def _unit(rows: NDArray[Any]) -> NDArray[Any]:
    wide = rows.astype(np.float64)
    return np.asarray(wide / np.linalg.norm(wide, axis=1, keepdims=True))


def _correlations(one: NDArray[Any], other: NDArray[Any]) -> NDArray[Any]:
    """Of each column with the same one of the other."""
    apart, also = (values - values.mean(0, dtype=np.float64) for values in (one, other))
    with np.errstate(invalid="ignore", divide="ignore"):
        return np.asarray((apart * also).sum(0) / np.sqrt((apart**2).sum(0) * (also**2).sum(0)))


def assign(costs: ArrayLike) -> tuple[int, ...]:
    """The column of each row, no two the same, so that their costs add to the least.

    The Hungarian method as shortest augmenting paths (Kuhn 1955; Jonker and Volgenant 1987), O(rows² × columns): one
    row after another is placed, and those placed before make way along the cheapest path.

    Args:
        costs: (rows, columns), finite, with no more rows than columns.

    Raises:
        PlanError: for costs of another form.
    """
    given = np.asarray(costs, dtype=np.float64)
    if given.ndim != 2 or given.shape[0] > given.shape[1] or not np.isfinite(given).all():
        raise PlanError(f"costs {given.shape} are no finite (rows, columns) with at least as many columns as rows")
    rows, columns = given.shape
    of_row, of_column = np.zeros(rows), np.zeros(columns + 1)
    taken = np.full(columns + 1, -1)  # the row that has each column; the last column is where a search begins
    for row in range(rows):
        _place(row, given, of_row, of_column, taken)
    found = dict(zip(taken[:-1].tolist(), range(columns), strict=True))
    return tuple(found[row] for row in range(rows))


def _place(row: int, costs: NDArray[Any], of_row: NDArray[Any], of_column: NDArray[Any], taken: NDArray[Any]) -> None:
    """Give `row` a column, by the cheapest path of rows that move on."""
    columns = costs.shape[1]
    least, before = np.full(columns, np.inf), np.full(columns, columns)
    seen = np.zeros(columns + 1, bool)
    at, taken[columns] = columns, row
    while taken[at] >= 0:
        seen[at] = True
        here = taken[at]
        reduced = costs[here] - of_row[here] - of_column[:-1]
        nearer = ~seen[:-1] & (reduced < least)
        least[nearer], before[nearer] = reduced[nearer], at
        open_ = np.where(seen[:-1], np.inf, least)
        following = int(open_.argmin())
        step = open_[following]
        of_row[taken[seen]] += step
        of_column[seen] -= step
        least[~seen[:-1]] -= step
        at = following
    while at != columns:
        taken[at] = taken[before[at]]
        at = int(before[at])
