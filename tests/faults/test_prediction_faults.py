"""What is left of a prediction that goes wrong: an answer or an error in time, no process and no directory."""

import os
import signal
import subprocess
import sys
import textwrap
import threading
import time

import psutil
import pytest
from test_trial_faults import assert_all_gone
from trial_fixtures import ranks_alive, wait_until

from kit.errors import TrialError
from kit.run.memory import recordings
from kit.run.memory.job import UnansweredError
from kit.run.memory.prediction import predict_memory
from kit.testing import FaultyModule, TinyData, TinyModule

DATA = "kit.testing:TinyData"

pytestmark = pytest.mark.usefixtures("no_predictions_left")


@pytest.fixture(autouse=True)
def nothing_known():
    recordings.cache.clear()


def hanging():
    return TinyModule(seconds=3600)


def test_a_step_that_hangs_is_broken_off_and_the_rest_is_answered(config):
    began = time.monotonic()
    found = predict_memory(hanging, DATA, config(), timeout_seconds=5)
    assert time.monotonic() - began < 60
    assert (found.complete, found.verdict) == (False, "unknown")
    assert found.breakdown["parameters"] == 9 * 4
    assert any("still running after 4 s at testing.py, line" in reason for reason in found.reasons)


def test_an_answer_without_activations_is_not_kept(config):
    assert not predict_memory(hanging, DATA, config(), timeout_seconds=3).complete
    assert len(recordings.cache._kept) == 0


class Deaf(TinyModule):
    """Hangs and does not let itself be broken off."""

    def training_step(self, batch, batch_idx):
        while True:
            try:
                time.sleep(3600)
            except TimeoutError:
                continue


def test_a_process_that_cannot_be_broken_off_is_killed_and_its_place_is_told(config):
    with pytest.raises(UnansweredError, match=r"still going after 4 s, at test_prediction_faults.py, line \d+"):
        predict_memory(Deaf, DATA, config(), timeout_seconds=4)


def test_data_that_hangs_is_broken_off_with_its_line(config):
    class Hanging(TinyData):
        def train_dataloader(self):
            time.sleep(3600)

    found = predict_memory(TinyModule, Hanging, config(), timeout_seconds=3)
    assert any(
        "activations unknown: still running after 2.4 s at test_prediction_faults.py, line" in reason
        for reason in found.reasons
    )


@pytest.mark.parametrize("fault", ["kill", "exit0", "segfault"])
def test_a_process_that_dies_is_an_error_and_harms_no_later_one(config, fault):
    with pytest.raises(TrialError, match="rank 0"):
        predict_memory(lambda: FaultyModule({(0, 1): fault}), DATA, config(), timeout_seconds=30)
    assert predict_memory(TinyModule, DATA, config()).complete


# A file that an interrupt finds between its opening and the `with` that closes it is closed by the interpreter.
@pytest.mark.filterwarnings("ignore:Exception ignored in. <_io.FileIO:pytest.PytestUnraisableExceptionWarning")
def test_an_interrupt_ends_the_process_and_gets_through(config):
    threading.Timer(2.0, lambda: os.kill(os.getpid(), signal.SIGINT)).start()
    with pytest.raises(KeyboardInterrupt):
        predict_memory(hanging, DATA, config(), timeout_seconds=60)
    assert not ranks_alive()


def test_nothing_survives_a_kernel_that_is_killed(config, no_predictions_left):
    code = textwrap.dedent(f"""
        from kit.config import Config
        from kit.run.memory.prediction import predict_memory
        def module():
            from kit.testing import TinyModule
            return TinyModule(seconds=3600)
        predict_memory(module, {DATA!r}, Config.from_yaml({config().to_yaml(comments=False)!r}))
    """)
    kernel = subprocess.Popen([sys.executable, "-c", code])

    def family():
        found = psutil.Process(kernel.pid).children(recursive=True)
        return found if len(found) >= 2 else None

    processes = wait_until(family)
    assert [path.name.startswith("kit-prediction-") for path in no_predictions_left.iterdir()] == [True]
    kernel.kill()
    kernel.wait()
    assert_all_gone(processes)
