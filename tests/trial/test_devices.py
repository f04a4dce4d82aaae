"""Devices of a trial: what kit chooses is never shared, however many kernels choose at once."""

import contextlib
import dataclasses
import json
import os
import re
import signal
import subprocess
import sys

import claiming_kernel
import pytest
from claiming_kernel import config_of, gpus, machine_of
from trial_fixtures import steps_taken
from waiting import PATIENCE_SECONDS, wait_until

import kit.machine.claims
import kit.trial.submit
from kit.config import Config
from kit.errors import ConfigError, HardwareError, KitWarning, TrialError
from kit.machine.claims import choosing, claims
from kit.machine.machine import resolve_devices
from kit.machine.processes import alive
from kit.memory.alongside import fit, machine_of_trial
from kit.memory.replay.cards import target_of
from kit.trial import client
from kit.trial.submit import Taken, take_devices

MODULE, DATA = "kit.testing:TinyModule", "kit.testing:TinyData"
SECONDS = PATIENCE_SECONDS


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.setattr(kit.machine.claims, "FOLDER", tmp_path / "claims")
    return tmp_path / "claims"


@pytest.fixture
def machine(monkeypatch):
    """Gives this kernel GPUs."""

    def give(table):
        monkeypatch.setattr(kit.trial.submit, "hardware", machine_of(table))

    return give


@pytest.fixture
def kernel(folder):
    """Starts kernels that take the devices they are told to; `say` lets one go on."""
    with contextlib.ExitStack() as stack:

        def start(count, devices="auto"):
            command = [sys.executable, claiming_kernel.__file__, str(folder), str(count), json.dumps(devices)]
            pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
            process = stack.enter_context(subprocess.Popen(command, **pipes))
            stack.callback(process.kill)
            assert process.stdout.readline() == "ready\n"
            return process

        yield start


def go(process):
    process.stdin.write("\n")
    process.stdin.flush()


def told(process):
    return json.loads(process.stdout.readline())


# -- one kernel


def test_auto_takes_the_least_occupied_gpu_that_is_unclaimed_and_says_whose_the_other_is(machine):
    machine(gpus(3))
    assert [take_devices(config_of("auto")).resolved.devices for _ in range(3)] == [("GPU-2",), ("GPU-1",), ("GPU-0",)]
    with pytest.raises(HardwareError, match=r"auto.* 0 of 3 .*unclaimed: .*share on purpose"):
        take_devices(config_of("auto"))


def test_the_reason_names_the_claim_that_was_passed_over(machine):
    machine(gpus(2))
    take_devices(config_of("auto"))
    reason = take_devices(config_of("auto")).resolved.reasons[0]
    assert reason.startswith("GPU 0 ")
    assert "1 unclaimed: 60 GiB of 80 GiB free" in reason
    assert re.search(rf"GPU 1 .*claimed by mine \(kernel {os.getpid()}\)$", reason)


def test_a_number_is_taken_whole_or_not_at_all(machine):
    machine(gpus(3))
    assert take_devices(config_of(2)).resolved.devices == ("GPU-1", "GPU-2")
    with pytest.raises(HardwareError, match="devices is 2, but 1 of 3 GPUs are unclaimed"):
        take_devices(config_of(2))
    assert set(claims()) == {"GPU-1", "GPU-2"}


