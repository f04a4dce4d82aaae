"""PoissonNMF: topics of a count matrix, by gradient descent; the model, loss and schedule of tinytopics.

Document d draws its terms from a mixture of topics: X[d] ~ Poisson with rates shares[d] @ terms, both rows of
probabilities, kept as the logits of a softmax. The loss is the sum over the samples of a batch of

    rate - X log(max(rate, 1e-10)),

AdamW lowers it, and cosine annealing with warm restarts moves its rate after every batch. Initial weights are drawn as
tinytopics draws them: the same torch seed gives the same ones. A batch is what `kit.RowData` yields, and only batches
are ever on the device.

What is done otherwise gives the same numbers, but for rounding. Rates of a row add to one, so their sum is the number
of samples, and their gradient vanishes behind the softmax: neither is computed. Rows of the document table that a batch
does not touch wait (`kit.models.row_adamw`). The arithmetic is in 32 bits, whatever the precision of the Trainer.

On several devices each rank's loss is its samples' times the number of ranks: averaged gradients are then those of the
global batch, and so is the mean of the ranks' losses. Rank 0 alone writes what was found.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar, Literal, cast

import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.strategies import DDPStrategy, SingleDeviceStrategy
from lightning.pytorch.utilities.types import OptimizerLRScheduler
from torch import Tensor, nn
from torch.autograd import Function
from torch.optim import AdamW
from torch.optim.lr_scheduler import CosineAnnealingWarmRestarts
from typing_extensions import override

from kit.config import resolve_path
from kit.errors import ConfigError, Problem
from kit.models.row_adamw import RowAdamW
from kit.plan.topics import Topics

LEAST_RATE = 1e-10
_PRECISIONS = ("32-true", "bf16-mixed")
Batch = tuple[Tensor, Tensor]
"""Counts (samples, terms), and which documents they are of, (samples,), int64."""


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
