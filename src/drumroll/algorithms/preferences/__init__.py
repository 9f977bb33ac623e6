"""Losses on preferences: one number per pair, or per rated answer. One file per method.

A loss is one function of `Pairs` (or, registered with `pairs=False`, of `Rated`) and the config; a user's own is named as
`module:function`. Gradients flow through `Answers.logprobs` only.
"""

from drumroll.algorithms.preferences import dpo, ipo, kto, simpo
from drumroll.algorithms.preferences.parts import Answers, Pairs, PreferenceLoss, Rated
from drumroll.config.preferences import PREFERENCE_LOSSES

__all__ = ["PREFERENCE_LOSSES", "Answers", "Pairs", "PreferenceLoss", "Rated"]
METHODS = (dpo, ipo, kto, simpo)
