"""Waiting for what has to happen, by looking; how long it takes is nobody's business but the deadline's.

The deadline says "never", not "slow": it is a multiple of what the slowest wait takes where other processes burn every
core. A test that reaches it fails; one that does not has learnt nothing about speed.
"""

import shutil
import time

PATIENCE_SECONDS = 120.0


def wait_until(condition, seconds=PATIENCE_SECONDS, what="it"):
    """Look until `condition()` is true and return what it gave; fail when it never is, and say `what` was not."""
    deadline = time.monotonic() + seconds
    while not (result := condition()):
        assert time.monotonic() < deadline, f"{what} did not happen within {seconds:g} s"
        time.sleep(0.01)
    return result


def wait_for_prediction(trial):
    """Until the prediction beside a trial is written: made at the lowest priority, it is last on a busy machine."""
    wait_until(trial.paths.prediction.is_file, 8 * PATIENCE_SECONDS, "the prediction")


def remove(folder):
    """Remove a folder into which others still write, as a user's second try does."""
    wait_until(lambda: shutil.rmtree(folder, ignore_errors=True) or not folder.exists())
