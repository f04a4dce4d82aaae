import json
import os
import re
import tempfile
import warnings

import psutil
import pytest
from trial_fixtures import is_alive, steps_taken
from waiting import PATIENCE_SECONDS, wait_until

from kit.errors import KitWarning, TrialError
from kit.memory.alongside import fit
from kit.testing import TinyData, TinyModule

SECONDS = PATIENCE_SECONDS
LONG = 1_000_000


class Telling(TinyModule):
    """Prints what a rank finds itself in."""

    def on_train_start(self):
        import multiprocessing

        import torch

        names = ("CUDA_VISIBLE_DEVICES", "TORCHELASTIC_RUN_ID", "RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR")
        found = {name: os.environ.get(name) for name in names}
        found |= {"folder": os.getcwd(), "threads": torch.get_num_threads(), "group": os.getpgid(0)}
        found |= {"start_method": multiprocessing.get_start_method(), "stdin": os.readlink("/proc/self/fd/0")}
        found |= {"temporary": tempfile.gettempdir()}
        found |= {"pid": os.getpid(), "descriptors": len(os.listdir("/proc/self/fd"))}
        print(json.dumps(found))


def told(trial, rank):
    return json.loads(next(line for line in trial.paths.log(rank).read_text().splitlines() if line.startswith("{")))


@pytest.mark.parametrize("start", ["warm", pytest.param("cold", marks=pytest.mark.slow)])
def test_a_rank_finds_the_kernels_folder_and_its_own_number(config, tmp_path, monkeypatch, start):
    monkeypatch.chdir(tmp_path)
    trial = fit(config(2, start=start), Telling, TinyData).wait(SECONDS)
    for rank in (0, 1):
        found = told(trial, rank)
        assert found["folder"] == str(tmp_path)
        assert (found["RANK"], found["LOCAL_RANK"], found["WORLD_SIZE"]) == (str(rank), str(rank), "2")
        assert (found["MASTER_ADDR"], found["TORCHELASTIC_RUN_ID"]) == ("127.0.0.1", "kit")
        assert found["CUDA_VISIBLE_DEVICES"] == ""
        assert (found["threads"], found["start_method"], found["stdin"]) == (1, "fork", "/dev/null")
        assert found["group"] == told(trial, 0)["pid"]


def test_a_rank_puts_temporary_files_where_its_kernel_does_by_then(config, tmp_path, monkeypatch):
    for name in ("first", "second"):
        folder = tmp_path / name
        folder.mkdir()
        monkeypatch.setenv("TMPDIR", str(folder))
        monkeypatch.setattr(tempfile, "tempdir", None)
        assert told(fit(config(), Telling, TinyData).wait(SECONDS), 0)["temporary"] == str(folder)
        folder.rmdir()


def test_a_rank_inherits_nothing_of_other_trials(config):
    alone = told(fit(config(), Telling, TinyData).wait(SECONDS), 0)["descriptors"]
    others = [fit(config(max_steps=LONG), lambda: TinyModule(seconds=0.01), TinyData) for _ in range(2)]
    for other in others:
        wait_until(steps_taken(other, 1))
    beside = told(fit(config(), Telling, TinyData).wait(SECONDS), 0)["descriptors"]
    for other in others:
        other.kill()
        other.wait(SECONDS)
    assert beside == alone


class Warning_(TinyModule):
    def on_train_start(self):
        warnings.warn("use another lever", KitWarning, stacklevel=1)
        warnings.warn("of no concern", UserWarning, stacklevel=1)


def test_what_kit_warns_of_in_a_rank_reaches_the_notebook(config):
    trial = fit(config(), Warning_, TinyData).wait(SECONDS)
    assert trial.warnings == ["use another lever"]
    assert "of no concern" in trial.paths.log(0).read_text()


class ForkingFromAThread(TinyModule):
    """Forks a process from a thread that ends at once."""

    def on_train_start(self):
        import multiprocessing
        import threading
        import time

        def fork():
            process = multiprocessing.Process(target=time.sleep, args=(600,))
            process.start()
            print("forked", process.pid, flush=True)

        thread = threading.Thread(target=fork)
        thread.start()
        thread.join()


def test_a_process_forked_by_a_short_lived_thread_lives_on_and_dies_with_its_rank(config):
    trial = fit(config(max_steps=LONG), lambda: ForkingFromAThread(seconds=0.01), TinyData)
    wait_until(steps_taken(trial, 20))
    process = psutil.Process(int(re.search(r"forked (\d+)", trial.paths.log(0).read_text())[1]))
    assert is_alive(process)
    os.kill(trial.event("rank_started", "pid"), 9)
    wait_until(lambda: not is_alive(process))
    with pytest.raises(TrialError, match="SIGKILL"):
        trial.wait(SECONDS)


class LeavingByExit(TinyModule):
    def on_train_batch_end(self, *_):
        raise SystemExit(0)


def test_leaving_by_sys_exit_is_a_failure(config):
    trial = fit(config(), LeavingByExit, TinyData)
    with pytest.raises(TrialError, match=r"^SystemExit: 0 \(test_worker.py"):
        trial.wait(SECONDS)


def test_user_code_that_reads_stdin_does_not_wait_for_ever(config):
    trial = fit(config(), Reading, TinyData)
    with pytest.raises(TrialError, match="^EOFError"):
        trial.wait(SECONDS)


class Reading(TinyModule):
    def on_train_start(self):
        input()
