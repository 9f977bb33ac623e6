"""A rank that fails or hangs while ranks divide a model ends the wait of its peer, and each says why."""

import itertools
import time
from functools import partial

import pytest
import torch
import torch.distributed as dist
from forked import RankPool, run_ranks
from test_batch import random_groups
from test_parallel import Matrix

from drumroll.algorithms.aggregations import Shares
from drumroll.algorithms.losses import SFTLoss
from drumroll.batch import pack
from drumroll.config.optim import OptimConfig
from drumroll.config.roles import ParallelConfig
from drumroll.errors import Interrupted, PeerFailed
from drumroll.learners import Learner, Update
from drumroll.learners.backend import LearnerSpec
from drumroll.learners.backends import find_backend
from drumroll.learners.backends.division import Division
from drumroll.learners.backends.zero import Zero2, Zero3
from drumroll.learners.checkpoint import Snapshot
from drumroll.learners.heads import LogProbHead
from drumroll.learners.ranks import Ranks
from drumroll.mesh import Mesh
from drumroll.processes.rendezvous import Rendezvous
from drumroll.weights import exhausted

PATIENCE = 600.0
"""Seconds of a collective: a peer that waits for this deadline does not answer in time for the test."""
DEADLINE = 3.0
"""Seconds of a collective where a rank hangs."""
OPTIM = OptimConfig(lr=1e-3, minibatch=12, micro_tokens=12)
"""Two minibatches of several micro-batches on every rank."""
LAYOUTS = {"shard 2": {"shard": 2}, "tensor 2": {"tensor": 2}}
ZERO = {"ZeRO-2": {"zero": 2}, "ZeRO-3": {"zero": 3}, "ZeRO-3, offload": {"zero": 3, "offload": "all"}}
"""Layouts of two ranks by DeepSpeed (`test_deepspeed.py`)."""

FINE = (None, "")
"""How a call ends that does not fail."""
VOTED = (
    "minibatches",
    "share",
    "inputs",
    "loss",
    "second loss",
    "local second loss",
    "interrupt",
    "infer share",
    "infer inputs",
    "infer interrupt",
)
"""Where ranks vote: all go on as if nothing had happened."""
LEFT = ("forward", "backward", "layer backward", "sum", "clip", "step", "weights", "infer forward", "frozen forward")
"""Where ranks compute together: who fails leaves."""


def fail(*_, **__):
    raise MemoryError("planted")


def hang(*_, **__):
    time.sleep(PATIENCE)


def fail_in_backward(module, inputs, output):
    """A layer whose backward pass fails."""
    (output[0] if isinstance(output, tuple) else output).register_hook(fail)


def plant(patch, learner, where, harm=fail):
    """Let a rank fail at a place."""
    backend, last = learner.backend, where.split()[-1]
    layer = next(m for m in backend.scorer.modules() if type(m).__name__.endswith("DecoderLayer"))
    if last == "interrupt":
        learner.interrupt()
    elif "second" in where:  # after a backward pass
        losses = iter([learner._loss])
        patch.setattr(learner, "_loss", lambda *given: next(losses, harm)(*given))
    elif where == "layer backward":
        layer.mlp.register_forward_hook(fail_in_backward)
    elif where == "sum":
        plain = backend.ranks._reduce
        patch.setattr(backend.ranks, "_reduce", lambda tensor, *rest: plain(tensor, *rest) if tensor.numel() == 1 else harm())
        patch.setattr(dist, "reduce_scatter_single", harm)
        plant_in_zero(patch, backend, harm)
    elif where == "weights" and hasattr(backend, "zero"):
        patch.setattr(type(backend.zero), "whole", harm)
    else:
        planted = {
            "minibatches": (learner, "_minibatches"),
            "share": (learner, "_share"),
            "inputs": (backend, "_inputs"),
            "loss": (learner, "_loss"),
            "forward": (layer.mlp, "forward"),
            "backward": (torch.Tensor, "backward"),
            "clip": (torch.Tensor, "norm"),
            "step": (backend.optimizer, "step"),
            "weights": (Division, "whole"),
        }[last]
        patch.setattr(*planted, harm)


def plant_in_zero(patch, backend, harm):
    """Let the sums of DeepSpeed's gradients fail."""
    if isinstance(getattr(backend, "zero", None), Zero3):
        patch.setattr("deepspeed.runtime.zero.stage3.reduce_scatter_coalesced", harm)
    elif isinstance(getattr(backend, "zero", None), Zero2):
        patch.setattr(backend.zero.optimizer, "average_tensor", harm)


def act(learner, work, where):
    """Do what is to fail."""
    if where.startswith(("infer", "frozen")):
        learner.infer(work.batch)
    elif where == "weights":
        list(learner.weights())
    else:
        learner.update(work)


def join(number, port, layout, seconds):
    """Meet anew; the process may have been a rank of an earlier case."""
    if dist.is_initialized():
        dist.destroy_process_group()
    rendezvous = Rendezvous("127.0.0.1", port, ("127.0.0.1",) * 2)
    mesh = Mesh(**LAYOUTS.get(layout, {"shard": 2}), rank=number)
    return Ranks.meet(mesh, rendezvous, device="cpu", seconds=seconds, patience=PATIENCE)


def open_learner(ranks, layout, folder, where=""):
    mesh, optim = ranks.mesh, None if "frozen" in where else OPTIM
    accumulate, zero = "local" if "local" in where else "sharded", ZERO.get(layout, {})
    parallel = ParallelConfig(data=mesh.data, shard=mesh.shard, tensor=mesh.tensor, accumulate=accumulate, **zero)
    open_backend = find_backend("deepspeed" if zero else "torch")
    return Learner(open_backend(LearnerSpec(folder, LogProbHead(), ranks, optim, parallel=parallel)), OPTIM)


