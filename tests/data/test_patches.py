"""The loader yields what the plan says, however many processes and ranks read it, and Lightning leaves it alone."""

from __future__ import annotations

import multiprocessing
import os
import random
from dataclasses import replace
from multiprocessing import forkserver, resource_tracker
from pathlib import Path

import numpy as np
import psutil
import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.strategies import DDPStrategy
from waiting import PATIENCE_SECONDS

from kit.data.build.build import build
from kit.data.open_dataset import open_dataset
from kit.data.patches.loader import PatchLoader, seed_process
from kit.data.patches.module import PatchData
from kit.data.sampling import sample_plan
from kit.data.stream.engine import Engine
from kit.errors import ConfigError, CorruptChunkError
from kit.sections import Loader

QUIET = {
    "accelerator": "cpu", "logger": False, "enable_checkpointing": False, "enable_progress_bar": False,
    "enable_model_summary": False,
}  # fmt: skip


@pytest.fixture(autouse=True)
def nothing_is_left():
    torch.set_num_threads(1)
    before = {child.pid for child in psutil.Process().children(recursive=True)}
    yield
    # The server that loader processes come from, and its helper, end with this process.
    before |= {forkserver._forkserver._forkserver_pid, resource_tracker._resource_tracker._pid}
    left = [child for child in psutil.Process().children(recursive=True) if child.pid not in before]
    assert not psutil.wait_procs(left, timeout=PATIENCE_SECONDS)[1]


@pytest.fixture
def config(tiny_config, tmp_path):
    """A built store and a config that reads it."""
    config = tiny_config(
        tmp_path / "tiny.zarr", data__samples_per_epoch=26, loader__batch_size=4, data__patch={"lat": 3, "lon": 4}
    )
    build(config, progress=False)
    return config


def test_it_is_shown_in_one_line_and_nothing_is_opened(config):
    data = PatchData(config.replace({"data.url": "data/none.zarr"}))
    assert str(data) == "PatchData: random patches lat 3, lon 4 of data/none.zarr, 4 in a batch"
    given = PatchData(config, open_dataset(config))
    assert "random patches lat 3, lon 4" in str(given)
    assert "a Dataset" in str(given)
    assert (data.dataset, data.loader) == (None, None)


def loader_of(config, *, rank=0, world_size=1, **changes):
    dataset = open_dataset(config)
    settings = Loader(**(config.loader.model_dump() | changes))
    plan = sample_plan(config, dataset, world_size)
    return PatchLoader(dataset, plan, settings, rank=rank, standardize=True)


def passes(loader, count=1):
    """The batches of some epochs, then the loader closed."""
    try:
        return [batch for _ in range(count) for batch in loader]
    finally:
        loader.close()


def equal(mine, theirs):
    pairs = zip(mine, theirs, strict=True)
    return all(torch.equal(one[name], other[name]) for one, other in pairs for name in ("values", "valid"))


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ("gs://bucket/sea.zarr", r"'data\.url': 'gs://bucket/sea\.zarr', 'data\.patch'"),
        (Path("sea.zarr"), r"'data\.url': 'sea\.zarr'"),
        ("recipe.yaml", r"Config\.load\('recipe\.yaml'\)"),
        (np.zeros((3, 4)), r"PatchData\(config, data\)"),
        (None, r"PatchData\(config, data\)"),
    ],
)
def test_data_in_place_of_the_config_is_told_how_it_is_given(given, words):
    with pytest.raises(ConfigError, match=words):
        PatchData(given)


def test_the_place_of_a_store_beside_the_config_is_read(config):
    elsewhere = config.replace({"data.url": "nowhere.zarr"})
    data = PatchData(elsewhere, Path(config.data.url))
    data.setup()
    batch = next(iter(data.train_dataloader()))
    data.teardown()
    assert len(batch["values"]) == config.loader.batch_size


def test_a_batch_is_two_tensors_of_one_shape(config):
    first, *_, last = passes(loader_of(config))
    assert (first["values"].shape, first["values"].dtype) == ((4, 2, 1, 3, 4), torch.float32)
    assert (first["valid"].shape, first["valid"].dtype) == ((4, 2, 1, 3, 4), torch.bool)
    assert len(last["values"]) == 26 % 4
    assert (first["values"][~first["valid"]] == 0).all()