def test_who_has_a_share_of_a_gpu_shares_it_and_its_allocator_is_held_to_that(machine, monkeypatch):
    monkeypatch.setenv("KIT_SEAT", "1/8 ada")
    machine(tuple(dataclasses.replace(gpu, total_bytes=gpu.total_bytes // 8) for gpu in gpus(1)))
    first, second = take_devices(config_of("auto")), take_devices(config_of("auto"))
    assert first.resolved.devices == second.resolved.devices == ("GPU-0",)
    eighth = gpus(1)[0].total_bytes // 8
    assert eighth - (1 << 30) < first.share_bytes < eighth, "without what lies outside the allocator"


@pytest.mark.parametrize("devices", [[1], [0, 1], -1])
def test_what_is_named_is_shared_with_a_warning(machine, devices):
    machine(gpus(2))
    take_devices(config_of("auto"))
    with pytest.warns(KitWarning, match="GPU 1 .*claimed by mine .*share"):
        taken = take_devices(config_of(devices))
    assert any(re.search("warning: GPU 1 .*claimed by mine", reason) for reason in taken.resolved.reasons)
    assert len(claims()["GPU-1"]) == 2


def test_each_mig_instance_is_claimed_by_itself(machine):
    instances = [dataclasses.replace(gpu, uuid=f"MIG-{gpu.uuid}/1/0", parent="GPU-9") for gpu in gpus(2)]
    machine(tuple(instances))
    assert take_devices(config_of("auto")).resolved.devices == ("MIG-GPU-1/1/0",)
    assert take_devices(config_of("auto")).resolved.devices == ("MIG-GPU-0/1/0",)


def test_ranks_on_the_cpu_claim_nothing(machine, folder):
    machine(gpus(1))
    on_cpu = Config.make({"hardware": {"accelerator": "cpu", "devices": 2, "strategy": "ddp"}})
    assert take_devices(on_cpu).claims == ()
    machine(())
    assert take_devices(Config()).claims == ()
    assert not folder.exists()


def test_a_question_asked_while_all_is_claimed_is_still_answered(machine):
    machine(gpus(1))
    take_devices(config_of("auto"))
    found = kit.trial.submit.hardware()
    assert resolve_devices(Config(), found).devices == ("GPU-0",)
    assert re.search("warning: GPU 0 .*claimed by mine", repr(found))


def test_a_prediction_beside_a_trial_is_for_the_gpu_that_the_trial_has(machine):
    machine(gpus(2))
    taken = take_devices(config_of("auto"))
    found = kit.trial.submit.hardware()
    assert resolve_devices(Config(), found).devices == ("GPU-0",)
    seen = machine_of_trial(found, taken.resolved.devices)
    assert seen.auto.devices == taken.resolved.devices == ("GPU-1",)
    assert target_of("this machine", seen).capacity_bytes == seen.gpus[0].free_bytes


# -- several kernels


def test_kernels_that_choose_at_the_same_moment_never_choose_the_same(kernel):
    kernels = [kernel(4) for _ in range(6)]
    for process in kernels:
        go(process)
    answers = [told(process) for process in kernels]
    devices = [answer["devices"][0] for answer in answers if "devices" in answer]
    assert sorted(devices) == ["GPU-0", "GPU-1", "GPU-2", "GPU-3"]
    assert sum("0 of 4 GPUs are unclaimed" in answer.get("error", "") for answer in answers) == 2


def test_the_gpu_of_a_killed_kernel_is_taken_over(kernel):
    first, second, third = kernel(1), kernel(1), kernel(1)
    go(first)
    assert told(first)["devices"] == ["GPU-0"]
    go(second)
    assert re.search(rf"GPU 0 .*claimed by mine \(kernel {first.pid}\)", told(second)["error"])
    first.send_signal(signal.SIGKILL)
    first.wait()
    go(third)
    assert told(third)["devices"] == ["GPU-0"]


# -- a trial's claim, from submission to its end


@pytest.fixture
def claiming(monkeypatch):
    """Trials run on the CPU and claim a GPU all the same."""
    on_cpu = kit.trial.submit.take_devices

    def take(config):
        with choosing() as desk:
            return Taken(resolved=on_cpu(config).resolved, used_bytes=(), claims=tuple(desk.take(["GPU-1"], "mine")))

    monkeypatch.setattr(kit.trial.submit, "take_devices", take)


def test_a_running_trial_holds_its_gpu_through_its_supervisor_and_lets_go_before_its_end_is_told(config, claiming):
    trial = fit(config(max_steps=1_000_000), MODULE, DATA)
    wait_until(steps_taken(trial, 2))
    (claim,) = claims()["GPU-1"]
    assert claim.holder == client.supervisor("warm").identity
    trial.stop()
    wait_until(lambda: trial.poll() == "STOPPED")
    assert claims() == {}


def test_a_trial_that_fails_lets_go(config, claiming):
    with pytest.raises(TrialError):
        fit(config(), "kit.testing:TinyModule", lambda: 1 / 0).wait(SECONDS)
    assert claims() == {}


def test_a_trial_whose_supervisor_is_killed_lets_go(config, claiming):
    trial = fit(config(max_steps=1_000_000), MODULE, DATA)
    wait_until(steps_taken(trial, 2))
    identity = client.supervisor("warm").identity
    os.kill(identity["pid"], signal.SIGKILL)
    wait_until(lambda: not alive(identity) and trial.poll() == "LOST")
    assert claims() == {}


def test_a_submission_that_is_refused_lets_go(config, claiming, tmp_path):
    (tmp_path / "file").write_text("not a folder")
    with pytest.raises(ConfigError, match="run directory"):
        fit(config(folder=str(tmp_path / "file" / "runs")), MODULE, DATA)
    assert claims() == {}
