"""A rank of Megatron-Core that fails or hangs ends the wait of its peer, and each says why."""

from functools import cache, partial

import pytest
import torch
import torch.distributed as dist
from forked import RankPool, run_ranks
from test_divided_faults import DEADLINE, OPTIM, PATIENCE, assert_left, attempt, fail, fail_in_backward, hang, work
from test_parallel import Matrix, megatron_on_cpu

from drumroll.config.learners import AXES
from drumroll.config.roles import ParallelConfig
from drumroll.errors import Interrupted, PeerFailed
from drumroll.learners import Learner
from drumroll.learners.backend import LearnerSpec
from drumroll.learners.backends.megatron import open_backend
from drumroll.learners.heads import LogProbHead
from drumroll.learners.ranks import Ranks
from drumroll.mesh import Mesh
from drumroll.processes.rendezvous import Rendezvous

LAYOUTS = {"tensor 2": {"tensor": 2}, "pipeline 2": {"pipeline": 2}, "data 2": {"data": 2}}
VOTED = ("share", "inputs", "loss", "second loss", "interrupt", "infer inputs", "infer interrupt", "load")
"""Where ranks vote: all go on as if nothing had happened."""
LEFT = ("forward", "layer backward", "clip", "step", "weights", "infer forward", "refresh")
"""Where ranks compute together: who fails leaves."""


def plant(patch, learner, where, harm):
    """Let a rank fail at a place."""
    backend, last = learner.backend, where.split()[-1]
    layer = backend.stage.decoder.layers[0]
    if last == "interrupt":
        learner.interrupt()
    elif "second" in where:
        losses = iter([learner._loss])
        patch.setattr(learner, "_loss", lambda *given: next(losses, harm)(*given))
    elif where == "layer backward":
        layer.mlp.register_forward_hook(fail_in_backward)
    else:
        planted = {
            "share": (learner, "_share"),
            "inputs": (backend, "_inputs"),
            "loss": (learner, "_loss"),
            "forward": (layer.mlp, "forward"),
            "clip": (torch.Tensor, "norm"),
            "step": (backend.optimizer.runs[0].optimizer, "step"),
            "weights": (torch, "zeros"),
            "load": ("drumroll.learners.backends.megatron.load_checkpoint",),
            "refresh": (backend.optimizer.ddp, "start_param_sync"),
        }[last]
        patch.setattr(*planted, harm)


def act(learner, where, folder):
    """Do what is to fail."""
    if where.startswith("infer"):
        learner.infer(work(1).batch)
    elif where == "weights":
        list(learner.weights())
    elif where in ("load", "refresh"):
        learner.load(folder)
    else:
        learner.update(work(1))


def rank(number, port, layout, model, checkpoint, where="", harm=fail, seconds=PATIENCE):
    """Fail on one rank, then work on: how all calls ended, and the weights at the end."""
    if dist.is_initialized():
        dist.destroy_process_group()
    mesh = Mesh(**LAYOUTS[layout], rank=number)
    rendezvous = Rendezvous("127.0.0.1", port, ("127.0.0.1",) * 2)
    ranks = Ranks.meet(mesh, rendezvous, device="cpu", seconds=seconds, patience=PATIENCE)
    megatron_on_cpu.install()
    parallel = ParallelConfig(**{axis: getattr(mesh, axis) for axis in AXES})
    learner = Learner(open_backend(LearnerSpec(model, LogProbHead(), ranks, OPTIM, parallel=parallel)), OPTIM)
    if where in ("load", "refresh"):
        learner.snapshot()
        ranks.most(0)
        learner._write(checkpoint)
        ranks.most(0)
    ends = []
    if where:
        with pytest.MonkeyPatch.context() as patch:
            if number == failing(layout, where):
                plant(patch, learner, where, harm)
            ends.append(attempt(act, learner, where, checkpoint))
        learner.backend.stop.clear()
    if where not in LEFT:
        learner.update(work(2))
        return ends, {name: tensor.clone() for name, tensor in learner.weights()}
    return [*ends, attempt(learner.infer, work(2).batch), attempt(learner.update, work(2))], {}


def failing(layout, where):
    """Only the last stage of a pipeline has losses."""
    return 1 if layout == "pipeline 2" and "loss" in where else 0


@pytest.fixture(scope="module")
def both_ranks():
    """Runs a function on two ranks that meet anew for each call."""
    with RankPool(2) as pool:
        yield partial(pool.meet, seconds=PATIENCE / 4)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return Matrix(tmp_path_factory.mktemp("model")).model("Qwen3")


@pytest.fixture(scope="module")
def undisturbed(model, both_ranks, tmp_path_factory):
    """The weights after an update without a failure before it, of a layout."""
    folder = tmp_path_factory.mktemp("checkpoint")
    return cache(lambda layout: both_ranks(rank, layout, model, folder)[0][1])


def cases(places, quick):
    """Ranks that hold the same weights infer alone; others have nothing to gather after loading."""
    alone = [("data 2", "infer forward"), ("tensor 2", "refresh"), ("pipeline 2", "refresh")]
    every = [(layout, where) for layout in LAYOUTS for where in places if (layout, where) not in alone]
    return [pytest.param(*case, marks=() if case in quick else pytest.mark.slow) for case in every]


@pytest.mark.parametrize(("layout", "where"), cases(VOTED, [("pipeline 2", "second loss")]))
def test_a_failure_on_which_ranks_vote_leaves_nothing_behind(layout, where, model, both_ranks, undisturbed, tmp_path):
    for number, (ends, weights) in enumerate(both_ranks(rank, layout, model, tmp_path, where)):
        own = Interrupted if "interrupt" in where else MemoryError
        assert [kind for kind, _ in ends] == [own if number == failing(layout, where) else Interrupted]
        truth = undisturbed(layout)
        assert weights.keys() == truth.keys()
        assert all(torch.equal(tensor, truth[name]) for name, tensor in weights.items())


@pytest.mark.parametrize(("layout", "where"), cases(LEFT, [("pipeline 2", "forward"), ("tensor 2", "layer backward")]))
def test_a_rank_that_fails_in_a_collective_leaves_its_peer_at_once(layout, where, model, both_ranks, tmp_path):
    (mine, _), (others, _) = both_ranks(rank, layout, model, tmp_path, where)
    assert mine[0] == (MemoryError, "planted")
    assert_left(mine[1:])
    assert others[0][0] is PeerFailed
    assert "Rank 1 of 2 lost its peers" in others[0][1]
    assert_left(others[1:])


@pytest.mark.slow
@pytest.mark.parametrize("where", ["forward", "weights"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_rank_that_hangs_is_waited_for_until_the_collective_deadline(layout, where, model, tmp_path):
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    arguments = (store.port, layout, model, tmp_path, where, hang, DEADLINE)
    ((ends, _),) = run_ranks(rank, 2, *arguments, seconds=PATIENCE / 4, lost=(0,))
    assert ends[0][0] is PeerFailed
    assert "did not come within cluster.collective_timeout" in ends[0][1]
    assert_left(ends[1:])