def test_batches_are_those_of_the_plan(config):
    loader = loader_of(config)
    with Engine(open_dataset(config), standardize=True) as engine:
        offsets = [loader.plan.batch(epoch, step, 0) for epoch in range(2) for step in range(len(loader))]
        expected = [{"values": torch.tensor(a), "valid": torch.tensor(b)} for a, b in engine.stream(offsets, (1, 3, 4))]
    assert equal(passes(loader, 2), expected)


@pytest.mark.parametrize("num_workers", [1, 2, pytest.param(9, marks=pytest.mark.slow)])
def test_any_number_of_processes_yields_the_same_batches_in_the_same_order(config, num_workers):
    alone = loader_of(config)
    spread = loader_of(config, num_workers=num_workers)
    assert equal(passes(alone, 2), passes(spread, 2))
    mine, theirs = alone.counters(), spread.counters()
    assert mine["samples"] == theirs["samples"] == 52
    used = [counts["cache_hits"] + counts["cache_misses"] for counts in (mine, theirs)]
    assert used[0] == used[1] > 0
    for counts in (mine, theirs):  # what batches on their way at the same time share depends on the moment
        assert 0 < counts["chunks_decoded"] <= counts["cache_misses"] <= used[0]
        assert counts["bytes_read"] > 0


@pytest.mark.parametrize("num_workers", [0, 2])
def test_two_ranks_share_the_global_batches_of_one(config, num_workers):
    whole = passes(loader_of(config.replace({"loader.batch_size": 8})))
    parts = [passes(loader_of(config, rank=rank, world_size=2, num_workers=num_workers)) for rank in (0, 1)]
    joined = [
        {name: torch.cat([one[name], other[name]]) for name in ("values", "valid")}
        for one, other in zip(*parts, strict=True)
    ]
    assert equal(joined, whole)


def test_epochs_advance_by_themselves_and_can_be_set(config):
    loader = loader_of(config)
    first, second = [*loader], [*loader]
    assert not equal(first, second)
    loader.set_epoch(0)
    assert equal(passes(loader), first)


def test_making_an_iterator_starts_no_epoch(config):
    loader = loader_of(config)
    iter(loader)
    assert loader.epoch == 0
    assert loader.counters()["requests"] == 0


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_pass_left_early_does_not_disturb_the_next(config, num_workers):
    loader = loader_of(config, num_workers=num_workers)
    for _ in loader:
        break
    loader.set_epoch(1)
    got = passes(loader)
    loader = loader_of(config)
    loader.set_epoch(1)
    assert equal(got, passes(loader))


def test_loading_draws_nothing_from_the_random_numbers_of_the_model(config):
    torch.manual_seed(5)
    expected = torch.rand(3)
    for num_workers in (0, 2):
        torch.manual_seed(5)
        passes(loader_of(config, num_workers=num_workers))
        assert torch.equal(torch.rand(3), expected)


@pytest.mark.parametrize("num_workers", [0, 2])
def test_damage_reaches_the_consumer_under_its_name(config, num_workers):
    loader = loader_of(config, num_workers=num_workers)
    for path in Path(config.data.url).rglob("wind/c/*/*/*"):
        path.write_bytes(path.read_bytes()[:-9])
    with pytest.raises(CorruptChunkError, match="of wind .*damaged"):
        passes(loader)


def test_the_processes_share_the_budget_of_requests(config):
    loader = loader_of(config, num_workers=4, requests_in_flight=32)
    assert loader._stream.engine._plan.requests_in_flight == 8


def _draws(seed, rank, worker, connection):
    seed_process(seed, rank, worker)
    connection.send((torch.rand(1).item(), np.random.random(), random.random()))


def test_each_process_of_each_rank_draws_its_own_numbers_and_the_same_in_every_run():
    context = multiprocessing.get_context("fork")

    def draw(*key):
        here, there = context.Pipe()
        child = context.Process(target=_draws, args=(*key, there))
        child.start()
        drawn = here.recv()
        child.join()
        return drawn

    first, again, other_rank, other_worker = draw(1, 0, 0), draw(1, 0, 0), draw(1, 1, 0), draw(1, 0, 1)
    assert first == again
    assert len({*first, *other_rank, *other_worker}) == 9


