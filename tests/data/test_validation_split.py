"""A part of kit's own data is kept for validation: no sample of training reaches into it, on any number of ranks."""

import numpy as np
import pytest
import zarr
from lightning.pytorch import Trainer
from lightning.pytorch.utilities.model_helpers import is_overridden

import kit
from kit.config import Config
from kit.data.open_dataset import open_dataset
from kit.data.rows.loader import RowData
from kit.data.sampling import sample_plan
from kit.data.splits import split_of, widest_of
from kit.data.tables.chunks import EventPlan
from kit.errors import ConfigError
from kit.models.unet import UNet


@pytest.fixture
def config(tmp_path):
    group = zarr.open_group(str(tmp_path / "store.zarr"), mode="w")
    for name in ("sst", "ssh"):
        array = group.create_array(
            name, shape=(40, 16, 16), chunks=(4, 8, 8), dtype="float32", dimension_names=("time", "lat", "lon")
        )
        array[:] = np.arange(40, dtype="float32")[:, None, None] * np.ones((1, 16, 16))

    def make(**changes):
        return Config().replace(
            {
                "data.url": str(tmp_path / "store.zarr"),
                "data.patch": {"time": 3, "lat": 8, "lon": 8},
                "data.samples_per_epoch": 96,
                "data.standardize": False,
                "data.validation_fraction": 0.25,
                "loader.batch_size": 4,
                **changes,
            }
        )

    return make


def places(plan, world_size, axis):
    """First and last element along the dimension of every sample of an epoch."""
    offsets = [
        plan.batch(0, step, rank)[:, axis] for step in range(plan.batches_per_epoch) for rank in range(world_size)
    ]
    found = np.concatenate(offsets)
    return found.min(), found.max() + plan.patch[axis] - 1, len(found)


@pytest.mark.parametrize("order", ["random", "grid", "block"])
@pytest.mark.parametrize("world_size", [1, 2])
def test_no_patch_of_training_reaches_into_what_is_kept(config, order, world_size):
    asked = config(**{"data.order": order, "data.stride": {"time": 1} if order == "grid" else {}})
    dataset = open_dataset(asked)
    first, last, _ = places(sample_plan(asked, dataset, world_size), world_size, 0)
    begin, end, count = places(sample_plan(asked, dataset, world_size, part="validation"), world_size, 0)
    assert (first, last) == (0, 31) if order == "grid" else first < last <= 31
    assert 32 <= begin < end <= 39  # three tenths of the chunks of 4, at whose border it begins
    assert count >= (24 if order != "grid" else 1)


def test_the_split_begins_at_a_border_of_chunks_and_says_so(config):
    asked = config()
    split = split_of(asked, widest_of(open_dataset(asked), asked))
    assert (split.dimension, split.extent("validation")) == ("time", ((32, 0, 0), (8, 16, 16)))
    assert "32 to 39 of 40, 20%" in split.sentence
    assert "no chunk" in split.sentence
    late = asked.replace({"data.patch": {}, "data.validation_fraction": 0.02})
    inside = split_of(late, widest_of(open_dataset(late), late))
    assert (inside.extent("train")[1][0], "read for both" in inside.sentence) == (39, True)


@pytest.mark.parametrize(
    ("changes", "path"),
    [
        ({"data.validation_dimension": "tim"}, "data.validation_dimension"),
        ({"data.validation_dimension": "lat", "data.patch": {"lat": 9}}, "data.validation_fraction"),
    ],
)
def test_what_cannot_be_split_is_refused_by_its_field(config, changes, path):
    asked = config(**changes)
    with pytest.raises(ConfigError) as caught:
        sample_plan(asked, open_dataset(asked), 1)
    assert caught.value.problems[0].path == path


def test_patches_to_validate_on_are_the_same_each_time_and_hold_late_times_only(config):
    data = kit.data.PatchData(config())
    batches = [batch["values"].numpy() for batch in data.val_dataloader()]
    again = [batch["values"].numpy() for batch in data.validation_loader]
    assert all(np.array_equal(one, two) for one, two in zip(batches, again, strict=True))
    assert min(batch.min() for batch in batches) >= 32
    assert max(batch["values"].max() for batch in data.train_dataloader()) <= 31
    data.teardown()


def test_data_of_which_nothing_is_kept_has_nothing_to_validate_on(config):
    data = kit.data.PatchData(config(**{"data.validation_fraction": 0.0}))
    assert not is_overridden("val_dataloader", data)
    assert is_overridden("val_dataloader", kit.data.PatchData(config()))


@pytest.mark.parametrize("row_block", [1, 8])
def test_the_last_rows_are_kept(row_block):
    data = RowData(np.arange(100.0)[:, None], batch_size=8, row_block=row_block)
    data.use_config(Config().replace({"data.validation_fraction": 0.2}))
    trained = sorted(int(row) for _, rows in data.train_dataloader() for row in rows)
    validated = [int(row) for _, rows in data.val_dataloader() for row in rows]
    assert trained + validated == list(range(100))
    assert len(validated) == 20
    data.teardown()


def test_a_model_of_kit_validates_on_patches_of_kit(config):
    trainer = Trainer(max_epochs=1, accelerator="cpu", logger=False, enable_checkpointing=False, **QUIET)
    asked = config(**{"data.samples_per_epoch": 16})
    trainer.fit(UNet(variables=2, history=2, width=4, depth=1), datamodule=kit.data.PatchData(asked))
    assert trainer.callback_metrics["val_loss"] > 0


QUIET = {"enable_progress_bar": False, "enable_model_summary": False, "num_sanity_val_steps": 2}


def test_the_last_entities_of_each_query_chunk_are_kept():
    common = {"table": {"name": "shop"}, "batch_size": 2, "world_size": 2, "seed": 3, "drop_last": False}
    plans = {
        validates: EventPlan(
            entities=(10, 5), shuffle=not validates, validation_fraction=0.2, validates=validates, **common
        )
        for validates in (False, True)
    }
    served = {
        validates: sorted(
            (chunk, entity)
            for rank in (0, 1)
            for chunk, entities in plan.shares(0, 0, rank)
            for entity in entities.tolist()
        )
        for validates, plan in plans.items()
    }
    assert served[True] == [(0, 8), (0, 9), (1, 4)]
    assert served[False] == [(0, place) for place in range(8)] + [(1, place) for place in range(4)]
