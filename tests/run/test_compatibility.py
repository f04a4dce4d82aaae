from pathlib import Path

import pytest

from kit.run.compatibility import LEVERS, PRECISIONS, STRATEGIES, Cell, cells, markdown, run

PAGE = Path(__file__).parents[2] / "notebooks" / "compatibility.md"


def test_every_combination_is_a_cell_once():
    everything = list(cells())
    assert len(set(everything)) == len(everything) == len(LEVERS) * len(STRATEGIES) * len(PRECISIONS)


@pytest.mark.timeout(400)
def test_the_page_says_what_happens_when_every_cell_is_run(tmp_path):
    pytest.importorskip("bitsandbytes", reason="the page holds what the 8-bit optimizer does (kit[eight-bit])")
    assert markdown([run(cell, tmp_path) for cell in cells()]) == PAGE.read_text()


def test_a_trial_that_fails_for_another_reason_is_no_refusal(tmp_path, monkeypatch):
    from kit.errors import TrialError

    monkeypatch.setitem(
        LEVERS, "no lever", {"model.arguments": {"vocabulary": 2, "context": 16, "width": 24, "heads": 2, "layers": 1}}
    )
    with pytest.raises(TrialError):
        run(Cell("no lever", "none", "32-true"), tmp_path)
