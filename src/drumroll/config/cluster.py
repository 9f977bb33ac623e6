"""`cluster`: where the roles run."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from drumroll.config.accelerators import KindName
from drumroll.config.section import Section


class ClusterConfig(Section):
    """The runtime and its devices."""

    runtime: Literal["local", "ray"] = "local"
    """`local`: all roles in this process, on one device. `ray`: each rank of a role in a process of its own, anywhere on a cluster."""
    devices: int | None = Field(None, ge=1)
    """Devices of the pool. Default: every GPU of the cluster; where there is none, a CPU slot for each machine."""
    kind: KindName = "auto"
    """What a device is: `cpu` is a slot of CPU threads, the others are accelerators by torch's names; `auto` is a GPU where there is one, else a slot. A cluster's GPUs are `cuda` (NVIDIA, AMD) unless you name another."""
    device_memory_gb: float | None = Field(None, gt=0)
    """Memory of a device in GB of 10⁹ bytes, for the memory plan of `--dry-run`. Default: that of this machine's GPUs; a CPU slot has its share of the machine's memory."""
    threads: int = Field(0, ge=0)
    """CPU threads of a device; 0 takes the top-level `threads`, and without it divides a machine's cores among its slots."""
    address: str | None = None
    """The Ray cluster to join. Default: RAY_ADDRESS; without it one is started on this machine."""
    interface: str | None = None
    """Network interface through which stores, gloo and NCCL of a run join its machines, for example ib0. Default: the one with the address that Ray knows of each."""
    start_timeout: float = Field(120.0, gt=0)
    """Seconds to wait for the cluster to give the run its devices."""
    call_timeout: float = Field(3600.0, gt=0)
    """Seconds that one call to a worker may take."""
    collective_timeout: float = Field(1800.0, gt=0)
    """Seconds that ranks of a role wait for each other in an update: more than the slowest rank needs longer than the quickest for a minibatch."""
    replace_engines: bool = True
    """Start a new engine in place of one that is lost."""
    weight_sync: Literal["auto", "shared", "broadcast"] = "auto"
    """How weights reach the engines: shared memory on one machine, or buckets broadcast over the network."""
    checksum: bool = False
    """Check the bytes of published weights on arrival; costs some speed."""
