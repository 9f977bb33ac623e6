"""Runs an environment's code on an event loop, in a thread, or in a process that can be killed.

Every call has a deadline, which starts when the call gets its thread, loop or process. An executor must never block
generation.
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
"""The most calls that run in threads at once. A thread that hangs releases its slot and is abandoned."""
PLAY, LEAVE = "drumroll.envs.runner:play", "drumroll.envs.runner:leave"
GROWN = ("MemoryError", "TooMuchMemory")
"""Errors after which the process is replaced."""
T = TypeVar("T")


class Executor(Protocol):
    """Runs one episode. `printed` is the standard output of its last call, if the executor captures it."""

    printed: str

    async def reset(self, seed: int, row: Mapping[str, Any], seconds: float) -> Observation: ...
    async def step(self, text: str, seconds: float) -> Step: ...
    def close(self) -> None: ...


class Inline:
    """Runs an environment on the caller's event loop, for calls that take microseconds or are coroutines."""

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
    """Runs an environment in threads, for calls that wait for I/O."""

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
    """Runs the user's coroutines on an event loop that all such environments share."""

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
    """Run the function in a new thread and return its result.

    Past the deadline the thread is abandoned; it ends with the process at the latest.
    """
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
            if isinstance(caught, StopIteration):  # a future refuses StopIteration
                error = RuntimeError(f"StopIteration: {caught}").with_traceback(caught.__traceback__)
        with suppress(RuntimeError):  # the loop is closed: no caller waits any more
            loop.call_soon_threadsafe(deliver, found, error)

    threading.Thread(target=run, daemon=True, name="environment").start()
    async with asyncio.timeout(seconds):
        return await future


class EnvironmentProcess:
    """One process that plays many episodes, one call at a time. A call that hangs or crashes costs only its own episode."""

    def __init__(self, pool: Pool, memory_gb: float) -> None:
        self.pool = pool
        self.memory_gb = memory_gb
        self.episodes = 0
        self.over: list[str] = []
        self.lives = 0  # counts how often the process was lost
        self.calls: set[asyncio.Future[Any]] = set()
        self._lock = asyncio.Lock()

    async def call(self, played: Played, seconds: float, again: float) -> Any:
        """Return the next answer of an episode.

        If the process was replaced since the last answer, first replay all earlier turns within `again` seconds.
        """
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
            elif error.kind in GROWN:  # after any other error of the environment the process is still good
                self.lives += 1
                with suppress(WorkerDied):
                    await self.pool.call(LEAVE, {}, seconds)
            raise

    async def close(self) -> None:
        """Cancel the calls in progress and end the process."""
        calls = list(self.calls)
        for call in calls:
            call.cancel()
        await asyncio.gather(*calls, return_exceptions=True)
        await self.pool.close()


class Played:
    """Runs one episode in a process that it shares with other episodes."""

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
        """Call the process and wait for the answer.

        If the sample is aborted, the call still runs to its end: killing the process would cost the other episodes
        time.
        """
        call = asyncio.ensure_future(self.process.call(self, seconds, self.reset_seconds + len(self.turns) * seconds))
        self.process.calls.add(call)
        call.add_done_callback(self._done)
        return await asyncio.shield(call)

    def _done(self, call: asyncio.Future[Any]) -> None:
        self.process.calls.discard(call)
        if not call.cancelled():
            call.exception()  # retrieve the error, so that asyncio does not warn about an aborted sample

    def close(self) -> None:
        self.closed = True
        self.process.episodes -= 1
        self.process.over.append(self.name)


class Executors:
    """Gives every episode an executor."""

    def __init__(self, config: EnvironmentConfig, open_pool: Callable[[int], Pool]) -> None:
        self.config = config
        self._open_pool = open_pool
        self._processes: list[EnvironmentProcess] = []
        self._gate = asyncio.Semaphore(THREADS)
        self._loop = Loop("environments")
        self._count = 0
        self._where: dict[str, str] = {}

    def open(self, scene: Scene) -> Executor:
        """Return an executor for one episode; in processes, the one with the fewest episodes."""
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
        """End the event loop and all processes."""
        await self._loop.close()
        for process in self._processes:
            await process.close()
