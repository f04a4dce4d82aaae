"""YAML text: two readers of different YAML see the same values."""

import yaml
from hypothesis import given
from hypothesis import strategies as st
from ruamel.yaml import YAML

from kit.committed.yaml import Noted, YamlBlock, yaml_text

TEXT = st.text(st.characters(exclude_categories=("Cs", "Cc")), max_size=12) | st.sampled_from(
    ["no", "on", "Yes", "12:30", "1e-5", "0x1f", "null", "~", "", " a", "a: b", "# x", "32-true", "a\nb", "\t", "\x85"]
)
SCALARS = st.none() | st.booleans() | st.integers(-(10**9), 10**9) | st.floats(allow_nan=False, allow_infinity=False)
VALUES = st.recursive(
    SCALARS | TEXT, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=3), max_leaves=12
)


def plain(value):
    if isinstance(value, dict):
        return {key: plain(item) for key, item in value.items()}
    return [plain(item) for item in value] if isinstance(value, list) else value


@given(st.dictionaries(TEXT, VALUES, max_size=4))
def test_both_readers_see_what_was_written(values):
    text = yaml_text(values)
    assert text.isascii(), "LightningCLI reads it in the locale's encoding"
    assert plain(YAML(typ="safe", pure=True).load(text) or {}) == values
    assert (yaml.safe_load(text) or {}) == values


def test_a_note_stands_above_its_value_and_a_block_keeps_its_lines():
    text = yaml_text(
        {"trainer": {"precision": Noted("bf16-mixed", "because\nit is fast"), "config": YamlBlock("a: 1\n\nb: 2")}}
    )
    assert text.splitlines() == [
        "trainer:", "  # because it is fast", "  precision: bf16-mixed", "  config: |", "    a: 1", "", "    b: 2"
    ]  # fmt: skip
    assert yaml.safe_load(text)["trainer"]["config"] == "a: 1\n\nb: 2\n"


def test_items_of_a_list_have_their_notes_too():
    text = yaml_text(
        {"callbacks": [Noted({"class_path": "a.B", "init_args": {"x": [1, 2]}}, "why"), {"class_path": "c.D"}]}
    )
    assert yaml.safe_load(text) == {
        "callbacks": [{"class_path": "a.B", "init_args": {"x": [1, 2]}}, {"class_path": "c.D"}]
    }
    assert "    # why\n" in text or "  # why\n" in text


def test_a_block_that_is_not_ascii_is_text_of_the_same_value():
    text = yaml_text({"config": Noted(YamlBlock("folder: Bücher\n\nb: 2"), "2 × Bücher")})
    assert text.startswith("# 2 x Bu")
    assert text.isascii()
    assert yaml.safe_load(text)["config"] == "folder: Bücher\n\nb: 2\n"
