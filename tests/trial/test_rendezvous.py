"""Where the processes of a trial listen: on loopback, and nowhere else."""

import ipaddress

import psutil
import pytest
from gated import Gated
from properties import at_night
from waiting import PATIENCE_SECONDS, wait_until

from kit.memory.alongside import fit
from kit.testing import TinyData, TinyModule
from kit.trial import client


def listening(process):
    """The addresses on which a process and those it started take connections."""
    processes = [process, *process.children(recursive=True)]
    found = [connection for one in processes for connection in one.net_connections("tcp")]
    return [ipaddress.ip_address(one.laddr.ip) for one in found if one.status == psutil.CONN_LISTEN]


def running(gate, config):
    """A trial that waits in its second step, when every rank has met the others."""
    trial = fit(config, lambda: Gated(gate, step=2), TinyData)
    wait_until(gate.with_suffix(".reached").exists)
    trial.poll()
    return trial


WARM = [("warm", "ddp"), ("warm", "fsdp")]
COLD = [("cold", "ddp"), ("cold", "fsdp")]


@pytest.mark.parametrize(
    ("start", "strategy"), [*WARM, *(pytest.param(*case, marks=pytest.mark.slow) for case in at_night(COLD, COLD[:1]))]
)
def test_every_process_of_a_trial_listens_on_loopback_only(config, tmp_path, monkeypatch, start, strategy):
    ranks = 2
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "eth0")  # what a cluster's login shell says
    gate = tmp_path / "gate"
    trial = running(gate, config(ranks, strategy, start=start))
    found = listening(psutil.Process(client.supervisor(start).identity["pid"]))
    gate.touch()
    assert trial.wait(PATIENCE_SECONDS).state == "COMPLETE"
    assert len(found) > ranks  # the store, and each rank for the others
    assert all(address.is_loopback for address in found)


def test_the_port_of_a_trial_is_taken_before_its_ranks_start_and_free_when_it_has_ended(config, tmp_path):
    gate = tmp_path / "gate"
    trial = running(gate, config(2))
    port = trial.event("trial_started", "port")
    listeners = [one.pid for one in psutil.net_connections("tcp") if one.laddr.port == port and one.status == "LISTEN"]
    gate.touch()
    trial.wait(PATIENCE_SECONDS)
    assert listeners == [trial.event("trial_started", "processes")[1]["pid"]]  # rank 0 alone
    assert not [one for one in psutil.net_connections("tcp") if one.laddr.port == port and one.status == "LISTEN"]


class JoinsByItself(TinyModule):
    """Asks torch for a group of its own accord, on one device and without a strategy."""

    def on_fit_start(self):
        import torch

        torch.distributed.init_process_group("gloo")
        print(f"joined {torch.distributed.get_world_size()}")
        torch.distributed.destroy_process_group()


def test_a_module_that_makes_its_own_group_finds_the_store_too(config):
    trial = fit(config(), JoinsByItself, TinyData).wait(PATIENCE_SECONDS)
    assert "joined 1" in trial.paths.log(0).read_text()
