"""Processes for rewards and environments on the machines of a cluster.

This file must never import torch, nor a file that does: its processes would take seconds to start.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

from drumroll import objects
from drumroll.processes.deadline import CpuTimeExceeded
from drumroll.processes.pool import KillablePool, RemoteError
from drumroll.workers.ray_group import RayGroup
from drumroll.workers.server import WorkerLost


class RewardWorker:
    """One process for rewards that can be killed, on whatever machine this actor is."""

    def __init__(self, packed: Mapping[str, bytes | str] | None = None) -> None:
        objects.unpack(packed or {})
        self.pool: KillablePool | None = None

    async def run(self, path: str, arguments: dict[str, Any], seconds: float, cpu: bool, search: list[str]) -> Any:
        self.pool = self.pool or KillablePool(1, search)
        return await self.pool.call(path, arguments, seconds, cpu)

    async def close(self) -> None:
        """End the process."""
        if self.pool is not None:
            await self.pool.close()


class RewardPool:
    """`KillablePool` over actors: the same calls, on the machines of a cluster."""

    def __init__(
        self,
        size: int,
        open_group: Callable[[], RayGroup[RewardWorker]],
        search: list[str],
        notify: Callable[[str], None] = lambda text: None,
        struck: Counter[str] | None = None,
    ) -> None:
        """The first call opens the group: most built-in rewards need no process."""
        self.group: RayGroup[RewardWorker] | None = None
        self.search = search
        self.notify = notify
        self.restarts = 0
        self.struck: Counter[str] = Counter() if struck is None else struck
        self._open_group = open_group
        self._free = list(range(size))
        self._places = asyncio.Semaphore(size)

    async def call(self, path: str, arguments: dict[str, Any], seconds: float, cpu: bool = False) -> Any:
        """The function's result; a machine that is lost costs another try elsewhere."""
        self.group = group = self.group or self._open_group()
        while True:
            async with self._places:
                rank = self._free.pop()
                try:
                    return await group.call(rank, RewardWorker.run, path, arguments, seconds, cpu, self.search)
                except WorkerLost as lost:
                    self.restarts += 1
                    self.notify(str(lost))
                    await group.replace(rank)
                except RemoteError:
                    raise
                except CpuTimeExceeded:
                    self.struck["cpu"] += 1
                    raise
                except BaseException as error:
                    self.restarts += 1  # `RewardWorker` has killed the process
                    self.struck["wall"] += isinstance(error, TimeoutError)
                    raise
                finally:
                    self._free.append(rank)

    async def close(self) -> None:
        """End all processes."""
        if self.group is not None:
            await self.group.close()
