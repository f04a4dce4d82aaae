"""What holds for every test: the same environment everywhere, nothing left in it, and the long tests first."""

from __future__ import annotations

import gc
import os
import shutil
import signal
import sys
import tempfile
import threading
from pathlib import Path

import pytest
import quick
from properties import register_profiles

from kit.cloud.simulated import simulated_cloud
from kit.machine.endpoints import VARIABLE

# With tiles (AMX) oneDNN lays bfloat16 out in another way: what convolutions and LSTMs hold meanwhile was measured
# without, and the tests compare with that on every machine. It is read before the first operator, so it is set here.
os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_FP16")

# Four workers share two cores, and each trial has a thread for each: threads that spin for one another keep the others
# from their cores. The topics notebook four times at once takes 82 s without that, and over 280 s with it. OpenMP reads
# this when torch is imported; workers and all that they start have it from the controller.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

# What the machine around the tests may have set and a test must not see: a cluster, another GPU, a proxy, a database,
# a notebook that the tests are started from.
_FOREIGN = ("SLURM_", "PMI_", "OMPI_", "TORCHELASTIC_", "JPY_", "JUPYTER_", "IPYTHON", "AWS_", "GOOGLE_", "PG", "KIT_")
_FOREIGN_NAMES = (
    "RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "NODE_RANK", "MASTER_ADDR", "MASTER_PORT",
    "CUDA_VISIBLE_DEVICES", "OMP_NUM_THREADS", "STORAGE_EMULATOR_HOST", "PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF",
    "HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "NO_PROXY", "MPLBACKEND", "COLUMNS", "PYTHONDONTWRITEBYTECODE",
)  # fmt: skip
_KEPT = ("KIT_REQUIRE_BROWSER", "KIT_REQUIRE_POSTGRES")

# By which nbformat would check addresses: five seconds of a core to compile its grammar, in every worker.
sys.modules.setdefault("rfc3987_syntax", None)  # type: ignore[arg-type]
sys.dont_write_bytecode = False  # hundreds of interpreters are started, and what they import is compiled once
register_profiles()


def pytest_addoption(parser: pytest.Parser) -> None:
    quick.add_option(parser)


def pytest_configure(config: pytest.Config) -> None:
    # What a shell runs in the background ignores interrupts from birth, and so would all that the tests interrupt.
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    for name in list(os.environ):
        if (name.upper() in _FOREIGN_NAMES or name.startswith(_FOREIGN)) and name not in _KEPT:
            del os.environ[name]
    if "PYTEST_XDIST_WORKER" not in os.environ:  # the workers have it from here
        state = tempfile.mkdtemp(prefix="kit-tests-state-")
        config.add_cleanup(lambda: shutil.rmtree(state, ignore_errors=True))
        os.environ["XDG_STATE_HOME"] = state  # where the key lies that run directories are signed with
    if config.getoption("quick"):
        config.pluginmanager.register(quick.Quick(), "quick")
    gc.disable()  # until all files are imported: collections among a million new objects take half of that time


def pytest_collection_finish() -> None:
    gc.enable()


def pytest_sessionfinish() -> None:
    gc.unfreeze()  # else libraries that look for leaks at the end find what was frozen, see below


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers() -> int:
    """Two workers more than cores: much of what tests do is waiting for processes."""
    return (os.cpu_count() or 1) + 2


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """The long ones first; with `--dist loadfile` a file goes where its first test does."""
    if choosing := config.pluginmanager.get_plugin("quick"):
        items[:], left_out = choosing.choose(items)
        config.hook.pytest_deselected(items=left_out)
    else:
        items.sort(key=_long_first)


_LONG_FOLDERS = (
    "browser", "notebooks", "faults", "studies", "trial", "committed", "records", "charts", "memory", "train",
)  # fmt: skip
"""In the order in which they begin: what takes longest must not begin last."""


def _long_first(item: pytest.Item) -> int:
    if item.get_closest_marker("slow") is not None:
        return 0
    folder = item.path.relative_to(Path(__file__).parent).parts[0]
    return 1 + (_LONG_FOLDERS.index(folder) if folder in _LONG_FOLDERS else len(_LONG_FOLDERS))


@pytest.fixture(scope="module", autouse=True)
def what_is_old_is_left_alone_by_the_garbage_collector():
    """A million objects of imports and of the tests themselves, which every full collection would look through."""
    gc.collect(1)
    gc.freeze()


@pytest.fixture(autouse=True)
def environment_restored():
    """What a test, or a library that it calls, sets in the environment is gone with it.

    Lightning sets OMP_NUM_THREADS when it makes a strategy for several ranks; trials that came after would start cold.
    torch prints uncaught errors with one more "[rank0]: " for each process group that ever began.
    """
    before, print_uncaught = dict(os.environ), sys.excepthook
    yield
    sys.excepthook = print_uncaught
    for name in os.environ.keys() - before.keys():
        del os.environ[name]
    os.environ.update({name: value for name, value in before.items() if os.environ.get(name) != value})


@pytest.fixture
def new_threads():
    """Finds by the start of their names threads begun since and alive; loaders of other tests have their own."""
    before = {*threading.enumerate()}
    return lambda *names: [one for one in {*threading.enumerate()} - before if one.name.startswith(names)]


@pytest.fixture
def project(tmp_path, monkeypatch):
    """An empty project folder, which is the working folder."""
    (tmp_path / "pyproject.toml").touch()
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture(scope="module")
def running_cloud():
    """A simulated cloud for a whole file of tests; each asks for it as `cloud`."""
    with simulated_cloud("no limits") as running:
        yield running


@pytest.fixture
def cloud(running_cloud, monkeypatch):
    """A simulated cloud without limits, faults or counts; what the test names a bucket of it is forgotten after it.

    Objects of earlier tests of the same file stay in their own buckets.
    """
    monkeypatch.setenv(VARIABLE, "")
    return running_cloud.turn("no limits", faults={}).forget_scripts().reset_counts()
