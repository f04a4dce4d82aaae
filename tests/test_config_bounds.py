"""Numbers, lists and texts beyond any use: one ConfigError that is short, from each field, in work that is bounded."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st
from properties import examples, nightly
from ruamel.yaml.constructor import SafeConstructor
from ruamel.yaml.parser import Parser

from kit.config import Config
from kit.errors import ConfigError
from kit.sections import LARGEST_WHOLE

FIELDS = [info.path for info in Config.fields()]
HUGE = (10**400, -(10**400), math.inf, -math.inf, math.nan)
WORDS = ("1" + "0" * 400, "1" + "0" * 5000, "1e999", "-1e999", ".inf", ".nan", "0x" + "f" * 400)


def yaml(path, text):
    section, _, name = path.rpartition(".")
    return f"{section}: {{{name}: {text}}}\n" if section else f"{name}: {text}\n"


def refused(make):
    with pytest.raises(ConfigError) as caught:
        make()
    assert len(str(caught.value)) < 3000
    return str(caught.value)


@pytest.mark.parametrize("path", FIELDS)
def test_no_field_takes_a_number_that_nothing_can_hold(path):
    for value in (*HUGE, 10**5000):
        assert path in refused(lambda value=value: Config().replace({path: value}))
    for word in WORDS:
        refused(lambda word=word: Config.from_yaml(yaml(path, word)))


@pytest.mark.parametrize(
    "changes",
    [
        {"data.patch": {"x": 10**400}}, {"data.patch": {"x": 10**5000}}, {"data.arguments": {"a": [1, {"b": 10**400}]}},
        {"data.arguments": {"a": math.nan}}, {"chunking.readers": {"a": {"patch": {"x": 10**400}}}},
        {"hardware.devices": [10**400]}, {"hardware.devices": [10**5000]}, {"loader.memory_bytes": "1" * 400},
        {"loader.memory_bytes": "9" * 5000 + " GiB"}, {"calibration.candidate_workers": [10**400]},
    ],
    ids=lambda changes: next(iter(changes)),
)  # fmt: skip
def test_nor_does_what_is_inside_of_one(changes):
    assert next(iter(changes)) in refused(lambda: Config().replace(changes))


def test_whole_numbers_fit_64_bits():
    for path in (info.path for info in Config.fields() if info.kind == "int"):
        assert path in refused(lambda path=path: Config().replace({path: LARGEST_WHOLE + 1}))


def test_the_largest_whole_number_is_taken_and_survives_its_file():
    config = Config().replace({"trial.max_steps": LARGEST_WHOLE})
    assert Config.from_yaml(config.to_yaml()) == config


@pytest.mark.parametrize("path", ["loader.batch_size", "hardware.devices", "data.variables", "data.arguments", "name"])
def test_a_list_of_880_kilobytes_is_given_up_after_its_first_values(path, monkeypatch):
    """What is read is bounded, not only what is taken: reading all of it took half a minute."""
    events, get_event = [], Parser.get_event
    monkeypatch.setattr(Parser, "get_event", lambda parser: events.append(get_event(parser)) or events[-1])
    monkeypatch.setattr(SafeConstructor, "construct_document", lambda *_: pytest.fail("nothing of it is constructed"))
    text = yaml(path, "[" + ", ".join(["1"] * 290_000) + "]")
    assert len(text) > 860_000
    assert "10,000 values" in refused(lambda: Config.from_yaml(text))
    assert len(events) < 10_100


@pytest.mark.parametrize("path", FIELDS if nightly() else FIELDS[::24])
def test_a_long_list_in_hand_is_refused_in_few_words(path):
    assert path in refused(lambda: Config().replace({path: [1] * 290_000}))


def test_of_very_many_problems_the_first_are_told_and_how_many_there_are():
    told = refused(lambda: Config().replace({"data.variables": [1] * 5000}))
    assert "5,000" in told


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.sampled_from(HUGE),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)


@given(st.sampled_from(FIELDS), VALUES)
@examples(400)
def test_any_value_of_any_field_makes_a_config_that_can_be_kept_or_is_refused(path, value):
    try:
        config = Config().replace({path: value})
    except ConfigError:
        return
    assert Config.from_yaml(config.to_yaml(), path).fingerprint == config.fingerprint
    assert repr(config)
