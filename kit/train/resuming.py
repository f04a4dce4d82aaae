"""Resuming from a checkpoint that was saved at the end of an epoch: the next epoch begins, with its first batch.

A Trainer with `max_steps` takes every resumed epoch for one that was broken off. Where it had ended, Lightning trains
one more batch in it, under an index past its end, and only then begins the next (Lightning-AI/pytorch-lightning#19617,
open in 2.6.6). `make_trainer` adds `WholeEpochs`, which says to the loop that the epoch is over.

A checkpoint from the middle of an epoch needs a loader that knows where it was. `kit.PatchData` makes one; any other
must have `state_dict` and `load_state_dict` (torchdata's StatefulDataLoader does). A plain DataLoader starts from its
first batch again and is left when the epoch has as many batches as it should, so it sees some samples twice and others
not at all in that epoch; Lightning warns of it, and nothing here can mend it.
"""

from __future__ import annotations

from lightning.pytorch import Callback, LightningModule, Trainer
from typing_extensions import override


class WholeEpochs(Callback):
    """Begins the next epoch where a checkpoint was saved after the last batch of one."""

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        loop = trainer.fit_loop
        if not loop.is_resuming or not _has_ended(trainer):
            return
        epochs = loop.epoch_progress
        if epochs.current.completed < epochs.current.ready:  # saved while the epoch's last hooks ran
            epochs.increment_completed()
        loop._restarting = False  # its setter would make it True again wherever there is a `max_steps`
        loop.epoch_loop.restarting = False
        loop._resuming_from_checkpoint = False  # so that the loader is asked for the next epoch's batches
        for part in (loop, loop.epoch_loop, loop.epoch_loop.val_loop):
            part.reset_restart_stage()


def _has_ended(trainer: Trainer) -> bool:
    """Whether the epoch under way, as the checkpoint has it, has no batch left."""
    progress = trainer.fit_loop.epoch_loop.batch_progress
    done = progress.current.ready == progress.current.completed
    return done and (progress.is_last_batch or progress.current.ready >= trainer.num_training_batches)
