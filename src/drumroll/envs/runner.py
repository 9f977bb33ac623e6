"""Calls an environment: finds it by name, passes the columns that it asks for, and checks and normalises its answers.

`play` does the same inside an environment process. There many episodes live side by side, one call at a time. If the
process does not know an episode, because it replaced an earlier process, it replays the episode from its seed and
turns. The replay is exact, because all randomness comes from the seed. `play` captures the episode's standard output,
and reports a process that grows too large, which is then replaced.
"""

from __future__ import annotations

import asyncio
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
from drumroll.rewards.signatures import BadReward, check_value

INFO = ("success", "effective", "malformed", "state", "tool_error")
"""The keys that are read from a step's `info`."""
T = TypeVar("T")


class BadAnswer(ValueError):
    """An environment returned something that is neither an observation nor a step."""


class TooMuchMemory(RuntimeError):
    """The process of an environment has grown beyond its memory limit."""


def find(use: str) -> Callable[..., Environment]:
    """Find an environment by name, through an adapter (`gymnasium:FrozenLake-v1`), or as `module:Class`."""
    exists(use)
    return adapted(use) or ENVIRONMENTS.get(use)


def agent_path(use: str) -> str | None:
    """Return the `module:function` of an agent if `use` is of the form `agent:module:function`, else None."""
    kind, _, path = use.partition(":")
    return path if kind == "agent" and ":" in path else None


def exists(name: str) -> bool:
    """Return whether an environment of this name is registered. The first lookup imports the built-ins."""
    if ":" not in name and name not in ENVIRONMENTS.parts:
        from drumroll.envs import builtin  # noqa: F401  registers the built-ins
    return name in ENVIRONMENTS.parts


def where(use: str) -> str:
    """Return where the environment runs: its declared `runs`, else `loop` for coroutines and `process` for the rest."""
    make, adapter = find(use), adapter_of(use)
    own = adapter.runs if adapter else ENVIRONMENTS.traits(use).get("runs")
    return own or ("loop" if inspect.iscoroutinefunction(getattr(make, "step", None)) else "process")


class Runner:
    """Plays one episode of an environment and checks each answer."""

    def __init__(self, use: str, args: Mapping[str, Any]) -> None:
        self.use = use
        self.environment = find(use)(**args)

    async def reset(self, seed: int, row: Mapping[str, Any]) -> Observation:
        """Start the episode, with those columns of the row that `reset` accepts."""
        parameters = inspect.signature(self.environment.reset).parameters
        takes_any = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
        given = {k: v for k, v in row.items() if k not in ("seed", "environment") and (takes_any or k in parameters)}
        return check_observation(self.use, await awaited(self.environment.reset(seed, **given)))

    async def step(self, text: str) -> Step:
        """Play one turn."""
        return check_step(self.use, await awaited(self.environment.step(text)))

    def close(self) -> None:
        """End the episode."""
        self.environment.close()


async def awaited(value: T | Awaitable[T]) -> T:
    """Await the value if it is awaitable."""
    return await value if inspect.isawaitable(value) else value


def check_observation(use: str, value: Any) -> Observation:
    """Return the value if it is a text or a list of messages with role and content; raise `BadAnswer` otherwise."""
    if isinstance(value, str):
        return value
    if isinstance(value, list) and value and all(isinstance(m, dict) and {"role", "content"} <= m.keys() for m in value):
        return value
    raise BadAnswer(f"environment '{use}' showed {value!r:.80}; an observation is a text, or a list of messages")


def check_step(use: str, value: Any) -> Step:
    """Return the value as a `Step` with checked fields; a plain tuple of the fields is accepted too."""
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


# --- inside an environment process ---

_runners: dict[str, tuple[Runner, int]] = {}
_loop: list[asyncio.AbstractEventLoop] = []
PRINTED = 200
"""Characters kept of the output that a call prints."""


class _Prints(io.TextIOBase):
    """Keeps the first characters that are printed."""

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
    """Play the turns of an episode; return the answer to the last one and the printed output.

    Without turns the answer is the first observation. Closes the episodes named in `over`.
    """
    for gone in over:
        with suppress(Exception):
            _runners.pop(gone)[0].close()
    if not _loop:
        _loop.append(asyncio.new_event_loop())
        _, most = resource.getrlimit(resource.RLIMIT_DATA)
        with suppress(OSError, ValueError):  # a second limit, for memory that grows within one call
            resource.setrlimit(resource.RLIMIT_DATA, (int(2 * memory_gb * 2**30), most))
    prints = _Prints()
    with redirect_stdout(prints):
        answer = _loop[0].run_until_complete(_play(episode, use, args, seed, row, turns))
    if (size := resident_gb()) > memory_gb:
        raise TooMuchMemory(f"its process has grown to {size:.2f} GB; environment.memory_gb allows {memory_gb:g}")
    return answer, prints.text


def resident_gb() -> float:
    """Return the resident memory of this process in GB; if unknown, its peak."""
    with suppress(OSError), open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * resource.getpagesize() / 2**30
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20


def leave() -> None:
    """End the process."""
    os._exit(0)


async def _play(
    episode: str, use: str, args: dict[str, Any], seed: int, row: dict[str, Any], turns: Sequence[str]
) -> Observation | Step:
    known = _runners.pop(episode, None)  # an episode that raises is not kept
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
