"""Where the ranks of one machine find each other: in a store on loopback, which no other machine reaches.

Left to itself, torch's store listens on every interface, whatever MASTER_ADDR says. Here a socket on loopback is opened
first, rank 0 serves the store on it, and the ranks join a store that is there already, as torchrun has them do. The
sockets of gloo and NCCL stay on loopback too. A trial's socket is opened by its supervisor, so that nobody else can
take its port, and inherited by rank 0; a committed run on one machine opens its own (`meet_here`).
"""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import MutableMapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

HOST = "127.0.0.1"
DESCRIPTOR = "KIT_STORE_DESCRIPTOR"
"""The variable that tells rank 0 which descriptor it inherited."""
_LOOPBACK = "lo" if sys.platform == "linux" else "lo0"
INTERFACES = {"GLOO_SOCKET_IFNAME": _LOOPBACK, "NCCL_SOCKET_IFNAME": _LOOPBACK}
_JOIN = "TORCHELASTIC_USE_AGENT_STORE"


def listen(port: int = 0) -> socket.socket:
    """A socket for a store, by default on a port that nobody has."""
    return socket.create_server((HOST, port), backlog=1024)


def open_store() -> TCPStore | None:
    """Let this rank of a trial find the others; rank 0 serves the store as long as it holds what is returned."""
    os.environ[_JOIN] = "True"
    descriptor = os.environ.pop(DESCRIPTOR, None)
    return None if descriptor is None else _serve(int(descriptor), int(os.environ["MASTER_PORT"]))


def meet_here(variables: MutableMapping[str, str], ranks: int) -> TCPStore | None:
    """Have the ranks of a committed run on one machine find each other on loopback.

    Data is made before they meet. A data set that shares its samples out by itself may go by WORLD_SIZE and
    GLOBAL_RANK (litdata does), so each rank has them from here on.

    Under `python` Lightning starts the others with the variables of this process, which are set here. torchrun gives
    each rank an address and a port; where it leaves the store to rank 0, that port is taken on loopback. Where it
    serves the store itself, or somebody has said where the ranks meet, that stays; gloo and NCCL keep to loopback.

    Args:
        variables: Of this process; they are changed.
        ranks: How many there are.

    Returns:
        The store, for rank 0 to hold as long as it runs.
    """
    number = variables.get("RANK", variables.get("LOCAL_RANK", "0"))
    variables.update({**INTERFACES, "WORLD_SIZE": str(ranks), "GLOBAL_RANK": number})
    by_torchrun = "TORCHELASTIC_RUN_ID" in variables
    if by_torchrun and variables.get(_JOIN) == "True":
        return None
    if not by_torchrun and ("LOCAL_RANK" in variables or "MASTER_ADDR" in variables):
        return None  # started by Lightning, which has set all of it, or by hand
    server = listen(int(variables["MASTER_PORT"]) if by_torchrun else 0) if number == "0" else None
    variables.update({_JOIN: "True", "MASTER_ADDR": HOST})
    if server is None:
        return None
    variables["MASTER_PORT"] = str(server.getsockname()[1])
    return _serve(server.detach(), int(variables["MASTER_PORT"]))


def _serve(descriptor: int, port: int) -> TCPStore:
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    return TCPStore(HOST, port, is_master=True, wait_for_workers=False, master_listen_fd=descriptor)
