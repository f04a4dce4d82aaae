"""What happens to a trial when something goes wrong in, around or above its ranks."""

import asyncio
import json
import os
import re
import signal
import subprocess
import sys
import textwrap
import threading
import time

import psutil
import pytest
from faulty import FaultyModule
from gated import Gated
from trial_fixtures import is_alive, last_steps, steps_taken
from waiting import PATIENCE_SECONDS, wait_until

from kit.errors import TrialError, TrialStopped
from kit.events import EventWriter
from kit.memory.alongside import fit
from kit.testing import TinyData, TinyModule
from kit.trial import client
from kit.trial.supervisor import LOG_BYTES
from kit.trial.trial import Trial

LONG = 1_000_000


def start(config, faults=None, seconds=0.0, **data):
    return fit(config, lambda: FaultyModule(faults or {}, seconds), lambda: TinyData(**data))


@pytest.mark.parametrize(
    ("ranks", "where", "fault", "cause", "message"),
    [
        (1, (0, 4), "raise", "error", r"^ValueError: a scripted fault \(faulty.py, line \d+, in _raise\)"),
        (2, (1, 4), "raise", "error", r"^ValueError: a scripted fault"),
        (1, (0, 4), "kill", "killed", r"^rank 0 .*SIGKILL from outside .*step 3"),
        (2, (1, 4), "kill", "killed", r"^rank 1 .*SIGKILL from outside .*step 3"),
        (
            2,
            (1, 4),
            "segfault",
            "killed",
            r"^rank 1 .*SIGSEGV \(segmentation fault\) .*step 3, at faulty.py",
        ),
        (1, (0, 4), "exit0", "error", r"^rank 0 .*exit code 0 .*step 3"),
        (2, (1, 4), "exit0", "error", r"^rank 1 .*exit code 0 .*step 3"),
        (1, (0, 4), "nan", "diverged", r"loss is nan .*step 4; .*finite.* \d"),
        (2, (1, 4), "oom", "host_oom", r"^RuntimeError: .*can't allocate memory"),
        (2, (1, 4), "device_oom", "device_oom", r"^OutOfMemoryError: CUDA"),
        (1, (0, 4), "disk_full", "error", r"write .*disk full"),
    ],
)
def test_a_fault_fails_the_trial_with_its_cause_and_keeps_the_steps_before(config, ranks, where, fault, cause, message):
    trial = start(config(ranks), {where: fault})
    with pytest.raises(TrialError, match=message):
        trial.wait(PATIENCE_SECONDS)
    assert (trial.state, trial.cause) == ("FAILED", cause)
    assert [e["step"] for e in trial.steps if e["rank"] == where[0]][:3] == [1, 2, 3]
    assert trial.event("trial_ended", "failed_rank") == where[0]


def test_the_siblings_of_a_failed_rank_do_not_wait_for_it(config):
    trial = start(config(2, stall_seconds=600), {(1, 3): "raise"})
    wait_until(lambda: trial.poll() == "FAILED")
    assert [e["rank"] for e in trial.events if e["kind"] == "failed"][:1] == [1]
    assert (trial.event("trial_ended", "failed_rank"), trial.cause) == (1, "error")


def test_the_error_shown_holds_the_users_traceback_and_the_log(config):
    trial = start(config(), {(0, 2): "raise"})
    with pytest.raises(TrialError) as caught:
        trial.wait(PATIENCE_SECONDS)
    shown = caught.value._render_traceback_()
    assert shown[0].startswith("TrialError: ValueError: a scripted fault (faulty.py")
    assert shown[0].endswith("[error]")
    assert any("raise ValueError" in line for line in shown)
    assert shown[-1] == f"Log: {trial.paths.log(0)}"


# -- hanging


def keep_alive(trial, until):
    """Write in the name of rank 0 until then: what comes before a hang may take as long as it likes."""
    writer = EventWriter(trial.paths.events(0), 0)

    def look():
        writer.write("span", name="a test looks on", started=0.0, ended=0.0)
        return until()

    wait_until(look)
    writer.close()


