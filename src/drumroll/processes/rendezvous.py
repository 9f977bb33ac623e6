"""Rendezvous of torch process groups: stores, gloo and the collectives of accelerators all use one known address per machine, never a guess.

The runtime knows the address of every machine (`RayRuntime.host_of`) and passes each process its own. A store on
loopback joins processes of one machine; gloo then listens on loopback too.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Generator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch.distributed import distributed_c10d

from drumroll.config.accelerators import family
from drumroll.errors import ConfigError, DrumrollError
from drumroll.processes.network import interfaces

LOOPBACK = "127.0.0.1"
GLOO = "gloo_at_address"
"""Backend name of gloo bound to an address that we choose; torch's own `gloo` resolves the host name."""
SHOWN = 4
"""The most peers that an error message names."""
ADVICE = "Check the network between these machines, or name the one that joins them in cluster.interface."


@dataclass(frozen=True, slots=True)
class Rendezvous:
    """Where the ranks of one generation of a group meet: host and port of their store, and the address of each rank.

    A group that is made anew meets at a new store, so that no rank of an earlier generation can join it.
    """

    host: str
    port: int
    addresses: tuple[str, ...]


class MeetingError(DrumrollError, RuntimeError):
    """Processes cannot form a process group."""


def open_store(host: str, port: int = 0, seconds: float = 300.0) -> dist.TCPStore:
    """Open a TCP store at this address; with port 0 the system picks a free port."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.create_server((host, port), family=family, backlog=1024)
    found = int(listener.getsockname()[1])
    limit = timedelta(seconds=seconds)
    return dist.TCPStore(host, found, None, True, limit, wait_for_workers=False, master_listen_fd=listener.detach())


def find_store(host: str, port: int, seconds: float, address: str = LOOPBACK) -> dist.TCPStore:
    """Connect to the store that another process has opened. `address` is this machine's address, for the error message."""
    try:
        return dist.TCPStore(host, port, None, False, timedelta(seconds=seconds), wait_for_workers=False)
    except RuntimeError as error:
        raise MeetingError(
            f"The process at {address} does not reach the store at {host}:{port} in {seconds:g} s: {_short(error)}. {ADVICE}"
        ) from None


@contextmanager
def meeting(store: Any, rank: int, size: int, address: str, seconds: float) -> Generator[None]:
    """Announce this process's address to its peers.

    If forming the group fails inside the block, raise one sentence that names the addresses.
    """
    keys = [f"address/{peer}" for peer in range(size)]
    try:
        store.set(keys[rank], address)
        yield
    except RuntimeError as error:
        peers = list[str]()
        for peer in (p for p in range(size) if p != rank):
            found = "of unknown address"
            with suppress(RuntimeError):  # the store may be gone
                found = f"at {store.get(keys[peer]).decode()}" if store.check([keys[peer]]) else "that never came"
            peers.append(f"rank {peer} {found}")
        more = f" and {len(peers) - SHOWN} more" if len(peers) > SHOWN else ""
        who = f"Rank {rank} at {address} forms no group with {', '.join(peers[:SHOWN])}{more}"
        raise MeetingError(f"{who} in {seconds:g} s: {_short(error)}. {ADVICE}") from None


def _short(error: Exception) -> str:
    """Return the first line of torch's message, without its stack."""
    line = next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)
    return line[:300].rstrip(".")


def gloo_options(host: str, address: str, seconds: float) -> Any:
    """Return options for a gloo group with its store on `host`. Gloo listens on `address`, or on loopback if the store does."""
    gloo: Any = dist.ProcessGroupGloo
    options = gloo._Options()
    options._devices = [gloo.create_device(hostname=LOOPBACK if host == LOOPBACK else address)]
    options._timeout = timedelta(seconds=seconds)
    return options


def gloo_group(store: Any, rank: int, size: int, options: Any) -> Any:
    """Make a gloo group apart from torch's default group; waits until all ranks have joined."""
    gloo: Any = dist.ProcessGroupGloo
    return gloo(store, rank, size, options)