# -- Lightning


class Recorder(LightningModule):
    """Keeps the batches it is given."""

    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(()))
        self.batches = []
        self.loader = None

    def training_step(self, batch, _):
        self.batches.append(batch)
        self.loader = self.trainer.train_dataloader
        return (batch["values"] * self.weight).mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.1)


@pytest.mark.parametrize("num_workers", [0, 2])
def test_lightning_trains_on_it_epoch_after_epoch(config, num_workers):
    data, model = PatchData(config.replace({"loader.num_workers": num_workers})), Recorder()
    Trainer(max_epochs=2, **QUIET).fit(model, datamodule=data)
    assert equal(model.batches, passes(loader_of(config), 2))
    assert data.loader.counters()["samples"] == 52


class Saver(Callback):
    """Writes a checkpoint after a step."""

    def __init__(self, step, path):
        self.step, self.path = step, path

    def on_train_batch_end(self, trainer, *_):
        if trainer.global_step == self.step:
            trainer.save_checkpoint(self.path)


@pytest.mark.parametrize(("num_workers", "order"), [(0, "random"), (2, "random"), (0, "grid"), (0, "block")])
@pytest.mark.parametrize("steps", [3, 7, 10])
def test_a_fit_resumed_from_a_checkpoint_sees_exactly_the_batches_left(config, tmp_path, order, num_workers, steps):
    config = config.replace({"data.order": order, "data.stride": {"lat": 2, "lon": 1} if order == "grid" else {}})
    whole = passes(loader_of(config), 2)
    steps = min(steps, len(whole) - 1)
    data, saver = PatchData(config.replace({"loader.num_workers": num_workers})), Saver(steps, tmp_path / "middle.ckpt")
    Trainer(max_epochs=2, callbacks=[saver], **QUIET).fit(Recorder(), data)
    data, rest = PatchData(config), Recorder()
    Trainer(max_epochs=2, **QUIET).fit(rest, data, ckpt_path=saver.path, weights_only=False)
    assert equal(rest.batches, whole[steps:])


