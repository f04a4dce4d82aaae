"""Trials of these tests: their configs, and proof that none of them survives."""

from trial_fixtures import config, no_predictions_left, no_survivors, own

__all__ = ["config", "no_predictions_left", "no_survivors", "own"]
