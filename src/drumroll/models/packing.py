"""Layers for generation on a CPU, where a product of few rows spends much of its time arranging weights.

In inference mode, where nothing is learned, the linear layers of a module use copies of their weights packed for the CPU's
matrix units, layers given the same input are one product, and norms are one operation instead of six. Elsewhere
(training, accelerators, layers of other kinds) nothing changes.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from weakref import WeakKeyDictionary

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from typing_extensions import override

from drumroll.models.kernels import rms_norm

SIBLINGS = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))  # layers of one parent that are given the same input


class _Joint:
    """The packed weights of layers that are given the same input: one product serves all."""

    def __init__(self, layers: Sequence[nn.Linear], rows: int) -> None:
        joined = torch.cat([layer.weight.detach() for layer in layers]) if len(layers) > 1 else layers[0].weight.detach()
        self.weight = torch.ops.mkldnn._reorder_linear_weight(joined, rows)
        self.bias = None if layers[0].bias is None else torch.cat([layer.bias.detach() for layer in layers])
        self.sizes = [layer.out_features for layer in layers]
        self.held: tuple[Tensor, Sequence[Tensor]] | None = None

    def output(self, input: Tensor, index: int) -> Tensor:
        """What the layer of this index makes of the input; the first that is asked computes it for the others."""
        held = self.held
        if held is None or held[0] is not input:
            out = torch.ops.mkldnn._linear_pointwise(input, self.weight, self.bias, "none", [], "")
            held = (input, out.split(self.sizes, dim=-1) if len(self.sizes) > 1 else (out,))
        self.held = None if index == len(self.sizes) - 1 else held
        return held[1][index]


_PACKED: WeakKeyDictionary[nn.Module, tuple[_Joint, int]] = WeakKeyDictionary()  # not in the layers: copies have other weights


class _Linear(nn.Linear):
    """A linear layer that looks for its packed weight."""

    @override
    def forward(self, input: Tensor) -> Tensor:
        packed = _PACKED.get(self) if torch.is_inference_mode_enabled() else None
        if packed is None:
            return F.linear(input, self.weight, self.bias)
        return packed[0].output(input, packed[1])


def quicken_norms(module: nn.Module) -> None:
    """Let norms that compute what torch's own `rms_norm` does use it in inference mode."""
    for kind in {type(m) for m in module.modules() if type(m).__name__.endswith("RMSNorm")}:
        norms = [m for m in module.modules() if type(m) is kind]
        if all(_is_rms_norm(norm) for norm in norms):
            quick = type(kind.__name__, (_Norm, kind), {})
            for norm in norms:
                norm.__class__ = quick


class _Norm(nn.Module):
    """A norm of Hugging Face's, as one operation in inference mode."""

    weight: Tensor
    variance_epsilon: float

    @override
    def forward(self, hidden_states: Tensor) -> Tensor:
        if torch.is_inference_mode_enabled():
            return rms_norm(hidden_states, self.weight, self.variance_epsilon)
        return super().forward(hidden_states)


def _is_rms_norm(norm: nn.Module) -> bool:
    """Asks the norm itself, with numbers."""
    weight, epsilon = getattr(norm, "weight", None), getattr(norm, "variance_epsilon", None)
    if isinstance(norm, _Norm) or not isinstance(weight, Tensor) or not isinstance(epsilon, float):
        return False
    if weight.device.type != "cpu" or weight.dtype is not torch.float32:
        return False
    with torch.no_grad():
        x = torch.linspace(-2, 3, weight.numel())
        return torch.allclose(norm(x), F.rms_norm(x, weight.shape, weight, epsilon), rtol=1e-6, atol=1e-7)


class PackedLinears:
    """The packed copies of a module's linear weights, for products of about `rows` rows."""

    def __init__(self, module: nn.Module, rows: int) -> None:
        self.rows = rows
        self._packed = False
        self.joint = list(_joint(module)) if torch.backends.mkldnn.is_available() else []
        for layer in itertools.chain.from_iterable(self.joint):
            layer.__class__ = _Linear

    def refresh(self) -> None:
        """Pack the weights as they are now, if they are not packed."""
        if self._packed:
            return
        self._packed = True
        with torch.no_grad():
            for layers in self.joint:
                joint = _Joint(layers, self.rows)
                for i, layer in enumerate(layers):
                    _PACKED[layer] = (joint, i)

    def release(self) -> None:
        """The weights have changed, or memory is wanted: no copies until the next `refresh`."""
        self._packed = False
        for layer in itertools.chain.from_iterable(self.joint):
            _PACKED.pop(layer, None)


def _joint(module: nn.Module) -> Iterator[list[nn.Linear]]:
    """The layers that fit, those given the same input together."""
    seen: set[int] = set()
    for parent in module.modules():
        children = {
            name: m for name, m in parent.named_children() if isinstance(m, nn.Linear) and _fits(m) and id(m) not in seen
        }
        for names in SIBLINGS:
            some = [children[name] for name in names if name in children]
            if len(some) == len(names) and len({(m.bias is None, m.in_features) for m in some}) == 1:
                yield some
                children = {name: m for name, m in children.items() if name not in names}
                seen.update(map(id, some))
        for single in children.values():
            yield [single]
        seen.update(map(id, children.values()))


def _fits(layer: nn.Linear) -> bool:
    """A plain layer, or one that was made to look for its packed weight before."""
    if type(layer) not in (nn.Linear, _Linear) or layer.weight.device.type != "cpu":
        return False
    able = layer.weight.dtype is torch.bfloat16 and torch.ops.mkldnn._is_mkldnn_bf16_supported()
    return layer.weight.dtype is torch.float32 or able