@pytest.mark.parametrize(
    ("ranks", "where", "fault", "place"),
    [(1, (0, 3), "hang", "_hang"), (2, (1, 3), "hang", "_hang"), (2, (0, 3), "collective", "_collective")],
)
def test_a_rank_that_hangs_is_killed_and_its_stack_is_told(config, ranks, where, fault, place):
    trial = start(config(ranks, stall_seconds=3), {where: fault})
    keep_alive(trial, steps_taken(trial, 2))
    with pytest.raises(TrialError, match=rf"progress for 3 s .*step 2: rank {where[0]} .*faulty.py"):
        trial.wait(PATIENCE_SECONDS)
    assert trial.cause == "stalled"
    assert f"in {place}" in trial.paths.log(where[0]).read_text()


def test_data_that_hangs_is_told_by_its_line(config):
    trial = fit(config(stall_seconds=3), TinyModule, HangingData)
    keep_alive(trial, steps_taken(trial, 2))
    with pytest.raises(TrialError, match=r"step 2: rank 0 .*test_trial_faults.py, line \d+, in train_data"):
        trial.wait(PATIENCE_SECONDS)
    assert trial.cause == "stalled"


class HangingData(TinyData):
    def train_dataloader(self):
        for index, batch in enumerate(super().train_dataloader()):
            if index == 3:  # one is read ahead
                time.sleep(3600)
            yield batch


def test_a_trial_that_takes_too_long_is_ended(config):
    trial = start(config(max_steps=LONG, timeout_seconds=6), seconds=0.02)
    with pytest.raises(TrialError, match="still running after 6 s"):
        trial.wait(PATIENCE_SECONDS)
    assert trial.cause == "timeout"
    assert trial.steps


def test_a_hung_rank_is_killed_when_the_grace_after_stop_is_over(config, tmp_path):
    hanging = Gated(tmp_path / "never", step=4, rank=1)
    trial = fit(config(2, grace_seconds=1), hanging, TinyData)
    wait_until(hanging.reached.exists)
    trial.stop()
    trial.wait(PATIENCE_SECONDS)
    assert trial.state == "STOPPED"
    assert re.search(r"step 3; rank .*1 .*within 1 s .*killed", trial.message)


# -- stopping


@pytest.mark.parametrize("ranks", [1, 2])
def test_stop_ends_every_rank_after_the_same_step(config, ranks):
    trial = start(config(ranks, max_steps=LONG), seconds=0.01)
    wait_until(steps_taken(trial, 3))
    trial.stop()
    assert trial.wait(PATIENCE_SECONDS) is trial
    assert trial.state == "STOPPED"
    assert len(set(last_steps(trial))) == 1
    assert trial.message == f"stopped after step {last_steps(trial)[0]}"
    assert set(trial.event("trial_ended", "exit_codes").values()) == {0}
    assert [e["stopped"] for e in trial.events if e["kind"] == "fit_ended"] == [True] * ranks


def test_kill_ends_a_trial_at_once(config):
    trial = start(config(2, max_steps=LONG, grace_seconds=600), seconds=0.01)
    wait_until(steps_taken(trial, 2))
    trial.kill()
    trial.wait(PATIENCE_SECONDS)
    assert trial.state == "STOPPED"
    assert trial.message.startswith("killed after step")


def test_a_trial_can_be_stopped_through_its_run_directory(config):
    trial = start(config(max_steps=LONG), seconds=0.01)
    wait_until(steps_taken(trial, 1))
    Trial.open(trial.run_directory).stop()
    assert trial.wait(PATIENCE_SECONDS).state == "STOPPED"


def test_an_interrupt_while_waiting_stops_the_trial_and_keeps_its_steps(config, monkeypatch):
    trial = start(config(max_steps=LONG), seconds=0.01)
    wait_until(steps_taken(trial, 2))

    def looked():
        monkeypatch.undo()
        os.kill(os.getpid(), signal.SIGINT)
        return trial.poll()

    monkeypatch.setattr(trial, "poll", looked)  # the first look of `wait`
    with pytest.raises(TrialStopped) as caught:
        trial.wait(PATIENCE_SECONDS)
    assert trial.state == "STOPPED"
    assert len(caught.value._render_traceback_()) == 1
    assert str(last_steps(trial)[0]) in str(caught.value)


