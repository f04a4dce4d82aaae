"""Callbacks that any module can be fitted with; none of them changes a number.

`WholeEpochs` resumes from a checkpoint that was saved at the end of an epoch with the first batch of the next one. A
Trainer with `max_steps` takes every resumed epoch for one that was broken off: where it had ended, Lightning trains one
more batch in it, under an index past its end, and only then begins the next (Lightning-AI/pytorch-lightning#19617, open
in 2.6.6). A checkpoint from the middle of an epoch needs a loader that knows where it was. `kit.data.PatchData` makes
one; any other must have `state_dict` and `load_state_dict` (torchdata's StatefulDataLoader does). A plain DataLoader
starts from its first batch again and is left when the epoch has as many batches as it should, so it sees some samples
twice and others not at all in that epoch; Lightning warns of it, and nothing here can mend it.

`LossLog` writes the loss of every batch to a file for each rank, and rank 0 a line to stdout now and then. There is one
`step` event a batch (`kit.events`: JSON lines, readable while they are written and after a kill) between a
`fit_started` and a `fit_ended`. Losses are read from the device together, so that no step waits for a GPU.

`UnusedParameters` says which setting of ddp a module needs. Torch would stop at the second step, with advice for
another program, and Lightning with the name of a strategy that no config has.

`CommittedConfig` carries the Config that a file was committed from, as text that stock LightningCLI passes on
untouched, and what `auto` came to; it gives each rank as many threads as a trial would, whatever started it.
`kit.data.RowData` and `kit.data.EventData` take from it what the file does not name (see `kit.data.patches.module`).
`CommittedData` is `kit.data.PatchData` of that Config, which therefore stands in the file once.
"""

from __future__ import annotations

import inspect
import time
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.strategies import DDPStrategy
from torch.nn.parallel import DistributedDataParallel
from torch.utils._pytree import tree_leaves
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler, IterableDataset
from typing_extensions import override

from kit.config import Config
from kit.data.patches.loader import PatchLoader
from kit.data.patches.module import PatchData
from kit.errors import ConfigError, KitWarning, Problem, first_few, warn_caller
from kit.events import EventWriter
from kit.machine.machine import share
from kit.machine.processes import keep_freed_memory
from kit.train.device_limit import DeviceLimit as DeviceLimit  # where committed files and pickles name it


class WholeEpochs(Callback):
    """Begins the next epoch where a checkpoint was saved after the last batch of one."""

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        loop, progress = trainer.fit_loop, trainer.fit_loop.epoch_loop.batch_progress
        is_done = progress.current.ready == progress.current.completed
        is_last = progress.is_last_batch or progress.current.ready >= trainer.num_training_batches
        if not (loop.is_resuming and is_done and is_last):
            return
        epochs = loop.epoch_progress
        if epochs.current.completed < epochs.current.ready:  # saved while the epoch's last hooks ran
            epochs.increment_completed()
        loop._restarting = False  # its setter would make it True again wherever there is a `max_steps`
        loop.epoch_loop.restarting = False
        loop._resuming_from_checkpoint = False  # so that the loader is asked for the next epoch's batches
        for part in (loop, loop.epoch_loop, loop.epoch_loop.val_loop):
            part.reset_restart_stage()


class LastModelCheckpoint(ModelCheckpoint):
    """The checkpoint that a run goes on from. Lightning drops a Trainer's callbacks for those of the same class that a
    module brings in `configure_callbacks`; this one stays beside a module's own ModelCheckpoint."""


class LossLog(Callback):
    """Writes the losses of every rank.

    Args:
        file: The file they are appended to. Its `.0.` becomes the number of the rank; without it, rank 0 alone writes.
        every_seconds: Between two writes, each with a line on stdout.
    """

    def __init__(self, file: str, every_seconds: float = 1.0) -> None:
        self.file, self.every_seconds = file, every_seconds
        self._writer: EventWriter | None = None
        self._kept: list[tuple[dict[str, Any], torch.Tensor | None]] = []
        self._written = 0.0

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        rank = trainer.global_rank
        if rank == 0 or ".0." in Path(self.file).name:
            file = Path(self.file)
            self._writer = EventWriter(file.with_name(file.name.replace(".0.", f".{rank}.", 1)), rank)
            done = {"step": trainer.global_step, "batches": trainer.fit_loop.epoch_loop.batch_progress.total.ready}
            self._writer.write("fit_started", world_size=trainer.world_size, **done)
            self._written = time.monotonic()

    @override
    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if self._writer is None:
            return
        place = {"step": trainer.global_step, "epoch": trainer.current_epoch, "batch": batch_idx}
        self._kept.append((place, batch_loss(outputs, trainer)))
        if time.monotonic() - self._written >= self.every_seconds:
            self._write()

    @override
    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._end(trainer)

    @override
    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        self._end(trainer)

    def _write(self) -> None:
        """What is kept, waiting once for all losses; then where the fit is."""
        kept, self._kept, self._written = self._kept, [], time.monotonic()
        if self._writer is None or not kept:
            return
        tensors = [loss.float() for _, loss in kept if loss is not None]
        losses = iter(torch.stack(tensors).tolist() if tensors else [])
        for place, loss in kept:
            place["loss"] = None if loss is None else next(losses)
            self._writer.write("step", **place)
        last = kept[-1][0]
        said = "" if last["loss"] is None else f", loss {last['loss']:.4g}"
        if self._writer.rank == 0:
            print(f"epoch {last['epoch'] + 1}, step {last['step']}{said}", flush=True)  # noqa: T201 - it is for a log

    def _end(self, trainer: Trainer) -> None:
        if self._writer is not None:
            self._write()
            self._writer.write("fit_ended", step=trainer.global_step)
            self._writer.close()
            self._writer = None


