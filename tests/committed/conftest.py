"""Trials of these tests: their configs, and proof that none of them survives."""

import sys

import pytest
from trial_fixtures import config, no_predictions_left, no_survivors, own
from warm_python import programs

__all__ = ["config", "no_predictions_left", "no_survivors", "own"]


@pytest.fixture
def warm_runs(monkeypatch):
    """`Committed.run` begins at once, with the libraries loaded."""
    monkeypatch.setattr(sys, "executable", str(programs() / "python"))