def test_cancelling_an_awaited_trial_stops_it(config):
    trial = start(config(max_steps=LONG), seconds=0.01)

    async def cancel():
        task = asyncio.ensure_future(trial)
        async with asyncio.timeout(PATIENCE_SECONDS):
            while not trial.steps:
                await asyncio.sleep(0.01)
        task.cancel()
        await task

    with pytest.raises(TrialStopped):
        asyncio.run(cancel())
    assert trial.state == "STOPPED"


# -- noise


def test_a_noisy_module_does_not_fill_the_disk(config):
    trial = start(config(max_steps=4), {(0, 2): "noisy"}).wait(PATIENCE_SECONDS)
    assert trial.state == "COMPLETE"
    log = trial.paths.log(0)
    assert log.stat().st_size < LOG_BYTES + 1000
    assert b"bytes of log were dropped here" in log.read_bytes()


def test_an_error_in_a_loader_process_is_a_failure_of_the_data(config):
    trial = fit(config(), TinyModule, BrokenData)
    with pytest.raises(
        TrialError, match=r"^IndexError: sample 5 is missing \(test_trial_faults.py, line \d+, in __getitem__\)"
    ):
        trial.wait(PATIENCE_SECONDS)
    assert trial.cause == "data"


class BrokenData(TinyData):
    def train_dataloader(self):
        from torch.utils.data import DataLoader

        return DataLoader(BrokenSamples(), batch_size=2, num_workers=1)


class BrokenSamples:
    def __len__(self):
        return 100

    def __getitem__(self, index):
        if index == 5:
            raise IndexError("sample 5 is missing")
        import torch

        return torch.zeros(8), torch.zeros(1)


# -- death from above


def kernel_code(config):
    """What a notebook would run: a long trial on two ranks, each with two loader processes."""
    return textwrap.dedent(f"""
        from kit.config import Config
        from kit.memory.alongside import fit
        def data():
            from kit.testing import TinyData
            return TinyData(num_workers=2, samples=100_000)
        def module():
            from kit.testing import TinyModule
            return TinyModule(seconds=0.02)
        trial = fit(Config.from_yaml({config.to_yaml(comments=False)!r}), module, data)
        print(trial.run_directory, flush=True)
    """)


def family(pid):
    """Every descendant of a kernel that runs `kernel_code`: supervisor, two ranks, four loader processes."""

    def look():
        found = psutil.Process(pid).children(recursive=True)
        return found if len(found) >= 7 else None

    return wait_until(look)


def assert_all_gone(processes):
    wait_until(lambda: not any(is_alive(process) for process in processes))


def test_nothing_survives_a_kernel_that_is_killed_and_the_trial_is_lost(config):
    code = kernel_code(config(2, max_steps=LONG)) + "import time; time.sleep(600)\n"
    kernel = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    trial = Trial.open(kernel.stdout.readline().strip())
    wait_until(steps_taken(trial, 1))
    processes = family(kernel.pid)
    assert Trial.open(trial.run_directory).state == "RUNNING"
    kernel.kill()
    assert_all_gone(processes)
    kernel.communicate()
    reopened = Trial.open(trial.run_directory)
    assert reopened.state == "LOST"
    assert "kernel" in reopened.error
    assert reopened.steps


def test_nothing_survives_a_supervisor_that_is_killed_and_the_next_trial_gets_a_new_one(config):
    trial = start(config(2, max_steps=LONG), seconds=0.01, num_workers=1, samples=100_000)
    wait_until(steps_taken(trial, 1))
    supervisor = psutil.Process(client.supervisor("warm").identity["pid"])
    processes = supervisor.children(recursive=True)
    assert len(processes) >= 4
    supervisor.kill()
    assert_all_gone(processes)
    with pytest.raises(TrialError, match="supervisor"):
        trial.wait(PATIENCE_SECONDS)
    assert Trial.open(trial.run_directory).state == "LOST"
    assert start(config()).wait(PATIENCE_SECONDS).state == "COMPLETE"


def test_loader_processes_die_with_a_rank_that_is_killed(config):
    trial = start(config(max_steps=LONG), seconds=0.01, num_workers=2, samples=100_000)
    wait_until(steps_taken(trial, 1))
    rank = psutil.Process(trial.event("rank_started", "pid"))
    loaders = rank.children(recursive=True)
    assert len(loaders) == 2
    rank.kill()
    assert_all_gone(loaders)
    assert wait_until(lambda: trial.poll() == "FAILED" and trial.cause) == "killed"


