"""Trials of these tests: their configs, and proof that none of them survives."""

from trial_fixtures import config, no_survivors

__all__ = ["config", "no_survivors"]
