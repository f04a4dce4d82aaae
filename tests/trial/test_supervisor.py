import os
import signal
import subprocess
import sys

import psutil
import pytest
from trial_fixtures import steps_taken
from waiting import PATIENCE_SECONDS, wait_until

from kit.errors import TrialError
from kit.memory.alongside import fit
from kit.testing import TinyModule
from kit.trial import client
from kit.trial.launch import differing_variables
from kit.trial.trial import Trial

SECONDS = PATIENCE_SECONDS
LONG = 1_000_000
MODULE, DATA = "kit.testing:TinyModule", "kit.testing:TinyData"


def supervisor():
    return psutil.Process(client.supervisor("warm").identity["pid"])


def test_a_warm_start_forks_its_ranks_and_says_so(config):
    trial = fit(config(), MODULE, DATA).wait(SECONDS)
    assert (trial.event("trial_started", "start"), trial.event("trial_started", "reason")) == ("warm", "")
    assert trial.event("trial_started", "processes")[0]["pid"] == supervisor().pid


AT_ONCE = """
import sys
from kit.config import Config
from kit.memory.alongside import fit
from kit.testing import TinyModule

class Telling(TinyModule):
    def on_train_start(self):
        print("loaded:", "matplotlib.pyplot" in sys.modules)

config = Config().replace({"trial.max_steps": 1, "trial.warmup_steps": 0, "trial.predict_memory": False})
print(fit(config, Telling, "kit.testing:TinyData").wait().paths.log(0).read_text())
"""


@pytest.mark.slow
def test_a_training_that_is_the_first_of_its_kernel_holds_what_later_ones_hold(tmp_path):
    done = subprocess.run([sys.executable, "-c", AT_ONCE], capture_output=True, text=True, cwd=tmp_path)
    assert "loaded: True" in done.stdout, done.stderr


@pytest.mark.slow
def test_a_cold_start_gives_the_same_result(config):
    warm = fit(config(2), MODULE, DATA).wait(SECONDS)
    cold = fit(config(2, start="cold"), MODULE, DATA).wait(SECONDS)
    assert (cold.event("trial_started", "start"), cold.state) == ("cold", "COMPLETE")
    assert [e["loss"] for e in cold.steps if e["rank"] == 1] == [e["loss"] for e in warm.steps if e["rank"] == 1]


@pytest.mark.slow
def test_a_variable_that_is_read_when_libraries_load_makes_the_start_cold(config, monkeypatch):
    assert supervisor().is_running()  # it was started without the variable
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    trial = fit(config(), lambda: Telling("OMP_NUM_THREADS"), DATA).wait(SECONDS)
    assert trial.event("trial_started", "start") == "cold"
    assert trial.event("trial_started", "reason").startswith("OMP_NUM_THREADS changed")
    assert "OMP_NUM_THREADS=3" in trial.paths.log(0).read_text()


class Telling(TinyModule):
    """Prints one variable of its environment."""

    def __init__(self, name):
        super().__init__()
        self.name = name

    def on_train_start(self):
        print(f"{self.name}={os.environ.get(self.name)}")


@pytest.mark.parametrize(
    "name",
    [
        "OMP_NUM_THREADS",
        "OMP_WAIT_POLICY",
        "GOMP_SPINCOUNT",
        "MKL_NUM_THREADS",
        "PYTORCH_CUDA_ALLOC_CONF",
        "PYTORCH_ALLOC_CONF",
    ],
)
def test_which_variables_matter_when_they_differ(name):
    assert differing_variables({}, {name: "1"}) == [name]
    assert differing_variables({name: "1"}, {name: "1", "HOME": "/elsewhere"}) == []


def test_a_variable_set_after_the_supervisor_started_reaches_the_ranks(config, monkeypatch):
    fit(config(), MODULE, DATA).wait(SECONDS)
    monkeypatch.setenv("SET_LATER", "yes")
    trial = fit(config(), lambda: Telling("SET_LATER"), DATA).wait(SECONDS)
    assert "SET_LATER=yes" in trial.paths.log(0).read_text()


@pytest.mark.slow
def test_an_allocation_of_slurm_around_the_notebook_does_not_confuse_the_ranks(config, monkeypatch):
    variables = {
        "SLURM_JOB_ID": "7",
        "SLURM_NTASKS": "4",
        "SLURM_PROCID": "3",
        "SLURM_LOCALID": "3",
        "SLURM_NODEID": "1",
    }
    variables |= {
        "SLURM_STEP_ID": "0",
        "SLURM_JOB_NAME": "train",
        "SLURM_NNODES": "2",
        "SLURM_NODELIST": "nowhere[1-2]",
    }
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    trial = fit(config(2), MODULE, DATA).wait(SECONDS)
    assert trial.event("fit_started", "world_size") == 2


