"""Tensors in Ray's object store: sent without a copy where they are contiguous on the CPU, received as read-only views.

Ray's own switch for this (RAY_ENABLE_ZERO_COPY_TORCH_TENSORS) imports torch into every worker, which takes seconds; here
only processes that use it pay. A view must never be written to: other workers read the same memory.
"""

from __future__ import annotations

import sys
import warnings
from typing import TYPE_CHECKING, Any

from ray.util.serialization import register_serializer

if TYPE_CHECKING:
    from torch import Tensor

warnings.filterwarnings("ignore", "The given NumPy array is not writable")


def view_tensors() -> None:
    """From now on this process sends plain tensors as bytes that can be viewed; they arrive on the CPU, without gradient."""
    if (torch := sys.modules.get("torch")) is not None:
        register_serializer(torch.Tensor, serializer=_to_bytes, deserializer=_from_bytes)


def _to_bytes(tensor: Tensor) -> tuple[Any, str, tuple[int, ...]]:
    import torch

    flat = tensor.detach().cpu().contiguous().reshape(-1)
    return flat.view(torch.uint8).numpy(), str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape)


def _from_bytes(packed: tuple[Any, str, tuple[int, ...]]) -> Tensor:
    import torch

    data, dtype, shape = packed
    return torch.from_numpy(data).view(getattr(torch, dtype)).reshape(shape)
