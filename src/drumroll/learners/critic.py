"""The critic: a language model's body with a value head, trained beside the actor by the same machinery."""

from __future__ import annotations

from pathlib import Path

from torch import Tensor
from typing_extensions import override

from drumroll.algorithms.losses import ValueLoss, ValueTokens
from drumroll.batch import Batch
from drumroll.learners import Update
from drumroll.learners.torch import TorchLearner
from drumroll.models.prefix_tree import PrefixTree


class TorchCritic(TorchLearner):
    """Implements `Learner` for values; log-probs it has none."""

    area = "critic"

    @override
    def values(self, batch: Batch) -> Tensor:
        return self._each_token(batch, self._values)

    def _values(self, micro: Batch) -> Tensor:
        """[trained tokens] what is expected before each is written."""
        tree = micro.tree()
        values = self.model.module(tree.tokens.to(self.device), PrefixTree(tree.paths, self.device))
        return values.index_select(0, tree.node_of[micro.mask.nonzero()[:, 0] - 1].to(self.device))

    @override
    def _loss(self, micro: Batch, work: Update) -> tuple[Tensor, dict[str, Tensor]]:
        assert isinstance(work.loss, ValueLoss)
        values, old, returns = self._values(micro), self._trained(micro, micro.values), self._trained(micro, micro.returns)
        assert old is not None
        assert returns is not None
        return work.loss(ValueTokens(values.float(), old, returns))

    @override
    def logprobs(self, batch: Batch, temperature: float) -> Tensor:
        raise NotImplementedError("a critic has no log-probs")

    @override
    def export(self, folder: Path) -> None:
        raise NotImplementedError("a critic is kept in checkpoints only")
