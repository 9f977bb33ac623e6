"""Where an environment's code runs: on an event loop, in a thread, or in a process that can be killed.

Every call has a deadline that counts from when its place was got. Nothing here may hold up generation.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any, Protocol, TypeVar

from typing_extensions import override

from drumroll.config.environment import EnvironmentConfig
from drumroll.envs import Observation, Step
from drumroll.envs.runner import Runner, check_observation, check_step, where
from drumroll.processes.loops import Loop
from drumroll.processes.pool import RemoteError, WorkerDied
from drumroll.rewards import Pool
from drumroll.sample import Scene

THREADS = 256
"""Calls in threads at once; a thread that hangs gives its place back and is left behind."""
PLAY, LEAVE = "drumroll.envs.runner:play", "drumroll.envs.runner:leave"
GROWN = ("MemoryError", "TooMuchMemory")
"""Errors after which a process is replaced."""
T = TypeVar("T")


class Executor(Protocol):
    """One episode, wherever it runs. `printed` is what its last call wrote to standard output, where that is caught."""

    printed: str

    async def reset(self, seed: int, row: Mapping[str, Any], seconds: float) -> Observation: ...
    async def step(self, text: str, seconds: float) -> Step: ...
    def close(self) -> None: ...


class Inline:
    """On the event loop: microseconds, or coroutines."""

    printed = ""

    def __init__(self, scene: Scene) -> None:
        self.scene = scene
        self.runner: Runner | None = None

    async def reset(self, seed: int, row: Mapping[str, Any], seconds: float) -> Observation:
        async with asyncio.timeout(seconds):
            self.runner = Runner(self.scene.use, self.scene.args)
            return await self.runner.reset(seed, row)

    async def step(self, text: str, seconds: float) -> Step:
        assert self.runner is not None
        async with asyncio.timeout(seconds):
            return await self.runner.step(text)

    def close(self) -> None:
        if self.runner is not None:
            self.runner.close()


class Threaded(Inline):
    """In threads: calls that wait for others."""

    def __init__(self, scene: Scene, gate: asyncio.Semaphore) -> None:
        super().__init__(scene)
        self.gate = gate

    @override
    async def reset(self, seed: int, row: Mapping[str, Any], seconds: float) -> Observation:
        def begin() -> Observation:
            self.runner = Runner(self.scene.use, self.scene.args)
            return asyncio.run(self.runner.reset(seed, row))

        async with self.gate:
            return await in_thread(begin, seconds)

    @override
    async def step(self, text: str, seconds: float) -> Step:
        runner = self.runner
        assert runner is not None
        async with self.gate:
            return await in_thread(lambda: asyncio.run(runner.step(text)), seconds)


class Looped(Inline):
    """On an event loop that environments share: coroutines of the user."""

    def __init__(self, scene: Scene, loop: Loop) -> None:
        super().__init__(scene)
        self.loop = loop

    @override
    async def reset(self, seed: int, row: Mapping[str, Any], seconds: float) -> Observation:
        return await self.loop.run_within(seconds, lambda: Inline.reset(self, seed, row, seconds))

    @override
    async def step(self, text: str, seconds: float) -> Step:
        return await self.loop.run_within(seconds, lambda: Inline.step(self, text, seconds))


async def in_thread(function: Callable[[], T], seconds: float | None) -> T:
    """The function's result; past the deadline its thread is left behind, and ends with the process at the latest."""
    loop = asyncio.get_running_loop()
    future: asyncio.Future[T] = loop.create_future()

    def deliver(result: T | None, error: BaseException | None) -> None:
        if future.done():
            return
        if error is not None:
            future.set_exception(error)
        else:
            future.set_result(result)  # pyrefly: ignore[bad-argument-type]

    def run() -> None:
        try:
            found, error = function(), None
        except BaseException as caught:
            found, error = None, caught
            if isinstance(caught, StopIteration):  # which a future does not take
                error = RuntimeError(f"StopIteration: {caught}").with_traceback(caught.__traceback__)
        with suppress(RuntimeError):  # the loop is closed: nobody waits any more
            loop.call_soon_threadsafe(deliver, found, error)

    threading.Thread(target=run, daemon=True, name="environment").start()
    async with asyncio.timeout(seconds):
        return await future


