"""The accelerator of this process: which one torch has, its memory, its collectives, and copies to it.

Everything that drumroll asks of an accelerator goes through here and `torch.accelerator`, so that no other module knows
one by name. Without an accelerator every function works on the CPU or does nothing.
"""

from __future__ import annotations

import ctypes
from contextlib import suppress
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from drumroll.config.accelerators import Kind, family, is_accelerator
from drumroll.errors import ConfigError


class Found(NamedTuple):
    """A device that torch sees: its name, its memory in bytes, and whether it computes in bfloat16."""

    name: str
    memory: int
    bfloat16: bool


def kind() -> str:
    """The name of this machine's accelerator; `cpu` where torch sees none."""
    found = torch.accelerator.current_accelerator(check_available=True)
    return Kind.CPU if found is None else found.type


def built() -> bool:
    """Whether this build of torch has an accelerator at all."""
    return torch.accelerator.current_accelerator() is not None


def count() -> int:
    """How many accelerators torch sees."""
    return torch.accelerator.device_count()


def pick(device: str) -> torch.device:
    """The device that a config names; `auto` is the accelerator where there is one, else the CPU."""
    here, (name, _, index) = kind(), device.partition(":")
    if device == "auto":
        return torch.device(here)
    if is_accelerator(device) and (name != here or int(index or 0) >= count()):
        have = "only the CPU" if here == Kind.CPU else f"'{here}' up to {here}:{count() - 1}"
        raise ConfigError(f"devices: {device} was asked for, but torch sees no such device here, {have}; use 'auto' or 'cpu'.")
    return torch.device(device)


def select(device: torch.device | str) -> None:
    """Make a device this process's current one; on a CPU nothing."""
    index = torch.device(device).index
    if torch.device(device).type == kind() != Kind.CPU and index is not None:
        torch.accelerator.set_device_index(index)


def synchronize() -> None:
    """Wait until the accelerator has done all that it was given."""
    if kind() != Kind.CPU:
        torch.accelerator.synchronize()


def total_memory(index: int = 0) -> int | None:
    """The memory of an accelerator in bytes; None without one."""
    return None if kind() == Kind.CPU else torch.accelerator.get_memory_info(index)[1]


def devices() -> tuple[Found, ...]:
    """All accelerators that torch sees."""
    here = kind()
    if here == Kind.CPU:
        return ()
    module = torch.get_device_module(here)
    names = [str(module.get_device_name(i)) if hasattr(module, "get_device_name") else here for i in range(count())]
    able = [_has_bfloat16(i) for i in range(count())]
    return tuple(Found(name, total_memory(i) or 0, able[i]) for i, name in enumerate(names))


def _has_bfloat16(index: int) -> bool:
    """Whether a device has units for bfloat16. NVIDIA's older ones can store it too, but only the 8th generation computes in it."""
    module = torch.get_device_module(kind())
    if kind() == Kind.CUDA and torch.version.hip is None:
        return int(module.get_device_capability(index)[0]) >= 8
    return torch.bfloat16 in torch.accelerator.get_device_capability(index)["supported_dtypes"]


def take_peak() -> int:
    """The peak of memory held by tensors since the last call, in bytes; 0 where nobody has used an accelerator."""
    with suppress(RuntimeError, NotImplementedError):  # some accelerators do not count
        if kind() != Kind.CPU and torch.accelerator.memory_reserved():
            peak = torch.accelerator.max_memory_allocated()
            torch.accelerator.reset_peak_memory_stats()
            return peak
    return 0


def empty_cache() -> None:
    """Give memory that no tensor holds back to the system, for other processes.

    On a CPU that is the C library's: tensors of many sizes leave holes in its heap, which it would keep.
    """
    if kind() != Kind.CPU:
        with suppress(RuntimeError, NotImplementedError):  # some accelerators keep no cache
            torch.accelerator.empty_cache()
        return
    with suppress(AttributeError, OSError):  # only glibc has it
        ctypes.CDLL(None).malloc_trim(0)


def collectives(device: torch.device | str) -> str:
    """The backend of torch.distributed that serves a device."""
    return family(str(device)).collectives


def takes(backend: str) -> str:
    """The kind of device whose tensors a backend of torch.distributed takes in this process."""
    return kind() if backend == collectives(kind()) != collectives(Kind.CPU) else Kind.CPU


def send(data: Tensor | NDArray[np.generic], device: torch.device | str) -> Tensor:
    """Copy from the host to a device without waiting for it. On a CPU nothing is copied.

    Work that the device has yet to do is in no hurry: an ordinary copy would wait until all of it is done.
    """
    tensor = torch.from_numpy(data) if isinstance(data, np.ndarray) else data
    return tensor.to(device, non_blocking=family(str(device)).copies_ahead)
