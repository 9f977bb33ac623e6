"""Calling an environment: found by name, given what it asks for, its answers checked and made plain.

`play` is the same in a process of its own. There many episodes live side by side, a call at a time. One that is not
known (its process was replaced) is played again from its seed and its turns, which is exact: all randomness is the seed's.
What it prints is caught, and a process that grows too large says so and is replaced.
"""

from __future__ import annotations

import asyncio
import importlib
import importlib.util
import inspect
import io
import os
import resource
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import redirect_stdout, suppress
from typing import Any, TypeVar

from typing_extensions import override

from drumroll.envs import ENVIRONMENTS, Environment, Observation, Step
from drumroll.envs.adapters import adapted, adapter_of
from drumroll.rewards import BadReward, check_value

INFO = ("success", "effective", "malformed", "state", "tool_error")
"""What is read of a step's `info`."""
BUILT_IN = "drumroll.envs.builtin"
T = TypeVar("T")


class BadAnswer(ValueError):
    """An environment returned something that is neither an observation nor a step."""


class TooMuchMemory(RuntimeError):
    """The process of an environment has grown beyond its limit."""


def find(use: str) -> Callable[..., Environment]:
    """The environment by name, by an adapter (`gymnasium:FrozenLake-v1`) or as `module:Class`."""
    exists(use)
    return adapted(use) or ENVIRONMENTS.get(use)


def agent_path(use: str) -> str | None:
    """The `module:function` of an agent, if `use` names one: `agent:module:function`."""
    kind, _, path = use.partition(":")
    return path if kind == "agent" and ":" in path else None


def exists(name: str) -> bool:
    """Whether an environment is registered under a name; the built-ins are when one is first asked for."""
    if ":" not in name and name not in ENVIRONMENTS.parts and importlib.util.find_spec(BUILT_IN) is not None:
        importlib.import_module(BUILT_IN)
    return name in ENVIRONMENTS.parts


def where(use: str) -> str:
    """Where it runs: as it says itself; else coroutines on an event loop of their own, all others in a process."""
    make, adapter = find(use), adapter_of(use)
    own = adapter.runs if adapter else ENVIRONMENTS.traits(use).get("runs")
    return own or ("loop" if inspect.iscoroutinefunction(getattr(make, "step", None)) else "process")


class Runner:
    """One episode of an environment, each answer checked."""

    def __init__(self, use: str, args: Mapping[str, Any]) -> None:
        self.use = use
        self.environment = find(use)(**args)

    async def reset(self, seed: int, row: Mapping[str, Any]) -> Observation:
        """Begin, with those columns that `reset` asks for."""
        parameters = inspect.signature(self.environment.reset).parameters
        takes_any = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
        given = {k: v for k, v in row.items() if k not in ("seed", "environment") and (takes_any or k in parameters)}
        return check_observation(self.use, await awaited(self.environment.reset(seed, **given)))

    async def step(self, text: str) -> Step:
        """A turn."""
        return check_step(self.use, await awaited(self.environment.step(text)))

    def close(self) -> None:
        """End the episode."""
        self.environment.close()


async def awaited(value: T | Awaitable[T]) -> T:
    """The value, or what it becomes."""
    return await value if inspect.isawaitable(value) else value


def check_observation(use: str, value: Any) -> Observation:
    """A text, or messages with role and content."""
    if isinstance(value, str):
        return value
    if isinstance(value, list) and value and all(isinstance(m, dict) and {"role", "content"} <= m.keys() for m in value):
        return value
    raise BadAnswer(f"environment '{use}' showed {value!r:.80}; an observation is a text, or a list of messages")


def check_step(use: str, value: Any) -> Step:
    """A `Step`, or a plain tuple of its parts."""
    if not isinstance(value, tuple) or not 1 <= len(value) <= len(Step._fields):
        raise BadAnswer(f"environment '{use}' answered {value!r:.80}; a step is a drumroll.envs.Step")
    step = Step(*value)
    try:
        reward = check_value(use, step.reward)
    except BadReward:
        reward = None
    if reward is None:
        raise BadAnswer(f"environment '{use}' gave the reward {step.reward!r:.40}; it must be a finite number")
    if not isinstance(step.info, Mapping):
        raise BadAnswer(f"environment '{use}' gave {step.info!r:.40} for info; it must be a mapping")
    info = {key: step.info[key] for key in INFO if step.info.get(key) is not None}
    for key in info.keys() & {"success", "effective", "malformed"}:
        info[key] = bool(info[key])
    for key in info.keys() & {"state", "tool_error"}:
        info[key] = str(info[key])
    return Step(check_observation(use, step.observation), reward, bool(step.terminated), bool(step.truncated), info)


# --- in a process of its own ---

_runners: dict[str, tuple[Runner, int]] = {}
_loop: list[asyncio.AbstractEventLoop] = []
PRINTED = 200
"""Characters kept of what a call prints."""


class _Prints(io.TextIOBase):
    """Keeps the beginning of what is printed."""

    def __init__(self) -> None:
        self.text = ""

    @override
    def write(self, text: str, /) -> int:
        self.text += text[: PRINTED - len(self.text)]
        return len(text)


def play(
    episode: str,
    use: str,
    args: dict[str, Any],
    seed: int,
    row: dict[str, Any],
    turns: Sequence[str],
    over: Sequence[str],
    memory_gb: float,
) -> tuple[Observation | Step, str]:
    """What the last of the turns brings, or the first observation when there is none; and what was printed meanwhile.

    Episodes that are over are ended.
    """
    for gone in over:
        with suppress(Exception):
            _runners.pop(gone)[0].close()
    if not _loop:
        _loop.append(asyncio.new_event_loop())
        _, most = resource.getrlimit(resource.RLIMIT_DATA)
        with suppress(OSError, ValueError):  # a second guard, for what grows within one call
            resource.setrlimit(resource.RLIMIT_DATA, (int(2 * memory_gb * 2**30), most))
    prints = _Prints()
    with redirect_stdout(prints):
        answer = _loop[0].run_until_complete(_play(episode, use, args, seed, row, turns))
    if (size := resident_gb()) > memory_gb:
        raise TooMuchMemory(f"its process has grown to {size:.2f} GB; environment.memory_gb allows {memory_gb:g}")
    return answer, prints.text


def resident_gb() -> float:
    """Memory that this process holds; where that is not known, the most that it ever held."""
    with suppress(OSError), open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * resource.getpagesize() / 2**30
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20


def leave() -> None:
    """End the process."""
    os._exit(0)


async def _play(
    episode: str, use: str, args: dict[str, Any], seed: int, row: dict[str, Any], turns: Sequence[str]
) -> Observation | Step:
    known = _runners.pop(episode, None)  # what raises is not kept
    played = known is not None and known[1] == len(turns) - 1
    runner = known[0] if known is not None and played else Runner(use, args)
    try:
        answer: Observation | Step = "" if played else await runner.reset(seed, row)
        for text in turns[-1:] if played else turns:
            answer = await runner.step(text)
    except BaseException:
        with suppress(Exception):
            runner.close()
        raise
    _runners[episode] = (runner, len(turns))
    return answer
