"""Dials: which arguments are sizes, by the names that models have given theirs, and marks that fit the model."""

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kit.memory.dials import find_dials, kind_of


@pytest.mark.parametrize(
    ("kind", "names"),
    [
        ("width", "hidden_dim hidden_size d_model n_embd embed_dim embedding_dim width dim dim_feedforward hiddenDim"),
        ("width", "mlp_dim intermediate_size units num_hidden latent_dim d_ff model_dim hidden_channels"),
        ("channels", "base_channels init_features num_filters n_filters model_channels channels base_ch"),
        ("layers", "num_layers n_layer layers n_blocks blocks num_hidden_layers encoder_layers num_encoder_layers"),
        ("depth", "depth levels num_levels n_stages"),
        ("sketch", "sketch_width sketch_dim num_buckets"),
        ("quality", "sketch_quality emde_quality"),
        ("factors", "topics num_topics rank lora_rank n_components factors"),
        ("sequence", "max_seq_len seq_len sequence_length context context_length n_ctx max_length block_size"),
        ("sequence", "n_positions max_position_embeddings"),
    ],
)
def test_the_names_that_models_use_are_known(kind, names):
    assert {name: kind_of(name, 64) for name in names.split()} == dict.fromkeys(names.split(), kind)


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("vocabulary", "data"),
        ("vocab_size", "data"),
        ("num_classes", "data"),
        ("in_channels", "data"),
        ("channels", "data"),
        ("sketched_columns", "data"),
        ("numbers", "data"),
        ("documents", "data"),
        ("heads", "share the width"),
        ("nhead", "share the width"),
        ("warmup", "not known"),
    ],
)
def test_other_numbers_are_no_dials_and_say_why(name, why):
    dials, others = find_dials({name: 3})
    assert (dials, list(others)) == ([], [name])
    assert why in others[name]


def test_only_whole_numbers_from_one_on_are_looked_at():
    assert find_dials({"width": 0.5, "layers": True, "depth": 0, "context": None, "hidden_dim": "8"}) == ([], {})


@pytest.mark.parametrize("value", [1.0, 1, 0.3, 1e-7])
def test_a_quality_may_be_a_fraction_and_its_marks_are_shares_of_it(value):
    (dial,), _ = find_dials({"sketch_quality": value})
    assert (dial.kind, dial.value, dial.whole) == ("quality", value, False)
    assert 0 < dial.low == pytest.approx(value / 8)
    assert dial.high == pytest.approx(2 * value)
    assert list(dial.marks) == sorted(set(dial.marks))
    assert value in dial.marks


def test_what_the_model_states_comes_first_in_its_order_with_its_words():
    arguments = {"hidden_dim": 64, "k": 5, "sketch_quality": 1.0, "num_layers": 4}
    dials, others = find_dials(arguments, stated={"k": "first of all", "sketch_quality": "then", "absent": "never"})
    assert [dial.name for dial in dials] == ["k", "sketch_quality", "hidden_dim", "num_layers"]
    assert [dial.reason for dial in dials[:2]] == ["first of all", "then"]
    assert (dials[0].kind, others) == ("size", {})


def test_an_argument_may_be_said_to_be_a_size():
    (dial,), _ = find_dials({"k": 20}, also=["k"])
    assert (dial.kind, dial.low, dial.high) == ("size", 2, 160)


def test_widths_come_first_and_layers_before_the_sequence():
    dials, _ = find_dials({"context": 64, "layers": 2, "base_channels": 8, "width": 8})
    assert [dial.name for dial in dials] == ["width", "base_channels", "layers", "context"]


def test_a_width_stays_divisible_by_its_heads_and_says_so():
    (dial,), _ = find_dials({"width": 768, "heads": 12})
    assert {mark % 24 for mark in dial.marks} == {0}
    assert (dial.low, dial.high) == (96, 6144)
    assert re.search("multiples of 24, .*12 heads", dial.range_reason)


def test_an_argument_that_the_data_has_too_is_turned_with_it_only_when_they_agree():
    arguments = {"context": 192}
    assert find_dials(arguments, {"context": 192})[0][0].follows
    assert not find_dials(arguments, {"context": 96})[0][0].follows
    assert not find_dials(arguments, {"length": 192})[0][0].follows


def test_a_thousand_layers_have_no_thousands_of_marks():
    (dial,), _ = find_dials({"num_layers": 1000})
    assert len(dial.marks) < 64
    assert dial.high == 4000


@given(
    name=st.sampled_from(["width", "base_channels", "layers", "depth", "sketch_width", "rank", "seq_len"]),
    value=st.integers(1, 100_000),
    heads=st.integers(1, 16),
)
def test_marks_rise_hold_the_value_and_keep_what_divides_it(name, value, heads):
    (dial,), _ = find_dials({name: value, "heads": heads})
    assert value in dial.marks
    assert list(dial.marks) == sorted(set(dial.marks))
    assert dial.low >= 1
    assert dial.high >= 2 * value
    if name == "width" and value % heads == 0:
        assert all(mark % heads == 0 for mark in dial.marks)
