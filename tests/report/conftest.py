import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "run"))

from trial_fixtures import config, no_survivors, own

__all__ = ["config", "no_survivors", "own"]
