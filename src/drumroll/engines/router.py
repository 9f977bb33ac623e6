"""Routes requests to engines: least loaded first, sticky to shared prefixes, with engines that join and leave.

The router binds a request to an engine only when a slot is free, oldest draw first, so no request waits behind a busy
engine while another is idle. The router counts the slots; each slot taken is released exactly once.
"""

from __future__ import annotations

import asyncio
import heapq
import itertools
import math
from collections.abc import Awaitable, Callable, Hashable
from dataclasses import dataclass, field

from drumroll.engines import Completion, EngineLost, Request
from drumroll.errors import NoEngines


@dataclass
class Route:
    """An engine as the router sees it."""

    name: str
    generate: Callable[[Request], Awaitable[Completion]]
    capacity: int
    interrupt: Callable[[], None]
    running: int = 0
    alive: bool = True
    resting: bool = False

    @property
    def free(self) -> int:
        """The number of slots that could take a request now."""
        return self.capacity - self.running if self.alive and not self.resting else 0


@dataclass(order=True)
class _Waiter:
    priority: int
    number: int
    granted: asyncio.Future[Route] = field(compare=False)
    key: Hashable = field(compare=False)


class Router:
    """Binds requests to engines."""

    def __init__(self, engine_timeout: float = 60.0) -> None:
        self.engine_timeout = engine_timeout
        self.routes: dict[str, Route] = {}
        self._sticky: dict[Hashable, Route] = {}
        self._loads: list[tuple[int, int, Route]] = []
        self._waiting: list[_Waiter] = []
        self._count = itertools.count()
        self._paused = False
        self._expected: set[str] = set()
        self._alarm: asyncio.TimerHandle | None = None
        self.hopeless: NoEngines | None = None
        self.on_hopeless: Callable[[], None] = lambda: None

    # --- engines join and leave ---

    def join(
        self,
        name: str,
        generate: Callable[[Request], Awaitable[Completion]],
        capacity: int,
        interrupt: Callable[[], None] = lambda: None,
    ) -> None:
        """Add a new engine, or one that is back."""
        self.leave(name)
        route = Route(name, generate, capacity, interrupt)
        self.routes[name] = route
        self.hopeless = None
        self._expected.discard(name)
        self._watch()
        self._offer(route)
        self._grant()

    def leave(self, name: str) -> None:
        """Send no new requests to this engine; running ones continue."""
        route = self.routes.pop(name, None)
        if route is None:
            return
        route.alive = False
        self._watch()

    def expect(self, name: str, coming: bool = True) -> None:
        """Record that an engine is starting under this name, which may take a while, or (`coming=False`) no longer is."""
        (self._expected.add if coming else self._expected.discard)(name)
        self._watch()

    def _watch(self) -> None:
        """Run the `engine_timeout` timer only while there is no engine and none is starting."""
        wanted = not self.routes and not self._expected
        if not wanted and self._alarm is not None:
            self._alarm.cancel()
            self._alarm = None
        elif wanted and self._alarm is None:
            self._alarm = asyncio.get_running_loop().call_later(self.engine_timeout, self._give_up)

    def rest(self, name: str) -> None:
        """Interrupt an engine whose device is needed elsewhere for a while; its requests may continue on other engines."""
        if name in self.routes:
            self.routes[name].resting = True
            self.routes[name].interrupt()

    def back(self, name: str) -> None:
        """Resume an engine whose device is free again."""
        if name in self.routes:
            self.routes[name].resting = False
            self._offer(self.routes[name])
            self._grant()

    def _give_up(self) -> None:
        self.hopeless = NoEngines(
            f"no engine has been alive for {self.engine_timeout:g} s; {len(self._waiting)} samples wait for one."
        )
        waiting, self._waiting = self._waiting, []
        for waiter in waiting:
            if not waiter.granted.done():
                waiter.granted.set_exception(EngineLost(str(self.hopeless)))
        self.on_hopeless()

    def pause(self) -> None:
        """Interrupt all running requests (engines return their tokens so far) and start none until `resume`."""
        self._paused = True
        for route in self.routes.values():
            route.interrupt()

    def resume(self) -> None:
        """Start requests again."""
        self._paused = False
        self._grant()

    # --- requests ---

    async def generate(
        self, request: Request, key: Hashable, priority: int, seconds: float, started: Callable[[], None]
    ) -> Completion:
        """Wait for a slot (requests with the same `key` prefer one engine), generate within a deadline, and release the slot.

        The deadline starts when the slot is acquired; `started` is called then.
        """
        route = await self._acquire(key, priority)
        try:
            started()
            async with asyncio.timeout(None if seconds == math.inf else seconds):
                return await route.generate(request)
        except EngineLost:
            if self.routes.get(route.name) is route:
                self.leave(route.name)
            raise
        finally:
            self._release(route)

    def forget(self, key: Hashable) -> None:
        """Drop the engine preference of this key: it has no more requests."""
        self._sticky.pop(key, None)

    def busy(self) -> int:
        """Return the number of slots taken on the current engines."""
        return sum(route.running for route in self.routes.values())

    async def _acquire(self, key: Hashable, priority: int) -> Route:
        if self.hopeless is not None:
            raise EngineLost(str(self.hopeless))
        route = None if self._waiting else self._pick(key)
        if route is None:
            waiter = _Waiter(priority, next(self._count), asyncio.get_running_loop().create_future(), key)
            heapq.heappush(self._waiting, waiter)
            try:
                return await waiter.granted
            except asyncio.CancelledError:
                if waiter.granted.done() and not waiter.granted.cancelled() and waiter.granted.exception() is None:
                    self._release(waiter.granted.result())
                raise
        return self._take(route, key)

    def _take(self, route: Route, key: Hashable) -> Route:
        route.running += 1
        self._sticky[key] = route
        self._offer(route)
        return route

    def _release(self, route: Route) -> None:
        route.running -= 1
        assert route.running >= 0, f"engine {route.name} was given a slot back twice"
        self._offer(route)
        self._grant()

    def _grant(self) -> None:
        """Give free slots to waiting requests, oldest draw first."""
        while self._waiting:
            if self._waiting[0].granted.done():  # cancelled in the meantime
                heapq.heappop(self._waiting)
                continue
            route = self._pick(self._waiting[0].key)
            if route is None:
                return
            waiter = heapq.heappop(self._waiting)
            waiter.granted.set_result(self._take(route, waiter.key))

    def _pick(self, key: Hashable) -> Route | None:
        if self._paused:
            return None
        sticky = self._sticky.get(key)
        if sticky is not None and sticky.free > 0:
            return sticky
        while self._loads:
            load, _, route = self._loads[0]
            if route.free > 0 and route.running == load:
                return route
            heapq.heappop(self._loads)  # outdated: a newer entry exists, or the engine is full or gone
        return None

    def _offer(self, route: Route) -> None:
        """Push an engine's current load; outdated entries are skipped when they reach the top."""
        if route.free > 0:
            heapq.heappush(self._loads, (route.running, next(self._count), route))
        if len(self._loads) > 64 + 4 * len(self.routes):
            self._loads = [(r.running, next(self._count), r) for r in self.routes.values() if r.free > 0]
            heapq.heapify(self._loads)