_ProcessGroup: Any = dist.ProcessGroup  # torch's type stub lacks the constructor without a store


class GlooGroup(_ProcessGroup):
    """A gloo group that a process can leave. Leaving closes its connections, which ends the collectives of all peers at once.

    Gloo itself has no such call: its connections close when the last reference to a group is gone, and meshes, models and
    autograd graphs keep references.
    """

    def __init__(self, rank: int, size: int, gloo: Any) -> None:
        super().__init__(rank, size)
        self._gloo = gloo

    def abort(self) -> None:
        """Leave the group."""
        self._gloo = None

    shutdown = abort

    @property
    def group_name(self) -> str:
        """The name that torch gave it."""
        return distributed_c10d._world.pg_names[self]

    @property
    def gloo(self) -> Any:
        """The gloo group itself; None after leaving."""
        return self._gloo

    def __getattribute__(self, name: str) -> Any:
        if name not in COLLECTIVES:
            return super().__getattribute__(name)
        gloo = super().__getattribute__("_gloo")
        if gloo is None:
            raise dist.DistError("this process has left its gloo group")
        return getattr(gloo, COLLECTIVES[name])

    def all_gather_single_coalesced(self, outputs: list[Any], inputs: list[Any], *options: Any) -> Any:
        """Gather several tensors; gloo has no call for it."""
        return self._each("_allgather_base", outputs, inputs, *options)

    def reduce_scatter_single_coalesced(self, outputs: list[Any], inputs: list[Any], *options: Any) -> Any:
        """Sum several tensors and scatter them."""
        return self._each("_reduce_scatter_base", outputs, inputs, *options)

    def _each(self, name: str, outputs: list[Any], inputs: list[Any], *options: Any) -> Any:
        works = [getattr(self, name)(*both, *options) for both in zip(outputs, inputs, strict=True)]
        for work in works[:-1]:
            work.wait()
        return works[-1]


COLLECTIVES = {
    **{name: name for name in ("allreduce", "broadcast", "barrier", "allgather", "reduce_scatter", "gather", "scatter")},
    **{name: name for name in ("send", "recv", "alltoall_base")},
    **{"all_to_all_single": "alltoall_base"},
    **{"all_gather_single": "_allgather_base", "reduce_scatter_single": "_reduce_scatter_base"},
    **{"_allgather_base": "_allgather_base", "_reduce_scatter_base": "_reduce_scatter_base"},
    "all_to_all_single": "alltoall_base",
}
"""Methods of a process group, and the names under which its gloo group has them."""


def device_group(device: str, store: Any, rank: int, size: int, timeout: timedelta) -> Any:
    """Make a group of an accelerator's own collectives, apart from torch's default group."""
    backend = family(device).collectives
    made: Any = getattr(dist, f"ProcessGroup{backend.upper()}", None)
    if made is None:
        raise ConfigError(
            f"cluster.weight_sync: this torch makes no groups of {backend} for {device} apart from its default group; use shared."
        )
    options = made.Options()
    options._timeout = timeout
    return made(store, rank, size, options)


def register_gloo(default: Any) -> str:
    """Register gloo at a chosen address as a backend of `dist.init_process_group`, which takes `gloo_options` as `pg_options`.

    The options limit how long the peers may take to join, `timeout` how long a collective may take. Groups that a library
    makes without options get the default ones.
    """

    def make(group: Any, options: Any) -> Any:
        made = gloo_group(group.store, group.group_rank, group.group_size, options or default)
        made._set_default_timeout(group.timeout)
        return GlooGroup(group.group_rank, group.group_size, made)

    dist.Backend.register_backend(GLOO, make, extended_api=True, devices=["cpu"])
    return GLOO


def steer_collectives(device: str, address: str) -> None:
    """Bind the collectives of a device to the interface with this address, unless their environment variable says another.

    Call before the process makes its first group.
    """
    variable, name = family(device).interface, next((name for name, own in interfaces().items() if own == address), None)
    if variable and name is not None and address != LOOPBACK:
        os.environ.setdefault(variable, f"={name}")
