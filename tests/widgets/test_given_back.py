"""Widgets are given back: by close(), and when a panel is forgotten."""

import asyncio
import contextlib
import gc
import itertools
import os
import queue
import signal
import statistics
import threading
import tracemalloc
import weakref

import pytest
import zmq
from ipywidgets.widgets import widget
from properties import at_night, nightly
from waiting import PATIENCE_SECONDS, wait_until

import kit
from kit.config import Config
from kit.errors import KitError
from kit.trial.client import close_supervisors

MAKERS = {"panel": kit.panel, "memory": kit.memory.panel, "chunks": kit.data.chunk_panel, "build": kit.data.build_panel}
PANELS = 30 if nightly() else 9
OTHERS: set[threading.Thread] = set()
"""Threads of tests before, which nobody has collected yet."""
MOST = 450
"""Models of a panel. ZeroMQ drops messages beyond a thousand that wait, and a cell run again closes as many first."""
SLOPE_BYTES = 20_000
"""A panel takes about 5 MiB; what is told from noise here is two hundredths of one."""


@pytest.fixture(autouse=True)
def project(project):
    OTHERS.update(threading.enumerate())
    widget.Widget.close_all()  # of tests before: a panel that a thread at work still holds would go meanwhile
    yield
    OTHERS.clear()
    close_supervisors()


def widgets():
    return len(widget._instances)


def quiet(panel):
    """The panel when none of the threads begun since the test began is at work."""
    wait_until(lambda: not any(one.name.startswith("kit-") for one in threading.enumerate() if one not in OTHERS))
    return panel


@pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS)
def test_close_gives_back_every_widget_and_can_be_asked_twice(make):
    gc.collect()  # panels of tests before, which would be collected meanwhile
    before = widgets()
    panel = quiet(make(Config()))
    assert before + 50 < widgets() < before + MOST
    panel.close()
    panel.close()
    assert widgets() == before
    assert panel.closed
    panel.config = panel.config.replace({"trial.max_steps": 77})  # what is known can still be asked and set
    panel.form.edit({"build.threads": 3})
    assert (panel.config.trial.max_steps, panel.config.build.threads) == (77, 3)
    quiet(panel)
    assert widgets() == before


@pytest.mark.parametrize("kind", at_night([*MAKERS], ["panel", "build"]))
def test_a_forgotten_panel_gives_back_every_widget(kind):
    before = widgets()
    panel = quiet(MAKERS[kind](Config()))
    gone = weakref.ref(panel)
    del panel
    gc.collect()
    assert gone() is None
    assert widgets() == before


def test_a_panel_in_which_all_failed_is_forgotten_like_any_other():
    before = widgets()
    panel = kit.panel(Config().replace({"data.url": "data/none.zarr"}))
    panel.button.click()
    panel.calibrate()
    for action in (panel.profile, panel.diagnose, panel.commit):
        with contextlib.suppress(KitError):
            action()
    gone = weakref.ref(quiet(panel))
    assert panel.calibration.error is not None
    del panel, action
    gc.collect()
    assert gone() is None
    assert widgets() == before


@pytest.mark.slow
@pytest.mark.parametrize("end", at_night(["close", "forget"], ["forget"]))
def test_many_panels_leave_a_flat_slope(end):
    def measure():
        gc.collect()
        return tracemalloc.get_traced_memory()[0], widgets()

    def held():
        return {*os.listdir("/proc/self/fd")}, {*threading.enumerate()}

    found = []
    for number in range(PANELS):
        if number == PANELS // 3:
            gc.collect()
            files, threads = held()
            tracemalloc.start()
        panel = quiet(kit.panel(Config()))
        if end == "close":
            panel.close()
        del panel
        if number >= PANELS // 3:
            found.append(measure())
    tracemalloc.stop()
    assert found[-1][1:] == found[0][1:]
    later_files, later_threads = held()
    assert not later_files - files
    assert not later_threads - threads  # those of tests before this may end meanwhile
    grown = [after[0] - before[0] for before, after in itertools.pairwise(found)]
    assert statistics.median(grown) < SLOPE_BYTES  # what a library loads once is no slope


@pytest.mark.slow
def test_a_panel_is_kept_while_its_trial_runs_and_no_longer():
    config = Config().replace({
        "model.target": "kit.testing:TinyModule", "trial.max_steps": 6, "trial.warmup_steps": 1,
        "hardware.accelerator": "cpu", "hardware.threads_per_rank": 1, "trial.predict_memory": False,
    })  # fmt: skip
    before = widgets()
    panel = kit.panel(config, data="kit.testing:TinyData")
    trial = panel.fit()
    gone = weakref.ref(panel)
    del panel
    gc.collect()
    assert trial.ended or gone() is not None
    trial.wait(PATIENCE_SECONDS)
    wait_until(lambda: gc.collect() is not None and gone() is None)
    wait_until(lambda: widgets() == before)  # a thread may have held it last, and closes them then
    assert trial.state == "COMPLETE"


