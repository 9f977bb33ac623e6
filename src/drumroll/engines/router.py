"""Which engine gets the next request: least loaded, sticky to shared prefixes, aware of engines coming and going.

A request is bound to an engine only when a slot is free, oldest draw first, so no request waits behind a busy engine
while another idles. Slots are counted here; whoever takes one gives it back exactly once.
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
        """Slots that could take a request now."""
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

    # --- engines come and go ---

    def join(
        self,
        name: str,
        generate: Callable[[Request], Awaitable[Completion]],
        capacity: int,
        interrupt: Callable[[], None] = lambda: None,
    ) -> None:
        """A new engine, or one that is back."""
        self.leave(name)
        route = Route(name, generate, capacity, interrupt)
        self.routes[name] = route
        self.hopeless = None
        self._expected.discard(name)
        self._watch()
        self._offer(route)
        self._grant()

    def leave(self, name: str) -> None:
        """No new requests for this engine; those under way go on."""
        route = self.routes.pop(name, None)
        if route is None:
            return
        route.alive = False
        self._watch()

    def expect(self, name: str, coming: bool = True) -> None:
        """An engine is being started under this name, which may take its time; or it is no longer."""
        (self._expected.add if coming else self._expected.discard)(name)
        self._watch()

    def _watch(self) -> None:
        """The time without an engine counts only while none is being started."""
        wanted = not self.routes and not self._expected
        if not wanted and self._alarm is not None:
            self._alarm.cancel()
            self._alarm = None
        elif wanted and self._alarm is None:
            self._alarm = asyncio.get_running_loop().call_later(self.engine_timeout, self._give_up)

    def rest(self, name: str) -> None:
        """The engine's device is needed elsewhere for a while: what runs on it is interrupted, and may go on at others."""
        if name in self.routes:
            self.routes[name].resting = True
            self.routes[name].interrupt()

    def back(self, name: str) -> None:
        """The device has been given back."""
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
        """Interrupt what is running (engines return what they have) and start nothing until `resume`."""
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
        """Wait for a slot (requests of one `key` prefer one engine), generate within a deadline, give the slot back.

        The deadline counts from the moment the slot was got; `started` is called then.
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
        """Requests of this key are over."""
        self._sticky.pop(key, None)

    def busy(self) -> int:
        """Slots taken on the engines that are listed."""
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
        """Hand free slots to those who wait, oldest draw first."""
        while self._waiting:
            if self._waiting[0].granted.done():  # cancelled meanwhile
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
            heapq.heappop(self._loads)  # out of date: a newer entry exists, or the engine is full or gone
        return None

    def _offer(self, route: Route) -> None:
        """Enter an engine's present load; entries that no longer hold are skipped when they surface."""
        if route.free > 0:
            heapq.heappush(self._loads, (route.running, next(self._count), route))
        if len(self._loads) > 64 + 4 * len(self.routes):
            self._loads = [(r.running, next(self._count), r) for r in self.routes.values() if r.free > 0]
            heapq.heapify(self._loads)
