from trial_fixtures import config, no_predictions_left, no_survivors, own

__all__ = ["config", "no_predictions_left", "no_survivors", "own"]
