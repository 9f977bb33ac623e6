"""Which transport brings weights from a sender to its receivers: decided by where they are, not by a setting."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from drumroll.errors import ConfigError
from drumroll.processes.rendezvous import LOOPBACK


@dataclass(frozen=True, slots=True)
class End:
    """A process on the bus: the address of its machine, and the pool's number of the GPU that holds its tensors, if one does."""

    host: str
    gpu: int | None = None


@dataclass(frozen=True, slots=True)
class Transport:
    """How weights travel. `device` is where buckets lie (NCCL on CUDA, else gloo), `host` where the ends meet."""

    kind: str
    device: str
    host: str


def choose(wanted: str, ends: Sequence[End]) -> Transport:
    """The transport between these ends, the sender's first.

    NCCL where every end has a GPU of its own (it refuses two on one). Otherwise shared memory on one machine, gloo between several.
    """
    gpus, hosts = [end.gpu for end in ends], {end.host for end in ends}
    nccl = None not in gpus and len(set(gpus)) == len(gpus)
    if wanted == "shared" and len(hosts) > 1:
        raise ConfigError(
            f"cluster.weight_sync: shared reaches one machine only, but actor and engines are on {len(hosts)}; use auto."
        )
    kind = wanted if wanted != "auto" else "broadcast" if nccl or len(hosts) > 1 else "shared"
    return Transport(kind, "cuda:0" if nccl else "cpu", LOOPBACK if len(hosts) == 1 else ends[0].host)
