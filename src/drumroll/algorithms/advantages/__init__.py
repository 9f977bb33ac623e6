"""Advantage estimators: from rewards to one advantage per sample, or per trained token. One file per method.

An estimator is one function of `Scores`; a user's own is named as `module:function`, and decorated with
`ESTIMATORS.register(name, ...)` where it has traits.
"""

from drumroll.algorithms.advantages import dr_grpo, gae, grpo, opo, pass_at_k, positive, reinforce, remax, rloo
from drumroll.algorithms.advantages.parts import ESTIMATORS, Estimator, Scores

__all__ = ["ESTIMATORS", "Estimator", "Scores"]
METHODS = (dr_grpo, gae, grpo, opo, pass_at_k, positive, reinforce, remax, rloo)
