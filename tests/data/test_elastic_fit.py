"""A fit that is stopped in an epoch and resumed on 1, 2 and 1 ranks trains on every sample of it once."""

from __future__ import annotations

import multiprocessing
import os
import socket
import warnings
from collections import Counter
from multiprocessing import forkserver

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.strategies import DDPStrategy
from test_cache_requests import config_of
from waiting import PATIENCE_SECONDS

import kit
from kit.data.build.build import build
from kit.data.build.layout import predict_reading
from kit.data.open_dataset import open_dataset
from kit.errors import KitWarning

QUIET = {
    "accelerator": "cpu", "logger": False, "enable_checkpointing": False, "enable_progress_bar": False,
    "enable_model_summary": False, "max_epochs": 2,
}  # fmt: skip


class Seen(LightningModule):
    """Keeps the samples of each epoch, and the numbers of its batches."""

    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(()))
        self.samples, self.numbers, self.lengths = ([], []), ([], []), set()

    def training_step(self, batch, batch_idx):
        self.samples[self.current_epoch].extend(sample.numpy().tobytes() for sample in batch["values"])
        self.numbers[self.current_epoch].append(batch_idx)
        self.lengths.add(self.trainer.num_training_batches)
        return (batch["values"] * self.weight).mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.1)


class Stop(Callback):
    """Saves a checkpoint after a step, and is gone."""

    def __init__(self, step, path):
        self.step, self.path = step, path

    def on_train_batch_end(self, trainer, *_):
        if trainer.global_step == self.step:
            trainer.save_checkpoint(self.path)
            trainer.should_stop = True
            trainer.limit_val_batches = 0


def forget_forkserver():
    """Loader processes come from a server of this process: that of an earlier test is the parent's child, not ours."""
    server = forkserver._forkserver
    server._forkserver_address = server._forkserver_alive_fd = server._forkserver_pid = None


def fit_rank(rank, ranks, port, connection, config, stop=None, path=None, resume=None):
    os.environ |= {
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(ranks), "NODE_RANK": "0",
        "LOCAL_RANK": str(rank), "RANK": str(rank), "GROUP_RANK": "0", "LOCAL_WORLD_SIZE": str(ranks),
        "TORCHELASTIC_RUN_ID": "none",
    }  # fmt: skip
    forget_forkserver()
    torch.set_num_threads(1)
    data, module = kit.data.PatchData(config), Seen()
    strategy = DDPStrategy(process_group_backend="gloo") if ranks > 1 else "auto"
    callbacks = [Stop(stop, path)] if stop else []
    trainer = Trainer(devices=ranks, strategy=strategy, max_steps=stop or -1, callbacks=callbacks, **QUIET)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer.fit(module, datamodule=data, ckpt_path=resume, weights_only=False)
    said = [str(warning.message) for warning in caught if issubclass(warning.category, KitWarning)]
    connection.send((module.samples, module.numbers, module.lengths, said))


def fit(config, *, ranks=1, **given):
    """What each rank saw. Each is a fork, since a process that has trained cannot be forked again."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    context = multiprocessing.get_context("fork")
    pipes = [context.Pipe() for _ in range(ranks)]
    processes = [
        context.Process(target=fit_rank, args=(rank, ranks, port, pipes[rank][1], config), kwargs=given)
        for rank in range(ranks)
    ]
    for process in processes:
        process.start()
    heard = [here.recv() if here.poll(PATIENCE_SECONDS) else None for here, _ in pipes]
    for process in processes:
        process.join(PATIENCE_SECONDS)
    return heard


@pytest.mark.slow
@pytest.mark.parametrize("order", ["random", "block"])
def test_a_fit_on_one_two_and_one_ranks_takes_every_sample_of_the_epoch_once(tiny_config, tmp_path, order):
    config = tiny_config(
        tmp_path / "tiny.zarr", data__samples_per_epoch=46, loader__batch_size=3, data__patch={"lat": 3, "lon": 4},
        data__order=order, loader__window_blocks=3, loader__block_reuse=2.0,
    )  # fmt: skip
    build(config, progress=False)
    ((expected, *_),) = fit(config)
    ((first, *_),) = fit(config, stop=3, path=tmp_path / "1.ckpt")  # 9 samples
    two = config.replace({"loader.batch_size": 4})
    ranks = fit(two, ranks=2, resume=tmp_path / "1.ckpt", stop=5, path=tmp_path / "2.ckpt")  # 16 more
    three = config.replace({"loader.batch_size": 4, "loader.num_workers": 2, "loader.block_reuse": 1.0})
    ((last, numbers, lengths, said),) = fit(three, resume=tmp_path / "2.ckpt")
    seen = [*first[0], *ranks[0][0][0], *ranks[1][0][0], *last[0]]
    assert [len(rank[0][0]) for rank in ranks] == [8, 8]
    assert Counter(seen) == Counter(expected[0])
    assert numbers[0] == [*range(5, 11)]  # 21 samples, 4 at a time
    assert numbers[1] == [*range(12)]
    assert lengths == {11, 12}  # of the resumed epoch, and of the next
    assert [note for note in said if "another order" in note] == (said if order == "block" else [])
    if order == "random":
        assert last[0] == expected[0][25:]
        assert last[1] == expected[1]
    assert len(last[1]) == 46


@pytest.mark.slow
@pytest.mark.parametrize("order", ["random", "block"])
def test_ten_ranks_of_one_cloud_share_an_epoch_and_ask_for_what_was_predicted(cloud, tiny_config, order):
    few = {"loader.batch_size": 2, "loader.window_blocks": 2, "cache.size_bytes": 0, "trial.max_steps": 26}
    config = config_of(tiny_config, cloud.url(f"ten-{order}/t.zarr"), None, order=order).replace(few)
    builder = multiprocessing.get_context("fork").Process(target=build, args=(config,), kwargs={"progress": False})
    builder.start()  # so that this process has opened no store when it is forked
    builder.join(PATIENCE_SECONDS)
    mark = cloud.counts()
    ranks = fit(config, ranks=10)
    requests = cloud.counts(since=mark).requests
    mark = cloud.counts()
    dataset = open_dataset(config)
    opening = 10 * cloud.counts(since=mark).requests
    predicted = 2 * 256 * predict_reading(config, dataset, 10)["requests_per_sample"]
    # In block order ten ranks ask for 0.83 of it: some of their windows touch the same objects.
    assert requests - opening == pytest.approx(predicted, rel=0.15 if order == "random" else 0.25)
    data = kit.data.PatchData(config)
    loader = data.train_dataloader()
    for epoch in range(2):
        alone = Counter(sample.numpy().tobytes() for batch in loader for sample in batch["values"])
        assert alone.total() == 256
        assert Counter(sample for rank in ranks for sample in rank[0][epoch]) == alone
    data.teardown()