@pytest.fixture
def kernel():
    """A real Jupyter kernel, and `run(code)` that returns what it printed."""
    from jupyter_client.manager import KernelManager
    from jupyter_core.utils import ensure_event_loop

    manager = KernelManager(kernel_name="python3")
    manager.start_kernel()
    channel = manager.blocking_client()
    channel.start_channels()
    channel.wait_for_ready(timeout=PATIENCE_SECONDS)

    def run(code, until="idle"):
        channel.execute(code)
        printed = ""
        while True:
            message = channel.get_iopub_msg(timeout=PATIENCE_SECONDS)
            printed += message["content"].get("text", "") if message["msg_type"] == "stream" else ""
            printed += "\n".join(message["content"]["traceback"]) if message["msg_type"] == "error" else ""
            done = message["msg_type"] == "status" and message["content"]["execution_state"] == until
            if done and message["parent_header"].get("msg_type") == "execute_request":
                return printed

    yield manager, channel, run
    channel.stop_channels()
    if manager.is_alive():
        manager.shutdown_kernel(now=True)
    manager.cleanup_resources()
    ensure_event_loop().close()  # jupyter_client leaves its own open
    asyncio.set_event_loop(None)


def kernel_pid(manager):
    return manager.provisioner.pid


@pytest.mark.parametrize("how", ["restart", "kill", "shutdown"])
def test_nothing_survives_a_notebook_kernel(config, kernel, how):
    manager, _, run = kernel
    trial = Trial.open(run(kernel_code(config(2, max_steps=LONG))).strip())
    wait_until(steps_taken(trial, 1))
    processes = family(kernel_pid(manager))
    if how == "restart":
        manager.restart_kernel(now=True)
    elif how == "kill":
        os.kill(kernel_pid(manager), signal.SIGKILL)
    else:
        manager.shutdown_kernel()
    assert_all_gone(processes)
    assert Trial.open(trial.run_directory).state == "LOST"


@pytest.mark.parametrize("code", ["trial.wait()", "await trial"])
def test_interrupting_a_notebook_cell_stops_the_trial_it_waits_for_and_leaves_one_line(config, kernel, tmp_path, code):
    manager, _, run = kernel
    trial = Trial.open(run(kernel_code(config(2, max_steps=LONG))).strip())
    wait_until(steps_taken(trial, 1))
    waits = tmp_path / "waits"
    run(f"import pathlib\nlook = trial.poll\ntrial.poll = lambda: pathlib.Path({str(waits)!r}).touch() or look()")
    group = os.getpgid(kernel_pid(manager))

    def interrupt():
        wait_until(waits.exists)
        os.killpg(group, signal.SIGINT)  # what the Interrupt button sends

    thread = threading.Thread(target=interrupt)
    thread.start()
    printed = run(code)
    thread.join()
    assert printed.startswith("TrialStopped: interrupted after")
    assert "\n" not in printed.strip()
    assert wait_until(lambda: trial.poll() == "STOPPED")
    assert run("print(trial.state)").strip() == "STOPPED"


def test_an_error_in_a_class_of_a_cell_is_told_by_cell_and_line(config, kernel):
    _, _, run = kernel
    run("import torch; from kit.config import Config; from kit.testing import TinyModule, TinyData")
    run("from kit.memory.alongside import fit")
    run("class Mine(TinyModule):\n    def training_step(self, batch, _):\n        return batch[0] @ self.weights")
    printed = run(f"fit(Config.from_yaml({config().to_yaml(comments=False)!r}), Mine, TinyData).wait()")
    first, *rest = printed.splitlines()
    assert re.match(r"TrialError: AttributeError: 'Mine' .*'weights' \(cell 3, line 3, in ", first)
    assert any("return batch[0] @ self.weights" in line for line in rest)


def test_the_fault_table_is_json_in_every_event_file(config):
    trial = start(config(), {(0, 3): "nan"})
    wait_until(lambda: trial.poll() == "FAILED")
    for path in trial.paths.event_files():
        for line in path.read_text().splitlines():
            json.loads(line, parse_constant=lambda word: pytest.fail(f"{word} is not JSON"))
