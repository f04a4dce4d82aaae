"""A number that was typed out of bounds is corrected, and what became of it is said beside its control."""

import html

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kit.config import Config
from kit.data.build.schedulers import advise_schedule
from kit.widgets.build_panel import ScheduleView
from kit.widgets.controls import NumberField
from kit.widgets.form import ConfigForm
from kit.widgets.memory_panel import DialsView

TOKENS = {"vocabulary": 64, "width": 32, "heads": 2, "layers": 2, "context": 16}


def typed(field, value):
    """As the page hands over what was typed."""
    field.set_state({"value": value})


def note(form, path):
    return html.unescape(form._notes[path].value) if path in form._notes else ""


@pytest.mark.parametrize(
    ("path", "value", "used", "said"),
    [
        ("loader.batch_size", 0, 1, "0 is below 1"),
        ("loader.batch_size", -3, 1, "-3 is below 1"),
        ("loader.batch_size", 2.5, 2, "2.5 is no whole number"),
        ("loader.num_workers", 1000, 256, "1000 is above 256"),
        ("loader.prefetch_factor", 65, 64, "65 is above 64"),
        ("chunking.compression_level", -1, 0, "-1 is below 0"),
        ("trial.max_steps", 0, 1, "0 is below 1"),
        ("training.seed", 2**40, 2**32 - 1, "above 4294967295"),
    ],
)
def test_a_number_out_of_bounds_is_corrected_and_the_form_says_so(path, value, used, said):
    form = ConfigForm(Config().replace({"trial.warmup_steps": 0}))
    typed(form.controls[path], value)
    assert form.config.get(path) == used
    assert said in note(form, path)
    assert f"{used} is used" in note(form, path)
    typed(form.controls[path], used + 1 if used <= 1 else used - 1)
    assert said not in note(form, path)


def test_the_number_of_before_is_told_to_the_page_again_where_it_is_used_in_place_of_another():
    field, sent = NumberField(1, least=1, most=9), []
    field.send_state = lambda key: sent.append((key, field.value))
    typed(field, 0)
    assert sent == [("value", 1)]
    sent.clear()
    typed(field, 5)
    assert sent == []


def test_setting_the_config_takes_back_what_was_said():
    form = ConfigForm(Config())
    typed(form.controls["loader.batch_size"], 0)
    assert "is used" in note(form, "loader.batch_size")
    form.config = form.config
    assert "is used" not in note(form, "loader.batch_size")


def test_numbers_are_read_as_the_page_reads_them():
    field = NumberField(4, least=1, most=5000)
    typed(field, 1e3)
    assert (field.value, field.correction) == (1000, "")
    assert isinstance(field.value, int)
    typed(field, None)  # what JSON makes of an infinity
    assert field.value == 1000
    assert "1000 stays" in field.correction


def test_a_dial_that_was_corrected_says_so_beside_it():
    view = DialsView(ConfigForm(Config().replace({"model.target": "kit.models:GPT", "model.arguments": TOKENS})))
    typed(view.fields["layers"], 0)
    row = next(row for row in view.ui.children[1:] if "layers" in row.children[0].children[0].children[0].description)
    assert view.fields["layers"].value == 1
    assert "0 is below 1" in row.children[1].value
    assert row.children[1].layout.display is None
    typed(view.fields["layers"], 3)
    assert row.children[1].layout.display == "none"


def test_the_machine_of_an_advice_says_what_was_corrected():
    view = ScheduleView(Config(), lambda _: None, lambda: None)
    cores = advise_schedule(Config()).cores
    typed(view.cores, 0)
    assert view.cores.value == 1
    assert any("0 is below 1" in part.value for part in view.ui.children if hasattr(part, "value"))
    typed(view.cores, cores)
    assert view.cores.correction == ""


@given(st.one_of(st.integers(), st.floats(allow_nan=True), st.none(), st.text(max_size=3)), st.booleans())
def test_a_value_is_always_within_its_bounds_and_every_change_is_said(value, whole):
    field = NumberField(4, least=2, most=64, whole=whole)
    typed(field, value)
    assert 2 <= field.value <= 64
    assert (field.correction == "") == (field.value == value)
    assert isinstance(field.value, int) or not whole
