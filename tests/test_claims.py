"""Claims: they count while their process lives, and never longer."""

import json
import os
import signal
import subprocess
import sys

import pytest

import kit.machine.claims
from kit.errors import HardwareError
from kit.machine.claims import choosing, claims, hand_over, release
from kit.machine.processes import identify, machine


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.setattr(kit.machine.claims, "FOLDER", tmp_path / "claims")
    return tmp_path / "claims"


@pytest.fixture
def other():
    """Another process, which does nothing."""
    process = subprocess.Popen([sys.executable, "-c", "import sys; sys.stdin.read()"], stdin=subprocess.PIPE)
    yield process
    process.kill()
    process.wait()
    process.stdin.close()


def take(*gpus):
    with choosing() as desk:
        return desk.take(gpus, "mine")


def end(process):
    process.send_signal(signal.SIGKILL)
    process.wait()


def test_before_the_first_claim_there_is_none_and_no_folder(folder):
    assert claims() == {}
    assert not folder.exists()


def test_a_claim_is_seen_until_it_is_released():
    files = take("GPU-1", "MIG-GPU-2/1/0")
    assert list(claims()) == ["GPU-1", "MIG-GPU-2/1/0"]
    assert str(claims()["GPU-1"][0]) == f"mine (kernel {os.getpid()})"
    release(files)
    release(files)
    assert claims() == {}


def test_a_gpu_may_be_claimed_twice_and_stays_claimed_when_one_lets_go():
    first, _ = take("GPU-1"), take("GPU-1")
    assert len(claims()["GPU-1"]) == 2
    release(first)
    assert len(claims()["GPU-1"]) == 1


def test_a_claim_ends_with_the_process_it_was_handed_to_and_its_file_goes_with_the_next_look(folder, other):
    files = take("GPU-1")
    hand_over(files, identify(other.pid), "mine")
    assert list(claims()) == ["GPU-1"]
    end(other)
    assert claims() == {}
    assert files[0].exists()
    take("GPU-2")
    assert not files[0].exists()


def test_an_id_that_another_process_has_by_now_holds_nothing():
    (file,) = take("GPU-1")
    told = json.loads(file.read_text())
    told["holder"]["started"] -= 1
    file.write_text(json.dumps(told))
    assert claims() == {}


@pytest.mark.parametrize("changed", [{"boot": "another"}, {"host": "another"}])
def test_a_claim_of_another_boot_or_machine_does_not_count(changed):
    (file,) = take("GPU-1")
    file.write_text(json.dumps({**json.loads(file.read_text()), "machine": {**machine(), **changed}}))
    assert claims() == {}


def test_a_run_whose_supervisor_died_gets_its_claim_back_unless_it_is_taken(other):
    files = take("GPU-1")
    hand_over(files, identify(other.pid), "mine")
    end(other)
    take("GPU-2")
    hand_over(files, identify(os.getpid()), "mine")
    assert sorted(claims()) == ["GPU-1", "GPU-2"]
    release(files)
    take("GPU-1")
    with pytest.raises(HardwareError, match=r"GPU-1 .*claimed .*mine \(kernel \d+\)"):
        hand_over(files, identify(os.getpid()), "mine")


def test_half_written_and_foreign_files_hold_nothing(folder):
    take("GPU-1")
    (folder / "GPU-2.abc.json").write_text("{")
    (folder / "GPU-3.abc.json").write_text("{}")
    (folder / "GPU-4.abc.tmp").write_text("half")
    assert list(claims()) == ["GPU-1"]
    take("GPU-5")
    assert not (folder / "GPU-4.abc.tmp").exists()


def test_one_chooser_waits_for_the_other_and_says_when_it_takes_too_long(folder, monkeypatch):
    holding = subprocess.Popen(
        [sys.executable, "-c", _HOLD, str(folder)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert holding.stdout.readline() == "held\n"
    monkeypatch.setattr(kit.machine.claims, "LOCK_SECONDS", 0.05)
    with pytest.raises(HardwareError, match=r"another process .* 0\.05 s"):
        take("GPU-1")
    end(holding)
    assert take("GPU-1")
    holding.stdin.close()
    holding.stdout.close()


_HOLD = """
import pathlib, sys
import kit.machine.claims
kit.machine.claims.FOLDER = pathlib.Path(sys.argv[1])
with kit.machine.claims.choosing():
    print("held", flush=True)
    sys.stdin.read()
"""


def test_a_folder_that_others_can_write_to_is_refused(folder):
    folder.mkdir()
    folder.chmod(0o777)
    with pytest.raises(HardwareError, match="only this user"):
        take("GPU-1")


def test_a_link_in_place_of_the_folder_is_refused(folder, tmp_path):
    (tmp_path / "elsewhere").mkdir()
    folder.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(HardwareError, match="only this user"):
        take("GPU-1")
    assert list((tmp_path / "elsewhere").iterdir()) == []