def test_a_rendezvous_left_in_the_environment_does_not_confuse_the_ranks(config, monkeypatch):
    for name, value in {"MASTER_ADDR": "192.0.2.1", "MASTER_PORT": "1", "RANK": "5", "WORLD_SIZE": "9"}.items():
        monkeypatch.setenv(name, value)
    assert fit(config(2), MODULE, DATA).wait(SECONDS).state == "COMPLETE"


@pytest.mark.slow
def test_twenty_trials_leave_descriptors_threads_and_children_as_they_were(config):
    fit(config(2), MODULE, DATA).wait(SECONDS)
    mine, its = psutil.Process(), supervisor()

    def count():
        return [mine.num_fds(), mine.num_threads(), its.num_fds(), its.num_threads(), len(its.children(recursive=True))]

    before = count()
    for ranks in [1, 2] * 10:
        fit(config(ranks), MODULE, DATA).wait(SECONDS)
    wait_until(lambda: count() == before)


def test_two_trials_run_at_the_same_time_and_end_apart(config):
    slow = fit(config(2, max_steps=LONG), lambda: TinyModule(seconds=0.01), DATA)
    fast = fit(config(2), MODULE, DATA).wait(SECONDS)
    assert fast.state == "COMPLETE"
    wait_until(steps_taken(slow, 1))
    slow.stop()
    assert slow.wait(SECONDS).state == "STOPPED"


@pytest.mark.slow
def test_a_supervisor_that_dies_before_it_starts_a_trial_is_replaced_by_a_cold_one(config):
    client.supervisor("warm").close()
    newcomer = client.supervisor("warm")
    os.kill(newcomer.identity["pid"], signal.SIGSTOP)  # it will not read the command that follows
    trial = fit(config(), MODULE, DATA)
    os.kill(newcomer.identity["pid"], signal.SIGKILL)
    trial.wait(SECONDS)
    assert trial.event("trial_started", "start") == "cold"
    assert "warm process" in trial.event("trial_started", "reason")


def test_a_supervisor_ends_when_its_parent_is_not_who_it_was_told(tmp_path):
    command = [sys.executable, "-P", "-m", "kit.trial.supervisor", "cold", "1"]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True)
    assert process.wait(SECONDS) == 0
    process.communicate()


@pytest.mark.slow
def test_ranks_that_cannot_be_started_are_a_failure_and_not_the_end_of_the_supervisor(config, monkeypatch):
    fit(config(), MODULE, DATA).wait(SECONDS)
    before = supervisor().pid
    monkeypatch.setenv("OMP_NUM_THREADS", "3")  # asks for fresh interpreters,
    monkeypatch.setenv("HUGE", "x" * 200_000)  # which cannot be given an environment as large as this
    trial = fit(config(), MODULE, DATA)
    with pytest.raises(TrialError, match="ranks .*not be started: Argument list"):
        trial.wait(SECONDS)
    monkeypatch.undo()
    assert fit(config(), MODULE, DATA).wait(SECONDS).state == "COMPLETE"
    assert supervisor().pid == before


def test_a_trial_seen_from_another_process_is_running(config):
    trial = fit(config(max_steps=LONG), lambda: TinyModule(seconds=0.01), DATA)
    wait_until(steps_taken(trial, 1))
    code = f"from kit.trial.trial import Trial; print(Trial.open({str(trial.run_directory)!r}).state)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout.strip() == "RUNNING"
    trial.kill()
    trial.wait(SECONDS)


def test_a_start_that_is_asked_to_stop_at_once_ends_stopped(config):
    trial = fit(config(max_steps=LONG), lambda: TinyModule(seconds=0.01), DATA)
    trial.stop()
    assert trial.wait(SECONDS).state == "STOPPED"


def test_failed_trials_keep_their_supervisor(config):
    before = client.supervisor("warm").identity
    trial = fit(config(), lambda: 1 / 0, DATA)
    with pytest.raises(TrialError, match=r"^ZeroDivisionError: division by zero \(test_supervisor.py"):
        trial.wait(SECONDS)
    assert client.supervisor("warm").identity == before
    assert Trial.open(trial.run_directory).state == "FAILED"
