"""Where processes meet for torch's collectives: a store that listens on one address of its machine, not on all of them."""

from __future__ import annotations

import socket
from datetime import timedelta

import torch.distributed as dist

LOOPBACK = "127.0.0.1"


def open_store(host: str, port: int = 0, seconds: float = 300.0) -> dist.TCPStore:
    """A store at this address; with port 0 the system picks one."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.create_server((host, port), family=family, backlog=1024)
    found = int(listener.getsockname()[1])
    limit = timedelta(seconds=seconds)
    return dist.TCPStore(host, found, None, True, limit, wait_for_workers=False, master_listen_fd=listener.detach())


def find_store(host: str, port: int, seconds: float) -> dist.TCPStore:
    """The store that another process has opened."""
    return dist.TCPStore(host, port, None, False, timedelta(seconds=seconds), wait_for_workers=False)


def own_address(peer: str) -> str:
    """The address under which this machine reaches a peer, so the one under which the peer reaches it."""
    family, kind, _, _, where = socket.getaddrinfo(peer, 9, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind) as probe:  # nothing is sent
        probe.connect(where)
        return str(probe.getsockname()[0])
