"""Checkpoints are written beside the loop: one at a time, named in the ledger when complete, and never half."""

import asyncio
import threading

import pytest
import torch

from drumroll.config.optim import OptimConfig
from drumroll.errors import StoreError
from drumroll.learners import Learner
from drumroll.learners.backends.torch import torch_learner
from drumroll.learners.checkpoint import Snapshot
from drumroll.models.loading import load
from drumroll.store.checkpoints import Checkpoints
from drumroll.store.ledger import Ledger
from drumroll.store.saving import BackgroundSaver
from drumroll.workers.group import LocalGroup, Role
from drumroll.workers.server import WorkerServer


class World:
    """A saver, its ledger, and a part that is written when `go` is set."""

    def __init__(self, folder, keep=9):
        self.checkpoints, self.ledger = Checkpoints(folder / "checkpoints", keep), Ledger(folder / "ledger.sqlite")
        self.ledger.resume(0)
        self.seconds = []
        self.saver = BackgroundSaver(self.checkpoints, lambda: float(len(self.seconds)), self.seconds.append)
        self.go = asyncio.Event()
        self.failure = None

    async def write(self, folder):
        (folder / "half").write_text("w")
        await self.go.wait()
        if self.failure is not None:
            raise self.failure
        (folder / "weights").write_text("w")

    def start(self, step, best=None, **state):
        self.saver.start(step, {"": self.write}, {"best": best, **state}, self.ledger)

    async def whole(self, step, best=None):
        self.go.set()
        self.start(step, best)
        await self.saver.wait()
        self.go.clear()

    def seen(self):
        """Complete checkpoints, named ones, and the best."""
        return self.checkpoints.steps(), list(self.ledger.checkpoints()), self.checkpoints.best_step()


def test_a_checkpoint_is_named_when_it_is_complete(tmp_path):
    async def story():
        world, state = World(tmp_path), {"place": [1]}
        world.start(1, {"step": 1, "score": 0.5}, loop=state)
        state["place"].append(2)  # the loop goes on
        for _ in range(20):
            await asyncio.sleep(0)
        await world.saver.check()
        assert (tmp_path / "checkpoints" / ".step-000001.tmp" / "half").exists()
        assert world.seen() == ([], [], None)
        assert world.saver.best() == {"step": 1, "score": 0.5}  # the next evaluation is compared with it
        assert not world.seconds
        world.go.set()
        await world.saver.wait()
        assert world.seen() == ([1], [1], 1)
        assert world.checkpoints.state(1)["loop"] == {"place": [1]}
        assert len(world.seconds) == 1

    asyncio.run(story())


def test_older_checkpoints_go_when_the_newer_one_is_named(tmp_path):
    async def story():
        world = World(tmp_path, keep=1)
        await world.whole(1, {"step": 1, "score": 0.5})
        await world.whole(2, {"step": 1, "score": 0.5})
        assert world.seen() == ([1, 2], [1, 2], 1)
        world.start(3, {"step": 3, "score": 0.7})
        await asyncio.sleep(0.01)
        assert world.seen() == ([1, 2], [1, 2], 1)  # nothing goes while its successor is under way
        world.go.set()
        await world.saver.wait()
        assert world.seen() == ([3], [1, 2, 3], 3)

    asyncio.run(story())


def test_a_failure_is_raised_once_when_it_is_asked_for(tmp_path):
    async def story():
        world = World(tmp_path)
        await world.whole(1)
        world.failure = OSError(28, "No space left on device")
        world.start(2)
        world.go.set()
        while (tmp_path / "checkpoints" / ".step-000002.tmp").exists() or not world.saver._task.done():
            await asyncio.sleep(0)
        with pytest.raises(StoreError, match=r"cannot write .*step-000002: No space left on device. Free some space"):
            await world.saver.check()
        await world.saver.wait()
        assert world.seen() == ([1], [1], None)
        assert [p.name for p in (tmp_path / "checkpoints").iterdir()] == ["step-000001"]

    asyncio.run(story())


def test_an_abandoned_save_leaves_nothing(tmp_path):
    async def story():
        world = World(tmp_path)
        await world.whole(1)
        world.start(2)
        await asyncio.sleep(0.01)
        world.saver.abandon()
        with pytest.raises(asyncio.CancelledError):
            await world.saver.wait()
        assert world.seen() == ([1], [1], None)
        assert [p.name for p in (tmp_path / "checkpoints").iterdir()] == ["step-000001"]

    asyncio.run(story())


def test_folders_of_a_killed_process_are_removed_on_resume(tmp_path):
    async def story():
        world = World(tmp_path)
        await world.whole(1)
        (tmp_path / "checkpoints" / ".step-000002.tmp" / "master").mkdir(parents=True)
        world.checkpoints.discard_after(1)
        assert [p.name for p in (tmp_path / "checkpoints").iterdir()] == ["step-000001"]

    asyncio.run(story())


def learner():
    return torch_learner(load("tiny-random", seed=1), OptimConfig(), total_steps=1)


async def served():
    """A learner as a worker's process serves it."""
    server = WorkerServer(frozenset())
    about = await server.open(learner)
    assert "write" in about.free  # nor does the caller's side hold it back
    return server.worker, server.call


async def local():
    group = LocalGroup(Role.ACTOR, [learner()])
    return group.workers[0], lambda method, *arguments: group.call(0, getattr(Learner, method), *arguments)


@pytest.mark.parametrize("begin", [served, local])
def test_a_learner_works_while_its_snapshot_is_written(tmp_path, monkeypatch, begin):
    """The files hold the weights of the snapshot, whatever became of them meanwhile."""
    go, write = threading.Event(), Snapshot.write
    monkeypatch.setattr(Snapshot, "write", lambda self, folder: (go.wait(60), write(self, folder)))

    async def story():
        worker, call = await begin()
        await call("snapshot")
        writing = asyncio.ensure_future(call("write", tmp_path))
        await asyncio.sleep(0)
        before = [master.detach().clone() for master in worker.backend.master]
        with torch.no_grad():
            for master in worker.backend.master:
                master.add_(1.0)
        assert await call("learning_rate") > 0
        assert not writing.done()
        go.set()
        assert await writing is None
        await call("load", tmp_path)
        assert all(torch.equal(*pair) for pair in zip(worker.backend.master, before, strict=True))

    asyncio.run(story())
