"""Imitation: negative log-likelihood."""

from dataclasses import dataclass

from torch import Tensor

from drumroll.algorithms.losses.parts import Tokens


@dataclass(frozen=True)
class SFTLoss:
    """Negative log-likelihood of the given answer."""

    name: str = "sft"
    entropy_gradient: bool = False
    skips_zero_advantage: bool = False

    def __call__(self, tokens: Tokens) -> tuple[Tensor, dict[str, Tensor]]:
        return -tokens.logprobs, {}
