"""The dials of the memory panel: they edit the form's config, follow it, and are redrawn for another model."""

import json

import pytest
from lightning.pytorch import LightningModule
from waiting import PATIENCE_SECONDS

import kit
from kit.config import Config
from kit.widgets.form import ConfigForm
from kit.widgets.memory_panel import DialsView

TOKENS = {"vocabulary": 64, "width": 32, "heads": 2, "layers": 2, "context": 16}
WAIT = PATIENCE_SECONDS


class Mine(LightningModule):
    def __init__(self, hidden_dim: int = 64, k: int = 5):
        super().__init__()


@pytest.fixture
def form():
    return ConfigForm(Config().replace({"model.target": "kit.models:GPT", "model.arguments": TOKENS}))


def test_there_is_a_field_and_a_slider_for_each_dial(form):
    view = DialsView(form)
    assert {name: field.value for name, field in view.fields.items()} == {"width": 32, "layers": 2, "context": 16}
    assert view.sliders["layers"].widget.options == tuple(range(1, 9))
    assert view.fields["width"].tooltip.endswith("in multiples of 8, which 2 heads share")


def test_a_slider_turns_the_argument_of_the_form_once(form):
    view, heard = DialsView(form), []
    form.on_change(heard.append)
    view.sliders["width"].widget.value = 64
    assert view.fields["width"].value == 64
    assert form.config.model.arguments == {**TOKENS, "width": 64}
    assert heard == [form.config]


def with_tokens():
    """A form whose data follows its model, its dials, and the configs that were heard of."""
    arguments = {"model.arguments": TOKENS, "data.arguments": {"context": 16}}
    form, heard = ConfigForm(Config().replace({"model.target": "kit.models:GPT", **arguments})), []
    view = DialsView(form, data="kit.models:Tokens")
    form.on_change(heard.append)
    return form, view, heard


def test_model_and_data_that_go_together_change_in_one_step():
    form, view, heard = with_tokens()
    view.fields["context"].value = 32
    assert (form.config.model.arguments["context"], form.config.data.arguments["context"]) == (32, 32)
    assert len(heard) == 1


def test_the_data_follows_what_is_typed_into_the_arguments_too():
    form, view, heard = with_tokens()
    base = form.config
    form.controls["model.arguments"].value = json.dumps({**TOKENS, "width": 64, "context": 32})
    assert form.config.data.arguments == {"context": 32}
    assert len(heard) == 1
    form.reset("model.arguments")
    assert form.config == base
    form.edit({"data.arguments": {"context": 8}})
    form.edit({"model.arguments": {**TOKENS, "context": 64}})
    assert form.config.data.arguments == {"context": 8}
    assert view.fields["context"].value == 64


def test_dials_follow_the_config_and_an_edit_that_waits_stays_where_it_is(form):
    view = DialsView(form)
    form.controls["hardware.strategy"].value = "ddp"
    view.fields["layers"].value = 3
    assert form.controls["hardware.strategy"].value == "ddp"
    assert [problem.path for problem in form.problems] == ["hardware.strategy"]
    form.controls["model.arguments"].value = '{"width": 48, "heads": 2}'
    assert {name: field.value for name, field in view.fields.items()} == {"width": 48, "layers": 12, "context": 1024}


def test_rows_stay_while_the_same_arguments_are_dials_and_another_model_has_its_own(form):
    view = DialsView(form)
    rows = view.ui.children
    view.fields["width"].value = 64
    assert view.ui.children is rows
    form.config = form.config.replace({"model.target": "kit.models:UNet", "model.arguments": {}})
    assert [*view.fields] == ["width", "depth"]
    form.config = form.config.replace({"model.target": "kit.models:Nothing"})
    assert view.ui.children == ()
    form.config = form.config.replace({"model.target": "kit.models:UNet"})
    assert [*view.fields] == ["width", "depth"]


def test_a_class_of_ones_own_has_them_and_a_name_may_be_added():
    assert [*DialsView(ConfigForm(), Mine, also=("k",)).fields] == ["hidden_dim", "k"]
    assert DialsView(ConfigForm(), lambda: Mine()).ui.children == ()


@pytest.mark.slow
def test_turning_returns_at_once_and_the_parameters_of_before_stand_beside_the_new_ones():
    config = Config().replace({"model.target": "kit.models:GPT", "model.arguments": TOKENS, "loader.batch_size": 2})
    panel = kit.memory.panel(config, data=tokens, device="T4-16GB", cards=())
    panel.wait(WAIT)
    first = panel.estimate.parameters
    panel.dials.fields["width"].value = 64
    assert panel.busy
    assert panel.view.waiting, "grey until it is recorded"
    panel.wait(WAIT)
    assert panel.estimate.parameters > 2 * first
    times = f"{panel.estimate.parameters:,} parameters, {panel.estimate.parameters / first:.3g} times the {first:,}"
    assert times in panel.view.headline.value
    assert "&quot;width&quot;: 64" in panel.code.value
    panel.dials.fields["width"].value = 33
    with pytest.raises(kit.KitError, match="shared by 2 heads"):
        panel.wait(WAIT)
    assert "shared by 2 heads" in panel.view.error.value


def tokens():
    from kit.models import Tokens

    return Tokens(vocabulary=64, context=16, batch_size=2, sequences=64)


def test_the_order_that_a_model_states_stands_above_its_dials_and_a_quality_has_fractions():
    form = ConfigForm(Config().replace({"model.target": "kit.models:SketchModel"}))
    view = DialsView(form)
    assert [*view.fields] == ["hidden_dim", "num_layers", "sketch_quality"]
    assert "change hidden_dim, then num_layers, then sketch_quality" in view.ui.children[0].value
    view.sliders["sketch_quality"].widget.value = 0.25
    assert view.fields["sketch_quality"].value == 0.25
    assert form.config.model.arguments == {"sketch_quality": 0.25}
    view.fields["sketch_quality"].value = 0.3
    assert view.sliders["sketch_quality"].widget.value == 0.3
    form.config = Config().replace({"model.target": "kit.models:UNet"})
    assert "change" not in view.ui.children[0].value
