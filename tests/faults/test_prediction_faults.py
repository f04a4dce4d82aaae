"""What is left of a prediction that goes wrong: an answer or an error in time, no process and no directory."""

import contextlib
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time

import psutil
import pytest
import torch
from faulty import FaultyModule
from test_trial_faults import assert_all_gone
from torch._subclasses.fake_tensor import FakeTensor
from trial_fixtures import ranks_alive
from waiting import PATIENCE_SECONDS, wait_until

from kit.errors import TrialError
from kit.memory import recordings
from kit.memory import recordings as job
from kit.memory.batch_model import memory_model
from kit.memory.predict_job import Patience
from kit.memory.prediction import predict_memory
from kit.memory.record.dry_run import DryRun, record
from kit.memory.recordings import UnansweredError
from kit.testing import TinyData, TinyModule

DATA = "kit.testing:TinyData"

pytestmark = pytest.mark.usefixtures("no_predictions_left")


@pytest.fixture(autouse=True)
def nothing_known():
    recordings.cache.clear()


def time_is_up(patience_seconds=48):
    """Bring forward the alarm that breaks off what takes too long; how long that is, is asked of the timer itself.

    It is called where something begins to hang: what comes before may take as long as it likes.
    """
    left, _ = signal.getitimer(signal.ITIMER_REAL)
    assert 0 < left <= patience_seconds
    signal.setitimer(signal.ITIMER_REAL, 0.1)


class Hanging(TinyModule):
    def training_step(self, batch, batch_idx):
        time_is_up()
        time.sleep(3600)


def test_a_step_that_hangs_is_broken_off_and_the_rest_is_answered(config):
    found = predict_memory(config(), Hanging, DATA, timeout_seconds=60)
    assert (found.complete, found.verdict) == (False, "unknown")
    assert found.breakdown["parameters"] == 9 * 4
    assert any("running after 48 s at test_prediction_faults.py, line" in reason for reason in found.reasons)


class GoingAway:
    """Time is up while it goes away, where an error is lost."""

    def __del__(self):
        signal.raise_signal(signal.SIGALRM)
        for _ in range(100):
            pass


class Losing(TinyModule):
    def training_step(self, batch, batch_idx):
        GoingAway()
        return super().training_step(batch, batch_idx)


class Catching(TinyModule):
    """Takes another way where the first ends with an error."""

    def training_step(self, batch, batch_idx):
        with contextlib.suppress(Exception):
            signal.raise_signal(signal.SIGALRM)
            batch[0] + 1
        return super().training_step(batch, batch_idx)


@pytest.mark.parametrize("made", [Losing, Catching])
def test_the_end_of_patience_is_neither_lost_nor_caught(config, made):
    patience = Patience(PATIENCE_SECONDS, {})
    with patience:
        found = record(made, lambda: {"datamodule": TinyData()}, DryRun(config(), "32-true"), check=patience.check)
    assert patience.message
    assert found.facts["unknown"].startswith(f"TimeoutError: {patience.message}")


def test_a_module_that_is_not_made_in_time_is_a_timeout_and_no_crash(config):
    def made():
        time_is_up()
        while True:
            torch.ones(3)

    with pytest.raises(UnansweredError, match=r"running after 48 s at test_prediction_faults.py, line \d+"):
        predict_memory(config(), made, DATA, timeout_seconds=60)


class HangingDry(TinyModule):
    """Hangs where numbers are guessed, as a loop over them may."""

    def training_step(self, batch, batch_idx):
        if isinstance(batch[0], FakeTensor):
            time_is_up()
            time.sleep(3600)
        return super().training_step(batch, batch_idx)


def test_a_step_that_hangs_without_numbers_is_run_for_real_in_the_time_that_is_left(config):
    model = memory_model(config(), HangingDry, DATA, timeout_seconds=60)
    found = [model.estimate(size) for size in (4, 40)]
    exact = [memory_model(config(), TinyModule, DATA, timeout_seconds=60).estimate(size) for size in (4, 40)]
    for real, dry in zip(found, exact, strict=True):
        assert real.device_allocated_bytes == pytest.approx(dry.device_allocated_bytes, abs=64)
    assert all("run for real" in one.source for one in found)


