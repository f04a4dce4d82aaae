"""Each row once an epoch, in the same batches whatever holds the rows and whoever reads them."""

import itertools
import multiprocessing
import pickle
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from lightning.pytorch import LightningModule, Trainer
from properties import examples
from row_files import PLACES, numbers, put

import kit
from kit.data.rows.loader import RowOrder
from kit.data.rows.rows import Rows
from kit.data.rows.sources import MemoryRows
from kit.errors import ConfigError
from kit.memory.record.batches import loaders_of
from kit.studies.calibration.measure import subject_of
from kit.trial.fit_job import make_data, resize
from kit.trial.payload import Part

QUIET = {
    "accelerator": "cpu", "logger": False, "enable_checkpointing": False, "enable_progress_bar": False,
    "enable_model_summary": False,
}  # fmt: skip


@pytest.fixture(autouse=True)
def one_thread():
    torch.set_num_threads(1)


def orders(most_rows=60):
    return st.builds(
        RowOrder, rows=st.integers(12, most_rows), batch_size=st.integers(1, 3), world_size=st.integers(1, 4),
        seed=st.integers(0, 3), shuffle=st.booleans(), drop_last=st.booleans(), row_block=st.integers(1, 9),
        window_blocks=st.integers(1, 4),
    )  # fmt: skip


def rows_of(order, epoch, first=0, ranks=None):
    return [
        [order.batch(epoch, step, rank) for rank in range(ranks or order.world_size)]
        for step in range(first, order.batches_per_epoch)
    ]


def flat(batches):
    return [row for step in batches for batch in step for row in batch.tolist()]


def test_it_is_shown_in_one_line_and_nothing_is_read():
    data = kit.data.RowData(numbers(), batch_size=8)
    shown = str(data)
    assert shown.startswith("RowData: Rows 53 × 7 float32, 1.45 KiB, ")
    assert shown.endswith(", 8 in a batch")
    assert repr(data) == shown
    assert data.loader is None


@examples(150)
@given(orders(), st.integers(0, 3))
def test_each_row_comes_once_an_epoch_over_all_ranks(order, epoch):
    batches = rows_of(order, epoch)
    seen = flat(batches)
    whole = order.batch_size * order.world_size
    left = order.rows % whole if order.drop_last else order.rows % whole * (order.rows % whole < order.world_size) * 0
    assert len(seen) == len(set(seen)) == order.rows - left
    assert set(seen) <= set(range(order.rows))
    assert all(len(step) == order.world_size and min(map(len, step)) > 0 for step in batches)
    if not order.shuffle:
        assert seen == sorted(seen)


@given(orders(), st.integers(0, 2), st.integers(1, 4), st.integers(1, 9), st.data())
def test_a_resumed_epoch_goes_on_where_it_stopped_with_any_ranks(order, epoch, world_size, batch_size, data):
    step = data.draw(st.integers(0, order.batches_per_epoch - 1))
    assume(world_size * batch_size <= order.rows)
    other = replace(order, batch_size=batch_size, world_size=world_size).resume(order.identity(), step)
    before = flat(rows_of(order, epoch)[:step])
    after = flat(rows_of(other, epoch, step))
    assert len(before) + len(after) == len({*before, *after})
    if not order.drop_last:
        left_out = other.plan.steps.left_out
        assert len({*before, *after}) == order.rows - left_out
        assert left_out < world_size


@examples(50)
@given(orders(), st.integers(0, 2))
def test_two_ranks_share_the_global_batches_of_one(order, epoch):
    fields = {name: getattr(order, name) for name in ("rows", "seed", "shuffle", "row_block", "window_blocks")}
    one = RowOrder(batch_size=6, world_size=1, drop_last=True, **fields)
    two = RowOrder(batch_size=3, world_size=2, drop_last=True, **fields)
    joined = [np.concatenate(step).tolist() for step in rows_of(two, epoch)]
    assert joined == [step[0].tolist() for step in rows_of(one, epoch)]


