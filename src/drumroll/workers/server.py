"""What lives in a worker's own process, and what its failures look like to the caller. No runtime is imported here.

A worker's exception travels as a value and is raised again at the caller as itself, with the worker's traceback as its
cause, so the user sees their own error and no wrapper of the runtime.
"""

from __future__ import annotations

import asyncio
import inspect
import os
import pickle
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, NoReturn

from typing_extensions import override

from drumroll.errors import DrumrollError
from drumroll.processes.threads import SerialExecutor


class WorkerLost(DrumrollError):
    """A worker's process is gone, and with it the call. `then` says what happens next."""

    def __init__(self, role: str, rank: int, why: str, then: str) -> None:
        super().__init__(role, rank, why, then)
        self.role, self.rank, self.why, self.then = role, rank, why, then

    @override
    def __str__(self) -> str:
        return f"{self.role} rank {self.rank} is gone: {self.why}; {self.then}."


class WorkerTimeout(DrumrollError, TimeoutError):
    """A call that was not answered in time."""


class WorkerError(RuntimeError):
    """A worker's exception that cannot travel as itself; `remote` is its traceback."""

    def __init__(self, message: str, remote: str = "") -> None:
        super().__init__(message)
        self.remote = remote


class RemoteTraceback(Exception):
    """The cause of an exception that came from a worker: where it was raised there."""


@dataclass(frozen=True, slots=True)
class Failure:
    """An exception on its way to the caller."""

    summary: str
    remote: str
    pickled: bytes | None

    @classmethod
    def of(cls, error: BaseException) -> Failure:
        """Called by the frame that called the worker; that frame is left out."""
        pickled = None
        if isinstance(error, Exception):  # a worker's SystemExit must not end the controller
            with suppress(Exception):
                data = pickle.dumps(error)
                pickled = data if type(pickle.loads(data)) is type(error) else None
        trace = error.__traceback__.tb_next if error.__traceback__ else None
        remote = "".join(traceback.format_exception(type(error), error, trace))
        return cls(f"{type(error).__name__}: {error}", remote, pickled)

    def throw(self, who: str) -> NoReturn:
        """Raise it at the caller."""
        error: Exception = WorkerError(f"{who}: {self.summary}", self.remote)
        if self.pickled is not None:
            with suppress(Exception):
                error = pickle.loads(self.pickled)
        raise error from RemoteTraceback(f"in {who}\n{self.remote}")


@dataclass(frozen=True, slots=True)
class About:
    """What a worker that was made tells of itself: where its errors are logged, and which methods need not take turns."""

    log: str
    free: frozenset[str]


class WorkerServer:
    """Owns one worker. Coroutines run on the loop, urgent methods there at once, all others on one thread in order."""

    def __init__(self, urgent: frozenset[str]) -> None:
        self.urgent = urgent
        self.executor = SerialExecutor("worker")
        self.worker: Any = None

    async def open(self, factory: Callable[[], Any]) -> About | Failure:
        """Make the worker, on the thread that will run it."""
        made = await self._run(factory, False, (), {})
        if isinstance(made, Failure):
            return made
        self.worker, kind, log = made, type(made), ""
        with suppress(OSError):  # not on Linux
            log = os.readlink("/proc/self/fd/2")
        coroutines = (n for n in dir(kind) if inspect.iscoroutinefunction(getattr(kind, n, None)))
        return About(log, self.urgent.union(coroutines, {"ping"}))

    async def call(self, method: str, /, *args: Any, **kwargs: Any) -> Any:
        """Run a method; a failure is a value."""
        try:
            function = getattr(self.worker, method)
        except AttributeError as error:
            return Failure.of(error)
        return await self._run(function, method in self.urgent, args, kwargs)

    async def keep(self, method: str, /, *args: Any, **kwargs: Any) -> tuple[Failure | None, Any]:
        """Run a method; failure and result apart, so that the result can stay where it is."""
        result = await self.call(method, *args, **kwargs)
        return (result, None) if isinstance(result, Failure) else (None, result)

    async def ping(self) -> None:
        """Answer at once, whatever the worker does."""

    async def alive(self) -> None:
        """Never returns: whoever waits for it learns of this process's death."""
        await asyncio.Event().wait()

    async def _run(self, function: Callable[..., Any], urgent: bool, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        if urgent:
            return _attempt(function, args, kwargs)
        if not inspect.iscoroutinefunction(function):
            return await asyncio.wrap_future(self.executor.submit(partial(_attempt, function, args, kwargs)))
        try:
            return await function(*args, **kwargs)
        except asyncio.CancelledError:
            raise
        except BaseException as error:
            return Failure.of(error)


def _attempt(function: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    try:
        return function(*args, **kwargs)
    except BaseException as error:
        return Failure.of(error)
