"""Weights laid out for the CPU's matrix units, for generation: a product of few rows spends much of its time arranging them.

In inference mode, where nothing is learned, the linear layers of a module use packed copies of their weights. Elsewhere
(training, CUDA, layers of other kinds) nothing changes.
"""

from __future__ import annotations

from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from typing_extensions import override

_PACKED: WeakKeyDictionary[nn.Module, Any] = WeakKeyDictionary()  # not in the layers: a copy of a layer has other weights


class _Linear(nn.Linear):
    """A linear layer that looks for its packed weight."""

    @override
    def forward(self, input: Tensor) -> Tensor:
        packed = _PACKED.get(self) if torch.is_inference_mode_enabled() else None
        if packed is None:
            return F.linear(input, self.weight, self.bias)
        return torch.ops.mkldnn._linear_pointwise(input, packed, self.bias, "none", [], "")


class PackedLinears:
    """The packed copies of a module's linear weights, for products of about `rows` rows."""

    def __init__(self, module: nn.Module, rows: int) -> None:
        self.rows = rows
        self._packed = False
        self.layers: list[nn.Linear] = []
        if torch.backends.mkldnn.is_available():
            self.layers = [m for m in module.modules() if isinstance(m, nn.Linear) and _fits(m)]
        for layer in self.layers:
            layer.__class__ = _Linear

    def refresh(self) -> None:
        """Pack the weights as they are now, if they are not packed."""
        if self._packed:
            return
        self._packed = True
        with torch.no_grad():
            for layer in self.layers:
                _PACKED[layer] = torch.ops.mkldnn._reorder_linear_weight(layer.weight.detach(), self.rows)

    def release(self) -> None:
        """The weights have changed, or memory is wanted: no copies until the next `refresh`."""
        self._packed = False
        for layer in self.layers:
            _PACKED.pop(layer, None)


def _fits(layer: nn.Linear) -> bool:
    """A plain layer, or one that was made to look for its packed weight before."""
    if type(layer) not in (nn.Linear, _Linear) or layer.weight.device.type != "cpu":
        return False
    able = layer.weight.dtype is torch.bfloat16 and torch.ops.mkldnn._is_mkldnn_bf16_supported()
    return layer.weight.dtype is torch.float32 or able
