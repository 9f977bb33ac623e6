"""ReMax (2310.10505)."""

from torch import Tensor

from drumroll.algorithms.advantages.parts import ESTIMATORS, Scores


@ESTIMATORS.register("remax", needs=("greedy",))
def remax(scores: Scores) -> Tensor:
    """Reward minus that of a greedy answer to the same prompt, which is not trained on (2310.10505)."""
    assert scores.greedy is not None
    return scores.rewards - scores.greedy
