"""Rendezvous: the store in which the ranks of a trial find each other, reached from this machine alone.

Left to itself torch's store listens on every interface, whatever MASTER_ADDR says. Here the supervisor opens the
socket, on loopback, so that nobody else can take its port, and rank 0 inherits it and serves. Ranks then join a store
that is there already, which is how torchrun has them do it. The sockets of gloo and NCCL stay on loopback too.
"""

from __future__ import annotations

import os
import socket
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

HOST = "127.0.0.1"
DESCRIPTOR = "KIT_STORE_DESCRIPTOR"
"""The variable that tells rank 0 which descriptor it inherited."""
_LOOPBACK = "lo" if sys.platform == "linux" else "lo0"
INTERFACES = {"GLOO_SOCKET_IFNAME": _LOOPBACK, "NCCL_SOCKET_IFNAME": _LOOPBACK}


def listen() -> socket.socket:
    """The socket of a trial's store, on a port that nobody has."""
    return socket.create_server((HOST, 0), backlog=1024)


def open_store() -> TCPStore | None:
    """Let this rank find the others; rank 0 serves the store as long as it holds what is returned."""
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    os.environ["TORCHELASTIC_USE_AGENT_STORE"] = "True"
    descriptor = os.environ.pop(DESCRIPTOR, None)
    if descriptor is None:
        return None
    port = int(os.environ["MASTER_PORT"])
    return TCPStore(HOST, port, is_master=True, wait_for_workers=False, master_listen_fd=int(descriptor))
