"""Rewards: the user's functions, bound to columns by name, routed by domain.

The user's form is `def correct(completion, answer) -> float | None`, sync or async. `completion` is the text the
model wrote, `prompt` the row's prompt, `sample` the whole sample; any other argument is a column of the row. `None`
means "not applicable". An exception, a NaN or a non-number is that sample's failure, shown with its text.
"""

from __future__ import annotations

import asyncio
import inspect
import math
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from drumroll.cluster.pool import KillablePool, RemoteError
from drumroll.config.reward import ALL_DOMAINS, RewardConfig
from drumroll.errors import ConfigError
from drumroll.registry import Registry
from drumroll.sample import Failure, Sample

RewardFunction = Callable[..., Any]
Ask = Callable[[str], Awaitable[str]]
"""A question to the judge, and its answer."""


class Pool(Protocol):
    """Runs `module:function` calls, each with a deadline of its own."""

    async def call(self, path: str, arguments: dict[str, Any], seconds: float) -> Any: ...
    async def close(self) -> None: ...


REWARDS: Registry[RewardFunction] = Registry("reward")
GIVEN = ("completion", "prompt", "sample", "judge")


class BadReward(ValueError):
    """A reward function returned something that is not a finite number or None."""


@dataclass(frozen=True)
class Reward:
    """A function bound to its arguments."""

    name: str
    weight: float
    function: RewardFunction
    arguments: tuple[str, ...]
    optional: frozenset[str]
    fixed: Mapping[str, Any]
    path: str | None

    @classmethod
    def bind(cls, config: RewardConfig) -> Reward:
        """Look the function up and read its signature."""
        function = REWARDS.get(config.use)
        name = config.use.rpartition(":")[2]
        parameters = inspect.signature(function).parameters.values()
        named = [p for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY) and p.name not in config.args]
        takes_any = any(p.kind is p.VAR_KEYWORD for p in parameters)
        unknown = set(config.args) - set(inspect.signature(function).parameters)
        if unknown and not takes_any:
            raise ConfigError(
                f"reward '{config.use}' takes no argument '{sorted(unknown)[0]}'; it takes {', '.join(p.name for p in named)}."
            )
        return cls(
            name=name,
            weight=config.weight,
            function=function,
            arguments=tuple(p.name for p in named),
            optional=frozenset(p.name for p in named if p.default is not p.empty),
            fixed=dict(config.args),
            path=None if config.use in REWARDS.parts else config.use,
        )

    @property
    def columns(self) -> list[str]:
        """Columns a row must have."""
        return [a for a in self.arguments if a not in GIVEN and a not in self.optional]

    def inputs(self, sample: Sample, judge: Ask | None = None) -> dict[str, Any]:
        """The function's keyword arguments for one sample."""
        given = {"completion": sample.completion, "prompt": sample.prompt.content, "sample": sample, "judge": judge}
        row = sample.prompt.columns
        found = {a: given[a] if a in given else row[a] for a in self.arguments if a in given or a in row}
        return {**found, **self.fixed}

    async def __call__(self, sample: Sample, pool: Pool, seconds: float, judge: Ask | None = None) -> float | None:
        """Built-ins and coroutines run here; other functions of the user in a process that can be killed."""
        inputs = self.inputs(sample, judge)
        if inspect.iscoroutinefunction(self.function):
            async with asyncio.timeout(seconds):
                value = await self.function(**inputs)
        elif self.path is None:
            value = self.function(**inputs)
        else:
            value = await pool.call(self.path, inputs, seconds)
        return check_value(self.name, value)


def check_value(name: str, value: Any) -> float | None:
    """A finite number or None; anything else is the function's fault and says so."""
    if value is None:
        return None
    if not isinstance(value, int | float) and hasattr(value, "item"):
        value = value.item()
    if not isinstance(value, int | float):
        raise BadReward(f"reward '{name}' returned {value!r}, a {type(value).__name__}; it must return a number or None")
    if not math.isfinite(value):
        raise BadReward(f"reward '{name}' returned {value}; it must return a finite number or None")
    return float(value)


class Scorer:
    """Scores samples with the rewards of their domain."""

    def __init__(
        self,
        by_domain: Mapping[str, Sequence[RewardConfig]],
        timeout: float = 30.0,
        pool: Pool | None = None,
        judge: Ask | None = None,
    ) -> None:
        import drumroll.rewards.judge
        import drumroll.rewards.text  # noqa: F401  the built-ins register themselves

        self.timeout = timeout
        self.pool = pool or KillablePool(2)
        self.judge = judge
        self._rewards = {domain: [Reward.bind(c) for c in configs] for domain, configs in by_domain.items()}
        asking = [r.name for rewards in self._rewards.values() for r in rewards if "judge" in r.arguments]
        if asking and judge is None:
            raise ConfigError(f"reward '{asking[0]}' asks a judge, but there is none: name one under roles.judge (model: ...).")

    def rewards(self, domain: str, *, played: bool = False) -> list[Reward]:
        """The rewards of a domain, or those for all. One that is `played` in an environment needs no others."""
        found = self._rewards.get(domain) or self._rewards.get(ALL_DOMAINS)
        if not found:
            if played:
                return []
            raise ConfigError(f"no reward for domain '{domain}'; `reward` names {', '.join(self._rewards) or 'none'}.")
        return found

    def required_columns(self, domain: str, *, played: bool = False) -> list[tuple[str, str]]:
        """(column, reward that asks for it) of a domain's rows."""
        return [(column, f"reward '{r.name}'") for r in self.rewards(domain, played=played) for column in r.columns]

    async def score(self, sample: Sample) -> None:
        """Fill in the sample's reward, or its failure. What an environment gave counts in full."""
        played = sample.prompt.scene is not None
        total, applicable = sample.rewards.get("environment", 0.0) if played else 0.0, played
        for reward in self.rewards(sample.prompt.domain, played=played):
            try:
                value = await reward(sample, self.pool, self.timeout, self.judge)
            except Exception as error:
                sample.failure = self._failure(reward, error)
                return
            if value is not None:
                sample.rewards[reward.name] = value
                total += reward.weight * value
                applicable = applicable or reward.weight != 0
        if applicable:
            sample.reward = total
        else:
            sample.failure = Failure("NotApplicable", "rewards", "every reward returned None")

    def _failure(self, reward: Reward, error: Exception) -> Failure:
        kind = error.kind if isinstance(error, RemoteError) else type(error).__name__
        text = f"took longer than {self.timeout:g} s" if isinstance(error, TimeoutError) else str(error)
        return Failure(kind, f"reward '{reward.name}'", text)

    async def close(self) -> None:
        """End the worker processes."""
        await self.pool.close()
