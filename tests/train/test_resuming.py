"""Resuming: a finished epoch stays finished, and a broken-off one goes on where its loader can."""

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from kit.config import Config
from kit.train import make_trainer

EPOCH = 8
QUIET = {
    "accelerator": "cpu", "logger": False, "enable_progress_bar": False, "enable_model_summary": False,
    "enable_checkpointing": False, "max_epochs": -1,
}  # fmt: skip


class Seen(LightningModule):
    """Keeps (epoch, batch index, first number of the batch) of every batch."""

    def __init__(self):
        super().__init__()
        self.layer, self.batches = torch.nn.Linear(1, 1), []

    def training_step(self, batch, batch_idx):
        self.batches.append((self.current_epoch, batch_idx, int(batch[0][0])))
        return self.layer(batch[0]).mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.01)


class Stream(IterableDataset):
    def __iter__(self):
        return (([float(number)],) for number in range(EPOCH))


class Stateful(DataLoader):
    """Knows where it was, as torchdata's loader does."""

    first = 0

    def __iter__(self):
        self.handed, self.first = self.first, 0
        for number, batch in enumerate(super().__iter__()):
            if number >= self.handed:
                self.handed += 1
                yield batch

    def state_dict(self):
        return {"handed": self.handed}

    def load_state_dict(self, state):
        self.first = state["handed"]


def numbers(kind=DataLoader):
    return kind(TensorDataset(torch.arange(float(EPOCH))[:, None]), batch_size=1)


def stream():
    return DataLoader(Stream(), batch_size=1, collate_fn=lambda samples: [torch.tensor(samples[0])])


class SaveAtTheEndOfTheEpoch(Callback):
    def __init__(self, path):
        self.path = path

    def on_train_epoch_end(self, trainer, pl_module):
        trainer.save_checkpoint(self.path)


class SaveAfterABatch(SaveAtTheEndOfTheEpoch):
    def __init__(self, path, batches=EPOCH):
        super().__init__(path)
        self.batches = batches

    def on_train_batch_end(self, trainer, *_):
        if trainer.global_step * trainer.accumulate_grad_batches == self.batches:
            trainer.save_checkpoint(self.path)

    def on_train_epoch_end(self, trainer, pl_module):
        pass


class StopAndSave(SaveAtTheEndOfTheEpoch):
    """Saves when the fit is over."""

    def on_train_epoch_end(self, trainer, pl_module):
        trainer.should_stop = True

    def on_fit_end(self, trainer, pl_module):
        trainer.save_checkpoint(self.path)


def ours(max_steps, accumulate=1, callbacks=()):
    config = Config().replace({"levers.accumulate_grad_batches": accumulate})
    return make_trainer(
        config, accelerator="cpu", world_size=1, precision="32-true", max_steps=max_steps, callbacks=callbacks
    )


def resumed(make_loader, path, max_steps, accumulate=1, trainer=ours):
    module = Seen()
    trainer(max_steps, accumulate).fit(module, make_loader(), ckpt_path=path, weights_only=False)
    return [batch for _, *batch in module.batches], [epoch for epoch, *_ in module.batches]


@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize(
    ("save", "make_loader"),
    [
        (SaveAtTheEndOfTheEpoch, numbers),
        (SaveAtTheEndOfTheEpoch, stream),
        (StopAndSave, numbers),
        (StopAndSave, stream),
        (SaveAfterABatch, numbers),
    ],
)
def test_after_a_finished_epoch_the_next_begins_with_its_first_batch(tmp_path, save, make_loader, accumulate):
    path, steps = tmp_path / "whole.ckpt", EPOCH // accumulate
    ours(steps, accumulate, [save(path)]).fit(Seen(), make_loader())
    batches, epochs = resumed(make_loader, path, 2 * steps, accumulate)
    assert batches == [[place, place] for place in range(EPOCH)]
    assert epochs == [1] * EPOCH


def test_lightning_alone_trains_one_batch_more_in_the_finished_epoch(tmp_path):
    """When this fails, Lightning has mended it, and kit.train.callbacks can go."""
    path = tmp_path / "whole.ckpt"
    ours(EPOCH, 1, [SaveAtTheEndOfTheEpoch(path)]).fit(Seen(), numbers())

    def alone(max_steps, accumulate):
        return Trainer(max_steps=max_steps, accumulate_grad_batches=accumulate, **QUIET)

    batches, epochs = resumed(numbers, path, EPOCH + 3, trainer=alone)
    assert batches == [[EPOCH, 0], [0, 0], [1, 1]]
    assert epochs == [0, 1, 1]


def test_a_loader_that_knows_where_it_was_goes_on_in_the_middle_and_then_begins_anew(tmp_path):
    path = tmp_path / "middle.ckpt"
    ours(4, 1, [SaveAfterABatch(path, 3)]).fit(Seen(), numbers(Stateful))
    batches, _ = resumed(lambda: numbers(Stateful), path, EPOCH + 2)
    assert batches == [[place, place] for place in (3, 4, 5, 6, 7, 0, 1)]


def test_a_plain_loader_starts_anew_in_the_middle_and_lightning_says_so(tmp_path):
    path = tmp_path / "middle.ckpt"
    ours(4, 1, [SaveAfterABatch(path, 3)]).fit(Seen(), numbers())
    with pytest.warns(UserWarning, match="not resumable"):
        batches, _ = resumed(numbers, path, EPOCH + 1)
    assert batches == [[3, 0], [4, 1], [5, 2], [6, 3], [7, 4], [0, 0]]
