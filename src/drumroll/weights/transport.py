"""Chooses and opens the transport of weight sync, from where the sender and its receivers run, not from a setting."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from drumroll.config.accelerators import USUAL
from drumroll.errors import ConfigError
from drumroll.processes.rendezvous import LOOPBACK
from drumroll.weights import Meeting, Packing, Receiver, Sender
from drumroll.weights.broadcast import BroadcastReceiver, BroadcastSender
from drumroll.weights.shared_memory import SharedReceiver, SharedSender

SECONDS = 120.0
"""How long the processes of one publication wait for each other."""


@dataclass(frozen=True, slots=True)
class End:
    """A process that takes part in weight sync: its machine's address, and the pool's number of its GPU (None: CPU)."""

    host: str
    gpu: int | None = None
    kind: str = USUAL


@dataclass(frozen=True, slots=True)
class Transport:
    """How weights travel. Buckets are on `device` (by the collectives of their kind), and the processes meet at `host`."""

    kind: str
    device: str
    host: str


def choose(wanted: str, ends: Sequence[End]) -> Transport:
    """Return the transport between these processes; the first is the sender.

    Device to device if every process has its own GPU (collectives refuse two ranks on one). Otherwise shared memory on one machine, gloo
    between several.
    """
    gpus, hosts = [end.gpu for end in ends], {end.host for end in ends}
    direct = None not in gpus and len(set(gpus)) == len(gpus)
    if wanted == "shared" and len(hosts) > 1:
        raise ConfigError(
            f"cluster.weight_sync: shared reaches one machine only, but actor and engines are on {len(hosts)}; use auto."
        )
    kind = wanted if wanted != "auto" else "broadcast" if direct or len(hosts) > 1 else "shared"
    return Transport(kind, f"{ends[0].kind}:0" if direct else "cpu", LOOPBACK if len(hosts) == 1 else ends[0].host)


def open_sender(transport: Transport, run: str, packing: Packing, size: int, address: str) -> Sender:
    """Open the sender to `size` - 1 receivers; `address` is that of this process's machine."""
    meeting = Meeting(transport.host, 0, size, transport.device, SECONDS, transport.kind)
    return (
        SharedSender(meeting, run, packing)
        if transport.kind == "shared"
        else BroadcastSender(meeting, packing, address=address)
    )


def open_receiver(meeting: Meeting, rank: int, address: str) -> Receiver:
    """Join a sender as its receiver of this rank, 1 or higher."""
    return SharedReceiver(meeting, rank) if meeting.kind == "shared" else BroadcastReceiver(meeting, rank, address)
