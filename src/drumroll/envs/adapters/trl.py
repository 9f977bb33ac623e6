"""`trl:my_envs:Shop`: an environment class of the kind that TRL's `environment_factory` takes.

It has `reset(**row)`, which may return a text to append to the task, and public methods, which are the tools. Its
reward is `get_reward()` or the attribute `reward`. A turn earns the increase of the reward, so the sum is right
wherever the episode ends. An attribute `done` that becomes true ends the episode.
"""

from __future__ import annotations

import functools
import inspect
from typing import Any

from typing_extensions import override

from drumroll.envs import Step
from drumroll.envs.adapters.chance import Chance
from drumroll.envs.adapters.schema import Tool
from drumroll.envs.adapters.tools import ToolEpisode
from drumroll.envs.runner import awaited
from drumroll.errors import ConfigError
from drumroll.registry import import_path
from drumroll.sample import Message

RESERVED = ("reset", "get_reward", "close")


@functools.cache
def _tools(kind: type) -> dict[str, Tool]:
    """Return the public methods of a class as tools."""
    methods = inspect.getmembers(kind, inspect.isfunction)
    return {n: Tool(f, method=True) for n, f in methods if n not in RESERVED and not n.startswith("_")}


class ToolClass(ToolEpisode):
    """A TRL environment class. `args` are the arguments of the class; other settings are those of all tool environments."""

    def __init__(self, name: str, args: dict[str, Any] | None = None, **settings: Any) -> None:
        super().__init__(**settings)
        self.name, self.args = name, args or {}
        self.made: Any = None
        self.earned = 0.0
        self.tools: dict[str, Tool] = {}

    async def reset(self, seed: int, **row: Any) -> list[Message]:
        """Make a new instance and pass it the row and, if it takes it, the seed."""
        self.chance, self.earned = Chance(seed), 0.0
        with self.chance.own():
            self.made = import_path(self.name, "environment")(**self.args)
            if not callable(getattr(self.made, "reset", None)):
                raise ConfigError(f"environment trl:{self.name} has no reset(); it needs one, and public methods as tools.")
            self.tools = _tools(type(self.made))
            self.schemas = [tool.schema for tool in self.tools.values()]
            parameters = inspect.signature(self.made.reset).parameters
            takes_any = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
            given = {k: v for k, v in (row | {"seed": seed}).items() if takes_any or k in parameters}
            said = await awaited(self.made.reset(**given))
        return self.begin(seed, row, str(said or ""))

    @override
    async def call(self, name: str, arguments: dict[str, Any]) -> Any:
        given = self.tools[name].bind(arguments)
        with self.chance.own():
            return await awaited(getattr(self.made, name)(**given))

    @override
    async def step(self, text: str) -> Step:
        """Play a turn; its reward is the increase of the total reward."""
        step = await super().step(text)
        total = await self._total()
        if total is not None:
            earned, self.earned = total - self.earned, total
            step = step._replace(reward=earned)
        over = step.terminated or getattr(self.made, "done", None) is True
        info = dict(step.info)
        if over and total is not None:
            info["success"] = total >= 1
        return step._replace(terminated=over, info=info)

    async def _total(self) -> float | None:
        """Return the reward so far, or None if the class has none."""
        with self.chance.own():
            if callable(own := getattr(self.made, "get_reward", None)):
                return float(await awaited(own()))
        reward = getattr(self.made, "reward", None)
        return float(reward) if isinstance(reward, (int, float)) else None

    @override
    def close(self) -> None:
        if callable(close := getattr(self.made, "close", None)):
            close()
