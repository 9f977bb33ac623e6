"""What routers do with trained tokens, where ranks divide layers and tokens: each notes its own, and all bring it together."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from megatron.core.transformer.moe.router import TopKRouter
from torch import Tensor

from drumroll.learners.ranks import Ranks
from drumroll.learners.statistics import Statistics


class RouterNotes:
    """Entropies and visits of a pass; models without experts have nothing to note."""

    def __init__(self, stage: Any, layers: int, experts: int, ranks: Ranks) -> None:
        self.ranks, self.shape = ranks, (layers, experts)
        self._positions: Tensor | None = None
        self._entropies: list[Tensor] = []
        self._visits: list[tuple[int, Tensor]] = []
        for part in stage.modules():
            if isinstance(part, TopKRouter):
                router: Any = part
                router.routing = partial(self._note, router.layer_number - 1, router.routing)

    @contextmanager
    def noting(self, positions: Tensor) -> Generator[None]:
        """Note a forward pass, for the tokens at these positions; not where activations are computed again."""
        self._positions = positions
        self._entropies.append(torch.zeros(len(positions), device=positions.device))
        try:
            yield
        finally:
            self._positions = None

    def _note(self, layer: int, routing: Any, logits: Tensor, *given: Any, **named: Any) -> Any:
        """Ranks along `tensor` have the tokens one part after the other."""
        out = routing(logits, *given, **named)
        if self._positions is not None:
            flat = logits.detach().reshape(-1, logits.shape[-1])
            own = self._positions - self.ranks.mesh.coordinates["tensor"] * len(flat)
            here = (own >= 0) & (own < len(flat))
            shares = flat[own[here]].float().log_softmax(-1)
            self._entropies[-1][here] -= (shares.exp() * shares).sum(-1) / self.shape[0]
            self._visits.append((layer, out[1][own[here]].sum(0)))
        return out

    def drop(self) -> None:
        """Forget what was noted."""
        self._entropies, self._visits = [], []

    def add_to(self, statistics: Statistics) -> None:
        """Add what the routers of all stages did; a collective of the ranks that share a batch."""
        if self.shape[1] == 0:
            return
        entropies = torch.cat(self._entropies)
        visits = torch.zeros(self.shape, device=entropies.device)
        for layer, counts in self._visits:
            visits[layer] += counts
        self.drop()
        for axis in ("tensor", "pipeline"):
            self.ranks.add([entropies, visits], axis)
        by_layer = {layer: counts.long().cpu() for layer, counts in enumerate(visits)}
        columns = {"router_entropy": [entropies.cpu()]} if len(entropies) else {}
        statistics.extend(Statistics(columns=columns, visits=by_layer if len(entropies) else {}))
