"""Kinds of devices by the names that torch gives them. Nothing else in drumroll names an accelerator.

Plain data, no torch: `processes/accelerator.py` speaks to the devices.
"""

from __future__ import annotations

import re
from enum import StrEnum
from typing import Literal, NamedTuple


class Kind(StrEnum):
    """The kind of a device: an accelerator's, or a slot of CPU threads."""

    CUDA = "cuda"  # NVIDIA and AMD
    XPU = "xpu"  # Intel
    NPU = "npu"  # Ascend
    MPS = "mps"  # Apple
    CPU = "cpu"


KindName = Literal["auto", "cuda", "xpu", "npu", "mps", "cpu"]
"""What a config may say."""
USUAL = Kind.CUDA
"""What a GPU that nobody could ask yet is taken for, such as those of a Ray cluster."""


class Family(NamedTuple):
    """What else differs between accelerators."""

    collectives: str
    """The backend of torch.distributed that serves it."""
    visible: str = ""
    """The environment variable that limits the devices which a process sees."""
    interface: str = ""
    """The environment variable that binds its collectives to a network interface."""
    copies_ahead: bool = True
    """Whether a copy from pageable host memory may return before it is done, and still read what was there."""


FAMILIES = {
    Kind.CUDA: Family("nccl", "CUDA_VISIBLE_DEVICES", "NCCL_SOCKET_IFNAME"),
    Kind.XPU: Family("xccl", "ONEAPI_DEVICE_SELECTOR"),
    Kind.NPU: Family("hccl", "ASCEND_RT_VISIBLE_DEVICES", "HCCL_SOCKET_IFNAME"),
    Kind.MPS: Family("gloo", copies_ahead=False),
    Kind.CPU: Family("gloo"),
}
ACCELERATORS = tuple(kind.value for kind in Kind if kind is not Kind.CPU)
LOCAL_DEVICE = re.compile(rf"{Kind.CPU}|({'|'.join(ACCELERATORS)})(:\d+)?")
"""A device of the local runtime."""


def is_accelerator(device: str) -> bool:
    """Whether a device's name (`xpu`, `xpu:1`) is an accelerator's."""
    return device.partition(":")[0] in ACCELERATORS


def family(device: str) -> Family:
    """What there is to know of a device's kind; of one that nobody named here (a plugin's), only that gloo serves it."""
    kind = device.partition(":")[0]
    return FAMILIES[Kind(kind)] if kind in FAMILIES else Family("gloo")
