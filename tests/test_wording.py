"""Tests assert on values and a key word: a sentence that users see can be improved without breaking them."""

import ast
import re
from pathlib import Path

import pytest

TESTS = Path(__file__).parent
FILES = sorted(path for path in TESTS.rglob("*.py") if path.parent.name != "gpu")
MOST_WORDS = 5
"""In a row, of plain words; the names of findings have four."""
WORD = r"[A-Za-z][A-Za-z'’-]*"
SENTENCE = re.compile(rf"{WORD}(?:[ ,;]+{WORD}){{{MOST_WORDS},}}")
GIVEN = {"test_failure.py"}
"""Hand over the messages of other libraries, word for word."""


def compared(tree):
    """What messages are compared with: in assertions, as `match`, and as arguments of a test."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Assert):
            yield node.test
        elif isinstance(node, ast.keyword) and node.arg == "match":
            yield node.value
        elif isinstance(node, ast.Call) and getattr(node.func, "attr", "") == "parametrize":
            yield from node.args[1:2]


def sentences(text):
    nodes = (node for part in compared(ast.parse(text)) for node in ast.walk(part))
    words = (node.value for node in nodes if isinstance(node, ast.Constant) and isinstance(node.value, str))
    return [match[0] for match in map(SENTENCE.search, (text.replace("\\", "") for text in words)) if match]


@pytest.mark.parametrize("path", [path for path in FILES if path.name not in GIVEN], ids=lambda path: path.stem)
def test_no_assertion_holds_a_whole_sentence(path):
    assert sentences(path.read_text()) == []


def test_a_sentence_is_found_wherever_a_message_is_compared_with_it():
    said = "there is no such thing at all"
    for line in (f'assert "{said}" in text', f'raises(E, match="{said}.*")', f'mark.parametrize("a", ["{said}"])'):
        assert sentences(line) == [said]
    assert sentences(f'call("{said}")') == []
