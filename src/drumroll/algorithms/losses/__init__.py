"""Losses per token. The learner multiplies them by the tokens' weights and sums, whatever they are. One file per method.

A loss is one function of `Tokens` and the config; a user's own is named as `module:function`. Gradients flow through
`tokens.logprobs` (and `tokens.entropy`) only.
"""

from drumroll.algorithms.losses import cispo, gspo, mirror, pg, ppo, sapo, topr
from drumroll.algorithms.losses.distill import DistillLoss
from drumroll.algorithms.losses.parts import LOSSES, Loss, Tokens, ValueTokens
from drumroll.algorithms.losses.policy import PolicyLoss, kl_divergence
from drumroll.algorithms.losses.reward import RewardLoss, Scores
from drumroll.algorithms.losses.sft import SFTLoss
from drumroll.algorithms.losses.value import ValueLoss

__all__ = [
    "LOSSES",
    "AnyLoss",
    "DistillLoss",
    "Loss",
    "PolicyLoss",
    "RewardLoss",
    "SFTLoss",
    "Scores",
    "Tokens",
    "ValueLoss",
    "ValueTokens",
    "kl_divergence",
]
AnyLoss = Loss | ValueLoss | RewardLoss
METHODS = (cispo, gspo, mirror, pg, ppo, sapo, topr)
