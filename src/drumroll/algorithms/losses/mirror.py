"""Mirror descent as in Kimi k1.5 (2501.12599)."""

from torch import Tensor

from drumroll.algorithms.losses.parts import LOSSES, Tokens
from drumroll.algorithms.statistics import log_ratio
from drumroll.config.algorithm import AlgorithmConfig


@LOSSES.register("mirror", acts_without_advantage=True)
def mirror(tokens: Tokens, config: AlgorithmConfig) -> Tensor:
    """Policy gradient with a squared log-ratio that holds the policy near the one before (Kimi k1.5, 2501.12599)."""
    return -tokens.advantages * tokens.logprobs + 0.5 * config.mirror * log_ratio(tokens.logprobs, tokens.old) ** 2
