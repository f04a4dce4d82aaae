"""model_dials: a user's class and kit's models alike, and turning one changes what is fitted."""

import re

import numpy
import pytest
from lightning.pytorch import LightningModule
from waiting import PATIENCE_SECONDS

import kit
from kit.config import Config
from kit.errors import ConfigError, TargetError
from kit.testing import TinyData, TinyModule

TOKENS = {"vocabulary": 64, "width": 32, "heads": 2, "layers": 2, "context": 16}
TOPIC_MODEL = "datasets/topics/topics.py:PoissonNMF"
TOPICS = {"documents": 100, "terms": 50, "topics": 8}


class Mine(LightningModule):
    def __init__(self, hidden_dim: int = 64, num_layers: int = 2, k: int = 5, dropout: float = 0.1):
        super().__init__()


def gpt(**changes):
    return Config().replace({"model.target": "kit.models:GPT", "model.arguments": TOKENS, **changes})


def names(dials):
    return [(dial.name, dial.value) for dial in dials]


def test_the_dials_stand_where_the_config_has_them_else_at_the_defaults():
    config = gpt(**{"model.arguments": {"width": 384, "heads": 6}})
    assert names(kit.memory.sizes(config)) == [("width", 384), ("layers", 12), ("context", 1024)]


@pytest.mark.parametrize(
    ("target", "found"),
    [
        ("kit.models:UNet", ["width", "depth"]),
        ("kit.models:Recurrent", ["width", "layers"]),
        ("kit.models:Recommender", ["width"]),
        ("kit.models:Encoder", ["width", "layers", "context"]),
        ("kit.models:ResNet", ["width"]),
    ],
)
def test_every_model_of_kit_has_dials(target, found):
    assert [dial.name for dial in kit.memory.sizes(Config().replace({"model.target": target}))] == found


def test_a_class_of_ones_own_has_them_too():
    dials = kit.memory.sizes(Config(), Mine)
    assert names(dials) == [("hidden_dim", 64), ("num_layers", 2)]
    assert list(dials.others) == ["k"]
    assert "not known" in dials.others["k"]
    assert names(kit.memory.sizes(Config(), Mine, also=["k"])) == [("hidden_dim", 64), ("num_layers", 2), ("k", 5)]


@pytest.mark.parametrize("module", [TinyModule(), lambda: TinyModule()])
def test_what_is_made_already_has_none_and_says_why(module):
    dials = kit.memory.sizes(Config(), module)
    assert len(dials) == 0
    assert "size is settled" in repr(dials)
    assert "import path" in repr(dials)


def test_a_target_that_is_not_there_is_refused():
    with pytest.raises(TargetError, match="did you mean 'GPT'"):
        kit.memory.sizes(Config().replace({"model.target": "kit.models:GPTT"}))


def test_the_table_names_ranges_and_reasons():
    dials = kit.memory.sizes(gpt())
    for text in (repr(dials), dials._repr_html_()):
        assert "width" in text
        assert "its square" in text
        assert re.search("vocabulary .*no dial", text)
    several = kit.memory.sizes(Config().replace({"model.target": TOPIC_MODEL, "model.arguments": TOPICS}))
    assert re.search("documents, terms .*no dials", repr(several))


def test_turning_one_changes_the_model_and_the_data_that_follows():
    dials = kit.memory.sizes(gpt(), data="kit.models:Tokens")
    assert not dials[2].follows, "the data is made with another length"
    config = gpt(**{"data.arguments": {"context": 16}})
    dials = kit.memory.sizes(config, data="kit.models:Tokens")
    assert dials.changes(width=64) == {"model.arguments": {**TOKENS, "width": 64}}
    assert dials.changes(context=32) == {
        "model.arguments": {**TOKENS, "context": 32}, "data.arguments": {"context": 32},
    }  # fmt: skip


def test_data_of_a_source_does_not_follow():
    config = gpt(**{"data.arguments": {"context": 16}, "data.source": "datasets/ocean/source.py:Ocean"})
    assert not kit.memory.sizes(config, data="kit.models:Tokens")[2].follows


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"widht": 64}, r"model\.arguments\.widht: .*no dial; .*'width'"),
        ({"heads": 4}, r"no dial \(heads .*width.*width, layers, context"),
        ({"width": 0}, "0 is no width"),
        ({"width": 64.0}, "64.0 .*whole number"),
        ({"width": "64"}, "'64' is no width"),
    ],
)
def test_what_cannot_be_turned_is_refused(values, message):
    with pytest.raises(ConfigError, match=message):
        kit.memory.sizes(gpt()).changes(**values)


def test_a_turned_config_is_fitted_and_predicted_with_data_of_that_length(config):
    base = config(max_steps=2, warmup_steps=1).replace(
        {
            "model.target": "kit.models:GPT",
            "model.arguments": TOKENS,
            "data.arguments": {"vocabulary": 64, "context": 16},
        }
    )
    turned = base.replace(kit.memory.sizes(base, data="kit.models:Tokens").changes(context=32))
    trial = kit.fit(turned, None, "kit.models:Tokens").wait(PATIENCE_SECONDS)
    assert trial.state == "COMPLETE"
    short, long = (kit.predict_memory(one, None, "kit.models:Tokens", device="T4-16GB") for one in (base, turned))
    assert long.device_allocated_bytes > short.device_allocated_bytes
    assert long.parameters == short.parameters + 16 * 32


