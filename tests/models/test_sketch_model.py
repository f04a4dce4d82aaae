"""SketchModel: learns what entities do next, has the seed's dials in their order, and refuses other sketches."""

import math
import re

import pytest
import torch
from sketch_data import Sketches

import kit
from kit.config import Config
from kit.data.tables.features import DEPTH
from kit.errors import ConfigError
from kit.models import SketchModel
from kit.train.fsdp import repeated_blocks

SMALL = {"sketched_columns": 2, "numbers": 3, "categories": [5, 7], "sketch_quality": 0.125}
BUCKETS = 16


@pytest.fixture(autouse=True)
def _one_thread():
    torch.set_num_threads(1)
    torch.manual_seed(0)


def made(**changes):
    return SketchModel(**{**SMALL, "hidden_dim": 32, "num_layers": 2, **changes})


def batch_of(entities=16, **changes):
    data = Sketches(**{**SMALL, "batch_size": entities, "entities": entities, **changes})
    (batch,) = data.train_dataloader()
    return batch


def test_at_its_defaults_it_has_the_dials_of_the_seed():
    dials = kit.memory.sizes(Config().replace({"model.target": "kit.models:SketchModel"}))
    found = [(dial.name, dial.value) for dial in dials]
    assert found == [("hidden_dim", 2048), ("num_layers", 4), ("sketch_quality", 1.0)]
    assert dials.order_sentence == "change hidden_dim, then num_layers, then sketch_quality"
    assert re.search("after hidden_dim, .*underfitting", repr(dials))
    assert "data" in dials.others["sketched_columns"] == dials.others["numbers"]


def test_a_batch_without_knowledge_costs_the_logarithm_of_the_width():
    model, batch = made(), batch_of()
    torch.nn.init.zeros_(model.head.weight)
    torch.nn.init.zeros_(model.head.bias)
    assert model.loss(batch).item() == pytest.approx(math.log(BUCKETS), rel=1e-5)


def test_the_loss_is_nothing_where_the_target_is_foretold():
    model, batch = made(), batch_of(1)
    torch.nn.init.zeros_(model.head.weight)
    with torch.no_grad():
        model.head.bias.copy_(batch["target"][0].clamp(min=1e-30).log())
    assert model.loss(batch).item() == pytest.approx(0, abs=1e-6)


def test_rows_without_a_target_are_left_out():
    model, batch = made(), batch_of(2)
    alone = model.loss({name: values[:1] for name, values in batch.items()})
    batch["target"][1] = 0
    assert model.loss(batch).item() == pytest.approx(alone.item())
    batch["target"][:] = 0
    assert model.loss(batch).item() == 0


def test_it_learns_what_it_sees_again():
    model, batch = made(learning_rate=1e-2), batch_of()
    optimizer = model.configure_optimizers()
    before = model.loss(batch).item()
    for _ in range(60):
        optimizer.zero_grad()
        model.loss(batch).backward()
        optimizer.step()
    assert model.loss(batch).item() < 0.1 * before


def test_its_output_is_a_row_of_buckets_for_each_column_and_depth():
    assert made()(batch_of(3)).shape == (3, 2 * DEPTH, BUCKETS)


def test_its_layers_are_the_blocks_that_kit_shards_and_checkpoints():
    model = made()
    assert repeated_blocks(model) == list(model.blocks)


def test_sketches_of_another_width_are_refused_with_the_way_out():
    with pytest.raises(ConfigError, match=r"sketches .*128 .* 256.*model_arguments"):
        made()(batch_of(sketch_quality=0.25))


@pytest.mark.parametrize("quality", [0, -1.0, float("nan"), 1e9])
def test_a_quality_that_is_none_is_refused(quality):
    with pytest.raises(ConfigError, match="sketch_quality"):
        made(sketch_quality=quality)


def test_sketch_data_are_the_same_for_the_same_seed():
    one, again, other = batch_of(), batch_of(), batch_of(seed=1)
    torch.testing.assert_close(one, again)
    assert not torch.equal(one["sketch"], other["sketch"])
    assert one["sketch"].unflatten(1, (2 * DEPTH, BUCKETS)).sum(dim=-1).unique().tolist() == [1.0]
    with pytest.raises(IndexError, match="there are 16"):
        Sketches(**SMALL, entities=16).dataset[16]
