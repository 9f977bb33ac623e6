"""Chooses the transport of weight sync from where the sender and its receivers run, not from a setting."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from drumroll.config.accelerators import USUAL
from drumroll.errors import ConfigError
from drumroll.processes.rendezvous import LOOPBACK


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
