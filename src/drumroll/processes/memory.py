"""Memory of this process: its peak since the last measurement, and what it may take for keys and values."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from drumroll.config.accelerators import is_accelerator
from drumroll.processes.host import read_memory

SHARE = 3
"""By default keys and values take one part in so many of the memory."""


class Peak(NamedTuple):
    """Peak memory of a process since the last call, in GB."""

    all: float
    """Host plus GPU."""
    device: float
    """What the process computes on: tensors on its GPU, or host memory if it uses none."""


def peak_gb() -> Peak:
    """Return the peak memory since the last call; 0 if the system does not report it."""
    host = 0
    with suppress(OSError, ValueError, StopIteration):
        status = Path("/proc/self/status").read_text()
        host = int(next(line for line in status.splitlines() if line.startswith("VmHWM")).split()[1]) * 1024
        Path("/proc/self/clear_refs").write_text("5")  # reset the peak
    gpu = 0
    if "torch" in sys.modules:
        from drumroll.processes import accelerator

        gpu = accelerator.take_peak()
    return Peak((host + gpu) / 1e9, (gpu or host) / 1e9)


def merge(role: str, peaks: Iterable[Peak]) -> dict[str, float]:
    """The metrics of a role: the sum of its processes, and the most that one of them has on its device."""
    found = list(peaks)
    return {role: sum(peak.all for peak in found), f"{role}/max": max((peak.device for peak in found), default=0.0)}


def spare_gb(device: str, neighbours: int = 1, *, fixed: bool = False) -> float | None:
    """The memory that keys and values take by default, in GiB: a third of what is free, on a CPU divided among engines.

    With a fixed shape it is a third of all memory, because a repeated run must get the same shape. None if unknown.
    """
    if is_accelerator(device):
        import torch

        free, total = torch.accelerator.get_memory_info(torch.device(device))
        return (total if fixed else free) / SHARE / 2**30
    host = read_memory(Path("/"))
    usable = None if host is None else host.total if fixed else host.available
    return None if usable is None else usable / SHARE / neighbours / 2**30
