"""A rank that fails in an update ends the update on its peers at once, and the controller reports the cause."""

import asyncio
import time
from queue import Empty

import pytest
import torch
import torch.distributed as dist
from forked import FORKED
from test_learner import batch

from drumroll.algorithms.aggregations import Shares
from drumroll.algorithms.losses import SFTLoss
from drumroll.config.optim import OptimConfig
from drumroll.errors import Interrupted, PeerFailed
from drumroll.learners import Update
from drumroll.learners.backends.torch import torch_learner
from drumroll.learners.ranks import Ranks
from drumroll.mesh import Mesh
from drumroll.models.loading import load
from drumroll.processes.rendezvous import Rendezvous
from drumroll.workers import group
from drumroll.workers.group import LocalGroup, Role
from drumroll.workers.server import WorkerLost

PATIENCE = 600.0
"""Seconds of a collective: a peer that waits for this deadline does not answer in time for the test."""


def rank(number, port, where, seconds, answers):
    """Train twice; rank 0 fails at `where` in the first update. Tells how both updates ended."""
    torch.set_num_threads(1)
    ranks = Ranks.meet(
        Mesh(data=2, rank=number),
        Rendezvous("127.0.0.1", port, ("127.0.0.1",) * 2),
        device="cpu",
        seconds=seconds,
        patience=PATIENCE,
    )
    learner = torch_learner(load("tiny-random", seed=1), OptimConfig(lr=1e-2), total_steps=1, ranks=ranks)
    work = Update(batch(), SFTLoss(), Shares("token_mean"))
    before = [p.detach().clone() for p in learner.backend.master]

    if where == "absent" and number == 0:
        answers.put((0, [], True))
        time.sleep(PATIENCE)

    def fail(*_, **__):
        raise MemoryError("planted")

    def fail_in_sum(tensor, op, group, plain=ranks._reduce):
        return plain(tensor, op, group) if tensor.numel() == 1 else fail()

    ends = []
    for attempt in range(2):
        with pytest.MonkeyPatch.context() as patch:
            if number == 0 and attempt == 0:
                planted = {
                    "minibatches": (learner, "_minibatches"),
                    "aggregate": (learner, "_share"),
                    "infer": (learner, "_share"),
                    "loss": (learner, "_loss"),
                    "backward": (torch.Tensor, "backward"),
                    "clip": (torch.nn.utils, "clip_grad_norm_"),
                    "step": (learner.backend.optimizer, "step"),
                    "sum": (ranks, "_reduce"),
                }[where]
                patch.setattr(*planted, fail_in_sum if where == "sum" else fail)
            try:
                learner.infer(work.batch) if where == "infer" else learner.update(work)
                ends.append("trained")
            except Exception as error:
                ends.append(type(error).__name__)
    same = all(torch.equal(a, b) for a, b in zip(before, learner.backend.master, strict=True))
    answers.put((number, ends, same))
    time.sleep(PATIENCE)  # a process that ends would end the wait of its peers


def two_ranks(where, seconds=PATIENCE):
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    answers = FORKED.Queue()
    started = [FORKED.Process(target=rank, args=(n, store.port, where, seconds, answers)) for n in range(2)]
    try:
        for process in started:
            process.start()
        return {number: (ends, same) for number, ends, same in (answers.get(timeout=PATIENCE / 4) for _ in started)}
    except Empty:
        pytest.fail("a rank still waits for the one that failed")
    finally:
        for process in started:
            process.kill()
            process.join()


@pytest.mark.parametrize("where", ["minibatches", "aggregate", "loss", "backward", "clip", "infer"])
def test_what_fails_before_the_step_is_voted_on(where):
    """No rank steps, and the group stays usable."""
    ends = two_ranks(where)
    assert ends[0][0] == ["MemoryError", "trained"]
    assert ends[1][0] == ["Interrupted", "trained"]


@pytest.mark.parametrize("where", ["sum", "step"])
def test_what_fails_in_the_step_ends_the_wait_of_the_others(where):
    ends = two_ranks(where)
    assert ends[0] == (["MemoryError", "PeerFailed"], True)
    assert ends[1][0][-1] == "PeerFailed"
    assert ends[1][1] is (where == "sum")  # a peer that has summed steps alone, and fails in the next update


def test_a_peer_that_never_comes_is_waited_for_until_the_collective_deadline():
    assert two_ranks("absent", seconds=3.0)[1][0][0] == "PeerFailed"


class Part:
    """A worker that fails, or waits for ever."""

    def __init__(self, failure=None):
        self.failure = failure

    async def work(self):
        if self.failure is None:
            await asyncio.Event().wait()
        raise self.failure


LOST = WorkerLost("actor", 0, "planted", "the run stops")


@pytest.mark.parametrize(
    ("failures", "told"),
    [
        ([PeerFailed("b"), MemoryError("a")], MemoryError),
        ([Interrupted("c"), PeerFailed("b")], PeerFailed),
        ([MemoryError("a"), None], MemoryError),
        ([None, MemoryError("a"), LOST], WorkerLost),
        ([None, LOST], WorkerLost),
    ],
)
def test_the_first_failure_ends_a_call_and_the_cause_is_told(monkeypatch, failures, told):
    """A worker that never answers is left after a grace period, and without one when another is lost."""
    monkeypatch.setattr(group, "GRACE", PATIENCE if LOST in failures else 0.05)
    workers = LocalGroup(Role.ACTOR, [Part(failure) for failure in failures])
    with pytest.raises(told):
        asyncio.run(asyncio.wait_for(workers.broadcast(Part.work), PATIENCE / 4))
