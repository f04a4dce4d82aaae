"""Trials of kit's own data leave nothing behind, however they end; patches and rows are read by loader processes."""

import json
import os
import signal
import subprocess
import sys
import tempfile
import textwrap
from pathlib import Path

import numpy as np
import psutil
import pyarrow
import pyarrow.parquet
import pytest
from properties import at_night
from test_trial_faults import assert_all_gone, keep_alive
from trial_fixtures import steps_taken
from waiting import PATIENCE_SECONDS, wait_until

from kit.errors import TrialError
from kit.machine.processes import identify
from kit.memory.alongside import fit
from kit.trial import client, scratch
from kit.trial.trial import ENDED, Trial

LONG = 1_000_000
SHARED = Path("/dev/shm")
MODULE = f"{Path(__file__).with_name('any_batch.py')}:AnyBatch"
DATA = {"patches": None, "rows": "kit.data:RowData", "events": "kit.data:EventData"}


@pytest.fixture(params=DATA)
def asked(request, own, tmp_path):
    """Makes `fit`'s arguments for one kind of data, read by two loader processes where it can be."""
    arguments = {}
    if request.param == "rows":
        np.save(tmp_path / "rows.npy", np.random.default_rng(0).random((64, 6), "float32"))
        arguments = {"source": str(tmp_path / "rows.npy")}
    elif request.param == "events":
        times = pyarrow.array([index * 3_600_000_000 for index in range(256)], "timestamp[us]")
        events = {"customer": [index % 32 for index in range(256)], "time": times, "price": [1.5] * 256}
        pyarrow.parquet.write_table(pyarrow.table(events), tmp_path / "events.parquet")
        connection = {"kind": "parquet", "path": str(tmp_path / "events.parquet"), "threads": 1}
        named = {"type": "event", "name": "events", "main_entity_column": "customer", "date_column": "time"}
        arguments = {"source": {**named, "connection": connection}}

    def make(ranks=1, *, hang_at=0, **trial):
        config = own(ranks).replace({
            "loader.num_workers": 2, "training.max_epochs": LONG, "model.target": MODULE,
            "model.arguments": {"hang_at": hang_at}, "data.arguments": arguments,
            **{f"trial.{name}": value for name, value in trial.items()},
        })  # fmt: skip
        return config, MODULE, DATA[request.param]

    return make


@pytest.fixture
def temporary(tmp_path, monkeypatch):  # pytest must have a folder of its own before this one is made
    """The folder for temporary files, of this test alone and with a path short enough for sockets; empty at the end."""
    folder = Path(tempfile.mkdtemp(prefix="kit-test-"))
    monkeypatch.setenv("TMPDIR", str(folder))
    monkeypatch.setattr(tempfile, "tempdir", None)
    yield folder
    wait_until(lambda: list(folder.iterdir()) == [])
    folder.rmdir()


@pytest.fixture
def run(asked):
    """Starts a trial; one whose test fails is ended with it."""
    started = []

    def start(ranks=1, **trial):
        started.append(fit(*asked(ranks, **trial)))
        return started[-1]

    yield start
    for trial in started:
        trial.kill()
        wait_until(lambda trial=trial: trial.poll() in ENDED)


def members(trial):
    """Every process of a trial, two loader processes on each rank among them where its data has any."""
    loading = 2 * (trial.environment["given"]["data_identity"] != "kit.data:EventData")

    def look():
        trial.poll()
        assert not trial.ended, trial
        started = [event["pid"] for event in trial.events if event["kind"] == "rank_started"]
        found = [child for pid in started for child in psutil.Process(pid).children(recursive=True)]
        loaders = [process for process in found if shared_memory([process])]
        enough = len(loaders) >= loading * trial.environment["world_size"] and steps_taken(trial, 2)()
        return [*map(psutil.Process, started), *found] if enough else None

    return wait_until(look)


def shared_memory(processes):
    """The files in shared memory that processes have mapped."""
    found = set()
    for process in processes:
        maps = Path(f"/proc/{process.pid}/maps")
        lines = maps.read_text().splitlines() if maps.exists() else ()
        found |= {line.split(None, 5)[5] for line in lines if str(SHARED) in line}
    return {Path(name) for name in found if not name.endswith("(deleted)")}


def assert_nothing_is_left(processes, held):
    assert held or len(processes) < 3  # ranks alone
    assert_all_gone(processes)
    wait_until(lambda: not any(file.exists() for file in held))


def loader_of(processes):
    """One of the processes that read batches, if any: it maps the queues, and is the child of a server."""
    pids = {process.pid for process in processes}
    return next((each for each in processes if shared_memory([each]) and each.ppid() in pids), None)


def test_a_complete_trial(temporary, run):
    trial = run(max_steps=400)
    processes = members(trial)
    held = shared_memory(processes)
    assert len(list(temporary.iterdir())) == 1
    assert trial.wait(PATIENCE_SECONDS).state == "COMPLETE"
    assert list(temporary.iterdir()) == []  # before anybody hears of the end
    assert_nothing_is_left(processes, held)


ENDS = ("stop", "rank", "loader", "supervisor")
PAIRS = [(kind, end) for end in ENDS for kind in DATA]
TRIED = [("rows", "stop"), ("patches", "rank"), ("events", "rank"), ("rows", "loader"), ("patches", "supervisor")]


