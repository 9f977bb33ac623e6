"""A worker group: all workers of one role, behind calls that are the same on every runtime.

A call names the method itself (`Learner.update`), so the type checker knows its arguments and result; the runtime
sends only its name. This file must never know what a worker does.
"""

from __future__ import annotations

import asyncio
import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import ThreadPoolExecutor
from enum import StrEnum
from typing import Any, Concatenate, Generic, ParamSpec, TypeVar, overload

W = TypeVar("W")
P = ParamSpec("P")
R = TypeVar("R")
S = TypeVar("S")


class Role(StrEnum):
    """The parts a model can play."""

    ACTOR = "actor"
    ROLLOUT = "rollout"
    REFERENCE = "reference"


class WorkerGroup(ABC, Generic[W]):
    """All workers of one role."""

    def __init__(self, role: Role, size: int) -> None:
        self.role = role
        self.size = size

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

    async def broadcast(self, method: Callable[Concatenate[W, P], R], *args: P.args, **kwargs: P.kwargs) -> list[R]:
        """Run a method on all workers with the same arguments."""
        return list(await asyncio.gather(*(self._send(rank, method.__name__, args, kwargs) for rank in range(self.size))))

    async def scatter(self, method: Callable[[W, S], R], shards: Sequence[S]) -> list[R]:
        """Run a method on each worker with its own shard; results in rank order."""
        assert len(shards) == self.size, f"{self.role} has {self.size} workers, got {len(shards)} shards"
        return list(
            await asyncio.gather(*(self._send(rank, method.__name__, [shard], {}) for rank, shard in enumerate(shards)))
        )


class LocalGroup(WorkerGroup[W]):
    """Workers in this process. Coroutines run on the event loop; other methods on a thread per worker, in order."""

    def __init__(self, role: Role, workers: Sequence[W]) -> None:
        super().__init__(role, len(workers))
        self.workers = list(workers)
        self._threads = [ThreadPoolExecutor(1, f"{role}-{rank}") for rank in range(len(workers))]

    async def _send(self, rank: int, method: str, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        function = getattr(self.workers[rank], method)
        if inspect.iscoroutinefunction(function):
            return await function(*args, **kwargs)
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._threads[rank], lambda: function(*args, **kwargs))

    async def close(self) -> None:
        for worker in self.workers:
            close = getattr(worker, "close", None)
            if close is not None:
                close()
        for thread in self._threads:
            thread.shutdown(wait=False, cancel_futures=True)
