"""The table of faults: each stands once, and what is said to show it is there to be run."""

import ast
from functools import cache
from pathlib import Path

import pytest
from table import TABLE

TESTS = Path(__file__).parents[1]


@pytest.fixture(autouse=True)
def nothing_left():
    """Nothing is started here that could be."""


@cache
def defined(file):
    """Names of the tests that pytest collects from a file."""
    path = TESTS / file
    if not (path.name.startswith("test_") and path.is_file()):
        return frozenset()
    return frozenset(node.name for node in ast.parse(path.read_text()).body if isinstance(node, ast.FunctionDef))


def test_every_fault_stands_once_in_its_order():
    assert [row.number for row in TABLE] == list(range(1, 56))
    assert len({row.fault for row in TABLE}) == 55
    assert all(row.fault and row.injected and row.expected for row in TABLE)


@pytest.mark.parametrize("row", TABLE, ids=lambda row: str(row.number))
def test_each_test_that_is_named_exists(row):
    named = row.tests + row.gpu
    assert len(set(named)) == len(named)
    missing = [name for name in named if name.partition("::")[2] not in defined(name.partition("::")[0])]
    assert missing == []
    assert all(name.startswith("gpu/") for name in row.gpu)
    assert not any(name.startswith("gpu/") for name in row.tests), "what a CPU shows stands apart"


@pytest.mark.parametrize("row", TABLE, ids=lambda row: str(row.number))
def test_a_sentence_stands_where_no_test_does(row):
    if not row.tests or row.gpu:
        assert row.remark
    assert not row.remark or ((row.remark[0].isupper() or row.remark.startswith("kit.")) and row.remark.endswith("."))


def test_a_test_that_is_not_there_is_missed():
    assert "test_every_fault_stands_once_in_its_order" in defined("faults/test_table.py")
    assert "test_nothing_of_this_name" not in defined("faults/test_table.py")
    assert defined("faults/test_no_such_file.py") == frozenset()
