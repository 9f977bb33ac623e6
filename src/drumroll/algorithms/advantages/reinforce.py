"""REINFORCE (Williams, 1992)."""

from torch import Tensor

from drumroll.algorithms.advantages.parts import ESTIMATORS, Scores, discounted


@ESTIMATORS.register("reinforce", per_token=True)
def reinforce(scores: Scores) -> Tensor:
    """The discounted return from each token to the end of its episode (Williams, 1992); whiten or centre rewards for a baseline."""
    assert scores.token_rewards is not None
    return discounted(scores.token_rewards, scores.chains(), scores.config.discount)