def loss_in(outputs: Any) -> Any:
    """What `training_step` gave as the loss, in what callbacks get at the end of a batch; None where it gave none."""
    return outputs.get("loss") if isinstance(outputs, dict) else outputs


def batch_loss(outputs: Any, trainer: Trainer) -> torch.Tensor | None:
    """The loss of one micro-batch, without the division by accumulation that Lightning has applied.

    Args:
        outputs: What callbacks get at the end of a training batch.

    Returns:
        A tensor without dimensions, still on its device; None where there is no single number.
    """
    loss = loss_in(outputs)
    if not isinstance(loss, torch.Tensor) or loss.numel() != 1:
        return None
    automatic = trainer.lightning_module.automatic_optimization
    scale = trainer.accumulate_grad_batches if automatic else 1
    return loss.detach().reshape(()) * scale


def why_nothing_trains(trainer: Trainer, has_loss: bool) -> str:
    """Why steps of automatic optimization change no weight, and what to do; empty where they do.

    Args:
        trainer: In or after its fit.
        has_loss: Whether `training_step` gave a loss in any of them.
    """
    module = trainer.lightning_module
    if not module.automatic_optimization:
        return ""
    name = type(module).__name__
    if not has_loss:
        return f"{name}.training_step gave no loss in any batch; return the loss"
    if all(type(optimizer).__name__ == "_MockOptimizer" for optimizer in trainer.optimizers):  # Lightning's, for none
        return f"{name}.configure_optimizers gave no optimizer; return one"
    return ""


def sparse_tables(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    """The weights of embeddings whose gradients are sparse, by name of the embedding."""
    return {
        name: part.weight
        for name, part in module.named_modules()
        if isinstance(part, torch.nn.Embedding | torch.nn.EmbeddingBag) and part.sparse and part.weight.requires_grad
    }


def refused_strategies(module: LightningModule, on_gpu: bool) -> dict[str, str]:
    """Why torch cannot train the module on several ranks, by strategy: gradients that nothing there adds up."""
    sparse = list(sparse_tables(module))
    if not sparse:
        return {}
    way_out = f"make {sparse[0]} with sparse=False"
    found = {"fsdp": f"fsdp divides no sparse gradients, as {sparse[0]} has; {way_out}, or use ddp on CPUs"}
    if on_gpu:
        found["ddp"] = f"NCCL adds up no sparse gradients, as {sparse[0]} has (pytorch/pytorch#22400); {way_out}"
    return found


def why_undivided(loaders: Any) -> str:
    """Why Lightning would stop at these loaders on several ranks, unless it is told not to divide them."""
    own = [one for one in tree_leaves(loaders) if isinstance(one, DataLoader) and not _divisible(one)]
    if not own:
        return ""
    return (
        f"warning: Lightning cannot divide batches of {type(own[0].batch_sampler).__name__} among ranks, and stops; "
        "make it a BatchSampler that takes sampler, batch_size and drop_last, or have it give each rank its own and "
        'pass trainer={"use_distributed_sampler": False} to kit.fit'
    )


def _divisible(loader: DataLoader[Any]) -> bool:
    """Whether Lightning can give each rank batches of its own, as far as that is seen without making a sampler."""
    sampler: Any = loader.batch_sampler
    plain = type(sampler) in (BatchSampler, type(None)) or isinstance(loader.dataset, IterableDataset)
    if plain or isinstance(loader.sampler, DistributedSampler) or hasattr(sampler, "__pl_saved_args"):
        return True
    if not (hasattr(sampler, "batch_size") and hasattr(sampler, "drop_last")):
        return isinstance(sampler, BatchSampler)  # made in a hook of the user's, Lightning remembers its arguments
    try:
        inspect.signature(type(sampler)).bind(loader.sampler, batch_size=1, drop_last=False)
    except TypeError:
        return isinstance(sampler, BatchSampler)
    return True


class UnusedParameters(Callback):
    """Under ddp: names parameters that get no gradient, before ddp waits for them, and what would do instead.

    Raises:
        ConfigError: at the first optimizer step, with the setting that a model with such parameters needs.
    """

    def __init__(self) -> None:
        self._seen = False

    @override
    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, optimizer: Any) -> None:
        strategy = trainer.strategy
        if self._seen or not isinstance(strategy, DDPStrategy) or not pl_module.automatic_optimization:
            return
        self._seen = True
        options = strategy._ddp_kwargs
        names = [name for name, held in pl_module.named_parameters() if held.requires_grad and held.grad is None]
        if names and not options.get("find_unused_parameters") and not options.get("static_graph"):
            message = (
                f"false, but {first_few(names, _NAMED)} got no gradient in the first step, and ddp would wait "
                "for it; set it to true, or freeze with requires_grad_(False) what is never used"
            )
            raise ConfigError([Problem("hardware.ddp_find_unused_parameters", message)])

    @override
    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        if isinstance(exception, RuntimeError) and "Expected to have finished reduction" in str(exception):
            message = (
                f"false, but a backward of {type(pl_module).__name__} left out parameters that another one uses, as "
                "where optimizers take turns, and ddp waits for them; set it to true"
            )
            raise ConfigError([Problem("hardware.ddp_find_unused_parameters", message)]) from exception

    @override
    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        strategy, model = trainer.strategy, trainer.strategy.model
        if not isinstance(strategy, DDPStrategy) or not isinstance(model, DistributedDataParallel):
            return
        searches = strategy._ddp_kwargs.get("find_unused_parameters") and not strategy._ddp_kwargs.get("static_graph")
        reducer: Any = model.reducer
        if searches and trainer.is_global_zero and reducer._ddp_graph_static():
            message = (
                "hardware.ddp_find_unused_parameters is true, and every step used the same parameters: "
                "hardware.ddp_static_graph: true instead spares the search in each step"
            )
            warn_caller(message)