@pytest.mark.parametrize(("asked", "end"), at_night(PAIRS, TRIED), indirect=["asked"])
def test_a_trial_that_is_ended(temporary, run, end):
    trial = run(max_steps=LONG)
    processes = members(trial)
    held = shared_memory(processes)
    if end == "loader" and not held:
        pytest.skip("this data is read by threads of the rank")
    if end == "stop":
        trial.stop()
    else:
        supervisor = psutil.Process(client.supervisor("warm").identity["pid"])
        {"rank": processes[0], "loader": loader_of(processes), "supervisor": supervisor}[end].kill()
    wait_until(lambda: trial.poll() in ("STOPPED", "FAILED", "LOST"))
    assert trial.state == {"stop": "STOPPED", "supervisor": "LOST"}.get(end, "FAILED")
    assert_nothing_is_left(processes, held)


@pytest.mark.parametrize("asked", at_night(DATA, ["patches"]), indirect=True)
def test_a_trial_of_two_ranks_that_stalls(temporary, run):
    trial = run(2, max_steps=LONG, stall_seconds=3, hang_at=3)
    found = []
    keep_alive(trial, lambda: steps_taken(trial, 2)() and (found or found.append(members(trial)) or found))
    held = shared_memory(found[0])
    with pytest.raises(TrialError):
        trial.wait(PATIENCE_SECONDS)
    assert trial.cause == "stalled"
    assert_nothing_is_left(found[0], held)


KILLED = [(kind, also) for kind in DATA for also in (False, True)]


@pytest.mark.parametrize(
    ("asked", "also_the_supervisor"), at_night(KILLED, [("patches", True), ("rows", True), ("events", False)]),
    indirect=["asked"],
)  # fmt: skip
def test_a_trial_whose_kernel_is_killed(asked, temporary, also_the_supervisor):
    config, module, data = asked(max_steps=LONG)
    code = textwrap.dedent(f"""
        import time
        from kit.config import Config
        from kit.memory.alongside import fit
        trial = fit(Config.from_yaml({config.to_yaml(comments=False)!r}), {module!r}, {data!r})
        print(trial.run_directory, flush=True)
        time.sleep(3600)
    """)
    kernel = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    trial = Trial.open(kernel.stdout.readline().strip())
    processes = members(trial)
    held = shared_memory(processes)
    supervisor = psutil.Process(trial.environment["supervisor"]["pid"])
    os.kill(supervisor.pid, signal.SIGSTOP)  # it must not see the kernel go before it goes itself
    kernel.kill()
    os.kill(supervisor.pid, signal.SIGKILL if also_the_supervisor else signal.SIGCONT)
    kernel.communicate()
    assert_all_gone([supervisor, *processes])
    if also_the_supervisor:
        scratch.sweep()  # as the next kernel does before its first trial
    assert_nothing_is_left(processes, held)


# -- what is swept


def test_only_folders_of_this_user_whose_owner_is_gone_are_swept(temporary):
    mine = scratch.make()
    ended = subprocess.Popen([sys.executable, "-c", ""])
    wait_until(lambda: identify(ended.pid)["started"] is None)
    system, pid, *_ = mine.name.removeprefix("kit-trial-").split("-")
    lost = temporary / f"kit-trial-{system}-{ended.pid:x}-1-abcdefgh"
    others = [
        temporary / f"kit-trial-000000-{ended.pid:x}-1-abcdefgh",  # of another machine
        temporary / "kit-prediction-abcdefgh",
        temporary / "kit-trial-of-my-own",
    ]
    reused = temporary / f"kit-trial-{system}-{pid}-1-abcdefgh"  # the process has been given the id of another
    for folder in (lost, reused, *others):
        folder.mkdir()
    elsewhere = temporary / "precious"
    elsewhere.mkdir()
    link = temporary / f"kit-trial-{system}-{ended.pid:x}-1-aaaaaaaa"
    link.symlink_to(elsewhere)
    scratch.sweep()
    ended.wait()
    assert sorted(temporary.iterdir()) == sorted([mine, link, elsewhere, *others])
    link.unlink()
    for folder in (mine, elsewhere, *others):
        folder.rmdir()


def test_a_prediction_beside_a_trial_is_swept_when_its_supervisor_is_gone(temporary):
    folders = {removed: scratch.make("kit-prediction-") for removed in ("at end", "when lost")}
    for removed, folder in folders.items():
        gone = {"pid": os.getpid(), "started": 1.0}
        (folder / "environment.json").write_text(json.dumps({"removed": removed, "supervisor": gone}))
    scratch.sweep()
    assert list(temporary.iterdir()) == [folders["when lost"]]  # its kernel may still read the answer
    scratch.remove_folder(folders["when lost"])


@pytest.mark.parametrize("asked", at_night(DATA, ["rows"]), indirect=True)
def test_sockets_find_room_where_the_folder_for_temporary_files_has_a_long_path(temporary, run, monkeypatch):
    long = temporary / ("long" * 30)
    long.mkdir()
    monkeypatch.setenv("TMPDIR", str(long))
    monkeypatch.setattr(tempfile, "tempdir", None)
    trial = run(max_steps=400)
    processes = members(trial)
    held = shared_memory(processes)
    assert trial.wait(PATIENCE_SECONDS).state == "COMPLETE"
    assert_nothing_is_left(processes, held)
    long.rmdir()
