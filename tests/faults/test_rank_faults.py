"""Ranks that are deaf, noisy in bytes or cannot be made, and loader processes that die or hang."""

import json
import os
import signal
import sys
import time

import psutil
import pytest
from gated import Gated
from test_trial_faults import BrokenSamples, assert_all_gone, keep_alive
from trial_fixtures import steps_taken
from waiting import PATIENCE_SECONDS, wait_until

import kit
from kit.errors import TrialError
from kit.memory.alongside import fit
from kit.testing import TinyData, TinyModule
from kit.widgets.trial_view import TrialView

LONG = 1_000_000
DATA = "kit.testing:TinyData"


def refuse_to_end():
    for number in signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP, signal.SIGCHLD, signal.SIGUSR1}:
        if number < signal.SIGRTMIN:
            signal.signal(number, signal.SIG_IGN)


class Deaf(Gated):
    """Ignores every signal that can be ignored, and hangs."""

    def on_train_start(self):
        refuse_to_end()


def test_a_rank_that_ignores_every_signal_is_killed_when_the_grace_is_over(config, tmp_path):
    deaf = Deaf(tmp_path / "never", step=4)
    trial = fit(config(grace_seconds=1), deaf, DATA)
    wait_until(deaf.reached.exists)
    rank = psutil.Process(wait_until(lambda: trial.poll() and trial.event("rank_started", "pid")))
    rank.terminate()
    rank.send_signal(signal.SIGINT)
    trial.stop()
    assert trial.wait(PATIENCE_SECONDS).state == "STOPPED"
    assert trial.event("trial_ended", "exit_codes") == {"0": -signal.SIGKILL}
    assert [event["step"] for event in trial.steps] == [1, 2, 3]


@pytest.mark.parametrize("value", [float("inf"), float("-inf"), float("nan")])
def test_a_loss_that_is_no_number_stands_in_the_row_and_every_file_of_it_is_json(config, value):
    asked = config()
    trial = fit(asked, lambda: Diverging(value), DATA)
    with pytest.raises(TrialError, match=rf"loss is {value} at step 4"):
        trial.wait(PATIENCE_SECONDS)
    found = kit.results(asked.trial.folder)
    assert (found[0]["state"], found[0]["cause"], found[0]["steps"]) == ("FAILED", "diverged", 4)
    for text in (found.to_json(), trial.paths.row.read_text()):
        json.loads(text, parse_constant=lambda word: pytest.fail(f"{word} is not JSON"))


class Diverging(TinyModule):
    def __init__(self, value):
        super().__init__()
        self.value = value

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        return loss * 0 + self.value if self.global_step == 3 else loss


class Garbling(TinyModule):
    """Writes every byte there is, a progress bar and lines without an end, from Python and past it; then fails."""

    def training_step(self, batch, batch_idx):
        os.write(2, bytes(range(256)) * 50)
        os.write(1, b"\xff\xfe" * 1000)
        for percent in range(100):
            sys.stderr.write(f"\r{percent}%|####")
        sys.stdout.write("x" * 100_000)
        if self.global_step == 3:
            raise ValueError("after the noise")
        return super().training_step(batch, batch_idx)


def test_bytes_that_are_no_text_and_progress_bars_in_a_log_hide_no_error(config):
    asked = config(stall_seconds=60)
    view = TrialView(asked)
    trial = fit(asked, Garbling, DATA)
    view.watch(trial)
    with pytest.raises(TrialError, match=r"^ValueError: after the noise \(test_rank_faults.py"):
        trial.wait(PATIENCE_SECONDS)
    assert bytes(range(256)) in trial.paths.log(0).read_bytes()
    wait_until(lambda: "after the noise" in view.error.value)
    assert kit.results(asked.trial.folder)[0]["cause"] == "error"


def test_a_crash_after_bytes_that_are_no_text_is_still_told_by_its_line(config):
    trial = fit(config(), GarblingThenCrashing, DATA)
    with pytest.raises(TrialError, match=r"SIGSEGV .*step 3, at test_rank_faults.py"):
        trial.wait(PATIENCE_SECONDS)


class GarblingThenCrashing(TinyModule):
    def training_step(self, batch, batch_idx):
        if self.global_step == 3:
            os.write(2, b"\xff\xfe\x00" * 1000 + b"\n")
            import ctypes

            ctypes.string_at(0)
        return super().training_step(batch, batch_idx)


def test_an_object_that_cannot_be_made_again_in_a_rank_fails_with_its_own_error(config):
    trial = fit(config(), TinyModule, OnlyHere())
    with pytest.raises(TrialError, match="^RuntimeError: made in the kernel only"):
        trial.wait(PATIENCE_SECONDS)
    assert trial.cause == "error"


def refuse_to_be_made():
    raise RuntimeError("made in the kernel only")


class OnlyHere:
    """Pickles, and does not come out of it."""

    def __getitem__(self, index): ...  # as a data set has it

    def __reduce__(self):
        return refuse_to_be_made, ()


def test_trials_beside_each_other_meet_at_ports_of_their_own(config):
    trials = [fit(config(2, max_steps=LONG), lambda: TinyModule(seconds=0.01), DATA) for _ in range(2)]
    for trial in trials:
        wait_until(steps_taken(trial, 1))
    assert len({trial.event("trial_started", "port") for trial in trials}) == 2
    for trial in trials:
        trial.stop()
        assert trial.wait(PATIENCE_SECONDS).state == "STOPPED"


# -- loader processes


def test_a_loader_process_that_is_killed_is_a_failure_of_the_data(config):
    trial = fit(
        config(max_steps=LONG), lambda: TinyModule(seconds=0.01), lambda: TinyData(num_workers=2, samples=100_000)
    )
    wait_until(steps_taken(trial, 1))
    loaders = psutil.Process(trial.event("rank_started", "pid")).children(recursive=True)
    assert len(loaders) == 2
    loaders[0].kill()
    with pytest.raises(TrialError, match=rf"DataLoader worker .*{loaders[0].pid}.*memory"):
        trial.wait(PATIENCE_SECONDS)
    assert trial.cause == "data"
    assert_all_gone(loaders)


def test_a_loader_process_that_hangs_is_told_by_its_line_and_killed_with_its_rank(config):
    trial = fit(config(stall_seconds=3), TinyModule, HangingInALoader)
    keep_alive(trial, steps_taken(trial, 2))
    loaders = psutil.Process(trial.event("rank_started", "pid")).children(recursive=True)
    with pytest.raises(TrialError, match="progress for 3 s"):
        trial.wait(PATIENCE_SECONDS)
    assert trial.cause == "stalled"
    assert "in __getitem__" in trial.paths.log(0).read_text()
    assert_all_gone(loaders)


class HangingInALoader(TinyData):
    def train_dataloader(self):
        from torch.utils.data import DataLoader

        return DataLoader(HangingSamples(), batch_size=2, num_workers=1)


class HangingSamples(BrokenSamples):
    """Hangs at a sample beyond those that are read ahead of the second step."""

    def __getitem__(self, index):
        import torch

        if index == 14:
            time.sleep(3600)
        return torch.zeros(8), torch.zeros(1)
