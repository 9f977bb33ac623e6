"""How the experts of a layer are computed, and how their routers' choices are seen.

The tokens of each expert are one product (transformers' `grouped_mm`). The rounding of a row then depends on which other rows
visit the same expert; within `rows_alone` every expert computes all rows, so that it does not.
"""

from __future__ import annotations

import re
from collections.abc import Generator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from drumroll.errors import ModelError

NAME = "drumroll"
LAYER = re.compile(r"\.(\d+)\.")

_ROWS_ALONE: ContextVar[bool] = ContextVar("rows_alone", default=False)


def use(module: Any, name: str = NAME) -> None:
    """Let a model's experts be computed as this module says, or as transformers names; nothing changes for a model without."""
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

    ALL_EXPERTS_FUNCTIONS.register(NAME, _forward)
    if has_experts(module):
        module.set_experts_implementation(name)


def has_experts(module: nn.Module) -> bool:
    """Whether a model has layers of experts that transformers computes by a choice of functions."""
    return any(hasattr(part, "_is_expert_parallel") for part in module.modules())


@contextmanager
def rows_alone() -> Generator[None]:
    """Within the block the numbers of a row do not depend on the others, if there are always equally many rows."""
    token = _ROWS_ALONE.set(True)
    try:
        yield
    finally:
        _ROWS_ALONE.reset(token)


def _forward(experts: Any, hidden: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
    from transformers.integrations.moe import grouped_mm_experts_forward

    if _ROWS_ALONE.get():
        return _on_all_rows(experts, hidden, chosen, weights)
    if not _groups(experts, hidden):
        return type(experts).forward.__wrapped__(experts, hidden, chosen, weights)
    return grouped_mm_experts_forward(experts, hidden, chosen, weights)


def _groups(experts: Any, hidden: Tensor) -> bool:
    """Whether `grouped_mm` takes these weights: no float64, and rows of a multiple of 16 bytes."""
    return hidden.dtype is not torch.float64 and all(p.shape[-1] * p.itemsize % 16 == 0 for p in experts.parameters())


def _on_all_rows(experts: Any, hidden: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
    """Every expert that a row visits computes all rows; rows take what is theirs, in the order of the experts."""
    if experts.is_transposed or experts.has_bias or not experts.has_gate:
        raise ModelError(
            f"model: the native engine cannot compute {type(experts).__name__} with deterministic: true; set deterministic: false."
        )
    total = torch.zeros(hidden.shape, dtype=torch.promote_types(hidden.dtype, weights.dtype), device=hidden.device)
    for number in chosen.unique().tolist():
        rows, place = (chosen == number).nonzero(as_tuple=True)
        inner = experts._apply_gate(F.linear(hidden, experts.gate_up_proj[number]))
        out = F.linear(inner, experts.down_proj[number])
        total.index_add_(0, rows, (out[rows] * weights[rows, place, None]).to(total.dtype))
    return total.to(hidden.dtype)


# --- what routers choose ---


@dataclass(frozen=True)
class Routed:
    """What the routers of all layers did with the trained tokens of a micro-batch."""

    entropy: Tensor  # [trained tokens] of the probabilities of the experts, mean over layers
    visits: dict[int, Tensor]  # by layer: [experts] how many trained tokens visited each


class Routers:
    """Notes what the routers of a model choose. Layers without one, and models without any, have nothing to note."""

    def __init__(self, module: nn.Module) -> None:
        self._seen: dict[int, tuple[Tensor, Tensor]] | None = None
        for name, part in module.named_modules():
            if type(part).__name__.endswith("Router") and (layer := LAYER.search(name)):
                part.register_forward_hook(partial(self._note, int(layer[1])))

    def _note(self, layer: int, router: nn.Module, given: Any, out: Any) -> None:
        """A forward pass that recomputes activations is not noted again; routers that return other things never are."""
        if self._seen is not None and isinstance(out, tuple) and len(out) == 3:
            logits, _, chosen = out
            self._seen[layer] = (logits.detach(), chosen)

    @contextmanager
    def noting(self) -> Generator[None]:
        """Note the forward pass within the block, until `take`."""
        self._seen = {}
        try:
            yield
        except BaseException:
            self._seen = None
            raise

    def take(self, positions: Tensor) -> Routed | None:
        """What was noted for the tokens at these positions, each as often as it is named: not how tokens are packed."""
        seen, self._seen = self._seen, None
        if not seen:
            return None
        probabilities = [logits[positions].float().log_softmax(-1) for logits, _ in seen.values()]
        entropy = torch.stack([-(p.exp() * p).sum(-1) for p in probabilities]).mean(0)
        visits = {layer: _counts(chosen[positions], logits.shape[-1]) for layer, (logits, chosen) in seen.items()}
        return Routed(entropy, visits)


def _counts(chosen: Tensor, experts: int) -> Tensor:
    return torch.zeros(experts, dtype=torch.int64, device=chosen.device).index_add_(
        0, chosen.flatten(), torch.ones_like(chosen.flatten())
    )
