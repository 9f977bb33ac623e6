"""The engines of a role behind one queue: those that are lost are replaced, those on devices that train rest meanwhile.

An engine enters the queue only under the lock that training holds too, so none ever generates on a device that trains.
This file knows no Ray.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Collection

from drumroll.engines import Completion, Engine, EngineLost, Request
from drumroll.engines.router import Router
from drumroll.placement.devices import DeviceSet
from drumroll.workers.group import ReplaceableGroup
from drumroll.workers.server import WorkerLost


class EnginePool:
    """Engines that come and go. `prepare` brings a new one to the present state before it gets work."""

    def __init__(
        self,
        group: ReplaceableGroup[Engine],
        router: Router,
        lock: asyncio.Lock,
        *,
        trained: Collection[int] = (),
        replaces: bool = True,
        elsewhere: Callable[[DeviceSet], DeviceSet] = lambda devices: devices,
        prepare: Callable[[], Awaitable[None]] | None = None,
        notify: Callable[[str], None] = lambda text: None,
    ) -> None:
        """`trained`: devices that training uses; `elsewhere`: where to start an engine anew, given where it was."""
        self.group, self.router, self.lock, self.trained = group, router, lock, frozenset(trained)
        self.replaces, self.elsewhere, self.prepare, self.notify = replaces, elsewhere, prepare, notify
        self.lost: set[int] = set()
        self._abandoned: set[int] = set()
        self._preparing: int | None = None
        self._lives = [0] * group.size
        self._reasons: dict[int, str] = {}
        self._resting: list[int] = []
        self._watching: list[asyncio.Task[None]] = []

    async def start(self) -> None:
        """Put all engines behind the queue, and watch them."""
        for rank in range(self.group.size):
            await self._join(rank)
            self._watching.append(asyncio.ensure_future(self._watch(rank)))

    def living(self) -> list[int]:
        """The engines that are there."""
        return [rank for rank in range(self.group.size) if rank not in self.lost]

    def coming(self) -> bool:
        """Whether a lost engine is still to be started again, and prepared then; one that dies while it is prepared is not."""
        return self.replaces and bool(self.lost - self._abandoned - {self._preparing})

    def condemn(self, rank: int, why: str) -> None:
        """Kill and replace an unusable engine."""
        if rank not in self._reasons:
            self.lost.add(rank)
            self._reasons[rank] = why
            self.group.kill(rank)

    def close(self) -> None:
        """Stop watching the engines."""
        for task in self._watching:
            task.cancel()

    # --- turns on shared devices ---

    def sharing(self) -> list[int]:
        """The engines on devices that training uses, as they lie now; those that are being replaced too."""
        return [rank for rank, devices in enumerate(self.group.device_sets) if self._trains(devices)]

    async def rest(self) -> None:
        """Leave the devices that train: what runs there is interrupted and goes on elsewhere, or later."""
        self._resting = [rank for rank in self.sharing() if rank not in self.lost]
        for rank in self._resting:
            self.router.rest(self._name(rank))
        await asyncio.gather(*(self.group.call(rank, Engine.sleep) for rank in self._resting), return_exceptions=True)

    async def back(self) -> None:
        """Take the devices again."""
        await asyncio.gather(*(self.group.call(rank, Engine.wake) for rank in self._resting), return_exceptions=True)
        for rank in self._resting:
            self.router.back(self._name(rank))
        self._resting = []

    def _trains(self, devices: DeviceSet) -> bool:
        return any(device.index in self.trained for device in devices)

    # --- coming and going ---

    async def _join(self, rank: int) -> None:
        life = self._lives[rank]

        async def generate(request: Request) -> Completion:
            try:
                return await self.group.call(rank, Engine.generate, request)
            except WorkerLost as lost:
                raise EngineLost(str(lost)) from None
            except EngineLost as error:
                if self._lives[rank] == life:
                    self.condemn(rank, str(error))
                raise

        capacity = await self.group.call(rank, Engine.capacity)
        self.router.join(self._name(rank), generate, capacity, lambda: self.group.post(rank, Engine.interrupt))

    async def _watch(self, rank: int) -> None:
        """When an engine's process is gone: say so, send its requests elsewhere, start another."""
        while True:
            lost = await self.group.lost(rank)
            self._lives[rank] += 1
            self.lost.add(rank)
            self.router.expect(self._name(rank), self.replaces)
            self.router.leave(self._name(rank))
            self.notify(str(WorkerLost(lost.role, rank, self._reasons.pop(rank, lost.why), lost.then)))
            if not self.replaces:
                return
            try:
                await self._revive(rank)
            except Exception as error:
                self.lost.add(rank)
                self._abandoned.add(rank)
                self.router.expect(self._name(rank), False)
                self.notify(f"{self.group.role} rank {rank} could not be started again: {error}")
                return

    async def _revive(self, rank: int) -> None:
        """Nobody waits while an engine starts on a device of its own; one on a device that trains starts in its turn."""
        devices = self.elsewhere(self.group.device_sets[rank])
        if not self._trains(devices):
            await self.group.replace(rank, devices)
        async with self.lock:
            if self._trains(devices):
                await self.group.replace(rank, devices)
            self.lost.discard(rank)
            self._preparing = rank
            try:
                if self.prepare is not None:
                    await self.prepare()
            finally:
                self._preparing = None
            if rank not in self.lost:
                await self._join(rank)

    def _name(self, rank: int) -> str:
        return f"{self.group.role}-{rank}"