# -- in a notebook

SETUP = """
import gc, weakref, kit
from kit.config import Config
from ipywidgets.widgets import widget
import comm
def count():
    gc.collect()
    assert len(widget._instances) == len(comm.get_comm_manager().comms)
    return len(widget._instances)
"""


FORGOTTEN = "Out.clear(); _ = __ = ___ = None; globals().pop('mine', None); widget.Widget.close_all(); print(count())"


@pytest.fixture(scope="module")
def kernel(tmp_path_factory):
    """`run(code, cell)` in a real kernel: what the cell printed; a cell is known by its id, as front ends send it."""
    from jupyter_client.manager import KernelManager
    from jupyter_core.utils import ensure_event_loop

    folder = tmp_path_factory.mktemp("kernel")
    (folder / "pyproject.toml").touch()
    manager = KernelManager(kernel_name="python3")
    manager.start_kernel(cwd=str(folder))
    client = manager.blocking_client()
    client.context.setsockopt(zmq.RCVHWM, 0)  # on a busy machine this process may read nothing for seconds
    client.start_channels()
    client.wait_for_ready(timeout=PATIENCE_SECONDS)

    def run(code, cell):
        content = {"code": code, "silent": False, "store_history": True, "user_expressions": {}, "allow_stdin": False}
        client.shell_channel.send(client.session.msg("execute_request", content, metadata={"cellId": cell}))
        printed = ""
        while True:
            try:
                message = client.get_iopub_msg(timeout=PATIENCE_SECONDS)
            except queue.Empty:
                os.kill(manager.provisioner.pid, signal.SIGUSR1)
                wait_until(lambda: stacks.read_text())
                raise AssertionError(f"{code!r} does not end; the kernel is at\n{stacks.read_text()}") from None
            printed += message["content"]["text"] if message["msg_type"] == "stream" else ""
            assert message["msg_type"] != "error", "\n".join(message["content"]["traceback"])
            idle = message["msg_type"] == "status" and message["content"]["execution_state"] == "idle"
            if idle and message["parent_header"].get("msg_type") == "execute_request":
                return printed.strip()

    stacks = folder / "stacks"
    run(
        f"{SETUP}\nimport faulthandler, signal\nfaulthandler.register(signal.SIGUSR1, open({str(stacks)!r}, 'w'))",
        "setup",
    )
    yield run
    client.stop_channels()
    manager.shutdown_kernel(now=True)
    manager.cleanup_resources()
    ensure_event_loop().close()
    asyncio.set_event_loop(None)


@pytest.fixture
def notebook(kernel, request):
    """`run(code, cell)` in the kernel of this file, with cells of the test's own; what is left is closed after it."""
    yield lambda code, cell: kernel(code, f"{request.node.name} {cell}")
    assert kernel(FORGOTTEN, "forgotten") == "0"


def test_a_shown_panel_stays_though_nobody_holds_it(notebook):
    notebook("kit.panel(Config())", "a")
    shown = int(notebook("print(count())", "b"))
    assert shown > 100
    notebook("Out.clear(); _ = __ = ___ = None", "c")
    assert int(notebook("print(count())", "b")) == shown
    notebook("from IPython.display import display; display(kit.panel(Config()))", "d")  # not a result, held by nobody
    assert int(notebook("print(count())", "b")) >= 2 * shown - 1


@pytest.mark.slow
def test_running_its_cell_again_gives_back_the_panel_it_showed(notebook):
    """Many times: one panel is left, whatever IPython keeps of results."""
    counts = set()
    for _ in range(PANELS):
        notebook("kit.panel(Config())", "a")
        counts.add(int(notebook("print(count())", "b")))
    assert len(counts) == 1
    kept = "[value for value in [*Out.values(), *globals().values()] if isinstance(value, kit.widgets.panel.Panel)]"
    assert notebook(f"print(len({{id(one) for one in {kept}}}))", "b") == "1"
    notebook("1 + 1", "a")
    assert notebook("print(count())", "b") == "0"


def test_a_panel_that_a_variable_holds_or_another_cell_shows_outlives_its_cell(notebook):
    notebook("mine = kit.panel(Config())\nmine", "a")
    shown = int(notebook("print(count())", "b"))
    notebook("1", "a")
    assert int(notebook("print(count())", "b")) == shown
    notebook("mine", "c")
    notebook("del mine", "d")
    assert int(notebook("print(count())", "b")) == shown
    notebook("1", "c")
    assert notebook("print(count())", "b") == "0"


def test_a_closed_panel_says_so_and_ipython_lets_go_of_it(notebook):
    notebook("mine = kit.panel(Config())\nmine", "a")
    notebook("gone = weakref.ref(mine); mine.close(); mine", "b")
    assert notebook("print(count())", "c") == "0"
    notebook("mine.close(); del mine", "d")
    assert notebook("gc.collect(); print(gone())", "c") == "None"
