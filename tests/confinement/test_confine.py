"""Each layer that keeps a process from changing files, in a process of its own, whichever the system has."""

import os
import pickle
import socket
import subprocess
import tempfile
import traceback
from pathlib import Path

import numpy as np
import pytest

from kit.confinement import confine, private_files
from kit.confinement.private_files import SET_DUMPABLE, control

h5py = pytest.importorskip("h5py")
NOBODY = 65534


def in_child(work):
    """What `work` gives in a fork, which has one thread."""
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            answer = work()
        except BaseException:
            answer = traceback.format_exc()
        os.write(write, pickle.dumps(answer))
        os._exit(0)
    os.close(write)
    with os.fdopen(read, "rb") as file:
        answer = pickle.loads(file.read())
    os.waitpid(child, 0)
    return answer


def has_private_files():
    def enter():
        confine.confine_process(Path(os.environ["KIT_TEST_SCRATCH"]), [], may_start_programs=True)
        return confine._confinement.private is not None

    return in_child(enter) is True


@pytest.fixture
def places(tmp_path, monkeypatch):
    user, run = tmp_path / "user", tmp_path / "run"
    for folder in (user, run):
        folder.mkdir()
    (user / "existing.txt").write_text("before")
    (user / "kept").mkdir()
    monkeypatch.setenv("KIT_TEST_SCRATCH", str(run / "probe"))
    return user, run


def write_everything(user, run):
    """As C and Python code do it, and what comes of each."""
    done = {}

    def attempt(name, work):
        try:
            work()
        except OSError as error:
            done[name] = repr(error)
        else:
            done[name] = "done"

    attempt("write", lambda: (user / "existing.txt").write_text("after"))
    attempt("h5py", lambda: h5py.File(user / "new.h5", "w").create_dataset("a", data=np.ones(3)))
    attempt("delete", lambda: (user / "kept").rmdir())
    attempt("move", lambda: (user / "existing.txt").rename(user / "moved.txt"))
    attempt("own", lambda: (run / "own.txt").write_text("own"))
    attempt("program", lambda: subprocess.run(["true"], check=True))
    return done


def is_untouched(user):
    return sorted(path.name for path in user.iterdir()) == ["existing.txt", "kept"] and (
        (user / "existing.txt").read_text() == "before"
    )


def test_in_a_private_view_everything_succeeds_and_nothing_happens(places):
    user, run = places
    if not has_private_files():
        pytest.skip("no mount namespace here")

    def work():
        held = confine.confine_process(run / "scratch", [run], may_start_programs=True)
        done = write_everything(user, run)
        changed = {(doing, path.name) for doing, path in held.private.changed() if user in path.parents}
        return held.private is not None, done, changed

    is_private, done, changed = in_child(work)
    assert is_private
    assert set(done.values()) == {"done"}
    assert changed == {
        ("deleting", "existing.txt"), ("deleting", "kept"), ("writing", "moved.txt"), ("writing", "new.h5"),
    }  # fmt: skip
    assert is_untouched(user)
    assert (run / "own.txt").read_text() == "own"


@pytest.mark.skipif(os.getuid() != 0, reason="only root can become somebody else")
def test_who_has_no_privileges_takes_a_user_namespace(places):
    user, run = places
    for folder in (user, run, user / "existing.txt", user / "kept"):
        os.chown(folder, NOBODY, NOBODY)
    for folder in user.parents:
        if Path(tempfile.gettempdir()) in folder.parents:
            folder.chmod(folder.stat().st_mode | 0o055)

    def work():
        os.setgid(NOBODY)
        os.setuid(NOBODY)
        control(SET_DUMPABLE, 1)
        os.chdir(user)  # what lies in folders of others elsewhere cannot be changed, not even in private
        held = confine.confine_process(run / "scratch", [run], may_start_programs=True)
        return held.private is not None, held.why_not_private, write_everything(user, run)

    private, why, done = in_child(work)
    if not private:
        pytest.skip(f"no user namespace here: {why}")
    assert set(done.values()) == {"done"}
    assert is_untouched(user)
    assert (run / "own.txt").read_text() == "own"


def test_without_a_private_view_landlock_refuses_c_code_as_well(places, monkeypatch):
    user, run = places
    if not private_files.version():
        pytest.skip("no Landlock here")

    def refuse(*_):
        raise PermissionError("no namespaces")

    monkeypatch.setattr(private_files, "enter", refuse)

    def work():
        held = confine.confine_process(run / "scratch", [run], may_start_programs=False)
        return held.landlocked, held.why_not_private, write_everything(user, run)

    is_landlocked, why, done = in_child(work)
    assert is_landlocked
    assert "no namespaces" in why
    assert done.pop("own") == "done"
    assert "done" not in done.values()
    assert is_untouched(user)


def test_python_code_goes_on_where_landlock_refuses(places, monkeypatch):
    user, run = places

    def refuse(*_):
        raise PermissionError("no namespaces")

    monkeypatch.setattr(private_files, "enter", refuse)

    def work():
        confine.confine_process(run / "scratch", [run], may_start_programs=True)
        with confine.confined("the test", bool, bool):
            (user / "existing.txt").write_text("after")
            read = (user / "existing.txt").read_text()
            (user / "existing.txt").rename(user / "moved.txt")
            listed = sorted(os.listdir(user))
        return read, listed

    assert in_child(work) == ("after", ["kept", "moved.txt"])
    assert is_untouched(user)


def test_after_the_data_was_read_nobody_can_be_connected_to(places):
    if private_files.version() < 4:
        pytest.skip("this Landlock knows no network")
    with socket.create_server(("127.0.0.1", 0)) as server:

        def work():
            connected = []
            for _ in range(2):
                with socket.socket() as connection:
                    connected.append(connection.connect_ex(server.getsockname()))
                private_files.connect_nowhere()
            return connected

        before, after = in_child(work)
    assert before == 0
    assert after != 0


def test_ranks_of_one_job_see_what_the_others_write(places):
    user, run = places
    if not has_private_files():
        pytest.skip("no mount namespace here")
    ready, go = os.pipe()
    child = os.fork()
    if child == 0:
        confine.confine_process(run / "scratch", [run], may_start_programs=True)
        (user / "shared.txt").write_text("from rank 0")
        (run / "written").touch()
        os.read(ready, 1)
        os._exit(0)

    def work():
        confine.confine_process(run / "scratch", [run], may_start_programs=True, rank=1)
        while not (run / "written").exists():
            pass
        return (user / "shared.txt").read_text()

    assert in_child(work) == "from rank 0"
    os.write(go, b".")
    os.waitpid(child, 0)
    assert is_untouched(user)