_NAMED = 3
Resolved = dict[str, int | float | str | dict[str, int]]


class CommittedConfig(Callback):
    """Carries the Config of a committed run, and says where a checkpoint it goes on from was of another.

    Args:
        config: Its YAML.
        resolved: What settings left on `auto` came to, by dotted path.

    Raises:
        ConfigError: when that is no Config, or `resolved` does not fit it.
    """

    def __init__(self, config: str, resolved: Resolved | None = None) -> None:
        self.given = Config.from_yaml(config, "trainer.callbacks, CommittedConfig.config")
        self.committed = self.given.replace(resolved or {})
        """As it runs."""
        self.started: dict[str, str] = {}
        """The file and the arguments of the model that the command line was started with, by dotted path; its
        checkpoints keep them."""

    @override
    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        hardware = self.committed.hardware
        torch.set_num_threads(hardware.threads_per_rank or max(1, share().cores // trainer.num_devices))
        if hardware.keep_freed_memory and trainer.strategy.root_device.type == "cpu":
            keep_freed_memory()

    @override
    def state_dict(self) -> dict[str, Any]:
        return {"started": self.started}

    @override
    def on_load_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        before = checkpoint.get("callbacks", {}).get(self.state_key, {}).get("started")
        if before and self.started and trainer.state.fn == "fit" and trainer.is_global_zero:
            self._say_what_differs(before)

    def _say_what_differs(self, before: Mapping[str, str]) -> None:
        changed = [
            f"{path} was {before.get(path, 'not given')} there and is {self.started.get(path, 'not given')} here"
            for path in dict.fromkeys((*before, *self.started))
            if before.get(path) != self.started.get(path)
        ]
        if changed:
            warnings.warn(
                f"this run goes on from a checkpoint of another: {'; '.join(changed)}. What the optimizer holds, its "
                "learning rate too, goes on as it was there, and the checkpoint will be replaced; for a run of its own "
                "commit the changed config, which gets its own folder",
                KitWarning, stacklevel=2,
            )  # fmt: skip


class CommittedData(PatchData):
    """The patches that the committed Config names."""

    def __init__(self) -> None:
        super().__init__(Config())

    @override
    def setup(self, stage: str | None = None) -> None:
        self.config = self._config()
        super().setup(stage)

    @override
    def train_dataloader(self) -> PatchLoader:
        self.config = self._config()
        return super().train_dataloader()

    @override
    def _validates(self) -> bool:
        self.config = self._config() if self.trainer is not None else self.config
        return super()._validates()

    def _config(self) -> Config:
        found = self.committed
        if found is None:
            message = "CommittedData reads the config of kit.train.CommittedConfig, which is not among the callbacks"
            raise ConfigError([Problem("trainer.callbacks", message)])
        return found
