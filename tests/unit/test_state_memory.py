"""Ranks that divide a model divide its state: master weights, moments and gradients, in bytes of tensors."""

import contextlib

import pytest
import test_parallel
from live_memory import state_bytes
from test_memory import batch

from drumroll.algorithms.aggregations import Shares
from drumroll.algorithms.losses import PolicyLoss
from drumroll.config.algorithm import AlgorithmConfig
from drumroll.config.optim import OptimConfig
from drumroll.config.roles import ParallelConfig
from drumroll.learners import Learner, Update
from drumroll.learners.backend import LearnerSpec
from drumroll.learners.backends.torch import open_backend
from drumroll.learners.heads import LogProbHead


def state(rank, model, dtype):
    """The bytes of this rank's state in its second update, when it has moments."""
    ranks, optim = test_parallel.RANKS[-1], OptimConfig(lr=1e-4, micro_tokens=200)
    parallel = ParallelConfig(data=ranks.mesh.data, shard=ranks.mesh.shard, tensor=ranks.mesh.tensor)
    learner = Learner(open_backend(LearnerSpec(model, LogProbHead(), ranks, optim, dtype, parallel=parallel)), optim)
    work = Update(batch(4, 2, 8, 12, 60), PolicyLoss(AlgorithmConfig()), Shares("token_mean"))
    learner.update(work)
    return state_bytes(learner, work)


@pytest.fixture(scope="module")
def matrix(tmp_path_factory):
    with contextlib.closing(test_parallel.Matrix(tmp_path_factory.mktemp("models"))) as made:
        yield made


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(("layout", "model"), [({"shard": 2}, "tiny-random"), ({"tensor": 2}, "tiny-even-random")])
def test_two_ranks_hold_hardly_more_than_half_of_the_state_each(matrix, layout, model, dtype):
    (whole,) = matrix.run({}, state, model, dtype)
    assert max(matrix.run(layout, state, model, dtype)) <= 0.52 * whole