def attempt(action, *arguments):
    """The type and the text of the error that an action ends with."""
    try:
        action(*arguments)
    except Exception as error:
        return type(error), str(error)
    return None, ""


def work(seed):
    return Update(pack(random_groups(seed=seed)), SFTLoss(), Shares("token_mean"))


def rank(number, port, layout, folder, where="", harm=fail, seconds=PATIENCE):
    """Fail on rank 0, then work on: how all calls ended, and the weights at the end."""
    ranks = join(number, port, layout, seconds)
    learner = open_learner(ranks, layout, folder, where)
    ends = []
    if where in (*VOTED, *LEFT):
        with pytest.MonkeyPatch.context() as patch:
            if number == 0:
                plant(patch, learner, where, harm)
            ends.append(attempt(act, learner, work(1), where))
        learner.backend.stop.clear()
    if where not in LEFT:
        learner.update(work(2))
        return ends, {name: tensor.clone() for name, tensor in learner.weights()}
    ends.append(attempt(learner.infer, work(2).batch))
    if not where.startswith("frozen"):
        ends += [attempt(learner.update, work(2)), attempt(lambda: list(learner.weights()))]
    return ends, {}


@pytest.fixture(scope="module")
def both_ranks():
    """Runs a function on two ranks that meet anew for each call."""
    with RankPool(2) as pool:
        yield partial(pool.meet, seconds=PATIENCE / 4)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return Matrix(tmp_path_factory.mktemp("model")).model("Qwen3")


@pytest.fixture(scope="module")
def undisturbed(folder, both_ranks):
    """The weights after an update without a failure before it, by layout and where gradients accumulate."""
    choices = itertools.product(LAYOUTS, ("sharded", "local"))
    return {(layout, choice): both_ranks(rank, layout, folder, choice)[0][1] for layout, choice in choices}


@pytest.mark.parametrize("where", VOTED)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_failure_on_which_ranks_vote_leaves_nothing_behind(layout, where, folder, both_ranks, undisturbed):
    truth = undisturbed[layout, "local" if "local" in where else "sharded"]
    for number, (ends, weights) in enumerate(both_ranks(rank, layout, folder, where)):
        own = Interrupted if "interrupt" in where else MemoryError
        assert [kind for kind, _ in ends] == [own if number == 0 else Interrupted]
        assert weights.keys() == truth.keys()
        assert all(torch.equal(tensor, truth[name]) for name, tensor in weights.items())


@pytest.mark.parametrize("where", LEFT)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_rank_that_fails_in_a_collective_leaves_its_peer_at_once(layout, where, folder, both_ranks):
    (mine, _), (others, _) = both_ranks(rank, layout, folder, where)
    assert mine[0] == (MemoryError, "planted")
    assert_left(mine[1:])
    assert others[0][0] is PeerFailed
    assert "Rank 1 of 2 lost its peers" in others[0][1]
    assert_left(others[1:])


def assert_left(ends):
    assert ends
    for kind, text in ends:
        assert kind is PeerFailed
        assert "has left its peers after a failure; start the run again." in text


@pytest.mark.parametrize("where", ["forward", "backward", "weights", "frozen forward"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_rank_that_hangs_is_waited_for_until_the_collective_deadline(layout, where, folder):
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    arguments = (store.port, layout, folder, where, hang, DEADLINE)
    ((ends, _),) = run_ranks(rank, 2, *arguments, seconds=PATIENCE / 4, lost=(0,))
    assert ends[0][0] is PeerFailed
    assert "did not come within cluster.collective_timeout" in ends[0][1]
    assert_left(ends[1:])


# --- calls in which ranks do not wait for each other ---


def publish(number, port, layout, folder):
    """Rank 0 stops taking weights, as where its receivers fail."""
    learner = open_learner(join(number, port, layout, PATIENCE), layout, folder)

    def take():
        with exhausted(learner.weights()) as weights:
            for count, _ in enumerate(weights):
                if number == 0 and count == 2:
                    fail()

    return attempt(take), attempt(learner.update, work(1))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_rank_whose_receivers_fail_goes_on_gathering_for_its_peer(layout, folder, both_ranks):
    assert both_ranks(publish, layout, folder) == [((MemoryError, "planted"), FINE), (FINE, FINE)]


def save_and_load(number, port, layout, folder, checkpoint, where):
    """Rank 0 fails in a call, and the calls after it: which calls failed, and with what."""
    learner = open_learner(join(number, port, layout, PATIENCE), layout, folder)
    calls = {
        "snapshot": learner.snapshot,
        "write": lambda: learner._write(checkpoint),
        "load": lambda: learner.load(checkpoint),
    }
    with pytest.MonkeyPatch.context() as patch:
        if number == 0:
            planted = {
                "snapshot": (Snapshot, "take"),
                "write": (Snapshot, "write"),
                "load": (learner.backend, "_refresh_working"),
            }
            patch.setattr(*planted[where], fail)
        ends = []
        for name, call in calls.items():
            ends.append(attempt(call))
            learner.backend.ranks.most(0)  # the controller waits for all ranks between two calls
            if name == where:
                break
    return [*ends, attempt(learner.update, work(1))]


@pytest.mark.parametrize("where", ["snapshot", "write", "load"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_rank_that_fails_in_a_checkpoint_tells_and_stays(layout, where, folder, both_ranks, tmp_path):
    """Each rank reads and writes alone: nobody waits for the one that fails, and the group stays usable."""
    mine, others = both_ranks(save_and_load, layout, folder, tmp_path, where)
    assert mine[-2:] == [(MemoryError, "planted"), FINE]
    assert set(others) == set(mine[:-2]) | {FINE} == {FINE}