class EnvironmentProcess:
    """One process. It plays many episodes, a call at a time; one call that hangs or crashes costs its own episode only."""

    def __init__(self, pool: Pool, memory_gb: float) -> None:
        self.pool = pool
        self.memory_gb = memory_gb
        self.episodes = 0
        self.over: list[str] = []
        self.lives = 0  # how often the process was lost
        self.calls: set[asyncio.Future[Any]] = set()
        self._lock = asyncio.Lock()

    async def call(self, played: Played, seconds: float, again: float) -> Any:
        """The next answer of an episode; if the process was replaced since its last one, all before is played `again` first."""
        async with self._lock:
            if played.closed:
                return None
            if played.life not in (None, self.lives) and played.turns:
                await self._play(played, played.turns[:-1], again)
            played.life = self.lives
            return await self._play(played, played.turns, seconds)

    async def _play(self, played: Played, turns: list[str], seconds: float) -> Any:
        over, self.over = self.over, []
        scene = played.scene
        arguments = {"episode": played.name, "use": scene.use, "args": dict(scene.args), "seed": played.seed}
        arguments |= {"row": dict(played.row), "turns": turns, "over": over, "memory_gb": self.memory_gb}
        try:
            answer, played.printed = await self.pool.call(PLAY, arguments, seconds)
            return answer
        except BaseException as error:
            if not isinstance(error, RemoteError):
                self.lives += 1
            elif error.kind in GROWN:  # whatever else the environment raises leaves the process as it is
                self.lives += 1
                with suppress(WorkerDied):
                    await self.pool.call(LEAVE, {}, seconds)
            raise

    async def close(self) -> None:
        """Give up what is under way and end the process."""
        calls = list(self.calls)
        for call in calls:
            call.cancel()
        await asyncio.gather(*calls, return_exceptions=True)
        await self.pool.close()


class Played:
    """In a process of its own."""

    def __init__(self, scene: Scene, name: str, process: EnvironmentProcess, reset_seconds: float) -> None:
        self.scene = scene
        self.name = name
        self.process = process
        self.reset_seconds = reset_seconds
        self.seed = 0
        self.row: Mapping[str, Any] = {}
        self.turns: list[str] = []
        self.life: int | None = None
        self.printed = ""
        self.closed = False
        process.episodes += 1

    async def reset(self, seed: int, row: Mapping[str, Any], seconds: float) -> Observation:
        self.seed, self.row = seed, row
        return check_observation(self.scene.use, await self._call(seconds))

    async def step(self, text: str, seconds: float) -> Step:
        self.turns.append(text)
        return check_step(self.scene.use, await self._call(seconds))

    async def _call(self, seconds: float) -> Any:
        """A call that its sample gives up on runs to its end: killing the process would cost its neighbours time."""
        call = asyncio.ensure_future(self.process.call(self, seconds, self.reset_seconds + len(self.turns) * seconds))
        self.process.calls.add(call)
        call.add_done_callback(self._done)
        return await asyncio.shield(call)

    def _done(self, call: asyncio.Future[Any]) -> None:
        self.process.calls.discard(call)
        if not call.cancelled():
            call.exception()  # whoever gave the sample up does not ask for it

    def close(self) -> None:
        self.closed = True
        self.process.episodes -= 1
        self.process.over.append(self.name)


class Executors:
    """Gives every episode its place."""

    def __init__(self, config: EnvironmentConfig, open_pool: Callable[[int], Pool]) -> None:
        self.config = config
        self._open_pool = open_pool
        self._processes: list[EnvironmentProcess] = []
        self._gate = asyncio.Semaphore(THREADS)
        self._loop = Loop("environments")
        self._count = 0
        self._where: dict[str, str] = {}

    def open(self, scene: Scene) -> Executor:
        """A place for one episode; in processes, where the fewest are."""
        kind = self._where.get(scene.use) or where(scene.use)
        self._where[scene.use] = kind
        if kind == "inline":
            return Inline(scene)
        if kind == "thread":
            return Threaded(scene, self._gate)
        if kind == "loop":
            return Looped(scene, self._loop)
        if not self._processes:
            self._processes = [
                EnvironmentProcess(self._open_pool(1), self.config.memory_gb) for _ in range(self.config.workers)
            ]
        self._count += 1
        process = min(self._processes, key=lambda process: process.episodes)
        return Played(scene, f"{self._count}", process, self.config.reset_timeout)

    async def close(self) -> None:
        """End all processes."""
        await self._loop.close()
        for process in self._processes:
            await process.close()