def test_blocks_of_rows_stay_together_in_their_window():
    order = RowOrder(
        rows=1000, batch_size=100, world_size=1, seed=1, shuffle=True, drop_last=False, row_block=50, window_blocks=2
    )
    first = np.concatenate([order.batch(0, 0, 0)])
    assert len({row // 50 for row in first.tolist()}) == 2
    assert first.tolist() != sorted(first.tolist())
    assert order.batch(1, 0, 0).tolist() != first.tolist()


def test_a_batch_larger_than_the_rows_is_refused_with_what_would_do():
    with pytest.raises(ConfigError, match="30 rows × 2 ranks = 60 .*53 rows.*at most 26"):
        RowOrder(rows=53, batch_size=30, world_size=2, seed=0, shuffle=True, drop_last=False)
    with pytest.raises(ConfigError, match="row_block"):
        kit.data.RowData(numbers(), row_block=0)


def test_another_order_is_not_resumed():
    fields = {"rows": 50, "batch_size": 5, "world_size": 1, "seed": 0, "drop_last": False}
    mine = RowOrder(shuffle=True, **fields)
    with pytest.raises(ConfigError, match="shuffle: True, but False"):
        mine.resume(RowOrder(shuffle=False, **fields).identity(), 1)
    with pytest.raises(ConfigError, match="seed"):
        mine.resume(RowOrder(shuffle=True, **{**fields, "seed": 1}).identity(), 1)
    with pytest.raises(ConfigError, match="row_block"):
        mine.resume(RowOrder(shuffle=True, row_block=4, **fields).identity(), 1)


# -- the loader


def passes(data, count=1):
    try:
        return [batch for _ in range(count) for batch in data]
    finally:
        data.close()


def equal(mine, theirs):
    return len(mine) == len(theirs) and all(
        torch.equal(one, other) for pair in zip(mine, theirs, strict=True) for one, other in zip(*pair, strict=True)
    )


@pytest.mark.parametrize("ahead", [0, 3])
@pytest.mark.parametrize("place", PLACES)
def test_batches_are_the_same_wherever_the_rows_are(tmp_path, place, ahead):
    data = kit.data.RowData(put(place, tmp_path, numbers()), batch_size=8, seed=3, batches_ahead=ahead)
    batches = passes(data, 2)
    expected = passes(kit.data.RowData(numbers(), batch_size=8, seed=3), 2)
    assert equal(batches, expected)
    for values, rows in batches:
        assert (values.dtype, rows.dtype) == (torch.float32, torch.int64)
        assert np.array_equal(values.numpy(), numbers()[rows.numpy()])
    assert sorted(torch.cat([rows for _, rows in batches[:7]]).tolist()) == list(range(53))
    assert not equal(batches[:7], batches[7:])


@pytest.mark.parametrize("place", ["tensor", ".npy", "zarr array"])
def test_loader_processes_give_the_same_batches_in_the_same_order(tmp_path, place):
    where = put(place, tmp_path, numbers())
    data = kit.data.RowData(where, batch_size=8, num_workers=2)
    spread = passes(data, 2)
    assert equal(spread, passes(kit.data.RowData(where, batch_size=8), 2))
    assert data.loader.counters()["samples"] == 2 * 53
    assert data.loader.counters()["bytes_read"] == 2 * 53 * 28


class Counted(MemoryRows):
    """Counts how often it is read."""

    reads = 0

    def read(self, rows):
        self.reads += 1
        return super().read(rows)


@pytest.mark.parametrize("settings", [{}, {"row_block": 4}, {"shuffle": False}], ids=str)
def test_a_batch_is_one_block_and_not_read_row_by_row(settings):
    source = Counted(numbers())
    assert len(passes(kit.data.RowData(Rows(source), batch_size=8, **settings))) == source.reads == 7


def test_an_epoch_goes_on_from_its_middle(tmp_path):
    where = put(".npy", tmp_path, numbers())
    whole = kit.data.RowData(where, batch_size=8)
    expected = passes(whole, 2)
    begun = kit.data.RowData(where, batch_size=8)
    half = [*itertools.islice(begun, 3)]
    state = pickle.loads(pickle.dumps(begun.state_dict()))
    begun.close()
    resumed = kit.data.RowData(where, batch_size=8)
    resumed.load_state_dict(state)
    assert equal([*half, *passes(resumed, 2)], expected)
    resumed.set_epoch(1)
    assert equal(passes(resumed), expected[7:])


def test_only_the_rest_is_dropped_and_rows_in_order_come_in_order():
    batches = passes(kit.data.RowData(numbers(), batch_size=8, drop_last=True, shuffle=False))
    assert torch.cat([rows for _, rows in batches]).tolist() == list(range(48))


def test_rows_are_read_into_memory_where_asked(tmp_path):
    file = put(".npy", tmp_path, numbers())
    data = kit.data.RowData(file, batch_size=8, in_memory=True)
    data.setup()
    file.unlink()
    assert equal(passes(data), passes(kit.data.RowData(numbers(), batch_size=8)))


def test_what_does_not_fit_the_memory_of_the_loader_is_refused():
    data = kit.data.RowData(np.zeros((64, 4096), "float32"), batch_size=64)
    data.use_config(kit.Config().replace({"loader.memory_bytes": "1 MiB"}))
    with pytest.raises(ConfigError, match="4 batches of 64 rows of 16 KiB.*at least 4 MiB"):
        data.train_dataloader()


# -- in a Trainer and in trials


class Factor(LightningModule):
    """One number for each row and one for each column."""

    def __init__(self, rows=53, columns=7):
        super().__init__()
        self.rows = torch.nn.Embedding(rows, columns)

    def training_step(self, batch, _):
        values, rows = batch
        return ((self.rows(rows) - values / 100) ** 2).mean()

    def on_train_batch_end(self, outputs, *_):
        self.losses = [*getattr(self, "losses", []), float(outputs["loss"])]

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Watched(kit.data.RowData):
    """Notes what goes to the device."""

    def transfer_batch_to_device(self, batch, device, dataloader_idx):
        self.moved = [*getattr(self, "moved", []), sum(tensor.nbytes for tensor in batch)]
        return super().transfer_batch_to_device(batch, device, dataloader_idx)


def fitted(data, **changes):
    torch.manual_seed(0)
    module = Factor()
    Trainer(**QUIET, max_epochs=2, **changes).fit(module, datamodule=data)
    return module


def test_losses_are_equal_from_memory_and_every_file(tmp_path):
    places = {place: put(place, tmp_path / str(number), numbers()) for number, place in enumerate(PLACES)}
    losses = {place: fitted(kit.data.RowData(where, batch_size=8)).losses for place, where in places.items()}
    assert len(losses["array"]) == 2 * 7
    assert all(found == losses["array"] for found in losses.values())


def test_only_batches_are_moved_to_the_device_also_from_memory():
    data = Watched(torch.from_numpy(numbers()), batch_size=8)
    module = fitted(data)
    assert len(data.moved) == 14
    assert max(data.moved) == 8 * (7 * 4 + 8) < numbers().nbytes
    assert not [tensor for tensor in module.buffers() if tensor.shape == (53, 7)]


def test_the_batch_is_known_without_reading_a_row(tmp_path):
    file = put(".npy", tmp_path, numbers())
    data = make_data(Part.of(kit.data.RowData(file)), kit.Config().replace({"loader.batch_size": 5}))
    file.unlink()
    found = loaders_of(data, None)
    assert [(item.shape, item.dtype) for item in found.tensors] == [((5, 7), torch.float32), ((5,), torch.int64)]
    assert [item.shape for item in loaders_of(data, 9).tensors] == [(9, 7), (9,)]


def test_what_is_not_given_is_the_configs(tmp_path):
    file = str(put(".npy", tmp_path, numbers()))
    config = kit.Config().replace({
        "loader.batch_size": 5, "training.seed": 99, "data.arguments": {"source": file, "drop_last": True},
    })  # fmt: skip
    for given_as in ("kit.data:RowData", kit.data.RowData):
        data = make_data(Part.of(given_as), config)["datamodule"]
        order = data.order()
        assert (order.batch_size, order.seed, order.drop_last) == (5, 99, True)
    mine = kit.data.RowData(file, batch_size=3)
    assert make_data(Part.of(mine), config)["datamodule"].order().batch_size == 3
    assert resize({"datamodule": mine}, 6)["datamodule"].order().batch_size == 6
    mine.use_config(config)
    assert mine.order().batch_size == 6


def test_its_processes_are_set_by_calibration(tmp_path):
    data = make_data(Part.of(kit.data.RowData(put(".npy", tmp_path, numbers()), batch_size=8)), kit.Config())
    subject = subject_of(data)
    setting = subject.present()
    with subject.loader(setting, 1) as loader:
        assert sum(len(rows) for _, rows in loader) == 53
    assert subject.identity()["shape"] == [53, 7]
    assert not multiprocessing.active_children()
