"""RAFT (2304.06767) and RAFT++ (2504.11343)."""

from torch import Tensor

from drumroll.algorithms.advantages.parts import ESTIMATORS, Scores


@ESTIMATORS.register("positive")
def positive(scores: Scores) -> Tensor:
    """1 for samples with a reward above 0, else 0: learn from successes only (RAFT, 2304.06767; RAFT++, 2504.11343)."""
    return scores.successes().to(scores.rewards.dtype)