def test_an_answer_without_activations_is_not_kept(config, monkeypatch):
    asked = []
    started = recordings.PredictionJob
    monkeypatch.setattr(recordings, "PredictionJob", lambda *given: asked.append(given) or started(*given))
    for _ in range(2):
        assert not predict_memory(config(), Hanging, DATA, timeout_seconds=60).complete
    assert len(asked) == 2


class Deaf(TinyModule):
    """Hangs and does not let itself be broken off."""

    def training_step(self, batch, batch_idx):
        time_is_up(40)
        while True:
            try:
                time.sleep(3600)
            except TimeoutError:
                continue


def test_a_process_that_cannot_be_broken_off_is_killed_and_its_place_is_told(config, monkeypatch):
    monkeypatch.setattr(job, "_STACK_FRACTION", 0.1)
    with pytest.raises(UnansweredError, match=r"going after 50 s, at test_prediction_faults.py, line \d+"):
        predict_memory(config(), Deaf, DATA, timeout_seconds=50)


def test_data_that_hangs_is_broken_off_with_its_line(config):
    class HangingData(TinyData):
        def train_dataloader(self):
            time_is_up()
            time.sleep(3600)

    found = predict_memory(config(), TinyModule, HangingData, timeout_seconds=60)
    assert any(
        "activations unknown: " in reason and "running after 48 s at test_prediction_faults.py, line" in reason
        for reason in found.reasons
    )


@pytest.mark.parametrize("fault", ["kill", "exit0", "segfault"])
def test_a_process_that_dies_is_an_error_and_harms_no_later_one(config, fault):
    with pytest.raises(TrialError, match="rank 0"):
        predict_memory(config(), lambda: FaultyModule({(0, 1): fault}), DATA, timeout_seconds=PATIENCE_SECONDS)
    assert predict_memory(config(), TinyModule, DATA).complete


# A file that an interrupt finds between its opening and the `with` that closes it is closed by the interpreter.
@pytest.mark.filterwarnings("ignore:Exception ignored in. <_io.FileIO:pytest.PytestUnraisableExceptionWarning")
def test_an_interrupt_ends_the_process_and_gets_through(config, no_predictions_left):
    def reached():  # in its log: it can write no file that is seen here
        return any("reached" in log.read_text() for log in no_predictions_left.glob("*/log.0.txt"))

    class HangingAndSayingSo(TinyModule):
        def training_step(self, batch, batch_idx):
            print("reached", flush=True)
            time.sleep(3600)

    def interrupt():
        wait_until(reached)
        os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=interrupt)
    thread.start()
    with pytest.raises(KeyboardInterrupt):
        predict_memory(config(), HangingAndSayingSo, DATA, timeout_seconds=PATIENCE_SECONDS)
    thread.join()
    assert not ranks_alive()


def test_nothing_survives_a_kernel_that_is_killed(config, no_predictions_left):
    code = textwrap.dedent(f"""
        from kit.config import Config
        from kit.memory.prediction import predict_memory
        def module():
            from kit.testing import TinyModule
            return TinyModule(seconds=3600)
        predict_memory(Config.from_yaml({config().to_yaml(comments=False)!r}), module, {DATA!r})
    """)
    kernel = subprocess.Popen([sys.executable, "-c", code])

    def family():
        found = psutil.Process(kernel.pid).children(recursive=True)
        return found if len(found) >= 2 else None

    processes = wait_until(family)
    assert len(list(no_predictions_left.glob("kit-prediction-*"))) == 1
    kernel.kill()
    kernel.wait()
    assert_all_gone(processes)


def test_a_directory_that_is_removed_takes_nothing_along_that_a_link_in_it_leads_to(
    config, tmp_path, no_predictions_left
):
    kept, linked = tmp_path / "kept", []
    kept.mkdir()
    (kept / "thesis.txt").write_text("years of work")

    def link():
        directory = wait_until(lambda: next(no_predictions_left.glob("kit-prediction-*"), None))
        (directory / "link").symlink_to(kept)
        linked.append(directory)

    thread = threading.Thread(target=link)
    thread.start()
    assert predict_memory(config(), TinyModule, DATA).complete
    thread.join()
    assert not linked[0].exists()
    assert (kept / "thesis.txt").read_text() == "years of work"
