"""A worker group: all workers of one role, behind calls that are the same on every runtime.

A call names the method itself (`Learner.update`), so the type checker knows its arguments and result; the runtime
sends only its name. This file must never know what a worker does.
"""

from __future__ import annotations

import asyncio
import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable, Coroutine, Sequence
from enum import StrEnum
from typing import Any, Concatenate, Generic, ParamSpec, TypeVar, overload

from drumroll.errors import Interrupted, PeerFailed
from drumroll.mesh import Mesh
from drumroll.placement.devices import DeviceSet
from drumroll.processes.threads import SerialExecutor
from drumroll.workers.server import WorkerLost

W = TypeVar("W", covariant=True)  # a group of `LearnerWorker`s is a group of `Learner`s
P = ParamSpec("P")
R = TypeVar("R")
T = TypeVar("T")
GRACE = 30.0
"""Seconds that the other workers of a call have to end after one has failed."""


class Role(StrEnum):
    """The parts a model can play."""

    ACTOR = "actor"
    ROLLOUT = "rollout"
    REFERENCE = "reference"
    TEACHER = "teacher"
    CRITIC = "critic"
    JUDGE = "judge"
    REWARD_MODEL = "reward_model"
    BATCH_BUILDER = "batch_builder"
    REWARD = "reward"


class WorkerGroup(ABC, Generic[W]):
    """All workers of one role."""

    def __init__(self, role: Role, size: int) -> None:
        self.role = role
        self.size = size
        self.mesh = Mesh(data=max(1, size))

    @abstractmethod
    async def _send(self, rank: int, method: str, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """Run a method on one worker and return its result."""

    @abstractmethod
    async def close(self) -> None:
        """Free the workers."""

    @overload
    async def call(
        self, rank: int, method: Callable[Concatenate[W, P], Coroutine[Any, Any, R]], *args: P.args, **kwargs: P.kwargs
    ) -> R: ...
    @overload
    async def call(self, rank: int, method: Callable[Concatenate[W, P], R], *args: P.args, **kwargs: P.kwargs) -> R: ...
    async def call(self, rank: int, method: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Run a method on one worker."""
        return await self._send(rank, method.__name__, args, kwargs)

    @overload
    async def broadcast(
        self, method: Callable[Concatenate[W, P], Coroutine[Any, Any, R]], *args: P.args, **kwargs: P.kwargs
    ) -> list[R]: ...
    @overload
    async def broadcast(self, method: Callable[Concatenate[W, P], R], *args: P.args, **kwargs: P.kwargs) -> list[R]: ...
    async def broadcast(self, method: Callable[..., Any], *args: Any, **kwargs: Any) -> list[Any]:
        """Run a method on all workers with the same arguments; results in rank order."""
        return await _together(*(self._send(rank, method.__name__, args, kwargs) for rank in range(self.size)))

    async def keep(self, rank: int, method: Callable[Concatenate[W, P], R], *args: P.args, **kwargs: P.kwargs) -> R:
        """Run a method and leave its result where it is; what is returned stands for it in other calls."""
        return await self._send(rank, method.__name__, args, kwargs)

    async def scatter(self, method: Callable[Concatenate[W, P], R], *args: P.args, **kwargs: P.kwargs) -> list[R]:
        """Run a method on all workers, each on its share of a batch; returns a reference to the result for each share.

        A worker cuts its own share (`Batch.shares`, balanced by tokens), so a batch moves once to a host, not through here.
        Workers at the same data coordinates have the same share: the first of them answers for it.
        """
        kept = await _together(*(self.keep(rank, method, *args, **kwargs) for rank in range(self.size)))
        return [kept[rank] for rank in self.mesh.leaders()]

    def put(self, value: T) -> T:
        """A reference to a large value, valid as an argument of this group's calls."""
        return value

    def post(self, rank: int, method: Callable[Concatenate[W, P], Any], *args: P.args, **kwargs: P.kwargs) -> None:
        """Run a method without waiting for it. A lost worker raises no error here."""
        task = asyncio.ensure_future(self._send(rank, method.__name__, args, kwargs))
        task.add_done_callback(lambda done: done.cancelled() or done.exception())


class ReplaceableGroup(WorkerGroup[W]):
    """Workers in processes that may die, each on its devices."""

    device_sets: list[DeviceSet]

    @abstractmethod
    async def lost(self, rank: int) -> WorkerLost:
        """Wait until a worker's process is gone; says how."""

    @abstractmethod
    async def replace(self, rank: int, devices: DeviceSet | None = None) -> None:
        """Make a worker anew in a new process, on its devices or others; what runs in the old one is lost."""

    @abstractmethod
    def kill(self, rank: int) -> None:
        """End a worker's process."""


async def _together(*calls: Coroutine[Any, Any, R]) -> list[R]:
    """All results; of several failures the most telling one: a lost worker, then causes before their consequences.

    After a failure the other calls get `GRACE` seconds to end, and none after a lost worker.
    """
    tasks = [asyncio.ensure_future(call) for call in calls]
    if not tasks:
        return []
    try:
        done, pending = await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
        if pending and not any(isinstance(task.exception(), WorkerLost) for task in done):
            await asyncio.wait(pending, timeout=GRACE, return_when=asyncio.ALL_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()
    failures = [error for task in tasks if task.done() and not task.cancelled() and (error := task.exception())]
    if failures:
        raise min(failures, key=_consequence)
    return [task.result() for task in tasks]


def _consequence(failure: BaseException) -> int:
    """How far a failure is from its cause."""
    if isinstance(failure, WorkerLost):
        return 0
    return 3 if isinstance(failure, Interrupted) else 2 if isinstance(failure, PeerFailed) else 1


class LocalGroup(WorkerGroup[W]):
    """Workers in this process. Coroutines run on the event loop; other methods of a worker on a thread, in order."""

    def __init__(self, role: Role, workers: Sequence[W]) -> None:
        super().__init__(role, len(workers))
        self.workers = list(workers)
        self._executors = [SerialExecutor(f"{role}-{rank}") for rank in range(len(workers))]

    async def _send(self, rank: int, method: str, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        function = getattr(self.workers[rank], method)
        if inspect.iscoroutinefunction(function):
            return await function(*args, **kwargs)
        return await asyncio.wrap_future(self._executors[rank].submit(lambda: function(*args, **kwargs)))

    async def close(self) -> None:
        for worker in self.workers:
            close = getattr(worker, "close", None)
            if close is not None:
                close()
