"""Feed: gives a dry run its batches, counted where a real run would count them.

On the CPU the loader's own batch is what the step reads. On a GPU the batch on the host does not count, pinned or not;
its copy on the device does, from the transfer on, whoever asks for it: Lightning, a batch class, or the module itself.
The invariant: the user's loaders are read outside the recording and are as they were afterwards.
"""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

from lightning.pytorch import LightningDataModule, Trainer
from torch import Tensor
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.utils._pytree import tree_leaves

from kit.memory.batch_shapes import Batches
from kit.memory.batches import fake_loaders, loaders_of
from kit.memory.fakes import Answers
from kit.memory.marks import MOST_BATCHES
from kit.memory.patches import overridden
from kit.memory.recorder import Recorder


class Feed:
    """Gives a Trainer fake batches, and knows when they reach the device."""

    def __init__(self, recorder: Recorder, answers: Answers, trainer: Trainer, on_gpu: bool) -> None:
        self.recorder, self.answers, self.trainer, self.on_gpu = recorder, answers, trainer, on_gpu
        self.batch_size = 0
        """Samples per micro-batch of the first loader, once the data were looked at."""
        self.notes: list[str] = []
        self._looked: list[Batches] = []

    @contextlib.contextmanager
    def taken(self, data: Mapping[str, Any], batch_size: int | None) -> Iterator[dict[str, Any]]:
        """Arguments of `Trainer.fit` that read nothing; a data module keeps its own hooks."""
        loaders = self._loaders(data, batch_size)
        self.batch_size = self._looked[0].batch_size
        self.notes = [note for batches in self._looked for note in batches.notes]
        strategy = self.trainer.strategy
        if self.on_gpu:
            self.answers.arrive = self._arrive
        with overridden(strategy, "batch_to_device", partial(self._to_device, strategy.batch_to_device)):
            module = data.get("datamodule")
            if module is None:
                yield {"train_dataloaders": loaders}
                return
            with _reading_nothing(module, loaders):
                yield {"datamodule": module}

    def _loaders(self, data: Mapping[str, Any], batch_size: int | None) -> Any:
        module = data.get("datamodule")
        if module is not None:
            module.trainer = self.trainer
        fewest = MOST_BATCHES * self.trainer.accumulate_grad_batches
        with self.recorder.paused(), unset_fake_temporarily():
            return fake_loaders(loaders_of(data, batch_size), batch_size, self._make, fewest, self._looked)

    @property
    def _has_an_end(self) -> bool:
        """Without one, Lightning keeps the next batch in hand while it trains on this one."""
        return all(batches.length is not None for batches in self._looked)

    def _make(self, batches: Batches) -> Any:
        """The next batch, as the loader hands it over."""
        if self.on_gpu:
            with self.recorder.paused():
                batch, tensors = batches.make()
            for tensor in tensors:
                self.recorder.ignore(tensor)
            return batch
        if batches is self._looked[0] and self._has_an_end:
            self._begin()
        with self.recorder.labelled("inputs"):
            return batches.make()[0]

    def _begin(self) -> None:
        gc.collect(0)  # cycles made by the last step go before the next, at the same place in every run
        self.recorder.begin_batch()

    def _to_device(self, move: Callable[..., Any], batch: Any, *args: Any, **options: Any) -> Any:
        if self.on_gpu or not self._has_an_end:
            self._begin()
        batch = move(batch, *args, **options)
        for tensor in tree_leaves(batch):
            if isinstance(tensor, Tensor) and self.recorder.knows(tensor):
                self.recorder.note(tensor, "inputs")
        return batch

    def _arrive(self, tensor: Tensor) -> Tensor:
        """A tensor moved to the GPU: a copy there of what is on the host, itself when it is there."""
        if self.recorder.knows(tensor):
            return tensor
        with self.recorder.labelled("inputs"):
            copy = tensor.clone()
        copy.constant = getattr(tensor, "constant", None)  # type: ignore[attr-defined]
        return copy


@contextlib.contextmanager
def _reading_nothing(module: Any, loaders: Any) -> Iterator[None]:
    """A data module that was set up already, and hands out `loaders`; the hooks around a batch stay its own."""
    with contextlib.ExitStack() as undo:
        for name in ("prepare_data", "setup", "teardown"):
            # Lightning's own empty method: then it does not even gather the ranks around it.
            undo.enter_context(overridden(module, name, getattr(LightningDataModule, name).__get__(module)))
        undo.enter_context(overridden(module, "train_dataloader", lambda: loaders))
        yield
