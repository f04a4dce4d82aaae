from trial_fixtures import config, no_survivors

__all__ = ["config", "no_survivors"]
