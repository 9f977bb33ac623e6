"""Advantage estimators: from rewards to one advantage per sample, or per trained token. One file per method.

An estimator is one function of `Scores`; a user's own is named as `module:function`, and decorated with
`ESTIMATORS.register(name, ...)` where it has traits.
"""

from drumroll.algorithms.advantages import dr_grpo, gae, gigpo, grpo, opo, pass_at_k, positive, reinforce, remax, rloo, turns
from drumroll.algorithms.advantages.parts import ESTIMATORS, Estimator, Scores, TurnScores

__all__ = ["ESTIMATORS", "Estimator", "Scores", "TurnScores"]
METHODS = (dr_grpo, gae, gigpo, grpo, opo, pass_at_k, positive, reinforce, remax, rloo, turns)
