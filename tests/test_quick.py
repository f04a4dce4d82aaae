"""What `pytest --quick` chooses: what changed first, then what is pure; never what is slow."""

from pathlib import Path
from types import SimpleNamespace

import pytest
import quick

TESTS = Path(__file__).parent


@pytest.mark.parametrize(
    ("name", "pure"),
    [("chunks/test_chunks", True), ("test_units", True), ("trial/test_trial", False), ("data/test_engine", False)],
)
def test_a_file_is_pure_when_it_needs_no_process_store_or_torch(name, pure):
    assert quick.is_pure(TESTS / f"{name}.py") is pure


def test_what_a_helper_imports_counts_as_imported():
    assert "torch" in quick.imports(TESTS / "memory" / "record" / "test_distributed_truth.py")


def item(path, *marks):
    return SimpleNamespace(path=TESTS / path, get_closest_marker=lambda name: name in marks or None)


def test_tests_of_what_changed_come_first_and_slow_ones_are_left(monkeypatch):
    changed = frozenset({Path("kit/data/stream/engine.py"), Path("kit/chunks/reasons.py")})
    monkeypatch.setattr(quick, "changed_files", lambda: changed)
    named, importing = item("data/test_engine.py"), item("data/test_reader.py")
    pure, heavy, slow = item("test_units.py"), item("trial/test_trial.py"), item("data/test_engine.py", "slow")
    chosen, left_out = quick.Quick().choose([heavy, pure, importing, slow, named])
    assert chosen == [named, importing, pure]
    assert left_out == [heavy, slow]
