"""A notebook without a front end whose kernel is killed in the middle of a cell."""

import os
import textwrap

import nbformat
import psutil
import pytest
from nbclient import NotebookClient
from nbclient.exceptions import DeadKernelError
from trial_fixtures import is_alive
from waiting import PATIENCE_SECONDS, wait_until

from kit.trial.trial import Trial


def test_a_kernel_that_is_killed_in_a_notebook_is_a_failure_and_leaves_no_process(config, tmp_path):
    cell = textwrap.dedent(f"""
        import os, pathlib, signal
        import kit, psutil
        from kit.testing import TinyData, TinyModule
        config = kit.Config.from_yaml({config(2, max_steps=1_000_000).to_yaml(comments=False)!r})
        trial = kit.fit(config, lambda: TinyModule(seconds=0.01), lambda: TinyData(num_workers=1, samples=100_000))
        def started(seen):
            if len(seen.steps) > 2:
                below = psutil.Process().children(recursive=True)
                pathlib.Path({str(tmp_path / "pids")!r}).write_text(f"{{seen.run_directory}}\\n"
                    + "\\n".join(str(one.pid) for one in below))
                os.kill(os.getpid(), signal.SIGKILL)
        trial.on_change(started)
        trial.wait()
    """)
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell)])
    client = NotebookClient(notebook, timeout=int(PATIENCE_SECONDS), kernel_name="python3")
    with pytest.raises(DeadKernelError):
        client.execute()
    directory, *pids = (tmp_path / "pids").read_text().splitlines()
    assert len(pids) >= 5  # a supervisor, two ranks and what each loads with
    wait_until(lambda: not any(is_alive_here(int(pid)) for pid in pids))
    assert Trial.open(directory).state == "LOST"


def is_alive_here(pid):
    try:
        return is_alive(psutil.Process(pid)) and pid != os.getpid()
    except psutil.NoSuchProcess:
        return False
