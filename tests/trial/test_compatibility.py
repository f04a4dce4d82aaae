import itertools
import re
from dataclasses import astuple
from pathlib import Path

import pytest
from compatibility import LEVERS, PRECISIONS, STRATEGIES, Cell, cells, markdown, run
from properties import nightly

PAGE = Path(__file__).parents[2] / "notebooks" / "compatibility.md"


def test_every_combination_is_a_cell_once():
    everything = list(cells())
    assert len(set(everything)) == len(everything) == len(LEVERS) * len(STRATEGIES) * len(PRECISIONS)


def said_on_the_page():
    """What the page says of each cell, a note in words."""
    lines = PAGE.read_text().splitlines()
    notes = dict(re.findall(r"^(\d+)\. (.+)$", "\n".join(lines), re.MULTILINE))
    rows = [[text.strip() for text in line.strip("|").split("|")] for line in lines if line.startswith("|")][2:]
    others = list(itertools.product(STRATEGIES, PRECISIONS))
    for lever, *signs in rows:
        for other, sign in zip(others, signs, strict=True):
            outcome, _, note = sign.partition(" (")
            yield Cell(lever, *other), (outcome, notes[note.removesuffix(")")] if note else "")


def every_pair(everything):
    """A third of the cells, in which each two of lever, strategy and precision that can run meet once."""
    place = [{name: number for number, name in enumerate(names)} for names in (LEVERS, STRATEGIES, PRECISIONS)]
    for cell in everything:
        lever, strategy, precision = (of[name] for of, name in zip(place, astuple(cell), strict=True))
        if (lever + precision) % len(STRATEGIES) == strategy:
            yield cell


@pytest.mark.slow
def test_the_page_says_what_happens_when_a_cell_of_every_pair_is_run(tmp_path):
    pytest.importorskip("bitsandbytes", reason="the page holds what the 8-bit optimizer does (kit[eight-bit])")
    said = dict(said_on_the_page())
    assert list(said) == list(cells())
    for result in (run(cell, tmp_path) for cell in every_pair(cells())):
        assert (result.outcome.removesuffix(" with a note"), result.note) == said[result.cell], result.cell


@pytest.mark.skipif(not nightly(), reason="pairs are run in CI, every cell at night")
def test_the_page_is_the_one_written_when_every_cell_is_run(tmp_path):
    pytest.importorskip("bitsandbytes", reason="the page holds what the 8-bit optimizer does (kit[eight-bit])")
    assert markdown([run(cell, tmp_path) for cell in cells()]) == PAGE.read_text()


def test_a_trial_that_fails_for_another_reason_is_no_refusal(tmp_path, monkeypatch):
    from kit.errors import TrialError

    monkeypatch.setitem(
        LEVERS, "no lever", {"model.arguments": {"vocabulary": 2, "context": 16, "width": 24, "heads": 2, "layers": 1}}
    )
    with pytest.raises(TrialError):
        run(Cell("no lever", "none", "32-true"), tmp_path)