@pytest.mark.parametrize("order", ["random", "grid", "block"])
@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_loader_goes_on_where_its_state_was_taken(config, order, num_workers):
    config = config.replace({"data.order": order})
    whole = passes(loader_of(config), 2)
    for step in (0, 1, len(whole) // 2 - 1):
        loader = loader_of(config)
        taken = [next(loader_pass) for loader_pass in [iter(loader)] for _ in range(step)]
        state = loader.state_dict()
        loader.close()
        again = loader_of(config, num_workers=num_workers)
        again.load_state_dict(state)
        assert equal(taken + passes(again, 2), whole)


def test_a_state_of_other_samples_is_refused_with_what_differs(config):
    state = loader_of(config).state_dict()
    for changes, field in [
        ({"training.seed": 99}, "training.seed"),
        ({"data.patch": {"lat": 2, "lon": 4}}, "data.patch"),
        ({"data.order": "grid"}, "data.order"),
        ({"data.samples_per_epoch": 30}, "data.samples_per_epoch"),
    ]:
        with pytest.raises(ConfigError, match=field):
            loader_of(config.replace(changes)).load_state_dict(state)


def test_mixing_is_measured_and_is_one_in_random_order(config):
    for order, low, high in [("random", 1, 1), ("block", 0.01, 0.999)]:
        loader = loader_of(config.replace({"data.order": order, "loader.window_blocks": 3, "loader.block_reuse": 3.0}))
        assert loader.mixing is None
        passes(loader)
        assert low <= loader.mixing <= high


def test_batches_are_made_by_what_is_told_to_make_them(config):
    made = []

    def allocate(shape, dtype):
        made.append(np.empty(shape, dtype))
        return made[-1]

    with Engine(open_dataset(config), allocate=allocate) as engine:
        ((values, valid),) = engine.stream([np.zeros((2, 3), np.int64)], (1, 3, 4))
    assert values is made[0]
    assert valid is made[1]


@pytest.mark.parametrize("num_workers", [0, 2])
def test_batches_are_pinned_where_there_is_a_gpu_and_only_there(config, num_workers):
    plain, pinned = (
        passes(loader_of(config, num_workers=num_workers, pin_memory=pin_memory)) for pin_memory in (False, True)
    )
    assert equal(plain, pinned)
    assert not any(tensor.is_pinned() for batch in plain for tensor in batch.values())
    assert {tensor.is_pinned() for batch in pinned for tensor in batch.values()} == {torch.cuda.is_available()}


def test_loader_processes_are_no_forks_of_the_process_that_opened_the_store(config):
    loader = loader_of(config, num_workers=2)
    batches = iter(loader)
    next(batches)
    readers = loader._processes._iterator._workers
    assert len(readers) == 2
    parents = {psutil.Process(reader.pid).ppid() for reader in readers}
    loader.close()
    assert parents == {forkserver._forkserver._forkserver_pid}


def test_a_fit_stopped_in_the_middle_leaves_no_thread_and_no_process(config):
    data, model = PatchData(config.replace({"loader.num_workers": 2})), Recorder()
    Trainer(max_steps=2, **QUIET).fit(model, datamodule=data)
    assert len(model.batches) == 2


def _fit_rank(config, rank, port, connection):
    os.environ |= {
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "LOCAL_RANK": str(rank), "NODE_RANK": "0",
        "WORLD_SIZE": "2", "RANK": str(rank), "GROUP_RANK": "0", "LOCAL_WORLD_SIZE": "2",
        "TORCHELASTIC_RUN_ID": "none",
    }  # fmt: skip
    torch.set_num_threads(1)
    data, model = PatchData(config), Recorder()
    strategy = DDPStrategy(process_group_backend="gloo")
    Trainer(max_epochs=1, devices=2, strategy=strategy, **QUIET).fit(model, datamodule=data)
    connection.send((type(model.loader).__name__, [batch["values"].numpy() for batch in model.batches]))


@pytest.mark.slow
def test_under_ddp_lightning_keeps_the_loader_and_each_rank_reads_its_own_part(config, free_port):
    context = multiprocessing.get_context("fork")
    pipes = [context.Pipe() for _ in range(2)]
    ranks = [context.Process(target=_fit_rank, args=(config, rank, free_port, pipes[rank][1])) for rank in range(2)]
    for process in ranks:
        process.start()
    heard = [here.recv() if here.poll(300) else None for here, _ in pipes]
    for process in ranks:
        process.join(PATIENCE_SECONDS)
    whole = passes(loader_of(config.replace({"loader.batch_size": 8})))
    assert [name for name, _ in heard] == ["PatchLoader", "PatchLoader"]
    for mine, theirs, both in zip(heard[0][1], heard[1][1], whole, strict=True):
        assert np.array_equal(np.concatenate([mine, theirs]), both["values"].numpy())


@pytest.fixture
def free_port():
    import socket

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def test_without_a_trainer_it_is_one_rank(config):
    data = PatchData(config)
    assert equal(passes(data.train_dataloader()), passes(loader_of(config)))


def test_what_does_not_fit_an_open_store_is_refused_without_a_request(cloud, tiny_config):
    config = tiny_config(cloud.url("refused/t.zarr"))
    dataset = build(config, progress=False)
    mark = cloud.counts()
    for changes, message in [
        ({"data.patch": {"lat": 8}}, r"data\.patch: 8 elements along 'lat', but .* has 7; use at most 7"),
        ({"data.patch": {"latt": 2}}, r"data\.patch: .*did you mean 'lat'"),
        ({"data.stride": {"height": 2}, "data.order": "grid"}, r"data\.stride: dimension 'height'"),
        ({"data.variables": ["winds"]}, r"data\.variables: no variable 'winds' .*did you mean 'wind'"),
        ({"loader.batch_size": 10_000}, r"loader\.batch_size: a batch that does not fit the data"),
    ]:
        with pytest.raises(ConfigError, match=message):
            PatchData(config.replace(changes), dataset).train_dataloader()
    with pytest.raises(ConfigError, match=r"data\.variables: .*no data variables"):
        PatchData(config, replace(dataset, arrays={})).train_dataloader()
    assert cloud.counts(since=mark).requests == 0