def test_a_class_of_ones_own_data_is_made_with_the_arguments_of_the_config(config):
    wide = config(max_steps=2, warmup_steps=1).replace(
        {"model.arguments": {"width": 16}, "data.arguments": {"width": 16}}
    )
    assert kit.fit(wide, TinyModule, TinyData).wait(PATIENCE_SECONDS).state == "COMPLETE"
    assert kit.memory.sizes(wide, TinyModule, TinyData)[0].follows


SKETCHES = {"sketched_columns": 2, "numbers": 3, "categories": [5, 7], "sketch_quality": 0.125}


def test_a_quality_is_turned_by_fractions_with_the_data_that_has_it_too(config):
    base = config(max_steps=2, warmup_steps=1).replace(
        {
            "model.target": "kit.models:SketchModel",
            "model.arguments": {**SKETCHES, "hidden_dim": 64},
            "data.arguments": {**SKETCHES, "batch_size": 4, "entities": 16},
        }
    )
    dials = kit.memory.sizes(base, data="sketch_data:Sketches")
    assert dials[2].follows
    turned = base.replace(dials.changes(sketch_quality=1, hidden_dim=128))
    assert turned.data.arguments["sketch_quality"] == 1.0
    assert kit.fit(turned, None, "sketch_data:Sketches").wait(PATIENCE_SECONDS).state == "COMPLETE"
    small, large = (kit.predict_memory(one, None, "sketch_data:Sketches", device="T4-16GB") for one in (base, turned))
    assert large.parameters - small.parameters > 2 * 2 * 4 * 112 * 64
    assert large.device_allocated_bytes > small.device_allocated_bytes


@pytest.mark.parametrize("value", [0, -0.5, True, float("inf"), float("nan"), "1"])
def test_what_is_no_quality_is_refused(value):
    config = Config().replace({"model.target": "kit.models:SketchModel"})
    with pytest.raises(ConfigError, match=r"model\.arguments\.sketch_quality: .* no quality; .*above 0"):
        kit.memory.sizes(config).changes(sketch_quality=value)


class Ordered(Mine):
    dial_order = {"k": "first", "num_layers": "later", "gone": "never"}  # noqa: RUF012


def test_a_model_states_its_own_order_and_its_names_are_dials():
    dials = kit.memory.sizes(Config(), Ordered)
    assert [(dial.name, dial.reason) for dial in dials[:2]] == [("k", "first"), ("num_layers", "later")]
    assert names(dials) == [("k", 5), ("num_layers", 2), ("hidden_dim", 64)]
    assert dials.order == ("k", "num_layers")
    assert "k, then num_layers" in dials._repr_html_()
    assert kit.memory.sizes(Config().replace({"model.target": TOPIC_MODEL})).order_sentence == ""
    assert kit.memory.sizes(Config(), Mine).order_sentence == ""


def test_the_order_is_read_from_source_text_and_from_a_base(tmp_path):
    source = tmp_path / "model_with_order.py"
    source.write_text(
        "raise ImportError('never imported')\n"
        "class Base:\n    dial_order: dict[str, str] = {'layers': 'first', 'width': 'second'}\n"
        "class Model(Base):\n    def __init__(self, width=8, layers=2): ...\n"
        "class Computed(Base):\n    dial_order = dict(width='first')\n    def __init__(self, width=8): ...\n"
    )
    dials = kit.memory.sizes(Config().replace({"model.target": f"{source}:Model"}))
    assert dials.order_sentence.endswith("layers, then width")
    assert kit.memory.sizes(Config().replace({"model.target": f"{source}:Computed"})).order == ("width",)


class Wrong(Mine):
    dial_order = ("hidden_dim",)


def test_an_order_that_is_no_mapping_is_refused():
    with pytest.raises(ConfigError, match="dial_order .*map arguments"):
        kit.memory.sizes(Config(), Wrong)


def test_a_size_named_by_hand_may_be_one_text_and_must_be_there():
    assert [dial.name for dial in kit.memory.sizes(gpt(), also="heads") if dial.kind == "size"] == ["heads"]
    with pytest.raises(ConfigError, match=r"also: 'headz'.*'heads'"):
        kit.memory.sizes(gpt(), also=["headz"])
    with pytest.raises(ConfigError, match=r"Config.load\('recipe.yaml'\)"):
        kit.memory.sizes("recipe.yaml")


@pytest.mark.parametrize("value", [numpy.int64(64), numpy.int32(64)])
def test_a_whole_number_of_numpy_turns_a_dial(value):
    changed = gpt().replace(kit.memory.sizes(gpt()).changes(width=value))
    assert type(changed.model.arguments["width"]) is int
