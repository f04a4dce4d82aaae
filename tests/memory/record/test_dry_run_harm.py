"""A dry run in this process leaves files, processes and servers alone, by Python's own functions."""

import functools
import os

import pytest
from hook_acts import (
    ACTS,
    CONNECTIONS,
    FILES,
    HOOKS,
    IN_A_FIT,
    IN_C,
    PROCESSES,
    Acting,
    WithCheckpoints,
    contents,
    counting_server,
    filled,
)
from properties import crossed

from kit.config import Config
from kit.memory.record.dry_run import DryRun, record
from kit.testing import TinyData, TinyModule


@pytest.fixture(autouse=True)
def back_where_it_was():
    here = os.getcwd()
    yield
    os.chdir(here)


def dry(module):
    return record(module, lambda: {"datamodule": TinyData()}, DryRun(Config(), "32-true"))


@functools.cache
def plain():
    return dry(TinyModule)


def said(recording, hook):
    return [note for note in recording.facts["notes"] if "kept" in note and hook in note]


@pytest.mark.parametrize(("hook", "act"), crossed(HOOKS, [*FILES, *PROCESSES, *CONNECTIONS]))
def test_what_a_hook_does_beside_the_training_happens_to_nobody(tmp_path, act, hook):
    folder = filled(tmp_path / "user")
    before = contents(folder)
    with counting_server() as (url, asked):
        found = dry(lambda: Acting([act], hook, folder, url))
    assert contents(folder) == before
    assert not asked or act not in CONNECTIONS
    assert found.facts["unknown"] == ""
    assert not any("early" in note for note in found.facts["notes"]), found.facts["notes"]
    assert said(found, hook)
    if act != "torch.save":  # which is loaded again, into new tensors
        assert found.block_bytes.tolist() == plain().block_bytes.tolist()


def test_checkpoints_of_a_callback_go_nowhere(tmp_path):
    folder = filled(tmp_path / "user")
    before = contents(folder)
    found = dry(lambda: WithCheckpoints(folder))
    assert contents(folder) == before
    assert found.facts["unknown"] == ""
    assert found.facts["optimizers"] == plain().facts["optimizers"]


def test_a_hook_that_trips_over_what_it_is_kept_from_ends_and_the_steps_go_on(tmp_path):
    class Forking(Acting):
        def on_train_start(self):
            os.fork()

    found = dry(Forking)
    assert found.facts["unknown"] == ""
    assert any("on_train_start ended early" in note for note in found.facts["notes"])


def test_many_attempts_are_few_notes(tmp_path):
    class Busy(TinyModule):
        def on_train_start(self):
            for number in range(100):
                (tmp_path / f"{number}").touch()

    found = dry(Busy)
    assert not list(tmp_path.iterdir())
    assert 1 < len(said(found, "on_train_start")) < 10
    assert any("92 more" in note for note in found.facts["notes"])


def test_afterwards_files_and_processes_are_what_they_were(tmp_path):
    dry(lambda: Acting([*FILES, *PROCESSES, *IN_A_FIT], "on_train_end", filled(tmp_path / "user")))
    (tmp_path / "after").write_text("written")
    assert (tmp_path / "after").read_text() == "written"
    assert os.system("true") == 0
    assert set(ACTS) >= set(IN_C)
